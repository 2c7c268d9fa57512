"""Laws on crashes: the field types of states, the due value of what loads, and the enumeration of cases."""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import torch
from hypothesis import strategies as st
from torch.distributed.checkpoint.api import CheckpointException

from shardlaw.conformance.law.act import law
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Due, Refused
from shardlaw.conformance.law.fields import Field, ScriptArgument
from shardlaw.conformance.law.law import Law, Limits
from shardlaw.conformance.law.verdict import Verdict
from shardlaw.conformance.laws.checkpoint.calls import CheckpointFailed
from shardlaw.conformance.laws.checkpoint.fields import StateField, WriterField
from shardlaw.conformance.laws.crash.crashes import Crash, LossyCrash, Overlap, RecordedCrash, RecordedOverlap
from shardlaw.conformance.laws.crash.objects import ObjectCrash, RecordedObjectCrash
from shardlaw.conformance.laws.roundtrip.cases import NEEDS, narrow
from shardlaw.conformance.rank import storage
from shardlaw.reference.crash import StepId
from shardlaw.reference.notation import NotationError

if TYPE_CHECKING:
    from shardlaw.conformance.rank.context import RankContext

DISKS = ("kill", "posix")
SELECTORS = ("crash", "done", "lost", "half", "turns")  # fields that select a state of a scenario
STRIDE = 0.6180339887  # between indices that are tried one after the other, modulo 1


@dataclass(frozen=True)
class StateSelection:
    """The ``scenario`` of a case, which is its text without :data:`SELECTORS`, and the attributes that select a state
    of :class:`RecordedStates`."""

    scenario: str
    attributes: Mapping[str, Any]


class CrashField(Field):
    """The state of a crash that a case selects. With ``returned``, the save has returned on every rank.

    ``case_fields``: the fields that select it. An act gets a ``recorded_class``; so does a script where the case
    selects the state by an index above 0. For other states a script gets a ``script_class``.
    """

    always = True
    takes = "crash=NUMBER, or how many steps each rank has done and which are lost: done=3,1 lost=0.2,1.1 half=0.3"
    case_fields: tuple[str, ...] = ("disk", "crash", "done", "lost", "half", "threads")
    recorded_class: type[RecordedCrash | RecordedOverlap] = RecordedCrash
    script_class: type = Crash

    def __init__(self, *, returned: bool = False) -> None:
        self.returned = returned

    def fields(self, name: str) -> tuple[str, ...]:
        return self.case_fields

    def read(self, case: Case, name: str) -> StateSelection:
        scenario = replace(case, fields=tuple(field for field in case.fields if field[0] not in SELECTORS))
        return StateSelection(scenario.text, {**self.selection(case), "index": case.integer("crash", 0)})

    def selection(self, case: Case) -> dict[str, Any]:
        """The attributes that select the state, without its index. Raises :class:`NotationError`."""
        selection: dict[str, Any] = {"returned": self.returned}
        if "disk" in self.case_fields:
            selection |= {"disk": case.get("disk", "posix"), "threads": case.integer("threads", 1)}
            if selection["disk"] not in DISKS:
                raise NotationError(f"case {case.text!r}: disk={selection['disk']}: want {' or '.join(DISKS)}")
        if "done" in case:
            lost = [parse_step_id(text) for text in case.get("lost", "").split(",") if text]
            half = parse_step_id(case.get("half")) if "half" in case else None
            selection |= {"done": [int(count) for count in case.get("done").split(",")], "lost": lost, "half": half}
            steps = [*lost, *filter(None, [half])]
            if len(selection["done"]) != case.world or any(rank >= case.world for rank, _ in steps):
                raise NotationError(f"case {case.text!r}: want counts of steps, and steps, of {case.world} ranks")
            if any(number > selection["done"][rank] for rank, number in steps):
                raise NotationError(f"case {case.text!r}: want lost and half to name steps that were done")
        return selection

    def build(self, value: StateSelection, here: RankContext) -> Any:
        recording = here.cached(("crash", value.scenario), dict)
        return self.recorded_class(here.folder(), recording, **value.attributes)

    def to_script(self, value: StateSelection, name: str, world: int) -> ScriptArgument:
        attributes = dict(value.attributes)
        index = attributes.pop("index")
        if "done" not in attributes and index == 0:
            attributes["done"] = [] if self.returned else [0] * world
        if "done" in attributes:
            keys = ("done", "lost", "half", "returned", "scheme")
            options = {key: attributes[key] for key in keys if attributes.get(key)}
            lossy = "lost" in options or "half" in options
            return self.script_call(LossyCrash if lossy else self.script_class, "folder", options)
        return self.script_call(self.recorded_class, "folder, {}", {**attributes, "index": index})

    @staticmethod
    def script_call(crash: type, arguments: str, options: Mapping[str, Any]) -> ScriptArgument:
        more = "".join(f", {key}={value!r}" for key, value in options.items())
        return ScriptArgument(f"{crash.__name__}({arguments}{more})", uses=(crash,))


class ObjectCrashField(CrashField):
    """The state of a crash of ranks that save in an object store."""

    takes = "crash=NUMBER, or how many puts and removals each rank has done: done=3,1; store=s3://bucket"
    case_fields = ("crash", "done", "store")
    recorded_class, script_class = RecordedObjectCrash, ObjectCrash

    def selection(self, case: Case) -> dict[str, Any]:
        return {**super().selection(case), "scheme": case.get("store", "memory://")}


class OverlapField(CrashField):
    """The state of a crash of two jobs that save in one folder."""

    takes = "crash=NUMBER, or turns=5,9,2: how many steps the first job takes, then the second, then the first again"
    case_fields = ("crash", "turns")
    recorded_class, script_class = RecordedOverlap, Overlap

    def selection(self, case: Case) -> dict[str, Any]:
        turns = [int(word) for word in case.get("turns", "0,0,0").split(",") if word.isdigit()]
        if len(turns) != 3:
            raise NotationError(f"case {case.text!r}: turns={case.get('turns')}: want three counts of steps")
        return {"turns": tuple(turns)} if "turns" in case else {}

    def to_script(self, value: StateSelection, name: str, world: int) -> ScriptArgument:
        if "turns" in value.attributes:
            return self.script_call(self.script_class, "folder", {"turns": value.attributes["turns"]})
        return self.script_call(self.recorded_class, "folder, {}", value.attributes)


def parse_step_id(text: str) -> StepId:
    """The rank and the number of a step. Raises :class:`NotationError`."""
    rank, _, number = text.partition(".")
    if not (rank.isdigit() and number.isdigit() and int(number)):
        raise NotationError(f"{text!r}: want RANK.NUMBER of a step, such as 0.2")
    return int(rank), int(number)


def name_by_steps(verdict: Verdict) -> Case | None:
    """The case of a verdict with its state selected by steps instead of an index, where the message has the steps."""
    selectors = re.search(r"(turns=[\d,]+|done=\S+)( lost=[\d.,]+)?( half=[\d.]+)?;", verdict.message)
    if "crash" not in verdict.case or "threads" in verdict.case or selectors is None:
        return None
    fields = dict(word.split("=", 1) for word in selectors[0].removesuffix(";").split())
    plain = replace(verdict.case, fields=tuple(field for field in verdict.case.fields if field[0] not in SELECTORS))
    return plain.with_fields(**fields)


class SyncingWriterField(WriterField):
    """A function from a folder to a writer; those of torch sync files, unless the case has ``sync=0``."""

    def build(self, value: Mapping[str, Any], here: RankContext) -> Any:
        default = {"sync_files": True} if storage.target_storage(here.target).options.get("sync_files") is False else {}
        return super().build({**default, **value}, here)


@dataclass(frozen=True)
class OneOfStates(Due):
    """What loads after a crash: all of one of these ``states`` (:class:`Contents`, by name), or, with ``may_refuse``, a
    refusal. Compared on rank 0."""

    states: Mapping[str, Any]
    rank: int
    may_refuse: bool = True

    def compare(self, here: RankContext, check: str, got: Any, place: str) -> None:
        if got is None and here.rank:
            return
        loaded, state = got
        loaded = CheckpointFailed(loaded) if isinstance(loaded, CheckpointException) else loaded
        here.add_feature(f"storage:{here.target.storage}")
        for kind in getattr(state, "kinds", ()):
            here.add_feature(f"lost:{kind}")
        if isinstance(loaded, BaseException):
            here.add_feature("left:refused")
            message = f"{state}: nothing loads: {type(loaded).__name__}: {loaded}"
            if here.require(self.may_refuse, "wrong-value", "lost", message):
                Refused().compare(here, check, loaded, f"{state}: what is left")
            return
        for name, contents in self.states.items():
            if here.would_pass(functools.partial(contents.compare, here, check, loaded, place)):
                here.add_feature(f"left:{name}")
                return
        what = mixture_or_garbage([contents.trip.values for contents in self.states.values()], loaded)
        here.add_feature(f"left:{what}")
        names = " or the ".join(self.states)
        text = f"{state}: what loads is {'a mixture' if what == 'mixture' else what}, not the {names}"
        want = " or ".join(f"{name}: {format_tensors(state.values())}" for name, state in self.states.items())
        here.deviates("wrong-value", what, text, want, format_tensors(loaded))

    def for_script(self, rank: int) -> Any:
        if rank:
            return ...
        allowed = [*(state.for_script(rank) for state in self.states.values()), *[BaseException] * self.may_refuse]
        return {"either": [str, ({"either": allowed}, ...)]}  # a text: what must be lost lasts

    def compares(self) -> Iterable[str]:
        parts = {part for state in self.states.values() for part in state.compares()}
        return sorted(parts - {"dtensor"} | {"either", "list", "error"})


def mixture_or_garbage(states: Sequence[Mapping[str, torch.Tensor]], loaded: Mapping[str, Any]) -> str:
    """``mixture`` where every loaded element is that of one of the states, else ``garbage``."""
    for name, got in loaded.items():
        if isinstance(got, torch.Tensor) and all(name in state for state in states):
            allowed = [state[name] for state in states]
            if any(want.shape != got.shape for want in allowed):
                return "garbage"
            if not bool(torch.stack([got.cpu() == want for want in allowed]).any(0).all()):
                return "garbage"
    return "mixture"


def format_tensors(state: Mapping[str, Any]) -> str:
    """The values of a state as a text."""
    return ", ".join(
        f"{name}={value.tolist() if isinstance(value, torch.Tensor) else value}" for name, value in state.items()
    )


def sweep_scenarios(*scenarios: tuple[str, int]) -> Callable[[Limits], list[Case]]:
    """The enumerator of scenarios, each with its number of states to try. Consecutive cases have distant indices."""

    def sweep(limits: Limits) -> list[Case]:
        cases = [(Case.parse(f"- {text}"), count) for text, count in scenarios]
        return [
            case.with_fields(crash=index)
            for case, count in cases
            if case.world <= limits.world_size
            for index in sorted(range(count), key=lambda index: (index * STRIDE) % 1)
        ]

    return sweep


@st.composite
def narrow_crash(draw: st.DrawFn, case: Case) -> Case:
    """Cases with fewer or smaller tensors, fewer ranks, and a smaller index of the state."""
    smaller = draw(narrow(case))
    if "crash" not in case:
        return smaller
    index = draw(st.integers(0, case.integer("crash", 0)))
    if case.get("mesh") in ("3", "4"):
        smaller = smaller.with_fields(mesh=draw(st.sampled_from(("2", case.get("mesh")))))
    return smaller.with_fields(crash=index)


def crash_features(case: Case) -> set[str]:
    return {f"disk:{case.get('disk')}"} if "disk" in case else {"disk:kill", "second-job"}


def crash_law(
    name: str,
    *,
    control: str,
    scenarios: Sequence[tuple[str, int]],
    smoke: int,
    annotations: Mapping[str, Any] | None = None,
    **record: Any,
) -> Callable[[Callable[..., Any]], Law]:
    """Decorate the act of the law ``crash.NAME``.

    ``scenarios``: fields of cases without the state, and the number of states of each in a run of this chapter only.
    ``smoke``: the number of cases in a smoke run. ``annotations``: replace those of the act.
    """
    defaults: dict[str, Any] = {
        "sweep": sweep_scenarios(*scenarios),
        "sweeps": smoke,
        "alone": sum(count for _, count in scenarios),
        "narrow": narrow_crash,
        "plainer": name_by_steps,
        "needs": NEEDS,
        "smallest": 1,
        "features": crash_features,
    }
    decorate = law(f"crash.{name}", control=control, **{**defaults, **record})

    def decorate_copy(function: Callable[..., Any]) -> Law:
        act = types.FunctionType(function.__code__, function.__globals__, function.__name__)
        act.__doc__, act.__module__ = function.__doc__, function.__module__
        act.__annotations__ = {**function.__annotations__, **(annotations or {})}
        return decorate(act)

    return decorate_copy


FullDestination = Annotated[dict[str, Any], StateField("load", fill="poison", plain=True)]
NewerFullState = Annotated[dict[str, Any], StateField("load", plain=True, newer=1)]
Newest = Annotated[dict[str, Any], StateField("save", newer=2)]
NewestFullState = Annotated[dict[str, Any], StateField("load", plain=True, newer=2)]
TwoJobs = Annotated[Any, OverlapField()]
SaveCrash = Annotated[Any, CrashField()]
LaterCrash = Annotated[Any, CrashField(returned=True)]
ObjectSaveCrash = Annotated[Any, ObjectCrashField()]
LaterObjectCrash = Annotated[Any, ObjectCrashField(returned=True)]
SyncingWriter = Annotated[Callable[..., Any], SyncingWriterField()]
