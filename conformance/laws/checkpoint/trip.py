"""Round trips of checkpoints: reads the save and the load from a case, and builds their states on a rank.

Fields of a case:

``a`` .. ``z``      the saved tensors, with their placements on ``mesh``; plain without placements
``state``           the saved state, in the notation of :mod:`shardlaw.reference.checkpoint.state_dict`; default: every
                    tensor under its name
``mesh.load``       the mesh of the load; default: ``mesh``
``to``, ``to.x``    the placements (of ``x``) on ``mesh.load``; ``-``: a plain tensor; default: those of the save
``into``            the state that is loaded into; default: ``state``
``dtype``, ``memory``  those of the tensors that are loaded into; default: those of the save
``world.save``, ``world.load``  numbers of ranks; default: those that the meshes need
``held``, ``cut``   holder and cut of the saved tensors, see :mod:`shardlaw.conformance.laws.checkpoint.holders`
``held.load``, ``cut.load``  the same for the tensors that are loaded into
``threads``, ``files``  options of the writer: its threads, one file a ``rank`` or an ``item``
``sync``, ``ahead``, ``format``  whether it syncs files (``1``), bytes that it copies ahead, serialization format
``dedup``           the rank that writes what several ranks have: the ``lowest``, or ``balanced``
``nested``, ``inner``  ``kept``: the planner does not flatten states, or sharded tensors within one another

The destination is poisoned: every element, and every value that is no tensor, differs from the saved one.
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
from shardlaw.conformance.laws.checkpoint.holders import HOLDERS, build_holder, elements, shards_of_cut
from shardlaw.conformance.rank.context import RankContext
from shardlaw.reference.box import Box
from shardlaw.reference.checkpoint.state_dict import Slot, State, Stateful, map_leaves, parse_state, slot_names
from shardlaw.reference.layout import Layout
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.notation import NotationError
from shardlaw.reference.placement import Placements, parse_placements
from shardlaw.reference.shards import Shards
from shardlaw.reference.tensors import DTYPES, TensorSpec, lay_out

FLATTENING = {"nested": "flatten_state_dict", "inner": "flatten_sharded_tensors"}


@dataclass(frozen=True)
class End:
    """The save or the load of a trip: a state, and how each of its tensors lies on ``mesh``."""

    state: State
    mesh: Mesh
    specs: dict[str, TensorSpec]
    holder: str = ""
    cut: str = ""

    def layout(self, name: str) -> Layout | None:
        """The layout of a tensor, or ``None`` for a plain one."""
        spec = self.specs[name]
        return None if spec.placements is None else Layout(spec.shape, self.mesh, spec.placements)

    def shards(self, name: str, ranks: Iterable[int]) -> Shards:
        """The shards of a tensor; all of a plain one is on each of ``ranks``."""
        layout = self.layout(name)
        if layout is None:
            return Shards.whole(self.specs[name].shape, ranks)
        return shards_of_cut(layout, self.cut) if self.holder else Shards.of_layout(layout)

    def boxes(self, name: str, rank: int) -> tuple[Box, ...]:
        """The boxes of a tensor on a rank."""
        return self.shards(name, (rank,)).boxes_of(rank)


@dataclass(frozen=True)
class Trip:
    """Both ends of a trip, their numbers of ranks, and the elements of the saved tensors."""

    save: End
    load: End
    world_sizes: tuple[int, int]
    values: dict[str, torch.Tensor]

    def full_tensor(self, end: End, name: str) -> torch.Tensor:
        """The global tensor at an end: the saved one, in the dtype of that end."""
        return self.values[name].to(DTYPES[end.specs[name].dtype])


def tensor_names(case: Case) -> list[str]:
    """The names of the tensors of a case: its fields of one letter."""
    return [name for name, _ in case.fields if re.fullmatch("[a-z]", name)]


def state_of(case: Case, names: Iterable[str]) -> State:
    """The saved state: the field ``state``, or every tensor under its name."""
    return parse_state(case.get("state")) if "state" in case else {name: Slot(name) for name in names}


def mesh_of_load(case: Case) -> Mesh:
    """The mesh of the load, by default that of the save."""
    return case.mesh("mesh.load" if "mesh.load" in case else "mesh")


def placements_at_load(case: Case, name: str) -> Placements | None:
    """The placements of a tensor at the load, by default those of the save; ``None`` for a plain tensor."""
    text = case.get(f"to.{name}", case.get("to", "same"))
    if text == "same":
        return case.tensor(name).placements
    return None if text == "-" else parse_placements(text)


@lru_cache(64)
def read_trip(case: Case) -> Trip:
    """The trip of a case. Raises :class:`NotationError` where a state names a tensor that the case lacks, and for an
    unknown holder."""
    for field in ("held", "held.load"):
        if field in case and case.get(field) not in ("wrapper", *HOLDERS):
            raise NotationError(f"{field}={case.get(field)}: want one of wrapper, {', '.join(HOLDERS)}")
    saved = {name: case.tensor(name) for name in tensor_names(case)}
    state = state_of(case, saved)
    into = parse_state(case.get("into")) if "into" in case else state
    missing = [name for name in (*slot_names(state), *slot_names(into)) if name not in saved]
    if missing:
        raise NotationError(f"case {case.text!r}: the state names the tensor {missing[0]!r}, which has no field")
    loaded = {name: _spec_at_load(case, name, spec) for name, spec in saved.items()}
    values = {name: spec.build(case.seed + 31 * at) for at, (name, spec) in enumerate(saved.items())}
    save = End(state, case.mesh(), saved, case.get("held", ""), case.get("cut", ""))
    load = End(into, mesh_of_load(case), loaded, case.get("held.load", ""), case.get("cut.load", ""))
    return Trip(save, load, world_sizes(case), values)


def writer_options(case: Case) -> dict[str, Any]:
    """The options of the writer in a case. Raises :class:`NotationError`."""
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
    """The options in a case of the planner of the save, or of the load."""
    options = {"dedup_save_to_lowest_rank": case.get("dedup") == "lowest"} if saves and "dedup" in case else {}
    return {**options, **{option: False for name, option in FLATTENING.items() if case.get(name, "") == "kept"}}


def world_sizes(case: Case) -> tuple[int, int]:
    """The numbers of ranks that save and that load."""
    saving, loading = case.mesh().ranks, mesh_of_load(case).ranks
    return case.integer("world.save", max(saving) + 1), case.integer("world.load", max(loading) + 1)


def _spec_at_load(case: Case, name: str, spec: TensorSpec) -> TensorSpec:
    dtype, memory = case.get("dtype", spec.dtype), case.get("memory", "plain")
    return replace(spec, placements=placements_at_load(case, name), dtype=dtype, memory=memory)


def build_state(end: End, build: Callable[[str], Any]) -> State:
    """The state of one end, with an :class:`App` for each stateful object and the tensors that ``build`` makes, each
    once."""
    tensors = {name: build(name) for name in slot_names(end.state)}

    def build_value(value: Any) -> Any:
        value = map_leaves(value, lambda leaf: tensors[leaf.name] if isinstance(leaf, Slot) else leaf)
        return App(value.state) if isinstance(value, Stateful) else value

    return {key: build_value(value) for key, value in end.state.items()}


def local_tensor(end: End, name: str, full: torch.Tensor, rank: int) -> torch.Tensor:
    """The local tensor of ``name`` on a rank; contributions to a pending reduction are unequal."""
    layout = end.layout(name)
    return full if layout is None else Global(full, layout).local(rank)


def build_tensor(
    here: RankContext, end: End, name: str, full: torch.Tensor, fill: Callable[[torch.Tensor], torch.Tensor]
) -> Any:
    """The tensor ``name`` of one end on this rank; ``fill`` maps the local elements of ``full`` to initial ones."""
    layout = end.layout(name)
    if end.holder and layout is not None:
        shards = [(box, fill(elements(full, box))) for box in end.boxes(name, here.rank)]
        return build_holder(here, end.holder, layout, shards)
    local = lay_out(fill(local_tensor(end, name, full, here.rank).contiguous()), end.specs[name].memory)
    local = local if local.is_meta else here.tensor(local)
    return local if layout is None else assemble_dtensor(Global(full, layout), local, here)
