"""Laws of seeds on a mesh, of functions that initialise parameters, and of the generator offsets of shards."""

from __future__ import annotations

import itertools
import math
import warnings
from collections.abc import Callable
from typing import Annotated, Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardlaw.conformance import compat
from shardlaw.conformance.law.act import fields, law
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Alike, Global, Of, caught
from shardlaw.conformance.law.fields import Device, MeshTable, Seed, WordField
from shardlaw.conformance.law.law import Limits
from shardlaw.conformance.laws.rng.random_ops import DOC, meshes
from shardlaw.conformance.laws.shared import draws
from shardlaw.conformance.laws.shared.tensor_fields import DtypeOf, GlobalOf, PlacementsOf, ShapeOf, StrideOf
from shardlaw.reference.layout import Layout
from shardlaw.reference.mesh import Coord
from shardlaw.reference.placement import shard_dim
from shardlaw.reference.tensors import TensorSpec
from shardlaw.strategies import shapes
from shardlaw.strategies.placements import placements


def draw_seed(limits: Limits) -> SearchStrategy[Case]:
    mesh_list = draws.meshes(limits, permuted=False)
    return st.builds(lambda mesh, to: fields(mesh=mesh, to=to), st.sampled_from(mesh_list), st.integers(2, 60))


@law(
    "random.seed",
    source=f"{DOC}, docstring of manual_seed",
    control="mesh=2 to=7",
    features=lambda case: {"random"},
    draw=draw_seed,
    draws=8,
    weight=0.1,
)
def seeded(mesh: DeviceMesh, to: int):
    """manual_seed on a mesh seeds its ranks and raises on ranks outside, where the device supports random DTensors;
    elsewhere it warns and changes nothing."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        supported = compat.is_rng_supported_mesh(mesh)
        warned.clear()
        torch.manual_seed(to if supported else 1)
        due = torch.rand(4)
        torch.manual_seed(1)
        refusal = caught(lambda: compat.manual_seed(to, mesh))
        drawn = torch.rand(4)
    if supported and mesh.get_coordinate() is None:
        return {"refused": isinstance(refusal, RuntimeError), "seeded": True, "warned": True}
    return {"refused": refusal is None, "seeded": torch.equal(drawn, due), "warned": supported or bool(warned)}


@seeded.due
def _():
    return {"refused": Of(True, "wrong-error"), "seeded": True, "warned": Of(True, "wrong-error")}


# init functions with a certain result; random ones, with a bound that depends on fan out, fan in and receptive field
FIXED: dict[str, Callable[[Any], Any]] = {
    "zeros": nn.init.zeros_,
    "ones": nn.init.ones_,
    "constant": lambda x: nn.init.constant_(x, 2.5),
    "uniform": lambda x: nn.init.uniform_(x, 2.0, 2.0),
    "normal": lambda x: nn.init.normal_(x, 3.0, 0.0),
    "eye": nn.init.eye_,
    "dirac": nn.init.dirac_,
    "xavier-none": lambda x: nn.init.xavier_uniform_(x, 0.0),
}
BOUNDED: dict[str, tuple[Callable[[Any], Any], Callable[[int, int, int], float]]] = {
    "xavier-uniform": (nn.init.xavier_uniform_, lambda out, into, field: math.sqrt(6 / ((out + into) * field))),
    "kaiming-uniform": (
        lambda x: nn.init.kaiming_uniform_(x, math.sqrt(5)),
        lambda out, into, field: 1 / math.sqrt(into * field),
    ),
    "kaiming-out": (
        lambda x: nn.init.kaiming_uniform_(x, math.sqrt(5), "fan_out"),
        lambda out, into, field: 1 / math.sqrt(out * field),
    ),
    "uniform-some": (lambda x: nn.init.uniform_(x, -2.0, 2.0), lambda out, into, field: 2.0),
    "trunc-normal": (nn.init.trunc_normal_, lambda out, into, field: 2.0),
}


@st.composite
def draw_init(draw: st.DrawFn, limits: Limits) -> Case:
    often = (*FIXED, *BOUNDED, *BOUNDED)  # random functions are drawn more often
    any_dims = ("zeros", "ones", "constant", "uniform", "normal")
    mesh, call = draw(st.sampled_from(meshes(limits))), draw(st.sampled_from(often))
    least, most = (1, 3) if call in any_dims else (3, 3) if call == "dirac" else (2, 2)
    shape = draw(shapes(min_dims=least, max_dims=most, min_size=1))
    at = draw(placements(mesh, len(shape), kinds=("R", "S", "S")))
    other = draw(shapes(min_dims=len(shape), max_dims=len(shape), min_size=1))
    b = draw(st.sampled_from([None, None, None, TensorSpec(other, at)]))
    return fields(mesh=mesh, x=TensorSpec(shape, at), b=b, call=call, seed=draw(draws.seeds()))


def features_init(case: Case) -> set[str]:
    call = case.get("call")
    return {"random", "in-place", f"init:{call}"} | ({"certain"} if call in FIXED else set())


@law(
    "random.init",
    source="torch.nn.init; torch.distributed.tensor docs: a DTensor has the semantics of the global tensor",
    control="mesh=2 x=4x6:R call=ones",
    features=features_init,
    draw=draw_init,
    draws=40,
    needs=("all_gather",),
    refusal="allowed",
    weight=0.2,
)
def init(x: DTensor, call: Annotated[str, WordField((*FIXED, *BOUNDED))], seed: Seed, b: DTensor | None = None):
    """torch.nn.init gives a sharded parameter the dense values or bounds, and equal replicas, also after a call on
    another parameter."""
    parameter, shape = nn.Parameter(x.detach()), x.shape
    function = FIXED[call] if call in FIXED else BOUNDED[call][0]
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed + 1)
        if b is not None:
            function(nn.Parameter(b.detach()))
        result = function(parameter)
    if call in FIXED:
        return {"same": result is parameter, "values": parameter.detach()}
    out, into, *rest = *shape, 1
    most = BOUNDED[call][1](out, into, math.prod(rest)) * (1 + 1e-6)
    local = parameter.detach().to_local()  # type: ignore[attr-defined]
    return {
        "same": result is parameter and isinstance(parameter, DTensor) and parameter.requires_grad,
        "too large": local[local.abs() > most].tolist(),
        "nothing drawn": local.numel() > 8 and not local.any().item(),
        "replicas": parameter.detach().full_tensor(),  # type: ignore[attr-defined]
    }


@init.due
def _(x: Global, call):
    if call in FIXED:
        return {"same": Of(True), "values": x.holding(FIXED[call](x.full.clone()))}
    return {"same": Of(True), "too large": [], "nothing drawn": False, "replicas": Alike(x.mesh)}


START_OFFSET = 40  # of the generator before the op


def same_shard(layout: Layout, one: Coord, other: Coord) -> bool:
    """Whether two coordinates hold replicas of one shard."""
    return all(shard_dim(at) is None or a == b for at, a, b in zip(layout.placements, one, other, strict=True))


@law(
    "random.offsets",
    source=f"{DOC}, docstrings of OffsetBasedRNGTracker._set_pre_op_offset and _set_post_op_offset",
    control="mesh=2 x=5x6:S(0)",
    features=lambda case: {"random"},
    # seldom drawn: shards of one or two elements, and a dim that two mesh dims shard
    cases=("mesh=3 x=5:S(0)", "mesh=4 x=2x4:S(1)", "mesh=2x2 x=8x3:S(0),S(0)", "mesh=2x2 x=3x8:S(1),S(1)"),
    draw=lambda limits: draws.tensor_cases(
        limits, on=draws.meshes(limits, submeshes=False), kinds=("R", "S"), min_dims=1
    ),
    draws=40,
    weight=0.2,
)
def offsets(
    mesh: MeshTable, placements: PlacementsOf, shape: ShapeOf, stride: StrideOf, dtype: DtypeOf, device: Device
):
    """Different shards start at different offsets of the generator, in the order of their offsets in the tensor;
    replicas start at the same, and all ranks end at the same, as many numbers further on as the tensor has elements or
    more."""
    table, starts, states = torch.tensor(mesh), {}, {}
    for rank in table.flatten().tolist():
        rank_mesh = compat.mesh_for_rank(device.type, table, rank)
        spec = compat.DTensorSpec(rank_mesh, tuple(placements), tensor_meta=compat.TensorMeta(shape, stride, dtype))
        tracker = object.__new__(compat.OffsetBasedRNGTracker)
        starts[rank] = compat.rng_offsets(tracker, spec)
        state = compat.PhiloxState(torch.zeros(16, dtype=torch.uint8))
        state.offset = before = torch.tensor([START_OFFSET])
        compat.set_offset_before_op(tracker, state, spec)
        start = int(state.offset)
        compat.set_offset_after_op(tracker, state, spec, before)
        states[rank] = start - START_OFFSET, int(state.offset) - START_OFFSET
    ends = {end for _, end in starts.values()}
    pairs = [(a, starts[a][0] - starts[b][0], b) for a, b in itertools.combinations(starts, 2)]
    return {
        "states": states == starts,
        "in fours": all(at % 4 == 0 for pair in starts.values() for at in pair),
        "go on alike": len(ends) == 1,
        "advance": min(ends) >= shape.numel() and all(start >= 0 for start, _ in starts.values()),
        "starts": {f"rank {a} to {b}": (distance > 0) - (distance < 0) for a, distance, b in pairs},
    }


@offsets.due
def _(x: GlobalOf):
    layout, starts = x.layout, {}
    for one, other in itertools.combinations(layout.mesh.coords(), 2):
        here, there = layout.offset(one), layout.offset(other)
        order = (here > there) - (here < there)
        empty = 0 in (*layout.local_shape(one), *layout.local_shape(other))
        between = f"rank {layout.mesh.rank_at(one)} to {layout.mesh.rank_at(other)}"
        starts[between] = 0 if same_shard(layout, one, other) else ... if empty else order
    return {"states": True, "in fours": True, "go on alike": True, "advance": True, "starts": starts}
