"""A law: a statement that must hold for every input of a kind, with everything needed to try it.

A law is data. Its ``check`` is a plain function ``check(case, here)``: SPMD code that every rank runs, that names no device,
backend or storage, and that says what it finds through ``here`` (see :class:`shardlaw.conformance.rank.context.RankContext`). It returns
nothing and does not raise for a deviation: it goes on, so that no rank leaves the others waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from shardlaw.conformance.law.case import Case

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from shardlaw.conformance.law.script import Script
    from shardlaw.conformance.law.verdict import Verdict
    from shardlaw.conformance.rank.context import RankContext

CHAPTERS = ("mesh", "layout", "collective", "redistribute", "op", "gradient", "random", "module", "plan", "roundtrip",
            "crash", "sharded_tensor", "optimizer", "engine", "fault")  # fmt: skip
Tier = Literal["core", "extended", "advisory"]
Refusal = Literal["never", "allowed", "lost"] | Callable[[Case, str], bool]
Profile = Literal["smoke", "ci", "nightly"]


# the chapters of which one drawn case in five may take the larger world that a run allows
LARGER_WORLD_CHAPTERS = frozenset({"redistribute", "gradient", "op", "module", "roundtrip"})


@dataclass(frozen=True)
class Limits:
    """What the target and the request allow a case to be: ``larger`` ranks, where that is more than ``world_size``, few of the drawn cases
    of the chapters :data:`LARGER`."""

    world_size: int = 4
    dtypes: tuple[str, ...] = ("float32", "float64", "bfloat16", "int64", "int32", "uint8", "bool")
    cannot: frozenset[str] = frozenset()
    larger: int = 0

    @property
    def most(self) -> int:
        """How many ranks a case has at most."""
        return max(self.world_size, self.larger)


@dataclass(frozen=True)
class EarlyRefusal:
    """The refusals of a law on a release that may be earlier than what it asks for: those that are allowed, and that of its control."""

    allowed: Refusal

    def __call__(self, case: Case, text: str) -> bool:
        return self.allowed(case, text) if callable(self.allowed) else self.allowed != "never"


@dataclass(frozen=True)
class Law:
    """One entry of the catalogue.

    ``id``: ``chapter.name`` or ``chapter.name[variant]``. ``clause``: one sentence. ``source``: where the promise is made.
    ``needs``: capabilities (a target that declares one as missing leaves the law ``untested``). ``smallest``: the fewest ranks on
    which it says something. ``weight``: its share of a budget. ``draw``: a Hypothesis strategy of cases, of which a ``smoke``
    run draws ``draws``; ``sweep``: an enumerator whose first ``sweeps`` cases it takes, or ``alone`` of them in a run
    of this chapter alone. ``narrow``: a strategy of cases no larger than a given one, to shrink what the sweep found. ``plainer``: the same
    case in plainer words, which its verdict tells. ``profile``: the smallest that tries it. ``control``: the text of a case that
    must hold. ``refusal``: whether all ranks may refuse a
    case alike, or a function of the case and of what is said that tells; ``lost``: earlier releases of torch refuse none, so that a
    refusal is support that was lost.
    ``stages``: world sizes, one after the other, for a law whose case runs in several worlds (``here.stage`` tells which).
    ``features``: features of a case beyond those that :mod:`shardlaw.conformance.law.features.features` reads from its fields.
    ``acts``: what :func:`shardlaw.conformance.law.act.law` makes of functions of plain torch code; ``members``: whether ranks outside the
    case's first mesh take no part in them, or which ranks of a case take part in a stage. A law that cannot be told so has a ``check`` and
    a ``script`` of its own, with the ``reason``, and names
    the ``fields`` of its cases with their annotations.
    ``script``: the literal body of a reproducer. ``checks``: how many questions a case stands for, where that is more than one.
    ``seconds``: for how long a case may use the CPU, or wait for a process that does, where that is longer than the target's limit.
    """

    id: str
    clause: str
    source: str
    control: str
    check: Callable[[Case, RankContext], None] | None = None
    acts: list[Any] = field(default_factory=list, compare=False)
    members: bool | Callable[[Case, int], Collection[int]] = False
    reason: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)
    draw: Callable[[Limits], SearchStrategy[Case]] | None = None
    draws: float = 0
    sweep: Callable[[Limits], Sequence[Case]] | None = None
    sweeps: int = 0
    alone: int = 0
    narrow: Callable[[Case], SearchStrategy[Case]] | None = None
    plainer: Callable[[Verdict], Case | None] | None = None
    profile: Profile = "smoke"
    tier: Tier = "core"
    needs: tuple[str, ...] = ()
    smallest: int = 2
    weight: float = 1.0
    refusal: Refusal = "never"
    stages: Callable[[Case], tuple[int, ...]] | None = None
    features: Callable[[Case], set[str]] | None = None
    script: Callable[[Case], Script] | None = None
    checks: Callable[[Case], int] | None = None
    seconds: float = 0.0
    aliases: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        """Whatever makes cases, the cases are this law's."""
        draw, sweep, narrow = self.draw, self.sweep, self.narrow
        if draw is not None:
            object.__setattr__(self, "draw", lambda limits: draw(limits).map(self._relabel))
        if sweep is not None:
            object.__setattr__(self, "sweep", lambda limits: RelabeledCases(sweep(limits), self._relabel))
        if narrow is not None:
            object.__setattr__(self, "narrow", lambda case: narrow(case).map(self._relabel))

    def _relabel(self, case: Case) -> Case:
        return case if case.law == self.id else replace(case, law=self.id)

    def due(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Decorates what the last act must give: a function of the reference, with parameters of the same names."""
        self.acts[-1].set_due(function)
        return function

    def then(self, function: Callable[..., Any]) -> Law:
        """Decorates the act of the next world, of a law whose cases run in several (``stages``)."""
        self.acts.append(type(self.acts[0]).from_function(function))
        return self

    def member_ranks(self, case: Case, stage: int = 0) -> Collection[int] | None:
        """The ranks that act and are judged, where not all do."""
        if callable(self.members):
            return self.members(case, stage)
        return case.meshes[0].ranks if self.members and case.meshes else None

    def worlds(self, case: Case) -> tuple[int, ...]:
        """The sizes of the worlds that a case runs in, one after the other."""
        return self.stages(case) if self.stages else (max(case.world, self.smallest),)

    def case_strategy(self, limits: Limits) -> SearchStrategy[Case]:
        """What :attr:`draw` gives, in larger worlds now and then."""
        from hypothesis import strategies as st

        assert self.draw is not None
        usual = self.draw(limits)
        if limits.most == limits.world_size or self.chapter not in LARGER_WORLD_CHAPTERS:
            return usual
        larger = self.draw(replace(limits, world_size=limits.larger))
        return st.integers(1, 5).flatmap(lambda turn: larger if turn == 5 else usual)

    def with_no_refusal_allowed(self) -> Law:
        """The same law on a torch that has to refuse no case of it."""
        return self._with_refusal("lost")

    def for_earlier_release(self) -> Law:
        """The same law on a torch of which nobody knows whether it supports what a later one does."""
        return self._with_refusal(EarlyRefusal(self.refusal)) if self.refusal != "never" else self

    def _with_refusal(self, refusal: Refusal) -> Law:
        same = copy(self)  # what makes its cases is as it was, so that one seed gives the same
        object.__setattr__(same, "refusal", refusal)
        return same

    @property
    def chapter(self) -> str:
        return self.id.split(".")[0]

    @property
    def name(self) -> str:
        """The id without its variant: ``op.forward`` of ``op.forward[mean]``."""
        return self.id.partition("[")[0]

    @property
    def variant(self) -> str:
        return self.id.partition("[")[2].removesuffix("]")


class RelabeledCases(Sequence[Case]):
    """The cases of an enumerator as those of one law, each made when it is asked for."""

    def __init__(self, cases: Sequence[Case], named: Callable[[Case], Case]) -> None:
        self._cases, self._named = cases, named

    def __len__(self) -> int:
        return len(self._cases)

    @property
    def combinations(self) -> int:
        """How many cases there were if everything were combined with everything; 0 where nobody has counted."""
        return getattr(self._cases, "combinations", 0)

    def __getitem__(self, at: Any) -> Any:
        return [self._named(case) for case in self._cases[at]] if isinstance(at, slice) else self._named(self._cases[at])
