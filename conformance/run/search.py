"""The search: Hypothesis draws cases under a fixed seed, worlds judge them in batches, and each new signature is shrunk apart.

Hypothesis never sees a failure that was not asked for. In the first pass nothing fails: cases are drawn, fed to the pool and
remembered with their verdicts. Then, for one signature at a time, the same seed is replayed from memory and only that signature
fails, so that only shrink candidates reach a world. What the enumerator or a list found is shrunk in the same way, over the law's
``narrow`` strategy, cases no larger than the one found, or else over what the law draws.

Strategies know of no faults. Of the drawn cases that a known finding covers, three in four are passed over, and others drawn for them.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.law import Law, Limits
from shardlaw.conformance.law.verdict import Verdict
from shardlaw.conformance.run.shares import Share, full_share

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from shardlaw.conformance.world import Pool

SHRINK_SECONDS = 10.0
NARROW_DRAWS = 80
NARROW_BATCH = 10
COVERED_STRIDE = 4  # one in so many
MAX_ROUNDS = 4


def never(case: Case) -> bool:
    """Of no case."""
    return False


class StopDrawing(BaseException):
    """Ends a drawing early. No ``Exception``: Hypothesis would take one for a failing example."""


def law_seed(seed: int, law_id: str) -> int:
    """The seed of one law's draws: a function of the run's seed and the law alone."""
    return int.from_bytes(hashlib.sha256(f"{seed} {law_id}".encode()).digest()[:6], "big")


def draw(strategy: SearchStrategy[Case], seed: int, count: int, take: Callable[[Case], None], *, shrink: bool = False) -> None:
    """Give ``take`` up to ``count`` cases of ``strategy``: the same ones, in the same order, for the same arguments.

    Whatever ``take`` raises comes out as it is; with ``shrink`` an ``Exception`` of it is shrunk first.
    """
    import hypothesis
    from hypothesis import HealthCheck, Phase, Verbosity

    phases = (Phase.generate, Phase.shrink) if shrink else (Phase.generate,)
    raised: list[Exception] = []

    @hypothesis.settings(
        max_examples=count,
        phases=phases,
        database=None,
        deadline=None,
        derandomize=False,
        report_multiple_bugs=False,
        print_blob=False,
        suppress_health_check=list(HealthCheck),
        verbosity=Verbosity.quiet,
    )
    @hypothesis.seed(seed)
    @hypothesis.given(strategy)
    def drawn(case: Case) -> None:
        try:
            take(case)
        except Exception as error:
            if shrink:
                raise
            raised.append(error)  # Hypothesis would try the case again, and call what does not repeat flaky
            raise StopDrawing from None

    try:
        drawn()
    except StopDrawing:
        if raised:
            raise raised[0] from None
        raise


@dataclass
class Plan:
    """What one law tries in a run: its ``share`` of enumerated and drawn cases, or one shard of them.

    ``number`` counts, from 1, the cases of all shards that :meth:`feed` came upon, ``swept`` those of them that the enumerator gave, of
    how many ``combinations`` (0 where it does not say). ``covered`` says of a case whether a known finding covers it: what is drawn in the
    place of those that are :meth:`passed_over` comes of further ``rounds``, each the seed and the number of its draws. Of a certified
    profile the ``listed`` cases are all.
    """

    law: Law
    limits: Limits
    seed: int
    share: Share
    shard: tuple[int, int] = (1, 1)
    is_covered: Callable[[Case], bool] = never
    certified_cases: Sequence[Case] | None = None
    rounds: list[tuple[int, int]] = field(default_factory=list, init=False)
    swept: int = field(default=0, init=False)
    combinations: int = field(default=0, init=False)
    number: int = field(default=0, init=False)

    @classmethod
    def for_law(
        cls, law: Law, limits: Limits, seed: int, profile: str, shard: tuple[int, int] = (1, 1), share: Share | None = None
    ) -> Plan:
        """The plan of a run's ``seed``; without a ``share`` all that the profile tries."""
        return cls(law, limits, law_seed(seed, law.id), share or full_share(law, profile), shard)

    def is_skipped(self, case: Case) -> bool:
        """Whether a drawn case is left out for the sake of others: by its text, so that it is in every run with these known findings."""
        return zlib.crc32(case.text.encode()) % COVERED_STRIDE != 0 and self.is_covered(case)

    def feed(self, take: Callable[[Case, bool], None]) -> None:
        """Give ``take`` every case of the plan in order, with whether it was drawn. ``take`` may raise :class:`Enough`."""
        self.number = 0
        self.rounds.clear()
        seen: set[Case] = set()
        left, places = int(self.share.draws + random.Random(self.seed).random()), self.share.indices

        def offer(case: Case, drawn: bool) -> None:
            self.number += 1
            if case in seen:
                return
            seen.add(case)  # those of other shards too: a case that is drawn twice belongs to one of them
            if self._in_shard(self.number) and case.world <= self.limits.most:
                take(case, drawn)

        def offer_drawn(case: Case) -> None:
            nonlocal left
            if self.is_skipped(case):
                left += 1
            else:
                offer(case, True)

        if self.certified_cases is not None:
            for case in self.certified_cases:
                offer(case, False)
            return
        if self.law.sweep is not None and self.share.sweeps:
            cases = self.law.sweep(self.limits)
            for place, case in enumerate(itertools.islice(cases, self.share.sweeps)):
                if places is None or place in places:
                    self.swept += 1
                    offer(case, False)
            self.combinations = getattr(cases, "combinations", 0)
        for case in self.share.cases_within(self.limits):
            offer(case, False)
        if self.law.draw is not None and left:
            strategy = self.law.drawn(self.limits)
            while left and len(self.rounds) < MAX_ROUNDS:
                self.rounds.append((self.seed + len(self.rounds), left))
                left = 0
                draw(strategy, *self.rounds[-1], offer_drawn)

    def _in_shard(self, number: int) -> bool:
        """Whether the shard has the case of this number. Dealt by a hash: what an enumerator repeats at every so many cases must not fall
        to one shard, nor the first case of every law."""
        part, parts = self.shard
        return parts == 1 or zlib.crc32(f"{self.law.id} {number}".encode()) % parts == part - 1


@dataclass
class ShrinkResult:
    """The smallest case found that shows a signature. ``minimal`` says whether the search for a smaller one was finished."""

    case: Case
    verdict: Verdict
    minimal: bool
    calls: int


class _SignatureReproduced(Exception):
    """The case at hand shows the signature that is being shrunk."""


@dataclass
class Shrinker:
    """Shrinks one signature of one law, with the verdicts that the first pass remembered.

    A verdict that is ``known`` (expected) does not show the signature: a new fault must not shrink into an old one.
    """

    plan: Plan
    pool: Pool
    memory: dict[Case, Verdict]
    seconds: float = SHRINK_SECONDS
    is_known: Callable[[Verdict], bool] = lambda verdict: False
    calls: int = field(default=0, init=False)

    def shrink(self, first: Verdict, drawn: bool) -> ShrinkResult:
        """The smallest case with the signature of ``first``, which the drawing (or else the enumerator) came upon."""
        law = self.plan.law
        start = ShrinkResult(first.case, first, False, 0)
        self._deadline = time.monotonic() + self.seconds
        if drawn and law.draw is not None:
            strategy = law.drawn(self.plan.limits)
            found = (self._replay(strategy, *drawn, first.signature, self.plan.is_skipped) for drawn in self.plan.rounds)
            return next(filter(None, found), start)
        if law.narrow is None and law.draw is None:
            return start
        strategy = law.narrow(first.case) if law.narrow else law.drawn(self.plan.limits)
        near: list[Case] = []
        draw(strategy, self.plan.seed, NARROW_DRAWS, near.append)
        unseen = [case for case in dict.fromkeys(near) if case not in self.memory]
        while unseen and time.monotonic() < self._deadline:
            self._run_cases(unseen[:NARROW_BATCH])
            del unseen[:NARROW_BATCH]
        if unseen or not any(self._reproduces(self.memory[case], first.signature) for case in near):
            return self._smallest(near, first) or start
        return self._replay(strategy, self.plan.seed, NARROW_DRAWS, first.signature) or start

    def _smallest(self, near: Sequence[Case], first: Verdict) -> ShrinkResult | None:
        """The shortest of the cases judged near the first one that shows its signature, where there is one."""
        shown = [case for case in near if case in self.memory and self._reproduces(self.memory[case], first.signature)]
        best = min(shown, key=lambda case: (case.world, len(case.text), case.text), default=None)
        return None if best is None else ShrinkResult(best, self.memory[best], False, self.calls)

    def _reproduces(self, verdict: Verdict, signature: str) -> bool:
        return verdict.signature == signature and not self.is_known(verdict)

    def _run_cases(self, cases: Sequence[Case]) -> None:
        self.calls += len(cases)
        for case, verdict in zip(cases, self.pool.judge(self.plan.law, list(cases)), strict=True):
            self.memory[case] = verdict

    def _replay(
        self,
        strategy: SearchStrategy[Case],
        seed: int,
        count: int,
        signature: str,
        skip: Callable[[Case], bool] = never,
    ) -> ShrinkResult | None:
        """The smallest case that this drawing leads to. ``skip``: those that it was not asked for, until the signature has shown."""
        best: Verdict | None = None

        def show(case: Case) -> None:
            nonlocal best
            if case not in self.memory:
                if time.monotonic() > self._deadline:
                    raise StopDrawing
                if case.world > self.plan.limits.most or (best is None and skip(case)):
                    return
                self._run_cases([case])
            verdict = self.memory[case]
            if self._reproduces(verdict, signature):
                best = verdict
                raise _SignatureReproduced

        from hypothesis.errors import Flaky

        minimal = True
        try:
            draw(strategy, seed, count, show, shrink=True)
        except _SignatureReproduced:
            pass
        except StopDrawing:
            minimal = False
        except Flaky:  # a verdict that did not repeat
            minimal = False
        return None if best is None else ShrinkResult(best.case, best, minimal, self.calls)


def reduce_history(history: Sequence[Case], shows: Callable[[tuple[Case, ...]], bool], deadline: float) -> tuple[Case, ...]:
    """The cases of ``history`` that are needed for ``shows`` to hold, by delta debugging; the last ones tried first."""
    kept, parts = tuple(history), 2
    while len(kept) >= 1 and time.monotonic() < deadline:
        size = max(1, -(-len(kept) // parts))
        pieces = [kept[at : at + size] for at in range(0, len(kept), size)]
        smaller = _first_reproducing(pieces, kept, shows, deadline)
        if smaller is not None:
            kept, parts = smaller, max(2, min(parts, len(smaller)))
        elif size == 1:
            break
        else:
            parts = min(len(kept), parts * 2)
    return kept


def _first_reproducing(
    pieces: list[tuple[Case, ...]], kept: tuple[Case, ...], shows: Callable[[tuple[Case, ...]], bool], deadline: float
) -> tuple[Case, ...] | None:
    candidates: list[tuple[Case, ...]] = list(reversed(pieces))
    if len(pieces) > 2:
        candidates += [tuple(case for other in pieces if other is not piece for case in other) for piece in reversed(pieces)]
    for candidate in candidates:
        if time.monotonic() > deadline:
            return None
        if len(candidate) < len(kept) and shows(candidate):
            return candidate
    return None
