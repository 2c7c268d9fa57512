"""Scripts are run before they are handed out: each in a process of its own, forked from one that has torch loaded, with a limit.

A script is *proven* when it exits 1: it shows the fault. One that does not is no reproducer, and the finding says why.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import runpy
import sys
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path

from shardlaw.conformance.compat import LATE_MODULES

LIMIT_SECONDS = 90.0
PRELOADED = ["torch.distributed.tensor", "torch.distributed.checkpoint", "torch.distributed.fsdp", *LATE_MODULES]
PROVEN = "proven"
PORT_TAKEN = "EADDRINUSE"


@dataclass(frozen=True)
class ScriptResult:
    """How a script ended: its exit code (negative: the signal that ended it; ``None``: it was still running at the limit), and what it
    printed."""

    code: int | None
    output: str

    @property
    def proof(self) -> str:
        """``proven``, or why the script shows nothing."""
        last = next((line.strip() for line in reversed(self.output.splitlines()) if line.strip()), "it printed nothing")
        match self.code:
            case 1:
                return PROVEN
            case 0:
                return "not proven: the script does not show the fault by itself"
            case None:
                return f"not proven: the script did not end within {LIMIT_SECONDS:.0f} s"
        return f"not proven: the script ended with {self.code}: {last:.200}"


def run_script(text: str, *, setup: str = "", argument: str = "", limit: float = LIMIT_SECONDS) -> ScriptResult:
    """Run a script, once more where somebody took a port that torch had found free. ``setup``: ``module:function`` to call first in its
    process, with ``argument``."""
    ran = _run_script_once(text, setup, argument, limit)
    return _run_script_once(text, setup, argument, limit) if ran.code == 2 and PORT_TAKEN in ran.output else ran


def _run_script_once(text: str, setup: str, argument: str, limit: float) -> ScriptResult:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with tempfile.TemporaryDirectory(prefix="shardlaw-script-") as folder:
        path, output = Path(folder) / "script.py", Path(folder) / "output"
        path.write_text(text, "utf-8")
        process = context.Process(target=_child_main, args=(str(path), str(output), setup, argument))
        process.start()
        process.join(limit)
        code = process.exitcode
        if code is None:
            _kill_tree(process.pid)
            process.join()
        process.close()
        return ScriptResult(code, output.read_text("utf-8", "replace") if output.exists() else "")


def prove(text: str, limit: float = LIMIT_SECONDS) -> str:
    """``proven``, or why a script shows nothing."""
    return run_script(text, limit=limit).proof


def _child_main(path: str, output: str, setup: str, argument: str) -> None:
    """In the process of the script: what it prints goes to a file, an error of its own is no fault."""
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
    """End a process and all that it started."""
    import psutil

    if pid is None:
        return
    try:
        process = psutil.Process(pid)
        for each in [*process.children(recursive=True), process]:
            each.kill()
    except psutil.NoSuchProcess:
        return
