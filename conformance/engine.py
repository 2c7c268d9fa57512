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
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conformance import stopping
from conformance.errors import UsageError
from conformance.request import PROFILES, RunRequest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from conformance.attempt import Attempt, LawResult
    from conformance.case import Case
    from conformance.expectations import TooWide
    from conformance.findings import Finding
    from conformance.law import Law
    from conformance.verdict import Verdict
    from conformance.world.keeper import Launch

SHRINK_TOTAL_SECONDS = {"smoke": 60.0, "ci": 240.0, "nightly": 1800.0}
INI = Path(__file__).parent / "run.ini"


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
        from conformance.attempt import LawResult
        from conformance.law import Limits
        from conformance.laws import catalogue
        from conformance.report.terminal import Terminal
        from conformance.selection import select

        self.request = request
        self.target = target
        self.writer = writer
        self.pool = pool
        self.laws = select(list(catalogue().values()), request.laws, request.ops)
        files = [] if request.no_expect else expectations.layers(target, request.expect)
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
        self._ahead: Attempt | None = None
        self._turned = self.clock
        self._last_write = self._write_seconds = 0.0

    # One law

    def law(self, law: Law, following: Law | None = None) -> LawResult:
        """Try one law: its stored findings, its enumerated cases, its drawn ones; then shrink and confirm what is new. While its last
        verdicts are on their way the ranks get the cases of the law ``following`` it, whose turn the next call is."""
        result = self.results[law.id]
        attempt, self._ahead = self._ahead, None
        if attempt is None or attempt.law is not law or self.stopped_by:
            attempt = self._attempt(law)
        if attempt is not None:
            self.terminal.law(law.id)
            try:
                attempt.open()
                attempt.feed()
                if following is not None and self.request.budget is None:  # nobody spends what is left of a budget before their turn
                    self._ahead = self._attempt(following)
                    if self._ahead is not None:
                        self._ahead.feed()
                attempt.finish()
            except Exception as error:
                # a run that broke is not finished: the laws after this one are untested, and what was found stands
                from conformance.world.launch import LostError

                self.failure = error
                self.stopped_by, result.reason = "an error of the harness", "the run broke here"
                if isinstance(error, LostError):
                    self.stopped_by, result.reason = "a lost host", f"the run broke here: {error}"
            finally:
                attempt.note_expected()
            result.seconds = time.monotonic() - self._turned
        self._turned = time.monotonic()
        self.terminal.done(result)
        self._write_now_and_then()
        return result

    def _attempt(self, law: Law) -> Attempt | None:
        """The attempt at a law; none where it cannot be tried, and its result says why."""
        from conformance.attempt import Attempt
        from conformance.search import Plan

        result = self.results[law.id]
        result.reason = self._why_untested(law)
        if result.reason is not None:
            return None
        plan = Plan.of(law, self.limits, self.request.seed, self.request.profile, self.request.shard)
        return Attempt(self, plan, result, self._share(law) if self.request.budget else float("inf"))

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

    def add(self, found: Finding) -> None:
        """Take a finding into the report."""
        self.findings.append(found)
        self.writer.finding(found, self)
        self.terminal.finding(found)
        if found.status == "new":
            self.write()
        else:
            self._write_now_and_then()

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

    def too_wide(self) -> list[TooWide]:
        """The expectations to refuse. One shard of a run does not say: the share of its few cases is not that of the whole, which a
        merge works out."""
        return self.expectations.too_wide() if self.request.shard == (1, 1) else []

    def exit_code(self) -> int:
        """2 when no case was judged, 1 for a new finding (or, with ``--strict``, a stale expectation), else 0."""
        advisory = {law.id for law in self.laws if law.tier == "advisory"}
        if any(found.status == "new" and found.law not in advisory for found in self.findings):
            return 1
        if not self.judged:
            return 2
        stale = any(self.expectations.stale(law.id) for law in self.laws)
        return 1 if self.request.strict and (stale or self.too_wide()) else 0

    def write(self, exit_code: int | None = None) -> None:
        """Write ``report.json`` as it stands; complete when ``exit_code`` is given."""
        began = time.monotonic()
        if exit_code is not None:
            for result in self.results.values():
                if result.outcome in ("held", "stale"):
                    result.outcome = "stale" if self.expectations.stale(result.law.id) else "held"
        self.writer.update(self, exit_code)
        self._last_write = time.monotonic()
        self._write_seconds = self._last_write - began

    def _write_now_and_then(self) -> None:
        """At most once a second, and for a twentieth of the time."""
        if time.monotonic() - self._last_write > max(1.0, 20 * self._write_seconds):
            self.write()

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
        started = live.judged or isinstance(live.failure, LostError)
        problem = " ".join(str(live.failure).split())
        print(f"shardlaw: {problem if started else f'target {live.target.name} cannot start: {problem}'}", file=sys.stderr)
        return 3 if started else 2
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
