"""Spies on the calls that a save or a load makes to its planner and its storage, which may make one of them fail."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

SAVE_PLANNER = ("set_up_planner", "create_local_plan", "create_global_plan", "finish_plan", "resolve_data")
WRITER = ("reset", "set_up_storage_writer", "prepare_local_plan", "prepare_global_plan", "write_data", "finish")
LOAD_PLANNER = (
    "set_up_planner",
    "create_local_plan",
    "create_global_plan",
    "finish_plan",
    "load_bytes",
    "resolve_tensor",
    "commit_tensor",
)
READER = ("reset", "read_metadata", "set_up_storage_reader", "prepare_local_plan", "prepare_global_plan", "read_data")
COORDINATOR = ("create_global_plan", "prepare_global_plan", "finish")
WORKER_SECONDS = 5.0


class PlantedError(Exception):
    """What a storage or a planner fails with when it is told to."""


class WideError(Exception):
    """An error as many libraries raise them: made of two values, it remembers one, and cannot be unpickled."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


@dataclass(frozen=True)
class Call:
    """One call, by the name of its method: what it was given, by position and by name, and what it gave."""

    name: str
    args: tuple[Any, ...]
    options: dict[str, Any]
    result: Any = None


@dataclass
class Spy:
    """Notes every call, in order. The method ``fails`` (on this rank) raises ``error`` instead of doing anything.

    ``in_thread``: only a call from another thread than the first fails, and the first thread waits for it.
    """

    fails: str = ""
    error: str = "plain"
    in_thread: bool = False
    calls: list[Call] = field(default_factory=list)
    raised: threading.Event = field(default_factory=threading.Event)

    def watch(self, watched: Any, methods: Iterable[str]) -> Any:
        """``watched``, whose ``methods`` are noted from now on."""
        for name in methods:
            setattr(watched, name, self._noted(name, getattr(watched, name)))
        return watched

    def _noted(self, name: str, true: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(true)
        def noted(*args: Any, **options: Any) -> Any:
            if name == self.fails:
                self._fail(name)
            result = true(*args, **options)
            self.calls.append(Call(name, args, options, result))
            return result

        return noted

    def _fail(self, name: str) -> None:
        if self.in_thread and threading.current_thread() is threading.main_thread():
            self.raised.wait(WORKER_SECONDS)
            return
        self.raised.set()
        if self.error == "exit":
            raise SystemExit(f"planted in {name}")
        if self.error == "wide":
            raise WideError(1, f"planted in {name}")
        raise PlantedError(f"planted in {name}")

    def of(self, name: str) -> list[Call]:
        return [call for call in self.calls if call.name == name]
