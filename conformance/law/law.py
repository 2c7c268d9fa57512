"""A law: a statement that must hold for every input of a kind, with everything needed to try it.

A law is data. A ``check`` is a plain function ``check(case, here)``, SPMD code that every rank runs. It names no device, backend or
storage. It records deviations on ``here`` (:class:`shardlaw.conformance.rank.context.RankContext`) instead of raising: a rank that stopped
early would leave the others waiting in a collective.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.target import DTYPES

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
# in these chapters one drawn case in five may need a world of up to ``Limits.larger`` ranks
LARGER_WORLD_CHAPTERS = frozenset({"redistribute", "gradient", "op", "module", "roundtrip"})


@dataclass(frozen=True)
class Limits:
    """What the target and the request allow in a case. Where ``larger`` exceeds ``world_size``, a few drawn cases of the chapters
    :data:`LARGER_WORLD_CHAPTERS` may need that many ranks."""

    world_size: int = 4
    dtypes: tuple[str, ...] = DTYPES
    cannot: frozenset[str] = frozenset()
    larger: int = 0

    @property
    def most(self) -> int:
        """The largest number of ranks of a case."""
        return max(self.world_size, self.larger)


@dataclass(frozen=True)
class EarlyRefusal:
    """Which refusals a law allows on a release of torch that may lack what the law is about: its own, and that of its control case."""

    allowed: Refusal

    def __call__(self, case: Case, text: str) -> bool:
        return self.allowed(case, text) if callable(self.allowed) else self.allowed != "never"


@dataclass(frozen=True)
class Law:
    """One entry of the catalogue.

    ``id``: ``chapter.name`` or ``chapter.name[variant]``. ``clause``: one sentence. ``source``: where the promise is made.
    ``needs``: capabilities (a target that declares one as missing leaves the law ``untested``). ``smallest``: the fewest ranks on
    which it can be tried. ``weight``: its share of a budget. ``profile``: the smallest profile that tries it. ``control``: the text of a
    case that must hold.

    Cases. ``draw``: a Hypothesis strategy, of which a ``smoke`` run draws ``draws`` cases. ``sweep``: an enumerator, of which it takes the
    first ``sweeps`` cases, or ``alone`` of them in a run of this chapter only. ``narrow``: a strategy of cases no larger than a given one,
    to shrink a case of the sweep. ``plainer``: a simpler notation of the case of a verdict. ``features``: features of a case beyond those
    that :mod:`shardlaw.conformance.law.features.features` reads from its fields. ``checks``: how many questions a case stands for.

    Running. ``acts``: made by :func:`shardlaw.conformance.law.act.law`. ``members``: true where ranks outside the case's first mesh do not
    call the act, or a function of the case and the stage that returns the ranks that do. ``stages``: the sizes of the worlds in which a
    case runs one after the other (``here.stage`` is the current one). ``own_world``: whether a case has worlds in which no other case
    runs, since it depends on what ranks did before, or leaves them unlike each other. A law that acts cannot express has a ``check`` and a
    ``script``, with the ``reason``, and declares the ``fields`` of its cases with their annotations. ``seconds``: for how long a case may
    use the CPU, or wait for a process that does, where that is longer than the target's limit.

    ``refusal``: whether all ranks may refuse a case, or a function of the case and the error text that decides it; ``lost``: earlier
    releases of torch refuse no case, so a refusal is lost support.
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
    own_world: Callable[[Case], bool] | None = None
    features: Callable[[Case], set[str]] | None = None
    script: Callable[[Case], Script] | None = None
    checks: Callable[[Case], int] | None = None
    seconds: float = 0.0
    aliases: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        """Give every case of ``draw``, ``sweep`` and ``narrow`` this law's id."""
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
        """Decorate the due function of the last act."""
        self.acts[-1].set_due(function)
        return function

    def then(self, function: Callable[..., Any]) -> Law:
        """Decorate the act of the next world, for a law with ``stages``."""
        self.acts.append(type(self.acts[0]).from_function(function))
        return self

    def member_ranks(self, case: Case, stage: int = 0) -> Collection[int] | None:
        """The ranks that call the act and are compared; None for all."""
        if callable(self.members):
            return self.members(case, stage)
        return case.meshes[0].ranks if self.members and case.meshes else None

    def worlds(self, case: Case) -> tuple[int, ...]:
        """The sizes of the worlds in which a case runs, one after the other."""
        return self.stages(case) if self.stages else (max(case.world, self.smallest),)

    def needs_own_world(self, case: Case) -> bool:
        """Whether a case runs in new worlds that run no other case."""
        return self.own_world is not None and self.own_world(case)

    def case_strategy(self, limits: Limits) -> SearchStrategy[Case]:
        """The strategy :attr:`draw`, in one case of five with a larger world where the limits and the chapter allow it."""
        from hypothesis import strategies as st

        assert self.draw is not None
        usual = self.draw(limits)
        if limits.most == limits.world_size or self.chapter not in LARGER_WORLD_CHAPTERS:
            return usual
        larger = self.draw(replace(limits, world_size=limits.larger))
        return st.integers(1, 5).flatmap(lambda turn: larger if turn == 5 else usual)

    def with_no_refusal_allowed(self) -> Law:
        """The same law where any refusal is lost support."""
        return self._with_refusal("lost")

    def for_earlier_release(self) -> Law:
        """The same law for a release of torch that may lack support: the control case may be refused too, if any case may."""
        return self._with_refusal(EarlyRefusal(self.refusal)) if self.refusal != "never" else self

    def _with_refusal(self, refusal: Refusal) -> Law:
        same = copy(self)  # not ``replace``, which would wrap ``draw``, ``sweep`` and ``narrow`` again: one seed must give the same cases
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
    """The cases of an enumerator with another law's id, computed lazily."""

    def __init__(self, cases: Sequence[Case], relabel: Callable[[Case], Case]) -> None:
        self._cases, self._relabel = cases, relabel

    def __len__(self) -> int:
        return len(self._cases)

    @property
    def combinations(self) -> int:
        """How many cases the full cross product has; 0 where it is unknown."""
        return getattr(self._cases, "combinations", 0)

    def __getitem__(self, at: Any) -> Any:
        return [self._relabel(case) for case in self._cases[at]] if isinstance(at, slice) else self._relabel(self._cases[at])
