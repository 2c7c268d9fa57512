"""The strategy for nested states."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, find, given, settings
from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument

from shardlaw.reference.checkpoint.state_dict import Slot, Stateful, flatten, format_state, slot_names
from shardlaw.strategies.state_dicts import state_dicts

QUICK = settings(max_examples=3000, database=None, suppress_health_check=list(HealthCheck))


@given(state_dicts(("x", "y"), stateful=True, int_keys=True))
def test_every_tensor_stands_in_every_state_and_no_two_leaves_have_one_path(state):
    assert {*slot_names(state)} == {"x", "y"}
    assert {leaf.name for _, leaf in flatten(state).values() if isinstance(leaf, Slot)} <= {"x", "y"}
    assert all(isinstance(key, str) for key in state)


def test_it_shrinks_to_the_tensors_alone():
    assert find(state_dicts(("x", "y")), lambda state: True, settings=QUICK) == {"x": Slot("x"), "y": Slot("y")}


@pytest.mark.parametrize("wanted", ["{}", "[]", "()", "None", "{1,2}", 'b"ab"', "1j", "a.b:", "(1,2)"])
def test_it_reaches(wanted):
    found = find(state_dicts(), lambda state: wanted in format_state(state), settings=QUICK)
    assert wanted in format_state(found)


def test_it_reaches_objects_with_state_and_keys_that_are_numbers():
    find(state_dicts(stateful=True), lambda state: any(isinstance(value, Stateful) for value in state.values()), settings=QUICK)
    find(state_dicts(int_keys=True), lambda state: "{0:" in format_state(state), settings=QUICK)


@pytest.mark.parametrize("options", [{"names": ()}, {"max_entries": -1}, {"max_depth": 0}, {"names": "x"}])
def test_a_wrong_option_is_refused(options):
    with pytest.raises(InvalidArgument, match=next(iter(options))):
        state_dicts(**options)


def test_without_options_it_is_a_strategy():
    assert isinstance(state_dicts(), st.SearchStrategy)
