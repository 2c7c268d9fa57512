"""Chains of ops that have gradients, over two leaves."""

from __future__ import annotations

import re

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from shardlaw.reference.mesh import Mesh
from shardlaw.reference.placement import Partial, Placement, Placements, Replicate, Shard
from shardlaw.reference.tensors import TensorSpec
from shardlaw.strategies.op_gradients import SIZES, Backward, arrivals, meshes
from shardlaw.strategies.op_programs import NAMES, Value, chained, links
from shardlaw.strategies.ops import Sample

# ops without a gradient, or whose gradient is not settled where elements are equal or zero
APART = re.compile(r"^(sign|floor|to|abs|amax|amin|maximum|sqrt|linalg)\b|torch\.")


def gradient_programs(*, world_size: int = 4) -> SearchStrategy[Backward]:
    """Chains of two to four calls on a tensor ``a``, some of which take a second leaf ``b`` of the same shape or of its last dim.

    Shrinks to two calls on 2x2 tensors on the mesh ``2``.
    """
    fitting = [mesh for mesh in meshes(world_size) if mesh.ranks == tuple(range(mesh.size))]

    @st.composite
    def drawn(draw: st.DrawFn) -> Backward:
        mesh = draw(st.sampled_from(fitting))
        sizes = {"m": draw(st.sampled_from(SIZES)), "n": draw(st.sampled_from(SIZES))}
        x, a, b = Value("a", ("m", "n")), Value("a", ("m", "n")), Value("b", draw(st.sampled_from([("m", "n"), ("n",)])))
        calls = []
        for at in range(draw(st.integers(2, 4))):
            other = draw(st.sampled_from([b, a]))
            options = [link for link in links(x, other, mesh.ndim) if link.kind == "float" and not APART.search(link.call)]
            options = [link for link in options if len(other.dims) == 2 or not link.call.startswith("mm")]
            link = draw(st.sampled_from(options))
            calls.append(link.call.replace("{x}", x.name).replace("{a}", other.name))
            x = Value(NAMES[at] if at < len(NAMES) else "", link.dims, link.kind, link.exact)
        specs = [
            (v.name, TensorSpec(tuple(sizes[dim] for dim in v.dims), draw(_placed(mesh, len(v.dims))), "float32", "small")) for v in (a, b)
        ]
        steps = chained(calls)
        used = tuple((name, spec) for name, spec in specs if re.search(rf"\b{name}\b", steps))
        return Backward(Sample(mesh, used, steps), tuple(name for name, _ in used), draw(arrivals(mesh)))

    return drawn()


def _placed(mesh: Mesh, ndim: int) -> SearchStrategy[Placements]:
    shards = [Shard(dim) for dim in range(ndim)]
    singles: list[Placement] = [Replicate(), *shards, *shards, Partial("sum")]
    return st.tuples(*(st.sampled_from(singles) for _ in mesh.shape))
