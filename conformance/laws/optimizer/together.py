"""Laws on the state of a model and that of its optimizers together: taken from one model, given to another.

A case is a model as :mod:`conformance.laws.optimizer.nets` describes it. ``how`` are the options: ``flat`` (no nested dicts of the
optimizer), ``whole`` (whole tensors on every rank), ``broadcast`` (whole tensors, from rank 0; ``apart``: first that of the model, then
that of the optimizer) and ``offload`` (on the host: with whole tensors on rank 0 alone), joined by commas. Whole tensors are given to a
model that is placed by ``to``; others to one like the first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor

from conformance import trip as t
from conformance.case import Case
from conformance.here import Here
from conformance.law import Law
from conformance.laws.optimizer import nets, together_scripts
from conformance.laws.roundtrip import model as m
from conformance.laws.roundtrip.cases import listed, narrow

DOCS = "torch.distributed.checkpoint.state_dict docs"


class Deep(torch.optim.Optimizer):
    """Keeps what it has seen of a gradient in dicts within dicts, as Shampoo does."""

    def __init__(self, groups: Any, **_: Any) -> None:
        super().__init__(groups, {"lr": 0.5})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in (one for group in self.param_groups for one in group["params"] if one.grad is not None):
            state = self.state[parameter]
            state["step"] = state.get("step", 0) + 1
            state["seen"] = {"left": {"0": parameter.grad / 2, "weight": 3}, "right": parameter.grad / 4}


class Groups:
    """Which parameters have a group of their own, and which rate: one for ``each``, or all in ``one``."""

    def __init__(self, case: Case, net: nets.Net, end: str) -> None:
        how, held = case.get("groups", "each"), [*net.given]
        self.paths = [held] if how == "one" else [[path] for path in held]
        self.paths += [[]] if "hollow" in nets.oddities(case) else []
        self.end, rates = end, m.RATES if end == "save" else m.OTHER_RATES
        self.rates = [rates[at % len(rates)] for at in range(len(self.paths))]

    def optimizer(self, case: Case, net: nets.Net) -> torch.optim.Optimizer:
        told = [{"params": [net.given[p] for p in group], "lr": rate} for group, rate in zip(self.paths, self.rates, strict=True)]
        made = Deep(told) if case.get("opt", "adam") == "deep" else torch.optim.Adam(told, betas=(0.5, 0.5), foreach=False)
        for group in made.param_groups if "scheduled" in nets.oddities(case) and self.end == "save" else ():
            group["initial_lr"] = 2 * group["lr"]
        return made


def words(case: Case) -> set[str]:
    return {*case.get("how", "plain").split(",")}


def options_of(case: Case, **more: Any) -> StateDictOptions:
    """The options under which a state is given."""
    how = words(case)
    whole, broadcast = bool(how & {"whole", "broadcast"}), "broadcast" in how
    return StateDictOptions(
        full_state_dict=whole,
        broadcast_from_rank0=broadcast,
        flatten_optimizer_state_dict="flat" in how,
        cpu_offload="offload" in how,
        **more,
    )


def stepped(case: Case, here: Here, trip: t.Trip) -> tuple[nets.Net, torch.optim.Optimizer]:
    """A model that holds what it must, and its optimizer after one step."""
    net = nets.net_of(case, here, trip, trip.save, case.get("wrap", "none"), poisoned=False)
    optimizer = Groups(case, net, "save").optimizer(case, net)
    behind = nets.paths(case, trip)
    kept = {path: parameter.detach().clone() for path, parameter in net.trained().items()}
    for path, parameter in net.trained().items():
        parameter.grad = t.placed(here, trip.save, behind[path], trip.values[behind[path]], torch.clone)
    optimizer.step()
    with torch.no_grad():
        for path, parameter in net.trained().items():
            parameter.copy_(kept[path])
            parameter.grad = None
    return net, optimizer


def averages(case: Case, grad: torch.Tensor) -> dict[tuple[str, ...], torch.Tensor]:
    """What one step leaves of a gradient, by its path in the state of the parameter."""
    if case.get("opt", "adam") == "deep":
        return {("seen", "left", "0"): grad / 2, ("seen", "right"): grad / 4}
    return {("exp_avg",): grad / 2, ("exp_avg_sq",): grad * grad / 2}


def check_together(case: Case, here: Here) -> None:
    """Both states, taken at once and given at once, make another model and its optimizer the first ones; their names are canonical."""
    trip = t.read_trip(case)
    net, optimizer = stepped(case, here, trip)
    how = words(case)
    asked = options_of(case)
    asked.broadcast_from_rank0 = False
    model_state, optim_state = get_state_dict(net.outside, optimizer, options=asked)
    if here.rank > 0 and "offload" in how and asked.full_state_dict:
        here.require(not model_state and not optim_state, "wrong-metadata", "offloaded", "a whole state on the host is rank 0's alone")
    else:
        judge_names(case, here, trip, net, model_state, optim_state)
        judge_taken(case, here, trip, model_state, optim_state)
    whole = asked.full_state_dict
    end = trip.load if whole else trip.save
    other = nets.net_of(case, here, trip, end, case.get("wrap.load", case.get("wrap", "none")), poisoned=True)
    fresh = Groups(case, other, "load").optimizer(case, other)
    if "broadcast" in how and "apart" in how:
        given: Any = (model_state, optim_state) if here.rank == 0 else ({}, {})
        said = set_model_state_dict(other.outside, given[0], options=options_of(case))
        set_optimizer_state_dict(other.outside, fresh, given[1], options=options_of(case))
    else:
        mine = here.rank == 0 or "broadcast" not in how
        given = {"model_state_dict": model_state if mine else {}, "optim_state_dict": optim_state if mine else {}}
        said = set_state_dict(other.outside, fresh, **given, options=options_of(case))
    left = [*said.missing_keys, *said.unexpected_keys]
    here.require(not left, "wrong-metadata", "told", "names are told to be missing or unexpected", [], left)
    nets.judge_net(case, here, trip, end, other, "given")
    judge_optimizer(case, here, trip, end, net, other, fresh)


def judge_names(case: Case, here: Here, trip: t.Trip, net: nets.Net, model_state: Any, optim_state: Any) -> None:
    """The names in both states are those that the model has where nothing is wrapped around it."""
    due = nets.names(case, trip)
    here.require(
        {*model_state} == due, "wrong-metadata", "names", "the state of the model has other names than the model", due, {*model_state}
    )
    groups = Groups(case, net, "save")
    trained, kinds = [*net.trained()], [("step",), *averages(case, torch.zeros(()))]
    kinds += [("seen", "left", "weight")] if case.get("opt", "adam") == "deep" else []
    if "flat" in words(case):
        want = {".".join(("state", path, *kind)) for path in trained for kind in kinds}
        got = {name for name in optim_state if name.startswith("state.")}
        here.require(got == want, "wrong-metadata", "flat names", "the flat state has other names than it must", sorted(want), sorted(got))
        for path, rate in ((path, rate) for group, rate in zip(groups.paths, groups.rates, strict=True) for path in group):
            told = optim_state.get(f"param_groups.{path}.lr")
            here.require(told == rate, "wrong-value", "flat rate", f"the rate of {path} is {told} in the flat state", rate, told)
        return
    got = {*optim_state["state"]}
    here.require(
        got == {*trained}, "wrong-metadata", "state names", "the state of the optimizer has other names", sorted(trained), sorted(got)
    )
    members = [group["params"] for group in optim_state["param_groups"]]
    here.require(members == groups.paths, "wrong-metadata", "group names", "the groups have other members", groups.paths, members)


def judge_taken(case: Case, here: Here, trip: t.Trip, model_state: Any, optim_state: Any) -> None:
    """What was taken holds what the model and its optimizer hold: whole where that was asked."""
    whole = bool(words(case) & {"whole", "broadcast"})
    for path, name in nets.paths(case, trip).items():
        if path in model_state:
            layout = None if whole else trip.save.layout(name)
            t.judge_tensor(here, model_state[path].detach(), trip.values[name], layout, place=path, check="taken")
    if "extra" in nets.oddities(case):
        got = model_state.get(nets.STATED)
        here.require(got == nets.EXTRA, "wrong-value", "taken", "the extra state in the state is another one", nets.EXTRA, got)


def judge_optimizer(
    case: Case, here: Here, trip: t.Trip, end: t.End, first: nets.Net, net: nets.Net, optimizer: torch.optim.Optimizer
) -> None:
    """Every average, step and rate is that of the first optimizer, and nothing is kept of what has none."""
    behind, saved = nets.paths(case, trip), Groups(case, first, "save")
    for path, parameter in net.trained().items():
        state = optimizer.state.get(parameter, {})
        for kind, full in averages(case, trip.due(end, behind[path])).items():
            got: Any = state
            for key in kind:
                got = got.get(key) if isinstance(got, dict) else None
            what = f"{'.'.join(kind)} of {path}"
            if here.require(got is not None, "wrong-metadata", "optimizer", f"there is no {what}", kind, [*state]):
                t.judge_tensor(here, got, full, end.layout(behind[path]), place=what, check="optimizer")
        step = state.get("step")
        count = None if step is None else float(step.to_local() if isinstance(step, DTensor) else step)
        here.require(count == 1, "wrong-value", "optimizer", f"the step of {path} is {count}, must be 1", 1, count)
        if case.get("opt", "adam") == "deep" and "seen" in state:
            weight = state["seen"].get("left", {}).get("weight")
            here.require(weight == 3, "wrong-value", "optimizer", f"a number within the state of {path} is {weight}, must be 3", 3, weight)
    strangers = [parameter for parameter in optimizer.state if all(parameter is not own for own in net.trained().values())]
    here.require(not strangers, "wrong-metadata", "optimizer", "there is a state of a parameter that is not trained")
    rates = [float(group["lr"]) if "lr" in group else None for group in optimizer.param_groups]
    here.require(rates == saved.rates, "wrong-value", "optimizer", "the rates are not those of the first optimizer", saved.rates, rates)
    if "scheduled" in nets.oddities(case):
        told = [group.get("initial_lr") for group in optimizer.param_groups]
        want = [2 * rate for rate in saved.rates]
        here.require(told == want, "wrong-value", "scheduled", "an option of the groups that a scheduler added is lost", want, told)


def features(case: Case) -> set[str]:
    how = words(case)
    found = nets.features(case)
    found |= {"flat-state"} if "flat" in how else set()
    found |= {"whole-state"} if how & {"whole", "broadcast"} else set()
    found |= {"offloaded"} if "offload" in how else set()
    found |= {"hollow-group"} if "hollow" in nets.oddities(case) else set()
    found |= {"flat-whole"} if {"flat", "whole"} <= how else set()
    found |= {"broadcast-both"} if "broadcast" in how and "apart" not in how else set()
    found |= {"nested-state"} if case.get("opt", "adam") == "deep" else set()
    return found


def shrunk(case: Case) -> Any:
    """Smaller cases that still have two tensors: what is odd about a model hangs on them."""
    return narrow(case).map(lambda smaller: smaller if "a" in smaller else case)


SMALL = "float32:small"
TOGETHER = (
    f"mesh=2 x=5x2:S(0):{SMALL} a=4:R:{SMALL} with=extra,hidden",
    f"mesh=2 x=5x2:S(0):{SMALL} a=4x3:S(1):{SMALL} b=3:R:int64 how=flat with=frozen",
    f"mesh=3 x=2x3:S(0):{SMALL} a=7:S(0):{SMALL} to.x=S(1) to.a=R how=whole with=extra,hidden,idle",
    f"mesh=2 x=5x2:S(0):{SMALL} a=4x3:S(1):{SMALL} b=3:-:{SMALL} to.x=R to.a=S(0) how=broadcast,apart with=extra,hidden,frozen",
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
    # behind what smoke tries: ranks that are not given anything wait
    f"mesh=2 x=2:S(0):{SMALL} a=2:R:{SMALL} how=broadcast",
)
WRAPPED = (
    f"mesh=2 x=5x2:-:{SMALL} a=4:-:{SMALL} b=3:-:int64 wrap=ddp with=extra,frozen",
    f"mesh=2 x=5x2:S(0):{SMALL} a=4:R:{SMALL} wrap=compile with=extra,hidden how=flat",
    f"mesh=2 x=5x2:-:{SMALL} a=4:-:{SMALL} to.x=S(0) to.a=R wrap=ddp-compile wrap.load=inside how=whole",
    f"mesh=2 x=5x2:-:{SMALL} a=4:-:{SMALL} wrap=inside wrap.load=compile-ddp how=broadcast,apart with=extra",
    f"mesh=2 x=5x2:-:{SMALL} a=4:-:{SMALL} wrap=ddp-inside wrap.load=ddp with=idle",
    f"mesh=3 x=7:S(0):{SMALL} a=4x3:S(1):{SMALL} wrap=none wrap.load=compile how=broadcast,apart,offload",
)
TIED = (
    f"mesh=2 x=5x2:S(0):{SMALL} a=4:R:{SMALL} with=tied",
    f"mesh=2 x=5x2:S(0):{SMALL} a=4:R:{SMALL} with=tied how=flat",
    f"mesh=2 x=7:S(0):{SMALL} a=4:R:{SMALL} to.x=R to.a=S(0) with=tied how=whole",
    f"mesh=3 x=2x4:S(0):{SMALL} a=4:R:{SMALL} to.x=S(1) with=tied,extra how=broadcast,apart groups=one",
    f"mesh=2 x=5x2:-:{SMALL} a=4:-:{SMALL} wrap=ddp with=tied",
    f"mesh=2 x=5x2:S(0):{SMALL} a=4:R:{SMALL} wrap=compile with=tied how=flat groups=one",
)
DEEP = (
    f"mesh=2 x=5x2:S(0):{SMALL} a=4:R:{SMALL} opt=deep",
    f"mesh=2 x=5x2:S(0):{SMALL} a=4x3:S(1):{SMALL} opt=deep how=flat",
    f"mesh=3 x=2x3:S(0):{SMALL} a=7:S(0):{SMALL} opt=deep how=flat groups=one",
    f"mesh=2 x=5x2:S(0):{SMALL} a=4:R:{SMALL} to.x=S(1) to.a=S(0) opt=deep how=whole",
    f"mesh=2 x=5x2:-:{SMALL} a=4:S(0):{SMALL} to.a=R opt=deep how=broadcast,apart",
    f"mesh=1 x=2:-:{SMALL} a=2:-:{SMALL} opt=deep how=flat",
)


def law(name: str, texts: tuple[str, ...], holds: str, *, behind: int = 0, **fields: Any) -> Law:
    """The law ``optimizer.NAME``, whose last texts, ``behind`` of them, smoke does not try."""
    return Law(
        id=f"optimizer.{name}",
        control=f"optimizer.{name} {holds}",
        sweep=listed(f"optimizer.{name}", *texts),
        sweeps=len(texts) - behind,
        narrow=shrunk,
        needs=("checkpoint", "object_collectives"),
        smallest=1,
        **{"check": check_together, "features": features, "script": together_scripts.together, **fields},
    )


LAWS = (
    law(
        "together",
        TOGETHER,
        f"mesh=2 x=4x2:S(0):{SMALL} a=2:R:{SMALL}",
        clause="The states of a model and of its optimizer, taken together and given together, make another model and optimizer the same.",
        source=f"{DOCS}, get_state_dict, set_state_dict; StateDictOptions",
        planted="optimizer_is_not_set_with_its_model",
        behind=1,
    ),
    law(
        "wrapped",
        WRAPPED,
        f"mesh=2 x=4x2:-:{SMALL} a=2:-:{SMALL} wrap=ddp",
        clause="Whatever is wrapped around a model, its names in both states are its own, and both fit one that is wrapped otherwise.",
        source=f"{DOCS}, get_state_dict: the keys are canonical FQNs; DDP, FSDP and any combination of parallelisms",
        planted="prefixes_of_wrappers_stay",
    ),
    law(
        "tied",
        TIED,
        f"mesh=2 x=4x2:S(0):{SMALL} a=2:R:{SMALL} with=tied",
        clause="A parameter under two names is in the state of its model under both, in that of its optimizer under the first.",
        source=f"{DOCS}, get_state_dict: canonical FQNs as returned by named_parameters",
        planted="tied_parameters_are_dropped",
    ),
    law(
        "deep",
        DEEP,
        f"mesh=2 x=4x2:S(0):{SMALL} a=2:R:{SMALL} opt=deep how=flat",
        clause="What an optimizer keeps in dicts within dicts comes back in them, from a flat state as well.",
        source=f"{DOCS}, StateDictOptions: flatten_optimizer_state_dict; arbitrary levels of nesting for optimizers like Shampoo",
        planted="inner_dicts_come_back_empty",
    ),
)
