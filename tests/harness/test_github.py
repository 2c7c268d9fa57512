"""What a run says to GitHub."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from shardlaw.conformance.report.github import annotate
from tests.harness.reports import CASE, finding, law, report

HOSTILE = "50% wrong\r\n::set-env name=A::b, at x:y"


def test_each_new_finding_is_one_escaped_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    found = [
        finding(message=HOSTILE, kind="wrong:kind,x", reproducer="findings/0badcafe.py"),
        finding("11111111", status="expected"),
        finding("22222222", note="no reproducer: none"),
    ]
    out = io.StringIO()
    annotate(report([law("op.forward[mean]")], found), Path("a,b"), out)
    first, second = out.getvalue().splitlines()
    assert first == (
        "::error file=a%2Cb/findings/0badcafe.py,title=shardlaw%3A wrong%3Akind%2Cx 0badcafe::"
        f"{CASE}%0A50%25 wrong%0D%0A::set-env name=A::b, at x:y%0Apython a,b/findings/0badcafe.py"
    )
    assert second == (
        "::error file=a%2Cb/findings/22222222.json,title=shardlaw%3A wrong-value 22222222::"
        f"{CASE}%0Arank 0: holds other elements%0Ano reproducer: none"
    )


def test_nothing_is_said_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    out = io.StringIO()
    annotate(report([law("op.forward[mean]")], [finding()]), tmp_path, out)
    assert out.getvalue() == ""


def test_the_summary_of_a_step_is_added_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    summary = tmp_path / "summary.md"
    summary.write_text("before\n")
    (tmp_path / "report.md").write_text("# shardlaw\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(summary))
    made = report([law("op.forward[mean]")])
    annotate(made, tmp_path)
    assert summary.read_text() == "before\n# shardlaw\n\n"
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "no" / "folder"))
    annotate(made, tmp_path)
    assert "shardlaw: no step summary" in capsys.readouterr().err
