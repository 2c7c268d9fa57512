"""Where in torch a case goes: which rule planned each op, which functions redistributed, planned or stored, in the order of their calls.

A trace is taken once, when a finding is confirmed, in a fresh world: nothing is remembered there, so that every rule is asked. It hears the
calls of functions of ``torch.distributed`` on the thread that acts; what C++ does it does not hear.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from shardlaw.conformance import compat

MOST_STEPS = 400
ROOT = os.path.join("torch", "distributed", "")
_HELPERS = ("__init__", "__eq__", "__hash__", "__repr__", "__str__", "__post_init__", "<lambda>", "<genexpr>", "<listcomp>", "<dictcomp>")


def is_rule(file: str, function: str) -> bool:
    """Whether a function that is called while an op is planned is the rule of an op."""
    return file.startswith(compat.RULES) and not file.endswith(compat.NO_RULES) and function not in _HELPERS


def is_step(file: str, function: str) -> bool:
    """Whether a call of a function says what torch does with a sharded tensor or a checkpoint."""
    for place, functions in compat.STEPS.items():
        if file.startswith(place):
            return function not in _HELPERS and not function.startswith("is_") and (functions is None or function in functions)
    return False


class Tracer:
    """Notes calls while it listens. A step is one line: what was called, where it stands, and of an op what its rule asked for and
    claimed."""

    def __init__(self) -> None:
        self.steps: list[str] = []
        self._ops: list[tuple[FrameType, str, list[str]]] = []

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Notes the calls of the block."""
        before = sys.getprofile()
        sys.setprofile(self._hear)
        try:
            yield
        finally:
            sys.setprofile(before)

    def _hear(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        at = code.co_filename.find(ROOT)
        if at < 0 or threading.current_thread() is not threading.main_thread():
            return
        file, name = code.co_filename[at:].replace(os.sep, "/"), code.co_qualname.replace("<locals>.", "")
        if event == "return" and self._ops and self._ops[-1][0] is frame:
            _, op, rules = self._ops.pop()
            self._note(f"op {op}: {rules[0] if rules else 'no rule'}{_decided(argument)}")
        elif event == "call":
            if code.co_name == compat.PLANS_AN_OP:
                schema = frame.f_locals.get("op_schema")
                self._ops.append((frame, f"{getattr(schema, 'op', '?')}({_inputs(schema)})", []))
            elif self._ops:
                if is_rule(file, code.co_name):
                    self._ops[-1][2].append(f"{name}, {file}:{code.co_firstlineno}")
            elif is_step(file, code.co_name):
                self._note(f"{name}, {file}:{code.co_firstlineno}")

    def _note(self, step: str) -> None:
        if len(self.steps) < MOST_STEPS and self.steps[-1:] != [step]:
            self.steps.append(step)


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


def where(steps: list[str], raised: str = "") -> str:
    """The step to look at first: where an error came from (``raised`` is its stack), else the rule of the last op that was planned, else
    the
    last function that redistributed, planned or stored. Empty where nothing was heard."""
    frames = [line for line in raised.splitlines() if f"/{ROOT}" in line]
    if frames:
        place, _, function = frames[-1].partition(" in ")
        return f"{function}, {place[place.find(ROOT) :]}"
    ops = [step.partition(": ")[2] for step in steps if step.startswith("op ")]
    moves = [step for step in steps if any(place in step for place in compat.MOVES)]
    return next((found[-1] for found in (ops, moves, steps) if found), "")
