"""A round trip of a checkpoint: what a case says of it, how a rank builds both of its ends, and how it judges what came back.

Fields of a case, beside those that every reader knows:

``a`` .. ``z``      the tensors: as they are saved, with their placements on ``mesh``; plain where they have none
``state``           what is saved, in the notation of :mod:`reference.checkpoint.state_dict`; left out, every tensor under its name
``mesh.load``       the mesh of the load, where it is another than ``mesh``
``to``, ``to.x``    the placements (of ``x``) under ``mesh.load``; ``-`` for a plain tensor; left out, those of the save
``into``            what is loaded into, where it is another state than the saved one
``dtype``, ``memory``  of the tensors that are loaded into, where other than those saved
``world.save``, ``world.load``  how many ranks take part, where the meshes do not name them all
``held``, ``cut``   what holds the shards at the save and how they are cut, as in :mod:`conformance.holders`
``held.load``, ``cut.load``  the same for what is loaded into
``threads``, ``files``  options of the writer: its threads, one file a ``rank`` or an ``item``
``sync``, ``ahead``, ``format``  whether it syncs files (``1``), how many bytes it copies ahead, the format that it writes
``dedup``           which of several ranks that hold the same writes it: the ``lowest``, or ``balanced``
``nested``, ``inner``  ``kept``: the planner does not flatten states, or sharded tensors within one another

The destination is poisoned: every element and every other value of it differs from what must arrive.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed.checkpoint
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.tensor import DTensor

from conformance.case import Case
from conformance.here import Here, Rejected, read_placements
from conformance.holders import Piece, hold, pieces
from conformance.holders import judge as judge_pieces
from conformance.target import storage
from reference import simulate
from reference.checkpoint.state_dict import Slot, State, Stateful, format_state, mapped, parse_state, slots, spoiled
from reference.layout import Layout
from reference.mesh import Mesh
from reference.notation import NotationError
from reference.placement import Placements, format_placements, parse_placements
from reference.tensors import DTYPES, TensorSpec, lay_out

dcp: Any = torch.distributed.checkpoint
POISON, OTHER_POISON = 113, 114
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
    """What a case says: both ends, how many ranks each has, and the options of the save; ``reading`` are those of the load's planner."""

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


class CheckpointFailed(Exception):
    """A save or load that torch gave up on all ranks: the step that failed, and the first rank's error in one line."""

    def __init__(self, error: CheckpointException) -> None:
        rank, (cause, _) = min(error.failures.items(), key=lambda item: item[0])
        super().__init__(f"{error.args[0]}: {type(cause).__name__}: {cause}\nranks {sorted(error.failures)}; rank {rank}:\n{error}")


@contextmanager
def told_plainly() -> Iterator[None]:
    """Turn a ``CheckpointException``, no ``Exception`` and all traceback, into :class:`CheckpointFailed`."""
    try:
        yield
    except CheckpointException as error:
        raise CheckpointFailed(error) from error


class App:
    """An object with state of its own, as an application would put it into a checkpoint."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.loads = 0

    def state_dict(self) -> State:
        return dict(self.state)

    def load_state_dict(self, state: State) -> None:
        self.state = state
        self.loads += 1


def tensor_names(case: Case) -> list[str]:
    """The fields of a case that are tensors: those of one letter."""
    return [name for name, _ in case.fields if re.fullmatch("[a-z]", name)]


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
    writer: dict[str, Any] = {}
    if "threads" in case:
        writer["thread_count"] = case.integer("threads")
    if "files" in case:
        writer["single_file_per_rank"] = case.get("files") == "rank"
    if "sync" in case:
        writer["sync_files"] = case.integer("sync") == 1
    if "ahead" in case:
        writer["per_thread_copy_ahead"] = case.integer("ahead")
    if "format" in case:
        writer["serialization_format"] = SerializationFormat(case.get("format"))
    reading = {option: False for name, option in KEPT.items() if case.get(name, "") == "kept"}
    planner = {"dedup_save_to_lowest_rank": case.get("dedup") == "lowest"} if "dedup" in case else {}
    save = End(state, mesh, saved, case.get("held", ""), case.get("cut", ""))
    load = End(into, mesh_load, loaded, case.get("held.load", ""), case.get("cut.load", ""))
    return Trip(save, load, worlds(case), values, writer, {**planner, **reading}, reading)


def worlds(case: Case) -> tuple[int, int]:
    """How many ranks save, and how many load."""
    mesh = case.mesh()
    mesh_load = case.mesh("mesh.load") if "mesh.load" in case else mesh
    return case.integer("world.save", max(mesh.ranks) + 1), case.integer("world.load", max(mesh_load.ranks) + 1)


def _loaded(case: Case, name: str, spec: TensorSpec) -> TensorSpec:
    text = case.get(f"to.{name}", case.get("to", "same"))
    placed: Placements | None = spec.placements if text == "same" else None if text == "-" else parse_placements(text)
    return replace(spec, placements=placed, dtype=case.get("dtype", spec.dtype), memory=case.get("memory", "plain"))


def poison(want: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape and dtype that differs from ``want`` in every element."""
    if want.dtype == torch.bool:
        return ~want
    return torch.full_like(want, POISON).where(want != POISON, torch.full_like(want, OTHER_POISON))


def build(end: End, make: Callable[[str], Any]) -> State:
    """The state of one end with real tensors, made by name (once each), and real stateful objects."""
    made = {name: make(name) for name in slots(end.state)}
    return {key: _real(value, made) for key, value in end.state.items()}


def _real(value: Any, made: dict[str, Any]) -> Any:
    built = mapped(value, lambda leaf: made[leaf.name] if isinstance(leaf, Slot) else leaf)
    return App(built.state) if isinstance(built, Stateful) else built


def placed(here: Here, end: End, name: str, full: torch.Tensor, local: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The tensor ``name`` of one end, as this rank holds it; ``local`` turns the elements that it must hold into those it does."""
    memory = end.specs[name].memory
    layout = end.layout(name)
    if layout is None:
        held = lay_out(local(full), memory)
        return held if held.is_meta else here.tensor(held)
    if end.held:
        return hold(here, end.held, layout, [(piece, local(piece.of(full))) for piece in end.pieces(name, here.rank)])
    if layout.has_partial():
        return here.dtensor(full, layout)
    if here.coord(layout.mesh) is None:
        held = torch.empty((0,) * min(full.ndim, 1), dtype=full.dtype, device=here.device)
    else:
        held = lay_out(local(here.local(full, layout)), memory)
    stride = torch.empty(full.shape, device="meta").stride()
    places = here.placements(layout.placements)
    return DTensor.from_local(held, here.mesh(layout.mesh), places, run_check=False, shape=full.shape, stride=stride)


def source(trip: Trip, here: Here) -> State:
    """What is saved."""
    return build(trip.save, lambda name: placed(here, trip.save, name, trip.values[name], torch.clone))


def destination(trip: Trip, here: Here) -> State:
    """What is loaded into: poisoned."""
    end = replace(trip.load, state=spoiled(trip.load.state))
    return build(end, lambda name: placed(here, end, name, trip.due(end, name), poison))


def writer_of(trip: Trip, here: Here, folder: str = "", **options: Any) -> Any:
    """The writer of the target's storage with the options of the case; see :func:`reject_options`."""
    reject_options(here, {**trip.writer, **options})
    return storage.writer(here.target, folder or here.folder(), **trip.writer, **options)


def reject_options(here: Here, options: Iterable[str]) -> None:
    """Give up a case with options that the target's writer does not take. Ranks that take no part must ask too."""
    try:
        storage.want_options(here.target, options)
    except storage.NoSuchOption as error:
        raise Rejected(str(error)) from None


def reader_of(here: Here, folder: str = "") -> Any:
    """The reader of the target's storage."""
    return storage.reader(here.target, folder or here.folder())


def save(
    trip: Trip, here: Here, state: State | None = None, *, folder: str = "", planner: Any = None, writer: Any = None, **how: Any
) -> Any:
    """Save ``state`` (default: the source of the trip) as the case asks; returns the metadata. ``how`` goes to torch's ``save``."""
    state = source(trip, here) if state is None else state
    if planner is None and trip.planner:
        planner = dcp.DefaultSavePlanner(**trip.planner)
    writer = writer or writer_of(trip, here, folder)
    with told_plainly():
        return dcp.save(state, storage_writer=writer, planner=planner, **how)


def load(here: Here, state: State, *, folder: str = "", planner: Any = None, reader: Any = None, **how: Any) -> State:
    """Load into ``state`` and return it. ``how`` goes to torch's ``load``."""
    with told_plainly():
        dcp.load(state, storage_reader=reader or reader_of(here, folder), planner=planner, **how)
    return state


def round_trip(case: Case, here: Here) -> None:
    """The check that most laws share: what is loaded is what was saved, on every rank, bit by bit; what is saved stays as it is."""
    trip = read_trip(case)
    if here.stage == 0:
        state = source(trip, here)
        save(trip, here, state)
        judge(trip, here, state, end=trip.save, check="source")
    else:
        planner = dcp.DefaultLoadPlanner(**trip.reading) if trip.reading else None
        judge(trip, here, load(here, destination(trip, here), planner=planner))


def judge(
    trip: Trip,
    here: Here,
    state: State,
    *,
    check: str = "loaded",
    end: End | None = None,
    want: State | None = None,
    kept: Iterable[str] = (),
) -> None:
    """Hold a state against what must be in it: structure, types, values; tensors on every rank.

    ``end`` says where its tensors lie (default: the load). ``want`` is what it must hold, where that is not all of ``end``; tensors in
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


def judge_tensor(here: Here, got: Any, full: torch.Tensor, layout: Layout | None, *, place: str, check: str) -> None:
    """Hold one tensor against the elements of ``full`` that this rank must hold under ``layout``; ``None`` for a plain tensor."""
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


def same_value(here: Here, got: Any, want: Any, place: str, check: str) -> None:
    """Two values that are no tensors: of one type, and equal, all through."""
    if here.require(type(got) is type(want), "wrong-metadata", check,
                    f"{place} is a {type(got).__name__}, must be a {type(want).__name__}", repr(want), repr(got)):  # fmt: skip
        here.require(format_state(got) == format_state(want), "wrong-value", check, f"{place} is not what was saved", repr(want), repr(got))


def _pairs(place: str, got: Any, want: Any, here: Here, check: str) -> Iterator[tuple[str, Any, Any]]:
    """Every leaf of ``want`` with what stands in its place; records where the structure is another."""
    if isinstance(want, Stateful):
        message = f"{place} is a {type(got).__name__}, must still be the stateful object"
        if here.require(isinstance(got, App), "wrong-metadata", check, message):
            yield from _pairs(place, got.state, want.state, here, check)
    elif isinstance(want, dict) and isinstance(got, dict):
        same = sorted(map(repr, got)) == sorted(map(repr, want))
        here.require(same, "wrong-metadata", check, f"{place or 'the state'} has other keys than it must", [*want], [*got])
        for key, value in want.items():
            if key in got:
                yield from _pairs(f"{place}.{key}" if place else str(key), got[key], value, here, check)
    elif isinstance(want, list | tuple) and type(got) is type(want) and len(got) == len(want) and any(slots(want)):
        for at, (mine, value) in enumerate(zip(got, want, strict=True)):
            yield from _pairs(f"{place}.{at}", mine, value, here, check)
    else:
        yield place, got, want
