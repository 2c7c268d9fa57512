"""Field types of laws on checkpoints: states, and factories of writers, readers and planners.

Several fields of a case describe a state, see :mod:`shardlaw.conformance.laws.checkpoint.trip`. An act gets a state
dict, a due function its :class:`Contents`. ``writer`` and ``reader`` take a folder and return a writer or a reader of
the target's storage, with the options of the case; in scripts they are those of torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, Literal

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.device_mesh import DeviceMesh

from shardlaw.conformance.law.fields import Field, MeshField, RankField, ScriptArgument, mesh_line
from shardlaw.conformance.laws.checkpoint import trip as t
from shardlaw.conformance.laws.checkpoint.contents import Contents, newer_values
from shardlaw.conformance.laws.checkpoint.state_text import build_contents, script_contents
from shardlaw.conformance.rank import storage
from shardlaw.reference.checkpoint.state_dict import (
    FlattenError,
    State,
    flatten,
    unflatten,
)
from shardlaw.reference.mesh import Mesh

if TYPE_CHECKING:
    from shardlaw.conformance.law.case import Case
    from shardlaw.conformance.rank.context import RankContext

IMPORT = "import torch.distributed.checkpoint as dcp"
STATE_FIELDS = ("*", "mesh", "mesh.load", "state", "into", "to", "to.?", "dtype", "memory", "world.save", "world.load",
             "held", "cut", "held.load", "cut.load")  # fmt: skip
WRITER_FIELDS = ("threads", "files", "sync", "ahead", "format")


class StateField(Field):
    """The state at one ``end`` of a trip.

    ``tree``: the end whose tree it has. ``fill``: it is a destination, and before the load poisoned or on the device
    ``meta``; a due function gets its contents after the load. ``plain``: with full tensors. ``rebuilt``: its tree is
    flattened and unflattened. ``newer``: a number that changes every value; 0: the values of the case.
    """

    takes = "a state such as {w:x,n:1} and tensors of one letter"
    always = True
    reads = STATE_FIELDS

    def __init__(
        self,
        end: Literal["save", "load"],
        *,
        tree: Literal["", "save", "load"] = "",
        fill: Literal["", "poison", "meta"] = "",
        plain: bool = False,
        rebuilt: bool = False,
        newer: int = 0,
    ) -> None:
        self.end, self.tree, self.fill = end, tree or end, fill
        self.plain, self.rebuilt, self.newer = plain, rebuilt, newer

    def read(self, case: Case, name: str) -> Contents:
        trip = t.read_trip(case)
        end: t.End = getattr(trip, self.end)
        tree = getattr(trip, self.tree).state
        if self.rebuilt:
            tree = unflatten(flatten(tree))
        specs = {name: spec.with_placements(None) for name, spec in end.specs.items()} if self.plain else end.specs
        values = (
            {name: newer_values(full, self.newer) for name, full in trip.values.items()} if self.newer else trip.values
        )
        return Contents(replace(trip, values=values), replace(end, state=tree, specs=specs))

    def build(self, value: Contents, here: RankContext) -> State:
        return build_contents(value, here, self.fill)

    def to_script(self, value: Contents, name: str, world: int) -> ScriptArgument:
        return script_contents(value, "" if name == "state" else f"{name}_", world, self.fill)


class StatesField(Field):
    """A list of states, a letter of the field ``order`` each: ``a``, that of the save, or ``b``, that of the load. Each
    state has other values."""

    takes = "an order such as aba"
    always = True
    reads = (*STATE_FIELDS, "order")

    def __init__(self, *, poisoned: bool = False) -> None:
        self.fill = "poison" if poisoned else ""

    def read(self, case: Case, name: str) -> list[Contents]:
        ends: dict[str, Literal["save", "load"]] = {"a": "save", "b": "load"}
        return [StateField(ends[which], newer=at).read(case, name) for at, which in enumerate(case.get("order"))]

    def build(self, value: Sequence[Contents], here: RankContext) -> list[State]:
        return [build_contents(state, here, self.fill) for state in value]

    def to_script(self, value: Sequence[Contents], name: str, world: int) -> ScriptArgument:
        states = [script_contents(state, f"{name}_{at}_", world, self.fill) for at, state in enumerate(value)]
        lines = tuple(line for state in states for line in state.statements)
        uses = tuple(dict.fromkeys(name for state in states for name in state.uses))
        return ScriptArgument(f"[{', '.join(state.expression for state in states)}]", (), lines, uses=uses)


class WriterField(Field):
    """A function from a folder to a writer, with the options of the case and those that ``extra`` reads from it."""

    takes = "options of a writer"
    always = True
    reads: tuple[str, ...] = WRITER_FIELDS

    def __init__(self, extra: Callable[[Case], Mapping[str, Any]] = lambda case: {}) -> None:
        self.extra = extra

    def read(self, case: Case, name: str) -> dict[str, Any]:
        return {**t.writer_options(case), **self.extra(case)}

    def build(self, value: Mapping[str, Any], here: RankContext) -> Any:
        try:
            storage.check_options(here.target, value)
        except storage.NoSuchOption as error:
            here.reject(str(error))
        return functools.partial(storage.make_writer, here.target, **value)

    def to_script(self, value: Mapping[str, Any], name: str, world: int) -> ScriptArgument:
        if not value:
            return ScriptArgument("dcp.FileSystemWriter", imports=(IMPORT,))
        imports = ["import functools", IMPORT]
        if "serialization_format" in value:
            imports.append("from torch.distributed.checkpoint.filesystem import SerializationFormat")
        return ScriptArgument(f"functools.partial(dcp.FileSystemWriter, {options_text(value)})", imports=tuple(imports))


class WriterOptionsField(WriterField):
    """The options of the writer, for a storage other than the target's."""

    def build(self, value: Mapping[str, Any], here: RankContext) -> Any:
        return dict(value)

    def to_script(self, value: Mapping[str, Any], name: str, world: int) -> ScriptArgument:
        return ScriptArgument(repr(dict(value)))


def options_text(options: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{key}={str(value) if isinstance(value, Enum) else repr(value)}" for key, value in options.items()
    )


class PlannerField(Field):
    """The planner of a save or a load with the options of the case; ``None`` for the default planner without options.

    ``planner_class``: its class, if not the default. ``partial``: allow a partial load where leaves were not saved.
    """

    takes = "options of a planner"
    always = True
    reads = ("nested", "inner", "dedup")

    def __init__(self, *, saves: bool, planner_class: type | None = None, partial: bool = False) -> None:
        self.saves, self.planner_class, self.partial = saves, planner_class, partial

    def read(self, case: Case, name: str) -> dict[str, Any]:
        allowed = {"allow_partial_load": True} if self.partial and unsaved(case) else {}
        return {**t.planner_options(case, saves=self.saves), **allowed}

    def build(self, value: Mapping[str, Any], here: RankContext) -> Any:
        planner_class = self.planner_class or (DefaultSavePlanner if self.saves else DefaultLoadPlanner)
        return planner_class(**value) if value or self.planner_class else None

    def to_script(self, value: Mapping[str, Any], name: str, world: int) -> ScriptArgument:
        if self.planner_class is None:
            default = "dcp.DefaultSavePlanner" if self.saves else "dcp.DefaultLoadPlanner"
            return ScriptArgument(f"{default}({options_text(value)})" if value else "None", imports=(IMPORT,))
        name, module = self.planner_class.__name__, self.planner_class.__module__
        expression = f"{name}({options_text(value)})"
        if module.startswith("torch."):
            return ScriptArgument(expression, imports=(f"from {module} import {name}",))
        return ScriptArgument(expression, uses=(self.planner_class,))


def unsaved(case: Case) -> list[str]:
    """The leaves of the state of the load that were not saved."""
    trip = t.read_trip(case)
    try:
        saved = flatten(trip.save.state)
        return [name for name in flatten(trip.load.state) if name not in saved]
    except FlattenError:
        return []


class EndMeshField(MeshField):
    """The mesh of the load, by default that of the save."""

    always = True
    reads = ("mesh", "mesh.load")

    def read(self, case: Case, name: str) -> Mesh:
        return t.mesh_of_load(case)

    def to_script(self, value: Mesh, name: str, world: int) -> ScriptArgument:
        return ScriptArgument("mesh", (), (mesh_line(value, "mesh"),))


Saved = Annotated[dict[str, Any], StateField("save")]
Newer = Annotated[dict[str, Any], StateField("save", newer=1)]
Destination = Annotated[dict[str, Any], StateField("load", fill="poison")]
NewerDestination = Annotated[dict[str, Any], StateField("load", fill="poison", newer=1)]
States = Annotated[list[dict[str, Any]], StatesField()]
Destinations = Annotated[list[dict[str, Any]], StatesField(poisoned=True)]
Writer = Annotated[Callable[..., Any], WriterField()]
WriterOptions = Annotated[dict[str, Any], WriterOptionsField()]
Reader = Annotated[
    Callable[..., Any],
    RankField(
        lambda here: functools.partial(storage.make_reader, here.target), "dcp.FileSystemReader", imports=(IMPORT,)
    ),
]
CheckpointId = Annotated[
    Callable[[str], Any], RankField(lambda here: functools.partial(storage.checkpoint_id, here.target), "str")
]
"""A function from a folder to the ``checkpoint_id`` by which the target's storage names the checkpoint there."""
SavePlanner = Annotated[Any, PlannerField(saves=True)]
LoadPlanner = Annotated[Any, PlannerField(saves=False)]
LoadMesh = Annotated[DeviceMesh, EndMeshField()]
InFiles = Annotated[
    bool,
    RankField(lambda here: storage.target_storage(here.target).files, "IN_FILES", constants=("IN_FILES = True",)),
]
"""Whether a checkpoint of the target's storage is a folder of files that its metadata lists."""
