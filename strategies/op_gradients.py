"""Samples for backward passes: ops that have gradients, the operands with ``requires_grad``, and the placements of the incoming gradient.

Operands are sharded, replicated or pending sums. What other reductions mean for a gradient is not documented.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from zlib import crc32

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from shardlaw.reference.layout import Layout
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.placement import Partial as Pending
from shardlaw.reference.placement import Placement, Placements, Replicate, Shard
from shardlaw.strategies.meshes import palette_meshes
from shardlaw.strategies.op_catalogue import OPS
from shardlaw.strategies.op_draws import COMPLEX, SHORTS, choose_unusual, has_three_dims, untabled_dtypes, words
from shardlaw.strategies.op_operands import choose_by_number
from shardlaw.strategies.op_sweep import EVEN, SHORT, SQUARE, SQUARE_EVEN, THREE, UNEVEN, LazySequence, row_sample
from shardlaw.strategies.ops import Arg, Op, Sample, Variant, single_placements

FLOATS = ("float32", "float64")
ALLOWED = ("float32", "float64", "bfloat16")
REAL = frozenset({"select_scatter"})  # torch refuses their gradients for complex results
SIZES = (2, 3, 4, 5, 1, 6, 7)
MESHES = (*("2",) * 6, *("3",) * 2, *("2x2",) * 2, "2@1,2")
MESH_SIZES = (UNEVEN, SQUARE, SHORT, EVEN, UNEVEN, THREE, UNEVEN, SQUARE_EVEN, UNEVEN)
# cases of an op for each of its variants
ROUNDS = 60


WITHOUT_GRADIENT = words(
    """signbit isnan isfinite isposinf logical_not bitwise_not floor_divide heaviside gcd lcm eq ne lt le gt ge logical_and logical_or
    logical_xor bitwise_and bitwise_or bitwise_xor bitwise_left_shift isclose type_as argmax argmin any all count_nonzero equal item
    histc argsort view.dtype setitem bucketize nn.functional.one_hot full_like new_zeros new_full detach zeros_like ones_like
    empty_like nextafter foreach.in-place.lists scatter.longer"""
)
# It is not documented which element gets the gradient, or how it is computed for all inputs (the gradient of sinc is a sum of far larger
# contributions). Of masks, and of convolutions in any layout, most cases give no result.
UNSETTLED = frozenset(
    ["sinc", "mode", "index_reduce", "linalg.det", "sgn", "index_put.masks", "nn.functional.conv1d.layouts", "nn.functional.conv2d.layouts"]
)
# ops that fail on an empty shard, which forward laws cover
NEVER_EMPTY = re.compile(r"amax|amin|max|min|pool|interpolate|batch_norm|inf$|foreach_norm|median|kthvalue")
# losses that are not differentiable for equal operands
KINKED = words("nn.functional.margin_ranking_loss")
CONSTANT_CALLS = re.compile(r"squeeze_\(|expand_as|^(eq|lt)\(|^_foreach_\w+\(\[a,b\],c\)|torch\.(int|bool)|vector_norm\(a,0[,)]")
CONSTANT_ARGS = {
    **dict.fromkeys(("nn.functional.batch_norm", "nn.functional.batch_norm.training", "nn.functional.instance_norm"), "uv"),
    **dict.fromkeys(("nn.functional.nll_loss", "nn.functional.nll_loss.options", "nn.functional.nll_loss.weights"), "w"),
    **dict.fromkeys(("nn.functional.cross_entropy", "nn.functional.cross_entropy.options"), "w"),
}
# equal elements share the gradient evenly, as the documentation of amax says; along a dim max and min choose one
SHARES_GRADIENT = re.compile(r"^(amax|amin|maximum|minimum)\(|^(max|min)\(a\)$")
PICKS_ELEMENT = re.compile(r"^(max|min)\(a,")


@dataclass(frozen=True)
class Backward:
    """A sample, the operands whose gradients are compared, and the placements of the incoming gradient (``None``: those of the result)."""

    sample: Sample
    wrt: tuple[str, ...]
    arrives: Placements | None


@lru_cache(maxsize=1024)
def differentiable_variants(op: Op) -> tuple[Variant, ...]:
    """The variants of ``op`` that have gradients; also those with equal elements, where the gradient is documented for them."""
    if op.name in WITHOUT_GRADIENT | UNSETTLED or "in-place" in op.name:
        return ()
    variants = [
        _float_variant(variant) for variant in op.variants if not CONSTANT_CALLS.search(variant.call) and _differentiable_args(op, variant)
    ]
    settled = [variant for variant in variants if variant.fill != "ties" or not PICKS_ELEMENT.match(variant.call)]
    return (*settled, *(replace(variant, fill="ties") for variant in settled if SHARES_GRADIENT.match(variant.call)))


def _float_variant(variant: Variant) -> Variant:
    return replace(variant, dtypes=tuple(dtype for dtype in variant.dtypes if dtype in FLOATS) or ("float32",))


def _differentiable_args(op: Op, variant: Variant) -> tuple[str, ...]:
    """The arguments that can have a gradient."""
    floats = set(variant.dtypes) & set(FLOATS)
    names = [arg.name for arg in variant.args if (arg.dtype in FLOATS if arg.dtype else floats)]
    return tuple(name for name in names if name not in CONSTANT_ARGS.get(op.name, "") and re.search(rf"\b{name}\b", variant.call))


DIFFERENTIABLE: dict[str, Op] = {name: op for name, op in OPS.items() if differentiable_variants(op)}


def has_settled_gradient(op: Op, sample: Sample) -> bool:
    """Whether the gradient is defined on this sample: no empty shard for an op that fails on them, and no mesh dim of three for a loss with
    a kink, since a replica beside a pending sum then becomes thirds, which round."""
    if op.name in KINKED and 3 in sample.mesh.shape:
        return False
    if not NEVER_EMPTY.search(op.name):
        return True
    return not any(Layout(spec.shape, sample.mesh, spec.placements or ()).empty_coords() for _, spec in sample.tensors)


class GradientSweep(LazySequence[Backward]):
    """Cases of one op in a fixed order: every variant in turn, each time on another mesh and with other sizes, in other placements."""

    def __init__(self, op: Op, world_size: int = 4, leaves: Mapping[Variant, tuple[str, ...]] | None = None) -> None:
        """``leaves``: the differentiable operands by variant, for an op that is in no table."""
        self.op = op
        self.leaves = (
            leaves if leaves is not None else {variant: _differentiable_args(op, variant) for variant in differentiable_variants(op)}
        )
        self.variants = tuple(self.leaves)
        self.size_choices = [
            mesh_sizes
            for mesh_sizes in MESH_SIZES
            if max(mesh_sizes.mesh.ranks) < world_size and not (op.flat and mesh_sizes.mesh.ndim > 1)
        ]

    def __len__(self) -> int:
        return len(self.variants) * ROUNDS

    def item(self, at: int) -> Backward:
        turn, which = divmod(at, len(self.variants))
        variant, mesh_sizes = self.variants[which], self.size_choices[(at + turn) % len(self.size_choices)]
        dtype = variant.dtypes[-1] if at % 7 == 6 else variant.dtypes[0]
        sample = row_sample(variant, mesh_sizes, turn + which, (at + turn) % 3, dtype, _gradient_placements)
        if not has_settled_gradient(self.op, sample):
            mesh_sizes = EVEN
            sample = row_sample(variant, mesh_sizes, turn + which, (at + turn) % 3, dtype, _gradient_placements)
        names = self.leaves[variant]
        alone = len(names) > 1 and at % 4 == 3
        return Backward(
            sample, names[at % len(names) :][:1] if alone else names, _incoming_placements(mesh_sizes.mesh, (2 * at + turn) % 5)
        )


def plainest(op: Op) -> Backward:
    """The first variant of an op with sizes of 2 or 3, everything replicated on the mesh ``2``."""
    variant = differentiable_variants(op)[0]
    sizes = variant.fits(dict.fromkeys(variant.symbols, 2))
    sample = variant.sample(Mesh.of(2), sizes, {arg.name: (Replicate(),) for arg in variant.args}, variant.dtypes[0])
    return Backward(sample, _differentiable_args(op, variant)[:1], None)


def pending_incoming(op: Op) -> Backward:
    """The sample of :func:`plainest` with a pending sum as the incoming gradient, to all differentiable operands: what is linear in the
    gradient may leave its result pending."""
    return replace(plainest(op), wrt=_differentiable_args(op, differentiable_variants(op)[0]), arrives=(Pending("sum"),))


def _gradient_placements(arg: Arg, dtype: str) -> list[Placement]:
    """The shards of an argument, a pending sum where it can have one, the shards again, and a replica."""
    replica, *others = single_placements(arg, dtype)
    shards = [placement for placement in others if isinstance(placement, Shard)]
    return [*shards, *([] if arg.dtype else others[len(shards) :]), *shards, replica]


def _incoming_placements(mesh: Mesh, choice: int) -> Placements | None:
    """The result's own placements for choice 0; else replicated, sharded on dim 0 or 1, or pending on the first mesh dim, the next of these
    on each further one."""
    line: list[Placement] = [Replicate(), Shard(0), Shard(1), Pending("sum")]
    return None if not choice else tuple(line[(choice - 1 + at) % len(line)] for at in range(mesh.ndim))


def incoming_options(mesh: Mesh) -> list[Placements | None]:
    """Placements of an incoming gradient; half of them are ``None``, the result's own."""
    singles: list[Placement] = [Replicate(), Shard(0), Shard(1), Pending("sum")]
    rows = itertools.product(singles, repeat=mesh.ndim)
    found = [row for row in rows if sum(isinstance(p, Pending) for p in row) < 3]
    return [*[None] * len(found), *found]


def gradient_meshes(op: Op, world_size: int) -> list[Mesh]:
    """The meshes on which gradients of an op are tried, by weight."""
    return [mesh for mesh in palette_meshes(MESHES, world_size) if not (op.flat and mesh.ndim > 1)]


def unusual_gradient(op: Op, world_size: int) -> list[Backward]:
    """One sample of ``op`` with a dtype that its table lacks, or with memory that is not contiguous; none where it has no gradient."""
    number = crc32(op.name.encode())
    rare = untabled_dtypes(op, OPS[op.name].dtypes, ALLOWED) if number % 5 else ()
    known = [dtype for dtype in rare if dtype not in SHORTS and not (dtype in COMPLEX and op.name in REAL)]
    dtype, memory = choose_unusual(op, known, number // 5)
    choose = choose_by_number(number)
    fits = [
        variant for variant in differentiable_variants(op) if memory != "channels-last" or has_three_dims(variant)
    ] or differentiable_variants(op)
    variant = choose(fits)
    mesh = choose(gradient_meshes(op, world_size))
    extents = variant.fits({name: choose(SIZES) for name in variant.symbols})
    dtype = dtype or variant.dtypes[0]
    placed = {arg.name: tuple(choose(_gradient_placements(arg, dtype)) for _ in mesh.shape) for arg in variant.args}
    found = Backward(
        variant.sample(mesh, extents, placed, dtype, memory), _differentiable_args(op, variant), choose(incoming_options(mesh))
    )
    return [found] if has_settled_gradient(op, found.sample) else []


def gradient_samples(op: Op, *, world_size: int = 4) -> SearchStrategy[Backward]:
    """Any variant of ``op`` that has gradients, on tensors of sizes up to 7.

    Shrinks to the first variant with sizes of 2 on the mesh ``2``, everything replicated, all gradients wanted, the incoming one in the
    result's own placements.
    """
    meshes = gradient_meshes(op, world_size)

    @st.composite
    def drawn(draw: st.DrawFn) -> Backward:
        variant = draw(st.sampled_from(differentiable_variants(op)))
        mesh = draw(st.sampled_from(meshes))
        extents = variant.fits({name: draw(st.sampled_from(SIZES)) for name in variant.symbols})
        dtype = draw(st.sampled_from((variant.dtypes[0],) * 3 + variant.dtypes))
        placed = {}
        for arg in variant.args:
            replica, *others = _gradient_placements(arg, dtype)[::-1]
            placed[arg.name] = tuple(draw(st.sampled_from([replica, *others])) for _ in mesh.shape)
        names = _differentiable_args(op, variant)
        wrt = draw(st.sampled_from([names, names, *((name,) for name in names)]))
        return Backward(variant.sample(mesh, extents, placed, dtype), wrt, draw(st.sampled_from(incoming_options(mesh))))

    return drawn().filter(lambda found: has_settled_gradient(op, found.sample))
