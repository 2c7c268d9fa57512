"""Strategies for tensors: dtype, fill, memory layout and placements."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument
from hypothesis.strategies import SearchStrategy

from shardlaw.reference.mesh import Mesh
from shardlaw.reference.notation import Shape
from shardlaw.reference.placement import Placements
from shardlaw.reference.simulate import can_reduce
from shardlaw.reference.tensors import DTYPES, FILLS, MEMORIES, TensorSpec
from shardlaw.strategies._arguments import check_choices, format_arguments, shape_or_strategy
from shardlaw.strategies.placements import KINDS, placements
from shardlaw.strategies.shapes import shapes


def dtypes(allowed: Iterable[str] = ("float32", "float64", "bfloat16", "int64", "int32", "uint8", "bool")) -> SearchStrategy[str]:
    """Names of dtypes. Shrinks to the first of ``allowed``, which is drawn about as often as all others together."""
    names = check_choices("allowed", allowed, tuple(DTYPES))
    return st.sampled_from((names[0],) * max(1, len(names) - 1) + names[1:])


def specs(
    *,
    mesh: Mesh | None = None,
    shape: Shape | SearchStrategy[Shape] | None = None,
    placed: Placements | SearchStrategy[Placements] | None = None,
    dtypes: Iterable[str] = ("float32",),
    fills: Iterable[str] = ("distinct",),
    memories: Iterable[str] = ("plain",),
    kinds: Iterable[str] = KINDS,
    reduce_ops: Iterable[str] = ("sum",),
    split_factors: Iterable[int] = (2, 3),
    negative: bool = False,
) -> SearchStrategy[TensorSpec]:
    """Tensors of ``shape``, a value or a strategy (left out: :func:`~shardlaw.strategies.shapes.shapes`).

    With a ``mesh`` they have placements on it, drawn by the options of :func:`~shardlaw.strategies.placements.placements`, and only
    reductions that the dtype has; ``placed`` gives the placements instead. With neither they are plain tensors.
    ``dtypes``, ``fills`` and ``memories`` are names as in :mod:`shardlaw.reference.tensors`; the first of each is drawn about as often as
    all others together.

    Shrinks to the first dtype, fill and memory, then as shapes and placements do.

    Raises ``InvalidArgument`` where an option is wrong, or no placement is left for one of the dtypes.
    """
    names = check_choices("dtypes", dtypes, tuple(DTYPES))
    filled = check_choices("fills", fills)
    unknown = [fill for fill in filled if fill not in FILLS and not (fill[:5] == "index" and fill[5:].isdigit() and int(fill[5:]))]
    if unknown:
        raise InvalidArgument(f"fills: {unknown[0]!r} is none of {', '.join(FILLS)}, index<N>")
    lie = check_choices("memories", memories, MEMORIES)
    chosen = check_choices("kinds", kinds, KINDS)
    ops, factors = tuple(reduce_ops), tuple(split_factors)
    by_dtype = {name: _reducible_kinds(name, chosen, ops) for name in names} if mesh is not None and placed is None else {}
    if mesh is not None and placed is not None:
        raise InvalidArgument(f"{format_arguments(mesh=mesh, placed=placed)}: want one of them, the other follows or is not needed")
    if mesh is not None:
        for allowed, reductions in by_dtype.values():
            some_dims = len(shape) if isinstance(shape, tuple) else 1
            placements(mesh, some_dims, kinds=allowed, reduce_ops=reductions or ("sum",), split_factors=factors)
    needs_dim = any(not {"R", "P"} & set(allowed) for allowed, _ in by_dtype.values())
    shape_drawn = shape_or_strategy(shape, shapes(min_dims=int(needs_dim)))
    dtype_drawn, fill_drawn, memory_drawn = _mostly_first(names), _mostly_first(filled), _mostly_first(lie)
    placed_drawn = placed if isinstance(placed, SearchStrategy) else st.just(placed)

    @st.composite
    def spec(draw: st.DrawFn) -> TensorSpec:
        dtype, fill, memory = draw(dtype_drawn), draw(fill_drawn), draw(memory_drawn)
        extents = draw(shape_drawn)
        if mesh is None:
            return TensorSpec(extents, draw(placed_drawn), dtype, fill, memory)
        allowed, reductions = by_dtype[dtype]
        ops_or_sum = reductions or ("sum",)
        on = placements(mesh, len(extents), kinds=allowed, reduce_ops=ops_or_sum, split_factors=factors, negative=negative)
        return TensorSpec(extents, draw(on), dtype, fill, memory)

    return spec()


def _reducible_kinds(dtype: str, kinds: tuple[str, ...], ops: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The kinds and reductions that a dtype has."""
    reductions = tuple(op for op in ops if can_reduce(DTYPES[dtype], op))
    allowed = kinds if reductions else tuple(kind for kind in kinds if kind != "P")
    if not allowed:
        raise InvalidArgument(f"{format_arguments(kinds=kinds, reduce_ops=ops)}: {dtype} has none of these reductions")
    return allowed, reductions


def _mostly_first(choices: tuple[str, ...]) -> SearchStrategy[str]:
    return st.just(choices[0]) if len(choices) == 1 else st.sampled_from((choices[0],) * (len(choices) - 1) + choices[1:])
