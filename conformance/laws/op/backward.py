"""Gradients of ops: those of sharded operands are what the plain op's are, on every rank, however the incoming gradient lies."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor

from conformance.case import Case
from conformance.departures import of_layout
from conformance.here import read_placements
from conformance.law import Law, Limits
from conformance.laws import draws, scripts
from conformance.laws.given import Given
from conformance.laws.op.check import (
    judge_outsider,
    leaves,
    noting_overloads,
    operands,
    plain_of,
    plans_of_its_own,
    program_of,
    settled,
    sharded,
)
from conformance.laws.op.scripts import full, inputs, literal, tolerance
from reference.layout import Layout, LayoutError
from reference.mesh import Mesh
from reference.notation import Shape
from reference.placement import Placements, Replicate, format_placements, is_reduction, parse_placements, shard_dim
from reference.tensors import TensorSpec, dense
from strategies.op_corners import corner_gradients
from strategies.op_gradient_programs import gradient_programs
from strategies.op_gradients import DIFFERENTIABLE, Backward, GradientSweep, gradient_samples, plainest
from strategies.ops import Op

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from conformance.here import Here
    from conformance.report.reproducer import Script

SOURCE = "torch.distributed.tensor docs, DTensor: operators on sharded tensors follow the semantics of torch.Tensor, with autograd"
GRAD_SEED = 977
# cases of one op in a smoke run
LIGHT_SWEEPS = 1
SWEEPS = 3
DRAWS = 1


def case_of(law: str, drawn: Backward, seed: int = 0) -> Case:
    """The case that a sample makes: ``wrt`` names the leaves, ``arrives`` the placements of the incoming gradient."""
    sample = drawn.sample
    tensors: dict[str, Any] = dict(sample.tensors)
    fields: dict[str, Any] = {"steps": sample.steps, "wrt": drawn.wrt, "arrives": drawn.arrives, "sample": sample.origin or None}
    return Case.of(law, mesh=sample.mesh, **tensors, **fields, seed=seed or None)


def cases_of(law: str, drawn: SearchStrategy[Backward]) -> SearchStrategy[Case]:
    return st.tuples(drawn, st.integers(0, 3)).map(lambda both: case_of(law, *both))


def wanted(case: Case) -> tuple[str, ...]:
    """The operands whose gradients are judged."""
    return tuple(case.get("wrt").split(","))


def incoming(value: torch.Tensor, case: Case, at: int) -> torch.Tensor:
    """The gradient of a result: small integers that depend on the position."""
    return dense(tuple(value.shape), value.dtype, "small", case.seed * 64 + GRAD_SEED + 13 * at)


def arriving(case: Case, shape: Shape, own: Placements) -> Placements:
    """How the gradient of a result lies: as the case says, where a dim that the result does not have is replicated; else as the
    result itself, replicated where that is pending."""
    if "arrives" not in case:
        return tuple(Replicate() if is_reduction(placement) else placement for placement in own)
    return tuple(Replicate() if (shard_dim(p) or 0) >= len(shape) else p for p in parse_placements(case.get("arrives")))


def plain_gradients(case: Case, given: dict[str, Given]) -> tuple[list[int], list[torch.Tensor], dict[str, torch.Tensor | None]]:
    """Of the plain run: which parts of the result have a graph, these parts, and the gradients of the leaves."""
    plain = plain_of(given)
    for name in wanted(case):
        plain[name].requires_grad_()
    parts = list(leaves(program_of(case).run(plain)[-1]))
    found = [at for at, part in enumerate(parts) if isinstance(part, torch.Tensor) and part.requires_grad]
    values = [parts[at] for at in found]
    if values:
        torch.autograd.backward(values, [incoming(value, case, at) for at, value in enumerate(values)])
    return found, [value.detach() for value in values], {name: plain[name].grad for name in wanted(case)}


def check_gradients(case: Case, here: Here) -> None:
    """Run the steps forward and backward, plain and sharded, and judge the gradient of every leaf.

    Whether the forward calls are refused, or give something else, is judged by ``op.forward``.
    """
    with plans_of_its_own() if "tensor(" in case.get("steps") else nullcontext():
        _check_gradients(case, here)


def _check_gradients(case: Case, here: Here) -> None:
    given, mesh = operands(case), case.mesh()
    here.mesh(mesh)
    try:
        with noting_overloads(here):
            at, due, want = plain_gradients(case, given)
    except Exception as error:
        here.reject(f"the plain run fails: {error}")
    if not at:
        here.reject("nothing has a gradient")
    pending = "P(" in case.get("arrives", "") or any(x.layout.has_partial() for x in given.values())
    if pending and not all(grad.isfinite().all() for grad in want.values() if grad is not None):
        here.reject("the gradient is not finite: contributions to it do not add up")
    tensors = {name: sharded(x, here) for name, x in given.items()}
    for name in wanted(case):
        tensors[name].requires_grad_()

    def place(tensor: Any, placements: str) -> Any:
        for feature in of_layout(tuple(tensor.shape), str(mesh), placements):
            here.reached(feature)
        return tensor.redistribute(placements=here.placements(parse_placements(placements)))

    try:
        parts = list(leaves(program_of(case).run(tensors, place)[-1]))
    except Exception as error:
        raise NotImplementedError(f"no result to go back from: {type(error).__name__}: {error}") from error
    found = [parts[i] for i in at]
    for part, value in zip(found, due, strict=True):
        if not isinstance(part, DTensor) or (part.shape, part.dtype) != (value.shape, value.dtype):
            here.reject("the result itself is not what it must be")
        if not here.require(part.requires_grad, "wrong-metadata", "graph", "a result has no graph"):
            return
    try:
        grads = [_gradient(case, here, mesh, part, value, i) for i, (part, value) in enumerate(zip(found, due, strict=True))]
    except LayoutError:
        here.reject("the result itself claims placements that mean nothing")
    torch.autograd.backward(found, grads)
    for name in wanted(case):
        judge_gradient(here, mesh, tensors[name].grad, want[name], f"grad.{name}")


def _gradient(case: Case, here: Here, mesh: Mesh, part: DTensor, value: torch.Tensor, at: int) -> DTensor:
    """The gradient of a result, in the layout in which it arrives."""
    shape = tuple(value.shape)
    placements = arriving(case, shape, read_placements(part.placements))
    if "arrives" in case:
        for feature in of_layout(shape, str(mesh), format_placements(placements)):
            here.reached(feature)
    seed = case.seed + GRAD_SEED + at
    return Given(TensorSpec(shape), incoming(value, case, at), Layout(shape, mesh, placements), seed).dtensor(here)


def judge_gradient(here: Here, mesh: Mesh, got: Any, want: torch.Tensor | None, check: str) -> None:
    """A gradient is there where the plain one is, and is a DTensor on the mesh that denotes it."""
    if want is None or got is None:
        message = f"there is {'a' if want is None else 'no'} gradient"
        here.require((got is None) == (want is None), "wrong-value", check, message, want, got)
    elif here.coord(mesh) is None:
        judge_outsider(here, got, want, check)
    else:
        with torch.no_grad():
            here.same_dtensor(settled(got, here), want, check, exact=False, mesh=mesh)


def features(case: Case) -> set[str]:
    used = program_of(case).names()
    given = [name for name, _ in case.fields if name in used]
    last_alone = len(given) > 2 and wanted(case) == (given[-1],)
    return {name for name, holds in (("grad-placements", "arrives" in case), ("last-alone", last_alone)) if holds}


def script_of(case: Case) -> Script:
    """A script that runs the steps forward and backward and compares the full gradients."""
    given, mesh = operands(case), case.mesh()
    constants, body = inputs(case, given)
    at, due, want = plain_gradients(case, given)
    body += [f"{name}.requires_grad_()" for name in wanted(case)]
    body += program_of(case).source("out")
    several = at != [0] or len(at) > 1
    names = []
    for i, (where, value) in enumerate(zip(at, due, strict=True)):
        part = f"out[{where}]" if several else "out"
        grad, name, shape = incoming(value, case, i), f"g{i}", tuple(value.shape)
        if "arrives" in case:
            placed = arriving(case, shape, ())
            arrived = Given(TensorSpec(shape), grad, Layout(shape, mesh, placed), case.seed + GRAD_SEED + i)
            table, lines = scripts.source(arrived, case.world, name)
            constants += table
            body += lines[1:]
        else:
            body.append(f"{name} = DTensor.from_local({scripts.tensor(grad)}, mesh, {scripts.placements((Replicate(),) * mesh.ndim)})")
            body.append(f"{name} = {name}.redistribute(placements=[Replicate() if p.is_partial() else p for p in {part}.placements])")
        names.append((part, name))
    body.append(f"torch.autograd.backward([{', '.join(part for part, _ in names)}], [{', '.join(name for _, name in names)}])")
    judged = {f"{name}.grad": value for name, value in want.items()}
    got = ", ".join(full(name, value) for name, value in judged.items())
    expected = ", ".join(literal(value) for value in judged.values())
    outside = sorted(set(range(case.world)) - set(mesh.ranks))
    body += [f"if rank in {outside}:", "    return None, None"] if outside else []
    made = scripts.script([*body, f"expected = [{expected}]", f"return expected, [{got}]"], world=case.world, constants=constants)
    return replace(made, tolerance=tolerance([value for value in judged.values() if value is not None]))


def plainer(case: Case) -> SearchStrategy[Case]:
    """Cases with the same steps on the same shapes, with fewer departures."""

    @st.composite
    def drawn(draw: st.DrawFn) -> Case:
        fields: dict[str, object] = {}
        for name in operands(case):
            spec = case.tensor(name)
            options = [dict.fromkeys([Replicate(), placement]) for placement in spec.placements or ()]
            fields[name] = spec.placed(tuple(draw(st.sampled_from(list(option))) for option in options))
        smaller = case.with_fields(**fields)
        if "arrives" in case and draw(st.booleans()):
            smaller = smaller.with_fields(arrives=tuple(Replicate() for _ in case.mesh().shape))
        return smaller

    return drawn()


def _backward(op: Op) -> Law:
    law = f"op.backward[{op.name}]"
    return Law(
        id=law,
        clause=f"Gradients through {op.name} of sharded tensors are those of the full tensors, under the placements that they claim, "
        "also where the incoming gradient lies otherwise than the result.",
        source=op.source or SOURCE,
        check=check_gradients,
        control=case_of(law, plainest(op)).text,
        planted="leaf_gradients_shifted",
        draw=lambda limits: cases_of(law, gradient_samples(op, world_size=limits.world_size)),
        draws=DRAWS,
        sweep=lambda limits: draws.Listed(GradientSweep(op, limits.world_size), lambda drawn: case_of(law, drawn)),
        sweeps=LIGHT_SWEEPS if op.light else SWEEPS,
        narrow=plainer,
        refusal="allowed",
        features=features,
        script=script_of,
    )


def corners(limits: Limits) -> draws.Listed[Backward]:
    """The programs of a table, those that have ranks enough."""
    fitting = [drawn for drawn in corner_gradients() if max(drawn.sample.mesh.ranks) < limits.world_size]
    return draws.Listed(fitting, lambda drawn: case_of("op.program-backward", drawn))


PROGRAM = Law(
    id="op.program-backward",
    clause="The gradients of the end of a chain of ops with respect to all its leaves are those of the same chain of full tensors.",
    source=SOURCE,
    check=check_gradients,
    control="op.program-backward mesh=2 a=4x2:S(0):float32:small b=4x2:S(1):float32:small steps=x=mul(a,b);sum(x,0) wrt=a,b",
    planted="leaf_gradients_shifted",
    draw=lambda limits: cases_of("op.program-backward", gradient_programs(world_size=limits.world_size)),
    draws=60,
    sweep=corners,
    sweeps=len(corner_gradients()),
    weight=5.0,
    refusal="allowed",
    features=features,
    script=script_of,
)

LAWS = [*map(_backward, DIFFERENTIABLE.values()), PROGRAM]
