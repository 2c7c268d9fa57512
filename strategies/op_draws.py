"""Strategies for ops: samples of one op, and samples no larger than a given one."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from functools import cache
from zlib import crc32

from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument
from hypothesis.strategies import SearchStrategy

from shardlaw.reference.layout import Layout, LayoutError
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.placement import Partial, Placements, Replicate, Shard, StridedShard
from shardlaw.strategies._arguments import check_count
from shardlaw.strategies.meshes import palette_meshes
from shardlaw.strategies.op_operands import Choose, choose_by_number
from shardlaw.strategies.ops import Arg, Op, Sample, Variant, single_placements


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


SIZES = (2, 3, 4, 5, 1, 6, 7, 8, 0)
REDUCE_OPS = ("sum", "avg", "max", "min", "product")
# the plainest first, repeated by weight
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


# Dtypes that tables do not have, each with the dtype that a target must support for it to be tried. Half floats for ops that take bfloat16
# or are linear, short integers for ops that take int64, complex numbers for linear ops.
HALVES, SHORTS = {"float16": "bfloat16", "bfloat16": "bfloat16"}, {"int8": "int32", "int16": "int32"}
COMPLEX = {"complex64": "float32", "complex128": "float64"}
LINEAR = words(
    """abs neg square add sub mul div addcmul where masked_fill sum mean cumsum mm bmm matmul addmm baddbmm nn.functional.linear mv dot
    outer view reshape flatten unflatten permute transpose t movedim squeeze unsqueeze expand broadcast_to contiguous diagonal select
    narrow getitem split chunk tensor_split unbind gather take_along_dim index_select scatter index_add index_fill index_put setitem
    select_scatter slice_scatter cat stack hstack repeat tile flip roll tril triu diag diag_embed constant_pad_nd rot90 clone detach
    zeros_like ones_like new_zeros add.in-place sub.in-place mul.in-place copy.in-place exp sin cos tanh reciprocal"""
)
WRITES = re.compile(r"_\(|setitem|out=|(batch|instance)_norm")
CHOOSES = re.compile(r"\b(topk|sort|argsort|kthvalue|(nan)?median|mode)\(")  # which of equal elements is taken is not said
PAIRS = re.compile(r"view_as_complex\(")


def untabled_dtypes(op: Op, named: Collection[str], allowed: Collection[str]) -> tuple[str, ...]:
    """The dtypes that tables do not have and that the op takes, which has the dtypes ``named``. Complex and short ones, which few ops take,
    occur twice."""
    halves = HALVES if "bfloat16" in named or op.name in LINEAR else {}
    shorts = SHORTS if "int64" in named else {}
    found = {**halves, **shorts, **(COMPLEX if op.name in LINEAR and "float32" in named else {})}
    supported = tuple(dtype for dtype, base in found.items() if base in allowed)
    return supported + tuple(dtype for dtype in supported if dtype in COMPLEX or dtype in SHORTS)


def has_three_dims(variant: Variant) -> bool:
    """Whether one of its tensors has three dims or more."""
    return any(len(arg.dims) > 2 for arg in variant.args)


def unusual_memories(variants: Sequence[Variant]) -> tuple[str, ...]:
    """The memory layouts with which an op is tried, other than contiguous: none that repeats elements where it writes or takes any of
    equal elements, and only contiguous memory where it views pairs of elements."""
    if any(PAIRS.search(variant.call) for variant in variants):
        return ("plain",)
    expanded = ("expanded",) * (not any(WRITES.search(variant.call) or CHOOSES.search(variant.call) for variant in variants))
    return ("sliced", "transposed", *expanded, "offset", *("channels-last",) * (3 * any(map(has_three_dims, variants))))


def op_samples(op: Op, *, world_size: int = 4, dtypes: Sequence[str] | None = None) -> SearchStrategy[Sample]:
    """Any variant of ``op`` on tensors of sizes up to 8, on meshes of one and two dims, with any placements.

    Shrinks to the op's first variant with sizes of 2 on the mesh ``2``, everything replicated and float32.

    Raises ``InvalidArgument`` where no mesh fits into ``world_size`` ranks.
    """
    check_count("world_size", world_size, 1)
    meshes = op_meshes(op, world_size)
    if not meshes:
        raise InvalidArgument(f"world_size={world_size}: no mesh fits, want 2 or more")
    allowed = None if dtypes is None else frozenset(dtypes)

    @st.composite
    def drawn(draw: st.DrawFn) -> Sample:
        return choose_sample(op, lambda options: draw(st.sampled_from(options)), meshes, allowed)

    return drawn()


def op_meshes(op: Op, world_size: int) -> list[Mesh]:
    """The meshes on which an op is tried, the plainest first, repeated by weight."""
    return [mesh for mesh in palette_meshes(MESHES, world_size) if not (op.flat and mesh.ndim > 1)]


def choose_sample(
    op: Op, choose: Choose, meshes: Sequence[Mesh], allowed: Collection[str] | None, dtype: str = "", memory: str = ""
) -> Sample:
    """A sample of ``op``: its variant, mesh, sizes and placements by ``choose``, and dtype and memory where they are not given."""
    fits = [variant for variant in op.variants if memory != "channels-last" or has_three_dims(variant)]
    variant, mesh = choose(fits), choose(meshes)
    sizes = [size for size in SIZES if size or (op.zeros and not memory)]
    extents = variant.fits({name: choose(sizes) for name in variant.symbols})
    known = [name for name in variant.dtypes if allowed is None or name in allowed] or [variant.dtypes[0]]
    dtype = dtype or choose([known[0]] * (2 * len(known) - 1) + known[1:])
    placed = {arg.name: choose(_arg_placements(arg, dtype, mesh.ndim)) for arg in variant.args}
    return variant.sample(mesh, extents, placed, dtype, memory or choose(("plain",) * 9 + ("transposed",)))


def unusual_samples(op: Op, count: int, world_size: int, allowed: Collection[str]) -> list[Sample]:
    """``count`` samples of ``op``, alternately with a dtype that tables do not have and with memory that is not contiguous."""
    found = []
    for at in range(count):
        number = crc32(op.name.encode()) + at
        dtype, memory = choose_unusual(op, untabled_dtypes(op, op.dtypes, allowed) if number % 2 else (), number // 2)
        found.append(choose_sample(op, choose_by_number(number), op_meshes(op, world_size), allowed, dtype, memory))
    return found


def choose_unusual(op: Op, dtypes: Sequence[str], number: int) -> tuple[str, str]:
    """The dtype and the memory of an unusual sample: one of ``dtypes`` and contiguous memory, or without ``dtypes`` any (an empty text)
    and an unusual memory."""
    kinds = unusual_memories(op.variants)
    return (dtypes[number % len(dtypes)], "plain") if dtypes else ("", kinds[number % len(kinds)])


@cache
def _arg_placements(arg: Arg, dtype: str, mesh_ndim: int) -> list[Placements]:
    """Placements of one argument, by weight: mostly shards, no mixed reductions, on two mesh dims also a strided shard before its shard."""
    singles = single_placements(arg, dtype, REDUCE_OPS)
    shards = [single for single in singles if isinstance(single, Shard)]
    singles = [*singles[: len(shards) + 2], *shards, *singles[len(shards) + 2 :]]
    rows: list[Placements] = [(single,) for single in singles]
    for _ in range(mesh_ndim - 1):
        rows = [(*row, single) for row in rows for single in singles]
    found = [row for row in rows if len({p.op for p in row if isinstance(p, Partial)}) < 2]
    if mesh_ndim == 2:
        found += [(StridedShard(shard.dim, 2), shard) for shard in shards]
    return found


def samples_no_larger(op: Op, sample: Sample) -> SearchStrategy[Sample] | None:
    """Samples of the same variant with sizes and mesh dims that are no larger, and each placement the same or a replica.

    ``None`` when ``sample`` is not of ``op``. Shrinks to the smallest: the plain mesh of two ranks, everything replicated.
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

    return drawn().filter(_has_layouts)


def _simpler(placements: Placements, mesh_ndim: int) -> SearchStrategy[Placements]:
    """The placement or a replica for each mesh dim; on a mesh with fewer dims, any of the placements or a replica."""
    if len(placements) == mesh_ndim:
        return st.tuples(*(st.sampled_from(list(dict.fromkeys([Replicate(), placement]))) for placement in placements))
    singles = list(dict.fromkeys([Replicate(), *placements]))
    return st.tuples(*(st.sampled_from(singles) for _ in range(mesh_ndim)))


def _has_layouts(sample: Sample) -> bool:
    try:
        for _, spec in sample.tensors:
            Layout(spec.shape, sample.mesh, spec.placements or ())
    except LayoutError:
        return False
    return True
