"""Find the first step of a trace whose result deviates from the reference: an op must give on shards what it gives on the global tensors,
a redistribution must change no element."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardlaw.conformance.compat import trace as torch_trace
from shardlaw.conformance.law.evidence import Step, TracedTensor
from shardlaw.reference.layout import Layout, LayoutError
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.notation import NotationError
from shardlaw.reference.placement import parse_placements
from shardlaw.reference.simulate import assemble_replicas


class _CannotTell(Exception):
    """The reference cannot tell."""


class _StepDeviates(Exception):
    """A rank holds something else than the reference says."""


def first_deviating_step(steps: Mapping[int, Sequence[Step]], named: str = "") -> Step | None:
    """The first step, taken by all ranks, whose result deviates from the reference; only ops with ``named`` in their name. If a
    redistribution inside an op deviates, that one."""
    longest = max(steps.values(), key=len, default=())
    for at, step in enumerate(longest):
        if named not in step.name:
            continue
        if step.kind == "op":
            moves = (k for k, other in enumerate(longest) if other.within == at)
            move = next((longest[k] for k in moves if step_deviates(_step_by_rank(steps, k))), None)
            if move is not None or step_deviates(_step_by_rank(steps, at)):
                return move or step
        elif step.within is None and step_deviates(_step_by_rank(steps, at)):
            return step
    return None


def first_contradicting_step(steps: Mapping[int, Sequence[Step]]) -> Step | None:
    """The first step, taken by all ranks, whose operands are not what their placements say: replicas differ, or shards have other
    sizes."""
    longest = max(steps.values(), key=len, default=())
    for at, step in enumerate(longest):
        column = _step_by_rank(steps, at)
        try:
            if column:
                _assemble_operands(column)
        except _CannotTell:
            continue
        except _StepDeviates:
            return step
    return None


def _step_by_rank(steps: Mapping[int, Sequence[Step]], at: int) -> dict[int, Step]:
    """The step with this index on each rank that has it; empty if the ranks took different steps."""
    column = {rank: its[at] for rank, its in steps.items() if at < len(its)}
    return column if len({(step.kind, step.name) for step in column.values()}) == 1 else {}


def step_deviates(column: Mapping[int, Step]) -> bool:
    """Whether the result of one step, given by rank, deviates from the reference; false if the reference cannot tell."""
    if not column or not all(step.completed and step.arguments is not None for step in column.values()):
        return False
    step = next(iter(column.values()))
    try:
        inputs = _assemble_operands(column)
    except (_CannotTell, _StepDeviates):
        return False
    try:
        with torch.no_grad():
            _compare({rank: its.results for rank, its in column.items()}, inputs if step.kind == "move" else _run_dense(step.name, inputs))
    except _CannotTell:
        return False
    except _StepDeviates:
        return True
    return step.severed


def _run_dense(name: str, inputs: Any) -> Any:
    """Run an op on global tensors; returns its result and the tensors that it wrote to."""
    args, kwargs = inputs
    packet: Any = torch.ops
    for part in name.split("."):
        packet = getattr(packet, part)
    if torch.Tag.nondeterministic_seeded in packet.tags:
        raise _CannotTell
    written = torch_trace.written_arguments(packet, args, kwargs)
    try:
        return packet(*args, **kwargs), written
    except Exception as error:
        raise _CannotTell from error


def _assemble_operands(column: Mapping[int, Step]) -> Any:
    """The global values of a step's operands, given by rank."""
    return _assemble_values({rank: step.arguments for rank, step in column.items()})


def _assemble_values(values: Mapping[int, Any]) -> Any:
    """Assemble the global values from the parts of the ranks. Raises ``_StepDeviates`` if replicas differ."""
    first = next(iter(values.values()))
    if isinstance(first, TracedTensor):
        one, *others = _assemble_pieces(values).values()
        for other in others:
            _compare_tensors(other, one)
        return one.clone()
    if isinstance(first, (list, tuple)):
        return type(first)(_assemble_values({rank: value[at] for rank, value in values.items()}) for at in range(len(first)))
    if isinstance(first, dict):
        return {key: _assemble_values({rank: value[key] for rank, value in values.items()}) for key in first}
    return first.clone() if isinstance(first, torch.Tensor) else first


def _assemble_pieces(pieces: Mapping[int, TracedTensor]) -> Mapping[Any, torch.Tensor]:
    first = next(iter(pieces.values()))
    try:
        if not first.placements:
            raise _CannotTell
        layout = Layout(first.shape, Mesh.parse(first.mesh), parse_placements(first.placements))
        return assemble_replicas({coord: pieces[layout.mesh.rank_at(coord)].local for coord in layout.mesh.coords()}, layout)
    except (NotationError, LayoutError, KeyError, RuntimeError) as error:
        raise _CannotTell from error
    except ValueError as error:
        raise _StepDeviates from error


def _compare(values: Mapping[int, Any], expected: Any) -> None:
    """Raise ``_StepDeviates`` if the ranks do not hold what ``expected`` says."""
    first = next(iter(values.values()))
    if isinstance(first, TracedTensor) and isinstance(expected, torch.Tensor):
        inside = {rank: piece for rank, piece in values.items() if rank in Mesh.parse(first.mesh).ranks}
        if first.shape != tuple(expected.shape):
            raise _StepDeviates
        for got in _assemble_pieces(inside).values():
            _compare_tensors(got, expected)
    elif isinstance(first, (list, tuple)) and isinstance(expected, (list, tuple)):
        unknown = False
        for at, part in enumerate(expected[: len(first)]):
            try:
                _compare({rank: value[at] for rank, value in values.items()}, part)
            except _CannotTell:
                unknown = True
        if unknown:
            raise _CannotTell
    elif isinstance(first, torch.Tensor) and isinstance(expected, torch.Tensor):
        for got in values.values():
            _compare_tensors(got, expected)
    elif isinstance(expected, (bool, int, float)) and isinstance(first, (bool, int, float)):
        for got in values.values():
            _compare_tensors(torch.as_tensor(got), torch.as_tensor(expected))


def _compare_tensors(got: torch.Tensor, expected: torch.Tensor) -> None:
    if got.shape != expected.shape or got.dtype != expected.dtype:
        raise _StepDeviates
    if got.device != expected.device:  # such as a tensor on the meta device
        raise _CannotTell
    exact = not (expected.is_floating_point() or expected.is_complex())
    if not (torch.equal(got, expected) if exact else torch.allclose(got, expected, rtol=1e-3, atol=1e-3, equal_nan=True)):
        raise _StepDeviates
