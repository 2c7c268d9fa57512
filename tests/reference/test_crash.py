"""The model of crashes: what lasts, which moments there are, and which states they leave."""

from __future__ import annotations

import pytest

from shardlaw.reference.crash import Step, cuts, order_steps, state_at, states, surviving_tree
from shardlaw.reference.crash_jobs import overlapped_states

OLD: dict[str, bytes | None] = {"a": b"old"}


def trees(base: dict[str, bytes | None], *logs: list[Step], disk: str = "posix") -> list[dict[str, bytes | None]]:
    return [dict(state.tree) for state in states(base, timed(*logs), disk)]


def timed(*logs: list[Step]) -> list[list[Step]]:
    """The logs with times that order the steps of each process."""
    return [[Step(s.kind, s.path, s.other, s.at, s.data, number) for number, s in enumerate(log)] for log in logs]


def write(path: str, data: bytes = b"new") -> list[Step]:
    return [Step("open", path, at=1), Step("write", path, data=data)]


def test_what_was_not_synced_is_lost_or_not() -> None:
    found = trees(OLD, write("a"))
    assert found == [{"a": b"old"}, {"a": b""}, {"a": b"new"}, {"a": b"n"}]


def test_what_was_synced_lasts() -> None:
    done = timed([*write("a"), Step("sync", "a")])
    assert [state.tree for state in states(OLD, done, returned=True)] == [{"a": b"new"}]


def test_a_name_lasts_once_its_folder_is_synced() -> None:
    replaced = [*write("t"), Step("sync", "t"), Step("move", "t", "a")]
    assert {"a": b"old"} in [{**state.tree} for state in states(OLD, timed(replaced), returned=True)]
    assert [state.tree for state in states(OLD, timed([*replaced, Step("sync", "")]), returned=True)] == [{"a": b"new"}]


def test_a_replaced_file_is_the_old_one_or_the_new_one_in_every_state() -> None:
    found = trees(OLD, [*write("t"), Step("sync", "t"), Step("move", "t", "a"), Step("sync", "")])
    assert {tree["a"] for tree in found} == {b"old", b"new"}


def test_a_file_that_is_renamed_before_it_is_synced_may_be_empty() -> None:
    assert {tree["a"] for tree in trees(OLD, [*write("t"), Step("move", "t", "a")])} >= {b"", b"old", b"new"}


def test_a_kill_loses_nothing() -> None:
    assert trees(OLD, write("a"), disk="kill") == [{"a": b"old"}, {"a": b""}, {"a": b"new"}]


def test_what_stands_in_a_folder_without_a_name_has_no_path() -> None:
    assert {} in trees({}, [Step("make", "d"), *write("d/f"), Step("sync", "d/f"), Step("sync", "d")])
    assert {"d": None, "d/f": b"new"} in trees({}, [Step("make", "d"), *write("d/f")])


def test_a_folder_moves_with_what_it_holds_and_is_removed() -> None:
    base: dict[str, bytes | None] = {"d": None, "d/f": b"1"}
    assert surviving_tree(base, [Step("move", "d", "e")]) == {"e": None, "e/f": b"1"}
    assert surviving_tree(base, [Step("remove", "d/f"), Step("remove", "d")]) == {}
    assert surviving_tree(base, [Step("link", "d/f", "g"), Step("write", "g", data=b"22")]) == {"d": None, "d/f": b"22", "g": b"22"}


def test_holes_are_zeros_and_files_are_cut() -> None:
    assert surviving_tree({}, [Step("open", "f"), Step("write", "f", at=2, data=b"x")]) == {"f": b"\0\0x"}
    assert surviving_tree({"f": b"abc"}, [Step("cut", "f", at=1)]) == {"f": b"a"}
    assert surviving_tree({"f": b"abc"}, [Step("cut", "f", at=1), Step("write", "f", at=1, data=b"z")], lost={0}) == {"f": b"abc"}


@pytest.mark.parametrize(
    ("kind", "root", "allowed"),
    [
        ("all", 0, {(0, 0), (1, 0), (0, 1), (1, 1), (2, 1), (1, 2), (2, 2)}),
        ("to", 0, {(0, 0), (1, 0), (0, 1), (1, 1), (2, 1), (0, 2), (1, 2), (2, 2)}),
        ("from", 0, {(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1), (1, 2), (2, 2)}),
    ],
)
def test_nobody_passes_a_meeting_before_those_whom_it_waits_for(kind: str, root: int, allowed: set[tuple[int, int]]) -> None:
    log = [Step("open", "f"), Step("meet", other=kind, at=root), Step("open", "g")]
    found = {(len(first), len(second)) for first, second in cuts(timed(log, log))}
    assert found == allowed


def test_processes_that_meet_in_other_orders_are_refused() -> None:
    with pytest.raises(ValueError, match="one order"):
        cuts(timed([Step("meet", other="all")], []))


def test_threads_are_ordered_for_each_file_and_begin_in_turn() -> None:
    log = [step for name in "abc" for step in write(name)]
    names = [{step.path: step.kind for step in done} for (done,) in cuts(timed(log), threads=2)]
    assert {"b": "write"} in names
    assert {"c": "open"} not in names
    assert {"a": "open", "b": "write", "c": "open"} in names


def test_a_state_is_named_by_what_was_done_and_lost() -> None:
    logs = timed(write("a"), write("b"))
    found = next(state for state in states({}, logs) if "half=1.2" in state.description)
    assert found.description.startswith("done=0,2 half=1.2;")
    steps = {place: step for place, step in order_steps(logs).items() if place[0] == 1}
    assert state_at({}, steps, "", half=(1, 2)).tree == found.tree == {"b": b"n"}


def test_jobs_take_turns() -> None:
    found = {
        state.description.partition(";")[0]: state.tree["a"] for state in overlapped_states(OLD, (write("a", b"first"), write("a", b"2")))
    }
    assert found["turns=0,2,0"] == b"2"
    assert found["turns=0,2,2"] == b"first"
    assert {*found.values()} == {b"old", b"", b"first", b"2"}
