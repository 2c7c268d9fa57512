"""Run each reproducer script before it is handed out, with a time limit, in a process forked from one that has torch loaded.

A script is *proven* if it exits 1, that is, if it shows the fault. Otherwise it is no reproducer, and the finding says why. A run proves
the script of its first finding at once, the others in the background: most of their time scripts wait.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import threading
import time
import traceback
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import ForkServerContext
from pathlib import Path

LIMIT_SECONDS = 90.0
PRELOADED = ["torch.distributed.tensor", "torch.distributed.checkpoint", "torch.distributed.fsdp"]
PROVEN = "proven"
PORT_TAKEN = "EADDRINUSE"
MAX_SCRIPTS = 4  # that run side by side
POLL_SECONDS = 0.1
INTERRUPTED = "not proven: the run was interrupted"
NOT_YET = "not proven yet: the run goes on"


@dataclass(frozen=True)
class ScriptResult:
    """The exit code of a script (negative: the signal that ended it; ``None``: it still ran at the limit), and what it printed."""

    code: int | None
    output: str

    @property
    def proof(self) -> str:
        """``proven``, or why the script does not show the fault."""
        last = next((line.strip() for line in reversed(self.output.splitlines()) if line.strip()), "it printed nothing")
        match self.code:
            case 1:
                return PROVEN
            case 0:
                return "not proven: the script does not show the fault by itself"
            case None:
                return f"not proven: the script did not end within {LIMIT_SECONDS:.0f} s"
        return f"not proven: the script ended with {self.code}: {last:.200}"


class Prover:
    """Proves scripts in the background."""

    def __init__(self) -> None:
        self._workers = ThreadPoolExecutor(MAX_SCRIPTS)
        self._stopped = threading.Event()

    def submit(self, text: str) -> Future[str]:
        """Run a script as soon as fewer than ``MAX_SCRIPTS`` others run; the result is that of :func:`prove`."""
        return self._workers.submit(self._prove, text)

    @staticmethod
    def load_torch() -> None:
        """Start the process from which scripts are forked, unless it runs already; does not wait for it."""
        _forkserver()

    def stop(self) -> None:
        """End the scripts that run, and start no more."""
        self._stopped.set()

    def _prove(self, text: str) -> str:
        said = INTERRUPTED if self._stopped.is_set() else prove(text, self._stopped)
        return said if said == PROVEN or not self._stopped.is_set() else INTERRUPTED


def run_script(
    text: str, *, setup: str = "", argument: str = "", limit: float = LIMIT_SECONDS, stopped: threading.Event | None = None
) -> ScriptResult:
    """Run a script, and once more if another process took the port that torch had found free. ``setup``: ``module:function`` to call in its
    process first, with ``argument``. ``limit`` is in seconds; when ``stopped`` is set it ends too."""
    stopped = stopped or threading.Event()
    ran = _run_script_once(text, setup, argument, limit, stopped)
    return _run_script_once(text, setup, argument, limit, stopped) if ran.code == 2 and PORT_TAKEN in ran.output else ran


def _run_script_once(text: str, setup: str, argument: str, limit: float, stopped: threading.Event) -> ScriptResult:
    context = _forkserver()
    with tempfile.TemporaryDirectory(prefix="shardlaw-script-") as folder:
        path, output = Path(folder) / "script.py", Path(folder) / "output"
        path.write_text(text, "utf-8")
        process = context.Process(target=_child_main, args=(str(path), str(output), setup, argument))
        process.start()
        deadline = time.monotonic() + limit
        while process.exitcode is None and time.monotonic() < deadline and not stopped.is_set():
            process.join(POLL_SECONDS)
        code = process.exitcode
        if code is None:
            _kill_tree(process.pid)
            process.join()
        process.close()
        return ScriptResult(code, output.read_text("utf-8", "replace") if output.exists() else "")


def _forkserver() -> ForkServerContext:
    """The context of the process from which scripts are forked, which has begun to load torch. An interrupt from the keyboard is not for
    it: it would print where it was."""
    from shardlaw.conformance.compat import LAZY_MODULES  # loads torch

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED, *LAZY_MODULES])
    resource_tracker.ensure_running()  # which the next call starts too, and then lets interrupts through
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return context


def prove(text: str, stopped: threading.Event | None = None) -> str:
    """``proven``, or why a script does not show the fault."""
    return run_script(text, stopped=stopped).proof


def _child_main(path: str, output: str, setup: str, argument: str) -> None:
    """Run the script at ``path`` in this process and exit: output goes to a file, an uncaught exception exits 2."""
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.chdir(os.path.dirname(path))
    try:
        if setup:
            module, _, function = setup.partition(":")
            getattr(importlib.import_module(module), function)(argument)
        runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr, flush=True)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        os._exit(code)
    except BaseException:
        traceback.print_exc()
        os._exit(2)
    sys.stdout.flush()
    os._exit(0)


def _kill_tree(pid: int | None) -> None:
    """Kill a process and its descendants."""
    import psutil

    if pid is None:
        return
    try:
        process = psutil.Process(pid)
        for each in [*process.children(recursive=True), process]:
            each.kill()
    except psutil.NoSuchProcess:
        return
