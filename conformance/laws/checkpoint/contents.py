"""What a state holds, as due functions say it: its tree, where its tensors lie, and their elements."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from shardlaw.conformance.law.due import Due
from shardlaw.conformance.laws.checkpoint import trip as t
from shardlaw.conformance.laws.checkpoint.calls import poison
from shardlaw.conformance.laws.checkpoint.holders import wrapper_shape
from shardlaw.reference import simulate
from shardlaw.reference.checkpoint.state_dict import Slot, State, Stateful, slots, spoiled

if TYPE_CHECKING:
    from shardlaw.conformance.rank.context import RankContext


@dataclass(frozen=True)
class Contents(Due):
    """What a state holds: its tree, where its tensors lie, and their elements; those in ``poisoned`` differ from these
    in every element."""

    trip: t.Trip
    end: t.End
    poisoned: frozenset[str] = frozenset()

    @property
    def tree(self) -> State:
        """The state with a :class:`Slot` for each tensor."""
        return self.end.state

    @property
    def names(self) -> list[str]:
        """The names of the tensors of the case."""
        return [*self.trip.values]

    def holding(self, tree: State, poisoned: Iterable[str] = ()) -> Contents:
        """Another tree of the same tensors."""
        return replace(self, end=replace(self.end, state=tree), poisoned=frozenset(poisoned))

    def untouched(self) -> Contents:
        """The same as a destination before the load: every value is another."""
        return self.holding(spoiled(self.tree), slots(self.tree))

    def renamed(self, names: Mapping[str, str]) -> Contents:
        """A flat state: the tensors by other names."""
        return self.holding({path: Slot(name) for name, path in names.items()}, self.poisoned)

    def having(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Contents:
        """Other elements, of the dtypes of this end."""
        values = {name: change(self.trip.due(self.end, name)) for name in self.trip.values}
        return replace(self, trip=replace(self.trip, values=values))

    def full(self, name: str) -> torch.Tensor:
        """The global tensor."""
        want = self.trip.due(self.end, name)
        return poison(want) if name in self.poisoned else want

    def judge(self, here: RankContext, check: str, got: Any, place: str) -> None:
        t.judge(self.trip, here, got, check=check, end=self.end, kept=self.poisoned)

    def for_script(self, rank: int) -> Any:
        return self._told(self.tree, rank)

    def _told(self, value: Any, rank: int) -> Any:
        match value:
            case Slot(name):
                return self._tensor(name, rank)
            case Stateful(state):
                return {"stateful": self._told(state, rank)}
            case dict():
                return {key: self._told(entry, rank) for key, entry in value.items()}
            case list() | tuple() if any(slots(list(value))):
                return type(value)(self._told(entry, rank) for entry in value)
        return {"exactly": value}

    def _tensor(self, name: str, rank: int) -> Any:
        full, layout = self.full(name).contiguous(), self.end.layout(name)
        if layout is None:
            return {"exactly": full}
        if self.end.held:
            own = self.end.pieces(name, rank)
            shape = wrapper_shape(own) if self.end.held == "wrapper" else None
            return {"shards": [(piece.box.offset, piece.of(full)) for piece in own], "shape": shape or ...}
        coord = layout.mesh.coord(rank)
        return ... if coord is None else ([*layout.placements], layout.shape, simulate.take(full, layout, coord))

    def compares(self) -> Iterator[str]:
        yield from ("dict", "exactly", "dtensor", "tensor", "list")
        yield from ("shards",) if self.end.held else ()
        yield from ("stateful",) if any(isinstance(value, Stateful) for value in self.tree.values()) else ()


def changed(full: torch.Tensor, times: int = 1) -> torch.Tensor:
    """Values that differ from ``full`` in every element, and from those of other ``times``."""
    return (full if times % 2 == 0 else ~full) if full.dtype == torch.bool else full + times
