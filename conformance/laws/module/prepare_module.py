"""Laws of PrepareModuleInput, PrepareModuleOutput and both, and of what styles refuse."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

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
from shardlaw.conformance.laws.module.model_fields import NEEDS, uneven
from shardlaw.conformance.laws.module.styles import DOC, meshes_1d
from shardlaw.conformance.laws.shared import draws
from shardlaw.reference.notation import format_shape
from shardlaw.reference.placement import Partial, Placement
from shardlaw.reference.placement import Replicate as R
from shardlaw.reference.placement import Shard as S
from shardlaw.strategies.modules import eighths

CLASSES = {"input": "PrepareModuleInput", "output": "PrepareModuleOutput", "both": "PrepareModuleInputOutput"}


class Named(NamedTuple):
    """Two results with names."""

    first: Any
    second: Any


class Probe(nn.Module):
    """A module that returns its arguments, one of them as ``gives`` says, and stores them in ``received``."""

    received: tuple[Any, ...] = ()
    gives: str | None = None

    def forward(self, first: Any, second: Any = None, *, extra: Any = None) -> Any:
        self.received = (first, second, extra)
        if second is None:
            return (first,) if self.gives == "tuple" else first
        return Named(first, second) if self.gives == "named" else (first, second)


@dataclass(frozen=True)
class PrepareStyle:
    """A style that moves tensors from the placement ``source`` to ``target``. ``second``: whether there is a second
    positional tensor, and whether the style names its layout; ``named``: it comes by keyword and has no layout.
    ``extra``: whether a keyword argument is prepared too, or ``alone``. ``local``: prepared tensors become local ones.
    ``local_input``: the module gets local tensors."""

    side: str
    source: Placement
    target: Placement
    second: str
    extra: str
    local: bool
    local_input: bool

    @property
    def output(self) -> Placement:
        """The placement of the output. Where input and output are prepared, the output gets that of the input."""
        return self.target if self.side == "output" or isinstance(self.source, Partial) else self.source

    @property
    def argument(self) -> Style:
        def layouts(placement: Placement) -> Any:
            return {"plain": (placement, None), "alike": (placement, placement)}.get(self.second, placement)

        options: dict[str, Any] = {}
        if self.side != "output" and self.extra != "alone":
            options |= {"input_layouts": layouts(self.source), "desired_input_layouts": layouts(self.target)}
        if self.side != "output" and self.extra:
            options |= {
                "input_kwarg_layouts": {"extra": self.source},
                "desired_input_kwarg_layouts": {"extra": self.target},
            }
        if self.side == "output":
            options |= {"output_layouts": layouts(self.source), "desired_output_layouts": layouts(self.target)}
        if self.side == "both":
            options |= {
                "output_layouts": layouts(self.target),
                "desired_output_layouts": layouts(self.output),
                "use_local_input": self.local_input,
            }
        return style(CLASSES[self.side], **options, use_local_output=self.local)


def read_style(case: Case) -> PrepareStyle:
    side = WordField(CLASSES).parse(case.get("style"))
    second = WordField(("none", "plain", "alike", "named")).parse(case.get("beside", "none"))
    (source,), (target,) = case.placements("from"), case.placements("to")
    local_input = WordField(("sharded", "local")).parse(case.get("inside", "sharded")) == "local"
    return PrepareStyle(side, source, target, second, case.get("extra", ""), case.get("local") == "yes", local_input)


def read_inputs(case: Case) -> list[Any]:
    """The arguments of the module: a tensor, a second one or ``None``, and one by keyword or ``None``."""
    style, mesh = read_style(case), case.mesh()

    def tensor(number: int) -> DTensorValue | ByRank:
        full = eighths(case.shape("shape"), case.seed + 3 * number)
        return module_input(dtensor(mesh, full, style.source, seed=3), wrapped="wrapped" in case)

    second = {"none": None, "alike": tensor(1)}.get(style.second, torch.ones(3))
    return [tensor(0), second, tensor(2) if style.extra else None]


StyleArgument = Annotated[Any, FromCase(read_style, "style", "from", "to", "beside", "extra", "local", "inside")]
Inputs = Annotated[list[Any], FromCase(read_inputs, "shape", "wrapped")]
ByName = Annotated[bool, FromCase(lambda case: case.get("beside", "none") == "named")]


def prepared(
    style: StyleArgument,
    mesh: DeviceMesh,
    inputs: Inputs,
    by_name: ByName,
    gives: Literal["tuple", "named"] | None = None,
):
    """Tensors with a layout, positional or by keyword, are taken in it and moved to the desired layout; other arguments
    pass unchanged, and a tuple stays the tuple that it is."""
    probe, (first, second, extra) = Probe(), inputs
    probe.gives = gives
    parallelize_module(nn.ModuleDict({"probe": probe}), mesh, {"probe": style})
    by_position = [first] if second is None or by_name else [first, second]
    named = ({"second": second} if by_name else {}) | ({} if extra is None else {"extra": extra})
    out = probe(*by_position, **named)
    outs = [*out] if isinstance(out, tuple) else [out]
    passed = [received is given for received, given in zip(probe.received, inputs, strict=True)]
    got = {"met": [*probe.received], "passed": passed, "output": outs}
    return {**got, "returned": outs[-1] is second, "type": type(out).__name__}


def prepared_due(style: PrepareStyle, inputs: list[Any], gives: str | None, rank: Rank):
    def due(value: Any, placement: Placement, local: bool) -> Any:
        moved = value.under((placement,))
        return moved.local(rank) if local else moved

    side, alone, plain = style.side, style.extra == "alone", style.second in ("plain", "named")
    tensors = [value if isinstance(value, DTensorValue) else None for value in inputs]
    received: list[Any] = [...] * 3
    if side != "output":
        local = style.local_input if side == "both" else style.local
        received = [due(value, style.target, local) if value else ... for value in tensors]
        received = [..., ..., received[2]] if alone else received
    outs = [due(value, style.output, style.local) if value and side != "input" else ... for value in tensors[:2]]
    return {
        "met": received,
        "passed": [alone or ..., True if plain or (alone and inputs[1] is not None) else ..., ...],
        "output": outs[: 1 if inputs[1] is None else 2],
        "returned": plain or ...,
        "type": Of("Named" if gives == "named" else gives) if gives else ...,
    }


def features_prepare(case: Case) -> set[str]:
    (source,), (target,), shape = case.placements("from"), case.placements("to"), case.shape("shape")
    found = {"module", f"style:{CLASSES[case.get('style')]}"}
    found |= {"partial:sum"} if isinstance(source, Partial) else set()
    return found | uneven((shape[at.dim] for at in (source, target) if isinstance(at, S)), case.mesh().size)


@st.composite
def draw_prepare(draw: st.DrawFn, limits: Limits, side: str) -> Case:
    mesh, source = draw(st.sampled_from(meshes_1d(limits))), draw(st.sampled_from([S(0), S(1), R(), Partial("sum")]))
    target = draw(st.sampled_from([R(), S(0), S(1)]))
    wrapped = draw(st.sampled_from([None, 1]))
    shape = [draw(st.sampled_from([3, 5, 4, 6, 2])) for _ in range(2)]
    if not wrapped and isinstance(source, S):
        shape[source.dim] = mesh.size * draw(st.sampled_from([1, 2]))
    inside = draw(st.sampled_from([None, "local"])) if side == "both" else None
    if inside and isinstance(target, S):  # the global shape follows from the local one if shards are even
        shape[target.dim] = mesh.size * draw(st.sampled_from([1, 2]))
    extra = draw(st.sampled_from([None, 1, "alone"] if side == "input" else [None, 1])) if side != "output" else None
    values: dict[str, Any] = {"shape": format_shape(tuple(shape)), "from_": source, "to": target, "wrapped": wrapped}
    values |= {"local": draw(st.sampled_from(["no", "yes"])), "beside": draw(st.sampled_from([None, "plain", "alike"]))}
    return fields(mesh=mesh, style=side, **values, inside=inside, extra=extra, seed=draw(draws.seeds()))


CONTROLS = {
    "input": "mesh=2 style=input shape=4x3 from=S(0) to=R local=no beside=plain extra=1",
    "output": "mesh=2 style=output shape=4x3 from=R to=S(0) local=yes",
    "both": "mesh=2 style=both shape=4x3 from=S(0) to=R local=yes",
}
SWEEPS = {
    "input": ("mesh=2 style=input shape=4x3 from=S(0) to=R local=no beside=named extra=1",),  # one keyword has a layout
    "output": (
        "mesh=2 style=output shape=4x3 from=S(0) to=R local=yes gives=tuple",
        "mesh=2 style=output shape=4x3 from=S(0) to=R local=yes beside=alike gives=named",
    ),
    "both": ("mesh=2 style=both shape=4x3 from=S(0) to=R local=yes gives=tuple",),
}
LAWS = make_laws(
    prepared,
    prepared_due,
    {
        f"module.prepare[{side}]": {
            "control": control,
            "draw": partial(draw_prepare, side=side),
            "source": f"{DOC}, {CLASSES[side]}",
            "sweep": texts(*SWEEPS[side]),
            "sweeps": len(SWEEPS[side]),
        }
        for side, control in CONTROLS.items()
    },
    draws=8,
    features=features_prepare,
    needs=NEEDS,
    weight=0.1,
)


# Refusals

PAIR = (Replicate(), Replicate())


def apply(style: Any, mesh: DeviceMesh, module: nn.Module, *inputs: Any) -> Any:
    """Parallelise a module with a style, and call it if there are inputs."""
    parallel = parallelize_module(module.to(mesh.device_type), mesh, style)
    return parallel(*inputs) if inputs else parallel


def prepare_input(layouts: Any) -> PrepareModuleInput:
    return PrepareModuleInput(input_layouts=layouts, desired_input_layouts=layouts)


def prepare_output(layouts: Any) -> PrepareModuleOutput:
    return PrepareModuleOutput(output_layouts=layouts, desired_output_layouts=layouts)


REFUSED: dict[str, tuple[type[Exception], Callable[[DeviceMesh], Any]]] = {
    "colwise-norm": (NotImplementedError, lambda mesh: apply(ColwiseParallel(), mesh, nn.LayerNorm(6))),
    "rowwise-norm": (NotImplementedError, lambda mesh: apply(RowwiseParallel(), mesh, nn.LayerNorm(6))),
    "colwise-model": (NotImplementedError, lambda mesh: apply(ColwiseParallel(), mesh, nn.Sequential(nn.Linear(6, 6)))),
    "rowwise-model": (NotImplementedError, lambda mesh: apply(RowwiseParallel(), mesh, nn.Sequential(nn.Linear(6, 6)))),
    "sequence-of-list": (ValueError, lambda mesh: apply(SequenceParallel(), mesh, nn.LayerNorm(6), [1.0])),
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
    "prepare-list": (AssertionError, lambda mesh: apply(prepare_input(PAIR[0]), mesh, nn.ReLU(), [1.0])),
    "more-layouts-than-inputs": (ValueError, lambda mesh: apply(prepare_input(PAIR), mesh, nn.ReLU(), torch.ones(2))),
    "more-layouts-than-outputs": (ValueError, lambda mesh: apply(prepare_output(PAIR), mesh, nn.ReLU(), torch.ones(2))),
    "fewer-layouts-than-inputs": (
        ValueError,
        lambda mesh: apply(prepare_input(PAIR[0]), mesh, nn.PairwiseDistance(), torch.ones(2, 2), torch.ones(2, 2)),
    ),
    "fewer-layouts-than-outputs": (
        ValueError,
        lambda mesh: apply(prepare_output(PAIR[0]), mesh, nn.Identity(), (torch.ones(2), torch.ones(2))),
    ),
    "no-style": (TypeError, lambda mesh: apply(3, mesh, nn.Linear(6, 6))),
    "columns-alone": (
        RuntimeError,
        lambda mesh: apply(
            {"0": ColwiseParallel()},
            mesh,
            nn.Sequential(nn.Linear(6, 12), nn.Linear(12, 3)),
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
    cases=[f"mesh=2 attempt={attempt}" for attempt in ATTEMPTS],
    needs=("broadcast", "scatter"),
    weight=0.1,
)
def refusals(mesh: DeviceMesh, attempt: Annotated[str, WordField(ATTEMPTS)]):
    """Styles refuse modules and layouts that they do not support; a plan that names no module causes a warning."""
    if attempt in REFUSED:
        return {"refused": caught(lambda: REFUSED[attempt][1](mesh))}
    net = nn.Sequential(nn.Linear(6, 6)).to(mesh.device_type)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        got = parallelize_module(net, mesh, WARNED[attempt])
    sharded = [isinstance(parameter, DTensor) for parameter in net.parameters()]
    return {"warned": bool(warned), "unchanged": got is net and not any(sharded)}


@refusals.due
def _(attempt: str):
    if attempt in REFUSED:
        return {"refused": Refused((REFUSED[attempt][0],))}
    return {"warned": Of(True, "wrong-error"), "unchanged": True}
