"""A run: the laws that were asked for, tried one after the other on one target, with everything that is found written down.

pytest is the runner. :func:`run` starts it on the folder of laws under an ini, a rootdir and a plugin set of its own, so that
nothing of the folder that it is started in leaks in; each item calls :meth:`Run.law`.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conformance import stopping
from conformance.compat import TorchMovedError
from conformance.errors import UsageError
from conformance.request import PROFILES, RunRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from conformance.case import Case
    from conformance.expectations import Entry
    from conformance.findings import Finding
    from conformance.law import Law
    from conformance.verdict import Verdict
    from conformance.world.keeper import Launch

SHRINK_TOTAL_SECONDS = {"smoke": 60.0, "ci": 240.0, "nightly": 1800.0}
FINDINGS_A_LAW = 6
INI = Path(__file__).parent / "run.ini"


@dataclass
class LawResult:
    """What a run says of one law."""

    law: Law
    outcome: str = "untested"
    cases: int = 0
    checks: int = 0
    rejected: int = 0
    refused: int = 0
    skipped_expected: int = 0
    swept: int = 0
    combinations: int = 0
    seconds: float = 0.0
    reason: str | None = None
    rejection: str = ""
    features: Counter[str] = field(default_factory=Counter)
    lines: list[str] = field(default_factory=list)


@dataclass
class _Pass:
    """The first pass over one law: what deviated, by signature or by the entry that accounts for it. Of each the case that comes first in
    the plan is kept, whichever was judged first: no timing changes that."""

    result: LawResult
    memory: dict[Case, Verdict] = field(default_factory=dict)
    new: dict[str, tuple[Verdict, bool, int]] = field(default_factory=dict)
    expected: dict[Entry, tuple[Verdict, int]] = field(default_factory=dict)
    stop: bool = False


class Run:
    """One run, from its request to its exit code. Made by :meth:`start`; :meth:`finish` and :meth:`close` end it."""

    @classmethod
    def start(cls, request: RunRequest, launch: Launch | None = None, ranks_here: int | None = None) -> Run:
        """Check the request, start the target's server, and load the laws meanwhile. Raises :class:`UsageError`. Where ``launch`` starts
        the ranks, on many hosts, ``ranks_here`` of the largest world are on this machine."""
        from conformance.report.writer import ReportWriter
        from conformance.target.config import find_target

        # it counts the devices of this machine
        target = find_target(replace(request, world_size=ranks_here or request.world_size))
        writer = ReportWriter(request.report)
        from conformance.world import Pool, WorldError
        from conformance.world.launch import ForkserverLauncher

        try:
            pool = Pool(target, worlds=request.worlds, launch=launch or ForkserverLauncher)
        except WorldError as error:
            raise UsageError(str(error)) from None
        try:
            run = cls(request, target, writer, pool)
            run.write()
        except OSError as error:
            pool.close()
            raise UsageError(f"--report {request.report}: cannot be written: {error.strerror}") from None
        except BaseException:
            pool.close()
            raise
        return run

    def __init__(self, request: RunRequest, target: Any, writer: Any, pool: Any) -> None:
        import torch

        from conformance import expectations
        from conformance.law import Limits
        from conformance.laws import catalogue
        from conformance.report.terminal import Terminal
        from conformance.selection import select

        self.request = request
        self.target = target
        self.writer = writer
        self.pool = pool
        self.laws = select(list(catalogue().values()), request.laws, request.ops)
        files = [] if request.no_expect else expectations.layers(torch.__version__, target, request.expect)
        self.expectations = expectations.load(files, list(catalogue().values()), torch.__version__, target.name)
        self.limits = Limits(request.world_size, target.dtypes, frozenset(target.cannot))
        self.results: dict[str, LawResult] = {law.id: LawResult(law) for law in self.laws}
        self.findings: list[Finding] = []
        self.unconfirmed: list[Verdict] = []
        self.stale: list[str] = []
        self.features: Counter[str] = Counter()
        self.judged = 0
        self.drawn = 0
        self.distinct: set[Case] = set()
        self.started = datetime.now(UTC)
        self.clock = time.monotonic()
        self.stopped_by: str | None = None
        self.failure: Exception | None = None
        self.shrinking = SHRINK_TOTAL_SECONDS[request.profile]
        self.terminal = Terminal(len(self.laws))
        self.known = _known(request.known, {law.id for law in self.laws})
        self._last_write = 0.0

    # One law

    def law(self, law: Law) -> LawResult:
        """Try one law: its stored findings, its enumerated cases, its drawn ones; then shrink and confirm what is new."""
        result = self.results[law.id]
        result.reason = self._why_untested(law)
        if result.reason is None:
            self.terminal.law(law.id)
            began = time.monotonic()
            try:
                self._try(law, result)
            except Exception as error:
                # a run that broke is not finished: the laws after this one are untested, and what was found stands
                from conformance.world.launch import LostError

                self.failure = error
                self.stopped_by, result.reason = "an error of the harness", "the run broke here"
                if isinstance(error, LostError):
                    self.stopped_by, result.reason = "a lost host", f"the run broke here: {error}"
            result.seconds = time.monotonic() - began
            if self.failure is None:
                result.outcome = self._outcome(law, result)
        self.terminal.done(result)
        if time.monotonic() - self._last_write > 1.0:
            self.write()
        return result

    def _why_untested(self, law: Law) -> str | None:
        missing = sorted(set(law.needs) & self.limits.cannot)
        if missing:
            return f"the target declares that it cannot do {', '.join(missing)}"
        if PROFILES.index(law.profile) > PROFILES.index(self.request.profile):
            return f"tried from profile {law.profile} on"
        if law.smallest > self.request.world_size:
            return f"needs {law.smallest} ranks, the largest world has {self.request.world_size}"
        if self.stopped_by and not (self.stopped_by == "budget" and self._left() > 0):  # a law that was cut short ends no other
            return f"the run was ended before it, by {self.stopped_by}"
        return None

    def _try(self, law: Law, result: LawResult) -> None:
        from conformance.search import Enough, Plan

        request = self.request
        plan = Plan.of(law, self.limits, request.seed, request.profile, request.shard)
        tried = _Pass(result)
        self.pool.muster()
        deadline = time.monotonic() + self._share(law) if request.budget else float("inf")

        def take(case: Case, drawn: bool) -> None:
            stopping.check()
            if tried.stop or time.monotonic() > deadline:
                raise Enough
            self._feed(law, tried, case, drawn, plan.number)

        try:
            try:
                for case in self.known.get(law.id, [])[request.shard[0] - 1 :: request.shard[1]]:
                    self._feed(law, tried, case, False, 0)
                plan.feed(take)
            except Enough:
                if not tried.stop:
                    self.stopped_by = self.stopped_by or ("budget" if request.budget else None)
            except TorchMovedError as error:  # an enumerator that asks torch
                result.reason = str(error)
            result.swept, result.combinations = plan.swept, plan.combinations
            self.pool.flush()
        finally:
            self._note_expected(law, tried)
        self._confirm(law, plan, tried)

    def _feed(self, law: Law, tried: _Pass, case: Case, drawn: bool, number: int) -> None:
        from conformance.features import features_of

        features = features_of(case, law)
        if self.expectations.avoid(law.id, features) is not None:
            tried.result.skipped_expected += 1
            return
        self.pool.feed(law, case, lambda verdict: self._take_in(law, tried, verdict, features, drawn, number))

    def _take_in(self, law: Law, tried: _Pass, verdict: Verdict, features: frozenset[str], drawn: bool, number: int) -> None:
        result = tried.result
        tried.memory[verdict.case] = verdict
        self.writer.case(verdict, drawn)
        self.terminal.case()
        if verdict.status == "rejected":
            result.rejected += 1
            result.rejection = verdict.message
            return
        result.cases += 1
        result.checks += law.checks(verdict.case) if law.checks else 1
        self.judged += 1
        self.drawn += drawn
        self.distinct.add(verdict.case)
        reached = features | set(verdict.features)
        self.features.update(reached)
        result.features.update(reached)
        self.expectations.judged(law.id, reached)
        if verdict.status == "refused":
            result.refused += 1
        elif verdict.status == "deviates":
            entry = self.expectations.match(law.id, verdict.kind or "", reached, verdict.error)
            if entry is not None:
                if entry not in tried.expected or number < tried.expected[entry][1]:
                    tried.expected[entry] = verdict, number
            elif verdict.signature not in tried.new or number < tried.new[verdict.signature][2]:
                tried.new[verdict.signature] = (verdict, drawn, number)
                tried.stop = tried.stop or self.request.exitfirst

    def _note_expected(self, law: Law, tried: _Pass) -> None:
        """An expected finding stands once for its entry, with the first case of the first law that met it, unshrunk."""
        from conformance.findings import Finding

        noted = {found.entry for found in self.findings}
        for entry, (verdict, number) in sorted(tried.expected.items(), key=lambda item: item[1][1]):
            if entry.where not in noted:
                found = Finding.of(law, verdict, verdict.case, "expected")
                self._add(replace(found, id=entry.finding or found.id, note=entry.reason, number=number, entry=entry.where))

    def _is_known(self, law: Law, verdict: Verdict) -> bool:
        from conformance.features import features_of

        features = features_of(verdict.case, law) | set(verdict.features)
        return self.expectations.match(law.id, verdict.kind or "", features, verdict.error, count=False) is not None

    def _confirm(self, law: Law, plan: Any, tried: _Pass) -> None:
        from conformance.findings import Confirmer

        for verdict, drawn, number in sorted(tried.new.values(), key=lambda new: new[2])[:FINDINGS_A_LAW]:
            began = time.monotonic()
            self.terminal.shrinking(law.id, verdict)
            seconds = min(10.0, self.shrinking)
            confirmer = Confirmer(plan, self.pool, tried.memory, seconds, lambda seen: self._is_known(law, seen))
            found = confirmer.confirm(verdict, drawn)
            self.shrinking = max(0.0, self.shrinking - (time.monotonic() - began))
            if found is None:
                self.unconfirmed.append(verdict)
                continue
            self._add(replace(found, number=number))
            tried.result.lines.append(f"{found.kind} {found.id}: {found.case.text}\n    {found.message}")
            if self.request.exitfirst:
                self.stopped_by = "-x"
                break
        left_over = len(tried.new) - FINDINGS_A_LAW
        if left_over > 0:
            tried.result.lines.append(f"and {left_over} further signatures, not shrunk")

    def _add(self, found: Finding) -> None:
        self.findings.append(found)
        self.writer.finding(found, self)
        self.terminal.finding(found)
        self.write()

    def _outcome(self, law: Law, result: LawResult) -> str:
        if any(found.law == law.id and found.status == "new" for found in self.findings):
            return "deviates"
        if not result.cases:
            result.reason = "every case is an expected hang or crash" if result.skipped_expected else "no case was judged"
            result.reason += f": {result.rejection}" if result.rejection else ""
            return "untested"
        if any(found.law == law.id for found in self.findings):
            return "expected"
        if result.reason is None and result.refused == result.cases:
            result.reason = "unsupported: every case is refused, on every rank alike"
        return "held" if result.reason is None else "untested"

    # Budget

    def _left(self) -> float:
        """Seconds of the budget that are left."""
        assert self.request.budget is not None
        return max(0.0, self.request.budget - (time.monotonic() - self.clock))

    def _share(self, law: Law) -> float:
        """Seconds for this law: its share, by weight, of what is left; what earlier laws left over is in it."""
        at = self.laws.index(law)
        return self._left() * law.weight / sum(later.weight for later in self.laws[at:])

    # The end

    def probe(self) -> None:
        """Try on two ranks what the target declares that it cannot do."""
        from conformance.probe import stale

        self.stale = stale(self.pool, self.target) if self.judged and self.failure is None else []

    def exit_code(self) -> int:
        """2 when no case was judged, 1 for a new finding (or, with ``--strict``, a stale expectation), else 0."""
        advisory = {law.id for law in self.laws if law.tier == "advisory"}
        if any(found.status == "new" and found.law not in advisory for found in self.findings):
            return 1
        if not self.judged:
            return 2
        stale = any(self.expectations.stale(law.id) for law in self.laws)
        return 1 if self.request.strict and (stale or self.expectations.too_wide()) else 0

    def write(self, exit_code: int | None = None) -> None:
        """Write ``report.json`` as it stands; complete when ``exit_code`` is given."""
        self._last_write = time.monotonic()
        if exit_code is not None:
            for result in self.results.values():
                if result.outcome in ("held", "stale"):
                    result.outcome = "stale" if self.expectations.stale(result.law.id) else "held"
        self.writer.update(self, exit_code)

    def close(self) -> None:
        """End every process of the run."""
        self.pool.close()


def _failed(live: Run) -> int:
    """Say why a run broke: 2 when the target's ranks never started, else 3."""
    import traceback

    from conformance.world import WorldError
    from conformance.world.launch import LostError

    assert live.failure is not None
    if isinstance(live.failure, WorldError):
        print(f"shardlaw: {live.failure}", file=sys.stderr)
        return 3 if live.judged or isinstance(live.failure, LostError) else 2
    traceback.print_exception(live.failure)
    print(f"shardlaw: internal error: {type(live.failure).__name__}; this is a fault of shardlaw", file=sys.stderr)
    return 3


def _known(folder: Path | None, laws: set[str]) -> dict[str, list[Case]]:
    """The cases of stored findings, by law: they are tried before anything is drawn."""
    from conformance.report.finding_file import read_folder

    found: dict[str, list[Case]] = {}
    for case in read_folder(folder) if folder is not None else ():
        if case.law in laws:
            found.setdefault(case.law, []).append(case)
    return found


def run(request: RunRequest, launch: Launch | None = None, ranks_here: int | None = None) -> int:
    """Run the laws of ``request``; returns the exit code. Raises :class:`UsageError` before anything is judged. For ``launch`` and
    ``ranks_here`` see :meth:`Run.start`."""
    import pytest

    from conformance.plugin import RUN, law_files

    live = Run.start(request, launch, ranks_here)
    code = 3
    try:

        class Here:
            """Hands the run to the plugin."""

            @staticmethod
            def pytest_configure(config: pytest.Config) -> None:
                config.stash[RUN] = live

        arguments = ["-c", str(INI), "--rootdir", str(INI.parent), "--noconftest", "-p", "no:terminal", "-p", "no:cacheprovider"]
        arguments += [
            "-p",
            "conformance.plugin",
            *(["-x"] if request.exitfirst else []),
            str(INI.parent / "laws"),
            *map(str, law_files()),
        ]
        with _own_pytest():
            status = pytest.main(arguments, plugins=[Here()])
        if status == pytest.ExitCode.INTERRUPTED:
            raise KeyboardInterrupt
        live.probe()
        if live.failure is not None:
            code = _failed(live)
        elif status in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
            code = live.exit_code()
    except KeyboardInterrupt:
        live.stopped_by, code = "interrupt", stopping.seen_to()
    finally:
        live.close()
        live.write(code)
        live.terminal.summary(live, code)
    return code


@contextmanager
def _own_pytest() -> Iterator[None]:
    """Keep the surroundings' pytest options and plugins out, while our items run."""
    theirs = {name: os.environ.pop(name, None) for name in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS")}
    auto = os.environ.get("PYTEST_DISABLE_PLUGIN_AUTOLOAD")
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    try:
        yield
    finally:
        for name, value in {**theirs, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": auto}.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
