"""Laws of functions on local tensors (local_map)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import local_map

from conformance.case import Case
from conformance.law import Law, Limits
from conformance.laws import draws, scripts
from conformance.laws.given import Given, given
from conformance.report.reproducer import Script
from reference import simulate
from reference.layout import Layout
from reference.mesh import Mesh
from reference.notation import Shape
from reference.placement import Partial, Placement, Placements
from reference.placement import Replicate as R
from reference.placement import Shard as S
from reference.tensors import TensorSpec
from strategies.placements import placements

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from conformance.here import Here

DOC = "torch.distributed.tensor.experimental docs"
NEEDS = ("all_gather", "all_reduce", "all_to_all", "reduce_scatter")
P = Partial("sum")


@dataclass(frozen=True)
class Mapped:
    """A function on local tensors ``a`` (and ``b``), its text, and how its inputs and outputs are placed, alike along all mesh dims.

    Of local tensors it gives parts of what it gives of whole ones. ``grads``: how gradients of the inputs are placed where they are not
    placed as the inputs. ``outs``: one for each output, ``None`` for what is no tensor. ``b``: the shape of ``b`` for that of ``a`` and
    a number of ranks.
    """

    text: str
    run: Callable[..., Any]
    ins: tuple[Placement, ...]
    outs: tuple[Placement | None, ...]
    b: Callable[[Shape, int], Shape] = field(default=lambda shape, ranks: shape)
    grads: tuple[Placement, ...] = ()
    dims: int = 2


MAPPED: dict[str, Mapped] = {
    "scale": Mapped("a * 2", lambda a: a * 2, (S(0),), (S(0),), dims=1),
    "scale-pending": Mapped("a * 2", lambda a: a * 2, (P,), (P,), grads=(R(),), dims=1),
    "rows-sum": Mapped("a.sum(0)", lambda a: a.sum(0), (S(0),), (P,)),
    "columns-sum": Mapped("a.sum(0)", lambda a: a.sum(0), (S(1),), (S(0),)),
    "turned": Mapped("a.t()", lambda a: a.t(), (S(0),), (S(1),)),
    "add": Mapped("a + b", lambda a, b: a + b, (S(1), S(1)), (S(1),)),
    "inner": Mapped("a @ b", lambda a, b: a @ b, (S(1), S(0)), (P,), lambda shape, ranks: (shape[1], 3)),
    "by-columns": Mapped("a @ b", lambda a, b: a @ b, (R(), S(1)), (S(1),), lambda shape, ranks: (shape[1], ranks), (P, S(1))),
    "by-rows": Mapped("a @ b", lambda a, b: a @ b, (S(0), R()), (S(0),), lambda shape, ranks: (shape[1], 3), (S(0), P)),
    "pair": Mapped("(a + 1, a.sum(0))", lambda a: (a + 1, a.sum(0)), (S(0),), (S(0), P)),
    "with-number": Mapped("(a - 1, a.dim())", lambda a: (a - 1, a.dim()), (S(1),), (S(1), None)),
}


def asked(case: Case) -> tuple[Mapped, tuple[Given, ...], list[Placements]]:
    """The function, its inputs, and how it must be given them."""
    one = MAPPED[case.get("fn")]
    inputs = tuple(given(case, name) for name in "ab"[: len(one.ins)])
    return one, inputs, [(at,) * case.mesh().ndim for at in one.ins]


def wrapped(case: Case, here: Here) -> Any:
    """The function, mapped as the case says."""
    one, _, ins = asked(case)
    ndim = case.mesh().ndim
    outs: list[Any] = [None if at is None else here.placements((at,) * ndim) for at in one.outs]
    options: dict[str, Any] = {"out_placements": tuple(outs) if len(outs) > 1 else outs[0]}
    if "checked" in case:
        options["in_placements"] = tuple(map(here.placements, ins))
        options["redistribute_inputs"] = case.get("checked") == "moved"
    if "grads" in case:
        options["in_grad_placements"] = tuple(here.placements((at,) * ndim) for at in one.grads or one.ins)
    if "on" in case:
        options["device_mesh"] = here.mesh(case.mesh())
    return local_map(**options)(one.run) if "decorator" in case else local_map(one.run, **options)


def leaf(here: Here, x: Given) -> Any:
    """The tensor as a leaf that asks for a gradient."""
    return x.dtensor(here).detach().requires_grad_()


def check_map(case: Case, here: Here) -> None:
    """Outputs denote what the function gives of whole tensors, placed as declared; so do the gradients of the inputs."""
    one, inputs, _ = asked(case)
    live = [leaf(here, x) for x in inputs]
    dense = [x.full.clone().requires_grad_() for x in inputs]
    fn = wrapped(case, here)
    got, want = fn(*live), one.run(*dense)
    gots, wants = (value if isinstance(value, tuple) else (value,) for value in (got, want))
    if not here.require(len(gots) == len(wants), "wrong-metadata", "outputs", "another number of outputs", len(wants), len(gots)):
        return
    ndim = case.mesh().ndim
    for at, (mine, due, place) in enumerate(zip(gots, wants, one.outs, strict=True)):
        if place is None:
            here.require(mine == due, "wrong-value", f"output-{at}", "what is no tensor comes out otherwise", due, mine)
        else:
            here.same_dtensor(mine, due.detach(), f"output-{at}", mesh=case.mesh(), placements=(place,) * ndim)
    if "plain" in case:
        again = fn(*(here.tensor(x.full) for x in inputs))
        first = again[0] if isinstance(again, tuple) else again
        if here.require(not isinstance(first, DTensor), "wrong-metadata", "plain", "plain inputs give a DTensor"):
            here.same(first, wants[0].detach(), "plain", what="the output of plain inputs")
    if "grads" not in case:
        return
    arriving = torch.ones_like(wants[0])
    wants[0].backward(arriving)
    place = one.outs[0]
    assert place is not None
    whole = (R() if isinstance(place, Partial) else place,) * ndim
    layout = Layout(tuple(arriving.shape), case.mesh(), whole)
    coord = here.coord(layout.mesh)
    assert coord is not None
    local = here.tensor(simulate.take(arriving, layout, coord))
    live_mesh, size = here.mesh(case.mesh()), arriving.shape
    gots[0].backward(DTensor.from_local(local, live_mesh, here.placements(whole), shape=size, stride=arriving.stride()))
    for name, mine, due in zip("ab", live, dense, strict=False):
        assert due.grad is not None
        here.same_dtensor(mine.grad, due.grad, f"gradient-{name}", mesh=case.mesh())


def features_map(case: Case) -> set[str]:
    one, inputs, ins = asked(case)
    found = {"local-map", f"way:{case.get('fn')}"} | ({"backward"} if "grads" in case else set())
    if len(one.outs) > 1:
        found.add("several-outputs")
    if case.get("checked", "") == "moved" and any(x.layout.placements != at for x, at in zip(inputs, ins, strict=True)):
        found.add("redistributed")
    places = [x.layout.replace(at) for x, at in zip(inputs, ins, strict=True)]
    return found | ({"uneven-local"} if any(not layout.is_even() for layout in places) else set())


def draw_map(limits: Limits) -> SearchStrategy[Case]:
    on = [mesh for mesh in map(Mesh.parse, ("2", "2", "2", "3", "3", "4", "2x2")) if mesh.size <= limits.world_size]

    @st.composite
    def case(draw: st.DrawFn) -> Case:
        mesh = draw(st.sampled_from(on))
        name = draw(st.sampled_from(sorted(MAPPED)))
        one = MAPPED[name]
        even = [mesh.size, 2 * mesh.size]
        shape: Shape = tuple(draw(st.sampled_from(even)) for _ in range(one.dims))
        sizes = [shape, one.b(shape, mesh.size)][: len(one.ins)]
        checked = draw(st.sampled_from([None, "yes", "moved", "moved"]))
        fields: dict[str, Any] = {}
        for key, size, due in zip("ab", sizes, one.ins, strict=False):
            at: Placements = (due,) * mesh.ndim
            if checked == "moved" and not isinstance(due, Partial):
                at = draw(placements(mesh, len(size), kinds=("R", "S", "P")))
            fields[key] = TensorSpec(size, at, "float64", "small")
        grads = draw(st.sampled_from([None, 1])) if name != "with-number" else None
        fields |= {"fn": name, "checked": checked, "grads": grads}
        fields |= {key: draw(st.sampled_from([None, 1])) for key in ("decorator", "on", "plain")}
        if fields["plain"] and one.ins and any(isinstance(at, Partial) for at in one.ins):
            fields["plain"] = None
        return Case.of("module.local-map", mesh=mesh, **fields, seed=draw(draws.seeds()))

    return case()


def sweep_map(limits: Limits) -> list[Case]:
    """Shards that are not alike, which are known to come out otherwise, and would hide the rest if they were drawn."""
    sizes = (("2", "5:S(0)"), ("3", "4:S(0)"))
    cases = [Case.of("module.local-map", mesh=mesh, a=f"{a}:float64:small", fn="scale") for mesh, a in sizes]
    # functions of which an input is used whole on every rank: its gradients add up only if they are declared to
    for name, b in (("by-columns", "6x2:S(1)"), ("by-rows", "6x3:R")):
        a = "4x6:R" if name == "by-columns" else "4x6:S(0)"
        cases.append(Case.of("module.local-map", mesh="2", a=f"{a}:float64:small", b=f"{b}:float64:small", fn=name, grads=1))
    return [case for case in cases if case.world <= limits.world_size]


def script_map(case: Case) -> Script:
    one, inputs, ins = asked(case)
    ndim = case.mesh().ndim
    constants: list[str] = []
    body: list[str] = []
    for name, x in zip("ab", inputs, strict=False):
        more, put = scripts.source(x, case.world, name)
        constants += more
        body += put if not body else put[1:]
        body += [f"{name} = {name}.detach().requires_grad_()"]
    outs = ["None" if at is None else scripts.placements((at,) * ndim) for at in one.outs]
    options = [f"out_placements={outs[0] if len(outs) == 1 else '(' + ', '.join(outs) + ')'}"]
    if "checked" in case:
        options += [f"in_placements=({', '.join(map(scripts.placements, ins))},)", f"redistribute_inputs={case.get('checked') == 'moved'}"]
    if "grads" in case:
        options += [f"in_grad_placements=({', '.join(scripts.placements((at,) * ndim) for at in one.grads or one.ins)},)"]
    names = ", ".join("ab"[: len(inputs)])
    body += [f"got = local_map(lambda {names}: {one.text}, {', '.join(options)})({names})"]
    body += ["got = got[0] if isinstance(got, tuple) else got"]
    dense = [x.full.clone().requires_grad_() for x in inputs]
    want = one.run(*dense)
    want = want[0] if isinstance(want, tuple) else want
    if "grads" not in case:
        body += [f"return {scripts.tensor(want)}, got.full_tensor().detach()"]
    else:
        want.sum().backward()
        grads = ", ".join(scripts.tensor(x.grad) for x in dense if x.grad is not None)
        body += ["got.full_tensor().sum().backward()", f"return [{grads}], [x.grad.full_tensor() for x in ({names},)]"]
    made = scripts.script(body, world=case.world, constants=constants)
    return Script(made.stages, (*made.imports, "from torch.distributed.tensor.experimental import local_map"), made.constants)


# what is refused: the call as text, what is called with what, of x, sharded on dim 0 of a mesh of one dim, and the errors that refuse it
SHARDED = [Shard(0)]
MISMAPPED: dict[str, tuple[str, Callable[[Any], tuple[Any, ...]], type[Exception]]] = {
    "placed-otherwise": (
        "local_map(lambda a: a, [Shard(0)], ([Replicate()],))(x)",
        lambda x: (local_map(lambda a: a, SHARDED, ([Replicate()],)), x),
        ValueError,
    ),
    "other-placements-of-two": (
        "local_map(lambda a: a, [Replicate(), Shard(0)], ([Shard(0), Shard(0)],))(x)",
        lambda x: (local_map(lambda a: a, [Replicate(), Shard(0)], ([Shard(0), Shard(0)],)), x),
        ValueError,
    ),
    "none-for-tensor": (
        "local_map(lambda a: a, [Shard(0)], (None,))(x)",
        lambda x: (local_map(lambda a: a, SHARDED, (None,)), x),
        AssertionError,
    ),
    "placements-for-number": (
        "local_map(lambda a, k: a, [Shard(0)], ([Shard(0)], [Shard(0)]))(x, 3)",
        lambda x: (local_map(lambda a, k: a, SHARDED, (SHARDED, SHARDED)), x, 3),
        AssertionError,
    ),
    "fewer-in-placements": (
        "local_map(lambda a, b: a, [Shard(0)], ([Shard(0)],))(x, x)",
        lambda x: (local_map(lambda a, b: a, SHARDED, (SHARDED,)), x, x),
        AssertionError,
    ),
    "fewer-out-placements": (
        "local_map(lambda a: (a, a), ([Shard(0)],), ([Shard(0)],))(x)",
        lambda x: (local_map(lambda a: (a, a), (SHARDED,), (SHARDED,)), x),
        AssertionError,
    ),
    "placements-for-text": (
        'local_map(lambda a: "text", [Shard(0)], ([Shard(0)],))(x)',
        lambda x: (local_map(lambda a: "text", SHARDED, (SHARDED,)), x),
        AssertionError,
    ),
    "gives-dtensor": (
        "local_map(lambda a: x, [Shard(0)], ([Shard(0)],))(x)",
        lambda x: (local_map(lambda a: x, SHARDED, (SHARDED,)), x),
        AssertionError,
    ),
    "none-for-gradient": (
        "local_map(lambda a: a, [Shard(0)], ([Shard(0)],), (None,))(x)",
        lambda x: (local_map(lambda a: a, SHARDED, (SHARDED,), (None,)), x),
        AssertionError,
    ),
    "plain-beside": ("torch.add(x, torch.ones(4, 3))", lambda x: (torch.add, x, torch.ones(4, 3)), RuntimeError),
}


def check_mismapped(case: Case, here: Here) -> None:
    """Placements that do not fit what goes in or comes out are refused, and so is a plain operand where nobody asked for replicas."""
    text, made, error = MISMAPPED[case.get("attempt")]
    fn, *args = made(given(case).dtensor(here))
    here.refused(lambda: fn(*args), case.get("attempt"), text, errors=(error,))


def script_mismapped(case: Case) -> Script:
    call, _, error = MISMAPPED[case.get("attempt")]
    constants, body = scripts.source(given(case), case.world)
    made = scripts.refused(case, body, call, constants=constants, errors=error.__name__)
    return Script(made.stages, (*made.imports, "from torch.distributed.tensor.experimental import local_map"), made.constants)


def sweep_mismapped(limits: Limits) -> list[Case]:
    two: dict[str, Any] = {"mesh": "2x2" if limits.world_size > 3 else "1x2", "x": "4x3:R,S(0)"}
    return [
        Case.of("module.local-map-refusals", attempt=attempt, **(two if attempt.endswith("of-two") else {"mesh": "2", "x": "4x3:S(0)"}))
        for attempt in MISMAPPED
    ]


LAWS = (
    Law(
        id="module.local-map",
        clause="A function mapped over local tensors gets them placed as required and gives tensors placed as declared, gradients too.",
        source=f"{DOC}, local_map",
        check=check_map,
        script=script_map,
        features=features_map,
        control="module.local-map mesh=2 a=4x6:S(0):float64:small b=6x3:R:float64:small fn=inner checked=moved grads=1",
        planted="map_takes_inputs_as_they_lie",
        draw=draw_map,
        draws=14,
        sweep=sweep_map,
        sweeps=4,
        needs=NEEDS,
        weight=0.3,
    ),
    Law(
        id="module.local-map-refusals",
        clause="local_map refuses inputs that are placed otherwise, and placements that do not fit what goes in or comes out.",
        source=f"{DOC}, local_map (Raises)",
        check=check_mismapped,
        script=script_mismapped,
        control="module.local-map-refusals mesh=2 x=4x3:S(0) attempt=placed-otherwise",
        planted="map_moves_unasked",
        sweep=sweep_mismapped,
        sweeps=10,
        weight=0.1,
    ),
)
