"""The trace of an act on one rank, as plain data: the tensors of each step, the rule that decided it, and the lines that ran."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import torch

from shardlaw.reference.notation import Shape

T = TypeVar("T")


@dataclass(frozen=True)
class TracedTensor:
    """A DTensor on one rank: its global ``shape``, its local tensor, its mesh and placements in the reference's notation. ``placements``
    is empty where the notation cannot express them."""

    shape: Shape
    mesh: str
    placements: str
    local: torch.Tensor


def traced_tensors(value: Any) -> Iterator[TracedTensor]:
    """Yield the traced tensors in a value, and in its lists, tuples and dicts."""
    if isinstance(value, TracedTensor):
        yield value
    elif isinstance(value, (list, tuple, dict)):
        for each in value.values() if isinstance(value, dict) else value:
            yield from traced_tensors(each)


@dataclass
class Step:
    """An op on DTensors, or a redistribution (``kind="move"``) of one.

    - ``name``: the overload of an op.
    - ``arguments``: arguments and keyword arguments; ``results``: the results, then the tensors that the op wrote to. A
      :class:`TracedTensor` stands in place of each DTensor. ``None`` for an op of which only its planning was seen.
    - ``rule``: the function or table that decided it; ``calls``: what a redistribution called; ``within``: the index of the op in which
      it happened; ``missing_dim``: it was to shard a dim that the tensor does not have.
    - ``severed``: the op is a view, but its result shares no memory with its argument.
    - ``rule_asked``: torch has asked the op's rule in this act, for this call or an earlier one.
    - ``completed``: it returned instead of raising.
    - ``since``: the functions called since the step before; empty within an op.
    - ``similar_rule``: for an op without a rule, the rule of the op with the most similar name.
    """

    kind: str
    name: str
    arguments: Any = None
    results: Any = None
    rule: str = ""
    calls: list[str] = field(default_factory=list)
    within: int | None = None
    missing_dim: bool = False
    severed: bool = False
    rule_asked: bool = False
    completed: bool = False
    similar_rule: str = ""
    since: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Evidence:
    """What one rank recorded.

    - ``steps``: the ops and redistributions, in order.
    - ``visited``: for each function of ``torch.distributed`` that was called, the lines that ran; ``callers``: its callers.
    - ``answered``: the functions that returned a bool.
    - ``raised``: the functions on the stack of the error that ended the act, outermost first. Of chained errors, the first one's.
    """

    steps: tuple[Step, ...] = ()
    visited: Mapping[str, frozenset[int]] = field(default_factory=dict)
    callers: Mapping[str, frozenset[str]] = field(default_factory=dict)
    answered: frozenset[str] = frozenset()
    raised: tuple[str, ...] = ()

    def after(self, earlier: Iterable[Evidence]) -> Evidence:
        """With the functions that ran in earlier stages of the case, ahead of its own: what a save does wrongly a load may show."""
        stages = [*earlier, self]
        return replace(
            self,
            visited=merge(each.visited for each in stages),
            callers=merge(each.callers for each in stages),
            answered=frozenset[str]().union(*(each.answered for each in stages)),
        )


def merge(parts: Iterable[Mapping[str, frozenset[T]]]) -> dict[str, frozenset[T]]:
    """The union of the sets that ``parts`` have for each place, places in the order in which they first occur."""
    found: dict[str, frozenset[T]] = {}
    for part in parts:
        for place, its in part.items():
            found[place] = found.get(place, frozenset()) | its
    return found


def pack(evidence: Evidence) -> bytes:
    """Evidence as bytes that ``torch.load(weights_only=True)`` can read."""
    steps = [[_to_plain(getattr(step, name)) for name in _FIELDS] for step in evidence.steps]
    visited = {place: sorted(lines) for place, lines in evidence.visited.items()}
    callers = {place: sorted(by) for place, by in evidence.callers.items()}
    to = io.BytesIO()
    torch.save([steps, visited, callers, sorted(evidence.answered), list(evidence.raised)], to)
    return to.getvalue()


def unpack(data: bytes) -> Evidence:
    """The inverse of :func:`pack`."""
    steps, visited, callers, answered, raised = torch.load(io.BytesIO(data), weights_only=True)
    return Evidence(
        tuple(Step(**dict(zip(_FIELDS, map(_from_plain, step), strict=True))) for step in steps),
        {place: frozenset(lines) for place, lines in visited.items()},
        {place: frozenset(by) for place, by in callers.items()},
        frozenset(answered),
        tuple(raised),
    )


_FIELDS = tuple(each.name for each in fields(Step))


def _to_plain(value: Any) -> Any:
    if isinstance(value, TracedTensor):
        return {"": [value.shape, value.mesh, value.placements, value.local]}
    if isinstance(value, torch.memory_format):  # torch cannot save one
        return {"": [str(value)]}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_to_plain, value))
    return {key: _to_plain(part) for key, part in value.items()} if isinstance(value, dict) else value


def _from_plain(value: Any) -> Any:
    if isinstance(value, dict) and "" in value:
        parts = value[""]
        return TracedTensor(*parts) if len(parts) > 1 else getattr(torch, parts[0].removeprefix("torch."))
    if isinstance(value, (list, tuple)):
        return type(value)(map(_from_plain, value))
    return {key: _from_plain(part) for key, part in value.items()} if isinstance(value, dict) else value
