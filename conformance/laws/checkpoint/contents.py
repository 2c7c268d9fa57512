"""Due values for state dicts: the tree of a state, and the layouts and elements of its tensors."""

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
from shardlaw.conformance.laws.checkpoint.holders import described_boxes, elements
from shardlaw.reference.checkpoint.state_dict import Slot, State, Stateful, format_state, slot_names, spoil
from shardlaw.reference.shards import Shards, joined_size

if TYPE_CHECKING:
    from shardlaw.conformance.rank.context import RankContext


@dataclass(frozen=True)
class ExactDue(Due):
    """A value of the same type that is equal; tensors also in dtype and shape."""

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
    """A DTensor, whose contents are not compared on ranks outside its mesh."""

    def compare(self, here: RankContext, check: str, got: Any, place: str) -> None:
        if here.coord(self.mesh) is not None or type(got) is not DTensor:
            super().compare(here, check, got, place)


@dataclass(frozen=True)
class ShardsDue(Due):
    """A tensor with these ``shards`` in a ``holder``: ``wrapper``, ``sharded`` or ``described``."""

    holder: str
    full: torch.Tensor
    shards: Shards

    def compare(self, here: RankContext, check: str, got: Any, place: str) -> None:
        want = {"wrapper": DTensor, "described": torch.Tensor}.get(self.holder) or compat.name("ShardedTensor")
        message = f"{place} is a {type(got).__name__}, must be a {want.__name__}"
        if not here.require(isinstance(got, want), "wrong-metadata", check, message):
            return
        message = f"{place} does not say any more which shards it has"
        kept = self.holder != "described" or hasattr(got, "local_sizes")
        if not here.require(kept, "wrong-metadata", check, message):
            return
        boxes = self.shards.boxes_of(here.rank)
        if self.holder == "wrapper":
            wrapper = got.to_local()
            local = wrapper.local_shards()
            offsets = [tuple(offset) for offset in wrapper.local_offsets()][: len(local)]
            size, shape = joined_size(boxes), tuple(wrapper.size())
            message = f"the wrapper around the shards of {place} has shape {shape}, must have {size}"
            here.require(size in (None, shape), "wrong-metadata", check, message, size, shape)
        elif self.holder == "described":
            places, rest = [box.slices() for box in described_boxes(got)], got.detach().clone()
            offsets, local = [*got.global_offsets], [got[inside] for inside in places]
            for inside in places:
                rest[inside] = 0
            message = f"elements of {place} that are in no shard have changed"
            here.require(not rest.any(), "wrong-value", check, message)
        else:
            local = [shard.tensor for shard in got.local_shards()]
            offsets = [tuple(shard.metadata.shard_offsets) for shard in got.local_shards()]
        want_offsets = [box.offset for box in boxes]
        message = f"{place} holds shards at other offsets than it must"
        if here.require(offsets == want_offsets, "wrong-layout", check, message, want_offsets, offsets):
            for box, shard in zip(boxes, local, strict=True):
                here.same(shard, elements(self.full, box), check, what=f"the shard at {box.offset} of {place}")

    def for_script(self, rank: int) -> Any:
        boxes = self.shards.boxes_of(rank)
        size = joined_size(boxes) if self.holder == "wrapper" else None
        return {"shards": [(box.offset, elements(self.full, box)) for box in boxes], "shape": size or ...}


@dataclass(frozen=True)
class StatefulDue(Due):
    """An :class:`App` whose state is due."""

    state: Any

    def compare(self, here: RankContext, check: str, got: Any, place: str) -> None:
        message = f"{place} is a {type(got).__name__}, must still be the stateful object"
        if here.require(isinstance(got, App), "wrong-metadata", check, message):
            due.compare(here, check, got.state, self.state, place)

    def for_script(self, rank: int) -> Any:
        return {"stateful": due.for_script(self.state, rank)}


@dataclass(frozen=True)
class SequenceDue(Due):
    """A list or a tuple of due values, of the same type and length."""

    items: list[Any] | tuple[Any, ...]

    def compare(self, here: RankContext, check: str, got: Any, place: str) -> None:
        matches = type(got) is type(self.items) and len(got) == len(self.items)
        message = f"{place} is a {type(got).__name__}, must be a {type(self.items).__name__} of {len(self.items)} parts"
        if here.require(matches, "wrong-metadata", check, message):
            for at, (part, want) in enumerate(zip(got, self.items, strict=True)):
                due.compare(here, check, part, want, f"{place}[{at}]")

    def for_script(self, rank: int) -> Any:
        return due.for_script(self.items, rank)


@dataclass(frozen=True)
class Contents(Due):
    """The contents of a state at one ``end`` of a trip; tensors in ``poisoned`` differ from it in every element."""

    trip: t.Trip
    end: t.End
    poisoned: frozenset[str] = frozenset()

    @property
    def tree(self) -> State:
        """The state with a :class:`Slot` for each tensor."""
        return self.end.state

    def with_tree(self, tree: State, poisoned: Iterable[str] = ()) -> Contents:
        """The same tensors in another tree; those in ``poisoned`` differ in every element."""
        return replace(self, end=replace(self.end, state=tree), poisoned=frozenset(poisoned))

    def before_load(self) -> Contents:
        """The contents of the destination before the load: every value differs."""
        return self.with_tree(spoil(self.tree), slot_names(self.tree))

    def values(self) -> dict[str, MeshTensor | torch.Tensor]:
        """The tensors of the case, by name."""
        return {name: self.value(name) for name in self.trip.values}

    def value(self, name: str) -> MeshTensor | torch.Tensor:
        """A tensor with its layout at this end, or a plain one."""
        full, layout = self.full(name).contiguous(), self.end.layout(name)
        return full if layout is None else MeshTensor(full, layout)

    def full(self, name: str) -> torch.Tensor:
        """The global tensor."""
        want = self.trip.full_tensor(self.end, name)
        return poison(want) if name in self.poisoned else want

    def due_for(self, value: Any) -> Any:
        """The due value for a part of the tree."""
        match value:
            case Slot(name):
                return self._due_for_tensor(name)
            case Stateful(state):
                return StatefulDue(self.due_for(state))
            case dict():
                return {key: self.due_for(entry) for key, entry in value.items()}
            case list() | tuple() if any(slot_names(list(value))):
                return SequenceDue(type(value)(map(self.due_for, value)))
        return ExactDue(value)

    def _due_for_tensor(self, name: str) -> Due:
        value = self.value(name)
        if isinstance(value, torch.Tensor):
            return ExactDue(value)
        return ShardsDue(self.end.holder, value.full, self.end.shards(name, ())) if self.end.holder else value

    def compare(self, here: RankContext, check: str, got: Any, place: str) -> None:
        due.compare(here, check, got, self.due_for(self.tree), place)

    def for_script(self, rank: int) -> Any:
        return due.for_script(self.due_for(self.tree), rank)

    def compares(self) -> Iterator[str]:
        yield from ("dict", "exactly", "dtensor", "tensor", "list")
        yield from ("shards",) if self.end.holder else ()
        yield from ("stateful",) if any(isinstance(value, Stateful) for value in self.tree.values()) else ()


def newer_values(full: torch.Tensor, times: int = 1) -> torch.Tensor:
    """Values that differ in every element from ``full`` and from those for other ``times``."""
    return (full if times % 2 == 0 else ~full) if full.dtype == torch.bool else full + times
