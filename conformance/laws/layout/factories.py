"""Laws of DTensors that are made on a mesh from the start: the factories, defaults, and what is no layout."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
import torch.distributed.tensor as dtensor
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from shardlaw.conformance import compat
from shardlaw.conformance.law.act import fields, law, texts
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Either, Global, Of, Refused, caught
from shardlaw.conformance.law.fields import Seed, WordField
from shardlaw.conformance.law.law import Limits
from shardlaw.conformance.laws.layout.distribute import DOC, keeps_grad
from shardlaw.conformance.laws.shared import draws
from shardlaw.conformance.laws.shared.tensor_fields import DtypeOf, FullTensor, GlobalOf, PlacementsOf, ShapeOf
from shardlaw.reference import placement as reference
from shardlaw.reference.layout import Layout
from shardlaw.reference.mesh import Mesh

MAKERS = ("zeros", "ones", "full", "empty")
RANDOM = ("rand", "randn")
# the element that a factory fills with; of `full` what it is told here, of `empty` what is written afterwards
VALUES = {"zeros": 0, "ones": 1, "full": 7, "empty": 0}


def draw_factory(limits: Limits) -> SearchStrategy[Case]:
    def make(draw: st.DrawFn, layout: Layout) -> dict[str, Any]:
        return {"make": draw(st.sampled_from(MAKERS)), **keeps_grad(draw, layout)}

    return draws.tensor_cases(limits, dtypes=limits.dtypes, extra=make)


# the sizes one by one, of which there may be one alone, and in a list
SIZES = (
    "mesh=2 x=5:S(0) make=zeros sizes=apart",
    "mesh=2 x=5x3:S(1) make=ones sizes=apart",
    "mesh=2 x=5:S(0) make=empty sizes=listed",
    "mesh=2 x=5x3:S(0) make=full sizes=listed",
)


@law(
    "layout.factory",
    source=f"{DOC}, DTensor factory functions",
    control="mesh=2x2 x=5x6:S(0),S(1) make=full",
    draw=draw_factory,
    draws=90,
    sweep=texts(*SIZES),
    sweeps=len(SIZES),
    weight=0.5,
)
def factory(
    make: Literal["zeros", "ones", "full", "empty"],
    shape: ShapeOf,
    dtype: DtypeOf,
    mesh: DeviceMesh,
    placements: PlacementsOf,
    requires_grad: bool = False,
    sizes: Literal["whole", "apart", "listed"] = "whole",
):
    """zeros, ones, full and empty of a layout give each rank its slice of the plain tensor of this name, with its
    stride, in whatever form the sizes are given."""
    size = {"whole": (shape,), "apart": tuple(shape), "listed": ([*shape],)}[sizes]
    value = {"fill_value": 7} if make == "full" else {}
    grad = requires_grad and dtype.is_floating_point
    d = getattr(dtensor, make)(*size, **value, dtype=dtype, device_mesh=mesh, placements=placements, requires_grad=grad)
    if make == "empty":
        d.to_local().detach().fill_(0)
    return {"local": d, "requires_grad": d.requires_grad, "stride": tuple(d.stride())}


@factory.due
def _(x: GlobalOf, make, requires_grad=False):
    full = torch.full_like(x.full, VALUES[make])
    grad = requires_grad and x.full.dtype.is_floating_point
    return {"local": x.holding(full), "requires_grad": Of(grad), "stride": Of(full.stride())}


def draw_kinds(limits: Limits) -> SearchStrategy[Case]:
    def how(draw: st.DrawFn, layout: Layout) -> dict[str, Any]:
        return {"make": draw(st.sampled_from(MAKERS))}

    def chance(draw: st.DrawFn, layout: Layout) -> dict[str, Any]:
        return {"make": draw(st.sampled_from(RANDOM))}

    inside = [mesh for mesh in draws.meshes(limits, permuted=False) if mesh.size > max(mesh.ranks)]
    plain = draws.tensor_cases(limits, kinds=("S", "_S", "R"), min_dims=1, negative=True, extra=how)
    random = draws.tensor_cases(limits, on=inside, kinds=("R", "S"), min_dims=1, extra=chance)
    return st.one_of(plain, plain, random)  # four functions to two


def unlike(one: DTensor, again: DTensor, *, unit: bool) -> list[str]:
    """What does not hold of a random DTensor, and of another of the same seed; ``unit``: elements are from 0 to 1."""
    whole, local = one.full_tensor(), one.to_local()
    mine = distribute_tensor(whole, one.device_mesh, one.placements, src_data_rank=None).to_local()
    inside = (whole >= 0) & (whole < 1) if unit else whole.isfinite()
    holds = {
        "replicas agree": torch.equal(mine, local),
        "the seed gives the same again": torch.equal(again.to_local(), local),
        "elements are in range": bool(inside.all()),
        "few elements are all different": whole.numel() > 64 or whole.unique().numel() == whole.numel(),
    }
    return [name for name, held in holds.items() if not held]


@law(
    "layout.factory-kinds",
    source=f"{DOC}, DTensor factory functions (placements); torch.distributed.tensor._random, docstring of manual_seed",
    control="mesh=2x2 x=5x6:S(0),_S(1,2) make=full",
    features=lambda case: {"random"} if case.get("make") in RANDOM else set(),
    draw=draw_kinds,
    draws=80,
    weight=0.3,
)
def factory_kinds(
    make: Literal["zeros", "ones", "full", "empty", "rand", "randn"],
    shape: ShapeOf,
    mesh: DeviceMesh,
    placements: PlacementsOf,
    seed: Seed,
):
    """A factory takes strided shards and dims from either end; random ones agree on replicas and obey the seed, or are
    refused."""

    def made():
        value = {"fill_value": 7.0} if make == "full" else {}
        return getattr(dtensor, make)(shape, **value, device_mesh=mesh, placements=placements)

    if make in ("rand", "randn") and not compat.is_rng_supported_mesh(mesh):
        return {"refusal": caught(made), "unlike": []}
    if make in ("rand", "randn"):
        torch.manual_seed(seed + 1)
        one = made()
        torch.manual_seed(seed + 1)
        return {"refusal": "not due", "unlike": unlike(one, made(), unit=make == "rand")}
    d = made()
    if make == "empty":
        d.to_local().zero_()
    return {"local": d}


@factory_kinds.due
def _(x: GlobalOf, make):
    if make in RANDOM:
        return {"refusal": Either((Refused(), "not due")), "unlike": []}
    return {"local": x.holding(torch.full_like(x.full, VALUES[make]))}


def draw_context(limits: Limits) -> SearchStrategy[Case]:
    others = [mesh for mesh in map(Mesh.parse, ("2", "1x2", "3")) if mesh.size <= limits.world_size]

    def how(draw: st.DrawFn, layout: Layout) -> dict[str, Any]:
        inner = draw(st.sampled_from([None, None, *(other for other in others if other != layout.mesh)]))
        return {"how": draw(st.sampled_from(["distribute", "from_local", "zeros"])), "mesh__inner": inner}

    return draws.tensor_cases(limits, kinds=("R",), extra=how)


@law(
    "layout.context",
    source=f"{DOC}, distribute_tensor and DTensor.from_local (device_mesh, placements)",
    control="mesh=2 x=5x6:R how=from_local",
    draw=draw_context,
    draws=24,
    weight=0.2,
    needs=("broadcast",),
)
def context(
    x: FullTensor,
    mesh: DeviceMesh,
    how: Literal["distribute", "from_local", "zeros"],
    mesh__inner: DeviceMesh | None = None,
):
    """Inside a mesh's context the mesh is the default, and replication is the default placement; a context within
    another holds until it ends."""

    def made():
        return dtensor.zeros(x.shape) if how == "zeros" else makers[how](x)  # type: ignore[operator]

    makers = {"distribute": distribute_tensor, "from_local": DTensor.from_local}
    inner = None
    with mesh:
        if mesh__inner is not None:
            with mesh__inner:
                inner = made()
        outer = made()
    return {"inner": inner, "outer": outer}


@context.due
def _(x: Global, how, mesh__inner=None):
    whole = x.holding(torch.zeros_like(x.full)) if how == "zeros" else x
    return {
        "inner": mesh__inner and whole.under((reference.Replicate(),) * mesh__inner.ndim, mesh__inner),
        "outer": whole,
    }


# what is no layout: shape, placements on a 1-D mesh, placements on a 2-D mesh
ODD = {
    "dim-out": ("5x4", "S(2)", "R,S(2)"),
    "dim-far-out": ("5x4", "S(7)", "S(7),R"),
    "dim-far-below": ("5x4", "S(-3)", "R,S(-3)"),
    "strided-out": ("5x4", "_S(2,2)", "R,_S(2,2)"),
    "few": ("5x4", "", "S(0)"),
    "many": ("5x4", "S(0),R", "S(0),R,R"),
    "0-d": ("()", "S(0)", "R,S(0)"),
    "mixed-partial": ("5x4", "", "P(sum),P(max)"),
    "product": ("5x4", "P(product)", "R,P(product)"),
}
# how many of them, from the first on, each maker must refuse, and which calls with what is one are refused
HOWS = {"distribute": 9, "from_local": 8, "zeros": 7}
CALLS = (
    *("non-leaf", "other-placements", "other-mesh", "local-dtensor", "shape-alone", "stride-alone", "other-memory"),
    *("pending-shard", "pending-chunks", "unlike-shards"),
)


def sweep_refusals(limits: Limits) -> list[Case]:
    cases, meshes = [], [Mesh.parse(text) for text in ("2", "3", "1x2", "2x1", "2x2")]
    for how, count in HOWS.items():
        for attempt in [*ODD][:count]:
            shape, *by_ndim = ODD[attempt]
            placed = [(mesh, by_ndim[mesh.ndim - 1]) for mesh in meshes]
            cases += [fields(mesh=mesh, x=f"{shape}:{at}", how=how, attempt=attempt) for mesh, at in placed if at]
    cases += [fields(mesh=mesh, how="call", attempt=attempt) for attempt in CALLS for mesh in meshes]
    return [case for case in cases if case.world <= limits.world_size]


@law(
    "layout.refusals",
    source=f"{DOC}, distribute_tensor, DTensor.from_local and the factories (one placement for each mesh dim; Raises)",
    control="mesh=1x2 x=5x4:P(sum),P(max) how=from_local attempt=mixed-partial",
    sweep=sweep_refusals,
    sweeps=160,
    features=lambda case: {"from-local"} if case.get("how") == "from_local" else set(),
    weight=0.4,
)
def refusals(
    mesh: DeviceMesh,
    how: Literal["distribute", "from_local", "zeros", "call"],
    attempt: Annotated[str, WordField((*ODD, *CALLS))],
    shape: ShapeOf | None = None,
    placements: PlacementsOf | None = None,
):
    """Placements of a missing dim, too few or many, shards of a 0-d tensor, mixed reductions, shards that do not fit
    beside each other, and what a checkpoint would take of a pending tensor are refused on every rank."""
    at = [Shard(0)] + [Replicate()] * (mesh.ndim - 1)
    other = [Shard(1)] + [Replicate()] * (mesh.ndim - 1)
    x = torch.ones((4, 4) if shape is None else shape, device=mesh.device_type)

    def distributed():
        return distribute_tensor(torch.ones(4, 4, device=mesh.device_type), mesh, at, src_data_rank=None)

    def pending() -> Any:
        return DTensor.from_local(x, mesh, [Partial()] * mesh.ndim)

    calls = {
        "distribute": lambda: distribute_tensor(x, mesh, placements, src_data_rank=None),
        "from_local": lambda: DTensor.from_local(x, mesh, placements),
        "zeros": lambda: dtensor.zeros(shape, device_mesh=mesh, placements=placements),
        "non-leaf": lambda: distribute_tensor(x.requires_grad_() * 2, mesh, at),
        "other-placements": lambda: distribute_tensor(distributed(), mesh, other),
        "other-mesh": lambda: distribute_tensor(
            distributed(), DeviceMesh(mesh.device_type, mesh.mesh.flatten().flip(0).view(mesh.shape)), at
        ),
        "local-dtensor": lambda: DTensor.from_local(distributed(), mesh, at),
        "shape-alone": lambda: DTensor.from_local(x, mesh, at, shape=torch.Size((8, 4))),
        "stride-alone": lambda: DTensor.from_local(x, mesh, at, stride=(4, 1)),
        "other-memory": lambda: dtensor.zeros(4, 4, layout=torch.sparse_coo, device_mesh=mesh, placements=at),
        "pending-shard": lambda: pending().__get_tensor_shard__(MetadataIndex("x", torch.Size((0, 0)))),
        "unlike-shards": lambda: compat.global_tensor_shape(torch.Size((2, 3 + dist.get_rank())), mesh, at),
        "pending-chunks": lambda: pending().__create_chunk_list__(),
    }
    return caught(calls[attempt if how == "call" else how])


@refusals.due
def _():
    return Refused()
