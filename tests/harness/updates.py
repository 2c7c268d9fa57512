"""Reports with findings, and a shell that writes them down as expectations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from shardlaw.conformance.commands import cli
from shardlaw.conformance.errors import UsageError
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.features.features import features_of
from shardlaw.conformance.law.verdict import error_pattern, finding_id
from shardlaw.conformance.laws import catalogue, find
from shardlaw.conformance.report.run_report import FindingLine, RunReport, TargetLine, Totals
from shardlaw.conformance.run.entry import Entry
from shardlaw.conformance.run.expectations import load
from shardlaw.conformance.run.finding_file import to_json

GATHER = Case.parse("redistribute.local mesh=2x2 x=5:_S(0,3),S(0) to=R,R")
RAISES = Case.parse("op.forward[kron] mesh=2x2 a=4:S(0),S(0) b=2:R,R steps=kron(a,b)")
LAWS = list(catalogue().values())


def finding(case: Case = GATHER, kind: str = "wrong-value", error: str = "", seen: tuple[str, ...] = (), **fields: Any) -> FindingLine:
    features = tuple(sorted({*features_of(case, find(case.law)), *seen}))
    signature = f"{case.law} | {kind} | local | {error_pattern(error)}"
    line = FindingLine(
        id=finding_id(signature, features),
        law=case.law,
        kind=kind,
        status="new",
        message="rank 0: holds other elements",
        text=case.text,
        case=case.to_json(),
        features=list(features),
        signature=signature,
    )
    line.reproducer = f"findings/{line.id}.py"
    return msgspec.structs.replace(line, **fields)


def report(folder: Path, *findings: FindingLine, torch: str = "2.13.0+cpu", target: str = "gloo", **fields: Any) -> Path:
    folder.mkdir(exist_ok=True)
    line = TargetLine(name=target, device="cpu", backend="gloo", world_size=4, torch=torch, python="3.11.9", storage="filesystem")
    (folder / "report.json").write_text(to_json(RunReport(target=line, findings=list(findings), totals=Totals(), **fields)))
    return folder


class Shell:
    """Calls ``shardlaw expect update`` from a folder of its own."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self.file = folder / "shardlaw-expect.toml"
        self._capsys = capsys

    def __call__(self, *arguments: str, code: int = 0) -> str:
        """What the command said: on stdout, or why it refused."""
        got = cli.main(["expect", "update", *arguments])
        out, err = self._capsys.readouterr()
        assert got == code, out + err
        if code == 0:
            assert err == ""
            return out
        assert out == ""
        assert err.count("\n") == 1
        assert err.startswith("shardlaw: ")
        return err.removeprefix("shardlaw: ").strip()

    def filled(self, reason: str = "it is known", torch: str = "2.13.0", target: str = "gloo") -> tuple[Entry, ...]:
        """The entries, once somebody has said why."""
        with pytest.raises(UsageError, match=r":\d+: reason = '\.\.\.' is not filled in"):
            load([self.file], LAWS, torch, target)
        self.file.write_text(self.file.read_text().replace('"..."', json.dumps(reason)))
        return load([self.file], LAWS, torch, target).entries
