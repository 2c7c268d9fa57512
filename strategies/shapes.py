"""Strategies for shapes of tensors."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument
from hypothesis.strategies import SearchStrategy

from shardlaw.reference.notation import Shape
from shardlaw.strategies._arguments import check_range, check_sizes, format_arguments
from shardlaw.strategies._memo import memoized

# Sizes that find faults, with weights, the plainest first: uneven ones most, 0 seldom.
PALETTE = {2: 2, 3: 4, 4: 3, 5: 5, 7: 4, 8: 2, 1: 2, 0: 1}
DIMS_WEIGHT = {1: 4, 2: 7, 3: 3, 0: 1}


def dim_sizes(*, min_size: int = 0, max_size: int = 9, sizes: Iterable[int] | None = None) -> SearchStrategy[int]:
    """Extents of one tensor dim, in elements: ``sizes`` where given, else those of a palette within the bounds.

    Shrinks to 2 (the palette in the order 2, 3, 4, 5, 7, 8, 1, 0), or to the first of ``sizes``.
    """
    low, high = check_range("min_size", min_size, "max_size", max_size)
    if sizes is not None:
        given = check_sizes("sizes", sizes)
        chosen = [size for size in given if low <= size <= high]
        if not chosen:
            raise InvalidArgument(f"{format_arguments(sizes=given, min_size=low, max_size=high)}: no size lies within the bounds")
        return st.sampled_from(chosen)
    drawn = [size for size, weight in PALETTE.items() if low <= size <= high for _ in range(weight)]
    return st.sampled_from(drawn or range(low, high + 1))


@memoized
def shapes(
    *, min_dims: int = 0, max_dims: int = 3, min_size: int = 0, max_size: int = 9, sizes: Iterable[int] | None = None
) -> SearchStrategy[Shape]:
    """Shapes ``(n_0, ..., n_k)`` of tensors, in elements.

    ``min_dims`` and ``max_dims`` bound the number of dims, ``min_size`` and ``max_size`` the extent of each; ``sizes``, where
    given, are the only extents. Without them most extents are 3, 5 or 7, which no small mesh divides; some are 1 or 0.

    Shrinks to ``2``: one dim of two elements, the plainest that two ranks can share. Fewer dims come before more and 0-d comes
    last; smaller extents come before larger ones, 1 and then 0 after all others, since they are corner cases.

    Raises ``InvalidArgument`` where no shape satisfies the options.
    """
    low, high = check_range("min_dims", min_dims, "max_dims", max_dims)
    extents = dim_sizes(min_size=min_size, max_size=max_size, sizes=sizes)
    order = [ndim for ndim in [*range(1, high + 1), 0] if low <= ndim <= high]
    by_dims = {ndim: st.tuples(*[extents] * ndim) for ndim in order}
    if len(order) == 1:
        return by_dims[order[0]]
    # each number of dims once, then by weight: shrinking can then remove a dim in one step
    drawn_dims = st.sampled_from([*order, *(ndim for ndim in order for _ in range(DIMS_WEIGHT.get(ndim, 1)))])
    # an extra draw makes a 0-d shape as long as a 1-D one, which then stays the simplest
    filler = st.booleans()

    @st.composite
    def shape(draw: st.DrawFn) -> Shape:
        ndim = draw(drawn_dims)
        if not ndim:
            draw(filler)
        return draw(by_dims[ndim])

    return shape()
