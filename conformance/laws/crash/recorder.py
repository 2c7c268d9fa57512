"""The steps that a rank takes below a folder, as they reach the operating system: plain Python, which scripts have by
its source.

Whatever writes with Python's own means is seen: ``open``, ``pathlib``, ``shutil``, ``tempfile``, torch's
``FileSystem``, the local files of fsspec. What a library writes by itself is not: the folder then holds what no step
accounts for.
"""

from __future__ import annotations

import _pyio  # type: ignore[import-not-found]
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
from torch.distributed.elastic.utils import store as stores

from shardlaw.reference.crash import Step

# collectives of torch.distributed in which ranks wait for one another
MEETINGS = (
    *("barrier", "all_gather_object", "all_gather", "all_gather_into_tensor", "all_reduce"),
    *("gather_object", "gather", "reduce", "scatter_object_list", "broadcast_object_list", "broadcast", "scatter"),
)
# what a call of os does to the path, or the file, that it is given
CALLS = {
    "open": "open",
    **dict.fromkeys(("write", "pwrite"), "write"),
    **dict.fromkeys(("truncate", "ftruncate"), "cut"),
    **dict.fromkeys(("fsync", "fdatasync", "sync"), "sync"),
    **dict.fromkeys(("remove", "unlink", "rmdir"), "remove"),
    **dict.fromkeys(("rename", "replace"), "move"),
    "link": "link",
    "mkdir": "make",
}


def below(root: str, path: Any, folder: int | None = None) -> str | None:
    """A path, in the folder that a descriptor stands for or not, or what a descriptor itself stands for, relative to a
    root; ``None`` for one that does not lie below."""
    if isinstance(path, int):
        path = os.readlink(f"/proc/self/fd/{path}").removesuffix(" (deleted)")
    elif folder is not None:
        path = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), os.fspath(path))
    path = os.path.abspath(os.fsdecode(path))
    path = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
    return "" if path == root else path[len(root) + 1 :] if path.startswith(f"{root}/") else None


@contextmanager
def listening(
    root: Any, note: Callable[..., object], before: Callable[[str, str, str], float | None] = lambda *step: None
) -> Iterator[None]:
    """Calls ``note`` with what a :class:`Step` says after each step of this process on files below ``root``, and
    ``before`` with its kind, its path and its other path before it.

    Where ``before`` gives a number the step is lost: of a write that share is done, other steps are not. A file that is
    not opened has the suffix ``.lost`` until it is renamed.
    """
    root, opens = os.path.realpath(root), io.open

    def opened(file: Any, mode: str = "r", *more: Any, **options: Any) -> Any:
        changes = {*mode} & {*"wxa+"} and below(root, file) is not None
        return (_pyio.open if changes else opens)(file, mode, *more, **options)  # the one of _pyio calls what os has

    def faked(true: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def call(*given: Any, **options: Any) -> Any:
            path = below(root, given[0], options.get("dir_fd", options.get("src_dir_fd"))) if given else ""
            if path is None or (kind == "open" and not given[1] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)):
                return true(*given, **options)
            other: str | None = "" if given else "all"
            at, data = 0, b""
            if kind in ("move", "link"):
                other = below(root, given[1], options.get("dst_dir_fd"))
                given = (given[0] if os.path.exists(given[0]) else f"{given[0]}.lost", *given[1:])
            elif kind == "write":
                at, data = given[2] if len(given) > 2 else os.lseek(given[0], 0, os.SEEK_CUR), bytes(given[1])
            elif kind in ("cut", "open"):
                at = given[1] if kind == "cut" else int(bool(given[1] & os.O_TRUNC))
            share = before(kind, path, other or "")
            if share is not None and kind == "write":
                true(given[0], data[: int(len(data) * share)], *given[2:])
                os.lseek(given[0], at + len(data), os.SEEK_SET)
                return len(data)
            if share is not None:
                return (
                    true(f"{given[0]}.lost", given[1] | os.O_CREAT, *given[2:], **options) if kind == "open" else None
                )
            try:  # the order is what is looked at; the machine at hand does not go down
                result = None if kind == "sync" else true(*given, **options)
            except FileExistsError:  # another rank may have made it
                _ = kind == "make" and note(kind, path)
                raise
            note("remove" if other is None else kind, path, other or "", at, data[:result])
            return result

        return call

    with ExitStack() as stack:
        for owner in (builtins, io):
            stack.enter_context(mock.patch.object(owner, "open", opened))
        stack.enter_context(mock.patch.object(shutil, "_USE_CP_SENDFILE", False))  # copies are written like all else
        for name, kind in CALLS.items():
            stack.enter_context(mock.patch.object(os, name, faked(getattr(os, name), kind)))
        yield


@contextmanager
def meeting(note: Callable[..., None]) -> Iterator[None]:
    """Calls ``note`` with who waited for whom once a collective, or a barrier over a store, has ended in which ranks
    wait for one another."""

    def faked(true: Callable[..., Any]) -> Callable[..., Any]:
        taken = inspect.signature(true)
        who = "to" if "dst" in taken.parameters else "from" if "src" in taken.parameters else "all"

        def call(*given: Any, **options: Any) -> Any:
            result = true(*given, **options)
            bound = taken.bind(*given, **options).arguments
            note("meet", "", who, bound.get("dst", bound.get("src", 0)) or 0)
            return result

        return call

    with ExitStack() as stack:
        for owner, name in [*((dist, name) for name in MEETINGS), (stores, "barrier")]:
            stack.enter_context(mock.patch.object(owner, name, faked(getattr(owner, name))))
        yield


def gathered(own: Any) -> list[Any]:
    """What each rank gives, on all of them."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, own)
    return found


def recorded(root: Any, go: Callable[[], object]) -> list[Any]:
    """The steps that each rank takes below ``root``, and its meetings with others."""
    steps: list[Step] = []

    def note(kind: str, path: str, other: str = "", at: int = 0, data: bytes = b"") -> None:
        steps.append(Step(kind, path, other, at, data, time.monotonic_ns()))

    dist.barrier()
    with listening(root, note), meeting(note):
        go()
    return gathered(steps)


def tree(root: Any) -> dict[str, bytes | None]:
    """What lies below a folder: the files by their relative paths, ``None`` for a folder."""
    found: dict[str, bytes | None] = {}
    for folder, folders, files in os.walk(root):
        for name in folders:
            found[os.path.relpath(os.path.join(folder, name), root)] = None
        for name in files:
            with open(os.path.join(folder, name), "rb") as stream:
                found[os.path.relpath(stream.name, root)] = stream.read()
    return found


def plant(root: Any, content: Any) -> None:
    """Make a folder hold what :func:`tree` says of another."""
    os.makedirs(root, exist_ok=True)
    for path, data in sorted(content.items()):
        where = os.path.join(root, path)
        os.makedirs(where if data is None else os.path.dirname(where), exist_ok=True)
        if data is not None:
            with open(where, "wb") as stream:
                stream.write(data)
