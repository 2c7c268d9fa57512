"""Plans of many thousand ranks, computed for each tensor dim on its own.

Where every mesh dim shards at most one tensor dim, and no placement is strided, what a rank holds along one tensor dim depends
on its coordinates along the mesh dims that shard this dim, and on nothing else. So the boxes of a tensor are all combinations of the
*runs* of its dims, and whatever is counted of boxes is a product: how many there are, how many meet those of another layout, how many
elements all ranks hold. The runs of a dim are few; they are those of a 1-D tensor (:mod:`shardlaw.reference.layout`).
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cached_property

from shardlaw.reference.layout import Layout
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.notation import Shape
from shardlaw.reference.placement import Placements, Shard, StridedShard

Run = tuple[int, int]


@dataclass(frozen=True)
class Grid:
    """A tensor of ``shape`` under ``placements`` on a mesh of shape ``mesh`` whose ranks ascend."""

    shape: Shape
    mesh: Shape
    placements: Placements

    def __post_init__(self) -> None:
        if any(isinstance(placement, StridedShard) for placement in self.placements):
            raise ValueError(f"{self}: a strided shard holds no run")

    def _sharding(self, dim: int) -> list[int]:
        """The mesh dims that shard a tensor dim."""
        return [
            at for at, placement in enumerate(self.placements) if isinstance(placement, Shard) and placement.dim % len(self.shape) == dim
        ]

    @cached_property
    def runs(self) -> list[dict[Run, list[int]]]:
        """For each tensor dim the runs with elements: first index and length, each with what its coordinates add to the rank (several
        where nothing shards the dim: none does then)."""
        found = []
        for dim, extent in enumerate(self.shape):
            mesh_dims = self._sharding(dim)
            sizes = tuple(self.mesh[at] for at in mesh_dims)
            if not sizes:
                found.append({(0, extent): [0]} if extent else {})
                continue
            layout = Layout((extent,), Mesh.of(*sizes), (Shard(0),) * len(sizes))
            runs: dict[Run, list[int]] = {}
            for coord in layout.mesh.coords():
                (owned,) = layout.owned(coord)
                if owned:
                    rank = sum(math.prod(self.mesh[at + 1 :]) * place for at, place in zip(mesh_dims, coord, strict=True))
                    runs.setdefault((owned[0], len(owned)), []).append(rank)
            found.append(runs)
        return found

    @cached_property
    def copies(self) -> list[int]:
        """What the coordinates along the mesh dims that do not shard add to the rank: one number for each replica."""
        free = [at for at, placement in enumerate(self.placements) if not isinstance(placement, Shard)]
        steps = [[math.prod(self.mesh[at + 1 :]) * place for place in range(self.mesh[at])] for at in free]
        return [sum(parts) for parts in itertools.product(*steps)]

    @property
    def boxes(self) -> int:
        """How many distinct boxes with elements there are."""
        return math.prod(map(len, self.runs))

    @property
    def elements(self) -> int:
        """How many elements all ranks hold together."""
        return len(self.copies) * math.prod(self.shape)

    def cuts(self) -> list[list[list[int]]]:
        """The distinct runs of each dim, in order."""
        empty = 0 in self.shape
        return [[] if empty else [[*run] for run in sorted(runs)] for runs in self.runs]

    def meetings(self, other: Grid) -> list[dict[Run, list[Run]]]:
        """For each dim and each run of this grid, the runs of the other that have an index in common with it."""
        found = []
        for mine, others in zip(self.runs, other.runs, strict=True):
            ordered = sorted(others)
            found.append({(a, n): [(b, m) for b, m in ordered if a < b + m and b < a + n] for a, n in mine})
        return found

    def reads(self, saved: Grid) -> int:
        """How many read items fill all distinct boxes of this grid from those of another."""
        return math.prod(sum(map(len, met.values())) for met in self.meetings(saved))

    def files(self, saved: Grid) -> dict[int, set[int]]:
        """For each rank with elements, the ranks whose chunks it reads, where the lowest rank that holds a chunk has written it."""
        found: dict[int, set[int]] = {}
        for runs in itertools.product(*(met.items() for met in self.meetings(saved))):
            lowest = [[min(saved.runs[dim][run]) for run in met] for dim, (_, met) in enumerate(runs)]
            writers = {sum(parts) for parts in itertools.product(*lowest)}
            held = [self.runs[dim][run] for dim, (run, _) in enumerate(runs)]
            for parts in itertools.product(*held, self.copies):
                found[sum(parts)] = writers
        return found
