"""Laws on states that are given to a model and its optimizer: incomplete ones, those that must be refused, models without memory.

A case is a model as :mod:`conformance.laws.optimizer.nets` describes it. ``how`` says in which form the state is given: ``plain`` (placed
like the model), ``whole`` or ``broadcast``, and ``offload`` beside these, joined by commas. ``lacks`` names a tensor that the state
has not, or ``extra``; with ``adds`` it has a name that the model has not; ``by=module`` gives only what is in ``inner``, by that module.
``what`` says what is wrong with a request that must be refused.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from conformance import trip as t
from conformance.case import Case
from conformance.here import Here
from conformance.law import Law
from conformance.laws.optimizer import given_scripts, nets
from conformance.laws.optimizer.together import DOCS, SMALL, Groups, law, options_of, words
from conformance.laws.optimizer.together import features as features_of_both
from conformance.laws.roundtrip import model as m

STRANGER = "stranger"


def state_of(case: Case, here: Here, trip: t.Trip, net: nets.Net) -> dict[Any, Any]:
    """The state of the model that is given on this rank."""
    how, end = words(case), trip.save
    whole = bool(how & {"whole", "broadcast"})
    if "broadcast" in how and here.rank > 0:
        return {}
    lacking = lacked(case, trip)
    state: dict[Any, Any] = {}
    for path, name in nets.paths(case, trip).items():
        if path not in lacking:
            state[path] = trip.values[name].clone() if whole else t.placed(here, end, name, trip.values[name], torch.clone)
    state |= {nets.STATED: nets.EXTRA} if "extra" in nets.oddities(case) and nets.STATED not in lacking else {}
    state |= {STRANGER: torch.ones(2)} if "adds" in case else {}
    if "by" in case:
        return {net.inner: {path.removeprefix(m.INNER): value for path, value in state.items() if path.startswith(m.INNER)}}
    return state


def lacked(case: Case, trip: t.Trip) -> set[str]:
    """The names of the model that are not in the state."""
    own = nets.paths(case, trip)
    lacking = {path for path, name in own.items() if name == case.get("lacks", "")}
    lacking |= {nets.STATED} if case.get("lacks", "") == "extra" else set()
    return lacking | ({path for path in own if not path.startswith(m.INNER)} if "by" in case else set())


def check_lenient(case: Case, here: Here) -> None:
    """Not strictly, what a state has is loaded, what it lacks stays as it was; both are told by name to ranks that are given it."""
    trip = t.read_trip(case)
    net = nets.net_of(case, here, trip, trip.save, case.get("wrap", "none"), poisoned=True)
    lacking = lacked(case, trip)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        said = set_model_state_dict(net.outside, state_of(case, here, trip, net), options=options_of(case, strict=False))
    nets.judge_net(case, here, trip, trip.save, net, "given", spared=lacking)
    if case.get("wrap", "none") == "none" and "broadcast" not in words(case):
        missing, unexpected = {*said.missing_keys}, [*said.unexpected_keys]
        here.require(
            missing == lacking, "wrong-metadata", "missing", "other names are told to be missing", sorted(lacking), sorted(missing)
        )
        want = [STRANGER] if "adds" in case else []
        here.require(unexpected == want, "wrong-metadata", "unexpected", "other names are told to be unexpected", want, unexpected)


def check_blank(case: Case, here: Here) -> None:
    """A model of which parameters have no memory gets it, with what a whole state says must be in them."""
    trip = t.read_trip(case)
    net = nets.net_of(case, here, trip, trip.save, "none", poisoned=True, blank=case.get("blank"))
    set_model_state_dict(net.outside, state_of(case, here, trip, net), options=options_of(case))
    filled = nets.Net(net.outside, nets.held_by(net.outside), net.inner, {})
    left = [path for path, tensor in filled.held.items() if tensor.is_meta]
    if here.require(not left, "wrong-metadata", "memory", "parameters have no memory after a whole state was given", [], left):
        nets.judge_net(case, here, trip, trip.save, filled, "filled")
        asking = {path: parameter.requires_grad for path, parameter in net.outside.named_parameters()}
        due = {path: parameter.requires_grad for path, parameter in net.given.items()}
        here.require(asking == due, "wrong-metadata", "gradients", "other parameters ask for gradients than before", due, asking)


def check_refuses(case: Case, here: Here) -> None:
    """What cannot be meant is refused, by every rank; of the options of groups, none is lost."""
    trip = t.read_trip(case)
    net = nets.net_of(case, here, trip, trip.save, case.get("wrap", "none"), poisoned=True)
    optimizer = Groups(case, net, "load").optimizer(case, net)
    what = case.get("what")
    state: Any = state_of(case, here, trip, net)
    attempts: dict[str, Callable[[], object]] = {
        "no-optimizer": lambda: get_optimizer_state_dict(net.outside, []),
        "empty-model": lambda: set_model_state_dict(net.outside, {}),
        "empty-optimizer": lambda: set_state_dict(net.outside, optimizer, model_state_dict=state, optim_state_dict={}),
        "lacks": lambda: set_model_state_dict(net.outside, state, options=options_of(case)),
        "adds": lambda: set_model_state_dict(net.outside, state, options=options_of(case)),
        "texts": lambda: asked_with_text(net, optimizer),
        "groups": lambda: given_groups(case, net, optimizer),
    }
    alone = StateDictOptions(broadcast_from_rank0=True)
    attempts["broadcast-get"] = lambda: get_state_dict(net.outside, optimizer, options=alone)
    attempts["broadcast-get-model"] = lambda: get_model_state_dict(net.outside, options=alone)
    attempts["broadcast-set"] = lambda: set_model_state_dict(net.outside, state, options=alone)
    if what == "merged":
        judge_merged(here, net, optimizer)
    else:
        here.refused(attempts[what], what, MESSAGES[what])


MESSAGES = {
    "no-optimizer": "the state of no optimizer at all",
    "empty-model": "an empty state for a model",
    "empty-optimizer": "an empty state for an optimizer",
    "lacks": "a state that lacks a name of the model, given strictly",
    "adds": "a state with a name that the model has not, given strictly",
    "texts": "a flat state of an optimizer that keeps texts",
    "groups": "a state of other groups of parameters",
    "broadcast-get": "broadcast_from_rank0 without full_state_dict",
    "broadcast-get-model": "broadcast_from_rank0 without full_state_dict",
    "broadcast-set": "broadcast_from_rank0 without full_state_dict",
}


def asked_with_text(net: nets.Net, optimizer: torch.optim.Optimizer) -> object:
    for parameter in net.trained().values():
        optimizer.state[parameter]["note"] = "text"
    return get_optimizer_state_dict(net.outside, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))


def given_groups(case: Case, net: nets.Net, optimizer: torch.optim.Optimizer) -> object:
    """The state of an optimizer whose groups are ``saved``: ``plain``, or with so many ``hollow`` ones beside."""
    hollow = case.integer("saved", 0)
    state: Any = get_optimizer_state_dict(net.outside, optimizer)
    options = {key: value for key, value in state["param_groups"][0].items() if key != "params"}
    state["param_groups"] = [group for group in state["param_groups"] if group["params"]]
    state["param_groups"] += [{"params": [], **options} for _ in range(hollow)]
    set_optimizer_state_dict(net.outside, optimizer, state)
    return [group.get("lr") for group in optimizer.param_groups]


def judge_merged(here: Here, net: nets.Net, optimizer: torch.optim.Optimizer) -> None:
    """The state of one group of all parameters, given to a group for each: refused, or each has the options of that one."""
    state: Any = get_optimizer_state_dict(net.outside, optimizer)
    options = {key: value for key, value in state["param_groups"][0].items() if key != "params"}
    state["param_groups"] = [{**options, "params": [*net.given], "lr": m.RATES[0]}]
    try:
        set_optimizer_state_dict(net.outside, optimizer, state)
    except (ValueError, RuntimeError, KeyError):
        return
    got = [group.get("lr") for group in optimizer.param_groups]
    due = [m.RATES[0]] * len(got)
    here.require(got == due, "wrong-value", "merged", "groups that one was split into are taken, and lose its options", due, got)


def features(case: Case) -> set[str]:
    found = features_of_both(case) | ({"incomplete-state"} if "lacks" in case or "by" in case else set())
    found |= {"incomplete-whole-state"} if "lacks" in case and "whole" in words(case) else set()
    found |= {"meta-parameters"} if "blank" in case else set()
    found |= {"extra-state-missing"} if case.get("lacks", "") == "extra" else set()
    found |= {"strange-name"} if "adds" in case else set()
    found |= {"split-group"} if case.get("what", "") == "merged" else set()
    return found | ({"must-refuse"} if "what" in case else set())


MODEL = f"mesh=2 x=5x2:S(0):{SMALL} a=4:R:{SMALL}"
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
BLANK = (
    f"mesh=2 x=5x2:S(0):{SMALL} a=4:R:{SMALL} how=broadcast blank=all with=extra",
    "mesh=3 x=2x3:S(0) a=7:S(0):float64 b=3:-:bfloat16 how=broadcast blank=all",
    "mesh=2x2 x=5x4:S(0),S(1) a=6:R,S(0) how=broadcast blank=first",
    f"mesh=2 x=5x2:S(1):{SMALL} a=4:-:{SMALL} how=whole blank=all with=frozen",
    f"mesh=2 x=7:S(0):{SMALL} a=4:R:{SMALL} b=2:S(0) how=whole blank=first",
)
REFUSES = (
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
    f"{MODEL} what=adds adds=yes how=broadcast",
    f"{MODEL} what=merged",
)

LAWS: tuple[Law, ...] = (
    law(
        "lenient",
        LENIENT,
        "mesh=2 x=4x2:S(0):float32:small a=2:R:float32:small lacks=x adds=yes",
        check=check_lenient,
        features=features,
        script=given_scripts.lenient,
        clause="Not strictly, a state is loaded as far as it goes: what it lacks stays as it was, what it has beyond is told by name.",
        source=f"{DOCS}, StateDictOptions: strict; set_state_dict: missing_keys, unexpected_keys, keys that are modules",
        planted="what_is_lacking_is_zero",
    ),
    law(
        "blank",
        BLANK,
        "mesh=2 x=4x2:S(0):float32:small a=2:R:float32:small how=broadcast blank=all",
        check=check_blank,
        features=features,
        script=given_scripts.blank,
        clause="A model without memory gets it with the whole state that it is given, placed as it was without.",
        source=f"{DOCS}, StateDictOptions: broadcast_from_rank0, shard according to the local shards in the model",
        planted="memory_that_was_not_filled",
    ),
    law(
        "refuses",
        REFUSES,
        "mesh=2 x=4x2:S(0):float32:small a=2:R:float32:small what=broadcast-get",
        check=check_refuses,
        features=features,
        script=given_scripts.refuses,
        clause="Options that exclude each other, empty states, other names and other groups are refused by every rank.",
        source=f"{DOCS}, StateDictOptions: full_state_dict must be set with broadcast_from_rank0; strict; get_state_dict: sanity checking",
        planted="anything_is_taken",
    ),
)
