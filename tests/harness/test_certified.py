"""Certified runs: what they leave, that it comes out the same again, and that no submission stands that was tampered with."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shardlaw.conformance.commands import cli
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.laws import find
from shardlaw.conformance.report.run_report import read_report
from shardlaw.conformance.report.writer import write_report
from shardlaw.conformance.run import certified_profile

LIST = """# tiny-2026.1: what this test is about
collective.all-reduce mesh=2 x=2
collective.all-reduce mesh=3@2,0,1 x=2
collective.gather mesh=2 x=2
collective.gather mesh=3 x=4x3:-:int64 seed=2
mesh.coordinates mesh=2x2
mesh.coordinates mesh=2@1,0
redistribute.local mesh=2 x=4:S(0) to=R
"""
NEWER = LIST + "redistribute.local mesh=2 x=5:S(0) to=R\n"
TARGET = """
[target.frank]
backend = "gloo"
cannot = ["gather"]
"""
Change = Callable[[Path, dict[str, Any]], None]


def profiles(folder: Path, text: str) -> Path:
    (folder / "2026.1").mkdir(parents=True)
    (folder / "2026.1" / "tiny.txt").write_text(text)
    return folder


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder in which two certified runs of one list lie: one on a target that declares something as missing."""
    folder = tmp_path_factory.mktemp("certified")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(certified_profile, "PROFILES", profiles(folder / "profiles", LIST))
        patch.chdir(folder)
        (folder / "shardlaw.toml").write_text(TARGET)
        for name, target in (("first", "gloo"), ("again", "gloo"), ("frank", "frank")):
            assert cli.main(["run", "--certify", "tiny-2026.1", "--seed", "7", "--target", target, "--report", name]) in (0, 3)
        yield folder


@pytest.fixture
def submission(home: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(home / "first", tmp_path / "submission"))


def report(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return found


@pytest.mark.ranks
def test_a_certified_run_says_what_it_ran_and_with_what(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = report(home / "first")["certificate"]
    assert (told["profile"], told["release"], told["cases"], told["held"], told["passed"]) == ("tiny", "2026.1", 7, 7, True)
    assert told["sha256"] == hashlib.sha256(LIST.encode()).hexdigest()
    assert told["loaded"]["torch"] == report(home / "first")["target"]["torch"]
    assert told["loaded"]["torch_git"]
    lines = (home / "first" / "verdicts.txt").read_text().splitlines()
    assert lines == [f"held {line}" for line in LIST.splitlines()[1:]]
    assert cli.main(["verify", str(home / "first"), "--rerun", "3"]) == 0
    assert "verified; 3 of its cases were tried again: tiny-2026.1: passed: of 7 cases 7 hold" in capsys.readouterr().out


@pytest.mark.ranks
def test_two_certified_runs_give_the_same_verdicts_byte_by_byte(home: Path) -> None:
    assert (home / "first" / "verdicts.txt").read_bytes() == (home / "again" / "verdicts.txt").read_bytes()


@pytest.mark.ranks
def test_what_is_declared_missing_is_counted_apart(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    told = report(home / "frank")["certificate"]
    assert (told["held"], told["missing"], told["unsaid"]) == (5, 2, 0)
    assert not told["passed"]  # gloo can gather: what is declared missing works
    assert cli.main(["verify", str(home / "frank")]) == 1
    assert "it declares gather as missing, which works" in capsys.readouterr().out


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def seal(folder: Path, data: dict[str, Any]) -> None:
    """Name the verdicts as they stand now, as whoever changes them would."""
    data["certificate"]["verdicts"] = hashlib.sha256((folder / "verdicts.txt").read_bytes()).hexdigest()


def rewrite(folder: Path, data: dict[str, Any]) -> None:
    """Write the report and its pages with what was changed, as whoever changes them would."""
    (folder / "report.json").write_text(json.dumps(data))
    write_report(folder, read_report(folder))


def law_left_out(folder: Path, data: dict[str, Any]) -> None:
    data["laws"] = [law for law in data["laws"] if law["id"] != "collective.gather"]


def verdict_changed(folder: Path, data: dict[str, Any]) -> None:
    edit(folder / "verdicts.txt", "held collective.gather", "refused collective.gather")


def verdict_changed_and_sealed(folder: Path, data: dict[str, Any]) -> None:
    verdict_changed(folder, data)
    seal(folder, data)


def deviation_hidden(folder: Path, data: dict[str, Any]) -> None:
    """The cases as they came say otherwise."""
    edit(folder / "cases.txt", "held swept collective.gather", "wrong-value swept collective.gather")


def deviation_called_expected(folder: Path, data: dict[str, Any]) -> None:
    edit(folder / "verdicts.txt", "held mesh.coordinates", "expected no-such-cause wrong-value mesh.coordinates")
    seal(folder, data)
    data["certificate"] |= {"held": 6, "expected": 1}


def case_left_out(folder: Path, data: dict[str, Any]) -> None:
    lines = (folder / "verdicts.txt").read_text().splitlines(keepends=True)
    (folder / "verdicts.txt").write_text("".join(lines[:-1]))
    seal(folder, data)


def case_twice(folder: Path, data: dict[str, Any]) -> None:
    lines = (folder / "verdicts.txt").read_text().splitlines(keepends=True)
    (folder / "verdicts.txt").write_text("".join([lines[0], *lines[:-1]]))
    seal(folder, data)


def case_replaced(folder: Path, data: dict[str, Any]) -> None:
    edit(folder / "verdicts.txt", "mesh=3@2,0,1", "mesh=3")
    seal(folder, data)


def verdicts_gone(folder: Path, data: dict[str, Any]) -> None:
    (folder / "verdicts.txt").unlink()


def cases_gone(folder: Path, data: dict[str, Any]) -> None:
    (folder / "cases.txt").unlink()


def other_list(folder: Path, data: dict[str, Any]) -> None:
    data["certificate"]["sha256"] = hashlib.sha256(NEWER.encode()).hexdigest()


def release_that_never_was(folder: Path, data: dict[str, Any]) -> None:
    data["certificate"]["release"] = "2025.4"


def other_torch(folder: Path, data: dict[str, Any]) -> None:
    data["target"]["torch"] = "2.99.0"


def torch_not_told(folder: Path, data: dict[str, Any]) -> None:
    data["certificate"]["loaded"]["torch_git"] = ""


def other_shardlaw(folder: Path, data: dict[str, Any]) -> None:
    data["harness"] = data["certificate"]["loaded"]["harness"] = "0.0.1"


def smaller_world(folder: Path, data: dict[str, Any]) -> None:
    data["target"]["world_size"] = 2


def not_finished(folder: Path, data: dict[str, Any]) -> None:
    data["complete"] = False


def stopped(folder: Path, data: dict[str, Any]) -> None:
    data["stopped_by"] = "budget"


def advisory(folder: Path, data: dict[str, Any]) -> None:
    data["laws"][0]["tier"] = "advisory"


def clause_changed(folder: Path, data: dict[str, Any]) -> None:
    data["laws"][0]["clause"] = "Nothing in particular."


def more_cases_than_verdicts(folder: Path, data: dict[str, Any]) -> None:
    data["laws"][0]["cases"] += 5


def missing_declared_afterwards(folder: Path, data: dict[str, Any]) -> None:
    data["target"]["cannot"] = ["gather"]


def foreign_expectation(folder: Path, data: dict[str, Any]) -> None:
    line = {
        "law": "collective.gather",
        "kind": "wrong-value",
        "hits": 1,
        "masked": 0.1,
        "stale": False,
        "where": "mine.toml:1",
        "reason": "so",
    }
    data["expectations"].append(line)


def finding_without_a_file(folder: Path, data: dict[str, Any]) -> None:
    case = Case.parse(find("mesh.coordinates").control)
    line = {
        "id": "0badcafe",
        "law": case.law,
        "kind": "wrong-value",
        "status": "expected",
        "message": "",
        "text": case.text,
        "features": [],
    }
    data["findings"].append({**line, "case": case.to_json()})
    data["totals"]["findings"] += 1


def new_finding_and_exit_0(folder: Path, data: dict[str, Any]) -> None:
    finding_without_a_file(folder, data)
    data["findings"][0]["status"] = "new"
    data["totals"]["new"] += 1


def passed_by_decree(folder: Path, data: dict[str, Any]) -> None:
    edit(folder / "verdicts.txt", "held collective.gather", "wrong-value collective.gather")
    edit(folder / "cases.txt", "held swept collective.gather", "wrong-value swept collective.gather")
    seal(folder, data)


def deviation_called_unconfirmed(folder: Path, data: dict[str, Any]) -> None:
    """What a case came to is hidden behind a deviation of another one that is said not to repeat."""
    deviation_hidden(folder, data)
    text = next(line for line in LIST.splitlines() if line.startswith("collective.gather"))
    data["unconfirmed"].append({"law": "collective.gather", "kind": "hang", "message": "", "text": text, "case": {}})
    data["totals"]["unconfirmed"] = 1


def unconfirmed_not_counted(folder: Path, data: dict[str, Any]) -> None:
    deviation_called_unconfirmed(folder, data)
    data["unconfirmed"][0]["kind"] = "wrong-value"
    data["totals"]["unconfirmed"] = 0


def case_tried_until_it_held(folder: Path, data: dict[str, Any]) -> None:
    lines = (folder / "cases.txt").read_text().splitlines(keepends=True)
    (folder / "cases.txt").write_text("".join([lines[0].replace("held", "wrong-value", 1), *lines]))
    law = next(law for law in data["laws"] if f" {law['id']} " in lines[0])
    law["wrong"] = 1


def case_of_no_list(folder: Path, data: dict[str, Any]) -> None:
    with open(folder / "cases.txt", "a") as file:
        file.write("held swept redistribute.local mesh=2 x=9:S(0) to=R\n")


def finding_taken_out(folder: Path, data: dict[str, Any]) -> None:
    (folder / "findings" / "0badcafe.json").write_text("{}")


def law_added(folder: Path, data: dict[str, Any]) -> None:
    data["laws"].append({**data["laws"][0], "id": "mesh.groups"})


def laws_in_another_order(folder: Path, data: dict[str, Any]) -> None:
    data["laws"].reverse()


def refusals_not_told(folder: Path, data: dict[str, Any]) -> None:
    for name in ("verdicts.txt", "cases.txt"):
        text = (folder / name).read_text()
        (folder / name).write_text(text.replace("held swept mesh.", "refused swept mesh.").replace("held mesh.", "refused mesh."))
    seal(folder, data)
    data["certificate"] |= {"held": 5, "refused": 2}


def outcome_changed(folder: Path, data: dict[str, Any]) -> None:
    data["laws"][0]["outcome"] = "expected"


def totals_changed(folder: Path, data: dict[str, Any]) -> None:
    data["totals"]["checks"] += 1000


def error_added(folder: Path, data: dict[str, Any]) -> None:
    data["errors"].append({"law": "mesh.coordinates", "message": "no", "text": "no"})


def shard_of_a_run(folder: Path, data: dict[str, Any]) -> None:
    data["shard"] = "1/2"


def other_certificate(folder: Path, data: dict[str, Any]) -> None:
    data["certificate"]["held"] = 70
    data["certificate"]["cases"] = 70


CHANGES = [
    law_left_out, verdict_changed, verdict_changed_and_sealed, deviation_hidden, deviation_called_expected, case_left_out, case_twice,
    case_replaced, verdicts_gone, cases_gone, other_list, release_that_never_was, other_torch, torch_not_told, other_shardlaw,
    smaller_world, not_finished, stopped, advisory, clause_changed, more_cases_than_verdicts, missing_declared_afterwards,
    foreign_expectation, finding_without_a_file, new_finding_and_exit_0, passed_by_decree, deviation_called_unconfirmed,
    unconfirmed_not_counted, case_tried_until_it_held, case_of_no_list, finding_taken_out, law_added, laws_in_another_order,
    refusals_not_told, outcome_changed, totals_changed, error_added, shard_of_a_run, other_certificate,
]  # fmt: skip


@pytest.mark.ranks
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_submission_that_was_tampered_with_does_not_stand(submission: Path, change: Change, capsys: pytest.CaptureFixture[str]) -> None:
    data = report(submission)
    change(submission, data)
    rewrite(submission, data)
    assert cli.main(["verify", str(submission)]) == 1
    assert "not verified" in capsys.readouterr().out


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("page", "old", "new"), [("report.html", "7", "70"), ("report.md", "7", "70"), ("junit.xml", 'tests="', 'tests="7')]
)
def test_pages_that_say_what_the_report_does_not(
    submission: Path, page: str, old: str, new: str, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(submission / page, old, new)
    assert cli.main(["verify", str(submission)]) == 1
    assert f"{page} is not the page of this report.json" in capsys.readouterr().out
    (submission / page).unlink()
    assert cli.main(["verify", str(submission)]) == 1
    assert f"{page} cannot be read" in capsys.readouterr().out


@pytest.mark.ranks
def test_what_was_changed_everywhere_alike_is_seen_when_it_is_tried_again(submission: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = report(submission)
    refusals_not_told(submission, data)
    next(law for law in data["laws"] if law["id"] == "mesh.coordinates")["refused"] = data["totals"]["refused"] = 2
    rewrite(submission, data)
    assert cli.main(["verify", str(submission)]) == 0
    assert cli.main(["verify", str(submission), "--rerun", "7"]) == 1
    assert "mesh.coordinates mesh=2x2: refused in the report, held here" in capsys.readouterr().out


@pytest.mark.ranks
def test_a_board_shows_runs_by_target_and_profile(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "board.html"
    assert cli.main(["board", str(home / "first"), str(home / "frank"), "-o", str(page)]) == 0
    text = page.read_text()
    assert '<a class="passed" href="#run-1">passed</a>' in text
    assert "5 of 7 hold, 2 declared missing" in text
    assert "not verified: it declares gather as missing, which works" in text
    assert "<script" not in text
    assert cli.main(["board", str(home / "first"), str(home / "again"), "-o", str(page)]) == 2
    assert "want one" in capsys.readouterr().err
