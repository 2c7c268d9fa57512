"""The gold checkpoints of every release, and the page that says which release loads them."""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks import gold
from shardlaw.conformance.laws.roundtrip.release import FOLDER, GOLD, LAWS, RELEASES, TEXTS, unread_fields

NOTES = json.loads(gold.NOTES.read_text("utf-8"))


def test_every_release_has_saved_every_checkpoint_in_a_few_kilobytes() -> None:
    sizes = {path.name: path.stat().st_size for path in FOLDER.iterdir()}
    assert {*sizes} == {f"{release}-{name}.zip" for release in RELEASES for name in GOLD}
    assert max(sizes.values()) < 8 * 1024


def test_the_page_is_what_every_release_has_noted_of_every_other() -> None:
    assert [*NOTES] == [*RELEASES]
    assert all([*noted["loaded"]] == [*RELEASES] for noted in NOTES.values())
    assert gold.PAGE.read_text("utf-8") == gold.page(NOTES), "python -m benchmarks.gold"


def test_a_field_that_the_loading_release_lacks_is_named() -> None:
    notes = {
        release: {"fields": {"Kept": fields}, "loaded": {one: {"held": 0, "wrong": []} for one in RELEASES}}
        for release, fields in (("2.11", ["a"]), ("2.15", ["a", "b"]))
    }
    notes["2.11"]["loaded"]["2.15"] = {"held": 3, "wrong": ["cannot be read"]}
    page = gold.page(notes)
    assert f"| 2.15 | 3 of {len(TEXTS)}: no `Kept.b` | all |" in page
    assert "- cannot be read\n" in page


@pytest.mark.ranks
def test_the_torch_at_hand_loads_what_its_column_says() -> None:
    if gold.HERE not in NOTES:
        pytest.skip(f"nobody has tried torch {torch.__version__}")
    assert gold.tried() == NOTES[gold.HERE]["loaded"]
    assert len(LAWS) == len(RELEASES)


def test_what_cannot_be_read_is_told_by_its_fields(tmp_path: object) -> None:
    unread = {release: told(release, str(tmp_path)) for release in RELEASES}
    known = len(gold.fields_of((FOLDER / "2.11-even.zip").read_bytes())["TensorProperties"])
    assert [release for release, fields in unread.items() if fields] == ([] if known == 6 else ["2.15"])
    assert all("TensorProperties has the fields dtype, " in one for one in unread["2.15"])


def told(release: str, folder: str) -> list[str]:
    from shardlaw.conformance.laws.roundtrip.release import unpack

    return unread_fields(f"{unpack((FOLDER / f'{release}-even.zip').read_bytes(), f'{folder}/{release}')}/.metadata")
