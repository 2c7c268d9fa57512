"""Targets and storages that a user describes: ``shardlaw.toml``, or ``[tool.shardlaw]`` in ``pyproject.toml``, of the current folder.

::

    [target.ucx]
    backend = "ucx"
    setup = "commux:register"          # called in every rank before init_process_group
    cannot = ["all_to_all"]            # a law that needs it is 'untested', never 'held'

    [storage.s3]
    writer = "torch.distributed.checkpoint._fsspec_filesystem:FsspecWriter"
    reader = "torch.distributed.checkpoint._fsspec_filesystem:FsspecReader"
    options = { path = "s3://bucket/{run}" }

A block named like a built-in target changes it. Installed packages offer targets through the entry-point group ``shardlaw.targets``: a
:class:`~conformance.target.Target`, a table with the keys of a block, or a function without arguments that returns either.
Every value is checked; an unknown key is refused with the nearest known one.
"""

from __future__ import annotations

import importlib.util
import math
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from conformance.errors import UsageError, one_of
from conformance.target.builtin import BUILTIN, check_devices
from conformance.target.target import CAPABILITIES, TOLERANCE, Target

if TYPE_CHECKING:
    from conformance.request import RunRequest

DTYPES = ("float32", "float64", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool", "complex64", "complex128")
GROUP = "shardlaw.targets"
FILESYSTEM = "filesystem"


@dataclass(frozen=True)
class Storage:
    """A storage block: two ``module:Class`` names, the options of the writer and those of the reader."""

    writer: str
    reader: str
    options: tuple[tuple[str, Any], ...] = ()
    reader_options: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class Config:
    """What the config file of a folder describes. ``path`` is ``None`` where there is none."""

    path: Path | None
    targets: Mapping[str, Target]
    storages: Mapping[str, Storage]


def read_config(folder: Path | None = None) -> Config:
    """The config of ``folder`` (default: the current one): ``shardlaw.toml`` if it is there, else the table in ``pyproject.toml``.

    Raises :class:`UsageError`, which names the file and the key.
    """
    folder = folder or Path.cwd()
    path, table = folder / "shardlaw.toml", ""
    if not path.is_file():
        path, table = folder / "pyproject.toml", "tool.shardlaw"
    if not path.is_file():
        return Config(None, {}, {})
    data = _read(path, table)
    if data is None:
        return Config(None, {}, {})
    where = f"{path.name}: [{table}]" if table else path.name
    _only(where, data, ("target", "storage"))
    blocks = f"{path.name}: [{table}." if table else f"{path.name}: ["
    targets = {
        name: target_from(f"{blocks}target.{name}]", name, block, folder)
        for name, block in _tables(f"{blocks}target]", data.get("target", {})).items()
    }
    storages = {
        name: _storage(f"{blocks}storage.{name}]", name, block)
        for name, block in _tables(f"{blocks}storage]", data.get("storage", {})).items()
    }
    for name, target in targets.items():
        if target.storage != FILESYSTEM and target.storage not in storages:
            raise UsageError(
                f"{blocks}target.{name}]: storage {target.storage!r} is not described ({one_of(target.storage, [FILESYSTEM, *storages])})"
            )
    return Config(path, targets, storages)


def _read(path: Path, table: str) -> dict[str, Any] | None:
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


def target_from(where: str, name: str, block: Mapping[str, Any], folder: Path) -> Target:
    """The target that a block describes, over the built-in one of the same name if there is one. Raises :class:`UsageError`."""
    _only(where, block, KEYS)
    values = {key: KEYS[key](f"{where}: {key}", value) for key, value in block.items()}
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


def _storage(where: str, name: str, block: Mapping[str, Any]) -> Storage:
    _only(where, block, ("writer", "reader", "options", "reader_options"))
    if name == FILESYSTEM:
        raise UsageError(f"{where}: {FILESYSTEM} is built in: want another name")
    for key in ("writer", "reader"):
        if key not in block:
            raise UsageError(f'{where}: want a {key}, such as {key} = "package.module:Class"')
    options, reader_options = block.get("options", {}), block.get("reader_options", {})
    if not isinstance(options, dict):
        raise UsageError(f'{where}: options: want a table, such as {{ path = "s3://bucket/{{run}}" }}')
    if not isinstance(reader_options, dict) or "path" in reader_options:
        raise UsageError(f"{where}: reader_options: want a table without path, which is taken from options, such as {{ thread_count = 2 }}")
    places = _place(f"{where}: writer", block["writer"]), _place(f"{where}: reader", block["reader"])
    return Storage(*places, tuple(options.items()), tuple(reader_options.items()))


# One checker for each key of a target's block: value in, checked value out.


def _text(where: str, value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise UsageError(f"{where} = {value!r}: want a text")
    return value


def _place(where: str, value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[^\W\d][\w.]*:[^\W\d][\w.]*", value):
        raise UsageError(f"{where} = {value!r}: want module:name")
    return value


def _setup(where: str, value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[^\W\d][\w.]*(:[^\W\d][\w.]*)?", value):
        raise UsageError(f"{where} = {value!r}: want module:function, or a module that need only be imported")
    return value


def _seconds(where: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < math.inf:
        raise UsageError(f"{where} = {value!r}: want seconds, more than 0")
    return float(value)


def _words(known: tuple[str, ...]) -> Callable[[str, Any], tuple[str, ...]]:
    def check(where: str, value: Any) -> tuple[str, ...]:
        for word in (words := _texts(where, value)):
            if word not in known:
                raise UsageError(f"{where}: unknown {word!r} ({one_of(word, known)})")
        return words

    return check


def _texts(where: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
        raise UsageError(f"{where} = {value!r}: want a list of texts")
    return tuple(value)


def _environment(where: str, value: Any) -> tuple[tuple[str, str], ...]:
    if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
        raise UsageError(f'{where} = {value!r}: want a table of texts, such as {{ UCX_TLS = "tcp" }}')
    for name in value:
        if not re.fullmatch(r"[^\W\d]\w*", name, re.ASCII):
            raise UsageError(f"{where}: {name!r} is no name of an environment variable")
    return tuple(value.items())


def _tolerance(where: str, value: Any) -> dict[str, float]:
    if not isinstance(value, dict):
        raise UsageError(f"{where} = {value!r}: want a table from dtype to relative error, such as {{ float32 = 1e-5 }}")
    for dtype, error in value.items():
        if dtype not in TOLERANCE:
            raise UsageError(f"{where}: unknown dtype {dtype!r} ({one_of(dtype, TOLERANCE)})")
        if isinstance(error, bool) or not isinstance(error, (int, float)) or not 0 <= error < 1:
            raise UsageError(f"{where}: {dtype} = {error!r}: want a relative error from 0 to 1")
    return {dtype: float(error) for dtype, error in value.items()}


def _init_options(where: str, value: Any) -> tuple[tuple[str, Any], ...]:
    if not isinstance(value, dict):
        raise UsageError(f'{where} = {value!r}: want a table, such as {{ device_id = true, pg_options = "package:function" }}')
    _only(where, value, ("device_id", "pg_options"))
    if not isinstance(value.get("device_id", True), bool):
        raise UsageError(f"{where}: device_id = {value['device_id']!r}: want true or false")
    if "pg_options" in value:
        _place(f"{where}: pg_options", value["pg_options"])
    return tuple(value.items())


def _init_method(where: str, value: Any) -> str:
    if not re.match(r"(tcp|file|env)://", _text(where, value)):
        raise UsageError(f"{where} = {value!r}: want tcp://, file:// or env://")
    return str(value)


KEYS: dict[str, Callable[[str, Any], Any]] = {
    "device": _text,
    "backend": _text,
    "setup": _setup,
    "cannot": _words(CAPABILITIES),
    "dtypes": _words(DTYPES),
    "timeout": _seconds,
    "startup_timeout": _seconds,
    "env": _environment,
    "init_method": _init_method,
    "options": _init_options,
    "tolerance": _tolerance,
    "storage": _text,
    "expect": _texts,
}


def _only(where: str, block: Mapping[str, Any], known: Mapping[str, Any] | tuple[str, ...]) -> None:
    for key in block:
        if key not in known:
            raise UsageError(f"{where}: unknown key {key!r} ({one_of(key, known)})")


def _tables(where: str, value: Any) -> dict[str, dict[str, Any]]:
    if not isinstance(value, dict) or not all(isinstance(block, dict) for block in value.values()):
        raise UsageError(f"{where}: want tables, such as {where.rpartition('[')[2].rstrip(']')}.NAME")
    return value


# From a name to a target


def offered() -> dict[str, EntryPoint]:
    """The targets that installed packages offer, by name."""
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def _load(entry: EntryPoint) -> Target:
    where = f"entry point {entry.name} of {GROUP}"
    try:
        found = entry.load()
        if callable(found) and not isinstance(found, Target):
            found = found()
    except Exception as error:
        raise UsageError(f"{where}: {type(error).__name__}: {error}") from None
    if isinstance(found, Target):
        return found
    if isinstance(found, Mapping):
        return target_from(where, entry.name, found, Path.cwd())
    raise UsageError(f"{where}: gave a {type(found).__name__}, want a Target or a table")


def known_targets(config: Config) -> dict[str, str]:
    """The names of all targets, each with where it comes from."""
    found = dict.fromkeys(BUILTIN, "built in")
    found.update({name: f"entry point {entry.value}" for name, entry in offered().items()})
    found.update(dict.fromkeys(config.targets, config.path.name if config.path else ""))
    return found


def named_target(name: str, config: Config) -> Target:
    """The target of this name: from the config file, an installed package, or built in. Raises :class:`UsageError`."""
    if name in config.targets:
        return config.targets[name]
    if (entry := offered().get(name)) is not None:
        return _load(entry)
    if name in BUILTIN:
        return BUILTIN[name]
    raise UsageError(f"no target is called {name!r} ({one_of(name, known_targets(config))})")


def with_storage(target: Target, name: str | None, config: Config) -> Target:
    """The target with the storage of this name (default: its own). Raises :class:`UsageError`."""
    name = name or target.storage
    if name == FILESYSTEM:
        return replace(target, storage=name)
    if name not in config.storages:
        if name == target.storage and target.writer:
            return target
        raise UsageError(f"no storage is called {name!r} ({one_of(name, [FILESYSTEM, *config.storages])})")
    found = config.storages[name]
    return replace(
        target,
        storage=name,
        writer=found.writer,
        reader=found.reader,
        options=found.options,
        reader_options=found.reader_options,
        cannot=tuple(dict.fromkeys((*target.cannot, "checkpoint_files"))),
    )


def find_target(request: RunRequest) -> Target:
    """The target that a request names, with its storage and time limit, ready to start. Raises :class:`UsageError`."""
    config = read_config()
    target = with_storage(named_target(request.target, config), request.storage, config)
    if request.timeout is not None:
        target = replace(target, timeout=request.timeout)
    check_target(target, request.world_size)
    return target


def check_target(target: Target, ranks: int) -> None:
    """What can be told before anything starts: modules that are not there, devices that are too few. Raises :class:`UsageError`."""
    pg_options = str(dict(target.init_options).get("pg_options", ""))
    places = (("setup", target.setup), ("pg_options", pg_options), ("writer", target.writer), ("reader", target.reader))
    for key, place in places:
        module = place.partition(":")[0]
        if module and not _exists(module):
            raise UsageError(f"target {target.name}: {key} = {place!r}: there is no module {module}; is it installed, or on PYTHONPATH?")
    check_devices(target, ranks)


def _exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module.partition(".")[0]) is not None
    except (ImportError, ValueError):
        return False
