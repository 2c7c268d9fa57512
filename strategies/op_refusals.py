"""Calls that an op must refuse: on tensors that do not go together, and calls that are invalid for plain tensors too."""

from __future__ import annotations

import re

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from shardlaw.reference.mesh import Mesh
from shardlaw.reference.placement import Placement, Placements, Replicate, Shard
from shardlaw.reference.tensors import TensorSpec
from shardlaw.strategies.meshes import palette_meshes
from shardlaw.strategies.ops import Sample

PAIR_CALLS = [
    "add(a,b)",
    "mul(b,a)",
    "mm(a,b)",
    "cat([a,b])",
    "stack([b,a])",
    "where(gt(a,0),a,b)",
    "maximum(a,b)",
    "eq(a,b)",
    "equal(a,b)",
    "a.add_(b)",
    "a.copy_(b)",
    "lerp(a,b,0.5)",
    "nn.functional.linear(a,b)",
    "_foreach_add([a],[b])",
    "addmm(b,a,a)",
    "gather(a,0,argsort(b,0))",
    "scatter(a,0,argsort(a,0),b)",
]
# of these, the ones in which a plain vector would broadcast
BROADCAST_CALLS = ["add(a,b)", "mul(b,a)", "where(gt(a,0),a,b)", "maximum(a,b)", "eq(a,b)", "a.add_(b)", "lerp(a,b,0.5)"]
# calls on a 4x6 tensor a and a 6x4 tensor b that are invalid for plain tensors
INVALID_CALLS = [
    "add(a,b)",
    "mm(a,a)",
    "cat([a,b],0)",
    "stack([a,b])",
    "sum(a,2)",
    "sum(a,-3)",
    "mean(a,(0,0))",
    "amax(a,5)",
    "nn.functional.softmax(a,2)",
    "cumsum(a,2)",
    "sort(a,3)",
    "view(a,(5,5))",
    "reshape(a,(7,))",
    "permute(a,(0,0))",
    "permute(a,(0,))",
    "transpose(a,0,2)",
    "unsqueeze(a,4)",
    "expand(a,(5,6))",
    "select(a,0,4)",
    "select(a,2,0)",
    "narrow(a,0,3,2)",
    "getitem(a,(0,0,0))",
    "split(a,(1,2),0)",
    "topk(a,7)",
    "bmm(a,b)",
    "a.add_(b)",
    "a.copy_(b)",
    "flip(a,(2,))",
    "roll(a,1,2)",
    "where(gt(a,0),a,b)",
    "nn.functional.layer_norm(a,(5,))",
    "addmm(a,b,a)",
    "dot(a,b)",
    "matmul(a,a)",
]
# calls on a 4x4 tensor a that name strides of the full tensor; in the first two it has them already
STRIDE_CALLS = [
    "as_strided(a,(4,4),(4,1))",
    "as_strided(a,(4,4),(4,1),0)",
    "as_strided(a,(4,4),(1,4))",
    "as_strided(a,(2,8),(8,1))",
    "as_strided(a,(16,),(1,))",
    "as_strided(a,(2,4),(4,1),8)",
    "x=t(a);as_strided(x,(4,4),(4,1))",
    "x=narrow(a,0,0,2);as_strided(x,(2,4),(4,1))",
    "x=narrow(a,0,0,2);as_strided(x,(2,4),(4,1),8)",
]
TWO_MESHES = [
    ("2", "2@1,0"),
    ("2", "3"),
    ("3", "2"),
    ("2", "1"),
    ("2", "2@0,2"),
    ("4", "2x2"),
    ("2x2", "2x2@0,2,1,3"),
    ("2x2", "2"),
]


def _meshes(world_size: int) -> list[Mesh]:
    return palette_meshes(("2", "3", "2x2"), world_size)


def _shards_or_replicas(mesh: Mesh, ndim: int) -> SearchStrategy[Placements]:
    return st.tuples(*(st.sampled_from([Replicate(), *map(Shard, range(ndim))]) for _ in mesh.shape))


@st.composite
def mixed_samples(draw: st.DrawFn, *, world_size: int = 4) -> Sample:
    """A sharded tensor and a plain one, one of them ``a`` and the other ``b``."""
    mesh = draw(st.sampled_from(_meshes(world_size)))
    if draw(st.integers(0, 3)) == 3:
        a, b = TensorSpec((4, 4), draw(_shards_or_replicas(mesh, 2))), TensorSpec((4,), None)
        return Sample(mesh, (("a", a), ("b", b)), draw(st.sampled_from(BROADCAST_CALLS)))
    steps = draw(st.sampled_from(PAIR_CALLS))
    specs = [TensorSpec((4, 4), draw(_shards_or_replicas(mesh, 2))), TensorSpec((4, 4), None)]
    a, b = specs if draw(st.booleans()) else reversed(specs)
    return Sample(mesh, (("a", a), ("b", b)), steps)


def samples_on_two_meshes(*, world_size: int = 4) -> SearchStrategy[tuple[Sample, Mesh]]:
    """Two tensors on different meshes; the second value is the mesh of ``b``."""
    parsed = [(Mesh.parse(mesh), Mesh.parse(other)) for mesh, other in TWO_MESHES]
    fitting = [pair for pair in parsed if all(max(mesh.ranks) < world_size for mesh in pair)]

    @st.composite
    def drawn(draw: st.DrawFn) -> tuple[Sample, Mesh]:
        mesh, other = draw(st.sampled_from(fitting))
        a, b = TensorSpec((4, 4), draw(_shards_or_replicas(mesh, 2))), TensorSpec((4, 4), draw(_shards_or_replicas(other, 2)))
        return Sample(mesh, (("a", a), ("b", b)), draw(st.sampled_from(PAIR_CALLS))), other

    return drawn()


@st.composite
def invalid_call_samples(draw: st.DrawFn, *, world_size: int = 4) -> Sample:
    """Sharded tensors and a call that the plain op refuses."""
    mesh = draw(st.sampled_from(_meshes(world_size)))
    steps = draw(st.sampled_from(INVALID_CALLS))
    a = TensorSpec((4, 6), draw(_shards_or_replicas(mesh, 2)))
    both = re.search(r"\bb\b", steps)
    return Sample(mesh, (("a", a), *([("b", TensorSpec((6, 4), draw(_shards_or_replicas(mesh, 2))))] if both else [])), steps)


def stride_call_samples() -> list[Sample]:
    """Each of :data:`STRIDE_CALLS` on replicated, sharded and pending tensors."""
    lies = [("2", "R"), ("2", "S(0)"), ("2", "S(1)"), ("2x2", "S(1),R"), ("2", "P(sum)")]
    tensors = [(Mesh.parse(mesh), TensorSpec.parse(f"4x4:{at}")) for mesh, at in lies]
    return [Sample(mesh, (("a", a),), steps) for steps in STRIDE_CALLS for mesh, a in tensors]


@st.composite
def unbind_samples(draw: st.DrawFn, *, world_size: int = 4) -> Sample:
    """``unbind`` along a sharded dim."""
    mesh = draw(st.sampled_from(_meshes(world_size)))
    shape = draw(st.sampled_from([(2, 3), (3, 2), (4, 2, 3)]))
    dim = draw(st.integers(0, len(shape) - 1))
    at = draw(st.integers(0, mesh.ndim - 1))
    either: list[Placement] = [Replicate(), Shard(dim)]
    placed = tuple(either[1] if i == at else draw(st.sampled_from(either)) for i in range(mesh.ndim))
    spoken = draw(st.sampled_from([dim, dim - len(shape)]))
    return Sample(mesh, (("a", TensorSpec(shape, placed)),), f"unbind(a,{spoken})")
