"""Which rank owns which element of a sharded tensor.

The one idea
    Along each tensor dim a rank owns an *ordered list of global indices*. At first every rank owns all of them, in
    order. Then the placements are applied from the left mesh dim to the right. Each is a rule that splits every list among
    the ranks along its mesh dim:

    ``R``       every rank keeps the list.
    ``P(op)``   every rank keeps the list: it holds a contribution to each of these elements.
    ``S(d)``    the list of tensor dim ``d`` is cut into consecutive runs of ``ceil(n / m)`` indices, ``n`` being the
                length of the list and ``m`` the size of the mesh dim; rank ``i`` along the mesh dim gets run ``i``. The
                last runs may be short, and those after them empty: 5 indices over 4 ranks are 2, 2, 1, 0, never
                2, 1, 1, 1.
    ``_S(d,f)`` the list of tensor dim ``d`` is cut into ``f`` runs by the same rule; then each run is cut among the
                ranks, and rank ``i`` gets the ``i``-th part of every run, concatenated.

    The local tensor of a rank is the full tensor at its lists: ``full[lists[0]][:, lists[1]]...``.

Reading it off
    *Local shape*: how long the lists are. *Offset*: the first index of each list, and the tensor's extent where the list
    is empty. *Coverage*: together the ranks hold every element; each is held by as many ranks as the sizes of the mesh dims
    that do not shard multiply to. *Box*: a rank's elements form a rectangle when each of its lists is a run.

An example
    What does ``[S(0), _S(0,2)]`` mean on a 2x3 mesh for a dim of 7?  Mesh dim 0 has two ranks, so row 0 gets
    ``0 1 2 3`` and row 1 gets ``4 5 6``. Mesh dim 1 has three ranks and cuts each of these lists into 2 runs first: row 0
    into ``0 1 | 2 3``, row 1 into ``4 5 | 6``. Each run goes over the three ranks, in parts of ``ceil(2/3) = 1``:

    ========  =========  =========  =======
    row       column 0   column 1   column 2
    ========  =========  =========  =======
    0         ``0 2``    ``1 3``    (empty)
    1         ``4 6``    ``5``      (empty)
    ========  =========  =========  =======

Order, and what strided shards are for
    ``[S(0), S(0)]`` on a 2x2 mesh cuts a dim of 8 over the rows first, then each half over the columns. The other order, columns
    first, cannot be written with plain shards, since placements always apply from the left. A strided shard can: in
    ``[_S(0,2), S(0)]`` mesh dim 0 leaves room for the two runs into which mesh dim 1 will cut, and takes its part of both.

    =================  ==========  ==========  ==========  ==========
    coordinate         (0, 0)      (0, 1)      (1, 0)      (1, 1)
    =================  ==========  ==========  ==========  ==========
    ``S(0),S(0)``      ``0 1``     ``2 3``     ``4 5``     ``6 7``
    ``_S(0,2),S(0)``   ``0 1``     ``4 5``     ``2 3``     ``6 7``
    =================  ==========  ==========  ==========  ==========

    The split factor is the number of ranks that cut before it in this sense. Where sizes do not divide evenly, the two ways of cutting
    round up in different places; then the rule above holds, not this picture.

Uneven and empty
    Rounding up happens at every cut anew. A dim of 5 on ``2x2`` under ``[S(0), S(0)]`` is 3 and 2, then 2, 1, 1, 1; on one mesh dim of 4
    ranks it is 2, 2, 1, 0. A rank that is left with nothing still holds a local tensor: one with a dim of extent 0.

Source: the documentation of ``torch.distributed.tensor`` (placements apply in the order of the mesh dims; ``Shard`` cuts as
``torch.chunk`` does), and the docstring of ``_StridedShard`` in ``torch.distributed.tensor.placement_types``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from shardlaw.reference.box import Box
from shardlaw.reference.mesh import Coord, Mesh
from shardlaw.reference.notation import Shape, format_shape
from shardlaw.reference.placement import (
    MaskPartial,
    Partial,
    Placement,
    Placements,
    Replicate,
    Shard,
    StridedShard,
    format_placements,
    is_reduction,
    shard_dim,
)

Indices = tuple[int, ...]


class LayoutError(ValueError):
    """Placements that are invalid for a shape on a mesh. ``kind`` is ``arity``, ``dim`` or ``mixed-partial``."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def chunk(indices: Indices, parts: int) -> list[Indices]:
    """Cut a list into ``parts`` consecutive runs of ``ceil(len / parts)``; the last ones may be short or empty."""
    run = -(-len(indices) // parts)
    return [indices[i * run : (i + 1) * run] for i in range(parts)]


def strided(indices: Indices, parts: int, split_factor: int) -> list[Indices]:
    """Cut a list into ``split_factor`` runs, each run into ``parts``; part ``i`` joins the ``i``-th parts of all runs."""
    # further runs would be empty
    runs = [chunk(run, parts) for run in chunk(indices, min(split_factor, max(len(indices), 1)))]
    return [tuple(index for run in runs for index in run[i]) for i in range(parts)]


def split(indices: Indices, parts: int, placement: Placement) -> list[Indices]:
    """The list of each of ``parts`` ranks after ``placement`` is applied to a list."""
    if isinstance(placement, Shard):
        return chunk(indices, parts)
    if isinstance(placement, StridedShard):
        return strided(indices, parts, placement.split_factor)
    return [indices] * parts


@lru_cache(4096)
def _owned_by_coord(shape: Shape, mesh: Shape, placements: Placements) -> dict[Coord, tuple[Indices, ...]]:
    """The indices that a rank owns along each tensor dim, by coordinate: placements apply from left to right."""
    lists: dict[Coord, tuple[Indices, ...]] = {(): tuple(tuple(range(size)) for size in shape)}
    for size, placement in zip(mesh, placements, strict=True):
        dim, split_lists = shard_dim(placement), {}
        for coord, owned in lists.items():
            if dim is None:
                split_lists.update({(*coord, i): owned for i in range(size)})
                continue
            for i, part in enumerate(split(owned[dim], size, placement)):
                split_lists[*coord, i] = (*owned[:dim], part, *owned[dim + 1 :])
        lists = split_lists
    return lists


@dataclass(frozen=True)
class Layout:
    """A tensor of global ``shape`` on ``mesh`` with one placement a mesh dim. Raises :class:`LayoutError`.

    Negative dims are normalised (``S(-1)`` of a 2-D tensor is ``S(1)``), so that equal layouts compare equal.
    """

    shape: Shape
    mesh: Mesh
    placements: Placements

    def __post_init__(self) -> None:
        if len(self.placements) != self.mesh.ndim:
            raise LayoutError(
                "arity",
                f"{_count(len(self.placements), 'placement')} ({format_placements(self.placements)}) on mesh {self.mesh}: want one "
                f"for each of its {_count(self.mesh.ndim, 'mesh dim')}",
            )
        object.__setattr__(self, "placements", tuple(map(self._normalise, self.placements)))
        ops = {p.op for p in self.placements if isinstance(p, Partial)}
        if len(ops) > 1 and not ops <= {"sum", "avg"}:
            raise LayoutError("mixed-partial", f"{format_placements(self.placements)} mixes the reductions {sorted(ops)}")

    def _normalise(self, placement: Placement) -> Placement:
        dim = shard_dim(placement)
        if dim is None:
            return placement
        if not -len(self.shape) <= dim < len(self.shape):
            ndim = len(self.shape)
            wanted = f"a dim from {-ndim} to {ndim - 1}" if ndim else "R or a reduction"
            raise LayoutError("dim", f"{placement} on shape {format_shape(self.shape)}: it has {_count(ndim, 'dim')}: want {wanted}")
        dim %= len(self.shape)
        return StridedShard(dim, placement.split_factor) if isinstance(placement, StridedShard) else Shard(dim)

    def __str__(self) -> str:
        return f"{format_shape(self.shape)} on {self.mesh} as {format_placements(self.placements)}"

    @cached_property
    def _lists(self) -> dict[Coord, tuple[Indices, ...]]:
        return _owned_by_coord(self.shape, self.mesh.shape, self.placements)

    def owned(self, coord: Coord) -> tuple[Indices, ...]:
        """For each tensor dim the ordered global indices that the rank at ``coord`` holds."""
        return self._lists[coord]

    def local_shape(self, coord: Coord) -> Shape:
        """The shape of the local tensor at ``coord``, in elements."""
        return tuple(map(len, self.owned(coord)))

    def offset(self, coord: Coord) -> Shape:
        """The first global index along each dim; the global extent of a dim of which the rank holds nothing."""
        return tuple(owned[0] if owned else size for owned, size in zip(self.owned(coord), self.shape, strict=True))

    def box(self, coord: Coord) -> Box | None:
        """The rectangle that the rank at ``coord`` holds, or ``None`` when its lists are not all runs."""
        runs = all(not owned or owned[-1] - owned[0] + 1 == len(owned) for owned in self.owned(coord))
        return Box(self.offset(coord), self.local_shape(coord)) if runs else None

    def is_even(self) -> bool:
        """Whether all ranks hold local tensors of one shape."""
        return len({self.local_shape(coord) for coord in self.mesh.coords()}) == 1

    def empty_coords(self) -> list[Coord]:
        """The coordinates whose local tensor has no elements."""
        return [coord for coord in self.mesh.coords() if 0 in self.local_shape(coord)]

    def has_partial(self) -> bool:
        """Whether any mesh dim holds contributions instead of elements."""
        return any(map(is_reduction, self.placements))

    def is_strided(self) -> bool:
        """Whether any placement is a strided shard."""
        return any(isinstance(placement, StridedShard) for placement in self.placements)

    def replicas(self) -> int:
        """How many ranks hold each element: the product of the mesh dims that do not shard."""
        count = 1
        for size, placement in zip(self.mesh.shape, self.placements, strict=True):
            count *= 1 if shard_dim(placement) is not None else size
        return count

    def replace(self, placements: Sequence[Placement]) -> Layout:
        """The same tensor on the same mesh with other placements."""
        return Layout(self.shape, self.mesh, tuple(placements))


__all__ = [
    "Indices",
    "Layout",
    "LayoutError",
    "MaskPartial",
    "Partial",
    "Replicate",
    "Shard",
    "StridedShard",
    "chunk",
    "split",
    "strided",
]
