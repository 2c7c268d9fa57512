"""Device meshes: an n-d table of ranks.

A mesh of shape ``(2, 3)`` is a table with two rows and three columns whose cells are *distinct* global ranks. The
position of a rank in the table is its *coordinate*; a rank that is not in the table has none and takes no part in
anything that happens on the mesh. A *mesh dim* is an axis of the table; the ranks along one axis through one cell form
a *group*, ordered as they stand in the table, whatever their numbers are.

A mesh is written by its shape, ``2x3``, and its ranks where they are not ``0..n-1`` in order: ``2x2@0,2,1,3`` is the table
::

    0 2
    1 3

Taking some mesh dims and fixing the coordinate along the others gives a *slice*, a smaller mesh; reading the cells of a mesh row
by row gives a *flattened* one.

Source: the documentation of ``torch.distributed.device_mesh``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from shardlaw.reference.notation import NotationError, Shape, format_shape, parse_shape

Coord = tuple[int, ...]
MAX_RANKS = 1 << 16


class MeshError(ValueError):
    """A table of ranks that is no mesh: a rank twice, a negative rank, or the wrong number of ranks."""


@dataclass(frozen=True)
class Mesh:
    """A table of ranks: ``shape`` gives its extents, ``ranks`` its cells in row-major order."""

    shape: Shape
    ranks: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.shape or any(size < 1 for size in self.shape):
            raise MeshError(f"mesh {format_shape(self.shape)}: want at least one mesh dim, each of size 1 or more")
        if len(self.ranks) != math.prod(self.shape):
            raise MeshError(f"mesh {format_shape(self.shape)} has {math.prod(self.shape)} cells, but {len(self.ranks)} ranks")
        if len(set(self.ranks)) != len(self.ranks) or min(self.ranks) < 0:
            raise MeshError(f"mesh ranks {list(self.ranks)}: want distinct ranks, 0 or more")

    @classmethod
    def of(cls, *sizes: int) -> Mesh:
        """The plain mesh over ranks ``0..n-1`` in row-major order: ``Mesh.of(2, 3)``."""
        return cls(sizes, tuple(range(math.prod(sizes))))

    @staticmethod
    @lru_cache(4096)
    def parse(text: str) -> Mesh:
        """``"2x3"``, or ``"2x2@0,2,1,3"`` where the ranks are not ``0..n-1``. Raises :class:`NotationError`."""
        shape_text, at, ranks_text = text.partition("@")
        try:
            shape = parse_shape(shape_text)
        except NotationError:
            raise NotationError(f"mesh {text!r}: want sizes joined by 'x', such as 2x3 or 2x2@0,2,1,3") from None
        if math.prod(shape) > MAX_RANKS:
            raise NotationError(f"mesh {text!r}: want at most {MAX_RANKS} ranks")
        ranks = ranks_text.split(",")
        if at and not all(rank.isascii() and rank.isdigit() for rank in ranks):
            raise NotationError(f"mesh {text!r}: want ranks joined by ',' after '@', such as 2x2@0,2,1,3")
        try:
            return Mesh(shape, tuple(map(int, ranks))) if at else Mesh.of(*shape)
        except MeshError as error:
            raise NotationError(f"mesh {text!r}: {error}") from None

    def __str__(self) -> str:
        ascending = self.ranks == tuple(range(self.size))
        return format_shape(self.shape) + ("" if ascending else "@" + ",".join(map(str, self.ranks)))

    @property
    def ndim(self) -> int:
        """How many mesh dims there are."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """How many ranks the table has."""
        return len(self.ranks)

    def coords(self) -> Iterator[Coord]:
        """Every coordinate, row-major: the same order as :attr:`ranks`."""
        return itertools.product(*map(range, self.shape))

    def coord(self, rank: int) -> Coord | None:
        """The coordinate of ``rank``, or ``None`` for a rank that is not in the mesh."""
        if rank not in self.ranks:
            return None
        at, coord = self.ranks.index(rank), []
        for size in reversed(self.shape):
            at, position = divmod(at, size)
            coord.append(position)
        return tuple(reversed(coord))

    def rank_at(self, coord: Coord) -> int:
        """The rank at ``coord``."""
        at = 0
        for size, position in zip(self.shape, coord, strict=True):
            if not 0 <= position < size:
                raise IndexError(f"coordinate {coord} lies outside mesh {self}")
            at = at * size + position
        return self.ranks[at]

    def group(self, dim: int, coord: Coord) -> tuple[int, ...]:
        """The ranks along mesh dim ``dim`` through ``coord``, in the order of the table."""
        return tuple(self.rank_at((*coord[:dim], i, *coord[dim + 1 :])) for i in range(self.shape[dim]))

    def slice(self, dims: tuple[int, ...], coord: Coord) -> Mesh:
        """The sub-mesh spanned by ``dims`` (in that order) through ``coord``."""
        shape = tuple(self.shape[dim] for dim in dims)
        ranks = []
        for inner in itertools.product(*map(range, shape)):
            cell = list(coord)
            for dim, position in zip(dims, inner, strict=True):
                cell[dim] = position
            ranks.append(self.rank_at(tuple(cell)))
        return Mesh(shape, tuple(ranks))

    def flatten(self, dims: tuple[int, ...], coord: Coord) -> Mesh:
        """The 1-D mesh that :meth:`slice` becomes when its cells are read row by row."""
        ranks = self.slice(dims, coord).ranks
        return Mesh((len(ranks),), ranks)
