"""A spy that records the calls of a save or a load to its planner and storage, and may make one of them fail."""

from __future__ import annotations

import errno
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
    """The error of a method that a :class:`Spy` makes fail."""


class WideError(Exception):
    """An error that cannot be unpickled, as those of many libraries: it takes two arguments and stores one."""

    def __init__(self, code: int, text: str) -> None:
        super().__init__(text)
        self.code = code


@dataclass(frozen=True)
class Call:
    """One call of a method: its name, arguments, keyword arguments and result."""

    name: str
    args: tuple[Any, ...]
    options: dict[str, Any]
    result: Any = None


@dataclass
class Spy:
    """Records every call, in order. The method ``fails`` only raises ``error``.

    ``in_thread``: only calls in other threads than the main one fail, and the main thread waits for such a call.
    """

    fails: str = ""
    error: str = "plain"
    in_thread: bool = False
    calls: list[Call] = field(default_factory=list)
    raised: threading.Event = field(default_factory=threading.Event)

    def watch(self, watched: Any, methods: Iterable[str]) -> Any:
        """Record calls of these ``methods`` from now on; returns ``watched``."""
        for name in methods:
            setattr(watched, name, self._record(name, getattr(watched, name)))
        return watched

    def _record(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def record(*args: Any, **options: Any) -> Any:
            if name == self.fails:
                self._fail(name)
            result = original(*args, **options)
            self.calls.append(Call(name, args, options, result))
            return result

        return record

    def _fail(self, name: str) -> None:
        if self.in_thread and threading.current_thread() is threading.main_thread():
            self.raised.wait(WORKER_SECONDS)
            return
        self.raised.set()
        if self.error == "exit":
            raise SystemExit(f"planted in {name}")
        if self.error == "wide":
            raise WideError(1, f"planted in {name}")
        if self.error == "full":
            raise OSError(errno.ENOSPC, f"planted in {name}")
        raise PlantedError(f"planted in {name}")

    def calls_to(self, name: str) -> list[Call]:
        return [call for call in self.calls if call.name == name]
