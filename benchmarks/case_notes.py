"""What each case of a run enters of torch's own source, and what it costs: notes that ranks take for :mod:`benchmarks.chosen`."""

from __future__ import annotations

import builtins
import importlib.abc
import importlib.machinery
import importlib.util
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from benchmarks import reach

NOTES = "SHARDLAW_CASE_NOTES"  # the folder of the notes: a file for each process
WORKER, TRIES = "shardlaw.conformance.world.worker", "try_case"


@dataclass(frozen=True)
class Note:
    """What one rank says of one case: CPU-seconds, and the numbers of the blocks that it entered."""

    process: str
    law: str
    text: str
    seconds: float
    blocks: np.ndarray


def install() -> None:
    """Note from now on, in this process and those that it forks."""
    entered = bytearray(reach.numbered()[""])
    setattr(builtins, reach.MARK, entered)
    sys.meta_path[:0] = [reach.Finder(reach.numbered()), _WorkerFinder(entered)]


def noted(folder: Path) -> Iterator[Note]:
    """All notes of a run."""
    for file in sorted(folder.iterdir()):
        with file.open("rb") as stream:
            while True:
                try:
                    law, text, seconds, blocks = pickle.load(stream)
                except (EOFError, pickle.UnpicklingError):  # a rank that was killed may have written half a note
                    break
                yield Note(file.name, law, text, seconds, np.frombuffer(blocks, np.int32))


class _WorkerFinder(importlib.abc.MetaPathFinder):
    """Has the module of a rank try its cases under notes."""

    def __init__(self, entered: bytearray) -> None:
        self._entered = entered

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != WORKER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        assert spec is not None
        assert spec.loader is not None
        run = spec.loader.exec_module

        def run_and_note(module: ModuleType) -> None:
            run(module)
            setattr(module, TRIES, _noting(getattr(module, TRIES), self._entered))

        spec.loader.exec_module = run_and_note  # type: ignore[method-assign]
        return spec


def _noting(try_case: Callable[..., None], entered: bytearray) -> Callable[..., None]:
    none = bytes(len(entered))

    def noting(law: Any, case: Any, here: Any) -> None:
        entered[:] = none
        began = time.process_time()
        try:
            try_case(law, case, here)
        finally:
            seconds = time.process_time() - began
            blocks = np.frombuffer(entered, np.uint8).nonzero()[0].astype(np.int32).tobytes()
            with open(f"{os.environ[NOTES]}/{os.getpid()}", "ab") as file:
                pickle.dump((law.id, case.text, seconds, blocks), file)

    return noting
