"""What a rank notes of an act, to tell where in torch it goes wrong: the tensors of every step, who decided it, and which lines ran.

A trace is taken when a finding is confirmed, of its case and of cases near it that hold. Nothing is remembered between these, so that every
rule is asked. It hears the Python functions of ``torch.distributed`` on the thread that acts; what C++ does it does not hear.
"""

from __future__ import annotations

import opcode
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from types import CodeType, FrameType
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardlaw.conformance import compat
from shardlaw.conformance.compat import trace as heard
from shardlaw.conformance.compat.plans import called_alike, decider, lacking
from shardlaw.conformance.law.evidence import Evidence, Step, TracedTensor
from shardlaw.reference.placement import format_placements

NOTHING = torch.empty(0)
MOST_STEPS = 400
ROOT = os.path.join("torch", "distributed", "")
_RAISE = opcode.opmap["RAISE_VARARGS"]


class Tracer:
    """Listens to an act. ``steps`` tells of it in lines for people, ``evidence`` has it as data."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self._taken: list[Step] = []
        self._visited: dict[str, set[int]] = {}
        self._callers: dict[str, set[str]] = {}
        self._answered: set[str] = set()
        self._raised: tuple[str, ...] = ()
        self._places: dict[CodeType, str] = {}
        self._op: int | None = None
        self._move: tuple[FrameType, Step] | None = None
        self._deaf = False
        self._asked: set[str] = set()
        self._plans = 0

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Notes what the block does; what torch remembers of earlier ops is forgotten first."""
        with suppress(compat.TorchMovedError):
            compat.name("op_plans")()
        compat.forget_redistributions()
        before = sys.gettrace()
        try:
            with self._mode():
                sys.settrace(self._hear)
                yield
        except BaseException as error:
            sys.settrace(before)
            self._raised = tuple(self._frames(error))
            raise
        finally:
            sys.settrace(before)

    @property
    def evidence(self) -> Evidence:
        return Evidence(
            tuple(self._taken),
            {place: frozenset(lines) for place, lines in self._visited.items()},
            {place: frozenset(callers) for place, callers in self._callers.items()},
            frozenset(self._answered),
            self._raised,
        )

    # Functions and lines

    def _hear(self, frame: FrameType, event: str, argument: Any) -> Any:
        place = self._place(frame.f_code)
        if not place or self._deaf or threading.current_thread() is not threading.main_thread():
            return None
        lines = self._visited.setdefault(place, set())
        caller = frame.f_back
        while caller is not None and (not self._place(caller.f_code) or caller.f_code.co_name.startswith("<")):
            caller = caller.f_back
        by = self._place(caller.f_code) if caller is not None else ""
        self._callers.setdefault(place, set()).add(by)
        name = frame.f_code.co_name
        if name == heard.PLANS_AN_OP:
            return self._planning(frame, lines)
        if name == heard.MOVES_ONE:
            return self._moving(frame, lines)
        if not self._plans and heard.is_step(place):
            self._note(place)
        if self._move is not None and heard.PLANS_MOVE.match(place):
            self._move[1].rule = place
        if self._move is not None and frame.f_back is self._move[0] and heard.does(place):
            self._move[1].calls.append(place)

        def line(frame: FrameType, event: str, argument: Any) -> Any:
            if event == "line":
                lines.add(frame.f_lineno)
            elif event == "return" and isinstance(argument, bool):
                self._answered.add(place)
            return line

        return line

    def _planning(self, frame: FrameType, lines: set[int]) -> Any:
        schema = frame.f_locals.get("op_schema")
        self._plans += 1

        def line(frame: FrameType, event: str, argument: Any) -> Any:
            if event == "line":
                lines.add(frame.f_lineno)
            elif event == "return":
                self._plans -= 1
                self._asked.add(str(getattr(schema, "op", "")))
                rule = decider(getattr(schema, "op", None)) or "no rule"
                self._note(f"op {getattr(schema, 'op', '?')}({_inputs(schema)}): {rule}{_decided(argument)}")
            return line

        return line

    def _moving(self, frame: FrameType, lines: set[int]) -> Any:
        given = frame.f_locals
        step = Step("move", heard.MOVES_ONE, _piece(given["local_tensor"], given["current_spec"]), within=self._op)
        target = given["target_spec"]
        self._taken.append(step)
        self._note(f"redistribute {_placed(given['current_spec'])} to {_placed(target)}")
        before, self._move = self._move, (frame, step)

        def line(frame: FrameType, event: str, argument: Any) -> Any:
            if event == "line":
                lines.add(frame.f_lineno)
            elif event == "return":
                self._move = before
                if argument is not None:
                    step.results, step.completed = replace(_piece(argument, target), shape=step.arguments.shape), True
            return line

        return line

    def _place(self, code: CodeType) -> str:
        known = self._places.get(code)
        if known is None:
            known = self._places[code] = heard.place(code) if ROOT in code.co_filename else ""
        return known

    def _frames(self, error: BaseException) -> Iterator[str]:
        """The functions through which the error at the bottom of this one came."""
        below = error
        while (cause := below.__cause__ or (None if below.__suppress_context__ else below.__context__)) is not None:
            below = cause
        trace = below.__traceback__
        while trace is not None:
            place = self._place(trace.tb_frame.f_code)
            if place:
                refuses = trace.tb_next is None and trace.tb_frame.f_code.co_code[trace.tb_lasti] == _RAISE
                yield f"{heard.REFUSED_BY}{place}" if refuses else place
            trace = trace.tb_next

    def _note(self, step: str) -> None:
        if len(self.steps) < MOST_STEPS and self.steps[-1:] != [step]:
            self.steps.append(step)

    # Ops

    def _mode(self) -> Any:
        tracer = self

        class EachStep(compat.name("TorchDispatchMode")):  # type: ignore[misc]
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                return tracer._run(func, args, kwargs or {})

        return EachStep()

    def _run(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._op is not None or not _has_dtensor((args, kwargs)):
            return op(*args, **kwargs)
        with self._deafly():
            step = Step("op", str(op), (noted(args), noted(kwargs)), rule=decider(op))
            written = heard.written(op, args, kwargs)
        self._op = len(self._taken)
        self._taken.append(step)
        try:
            gave = op(*args, **kwargs)
        except NotImplementedError:
            without = lacking(op)
            step.rule, step.similar_rule = without or step.rule, "" if without else called_alike(op)
            raise
        finally:
            self._op = None
            step.rule_asked = str(op) in self._asked
        with self._deafly():
            step.results, step.completed = (noted(gave), noted(written)), True
            step.severed = bool(getattr(op, "is_view", False)) and _severed(args, gave)
        return gave

    @contextmanager
    def _deafly(self) -> Iterator[None]:
        self._deaf = True
        try:
            with torch.no_grad():
                yield
        finally:
            self._deaf = False


def _has_dtensor(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_has_dtensor, value))
    return any(map(_has_dtensor, value.values())) if isinstance(value, dict) else isinstance(value, DTensor)


def noted(value: Any) -> Any:
    """A value to send to the driver: tensors copied, whatever it cannot read as its text."""
    if isinstance(value, DTensor):
        return _piece(value.to_local(), heard.spec_of(value))
    if isinstance(value, torch.Tensor):
        return _copied(value)
    if isinstance(value, (list, tuple)):
        return type(value)(map(noted, value)) if type(value) in (list, tuple) else tuple(map(noted, value))
    if isinstance(value, dict):
        return {key: noted(part) for key, part in value.items()}
    plain = (type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
    return value if isinstance(value, plain) else repr(value)


def _piece(local: Any, spec: Any) -> TracedTensor:
    from shardlaw.conformance.rank.context import mesh_once_read, read_placements

    try:
        placements = format_placements(read_placements(spec.placements)) if all(map(_is_plain, spec.placements)) else ""
    except NotImplementedError:
        placements = ""
    with torch.no_grad():
        return TracedTensor(tuple(map(int, spec.shape)), str(mesh_once_read(spec.mesh)), placements, _copied(local))


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that can be sent: dense, of no class of a user's; empty where such a class may hold its elements elsewhere."""
    copy = tensor.detach().clone()
    copy = copy if copy.layout is torch.strided else copy.to_dense()
    if type(copy) is torch.Tensor:
        return copy
    holds_them = type(copy).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    return copy.as_subclass(torch.Tensor) if holds_them else NOTHING


def _is_plain(placement: Any) -> bool:
    """Whether it is a placement of the documentation, not one that torch derives from these."""
    return not placement.is_partial() or type(placement).__name__ == "Partial"


def _severed(args: tuple[Any, ...], gave: Any) -> bool:
    """Whether a result shares no memory with the first argument, of which it is a view."""
    if not (args and isinstance(args[0], DTensor) and isinstance(gave, DTensor)):
        return False
    one, other = args[0].to_local(), gave.to_local()
    return min(one.numel(), other.numel()) > 0 and one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr()


# What is said to people


def _inputs(schema: Any) -> str:
    return "; ".join(_placed(spec) for spec in getattr(schema, "args_spec", ()))


def _placed(spec: Any) -> str:
    """The placements of a spec, or of several, as torch prints them."""
    if isinstance(spec, (list, tuple)):
        return "; ".join(map(_placed, spec))
    return ",".join(map(str, getattr(spec, "placements", ()))) or "-"


def _decided(sharding: Any) -> str:
    """What a rule asked its inputs to be, and what it claims of its outputs."""
    if sharding is None:
        return ", which raised"
    asked = getattr(sharding, "redistribute_schema", None) if getattr(sharding, "needs_redistribute", False) else None
    said = f", asked for {_inputs(asked)}" if asked is not None else ""
    return f"{said}{' and' if said else ','} claimed {_placed(getattr(sharding, 'output_spec', None))}"
