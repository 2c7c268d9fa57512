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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
import torch.distributed.checkpoint
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.tensor import DTensor

from shardlaw.conformance.law.case import Case
from shardlaw.conformance.laws.checkpoint.calls import App, CheckpointFailed, poison, told_plainly  # noqa: F401
from shardlaw.conformance.laws.checkpoint.holders import Piece, hold, pieces
from shardlaw.conformance.laws.checkpoint.holders import judge as judge_pieces
from shardlaw.conformance.rank import storage
from shardlaw.conformance.rank.context import RankContext, Rejected, read_placements
from shardlaw.reference import simulate
from shardlaw.reference.checkpoint.state_dict import Slot, State, Stateful, format_state, mapped, parse_state, slots
from shardlaw.reference.layout import Layout
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.notation import NotationError
from shardlaw.reference.placement import Placements, format_placements, parse_placements
from shardlaw.reference.tensors import DTYPES, TensorSpec, lay_out

dcp: Any = torch.distributed.checkpoint
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

    def pieces(self, name: str, rank: int) -> list[Piece]:
        """The pieces of the tensor that a rank holds, where it is no DTensor of chunks."""
        layout = self.layout(name)
        return [piece for piece in pieces(layout, self.cut) if piece.rank == rank] if layout else []


@dataclass(frozen=True)
class Trip:
    """What a case says: both ends, how many ranks each has, and the options of the save; ``reading`` are those of the
    load's planner."""

    save: End
    load: End
    worlds: tuple[int, int]
    values: dict[str, torch.Tensor]
    writer: dict[str, Any]
    planner: dict[str, Any]
    reading: dict[str, Any] = field(default_factory=dict)

    def due(self, end: End, name: str) -> torch.Tensor:
        """The global tensor that an end holds: the saved one, in the dtype of that end."""
        return self.values[name].to(DTYPES[end.specs[name].dtype])


def tensor_names(case: Case) -> list[str]:
    """The fields of a case that are tensors: those of one letter."""
    return [name for name, _ in case.fields if re.fullmatch("[a-z]", name)]


@lru_cache(64)
def read_trip(case: Case) -> Trip:
    """Raises :class:`NotationError` where the case is no round trip."""
    names = tensor_names(case)
    saved = {name: case.tensor(name) for name in names}
    state = parse_state(case.get("state")) if "state" in case else {name: Slot(name) for name in names}
    into = parse_state(case.get("into")) if "into" in case else state
    missing = [name for name in (*slots(state), *slots(into)) if name not in saved]
    if missing:
        raise NotationError(f"case {case.text!r}: the state names the tensor {missing[0]!r}, which has no field")
    mesh = case.mesh()
    mesh_load = case.mesh("mesh.load") if "mesh.load" in case else mesh
    loaded = {name: _loaded(case, name, spec) for name, spec in saved.items()}
    values = {name: spec.build(case.seed + 31 * at) for at, (name, spec) in enumerate(saved.items())}
    reading = planner_options(case, saves=False)
    save = End(state, mesh, saved, case.get("held", ""), case.get("cut", ""))
    load = End(into, mesh_load, loaded, case.get("held.load", ""), case.get("cut.load", ""))
    return Trip(save, load, worlds(case), values, writer_options(case), planner_options(case, saves=True), reading)


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
    mesh = case.mesh()
    mesh_load = case.mesh("mesh.load") if "mesh.load" in case else mesh
    return case.integer("world.save", max(mesh.ranks) + 1), case.integer("world.load", max(mesh_load.ranks) + 1)


def _loaded(case: Case, name: str, spec: TensorSpec) -> TensorSpec:
    text = case.get(f"to.{name}", case.get("to", "same"))
    placed: Placements | None = spec.placements if text == "same" else None if text == "-" else parse_placements(text)
    return replace(spec, placements=placed, dtype=case.get("dtype", spec.dtype), memory=case.get("memory", "plain"))


def build(end: End, make: Callable[[str], Any]) -> State:
    """The state of one end with real tensors, made by name (once each), and real stateful objects."""
    made = {name: make(name) for name in slots(end.state)}
    return {key: _real(value, made) for key, value in end.state.items()}


def _real(value: Any, made: dict[str, Any]) -> Any:
    built = mapped(value, lambda leaf: made[leaf.name] if isinstance(leaf, Slot) else leaf)
    return App(built.state) if isinstance(built, Stateful) else built


def part(end: End, name: str, full: torch.Tensor, rank: int) -> torch.Tensor:
    """What a rank must hold of the tensor ``name`` of one end (with unequal contributions where a reduction is
    pending)."""
    layout = end.layout(name)
    if layout is None:
        return full
    coord = layout.mesh.coord(rank)
    if coord is None:
        return torch.empty((0,) * min(full.ndim, 1), dtype=full.dtype)
    return simulate.distribute(full, layout, 0)[coord] if layout.has_partial() else simulate.take(full, layout, coord)


def placed(
    here: RankContext, end: End, name: str, full: torch.Tensor, put: Callable[[torch.Tensor], torch.Tensor]
) -> Any:
    """The tensor ``name`` of one end, as this rank holds it; ``put`` turns the elements that it must hold into those it
    does."""
    layout = end.layout(name)
    if end.held and layout is not None:
        return hold(here, end.held, layout, [(piece, put(piece.of(full))) for piece in end.pieces(name, here.rank)])
    held = lay_out(put(part(end, name, full, here.rank)), end.specs[name].memory)
    held = held if held.is_meta else here.tensor(held)
    if layout is None:
        return held
    stride = torch.empty(full.shape, device="meta").stride()
    places = here.placements(layout.placements)
    return DTensor.from_local(held, here.mesh(layout.mesh), places, run_check=False, shape=full.shape, stride=stride)


def reject_options(here: RankContext, options: Iterable[str]) -> None:
    """Give up a case with options that the target's writer does not take."""
    try:
        storage.want_options(here.target, options)
    except storage.NoSuchOption as error:
        raise Rejected(str(error)) from None


def judge(
    trip: Trip,
    here: RankContext,
    state: State,
    *,
    check: str = "loaded",
    end: End | None = None,
    want: State | None = None,
    kept: Iterable[str] = (),
) -> None:
    """Hold a state against what must be in it: structure, types, values; tensors on every rank.

    ``end`` says where its tensors lie (default: the load). ``want`` is what it must hold, where that is not all of
    ``end``; tensors in
    ``kept`` must still be poison.
    """
    end = end or trip.load
    spared = {*kept}
    for place, got, due_there in _pairs("", state, end.state if want is None else want, here, check):
        if not isinstance(due_there, Slot):
            same_value(here, got, due_there, place, check)
            continue
        name = due_there.name
        full = poison(trip.due(end, name)) if name in spared else trip.due(end, name)
        if end.held and end.layout(name):
            judge_pieces(here, end.held, end.pieces(name, here.rank), full, got, place=place, check=check)
        else:
            judge_tensor(here, got, full, end.layout(name), place=place, check=check)


def judge_tensor(
    here: RankContext, got: Any, full: torch.Tensor, layout: Layout | None, *, place: str, check: str
) -> None:
    """Hold one tensor against the elements of ``full`` that this rank must hold under ``layout``; ``None`` for a plain
    tensor."""
    want = torch.Tensor if layout is None else DTensor
    message = f"{place} is a {type(got).__name__}, must be a {want.__name__}"
    if not here.require(type(got) is want, "wrong-metadata", check, message):
        return
    if layout is None:
        here.same(got, full, check, what=place)
        return
    coord = here.coord(layout.mesh)
    if coord is None:
        return
    claims = format_placements(read_placements(got.placements)), tuple(got.shape)
    due = format_placements(layout.placements), layout.shape
    if here.require(claims == due, "wrong-metadata", check, f"{place} claims another layout than it must", due, claims):
        here.same(got.to_local(), simulate.take(full, layout, coord), check, what=f"local tensor of {place}")


def same_value(here: RankContext, got: Any, want: Any, place: str, check: str) -> None:
    """Two values that are no tensors: of one type, and equal, all through."""
    if here.require(
        type(got) is type(want),
        "wrong-metadata",
        check,
        f"{place} is a {type(got).__name__}, must be a {type(want).__name__}",
        repr(want),
        repr(got),
    ):
        here.require(
            format_state(got) == format_state(want),
            "wrong-value",
            check,
            f"{place} is not what was saved",
            repr(want),
            repr(got),
        )


def _pairs(place: str, got: Any, want: Any, here: RankContext, check: str) -> Iterator[tuple[str, Any, Any]]:
    """Every leaf of ``want`` with what stands in its place; records where the structure is another."""
    if isinstance(want, Stateful):
        message = f"{place} is a {type(got).__name__}, must still be the stateful object"
        if here.require(isinstance(got, App), "wrong-metadata", check, message):
            yield from _pairs(place, got.state, want.state, here, check)
    elif isinstance(want, dict) and isinstance(got, dict):
        same = sorted(map(repr, got)) == sorted(map(repr, want))
        here.require(
            same, "wrong-metadata", check, f"{place or 'the state'} has other keys than it must", [*want], [*got]
        )
        for key, value in want.items():
            if key in got:
                yield from _pairs(f"{place}.{key}" if place else str(key), got[key], value, here, check)
    elif isinstance(want, list | tuple) and type(got) is type(want) and len(got) == len(want) and any(slots(want)):
        for at, (mine, value) in enumerate(zip(got, want, strict=True)):
            yield from _pairs(f"{place}.{at}", mine, value, here, check)
    else:
        yield place, got, want
