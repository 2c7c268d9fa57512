"""Records the steps of a rank on files below a folder, at the calls of ``os``: plain Python, which scripts copy as
source.

It sees writes by ``open``, ``pathlib``, ``shutil``, ``tempfile``, torch's ``FileSystem``, and the local files of
fsspec, but not those of native code.
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
COLLECTIVES = (
    *("barrier", "all_gather_object", "all_gather", "all_gather_into_tensor", "all_reduce"),
    *("gather_object", "gather", "reduce", "scatter_object_list", "broadcast_object_list", "broadcast", "scatter"),
)
# functions of os, with the kind of step of a call
STEP_KINDS = {
    "open": "open",
    **dict.fromkeys(("write", "pwrite"), "write"),
    **dict.fromkeys(("truncate", "ftruncate"), "cut"),
    **dict.fromkeys(("fsync", "fdatasync", "sync"), "sync"),
    **dict.fromkeys(("remove", "unlink", "rmdir"), "remove"),
    **dict.fromkeys(("rename", "replace"), "move"),
    "link": "link",
    "mkdir": "make",
}


def relative_path(root: str, path: Any, folder: int | None = None) -> str | None:
    """A path or an open file descriptor, relative to ``root``; ``None`` for one that is not below it. ``folder``: the
    descriptor of the folder from which the path starts."""
    if isinstance(path, int):
        path = os.readlink(f"/proc/self/fd/{path}").removesuffix(" (deleted)")
    elif folder is not None:
        path = os.path.join(os.readlink(f"/proc/self/fd/{folder}"), os.fspath(path))
    path = os.path.abspath(os.fsdecode(path))
    path = os.path.join(os.path.realpath(os.path.dirname(path)), os.path.basename(path))
    return "" if path == root else path[len(root) + 1 :] if path.startswith(f"{root}/") else None


@contextmanager
def watch_steps(
    root: Any, note: Callable[..., object], before: Callable[[str, str, str], float | None] = lambda *step: None
) -> Iterator[None]:
    """Call ``before`` with kind, path and other path before each step of this process on files below ``root``, and
    ``note`` with the fields of a :class:`Step` after it.

    Where ``before`` returns a number the step is lost: of a write this share takes effect, of other steps nothing. A
    file whose opening is lost has the suffix ``.lost`` until it is renamed.
    """
    root, original_open = os.path.realpath(root), io.open

    def patched_open(file: Any, mode: str = "r", *more: Any, **options: Any) -> Any:
        writes = {*mode} & {*"wxa+"} and relative_path(root, file) is not None
        return (_pyio.open if writes else original_open)(file, mode, *more, **options)  # that of _pyio calls os.open

    def patched(original: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            path = relative_path(root, args[0], options.get("dir_fd", options.get("src_dir_fd"))) if args else ""
            if path is None or (kind == "open" and not args[1] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)):
                return original(*args, **options)
            other: str | None = "" if args else "all"
            at, data = 0, b""
            if kind in ("move", "link"):
                other = relative_path(root, args[1], options.get("dst_dir_fd"))
                args = (args[0] if os.path.exists(args[0]) else f"{args[0]}.lost", *args[1:])
            elif kind == "write":
                at, data = args[2] if len(args) > 2 else os.lseek(args[0], 0, os.SEEK_CUR), bytes(args[1])
            elif kind in ("cut", "open"):
                at = args[1] if kind == "cut" else int(bool(args[1] & os.O_TRUNC))
            share = before(kind, path, other or "")
            if share is not None and kind == "write":
                original(args[0], data[: int(len(data) * share)], *args[2:])
                os.lseek(args[0], at + len(data), os.SEEK_SET)
                return len(data)
            if share is not None:
                return (
                    original(f"{args[0]}.lost", args[1] | os.O_CREAT, *args[2:], **options) if kind == "open" else None
                )
            try:  # a sync is recorded, not done: this machine does not crash
                result = None if kind == "sync" else original(*args, **options)
            except FileExistsError:  # another rank may have created it
                _ = kind == "make" and note(kind, path)
                raise
            note("remove" if other is None else kind, path, other or "", at, data[:result])
            return result

        return call

    with ExitStack() as stack:
        for owner in (builtins, io):
            stack.enter_context(mock.patch.object(owner, "open", patched_open))
        stack.enter_context(mock.patch.object(shutil, "_USE_CP_SENDFILE", False))  # so that copies call os.write
        for name, kind in STEP_KINDS.items():
            stack.enter_context(mock.patch.object(os, name, patched(getattr(os, name), kind)))
        yield


@contextmanager
def watch_collectives(note: Callable[..., None]) -> Iterator[None]:
    """Call ``note`` after each collective, and each barrier over a store, with the ranks that waited: ``to`` and
    ``from`` a rank, or ``all``."""

    def patched(original: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(original)
        who = "to" if "dst" in signature.parameters else "from" if "src" in signature.parameters else "all"

        def call(*args: Any, **options: Any) -> Any:
            result = original(*args, **options)
            bound = signature.bind(*args, **options).arguments
            note("meet", "", who, bound.get("dst", bound.get("src", 0)) or 0)
            return result

        return call

    with ExitStack() as stack:
        for owner, name in [*((dist, name) for name in COLLECTIVES), (stores, "barrier")]:
            stack.enter_context(mock.patch.object(owner, name, patched(getattr(owner, name))))
        yield


def all_gather_objects(local: Any) -> list[Any]:
    """The ``local`` objects of all ranks, on each rank."""
    objects: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(objects, local)
    return objects


def record_steps(root: Any, save: Callable[[], object]) -> list[Any]:
    """The steps and the collectives of each rank in ``save``."""
    steps: list[Step] = []

    def note(kind: str, path: str, other: str = "", at: int = 0, data: bytes = b"") -> None:
        steps.append(Step(kind, path, other, at, data, time.monotonic_ns()))

    dist.barrier()
    with watch_steps(root, note), watch_collectives(note):
        save()
    return all_gather_objects(steps)


def read_tree(root: Any) -> dict[str, bytes | None]:
    """The contents below a folder, by relative path: the bytes of a file, ``None`` for a folder."""
    contents: dict[str, bytes | None] = {}
    for folder, folders, files in os.walk(root):
        for name in folders:
            contents[os.path.relpath(os.path.join(folder, name), root)] = None
        for name in files:
            with open(os.path.join(folder, name), "rb") as stream:
                contents[os.path.relpath(stream.name, root)] = stream.read()
    return contents


def write_tree(root: Any, content: Any) -> None:
    """Write a tree of :func:`read_tree` into a folder."""
    os.makedirs(root, exist_ok=True)
    for path, data in sorted(content.items()):
        where = os.path.join(root, path)
        os.makedirs(where if data is None else os.path.dirname(where), exist_ok=True)
        if data is not None:
            with open(where, "wb") as stream:
                stream.write(data)
