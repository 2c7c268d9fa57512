"""The field types of laws on crashes, what is due of what a crash leaves, and how their cases are counted through."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from shardlaw.conformance.law.act import law
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Due, Refused
from shardlaw.conformance.law.fields import Field, Printed
from shardlaw.conformance.law.law import Law, Limits
from shardlaw.conformance.law.verdict import Verdict
from shardlaw.conformance.laws.checkpoint.fields import StateField, WriterField
from shardlaw.conformance.laws.crash.crashes import CountedCrash, Crash, Overlap
from shardlaw.conformance.laws.crash.objects import CountedObjectCrash, ObjectCrash
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
    """What a case asks of a crash: a state by its number ``index`` on a ``disk``, or after each rank has ``done`` so
    many steps.

    ``scenario`` is the case but for that.
    """

    scenario: str
    disk: str
    threads: int
    index: int | None
    done: list[int]
    lost: list[tuple[int, int]]
    half: tuple[int, int] | None


class CrashField(Field):
    """The state that the case names, of what the act records once for all states of a scenario."""

    always = True
    takes = "crash=NUMBER, or how many steps each rank has done and which are lost: done=3,1 lost=0.2,1.1 half=0.3"

    def __init__(self, *, returned: bool = False) -> None:
        self.returned = returned

    def fields(self, name: str) -> tuple[str, ...]:
        return "disk", "crash", "done", "lost", "half", "threads"

    def read(self, case: Case, name: str) -> Asked:
        disk = case.get("disk", "posix")
        if disk not in DISKS:
            raise NotationError(f"case {case.text!r}: disk={disk}: want {' or '.join(DISKS)}")
        scenario = replace(case, fields=tuple(field for field in case.fields if field[0] not in WHICH))
        threads = case.integer("threads", 1)
        if "done" not in case:
            return Asked(scenario.text, disk, threads, case.integer("crash", 0), [], [], None)
        done = [int(count) for count in case.get("done").split(",")]
        lost = [place_of(text) for text in case.get("lost", "").split(",") if text]
        half = place_of(case.get("half")) if "half" in case else None
        if len(done) != case.world or any(not 0 <= rank < case.world for rank, _ in [*lost, *filter(None, [half])]):
            raise NotationError(f"case {case.text!r}: want counts of steps, and steps, of {case.world} ranks")
        return Asked(scenario.text, disk, threads, None, done, lost, half)

    def build(self, value: Asked, here: RankContext) -> Crash:
        kept = here.kept(("crash", value.scenario), dict)
        if value.index is None:
            return Crash(value.done, value.lost, value.half, self.returned, kept)
        return CountedCrash((), (), None, self.returned, kept, value.disk, value.index, value.threads)

    def printed(self, value: Asked, name: str, world: int) -> Printed:
        if value.index is None:
            return Printed(f"Crash({value.done}, {value.lost}, {value.half}, {self.returned})", uses=(Crash,))
        own = f"disk={value.disk!r}, index={value.index}, threads={value.threads}, returned={self.returned}"
        return Printed(f"CountedCrash({own})", uses=(CountedCrash,))


class ObjectCrashField(Field):
    """The state of an object store that the case names, of what the act records once for all states of a scenario."""

    always = True
    takes = "crash=NUMBER, or how many puts and removals each rank has done: done=3,1"

    def __init__(self, *, returned: bool = False) -> None:
        self.returned = returned

    def fields(self, name: str) -> tuple[str, ...]:
        return "crash", "done"

    def read(self, case: Case, name: str) -> tuple[str, list[int] | None, int]:
        scenario = replace(case, fields=tuple(field for field in case.fields if field[0] not in WHICH))
        done = [int(count) for count in case.get("done").split(",")] if "done" in case else None
        if done is not None and len(done) != case.world:
            raise NotationError(f"case {case.text!r}: want counts of steps of {case.world} ranks")
        return scenario.text, done, case.integer("crash", 0)

    def build(self, value: tuple[str, list[int] | None, int], here: RankContext) -> ObjectCrash | CountedObjectCrash:
        scenario, done, index = value
        if done is not None:
            return ObjectCrash(done, self.returned)
        return CountedObjectCrash(index, self.returned, here.kept(("objects", scenario), dict))

    def printed(self, value: tuple[str, list[int] | None, int], name: str, world: int) -> Printed:
        _, done, index = value
        if done is not None:
            return Printed(f"ObjectCrash({done}, {self.returned})", uses=(ObjectCrash,))
        return Printed(f"CountedObjectCrash({index}, {self.returned})", uses=(CountedObjectCrash,))


class OverlapField(Field):
    """The state that the case names, of what two jobs leave that are recorded once for all states of a scenario."""

    always = True
    takes = "crash=NUMBER, or turns=5,9,2: how many steps the first job takes, then the second, then the first again"

    def fields(self, name: str) -> tuple[str, ...]:
        return "crash", "turns"

    def read(self, case: Case, name: str) -> tuple[str, tuple[int, int, int] | None, int]:
        scenario = replace(case, fields=tuple(field for field in case.fields if field[0] not in WHICH))
        if "turns" not in case:
            return scenario.text, None, case.integer("crash", 0)
        turns = [int(word) for word in case.get("turns").split(",") if word.isdigit()]
        if len(turns) != 3:
            raise NotationError(f"case {case.text!r}: turns={case.get('turns')}: want three counts of steps")
        return scenario.text, (turns[0], turns[1], turns[2]), 0

    def build(self, value: tuple[str, tuple[int, int, int] | None, int], here: RankContext) -> Overlap:
        scenario, turns, index = value
        return Overlap(turns, index, here.kept(("overlap", scenario), dict))

    def printed(self, value: tuple[str, tuple[int, int, int] | None, int], name: str, world: int) -> Printed:
        return Printed(f"Overlap({value[1]}, {value[2]})", uses=(Overlap,))


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
        synced = {"sync_files": True} if storage.storage(here.target).options.get("sync_files") is False else {}
        return super().build({**synced, **value}, here)


@dataclass(frozen=True)
class Untorn(Due):
    """What loads after a crash: one of some states (:class:`Contents`), by their names, as a whole; or an error that
    says so, where ``refusable``."""

    states: Mapping[str, Any]
    rank: int
    refusable: bool = True

    def judge(self, here: RankContext, check: str, got: Any, place: str) -> None:
        if isinstance(got, str):
            here.reject(got)
        if got is None and here.rank:
            return
        loaded, state = got
        here.reached(f"storage:{here.target.storage}")
        for kind in state.kinds:
            here.reached(f"lost:{kind}")
        if isinstance(loaded, BaseException):
            here.reached("left:refused")
            if here.require(
                self.refusable, "wrong-value", "lost", f"{state}: nothing loads: {type(loaded).__name__}: {loaded}"
            ):
                Refused().judge(here, check, loaded, f"{state}: what is left")
            return
        for name, contents in self.states.items():
            if here.would_hold(functools.partial(contents.judge, here, check, loaded, place)):
                here.reached(f"left:{name}")
                return
        what = mixture_or_garbage([contents.trip.values for contents in self.states.values()], loaded)
        here.reached(f"left:{what}")
        names = " or the ".join(self.states)
        text = f"{state}: what loads is {'a mixture' if what == 'mixture' else what}, not the {names}"
        here.deviates("wrong-value", what, text, self._shown(), shown(loaded))

    def _shown(self) -> str:
        return " or ".join(f"{name}: {shown(state.values())}" for name, state in self.states.items())

    def for_script(self, rank: int) -> Any:
        if rank:
            return ...
        wanted = [state.for_script(rank) for state in self.states.values()] + ([Exception] if self.refusable else [])
        return ({"either": wanted}, ...)

    def compares(self) -> Iterable[str]:
        found = {part for state in self.states.values() for part in state.compares()}
        return sorted(found | {"either", "list"} | ({"error"} if self.refusable else set()))


def mixture_or_garbage(states: Sequence[Mapping[str, torch.Tensor]], loaded: Mapping[str, Any]) -> str:
    """``mixture`` where every element of what was loaded is that of one of the states, else ``garbage``."""
    for name, got in loaded.items():
        if isinstance(got, torch.Tensor) and all(name in state for state in states):
            own = [state[name] for state in states]
            if any(one.shape != got.shape for one in own):
                return "garbage"
            if not bool(torch.stack([got == one for one in own]).any(0).all()):
                return "garbage"
    return "mixture"


def shown(state: Mapping[str, Any]) -> str:
    """The tensors of a state as a text."""
    return ", ".join(
        f"{name}={value.tolist() if isinstance(value, torch.Tensor) else value}" for name, value in state.items()
    )


class Counted(Sequence[Case]):
    """The states of some scenarios, each a case: ``most`` of each scenario, those that lie far apart first."""

    def __init__(self, scenarios: Sequence[Case], most: Sequence[int]) -> None:
        self._scenarios, self._most = scenarios, most

    def __len__(self) -> int:
        return sum(self._most)

    def __getitem__(self, at: Any) -> Any:
        if isinstance(at, slice):
            return [self[number] for number in range(*at.indices(len(self)))]
        if not 0 <= at < len(self):
            raise IndexError(at)
        for scenario, most in zip(self._scenarios, self._most, strict=True):
            if at < most:
                return scenario.with_fields(crash=spread(most)[at])
            at -= most
        raise IndexError(at)


@functools.cache
def spread(most: int) -> tuple[int, ...]:
    """The numbers below ``most``, each once, so that those at the beginning lie far apart."""
    return tuple(sorted(range(most), key=lambda at: (at * STRIDE) % 1))


def counted(*scenarios: tuple[str, int]) -> Callable[[Limits], Counted]:
    """The enumerator of scenarios that are written down, each with how many of its states are tried."""

    def sweep(limits: Limits) -> Counted:
        found = [(Case.parse(f"- {text}"), most) for text, most in scenarios]
        fitting = [(case, most) for case, most in found if case.world <= limits.world_size]
        return Counted([case for case, _ in fitting], [most for _, most in fitting])

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
    name: str, *, control: str, scenarios: Sequence[tuple[str, int]], smoke: int, **record: Any
) -> Callable[[Callable[..., Any]], Law]:
    """Make the law ``crash.NAME`` of the function below. ``scenarios``: the fields of cases but for the state, with how
    many states of each are tried where the chapter is asked for by itself; ``smoke`` is how many a smoke run tries of
    all."""
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
    return law(f"crash.{name}", control=control, **{**usual, **record})


Saved = Annotated[dict[str, Any], StateField("save")]
Newer = Annotated[dict[str, Any], StateField("save", newer=1)]
Whole = Annotated[dict[str, Any], StateField("load", blank="poison", plain=True)]
NewWhole = Annotated[dict[str, Any], StateField("load", plain=True, newer=1)]
Newest = Annotated[dict[str, Any], StateField("save", newer=2)]
NewestWhole = Annotated[dict[str, Any], StateField("load", plain=True, newer=2)]
Overlapping = Annotated[Overlap, OverlapField()]
Crashing = Annotated[Crash, CrashField()]
CrashingLater = Annotated[Crash, CrashField(returned=True)]
SyncingWriter = Annotated[Callable[..., Any], SyncingWriterField()]
CrashingObjects = Annotated[ObjectCrash | CountedObjectCrash, ObjectCrashField()]
CrashingObjectsLater = Annotated[ObjectCrash | CountedObjectCrash, ObjectCrashField(returned=True)]
