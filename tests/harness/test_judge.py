"""What counts as a refusal."""

from __future__ import annotations

import pytest

from conformance.judge import is_refusal

PLANNED = "Sharding propagation failed for aten.index.Tensor(Spec(f32[5, 4](R)))"


@pytest.mark.parametrize(
    ("error", "text"),
    [
        ("NotImplementedError", ""),
        ("RuntimeError", "Cannot flatten unevenly sharded tensor"),
        ("RuntimeError", f"Cannot unflatten unevenly sharded tensor: dimension 0. {PLANNED}"),
        ("ValueError", "Mixed Partial reduce types are not supported"),
    ],
)
def test_refusals_speak_of_sharding(error: str, text: str) -> None:
    assert is_refusal(error, text)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        ("RuntimeError", "shape '[8]' is invalid for input of size 10"),
        ("KeyError", "shard"),
        ("RuntimeError", f"tuple index out of range\n\n{PLANNED}"),
        ("RuntimeError", f"list index out of range {PLANNED}"),
        ("RuntimeError", f"'NoneType' object is not iterable {PLANNED}"),
        ("RuntimeError", f"'Replicate' object has no attribute 'dim' {PLANNED}"),
    ],
)
def test_plans_that_stumble_are_none(error: str, text: str) -> None:
    assert not is_refusal(error, text)
