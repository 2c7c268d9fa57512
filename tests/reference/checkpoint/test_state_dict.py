"""Nested states: their notation, and which leaves a checkpoint has of them."""

from __future__ import annotations

import pytest
from hypothesis import given

from shardlaw.reference.checkpoint.state_dict import (
    FlattenError,
    Slot,
    Stateful,
    flatten,
    format_state,
    is_branch,
    map_leaves,
    parse_state,
    slot_names,
    spoil,
    unflatten,
)
from shardlaw.reference.notation import NotationError
from shardlaw.strategies.state_dicts import state_dicts

X, Y = Slot("x"), Slot("y")
NESTED = state_dicts(("x", "y"), stateful=True, int_keys=True)


@given(NESTED)
def test_parsing_what_was_printed_gives_the_same_state(state):
    text = format_state(state)
    assert not any(map(str.isspace, text))
    assert parse_state(text) == state
    assert format_state(parse_state(text)) == text


@pytest.mark.parametrize("text", ["a b", 'q"q', "it's", "back\\slash", "\n", "é€𝄞", ""])
def test_texts_survive(text):
    for value in (text, text.encode()):
        assert parse_state(format_state({"k": value})) == {"k": value}
    assert not any(map(str.isspace, format_state({text: 1})))


def test_keys_of_every_kind_survive_and_become_texts_in_paths():
    state = {"o": {3: X, True: Y, None: 1, -0.5: 2, (0, ("a", None)): 3, (): 4, -1: 5}}
    assert parse_state(format_state(state)) == state
    assert [type(key) for key in parse_state(format_state(state))["o"]] == [type(key) for key in state["o"]]
    assert {path[1] for path, _ in flatten(state).values()} == {*map(str, state["o"])}


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[x]", "want a dict"),
        ("{w:", "want a dict"),
        ("{w:f(x)}", "'f(x)'"),
        ('{b"a":x}', "no key"),
        ("{([1],):x}", "no key"),
        ("{**x}", "no key"),
        ("{w:x+1}", "'x + 1'"),
    ],
)
def test_what_is_no_state_is_quoted(text, told):
    with pytest.raises(NotationError, match="state") as error:
        parse_state(text)
    assert told in str(error.value)


@pytest.mark.parametrize(
    ("value", "branch"),
    [
        ({}, True),
        ([], False),
        ([1, [2]], False),
        ([{}], True),
        ([[X]], True),
        ((X,), False),
        ([(X,)], False),
        ({1: 2}, True),
        ([[[{}]], 1], True),
    ],
)
def test_lists_are_opened_where_a_tensor_or_a_dict_is_in_their_lists(value, branch):
    assert is_branch(value) is branch


def test_leaves_have_the_paths_that_lead_to_them():
    state = {"a": {"b": [X, 1], 3: None}, "c": Stateful({"n": (1, Y)}), "d": {}, "e": [1, 2]}
    assert flatten(state) == {
        "a.b.0": (("a", "b", 0), X),
        "a.b.1": (("a", "b", 1), 1),
        "a.3": (("a", "3"), None),
        "c.n": (("c", "n"), (1, Y)),
        "e": (("e",), [1, 2]),
    }
    assert unflatten(flatten(state)) == {"a": {"b": [X, 1], "3": None}, "c": {"n": (1, Y)}, "e": [1, 2]}


def test_two_leaves_of_one_name_are_refused():
    with pytest.raises(FlattenError, match=r"'a\.b'"):
        flatten({"a": {"b": 1}, "a.b": 2})


def test_gaps_in_lists_are_none():
    assert unflatten({"l.2": (("l", 2), X), "l.0.k": (("l", 0, "k"), 1)}) == {"l": [{"k": 1}, None, X]}


@given(state_dicts(("x", "y")))
def test_unflatten_undoes_flatten_but_for_what_nothing_is_stored_of(state):
    flat = flatten(state)
    again = unflatten(flat)
    assert {leaf for _, leaf in flatten(again).values() if isinstance(leaf, Slot)} == {
        leaf for _, leaf in flat.values() if isinstance(leaf, Slot)
    }
    if "{}" not in format_state(state):
        assert again == state


@given(NESTED)
def test_a_spoiled_state_has_the_same_leaves_and_no_value_left(state):
    other = spoil(state)
    before, after = flatten(state), flatten(other)
    assert {name: path for name, (path, _) in before.items()} == {name: path for name, (path, _) in after.items()}
    for name, (_, leaf) in before.items():
        assert isinstance(leaf, Slot) or format_state(after[name][1]) != format_state(leaf)
    assert list(slot_names(other)) == list(slot_names(state))


def test_mapping_keeps_the_tree():
    state = {"a": [X, (Y, 1)], "b": Stateful({"n": X})}
    assert map_leaves(state, lambda leaf: leaf.name if isinstance(leaf, Slot) else leaf) == {
        "a": ["x", ("y", 1)],
        "b": Stateful({"n": "x"}),
    }
    assert list(slot_names(state)) == ["x", "y"]


def test_what_no_state_holds_cannot_be_spoiled():
    with pytest.raises(TypeError, match="object"):
        spoil(object())
