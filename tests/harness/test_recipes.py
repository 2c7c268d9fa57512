"""The workflow and the commands of ``docs/ci.md``: they parse, and ask for what there is."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardlaw.conformance.commands import cli

ROOT = Path(__file__).parents[2]
WORKFLOW = ROOT / "examples" / "github" / "shardlaw-nightly.yml"


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


@pytest.mark.parametrize("source", [WORKFLOW, ROOT / "docs" / "ci.md"], ids=lambda path: path.name)
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
