"""Collectives as functions on lists: entry ``i`` is the input, or the output, of the member at position ``i`` of the group.

The result is the same for every implementation (ring, tree, store) and device. Values are dense CPU tensors, or any objects where nothing
is reduced. ``None`` is the output of a member that gets nothing.

Source: the documentation of ``torch.distributed`` and, for what it leaves open, the collectives of MPI that it names.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

import torch

from shardlaw.reference.placement import REDUCE_OPS
from shardlaw.reference.simulate import can_reduce, reduce_by

T = TypeVar("T")


class CollectiveError(ValueError):
    """Arguments for which a collective is not defined."""


def is_reducible(dtype: torch.dtype, op: str) -> bool:
    """Whether elements of ``dtype`` have a reduction by ``op``. Products of complex numbers are not offered."""
    return op in REDUCE_OPS and can_reduce(dtype, op) and not (dtype.is_complex and op == "product")


def reduction(inputs: Sequence[torch.Tensor], op: str) -> torch.Tensor:
    """The reduction of all members' tensors, element by element. Raises :class:`CollectiveError` where there is none."""
    kinds = {(tuple(tensor.shape), tensor.dtype) for tensor in inputs}
    if len(kinds) != 1:
        raise CollectiveError(f"members reduce tensors of different kinds: {sorted(map(str, kinds))}")
    if not is_reducible(inputs[0].dtype, op):
        raise CollectiveError(f"{inputs[0].dtype} has no reduction by {op}")
    return reduce_by(op, list(inputs)).to(inputs[0].dtype)


def all_reduce(inputs: Sequence[torch.Tensor], op: str = "sum") -> list[torch.Tensor]:
    """Every member gets the reduction."""
    return [reduction(inputs, op)] * len(inputs)


def reduce(inputs: Sequence[torch.Tensor], op: str, root: int) -> list[torch.Tensor | None]:
    """The member ``root`` gets the reduction."""
    _check_root(root, inputs)
    return [reduction(inputs, op) if at == root else None for at in range(len(inputs))]


def broadcast(inputs: Sequence[T], root: int) -> list[T]:
    """Every member gets the input of ``root``."""
    _check_root(root, inputs)
    return [inputs[root]] * len(inputs)


def all_gather(inputs: Sequence[T]) -> list[list[T]]:
    """Every member gets the list of all inputs, in the order of the group; sizes may differ."""
    return [list(inputs) for _ in inputs]


def gather(inputs: Sequence[T], root: int) -> list[list[T] | None]:
    """The member ``root`` gets the list of all inputs; sizes may differ."""
    _check_root(root, inputs)
    return [list(inputs) if at == root else None for at in range(len(inputs))]


def scatter(rows: Sequence[Sequence[T] | None], root: int) -> list[T]:
    """Member ``i`` gets entry ``i`` of the list of ``root``."""
    _check_root(root, rows)
    row = rows[root]
    if row is None or len(row) != len(rows):
        raise CollectiveError(f"the root scatters {'nothing' if row is None else len(row)} to {len(rows)} members")
    return list(row)


def reduce_scatter(rows: Sequence[Sequence[torch.Tensor]], op: str = "sum") -> list[torch.Tensor]:
    """Member ``i`` gets the reduction of the entries ``i`` of all members' lists; sizes may differ between entries."""
    return [reduction(column, op) for column in all_to_all(rows)]


def all_to_all(rows: Sequence[Sequence[T]]) -> list[list[T]]:
    """Entry ``j`` of member ``i`` becomes entry ``i`` of member ``j``: the table is transposed."""
    if any(len(row) != len(rows) for row in rows):
        raise CollectiveError(f"lists of {[len(row) for row in rows]} entries among {len(rows)} members")
    return [[row[at] for row in rows] for at in range(len(rows))]


def all_to_all_single(inputs: Sequence[torch.Tensor], splits: Sequence[Sequence[int]] | None = None) -> list[torch.Tensor]:
    """All-to-all of one tensor for each member: ``splits[i][j]`` rows of member ``i`` go to member ``j``, which concatenates what it gets.

    Without ``splits`` each tensor is split evenly.
    """
    if splits is None:
        if any(len(tensor) % len(inputs) for tensor in inputs):
            raise CollectiveError(f"{[len(tensor) for tensor in inputs]} rows cannot be cut into {len(inputs)} equal parts")
        splits = [[len(tensor) // len(inputs)] * len(inputs) for tensor in inputs]
    if any(sum(split) != len(tensor) for split, tensor in zip(splits, inputs, strict=True)):
        raise CollectiveError("splits do not add up to the rows that they split")
    rows = [torch.split_with_sizes(tensor, list(split)) for tensor, split in zip(inputs, splits, strict=True)]
    return [torch.cat(parts) for parts in all_to_all(rows)]


def concatenate(parts: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """A gathered list concatenated along ``dim``; scalars become a vector."""
    return torch.cat([part.reshape(1) if part.ndim == 0 else part for part in parts], dim)


def stack(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """A gathered list as one tensor with a leading dim for the members."""
    return torch.stack(list(parts))


def permute(inputs: Sequence[T], to: Sequence[int]) -> list[T]:
    """The input of member ``i`` goes to member ``to[i]``."""
    if sorted(to) != list(range(len(inputs))):
        raise CollectiveError(f"{list(to)} is no permutation of {len(inputs)} members")
    return [inputs[list(to).index(at)] for at in range(len(inputs))]


def deliver(sent: Iterable[tuple[int, int, Hashable, T]]) -> dict[tuple[int, int, Hashable], list[T]]:
    """The values that arrive, by (source, destination, tag), for messages ``(source, destination, tag, value)`` in sending order."""
    arrived: dict[tuple[int, int, Hashable], list[T]] = {}
    for source, destination, tag, value in sent:
        arrived.setdefault((source, destination, tag), []).append(value)
    return arrived


def _check_root(root: int, members: Sequence[object]) -> None:
    if not 0 <= root < len(members):
        raise CollectiveError(f"position {root} is none of the {len(members)} members")
