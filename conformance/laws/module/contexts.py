"""Laws of sequences that are cut up for a while: buffers within context_parallel, what a backward pass keeps under input_reshard."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import distribute_module, distribute_tensor
from torch.distributed.tensor.experimental import context_parallel

from conformance import compat
from conformance.case import Case
from conformance.law import Law, Limits
from conformance.laws import draws, scripts
from conformance.laws.module.given import incoming, near, near_dtensor
from conformance.laws.module.styles import lines
from conformance.report.reproducer import Script
from reference.notation import format_shape
from reference.placement import Replicate as R
from reference.placement import Shard as S
from strategies.modules import eighths

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from conformance.here import Here

DOC = "torch.distributed.tensor.experimental docs, context_parallel"


def buffer_of(case: Case) -> torch.Tensor:
    return eighths(case.shape("shape"), case.seed)


def check_context(case: Case, here: Here) -> None:
    """Buffers are cut alike, every position once, and are whole again afterwards, except those that were not to be."""
    whole, dim, live = buffer_of(case), case.integer("dim"), here.mesh(case.mesh())
    steps = whole.shape[dim]
    buffer, positions = here.tensor(whole.clone()), here.tensor(torch.arange(steps).reshape(1, steps).clone())
    kept: set[torch.Tensor] = {buffer} if "kept" in case else set()
    with context_parallel(live, buffers=[buffer, positions], buffer_seq_dims=[dim, 1], no_restore_buffers=kept):
        at = positions.flatten()
        ranks = case.mesh().size
        if here.require(len(at) == steps // ranks, "wrong-layout", "share", "a rank has another share", steps // ranks, len(at)):
            here.same(buffer, here.tensor(whole).index_select(dim, at), "alike", what="the buffer at the positions of this rank")
        unshard = compat.name("context_parallel_unshard")
        order, full = unshard(live, [positions.clone(), buffer.clone()], [1, dim])
        here.same(order.flatten(), torch.arange(steps), "once", what="the positions of all ranks")
        here.same(full, whole, "together", what="the buffer of all ranks")
    if "kept" in case:
        here.require(buffer.shape[dim] == steps // ranks, "wrong-layout", "kept", "a buffer that was to stay cut is whole again")
    else:
        here.same(buffer, whole, "restored", what="the buffer afterwards")
    here.same(positions.flatten(), torch.arange(steps), "restored", what="the positions afterwards")


def draw_context(limits: Limits) -> SearchStrategy[Case]:
    @st.composite
    def case(draw: st.DrawFn) -> Case:
        mesh = draw(st.sampled_from(lines(limits)))
        shape, dim = [draw(st.sampled_from([1, 2, 3])) for _ in range(draw(st.sampled_from([2, 3, 4])))], draw(st.sampled_from([1, 1, 2]))
        dim = min(dim, len(shape) - 1)
        shape[dim] = mesh.size * draw(st.sampled_from([2, 4, 1, 3]))
        fields: dict[str, Any] = {"shape": format_shape(tuple(shape)), "dim": dim, "kept": draw(st.sampled_from([None, None, 1]))}
        return Case.of("module.context-parallel", mesh=mesh, **fields, seed=draw(draws.seeds()))

    return case()


def sweep_context(limits: Limits) -> list[Case]:
    """A sequence along the first dim, as of a table of positions; shares that cannot be dealt from both ends."""
    return [
        Case.of("module.context-parallel", mesh="2", shape=shape, dim=dim)
        for shape, dim in (("8x3", 0), ("4x2", 0), ("6x2", 0), ("1x2", 1))
    ]


def script_context(case: Case) -> Script:
    whole, dim = buffer_of(case), case.integer("dim")
    kept = "{x}" if "kept" in case else "set()"
    body = [
        f"mesh, whole = {scripts.mesh(case.mesh())}, {scripts.tensor(whole)}",
        "x = whole.clone()",
        f"with context_parallel(mesh, buffers=[x], buffer_seq_dims=[{dim}], no_restore_buffers={kept}):",
        f"    (full,) = context_parallel_unshard(mesh, [x.clone()], [{dim}])",
        f"return [whole, {case.mesh().size if 'kept' in case else 1} * x.shape[{dim}]], [full, whole.shape[{dim}]]",
    ]
    made = scripts.script(body, world=case.world)
    imports = (*made.imports, "from torch.distributed.tensor.experimental import context_parallel",
               "from torch.distributed.tensor.experimental._attention import context_parallel_unshard")  # fmt: skip
    return Script(made.stages, imports, made.constants)


# What the backward pass keeps


def check_resharded(case: Case, here: Here) -> None:
    """Gradients of a model whose kept activations are sharded meanwhile are those of the model alone."""
    sizes, rows = case.shape("dims"), case.integer("rows")
    dense: Any = nn.Sequential(nn.Linear(sizes[0], sizes[1], bias=False), nn.Tanh()).double()
    with torch.no_grad():
        dense[0].weight.copy_(eighths((sizes[1], sizes[0]), case.seed))
    model: Any = copy.deepcopy(dense).to(here.device)
    live = here.mesh(case.mesh())
    compat.name("input_reshard")(model, live, case.integer("dim") if "dim" in case else None)
    whole = eighths((rows, sizes[0]), case.seed + 5).requires_grad_()
    own = here.tensor(whole.detach().clone())
    if "held" in case:  # as DTensors, of which what is replicated alone is sharded meanwhile
        distribute_module(model, live)
        own = distribute_tensor(own, live, here.placements(case.placements("held")))
    x = own.requires_grad_()
    want, got = dense(whole), model(x)
    grad = incoming(want, case.seed)
    want.backward(grad)
    arrives = here.tensor(grad)
    got.backward(distribute_tensor(arrives, live, here.placements(case.placements("held"))) if "held" in case else arrives)
    pairs: list[tuple[str, Any, Any]] = [("x", x.grad, whole.grad), ("weight", model[0].weight.grad, dense[0].weight.grad)]
    for check, what, mine, due in (
        ("forward", "the output", got, want),
        *(("gradient", f"the gradient of {n}", m, d) for n, m, d in pairs),
    ):
        (near_dtensor if "held" in case else near)(here, mine, due, check, what)


def draw_resharded(limits: Limits) -> SearchStrategy[Case]:
    @st.composite
    def case(draw: st.DrawFn) -> Case:
        mesh = draw(st.sampled_from(lines(limits)))
        counts = st.sampled_from([mesh.size, 2 * mesh.size])
        dims, dim = format_shape((draw(counts), draw(counts))), draw(st.sampled_from([0, 1, 0, 1, None]))
        held = draw(st.sampled_from([None, None, R(), S(0)]))
        return Case.of("module.input-reshard", mesh=mesh, dims=dims, rows=draw(counts), dim=dim, held=held, seed=draw(draws.seeds()))

    return case()


def sweep_resharded(limits: Limits) -> list[Case]:
    """DTensors, and activations that do not split evenly."""
    sizes = (("4x2", 3, 0), ("3x2", 4, 1))
    whole = [Case.of("module.input-reshard", mesh="2", dims="4x2", rows=4, dim=dim, held="R") for dim in (0, 1)]
    return whole + [Case.of("module.input-reshard", mesh="2", dims=dims, rows=rows, dim=dim) for dims, rows, dim in sizes]


def features_resharded(case: Case) -> set[str]:
    sizes = case.shape("dims")
    cut = (case.integer("rows"), sizes[1]) if case.integer("dim", 0) == 0 else sizes
    return {"module", "backward"} | ({"uneven"} if any(extent % case.mesh().size for extent in cut) else set())


def script_resharded(case: Case) -> Script:
    sizes, rows = case.shape("dims"), case.integer("rows")
    held = scripts.placements(case.placements("held")) if "held" in case else ""
    body = [
        f"mesh, w = {scripts.mesh(case.mesh())}, {scripts.tensor(eighths((sizes[1], sizes[0]), case.seed))}",
        f"x, y = ({scripts.tensor(eighths((rows, sizes[0]), case.seed + 5))}.requires_grad_() for _ in range(2))",
        f"net = torch.nn.Sequential(torch.nn.Linear({sizes[0]}, {sizes[1]}, bias=False), torch.nn.Tanh()).double()",
        "net[0].weight.data = w",
        "net(x).sum().backward()",
        *(["distribute_module(net, mesh)", f"z = distribute_tensor(y.detach(), mesh, {held}).requires_grad_()"] if held else ["z = y"]),
        f"input_reshard(net, mesh, {case.get('dim', 'None')})(z).sum().backward()",
        f"return x.grad, z.grad{'.full_tensor()' if held else ''}",
    ]
    made = scripts.script(body, world=case.world)
    imports = (*made.imports, "from torch.distributed.tensor.parallel.input_reshard import input_reshard",
               *(["from torch.distributed.tensor import distribute_module"] if held else []))  # fmt: skip
    return Script(made.stages, imports, made.constants, tolerance=1e-9)


LAWS = (
    Law(
        id="module.context-parallel",
        clause="Within context_parallel buffers are cut at the same positions, each on one rank, can be put together, and are restored.",
        source=DOC,
        check=check_context,
        script=script_context,
        features=lambda case: {"context-parallel"} | ({"sequence-first"} if case.integer("dim") == 0 else set()),
        control="module.context-parallel mesh=2 shape=2x8x3 dim=1",
        planted="buffers_are_turned_round",
        draw=draw_context,
        draws=6,
        sweep=sweep_context,
        sweeps=1,
        needs=("all_gather",),
        weight=0.1,
    ),
    Law(
        id="module.input-reshard",
        clause="What a backward pass keeps may be sharded along a dim meanwhile: gradients are those of the model alone.",
        source="torch.distributed.tensor.parallel.input_reshard, docstring",
        check=check_resharded,
        script=script_resharded,
        features=features_resharded,
        control="module.input-reshard mesh=2 dims=4x2 rows=4 dim=0",
        planted="kept_activations_are_halved",
        draw=draw_resharded,
        draws=6,
        sweep=sweep_resharded,
        sweeps=3,
        needs=("all_gather",),
        weight=0.1,
    ),
)
