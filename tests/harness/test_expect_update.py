"""The new findings of a report, written down as expectations."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shardlaw.conformance.commands import cli
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.condition import HAS_ELEMENTS, case_facts
from shardlaw.conformance.law.features.features import features_of
from shardlaw.conformance.laws import find
from shardlaw.conformance.report.run_report import ExpectationLine, read_report
from shardlaw.conformance.run.expectations import load
from tests.harness.updates import GATHER, LAWS, RAISES, Shell, finding, report


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shell:
    monkeypatch.chdir(tmp_path)
    return Shell(tmp_path, capsys)


def test_every_new_finding_gets_an_entry(shell: Shell) -> None:
    first, second = finding(), finding(RAISES, "raised", "RuntimeError: shape '[2, 3]' is invalid for input of size 7")
    known = finding(replace(GATHER, law="redistribute.back"), status="expected")
    said = shell(str(report(shell.folder / "report", first, known, second)))
    text = shell.file.read_text()
    lines = text.splitlines()
    assert text.startswith("# For: shardlaw run --expect shardlaw-expect.toml\n\n# rank 0: holds other elements\n")
    assert f"# {GATHER.text}" in lines
    assert f"# shown by {shell.folder}/report/findings/{first.id}.py" in lines
    assert 'signature = "RuntimeError: shape _ is invalid for input of size #"' in lines
    assert lines.count('torch = ">=2.13,<2.14"') == lines.count('reason = "..."') == lines.count("[[expect]]") == 2
    assert known.id not in text
    headers = [number for number, line in enumerate(lines, 1) if line == "[[expect]]"]
    for found, at in zip((first, second), headers, strict=True):
        assert lines[at] == f'law = "{found.law}"'
        assert f"shardlaw-expect.toml:{at}: {found.kind} {found.id} {found.text}" in said
    assert "2 entries written to shardlaw-expect.toml" in said
    assert "shardlaw run --expect shardlaw-expect.toml" in said


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("wrong-value", ""),
        ("divergence", "AssertionError: no (P(avg)) to (P(max)) for 'x'"),
        ("raised", 'ValueError: a [[1, (2, [3])], 4] | b | c | d is "odd" \\ back\ttab'),
        ("raised", "RuntimeError: (((((1)))))"),
        ("raised", "RuntimeError: " + "(" * 300),
        ("raised", "(((((1)))))"),
        ("raised", "RuntimeError: Größe * of ? \x7f'"),
        ("wrong-error", "was accepted"),
        ("crash", "signal 11"),
    ],
)
def test_an_entry_matches_its_finding_and_is_taken_once_it_has_a_reason(shell: Shell, kind: str, error: str) -> None:
    found = finding(kind=kind, error=error)
    shell(str(report(shell.folder / "report", found)))
    (entry,) = shell.filled()
    assert entry.matches(GATHER, kind, set(found.features), error)
    assert not entry.matches(GATHER, kind, set(found.features) - {"uneven"}, error)
    assert (entry.law, entry.finding, entry.reason) == (found.law, found.id, "it is known")
    if error.strip() and entry.signature != "*":
        assert not entry.matches(GATHER, kind, set(found.features), "a different text")


def test_an_entry_is_of_the_torch_and_the_target_that_were_run(shell: Shell) -> None:
    shell(str(report(shell.folder / "report", finding(), torch="2.15.0a0+git123", target="mine")))
    assert len(shell.filled(torch="2.15.1", target="mine")) == 1
    assert not load([shell.file], LAWS, "2.16.0", "mine").entries
    assert not load([shell.file], LAWS, "2.15.1", "gloo").entries


def test_overloads_and_the_world_are_named_only_where_the_rest_says_too_little(shell: Shell) -> None:
    plain = Case.parse("op.forward[sum] mesh=3 x=6:S(0) steps=sum(x)")
    narrow = finding(RAISES, seen=("op:aten.mul.Tensor", "derived"))
    wide = finding(plain, seen=("op:aten.sum.default",))
    shell(str(report(shell.folder / "report", narrow, wide)))
    entries = {entry.finding: entry for entry in shell.filled()}
    assert entries[narrow.id].features == {*narrow.features} - {"op:aten.mul.Tensor", "world:4"}
    assert entries[wide.id].features == {"world:3"}


def test_what_would_match_a_fifth_of_a_laws_cases_names_more(shell: Shell) -> None:
    common = Case.parse("op.program mesh=2x2 x=6:S(0),R steps=b=sum(x);relu(b)")
    rare = Case.parse("op.program mesh=3 x=4:S(0) steps=b=sum(x);relu(b)")
    found = finding(common, seen=("op:aten.relu.default",))
    other = finding(rare, seen=("op:aten.relu.default",))
    folder = report(shell.folder / "report", found, other)
    cases = [common.with_fields(seed=at).text for at in range(30)] + [rare.text]
    (folder / "cases.txt").write_text("".join(f"held drawn {text}\n" for text in cases))
    shell(str(folder))
    first, second = shell.filled()
    assert first.features == set(found.features)
    assert second.features == set(other.features) - {"op:aten.relu.default", "world:3"}
    assert "of the cases of its law" not in shell.file.read_text()
    shell.file.unlink()
    shell(str(report(folder, finding(common))))
    assert "# matches cases that hold, 97% of those of its law: refused unless it says wide = true" in shell.file.read_text()


def test_an_entry_names_the_features_without_which_cases_hold_and_stands_for_a_chapter(shell: Shell) -> None:
    """What deviates is what has an uneven shard to be gathered, of two laws; nothing else about the cases matters."""
    local, back = (f"redistribute.{name} mesh={{}} x={{}}:S(0) to=R" for name in ("local", "back"))
    uneven = [Case.parse(law.format(mesh, shape)) for law in (local, back) for mesh, shape in (("2", "5"), ("2@1,0", "7x2"))]
    even = [Case.parse(law.format(mesh, shape)) for law in (local, back) for mesh, shape in (("2", "4"), ("2@1,0", "4x2"), ("4", "8"))]
    first, _, second, _ = uneven
    folder = report(shell.folder / "report", finding(first), finding(second))
    lines = [f"wrong-value drawn {case.text}\n" for case in uneven] + [f"held drawn {case.text}\n" for case in even]
    (folder / "cases.txt").write_text("".join(lines))
    said = shell(str(folder))
    assert [finding(case).id in said for case in (first, second)] == [True, True]
    (entry,) = shell.filled()
    assert (entry.law, entry.features) == ("redistribute.*", {"uneven"})
    assert all(entry.matches(case, "wrong-value", features_of(case, find(case.law)), "") for case in uneven)
    # where a case of another law has the feature and holds, the entry is of these laws alone
    shell.file.unlink()
    (folder / "cases.txt").write_text("".join([*lines, "held drawn redistribute.same mesh=2 x=5:S(0) to=R\n"]))
    shell(str(folder))
    assert [entry.law for entry in shell.filled()] == ["redistribute.local", "redistribute.back"]


def test_an_entry_says_what_a_field_holds_where_no_feature_parts(shell: Shell) -> None:
    """What deviates is what is asked for in one way; a number or a seed is no way."""
    text = "collective.mismatch mesh=2 attempt={} seed={}"
    wrong, held = ([Case.parse(text.format(word, seed)) for seed in range(3)] for word in ("dtype", "shape"))
    folder = report(shell.folder / "report", finding(wrong[0], features=[]))
    lines = [f"wrong-value drawn {case.text}\n" for case in wrong] + [f"held drawn {case.text}\n" for case in held]
    (folder / "cases.txt").write_text("".join(lines))
    shell(str(folder))
    assert 'where = { attempt = "dtype" }' in shell.file.read_text()
    (entry,) = shell.filled()
    assert [entry.matches(case, "wrong-value", set(), "") for case in (*wrong, *held)] == [True] * 3 + [False] * 3
    shell.file.unlink()
    dtyped = [case.with_fields(x=f"4:R:{dtype}") for case, dtype in zip(wrong, ("int8", "int8", "float64"), strict=True)]
    (folder / "cases.txt").write_text("".join(f"{'wrong-value' if 'int8' in case.text else 'held'} drawn {case.text}\n" for case in dtyped))
    report(folder, finding(dtyped[0], features=[]))
    shell(str(folder))
    assert 'where = { "x.dtype" = "int8" }' in shell.file.read_text()
    assert case_facts(dtyped[0]) == {"attempt=dtype", "x.dtype=int8", "*.placements=/R/", HAS_ELEMENTS}


def test_an_entry_is_of_what_most_cases_have_though_one_of_them_holds(shell: Shell) -> None:
    text = "collective.async mesh=2 x={} calls={}"
    wrong = [Case.parse(text.format(2 + at, f"all_gather/{other}")) for at in range(8) for other in ("all_reduce", "broadcast")]
    held = [Case.parse(text.format(2 + at, "all_reduce/broadcast")) for at in range(20)]
    lone = Case.parse(text.format(2, "all_gather"))
    folder = report(shell.folder / "report", finding(lone))
    lines = [f"wrong-value drawn {case.text}\n" for case in (lone, *wrong)] + [f"held drawn {case.text}\n" for case in held]
    (folder / "cases.txt").write_text("".join([*lines, "held drawn collective.async mesh=2 x=0 calls=all_gather/all_reduce\n"]))
    shell(str(folder))
    (entry,) = shell.filled()
    assert (entry.features, entry.conditions) == ({"collective:all_gather"}, ())


def test_one_cause_that_shows_in_many_laws_is_few_entries(shell: Shell) -> None:
    """What gathers wrongly does so in each form and law, but of tensors without elements; where sizes differ, each case has its error."""
    wrong = [f"collective.all-gather mesh=2 form={form} x={x}" for form in ("joined", "list") for x in range(1, 6)]
    wrong += [f"collective.async mesh=2 x={x} calls=all_gather late=0" for x in range(1, 5)]
    moved = [f"redistribute.{law} mesh=2 x={x}:S(0) to=R" for law in ("local", "back") for x in (2, 4, 6)]
    held = [f"collective.all-gather mesh=2 form={form} x=0" for form in ("joined", "list", "stacked")]
    held += [f"collective.async mesh=2 x={x} calls=all_reduce" for x in range(10)]
    held += [f"redistribute.{law} mesh=2 x={x}:R to={to}" for law in ("local", "back") for x in (2, 4) for to in ("R", "S(0)")]
    raised = [f"collective.all-gather mesh=2 form=list x=2 extents={extents}" for extents in ("2.3", "1.2")]
    shown = [finding(Case.parse(text)) for text in (wrong[0], wrong[5], wrong[10], moved[0], moved[3])]
    shown += [finding(Case.parse(text), "raised", f"RuntimeError: no {'x' * at}") for at, text in enumerate(raised)]
    folder, said = report(shell.folder / "report", *shown), {"wrong-value": wrong + moved, "held": held, "raised": raised}
    (folder / "cases.txt").write_text("".join(f"{word} drawn {text}\n" for word, texts in said.items() for text in texts))
    shell(str(folder))
    gathered, planned, mismatched = shell.filled()
    assert (gathered.law, gathered.features) == ("collective.*", {"collective:all_gather"})
    assert (planned.law, [str(one) for one in planned.conditions]) == ("redistribute.*", ["*.placements=/S/"])
    assert (mismatched.law, mismatched.features, mismatched.signature) == ("collective.all-gather", {"uneven-split"}, "RuntimeError")


@pytest.mark.parametrize("end", ["\n", "\r\n", ""])
def test_what_somebody_wrote_stays_as_it_is(shell: Shell, end: str) -> None:
    old = '# mine\n\n[[ expect ]] # why not\nlaw = "mesh.groups"  # a note\nkind   = "hang"\nreason = """it\nwaits"""\n# the end'
    old = old.replace("\n", end or "\n") + end
    shell.file.write_bytes(old.encode())
    first, second = finding(), finding(RAISES)
    assert "toml:13: wrong-value" in shell(str(report(shell.folder / "report", first)))
    text = shell.file.read_bytes().decode()
    assert text.startswith(old)
    assert ("\r\n" in text) == (end == "\r\n") == (text.count("\n") == text.count("\r\n"))
    shell(str(report(shell.folder / "report", first, second)))
    assert shell.file.read_bytes().decode().startswith(text)
    shell.file.write_bytes(shell.file.read_bytes().replace(b"\r\n", b"\n"))
    assert [entry.finding for entry in shell.filled()] == ["", first.id, second.id]


def test_a_second_time_adds_nothing(shell: Shell) -> None:
    folder = report(shell.folder / "report", finding())
    shell(str(folder))
    text = shell.file.read_text()
    said = shell(str(folder / "report.json"))
    assert shell.file.read_text() == text
    assert f"shardlaw-expect.toml:6: accounts for {finding().id}: no entry added" in said
    assert "nothing to write" in said
    assert 'nothing to write; 1 entry of shardlaw-expect.toml has reason = "...": say there what causes' in said


def test_an_entry_that_was_made_more_general_accounts_for_its_finding(shell: Shell) -> None:
    shell.file.write_text('[[expect]]\nlaw = "redistribute.*"\nkind = "wrong-value"\nfeatures = ["strided"]\nreason = "known"\n')
    said = shell(str(report(shell.folder / "report", finding())))
    assert "toml:1: accounts for" in said
    assert said.endswith("nothing to write\n")
    shell.file.write_text(shell.file.read_text() + 'torch = "<2.13"\n')
    assert "1 entry written" in shell(str(report(shell.folder / "report", finding())))


def test_an_entry_that_names_a_finding_but_does_not_match_is_pointed_at(shell: Shell) -> None:
    found = finding()
    text = f'[[expect]]\nlaw = "redistribute.local"\nkind = "hang"\nreason = "known"\nfinding = "{found.id}"\n'
    shell.file.write_text(text)
    said = shell(str(report(shell.folder / "report", found)))
    assert f"toml:1: names, but does not match, {found.id}" in said
    assert shell.file.read_text() == text


def test_stale_and_wide_entries_are_listed_and_left_alone(shell: Shell) -> None:
    def line(**fields: Any) -> ExpectationLine:
        return ExpectationLine(**{"law": "mesh.groups", "kind": "hang", "hits": 0, "masked": 0.1, "stale": False, **fields})

    lines = [
        line(where="a.toml:3", features=["submesh"], stale=True),
        line(where="a.toml:9", refused=True, masked=0.5),
        line(where="b.toml:1", refused=True, masked=0.4),
        line(where="c.toml:1", hits=3),
    ]
    warning = "a.toml:9: matches cases of mesh.groups that hold, 50% of all, more than 20%: refused, name more features or say wide = true"
    said = shell(str(report(shell.folder / "report", expectations=lines, warnings=[warning])))
    assert said.splitlines() == [
        "a.toml:3: stale: hang of mesh.groups with submesh did not happen, though its features were reached",
        warning,
        "b.toml:1: too wide: hang of mesh.groups: name more features or say wide = true",
        "nothing to write",
    ]
    assert not shell.file.exists()


def test_the_file_can_be_named(shell: Shell) -> None:
    case = GATHER.with_after((GATHER,))
    folder = report(shell.folder / "report", finding(case, note="seen once", reproducer=None))
    assert "written to other.toml" in shell(str(folder), "-o", "other.toml")
    text = (shell.folder / "other.toml").read_text()
    assert "# seen once\n" in text
    assert f"# {GATHER.text} (after 1 other cases)\n" in text


def test_a_text_with_odd_characters_stays_a_comment(shell: Shell) -> None:
    shell(str(report(shell.folder / "report", finding(message='x\x00\x1b[0m\nlaw = "y"' + "z" * 999))))
    assert len(shell.filled()) == 1
    assert max(map(len, shell.file.read_text().splitlines())) < 320


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: No such file or directory"),
        (b"", "no report of shardlaw"),
        (b"\xff\xfe{", "no report of shardlaw"),
        (b"[]", "no report of shardlaw"),
        (b'{"schema": 1, "id": "0badcafe", "law": "mesh.groups", "case": {}}', "no report of shardlaw"),
    ],
)
def test_what_is_no_report_is_refused(shell: Shell, content: bytes | None, message: str) -> None:
    path = shell.folder / "other.json"
    if content is not None:
        path.write_bytes(content)
    assert message in shell(str(path), code=2)
    assert not shell.file.exists()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"law": "mesh.gruops"}, "no law here is called 'mesh.gruops' (nearest: mesh.groups"),
        ({"kind": "sad"}, "unknown kind 'sad'"),
        ({"features": ["unevn"]}, "unknown feature 'unevn' (nearest: uneven"),
        ({"id": "../x"}, "want an id of 8 hex digits"),
        ({"kind": "raised", "signature": ""}, "without a signature"),
    ],
)
def test_a_finding_of_which_no_entry_can_be_made_is_refused(shell: Shell, fields: dict[str, Any], message: str) -> None:
    folder = report(shell.folder / "report", finding(), finding(**fields))
    assert message in shell(str(folder), code=2)
    assert not shell.file.exists()


def test_a_report_of_another_schema_or_torch_is_refused(shell: Shell) -> None:
    folder = report(shell.folder / "report", finding(), schema=2)
    assert "report schema 2, this version reads 1" in shell(str(folder), code=2)
    report(folder, finding(), torch="nightly")
    assert "torch 'nightly' is no version" in shell(str(folder), code=2)
    assert "cannot be read" in shell("x" * 5000, code=2)


@pytest.mark.parametrize(
    ("old", "message"),
    [
        ("[[expect]]\n", "toml:1: an expectation without law"),
        ("[[expect", "toml:1: no TOML"),
        ("[other]\n", "toml:1: unknown 'other'"),
        ('expect = [{law = "mesh.groups", kind = "hang", reason = "x"}]\n', "cannot be added to: want [[cause]] and [[expect]] tables"),
    ],
)
def test_a_file_that_is_none_of_expectations_is_left_alone(shell: Shell, old: str, message: str) -> None:
    shell.file.write_text(old)
    assert message in shell(str(report(shell.folder / "report", finding())), code=2)
    assert shell.file.read_text() == old


def test_a_file_that_cannot_be_written_is_refused(shell: Shell) -> None:
    folder = str(report(shell.folder / "report", finding()))
    assert "-o no/such/folder.toml: cannot be written: No such file" in shell(folder, "-o", "no/such/folder.toml", code=2)
    assert "-o .: cannot be written: want a file" in shell(folder, "-o", ".", code=2)
    assert "Not a directory" in shell(folder, "-o", "report/report.json/x", code=2)
    assert "want a file" in shell(folder, "-o", os.devnull, code=2)


def test_help_says_where_entries_go(shell: Shell, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["expect"]) == 0
    assert "update" in capsys.readouterr().out
    assert cli.main(["expect", "update", "--help"]) == 0
    assert re.search(r"shardlaw-\s*expect\.toml", capsys.readouterr().out)


def test_the_reports_that_runs_write_are_read(shell: Shell) -> None:
    assert read_report(report(shell.folder / "report", finding())).new()[0].features == sorted(features_of(GATHER, find(GATHER.law)))


def test_what_departs_at_one_place_gets_one_entry(shell: Shell) -> None:
    place = "Shard._to_replicate_tensor, torch/distributed/tensor/placement_types.py:591"
    at = {"where": f"{place}, asked for R and claimed R", "places": [place, "also_named, torch/distributed/tensor/_redistribute.py:1"]}
    told = shell(str(report(shell.folder / "report", finding(**at), finding(RAISES, "raised", "ValueError: no", **at))))
    assert told.splitlines()[-1].startswith("1 entry written to")
    (entry,) = shell.filled()
    assert (entry.law, entry.kind, entry.at) == ("*", "*", "Shard._to_replicate_tensor")


def test_what_calls_a_collective_that_its_law_shows_to_be_wrong_gets_one_entry(shell: Shell) -> None:
    shown = finding(Case.parse("collective.all-gather mesh=2 x=2"), where="the back end mine", calls=["all_gather"])
    others = [finding(case, calls=["all_gather", "broadcast"]) for case in (GATHER, RAISES)]
    told = shell(str(report(shell.folder / "report", shown, *others, finding(Case.parse("mesh.coordinates mesh=2"), calls=["broadcast"]))))
    assert told.splitlines()[-1].startswith("2 entries written to")
    gathering, other = shell.filled()
    assert (gathering.law, gathering.kind, gathering.at) == ("*", "*", "all_gather")
    assert (other.law, other.at) == ("mesh.coordinates", "")
