"""The released lists of certified profiles, and what a certified run refuses to be asked."""

from __future__ import annotations

import pytest

from shardlaw.conformance.commands import cli
from shardlaw.conformance.laws import find
from shardlaw.conformance.run import certified_profile


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["-x"], "want no -x"),
        (["mesh.*"], "want no LAW"),
        (["--profile", "ci"], "want no --profile"),
        (["--budget", "9s"], "want no --budget"),
        (["--no-expect"], "want no --no-expect"),
        (["--expect", __file__], "want no --expect"),
        (["--shard", "1/2"], "want no --shard"),
        (["--world-size", "2"], "want --world-size 4 or more, not 2"),
    ],
)
def test_a_certified_run_is_the_whole_list(more: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "--certify", "collectives-2026.1", *more]) == 2
    assert said in capsys.readouterr().err


def test_a_profile_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "--certify", "collectivs-2026.1"]) == 2
    assert "nearest: collectives-2026.1" in capsys.readouterr().err


@pytest.mark.parametrize("name", certified_profile.profile_names())
def test_a_released_list_says_what_every_version_understands(name: str) -> None:
    listed = certified_profile.read_profile(name)
    assert len(set(listed.cases)) == len(listed.cases) > 500
    for law_id, cases in listed.laws.items():
        law = find(law_id)
        assert law.tier == "core"
        assert all(case.world <= certified_profile.RANKS for case in cases)
    assert list(listed.laws) == list(dict.fromkeys(case.law for case in listed.cases))


@pytest.mark.parametrize(
    ("name", "sha256"),
    [
        ("collectives-2026.1", "35884635c9b4f1ad7c8e4464f84d0ec82d61a5c6ec1cb3c57de092d852eadcd3"),
        ("dtensor-2026.1", "50ade14881f398d8bc44839b48e37d9c441ea27305f5ce9cb4c29f763f7ae22b"),
        ("checkpoint-2026.1", "a0917536cb5215c8573afb489bf95827f0372ae412f4e31f42d2a7006bbe2c37"),
    ],
)
def test_a_released_list_is_never_changed(name: str, sha256: str) -> None:
    assert certified_profile.read_profile(name).sha256 == sha256
