"""Laws of DTensors that are made on a mesh from the start: the factories, defaults, and what is no layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.tensor as dtensor
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor, distribute_tensor

from conformance.case import Case
from conformance.law import Law, Limits
from conformance.laws import draws, scripts
from conformance.laws.given import given
from conformance.laws.layout.distribute import keeps_grad, wants_grad
from conformance.report.reproducer import Script
from reference.layout import Layout
from reference.mesh import Mesh
from reference.placement import Replicate, parse_placements
from reference.tensors import TensorSpec

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from conformance.here import Here

DOC = "torch.distributed.tensor docs"

MAKERS = {"zeros": 0, "ones": 1, "full": 7, "empty": None}


def draw_factory(limits: Limits) -> SearchStrategy[Case]:
    def make(draw: st.DrawFn, layout: Layout) -> dict[str, Any]:
        return {"make": draw(st.sampled_from(list(MAKERS))), **keeps_grad(draw, layout)}

    return draws.placed("layout.factory", limits, dtypes=limits.dtypes, extra=make)


def check_factory(case: Case, here: Here) -> None:
    """A factory makes the same tensor as its plain namesake, each rank its slice."""
    x, make, grad = given(case), case.get("make"), wants_grad(case)
    value = MAKERS[make]
    options: dict[str, Any] = {
        "dtype": x.full.dtype,
        "device_mesh": here.mesh(x.layout.mesh),
        "placements": here.placements(x.layout.placements),
        "requires_grad": grad,
    }
    shape = x.layout.shape
    got = dtensor.full(shape, value, **options) if make == "full" else getattr(dtensor, make)(shape, **options)
    if value is None:
        with torch.no_grad():
            got.to_local().fill_(0)
    here.same_dtensor(got, torch.full(shape, value or 0, dtype=x.full.dtype), make, mesh=x.layout.mesh, placements=x.layout.placements)
    here.require(got.requires_grad == grad, "wrong-metadata", "requires_grad", "requires_grad differs", grad, got.requires_grad)
    want = torch.empty(shape).stride()
    here.require(tuple(got.stride()) == want, "wrong-metadata", "stride", "global stride is not a contiguous tensor's", want, got.stride())


def script_factory(case: Case) -> Script:
    x, make = given(case), case.get("make")
    value = f", {MAKERS[make]}" if make == "full" else ""
    grad = ", requires_grad=True" if wants_grad(case) else ""
    at = scripts.placements(x.layout.placements)
    made = f"dtensor.{make}({x.layout.shape}{value}, dtype={x.full.dtype}, device_mesh=mesh, placements={at}{grad})"
    zero = ["d.to_local().detach().fill_(0)"] if make == "empty" else []
    body = [f"mesh = {scripts.mesh(x.layout.mesh)}", f"d = {made}", *zero]
    got = scripts.holds(case, body, "d", torch.full(x.layout.shape, MAKERS[make] or 0, dtype=x.full.dtype), x.layout)
    return Script(got.stages, ("import torch.distributed.tensor as dtensor", *got.imports), got.constants)


def draw_context(limits: Limits) -> SearchStrategy[Case]:
    others = [mesh for mesh in map(Mesh.parse, ("2", "1x2", "3")) if mesh.size <= limits.world_size]

    def how(draw: st.DrawFn, layout: Layout) -> dict[str, Any]:
        inner = draw(st.sampled_from([None, None, *(other for other in others if other != layout.mesh)]))
        return {"how": draw(st.sampled_from(["distribute", "from_local", "zeros"])), "mesh__inner": inner}

    return draws.placed("layout.context", limits, kinds=("R",), extra=how)


def check_context(case: Case, here: Here) -> None:
    """Under ``with mesh:`` the mesh need not be named; where no placements are, every rank holds the whole tensor. A context within
    another holds until it ends; then the outer one does again."""
    x, how = given(case), case.get("how")
    full, want = here.tensor(x.full), torch.zeros(x.layout.shape) if how == "zeros" else x.full
    calls: dict[str, Callable[[], DTensor]] = {
        "distribute": lambda: distribute_tensor(full),
        "from_local": lambda: DTensor.from_local(full),
        "zeros": lambda: dtensor.zeros(x.layout.shape),
    }
    inner = case.mesh("mesh.inner") if "mesh.inner" in case else None
    with here.mesh(x.layout.mesh):
        if inner is not None:
            with here.mesh(inner):
                within = calls[how]()
            here.same_dtensor(within, want, "inner", mesh=inner, placements=(Replicate(),) * inner.ndim)
        got = calls[how]()
    here.same_dtensor(got, want, how, mesh=x.layout.mesh, placements=x.layout.placements)


def script_context(case: Case) -> Script:
    x, how = given(case), case.get("how")
    call = {"distribute": "distribute_tensor(x)", "from_local": "DTensor.from_local(x)", "zeros": f"dtensor.zeros({x.layout.shape})"}[how]
    body = [f"x = {scripts.tensor(x.full)}"]
    if "mesh.inner" in case:
        body += [f"inner = {scripts.mesh(case.mesh('mesh.inner'))}", f"with {scripts.mesh(x.layout.mesh)}:", f"    with inner: {call}"]
    else:
        body += [f"with {scripts.mesh(x.layout.mesh)}:"]
    body += [f"    d = {call}"]
    got = scripts.holds(case, body, "d", torch.zeros(x.layout.shape) if how == "zeros" else x.full, x.layout)
    return Script(got.stages, ("import torch.distributed.tensor as dtensor", *got.imports), got.constants)


# what is asked for, by how: (shape, placements on a 1-D mesh, placements on a 2-D mesh)
ODD = {
    "dim-out": ("5x4", "S(2)", "R,S(2)"),
    "dim-far-out": ("5x4", "S(7)", "S(7),R"),
    "dim-far-below": ("5x4", "S(-3)", "R,S(-3)"),
    "strided-out": ("5x4", "_S(2,2)", "R,_S(2,2)"),
    "few": ("5x4", "", "S(0)"),
    "many": ("5x4", "S(0),R", "S(0),R,R"),
    "0-d": ("()", "S(0)", "R,S(0)"),
    "mixed-partial": ("5x4", "", "P(sum),P(max)"),
    "product": ("5x4", "P(product)", "R,P(product)"),
}
HOWS = {
    "distribute": ("dim-out", "dim-far-out", "dim-far-below", "strided-out", "few", "many", "0-d", "mixed-partial", "product"),
    "from_local": ("dim-out", "dim-far-out", "dim-far-below", "strided-out", "few", "many", "0-d", "mixed-partial"),
    "zeros": ("dim-out", "dim-far-out", "dim-far-below", "strided-out", "few", "many", "0-d"),
}
REFUSAL_MESHES = ("2", "3", "1x2", "2x1", "2x2")


def sweep_refusals(limits: Limits) -> list[Case]:
    cases = []
    for how, attempts in HOWS.items():
        for attempt in attempts:
            shape, *texts = ODD[attempt]
            for mesh in map(Mesh.parse, REFUSAL_MESHES):
                if texts[mesh.ndim - 1]:
                    x = TensorSpec.parse(f"{shape}:{texts[mesh.ndim - 1]}")
                    cases.append(Case.of("layout.refusals", mesh=mesh, x=x, how=how, attempt=attempt))
    for attempt in CALLS:
        cases += [Case.of("layout.refusals", mesh=mesh, how="call", attempt=attempt) for mesh in map(Mesh.parse, REFUSAL_MESHES)]
    return [case for case in cases if case.world <= limits.world_size]


def _on(here: Here, mesh: Mesh, text: str) -> dict[str, Any]:
    rest = ",R" * (mesh.ndim - 1)
    return {"device_mesh": here.mesh(mesh), "placements": here.placements(parse_placements(text + rest))}


def _non_leaf(here: Here, mesh: Mesh) -> object:
    return distribute_tensor(torch.ones(4, 4, requires_grad=True, device=here.device) * 2, **_on(here, mesh, "S(0)"))


def _other_placements(here: Here, mesh: Mesh) -> object:
    made = distribute_tensor(torch.ones(4, 4, device=here.device), **_on(here, mesh, "S(0)"), src_data_rank=None)
    return distribute_tensor(made, **_on(here, mesh, "S(1)"))


def _other_mesh(here: Here, mesh: Mesh) -> object:
    made = distribute_tensor(torch.ones(4, 4, device=here.device), **_on(here, mesh, "S(0)"), src_data_rank=None)
    return distribute_tensor(made, **_on(here, Mesh(mesh.shape, mesh.ranks[::-1]), "S(0)"))


def _local_dtensor(here: Here, mesh: Mesh) -> object:
    made = distribute_tensor(torch.ones(4, 4, device=here.device), **_on(here, mesh, "S(0)"), src_data_rank=None)
    return DTensor.from_local(made, **_on(here, mesh, "S(0)"))


def _shape_alone(here: Here, mesh: Mesh) -> object:
    return DTensor.from_local(torch.ones(4, 4, device=here.device), **_on(here, mesh, "S(0)"), shape=torch.Size((8, 4)))


def _stride_alone(here: Here, mesh: Mesh) -> object:
    return DTensor.from_local(torch.ones(4, 4, device=here.device), **_on(here, mesh, "S(0)"), stride=(4, 1))


# what else is refused: a call on a mesh, and its text
CALLS: dict[str, tuple[Callable[[Here, Mesh], object], str]] = {
    "non-leaf": (_non_leaf, "distribute_tensor(torch.ones(4, 4, requires_grad=True) * 2, mesh, {at})"),
    "other-placements": (_other_placements, "distribute_tensor(distribute_tensor(torch.ones(4, 4), mesh, {at}), mesh, {other})"),
    "other-mesh": (
        _other_mesh,
        "distribute_tensor(distribute_tensor(torch.ones(4, 4), mesh, {at}), "
        "DeviceMesh(mesh.device_type, mesh.mesh.flatten().flip(0).view(mesh.shape)), {at})",
    ),
    "local-dtensor": (_local_dtensor, "DTensor.from_local(distribute_tensor(torch.ones(4, 4), mesh, {at}), mesh, {at})"),
    "shape-alone": (_shape_alone, "DTensor.from_local(torch.ones(4, 4), mesh, {at}, shape=torch.Size((8, 4)))"),
    "stride-alone": (_stride_alone, "DTensor.from_local(torch.ones(4, 4), mesh, {at}, stride=(4, 1))"),
}


def check_refusals(case: Case, here: Here) -> None:
    """What is no layout is refused on every rank, without waiting for the others."""
    attempt, how, mesh = case.get("attempt"), case.get("how"), case.mesh()
    live = here.mesh(mesh)
    if how == "call":
        here.refused(lambda: CALLS[attempt][0](here, mesh), attempt, attempt)
        return
    spec = case.tensor("x")
    at, full = here.placements(spec.placements or ()), here.tensor(spec.build(case.seed))
    calls: dict[str, Callable[[], object]] = {
        "distribute": lambda: distribute_tensor(full, live, at, src_data_rank=None),
        "from_local": lambda: DTensor.from_local(full, live, at),
        "zeros": lambda: dtensor.zeros(spec.shape, device_mesh=live, placements=at),
    }
    here.refused(calls[how], attempt, f"{how} with {spec.placements and case.get('x')}")


def script_refusals(case: Case) -> Script:
    attempt, how, mesh = case.get("attempt"), case.get("how"), case.mesh()
    body = [f"mesh = {scripts.mesh(mesh)}"]
    if how == "call":
        rest = ",R" * (mesh.ndim - 1)
        at, other = (scripts.placements(parse_placements(text + rest)) for text in ("S(0)", "S(1)"))
        return scripts.refused(case, body, CALLS[attempt][1].format(at=at, other=other))
    spec = case.tensor("x")
    at = scripts.placements(spec.placements or ())
    made = {
        "distribute": f"distribute_tensor(torch.zeros({spec.shape}), mesh, {at}, src_data_rank=None)",
        "from_local": f"DTensor.from_local(torch.zeros({spec.shape}), mesh, {at})",
        "zeros": f"dtensor.zeros({spec.shape}, device_mesh=mesh, placements={at})",
    }[how]
    got = scripts.refused(case, body, made)
    return Script(got.stages, ("import torch.distributed.tensor as dtensor", *got.imports), got.constants)


LAWS = (
    Law(
        id="layout.factory",
        clause="zeros, ones, full and empty of a layout give each rank its slice of the plain tensor of this name.",
        source=f"{DOC}, DTensor factory functions",
        check=check_factory,
        script=script_factory,
        control="layout.factory mesh=2x2 x=5x6:S(0),S(1) make=full",
        planted="factory_ignores_second_mesh_dim",
        draw=draw_factory,
        draws=90,
        weight=0.5,
    ),
    Law(
        id="layout.context",
        clause="Inside a mesh's context the mesh is the default, and replication is the default placement.",
        source=f"{DOC}, distribute_tensor and DTensor.from_local (device_mesh, placements)",
        check=check_context,
        script=script_context,
        control="layout.context mesh=2 x=5x6:R how=distribute",
        planted="context_shards_by_default",
        draw=draw_context,
        draws=24,
        weight=0.2,
        needs=("broadcast",),
    ),
    Law(
        id="layout.refusals",
        clause="Placements of a missing dim, too few or many, shards of a 0-d tensor and mixed reductions are refused on every rank.",
        source=f"{DOC}, distribute_tensor, DTensor.from_local and the factories (one placement for each mesh dim; Raises)",
        check=check_refusals,
        script=script_refusals,
        control="layout.refusals mesh=1x2 x=5x4:P(sum),P(max) how=from_local attempt=mixed-partial",
        planted="mixed_partials_accepted",
        sweep=sweep_refusals,
        sweeps=145,
        features=lambda case: {"from-local"} if case.get("how") == "from_local" else set(),
        weight=0.4,
    ),
)
