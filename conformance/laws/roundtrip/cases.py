"""The cases of the round trip laws: corners that are written down, cases that are drawn, and smaller ones of either kind."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from conformance.case import Case
from conformance.here import Here
from conformance.law import Law, Limits
from conformance.trip import round_trip, tensor_names, worlds
from conformance.trip_script import round_trip_script
from reference.checkpoint.state_dict import format_state, parse_state, slots
from reference.mesh import Mesh
from reference.notation import Shape
from reference.placement import Placements
from reference.tensors import TensorSpec
from strategies import dtypes, exact_meshes, placements, shapes

# fields that make a case harder: a smaller case may do without
DISPENSABLE = ("memory", "dtype", "threads", "files", "dedup", "seed", "world.save", "world.load")
NAMES = "xabc"
NEEDS = ("checkpoint", "object_collectives")
IN_FILES = (*NEEDS, "checkpoint_files")


def law_of(name: str, *, holds: str, texts: Sequence[str], check: Callable[[Case, Here], None] = round_trip, **fields: Any) -> Law:
    """The law ``roundtrip.NAME`` whose sweep is ``texts`` and whose control is ``holds``."""
    law = f"roundtrip.{name}"
    return Law(
        id=law,
        check=check,
        control=f"{law} {holds}",
        sweep=listed(law, *texts),
        **{"narrow": narrow, "needs": NEEDS, "smallest": 1, "script": round_trip_script, **fields},
    )


def listed(law: str, *texts: str) -> Callable[[Limits], Sequence[Case]]:
    """The enumerator of cases that are written down, as far as the limits allow them."""

    def sweep(limits: Limits) -> Sequence[Case]:
        found = [Case.parse(f"{law} {text}") for text in texts]
        return [case for case in found if max(worlds(case)) <= limits.world_size and _dtypes(case) <= {*limits.dtypes}]

    return sweep


def _dtypes(case: Case) -> set[str]:
    named = {case.tensor(name).dtype for name in tensor_names(case)}
    return named | ({case.get("dtype")} if "dtype" in case else set())


def meshes(limits: Limits) -> SearchStrategy[Mesh]:
    """Meshes for one end of a trip: of two ranks most often, since every further rank costs as much again."""
    sizes = [size for size in (2, 2, 2, 3, 3, 1, 4) if size <= limits.world_size]
    by_size = {size: exact_meshes(size) for size in sizes}
    return st.sampled_from(sizes).flatmap(lambda size: by_size[size])


def trips(
    law: str,
    limits: Limits,
    *,
    tensors: int = 3,
    kinds: Sequence[str] = ("R", "S"),
    plain: bool = True,
    memories: Sequence[str] = ("plain",),
    extra: Callable[[st.DrawFn, list[str]], dict[str, object]] | None = None,
) -> SearchStrategy[Case]:
    """Cases with up to ``tensors`` tensors, from one mesh to another; ``plain``: some of them are no DTensors at one end."""
    mesh_drawn = meshes(limits)
    shape_drawn = shapes(min_dims=0 if "R" in kinds else 1)
    dtype_drawn = dtypes(limits.dtypes)
    memory_drawn = st.sampled_from(memories)

    @st.composite
    def case(draw: st.DrawFn) -> Case:
        mesh, mesh_load = draw(mesh_drawn), draw(mesh_drawn)
        fields: dict[str, object] = {}
        for name in NAMES[: draw(st.integers(1, tensors))]:
            shape = draw(shape_drawn)
            saved = _placed(draw, mesh, shape, kinds, plain)
            loaded = _placed(draw, mesh_load, shape, kinds, plain)
            fields[name] = TensorSpec(shape, saved, draw(dtype_drawn), memory=draw(memory_drawn))
            fields[f"to__{name}"] = loaded or "-"
        more = extra(draw, [name for name in fields if len(name) == 1]) if extra else {}
        seed = draw(st.integers(0, 9))
        end = {"mesh__load": mesh_load} if mesh_load != mesh else {}
        return Case.of(law, **{"mesh": mesh, **end, **fields, **more, "seed": seed or None})  # type: ignore[arg-type]

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
        fields = dict(kept)
        names = tensor_names(case)
        if "state" in fields:
            state = parse_state(fields["state"])
            chosen = [key for key in state if draw(st.booleans())] or list(state)[:1]
            fields["state"] = format_state({key: state[key] for key in chosen})
            if "into" in fields:
                into = parse_state(fields["into"])
                fields["into"] = format_state({key: into[key] for key in into if key in chosen or key not in state})
            used = [*slots(parse_state(fields["state"])), *slots(parse_state(fields.get("into", "{}")))]
        else:
            used = [name for name in names if draw(st.booleans())] or names[:1]
        for name in set(names) - {*used}:
            fields.pop(name, None)
            fields.pop(f"to.{name}", None)
        for name in sorted(used):
            spec = case.tensor(name)
            shape = tuple(draw(st.sampled_from([*range(min(size, 2), size), size])) for size in spec.shape)
            fields[name] = str(TensorSpec(shape, spec.placements, spec.dtype, spec.fill, spec.memory))
        return Case(case.law, tuple(fields.items()))

    return smaller()
