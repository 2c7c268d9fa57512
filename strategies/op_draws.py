"""Strategies for ops: samples of one op, and samples no larger than a given one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument
from hypothesis.strategies import SearchStrategy

from shardlaw.reference.layout import Layout, LayoutError
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.placement import Partial, Placements, Replicate, Shard, StridedShard
from shardlaw.strategies._arguments import check_count
from shardlaw.strategies.meshes import pool
from shardlaw.strategies.ops import Arg, Op, Sample, single_placements

SIZES = (2, 3, 4, 5, 1, 6, 7, 8, 0)
REDUCE_OPS = ("sum", "avg", "max", "min", "product")
# the plainest first, each as often as it is to be drawn
MESHES = (
    *("2",) * 9,
    *("3",) * 3,
    *("2x2",) * 5,
    "4",
    "1x2",
    "2@1,2",
    "2@1,0",
    "2x2@0,2,1,3",
)


def op_samples(op: Op, *, world_size: int = 4, dtypes: Sequence[str] | None = None) -> SearchStrategy[Sample]:
    """Any variant of ``op`` on tensors of any size up to 8, on meshes of one and two dims, in any placements.

    Shrinks to the op's first variant with sizes of 2 on the mesh ``2``, everything replicated and float32.

    Raises ``InvalidArgument`` where no mesh fits into ``world_size`` ranks.
    """
    check_count("world_size", world_size, 1)
    meshes = [mesh for mesh in pool(MESHES, world_size) if not (op.flat and mesh.ndim > 1)]
    if not meshes:
        raise InvalidArgument(f"world_size={world_size}: no mesh fits, want 2 or more")
    sizes = [size for size in SIZES if size or op.zeros]
    allowed = None if dtypes is None else frozenset(dtypes)

    @st.composite
    def drawn(draw: st.DrawFn) -> Sample:
        variant = draw(st.sampled_from(op.variants))
        mesh = draw(st.sampled_from(meshes))
        extents = variant.fits({name: draw(st.sampled_from(sizes)) for name in variant.symbols})
        fitting = [dtype for dtype in variant.dtypes if allowed is None or dtype in allowed] or [variant.dtypes[0]]
        dtype = draw(st.sampled_from((fitting[0],) * (2 * len(fitting) - 1) + tuple(fitting[1:])))
        placed = {arg.name: draw(_placements(arg, dtype, mesh.ndim)) for arg in variant.args}
        memory = draw(st.sampled_from(("plain",) * 9 + ("transposed",)))
        return variant.sample(mesh, extents, placed, dtype, memory)

    return drawn()


@cache
def _placements(arg: Arg, dtype: str, mesh_ndim: int) -> SearchStrategy[Placements]:
    """Placements of one argument: shards most often; reductions of one kind; now and then a strided shard beside its shard."""
    singles = single_placements(arg, dtype, REDUCE_OPS)
    shards = [single for single in singles if isinstance(single, Shard)]
    singles = [*singles[: len(shards) + 2], *shards, *singles[len(shards) + 2 :]]
    rows: list[Placements] = [(single,) for single in singles]
    for _ in range(mesh_ndim - 1):
        rows = [(*row, single) for row in rows for single in singles]
    kept = [row for row in rows if len({p.op for p in row if isinstance(p, Partial)}) < 2]
    if mesh_ndim == 2:
        kept += [(StridedShard(shard.dim, 2), shard) for shard in shards]
    return st.sampled_from(kept)


def no_larger(op: Op, sample: Sample) -> SearchStrategy[Sample] | None:
    """Samples of the same variant with no larger sizes, no more mesh dims, and placements that are the same or replicate.

    ``None`` when ``sample`` is no sample of ``op``. Shrinks to the smallest: the plain mesh of two ranks, everything replicated.
    """
    specs = dict(sample.tensors)
    found = op.find(specs, sample.steps)
    if found is None:
        return None
    variant, sizes = found
    least = dict(variant.least)
    ranges = {
        name: [size for size in SIZES if max(least.get(name, 0), not op.zeros) <= size <= max(size_now, 1)] or [size_now]
        for name, size_now in sizes.items()
    }
    meshes = list(dict.fromkeys([Mesh.of(2), *([Mesh.of(2, 2)] if sample.mesh.ndim > 1 else []), sample.mesh]))
    main = next((specs[arg.name].dtype for arg in variant.args if not arg.dtype), variant.dtypes[0])
    dtypes = list(dict.fromkeys([variant.dtypes[0], main]))
    memories = list(dict.fromkeys(["plain", *(spec.memory for spec in specs.values())]))

    @st.composite
    def drawn(draw: st.DrawFn) -> Sample:
        mesh = draw(st.sampled_from(meshes))
        extents = variant.fits({name: draw(st.sampled_from(ranges[name])) for name in variant.symbols})
        dtype = draw(st.sampled_from(dtypes))
        placed = {arg.name: draw(_simpler(specs[arg.name].placements or (), mesh.ndim)) for arg in variant.args}
        return variant.sample(mesh, extents, placed, dtype, draw(st.sampled_from(memories)))

    return drawn().filter(_means_something)


def _simpler(placements: Placements, mesh_ndim: int) -> SearchStrategy[Placements]:
    """The placements themselves or replicated ones, for each mesh dim; any one of them on a mesh of fewer dims."""
    if len(placements) == mesh_ndim:
        return st.tuples(*(st.sampled_from(list(dict.fromkeys([Replicate(), placement]))) for placement in placements))
    singles = list(dict.fromkeys([Replicate(), *placements]))
    return st.tuples(*(st.sampled_from(singles) for _ in range(mesh_ndim)))


def _means_something(sample: Sample) -> bool:
    try:
        for _, spec in sample.tensors:
            Layout(spec.shape, sample.mesh, spec.placements or ())
    except LayoutError:
        return False
    return True
