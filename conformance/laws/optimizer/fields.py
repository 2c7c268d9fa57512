"""The fields of the laws on optimizers: the tensors of a model, words, and process groups.

The tensors of a model are the fields of one letter. An act gets a dict of DTensors or plain tensors; a due function a
dict of :class:`~shardlaw.conformance.law.due.Global` for DTensors, of dense tensors for plain ones.
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
    """All tensors of a model, sharded on ``mesh``; ``dense``: plain on every rank.

    ``further``: more fields of the case; if ``to`` is one, the placements are those of ``to`` and ``to.NAME``.
    ``poisoned``: the act gets tensors that differ in every element from those of the due function."""

    field, takes = "", "tensors of one letter, such as x=5x6:S(0)"
    always = True

    def __init__(self, *further: str, poisoned: bool = False, dense: bool = False) -> None:
        self.further, self.poisoned, self.dense = further, poisoned, dense

    def fields(self, name: str) -> tuple[str, ...]:
        return ("*", "mesh", *self.further)

    def read(self, case: Case, name: str) -> dict[str, Value]:
        found: dict[str, Value] = {}
        for at, tensor in enumerate(tensor_names(case)):
            spec, seed = case.tensor(tensor), case.seed + 31 * at
            if "to" in self.further:
                spec = spec.with_placements(placements_at_load(case, tensor))
            is_plain = self.dense or spec.placements is None
            found[tensor] = spec.build(seed) if is_plain else Global.of(spec, case.mesh(), seed)
        if not found:
            raise NotationError("there are no tensors")
        return found

    def _act_values(self, values: Values) -> Values:
        return {name: changed(value, poison) for name, value in values.items()} if self.poisoned else values

    def build(self, value: Values, here: RankContext) -> dict[str, Any]:
        return super().build(self._act_values(value), here)

    def to_script(self, value: Values, name: str, world: int) -> ScriptArgument:
        values = {f"{name}_{tensor}": one for tensor, one in self._act_values(value).items()}
        argument = super().to_script(values, name, world)
        return replace(argument, expression=re.sub(rf"'{name}_(\w)'", r"'\1'", argument.expression))


class StateTensorsField(TensorsField):
    """The tensors of a state to set: sharded like the model, or dense where ``how`` says that the state is full."""

    def fields(self, name: str) -> tuple[str, ...]:
        return (*super().fields(name), "how")

    def read(self, case: Case, name: str) -> dict[str, Value]:
        return TensorsField(dense=is_full_state(case.get("how", "plain").split(","))).read(case, name)


def optimized_values(values: Values, traits: Collection[str] = ()) -> dict[str, Any]:
    """The due values of the parameters in the optimizer, by state name."""
    values_by_path = parameters_of(values)
    if "trained" in traits:
        values_by_path["kept.own.weight"] = next(iter(values.values()))
    return dict([*values_by_path.items()][:-1]) if "idle" in traits else values_by_path


def values_with_grads(values: Values, traits: Collection[str] = ()) -> dict[str, Any]:
    """The due values of the parameters in the optimizer that have gradients, by state name."""
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
    """The process group of this rank along an axis of a 2x2 mesh; the due function gets its ranks."""

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
