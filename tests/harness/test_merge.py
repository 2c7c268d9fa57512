"""The reports of shards as one: what they counted is added up, what follows from the counts is worked out again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shardlaw.conformance.commands import cli
from shardlaw.conformance.report.run_report import RunReport, read_report
from tests.harness.reports import CASE, expectation, finding, law, report, stored


def shards(folder: Path, *made: RunReport, cases: bool = True) -> list[str]:
    """Store reports as the shards of one run; returns their paths."""
    paths = []
    for at, one in enumerate(made, 1):
        one.shard = f"{at}/{len(made)}"
        lines = [f"held drawn {line.id} mesh=2 seed={at}.{n}" for line in one.laws for n in range(line.cases)]
        paths.append(str(stored(folder / f"s{at}", one, lines if cases else None)))
    return paths


def merged(folder: Path, *made: RunReport, cases: bool = True) -> tuple[int, RunReport]:
    code = cli.main(["merge", *reversed(shards(folder, *made, cases=cases)), "-o", str(folder / "all")])
    return code, read_report(folder / "all")


def test_counts_are_added_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = report([law("mesh.groups", cases=4, checks=8, refused=1, seconds=1.5, features={"uneven": 3})], features={"uneven": 3})
    two = report([law("mesh.groups", cases=3, checks=6, rejected=2, seconds=1.0, features={"uneven": 1, "0-d": 1})], features={"0-d": 1})
    one.features_missing, two.features_missing = ["0-d", "mesh-3d"], ["uneven", "mesh-3d"]
    code, whole = merged(tmp_path, one, two)
    (line,) = whole.laws
    assert (line.cases, line.checks, line.refused, line.rejected, line.seconds) == (7, 14, 1, 2, 2.5)
    assert line.features == {"0-d": 1, "uneven": 4}
    assert (whole.features, whole.features_missing) == ({"0-d": 1, "uneven": 3}, ["mesh-3d"])
    assert (whole.totals.cases, whole.totals.distinct, whole.totals.drawn) == (7, 7, 7)
    assert (code, whole.exit, whole.complete, whole.shard) == (0, 0, True, "1/1")
    assert len((tmp_path / "all" / "cases.txt").read_text().splitlines()) == 7
    for name in ("report.md", "report.html", "junit.xml"):
        assert (tmp_path / "all" / name).exists()
    assert "exit 0: nothing new" in capsys.readouterr().out


def test_findings_of_all_shards_stand_in_one_report(tmp_path: Path) -> None:
    laws = [law("mesh.groups", "deviates"), law("op.forward[mean]", "deviates")]
    found = finding("11111111", reproducer="findings/11111111.py", number=4)
    again = finding("33333333", signature=found.signature, number=9)
    other = finding("22222222", "mesh.groups mesh=2", number=2)
    code, whole = merged(tmp_path, report(laws, [again]), report([laws[0], law("op.forward[mean]", "deviates")], [found, other]))
    assert [line.id for line in whole.findings] == ["22222222", "11111111"]
    assert ([line.outcome for line in whole.laws], code) == (["deviates", "deviates"], 1)
    assert (whole.totals.findings, whole.totals.new) == (2, 2)
    files = sorted(path.name for path in (tmp_path / "all" / "findings").iterdir())
    assert files == ["11111111.json", "11111111.py", "22222222.json"]


def test_an_expected_finding_stands_once_for_its_entry(tmp_path: Path) -> None:
    known = {"status": "expected", "note": "known", "entry": "here/op.toml:3"}
    made = []
    for at, number in ((1, 9), (2, 5)):
        one = report(
            [law("op.forward[mean]", "expected", expected=at)], [finding(f"{at}" * 8, f"{CASE} seed={number}", number=number, **known)]
        )
        one.expectations = [expectation("op.forward[mean]", hits=at, masked=0.1 * at, matched={"op.forward[mean]": at}, happened=True)]
        made.append(one)
    code, whole = merged(tmp_path, *made)
    assert [found.id for found in whole.findings] == ["22222222"], "the one that comes first in the plan of the law"
    (entry,) = whole.expectations
    assert (entry.hits, entry.masked, entry.stale, entry.matched) == (3, 0.15, False, {"op.forward[mean]": 3})
    assert (whole.laws[0].outcome, code) == ("expected", 0)


def test_what_was_reached_often_enough_only_together_is_stale(tmp_path: Path) -> None:
    def part(**more: Any) -> RunReport:
        one = report([law("op.forward[mean]", cases=60)], **more)
        one.expectations = [expectation("op.forward[mean]", matched={"op.forward[mean]": 11}, masked=0.1833)]
        return one

    code, whole = merged(tmp_path / "a", part(), part())
    assert (whole.expectations[0].stale, whole.laws[0].outcome, code) == (True, "stale", 0)
    code, whole = merged(tmp_path / "b", part(strict=True), part(strict=True))
    assert (whole.expectations[0].masked, code) == (0.1833, 1)
    rare = part(), part()
    for one in rare:
        one.expectations[0].rare = True
    assert merged(tmp_path / "c", *rare)[1].laws[0].outcome == "held"


def test_what_is_too_wide_is_worked_out_again(tmp_path: Path) -> None:
    def part(matched: int, warnings: list[str]) -> RunReport:
        one = report([law("op.forward[mean]", cases=20)], warnings=warnings)
        one.expectations = [expectation("op.forward[mean]", hits=1, matched={"op.forward[mean]": matched}, refused=bool(warnings))]
        return one

    matched = "here/op.toml:3: matches cases of op.forward[mean] that hold, 30% of all, more than 20%"
    said = f"{matched}: refused, name more features or say wide = true"
    _, whole = merged(tmp_path / "a", part(6, [said]), part(0, ["the disk is slow"]))
    assert (whole.warnings, whole.expectations[0].refused) == (["the disk is slow"], False)
    _, whole = merged(tmp_path / "b", part(6, [said]), part(6, [said]))
    assert (whole.warnings, whole.expectations[0].refused) == ([said], True)


def test_a_law_that_one_shard_judged_is_tested(tmp_path: Path) -> None:
    silent = report([law("mesh.groups", "untested", 0, reason="no case was judged")], exit=2)
    code, whole = merged(tmp_path / "a", silent, report([law("mesh.groups")]))
    assert (whole.laws[0].outcome, whole.laws[0].reason, code) == ("held", None, 0)
    code, whole = merged(tmp_path / "b", silent, report([law("mesh.groups", "untested", 0, reason="needs 8 ranks")], exit=2))
    assert (whole.laws[0].outcome, whole.laws[0].reason, code) == ("untested", "no case was judged; needs 8 ranks", 2)


@pytest.mark.parametrize(
    ("given", "code"),
    [
        ({"exit": 130, "complete": False, "stopped_by": "interrupt"}, 130),
        ({"exit": 3, "complete": False, "stopped_by": "an error of the harness"}, 3),
        ({"exit": None, "complete": False}, 3),
        ({"exit": 2, "stopped_by": "an error of the harness"}, 3),
        ({"exit": 0, "stopped_by": "budget"}, 0),
    ],
)
def test_a_shard_that_was_not_finished_leaves_the_run_so(given: dict[str, Any], code: int, tmp_path: Path) -> None:
    got, whole = merged(tmp_path, report([law("mesh.groups")]), report([law("mesh.groups")], **given))
    assert (got, whole.exit) == (code, code)
    assert whole.complete == (code == 0 or given["exit"] == 2)
    assert whole.stopped_by == given.get("stopped_by")


def test_a_missing_shard_is_a_run_that_was_not_finished(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = shards(tmp_path, *(report([law("mesh.groups")]) for _ in range(3)))
    assert cli.main(["merge", paths[0], paths[2], "-o", str(tmp_path / "all")]) == 3
    whole = read_report(tmp_path / "all")
    assert (whole.shard, whole.complete, whole.stopped_by) == ("1,3/3", False, "shards that are not here: 2/3")
    assert "stopped by shards that are not here: 2/3" in capsys.readouterr().out
    assert cli.main(["merge", str(tmp_path / "all"), paths[1], "-o", str(tmp_path / "more")]) == 2
    assert "want the reports of single shards" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (report([law("mesh.groups")], seed=8), "seed is 8, in"),
        (report([law("mesh.groups")], profile="ci"), "profile is 'ci', in"),
        (report([law("mesh.groups")], target={"torch": "2.12.0"}), "torch is '2.12.0', in"),
        (report([law("mesh.groups")], target={"name": "mine"}), "target is 'mine', in"),
        (report([law("mesh.groups")], target={"world_size": 8}), "world size is 8, in"),
        (report([law("mesh.copies")]), "by its list of laws"),
    ],
)
def test_reports_of_two_requests_do_not_belong_together(
    other: RunReport, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = shards(tmp_path, report([law("mesh.groups")]), other)
    assert cli.main(["merge", *paths, "-o", str(tmp_path / "all")]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert f"{tmp_path / 's2'}: belongs to another run than {tmp_path / 's1'}" in err
    assert message in err
    assert not (tmp_path / "all").exists()


def test_bad_input_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = shards(tmp_path, report([law("mesh.groups")]), report([law("mesh.groups")]))
    (tmp_path / "file").write_text("")
    for arguments, message in (
        ([], "Missing argument 'REPORT'"),
        ([one, str(tmp_path / "none")], "cannot be read"),
        ([one, one], f"{one}: is shard 1/2, and so is {one}: want each shard once"),
        ([one, two, "-o", two], "is one of the reports: want another folder"),
        ([one, two, "-o", str(tmp_path / "file")], "is no folder"),
    ):
        assert cli.main(["merge", *arguments]) == 2
        out, err = capsys.readouterr()
        assert (out, err.count("\n")) == ("", 1), err
        assert message in err


def test_a_whole_run_is_its_own_merge(tmp_path: Path) -> None:
    _, whole = merged(tmp_path, report([law("mesh.groups", "deviates")], [finding(text="mesh.groups mesh=2")]))
    assert (whole.shard, whole.exit, [found.id for found in whole.findings]) == ("1/1", 1, ["0badcafe"])


LAWS = ("mesh.local-rank", "mesh.refusals", "mesh.coordinates", "layout.wrapper[rows]")


@pytest.mark.ranks
@pytest.mark.usefixtures("one_server")
@pytest.mark.parametrize(("count", "expect"), [(2, ()), (3, ("--no-expect",))])
def test_the_shards_of_a_real_run_make_up_the_whole(count: int, expect: tuple[str, ...], tmp_path: Path) -> None:
    shards = [f"{at}/{count}" for at in range(1, count + 1)]
    for shard in (*shards, "1/1"):
        assert cli.main(["run", *LAWS, *expect, "--shard", shard, "--report", str(tmp_path / shard)]) in (0, 1)
    code = cli.main(["merge", *(str(tmp_path / shard) for shard in shards), "-o", str(tmp_path / "all")])
    whole, parts = (json.loads((tmp_path / name / "report.json").read_text()) for name in ("1/1", "all"))
    assert code == whole["exit"] == (1 if expect else 0)
    for data in (whole, parts):
        for line in data["laws"]:
            del line["seconds"]
        for found in data["findings"]:
            # how often and how far there was time to shrink and confirm
            del found["confirmed"], found["minimal"], found["note"]
    for key in ("laws", "expectations", "features", "features_missing", "totals", "exit", "complete", "shard"):
        assert parts[key] == whole[key], key
    assert sorted(parts["findings"], key=lambda found: found["id"]) == sorted(whole["findings"], key=lambda found: found["id"])
    lists = [sorted((tmp_path / name / "cases.txt").read_text().splitlines()) for name in ("1/1", "all")]
    assert lists[0] == lists[1]
