"""Laws of gradients through ops: those of sharded operands are the dense ones on every rank, in whatever layout the
gradient of the result arrives."""

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
from shardlaw.conformance.laws.op.forward import fields_text
from shardlaw.conformance.laws.op.results import Result, dense_operands, is_replicated, refusal_unless, specs
from shardlaw.conformance.laws.shared.draws import Chained, LazyCases
from shardlaw.reference import placement as reference
from shardlaw.reference.layout import Layout
from shardlaw.reference.notation import NotationError
from shardlaw.reference.placement import format_placements, shard_dim
from shardlaw.reference.tensors import dense
from shardlaw.strategies.op_gradient_corners import corner_gradients
from shardlaw.strategies.op_gradient_programs import enumerate_gradient_programs, gradient_programs
from shardlaw.strategies.op_gradients import (
    DIFFERENTIABLE,
    Backward,
    GradientSweep,
    gradient_samples,
    pending_incoming,
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
CLAUSE_END = (
    "of sharded tensors are the dense ones, under the placements that they claim, also if the incoming gradient has "
    "other placements than the result."
)
NO_RESULT = "no result to go back from"
GRAD_SEED = 977
# cases of one op in a smoke run
LIGHT_SWEEPS = 1
SWEEPS = 3
DRAWS = 0.25  # the very first draw is the plainest sample, as the control is
# on 2-D meshes DTensor plans its decomposition for 8 s and more
SECONDS = {"nn.functional.group_norm": 40.0}


@dataclass(frozen=True)
class DenseRun:
    """The dense run of a case: the incoming gradients of the parts of the result that require one, by index, and the
    gradients of the leaves; or ``error``, if it fails."""

    output_grads: Mapping[int, Global]
    grads: Mapping[str, torch.Tensor | None]
    error: str = ""


@lru_cache(4)
def run_dense(case: Case) -> DenseRun:
    """Run the steps of a case forward and backward on dense tensors."""
    tensors, mesh, output_grads = dense_operands(operands_of(case)), case.mesh(), dict[int, Global]()
    try:
        for name in leaf_names(case):
            tensors[name].requires_grad_()
        parts = flatten(Steps.parse(case.get("steps")).run_plain(tensors)[-1])
        for at, part in enumerate(parts):
            if isinstance(part, torch.Tensor) and part.requires_grad:
                number, shape = len(output_grads), tuple(part.shape)
                grad = dense(shape, part.dtype, "small", case.seed * 64 + GRAD_SEED + 13 * number)
                layout = Layout(shape, mesh, gradient_placements(case, len(shape)))
                output_grads[at] = Global(grad, layout, case.seed + GRAD_SEED + number)
        with plain_run_context():
            torch.autograd.backward([parts[at] for at in output_grads], [grad.full for grad in output_grads.values()])
    except Exception as error:
        return DenseRun({}, {}, f"the plain run fails: {type(error).__name__}: {error}")
    return DenseRun(output_grads, {name: tensors[name].grad for name in leaf_names(case)})


def leaf_names(case: Case) -> list[str]:
    """The operands whose gradients are compared."""
    return case.get("wrt").split(",")


def gradient_placements(case: Case, ndim: int) -> reference.Placements:
    """The placements of the gradient of a result with ``ndim`` dims: those of the field ``arrives``, replicated where
    the result lacks the dim."""
    placements = case.placements("arrives") if "arrives" in case else (reference.Replicate(),) * case.mesh().ndim
    return tuple(reference.Replicate() if (shard_dim(at) or 0) >= ndim else at for at in placements)


class IncomingField(Field):
    """The incoming gradients of the parts of the result that require one, by index. The due function gets the
    :class:`DenseRun`."""

    field, takes = "wrt", "operands of the steps that have gradients, such as wrt=a,b"
    reads = ("*", "mesh", "steps", "wrt", "arrives")

    def read(self, case: Case, name: str) -> DenseRun:
        unknown = sorted({*leaf_names(case)} - {*operands_of(case)})
        if unknown:
            raise NotationError(f"wrt names {unknown[0]!r}, which the steps do not")
        return run_dense(case)

    def build(self, value: DenseRun, here: RankContext) -> dict[int, DTensor]:
        for grad in value.output_grads.values():
            for feature in placement_features(grad.layout.shape, str(grad.mesh), format_placements(grad.placements)):
                here.add_feature(feature)
        return {
            at: assemble_dtensor(grad, here.tensor(grad.local(here.rank)), here)
            for at, grad in value.output_grads.items()
        }

    def to_script(self, value: DenseRun, name: str, world: int) -> ScriptArgument:
        parts = {at: TensorField().to_script(grad, f"gradient{at}", world) for at, grad in value.output_grads.items()}
        return ScriptArgument(
            f"{{{', '.join(f'{at}: {part.expression}' for at, part in parts.items())}}}",
            tuple(line for part in parts.values() for line in part.constants),
            tuple(dict.fromkeys(line for part in parts.values() for line in part.statements)),
        )


Incoming = Annotated[dict[int, DTensor], IncomingField()]


def backward(steps: Program, operands: Operands, wrt: Word, incoming: Incoming, arrives: Placements | None = None):
    """The gradients of the operands ``wrt``. Incoming gradients without placements of their own get those of the
    result, with pending sums reduced."""
    leaves = {name: operands[name].requires_grad_() for name in wrt.split(",")}
    try:
        parts = flatten(steps(operands)[-1])
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


def flatten(value: Any) -> list[Any]:
    """The parts of a result in nested tuples and lists."""
    if isinstance(value, (tuple, list)):
        return [part for item in value for part in flatten(item)]
    return [value]


def backward_due(operands, incoming, mesh: DeviceMesh):
    """The due function of :func:`backward`."""
    if incoming.error:
        raise Meaningless(incoming.error)
    if not incoming.output_grads:
        raise Meaningless("nothing has a gradient")
    grads = {name: grad for name, grad in incoming.grads.items() if grad is not None}
    pending = any(
        x.layout.has_partial() for x in (*incoming.output_grads.values(), *operands.values()) if isinstance(x, Global)
    )
    if pending and not all(grad.isfinite().all() for grad in grads.values()):
        raise Meaningless("the gradient is not finite: contributions to it do not add up")
    due = {f"grad.{name}": Result(grad, cast("Mesh", mesh), exact=False) for name, grad in grads.items()}
    return {"graph": Of([True] * len(incoming.output_grads)), "gradients": [*grads], **due}


def features(case: Case) -> set[str]:
    names = [*specs(case)]
    last_alone = len(names) > 2 and leaf_names(case) == names[-1:]
    return {name for name, holds in (("grad-placements", "arrives" in case), ("last-alone", last_alone)) if holds}


def may_refuse(case: Case, text: str) -> bool:
    """Whether a refusal is allowed. An error or another shape in the forward calls is judged by ``op.forward``."""
    return NO_RESULT in text or refusal_unless(is_replicated)(case, text)


def to_case(gradient_sample: Backward, seed: int = 0) -> Case:
    """The case of a gradient sample: ``wrt`` names the leaves, ``arrives`` the placements of the incoming gradient."""
    sample = gradient_sample.sample
    tensors: dict[str, Any] = dict(sample.tensors)
    more: dict[str, Any] = {
        "steps": sample.steps,
        "wrt": gradient_sample.wrt,
        "arrives": gradient_sample.arrives,
        "sample": sample.origin or None,
    }
    return fields(mesh=sample.mesh, **tensors, **more, seed=seed or None)


def to_cases(samples: SearchStrategy[Backward]) -> SearchStrategy[Case]:
    return st.tuples(samples, st.integers(0, 3)).map(lambda pair: to_case(*pair))


@st.composite
def narrow(draw: st.DrawFn, case: Case) -> Case:
    """Cases with the same steps and shapes, in plainer placements."""
    smaller: dict[str, object] = {}
    for name, spec in specs(case).items():
        options = [dict.fromkeys([reference.Replicate(), placement]) for placement in spec.placements or ()]
        smaller[name] = spec.with_placements(tuple(draw(st.sampled_from(list(option))) for option in options))
    if "arrives" in case and draw(st.booleans()):
        smaller["arrives"] = tuple(reference.Replicate() for _ in case.mesh().shape)
    return case.with_fields(**smaller)


def gradient_law(id: str, name: str, **record: Any) -> Law:
    """A law of the gradients through the op or program ``name``."""
    clause = record.pop("clause", f"Gradients through {name} {CLAUSE_END}")
    made = law(id, clause=clause, features=features, narrow=narrow, refusal=may_refuse, **record)(backward)
    made.due(backward_due)
    return made


def backward_law(op: Op) -> Law:
    return gradient_law(
        f"op.backward[{op.name}]",
        op.name,
        source=op.source or SOURCE,
        control=fields_text(to_case(plainest(op))),
        draw=lambda limits: to_cases(gradient_samples(op, world_size=limits.world_size)),
        draws=DRAWS,
        sweep=lambda limits: LazyCases(
            Chained(
                [pending_incoming(op), *unusual_gradient(op, limits.world_size)], GradientSweep(op, limits.world_size)
            ),
            to_case,
        ),
        sweeps=2 + (LIGHT_SWEEPS if op.light else SWEEPS),
        seconds=SECONDS.get(op.name, 0.0),
    )


def list_corners(limits: Limits) -> LazyCases[Backward]:
    """The programs of a table, and enumerated ones, for which there are enough ranks."""
    samples = [*corner_gradients(), *enumerate_gradient_programs(limits.most)]
    return LazyCases([each for each in samples if max(each.sample.mesh.ranks) < limits.most], to_case)


program_backward = gradient_law(
    "op.program-backward",
    "programs",
    clause="The gradients of the end of a chain of ops with respect to its leaves are those of the dense chain.",
    source=SOURCE,
    control="mesh=2 a=4x2:S(0):float32:small b=4x2:S(1):float32:small steps=x=mul(a,b);sum(x,0) wrt=a,b",
    draw=lambda limits: to_cases(gradient_programs(world_size=limits.world_size)),
    draws=30,
    sweep=list_corners,
    sweeps=len(corner_gradients()) + 30,
    weight=5.0,
)

LAWS = [*map(backward_law, DIFFERENTIABLE.values()), program_backward]
