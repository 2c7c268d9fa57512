"""Laws of the factory functions of DTensors, the default mesh, and invalid layouts that are refused."""

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
from shardlaw.conformance.laws.layout.distribute import DOC, REQUIRES_GRAD
from shardlaw.conformance.laws.shared import draws
from shardlaw.conformance.laws.shared.tensor_fields import DtypeOf, FullTensor, GlobalOf, PlacementsOf, ShapeOf
from shardlaw.reference import placement as reference
from shardlaw.reference.layout import Layout
from shardlaw.reference.mesh import Mesh

# the elements: of `full` its argument, of `empty` what the act writes
VALUES = {"zeros": 0, "ones": 1, "full": 7, "empty": 0}
# the ends between which elements are spaced evenly, or their logarithms to the base 2
ENDS = {"linspace": (-3, 5), "logspace": (0, 16)}
RANDOM = ("rand", "randn")


def draw_factory(limits: Limits) -> SearchStrategy[Case]:
    return draws.tensor_cases(limits, dtypes=limits.dtypes, extra={"make": st.sampled_from([*VALUES])} | REQUIRES_GRAD)


# the sizes as separate arguments and as a list
SIZES = (
    "mesh=2 x=5:S(0) make=zeros sizes=apart",
    "mesh=2 x=5x3:S(1) make=ones sizes=apart",
    "mesh=2 x=5:S(0) make=empty sizes=listed",
    "mesh=2 x=5x3:S(0) make=full sizes=listed",
)
# from torch 2.14 on; of 17 steps those of linspace are halves, and of 33 those of the logarithms
SPACED = (
    "mesh=2 x=17:S(0) make=linspace",
    "mesh=2x2 x=17:S(0),S(0):float64 make=logspace",
    "mesh=3 x=2:S(0) make=logspace requires_grad=yes",
    "mesh=3 x=17:R:int64 make=linspace",
    "mesh=2 x=17:S(0):int64 make=linspace",
    "mesh=2 x=33:S(0):int32 make=logspace",
    "mesh=2@0,2 x=17:S(0) make=linspace",
)
TRAINED = tuple(f"mesh=2 x=5:S(0) make={make} requires_grad=yes" for make in ("zeros", "ones", "empty"))
KNOWN = SIZES + (SPACED if compat.torch_release() >= (2, 14) else ()) + TRAINED


@law(
    "layout.factory",
    source=f"{DOC}, DTensor factory functions",
    control="mesh=2x2 x=5x6:S(0),S(1) make=full",
    draw=draw_factory,
    draws=90,
    sweep=texts(*KNOWN),
    sweeps=len(SIZES + SPACED + TRAINED),
    weight=0.5,
)
def factory(
    make: Literal["zeros", "ones", "full", "empty", "linspace", "logspace"],
    shape: ShapeOf,
    dtype: DtypeOf,
    mesh: DeviceMesh,
    placements: PlacementsOf,
    requires_grad: bool = False,
    sizes: Literal["whole", "apart", "listed"] = "whole",
):
    """zeros, ones, full, empty, linspace and logspace of torch.distributed.tensor give each rank its slice of what the
    function of that name in torch gives, with its stride, for sizes in any form."""
    size = {"whole": (shape,), "apart": tuple(shape), "listed": ([*shape],)}[sizes]
    size = (*ENDS[make], *shape) if make in ENDS else size
    value = {"full": {"fill_value": 7}, "logspace": {"base": 2}}.get(make, {})
    grad = requires_grad and dtype.is_floating_point
    d = getattr(dtensor, make)(*size, **value, dtype=dtype, device_mesh=mesh, placements=placements, requires_grad=grad)
    if make == "empty":
        d.to_local().detach().fill_(0)
    return {"local": d, "requires_grad": d.requires_grad, "stride": tuple(d.stride())}


@factory.due
def _(x: GlobalOf, make, requires_grad=False):
    if make in ENDS:
        base = {"base": 2.0} if make == "logspace" else {}
        full = getattr(torch, make)(*ENDS[make], *x.full.shape, **base, dtype=x.full.dtype)
    else:
        full = torch.full_like(x.full, VALUES[make])
    grad = requires_grad and x.full.dtype.is_floating_point
    return {"local": x.holding(full), "requires_grad": Of(grad), "stride": Of(full.stride())}


def draw_kinds(limits: Limits) -> SearchStrategy[Case]:
    every_rank = [mesh for mesh in draws.meshes(limits, permuted=False) if mesh.size > max(mesh.ranks)]
    constant, random = ({"make": st.sampled_from(names)} for names in ([*VALUES], RANDOM))
    plain = draws.tensor_cases(limits, kinds=("S", "_S", "R"), min_dims=1, negative=True, extra=constant)
    chance = draws.tensor_cases(limits, on=every_rank, kinds=("R", "S"), min_dims=1, extra=random)
    return st.one_of(plain, plain, chance)


def failed_checks(x: DTensor, repeated: DTensor, *, unit: bool) -> list[str]:
    """The checks that a random DTensor fails; ``repeated`` has the same seed. ``unit``: elements are in [0, 1)."""
    full, local = x.full_tensor(), x.to_local()
    own = distribute_tensor(full, x.device_mesh, x.placements, src_data_rank=None).to_local()
    in_range = (full >= 0) & (full < 1) if unit else full.isfinite()
    passed = {
        "replicas agree": torch.equal(own, local),
        "the seed gives the same again": torch.equal(repeated.to_local(), local),
        "elements are in range": bool(in_range.all()),
        "few elements are all different": full.numel() > 64 or full.unique().numel() == full.numel(),
    }
    return [name for name in passed if not passed[name]]


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
    """Factory functions take strided shards and negative dims; random ones give replicas the same elements and repeat
    them with the same seed, or are refused."""

    def make_dtensor():
        value = {"fill_value": 7.0} if make == "full" else {}
        return getattr(dtensor, make)(shape, **value, device_mesh=mesh, placements=placements)

    if make in ("rand", "randn") and not compat.is_rng_supported_mesh(mesh):
        return {"refusal": caught(make_dtensor), "unlike": []}
    if make in ("rand", "randn"):
        torch.manual_seed(seed + 1)
        x = make_dtensor()
        torch.manual_seed(seed + 1)
        return {"refusal": "not due", "unlike": failed_checks(x, make_dtensor(), unit=make == "rand")}
    d = make_dtensor()
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
    """Within the context of a mesh, that mesh is the default, and the default placement is Replicate; of nested
    contexts the inner one counts."""

    def make():
        return dtensor.zeros(x.shape) if how == "zeros" else functions[how](x)  # type: ignore[operator]

    functions = {"distribute": distribute_tensor, "from_local": DTensor.from_local}
    inner = None
    with mesh:
        if mesh__inner is not None:
            with mesh__inner:
                inner = make()
        outer = make()
    return {"inner": inner, "outer": outer}


@context.due
def _(x: Global, how, mesh__inner=None):
    outer = x.holding(torch.zeros_like(x.full)) if how == "zeros" else x
    return {
        "inner": mesh__inner and outer.under((reference.Replicate(),) * mesh__inner.ndim, mesh__inner),
        "outer": outer,
    }


# invalid layouts: shape, placements on a 1-D mesh, on a 2-D mesh, and on a 3-D mesh
INVALID = {
    "dim-out": ("5x4", "S(2)", "R,S(2)"),
    "dim-far-out": ("5x4", "S(7)", "S(7),R"),
    "dim-far-below": ("5x4", "S(-3)", "R,S(-3)"),
    "strided-out": ("5x4", "_S(2,2)", "R,_S(2,2)"),
    "few": ("5x4", "", "S(0)"),
    "many": ("5x4", "S(0),R", "S(0),R,R"),
    "0-d": ("()", "S(0)", "R,S(0)"),
    "mixed-partial": ("5x4", "", "P(sum),P(max)", "P(sum),P(avg),P(max)"),
    "product": ("5x4", "P(product)", "R,P(product)"),
}
# how many of them, from the first on, each function must refuse
REFUSED_COUNTS = {"distribute": 9, "from_local": 8, "zeros": 7}
# invalid calls with a valid layout
CALLS = (
    *("non-leaf", "other-placements", "other-mesh", "local-dtensor", "shape-alone", "stride-alone", "other-memory"),
    *("pending-shard", "pending-chunks", "unlike-shards", "unlike-rows"),
)


def sweep_refusals(limits: Limits) -> list[Case]:
    cases, meshes = [], [Mesh.parse(text) for text in ("2", "3", "1x2", "2x1", "2x2", "1x2x2")]
    for how, count in REFUSED_COUNTS.items():
        for attempt in [*INVALID][:count]:
            shape, *by_ndim = INVALID[attempt]
            layouts = [(mesh, by_ndim[mesh.ndim - 1]) for mesh in meshes if mesh.ndim <= len(by_ndim)]
            cases += [fields(mesh=mesh, x=f"{shape}:{at}", how=how, attempt=attempt) for mesh, at in layouts if at]
    cases += [fields(mesh=mesh, how="call", attempt=attempt) for attempt in CALLS for mesh in meshes if mesh.ndim < 3]
    return [case for case in cases if case.world <= limits.world_size]


@law(
    "layout.refusals",
    source=f"{DOC}, distribute_tensor, DTensor.from_local and the factories (one placement for each mesh dim; Raises)",
    control="mesh=1x2 x=5x4:P(sum),P(max) how=from_local attempt=mixed-partial",
    sweep=sweep_refusals,
    sweeps=168,
    features=lambda case: {"from-local"} if case.get("how") == "from_local" else set(),
    weight=0.4,
)
def refusals(
    mesh: DeviceMesh,
    how: Literal["distribute", "from_local", "zeros", "call"],
    attempt: Annotated[str, WordField((*INVALID, *CALLS))],
    shape: ShapeOf | None = None,
    placements: PlacementsOf | None = None,
):
    """Every rank refuses placements of a missing dim, too few or too many, shards of a 0-d tensor, mixed reductions,
    shards whose other dims differ, and chunks of a pending tensor for a checkpoint."""
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
        "unlike-rows": lambda: compat.global_tensor_shape(torch.Size((2 + dist.get_rank(), 3)), mesh, other),
        "pending-chunks": lambda: pending().__create_chunk_list__(),
    }
    return caught(calls[attempt if how == "call" else how])


@refusals.due
def _():
    return Refused()
