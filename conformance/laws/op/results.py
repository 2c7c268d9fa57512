"""What an op must return and write: due values come from the same calls on dense tensors; each rank compares what it
has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardlaw.conformance import compat
from shardlaw.conformance.law.act import law
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Claimed, Due, Global, Meaningless, Near, Of
from shardlaw.conformance.law.fields import Rank
from shardlaw.conformance.law.law import Law, Limits
from shardlaw.conformance.law.program.calls import program_features
from shardlaw.conformance.law.program.fields import Operands, Program
from shardlaw.conformance.law.program.parse import Program as Steps
from shardlaw.conformance.rank.context import RankContext, read_placements
from shardlaw.reference.layout import Layout
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.placement import Replicate
from shardlaw.reference.tensors import LOST_BY_CLONE, TensorSpec, lay_out

RULES_KNOWN_FROM = (2, 13)
COMMON = frozenset(Limits().dtypes)
EXACT_DTYPES = (torch.float32, torch.float64)


def result(steps: Program, operands: Operands):
    """The result of the last step, its strides, and the operands after it."""
    value = steps(operands)[-1]
    after = {f"operand.{name}": tensor for name, tensor in operands.items()}
    return {"result": value, "strides": strides(value), **after}


def strides(value):
    """The strides of a tensor along its dims longer than 1, of the others they mean nothing; of each of several."""
    if isinstance(value, torch.Tensor):
        return [step for size, step in zip(value.shape, value.stride(), strict=True) if size > 1]
    return [strides(part) for part in value] if isinstance(value, (list, tuple)) else None


@cache  # hundreds of laws have the same due function
def result_due(*, exact: bool) -> Callable[..., Any]:
    """The due function of :func:`result`; ``exact``: bit by bit, if dtypes and mesh allow it."""

    def due(steps: Any, operands: Any, mesh: DeviceMesh, rank: Rank):
        values, after = due_results(steps, operands, cast("Mesh", mesh), rank, exact)
        return {"result": values[-1], "strides": due_strides(values[-1], operands), **after}

    return due


def due_strides(value: Any, operands: dict[str, Any]) -> Any:
    """The due strides of a result, unless its operands have other strides than their dense copies
    (:func:`dense_operands`)."""
    alike = all(not isinstance(x, Global) or x.memory != "expanded" for x in operands.values())
    return Of(_strides_of(value), "wrong-metadata") if alike else ...


def _strides_of(value: Any) -> Any:
    if isinstance(value, list):
        return [_strides_of(part) for part in value]
    return strides(value.full) if isinstance(value, Result) else None


def result_law(id: str, *, exact: bool, **record: Any) -> Law:
    """A law with the act :func:`result`."""
    made = law(id, **record)(result)
    made.due(result_due(exact=exact))
    return made


def due_results(
    steps: Steps, operands: dict[str, Any], mesh: Mesh, rank: int, exact: bool
) -> tuple[list[Any], dict[str, Any]]:
    """The due result of every step, and the due operands after the last one. Raises :class:`Meaningless`."""
    tensors = dense_operands(operands)
    try:
        values = steps.run_plain(tensors)
    except Exception as error:
        raise Meaningless(f"the plain op is refused: {type(error).__name__}: {error}") from None
    exact, member = exact and is_exact(operands, mesh), mesh.coord(rank) is not None
    written = "in-place" in program_features(steps.text)
    after = {f"operand.{name}": _due_operand(x, tensors[name], written, member, exact) for name, x in operands.items()}
    return [_due_result(value, mesh, member, exact) for value in values], after


def dense_operands(operands: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Dense copies of the operands, each in its own memory and with its memory layout, that a program may write
    into."""
    tensors = {name: _dense(x).clone(memory_format=torch.preserve_format) for name, x in operands.items()}
    for name, x in operands.items():
        if isinstance(x, Global) and x.memory in LOST_BY_CLONE:
            tensors[name] = lay_out(tensors[name], x.memory)
    return tensors


def _dense(x: Global | torch.Tensor) -> torch.Tensor:
    return x.full if isinstance(x, Global) else x


def is_exact(operands: dict[str, Any], mesh: Mesh) -> bool:
    """Whether small integers and their sums are exact: by the dtypes, and because an operand that becomes a pending sum
    is divided exactly only where every mesh dim is a power of two."""
    powers_of_two = all(size & (size - 1) == 0 for size in mesh.shape)
    tensors = map(_dense, operands.values())
    return powers_of_two and all(x.dtype in EXACT_DTYPES or not x.is_floating_point() for x in tensors)


def _due_result(value: Any, mesh: Mesh, member: bool, exact: bool) -> Any:
    """The due value of a result: tensors under whatever placements they claim; numbers, on ranks of the mesh only."""
    if isinstance(value, torch.Tensor):
        return Result(value, mesh, exact)
    if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        return [_due_result(part, mesh, member, exact) for part in value]
    return Number(value, exact=exact) if member else ...


def _due_operand(x: Global | torch.Tensor, now: torch.Tensor, written: bool, member: bool, exact: bool) -> Any:
    """The due value of an operand: the new elements in its old placements if it was changed, else the same bits."""
    full = _dense(x)
    changed = now.shape != full.shape or now.dtype != full.dtype or not torch.equal(now, full)
    # the written value may equal the old one: contributions to a pending sum are then others
    if not changed and not (written and isinstance(x, Global) and x.layout.has_partial()):
        return Untouched(x)
    if isinstance(x, torch.Tensor):
        return now if exact else Near(now)
    if not member:
        return ...
    return replace(x.holding(now), exact=exact) if now.shape == full.shape else Claimed(now, x.mesh, exact)


class Result(Claimed):
    """A DTensor of these elements under the placements that it claims. A rank outside the mesh must see its shape and
    dtype."""

    def compare(self, here: RankContext, check: str, got: Any, place: str) -> None:
        if here.coord(self.mesh) is not None:
            super().compare(here, check, got, place)
        elif here.require(isinstance(got, DTensor), "wrong-metadata", check, f"{place} is a {type(got).__name__}"):
            claimed, due = (tuple(got.shape), got.dtype), (tuple(self.full.shape), self.full.dtype)
            here.require(
                claimed == due, "wrong-metadata", check, "a rank outside sees another shape or dtype", due, claimed
            )


@dataclass(frozen=True)
class Untouched(Due):
    """An operand whose local elements are, bit by bit, what they were before the call, and whose shape and placements
    are too."""

    operand: Global | torch.Tensor

    def before(self, rank: int) -> torch.Tensor:
        x = self.operand
        if isinstance(x, torch.Tensor):
            return x
        return x.local(rank) if x.mesh.coord(rank) is not None else torch.empty(0, dtype=x.full.dtype)

    def compare(self, here: RankContext, check: str, got: Any, place: str) -> None:
        with torch.no_grad():  # no node for a graph that nobody wants
            local = got.to_local() if isinstance(got, DTensor) else got
        before, x = here.tensor(self.before(here.rank)), self.operand
        same = local.shape == before.shape and torch.equal(local, before)
        if here.require(same, "wrong-value", check, f"{place} must not change", before, local) and isinstance(
            x, Global
        ):
            claimed, due = (read_placements(got.placements), tuple(got.shape)), (x.placements, x.layout.shape)
            message = f"the shape and placements of {place} must not change"
            here.require(claimed == due, "wrong-metadata", check, message, due, claimed)

    def for_script(self, rank: int) -> Any:
        x = self.operand
        return ([*x.placements], x.layout.shape, self.before(rank)) if isinstance(x, Global) else x


@dataclass(frozen=True)
class Number(Near):
    """A Python number of the same type: equal, or near if it may have been rounded."""

    exact: bool = True

    def compare(self, here: RankContext, check: str, got: Any, place: str) -> None:
        alike = type(got) is type(self.value) and (got == self.value if self.exact else here.is_near(got, self.value))
        here.require(alike, "wrong-value", check, f"{place} is {got!r}, must be {self.value!r}", self.value, got)


# Which refusals are deviations


def specs(case: Case) -> dict[str, TensorSpec]:
    """The tensors that the steps of a case use, by name."""
    names = Steps.parse(case.get("steps")).names()
    return {name: case.tensor(name) for name, _ in case.fields if name in names}


def layouts(case: Case) -> Iterator[Layout]:
    mesh = case.mesh()
    for spec in specs(case).values():
        yield Layout(spec.shape, mesh, spec.placements if spec.placements is not None else (Replicate(),) * mesh.ndim)


def has_plain_tensors(case: Case) -> bool:
    """Whether all tensors have elements, a common dtype, contiguous memory and no strided shards."""
    plain = all(
        0 not in spec.shape and spec.memory == "plain" and spec.dtype in COMMON for spec in specs(case).values()
    )
    return plain and not any(layout.is_strided() for layout in layouts(case))


def has_plain_layouts(case: Case) -> bool:
    """As :func:`has_plain_tensors`; and there is no pending reduction, no empty shard and no dim of size 1, which might
    be broadcast."""
    edges = any(layout.has_partial() or layout.empty_coords() or 1 in layout.shape for layout in layouts(case))
    return has_plain_tensors(case) and not edges


def is_replicated(case: Case) -> bool:
    """As :func:`has_plain_tensors`; and every tensor is replicated."""
    named = [spec.placements or () for spec in specs(case).values()] + (
        [case.placements("arrives")] if "arrives" in case else []
    )
    return has_plain_tensors(case) and all(
        isinstance(placement, Replicate) for placements in named for placement in placements
    )


def refusal_unless(must_run: Callable[[Case], bool]) -> Callable[[Case, str], bool]:
    """Allow refusals, except of cases for which ``must_run`` is true. Older releases may have no rule for an op."""

    def allowed(case: Case, text: str) -> bool:
        older = compat.torch_release() < RULES_KNOWN_FROM and "not have a sharding strategy registered" in text
        return older or not must_run(case)

    return allowed
