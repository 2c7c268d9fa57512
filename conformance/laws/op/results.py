"""What an op gives and leaves behind: the same calls on plain tensors are right, and every rank compares what it
holds with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardlaw.conformance import compat
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Claimed, Due, Global, Meaningless, Near, Of
from shardlaw.conformance.law.fields import Rank
from shardlaw.conformance.law.law import Limits
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
    """What the last step gives, its strides, and what the operands are afterwards."""
    value = steps(operands)[-1]
    after = {f"operand.{name}": tensor for name, tensor in operands.items()}
    return {"result": value, "strides": strides(value), **after}


def strides(value):
    """The strides of a tensor along its dims longer than 1, of the others they mean nothing; of each of several."""
    if isinstance(value, torch.Tensor):
        return [step for size, step in zip(value.shape, value.stride(), strict=True) if size > 1]
    return [strides(part) for part in value] if isinstance(value, (list, tuple)) else None


def result_due(*, exact: bool) -> Callable[..., Any]:
    """What is due of :func:`result`; ``exact``: to the bit, where the dtypes allow it."""

    def due(steps: Any, operands: Any, mesh: DeviceMesh, rank: Rank):
        values, after = plain_run(steps, operands, cast("Mesh", mesh), rank, exact)
        return {"result": values[-1], "strides": due_strides(values[-1], operands), **after}

    return due


def due_strides(value: Any, operands: dict[str, Any]) -> Any:
    """The strides of the plain op's result, unless the plain op ran on copies that lie otherwise (:func:`plain_of`)."""
    alike = all(not isinstance(x, Global) or x.memory != "expanded" for x in operands.values())
    return Of(_strides_of(value), "wrong-metadata") if alike else ...


def _strides_of(value: Any) -> Any:
    if isinstance(value, list):
        return [_strides_of(part) for part in value]
    return strides(value.full) if isinstance(value, Result) else None


def plain_run(
    steps: Steps, operands: dict[str, Any], mesh: Mesh, rank: int, exact: bool
) -> tuple[list[Any], dict[str, Any]]:
    """What is due of every step, and of the operands after them."""
    plain = plain_of(operands)
    try:
        values = steps.run_plain(plain)
    except Exception as error:
        raise Meaningless(f"the plain op is refused: {type(error).__name__}: {error}") from None
    sharp, member = exact and is_exact(operands, mesh), mesh.coord(rank) is not None
    written = "in-place" in program_features(steps.text)
    after = {f"operand.{name}": _left(x, plain[name], written, member, sharp) for name, x in operands.items()}
    return [_given(value, mesh, member, sharp) for value in values], after


def plain_of(operands: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Tensors that a program may change, apart in memory as those on the ranks are: not every op takes any offset."""
    plain = {name: _full(x).clone(memory_format=torch.preserve_format) for name, x in operands.items()}
    apart = {name: x.memory for name, x in operands.items() if isinstance(x, Global) and x.memory in LOST_BY_CLONE}
    return plain | {name: lay_out(plain[name], memory) for name, memory in apart.items()}


def _full(x: Global | torch.Tensor) -> torch.Tensor:
    return x.full if isinstance(x, Global) else x


def is_exact(operands: dict[str, Any], mesh: Mesh) -> bool:
    """Whether small integers and their sums stay exact: by the dtypes, and because a share of a value, which an
    operand may have
    to be split into, is exact where every mesh dim is a power of two."""
    halves = all(size & (size - 1) == 0 for size in mesh.shape)
    return halves and all(_full(x).dtype in EXACT_DTYPES or not _full(x).is_floating_point() for x in operands.values())


def _given(value: Any, mesh: Mesh, member: bool, exact: bool) -> Any:
    """What is due of a result, part by part: tensors under whatever placements they claim, and numbers, on the ranks
    of the mesh."""
    if isinstance(value, torch.Tensor):
        return Result(value, mesh, exact)
    if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        return [_given(part, mesh, member, exact) for part in value]
    return Number(value, exact=exact) if member else ...


def _left(x: Global | torch.Tensor, now: torch.Tensor, written: bool, member: bool, exact: bool) -> Any:
    """What is due of an operand: what was changed holds the new value under its old placements, the rest is
    untouched."""
    full = _full(x)
    changed = now.shape != full.shape or now.dtype != full.dtype or not torch.equal(now, full)
    # what is written may be what was there; the contributions to it are others then
    if not changed and not (written and isinstance(x, Global) and x.layout.has_partial()):
        return Untouched(x)
    if isinstance(x, torch.Tensor):
        return now if exact else Near(now)
    if not member:
        return ...
    return replace(x.holding(now), exact=exact) if now.shape == full.shape else Claimed(now, x.mesh, exact)


class Result(Claimed):
    """A DTensor that denotes a tensor under the placements that it claims; a rank outside the mesh knows its shape
    and dtype, and no more."""

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
    """An operand whose elements on this rank are bit by bit what they were; a rank outside its mesh has none."""

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
            message = f"{place} must stay under its placements, of its shape"
            here.require(claimed == due, "wrong-metadata", check, message, due, claimed)

    def for_script(self, rank: int) -> Any:
        x = self.operand
        return ([*x.placements], x.layout.shape, self.before(rank)) if isinstance(x, Global) else x


@dataclass(frozen=True)
class Number(Near):
    """A Python number of the same type, equal or, where it may have been rounded, near."""

    exact: bool = True

    def compare(self, here: RankContext, check: str, got: Any, place: str) -> None:
        alike = type(got) is type(self.value) and (got == self.value if self.exact else here.is_near(got, self.value))
        here.require(alike, "wrong-value", check, f"{place} is {got!r}, must be {self.value!r}", self.value, got)


# When a refusal is a deviation


def specs(case: Case) -> dict[str, TensorSpec]:
    """The tensors that the steps of a case name."""
    wanted = Steps.parse(case.get("steps")).names()
    return {name: case.tensor(name) for name, _ in case.fields if name in wanted}


def layouts(case: Case) -> Iterator[Layout]:
    mesh = case.mesh()
    for spec in specs(case).values():
        yield Layout(spec.shape, mesh, spec.placements if spec.placements is not None else (Replicate(),) * mesh.ndim)


def registered_everywhere(case: Case) -> bool:
    """Whether nothing about the tensors is out of the way: they have elements of a common dtype, lie in one piece and
    are not strided."""
    whole = all(
        0 not in spec.shape and spec.memory == "plain" and spec.dtype in COMMON for spec in specs(case).values()
    )
    return whole and not any(layout.is_strided() for layout in layouts(case))


def without_pending(case: Case) -> bool:
    """As :func:`registered_everywhere`, no reduction is pending, no shard is empty, and no dim of size 1 may pass for
    broadcasting."""
    aside = any(layout.has_partial() or layout.empty_coords() or 1 in layout.shape for layout in layouts(case))
    return registered_everywhere(case) and not aside


def replicated(case: Case) -> bool:
    """As :func:`registered_everywhere`, and every tensor is replicated: nothing is asked of sharding."""
    named = [spec.placements or () for spec in specs(case).values()] + (
        [case.placements("arrives")] if "arrives" in case else []
    )
    return registered_everywhere(case) and all(
        isinstance(placement, Replicate) for placements in named for placement in placements
    )


def unless(wanted: Callable[[Case], bool]) -> Callable[[Case, str], bool]:
    """Refusals are allowed, but not of the cases that are ``wanted``; older releases may have no rule for an op."""

    def allowed(case: Case, text: str) -> bool:
        older = compat.torch_release() < RULES_KNOWN_FROM and "not have a sharding strategy registered" in text
        return older or not wanted(case)

    return allowed
