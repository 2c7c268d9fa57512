"""The steps that a rank takes below a folder, as they reach the operating system: plain Python, which scripts have by
its source.

Whatever writes with Python's own means is seen: ``open``, ``pathlib``, ``shutil``, ``tempfile``, torch's
``FileSystem``, the local files of fsspec. What a library writes by itself is not: the folder then holds what no step
accounts for.
"""

from __future__ import annotations

import builtins
import inspect
import io
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist

from shardlaw.reference.crash import Step

# who waits for whom in a collective
MEETINGS = {
    **dict.fromkeys(("barrier", "all_gather_object", "all_gather", "all_gather_into_tensor", "all_reduce"), "all"),
    **dict.fromkeys(("gather_object", "gather", "reduce"), "to"),
    **dict.fromkeys(("scatter_object_list", "broadcast_object_list", "broadcast", "scatter"), "from"),
}
# what a call of os does to the path that it is given
CALLS = {
    **dict.fromkeys(("truncate", "ftruncate"), "cut"),
    **dict.fromkeys(("fsync", "fdatasync", "sync"), "sync"),
    **dict.fromkeys(("remove", "unlink", "rmdir"), "remove"),
    **dict.fromkeys(("rename", "replace"), "move"),
    "link": "link",
    "mkdir": "make",
}
WRITES = os.O_WRONLY | os.O_RDWR


class Recorder:
    """Notes the steps of this process on files below ``root``, and its meetings with other ranks. ``before`` is called
    first for each step."""

    def __init__(self, root: Any, before: Callable[[str, str], None] = lambda kind, path: None) -> None:
        self.root = os.path.realpath(root)
        self.before = before
        self.steps: list[Step] = []

    def below(self, path: Any, folder: int | None = None) -> str | None:
        """A path (or a descriptor) relative to the root; ``None`` for one that does not lie below."""
        if isinstance(path, int):
            path = os.readlink(f"/proc/self/fd/{path}").removesuffix(" (deleted)")
        elif folder is not None:
            path = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), os.fspath(path))
        path = os.path.abspath(os.fsdecode(path))
        path = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
        return "" if path == self.root else path[len(self.root) + 1 :] if path.startswith(f"{self.root}/") else None

    def note(self, kind: str, path: str, other: str = "", at: int = 0, data: bytes = b"") -> None:
        self.steps.append(Step(kind, path, other, at, data, time.monotonic_ns()))

    @contextmanager
    def listening(self) -> Iterator[Recorder]:
        with ExitStack() as stack:
            for owner, name, fake in self.fakes():
                stack.enter_context(mock.patch.object(owner, name, fake))
            yield self

    def fakes(self) -> Iterator[tuple[Any, str, Any]]:
        """What stands for the functions that change files, and for collectives."""
        for owner in (builtins, io):
            yield owner, "open", self.opening(io.open)
        yield shutil, "_USE_CP_SENDFILE", False  # so that copies are written like all else
        yield os, "open", self.opening_descriptor(os.open)
        yield os, "write", self.writing(os.write)
        yield os, "pwrite", self.writing(os.pwrite)
        for name, kind in CALLS.items():
            yield os, name, self.noting(getattr(os, name), kind)
        yield from meetings(self.note)

    def opening(self, true: Callable[..., Any]) -> Callable[..., Any]:
        def faked(file: Any, mode: str = "r", buffering: int = -1, *text: Any, **options: Any) -> Any:
            path = self.below(file) if {*mode} & {*"wxa+"} else None
            if path is None:
                return true(file, mode, buffering, *text, **options)
            names = ("encoding", "errors", "newline", "closefd", "opener")
            options = {**dict(zip(names, text, strict=False)), **options}
            how = {name: options.pop(name) for name in ("closefd", "opener") if options.get(name) is not None}
            own = isinstance(file, int) or "opener" in how  # noted when it was opened
            if not own:
                self.before("open", path)
            raw = RecordedFile(file, mode.replace("b", "").replace("t", ""), **how)
            raw.recorder = self
            if not own:
                self.note("open", path, at=int("w" in mode))
            if buffering == 0:
                return raw
            buffered = io.BufferedRandom if "+" in mode else io.BufferedWriter
            made = buffered(raw, buffering if buffering > 1 else io.DEFAULT_BUFFER_SIZE)
            if "b" in mode:
                return made
            return io.TextIOWrapper(made, **{"line_buffering": buffering == 1, **options})

        return faked

    def opening_descriptor(self, true: Callable[..., int]) -> Callable[..., int]:
        def faked(path: Any, flags: int, *mode: Any, dir_fd: int | None = None) -> int:
            found = self.below(path, dir_fd) if flags & (WRITES | os.O_CREAT) else None
            if found is not None:
                self.before("open", found)
            number = true(path, flags, *mode, dir_fd=dir_fd)
            if found is not None and (flags & (os.O_CREAT | os.O_TRUNC)):
                self.note("open", found, at=int(bool(flags & os.O_TRUNC)))
            return number

        return faked

    def writing(self, true: Callable[..., int]) -> Callable[..., int]:
        def faked(number: int, data: Any, *place: int) -> int:
            found = self.below(number)
            if found is None:
                return true(number, data, *place)
            self.before("write", found)
            at = place[0] if place else os.lseek(number, 0, os.SEEK_CUR)
            written = true(number, data, *place)
            self.note("write", found, at=at, data=bytes(data)[:written])
            return written

        return faked

    def noting(self, true: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def faked(*given: Any, **options: Any) -> None:
            path = self.below(given[0], options.get("dir_fd", options.get("src_dir_fd"))) if given else ""
            if path is None:
                true(*given, **options)  # none of them returns anything
                return
            self.before(kind, path)
            other = (
                self.below(given[1], options.get("dst_dir_fd")) if kind in ("move", "link") else "" if given else "all"
            )
            try:
                if kind != "sync":  # the order is what is looked at; the machine at hand does not go down
                    true(*given, **options)
            except FileExistsError:  # another rank may have made it
                if kind == "make":
                    self.note(kind, path)
                raise
            self.note("remove" if other is None else kind, path, other or "", at=given[1] if kind == "cut" else 0)

        return faked


def meetings(note: Callable[..., None]) -> Iterator[tuple[Any, str, Any]]:
    """What stands for the collectives in which ranks wait for one another: each is noted once it has ended."""
    for name, who in MEETINGS.items():
        yield dist, name, meeting(getattr(dist, name), who, note)


def meeting(true: Callable[..., Any], who: str, note: Callable[..., None]) -> Callable[..., Any]:
    def faked(*given: Any, **options: Any) -> Any:
        result = true(*given, **options)
        bound = inspect.signature(true).bind(*given, **options).arguments
        note("meet", "", who, at=bound.get("dst", bound.get("src", 0)) or 0)
        return result

    return faked


class RecordedFile(io.FileIO):
    """A file whose writes are noted as they reach the operating system."""

    recorder: Recorder

    def write(self, data: Any) -> int:
        found = self.recorder.below(self.fileno())
        if found is None:
            return super().write(data) or 0
        self.recorder.before("write", found)
        at = os.fstat(self.fileno()).st_size if "a" in self.mode else self.tell()
        written = super().write(data) or 0
        self.recorder.note("write", found, at=at, data=bytes(data)[:written])
        return written

    def truncate(self, size: int | None = None) -> int:
        found = self.recorder.below(self.fileno())
        size = super().truncate(size)
        if found is not None:
            self.recorder.note("cut", found, at=size)
        return size


def tree(root: Any) -> dict[str, bytes | None]:
    """What lies below a folder: the files by their relative paths, ``None`` for a folder."""
    found: dict[str, bytes | None] = {}
    for folder, folders, files in os.walk(root):
        for name in folders:
            found[os.path.relpath(os.path.join(folder, name), root)] = None
        for name in files:
            path = os.path.join(folder, name)
            with open(path, "rb") as stream:
                found[os.path.relpath(path, root)] = stream.read()
    return found


def plant(root: Any, content: Any) -> None:
    """Make a folder hold what :func:`tree` says of another."""
    os.makedirs(root, exist_ok=True)
    for path, data in sorted(content.items()):
        where = os.path.join(root, path)
        if data is None:
            os.makedirs(where, exist_ok=True)
            continue
        os.makedirs(os.path.dirname(where), exist_ok=True)
        with open(where, "wb") as stream:
            stream.write(data)
