"""The checkpoint storage of a target: which writer and reader stand behind its name, so that no law has to know.

A storage is a pair of classes, a ``StorageWriter`` and a ``StorageReader``, whose argument ``path``, or else the first one, says where the
checkpoint lies.
"""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardlaw.conformance.law.target import Target

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata
    from torch.distributed.checkpoint.storage import StorageReader, StorageWriter


@dataclass(frozen=True)
class Storage:
    """``writer`` and ``reader`` are ``module:Class``; ``options`` are the writer's, before those that a case asks for.

    ``files``: whether a checkpoint is a folder of files whose extents its metadata names. ``reader_options`` are the reader's.
    """

    writer: str
    reader: str
    options: Mapping[str, Any] = field(default_factory=dict)
    files: bool = False
    reader_options: Mapping[str, Any] = field(default_factory=dict)


class NoSuchOption(Exception):
    """A writer does not take an option that a case asks for."""


# Syncing every file costs more than all the rest of a small checkpoint and says nothing about its content.
STORAGES = {
    "filesystem": Storage(
        "torch.distributed.checkpoint:FileSystemWriter",
        "torch.distributed.checkpoint:FileSystemReader",
        {"sync_files": False},
        files=True,
    )
}


@dataclass(frozen=True)
class Extent:
    """Where one stored item lies: bytes ``[start, end)`` of ``file``, which is ``size`` bytes long."""

    name: str
    file: str
    start: int
    end: int
    size: int


def storage(target: Target) -> Storage:
    """The storage that a target names. Raises ``KeyError``, which names those that there are."""
    if target.writer:
        return Storage(target.writer, target.reader, dict(target.options), reader_options=dict(target.reader_options))
    if target.storage not in STORAGES:
        raise KeyError(f"storage {target.storage!r} is none of {', '.join(STORAGES)}")
    return STORAGES[target.storage]


def writer(target: Target, folder: str | os.PathLike[str], **options: Any) -> StorageWriter:
    """A writer of the target's storage for the checkpoint in ``folder``; ``options`` are keyword arguments of its class.

    Raises :class:`NoSuchOption` for an option that the class does not name.
    """
    found = storage(target)
    made = _load(found.writer)
    want_options(target, options)
    given = {name: value for name, value in found.options.items() if name != "path"}
    return _made(made, _place(found, folder), {**given, **options})  # type: ignore[no-any-return]


def want_options(target: Target, names: Iterable[str]) -> None:
    """Raises :class:`NoSuchOption` for the first of ``names`` that the target's writer does not take."""
    for name in names:
        if name not in _parameters(_load(storage(target).writer)):
            raise NoSuchOption(f"the storage {target.storage} takes no option {name}")


def reader(target: Target, folder: str | os.PathLike[str]) -> StorageReader:
    """A reader of the target's storage for the checkpoint in ``folder``."""
    found = storage(target)
    return _made(_load(found.reader), _place(found, folder), found.reader_options)  # type: ignore[no-any-return]


def place(target: Target, folder: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """What the target's storage calls the checkpoint in ``folder``: its ``checkpoint_id``."""
    return _place(storage(target), folder)


def _made(made: Any, place: str | os.PathLike[str], options: Mapping[str, Any]) -> Any:
    """A writer or a reader: its place is its argument ``path``, wherever that stands, or else its first one."""
    return made(path=place, **options) if "path" in _parameters(made) else made(place, **options)


@cache
def _parameters(made: Any) -> frozenset[str]:
    return frozenset(inspect.signature(made).parameters)


def extents(target: Target, folder: str | os.PathLike[str], metadata: Metadata) -> list[Extent] | None:
    """Where every stored item of a checkpoint lies, or ``None`` for a storage that keeps no files."""
    if not storage(target).files:
        return None
    found = []
    for index, info in (metadata.storage_data or {}).items():
        path = Path(folder) / info.relative_path
        size = path.stat().st_size if path.exists() else 0
        name = f"{index.fqn}@{'-' if index.offset is None else ','.join(map(str, index.offset))}"
        found.append(Extent(name, info.relative_path, info.offset, info.offset + info.length, size))
    return found


def _place(found: Storage, folder: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """Where the checkpoint of a case's ``folder`` lies: there, or below the storage's own ``path``, in which ``{run}`` stands for it."""
    path = found.options.get("path")
    if path is None:
        return folder
    name = str(Path(folder)).strip("/").replace("/", "-")
    return str(path).replace("{run}", name) if "{run}" in str(path) else f"{path}/{name}"


def convert(target: Target, folder: str | os.PathLike[str], file: str | os.PathLike[str], *, back: bool = False) -> bool:
    """Turn the checkpoint in ``folder`` into one file of ``torch.save``, or such a file into a checkpoint when ``back``.

    Returns whether torch can do so for this storage: it can for folders of files.
    """
    if not storage(target).files:
        return False
    from torch.distributed.checkpoint import format_utils

    if back:
        format_utils.torch_save_to_dcp(file, folder)
    else:
        format_utils.dcp_to_torch_save(folder, file)
    return True


def in_script(target: Target) -> dict[str, str]:
    """What stands in a script for torch's writer and reader of files, where the target has others: expressions, by torch's names."""
    if not target.writer:
        return {}
    found = storage(target)
    lies, path = "folder", found.options.get("path")
    if path is not None:
        name = 'folder.strip("/").replace("/", "-")'
        lies = f'{str(path)!r}.replace("{{run}}", {name})' if "{run}" in str(path) else f"{f'{path}/'!r} + {name}"
    given = {name: value for name, value in found.options.items() if name != "path"}
    return {
        "dcp.FileSystemWriter": f"(lambda folder, **options: {_in_script(found.writer, lies)}, **{{**{given!r}, **options}}))",
        "dcp.FileSystemReader": f"(lambda folder: {_in_script(found.reader, lies)}, **{dict(found.reader_options)!r}))",
        "IN_FILES = True": "IN_FILES = False",
    }


def _in_script(made: str, lies: str) -> str:
    """The beginning of a call of a writer's or a reader's class: see :func:`_made`."""
    try:
        keyword = "path=" if "path" in _parameters(_load(made)) else ""
    except ImportError:
        keyword = ""
    return f"{made.replace(':', '.')}({keyword}{lies}"


def _load(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)
