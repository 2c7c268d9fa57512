"""``shardlaw run``: run pytest on the folder of laws.

pytest gets its own ini file, rootdir and plugins, so that the configuration in the current folder has no effect.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from shardlaw.conformance.errors import UsageError
from shardlaw.conformance.run.request import MAX_LOCAL_RANKS
from shardlaw.conformance.world import signals

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest

    from shardlaw.conformance.report.resume import EarlierRun
    from shardlaw.conformance.run.engine import Run
    from shardlaw.conformance.run.request import RunRequest
    from shardlaw.conformance.world.manager import Launch

INI = Path(__file__).parents[1] / "run.ini"


def run(request: RunRequest, launch: Launch | None = None, ranks_here: int | None = None) -> int:
    """Run the laws of ``request``; returns the exit code. ``launch`` starts the ranks if they are on several hosts; ``ranks_here`` of the
    largest world are then on this machine. Raises :class:`UsageError`, only before any case is judged."""
    from shardlaw.conformance.report.reporter import Reporter
    from shardlaw.conformance.target.config import find_target

    # what Hypothesis remembers of installed modules; else a folder .hypothesis appears where the command is called
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    os.environ.setdefault("HYPOTHESIS_STORAGE_DIRECTORY", os.path.join(cache, "shardlaw", "hypothesis"))
    if launch is None and request.world_size > MAX_LOCAL_RANKS:
        raise UsageError(f"--world-size {request.world_size}: want at most {MAX_LOCAL_RANKS} ranks on one machine; torchrun starts more")
    target = find_target(request.target, request.storage, request.timeout, ranks_here or request.world_size)
    request, before = _continue_earlier(request)
    listener = Reporter(request.report, before)
    listener.show_request(request, target)  # what follows loads torch, which takes seconds
    import pytest

    from shardlaw.conformance.plugin import RUN, law_files
    from shardlaw.conformance.run.start import start_run

    live = start_run(request, target, listener, launch)
    code = 3
    try:

        class RunPlugin:
            """Passes the run to the plugin."""

            @staticmethod
            def pytest_configure(config: pytest.Config) -> None:
                config.stash[RUN] = live

        arguments = ["-c", str(INI), "--rootdir", str(INI.parent), "--noconftest", "-p", "no:terminal", "-p", "no:cacheprovider"]
        arguments += ["-p", "shardlaw.conformance.plugin", *(["-x"] if request.exitfirst else [])]
        arguments += [str(INI.parent / "laws"), *map(str, law_files())]
        live.scout()
        gc.freeze()  # at its end pytest looks for garbage five times: not among all that was loaded
        with _isolated_pytest():
            status = pytest.main(arguments, plugins=[RunPlugin()])
        if status == pytest.ExitCode.INTERRUPTED:
            raise KeyboardInterrupt
        live.probe()
        live.listener.wait_for_scripts()
        if live.failure is not None:
            code = _print_failure(live)
        elif status in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
            code = live.exit_code()
            code = before.exit_code(code) if before is not None else code
    except KeyboardInterrupt:
        code = signals.acknowledge_stop()
        live.stopped_by = "SIGTERM" if code == 128 + signal.SIGTERM else "interrupt"
    finally:
        live.close()
        live.write(code)
        live.listener.on_run_end(live, code)
    return code


def _continue_earlier(request: RunRequest) -> tuple[RunRequest, EarlierRun | None]:
    """For ``--last-failed`` and ``--resume``: the restricted request, and the run to resume. Raises :class:`UsageError`."""
    if not (request.last_failed or request.resume):
        return request, None
    from shardlaw.conformance.report import resume  # loads torch

    return (resume.select_last_failed(request), None) if request.last_failed else resume.resume_run(request)


@contextmanager
def _isolated_pytest() -> Iterator[None]:
    """Remove the pytest options and plugins of the environment while our items run."""
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


def _print_failure(live: Run) -> int:
    """Print why a run broke; returns the exit code: 2 if the target's ranks never started, else 3."""
    import traceback

    from shardlaw.conformance.world import WorldError
    from shardlaw.conformance.world.launch import LostError

    assert live.failure is not None
    if isinstance(live.failure, WorldError):
        started = live.judged or isinstance(live.failure, LostError)
        problem = " ".join(str(live.failure).split())
        print(f"shardlaw: {problem if started else f'target {live.target.name} cannot start: {problem}'}", file=sys.stderr)
        return 3 if started else 2
    traceback.print_exception(live.failure)
    print(f"shardlaw: internal error: {type(live.failure).__name__}; this is a fault of shardlaw", file=sys.stderr)
    return 3
