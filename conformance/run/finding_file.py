"""A finding as a file: ``findings/<id>.json``, written when it is found, read by ``replay``, ``repro`` and ``--known``.

The file names its schema; it holds the case in JSON and as one line of text, and what every rank expected, got and printed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from shardlaw import __version__
from shardlaw.conformance.errors import UsageError

if TYPE_CHECKING:
    from shardlaw.conformance.law.case import Case
    from shardlaw.conformance.law.target import Target
    from shardlaw.conformance.law.verdict import Answer
    from shardlaw.conformance.run.state import Finding

SCHEMA = 1


def is_finding_id(text: str) -> bool:
    """Whether a text is a finding's id: 8 hex digits."""
    return re.fullmatch(r"[0-9a-f]{8}", text) is not None


def write_text(path: Path, text: str) -> Path:
    """Write a file atomically: a reader sees the old content or the new. Raises ``OSError``."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.write_text(text, "utf-8")
    return part.replace(path)


def to_json(value: Any) -> str:
    """JSON with an indent of two spaces and a line for each key."""
    return msgspec.json.format(msgspec.json.encode(value, enc_hook=str), indent=2).decode() + "\n"


def answer_fields(answer: Answer) -> dict[str, Any]:
    """The fields of one rank's answer in a finding's file."""
    first = answer.deviations[0] if answer.deviations else None
    raised = answer.raised
    return {
        "rank": answer.rank,
        "outcome": answer.outcome,
        "expected": first.expected if first else "",
        "got": first.got if first else f"{raised.error}: {raised.text}" if raised else answer.reason,
        "message": first.message if first else "",
        "stack": (raised.stack if raised else "") or answer.stack,
        "output": answer.output,
    }


def write_finding(
    folder: Path, finding: Finding, target: Target, seed: int, *, reproducer: str | None = None, note: str | None = None, script: str = ""
) -> Path:
    """Write ``<id>.json`` into ``folder``, which is created if missing; returns its path. ``note`` replaces the finding's own."""
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    data = {
        "schema": SCHEMA,
        "harness": __version__,
        "id": finding.id,
        "law": finding.law,
        "kind": finding.kind,
        "check": finding.check,
        "signature": finding.signature,
        "status": finding.status,
        "message": finding.message,
        "text": finding.case.text,
        "features": sorted(finding.features),
        "case": finding.case.to_json(),
        "raw_case": finding.raw_case.to_json(),
        "ranks": [answer_fields(answer) for answer in finding.verdict.ranks],
        "target": {name: getattr(target, name) for name in ("name", "device", "backend", "storage")} | {"torch": torch.__version__},
        "seed": seed,
        "shrink_steps": finding.shrink_calls,
        "minimal": finding.minimal,
        "confirmed": list(finding.confirmed),
        "note": finding.note if note is None else note,
        "reproducer": reproducer,
        "script": script,
        "where": finding.where,
        "trace": list(finding.trace),
    }
    return write_text(folder / f"{finding.id}.json", to_json(data))


def read_finding(path: Path) -> dict[str, Any]:
    """Read a finding's file; ``case`` and ``raw_case`` become :class:`Case`. Raises :class:`UsageError` for any other file."""
    from shardlaw.conformance.law.case import Case
    from shardlaw.reference.notation import NotationError

    try:
        data = msgspec.json.decode(path.read_bytes())
    except IsADirectoryError:
        raise UsageError(f"{path}: a folder: want one file from the folder findings/ of a report") from None
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}") from None
    except (msgspec.DecodeError, UnicodeDecodeError):
        raise UsageError(f"{path}: no finding: not JSON") from None
    if not isinstance(data, dict) or not {"schema", "id", "law", "case"} <= data.keys():
        raise UsageError(f"{path}: no finding: want a file from the folder findings/ of a report")
    if data["schema"] != SCHEMA:
        raise UsageError(f"{path}: finding schema {data['schema']!r}, this version reads {SCHEMA}")
    try:
        data["case"] = Case.from_json(data["case"])
        data["raw_case"] = Case.from_json(data["raw_case"]) if "raw_case" in data else data["case"]
    except NotationError as error:
        raise UsageError(f"{path}: {error}") from None
    for key in ("id", "law", "kind", "check", "signature", "status", "message"):
        if not isinstance(data.setdefault(key, ""), str):
            raise UsageError(f"{path}: no finding: {key} is no text")
    if not isinstance(data.setdefault("target", {}), dict):
        raise UsageError(f"{path}: no finding: target is no table")
    return data


def finding_files(folder: Path) -> list[Path]:
    """The files of findings in a folder, or in ``findings/`` of a report's folder, sorted by name."""
    inner = folder / "findings"
    return sorted(path for path in (inner if inner.is_dir() else folder).glob("*.json") if is_finding_id(path.stem))


def read_finding_texts(folder: Path, ids: Iterable[str]) -> dict[str, str]:
    """The texts of the files and scripts of findings, by path in the report's ``folder``, without those that cannot be read."""
    found = {}
    for name in (f"findings/{found_id}.{suffix}" for found_id in ids if is_finding_id(found_id) for suffix in ("json", "py")):
        with suppress(OSError, UnicodeDecodeError):
            found[name] = (folder / name).read_text("utf-8")
    return found


def read_cases(folder: Path) -> Iterator[Case]:
    """Yield the cases of all findings in a folder, which may have none. Raises :class:`UsageError` for a file that is no finding."""
    files = finding_files(folder)
    if not files and next(folder.glob("*.json"), None) and not (folder / "findings").is_dir():
        raise UsageError(f"{folder}: no findings in this folder: want the folder of a report, or its folder findings/")
    for path in files:
        yield read_finding(path)["case"]
