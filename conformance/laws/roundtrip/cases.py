"""Shared by laws of round trips: the acts of a save and a load, and the sweep, the draw and the narrowing of cases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

DOCS = "torch.distributed.checkpoint docs"
# fields that a smaller case may lack
DISPENSABLE = ("memory", "dtype", "threads", "files", "dedup", "seed", "world.save", "world.load")
NAMES = "xabc"
NEEDS = ("checkpoint", "object_collectives")
NEEDS_FILES = (*NEEDS, "checkpoint_files")


def trip_law(name: str, **record: Any) -> Callable[[Callable[..., Any]], Law]:
    """Decorate the first act of the law ``roundtrip.NAME``, which has a second act in the next world."""
    return one_world_law(name, **{"stages": world_sizes, **record})


def one_world_law(
    name: str, *, control: str, texts: Sequence[str], **record: Any
) -> Callable[[Callable[..., Any]], Law]:
    """Decorate the act of the law ``roundtrip.NAME``, whose sweep has these ``texts``."""
    defaults = {"sweep": sweep_texts(*texts), "sweeps": len(texts), "narrow": narrow, "needs": NEEDS, "smallest": 1}
    return law(f"roundtrip.{name}", control=control, **{**defaults, **record})


def save_act(state: Saved, writer: Writer, planner: SavePlanner, folder: Folder):
    """Save a state, which must not change."""
    save(state, writer(folder), planner)
    return {"source": state}


def load_act(state: Destination, reader: Reader, planner: LoadPlanner, folder: Folder):
    """Load in the next world."""
    load(state, reader(folder), planner)
    return {"loaded": state}


def round_trip(name: str, **record: Any) -> Law:
    """The law that a load gives the saved state, on every rank, bit by bit, and that a save does not change a state."""
    trip = after_save(name, **record)(load_act)
    trip.due(due_loaded)
    return trip


def due_source(state):
    return {"source": state}


def due_loaded(state):
    return {"loaded": state}


def save_only(law: Law) -> Law:
    """Set the due function of an act that returns ``{}``."""
    law.due(lambda: {})
    return law


def add_load(law: Law) -> Law:
    """Add the load in the next world."""
    law.then(load_act).due(due_loaded)
    return law


def load_both_act(state: Destination, newer: NewerDestination, reader: Reader, folder: Folder):
    """Load two checkpoints in the next world."""
    return {"first": load(state, reader(f"{folder}/first")), "second": load(newer, reader(f"{folder}/second"))}


def add_both_loads(law: Law) -> None:
    """Add the loads in the next world of the checkpoints ``first`` and, with newer values, ``second``."""
    law.then(load_both_act).due(lambda state, newer: {"first": state, "second": newer})


def after_save(name: str, **record: Any) -> Callable[[Callable[..., Any]], Law]:
    """Decorate the second act of the law ``roundtrip.NAME``, whose first act is :func:`save_act`."""

    def decorate(function: Callable[..., Any]) -> Law:
        trip = trip_law(name, **{"clause": first_paragraph(function), **record})(save_act)
        trip.due(due_source)
        return trip.then(function)

    return decorate


def due_refusal(key: str, culprit: str) -> dict[str, Any]:
    """The due values of a save or load that all ranks refuse, with an error whose first line names the culprit."""
    message = f"the first line of the refusal does not name {culprit!r}"
    return {key: Refused((CheckpointFailed,)), f"{key} message": Of(True, "wrong-error", message)}


def sweep_texts(*lines: str) -> Callable[[Limits], Sequence[Case]]:
    """The enumerator of the cases with these texts whose ranks and dtypes the limits allow."""

    def is_allowed(case: Case, limits: Limits) -> bool:
        dtypes = {case.tensor(name).dtype for name in tensor_names(case)}
        if "dtype" in case:
            dtypes.add(case.get("dtype"))
        return max(world_sizes(case)) <= limits.world_size and dtypes <= {*limits.dtypes}

    return lambda limits: [case for line in lines if is_allowed(case := Case.parse(f"- {line}"), limits)]


def trip_meshes(limits: Limits) -> SearchStrategy[Mesh]:
    """Meshes for one end of a trip: most have two ranks, since the cost of a case grows with its ranks."""
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
    """Cases with up to ``tensors`` tensors. ``kinds`` of placements and ``memories`` are those that they may have; with
    ``plain`` some are not DTensors at one end. ``extra`` draws further fields, given the names of the tensors."""
    any_mesh, any_shape = trip_meshes(limits), shapes(min_dims=0 if "R" in kinds else 1)
    any_dtype, any_memory = dtypes(limits.dtypes), st.sampled_from(memories)

    @st.composite
    def case(draw: st.DrawFn) -> Case:
        mesh, mesh_load = draw(any_mesh), draw(any_mesh)
        tensor_fields: dict[str, object] = {}
        for name in NAMES[: draw(st.integers(1, tensors))]:
            shape = draw(any_shape)
            saved = _draw_placements(draw, mesh, shape, kinds, plain)
            loaded = _draw_placements(draw, mesh_load, shape, kinds, plain)
            tensor_fields[name] = TensorSpec(shape, saved, draw(any_dtype), memory=draw(any_memory))
            tensor_fields[f"to__{name}"] = loaded or "-"
        more = extra(draw, [name for name in tensor_fields if len(name) == 1]) if extra else {}
        seed = draw(st.integers(0, 9))
        end = {"mesh__load": mesh_load} if mesh_load != mesh else {}
        return fields(**{"mesh": mesh, **end, **tensor_fields, **more, "seed": seed or None})

    return case()


def _draw_placements(draw: st.DrawFn, mesh: Mesh, shape: Shape, kinds: Sequence[str], plain: bool) -> Placements | None:
    if plain and draw(st.integers(0, 7)) == 7:
        return None
    return draw(placements(mesh, len(shape), kinds=kinds))


@st.composite
def narrow(draw: st.DrawFn, case: Case) -> Case:
    """Cases like ``case`` with fewer tensors, fewer entries in the state, fewer options and smaller extents."""
    values = dict(field for field in case.fields if field[0] not in DISPENSABLE or draw(st.booleans()))
    names = tensor_names(case)
    if "state" in values:
        state = parse_state(values["state"])
        chosen = [key for key in state if draw(st.booleans())] or list(state)[:1]
        values["state"] = format_state({key: state[key] for key in chosen})
        if "into" in values:
            into = parse_state(values["into"])
            values["into"] = format_state({key: into[key] for key in into if key in chosen or key not in state})
        used = [*slot_names(parse_state(values["state"])), *slot_names(parse_state(values.get("into", "{}")))]
    else:
        used = [name for name in names if draw(st.booleans())] or names[:1]
    for name in set(names) - {*used}:
        values.pop(name, None)
        values.pop(f"to.{name}", None)
    for name in sorted(used):
        spec = case.tensor(name)
        shape = tuple(draw(st.sampled_from([*range(min(size, 2), size), size])) for size in spec.shape)
        values[name] = str(TensorSpec(shape, spec.placements, spec.dtype, spec.fill, spec.memory))
    return Case(case.law, tuple(values.items()))
