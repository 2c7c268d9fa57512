"""Laws of experimental functions: implicit_replication, register_sharding, context_parallel, input_reshard."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Sequence
from functools import cache
from typing import Annotated, Any, Literal

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.experimental import context_parallel, implicit_replication, register_sharding

from shardlaw.conformance import compat
from shardlaw.conformance.law.act import fields, law, texts
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Claimed, Global, Near, Of, Refused, caught
from shardlaw.conformance.law.fields import Placements, Rank, Seed, Shape, WordField
from shardlaw.conformance.law.law import Limits
from shardlaw.conformance.laws.module.local_map import DOC, NEEDS
from shardlaw.conformance.laws.module.model_fields import uneven
from shardlaw.conformance.laws.module.styles import meshes_1d
from shardlaw.conformance.laws.shared import draws
from shardlaw.conformance.laws.shared.derived import operand
from shardlaw.reference.layout import Layout
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.notation import format_shape
from shardlaw.reference.placement import Replicate as R
from shardlaw.reference.placement import Shard as S
from shardlaw.reference.tensors import TensorSpec
from shardlaw.strategies import shapes
from shardlaw.strategies.modules import eighths, output_gradient
from shardlaw.strategies.placements import placements

# calls of a DTensor x and a plain tensor w
MIXED_CALLS: dict[str, Callable[[Any, Any], Any]] = {
    "add": lambda x, w: x + w,
    "from-the-left": lambda x, w: w - x,
    "mul": torch.mul,
    "maximum": torch.maximum,
    "where": lambda x, w: torch.where(w > 0, x, w),
    "matmul": lambda x, w: x @ w.t(),
    "equal": lambda x, w: x == w,
    "cat": lambda x, w: torch.cat([x, w]),
    "in-place": lambda x, w: x.add_(w),
    "lerp": lambda x, w: torch.lerp(x, w, 0.5),
}


def draw_implicit(limits: Limits) -> SearchStrategy[Case]:
    meshes = draws.meshes(limits, submeshes=False, permuted=False, min_size=2)

    @st.composite
    def case(draw: st.DrawFn) -> Case:
        mesh, call = draw(st.sampled_from(meshes)), draw(st.sampled_from(sorted(MIXED_CALLS)))
        # writing into a dim of size 1 that would be broadcast may be refused
        shape = draw(shapes(min_dims=2, max_dims=2, min_size=2 if call == "in-place" else 1))
        kinds = ("R", "S") if call == "in-place" else ("R", "S", "S", "P")
        at = draw(placements(mesh, 2, kinds=kinds))
        w_shape = draw(st.sampled_from([shape, shape, (1, shape[1])])) if call not in ("cat", "lerp") else shape
        x, w = TensorSpec(shape, at, "float64", "small"), TensorSpec(w_shape, None, "float64", "small")
        return fields(mesh=mesh, x=x, w=w, call=call, seed=draw(draws.seeds()))

    def writes_into_every_rank(case: Case) -> bool:
        """Writing into a tensor of which a rank has no element may be refused."""
        return case.get("call") != "in-place" or not operand(case).layout.empty_coords()

    return case().filter(writes_into_every_rank)


@law(
    "module.implicit-replication",
    source=f"{DOC}, implicit_replication",
    control="mesh=2 x=4x3:S(0):float64:small w=4x3:-:float64:small call=add",
    draw=draw_implicit,
    draws=12,
    cases=[f"mesh=2 x=4x3:S(0):float64:small w=4x3:-:float64:small call=add way={way}" for way in ("raised", "nested")],
    features=lambda case: {"implicit-replication", "plain-operand", f"way:{case.get('way', 'once')}"},
    needs=NEEDS,
    weight=0.2,
)
def implicit(
    x: DTensor,
    w: torch.Tensor,
    call: Annotated[str, WordField(MIXED_CALLS)],
    way: Literal["once", "raised", "nested"] = "once",
):
    """Within implicit_replication a plain tensor among DTensor operands counts as a replica; after the context it is
    refused again."""
    out = None
    if way == "raised":
        with contextlib.suppress(KeyError), implicit_replication():
            raise KeyError("a body that raises")
    else:
        with implicit_replication():
            if way == "nested":
                with implicit_replication():
                    pass
            out = MIXED_CALLS[call](x, w)
    plain = torch.ones(2, *w.shape, device=w.device)  # a tensor of one element would count as a scalar
    return {"out": out, "operand": x, "afterwards": caught(lambda: x + plain)}


@implicit.due
def _(x: Global, w: torch.Tensor, call: str, way: str):
    full = x.full.clone()
    out = Claimed(MIXED_CALLS[call](full, w), x.mesh, exact=False)  # a replica added to a pending sum is divided
    return {
        "out": None if way == "raised" else out,
        "operand": x.holding(full) if call == "in-place" else ...,
        "afterwards": Refused((RuntimeError,)),
    }


# Registered rules


def minus_max(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Each element minus the largest one along ``dim``, which no rank can compute from a shard of that dim."""
    return x - x.amax(dim, keepdim=True)


def sharding_rule(x: Any, dim: int, *, by_keyword: bool) -> list[tuple[list[Any], list[Any]]]:
    """The rule: replicas, or shards of any other dim. A dim that is passed by keyword is no input of the rule."""
    placements = [Replicate(), *(Shard(at) for at in range(x.ndim) if at != dim % x.ndim)]
    return [([at], [at] if by_keyword else [at, None]) for at in placements]


@cache
def registered_op(by_keyword: bool) -> Any:
    """The op, registered with its rule once in a process; ``by_keyword``: it takes its dim by keyword only."""
    name = "minus_max_by_keyword" if by_keyword else "minus_max"
    schema = f"(Tensor x, {'*, ' if by_keyword else ''}int dim) -> Tensor"
    op = torch.library.custom_op(f"shardlaw::{name}", minus_max, mutates_args=(), schema=schema)
    op.register_fake(lambda x, dim: torch.empty_like(x))
    overload = getattr(torch.ops.shardlaw, name).default
    if by_keyword:
        register_sharding(overload)(lambda x, *, dim: sharding_rule(x, dim, by_keyword=True))
        return lambda x, dim: overload(x, dim=dim)
    register_sharding(overload)(lambda x, dim: sharding_rule(x, dim, by_keyword=False))
    return overload


def unexpected_placements(out: DTensor, dim: int) -> list[str]:
    """The placements of a result that the rule does not allow."""
    others = [Shard(at) for at in range(out.ndim) if at != dim % out.ndim]
    return [str(at) for at in out.placements if at not in (Replicate(), *others)]


def draw_registered(limits: Limits) -> SearchStrategy[Case]:
    def extra(draw: st.DrawFn, layout: Layout) -> dict[str, Any]:
        ndim = len(layout.shape)
        return {"dim": draw(st.integers(-ndim, ndim - 1)), "by": draw(st.sampled_from([None, "name"]))}

    meshes = draws.meshes(limits, submeshes=False, permuted=False, min_size=2)
    cases = draws.tensor_cases(limits, kinds=("R", "S", "S", "P"), min_dims=1, on=meshes, extra=extra)
    return cases.filter(lambda case: 0 not in case.tensor("x").shape)


def features_registered(case: Case) -> set[str]:
    x, found = operand(case), {"registered-rule"} | ({"negative-dim"} if case.integer("dim") < 0 else set())
    dim = case.integer("dim") % x.full.ndim
    return found | (
        {"redistributed"} if any(isinstance(at, S) and at.dim == dim for at in x.layout.placements) else set()
    )


@law(
    "module.registered",
    source="torch.distributed.tensor.experimental docs, register_sharding",
    control="mesh=2 x=4x6:S(1) dim=1",
    draw=draw_registered,
    draws=20,
    # a plan that an earlier call made for another dim
    cases=("mesh=2 x=4x6:S(0) dim=0 by=name", "mesh=2x2 x=3x5:R,S(1) dim=-1 by=name"),
    features=features_registered,
    needs=("all_gather", "all_reduce", "all_to_all", "reduce_scatter"),
    weight=0.1,
)
def registered(x: DTensor, dim: int, by: Literal["place", "name"] = "place"):
    """An op with a registered rule has the dense result for any placements of its operand, in a placement that the rule
    allows, also after calls with other dims."""
    op = registered_op(by == "name")
    dims = [*(at for at in range(x.ndim) if at != dim % x.ndim), dim]
    outs = [op(x, at) for at in dims]
    return {"outs": outs, "ruled out": [unexpected_placements(out, at) for out, at in zip(outs, dims, strict=True)]}


@registered.due
def _(x: Global, dim: int):
    ndim = x.full.ndim
    dims = [*(at for at in range(ndim) if at != dim % ndim), dim]
    return {"outs": [Claimed(minus_max(x.full, at), x.mesh) for at in dims], "ruled out": Of([[]] * ndim)}


# Sequences


@st.composite
def draw_context(draw: st.DrawFn, limits: Limits) -> Case:
    mesh = draw(st.sampled_from(meshes_1d(limits)))
    shape = [draw(st.sampled_from([1, 2, 3])) for _ in range(draw(st.sampled_from([2, 3, 4])))]
    dim = min(draw(st.sampled_from([1, 1, 2])), len(shape) - 1)
    shape[dim] = mesh.size * draw(st.sampled_from([2, 4, 1, 3]))
    kept = draw(st.sampled_from([None, None, 1]))
    return fields(mesh=mesh, shape=format_shape(tuple(shape)), dim=dim, kept=kept, seed=draw(draws.seeds()))


def balanced_order(lengths: Sequence[int], ranks: int) -> torch.Tensor:
    """The positions of several documents in the order in which the load balancer assigns them: each rank gets one part
    from the head of each document, and one from as far before its tail."""
    starts = list(itertools.accumulate(lengths, initial=0))
    parts = [torch.arange(a, b).chunk(2 * ranks) for a, b in itertools.pairwise(starts)]
    return torch.cat([part[at] for rank in range(ranks) for part in parts for at in (rank, 2 * ranks - 1 - rank)])


@law(
    "module.context-parallel",
    source="torch.distributed.tensor.experimental docs, context_parallel; docstrings of _HeadTailLoadBalancer and "
    "_PerDocumentHeadTailLoadBalancer: slice_indices, per-document head-and-tail",
    control="mesh=2 shape=2x8x3 dim=1",
    draw=draw_context,
    draws=6,
    # two sequences of documents; sequences along the first dim; sequences too short to be balanced
    cases=(
        "mesh=2 shape=2x8x3 dim=1 documents=8x4 others=4x8",
        *(f"mesh=2 shape={shape} dim={dim}" for shape, dim in (("8x3", 0), ("4x2", 0), ("6x2", 0), ("1x2", 1))),
        # one document in each sequence; the gathered documents, whichever rank had which part
        "mesh=2 shape=2x8x3 dim=1 documents=8 others=8",
        "mesh=2 shape=2x8x3 dim=1 documents=8x4 others=4x8 back=1",
    ),
    features=lambda case: {"context-parallel"},
    needs=("all_gather",),
    weight=0.1,
)
def context(
    mesh: DeviceMesh,
    shape: Shape,
    dim: int,
    seed: Seed,
    kept: bool = False,
    documents: Shape | None = None,
    others: Shape | None = None,
    back: bool = False,
):
    """Within context_parallel buffers are sharded at the same positions, balanced from both ends of the sequence or of
    each document; they can be unsharded, and are restored after the context."""
    full = eighths(shape, seed).to(mesh.device_type)
    buffer, positions = full.clone(), torch.arange(shape[dim], device=mesh.device_type).reshape(1, -1)
    unrestored = {buffer} if kept else set()
    with context_parallel(mesh, buffers=[buffer, positions], buffer_seq_dims=[dim, 1], no_restore_buffers=unrestored):
        own_positions = positions.flatten().clone()
        share, same_positions = positions.numel(), torch.equal(buffer, full.index_select(dim, positions.flatten()))
        order, together = compat.context_parallel_unshard(mesh, [positions.clone(), buffer.clone()], [1, dim])
    unsharded = []
    if documents is not None and others is not None:  # two sequences with different documents
        balancer = compat.DocumentBalancer([[*documents], [*others]], mesh.size(), mesh.device_type)
        rows = torch.arange(2 * sum(documents), device=mesh.device_type).reshape(2, -1)
        shards = compat.context_parallel_shard(mesh, [rows], [1], balancer)
        unsharded = [shards[0].clone()] if not back else []
        unsharded += compat.context_parallel_unshard(mesh, shards, [1], balancer)
    return {
        "taken": own_positions,
        "pair": unsharded,
        "share": share,
        "alike": same_positions,
        "once": order.flatten(),
        "together": together,
        "steps afterwards": buffer.shape[dim],
        "restored": buffer,
        "positions": positions.flatten(),
    }


@context.due
def _(mesh: Mesh, shape, dim: int, seed: int, kept: bool, documents, others, back: bool, rank: Rank):
    full, order, share = eighths(shape, seed), torch.arange(shape[dim]), shape[dim] // mesh.size
    index, unsharded = mesh.ranks.index(rank), []
    if documents is not None and others is not None:
        rows = torch.arange(2 * sum(documents)).reshape(2, -1)
        own = [balanced_order(lengths, mesh.size).chunk(mesh.size)[index] for lengths in (documents, others)]
        unsharded = [torch.stack([row[at] for row, at in zip(rows, own, strict=True)]), rows][back:]
    return {
        "taken": balanced_order((shape[dim],), mesh.size).chunk(mesh.size)[index] if share % 2 == 0 else ...,
        "pair": unsharded,
        "share": Of(share, "wrong-layout"),
        "alike": True,
        "once": order,
        "together": full,
        "steps afterwards": Of(share if kept else shape[dim], "wrong-layout"),
        "restored": ... if kept else full,
        "positions": order,
    }


# Saved activations


@st.composite
def draw_input_reshard(draw: st.DrawFn, limits: Limits) -> Case:
    mesh = draw(st.sampled_from(meshes_1d(limits)))
    counts = st.sampled_from([mesh.size, 2 * mesh.size])
    dims, dim = format_shape((draw(counts), draw(counts))), draw(st.sampled_from([0, 1, 0, 1, None]))
    held = draw(st.sampled_from([None, None, R(), S(0)]))
    return fields(mesh=mesh, dims=dims, rows=draw(counts), dim=dim, held=held, seed=draw(draws.seeds()))


def features_input_reshard(case: Case) -> set[str]:
    sizes = case.shape("dims")
    sharded = (case.integer("rows"), sizes[1]) if case.integer("dim", 0) == 0 else sizes
    return {"module", "backward"} | uneven(sharded, case.mesh().size)


def tanh_layer(dims: Any, seed: int) -> nn.Sequential:
    """A linear layer with exact weights before a tanh."""
    net = nn.Sequential(nn.Linear(*dims, bias=False), nn.Tanh()).double()  # type: ignore[misc]
    net[0].weight.data = eighths((dims[1], dims[0]), seed)
    return net


@law(
    "module.input-reshard",
    source="torch.distributed.tensor.parallel.input_reshard, docstring",
    control="mesh=2 dims=4x2 rows=4 dim=0",
    draw=draw_input_reshard,
    draws=6,
    # DTensors, another dim, and activations that do not split evenly
    sweep=texts(
        "mesh=2 dims=4x2 rows=4 dim=1",
        "mesh=2 dims=4x2 rows=4 dim=0 held=R",
        "mesh=2 dims=4x2 rows=4 dim=1 held=R",
        "mesh=2 dims=4x2 rows=3 dim=0",
        "mesh=2 dims=3x2 rows=4 dim=1",
    ),
    sweeps=4,
    features=features_input_reshard,
    needs=("all_gather",),
    weight=0.1,
)
def input_reshard(
    mesh: DeviceMesh, dims: Shape, rows: int, seed: Seed, dim: int | None = None, held: Placements | None = None
):
    """Activations that are saved for the backward pass may be sharded along a dim until then: gradients are those of
    the unsharded model."""
    net = tanh_layer(dims, seed).to(mesh.device_type)
    compat.input_reshard(net, mesh, dim)
    x, grad = (
        full.to(mesh.device_type)
        for full in (eighths((rows, dims[0]), seed + 5), output_gradient((rows, dims[1]), seed))
    )
    if held is not None:  # DTensors: only replicated activations are sharded
        distribute_module(net, mesh)
        x, grad = (distribute_tensor(full, mesh, held) for full in (x, grad))
    out = net(x.requires_grad_())
    out.backward(grad)
    return {"forward": out, "input": x.grad, "weight": net[0].weight.grad}


@input_reshard.due
def _(mesh: Mesh, dims, rows: int, seed: int, held):
    net, x = tanh_layer(dims, seed), eighths((rows, dims[0]), seed + 5).requires_grad_()
    out = net(x)
    out.backward(output_gradient((rows, dims[1]), seed))
    want = {"forward": out.detach(), "input": x.grad, "weight": net[0].weight.grad}
    return {key: Near(full) if held is None else Claimed(full, mesh, exact=False) for key, full in want.items()}
