"""What the round trip laws share: the acts of a plain trip, corners that are written down, cases that are drawn, and
smaller ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from shardlaw.conformance.law.act import fields, first_paragraph, law
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Of, Refused
from shardlaw.conformance.law.fields import Folder
from shardlaw.conformance.law.law import Law, Limits
from shardlaw.conformance.laws.checkpoint.calls import CheckpointFailed, load, save
from shardlaw.conformance.laws.checkpoint.fields import (
    Destination,
    LoadPlanner,
    NewerDestination,
    Reader,
    Saved,
    SavePlanner,
    Writer,
)
from shardlaw.conformance.laws.checkpoint.trip import tensor_names, world_sizes
from shardlaw.reference.checkpoint.state_dict import format_state, parse_state, slot_names
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.notation import Shape
from shardlaw.reference.placement import Placements
from shardlaw.reference.tensors import TensorSpec
from shardlaw.strategies import dtypes, exact_meshes, placements, shapes

# fields that make a case harder: a smaller case may do without
DISPENSABLE = ("memory", "dtype", "threads", "files", "dedup", "seed", "world.save", "world.load")
NAMES = "xabc"
NEEDS = ("checkpoint", "object_collectives")
IN_FILES = (*NEEDS, "checkpoint_files")


def trip_law(name: str, *, holds: str, texts: Sequence[str], **record: Any) -> Callable[[Callable[..., Any]], Law]:
    """Make the law ``roundtrip.NAME``, whose sweep is ``texts`` and whose control is ``holds``, of the function below:
    its first act."""
    usual = {"sweep": written(*texts), "sweeps": len(texts), "narrow": narrow, "needs": NEEDS, "smallest": 1}
    return law(f"roundtrip.{name}", control=holds, **{**usual, **record})


def save_act(state: Saved, writer: Writer, planner: SavePlanner, folder: Folder):
    """A state is saved, and stays as it is."""
    save(state, writer(folder), planner)
    return {"source": state}


def load_act(state: Destination, reader: Reader, planner: LoadPlanner, folder: Folder):
    """A state is loaded into, in the next world."""
    load(state, reader(folder), planner)
    return {"loaded": state}


def round_trip(name: str, **record: Any) -> Law:
    """The law that what is loaded is what was saved, on every rank, bit by bit, and that what is saved stays as it
    is."""
    made = after_save(name, **record)(load_act)
    made.due(due_loaded)
    return made


def due_loaded(state):
    return {"loaded": state}


def then_loaded(law: Law) -> None:
    """In the next world, what was saved is loaded."""
    law.then(load_act).due(due_loaded)


def load_both_act(state: Destination, newer: NewerDestination, reader: Reader, folder: Folder):
    """A state and a newer one are loaded into, in the next world."""
    return {"first": load(state, reader(f"{folder}/first")), "second": load(newer, reader(f"{folder}/second"))}


def then_both_loaded(law: Law) -> None:
    """In the next world, what was saved to ``first`` and to ``second`` is loaded."""
    law.then(load_both_act).due(lambda state, newer: {"first": state, "second": newer})


def after_save(name: str, **record: Any) -> Callable[[Callable[..., Any]], Law]:
    """Make the law ``roundtrip.NAME`` of the function below: what is done in the next world, once the state has been
    saved."""

    def of(function: Callable[..., Any]) -> Law:
        made = trip_law(name, **{"stages": world_sizes, "clause": first_paragraph(function), **record})(save_act)
        made.due(lambda state: {"source": state})
        return made.then(function)

    return of


def refused_by_name(what: str, culprit: str) -> dict[str, Any]:
    """The due of a save or a load that all ranks refuse, naming the culprit at once."""
    message = f"the first line of the refusal does not name {culprit!r}"
    return {what: Refused((CheckpointFailed,)), f"{what} message": Of(True, "wrong-error", message)}


def written(*lines: str) -> Callable[[Limits], Sequence[Case]]:
    """The enumerator of cases that are written down, as far as the limits allow them."""

    def sweep(limits: Limits) -> Sequence[Case]:
        found = [Case.parse(f"- {line}") for line in lines]
        return [
            case for case in found if max(world_sizes(case)) <= limits.world_size and _dtypes(case) <= {*limits.dtypes}
        ]

    return sweep


def listed(law: str, *lines: str) -> Callable[[Limits], Sequence[Case]]:
    """As :func:`written`, of the law ``law``."""
    return lambda limits: [replace(case, law=law) for case in written(*lines)(limits)]


def _dtypes(case: Case) -> set[str]:
    named = {case.tensor(name).dtype for name in tensor_names(case)}
    return named | ({case.get("dtype")} if "dtype" in case else set())


def meshes(limits: Limits) -> SearchStrategy[Mesh]:
    """Meshes for one end of a trip: of two ranks most often, since every further rank costs as much again."""
    sizes = [size for size in (2, 2, 2, 3, 3, 1, 4, 6, 8) if size <= limits.world_size]
    by_size = {size: exact_meshes(size) for size in sizes}
    return st.sampled_from(sizes).flatmap(lambda size: by_size[size])


def trips(
    limits: Limits,
    *,
    tensors: int = 3,
    kinds: Sequence[str] = ("R", "S"),
    plain: bool = True,
    memories: Sequence[str] = ("plain",),
    extra: Callable[[st.DrawFn, list[str]], dict[str, object]] | None = None,
) -> SearchStrategy[Case]:
    """Cases with up to ``tensors`` tensors, from one mesh to another; ``plain``: some of them are no DTensors at one
    end."""
    mesh_drawn = meshes(limits)
    shape_drawn = shapes(min_dims=0 if "R" in kinds else 1)
    dtype_drawn = dtypes(limits.dtypes)
    memory_drawn = st.sampled_from(memories)

    @st.composite
    def case(draw: st.DrawFn) -> Case:
        mesh, mesh_load = draw(mesh_drawn), draw(mesh_drawn)
        found: dict[str, object] = {}
        for name in NAMES[: draw(st.integers(1, tensors))]:
            shape = draw(shape_drawn)
            saved = _placed(draw, mesh, shape, kinds, plain)
            loaded = _placed(draw, mesh_load, shape, kinds, plain)
            found[name] = TensorSpec(shape, saved, draw(dtype_drawn), memory=draw(memory_drawn))
            found[f"to__{name}"] = loaded or "-"
        more = extra(draw, [name for name in found if len(name) == 1]) if extra else {}
        seed = draw(st.integers(0, 9))
        end = {"mesh__load": mesh_load} if mesh_load != mesh else {}
        return fields(**{"mesh": mesh, **end, **found, **more, "seed": seed or None})

    return case()


def _placed(draw: st.DrawFn, mesh: Mesh, shape: Shape, kinds: Sequence[str], plain: bool) -> Placements | None:
    if plain and draw(st.integers(0, 7)) == 7:
        return None
    return draw(placements(mesh, len(shape), kinds=kinds))


def narrow(case: Case) -> SearchStrategy[Case]:
    """Cases like ``case`` with fewer tensors, fewer entries in the state, fewer options and smaller extents."""

    @st.composite
    def smaller(draw: st.DrawFn) -> Case:
        kept = [(name, value) for name, value in case.fields if name not in DISPENSABLE or draw(st.booleans())]
        found = dict(kept)
        names = tensor_names(case)
        if "state" in found:
            state = parse_state(found["state"])
            chosen = [key for key in state if draw(st.booleans())] or list(state)[:1]
            found["state"] = format_state({key: state[key] for key in chosen})
            if "into" in found:
                into = parse_state(found["into"])
                found["into"] = format_state({key: into[key] for key in into if key in chosen or key not in state})
            used = [*slot_names(parse_state(found["state"])), *slot_names(parse_state(found.get("into", "{}")))]
        else:
            used = [name for name in names if draw(st.booleans())] or names[:1]
        for name in set(names) - {*used}:
            found.pop(name, None)
            found.pop(f"to.{name}", None)
        for name in sorted(used):
            spec = case.tensor(name)
            shape = tuple(draw(st.sampled_from([*range(min(size, 2), size), size])) for size in spec.shape)
            found[name] = str(TensorSpec(shape, spec.placements, spec.dtype, spec.fill, spec.memory))
        return Case(case.law, tuple(found.items()))

    return smaller()
