"""Reproducers of round trips: what a case says, as literal lines of torch.

The tensors of a case are constants; what a rank holds of them is a table of slices by rank. Each end becomes a ``state``, the save one
stage of the script and the load the next.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from typing import Any

from conformance.case import Case
from conformance.laws import scripts
from conformance.report.reproducer import Script, Stage
from conformance.trip import End, Trip, read_trip
from reference.checkpoint.state_dict import Slot, State, Stateful, format_state, slots, spoiled
from reference.layout import Layout
from reference.mesh import Coord
from reference.notation import Shape

HELPERS = {
    "dtensor": (
        "def dtensor(local, whole, mesh, *placements):",
        "    return DTensor.from_local(local, mesh, placements, shape=whole.shape, stride=whole.stride())",
    ),
    "wrapped": (
        "def wrapped(pieces, whole, mesh, *placements):",
        "    wrapper = LocalShardsWrapper([t for t, _ in pieces], [offset for _, offset in pieces])",
        "    return DTensor.from_local(wrapper, mesh, placements, shape=whole.shape, stride=whole.stride())",
    ),
    "sharded": (
        "def sharded(pieces, whole, rank):",
        "    shards = [st.Shard.from_tensor_and_offsets(t.contiguous(), list(offset), rank) for t, offset in pieces]",
        "    return st.init_from_local_shards(shards, *whole.shape)",
    ),
    "App": ("class App(dict):", "    state_dict, load_state_dict = dict.copy, dict.update"),
    "transposed": ("transposed = lambda t: t.mT.contiguous().mT",),
    "sliced": ("sliced = lambda t: torch.stack([t, t], -1)[..., 0]",),
    "expanded": ("expanded = lambda t: t[:1].expand(t.shape)",),
}
IMPORTS = {
    "dcp": "import torch.distributed.checkpoint as dcp",
    "DTensor": "from torch.distributed.tensor import DTensor",
    "Shard": "from torch.distributed.tensor import Shard",
    "Replicate": "from torch.distributed.tensor import Replicate",
    "Partial": "from torch.distributed.tensor import Partial",
    "LocalShardsWrapper": "from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper",
    "st": "import torch.distributed._shard.sharded_tensor as st",
    "SerializationFormat": "from torch.distributed.checkpoint.filesystem import SerializationFormat",
    "_StridedShard": "from torch.distributed.tensor.placement_types import _StridedShard",
}


def round_trip_script(case: Case) -> Script:
    """Save, then load, then compare every leaf."""
    trip = read_trip(case)
    return script(trip, [(trip.worlds[0], save_lines(trip)), (trip.worlds[1], load_lines(trip))])


def script(trip: Trip, stages: Iterable[tuple[int, Sequence[str]]], constants: Iterable[str] = (), imports: Iterable[str] = ()) -> Script:
    """A script of these stages, with the constants and the imports that their lines need.

    A stage that returns nothing and the next one, in a world of the same size, become one.
    """
    merged: list[tuple[int, list[str]]] = []
    for world, lines in stages:
        if merged and merged[-1][0] == world and not any("return " in line for line in merged[-1][1]):
            earlier = merged[-1][1]
            earlier += [line for line in lines if not (line.startswith("mesh = ") and line in earlier)]
        else:
            merged.append((world, list(lines)))
    bodies = [(world, lines if "return " in lines[-1] else [*lines, "return None, None"]) for world, lines in merged]
    text = "\n".join([*(line for _, lines in bodies for line in lines), *constants])
    helpers = [line for name, lines in HELPERS.items() if name in _words(text) for line in lines]
    words = _words("\n".join([text, *helpers]))
    made = {name.upper(): scripts.tensor(full.contiguous()) for name, full in trip.values.items() if name.upper() in words}
    literal = [f"{', '.join(made)} = {', '.join(made.values())}"] if made else []
    wanted = [line for name, line in IMPORTS.items() if name in words]
    return Script(tuple(Stage(world, tuple(lines)) for world, lines in bodies), (*wanted, *imports), (*literal, *helpers, *constants))


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text))


def save_lines(
    trip: Trip, *, end: End | None = None, folder: str = "folder", planner: str = "", how: str = "", writer: str = ""
) -> list[str]:
    """The statements that save one end (default: the save); ``how`` are further arguments of the call, ``writer`` is another one."""
    end = end or trip.save
    planner = planner or (f"dcp.DefaultSavePlanner({_options(trip.planner)})" if trip.planner else "")
    chosen = f", planner={planner}" if planner else ""
    lines = [*mesh_lines(end), f"state = {state_text(trip, end, trip.worlds[0])}"]
    return [*lines, f"dcp.save(state, storage_writer={writer or writer_text(trip, folder)}{chosen}{how})"]


def load_lines(
    trip: Trip, *, end: End | None = None, folder: str = "folder", spoil: str = "+ 1", how: str = "", reader: str = ""
) -> list[str]:
    """The statements that load into one end (default: the load) and compare every leaf with what was saved."""
    end = end or trip.load
    how += f", planner=dcp.DefaultLoadPlanner({_options(trip.reading)})" if trip.reading else ""
    state = state_text(trip, replace(end, state=spoiled(end.state)), trip.worlds[1], spoil=spoil)
    expected, got = compared(trip, end, end.state, trip.worlds[1])
    return [
        *mesh_lines(end),
        f"state = {state}",
        f"dcp.load(state, storage_reader={reader or f'dcp.FileSystemReader({folder})'}{how})",
        f"return {expected}, {got}",
    ]


def mesh_lines(end: End) -> list[str]:
    """The statement that makes the mesh of an end, where any of its tensors needs one."""
    needed = any(end.layout(name) is not None for name in slots(end.state))
    return [f"mesh = dist.{scripts.mesh(end.mesh)}"] if needed else []


def writer_text(trip: Trip, folder: str = "folder", *, cached: bool = False) -> str:
    """The expression of the writer that a case asks for."""
    options = {"sync_files": False, **trip.writer, **({"cache_staged_state_dict": True} if cached else {})}
    return f"dcp.FileSystemWriter({folder}, {_options(options)})"


def _options(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={str(value) if isinstance(value, Enum) else repr(value)}" for key, value in options.items())


def state_text(trip: Trip, end: End, world: int, *, spoil: str = "", make: Callable[[str], str] | None = None) -> str:
    """The expression of a state. ``spoil`` is what is done to the elements of a destination (``+ 1``, or ``meta``); ``make`` gives
    the expression of a tensor by its name, where that is another than :func:`tensor_text`."""
    tensor = make or (lambda name: tensor_text(trip, end, world, name, spoil))

    def text(value: Any) -> str:
        match value:
            case Slot(name):
                return tensor(name)
            case Stateful(state):
                return f"App({text(state)})"
            case dict():
                return "{" + ", ".join(f"{key!r}: {text(entry)}" for key, entry in value.items()) + "}"
            case list():
                return "[" + ", ".join(map(text, value)) + "]"
            case tuple():
                return "(" + ", ".join(map(text, value)) + ("," if len(value) == 1 else "") + ")"
        return repr(value)

    return text(end.state)


def tensor_text(trip: Trip, end: End, world: int, name: str, spoil: str = "") -> str:
    """The expression of one tensor of an end, as a rank holds it."""
    spec, layout = end.specs[name], end.layout(name)
    full = name.upper()
    if end.held and layout is not None:
        table = pieces_text(end, name, world, lambda cut, offset: f"({_done_to(cut, spoil, spec.dtype)}, {offset})")
        placements = ", ".join(map(scripts.placement, layout.placements))
        return f"wrapped({table}, {full}, mesh, {placements})" if end.held == "wrapper" else f"sharded({table}, {full}, rank)"
    held = elements(trip, end, world, name, outside=full if not spec.shape else f"{full}.new_empty(0)")
    if spec.torch_dtype != trip.values[name].dtype:
        held = f"{held}.to(torch.{spec.dtype})"
    if spoil:
        held = f'{held}.to("meta")' if spoil == "meta" else f"~{held}" if spec.dtype == "bool" else f"{held} {spoil}"
    if spec.memory != "plain" and len(spec.shape) > (spec.memory == "transposed"):
        held = f"{spec.memory}({held})"
    if layout is None:
        return f"{held}.clone()" if held == full else held
    return f"dtensor({held}, {full}, mesh, {', '.join(map(scripts.placement, layout.placements))})"


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


def pieces_text(end: End, name: str, world: int, entry: Callable[[str, Shape], str]) -> str:
    """A table by rank of lists with one ``entry`` for each piece of a tensor, from the text of its elements and its offset."""
    lists = []
    for rank in range(world):
        entries = []
        for own in end.pieces(name, rank):
            cuts = ", ".join(f"{start}:{stop}" for start, stop in zip(own.box.offset, own.box.end, strict=True))
            beyond = any(stop > size for stop, size in zip(own.box.end, end.specs[name].shape, strict=True))
            entries.append(entry(f"torch.zeros({own.box.size})" if beyond else f"{name.upper()}[{cuts}]", own.box.offset))
        lists.append(f"{rank}: [{', '.join(entries)}]")
    return "{" + ", ".join(lists) + "}[rank]"


def piece(full: str, layout: Layout, coord: Coord) -> str:
    """The elements that a rank owns, as an indexing of the whole."""
    box, rank = layout.box(coord), len(layout.shape)
    if box is not None:
        bounds = zip(box.offset, box.end, layout.shape, strict=True)
        cuts = [":" if (start, end) == (0, size) else f"{start}:{end}" for start, end, size in bounds]
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
        if end.held and layout is not None:
            expected.append(_pieces_due(end, leaf.name, world, spoil if leaf.name in spared else ""))
            got.append(f"{path}.to_local().local_shards()" if end.held == "wrapper" else f"[s.tensor for s in {path}.local_shards()]")
            continue
        due = elements(trip, end, world, leaf.name)
        if spec.torch_dtype != trip.values[leaf.name].dtype:
            due = f"{due}.to(torch.{spec.dtype})"
        if leaf.name in spared:
            due = _done_to(due, spoil, spec.dtype)
        members = sorted(layout.mesh.ranks) if layout else list(range(world))
        local = path if layout is None else f"{path}.to_local()"
        outside = len(members) < world
        expected.append(f"({due} if rank in {members} else None)" if outside and leaf.name in spared else due)
        got.append(f"({local} if rank in {members} else None)" if outside else local)
    return f"[{', '.join(expected)}]", f"[{', '.join(got)}]"


def _pieces_due(end: End, name: str, world: int, spoil: str) -> str:
    """What a rank must hold of a tensor of pieces."""
    return pieces_text(end, name, world, lambda cut, _: _done_to(cut, spoil, end.specs[name].dtype))


def _done_to(text: str, spoil: str, dtype: str) -> str:
    """The expression of elements that are spoiled, where they are."""
    return f"~{text}" if spoil and dtype == "bool" else f"{text} {spoil}".strip()


def _leaves(path: str, value: Any) -> Iterable[tuple[str, Any]]:
    match value:
        case Stateful(state):
            yield from _leaves(path, state)
        case dict() if value:
            for key, entry in value.items():
                yield from _leaves(f"{path}[{key!r}]", entry)
        case list() | tuple() if any(slots(list(value))):
            for at, entry in enumerate(value):
                yield from _leaves(f"{path}[{at}]", entry)
        case _:
            yield path, value
