"""Where in torch a case goes: which rule planned each op, which functions redistributed, planned or stored, in the order of their calls.

A trace is taken once, when a finding is confirmed, in a fresh world: nothing is remembered there, so that every rule is asked. It hears the
calls of functions of ``torch.distributed`` on the thread that acts; what C++ does it does not hear.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

from shardlaw.conformance import compat_trace as heard
from shardlaw.conformance.compat_plans import PLANS_AN_OP

if TYPE_CHECKING:
    from shardlaw.conformance.law.verdict import Answer, Verdict

MOST_STEPS = 400
ROOT = os.path.join("torch", "distributed", "")
_HELPERS = ("__init__", "__eq__", "__hash__", "__repr__", "__str__", "__post_init__", "<lambda>", "<genexpr>", "<listcomp>", "<dictcomp>")


def is_rule(file: str, function: str) -> bool:
    """Whether a function that is called while an op is planned is the rule of an op."""
    return file.startswith(heard.RULES) and not file.endswith(heard.NO_RULES) and function not in _HELPERS


def is_step(file: str, function: str) -> bool:
    """Whether a call of a function says what torch does with a sharded tensor or a checkpoint."""
    for place, functions in heard.STEPS.items():
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
            if code.co_name == PLANS_AN_OP:
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


def departing(verdict: Verdict) -> Answer | None:
    """The answer of the first rank that deviated or raised."""
    return next((answer for answer in verdict.ranks if answer.outcome in ("deviates", "raised")), None)


def place_of(verdict: Verdict, ordinary: Verdict | None = None) -> str:
    """The place in torch to look at first, of a verdict whose ranks were traced; empty where nothing was heard. ``ordinary``: the traced
    verdict on a case of the same law that holds, which does not go there."""
    first = departing(verdict)
    if first is None:
        return ""
    usual = {step for answer in ordinary.ranks for step in answer.trace} if ordinary is not None and ordinary.status == "held" else set()
    return where(list(first.trace), first.raised.stack if first.raised else "", verdict.case.law.partition(".")[0], usual)


def where(steps: list[str], raised: str = "", chapter: str = "op", usual: Collection[str] = ()) -> str:
    """The step to look at first: where an error came from (``raised`` is its stack); or else, of the last calls in each, the first that
    there is of: the files in which the faults of a chapter are looked for, without ``usual`` steps and with them; the rules of the ops that
    were planned; the functions that redistributed; whatever was heard. Empty where nothing was heard."""
    frames = []
    for line in raised.splitlines():
        if f"/{ROOT}" in line:
            place, _, function = line.partition(" in ")
            frames.append(f"{function}, {place[place.find(ROOT) :]}")
    ops = [step.partition(": ")[2] for step in steps if step.startswith("op ")]
    calls = [step for step in steps if not step.startswith("op ")]
    homes = heard.HOMES.get(chapter, ())
    home = [step for step in calls if any(place in step for place in homes) and heard.DOES.match(_name(step))]
    unusual = [step for step in home if step not in usual]
    moves = [step for step in calls if any(place in step for place in heard.MOVES)]
    known = [_telling(some) for some in (frames, unusual, home, ops, moves, frames, steps)]
    return next((found[-1] for found in known if found), "") or next((some[-1] for some in (frames, ops, calls) if some), "")


def _telling(steps: Iterable[str]) -> list[str]:
    """Those that do more than to hand on."""
    return [step for step in steps if not heard.HANDS_ON.fullmatch(_name(step)) and not step.startswith("no rule")]


def _name(step: str) -> str:
    return step.partition(",")[0].rpartition(".")[2]
