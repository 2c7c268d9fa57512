"""Laws of the states of a model and its optimizer, read from one model and set on another.

A case is a model as :mod:`shardlaw.conformance.laws.optimizer.nets` describes it. ``how`` are the options, joined by
commas: ``flat`` (a flat optimizer state), ``whole`` (full tensors on every rank), ``broadcast`` (full tensors from
rank 0; with ``apart`` the model's state and the optimizer's are set one after the other) and ``offload`` (on the CPU;
full tensors on rank 0 only). A full state may be set on a model with other placements, the fields ``to``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import torch
from hypothesis.strategies import SearchStrategy
from torch.distributed.checkpoint.state_dict import (
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from shardlaw.conformance.law.act import law, texts
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Either, Of
from shardlaw.conformance.law.fields import Rank
from shardlaw.conformance.law.law import Law, Limits
from shardlaw.conformance.laws.checkpoint.models import (
    OTHER_RATES,
    RATES,
    adam,
    dense,
    grouped,
    keeps,
    learned,
    saved_rates,
    with_rates,
)
from shardlaw.conformance.laws.checkpoint.trip import tensor_names
from shardlaw.conformance.laws.optimizer.fields import (
    PoisonedTarget,
    Tensors,
    WordsField,
    optimized_values,
    values_with_grads,
)
from shardlaw.conformance.laws.optimizer.nets import (
    EXTRA,
    NestedStateOptimizer,
    Net,
    by_state_name,
    is_full_state,
    state_options,
    train_step,
    wrap_model,
)
from shardlaw.conformance.laws.roundtrip.cases import narrow

DOCS = "torch.distributed.checkpoint.state_dict docs"
NEEDS = ("checkpoint", "object_collectives")
TRAITS = (
    *("tied", "twice", "same", "extra", "hidden", "renamed", "frozen", "idle", "hollow", "scheduled"),
    *("trained", "rested"),
)
Traits = Annotated[Sequence[str], WordsField(*TRAITS)]
How = Annotated[Sequence[str], WordsField("plain", "flat", "whole", "broadcast", "apart", "offload")]
NESTED = {"deep": "0", "numbered": "[0]"}
FEATURES = {
    "tied": "tied",
    "twice": "tied",
    "same": "module-twice",
    "extra": "extra-state",
    "hidden": "buffer-not-saved",
    "renamed": "renamed",
    "scheduled": "scheduled",
    "frozen": "frozen",
    "idle": "stateless",
    "hollow": "hollow-group",
    "flat": "flat-state",
    "whole": "whole-state",
    "broadcast": "whole-state",
    "offload": "offloaded",
}
Wrap = Literal[
    "none", "ddp", "compile", "ddp-compile", "compile-ddp", "inside", "ddp-inside",
    "recompute", "recompute-inside", "recompute-ddp-inside",
]  # fmt: skip


def make_optimizer(
    net: Net, rates: Sequence[float], groups: str, traits: Sequence[str], opt: str
) -> torch.optim.Optimizer:
    parameters, hollow = [*net.optimizer_parameters(traits).values()], "last" if "hollow" in traits else None
    if opt != "adam":
        return NestedStateOptimizer(
            with_rates(grouped(parameters, groups, hollow), rates), 0 if opt == "numbered" else "0"
        )
    return adam(parameters, rates, groups, hollow)


def optimizer_state_names(state: Mapping[str, Any]) -> dict[str, Any]:
    """The names in the state of an optimizer; of a flat state also the learning rates, which are entries."""
    if "param_groups" in state:
        return {"names": sorted(state["state"]), "groups": [group["params"] for group in state["param_groups"]]}
    rates = {name: value for name, value in state.items() if name.startswith("param_groups.") and name.endswith(".lr")}
    return {"names": sorted(name for name in state if name.startswith("state.")), "rates": rates}


def transfer_states(
    tensors: Tensors,
    others: PoisonedTarget,
    rank: Rank,
    how: How = (),
    with_: Traits = (),
    wrap: Wrap = "none",
    wrap__load: Wrap | None = None,
    groups: Literal["each", "one"] = "each",
    opt: Literal["adam", "deep", "numbered"] = "adam",
):
    net = Net(tensors, with_)
    optimizer, model = make_optimizer(net, RATES, groups, with_, opt), wrap_model(net, wrap)
    for group in optimizer.param_groups if "scheduled" in with_ else ():
        group["initial_lr"] = 2 * group["lr"]
    train_step(optimizer)
    options = state_options(how)
    get_options = replace(options, broadcast_from_rank0=False)
    model_state, optimizer_state = get_state_dict(model, optimizer, options=get_options)
    saved = {"taken": dict(model_state), "optimizer names": optimizer_state_names(optimizer_state)}

    net = Net(others, with_, other=True)
    target_tensors, parameters, inner = net.held(), net.optimizer_parameters(with_), net.inner
    optimizer, model = make_optimizer(net, OTHER_RATES, groups, with_, opt), wrap_model(net, wrap__load or wrap)
    states = (model_state, optimizer_state) if rank == 0 or "broadcast" not in how else ({}, {})
    if "apart" in how:
        incompatible = set_model_state_dict(model, states[0], options=options)
        set_optimizer_state_dict(model, optimizer, states[1], options=options)
    else:
        incompatible = set_state_dict(
            model, optimizer, model_state_dict=states[0], optim_state_dict=states[1], options=options
        )
    return {
        **saved,
        "told": [*incompatible.missing_keys, *incompatible.unexpected_keys],
        "given": target_tensors,
        "extra": getattr(inner, "extra", None),
        **learned(parameters, optimizer),
        "scheduled": [group.get("initial_lr") for group in optimizer.param_groups],
    }


def due_transfer(tensors, others, rank: Rank, how, with_, groups, opt):
    parameters, hollow = [*optimized_values(tensors, with_)], "last" if "hollow" in with_ else None
    rates, full = saved_rates(parameters, groups, hollow), is_full_state(how)
    due_optimizer = keeps(values_with_grads(others, with_), rates, deep=NESTED.get(opt))
    scheduled: list[Any] = [2 * rate if "scheduled" in with_ else None for rate in rates]
    if "flat" in how and hollow:  # options are stored by parameter, of which the last group has none
        own = OTHER_RATES[(len(rates) - 1) % len(OTHER_RATES)]
        due_optimizer["rates"][-1], scheduled[-1] = Either((rates[-1], own)), ...
    extra = {"_extra_state": Of(EXTRA, "wrong-value")} if "extra" in with_ else None
    saved = by_state_name(dense(tensors) if full else tensors, with_, extra)
    names = due_optimizer_names(due_optimizer, parameters, rates, how, groups, hollow)
    if rank > 0 and full and "offload" in how:  # only rank 0 has it
        saved, names = {}, {"names": Of([]), "rates": {}}
    return {
        "taken": saved,
        "optimizer names": ... if "trained" in with_ else names,  # in which form a renamed one is there is open
        "told": Of([]),
        "given": due_tensors(others, with_),
        "extra": Of(EXTRA if "extra" in with_ else None, "wrong-value"),
        **due_optimizer,
        "scheduled": scheduled,
    }


def due_tensors(values: Mapping[str, Any], traits: Sequence[str]) -> dict[str, Any]:
    """The due tensors of the target model after its state was set; buffers outside the state keep their values."""
    return by_state_name(values, traits, {"scratch": torch.full((3,), 2.0)} if "hidden" in traits else None)


def due_optimizer_names(
    due: Any, parameters: list[str], rates: list[float], how: Sequence[str], groups: str, hollow: str | None
) -> dict[str, Any]:
    """The due result of :func:`optimizer_state_names`; ``due`` is that of the optimizer's contents."""
    paths = grouped(parameters, groups, hollow)
    if "flat" not in how:
        return {"names": Of(sorted(due["averages"])), "groups": Of(paths)}
    averages = {path: [key.replace("[0]", "0") for key in kept] for path, kept in due["averages"].items()}
    names = [f"state.{path}.{key}" for path, keys in averages.items() for key in ("step", *keys)]
    by_name = {f"param_groups.{path}.lr": rate for group, rate in zip(paths, rates, strict=True) for path in group}
    return {"names": Of(sorted(names)), "rates": by_name}


def features(case: Case) -> set[str]:
    how, traits = {*case.get("how", "plain").split(",")}, {*case.get("with", "").split(",")}
    found = {"module"} | {feature for word, feature in FEATURES.items() if word in how | traits}
    found |= {f"way:{case.get(field)}" for field in ("wrap", "wrap.load") if case.get(field, "none") != "none"}
    found |= {"broadcast-both"} if "broadcast" in how and "apart" not in how else set()
    return found | ({"nested-state"} if case.get("opt", "adam") in NESTED else set())


def sweep_record(*lines: str, untried: int = 0) -> dict[str, Any]:
    """The fields of a law's record for a sweep of these cases; smoke does not try the last ``untried`` ones."""

    def sweep(limits: Limits) -> list[Case]:
        return [
            case
            for case in texts(*lines)(limits)
            if {case.tensor(name).dtype for name in tensor_names(case)} <= {*limits.dtypes}
        ]

    def narrow_with_inner(case: Case) -> SearchStrategy[Case]:
        """Smaller cases that still have a tensor in the inner module, to which most traits apply."""
        return narrow(case).map(lambda smaller: smaller if "a" in smaller else case)

    return {"sweep": sweep, "sweeps": len(lines) - untried, "narrow": narrow_with_inner, "needs": NEEDS, "smallest": 1}


SMALL = "float32:small"
TOGETHER = (
    f"mesh=2 x=5x2:S(0):{SMALL} a=4:R:{SMALL} with=extra,hidden",
    f"mesh=2 x=5x2:S(0):{SMALL} a=4x3:S(1):{SMALL} b=3:R:int64 how=flat with=frozen",
    f"mesh=3 x=2x3:S(0):{SMALL} a=7:S(0):{SMALL} to.x=S(1) to.a=R how=whole with=extra,hidden,idle",
    f"mesh=2 x=5x2:S(0):{SMALL} a=4x3:S(1):{SMALL} b=3:-:{SMALL} to.x=R to.a=S(0) how=broadcast,apart "
    "with=extra,hidden,frozen",
    f"mesh=2x2 x=5x4:S(0),S(1):{SMALL} a=6:R,S(0):{SMALL} to.x=S(1),S(1) to.a=S(0),R how=broadcast,apart,offload",
    f"mesh=2 x=5x2:S(0):{SMALL} a=4:R:{SMALL} b=2:R:{SMALL} how=offload groups=one with=renamed,idle",
    f"mesh=2 x=5x2:S(0):{SMALL} a=4:S(0):{SMALL} with=same",
    f"mesh=2 x=5x2:S(0):{SMALL} a=4:S(0):{SMALL} how=flat groups=one with=idle,hidden",
    f"mesh=2 x=5x2:S(0):{SMALL} a=4:R:{SMALL} with=scheduled,hollow",
    f"mesh=2 x=5x2:S(0):{SMALL} a=4:R:{SMALL} to.x=S(1) how=whole with=hollow",
    f"mesh=2 x=3:S(0):{SMALL} a=4:R:{SMALL} how=broadcast,apart with=hollow,renamed",
    f"mesh=2 x=2:R:{SMALL} a=2:R:{SMALL} how=whole with=scheduled",
    f"mesh=2 x=2:R:{SMALL} a=2:R:{SMALL} how=broadcast,apart with=scheduled",
    f"mesh=2 x=2:S(0):{SMALL} a=2:R:{SMALL} how=flat,whole",
    f"mesh=2 x=2:S(0):{SMALL} a=2:S(0):{SMALL} how=whole with=same",
    f"mesh=2 x=2:R:{SMALL} a=2:R:{SMALL} how=flat with=scheduled",
    f"mesh=2 x=2:S(0):{SMALL} a=2:R:{SMALL} with=renamed,trained",
    # not in smoke: if the ranks hang, it takes the time limit of a case
    f"mesh=2 x=2:S(0):{SMALL} a=2:R:{SMALL} how=broadcast",
    f"mesh=2 x=5x2:S(0):{SMALL} a=4:R:{SMALL} how=flat with=hollow",
)
WRAPPED = (
    f"mesh=2 x=5x2:-:{SMALL} a=4:-:{SMALL} b=3:-:int64 wrap=ddp with=extra,frozen",
    f"mesh=2 x=5x2:S(0):{SMALL} a=4:R:{SMALL} wrap=compile with=extra,hidden how=flat",
    f"mesh=2 x=5x2:-:{SMALL} a=4:-:{SMALL} to.x=S(0) to.a=R wrap=ddp-compile wrap.load=inside how=whole",
    f"mesh=2 x=5x2:-:{SMALL} a=4:-:{SMALL} wrap=inside wrap.load=compile-ddp how=broadcast,apart with=extra",
    f"mesh=2 x=5x2:-:{SMALL} a=4:-:{SMALL} wrap=ddp-inside wrap.load=ddp with=idle",
    f"mesh=3 x=7:S(0):{SMALL} a=4x3:S(1):{SMALL} wrap=none wrap.load=compile how=broadcast,apart,offload",
    f"mesh=2 x=5x2:S(0):{SMALL} a=4:R:{SMALL} wrap=recompute wrap.load=inside with=extra",
    f"mesh=2 x=2:-:{SMALL} a=2:-:{SMALL} wrap=recompute-inside",
    f"mesh=2 x=2:-:{SMALL} a=2:-:{SMALL} wrap=recompute-ddp-inside how=flat",
)
TIED = (
    f"mesh=2 x=5x2:S(0):{SMALL} a=4:R:{SMALL} with=tied",
    f"mesh=2 x=5x2:S(0):{SMALL} a=4:R:{SMALL} with=tied how=flat",
    f"mesh=2 x=7:S(0):{SMALL} a=4:R:{SMALL} to.x=R to.a=S(0) with=tied how=whole",
    f"mesh=3 x=2x4:S(0):{SMALL} a=4:R:{SMALL} to.x=S(1) with=tied,extra how=broadcast,apart groups=one",
    f"mesh=2 x=5x2:-:{SMALL} a=4:-:{SMALL} wrap=ddp with=tied",
    f"mesh=2 x=5x2:S(0):{SMALL} a=4:R:{SMALL} wrap=compile with=tied how=flat groups=one",
    f"mesh=2 x=5x2:S(0):{SMALL} a=4:R:{SMALL} with=twice",
    f"mesh=2 x=2:S(0):{SMALL} a=2:R:{SMALL} with=twice how=whole",
    f"mesh=2 x=2:-:{SMALL} a=2:-:{SMALL} with=twice wrap=ddp",
)
DEEP = (
    f"mesh=2 x=5x2:S(0):{SMALL} a=4:R:{SMALL} opt=deep",
    f"mesh=2 x=5x2:S(0):{SMALL} a=4x3:S(1):{SMALL} opt=deep how=flat",
    f"mesh=3 x=2x3:S(0):{SMALL} a=7:S(0):{SMALL} opt=deep how=flat groups=one",
    f"mesh=2 x=5x2:S(0):{SMALL} a=4:R:{SMALL} to.x=S(1) to.a=S(0) opt=deep how=whole",
    f"mesh=2 x=5x2:-:{SMALL} a=4:S(0):{SMALL} to.a=R opt=deep how=broadcast,apart",
    f"mesh=1 x=2:-:{SMALL} a=2:-:{SMALL} opt=deep how=flat",
    f"mesh=2 x=2:S(0):{SMALL} a=2:R:{SMALL} opt=numbered",
    f"mesh=2 x=2:S(0):{SMALL} a=2:R:{SMALL} opt=numbered how=flat",
)


def both_states_law(name: str, lines: Sequence[str], control: str, clause: str, source: str, untried: int = 0) -> Law:
    built = law(
        f"optimizer.{name}",
        control=control,
        clause=clause,
        source=f"{DOCS}, {source}",
        features=features,
        **sweep_record(*lines, untried=untried),
    )(transfer_states)
    built.due(due_transfer)
    return built


LAWS = (
    both_states_law(
        "together",
        TOGETHER,
        f"mesh=2 x=4x2:S(0):{SMALL} a=2:R:{SMALL}",
        "get_state_dict and set_state_dict copy the state of a model and its optimizer to another model and optimizer.",
        "get_state_dict, set_state_dict; StateDictOptions",
        untried=2,
    ),
    both_states_law(
        "wrapped",
        WRAPPED,
        f"mesh=2 x=4x2:-:{SMALL} a=2:-:{SMALL} wrap=ddp",
        "The names in both states do not depend on wrappers of the model, and fit a model that is wrapped differently.",
        "get_state_dict: the keys are canonical FQNs; DDP, FSDP and any combination of parallelisms",
    ),
    both_states_law(
        "tied",
        TIED,
        f"mesh=2 x=4x2:S(0):{SMALL} a=2:R:{SMALL} with=tied",
        "A parameter with two names is in the model's state under both, and in the optimizer's state under the first.",
        "get_state_dict: canonical FQNs as returned by named_parameters",
    ),
    both_states_law(
        "deep",
        DEEP,
        f"mesh=2 x=4x2:S(0):{SMALL} a=2:R:{SMALL} opt=deep how=flat",
        "An optimizer state of nested dicts, under texts or numbers, is restored as it was, also from a flat state.",
        "StateDictOptions: flatten_optimizer_state_dict; arbitrary levels of nesting for optimizers like Shampoo",
    ),
)
