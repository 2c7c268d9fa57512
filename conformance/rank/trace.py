"""Trace an act on a rank, to find the place in torch that goes wrong: the tensors of every step, the rule that decided it, and the lines
that ran.

A confirmed finding is traced, and similar cases that hold. torch's caches of plans are cleared first, so that every rule is called. The
trace covers the Python functions of ``torch.distributed``, not C++; of threads that the act starts only which functions and lines ran.
"""

from __future__ import annotations

import opcode
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import CodeType, FrameType
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardlaw.conformance import compat
from shardlaw.conformance.compat import trace as torch_trace
from shardlaw.conformance.compat.plans import PLAIN_TYPES, rule_generator, rule_of, similar_rule
from shardlaw.conformance.law.evidence import Evidence, Step, TracedTensor
from shardlaw.reference.placement import format_placements

NOTHING = torch.empty(0)
MOST_STEPS = 400
MOST_NOTIFIED = 100  # steps: what is sent at each grows with them
ROOT = os.path.join("torch", "distributed", "")
_RAISE = opcode.opmap["RAISE_VARARGS"]


class Tracer:
    """Records an act: ``steps`` as lines for people, ``evidence`` as data. ``on_step`` is called before each op, after it was planned, and
    before each step of a redistribution, as long as there are few of them."""

    def __init__(self, on_step: Callable[[], None] | None = None) -> None:
        self._on_step = on_step
        self.steps: list[str] = []
        self._steps: list[Step] = []
        self._visited: dict[str, set[int]] = {}
        self._callers: dict[str, set[str]] = {}
        self._since: dict[str, None] = {}
        self._answered: set[str] = set()
        self._raised: tuple[str, ...] = ()
        self._places: dict[CodeType, str] = {}
        self._op: int | None = None
        self._move: tuple[FrameType, Step] | None = None
        self._is_paused = False
        self._planned_ops: set[str] = set()
        self._planning_depth = 0

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record what the block does, after torch's caches of plans are cleared."""
        compat.clear_op_plans()
        compat.clear_redistribution_plans()
        before, of_threads = sys.gettrace(), threading.gettrace()
        try:
            with self._dispatch_mode():
                threading.settrace(self._on_thread_call)
                sys.settrace(self._on_call)
                yield
        except BaseException as error:
            sys.settrace(before)
            self._raised = tuple(self._frames(error))
            raise
        finally:
            sys.settrace(before)
            threading.settrace(of_threads)

    @property
    def evidence(self) -> Evidence:
        return Evidence(
            tuple(self._steps),
            {place: frozenset(lines) for place, lines in [*self._visited.items()]},  # threads may still run
            {place: frozenset(callers) for place, callers in [*self._callers.items()]},
            frozenset(self._answered),
            self._raised,
        )

    def _on_call(self, frame: FrameType, event: str, argument: Any) -> Any:
        place = self._place(frame.f_code)
        if not place or self._is_paused:
            return None
        lines = self._visit(frame, place)
        name = frame.f_code.co_name
        if name == torch_trace.PLANS_OP:
            return self._on_planning(frame, lines)
        if name == torch_trace.REDISTRIBUTES:
            return self._on_redistribution(frame, lines)
        if not self._planning_depth and torch_trace.is_step(place):
            self._add_line(place)
        if self._move is not None and torch_trace.PLANS_MOVE.match(place):
            self._move[1].rule = place
        if self._move is not None and frame.f_back is self._move[0] and torch_trace.is_candidate(place):
            self._move[1].calls.append(place)
            self._notify()

        def on_return(result: Any) -> None:
            if isinstance(result, bool):
                self._answered.add(place)

        return _trace_lines(lines, on_return)

    def _on_thread_call(self, frame: FrameType, event: str, argument: Any) -> Any:
        """As :meth:`_on_call`, in a thread that the act has started."""
        place = self._place(frame.f_code)
        return _trace_lines(self._visit(frame, place), lambda result: None) if place else None

    def _visit(self, frame: FrameType, place: str) -> set[int]:
        """Note that a function was called; returns the set of its lines that ran."""
        caller = frame.f_back
        while caller is not None and (not self._place(caller.f_code) or caller.f_code.co_name.startswith("<")):
            caller = caller.f_back
        by = self._place(caller.f_code) if caller is not None else ""
        self._callers.setdefault(place, set()).add(by)
        if self._op is None and self._move is None:
            self._since[place] = None
        return self._visited.setdefault(place, set())

    def _take_since(self) -> list[str]:
        """The functions called since the step before, outside of steps."""
        since, self._since = list(self._since), {}
        return since

    def _on_planning(self, frame: FrameType, lines: set[int]) -> Any:
        schema = frame.f_locals.get("op_schema")
        self._planning_depth += 1
        if self._op is None:  # another dispatch mode, such as CommDebugMode, keeps ops from this one
            op = getattr(schema, "op", None)
            self._steps.append(Step("op", str(op), rule=rule_of(op), rule_asked=True, completed=True, since=self._take_since()))

        def on_return(sharding: Any) -> None:
            self._planning_depth -= 1
            self._planned_ops.add(str(getattr(schema, "op", "")))
            rule = rule_of(getattr(schema, "op", None)) or "no rule"
            self._add_line(f"op {getattr(schema, 'op', '?')}({_format_inputs(schema)}): {rule}{_format_decision(sharding)}")
            self._notify()

        return _trace_lines(lines, on_return)

    def _on_redistribution(self, frame: FrameType, lines: set[int]) -> Any:
        arguments = frame.f_locals
        target = arguments["target_spec"]
        step = Step(
            "move",
            torch_trace.REDISTRIBUTES,
            _snapshot_shard(arguments["local_tensor"], arguments["current_spec"]),
            within=self._op,
            missing_dim=torch_trace.shards_missing_dim(target),
            since=self._take_since(),
        )
        self._steps.append(step)
        self._add_line(f"redistribute {_format_placements(arguments['current_spec'])} to {_format_placements(target)}")
        before, self._move = self._move, (frame, step)

        def on_return(local: Any) -> None:
            self._move = before
            if local is not None:
                step.results, step.completed = replace(_snapshot_shard(local, target), shape=step.arguments.shape), True

        return _trace_lines(lines, on_return)

    def _place(self, code: CodeType) -> str:
        known = self._places.get(code)
        if known is None:
            known = self._places[code] = torch_trace.place(code) if ROOT in code.co_filename else ""
        return known

    def _frames(self, error: BaseException) -> Iterator[str]:
        """The functions of torch in the traceback of the first error in the chain of ``error``, outermost first."""
        below = error
        while (cause := below.__cause__ or (None if below.__suppress_context__ else below.__context__)) is not None:
            below = cause
        reported = torch_trace.reported_frames(below)
        trace = below.__traceback__
        while trace is not None:
            place = self._place(trace.tb_frame.f_code)
            if place:
                refuses = not reported and trace.tb_next is None and trace.tb_frame.f_code.co_code[trace.tb_lasti] == _RAISE
                yield f"{torch_trace.REFUSED_BY}{place}" if refuses else place
            trace = trace.tb_next
        for number, frame in enumerate(reported, 1):
            if place := torch_trace.place_in_frame(frame):
                refuses = number == len(reported) and (frame.line or "").startswith("raise ")
                yield f"{torch_trace.REFUSED_BY}{place}" if refuses else place

    def _notify(self) -> None:
        if self._on_step is not None and len(self._steps) <= MOST_NOTIFIED:
            with self._paused():
                self._on_step()

    def _add_line(self, step: str) -> None:
        if len(self.steps) < MOST_STEPS and self.steps[-1:] != [step]:
            self.steps.append(step)

    def _dispatch_mode(self) -> Any:
        tracer = self

        class EachStep(compat.name("TorchDispatchMode")):  # type: ignore[misc]
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                return tracer._run_op(func, args, kwargs or {})

        return EachStep()

    def _run_op(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._op is not None or not _has_dtensor((args, kwargs)):
            return op(*args, **kwargs)
        with self._paused():
            step = Step("op", str(op), (snapshot(args), snapshot(kwargs)), rule=rule_of(op), since=self._take_since())
            written = torch_trace.written_arguments(op, args, kwargs)
        self._op = len(self._steps)
        self._steps.append(step)
        self._notify()
        try:
            gave = op(*args, **kwargs)
        except NotImplementedError:
            without = rule_generator(op)
            step.rule, step.similar_rule = without or step.rule, "" if without else similar_rule(op)
            raise
        finally:
            self._op = None
            step.rule_asked = str(op) in self._planned_ops
        with self._paused():
            step.results, step.completed = (snapshot(gave), snapshot(written)), True
            step.severed = bool(getattr(op, "is_view", False)) and _is_severed(args, gave)
        return gave

    @contextmanager
    def _paused(self) -> Iterator[None]:
        self._is_paused = True
        try:
            with torch.no_grad():
                yield
        finally:
            self._is_paused = False


def _trace_lines(lines: set[int], on_return: Callable[[Any], None]) -> Callable[[FrameType, str, Any], Any]:
    """A trace function of one call, for ``sys.settrace``: it adds the lines that run to ``lines`` and passes on the result, which is
    ``None`` where the call raised."""

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            lines.add(frame.f_lineno)
        elif event == "return":
            on_return(argument)
        return trace

    return trace


def _has_dtensor(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_has_dtensor, value))
    return any(map(_has_dtensor, value.values())) if isinstance(value, dict) else isinstance(value, DTensor)


def snapshot(value: Any) -> Any:
    """A value that can be sent to the driver: tensors are copied, and what the driver cannot decode becomes its ``repr``."""
    if isinstance(value, DTensor):
        return _snapshot_shard(value.to_local(), torch_trace.spec_of(value))
    if isinstance(value, torch.Tensor):
        return _copy_dense(value)
    if isinstance(value, (list, tuple)):
        return type(value)(map(snapshot, value)) if type(value) in (list, tuple) else tuple(map(snapshot, value))
    if isinstance(value, dict):
        return {key: snapshot(part) for key, part in value.items()}
    return value if isinstance(value, tuple(PLAIN_TYPES)) else repr(value)


def _snapshot_shard(local: Any, spec: Any) -> TracedTensor:
    from shardlaw.conformance.rank.context import read_mesh_cached, read_placements

    try:
        placements = format_placements(read_placements(spec.placements)) if all(map(_is_plain, spec.placements)) else ""
    except NotImplementedError:
        placements = ""
    with torch.no_grad():
        return TracedTensor(tuple(map(int, spec.shape)), str(read_mesh_cached(spec.mesh)), placements, _copy_dense(local))


def _copy_dense(tensor: torch.Tensor) -> torch.Tensor:
    """A copy as a plain dense tensor; empty for a subclass with a ``__torch_dispatch__`` of its own, which may hold its elements
    elsewhere."""
    copy = tensor.detach().clone()
    copy = copy if copy.layout is torch.strided else copy.to_dense()
    if type(copy) is torch.Tensor:
        return copy
    return copy.as_subclass(torch.Tensor) if _has_own_memory(copy) else NOTHING


def _has_own_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor is of no subclass with a ``__torch_dispatch__`` of its own, which may hold its elements elsewhere."""
    return type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def _is_plain(placement: Any) -> bool:
    """Whether a placement is one of the documented ones, not derived from them by torch."""
    return not placement.is_partial() or type(placement).__name__ == "Partial"


def _is_severed(args: tuple[Any, ...], gave: Any) -> bool:
    """Whether the result of a view op shares no memory with the first argument; not said of subclasses that hold no memory themselves."""
    if not (args and isinstance(args[0], DTensor) and isinstance(gave, DTensor)):
        return False
    base, view = args[0].to_local(), gave.to_local()
    if not (_has_own_memory(base) and _has_own_memory(view)):
        return False
    return min(base.numel(), view.numel()) > 0 and base.untyped_storage().data_ptr() != view.untyped_storage().data_ptr()


def _format_inputs(schema: Any) -> str:
    return "; ".join(_format_placements(spec) for spec in getattr(schema, "args_spec", ()))


def _format_placements(spec: Any) -> str:
    """The placements of a spec, or of several, as torch prints them."""
    if isinstance(spec, (list, tuple)):
        return "; ".join(map(_format_placements, spec))
    return ",".join(map(str, getattr(spec, "placements", ()))) or "-"


def _format_decision(sharding: Any) -> str:
    """The placements that a rule asked of its inputs, and those that it claims of its outputs."""
    if sharding is None:
        return ", which raised"
    asked = getattr(sharding, "redistribute_schema", None) if getattr(sharding, "needs_redistribute", False) else None
    request = f", asked for {_format_inputs(asked)}" if asked is not None else ""
    return f"{request}{' and' if request else ','} claimed {_format_placements(getattr(sharding, 'output_spec', None))}"
