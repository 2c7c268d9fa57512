"""Collectives as list functions: what each member gets, the laws between them, and what means nothing."""

from __future__ import annotations

import pytest
import torch

from shardlaw.reference import collective
from shardlaw.reference.collective import CollectiveError


def rows(size: int) -> list[list[int]]:
    """Every entry names who has it and for whom it is."""
    return [[10 * at + to for to in range(size)] for at in range(size)]


def test_everybody_gets_what_is_due() -> None:
    assert collective.broadcast("abc", 1) == ["b", "b", "b"]
    assert collective.all_gather("abc") == [["a", "b", "c"]] * 3
    assert collective.gather("abc", 2) == [None, None, ["a", "b", "c"]]
    assert collective.scatter([None, "xyz", None], 1) == ["x", "y", "z"]
    assert collective.all_to_all(rows(3)) == [[0, 10, 20], [1, 11, 21], [2, 12, 22]]
    assert collective.permute("abc", [1, 2, 0]) == ["c", "a", "b"]
    assert collective.deliver([(0, 1, 0, "a"), (0, 1, 7, "b"), (0, 1, 0, "c")]) == {(0, 1, 0): ["a", "c"], (0, 1, 7): ["b"]}


@pytest.mark.parametrize(
    ("op", "want"),
    [("sum", 10), ("avg", 2.5), ("min", 1), ("max", 5), ("product", 20)],
)
def test_reductions_of_numbers(op: str, want: float) -> None:
    inputs = [torch.tensor([value]) for value in (4.0, 1.0, 5.0, 0.0)[: 4 if op in ("sum", "avg") else 3]]
    assert collective.all_reduce(inputs, op)[0].tolist() == [want]
    only = collective.reduce(inputs, op, 1)
    assert [value is not None for value in only] == [at == 1 for at in range(len(inputs))]


def test_reductions_of_bits_and_bools() -> None:
    bits = [torch.tensor([value]) for value in (6, 3)]
    assert [collective.reduction(bits, op).item() for op in ("band", "bor", "bxor")] == [2, 7, 5]
    bools = [torch.tensor([True, True, False]), torch.tensor([True, False, False])]
    assert collective.reduction(bools, "sum").tolist() == [True, True, False]
    assert collective.reduction(bools, "product").tolist() == [True, False, False]
    assert collective.reduction(bools, "sum").dtype == torch.bool


def test_uneven_rows_go_where_they_belong() -> None:
    inputs = [torch.arange(3), torch.arange(10, 12)]
    splits = [[2, 1], [0, 2]]
    assert [tensor.tolist() for tensor in collective.all_to_all_single(inputs, splits)] == [[0, 1], [2, 10, 11]]
    assert [tensor.tolist() for tensor in collective.all_to_all_single([torch.arange(2), torch.arange(2, 4)])] == [[0, 2], [1, 3]]
    halves = [[torch.ones(1), torch.ones(3)], [torch.ones(1), torch.ones(3)]]
    assert [tensor.tolist() for tensor in collective.reduce_scatter(halves)] == [[2.0], [2.0, 2.0, 2.0]]


def test_a_gathered_list_as_one_tensor() -> None:
    parts = [torch.tensor([[1, 2]]), torch.tensor([[3, 4]])]
    assert collective.concatenate(parts).tolist() == [[1, 2], [3, 4]]
    assert collective.concatenate(parts, 1).tolist() == [[1, 2, 3, 4]]
    assert collective.stack(parts).shape == (2, 1, 2)
    assert collective.concatenate([torch.tensor(1), torch.tensor(2)]).tolist() == [1, 2]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_each_is_made_of_others(size: int) -> None:
    inputs = [torch.arange(size * 2) + 100 * at for at in range(size)]
    cut = [list(tensor.split(2)) for tensor in inputs]
    total = collective.reduce(inputs, "sum", 0)
    assert total[0] is not None
    assert torch.equal(collective.all_reduce(inputs)[size - 1], total[0])
    pieces = collective.reduce_scatter(cut)
    assert torch.equal(collective.concatenate(pieces), total[0])
    assert collective.all_to_all(collective.all_to_all(cut)) == cut
    assert collective.all_gather(collective.scatter(cut, 0))[0] == cut[0]
    splits = [[(at + to) % 3 for to in range(size)] for at in range(size)]
    uneven = [torch.arange(sum(split)) + 100 * at for at, split in enumerate(splits)]
    there = collective.all_to_all_single(uneven, splits)
    back = collective.all_to_all_single(there, collective.all_to_all(splits))
    assert all(map(torch.equal, back, uneven))


def test_what_means_nothing_is_refused() -> None:
    ones = [torch.ones(2), torch.ones(2)]
    for wrong in (
        lambda: collective.all_reduce([torch.ones(2), torch.ones(3)]),
        lambda: collective.all_reduce([torch.ones(2), torch.ones(2, dtype=torch.int64)]),
        lambda: collective.all_reduce(ones, "band"),
        lambda: collective.all_reduce(ones, "nonsense"),
        lambda: collective.reduce(ones, "sum", 2),
        lambda: collective.broadcast(ones, -1),
        lambda: collective.scatter([None, [1, 2]], 0),
        lambda: collective.scatter([[1], None], 0),
        lambda: collective.all_to_all([[1], [2]]),
        lambda: collective.all_to_all_single([torch.ones(3), torch.ones(3)]),
        lambda: collective.all_to_all_single(ones, [[1, 1], [1, 2]]),
        lambda: collective.permute("ab", [0, 0]),
    ):
        with pytest.raises(CollectiveError):
            wrong()


def test_which_dtypes_have_which_reductions() -> None:
    assert collective.is_reducible(torch.complex64, "sum")
    assert not collective.is_reducible(torch.complex64, "product")
    assert not collective.is_reducible(torch.int64, "avg")
    assert not collective.is_reducible(torch.float32, "bxor")
    assert not collective.is_reducible(torch.float32, "premul")
