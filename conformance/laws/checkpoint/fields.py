"""The field types of laws on checkpoints: what is saved and loaded into, and writers, readers and planners.

What a case says of a state stands in many of its fields, see :mod:`shardlaw.conformance.laws.checkpoint.trip`. An act
gets real state dicts, a script prints them, and a due function gets their :class:`Contents`. ``writer`` and ``reader``
make those of the target's storage for a folder, with the options of the case; in scripts they are torch's own.
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
from shardlaw.conformance.laws.checkpoint.contents import Contents, changed
from shardlaw.conformance.laws.checkpoint.state_text import built, printed
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
OF_STATES = ("*", "mesh", "mesh.load", "state", "into", "to", "to.?", "dtype", "memory", "world.save", "world.load",
             "held", "cut", "held.load", "cut.load")  # fmt: skip
OF_WRITERS = ("threads", "files", "sync", "ahead", "format")


class StateField(Field):
    """A state at one ``end`` of a trip; ``tree`` names the end whose state it is, where that is the other one.

    ``blank``: a destination: poisoned, or on the device ``meta``. What a due function gets is what must arrive in it.
    ``plain``: with whole
    tensors; ``rebuilt``: as it is put together from its leaves. ``newer``: values that were changed so many times.
    """

    takes = "a state such as {w:x,n:1} and tensors of one letter"
    always = True

    def __init__(
        self,
        end: Literal["save", "load"],
        *,
        tree: Literal["", "save", "load"] = "",
        blank: Literal["", "poison", "meta"] = "",
        plain: bool = False,
        rebuilt: bool = False,
        newer: int = 0,
    ) -> None:
        self.end, self.tree, self.blank, self.plain, self.rebuilt, self.newer = (
            end,
            tree or end,
            blank,
            plain,
            rebuilt,
            newer,
        )

    def fields(self, name: str) -> tuple[str, ...]:
        return OF_STATES

    def read(self, case: Case, name: str) -> Contents:
        trip = t.read_trip(case)
        end: t.End = getattr(trip, self.end)
        tree = getattr(trip, self.tree).state
        if self.rebuilt:
            tree = unflatten(flatten(tree))
        specs = {name: spec.with_placements(None) for name, spec in end.specs.items()} if self.plain else end.specs
        values = {name: changed(full, self.newer) for name, full in trip.values.items()} if self.newer else trip.values
        return Contents(replace(trip, values=values), replace(end, state=tree, specs=specs))

    def build(self, value: Contents, here: RankContext) -> State:
        return built(value, here, self.blank)

    def to_script(self, value: Contents, name: str, world: int) -> ScriptArgument:
        return printed(value, "" if name == "state" else f"{name}_", world, self.blank)


class StatesField(Field):
    """The states that the field ``order`` names one after the other, ``a`` that of the save and ``b`` that of the load;
    the values of each differ from those of the one before."""

    takes = "an order such as aba"
    always = True

    def __init__(self, *, blank: bool = False) -> None:
        self.blank = "poison" if blank else ""

    def fields(self, name: str) -> tuple[str, ...]:
        return (*OF_STATES, "order")

    def read(self, case: Case, name: str) -> list[Contents]:
        ends: dict[str, Literal["save", "load"]] = {"a": "save", "b": "load"}
        return [StateField(ends[which], newer=at).read(case, name) for at, which in enumerate(case.get("order"))]

    def build(self, value: Sequence[Contents], here: RankContext) -> list[State]:
        return [built(one, here, self.blank) for one in value]

    def to_script(self, value: Sequence[Contents], name: str, world: int) -> ScriptArgument:
        found = [printed(one, f"{name}_{at}_", world, self.blank) for at, one in enumerate(value)]
        lines = tuple(line for one in found for line in one.statements)
        uses = tuple(dict.fromkeys(thing for one in found for thing in one.uses))
        return ScriptArgument(f"[{', '.join(one.expression for one in found)}]", (), lines, uses=uses)


class WriterField(Field):
    """What makes writers for a folder: with the options of the case, and those that ``more`` finds in it."""

    takes = "options of a writer"
    always = True

    def __init__(self, more: Callable[[Case], Mapping[str, Any]] = lambda case: {}) -> None:
        self.more = more

    def fields(self, name: str) -> tuple[str, ...]:
        return OF_WRITERS

    def read(self, case: Case, name: str) -> dict[str, Any]:
        return {**t.writer_options(case), **self.more(case)}

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
    """The options of the case alone, for writers of another storage than the target's."""

    def build(self, value: Mapping[str, Any], here: RankContext) -> Any:
        return dict(value)

    def to_script(self, value: Mapping[str, Any], name: str, world: int) -> ScriptArgument:
        return ScriptArgument(repr(dict(value)))


def options_text(options: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{key}={str(value) if isinstance(value, Enum) else repr(value)}" for key, value in options.items()
    )


class PlannerField(Field):
    """The planner of a save or a load with the options of the case; ``None`` where there are none and the default
    serves.

    ``made``: its class, where it is another. ``partial``: a load may leave alone what was not saved, where there is
    such.
    """

    takes = "options of a planner"
    always = True

    def __init__(self, *, saves: bool, made: type | None = None, partial: bool = False) -> None:
        self.saves, self.made, self.partial = saves, made, partial

    def fields(self, name: str) -> tuple[str, ...]:
        return ("nested", "inner", "dedup")

    def read(self, case: Case, name: str) -> dict[str, Any]:
        allowed = {"allow_partial_load": True} if self.partial and unsaved(case) else {}
        return {**t.planner_options(case, saves=self.saves), **allowed}

    def build(self, value: Mapping[str, Any], here: RankContext) -> Any:
        made = self.made or (DefaultSavePlanner if self.saves else DefaultLoadPlanner)
        return made(**value) if value or self.made else None

    def to_script(self, value: Mapping[str, Any], name: str, world: int) -> ScriptArgument:
        if self.made is None:
            made = "dcp.DefaultSavePlanner" if self.saves else "dcp.DefaultLoadPlanner"
            return ScriptArgument(f"{made}({options_text(value)})" if value else "None", imports=(IMPORT,))
        of_torch = self.made.__module__.startswith("torch.")
        imports = (f"from {self.made.__module__} import {self.made.__name__}",) if of_torch else ()
        return ScriptArgument(
            f"{self.made.__name__}({options_text(value)})", imports=imports, uses=() if of_torch else (self.made,)
        )


def unsaved(case: Case) -> list[str]:
    """The leaves of what is loaded into that were not saved."""
    trip = t.read_trip(case)
    try:
        saved = flatten(trip.save.state)
        return [name for name in flatten(trip.load.state) if name not in saved]
    except FlattenError:
        return []


class EndMeshField(MeshField):
    """The mesh of the load, which is that of the save where the case names no other."""

    always = True

    def read(self, case: Case, name: str) -> Mesh:
        return t.mesh_of_load(case)

    def fields(self, name: str) -> tuple[str, ...]:
        return ("mesh", "mesh.load")

    def to_script(self, value: Mesh, name: str, world: int) -> ScriptArgument:
        # a state of a script makes it too, under one of these names
        return ScriptArgument("mesh", (), (mesh_line(value, "mesh"),))


class ReaderField(RankField):
    """What makes readers for a folder."""

    def __init__(self) -> None:
        super().__init__(lambda here: functools.partial(storage.make_reader, here.target), "dcp.FileSystemReader")

    def to_script(self, value: Any, name: str, world: int) -> ScriptArgument:
        return ScriptArgument(self.expression, imports=(IMPORT,))


class InFilesField(RankField):
    """Whether the target's storage keeps files."""

    def __init__(self) -> None:
        super().__init__(lambda here: storage.target_storage(here.target).files, "IN_FILES")

    def to_script(self, value: Any, name: str, world: int) -> ScriptArgument:
        return ScriptArgument(self.expression, ("IN_FILES = True",))


Saved = Annotated[dict[str, Any], StateField("save")]
Newer = Annotated[dict[str, Any], StateField("save", newer=1)]
Blank = Annotated[dict[str, Any], StateField("load", blank="poison")]
NewerBlank = Annotated[dict[str, Any], StateField("load", blank="poison", newer=1)]
States = Annotated[list[dict[str, Any]], StatesField()]
Blanks = Annotated[list[dict[str, Any]], StatesField(blank=True)]
Writer = Annotated[Callable[..., Any], WriterField()]
WriterOptions = Annotated[dict[str, Any], WriterOptionsField()]
Reader = Annotated[Callable[..., Any], ReaderField()]
Place = Annotated[
    Callable[[str], Any], RankField(lambda here: functools.partial(storage.checkpoint_id, here.target), "str")
]
"""What the target's storage calls the checkpoint in a folder: its ``checkpoint_id``."""
SavePlanner = Annotated[Any, PlannerField(saves=True)]
LoadPlanner = Annotated[Any, PlannerField(saves=False)]
LoadMesh = Annotated[DeviceMesh, EndMeshField()]
InFiles = Annotated[bool, InFilesField()]
"""Whether a checkpoint of the target's storage is a folder of files that its metadata names."""
