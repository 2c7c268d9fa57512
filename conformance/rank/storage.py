"""The checkpoint storage of a target: its writer and reader, so that no law names a storage.

A storage is a pair of classes, a ``StorageWriter`` and a ``StorageReader``. Their argument ``path``, or else the first one, is the location
of the checkpoint.
"""

from __future__ import annotations

import inspect
import os
import pkgutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardlaw.conformance.law.target import Target

if TYPE_CHECKING:
    from torch.distributed.checkpoint.storage import StorageReader, StorageWriter


@dataclass(frozen=True)
class Storage:
    """``writer`` and ``reader`` are ``module:Class``; ``options`` are the writer's, which a case may override, ``reader_options`` the
    reader's. ``files``: whether a checkpoint is a folder of files whose extents are in its metadata."""

    writer: str
    reader: str
    options: Mapping[str, Any] = field(default_factory=dict)
    files: bool = False
    reader_options: Mapping[str, Any] = field(default_factory=dict)


class NoSuchOption(Exception):
    """A writer lacks an option that a case needs."""


# syncing every file takes longer than the rest of a small checkpoint, and does not change its content
STORAGES = {
    "filesystem": Storage(
        "torch.distributed.checkpoint:FileSystemWriter",
        "torch.distributed.checkpoint:FileSystemReader",
        {"sync_files": False},
        files=True,
    )
}


def target_storage(target: Target) -> Storage:
    """The storage of a target. Raises ``KeyError`` for an unknown name."""
    if target.writer:
        return Storage(target.writer, target.reader, dict(target.options), reader_options=dict(target.reader_options))
    if target.storage not in STORAGES:
        raise KeyError(f"storage {target.storage!r} is none of {', '.join(STORAGES)}")
    return STORAGES[target.storage]


def make_writer(target: Target, folder: str | os.PathLike[str], **options: Any) -> StorageWriter:
    """A writer of the target's storage for the checkpoint in ``folder``; ``options`` are keyword arguments of its class.

    Raises :class:`NoSuchOption` for an option that the class does not name.
    """
    check_options(target, options)
    found = target_storage(target)
    own = {name: value for name, value in found.options.items() if name != "path"}
    return _instantiate(found.writer, checkpoint_id(target, folder), {**own, **options})  # type: ignore[no-any-return]


def check_options(target: Target, names: Iterable[str]) -> None:
    """Raises :class:`NoSuchOption` for the first of ``names`` that the target's writer does not take."""
    for name in names:
        if name not in _parameters(target_storage(target).writer):
            raise NoSuchOption(f"the storage {target.storage} takes no option {name}")


def make_reader(target: Target, folder: str | os.PathLike[str]) -> StorageReader:
    """A reader of the target's storage for the checkpoint in ``folder``."""
    found = target_storage(target)
    return _instantiate(found.reader, checkpoint_id(target, folder), found.reader_options)  # type: ignore[no-any-return]


def checkpoint_id(target: Target, folder: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """The location of the checkpoint of a case's ``folder``: the folder, or a name made of it below the storage's ``path``, or in the place
    of ``{run}`` in that."""
    path = target_storage(target).options.get("path")
    if path is None:
        return folder
    name = str(Path(folder)).strip("/").replace("/", "-")
    return str(path).replace("{run}", name) if "{run}" in str(path) else f"{path}/{name}"


def _instantiate(class_name: str, location: str | os.PathLike[str], options: Mapping[str, Any]) -> Any:
    """A writer or a reader of the class ``module:Class``. The location is its argument ``path``, or else its first one."""
    cls = pkgutil.resolve_name(class_name)
    return cls(path=location, **options) if "path" in _parameters(class_name) else cls(location, **options)


@cache
def _parameters(class_name: str) -> frozenset[str]:
    return frozenset(inspect.signature(pkgutil.resolve_name(class_name)).parameters)


def script_replacements(target: Target) -> dict[str, str]:
    """Expressions that replace torch's file writer and reader in a script, by torch's names; empty for a target without a storage of its
    own."""
    if not target.writer:
        return {}
    found = target_storage(target)
    location, path = "folder", found.options.get("path")
    if path is not None:
        name = 'folder.strip("/").replace("/", "-")'
        location = f'{str(path)!r}.replace("{{run}}", {name})' if "{run}" in str(path) else f"{f'{path}/'!r} + {name}"
    own = {name: value for name, value in found.options.items() if name != "path"}
    return {
        "dcp.FileSystemWriter": f"(lambda folder, **options: {_constructor_call(found.writer, location)}, **{{**{own!r}, **options}}))",
        "dcp.FileSystemReader": f"(lambda folder: {_constructor_call(found.reader, location)}, **{dict(found.reader_options)!r}))",
        "IN_FILES = True": "IN_FILES = False",
    }


def _constructor_call(class_name: str, location: str) -> str:
    """The beginning of the source of a call of ``module:Class``, as :func:`_instantiate` makes it."""
    try:
        keyword = "path=" if "path" in _parameters(class_name) else ""
    except ImportError:
        keyword = ""
    return f"{class_name.replace(':', '.')}({keyword}{location}"
