"""The field types of laws on crashes, what is due of what a crash leaves, and how their cases are counted through."""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
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
from shardlaw.conformance.laws.crash.objects import ObjectCrash, RecordedObjects
from shardlaw.conformance.laws.roundtrip.cases import NEEDS, narrow
from shardlaw.conformance.rank import storage
from shardlaw.reference.notation import NotationError

if TYPE_CHECKING:
    from shardlaw.conformance.rank.context import RankContext

DISKS = ("kill", "posix")
WHICH = ("crash", "done", "lost", "half", "turns")  # fields that say which state of a scenario it is
STRIDE = 0.6180339887  # of the indices that are tried first: they lie far apart


@dataclass(frozen=True)
class Asked:
    """Which state a case asks for, and its ``scenario``: the case but for that."""

    scenario: str
    state: Mapping[str, Any]


class CrashField(Field):
    """The state that the case names, of what the act records once for all states of a scenario. ``taken``: the fields
    that say which. ``recorded`` tries it, ``again`` stands in scripts: where the case counts the state, the first
    one, in which nothing is done (or all is, once the save has ``returned``); any other is counted there too."""

    always = True
    takes = "crash=NUMBER, or how many steps each rank has done and which are lost: done=3,1 lost=0.2,1.1 half=0.3"
    taken: tuple[str, ...] = ("disk", "crash", "done", "lost", "half", "threads")
    recorded: type[RecordedCrash | RecordedOverlap] = RecordedCrash
    again: type = Crash

    def __init__(self, *, returned: bool = False) -> None:
        self.returned = returned

    def fields(self, name: str) -> tuple[str, ...]:
        return self.taken

    def read(self, case: Case, name: str) -> Asked:
        scenario = replace(case, fields=tuple(field for field in case.fields if field[0] not in WHICH))
        return Asked(scenario.text, {**self.asked(case), "index": case.integer("crash", 0)})

    def asked(self, case: Case) -> dict[str, Any]:
        """Which state it is, but for its number."""
        found: dict[str, Any] = {"returned": self.returned}
        if "disk" in self.taken:
            found |= {"disk": case.get("disk", "posix"), "threads": case.integer("threads", 1)}
            if found["disk"] not in DISKS:
                raise NotationError(f"case {case.text!r}: disk={found['disk']}: want {' or '.join(DISKS)}")
        if "done" in case:
            lost = [place_of(text) for text in case.get("lost", "").split(",") if text]
            half = place_of(case.get("half")) if "half" in case else None
            found |= {"done": [int(count) for count in case.get("done").split(",")], "lost": lost, "half": half}
            places = [*lost, *filter(None, [half])]
            if len(found["done"]) != case.world or any(rank >= case.world for rank, _ in places):
                raise NotationError(f"case {case.text!r}: want counts of steps, and steps, of {case.world} ranks")
            if any(number > found["done"][rank] for rank, number in places):
                raise NotationError(f"case {case.text!r}: want lost and half to name steps that were done")
        return found

    def build(self, value: Asked, here: RankContext) -> Any:
        return self.recorded(here.folder(), here.cached(("crash", value.scenario), dict), **value.state)

    def to_script(self, value: Asked, name: str, world: int) -> ScriptArgument:
        state = dict(value.state)
        index = state.pop("index")
        if "done" not in state and index == 0:
            state["done"] = [] if self.returned else [0] * world
        if "done" in state:
            given = {key: state[key] for key in ("done", "lost", "half", "returned", "scheme") if state.get(key)}
            return self.call(LossyCrash if "lost" in given or "half" in given else self.again, "folder", given)
        return self.call(self.recorded, "folder, {}", {**state, "index": index})

    @staticmethod
    def call(made: type, first: str, given: Mapping[str, Any]) -> ScriptArgument:
        more = "".join(f", {key}={value!r}" for key, value in given.items())
        return ScriptArgument(f"{made.__name__}({first}{more})", uses=(made,))


class ObjectCrashField(CrashField):
    """The same of an object store."""

    takes = "crash=NUMBER, or how many puts and removals each rank has done: done=3,1; store=s3://bucket"
    taken = ("crash", "done", "store")
    recorded, again = RecordedObjects, ObjectCrash

    def asked(self, case: Case) -> dict[str, Any]:
        return {**super().asked(case), "scheme": case.get("store", "memory://")}


class OverlapField(CrashField):
    """The same of what two jobs leave."""

    takes = "crash=NUMBER, or turns=5,9,2: how many steps the first job takes, then the second, then the first again"
    taken = ("crash", "turns")
    recorded, again = RecordedOverlap, Overlap

    def asked(self, case: Case) -> dict[str, Any]:
        turns = [int(word) for word in case.get("turns", "0,0,0").split(",") if word.isdigit()]
        if len(turns) != 3:
            raise NotationError(f"case {case.text!r}: turns={case.get('turns')}: want three counts of steps")
        return {"turns": tuple(turns)} if "turns" in case else {}

    def to_script(self, value: Asked, name: str, world: int) -> ScriptArgument:
        if "turns" in value.state:
            return self.call(self.again, "folder", {"turns": value.state["turns"]})
        return self.call(self.recorded, "folder, {}", value.state)


def place_of(text: str) -> tuple[int, int]:
    """The rank and the number of a step."""
    rank, _, number = text.partition(".")
    if not (rank.isdigit() and number.isdigit() and int(number)):
        raise NotationError(f"{text!r}: want RANK.NUMBER of a step, such as 0.2")
    return int(rank), int(number)


def by_steps(verdict: Verdict) -> Case | None:
    """The same case, its state named by the steps that were done, where its message tells them."""
    told = re.search(r"(turns=[\d,]+|done=\S+)( lost=[\d.,]+)?( half=[\d.]+)?;", verdict.message)
    if "crash" not in verdict.case or "threads" in verdict.case or told is None:
        return None
    fields = dict(word.split("=", 1) for word in told[0].removesuffix(";").split())
    plain = replace(verdict.case, fields=tuple(field for field in verdict.case.fields if field[0] not in WHICH))
    return plain.with_fields(**fields)


class SyncingWriterField(WriterField):
    """As the field of writers; torch's own sync their files, as they do where nobody says otherwise."""

    def build(self, value: Mapping[str, Any], here: RankContext) -> Any:
        synced = {"sync_files": True} if storage.target_storage(here.target).options.get("sync_files") is False else {}
        return super().build({**synced, **value}, here)


@dataclass(frozen=True)
class Untorn(Due):
    """What loads after a crash: one of some states (:class:`Contents`), by their names, as a whole; or an error that
    says so, where ``refusable``."""

    states: Mapping[str, Any]
    rank: int
    refusable: bool = True

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
            if here.require(
                self.refusable, "wrong-value", "lost", f"{state}: nothing loads: {type(loaded).__name__}: {loaded}"
            ):
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
        here.deviates("wrong-value", what, text, self._shown(), shown(loaded))

    def _shown(self) -> str:
        return " or ".join(f"{name}: {shown(state.values())}" for name, state in self.states.items())

    def for_script(self, rank: int) -> Any:
        if rank:
            return ...
        wanted = [state.for_script(rank) for state in self.states.values()] + (
            [BaseException] if self.refusable else []
        )
        return {"either": [str, ({"either": wanted}, ...)]}  # a text: what must be lost lasts

    def compares(self) -> Iterable[str]:
        found = {part for state in self.states.values() for part in state.compares()}
        return sorted(found - {"dtensor"} | {"either", "list", "error"})


def mixture_or_garbage(states: Sequence[Mapping[str, torch.Tensor]], loaded: Mapping[str, Any]) -> str:
    """``mixture`` where every element of what was loaded is that of one of the states, else ``garbage``."""
    for name, got in loaded.items():
        if isinstance(got, torch.Tensor) and all(name in state for state in states):
            own = [state[name] for state in states]
            if any(one.shape != got.shape for one in own):
                return "garbage"
            if not bool(torch.stack([got.cpu() == one for one in own]).any(0).all()):
                return "garbage"
    return "mixture"


def shown(state: Mapping[str, Any]) -> str:
    """The tensors of a state as a text."""
    return ", ".join(
        f"{name}={value.tolist() if isinstance(value, torch.Tensor) else value}" for name, value in state.items()
    )


def counted(*scenarios: tuple[str, int]) -> Callable[[Limits], list[Case]]:
    """The enumerator of scenarios that are written down, each with how many of its states are tried, at most as many as
    it has; of one scenario those that lie far apart come first."""

    def sweep(limits: Limits) -> list[Case]:
        found = [(Case.parse(f"- {text}"), most) for text, most in scenarios]
        return [
            case.with_fields(crash=number)
            for case, most in found
            if case.world <= limits.world_size
            for number in sorted(range(most), key=lambda at: (at * STRIDE) % 1)
        ]

    return sweep


def smaller(case: Case) -> SearchStrategy[Case]:
    """Cases with fewer tensors, smaller ones, fewer ranks and states after fewer steps."""

    @st.composite
    def found(draw: st.DrawFn) -> Case:
        less = draw(narrow(case))
        if "crash" not in case:
            return less
        index = draw(st.integers(0, case.integer("crash", 0)))
        if case.get("mesh") in ("3", "4"):
            less = less.with_fields(mesh=draw(st.sampled_from(("2", case.get("mesh")))))
        return less.with_fields(crash=index)

    return found()


def of_crash(case: Case) -> set[str]:
    return {f"disk:{case.get('disk')}"} if "disk" in case else {"disk:kill", "second-job"}


def crash_law(
    name: str,
    *,
    control: str,
    scenarios: Sequence[tuple[str, int]],
    smoke: int,
    takes: Mapping[str, Any] | None = None,
    **record: Any,
) -> Callable[[Callable[..., Any]], Law]:
    """Make the law ``crash.NAME`` of the function below. ``scenarios``: the fields of cases but for the state, with how
    many states of each are tried where the chapter is asked for by itself; ``smoke`` is how many a smoke run tries of
    all. ``takes``: what the function takes, where it is not what its annotations say."""
    usual: dict[str, Any] = {
        "sweep": counted(*scenarios),
        "sweeps": smoke,
        "alone": sum(most for _, most in scenarios),
        "narrow": smaller,
        "plainer": by_steps,
        "needs": NEEDS,
        "smallest": 1,
        "features": of_crash,
    }
    made = law(f"crash.{name}", control=control, **{**usual, **record})

    def of(function: Callable[..., Any]) -> Law:
        act = types.FunctionType(function.__code__, function.__globals__, function.__name__)
        act.__doc__, act.__module__ = function.__doc__, function.__module__
        act.__annotations__ = {**function.__annotations__, **(takes or {})}
        return made(act)

    return of


Whole = Annotated[dict[str, Any], StateField("load", fill="poison", plain=True)]
NewWhole = Annotated[dict[str, Any], StateField("load", plain=True, newer=1)]
Newest = Annotated[dict[str, Any], StateField("save", newer=2)]
NewestWhole = Annotated[dict[str, Any], StateField("load", plain=True, newer=2)]
Overlapping = Annotated[Any, OverlapField()]
Crashing = Annotated[Any, CrashField()]
CrashingLater = Annotated[Any, CrashField(returned=True)]
CrashingObjects = Annotated[Any, ObjectCrashField()]
CrashingObjectsLater = Annotated[Any, ObjectCrashField(returned=True)]
SyncingWriter = Annotated[Callable[..., Any], SyncingWriterField()]
