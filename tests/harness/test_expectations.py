"""Known findings: how they are read, matched and counted."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from shardlaw.conformance.errors import UsageError
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.law import Law
from shardlaw.conformance.law.target import Target
from shardlaw.conformance.law.verdict import Answer, Deviation, Verdict
from shardlaw.conformance.run.engine import Run
from shardlaw.conformance.run.expectation_file import read_entries
from shardlaw.conformance.run.expectations import Expectations, expectation_files, load, shipped_files
from shardlaw.conformance.run.request import RunRequest
from shardlaw.conformance.world.verdicts import combine_answers


@dataclass(frozen=True)
class FakeLaw:
    id: str
    aliases: tuple[str, ...] = ()


LAWS = [FakeLaw("op.forward[mean]"), FakeLaw("op.forward[sum]"), FakeLaw("mesh.groups"), FakeLaw("roundtrip.dtensor", ("roundtrip.old",))]
MEAN = '[[expect]]\nlaw = "op.forward[mean]"\nkind = "wrong-value"\nfeatures = ["uneven"]\nreason = "weighs ranks, not elements"\n'

MEAN_CASE = Case.parse("op.forward[mean] mesh=2 a=5:S(0) steps=mean(a)")
SUM_CASE = Case.parse("op.forward[sum] mesh=2 a=5:S(0) steps=sum(a)")

CAUSE = """[[cause]]
id = "weighs-ranks"
title = "The mean weighs ranks, not elements"
where = "mean_rule, torch/distributed/tensor/_ops/_math_ops.py"
seen = ["2.11", "2.13"]

[[cause.expect]]
law = "op.forward[mean]"
kind = "wrong-value"
features = ["uneven"]

[[cause.expect]]
law = "op.forward[sum]"
kind = "raised"
signature = "no strategy"
torch = ">=2.15"

[[cause]]
id = "newer"
title = "Another fault"
seen = ["2.15"]
issue = "https://example.org/1"

[[cause.expect]]
law = "mesh.groups"
kind = "wrong-value"
"""


def loaded(text: str, folder: Path, torch: str = "2.13.0+cpu", target: str = "gloo") -> Expectations:
    path = folder / "op.toml"
    path.write_text(text)
    return load([path], LAWS, torch, target)  # type: ignore[arg-type]


def refusal(text: str, folder: Path) -> str:
    with pytest.raises(UsageError) as refused:
        loaded(text, folder)
    message = str(refused.value)
    assert "\n" not in message
    return message.removeprefix(f"{folder}/")


def test_an_entry_matches_law_kind_and_all_its_features(tmp_path: Path) -> None:
    known = loaded(MEAN, tmp_path)
    assert known.match(MEAN_CASE, "wrong-value", {"uneven", "mesh-2d"}, "") is known.entries[0]
    assert known.match(SUM_CASE, "wrong-value", {"uneven"}, "") is None
    assert known.match(MEAN_CASE, "wrong-layout", {"uneven"}, "") is None
    assert known.match(MEAN_CASE, "wrong-value", {"mesh-2d"}, "") is None
    assert known.entries[0].hits == 1
    assert known.entries[0].where == f"{tmp_path}/op.toml:1"


def test_a_law_is_a_glob_or_an_alias(tmp_path: Path) -> None:
    text = MEAN.replace("op.forward[mean]", "op.forward") + MEAN.replace("op.forward[mean]", "roundtrip.old")
    known = loaded(text, tmp_path)
    assert known.entries[0].laws == ("op.forward[mean]", "op.forward[sum]")
    assert known.entries[1].laws == ("roundtrip.dtensor",)


WHERE = MEAN.replace('features = ["uneven"]', 'case = "op.forward[mean] mesh=2 a=5x4:S(0):int64 steps=mean(a,-1) way=b"\nwhere = {}')


@pytest.mark.parametrize(
    ("where", "matched", "other"),
    [
        ('way = "b"', "way=b", "way=bb"),
        ('way = ["a", "b"]', "way=a", "way=c"),
        ("way = true", "way=c", "seed=3"),
        ("side = false", "way=c", "side=a"),
        ("steps = '/,-\\d\\)/'", "steps=sum(a,-2)", "steps=sum(a,2)"),
        ('"a.dtype" = "int64"', "a=4:R:int64", "a=4:R b=4:R:int64"),
        ('"*.dtype" = "/int/"', "a=4 b=4:R:int8", "a=4:R"),
        ('"a.placements" = "/^S/"', "a=4:S(0)", "a=4:R"),
        ('"a.placements" = ["S(0)", "-"]', "a=4", "a=4:R"),
        ('"a.shape" = "/x/"', "a=4x1", "a=4"),
        ('"a.shards" = "2", "a.largest" = ["12"]', "mesh=2x2 a=5x4:S(0),R", "mesh=2x2 a=5x4:S(0),S(1)"),
        ('"*.elements" = "/^[1-9]/"', "mesh=2x2 of=a+b a=2:S(0)", "mesh=2x2 of=a+b a=0x2:S(0)"),
        ('way = "b", "a.fill" = "distinct"', "way=b a=4:R", "way=b a=4:R:float32:ties"),
    ],
)
def test_an_entry_says_what_fields_hold(where: str, matched: str, other: str, tmp_path: Path) -> None:
    known = loaded(WHERE.replace("{}", f"{{ {where} }}"), tmp_path)
    mesh = "" if "mesh=" in matched else "mesh=2 "
    for text, hit in ((matched, True), (other, False)):
        case = Case.parse(f"op.forward[mean] {mesh}{text}")
        assert (known.match(case, "wrong-value", set(), "") is not None) is hit, text
        assert known.covers(case, set()) is hit
        known.count_case(case, set())
    assert known.entries[0].matched == {"op.forward[mean]": 1}
    assert known.entries[0].requirements[0].startswith(where.split(" = ", maxsplit=1)[0].strip('"'))


@pytest.mark.parametrize(
    ("signature", "error", "hit"),
    [
        ("got # of #", "RuntimeError: got 3 of 17 shards", True),
        ("RuntimeError: got*shards", "RuntimeError: got 3 of 17 shards", True),
        ("got # shards", "RuntimeError: got 3 of 17 shards", False),
        ("op.forward[mean] | raised | error | RuntimeError: got #", "RuntimeError: got 3", True),
        ("op.forward[mean] | raised | error | ValueError: got #", "RuntimeError: got 3", False),
        ("no strategy for _ on _", "NotImplementedError: no strategy for 'aten.mean' on (S(0), R)", True),
    ],
)
def test_a_signature_is_part_of_the_struck_error(signature: str, error: str, hit: bool, tmp_path: Path) -> None:
    known = loaded(f"{MEAN.replace('wrong-value', 'raised')}signature = '{signature}'\n", tmp_path)
    assert (known.match(MEAN_CASE, "raised", {"uneven"}, error) is not None) is hit


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ("a slice by a,a: must be refused, was accepted", "was accepted"),
        ("S(9): must be refused by ValueError, raised TypeError: no", "by ValueError, raised TypeError: no"),
        ("S(9): refused by ValueError without a word", "by ValueError without a word"),
        ("the refusal does not name 'x'", "the refusal does not name 'x'"),
    ],
)
def test_the_error_of_a_wrong_refusal_does_not_hold_the_case(message: str, error: str) -> None:
    assert judged_error("wrong-error", message) == error


def test_the_error_of_a_value_that_did_not_come_is_that_of_torch() -> None:
    assert judged_error("raised", "result: raised RuntimeError: no rule: raised late") == "RuntimeError: no rule: raised late"
    assert judged_error("wrong-value", "holds 3: raised eyebrows") == ""


def judged_error(kind: str, message: str) -> str:
    law = Law("mesh.x", "A clause.", "docs", "mesh.x mesh=2", lambda case, here: None)
    return combine_answers(law, Case.parse("mesh.x mesh=2"), [Answer(0, "deviates", (Deviation(kind, "result", message),))], Target()).error


def asks_where(known: Expectations, case: Case, kind: str) -> bool:
    law = Law(case.law, "A clause.", "docs", case.text, lambda case, here: None)
    return known.needs_trace(law, Verdict(case, "deviates", kind, "result", error="an error"))  # type: ignore[arg-type]


def test_an_entry_that_says_where_wants_a_trace(tmp_path: Path) -> None:
    anywhere = '[[expect]]\nlaw = "op.forward"\nkind = "*"\nat = "mean_rule"\nreason = "its rule is wrong"\n'
    known = loaded(anywhere, tmp_path)
    for case, kind in ((MEAN_CASE, "wrong-value"), (SUM_CASE, "raised")):
        assert known.match(case, kind, set(), "an error") is None
        assert asks_where(known, case, kind)
        assert known.match(case, kind, set(), "an error", {"sum_rule"}) is None
        assert known.match(case, kind, set(), "an error", {"mean_rule", "all_reduce"}) is known.entries[0]
    assert not known.covers(MEAN_CASE, frozenset())
    one = loaded(anywhere.replace('"*"', '"wrong-value"'), tmp_path)
    assert not asks_where(one, MEAN_CASE, "wrong-layout")


def test_a_later_layer_accounts_for_what_two_match(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(MEAN.replace("weighs", "mine: weighs"))
    (tmp_path / "theirs.toml").write_text(MEAN)
    known = load([tmp_path / "theirs.toml", tmp_path / "mine.toml"], LAWS, "2.13.0")  # type: ignore[arg-type]
    entry = known.match(MEAN_CASE, "wrong-value", {"uneven"}, "")
    assert entry is not None
    assert entry.reason.startswith("mine")
    for _ in range(30):
        known.count_case(MEAN_CASE, {"uneven"})
    assert not any(entry.is_stale for entry in known.entries)


@pytest.mark.parametrize(
    ("torch", "holds"),
    [("2.10.1", False), ("2.11.0", True), ("2.13.0+cpu", True), ("2.15.2", True), ("2.16.0.dev20260101", False), ("2.13.0a0+git1", True)],
)
def test_an_entry_holds_for_some_versions_of_torch(torch: str, holds: bool, tmp_path: Path) -> None:
    assert bool(loaded(MEAN + 'torch = ">=2.11,<2.16"\n', tmp_path, torch).entries) is holds


def test_an_entry_may_be_true_of_one_target_only(tmp_path: Path) -> None:
    text = MEAN + 'target = "nccl*"\n'
    assert not loaded(text, tmp_path).entries
    assert loaded(text, tmp_path, target="nccl2").entries


def test_a_refusal_may_be_expected(tmp_path: Path) -> None:
    entry_text = MEAN.replace("wrong-value", "refused") + f'signature = "no strategy for it"\ncase = "{MEAN_CASE.text}"\n'
    known = loaded(entry_text, tmp_path)
    (entry,) = known.entries
    assert known.match(MEAN_CASE, "refused", {"uneven"}, "there is no strategy for it") is entry
    assert known.match(MEAN_CASE, "raised", {"uneven"}, "there is no strategy for it") is None
    known.note_own_case(Verdict(MEAN_CASE, "refused"))
    assert not entry.mended
    known.note_own_case(Verdict(MEAN_CASE, "held"))
    assert entry.mended


def test_an_expected_hang_is_avoided_after_three_hits(tmp_path: Path) -> None:
    known = loaded(MEAN.replace("wrong-value", "hang"), tmp_path)
    for _ in range(3):
        assert known.skip_entry(MEAN_CASE, {"uneven"}) is None
        known.count_case(MEAN_CASE, {"uneven"})
        known.match(MEAN_CASE, "hang", {"uneven"}, "")
    assert known.skip_entry(MEAN_CASE, {"uneven", "permuted"}) is known.entries[0]
    assert known.skip_entry(MEAN_CASE, {"permuted"}) is None
    assert known.skip_entry(SUM_CASE, {"uneven"}) is None
    assert known.entries[0].matched["op.forward[mean]"] == 4


def test_an_expected_wrong_value_is_never_avoided(tmp_path: Path) -> None:
    known = loaded(MEAN, tmp_path)
    for _ in range(9):
        known.match(MEAN_CASE, "wrong-value", {"uneven"}, "")
    assert known.skip_entry(MEAN_CASE, {"uneven"}) is None


def test_masked_is_the_share_of_a_laws_cases(tmp_path: Path) -> None:
    known = loaded(MEAN.replace("op.forward[mean]", "op.forward"), tmp_path)
    for at in range(100):
        known.count_case(MEAN_CASE, {"uneven"} if at < 30 else set())
        known.count_case(SUM_CASE, {"uneven"} if at < 10 else set())
    assert known.masked_share(known.entries[0]) == 0.3
    (wide,) = known.too_wide()
    assert (wide.law, wide.share) == ("op.forward[mean]", 0.3)
    assert "op.toml:1: matches cases of op.forward[mean] that hold, 30% of all" in str(wide)
    known.entries[0].wide = True
    assert not known.too_wide()


@pytest.mark.parametrize(("cases", "matched", "wide"), [(100, 20, False), (100, 21, True), (10_000, 2_001, True), (19, 19, False)])
def test_an_entry_is_wide_beyond_a_fifth_of_the_cases_of_a_law(tmp_path: Path, cases: int, matched: int, wide: bool) -> None:
    known = loaded(MEAN, tmp_path)
    for at in range(cases):
        known.count_case(MEAN_CASE, {"uneven"} if at < matched else set())
    assert bool(known.too_wide()) is wide


def test_an_entry_is_as_wide_as_what_it_matches_holds(tmp_path: Path) -> None:
    known = loaded(MEAN, tmp_path)
    for _ in range(30):
        known.count_case(MEAN_CASE, {"uneven"})
    for _ in range(24):
        known.match(MEAN_CASE, "wrong-value", {"uneven"}, "")
    assert (known.masked_share(known.entries[0]), known.too_wide()) == (1.0, []), "six of thirty hold"
    known.count_case(MEAN_CASE, {"uneven"})
    (wide,) = known.too_wide()
    assert wide.share == 7 / 31


def test_a_few_cases_do_not_make_an_entry_wide(tmp_path: Path) -> None:
    known = loaded(MEAN, tmp_path)
    for _ in range(19):
        known.count_case(MEAN_CASE, {"uneven"})
    assert not known.too_wide()
    known.count_case(MEAN_CASE, {"uneven"})
    assert known.too_wide()


@pytest.mark.parametrize(("shard", "wide"), [((1, 1), 1), ((2, 4), 0)])
def test_a_shard_does_not_say_how_wide_an_entry_is(tmp_path: Path, shard: tuple[int, int], wide: int) -> None:
    known = loaded(MEAN, tmp_path)
    for _ in range(20):
        known.count_case(MEAN_CASE, {"uneven"})
    run = SimpleNamespace(request=RunRequest(seed=7, shard=shard), expectations=known)
    assert len(Run.too_wide(run)) == wide  # type: ignore[arg-type]


def test_an_entry_that_never_happened_is_stale_when_its_features_were_reached(tmp_path: Path) -> None:
    known = loaded(MEAN, tmp_path)
    for at in range(20):
        assert not known.has_stale("op.forward[mean]"), at
        known.count_case(MEAN_CASE, {"uneven"})
    assert known.has_stale("op.forward[mean]")
    assert not known.has_stale("op.forward[sum]")
    known.match(MEAN_CASE, "wrong-value", {"uneven"}, "", count=False)
    assert known.has_stale("op.forward[mean]")
    known.match(MEAN_CASE, "wrong-value", {"uneven"}, "")
    assert not known.has_stale("op.forward[mean]")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (MEAN.replace("op.forward[mean]", "op.forward[maen]"), "op.toml:2: no law matches 'op.forward[maen]' (nearest: op.forward[mean]"),
        (MEAN.replace("op.forward", "!op.forward"), "op.toml:2: law = '!op.forward[mean]'"),
        (MEAN.replace("wrong-value", "wrong-valeu"), "op.toml:3: unknown kind 'wrong-valeu' (nearest: wrong-value"),
        (MEAN.replace("uneven", "unevn"), "op.toml:4: unknown feature 'unevn' (nearest: uneven"),
        (MEAN.replace("wrong-value", "*"), "op.toml:3: kind = '*': only where the entry says at which place"),
        (WHERE.replace("{}", '{ way = "c" }'), "op.toml:5: where.way = 'c': the entry's own case has something else"),
        (WHERE.replace("{}", '{ way = "/(/" }'), "op.toml:5: where.way = '/(/': no regular expression"),
        (WHERE.replace("{}", "{ way = 3 }"), "op.toml:5: where.way = 3: want a text, a list"),
        (WHERE.replace("{}", "{ way = [] }"), "op.toml:5: where.way = []: want a text, a list"),
        (WHERE.replace("{}", "3"), "op.toml:5: where = 3: want a table"),
        (MEAN + 'where = { way = "b" }\n', "op.toml:6: where.way = 'b': want a case that shows it"),
        (MEAN.replace("wrong-value", "raised"), "op.toml:3: kind 'raised' wants a signature"),
        (MEAN.replace("weighs ranks, not elements", "  "), "op.toml:5: reason = '  '"),
        (MEAN.replace("reason", "raeson"), "op.toml:5: unknown key 'raeson' (nearest: reason"),
        (MEAN + MEAN.replace('reason = "weighs ranks, not elements"', ""), "op.toml:6: an expectation without reason"),
        (MEAN + "\n# a comment\n" + MEAN + "wide = 1\n", "op.toml:13: wide = 1: want true or false"),
        (MEAN + 'finding = "xyz"\n', "op.toml:6: finding = 'xyz'"),
        (MEAN + 'torch = "2.11"\n', "op.toml:6: torch = '2.11'"),
        (MEAN.replace('["uneven"]', '"uneven"'), "op.toml:4: features = 'uneven': want a list"),
        (MEAN.replace("wrong-value", "raised") + 'signature = "got 3 of 4"\n', "op.toml:6: signature has numbers or names"),
        (MEAN + "[[expects]]\n", "op.toml:6: unknown 'expects'"),
        ("expect = 3\n", "op.toml:1: want [[expect]] tables"),
        (CAUSE.replace('"newer"', '"weighs-ranks"'), "op.toml:19: id = 'weighs-ranks': the cause in line 1 has it"),
        (CAUSE.replace('"newer"', '"Newer one"'), "op.toml:19: id = 'Newer one': want small letters"),
        (CAUSE.replace("title = ", "titel = ", 1), "op.toml:3: unknown key 'titel' (nearest: title"),
        (CAUSE.replace('["2.15"]', '"2.15"'), "op.toml:21: seen = '2.15': want a list of releases"),
        (CAUSE.replace("mesh.groups", "mesh.gruops"), "op.toml:25: no law matches 'mesh.gruops'"),
        ('[[cause]]\nid = "a"\ntitle = "b"\n', "op.toml:1: a cause without [[cause.expect]] tables"),
        ("[[expect]\n", "op.toml:1: no TOML"),
        ("{}", "op.toml:1: no TOML"),
    ],
)
def test_what_means_nothing_is_refused_with_file_and_line(text: str, message: str, tmp_path: Path) -> None:
    assert refusal(text, tmp_path).startswith(message)


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    (tmp_path / "binary.toml").write_bytes(b"\x00\xff\xfe")
    for name, message in (("binary.toml", "not UTF-8"), ("missing.toml", "No such file"), (".", "Is a directory")):
        with pytest.raises(UsageError, match=message):
            read_entries(tmp_path / name, ["mesh.groups"])


def test_the_entries_of_a_cause_have_its_title_as_their_reason(tmp_path: Path) -> None:
    known = loaded(CAUSE + MEAN, tmp_path)
    assert [(entry.law, entry.reason, entry.cause and entry.cause.id) for entry in known.entries] == [
        ("op.forward[mean]", "The mean weighs ranks, not elements", "weighs-ranks"),
        ("op.forward[mean]", "weighs ranks, not elements", None),
    ]
    (newer,) = loaded(CAUSE[CAUSE.index('[[cause]]\nid = "newer"') :], tmp_path, "2.15.0").entries
    assert (newer.issue, newer.where) == ("https://example.org/1", f"{tmp_path}/op.toml:7")


@pytest.mark.parametrize(
    ("torch", "laws", "unseen"),
    [
        ("2.11.0", ["op.forward[mean]"], False),
        ("2.12.1", ["op.forward[mean]"], True),
        ("2.13.0+cpu", ["op.forward[mean]"], False),
        ("2.14.0", ["op.forward[mean]", "mesh.groups"], True),  # 2.13 has the one, 2.15 the other, and nobody tried 2.14
        ("2.15.0", ["op.forward[sum]", "mesh.groups"], False),  # the first is mended there, but for one of its entries
        ("2.16.0", ["op.forward[sum]", "mesh.groups"], True),
    ],
)
def test_a_cause_holds_where_it_was_seen_and_near_there(torch: str, laws: list[str], unseen: bool, tmp_path: Path) -> None:
    entries = loaded(CAUSE, tmp_path, torch).entries
    assert [entry.law for entry in entries] == laws
    assert any(entry.is_untried_on(torch) for entry in entries) is unseen


def test_an_entry_whose_case_holds_is_stale(tmp_path: Path) -> None:
    text = "op.forward[mean] mesh=2 a=5:S(0) steps=mean(a)"
    known = loaded(MEAN + f'case = "{text}"\n', tmp_path)
    (entry,), (case,) = known.entries, known.known_cases("op.forward[mean]")
    for _ in range(30):
        known.count_case(MEAN_CASE, {"uneven"})
    assert not entry.is_stale  # its case was not tried
    known.note_own_case(Verdict(case, "held"))
    assert [entry.is_stale, replace(entry, rare=True).is_stale] == [True, False]
    known.match(MEAN_CASE, "wrong-value", {"uneven"}, "")  # another case shows that it is there
    assert not entry.is_stale
    assert loaded(MEAN.replace("wrong-value", "hang") + f'case = "{text}"\n', tmp_path).known_cases("op.forward[mean]") == []


def test_headers_within_texts_do_not_count_as_lines(tmp_path: Path) -> None:
    text = MEAN.replace('"weighs ranks, not elements"', '"""\n[[expect]]\n"""') + "\n" + MEAN
    assert [entry.line for entry in loaded(text, tmp_path).entries] == [1, 9]


def test_the_files_of_all_layers_come_in_order() -> None:
    given = [*shipped_files(), Path("their.toml"), Path("mine.toml")]
    assert expectation_files(Target(expect=("their.toml",)), [Path("mine.toml")]) == given
