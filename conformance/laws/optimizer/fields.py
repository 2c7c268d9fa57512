"""The field types of laws on optimizers: the tensors of a model, and the states and groups that it is given.

The tensors of a model are the fields of one letter. An act gets a dict of what this rank holds of them, a due
function a dict of :class:`~shardlaw.conformance.law.due.Global`, or of dense tensors where every rank has all
elements.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardlaw.conformance.law.due import Global
from shardlaw.conformance.law.fields import Field, RankField, ScriptArgument
from shardlaw.conformance.law.program.fields import OperandsField
from shardlaw.conformance.laws.checkpoint.calls import poison
from shardlaw.conformance.laws.checkpoint.models import Value, Values, changed, dense, frozen, parameters_of
from shardlaw.conformance.laws.checkpoint.trip import placements_at_load, tensor_names
from shardlaw.conformance.laws.optimizer.nets import is_full_state
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.notation import NotationError

if TYPE_CHECKING:
    from shardlaw.conformance.law.case import Case
    from shardlaw.conformance.rank.context import RankContext


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

    def read(self, case: Case, name: str) -> dict[str, Value]:
        found: dict[str, Value] = {}
        for at, tensor in enumerate(tensor_names(case)):
            spec, seed = case.tensor(tensor), case.seed + 31 * at
            if "to" in self.more:
                spec = spec.with_placements(placements_at_load(case, tensor))
            is_plain = self.dense or spec.placements is None
            found[tensor] = spec.build(seed) if is_plain else Global.of(spec, case.mesh(), seed)
        if not found:
            raise NotationError("there are no tensors")
        return found

    def _held(self, values: Values) -> Values:
        return {name: changed(value, poison) for name, value in values.items()} if self.poisoned else values

    def build(self, value: Values, here: RankContext) -> dict[str, Any]:
        return super().build(self._held(value), here)

    def to_script(self, value: Values, name: str, world: int) -> ScriptArgument:
        made = super().to_script({f"{name}_{tensor}": one for tensor, one in self._held(value).items()}, name, world)
        return replace(made, expression=re.sub(rf"'{name}_(\w)'", r"'\1'", made.expression))


class StateTensorsField(TensorsField):
    """The tensors of a state that is given: placed like the model, or dense where ``how`` says that it is whole."""

    def fields(self, name: str) -> tuple[str, ...]:
        return (*super().fields(name), "how")

    def read(self, case: Case, name: str) -> dict[str, Value]:
        return TensorsField(dense=is_full_state(case.get("how", "plain").split(","))).read(case, name)


def optimized_values(values: Values, traits: Collection[str] = ()) -> dict[str, Any]:
    """What an optimizer is given of a model, by name."""
    values_by_path = parameters_of(values)
    return dict([*values_by_path.items()][:-1]) if "idle" in traits else values_by_path


def values_with_grads(values: Values, traits: Collection[str] = ()) -> dict[str, Any]:
    """What has gradients of that."""
    frozen_names = frozen(dense(values)) if "frozen" in traits else []
    return {path: value for path, value in optimized_values(values, traits).items() if path[-1] not in frozen_names}


class WordsField(Field):
    """Some of these words, joined by commas."""

    def __init__(self, *words: str) -> None:
        self.words, self.takes = words, f"some of {', '.join(words)}, joined by commas"

    def parse(self, text: str) -> list[str]:
        found = text.split(",")
        if {*found} - {*self.words}:
            raise NotationError(f"{text!r} has others")
        return found


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

    def to_script(self, value: int, name: str, world: int) -> ScriptArgument:
        return ScriptArgument(f'DeviceMesh("cpu", [[0, 1], [2, 3]]).get_group({value})')


Tensors = Annotated[dict[str, Any], TensorsField()]
Poisoned = Annotated[dict[str, Any], TensorsField(poisoned=True)]
PoisonedTarget = Annotated[dict[str, Any], TensorsField("to", "to.x", "to.a", "to.b", "to.c", poisoned=True)]
FullTensors = Annotated[dict[str, torch.Tensor], TensorsField(dense=True)]
StateTensors = Annotated[dict[str, Any], StateTensorsField()]
Gradients = Annotated[dict[str, torch.Tensor], TensorsField("world.save", "world.load", dense=True)]
Group = Annotated[dist.ProcessGroup, GroupField()]
WorldMesh = Annotated[
    DeviceMesh,
    RankField(
        lambda here: here.mesh(Mesh((here.world,), tuple(range(here.world)))),
        'init_device_mesh("cpu", (dist.get_world_size(),))',
    ),
]
