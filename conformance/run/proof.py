"""Run each reproducer script before it is handed out, with a time limit, in a process forked from one that has torch loaded.

A script is *proven* if it exits 1, that is, if it shows the fault. Otherwise it is no reproducer, and the finding says why.
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

from shardlaw.conformance.compat import LAZY_MODULES

LIMIT_SECONDS = 90.0
PRELOADED = ["torch.distributed.tensor", "torch.distributed.checkpoint", "torch.distributed.fsdp", *LAZY_MODULES]
PROVEN = "proven"
PORT_TAKEN = "EADDRINUSE"


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


def run_script(text: str, *, setup: str = "", argument: str = "", limit: float = LIMIT_SECONDS) -> ScriptResult:
    """Run a script, and once more if another process took the port that torch had found free. ``setup``: ``module:function`` to call in its
    process first, with ``argument``. ``limit`` is in seconds."""
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


def prove(text: str) -> str:
    """``proven``, or why a script does not show the fault."""
    return run_script(text).proof


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
