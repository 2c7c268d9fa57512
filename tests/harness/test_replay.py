"""Findings and cases tried again."""

from __future__ import annotations

import json

import pytest

from shardlaw.conformance.law.case import Case
from tests.harness.shells import Shell, refused, stored

pytestmark = pytest.mark.ranks

SIGNATURE = "module.deviates | wrong-value | sum | "


def test_a_case_that_holds_is_replayed(shell: Shell) -> None:
    done = shell("replay", "module.holds world=3 seed=1", "--times", "2")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["module.holds world=3 seed=1", "  1 of 2: held", "  2 of 2: held", "  held 2 of 2 times"]
    assert list(shell.folder.iterdir()) == []


@pytest.mark.usefixtures("same_ranks")
def test_a_case_that_deviates_is_replayed(shell: Shell) -> None:
    done = shell("replay", "module.deviates world=2")
    assert done.returncode == 1, done.stderr
    assert "wrong-value (sum): rank 1: the sum is wrong" in done.stdout
    assert "rank 1 deviates: the sum is wrong\n      expected 1\n      got 2" in done.stdout
    assert "deviates 1 of 1 times" in done.stdout


@pytest.mark.usefixtures("same_ranks")
def test_a_stored_finding_is_compared_with_what_it_did(shell: Shell) -> None:
    path = stored(shell.folder / "findings", "module.deviates world=2", status="new", kind="wrong-value", signature=SIGNATURE)
    done = shell("replay", str(path), "--times", "2", "--trace")
    assert done.returncode == 1
    assert "deviates 2 of 2 times, as stored" in done.stdout
    stored(shell.folder / "findings", "module.deviates world=2", status="expected", kind="wrong-value", signature=SIGNATURE)
    done = shell("replay", ".")
    assert done.returncode == 0
    assert "as stored\n  which is expected: as its report says" in done.stdout
    stored(
        shell.folder / "findings",
        "module.deviates world=2",
        status="expected",
        kind="hang",
        signature="module.deviates | hang | process | ",
    )
    done = shell("replay", "findings")
    assert done.returncode == 1
    assert "0 of them as stored" in done.stdout


@pytest.mark.usefixtures("same_ranks")
def test_of_several_findings_what_is_new_is_told_last_and_summed_up(shell: Shell) -> None:
    folder = shell.folder / "shardlaw-report" / "findings"
    stored(folder, "module.deviates world=2", status="new", kind="wrong-value", signature=SIGNATURE).rename(folder / "0a1b2c3d.json")
    stored(folder, "module.deviates world=3", status="expected", kind="wrong-value", signature=SIGNATURE)
    done = shell("replay", "shardlaw-report")
    assert done.returncode == 1, done.stderr
    assert done.stdout.index("module.deviates world=3") < done.stdout.index("module.deviates world=2")
    *_, counted, named = done.stdout.splitlines()
    assert counted == "2 findings tried again: 1 expected, 1 new"
    assert named.endswith(" module.deviates world=2")


@pytest.mark.usefixtures("same_ranks")
def test_a_finding_of_the_last_report_is_known_by_its_id(shell: Shell) -> None:
    folder = shell.folder / "shardlaw-report" / "findings"
    stored(folder, "module.holds world=2").rename(folder / "0a1b2c3d.json")
    done = shell("replay", "0a1b2c3d")
    assert done.returncode == 0, done.stderr
    assert "module.holds world=2" in done.stdout
    assert refused(shell("replay", "0a1b2c3e")).startswith("0a1b2c3e: no such file or folder")


@pytest.mark.usefixtures("same_ranks")
def test_a_history_is_served_first_every_time(shell: Shell) -> None:
    case = Case.parse("module.counts world=2").with_after((Case.parse("module.counts world=2 seed=1"),))
    path = stored(shell.folder, "module.counts world=2")
    path.write_text(json.dumps({**json.loads(path.read_text()), "case": case.to_json()}))
    done = shell("replay", str(path), "--times", "2")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "(after 1 earlier cases)" in done.stdout
    assert "deviates 2 of 2 times" in done.stdout
    assert shell("replay", "module.counts world=2", "--times", "2").returncode == 0


@pytest.mark.usefixtures("same_ranks")
def test_a_case_without_meaning_is_bad_input(shell: Shell) -> None:
    message = refused(shell("replay", "module.meaningless world=2 to=S("))
    assert "placement 'S('" in message
    done = shell("replay", "module.rejects world=2")
    assert done.returncode == 2
    assert done.stderr == "shardlaw: no case was judged: nobody can tell\n"


def test_what_is_known_by_where_it_happens_is_known_when_it_is_replayed(shell: Shell) -> None:
    broken = "[target.broken]\nbackend = 'gloo'\nsetup = 'tests.planted.redistribute_faults:gather_in_reverse'\n"
    for at, code, word in (("Shard._to_new_shard_dim", 1, "deviates"), ("Shard._to_replicate_tensor", 0, "it gathers in reverse")):
        (shell.folder / "shardlaw.toml").write_text(f"{broken}expect = ['{at}.toml']\n")
        entry = f'[[expect]]\nlaw = "redistribute.*"\nkind = "*"\nat = "{at}"\nreason = "it gathers in reverse"\n'
        (shell.folder / f"{at}.toml").write_text(entry)
        done = shell("replay", "redistribute.back mesh=2 x=5x4:S(0) to=R", "--target", "broken")
        assert done.returncode == code, done.stderr
        assert word in done.stdout.splitlines()[-1]
