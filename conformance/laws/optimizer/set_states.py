"""Laws of set_model_state_dict and set_state_dict: incomplete states, models on the meta device, and refusals.

A case is a model as :mod:`shardlaw.conformance.laws.optimizer.nets` describes it. ``how`` are the options of the state:
``plain`` (sharded like the model), ``whole`` or ``broadcast``, and ``offload`` with any of these, joined by commas.
``lacks`` names a tensor that is missing from the state, or ``extra``; with ``adds`` the state has an unexpected name;
with ``by=module`` it has the entries of ``inner`` under that module as key. ``blank`` says whether all parameters or
the first one are on the meta device; with ``again`` the state, as a model gives it, is set on a second model, which has
memory. ``what`` names a request that must be refused.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from shardlaw.conformance.law.act import law
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Either, Of, Refused, caught
from shardlaw.conformance.law.fields import Rank, Word
from shardlaw.conformance.laws.checkpoint.calls import poison
from shardlaw.conformance.laws.checkpoint.models import OTHER_RATES, RATES, adam, changed, frozen
from shardlaw.conformance.laws.optimizer.both_states import DOCS, SMALL, How, Traits, Wrap, due_tensors, sweep_record
from shardlaw.conformance.laws.optimizer.both_states import features as features_of_both
from shardlaw.conformance.laws.optimizer.checkpointed import drop_parameter
from shardlaw.conformance.laws.optimizer.fields import Poisoned, StateTensors, optimized_values
from shardlaw.conformance.laws.optimizer.nets import EXTRA, OTHER_EXTRA, Net, by_state_name, state_options, wrap_model

MODEL = f"mesh=2 x=5x2:S(0):{SMALL} a=4:R:{SMALL}"


def state_to_set(
    tensors: Mapping[str, Any],
    how: Sequence[str],
    traits: Sequence[str],
    rank: int,
    lacks: str = "",
    adds: bool = False,
) -> dict[str, Any]:
    """The state that this rank passes."""
    if "broadcast" in how and rank > 0:
        return {}
    state = by_state_name(tensors, traits, {"_extra_state": EXTRA} if "extra" in traits else None)
    for path in state_names_of(tensors, traits, lacks):
        state.pop(path, None)
    return state | ({"stranger": torch.ones(2)} if adds else {})


def state_names_of(tensors: Mapping[str, Any], traits: Sequence[str], lacks: str) -> list[str]:
    """The names in the state of a model of one of its tensors, or of its ``extra`` state."""
    names = by_state_name({name: name for name in tensors}, traits, {"_extra_state": "extra"})
    return [path for path, name in names.items() if name == lacks]


def features(case: Case) -> set[str]:
    found = {
        "incomplete-state": "lacks" in case or "by" in case,
        "meta-parameters": "blank" in case,
        "strange-name": "adds" in case,
        "must-refuse": "what" in case,
    }
    return features_of_both(case) | {feature for feature, holds in found.items() if holds}


LENIENT = (
    f"{MODEL} lacks=x adds=yes",
    f"mesh=2 x=5x2:-:{SMALL} a=4:-:{SMALL} b=2:-:int64 wrap=ddp lacks=b adds=yes",
    f"mesh=2 x=5x2:S(0):{SMALL} a=4:R:{SMALL} wrap=compile lacks=a how=broadcast adds=yes",
    f"{MODEL} lacks=a how=broadcast with=extra,tied",
    f"{MODEL} adds=yes how=whole with=tied,hidden",
    f"{MODEL} adds=yes how=broadcast,offload",
    f"{MODEL} lacks=a how=whole",
    f"{MODEL} lacks=extra with=extra",
    f"{MODEL} lacks=extra with=extra how=broadcast",
    f"mesh=2 x=5x2:-:{SMALL} a=4:-:{SMALL} b=3:-:{SMALL} c=2x2:-:{SMALL} by=module",
    f"mesh=2 x=5x2:-:{SMALL} a=4:-:{SMALL} by=module wrap=ddp with=extra",
)


@law(
    "optimizer.lenient",
    source=f"{DOCS}, StateDictOptions: strict; set_state_dict: missing_keys, unexpected_keys, keys that are modules",
    control="mesh=2 x=4x2:S(0):float32:small a=2:R:float32:small lacks=x adds=yes",
    features=features,
    **sweep_record(*LENIENT),
)
def lenient(
    tensors: StateTensors,
    others: Poisoned,
    rank: Rank,
    how: How = (),
    with_: Traits = (),
    wrap: Wrap = "none",
    lacks: Word = "",
    adds: bool = False,
    by: Literal["module"] | None = None,
):
    """With strict=False, an incomplete state can be set: what it lacks stays unchanged, and missing and unexpected
    names are returned."""
    net = Net(others, with_, other=True)
    target_tensors, inner = net.held(), net.inner
    model = wrap_model(net, wrap)
    options = state_options(how, strict=False)
    state = state_to_set(tensors, how, with_, rank, lacks, adds)
    if by:
        prefix = "inner."
        state = {inner: {path.removeprefix(prefix): state[path] for path in state if path.startswith(prefix)}}
    incompatible = set_model_state_dict(model, state, options=options)
    return {
        "given": target_tensors,
        "extra": getattr(inner, "extra", None),
        "missing": sorted(incompatible.missing_keys),
        "unexpected": incompatible.unexpected_keys,
    }


@lenient.due
def _(others, how, with_, wrap, lacks, adds, by):
    untouched = state_names_of(others, with_, lacks)
    untouched += [path for path in by_state_name(others, with_) if by and not path.startswith("inner.")]
    reports_names = wrap == "none" and "broadcast" not in how
    return {
        "given": {
            path: changed(value, poison) if path in untouched else value
            for path, value in due_tensors(others, with_).items()
        },
        "extra": Of((OTHER_EXTRA if lacks == "extra" else EXTRA) if "extra" in with_ else None, "wrong-value"),
        "missing": Of(sorted(untouched)) if reports_names else ...,
        "unexpected": Of(["stranger"] if adds else []) if reports_names else ...,
    }


ON_META = (
    f"mesh=2 x=5x2:S(0):{SMALL} a=4:R:{SMALL} how=broadcast blank=all with=extra",
    "mesh=3 x=2x3:S(0) a=7:S(0):float64 b=3:-:bfloat16 how=broadcast blank=all",
    "mesh=2x2 x=5x4:S(0),S(1) a=6:R,S(0) how=broadcast blank=first",
    f"mesh=2 x=5x2:S(1):{SMALL} a=4:-:{SMALL} how=whole blank=all with=frozen",
    f"mesh=2 x=7:S(0):{SMALL} a=4:R:{SMALL} b=2:S(0) how=whole blank=first",
    f"mesh=2 x=5x2:S(0):{SMALL} a=4:R:{SMALL} how=whole blank=all with=tied",
    f"mesh=2 x=5x2:-:{SMALL} a=4:-:{SMALL} how=broadcast blank=all with=tied,extra",
    f"{MODEL} how=whole blank=all again=yes",
    f"mesh=2 x=5x2:-:{SMALL} a=4:S(0):{SMALL} b=2:-:int64 how=broadcast blank=all again=yes",
)


@law(
    "optimizer.blank",
    source=f"{DOCS}, StateDictOptions: broadcast_from_rank0, shard according to the local shards in the model",
    control="mesh=2 x=4x2:S(0):float32:small a=2:R:float32:small how=broadcast blank=all",
    features=features,
    **sweep_record(*ON_META),
)
def blank(
    tensors: StateTensors,
    others: Poisoned,
    rank: Rank,
    blank: Literal["all", "first"],
    how: How = (),
    with_: Traits = (),
    again: bool = False,
):
    """Parameters on the meta device get memory and values from a full state, with their placements unchanged, and a
    tied one stays one parameter. Parameters with memory stay the same objects, which optimizers train, also in a model
    on which the same state is set afterwards."""
    net = Net(others, with_, other=True)
    in_memory = move_to_meta(net, 1 if blank == "first" else None)
    state = state_to_set(tensors, how, with_, rank)
    if again and state:
        state = Net(tensors, with_).state_dict()
    # a copy, since names and tensors may be exchanged in it: that is judged by ``optimizer.left-alone``
    set_model_state_dict(net, copy.copy(state), options=state_options(how))
    next_net = Net(others, with_, other=True)
    kept_by_next = dict(next_net.named_parameters(remove_duplicate=False))
    if again:
        set_model_state_dict(next_net, state, options=state_options(how))
    return {
        "without memory": [path for path, tensor in net.held().items() if tensor.is_meta],
        "filled": {path: None if tensor.is_meta else tensor for path, tensor in net.held().items()},
        "extra": getattr(net.inner, "extra", None),
        "without gradients": [path for path, parameter in net.named_parameters() if not parameter.requires_grad],
        "filled next": next_net.held() if again else None,
        "parameters": [*net.optimizer_parameters()],
        "others in place": replaced(net, in_memory),
        "others in place next": replaced(next_net, kept_by_next),
    }


def move_to_meta(model: nn.Module, count: int | None) -> dict[str, nn.Parameter]:
    """Put the first ``count`` parameters of a model, or all, on the meta device, each under all of its names. Returns
    the others by name."""
    on_meta = {
        parameter: nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        for parameter in [*model.parameters()][:count]
    }
    named = dict(model.named_parameters(remove_duplicate=False))
    for path, parameter in named.items():
        if parameter in on_meta:
            module, _, name = path.rpartition(".")
            model.get_submodule(module).register_parameter(name, on_meta[parameter])
    return {path: parameter for path, parameter in named.items() if parameter not in on_meta}


def replaced(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> list[str]:
    """The names under which a model has another object than these parameters."""
    return [path for path, parameter in parameters.items() if model.get_parameter(path) is not parameter]


@blank.due
def _(tensors, others, with_, again):
    return {
        "without memory": Of([]),
        "filled": due_tensors(others, with_),
        "extra": Of(EXTRA if "extra" in with_ else None, "wrong-value"),
        "without gradients": Of(
            [path for path in by_state_name(tensors) if "frozen" in with_ and path[-1] in frozen(tensors)]
        ),
        "filled next": due_tensors(others, with_) if again else None,
        "parameters": Of([*optimized_values(others)]),
        "others in place": Of([]),
        "others in place next": Of([]),
    }


REFUSED = (
    f"{MODEL} what=broadcast-get",
    f"{MODEL} what=broadcast-get-model",
    f"{MODEL} what=broadcast-set",
    f"{MODEL} what=no-optimizer",
    f"{MODEL} what=empty-model",
    f"{MODEL} what=empty-optimizer",
    f"mesh=2 x=5x2:-:{SMALL} a=4:-:{SMALL} wrap=ddp what=lacks lacks=a",
    f"{MODEL} what=lacks lacks=a how=broadcast wrap=none",
    f"{MODEL} what=adds adds=yes",
    f"{MODEL} what=texts",
    f"{MODEL} what=groups with=hollow",
    f"{MODEL} what=groups with=hollow saved=2",
    f"{MODEL} what=several with=hollow",
    f"{MODEL} what=adds adds=yes how=broadcast",
    f"{MODEL} what=merged",
    f"{MODEL} what=unkept",
    f"{MODEL} what=unkept how=flat",
    f"{MODEL} what=size how=whole",
    f"{MODEL} what=size how=broadcast",
    f"mesh=2 x=4x2:S(0):{SMALL} a=4:R:{SMALL} what=size how=broadcast",
    f"mesh=2 x=5x2:-:{SMALL} a=4:-:{SMALL} what=size how=broadcast",
)
Request = Literal[
    "no-optimizer", "empty-model", "empty-optimizer", "lacks", "adds", "texts", "groups", "merged", "unkept",
    "several", "size", "broadcast-get", "broadcast-get-model", "broadcast-set",
]  # fmt: skip


@law(
    "optimizer.refuses",
    source=f"{DOCS}, StateDictOptions: broadcast_from_rank0 needs full_state_dict; strict; get_state_dict",
    control="mesh=2 x=4x2:S(0):float32:small a=2:R:float32:small what=broadcast-get",
    features=features,
    **sweep_record(*REFUSED),
)
def refuses(
    tensors: StateTensors,
    others: Poisoned,
    rank: Rank,
    what: Request,
    how: How = (),
    with_: Traits = (),
    wrap: Wrap = "none",
    lacks: Word = "",
    adds: bool = False,
    saved: int = 0,
):
    """Every rank refuses contradictory options, empty states, and states with other names, shapes or groups."""
    net = Net(others, with_, other=True)
    parameters = [*net.optimizer_parameters().values()]
    optimizer = adam(parameters, OTHER_RATES, "each", "last" if "hollow" in with_ else None)
    model, options = wrap_model(net, wrap), state_options(how)
    broadcast_only = StateDictOptions(broadcast_from_rank0=True)
    state = state_to_set(tensors, how, with_, rank, lacks, adds)
    attempts = {
        "no-optimizer": lambda: get_optimizer_state_dict(model, []),
        "empty-model": lambda: set_model_state_dict(model, {}),
        "empty-optimizer": lambda: set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict={}),
        "lacks": lambda: set_model_state_dict(model, state, options=options),
        "adds": lambda: set_model_state_dict(model, state, options=options),
        "texts": lambda: get_texts_flat(model, optimizer),
        "groups": lambda: set_with_groups(model, optimizer, saved),
        "several": lambda: set_on_two(model, optimizer),
        "merged": lambda: set_merged_groups(model, optimizer, [*by_state_name(tensors)]),
        "unkept": lambda: set_without_entry(model, optimizer, next(iter(by_state_name(tensors))), options),
        "size": lambda: set_model_state_dict(model, with_fewer_rows(state), options=options),
        "broadcast-get": lambda: get_state_dict(model, optimizer, options=broadcast_only),
        "broadcast-get-model": lambda: get_model_state_dict(model, options=broadcast_only),
        "broadcast-set": lambda: set_model_state_dict(model, state, options=broadcast_only),
    }
    refused = caught(attempts[what])
    return {what: refused, "names what is missing": next(iter(by_state_name(tensors))) in str(refused)}


def get_texts_flat(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Get the flat state of an optimizer whose state has a string."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter]["note"] = "text"
    return get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))


def set_with_groups(model: nn.Module, optimizer: torch.optim.Optimizer, empty: int) -> Any:
    """Set a state with this many groups without parameters."""
    state: Any = get_optimizer_state_dict(model, optimizer)
    first = {**state["param_groups"][0], "params": []}
    state["param_groups"] = [group for group in state["param_groups"] if group["params"]] + [first] * empty
    return set_optimizer_state_dict(model, optimizer, state)


def set_on_two(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Set the state of two optimizers, one with a group without parameters, on both."""
    groups = [group["params"] for group in optimizer.param_groups]
    pair = [adam([one for group in chosen for one in group], OTHER_RATES, "each", hollow)
            for chosen, hollow in ((groups[:1], "last"), (groups[1:], None))]  # fmt: skip
    return set_optimizer_state_dict(model, pair, get_optimizer_state_dict(model, pair))


def set_merged_groups(model: nn.Module, optimizer: torch.optim.Optimizer, names: list[str]) -> Any:
    """Set a state with one group of all parameters; returns the learning rates of the optimizer."""
    state: Any = get_optimizer_state_dict(model, optimizer)
    state["param_groups"] = [{**state["param_groups"][0], "params": names, "lr": RATES[0]}]
    set_optimizer_state_dict(model, optimizer, state)
    return [group.get("lr") for group in optimizer.param_groups]


def set_without_entry(model: nn.Module, optimizer: torch.optim.Optimizer, path: str, options: StateDictOptions) -> Any:
    """Set a state without an entry of one parameter, which is still in its group."""
    state: Any = drop_parameter(get_optimizer_state_dict(model, optimizer, options=options), path)
    return set_optimizer_state_dict(model, optimizer, state, options=options)


def with_fewer_rows(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state with half of the rows of its first tensor."""
    return {path: value[: len(value) // 2] if at == 0 else value for at, (path, value) in enumerate(state.items())}


@refuses.due
def _(tensors, what):
    if what == "merged":
        rates = [RATES[0]] * len(optimized_values(tensors))
        return {what: Either((rates, Refused((ValueError, RuntimeError, KeyError)))), "names what is missing": ...}
    message = "the refusal does not name the parameter"
    return {what: Refused(), "names what is missing": Of(True, "wrong-error", message) if what == "unkept" else ...}
