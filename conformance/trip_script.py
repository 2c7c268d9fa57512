"""Reproducers of round trips: what a case says, as literal lines of torch.

The tensors of a case are constants; what a rank holds of them is a table of slices by rank. Each end becomes a ``state``, the save one
stage of the script and the load the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from conformance.case import Case
from conformance.laws import scripts
from conformance.report.reproducer import Script, Stage
from conformance.trip import End, Trip, read_trip
from reference.checkpoint.state_dict import Slot, State, Stateful, format_state, slots, spoiled
from reference.layout import Layout
from reference.mesh import Coord

IMPORTS = (
    "import torch.distributed.checkpoint as dcp",
    "from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter",
    "from torch.distributed.device_mesh import DeviceMesh",
    "from torch.distributed.tensor import DTensor",
)
APP = (
    "class App:",
    "    def __init__(self, state):",
    "        self.state = state",
    "    def state_dict(self):",
    "        return dict(self.state)",
    "    def load_state_dict(self, state):",
    "        self.state = state",
)
MEMORY = {
    "transposed": "def transposed(t):\n    back = range(t.ndim)[::-1]\n    return t.permute(*back).contiguous().permute(*back)",
    "sliced": "def sliced(t):\n    return torch.stack([t, t], -1)[..., 0] if t.ndim else t",
    "expanded": "def expanded(t):\n    return t[:1].expand(t.shape) if t.ndim else t",
}


def round_trip_script(case: Case) -> Script:
    """Save, then load, then compare every leaf."""
    trip = read_trip(case)
    return script(trip, [(trip.worlds[0], save_lines(trip)), (trip.worlds[1], load_lines(trip))])


def script(trip: Trip, stages: Iterable[tuple[int, Sequence[str]]], constants: Iterable[str] = (), imports: Iterable[str] = ()) -> Script:
    """A script of these stages, with the constants and the imports that their lines need."""
    bodies = tuple(Stage(world, tuple(lines)) for world, lines in stages)
    text = "\n".join(line for stage in bodies for line in stage.body)
    used = [name for name in trip.values if f"{name.upper()}[" in text or f"{name.upper()}." in text or f"{name.upper()}" in _words(text)]
    made = [f"{name.upper()} = {scripts.tensor(trip.values[name].contiguous())}" for name in used]
    helpers = [line for memory, lines in MEMORY.items() if f"{memory}(" in text for line in lines.splitlines()]
    app = APP if "App(" in text else ()
    placed = [f"from {module} import {name}" for name, module in PLACEMENTS.items() if name in _words(text)]
    wanted = [line for line in IMPORTS if set(_words(line.partition("import ")[2])) & {*_words(text)}]
    return Script(bodies, (*wanted, *placed, *imports), (*made, *helpers, *app, *constants))


PLACEMENTS = {
    "Shard": "torch.distributed.tensor",
    "Replicate": "torch.distributed.tensor",
    "Partial": "torch.distributed.tensor",
    "_StridedShard": "torch.distributed.tensor.placement_types",
}


def _words(text: str) -> list[str]:
    return "".join(char if char.isalnum() or char == "_" else " " for char in text).split()


def save_lines(trip: Trip, *, end: End | None = None, folder: str = "folder", planner: str = "", name: str = "state") -> list[str]:
    """The body of a stage that saves one end (default: the save)."""
    end = end or trip.save
    planner = planner or (f"dcp.DefaultSavePlanner({_options(trip.planner)})" if trip.planner else "")
    chosen = f", planner={planner}" if planner else ""
    lines = [*mesh_lines(end), f"{name} = {state_text(trip, end, trip.worlds[0])}"]
    return [*lines, f"dcp.save({name}, storage_writer={writer_text(trip, folder)}{chosen})", "return None, None"]


def load_lines(trip: Trip, *, end: End | None = None, folder: str = "folder", planner: str = "", spoil: str = "+ 1") -> list[str]:
    """The body of a stage that loads into one end (default: the load) and compares every leaf with what was saved."""
    end = end or trip.load
    chosen = f", planner={planner}" if planner else ""
    state = state_text(trip, replace(end, state=spoiled(end.state)), trip.worlds[1], spoil=spoil)
    expected, got = compared(trip, end, end.state, trip.worlds[1])
    return [
        *mesh_lines(end),
        f"state = {state}",
        f"dcp.load(state, storage_reader=FileSystemReader({folder}){chosen})",
        f"return {expected}, {got}",
    ]


def mesh_lines(end: End) -> list[str]:
    """The statement that makes the mesh of an end, where any of its tensors needs one."""
    needed = any(end.layout(name) is not None for name in slots(end.state))
    return [f"mesh = {scripts.mesh(end.mesh)}"] if needed else []


def writer_text(trip: Trip, folder: str = "folder", **options: Any) -> str:
    return f"FileSystemWriter({folder}, sync_files=False{''.join(f', {key}={value!r}' for key, value in {**trip.writer, **options}.items())})"


def _options(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in options.items())


def state_text(trip: Trip, end: End, world: int, *, spoil: str = "") -> str:
    """The expression of a state; ``spoil`` follows (or, ``~``, precedes) the elements of every tensor of a destination."""
    return "{" + ", ".join(f"{key!r}: {_value(trip, end, world, value, spoil)}" for key, value in end.state.items()) + "}"


def _value(trip: Trip, end: End, world: int, value: Any, spoil: str) -> str:
    def inner(entry: Any) -> str:
        return _value(trip, end, world, entry, spoil)

    match value:
        case Slot(name):
            return tensor_text(trip, end, world, name, spoil)
        case Stateful(state):
            return f"App({inner(state)})"
        case dict():
            return "{" + ", ".join(f"{key!r}: {inner(entry)}" for key, entry in value.items()) + "}"
        case list():
            return "[" + ", ".join(map(inner, value)) + "]"
        case tuple():
            return "(" + ", ".join(map(inner, value)) + ("," if len(value) == 1 else "") + ")"
    return repr(value)


def tensor_text(trip: Trip, end: End, world: int, name: str, spoil: str = "") -> str:
    """The expression of one tensor of an end, as a rank holds it."""
    spec, layout = end.specs[name], end.layout(name)
    full = name.upper()
    held = elements(trip, end, world, name, outside=full if not spec.shape else f"{full}.new_empty(0)")
    if spec.dtype != trip.save.specs[name].dtype:
        held = f"{held}.to(torch.{spec.dtype})"
    if spoil:
        held = f'{held}.to("meta")' if spoil == "meta" else f"~{held}" if spec.dtype == "bool" else f"{held} {spoil}"
    if spec.memory != "plain":
        held = f"{spec.memory}({held})"
    if layout is None:
        return f"{held}.clone()" if held == full else held
    shape = f", shape={full}.shape, stride={full}.stride()" if spec.shape else ""
    return f"DTensor.from_local({held}, mesh, {scripts.placements(layout.placements)}, run_check=False{shape})"


def elements(trip: Trip, end: End, world: int, name: str, *, outside: str = "None") -> str:
    """What a rank must hold of a tensor: slices of the whole by rank, or the whole where all hold it; ``outside`` the mesh."""
    layout, full = end.layout(name), name.upper()
    if layout is None:
        return full
    if layout.has_partial():
        return full
    by_rank = {layout.mesh.rank_at(coord): piece(full, layout, coord) for coord in layout.mesh.coords()}
    if len(by_rank) == world and len({*by_rank.values()}) == 1:
        return next(iter(by_rank.values()))
    table = "{" + ", ".join(f"{rank}: {by_rank[rank]}" for rank in sorted(by_rank)) + "}"
    return f"{table}[rank]" if len(by_rank) == world else f"{table}.get(rank, {outside})"


def piece(full: str, layout: Layout, coord: Coord) -> str:
    """The elements that a rank owns, as an indexing of the whole."""
    box, rank = layout.box(coord), len(layout.shape)
    if box is not None:
        cuts = [f"{start}:{end}" if (start, end) != (0, size) else ":" for start, end, size in zip(box.offset, box.end, layout.shape, strict=True)]
        while cuts and cuts[-1] == ":":
            cuts.pop()
        return f"{full}[{', '.join(cuts)}]" if cuts else full
    text = full
    for dim, owned in enumerate(layout.owned(coord)):
        if owned != tuple(range(layout.shape[dim])):
            text += f"[{':, ' * dim}{list(owned)}]"
    return text if rank else full


def compared(trip: Trip, end: End, want: State, world: int, *, kept: Iterable[str] = (), spoil: str = "+ 1") -> tuple[str, str]:
    """Two lists: what every leaf of ``want`` must be, and what the state holds in its place."""
    spared, expected, got = {*kept}, [], []
    for path, leaf in _leaves("state", want):
        if not isinstance(leaf, Slot):
            expected.append(repr(format_state(leaf)) if isinstance(leaf, set) else repr(repr(leaf)))
            got.append(f"repr({path})")
            continue
        layout, spec = end.layout(leaf.name), end.specs[leaf.name]
        due = elements(trip, end, world, leaf.name)
        if spec.dtype != trip.save.specs[leaf.name].dtype:
            due = f"{due}.to(torch.{spec.dtype})"
        if leaf.name in spared:
            due = f"~{due}" if spec.dtype == "bool" else f"{due} {spoil}"
        members = sorted(layout.mesh.ranks) if layout else list(range(world))
        local = path if layout is None else f"{path}.to_local()"
        outside = len(members) < world
        expected.append(f"({due} if rank in {members} else None)" if outside and leaf.name in spared else due)
        got.append(f"({local} if rank in {members} else None)" if outside else local)
    return f"[{', '.join(expected)}]", f"[{', '.join(got)}]"


def _leaves(path: str, value: Any) -> Iterable[tuple[str, Any]]:
    match value:
        case Stateful(state):
            yield from _leaves(f"{path}.state", state)
        case dict() if value:
            for key, entry in value.items():
                yield from _leaves(f"{path}[{key!r}]", entry)
        case list() | tuple() if any(slots(list(value))):
            for at, entry in enumerate(value):
                yield from _leaves(f"{path}[{at}]", entry)
        case _:
            yield path, value
