"""The parameters of an act and of its due function."""

from __future__ import annotations

from typing import Annotated

import pytest

from shardlaw.conformance.law.fields import WordField
from shardlaw.conformance.law.schema import read_parameters

Side = Annotated[str, WordField(("left", "right"))]
Side2 = Annotated[str, WordField(("left", "right", "both"))]


def act(side: Side) -> None: ...
def due(side: Side) -> None: ...
def due_without_field(side: str) -> None: ...
def due_of_another_field(side: Side2) -> None: ...


def test_a_due_function_has_the_fields_of_its_act() -> None:
    known = read_parameters(act)
    assert read_parameters(due, known) == read_parameters(due_without_field, known) == known
    with pytest.raises(TypeError, match="due_of_another_field: parameter 'side' is another field than the act's of that name"):
        read_parameters(due_of_another_field, known)
