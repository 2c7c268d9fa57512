"""Models of which a state has more than parameters in place, and the wrappers that may be around them: what the laws on both states try.

The tensors of a case are those of :class:`conformance.laws.roundtrip.model.Model`: the first at the top, the second in ``inner``, and so
on. ``with`` names what else the model has:

``tied``     a parameter ``head.weight`` that is the first one
``same``     the module ``inner`` once more, as ``outer.again``
``extra``    an extra state of ``inner``
``hidden``   a buffer in ``inner`` that is not part of its state
``renamed``  a module whose hooks take the name of what is inside of it out of its states, and which says so
``frozen``   the last parameter asks for no gradient
``idle``     the last parameter is not given to the optimizer
``hollow``   the optimizer has a last group without parameters
``scheduled``  its groups have an option that a scheduler added, as long as it is the saved one

``wrap`` is what the model is wrapped in: ``ddp``, ``compile``, ``ddp-compile`` (compiled outside), ``compile-ddp``, and ``inside`` or
``ddp-inside`` where that is done to ``inner`` alone.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from conformance import trip as t
from conformance.case import Case
from conformance.here import Here
from conformance.laws.roundtrip import model as m

EXTRA, OTHER_EXTRA = {"count": 3, "name": "saved"}, {"count": 4, "name": "other"}
HEAD, AGAIN, STATED, RENAMED = "head.weight", "outer.again.", "inner._extra_state", "kept.weight"
FEATURES = {
    "tied": "tied",
    "same": "module-twice",
    "extra": "extra-state",
    "hidden": "buffer-not-saved",
    "renamed": "renamed",
    "scheduled": "scheduled",
}


class Stating(nn.Module):
    """A module with an extra state."""

    extra: Any = None

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


class Renaming(nn.Module):
    """A module whose states call ``own.weight`` ``weight``."""

    def __init__(self, own: torch.Tensor) -> None:
        super().__init__()
        self.own = nn.Module()
        self.own.register_parameter("weight", nn.Parameter(own))
        hooked: Any = self
        hooked.register_state_dict_post_hook(Renaming.shorten)
        hooked.register_load_state_dict_pre_hook(Renaming.lengthen)

    def shorten(self, state: dict[str, Any], prefix: str, *_: Any) -> None:
        state[f"{prefix}weight"] = state.pop(f"{prefix}own.weight")

    def lengthen(self, state: dict[str, Any], prefix: str, *_: Any) -> None:
        if f"{prefix}weight" in state:
            state[f"{prefix}own.weight"] = state.pop(f"{prefix}weight")

    def _fqn_modifiers(self) -> dict[str, str]:
        return {"weight": "own"}


@dataclass(frozen=True)
class Net:
    """A model as it is wrapped, what it holds by canonical name, and which of that its optimizer is given."""

    outside: nn.Module
    held: dict[str, torch.Tensor]
    inner: nn.Module
    given: dict[str, nn.Parameter]

    def trained(self) -> dict[str, nn.Parameter]:
        return {path: parameter for path, parameter in self.given.items() if parameter.requires_grad}


def oddities(case: Case) -> set[str]:
    return {*case.get("with", "").split(",")} - {""}


def paths(case: Case, trip: t.Trip) -> dict[str, str]:
    """The tensor behind each name that the state of the model has, the extra state apart."""
    own = {path: name for name, path in m.names_in_model(trip).items()}
    first, odd = next(iter(trip.values)), oddities(case)
    if "same" in odd:
        own |= {path.replace(m.INNER, AGAIN, 1): name for path, name in own.items() if path.startswith(m.INNER)}
    return own | ({HEAD: first} if "tied" in odd else {}) | ({RENAMED: first} if "renamed" in odd else {})


def names(case: Case, trip: t.Trip) -> set[str]:
    """All names of the state of the model."""
    odd = oddities(case)
    stated = {STATED, *([f"{AGAIN}_extra_state"] if "same" in odd else [])} if "extra" in odd else set()
    return {*paths(case, trip)} | stated


def net_of(case: Case, here: Here, trip: t.Trip, end: t.End, wrap: str, *, poisoned: bool, blank: str = "") -> Net:
    """The model of one end on this rank; ``blank``: ``all`` or the ``first`` of its parameters have no memory."""
    odd = oddities(case)
    frozen = m.frozen_of(trip) if "frozen" in odd else []
    core: Any = m.model_of(trip, here, end, poisoned=poisoned, frozen=frozen)
    if "extra" in odd:
        core.inner.__class__ = Stating
        core.inner.extra = dict(OTHER_EXTRA if poisoned else EXTRA)
    if "hidden" in odd:
        core.inner.register_buffer("scratch", here.tensor(torch.full((3,), 2.0 if poisoned else 1.0)), persistent=False)
    first = next(iter(trip.values))
    if "tied" in odd:
        core.head = nn.Module()
        core.head.register_parameter("weight", getattr(core, first))
    if "same" in odd:
        core.outer = nn.Module()
        core.outer.again = core.inner
    if "renamed" in odd:
        core.kept = Renaming(t.placed(here, end, first, trip.due(end, first), t.poison if poisoned else torch.clone))
    if blank:
        for home, name in [(core, first)] if blank == "first" else [(one, name) for one in core.modules() for name in one._parameters]:
            tensor = home.get_parameter(name)
            home.register_parameter(name, nn.Parameter(tensor.detach().to("meta"), requires_grad=tensor.requires_grad))
    held = held_by(core)
    given = {path: parameter for path, parameter in core.named_parameters() if path != "kept.own.weight"}
    if "idle" in odd:
        given.pop([*given][-1])
    inner = core.inner
    return Net(wrapped(core, wrap), held, inner, given)


def held_by(core: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of a model around which nothing is wrapped, by the names of its state."""
    held = {**dict(core.named_parameters(remove_duplicate=False)), **dict(core.named_buffers(remove_duplicate=False))}
    return {path.replace(".own", ""): tensor for path, tensor in held.items()}


def wrapped(core: Any, wrap: str) -> nn.Module:
    """What stands around the model, or around the module inside of it."""
    if wrap in ("inside", "ddp-inside"):
        core.inner = wrapped(core.inner, "compile" if wrap == "inside" else "ddp")
        return core  # type: ignore[no-any-return]
    for how in reversed(wrap.split("-")) if wrap != "none" else ():
        core = DistributedDataParallel(core) if how == "ddp" else torch.compile(core, backend="eager")
    return core  # type: ignore[no-any-return]


def judge_net(case: Case, here: Here, trip: t.Trip, end: t.End, net: Net, check: str, *, spared: Collection[str] = ()) -> None:
    """Everything that is part of a state holds what was saved, everything else what it held; ``spared`` is still as it was."""
    for path, name in paths(case, trip).items():
        due = trip.due(end, name)
        held = net.held[path].detach()
        t.judge_tensor(here, held, t.poison(due) if path in spared else due, end.layout(name), place=path, check=check)
    odd = oddities(case)
    if "extra" in odd:
        got, want = net.inner.extra, OTHER_EXTRA if STATED in spared else EXTRA
        here.require(got == want, "wrong-value", check, "the extra state is not what it must be", want, got)
    if "hidden" in odd:
        here.same(net.held["inner.scratch"], torch.full((3,), 2.0), check, what="a buffer that is no part of a state")


def features(case: Case) -> set[str]:
    odd = oddities(case)
    found = {"module", *(FEATURES[word] for word in odd & {*FEATURES}), *({"frozen"} if "frozen" in odd else ())}
    found |= {"stateless"} if "idle" in odd else set()
    for field in ("wrap", "wrap.load"):
        found |= {f"way:{case.get(field)}"} if case.get(field, "none") != "none" else set()
    return found
