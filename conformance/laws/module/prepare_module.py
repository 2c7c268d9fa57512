"""Laws of the styles that prepare what goes into a module and what comes out of it, and of what no style takes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from shardlaw.conformance.law.act import fields, law, texts
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Of, Refused, caught
from shardlaw.conformance.law.fields import Rank, WordField
from shardlaw.conformance.law.law import Limits
from shardlaw.conformance.laws.module.arguments import (
    ByRank,
    DTensorValue,
    FromCase,
    Style,
    dtensor,
    make_laws,
    module_input,
    style,
)
from shardlaw.conformance.laws.module.model_fields import NEEDS
from shardlaw.conformance.laws.module.styles import DOC, lines
from shardlaw.conformance.laws.shared import draws
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.notation import format_shape
from shardlaw.reference.placement import Partial, Placement
from shardlaw.reference.placement import Replicate as R
from shardlaw.reference.placement import Shard as S
from shardlaw.strategies.modules import eighths

CLASSES = {"input": "PrepareModuleInput", "output": "PrepareModuleOutput", "both": "PrepareModuleInputOutput"}


class Probe(nn.Module):
    """A module that gives back what it is given, and keeps it."""

    met: tuple[Any, ...] = ()

    def forward(self, first: Any, second: Any = None, *, extra: Any = None) -> Any:
        self.met = (first, second, extra)
        return first if second is None else (first, second)


@dataclass(frozen=True)
class Prepared:
    """Which tensors a style prepares: those by position as ``beside`` and ``extra`` say, from a placement to
    another; ``local``: they leave as local tensors, ``inside``: and the module meets such."""

    side: str
    first: Placement
    last: Placement
    beside: str
    extra: str
    local: bool
    inside: bool

    @property
    def after(self) -> Placement:
        """How what comes out lies: where both sides are prepared, as it came in."""
        return self.last if self.side == "output" or isinstance(self.first, Partial) else self.first

    @property
    def argument(self) -> Style:
        def both(at: Placement) -> Any:
            return {"none": at, "plain": (at, None), "alike": (at, at)}[self.beside]

        options: dict[str, Any] = {}
        if self.side != "output" and self.extra != "alone":
            options |= {"input_layouts": both(self.first), "desired_input_layouts": both(self.last)}
        if self.side != "output" and self.extra:
            options |= {
                "input_kwarg_layouts": {"extra": self.first},
                "desired_input_kwarg_layouts": {"extra": self.last},
            }
        if self.side == "output":
            options |= {"output_layouts": both(self.first), "desired_output_layouts": both(self.last)}
        if self.side == "both":
            options |= {
                "output_layouts": both(self.last),
                "desired_output_layouts": both(self.after),
                "use_local_input": self.inside,
            }
        return style(CLASSES[self.side], **options, use_local_output=self.local)


def prepared_of(case: Case) -> Prepared:
    side, beside = (
        WordField(CLASSES).parse(case.get("style")),
        WordField(("none", "plain", "alike")).parse(case.get("beside", "none")),
    )
    (first,), (last,) = case.placements("from"), case.placements("to")
    inside = WordField(("sharded", "local")).parse(case.get("inside", "sharded")) == "local"
    return Prepared(side, first, last, beside, case.get("extra", ""), case.get("local") == "yes", inside)


def read_rank_batches(case: Case) -> list[Any]:
    """What a module is given: a tensor, one beside it or ``None``, one by name or ``None``."""
    asked, mesh = prepared_of(case), case.mesh()

    def tensor(at: int) -> DTensorValue | ByRank:
        full = eighths(case.shape("shape"), case.seed + 3 * at)
        return module_input(dtensor(mesh, full, asked.first, seed=3), wrapped="wrapped" in case)

    second = {"none": None, "plain": torch.ones(3), "alike": tensor(1)}[asked.beside]
    return [tensor(0), second, tensor(2) if asked.extra else None]


PreparedStyle = Annotated[Any, FromCase(prepared_of, "style", "from", "to", "beside", "extra", "local", "inside")]
Inputs = Annotated[list[Any], FromCase(read_rank_batches, "shape", "wrapped")]


def prepared(style: PreparedStyle, mesh: DeviceMesh, inputs: Inputs):
    """Tensors with a layout are taken as it says and laid out as desired, by position and by name; all else passes as
    it is."""
    probe, (first, second, extra) = Probe(), inputs
    parallelize_module(nn.ModuleDict({"probe": probe}), mesh, {"probe": style})
    by_position = [first] if second is None else [first, second]
    out = probe(*by_position) if extra is None else probe(*by_position, extra=extra)
    outs = [*out] if isinstance(out, tuple) else [out]
    passed = [met is given for met, given in zip(probe.met, inputs, strict=True)]
    return {"met": [*probe.met], "passed": passed, "output": outs, "returned": outs[-1] is second}


def prepared_due(style: Prepared, mesh: Mesh, inputs: list[Any], rank: Rank):
    def lies(whole: Any, at: Placement, local: bool) -> Any:
        laid = whole.under((at,))
        return laid.local(rank) if local else laid

    side, alone, plain = style.side, style.extra == "alone", style.beside == "plain"
    tensors = [one if isinstance(one, DTensorValue) else None for one in inputs]
    met: list[Any] = [...] * 3
    if side != "output":
        local = style.inside if side == "both" else style.local
        met = [lies(one, style.last, local) if one else ... for one in tensors]
        met = [..., ..., met[2]] if alone else met
    outs = [lies(one, style.after, style.local) if one and side != "input" else ... for one in tensors[:2]]
    return {
        "met": met,
        "passed": [alone or ..., True if plain or (alone and inputs[1] is not None) else ..., ...],
        "output": outs[: 1 if inputs[1] is None else 2],
        "returned": plain or ...,
    }


def features_prepare(case: Case) -> set[str]:
    first, last = (*case.placements("from"), *case.placements("to"))
    uneven = any(case.shape("shape")[at.dim] % case.mesh().size for at in (first, last) if isinstance(at, S))
    pending = {"partial:sum"} if isinstance(first, Partial) else set()
    return {"module", f"style:{CLASSES[case.get('style')]}"} | ({"uneven"} if uneven else set()) | pending


@st.composite
def draw_prepare(draw: st.DrawFn, limits: Limits, side: str) -> Case:
    mesh, first = draw(st.sampled_from(lines(limits))), draw(st.sampled_from([S(0), S(1), R(), Partial("sum")]))
    last = draw(st.sampled_from([R(), S(0), S(1)]))
    wrapped = draw(st.sampled_from([None, 1]))
    shape = [draw(st.sampled_from([3, 5, 4, 6, 2])) for _ in range(2)]
    if not wrapped and isinstance(first, S):
        shape[first.dim] = mesh.size * draw(st.sampled_from([1, 2]))
    inside = draw(st.sampled_from([None, "local"])) if side == "both" else None
    if inside and isinstance(last, S):  # local tensors come out of the module, whose whole is found from even shards
        shape[last.dim] = mesh.size * draw(st.sampled_from([1, 2]))
    extra = draw(st.sampled_from([None, 1, "alone"] if side == "input" else [None, 1])) if side != "output" else None
    said: dict[str, Any] = {"shape": format_shape(tuple(shape)), "from_": first, "to": last, "wrapped": wrapped}
    said |= {"local": draw(st.sampled_from(["no", "yes"])), "beside": draw(st.sampled_from([None, "plain", "alike"]))}
    return fields(mesh=mesh, style=side, **said, inside=inside, extra=extra, seed=draw(draws.seeds()))


CONTROLS = {
    "input": "mesh=2 style=input shape=4x3 from=S(0) to=R local=no beside=plain extra=1",
    "output": "mesh=2 style=output shape=4x3 from=R to=S(0) local=yes",
    "both": "mesh=2 style=both shape=4x3 from=S(0) to=R local=yes",
}
LAWS = make_laws(
    prepared,
    prepared_due,
    {
        f"module.prepare[{side}]": {
            "control": control,
            "draw": partial(draw_prepare, side=side),
            "source": f"{DOC}, {CLASSES[side]}",
        }
        for side, control in CONTROLS.items()
    },
    draws=8,
    features=features_prepare,
    needs=NEEDS,
    weight=0.1,
)


# What is refused

PAIR = (Replicate(), Replicate())


def called(module: nn.Module, mesh: DeviceMesh, style: Any, *inputs: Any) -> Any:
    """Parallelise a module, and call it if there is anything to call it with."""
    parallel = parallelize_module(module.to(mesh.device_type), mesh, style)
    return parallel(*inputs) if inputs else parallel


REFUSED: dict[str, tuple[type[Exception], Callable[[DeviceMesh], Any]]] = {
    "colwise-norm": (NotImplementedError, lambda mesh: called(nn.LayerNorm(6), mesh, ColwiseParallel())),
    "rowwise-norm": (NotImplementedError, lambda mesh: called(nn.LayerNorm(6), mesh, RowwiseParallel())),
    "colwise-model": (
        NotImplementedError,
        lambda mesh: called(nn.Sequential(nn.Linear(6, 6)), mesh, ColwiseParallel()),
    ),
    "rowwise-model": (
        NotImplementedError,
        lambda mesh: called(nn.Sequential(nn.Linear(6, 6)), mesh, RowwiseParallel()),
    ),
    "sequence-of-list": (ValueError, lambda mesh: called(nn.LayerNorm(6), mesh, SequenceParallel(), [1.0])),
    "no-desired-input": (AssertionError, lambda mesh: PrepareModuleInput(input_layouts=Replicate())),
    "fewer-desired-inputs": (
        AssertionError,
        lambda mesh: PrepareModuleInput(input_layouts=PAIR, desired_input_layouts=PAIR[:1]),
    ),
    "fewer-desired-outputs": (
        AssertionError,
        lambda mesh: PrepareModuleOutput(output_layouts=PAIR, desired_output_layouts=PAIR[:1]),
    ),
    "fewer-desired-by-name": (
        AssertionError,
        lambda mesh: PrepareModuleInput(input_kwarg_layouts={"a": Replicate()}, desired_input_kwarg_layouts={}),
    ),
    "prepare-list": (
        AssertionError,
        lambda mesh: called(
            nn.ReLU(), mesh, PrepareModuleInput(input_layouts=PAIR[0], desired_input_layouts=PAIR[0]), [1.0]
        ),
    ),
    "more-layouts-than-inputs": (
        ValueError,
        lambda mesh: called(
            nn.ReLU(), mesh, PrepareModuleInput(input_layouts=PAIR, desired_input_layouts=PAIR), torch.ones(2)
        ),
    ),
    "more-layouts-than-outputs": (
        ValueError,
        lambda mesh: called(
            nn.ReLU(), mesh, PrepareModuleOutput(output_layouts=PAIR, desired_output_layouts=PAIR), torch.ones(2)
        ),
    ),
    "fewer-layouts-than-inputs": (
        ValueError,
        lambda mesh: called(
            nn.PairwiseDistance(),
            mesh,
            PrepareModuleInput(input_layouts=PAIR[0], desired_input_layouts=PAIR[0]),
            torch.ones(2, 2),
            torch.ones(2, 2),
        ),
    ),
    "fewer-layouts-than-outputs": (
        ValueError,
        lambda mesh: called(
            nn.Identity(),
            mesh,
            PrepareModuleOutput(output_layouts=PAIR[0], desired_output_layouts=PAIR[0]),
            (torch.ones(2), torch.ones(2)),
        ),
    ),
    "no-style": (TypeError, lambda mesh: called(nn.Linear(6, 6), mesh, 3)),
    "columns-alone": (
        RuntimeError,
        lambda mesh: called(
            nn.Sequential(nn.Linear(6, 12), nn.Linear(12, 3)),
            mesh,
            {"0": ColwiseParallel()},
            torch.ones(5, 6, device=mesh.device_type),
        ),
    ),
}
WARNED: dict[str, Any] = {"unknown-name": {"1": ColwiseParallel()}, "no-plan": None}
ATTEMPTS = (*REFUSED, *WARNED)


@law(
    "module.refusals",
    source=f"{DOC}, the styles (supported modules, lengths of layouts) and parallelize_module",
    control="mesh=2 attempt=colwise-norm",
    sweep=texts(*(f"mesh=2 attempt={attempt}" for attempt in ATTEMPTS)),
    sweeps=len(ATTEMPTS),
    needs=("broadcast", "scatter"),
    weight=0.1,
)
def refusals(mesh: DeviceMesh, attempt: Annotated[str, WordField(ATTEMPTS)]):
    """Styles refuse modules that they do not take and layouts that do not pair up; a plan that names nothing is warned
    of."""
    if attempt in REFUSED:
        return {"refused": caught(lambda: REFUSED[attempt][1](mesh))}
    net = nn.Sequential(nn.Linear(6, 6)).to(mesh.device_type)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        got = parallelize_module(net, mesh, WARNED[attempt])
    sharded = [isinstance(parameter, DTensor) for parameter in net.parameters()]
    return {"warned": bool(warned), "unchanged": got is net and not any(sharded)}


@refusals.due
def _(mesh: Mesh, attempt: str):
    if attempt in REFUSED:
        return {"refused": Refused((REFUSED[attempt][0],))}
    return {"warned": Of(True, "wrong-error"), "unchanged": True}
