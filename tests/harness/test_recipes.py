"""The workflow and the commands of ``docs/ci.md``: they parse, and ask for what there is."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardlaw.conformance.commands import cli
from shardlaw.conformance.report.markdown import render_markdown
from tests.harness.reports import law, report

ROOT = Path(__file__).parents[2]
WORKFLOW = ROOT / "examples" / "github" / "shardlaw-nightly.yml"
COMMENTING = ROOT / "examples" / "github" / "shardlaw-pull-request.yml"
GH = """#!/bin/sh
echo "$*" >> calls
case "$*" in *--paginate*) cat there ;; esac
"""


@pytest.fixture(scope="module")
def jobs() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(WORKFLOW.read_text())["jobs"]
    return found


def scripts(jobs: dict[str, Any]) -> list[str]:
    return [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]


def commands(text: str) -> list[list[str]]:
    """Every call of a subcommand, as its words."""
    joined = re.sub(r"\$\{\{.*?\}\}", "1", text.replace("\\\n", " "))
    found = re.findall(r"(?m)(?:^|\s)shardlaw ((?:run|merge|compare|expect|show) [^|;&\n`]*)", joined)
    return [shlex.split(words, comments=True) for words in found]


def test_the_jobs_of_the_workflow_fit_together(jobs: dict[str, Any]) -> None:
    assert jobs["shard"]["needs"] == "plan"
    assert jobs["report"]["needs"] == "shard"
    shards = jobs["shard"]["strategy"]["matrix"]["shard"]
    asked = [words for script in scripts(jobs) for words in commands(script) if words[0] == "run"]
    assert [words[words.index("--shard") + 1] for words in asked] == [f"1/{len(shards)}"]
    assert shards == list(range(1, len(shards) + 1))
    for job in jobs.values():
        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step)
            assert re.fullmatch(r"actions/[a-z/-]+@v\d+", step.get("uses", "actions/x@v1"))


@pytest.mark.parametrize("source", [WORKFLOW, COMMENTING, ROOT / "docs" / "ci.md"], ids=lambda path: path.name)
def test_every_command_has_the_options_that_it_is_given(source: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = commands(source.read_text())
    assert {words[0] for words in found} >= {"run"}
    for words in found:
        names = words[:2] if words[0] == "expect" else words[:1]
        assert cli.main([*names, "--help"]) == 0
        known = capsys.readouterr().out
        for word in words:
            if re.fullmatch(r"--?[a-z][a-z-]*", word):
                assert re.search(rf"(?m)[ ,]{re.escape(word)}\b", known), words


@pytest.mark.parametrize(
    ("there", "call"),
    [
        ("", "api repos/o/r/issues/7/comments -F body=@shardlaw-report/report.md"),
        ("41\n42\n", "api --method PATCH repos/o/r/issues/comments/41 -F body=@shardlaw-report/report.md"),
    ],
)
def test_a_pull_request_gets_one_comment_which_is_written_anew(there: str, call: str, tmp_path: Path) -> None:
    (step,) = [step for step in yaml.safe_load(COMMENTING.read_text())["jobs"]["smoke"]["steps"] if step.get("name") == "Comment"]
    (tmp_path / "gh").write_text(GH)
    (tmp_path / "gh").chmod(0o755)
    (tmp_path / "there").write_text(there)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "COMMENTS": "repos/o/r/issues", "NUMBER": "7"}
    command = ["bash", "-e", "-c", step["run"]]
    subprocess.run(command, cwd=tmp_path, env=env, check=True)  # nothing was reported, so nothing is said
    assert not (tmp_path / "calls").exists()
    (tmp_path / "shardlaw-report").mkdir()
    (tmp_path / "shardlaw-report" / "report.md").write_text("# shardlaw 0.1.0 on mine: nothing new\n")
    subprocess.run(command, cwd=tmp_path, env=env, check=True)
    asked, said = (tmp_path / "calls").read_text().splitlines()
    assert "--paginate repos/o/r/issues/7/comments" in asked
    assert said == call


def test_the_comment_is_known_by_how_a_report_begins() -> None:
    begins = render_markdown(report([law("mesh.groups")]), Path("r"))
    assert begins.startswith("# shardlaw ")
    assert 'startswith("# shardlaw ")' in COMMENTING.read_text()
