"""What a state holds, as due functions say it: its tree, where its tensors lie, and their elements."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from shardlaw.conformance import compat
from shardlaw.conformance.law import due
from shardlaw.conformance.law.due import Due, Global
from shardlaw.conformance.laws.checkpoint import trip as t
from shardlaw.conformance.laws.checkpoint.calls import App, poison
from shardlaw.conformance.laws.checkpoint.holders import elements
from shardlaw.reference.checkpoint.state_dict import Slot, State, Stateful, format_state, slot_names, spoil
from shardlaw.reference.shards import Shards, joined_size

if TYPE_CHECKING:
    from shardlaw.conformance.rank.context import RankContext


@dataclass(frozen=True)
class Exactly(Due):
    """A plain tensor, or a value that is none: of the same type, and equal all through."""

    value: Any

    def compare(self, here: RankContext, check: str, got: Any, place: str) -> None:
        want = self.value
        message = f"{place} is a {type(got).__name__}, must be a {type(want).__name__}"
        if not here.require(type(got) is type(want), "wrong-metadata", check, message, repr(want), repr(got)):
            return
        if isinstance(want, torch.Tensor):
            here.same(got, want, check, what=place)
            return
        equal = format_state(got) == format_state(want)
        here.require(equal, "wrong-value", check, f"{place} is not what was saved", repr(want), repr(got))

    def for_script(self, rank: int) -> Any:
        return {"exactly": self.value}


@dataclass(frozen=True)
class MeshTensor(Global):
    """A DTensor. On a rank outside of its mesh nothing more is due."""

    def compare(self, here: RankContext, check: str, got: Any, place: str) -> None:
        if here.coord(self.mesh) is not None or type(got) is not DTensor:
            super().compare(here, check, got, place)


@dataclass(frozen=True)
class InShards(Due):
    """A tensor of which the ranks hold any ``shards``, in a wrapper or a sharded tensor."""

    kind: str
    full: torch.Tensor
    shards: Shards

    def compare(self, here: RankContext, check: str, got: Any, place: str) -> None:
        want = DTensor if self.kind == "wrapper" else compat.name("ShardedTensor")
        message = f"{place} is a {type(got).__name__}, must be a {want.__name__}"
        if not here.require(isinstance(got, want), "wrong-metadata", check, message):
            return
        own = self.shards.boxes_of(here.rank)
        if self.kind == "wrapper":
            wrapper = got.to_local()
            held = wrapper.local_shards()
            offsets = [tuple(offset) for offset in wrapper.local_offsets()][: len(held)]
            size, shape = joined_size(own), tuple(wrapper.size())
            message = f"the wrapper around the shards of {place} has shape {shape}, must have {size}"
            here.require(size in (None, shape), "wrong-metadata", check, message, size, shape)
        else:
            held = [shard.tensor for shard in got.local_shards()]
            offsets = [tuple(shard.metadata.shard_offsets) for shard in got.local_shards()]
        places = [box.offset for box in own]
        message = f"{place} holds shards at other offsets than it must"
        if here.require(offsets == places, "wrong-layout", check, message, places, offsets):
            for box, shard in zip(own, held, strict=True):
                here.same(shard, elements(self.full, box), check, what=f"the shard at {box.offset} of {place}")

    def for_script(self, rank: int) -> Any:
        own = self.shards.boxes_of(rank)
        size = joined_size(own) if self.kind == "wrapper" else None
        return {"shards": [(box.offset, elements(self.full, box)) for box in own], "shape": size or ...}


@dataclass(frozen=True)
class Inside(Due):
    """A stateful object, and what is due of its state."""

    state: Any

    def compare(self, here: RankContext, check: str, got: Any, place: str) -> None:
        message = f"{place} is a {type(got).__name__}, must still be the stateful object"
        if here.require(isinstance(got, App), "wrong-metadata", check, message):
            due.compare(here, check, got.state, self.state, place)

    def for_script(self, rank: int) -> Any:
        return {"stateful": due.for_script(self.state, rank)}


@dataclass(frozen=True)
class Row(Due):
    """A list or a tuple of what is due."""

    parts: list[Any] | tuple[Any, ...]

    def compare(self, here: RankContext, check: str, got: Any, place: str) -> None:
        alike = type(got) is type(self.parts) and len(got) == len(self.parts)
        message = f"{place} is a {type(got).__name__}, must be a {type(self.parts).__name__} of {len(self.parts)} parts"
        if here.require(alike, "wrong-metadata", check, message):
            for at, (part, want) in enumerate(zip(got, self.parts, strict=True)):
                due.compare(here, check, part, want, f"{place}[{at}]")

    def for_script(self, rank: int) -> Any:
        return due.for_script(self.parts, rank)


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

    def holding(self, tree: State, poisoned: Iterable[str] = ()) -> Contents:
        """Another tree of the same tensors."""
        return replace(self, end=replace(self.end, state=tree), poisoned=frozenset(poisoned))

    def untouched(self) -> Contents:
        """The same as a destination before the load: every value is another."""
        return self.holding(spoil(self.tree), slot_names(self.tree))

    def values(self) -> dict[str, MeshTensor | torch.Tensor]:
        """The tensors of the case by themselves."""
        return {name: self.value(name) for name in self.trip.values}

    def value(self, name: str) -> MeshTensor | torch.Tensor:
        """A tensor as it lies at this end; a plain one as it is."""
        full, layout = self.full(name).contiguous(), self.end.layout(name)
        return full if layout is None else MeshTensor(full, layout)

    def full(self, name: str) -> torch.Tensor:
        """The global tensor."""
        want = self.trip.due(self.end, name)
        return poison(want) if name in self.poisoned else want

    def parts(self, value: Any) -> Any:
        """What is due of a part of the tree."""
        match value:
            case Slot(name):
                return self._tensor(name)
            case Stateful(state):
                return Inside(self.parts(state))
            case dict():
                return {key: self.parts(entry) for key, entry in value.items()}
            case list() | tuple() if any(slot_names(list(value))):
                return Row(type(value)(map(self.parts, value)))
        return Exactly(value)

    def _tensor(self, name: str) -> Due:
        value = self.value(name)
        if isinstance(value, torch.Tensor):
            return Exactly(value)
        return InShards(self.end.held, value.full, self.end.shards(name, ())) if self.end.held else value

    def compare(self, here: RankContext, check: str, got: Any, place: str) -> None:
        due.compare(here, check, got, self.parts(self.tree), place)

    def for_script(self, rank: int) -> Any:
        return due.for_script(self.parts(self.tree), rank)

    def compares(self) -> Iterator[str]:
        yield from ("dict", "exactly", "dtensor", "tensor", "list")
        yield from ("shards",) if self.end.held else ()
        yield from ("stateful",) if any(isinstance(value, Stateful) for value in self.tree.values()) else ()


def changed(full: torch.Tensor, times: int = 1) -> torch.Tensor:
    """Values that differ from ``full`` in every element, and from those of other ``times``."""
    return (full if times % 2 == 0 else ~full) if full.dtype == torch.bool else full + times
