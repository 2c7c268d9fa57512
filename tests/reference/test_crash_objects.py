"""The model of crashes of an object store: puts are atomic and last, and a rename is a put and a removal."""

from __future__ import annotations

import pytest

from shardlaw.reference.crash import Step
from shardlaw.reference.crash_objects import object_states, objects_after

OLD = {"a": b"old"}
MEET = Step("meet", other="all")


def logs(*steps: list[Step]) -> list[list[Step]]:
    return [[Step(s.kind, s.path, s.other, s.at, s.data, number) for number, s in enumerate(own)] for own in steps]


def put(name: str, data: bytes = b"new") -> Step:
    return Step("put", name, data=data)


def test_a_put_is_there_as_a_whole_or_not_at_all() -> None:
    assert [state.tree for state in object_states(OLD, logs([put("a")]))] == [{"a": b"old"}, {"a": b"new"}]


def test_nothing_that_was_done_is_lost() -> None:
    done = logs([put("t"), put("a"), Step("remove", "t")])
    assert [state.tree for state in object_states(OLD, done)] == [
        OLD,
        {"a": b"old", "t": b"new"},
        {"a": b"new", "t": b"new"},
        {"a": b"new"},
    ]
    assert [state.tree for state in object_states(OLD, done, returned=True)] == [{"a": b"new"}]


def test_what_comes_after_a_meeting_has_all_that_came_before_it() -> None:
    found = object_states({}, logs([put("x"), MEET, put("meta")], [put("y"), MEET]))
    assert all({"x", "y"} <= {*state.tree} for state in found if "meta" in state.tree)
    assert len(found) == 5


@pytest.mark.parametrize(
    ("done", "tree"),
    [
        ([0, 0], OLD),
        ([1, 0], {"a": b"one"}),
        ([1, 1], {"a": b"one", "b": b"two"}),
        ([0, 1], {**OLD, "b": b"two"}),
    ],
)
def test_a_state_is_named_by_what_each_process_has_done(done: list[int], tree: dict[str, bytes]) -> None:
    state = objects_after(OLD, logs([put("a", b"one")], [put("b", b"two")]), done)
    assert state.tree == tree
    assert state.description.startswith(f"done={done[0]},{done[1]}")
