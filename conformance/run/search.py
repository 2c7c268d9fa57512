"""The search: Hypothesis draws cases with a fixed seed, worlds judge them in batches, and each new signature is shrunk separately.

In the first pass no example fails: cases are drawn, fed to the pool, and their verdicts are stored by case. Then, for one signature at a
time, the same seed is replayed with the stored verdicts, and only that signature fails, so that only shrink candidates reach a world. A
deviation that the enumerator or a list found is shrunk in the same way, over the law's ``narrow`` strategy (cases no larger than the one
found), or over what the law draws.

Three in four of the drawn cases that a known finding covers are skipped, and other cases are drawn instead.
"""

from __future__ import annotations

import hashlib
import itertools
import random
import time
import zlib
from collections.abc import Callable, Collection, Sequence
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
COVERED_STRIDE = 4  # of the covered cases one in so many is tried
MAX_ROUNDS = 4
BLOCK_DRAWS = 500  # a law that draws more cases draws them in blocks, each with seeds of its own


def never(case: Case) -> bool:
    """The condition that no case meets."""
    return False


class StopDrawing(BaseException):
    """Stops :func:`draw` early. Not an ``Exception``: Hypothesis would treat that as a failing example."""


def law_seed(seed: int, law_id: str) -> int:
    """The seed for the draws of one law; depends on the seed of the run and the law id only."""
    return int.from_bytes(hashlib.sha256(f"{seed} {law_id}".encode()).digest()[:6], "big")


def draw(strategy: SearchStrategy[Case], seed: int, count: int, take: Callable[[Case], None], *, shrink: bool = False) -> None:
    """Call ``take`` with up to ``count`` cases of ``strategy``: the same cases in the same order for the same arguments.

    Raises what ``take`` raises; with ``shrink`` an ``Exception`` is shrunk first.
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
    def run_example(case: Case) -> None:
        try:
            take(case)
        except Exception as error:
            if shrink:
                raise
            raised.append(error)  # else Hypothesis would repeat the case and report what does not repeat as flaky
            raise StopDrawing from None

    try:
        run_example()
    except StopDrawing:
        if raised:
            raise raised[0] from None
        raise


@dataclass
class Plan:
    """The cases of one law in a run: its ``share`` of enumerated and drawn cases, or one shard of them.

    :meth:`feed` sets ``number`` (cases generated so far, over all shards, from 1), ``swept`` (how many of them the enumerator generated)
    and ``combinations`` (how many it could generate; 0 if it does not say). ``is_covered`` says whether a known finding covers a case: for
    each covered case that is skipped, another is drawn in a further round. ``rounds`` has seed and number of draws of each round. A case
    belongs to a shard by its number or, if the law draws several blocks, with its block: a shard draws its own blocks alone.
    In a certified run ``certified_cases`` are the only cases."""

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
        """The plan of a law in a run with this ``seed``; without a ``share`` it has all cases of the profile."""
        return cls(law, limits, law_seed(seed, law.id), share or full_share(law, profile), shard)

    def is_skipped(self, case: Case) -> bool:
        """Whether a drawn case is replaced by another one. Depends on its text only, so that every run with these expectations agrees."""
        return zlib.crc32(case.text.encode()) % COVERED_STRIDE != 0 and self.is_covered(case)

    def feed(self, take: Callable[[Case, bool], None], *, drawn: bool = True) -> None:
        """Call ``take(case, is_drawn)`` for every case of the plan, in order; without ``drawn`` for those alone that are not drawn.
        ``take`` may raise :class:`StopDrawing`."""
        self.number = 0
        self.rounds.clear()
        seen: set[Case] = set()
        draws, indices = int(self.share.draws + random.Random(self.seed).random()), self.share.indices
        remaining = 0

        def offer(case: Case, is_drawn: bool) -> None:
            self.number += 1
            if case in seen:
                return
            seen.add(case)  # of all shards: a case that is generated twice belongs to one shard
            in_shard = self._in_shard(self.number) or (is_drawn and draws > BLOCK_DRAWS)
            if in_shard and case.world <= self.limits.most:
                take(case, is_drawn)

        def offer_drawn(case: Case) -> None:
            nonlocal remaining
            if self.is_skipped(case):
                remaining += 1
            else:
                offer(case, True)

        if self.certified_cases is not None:
            for case in self.certified_cases:
                offer(case, False)
            return
        if self.law.sweep is not None and self.share.sweeps:
            cases = self.law.sweep(self.limits)
            for index, case in enumerate(itertools.islice(cases, self.share.sweeps)):
                if indices is None or index in indices:
                    self.swept += 1
                    offer(case, False)
            self.combinations = getattr(cases, "combinations", 0)
        for case in self.share.cases_within(self.limits):
            offer(case, False)
        if self.law.draw is None or not draws or not drawn:
            return
        strategy = self.law.case_strategy(self.limits)
        for block, start in enumerate(range(0, draws, BLOCK_DRAWS)):
            before, size = self.number, min(BLOCK_DRAWS, draws - start)
            if draws <= BLOCK_DRAWS or self._in_shard_with_block(block):
                remaining, first_seed = size, self.seed + block * MAX_ROUNDS
                for seed in range(first_seed, first_seed + MAX_ROUNDS):
                    self.rounds.append((seed, remaining))
                    remaining = 0
                    draw(strategy, *self.rounds[-1], offer_drawn)
                    if not remaining:
                        break
            self.number = before + size

    def listed_at(self, places: Collection[int]) -> list[Case]:
        """The listed cases at these places of the share, without those that the enumerator or the target does not have."""
        cases = self.law.sweep(self.limits) if self.law.sweep is not None else []
        swept = [cases[place] for place in sorted(places) if place < min(self.share.sweeps, len(cases))]
        return [*swept, *self.share.cases_within(self.limits, places)]

    def _in_shard(self, number: int) -> bool:
        """Whether the case with this number belongs to the shard. Decided by a hash: an enumerator's periodic pattern, or the first case of
        every law, must not all go to one shard."""
        part, parts = self.shard
        return parts == 1 or zlib.crc32(f"{self.law.id} {number}".encode()) % parts == part - 1

    def _in_shard_with_block(self, block: int) -> bool:
        """Whether the cases that a block draws belong to the shard. Blocks go round the shards; laws begin with different ones."""
        part, parts = self.shard
        return (block + zlib.crc32(self.law.id.encode())) % parts == part - 1


@dataclass
class ShrinkResult:
    """The smallest case found with a signature. ``minimal``: the search for a smaller one was completed."""

    case: Case
    verdict: Verdict
    minimal: bool
    calls: int


class _SignatureReproduced(Exception):
    """The current example has the signature that is being shrunk."""


@dataclass
class Shrinker:
    """Shrinks one signature of one law, using the verdicts of the first pass (``memory``).

    A verdict for which ``is_known`` is true (an expectation covers it) does not count: a new fault must not shrink into a known one.
    """

    plan: Plan
    pool: Pool
    memory: dict[Case, Verdict]
    seconds: float = SHRINK_SECONDS
    is_known: Callable[[Verdict], bool] = lambda verdict: False
    calls: int = field(default=0, init=False)

    def shrink(self, first: Verdict, is_drawn: bool) -> ShrinkResult:
        """The smallest case with the signature of ``first``. ``is_drawn``: its case was drawn, not enumerated."""
        law = self.plan.law
        start = ShrinkResult(first.case, first, False, 0)
        self._deadline = time.monotonic() + self.seconds
        if is_drawn and law.draw is not None:
            strategy = law.case_strategy(self.plan.limits)
            found = (self._replay(strategy, *drawn, first.signature, self.plan.is_skipped) for drawn in self.plan.rounds)
            return next(filter(None, found), start)
        if law.narrow is None and law.draw is None:
            return start
        strategy = law.narrow(first.case) if law.narrow else law.case_strategy(self.plan.limits)
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
        """The shortest judged case of ``near`` with the signature of ``first``; ``None`` if none has it."""
        shown = [case for case in near if case in self.memory and self._reproduces(self.memory[case], first.signature)]
        best = min(shown, key=lambda case: (case.world, len(case.text), case.text), default=None)
        return None if best is None else ShrinkResult(best, self.memory[best], False, self.calls)

    def _reproduces(self, verdict: Verdict, signature: str) -> bool:
        return verdict.signature == signature and not self.is_known(verdict)

    def _run_cases(self, cases: Sequence[Case]) -> None:
        self.calls += len(cases)
        for case, verdict in zip(cases, self.pool.check(self.plan.law, list(cases)), strict=True):
            self.memory[case] = verdict

    def _replay(
        self,
        strategy: SearchStrategy[Case],
        seed: int,
        count: int,
        signature: str,
        skip: Callable[[Case], bool] = never,
    ) -> ShrinkResult | None:
        """Draw again and let Hypothesis shrink to the smallest case. ``skip``: cases to pass over until the signature has occurred."""
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
        except (StopDrawing, Flaky):  # Flaky: a verdict that did not repeat
            minimal = False
        return None if best is None else ShrinkResult(best.case, best, minimal, self.calls)


def reduce_history(history: Sequence[Case], shows: Callable[[tuple[Case, ...]], bool], deadline: float) -> tuple[Case, ...]:
    """Reduce ``history`` to the cases that ``shows`` needs, by delta debugging; the last cases are tried first."""
    needed, parts = tuple(history), 2
    while len(needed) >= 1 and time.monotonic() < deadline:
        size = max(1, -(-len(needed) // parts))
        pieces = [needed[at : at + size] for at in range(0, len(needed), size)]
        smaller = _first_reproducing(pieces, needed, shows, deadline)
        if smaller is not None:
            needed, parts = smaller, max(2, min(parts, len(smaller)))
        elif size == 1:
            break
        else:
            parts = min(len(needed), parts * 2)
    return needed


def _first_reproducing(
    pieces: list[tuple[Case, ...]], needed: tuple[Case, ...], shows: Callable[[tuple[Case, ...]], bool], deadline: float
) -> tuple[Case, ...] | None:
    candidates: list[tuple[Case, ...]] = list(reversed(pieces))
    if len(pieces) > 2:
        candidates += [tuple(case for other in pieces if other is not piece for case in other) for piece in reversed(pieces)]
    for candidate in candidates:
        if time.monotonic() > deadline:
            return None
        if len(candidate) < len(needed) and shows(candidate):
            return candidate
    return None
