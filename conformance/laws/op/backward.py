"""Gradients of ops: those of sharded operands are what the plain op's are, on every rank, however the incoming
gradient lies."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any, cast

import torch
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from shardlaw.conformance.law.act import fields, law
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Global, Meaningless, Of
from shardlaw.conformance.law.features.layout_features import placement_features
from shardlaw.conformance.law.fields import Field, Placements, ScriptArgument, TensorField, Word, assemble_dtensor
from shardlaw.conformance.law.law import Law, Limits
from shardlaw.conformance.law.program.fields import Operands, Program, operands_of
from shardlaw.conformance.law.program.parse import Program as Steps
from shardlaw.conformance.law.program.parse import plain_run_context
from shardlaw.conformance.laws.op.forward import text_of
from shardlaw.conformance.laws.op.results import Result, plain_of, replicated, specs, unless
from shardlaw.conformance.laws.shared.draws import Chained, LazyCases
from shardlaw.reference import placement as reference
from shardlaw.reference.layout import Layout
from shardlaw.reference.notation import NotationError
from shardlaw.reference.placement import format_placements, shard_dim
from shardlaw.reference.tensors import dense
from shardlaw.strategies.op_corners import corner_gradients
from shardlaw.strategies.op_gradient_programs import enumerate_gradient_programs, gradient_programs
from shardlaw.strategies.op_gradients import (
    DIFFERENTIABLE,
    Backward,
    GradientSweep,
    gradient_samples,
    plainest,
    unusual_gradient,
)
from shardlaw.strategies.ops import Op

if TYPE_CHECKING:
    from collections.abc import Mapping

    from hypothesis.strategies import SearchStrategy

    from shardlaw.conformance.rank.context import RankContext
    from shardlaw.reference.mesh import Mesh

SOURCE = (
    "torch.distributed.tensor docs, DTensor: operators on sharded tensors follow the semantics of "
    "torch.Tensor, with autograd"
)
THROUGH = (
    "of sharded tensors are those of the full tensors, under the placements that they claim, "
    "also where the incoming gradient lies otherwise than the result."
)
NO_RESULT = "no result to go back from"
GRAD_SEED = 977
# cases of one op in a smoke run
LIGHT_SWEEPS = 1
SWEEPS = 3
DRAWS = 0.25  # the first draw of all is the plainest, which the control is like
# on meshes of two dims DTensor plans its decomposition for 8 s and more
SECONDS = {"nn.functional.group_norm": 40.0}


@dataclass(frozen=True)
class PlainRun:
    """Of the plain run: the gradient that arrives at each part of the result that has a graph, by its place, the
    gradients of the leaves, or
    why there is none."""

    arriving: Mapping[int, Global]
    grads: Mapping[str, torch.Tensor | None]
    error: str = ""


@lru_cache(4)
def plain_run(case: Case) -> PlainRun:
    """Run the steps of a case forward and backward on plain tensors."""
    plain, mesh, arriving = plain_of(operands_of(case)), case.mesh(), dict[int, Global]()
    try:
        for name in wanted(case):
            plain[name].requires_grad_()
        parts = flat(Steps.parse(case.get("steps")).run_plain(plain)[-1])
        for at, part in enumerate(parts):
            if isinstance(part, torch.Tensor) and part.requires_grad:
                seed, shape = len(arriving), tuple(part.shape)
                grad = dense(shape, part.dtype, "small", case.seed * 64 + GRAD_SEED + 13 * seed)
                arriving[at] = Global(
                    grad, Layout(shape, mesh, arrives(case, len(shape))), case.seed + GRAD_SEED + seed
                )
        with plain_run_context():
            torch.autograd.backward([parts[at] for at in arriving], [grad.full for grad in arriving.values()])
    except Exception as error:
        return PlainRun({}, {}, f"the plain run fails: {type(error).__name__}: {error}")
    return PlainRun(arriving, {name: plain[name].grad for name in wanted(case)})


def wanted(case: Case) -> list[str]:
    """The operands whose gradients are judged."""
    return case.get("wrt").split(",")


def arrives(case: Case, ndim: int) -> reference.Placements:
    """How the gradient of a result of so many dims lies: as the case says, replicated where it names a dim that the
    result lacks."""
    named = case.placements("arrives") if "arrives" in case else (reference.Replicate(),) * case.mesh().ndim
    return tuple(reference.Replicate() if (shard_dim(placement) or 0) >= ndim else placement for placement in named)


class IncomingField(Field):
    """The gradients of the parts of a result that have a graph, by their place, in the layout in which they arrive;
    for due functions the
    plain run, which says what they are."""

    takes = "operands of the steps that have gradients, such as wrt=a,b"

    def fields(self, name: str) -> tuple[str, ...]:
        return ("*", "mesh", "steps", "wrt", "arrives")

    def read(self, case: Case, name: str) -> PlainRun:
        unknown = sorted({*wanted(case)} - {*operands_of(case)})
        if unknown:
            raise NotationError(f"wrt names {unknown[0]!r}, which the steps do not")
        return plain_run(case)

    def build(self, value: PlainRun, here: RankContext) -> dict[int, DTensor]:
        for grad in value.arriving.values():
            for feature in placement_features(grad.layout.shape, str(grad.mesh), format_placements(grad.placements)):
                here.add_feature(feature)
        return {
            at: assemble_dtensor(grad, here.tensor(grad.local(here.rank)), here) for at, grad in value.arriving.items()
        }

    def to_script(self, value: PlainRun, name: str, world: int) -> ScriptArgument:
        parts = {at: TensorField().to_script(grad, f"gradient{at}", world) for at, grad in value.arriving.items()}
        return ScriptArgument(
            f"{{{', '.join(f'{at}: {one.expression}' for at, one in parts.items())}}}",
            tuple(line for one in parts.values() for line in one.constants),
            tuple(dict.fromkeys(line for one in parts.values() for line in one.statements)),
        )


Incoming = Annotated[dict[int, DTensor], IncomingField()]


def backward(steps: Program, operands: Operands, wrt: Word, incoming: Incoming, arrives: Placements | None = None):
    """The gradients of some operands: a gradient that is given no placements arrives as the result lies, with nothing
    pending."""
    leaves = {name: operands[name].requires_grad_() for name in wrt.split(",")}
    try:
        parts = flat(steps(operands)[-1])
        for at, gradient in incoming.items():
            if arrives is None:
                placements = [
                    Replicate() if placement.is_partial() else placement for placement in parts[at].placements
                ]
                incoming[at] = gradient.redistribute(placements=placements)
            if (parts[at].shape, parts[at].dtype) != (gradient.shape, gradient.dtype):
                raise ValueError("the result is of another shape or dtype than it must be")
    except Exception as error:
        raise NotImplementedError(f"{NO_RESULT}: {type(error).__name__}: {error}") from error
    graph = [parts[at].requires_grad for at in incoming]
    if all(graph):
        torch.autograd.backward([parts[at] for at in incoming], [*incoming.values()])
    grads = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    return {"graph": graph, "gradients": [*grads], **{f"grad.{name}": grad for name, grad in grads.items()}}


def flat(value: Any) -> list[Any]:
    """The parts of a result, tuples and lists unpacked."""
    if isinstance(value, (tuple, list)):
        return [part for item in value for part in flat(item)]
    return [value]


def backward_due(operands, incoming, mesh: DeviceMesh):
    """What is due of :func:`backward`."""
    if incoming.error:
        raise Meaningless(incoming.error)
    if not incoming.arriving:
        raise Meaningless("nothing has a gradient")
    grads = {name: grad for name, grad in incoming.grads.items() if grad is not None}
    pending = any(
        x.layout.has_partial() for x in (*incoming.arriving.values(), *operands.values()) if isinstance(x, Global)
    )
    if pending and not all(grad.isfinite().all() for grad in grads.values()):
        raise Meaningless("the gradient is not finite: contributions to it do not add up")
    due = {f"grad.{name}": Result(grad, cast("Mesh", mesh), exact=False) for name, grad in grads.items()}
    return {"graph": Of([True] * len(incoming.arriving)), "gradients": [*grads], **due}


def features(case: Case) -> set[str]:
    given = [*specs(case)]
    last_alone = len(given) > 2 and wanted(case) == given[-1:]
    return {name for name, holds in (("grad-placements", "arrives" in case), ("last-alone", last_alone)) if holds}


def may_refuse(case: Case, text: str) -> bool:
    """Whether the calls forward may be refused, or give something else, is judged by ``op.forward``."""
    return NO_RESULT in text or unless(replicated)(case, text)


def case_of(drawn: Backward, seed: int = 0) -> Case:
    """The case that a sample makes: ``wrt`` names the leaves, ``arrives`` the placements of the incoming gradient."""
    sample = drawn.sample
    tensors: dict[str, Any] = dict(sample.tensors)
    further: dict[str, Any] = {
        "steps": sample.steps,
        "wrt": drawn.wrt,
        "arrives": drawn.arrives,
        "sample": sample.origin or None,
    }
    return fields(mesh=sample.mesh, **tensors, **further, seed=seed or None)


def cases_of(drawn: SearchStrategy[Backward]) -> SearchStrategy[Case]:
    return st.tuples(drawn, st.integers(0, 3)).map(lambda both: case_of(*both))


def plainer(case: Case) -> SearchStrategy[Case]:
    """Cases with the same steps on the same shapes, with fewer departures."""

    @st.composite
    def drawn(draw: st.DrawFn) -> Case:
        smaller: dict[str, object] = {}
        for name, spec in specs(case).items():
            options = [dict.fromkeys([reference.Replicate(), placement]) for placement in spec.placements or ()]
            smaller[name] = spec.with_placements(tuple(draw(st.sampled_from(list(option))) for option in options))
        if "arrives" in case and draw(st.booleans()):
            smaller["arrives"] = tuple(reference.Replicate() for _ in case.mesh().shape)
        return case.with_fields(**smaller)

    return drawn()


def gradient_law(id: str, name: str, **record: Any) -> Law:
    """A law of the gradients through what is called ``name``."""
    clause = record.pop("clause", f"Gradients through {name} {THROUGH}")
    made = law(id, clause=clause, features=features, narrow=plainer, refusal=may_refuse, **record)(backward)
    made.due(backward_due)
    return made


def op_backward(op: Op) -> Law:
    return gradient_law(
        f"op.backward[{op.name}]",
        op.name,
        source=op.source or SOURCE,
        control=text_of(case_of(plainest(op))),
        draw=lambda limits: cases_of(gradient_samples(op, world_size=limits.world_size)),
        draws=DRAWS,
        sweep=lambda limits: LazyCases(
            Chained(unusual_gradient(op, limits.world_size), GradientSweep(op, limits.world_size)), case_of
        ),
        sweeps=1 + (LIGHT_SWEEPS if op.light else SWEEPS),
        seconds=SECONDS.get(op.name, 0.0),
    )


def corners(limits: Limits) -> LazyCases[Backward]:
    """The programs of a table, and one on each of many grounds, those that have ranks enough."""
    found = [*corner_gradients(), *enumerate_gradient_programs(limits.most)]
    return LazyCases([drawn for drawn in found if max(drawn.sample.mesh.ranks) < limits.most], case_of)


program_backward = gradient_law(
    "op.program-backward",
    "programs",
    clause="The gradients of the end of a chain of ops with respect to all its leaves are those of the same "
    "chain of full tensors.",
    source=SOURCE,
    control="mesh=2 a=4x2:S(0):float32:small b=4x2:S(1):float32:small steps=x=mul(a,b);sum(x,0) wrt=a,b",
    draw=lambda limits: cases_of(gradient_programs(world_size=limits.world_size)),
    draws=30,
    sweep=corners,
    sweeps=len(corner_gradients()) + 30,
    weight=5.0,
)

LAWS = [*map(op_backward, DIFFERENTIABLE.values()), program_backward]
