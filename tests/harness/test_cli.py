"""The command line, as a person meets it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shardlaw.conformance.commands import cli
from shardlaw.conformance.laws import find
from tests import forked
from tests.harness.shells import MODULE, Shell, refused, stored

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bogus"], "No such command 'bogus'"),
        (["run", "--bogus"], "No such option: --bogus; see shardlaw run --help"),
        (["run", "--tartget", "gloo"], "--target"),
        (["run", "--seed", "x"], "'--seed': want a whole number"),
        (["run", "--timeout", "x"], "'--timeout': want a number"),
        (["run", "--profile", "smok"], "'--profile': 'smok' is not one of 'smoke', 'ci', 'nightly'"),
        (["run", "--budget", "soon"], "--budget soon: want a time"),
        (["run", "--shard", "3/2"], "--shard 3/2"),
        (["run", "--world-size", "0"], "--world-size 0"),
        (["run", "--world-size", "99999999999999999999"], "want 1 to 4096 ranks"),
        (["run", "--world-size", "65"], "want at most 64 ranks on one machine; torchrun starts more"),
        (["show", "5x6"], "Missing option '--mesh'; see shardlaw show --help"),
        (["run", "-n", "100000"], "-n 100000: want 1 to 64 worlds"),
        (["run", "--timeout", "-1"], "--timeout -1"),
        (["run", "--timeout", "1e300"], "at most 86400"),
        (["laws", "--features", "dtpye:*"], "no feature matches 'dtpye:*' (nearest: "),
        (["repro", "redistribute.locl"], "nearest: redistribute.local"),
        (["verify", "nowhere"], "nowhere: cannot be read"),
        (["board", "nowhere"], "nowhere: cannot be read"),
        (["trend", "nowhere"], "nowhere: cannot be read"),
        (["run", "--expect", "none.toml"], "none.toml: no such file"),
        (["run", "--list", "--expect", __file__], "test_cli.py:1: no TOML"),
        (["run", "--known", "none"], "--known none: no such folder"),
        (["run", "--expect", __file__, "--no-expect"], "want one of them"),
        (["show"], "SHAPE"),
        (["show", "5x6", "--mesh", "2", "--place", "S("], "placement 'S('"),
        (["show", "5x6", "--mesh", "2", "--place", "S(9)"], "it has 2 dims: want a dim from -2 to 1"),
        (["show", "5x6", "--mesh", "2", "--place", "R", "--svg", "a.svg"], "extra argument(s) (a.svg); see shardlaw show --help"),
        (["show", "5x6", "--mesh", "2x2", "--place", "R,R,R"], "3 placements"),
        (["replay"], "FINDING.json"),
        (["replay", "no/such/file.json"], "No such file"),
        (["replay", "nothing"], "no such file or folder, and no case"),
        (["replay", "redistribute.local mesh"], "'mesh' is not NAME=VALUE"),
        (["replay", "redistribute.locl mesh=2"], "no law is called 'redistribute.locl' (nearest: redistribute.local"),
        (["replay", "redistribute.local mesh=2x x=5x6:R"], "field 'mesh': mesh '2x'"),
        (["replay", "redistribute.local mesh=2 x=5x6:S( to=R"], "to=R': field 'x': placement 'S('"),
        (
            ["replay", "redistribute.local mesh=2x2 x=5:S(0) to=R,R"],
            "1 placement (S(0)) on mesh 2x2: want one for each of its 2 mesh dims\n",
        ),
        (["replay", "op.forward[mean] mesh=2 a=5:R steps=mean(q)"], "field 'steps': steps name 'q', which is no field: want a\n"),
        (["replay", "redistribute.local world=2 mesh=2x3 x=5x6:R,R to=R,R"], "mesh=2x3 has rank 5, the world has 2 ranks"),
        (["replay", "redistribute.local mesh=100 x=5x6:R to=R"], "wants 100 ranks: want 1 to 64"),
        (["replay", "mesh.coordinates mesh=2", "--times", "0"], "--times 0"),
        (["replay", "mesh.coordinates mesh=2", "--target", "glo"], "no target is called 'glo' (nearest: gloo"),
        (["replay", "redistribute.local mesh=2 x=99999999999:R to=R"], "x=99999999999:R has 99,999,999,999 elements: want at most"),
        (["replay", ""], "nothing to try: want a finding's file"),
        (["replay", "."], "no findings in this folder: want the folder of a report"),
        (["repro", ""], "no case: want a finding's file"),
        (["repro", "."], "a folder: want one file from the folder findings/"),
        (["repro", "none.json"], "No such file"),
        (["repro", __file__], "not JSON"),
        (["laws", "mesh.grops"], "nearest: mesh.groups"),
        (["laws", "local"], "nearest: op.local"),
        (["laws", "nope"], "no law matches 'nope' ("),
        (["doctor", "--target", "nope"], "no target is called 'nope'"),
        (["run", "--target", "nope"], "no target is called 'nope'"),
        (["run", "--storage", "nope"], "no storage is called 'nope'"),
        (["run", "--report", f"{__file__}/report"], "is no folder"),
        (["run", "--report", "/proc/report"], "--report /proc/report: cannot be written: "),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith("shardlaw: ")
    assert message in err
    assert not list(tmp_path.iterdir()), "something was left behind"


def test_an_internal_error_is_no_finding(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("shardlaw.conformance.commands.show.show", lambda *arguments: 1 / 0)
    assert cli.main(["show", "5", "--mesh", "2", "--place", "R"]) == 3
    assert "shardlaw: internal error: ZeroDivisionError" in capsys.readouterr().err


def test_ctrl_c_is_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("shardlaw.conformance.commands.show.show", interrupt)
    assert cli.main(["show", "5", "--mesh", "2", "--place", "R"]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_the_catalogue_can_be_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["laws", "mesh.*", "--json"]) == 0
    records = json.loads(capsys.readouterr().out)
    assert all({"id", "tier", "clause", "source"} <= record.keys() for record in records)
    assert cli.main(["laws", "mesh.groups"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("mesh.groups  (core)\n    ")
    assert "source: " in out
    assert "\n    case:   mesh.groups mesh=" in out
    assert "\n    fields: mesh: a mesh " in out
    assert cli.main(["laws", "redistribute.on-view"]) == 0
    described = capsys.readouterr().out
    others = "slice, flatten, of: belong to x; the cases.txt of a run shows their values"
    assert re.search(rf"fields: x: a tensor .*\n +mesh: a mesh .*\n +{others}\n +to: placements", described)
    assert cli.main(["laws", "--features", "dtype:int*"]) == 0
    assert {line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]} == {f"dtype:int{size}" for size in (64, 32, 16, 8)}
    assert cli.main(["repro", "redistribute.local"]) == 0
    assert f"\n{find('redistribute.local').control}\n" in capsys.readouterr().out
    assert cli.main(["show", "5x6", "--mesh", "2x2", "--place", "[Shard(dim=0), Replicate()]"]) == 0
    assert "placements S(0),R" in capsys.readouterr().out
    assert cli.main(["laws", "--features"]) == 0
    assert re.search(r"^    uneven +\w", capsys.readouterr().out, re.MULTILINE)
    assert cli.main(["run", "--list", "mesh.*", "!mesh.groups"]) == 0
    listed = capsys.readouterr().out.split()
    assert listed == [record["id"] for record in records if record["id"] != "mesh.groups"]


def test_a_layout_without_meaning_is_bad_input(shell: Shell) -> None:
    assert "it has 2 dims" in refused(shell("replay", "redistribute.local mesh=2 x=5x6:S(9) to=R"))
    assert "3 placements" in refused(shell("replay", "redistribute.local mesh=2x2 x=5x6:S(0),R to=R,R,R"))


@pytest.mark.usefixtures("same_ranks")
def test_a_target_of_a_finding_must_be_known(shell: Shell) -> None:
    path = stored(shell.folder, "module.holds world=2", target={"name": "ucx"})
    assert "0badcafe: no target is called 'ucx'" in refused(shell("replay", str(path)))
    assert shell("replay", str(path), "--target", "gloo").returncode == 0


def test_a_target_that_cannot_start_is_bad_input(shell: Shell) -> None:
    targets = "[target.broken]\nbackend = 'gloo'\nsetup = 'json:laods'\n[target.unknown]\nbackend = 'golo'\n"
    (shell.folder / "shardlaw.toml").write_text(targets)
    told = "'json:laods': json has no laods (nearest: loads"
    message = refused(shell("replay", "module.holds world=2", "--target", "broken"))
    assert "cannot start" in message
    assert told in message
    for target, problem in (("broken", told), ("unknown", "torch has no backend 'golo' (nearest: gloo")):
        done = shell("doctor", "--target", target)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1)
        assert problem in done.stderr
        assert "what the rank said" not in done.stdout
    done = shell("run", "mesh.groups", "--target", "broken")
    assert done.returncode == 2
    assert "stopped by a target that cannot start\n" in done.stdout
    assert "not reached: 1 law: mesh.groups (the run broke here: the target cannot start)" in done.stdout


def test_repro_writes_a_script(shell: Shell) -> None:
    path = stored(shell.folder, "module.deviates world=2", kind="wrong-value")
    done = shell("repro", str(path), "-o", "script.py")
    assert (done.returncode, done.stdout) == (0, "")
    assert "It deviates." in (shell.folder / "script.py").read_text()
    assert shell("repro", str(path)).stdout == (shell.folder / "script.py").read_text()
    assert "cannot be written" in refused(shell("repro", str(path), "-o", "no/such/folder/script.py"))
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "SHARDLAW_LAWS")}
    ran = subprocess.run(
        [sys.executable, "-I", "script.py"], cwd=shell.folder, env=clean, capture_output=True, text=True, check=False, timeout=60
    )
    assert ran.returncode == 1
    assert "rank 1: WRONG" in ran.stdout


def test_doctor_says_that_gloo_works(shell: Shell) -> None:
    done = shell("doctor")
    assert done.returncode == 0, done.stderr
    assert "torch 2." in done.stdout
    assert "ok  backend gloo loads, 2 ranks start and reduce" in done.stdout


def test_doctor_tells_what_a_rank_printed_that_could_not_start(shell: Shell) -> None:
    (shell.folder / "shardlaw.toml").write_text("[target.broken]\nbackend = 'gloo'\nsetup = 'laws_for_the_cli:no_card'\n")
    path = shell.folder.parent / "lib" / "laws_for_the_cli.py"
    path.write_text(f"{MODULE}\ndef no_card():\n    print('looking for a card')\n    raise RuntimeError('no card')\n")
    done = shell("doctor", "--target", "broken")
    assert done.returncode == 2
    assert "    | looking for a card\n" in done.stdout
    assert "in no_card\n" in done.stdout
    told = r"shardlaw: target broken cannot start: rank [01] of 2 ended while it started: RuntimeError: no card\n"
    assert re.fullmatch(told, done.stderr)


STORAGES = """
[storage.mine]
writer = "torch.distributed.checkpoint:FileSystemWriter"
reader = "torch.distributed.checkpoint:FileSystemReader"
[storage.mistyped]
writer = "torch.distributed.checkpoint:FileSystemWrtier"
reader = "torch.distributed.checkpoint:FileSystemReader"
"""


def test_a_storage_is_examined_and_a_class_that_it_does_not_have_named(shell: Shell) -> None:
    (shell.folder / "shardlaw.toml").write_text(STORAGES)
    done = shell("doctor", "--storage", "mine")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ok  storage mine: a checkpoint is saved and loaded" in done.stdout
    message = refused(shell("run", "roundtrip.plain", "--storage", "mistyped"))
    assert message.startswith(
        "storage mistyped: writer = 'torch.distributed.checkpoint:FileSystemWrtier': torch.distributed.checkpoint has no"
    )
    assert "nearest: FileSystemWriter" in message


def test_a_folder_of_the_name_of_the_config_is_no_config(shell: Shell) -> None:
    (shell.folder / "shardlaw.toml").mkdir()
    assert refused(shell("targets")).startswith("shardlaw.toml: is a folder: want a file")


def test_a_word_that_nobody_knows_gets_all_that_are_known(shell: Shell) -> None:
    (shell.folder / "shardlaw.toml").write_text("[target.mine]\nbackend = 'gloo'\ncannot = ['zzz']\n")
    assert "cannot: unknown 'zzz' (known: all_gather, all_reduce, " in refused(shell("run", "--target", "mine"))


def test_a_budget_is_for_cases_and_not_for_the_start_of_ranks(shell: Shell) -> None:
    done = shell("run", "mesh.coordinates", "--budget", "0.01s")
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((shell.folder / "shardlaw-report" / "report.json").read_text())["totals"]["cases"] >= 1


def test_targets_are_listed_with_what_is_missing(shell: Shell) -> None:
    (shell.folder / "shardlaw.toml").write_text("[target.mine]\nbackend = 'gloo'\ncannot = ['p2p']\n")
    done = shell("targets")
    assert done.returncode == 0, done.stderr
    assert "mine: device cpu, backend gloo, storage filesystem, cannot p2p (shardlaw.toml)" in done.stdout
    assert "nccl: device cuda" in done.stdout


def test_a_terminated_replay_is_143(shell: Shell) -> None:
    arguments = ["replay", "module.holds world=2", "--times", "1000000"]
    with forked.driver(lambda: cli.main(arguments), shell.folder) as process:
        process.output.readline()
        process.output.readline()
        process.send_signal(signal.SIGTERM)
        process.output.read()
        assert process.wait(30) == 143


def test_output_that_nobody_reads_is_no_error(shell: Shell) -> None:
    command = f"{sys.executable} -m shardlaw laws --features | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=shell.folder, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.returncode == 0
