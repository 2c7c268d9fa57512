"""A run: tries the selected laws one after the other on one target, and writes down what it finds.

pytest is the runner: each of its items calls :meth:`Run.try_law`. A listener is notified of the progress.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from shardlaw.conformance.errors import UsageError
from shardlaw.conformance.law.verdict import finding_id
from shardlaw.conformance.run.request import PROFILES, RunRequest
from shardlaw.conformance.run.shares import law_share, smoke_shares
from shardlaw.conformance.run.state import Finding, LawResult, Listener, RunState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shardlaw.conformance.law.case import Case
    from shardlaw.conformance.law.law import Law
    from shardlaw.conformance.law.target import Target
    from shardlaw.conformance.run.law_run import LawRun
    from shardlaw.conformance.run.search import Plan
    from shardlaw.conformance.world import Pool

LAWS_AHEAD = 4  # for each world of one size; their cases are sent before their turn
SHRINK_TOTAL_SECONDS = {"smoke": 90.0, "ci": 240.0, "nightly": 1800.0}


class Run(RunState):
    """One run, from its request to its exit code. ``start.py`` creates it, :meth:`close` ends its processes. Raises :class:`UsageError`."""

    def __init__(self, request: RunRequest, target: Target, listener: Listener, pool: Pool) -> None:
        import torch

        from shardlaw.conformance.law.law import Limits
        from shardlaw.conformance.law.selection import select
        from shardlaw.conformance.law.target import TOLERANCE
        from shardlaw.conformance.laws import catalogue, find
        from shardlaw.conformance.run import expectations
        from shardlaw.conformance.run.certified_profile import read_profile
        from shardlaw.conformance.run.supported import for_installed_torch, supported_laws

        known_laws = list(catalogue().values())
        certified = read_profile(request.certify) if request.certify else None
        backend_expectations = None
        if certified is not None:
            if target.tolerance != TOLERANCE:
                raise UsageError(f"--certify {request.certify}: target {target.name} has a tolerance of its own: want none")
            laws, shrink_seconds = [find(law_id) for law_id in certified.laws], 0.0
            expected, backend_expectations = expectations.load_for_certificate(known_laws, torch.__version__, target.name)
        else:
            laws, shrink_seconds = select(known_laws, request.laws, request.ops), SHRINK_TOTAL_SECONDS[request.profile]
            files = [] if request.no_expect else expectations.expectation_files(target, request.expect)
            given = expectations.given_files(target, request.expect)
            expected = expectations.load(files, known_laws, torch.__version__, target.name, given)
            expected.chosen = frozenset(smoke_shares() if request.uses_smoke_shares else ())
        stored = _read_stored_cases(request.known, {law.id for law in laws})
        super().__init__(request, target, [*map(for_installed_torch, laws)], expected, stored, shrink_seconds)
        self.supported = supported_laws(torch.__version__, request.profile)
        self.certified, self.backend_expectations = certified, backend_expectations
        self.pool = pool
        self.limits = Limits(
            request.world_size, target.dtypes, frozenset(target.cannot), request.larger_world_size if target.device == "cpu" else 0
        )
        self.listener = listener
        listener.on_run_begin(self)
        self._is_one_chapter = len({law.chapter for law in laws}) == 1
        self._law_runs_ahead: dict[str, LawRun] = {}
        self._first_law = ""  # the law that :meth:`scout` found to deviate
        self._last_turn_end = self.clock
        self._last_write = self._write_seconds = 0.0

    def scout(self) -> None:
        """If the run stops at its first finding, find a law that deviates and put it, with the case that does, first."""
        from shardlaw.conformance.run.scout import Scout
        from shardlaw.conformance.world import WorldError

        request = self.request
        if not request.exitfirst or request.budget is not None or request.shard != (1, 1) or self.certified is not None:
            return
        plans = [self._plan(self.results[law.id].law) for law in self.laws if self._why_untested(law) is None]
        try:
            wrong = Scout(self, self.pool, self.listener).find_deviation(plans)
        except WorldError:  # try_law reports it
            return
        if wrong is not None:
            self._first_law = wrong.law
            self.laws.sort(key=lambda law: law.id != wrong.law)
            self.stored_cases.setdefault(wrong.law, []).insert(0, wrong)

    def try_law(self, law: Law, following: Iterable[Law] = ()) -> LawResult:
        """Try one law: its stored findings, its enumerated and its drawn cases; then shrink and confirm what is new.

        ``following`` are the laws of the next calls, in order. While the verdicts of this law are pending, their cases are sent too, so
        that a world which waits for a silent rank does not leave the others idle."""
        result = self.results[law.id]
        law_run = self._law_runs_ahead.pop(law.id, None)
        if law_run is None or self.stopped_by:
            law_run = self._make_law_run(law)
        if law_run is not None:
            self.listener.on_law_begin(law.id)
            try:
                law_run.begin_turn()
                law_run.feed()
                # with a budget a law's time begins with its turn; after scout() found a deviation nothing may delay it
                if self.request.budget is None and law.id != self._first_law:
                    self._feed_ahead(itertools.islice(following, LAWS_AHEAD * self.pool.worlds_per_size))
                law_run.finish()
            except Exception as error:
                # the run ends here: later laws are untested, findings so far are kept
                from shardlaw.conformance.world import WorldError
                from shardlaw.conformance.world.launch import LostError

                self.failure = error
                self.stopped_by, result.reason = "an error of the harness", "the run broke here"
                if isinstance(error, LostError):
                    self.stopped_by, result.reason = "a lost host", f"the run broke here: {error}"
                elif isinstance(error, WorldError) and not self.judged:
                    self.stopped_by, result.reason = "a target that cannot start", "the run broke here: the target cannot start"
            finally:
                law_run.add_expected_findings()
            result.seconds = time.monotonic() - self._last_turn_end
        self._last_turn_end = time.monotonic()
        self.listener.on_law_end(result)
        self._write_if_due()
        return result

    def _feed_ahead(self, laws: Iterable[Law]) -> None:
        for law in laws:
            if law.id not in self._law_runs_ahead and (law_run := self._make_law_run(law)) is not None:
                self._law_runs_ahead[law.id] = law_run
                law_run.feed()

    def _make_law_run(self, law: Law) -> LawRun | None:
        """Create the :class:`LawRun` of a law; ``None`` if the law cannot be tried, with the reason in its result."""
        from shardlaw.conformance.run.law_run import LawRun

        result = self.results[law.id]
        law, result.reason = result.law, self._why_untested(law)  # result.law has the refusals of the installed torch
        if result.reason is not None:
            return None
        seconds = self._law_seconds(law) if self.request.budget else float("inf")
        return LawRun(self, self.pool, self.listener, self.add_finding, self._plan(law), seconds)

    def _plan(self, law: Law) -> Plan:
        from shardlaw.conformance.law.features.features import features_of
        from shardlaw.conformance.run.search import Plan

        share = law_share(law, self.request, is_one_chapter=self._is_one_chapter)
        plan = Plan.for_law(law, self.limits, self.request.seed, self.request.profile, self.request.shard, share)
        plan.is_covered = lambda case: self.expectations.covers(case, features_of(case, law))
        plan.certified_cases = self.certified.laws[law.id] if self.certified is not None else None
        return plan

    def _why_untested(self, law: Law) -> str | None:
        missing = sorted(set(law.needs) & self.limits.cannot)
        if missing:
            if missing == ["checkpoint_files"] and self.target.writer:
                return f"storage {self.target.storage} cannot do checkpoint_files: what it keeps is no folder of files"
            return f"the target declares that it cannot do {', '.join(missing)}"
        if PROFILES.index(law.profile) > PROFILES.index(self.request.profile):
            return f"tried from profile {law.profile} on"
        if law.smallest > self.request.world_size:
            return f"needs {law.smallest} ranks, the largest world has {self.request.world_size}"
        if self.stopped_by and not (self.stopped_by == "budget" and self._budget_left() > 0):  # the budget of one law ends no other
            return f"the run was ended before it, by {self.stopped_by}"
        return None

    def add_finding(self, found: Finding) -> None:
        """Add a finding to the report. If its id is taken (the cases differ in a field that is no feature), it gets another."""
        if any(found.id == other.id for other in self.findings):
            found = replace(found, id=finding_id(found.signature, (*found.features, found.case.text)))
        is_first = found.status == "new" and not any(other.status == "new" for other in self.findings)
        self.findings.append(found)
        self.listener.on_finding(found, self)
        if is_first:
            self.write()
        else:
            self._write_if_due()

    def _budget_left(self) -> float:
        """Seconds of the budget that are left."""
        assert self.request.budget is not None
        return self.request.budget if self.budget_start is None else max(0.0, self.request.budget - (time.monotonic() - self.budget_start))

    def _law_seconds(self, law: Law) -> float:
        """Seconds for this law: its share, by weight, of the budget that earlier laws left."""
        at = self.laws.index(law)
        return self._budget_left() * law.weight / sum(later.weight for later in self.laws[at:])

    def probe(self) -> None:
        """Try on two ranks the capabilities that the target declares missing; for a certificate also query the loaded versions."""
        from shardlaw.conformance.run.certified_profile import query_loaded
        from shardlaw.conformance.target.probe import stale_declarations

        if self.judged and self.failure is None and not self.request.exitfirst:
            self.stale = stale_declarations(self.pool, self.target)
            self.loaded = query_loaded(self.pool, self.target) if self.certified is not None else {}

    def exit_code(self) -> int:
        """1 for a new finding (with ``--strict`` also for a stale or too wide expectation), 2 if no case was judged, 3 for an error of the
        harness, else 0."""
        advisory = {law.id for law in self.laws if law.tier == "advisory"}
        if any(found.status == "new" and found.law not in advisory for found in self.findings):
            return 1
        if not self.judged:
            return 3 if self.errors else 2
        stale = any(self.expectations.has_stale(law.id) for law in self.laws)
        if self.request.strict and (stale or self.too_wide()):
            return 1
        return 3 if self.errors or self._has_unjudged_cases() else 0

    def _has_unjudged_cases(self) -> bool:
        """Whether a certified run lacks the verdict of a case that the target does not declare out of reach."""
        tried = (self.results[law.id] for law in self.laws if not set(law.needs) & set(self.target.cannot))
        listed = self.certified.laws if self.certified is not None else {}
        return any(case.text not in self.verdict_words for result in tried for case in listed.get(result.law.id, ()))

    def write(self, exit_code: int | None = None) -> None:
        """Write ``report.json`` with the state so far; with an ``exit_code`` the report is final."""
        began = time.monotonic()
        if exit_code is not None:
            for result in self.results.values():
                if result.outcome in ("held", "stale"):
                    result.outcome = "stale" if self.expectations.has_stale(result.law.id) else "held"
        self.listener.write_report(self, exit_code)
        self._last_write = time.monotonic()
        self._write_seconds = self._last_write - began

    def _write_if_due(self) -> None:
        """Write at most once a second, and spend at most a fiftieth of the time on it."""
        if time.monotonic() - self._last_write > max(1.0, 50 * self._write_seconds):
            self.write()

    def close(self) -> None:
        """End every process of the run."""
        self.pool.close()


def _read_stored_cases(folder: Path | None, laws: set[str]) -> dict[str, list[Case]]:
    """Read the cases of stored findings, by law. A run tries them before it draws any."""
    from shardlaw.conformance.run.finding_file import read_cases

    found: dict[str, list[Case]] = {}
    for case in read_cases(folder) if folder is not None else ():
        if case.law in laws:
            found.setdefault(case.law, []).append(case)
    return found
