"""A round trip of a checkpoint: what a case says of it, how a rank builds both of its ends, and how it judges what came
back.

Fields of a case, beside those that every reader knows:

``a`` .. ``z``      the tensors: as they are saved, with their placements on ``mesh``; plain where they have none
``state``           what is saved, in the notation of :mod:`shardlaw.reference.checkpoint.state_dict`; left out, every
tensor under its name
``mesh.load``       the mesh of the load, where it is another than ``mesh``
``to``, ``to.x``    the placements (of ``x``) under ``mesh.load``; ``-`` for a plain tensor; left out, those of the save
``into``            what is loaded into, where it is another state than the saved one
``dtype``, ``memory``  of the tensors that are loaded into, where other than those saved
``world.save``, ``world.load``  how many ranks take part, where the meshes do not name them all
``held``, ``cut``   what holds the shards at the save and how they are cut, as in
:mod:`shardlaw.conformance.laws.checkpoint.holders`
``held.load``, ``cut.load``  the same for what is loaded into
``threads``, ``files``  options of the writer: its threads, one file a ``rank`` or an ``item``
``sync``, ``ahead``, ``format``  whether it syncs files (``1``), how many bytes it copies ahead, the format that it
writes
``dedup``           which of several ranks that hold the same writes it: the ``lowest``, or ``balanced``
``nested``, ``inner``  ``kept``: the planner does not flatten states, or sharded tensors within one another

The destination is poisoned: every element and every other value of it differs from what must arrive.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import SerializationFormat

from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Global
from shardlaw.conformance.law.fields import assemble_dtensor
from shardlaw.conformance.laws.checkpoint.calls import App
from shardlaw.conformance.laws.checkpoint.holders import elements, hold, shards_of_cut
from shardlaw.conformance.rank.context import RankContext
from shardlaw.reference.box import Box
from shardlaw.reference.checkpoint.state_dict import Slot, State, Stateful, map_leaves, parse_state, slot_names
from shardlaw.reference.layout import Layout
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.notation import NotationError
from shardlaw.reference.placement import Placements, parse_placements
from shardlaw.reference.shards import Shards
from shardlaw.reference.tensors import DTYPES, TensorSpec, lay_out

KEPT = {"nested": "flatten_state_dict", "inner": "flatten_sharded_tensors"}


@dataclass(frozen=True)
class End:
    """One end of a trip, the save or the load: a state, and where each of its tensors lies on ``mesh``."""

    state: State
    mesh: Mesh
    specs: dict[str, TensorSpec]
    held: str = ""
    cut: str = ""

    def layout(self, name: str) -> Layout | None:
        """Where the tensor lies, or ``None`` for a plain one."""
        spec = self.specs[name]
        return None if spec.placements is None else Layout(spec.shape, self.mesh, spec.placements)

    def shards(self, name: str, ranks: Iterable[int]) -> Shards:
        """Who holds what of the tensor; of a plain one each of ``ranks`` holds all."""
        layout = self.layout(name)
        if layout is None:
            return Shards.whole(self.specs[name].shape, ranks)
        return shards_of_cut(layout, self.cut) if self.held else Shards.of_layout(layout)

    def boxes(self, name: str, rank: int) -> tuple[Box, ...]:
        """The boxes of the tensor that a rank holds."""
        return self.shards(name, (rank,)).boxes_of(rank)


@dataclass(frozen=True)
class Trip:
    """What a case says: both ends, how many ranks each has, and the elements of the tensors."""

    save: End
    load: End
    worlds: tuple[int, int]
    values: dict[str, torch.Tensor]

    def due(self, end: End, name: str) -> torch.Tensor:
        """The global tensor that an end holds: the saved one, in the dtype of that end."""
        return self.values[name].to(DTYPES[end.specs[name].dtype])


def tensor_names(case: Case) -> list[str]:
    """The fields of a case that are tensors: those of one letter."""
    return [name for name, _ in case.fields if re.fullmatch("[a-z]", name)]


def state_of(case: Case, names: Iterable[str]) -> State:
    """What is saved: the field ``state``, or every tensor under its name."""
    return parse_state(case.get("state")) if "state" in case else {name: Slot(name) for name in names}


def mesh_of_load(case: Case) -> Mesh:
    """The mesh of the load, which is that of the save where the case names no other."""
    return case.mesh("mesh.load" if "mesh.load" in case else "mesh")


def placements_at_load(case: Case, name: str) -> Placements | None:
    """Those of a tensor at the load, ``None`` for a plain one: those of the save where the case names no others."""
    text = case.get(f"to.{name}", case.get("to", "same"))
    if text == "same":
        return case.tensor(name).placements
    return None if text == "-" else parse_placements(text)


@lru_cache(64)
def read_trip(case: Case) -> Trip:
    """Raises :class:`NotationError` where the case is no round trip."""
    saved = {name: case.tensor(name) for name in tensor_names(case)}
    state = state_of(case, saved)
    into = parse_state(case.get("into")) if "into" in case else state
    missing = [name for name in (*slot_names(state), *slot_names(into)) if name not in saved]
    if missing:
        raise NotationError(f"case {case.text!r}: the state names the tensor {missing[0]!r}, which has no field")
    loaded = {name: _loaded(case, name, spec) for name, spec in saved.items()}
    values = {name: spec.build(case.seed + 31 * at) for at, (name, spec) in enumerate(saved.items())}
    save = End(state, case.mesh(), saved, case.get("held", ""), case.get("cut", ""))
    load = End(into, mesh_of_load(case), loaded, case.get("held.load", ""), case.get("cut.load", ""))
    return Trip(save, load, worlds(case), values)


def writer_options(case: Case) -> dict[str, Any]:
    """The options of the writer that a case asks for. Raises :class:`NotationError`."""
    options: dict[str, Any] = {}
    for name, option in (("threads", "thread_count"), ("ahead", "per_thread_copy_ahead")):
        if name in case:
            options[option] = case.integer(name)
    if "files" in case:
        options["single_file_per_rank"] = case.get("files") == "rank"
    if "sync" in case:
        options["sync_files"] = case.integer("sync") == 1
    if "format" in case:
        options["serialization_format"] = SerializationFormat(case.get("format"))
    return options


def planner_options(case: Case, *, saves: bool) -> dict[str, Any]:
    """The options of the planner of the save, or of the load, that a case asks for."""
    options = {"dedup_save_to_lowest_rank": case.get("dedup") == "lowest"} if saves and "dedup" in case else {}
    return {**options, **{option: False for name, option in KEPT.items() if case.get(name, "") == "kept"}}


def worlds(case: Case) -> tuple[int, int]:
    """How many ranks save, and how many load."""
    saving, loading = case.mesh().ranks, mesh_of_load(case).ranks
    return case.integer("world.save", max(saving) + 1), case.integer("world.load", max(loading) + 1)


def _loaded(case: Case, name: str, spec: TensorSpec) -> TensorSpec:
    dtype, memory = case.get("dtype", spec.dtype), case.get("memory", "plain")
    return replace(spec, placements=placements_at_load(case, name), dtype=dtype, memory=memory)


def build(end: End, make: Callable[[str], Any]) -> State:
    """The state of one end with real tensors, made by name (once each), and real stateful objects."""
    made = {name: make(name) for name in slot_names(end.state)}
    return {key: _real(value, made) for key, value in end.state.items()}


def _real(value: Any, made: dict[str, Any]) -> Any:
    built = map_leaves(value, lambda leaf: made[leaf.name] if isinstance(leaf, Slot) else leaf)
    return App(built.state) if isinstance(built, Stateful) else built


def part(end: End, name: str, full: torch.Tensor, rank: int) -> torch.Tensor:
    """What a rank must hold of the tensor ``name`` of one end (with unequal contributions where a reduction is
    pending)."""
    layout = end.layout(name)
    return full if layout is None else Global(full, layout).local(rank)


def placed(
    here: RankContext, end: End, name: str, full: torch.Tensor, put: Callable[[torch.Tensor], torch.Tensor]
) -> Any:
    """The tensor ``name`` of one end, as this rank holds it; ``put`` turns the elements that it must hold into those it
    does."""
    layout = end.layout(name)
    if end.held and layout is not None:
        own = [(box, put(elements(full, box))) for box in end.boxes(name, here.rank)]
        return hold(here, end.held, layout, own)
    held = lay_out(put(part(end, name, full, here.rank).contiguous()), end.specs[name].memory)
    held = held if held.is_meta else here.tensor(held)
    return held if layout is None else assemble_dtensor(Global(full, layout), held, here)
