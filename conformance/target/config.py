"""Targets and storages in the config file of the current folder: ``shardlaw.toml``, or ``[tool.shardlaw]`` in ``pyproject.toml``.

::

    [target.ucx]
    backend = "ucx"
    setup = "commux:register"          # called in every rank before init_process_group
    cannot = ["all_to_all"]            # a law that needs it is 'untested', never 'held'

    [storage.s3]
    writer = "torch.distributed.checkpoint._fsspec_filesystem:FsspecWriter"
    reader = "torch.distributed.checkpoint._fsspec_filesystem:FsspecReader"
    options = { path = "s3://bucket/{run}" }

A block with the name of a built-in target overrides its values. Installed packages provide targets through the entry-point group
``shardlaw.targets``: a :class:`~shardlaw.conformance.law.target.Target`, a table with the keys of a block, or a function without arguments
that returns either. Every value is checked; for an unknown key the error names the nearest known one.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Annotated, Any

import msgspec

from shardlaw.conformance.errors import UsageError, convert_table, one_of
from shardlaw.conformance.law.target import CAPABILITIES, TOLERANCE, Target
from shardlaw.conformance.target.builtin import BUILTIN, check_devices

DTYPES = ("float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool", "complex64", "complex128")
ENTRY_POINT_GROUP = "shardlaw.targets"
FILESYSTEM = "filesystem"


@dataclass(frozen=True)
class Config:
    """The targets in a folder's config file, and its storages, as values of the fields of a target. ``path`` is ``None`` where there is no
    file."""

    path: Path | None
    targets: Mapping[str, Target]
    storages: Mapping[str, Mapping[str, Any]]


def read_config(folder: Path | None = None) -> Config:
    """The config of ``folder`` (default: the current one): ``shardlaw.toml`` if it is there, else the table in ``pyproject.toml``.

    Raises :class:`UsageError`, which names the file and the key.
    """
    folder = folder or Path.cwd()
    path, table = folder / "shardlaw.toml", ""
    if path.is_dir():
        raise UsageError(f"{path.name}: is a folder: want a file, or another name for the folder")
    if not path.is_file():
        path, table = folder / "pyproject.toml", "tool.shardlaw"
    if not path.is_file():
        return Config(None, {}, {})
    data = _read_table(path, table)
    if data is None:
        return Config(None, {}, {})
    where = f"{path.name}: [{table}]" if table else path.name
    _convert_values(where, data, dict.fromkeys(("target", "storage"), (Any, "tables")))
    blocks = f"{path.name}: [{table}." if table else f"{path.name}: ["
    targets = {
        name: parse_target(f"{blocks}target.{name}]", name, block, folder)
        for name, block in _check_tables(f"{blocks}target]", data.get("target", {})).items()
    }
    storages = {
        name: _parse_storage(f"{blocks}storage.{name}]", name, block)
        for name, block in _check_tables(f"{blocks}storage]", data.get("storage", {})).items()
    }
    for name, target in targets.items():
        if target.storage != FILESYSTEM and target.storage not in storages:
            raise UsageError(
                f"{blocks}target.{name}]: storage {target.storage!r} is not described ({one_of(target.storage, [FILESYSTEM, *storages])})"
            )
    return Config(path, targets, storages)


def _read_table(path: Path, table: str) -> dict[str, Any] | None:
    try:
        data: Any = tomllib.loads(path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path.name}: cannot be read: {error}") from None
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{path.name}: {error}") from None
    for key in filter(None, table.split(".")):
        data = data.get(key, {}) if isinstance(data, dict) else {}
    if table and not data:
        return None
    if not isinstance(data, dict):
        raise UsageError(f"{path.name}: [{table}]: want a table")
    return data


def parse_target(where: str, name: str, block: Mapping[str, Any], folder: Path) -> Target:
    """The target of a block, with defaults from the built-in target of the same name, if any. Raises :class:`UsageError`."""
    values = _convert_target_values(where, block)
    if name not in BUILTIN and not {"backend", "device"} & set(values):
        raise UsageError(f'{where}: want a backend, such as backend = "gloo"')
    base = BUILTIN.get(name, Target(name=name))
    if "env" in values:
        values["env"] = tuple({**dict(base.env), **dict(values["env"])}.items())
    if "options" in values:
        values["init_options"] = tuple({**dict(base.init_options), **dict(values.pop("options"))}.items())
    if "tolerance" in values:
        values["tolerance"] = {**TOLERANCE, **values["tolerance"]}
    if "expect" in values:
        values["expect"] = tuple(str(folder / path) for path in values["expect"])
        for path in values["expect"]:
            if not Path(path).is_file():
                raise UsageError(f"{where}: expect: no such file {path}")
    target = replace(base, name=name, **values)
    if target.device == "cpu" and dict(target.init_options).get("device_id"):
        raise UsageError(f"{where}: options: device_id: want a device of its own for each rank, not the cpu")
    return target


def _parse_storage(where: str, name: str, block: Mapping[str, Any]) -> dict[str, Any]:
    if name == FILESYSTEM:
        raise UsageError(f"{where}: {FILESYSTEM} is built in: want another name")
    values = _convert_values(where, block, STORAGE)
    for key in ("writer", "reader"):
        if key not in values:
            raise UsageError(f'{where}: want a {key}, such as {key} = "package.module:Class"')
    if "path" in values.get("reader_options", {}):
        raise UsageError(f"{where}: reader_options: want {STORAGE['reader_options'][1]}")
    options = {key: tuple(values.get(key, {}).items()) for key in ("options", "reader_options")}
    return {"writer": values["writer"], "reader": values["reader"], **options}


# The type of each key of a block, and its description in error messages.

Text = Annotated[str, msgspec.Meta(pattern=r"\S")]
Place = Annotated[str, msgspec.Meta(pattern=r"^[^\W\d][\w.]*:[^\W\d][\w.]*$")]
Module = Annotated[str, msgspec.Meta(pattern=r"^[^\W\d][\w.]*(:[^\W\d][\w.]*)?$")]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=sys.float_info.max)]
Share = Annotated[float, msgspec.Meta(ge=0, lt=1)]
KEYS: dict[str, tuple[Any, str]] = {
    "device": (Text, "a text"),
    "backend": (Text, "a text"),
    "setup": (Module, "module:function, or a module that need only be imported"),
    "cannot": (tuple[Text, ...], "a list of texts"),
    "dtypes": (tuple[Text, ...], "a list of texts"),
    "timeout": (Seconds, "seconds, more than 0"),
    "startup_timeout": (Seconds, "seconds, more than 0"),
    "env": (dict[str, str], 'a table of texts, such as { UCX_TLS = "tcp" }'),
    "init_method": (Annotated[str, msgspec.Meta(pattern="^(tcp|file|env)://")], "tcp://, file:// or env://"),
    "options": (dict[str, Any], 'a table, such as { device_id = true, pg_options = "package:function" }'),
    "tolerance": (dict[str, Any], "a table from dtype to relative error, such as { float32 = 1e-5 }"),
    "storage": (Text, "a text"),
    "expect": (tuple[Text, ...], "a list of texts"),
}
OPTIONS: dict[str, tuple[Any, str]] = {"device_id": (bool, "true or false"), "pg_options": (Place, "module:name")}
STORAGE: dict[str, tuple[Any, str]] = {
    "writer": (Place, "module:name"),
    "reader": (Place, "module:name"),
    "options": (dict[str, Any], 'a table, such as { path = "s3://bucket/{run}" }'),
    "reader_options": (dict[str, Any], "a table without path, which is taken from options, such as { thread_count = 2 }"),
}
WORDS = {"cannot": CAPABILITIES, "dtypes": DTYPES}


def _convert_values(where: str, block: Mapping[str, Any], keys: Mapping[str, tuple[Any, str]]) -> dict[str, Any]:
    """The values of a block, converted to the types of their keys. Raises :class:`UsageError`."""
    return convert_table(block, keys, lambda _, message: UsageError(f"{where}: {message}"))


def _convert_target_values(where: str, block: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a target's block, checked. Raises :class:`UsageError`."""
    values = _convert_values(where, block, KEYS)
    for key, known in WORDS.items():
        for word in values.get(key, ()):
            if word not in known:
                raise UsageError(f"{where}: {key}: unknown {word!r} ({one_of(word, known)})")
    for name in values.get("env", ()):
        if not re.fullmatch(r"[^\W\d]\w*", name, re.ASCII):
            raise UsageError(f"{where}: env: {name!r} is no name of an environment variable")
    if "options" in values:
        values["options"] = _convert_values(f"{where}: options", values["options"], OPTIONS)
    if "tolerance" in values:
        unknown = [dtype for dtype in values["tolerance"] if dtype not in TOLERANCE]
        if unknown:
            raise UsageError(f"{where}: tolerance: unknown dtype {unknown[0]!r} ({one_of(unknown[0], TOLERANCE)})")
        errors = dict.fromkeys(TOLERANCE, (Share, "a relative error from 0 to 1"))
        values["tolerance"] = _convert_values(f"{where}: tolerance", values["tolerance"], errors)
    return values


def _check_tables(where: str, value: Any) -> dict[str, dict[str, Any]]:
    if not isinstance(value, dict) or not all(isinstance(block, dict) for block in value.values()):
        raise UsageError(f"{where}: want tables, such as {where.rpartition('[')[2].rstrip(']')}.NAME")
    return value


def entry_point_targets() -> dict[str, EntryPoint]:
    """The targets of installed packages, by name."""
    return {entry.name: entry for entry in entry_points(group=ENTRY_POINT_GROUP)}


def _load_entry_point(entry: EntryPoint) -> Target:
    where = f"entry point {entry.name} of {ENTRY_POINT_GROUP}"
    try:
        found = entry.load()
        if callable(found) and not isinstance(found, Target):
            found = found()
    except Exception as error:
        raise UsageError(f"{where}: {type(error).__name__}: {error}") from None
    if isinstance(found, Target):
        return found
    if isinstance(found, Mapping):
        return parse_target(where, entry.name, found, Path.cwd())
    raise UsageError(f"{where}: gave a {type(found).__name__}, want a Target or a table")


def target_origins(config: Config) -> dict[str, str]:
    """Where each known target comes from, by name."""
    found = dict.fromkeys(BUILTIN, "built in")
    found.update({name: f"entry point {entry.value}" for name, entry in entry_point_targets().items()})
    found.update(dict.fromkeys(config.targets, config.path.name if config.path else ""))
    return found


def get_target(name: str, config: Config) -> Target:
    """The target of this name: from the config file, an installed package, or built in, in this order. Raises :class:`UsageError`."""
    if name in config.targets:
        return config.targets[name]
    if (entry := entry_point_targets().get(name)) is not None:
        return _load_entry_point(entry)
    if name in BUILTIN:
        return BUILTIN[name]
    raise UsageError(f"no target is called {name!r} ({one_of(name, target_origins(config))})")


def with_storage(target: Target, name: str | None, config: Config) -> Target:
    """The target with the storage of this name (default: its own). Raises :class:`UsageError`."""
    name = name or target.storage
    if name == FILESYSTEM:
        return replace(target, storage=name)
    if name not in config.storages:
        if name == target.storage and target.writer:
            return target
        raise UsageError(f"no storage is called {name!r} ({one_of(name, [FILESYSTEM, *config.storages])})")
    cannot = tuple(dict.fromkeys((*target.cannot, "checkpoint_files")))
    return replace(target, storage=name, **config.storages[name], cannot=cannot)


def find_target(name: str, storage: str | None, timeout: float | None, ranks: int) -> Target:
    """The target of this name, checked for worlds of ``ranks``; ``storage`` and ``timeout`` override its own. Raises
    :class:`UsageError`."""
    config = read_config()
    target = with_storage(get_target(name, config), storage, config)
    if timeout is not None:
        target = replace(target, timeout=timeout)
    check_target(target, ranks)
    return target


def check_target(target: Target, ranks: int) -> None:
    """Check, before ranks start, that the modules of a target exist and that there are enough devices. Raises :class:`UsageError`."""
    pg_options = str(dict(target.init_options).get("pg_options", ""))
    places = (("setup", target.setup), ("pg_options", pg_options), ("writer", target.writer), ("reader", target.reader))
    for key, place in places:
        module = place.partition(":")[0]
        if module and not _is_importable(module):
            owner = f"storage {target.storage}" if key in ("writer", "reader") else f"target {target.name}"
            raise UsageError(f"{owner}: {key} = {place!r}: there is no module {module}; is it installed, or on PYTHONPATH?")
    for key, place in places[2:]:
        _check_class(target, key, place)
    check_devices(target, ranks)


def _check_class(target: Target, key: str, place: str) -> None:
    """Raises :class:`UsageError` if a module lacks the class ``place``. A module that cannot be imported here passes: in ranks it may,
    after their ``setup``."""
    module, _, name = place.partition(":")
    if not module:
        return
    try:
        found: Any = importlib.import_module(module)
    except Exception:
        return
    if not hasattr(found, name):
        close = one_of(name, [known for known in vars(found) if not known.startswith("_")])
        raise UsageError(f"storage {target.storage}: {key} = {place!r}: {module} has no {name} ({close})")


def _is_importable(module: str) -> bool:
    try:
        return importlib.util.find_spec(module.partition(".")[0]) is not None
    except (ImportError, ValueError):
        return False
