"""The field types of laws on optimizers: the tensors of a model, the parts of a tensor, and how these are held
before they are saved.

The tensors of a model are the fields of one letter. An act gets a dict of what this rank holds of them, a due
function a dict of :class:`~shardlaw.conformance.law.due.Global`, or of dense tensors where every rank has all
elements.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardlaw.conformance.law import literal as texts
from shardlaw.conformance.law.due import Global, Of
from shardlaw.conformance.law.fields import Field, Printed, SurroundingField, TensorField
from shardlaw.conformance.law.program.fields import OperandsField
from shardlaw.conformance.laws.checkpoint.calls import poison
from shardlaw.conformance.laws.optimizer.nets import RATES, frozen, grouped, named
from shardlaw.conformance.laws.sharded_tensor import checkpoints
from shardlaw.conformance.laws.sharded_tensor.fields import WideTensorField, box_values
from shardlaw.conformance.rank import storage
from shardlaw.reference.checkpoint.sharded_leaf import parse_box, parse_boxes
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.notation import NotationError
from shardlaw.reference.placement import parse_placements
from shardlaw.reference.sharded_tensor import of_rank

if TYPE_CHECKING:
    from shardlaw.conformance.law.case import Case
    from shardlaw.conformance.rank.context import RankContext

Values = Mapping[str, Global | torch.Tensor]


class TensorsField(OperandsField):
    """All tensors of a model: as they are placed on ``mesh``, by the fields ``to.x`` and ``to`` where these are
    some of the fields, or ``dense`` ones on every rank. Where they are ``poisoned``, the act gets tensors that
    differ from these in every element."""

    takes = "tensors of one letter, such as x=5x6:S(0)"
    always = True

    def __init__(self, *more: str, poisoned: bool = False, dense: bool = False) -> None:
        self.more, self.poisoned, self.dense = more, poisoned, dense

    def fields(self, name: str) -> tuple[str, ...]:
        return ("*", "mesh", *self.more)

    def is_given(self, case: Case, name: str) -> bool:
        return True

    def read(self, case: Case, name: str) -> dict[str, Global | torch.Tensor]:
        found: dict[str, Global | torch.Tensor] = {}
        for at, tensor in enumerate(name for name, _ in case.fields if re.fullmatch("[a-z]", name)):
            spec, seed = case.tensor(tensor), case.seed + 31 * at
            to = case.get(f"to.{tensor}", case.get("to", "")) if "to" in self.more else ""
            if to:
                spec = spec.placed(None if to == "-" else parse_placements(to))
            whole = self.dense or spec.placements is None
            found[tensor] = spec.build(seed) if whole else Global.of(spec, case.mesh(), seed)
        if not found:
            raise NotationError("there are no tensors")
        return found

    def _held(self, values: Values) -> Values:
        return {name: changed(value, poison) for name, value in values.items()} if self.poisoned else values

    def build(self, value: Values, here: RankContext) -> dict[str, Any]:
        return super().build(self._held(value), here)

    def printed(self, value: Values, name: str, world: int) -> Printed:
        made = super().printed({f"{name}_{tensor}": one for tensor, one in self._held(value).items()}, name, world)
        return replace(made, expression=re.sub(rf"'{name}_(\w)'", r"'\1'", made.expression))


def changed(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A value of a due function with other elements, placed alike."""
    return value.holding(change(value.full)) if isinstance(value, Global) else change(value)


def dense(values: Values) -> dict[str, torch.Tensor]:
    """All elements of each."""
    return {name: value.full if isinstance(value, Global) else value for name, value in values.items()}


def given(values: Values, having: Collection[str] = ()) -> dict[str, Any]:
    """What an optimizer is given of a model, by name."""
    floating = dense(named(values))
    found = {path: value for path, value in named(values).items() if floating[path].is_floating_point()}
    return dict([*found.items()][:-1]) if "idle" in having else found


def trained(values: Values, having: Collection[str] = ()) -> dict[str, Any]:
    """What has gradients of that."""
    still = frozen(dense(values)) if "frozen" in having else []
    return {path: value for path, value in given(values, having).items() if path[-1] not in still}


def keeps(values: Values, rates: Sequence[float], count: float = 1.0, *, deep: bool = False) -> dict[str, Any]:
    """What :func:`~shardlaw.conformance.laws.optimizer.nets.learned` must find after one step whose gradients were
    ``values``."""

    def halves(value: Any) -> dict[str, Any]:
        half = changed(value, lambda grad: grad / 2)
        if deep:
            return {"seen.left.0": half, "seen.left.weight": 3, "seen.right": changed(value, lambda grad: grad / 4)}
        return {"exp_avg": half, "exp_avg_sq": changed(value, lambda grad: grad * grad / 2)}

    averages = {path: halves(value) for path, value in values.items()}
    return {"rates": [*rates], "steps": dict.fromkeys(values, count), "averages": averages, "strangers": Of(0)}


def saved_rates(members: Sequence[Any], groups: str = "each", hollow: str | None = None) -> list[float]:
    """The rates of the groups of an optimizer that is saved."""
    return [RATES[at % len(RATES)] for at in range(len(grouped(members, groups, hollow)))]


class WordsField(Field):
    """Some of these words, joined by commas."""

    def __init__(self, *words: str) -> None:
        self.words, self.takes = words, f"some of {', '.join(words)}, joined by commas"

    def parse(self, text: str) -> list[str]:
        found = text.split(",")
        if {*found} - {*self.words}:
            raise NotationError(f"{text!r} has others")
        return found


class BoxField(Field):
    """A box of the tensor ``x``, or ``several``; acts get the offset and the size of each."""

    takes = "START:END for each dim of x, such as 0:4,2:6, and ; between several"

    def __init__(self, *, several: bool = False) -> None:
        self.several = several

    def fields(self, name: str) -> tuple[str, ...]:
        return (name, "x")

    def read(self, case: Case, name: str) -> Any:
        return (parse_boxes if self.several else parse_box)(case.get(name), len(case.tensor("x").shape))

    def build(self, value: Any, here: RankContext) -> Any:
        return [(box.offset, box.size) for box in value] if self.several else (value.offset, value.size)


class HeldField(Field):
    """How the tensor ``x`` is held when it is saved, see :mod:`shardlaw.conformance.laws.sharded_tensor.checkpoints`: a
    dense tensor, a DTensor, or the boxes of this rank."""

    takes = "-, a sharding spec such as chunk(0)@0,1, or placements and their mesh such as S(0)@2"

    def fields(self, name: str) -> tuple[str, ...]:
        return (name, "x", "world.save", "world.load")

    def read(self, case: Case, name: str) -> tuple[checkpoints.Held, torch.Tensor]:
        return checkpoints.held(case, name), WideTensorField().read(case, "x")

    def build(self, value: tuple[checkpoints.Held, torch.Tensor], here: RankContext) -> Any:
        held, full = value
        if held.spec is not None:
            return box_values(of_rank(held.parts, here.rank))
        return TensorField().build(Global(full, held.layout), here) if held.layout else here.tensor(full.clone())

    def printed(self, value: tuple[checkpoints.Held, torch.Tensor], name: str, world: int) -> Printed:
        held, full = value
        if held.spec is not None:
            table = texts.by_rank("BOXES", {rank: box_values(of_rank(held.parts, rank)) for rank in range(world)})
            return Printed("BOXES[rank]", tuple(table))
        return (
            TensorField().printed(Global(full, held.layout), name, world)
            if held.layout
            else Printed(texts.tensor(full))
        )


class GroupField(Field):
    """The process group of this rank along one axis of a mesh of two by two; due functions get its ranks."""

    takes = "0 or 1"

    def parse(self, text: str) -> int:
        if text not in ("0", "1"):
            raise NotationError(f"{text!r} is neither")
        return int(text)

    def build(self, value: int, here: RankContext) -> dist.ProcessGroup:
        return here.mesh(Mesh((2, 2), (0, 1, 2, 3))).get_group(value)

    def due(self, value: int, rank: int, world: int) -> list[int]:
        return sorted((rank, rank ^ (1 if value else 2)))

    def printed(self, value: int, name: str, world: int) -> Printed:
        return Printed(f'DeviceMesh("cpu", [[0, 1], [2, 3]]).get_group({value})')


Tensors = Annotated[dict[str, Any], TensorsField()]
Poisoned = Annotated[dict[str, Any], TensorsField(poisoned=True)]
PoisonedElsewhere = Annotated[dict[str, Any], TensorsField("to", "to.x", "to.a", "to.b", "to.c", poisoned=True)]
Whole = Annotated[dict[str, torch.Tensor], TensorsField(dense=True)]
Gradients = Annotated[dict[str, torch.Tensor], TensorsField("world.save", "world.load", dense=True)]
Part = Annotated[tuple[Any, Any], BoxField()]
Chunks = Annotated[list[Any], BoxField(several=True)]
Held = Annotated[Any, HeldField()]
Group = Annotated[dist.ProcessGroup, GroupField()]
WorldMesh = Annotated[
    DeviceMesh,
    SurroundingField(
        lambda here: here.mesh(Mesh((here.world,), tuple(range(here.world)))),
        'init_device_mesh("cpu", (dist.get_world_size(),))',
    ),
]
Writer = Annotated[
    Callable[[str], Any],
    SurroundingField(
        lambda here: functools.partial(storage.writer, here.target), "torch.distributed.checkpoint.FileSystemWriter"
    ),
]
Reader = Annotated[
    Callable[[str], Any],
    SurroundingField(
        lambda here: functools.partial(storage.reader, here.target), "torch.distributed.checkpoint.FileSystemReader"
    ),
]
