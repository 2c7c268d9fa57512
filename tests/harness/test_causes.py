"""The known causes, and the pages that are written from them."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks import causes
from shardlaw.conformance.law.features.features import FEATURES
from shardlaw.conformance.run.entry import Cause, Entry

CHAPTERS = causes.known(sorted(causes.SOURCES.glob("*.toml")))
EVERY = [(cause, entries) for chapter in CHAPTERS.values() for cause, entries in chapter.items()]


def test_the_pages_are_what_the_files_say() -> None:
    assert causes.FINDINGS.read_text("utf-8") == causes.findings(CHAPTERS), "python -m benchmarks.causes"
    assert causes.RELEASES.read_text("utf-8") == causes.releases(CHAPTERS), "python -m benchmarks.causes"


def test_every_cause_has_an_id_of_its_own_a_place_and_a_release() -> None:
    assert [name for name, count in Counter(cause.id for cause, _ in EVERY).items() if count > 1] == []
    assert [cause.id for cause, _ in EVERY if not cause.seen] == []
    unknown = [cause.id for cause, _ in EVERY if not cause.where]
    assert len(unknown) <= 4, unknown


def test_every_entry_has_a_case() -> None:
    assert [entry.where for _, entries in EVERY for entry in entries if not entry.case] == []


def test_no_feature_is_there_for_one_entry_alone() -> None:
    """Of a family of features its members count as one; what a field holds is for an entry to say."""
    families = [name for name in FEATURES if name.endswith("*")]
    named = [feature for _, entries in EVERY for entry in entries for feature in entry.features]
    uses = Counter(next((one for one in families if name.startswith(one[:-1])), name) for name in named)
    assert [name for name, count in uses.items() if count == 1] == []


def test_silent_faults_come_first_and_are_shown_by_a_silent_case() -> None:
    loud, silent = (Entry("mesh.groups", kind, "", case="mesh.groups mesh=2") for kind in ("raised", "wrong-value"))
    page = causes.findings(
        {"mesh": {Cause("a", "A raises", seen=("2.13",)): [loud], Cause("b", "B is wrong", seen=("2.13",)): [loud, silent]}}
    )
    assert page.index("B is wrong (silent)") < page.index("A raises (loud)")
    assert "2 known causes, 1 of them silent" in page
    assert "\n\n## Meshes\n\n" in page
    assert "\n\n\n" not in page
    assert causes.example([loud, silent]) is silent


def test_a_cause_is_gone_where_it_was_seen_before_and_not_yet_where_it_comes_later() -> None:
    tried = ("2.11", "2.13", "2.15")
    page = causes.releases(
        {
            "mesh": {
                Cause("a", "A", seen=("2.13",), tried=tried): [],
                Cause("b", "B", seen=("2.11", "2.15"), tried=tried): [],
                Cause("c", "C", seen=("2.13",), tried=("2.13",)): [],
            }
        }
    )
    assert "[a](findings.md#a) | not yet | seen | gone |" in page
    assert "[b](findings.md#b) | seen | gone | seen |" in page
    assert "[c](findings.md#c) | not tried | seen | not tried |" in page


def test_a_cause_that_is_only_about_gpus_was_tried_where_it_was_seen() -> None:
    known = {cause.id: cause for cause, _ in EVERY}
    assert known["channel-shuffle-of-strided-on-cuda"].tried == ("2.11",)
    assert known["cached-redistribution-of-other-rank"].tried == ("2.11", "2.12", "2.13", "2.14", "2.15")


@pytest.mark.ranks
def test_the_text_of_an_issue_has_a_script(capsys: pytest.CaptureFixture[str]) -> None:
    assert causes.main(["--issue", "mesh-groups-in-rank-order"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("# On a mesh whose ranks do not ascend")
    assert "Where to look: DeviceMesh._init_one_process_group, torch/distributed/device_mesh.py" in text
    assert "dist.init_process_group" in text
    assert causes.main(["--issue", "mesh-groups"]) == 2
    assert "mesh-groups-in-rank-order" in capsys.readouterr().err
