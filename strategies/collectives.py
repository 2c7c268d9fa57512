"""Inputs of collectives: groups, payloads that identify every element, and sizes that differ by rank.

A constant payload on each rank cannot show that a block was cut, reversed or mixed up. Here every element is unique to its member and
position, as far as the dtype allows. Contributions to reductions are small and unequal, so that every reduction is exact and no single
member has the result.
"""

from __future__ import annotations

import math

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from shardlaw.reference.mesh import Mesh
from shardlaw.reference.notation import Shape
from shardlaw.reference.simulate import contributions
from shardlaw.reference.tensors import dense, scatter_bits
from shardlaw.strategies._arguments import check_count
from shardlaw.strategies.meshes import palette_meshes

# (members, weight), the plainest first
GROUPS = {"2": 9, "3": 8, "4": 3, "1": 1}
SUBGROUPS = {"2@0,2": 3, "2@1,2": 2, "3@0,1,3": 2, "1@1": 1}
REORDERED = {"2@1,0": 2, "3@2,0,1": 2, "2@2,0": 2, "4@2,3,0,1": 1}
# how many integers from 1 on a dtype can distinguish
ROOM = {torch.uint8: 251, torch.int8: 113, torch.bfloat16: 251, torch.float16: 1999}
UNEVEN = (1, 2, 3, 0, 4, 5)


def groups(*, world_size: int = 4, least: int = 1, parts: bool = True, tables: bool = True) -> SearchStrategy[Mesh]:
    """The members of one group: all ranks, some of them, and lists that do not ascend. Shrinks to ``2``."""
    check_count("world_size", world_size, 1)
    check_count("least", least, 1)
    palette = {**GROUPS, **(SUBGROUPS if parts else {}), **(REORDERED if tables else {})}
    texts = [text for text, weight in palette.items() if Mesh.parse(text).size >= least for _ in range(weight)]
    return st.sampled_from(palette_meshes(texts, world_size) or [Mesh.of(least)])


def extents(size: int) -> SearchStrategy[tuple[int, ...]]:
    """Numbers of rows, one for each of ``size`` members; they differ, and some are 0."""
    check_count("size", size, 1)
    return st.tuples(*[st.sampled_from(UNEVEN)] * size)


def split_tables(size: int) -> SearchStrategy[tuple[tuple[int, ...], ...]]:
    """How many rows each of ``size`` members sends to each."""
    check_count("size", size, 1)
    return st.tuples(*[st.tuples(*[st.sampled_from((1, 2, 0, 3))] * size)] * size)


def payload(shape: Shape, dtype: torch.dtype, position: int, span: int = 0, fill: str = "distinct") -> torch.Tensor:
    """The input at ``position`` of a case: all elements of the case are distinct, as far as the dtype allows; or values by ``fill``,
    ``wide`` or ``edges``, that differ by position.

    ``span``: how many numbers each position uses; where shapes differ, the number of elements of the largest.
    """
    if fill != "distinct" and dtype != torch.bool:
        return dense(shape, dtype, fill, position)
    count = math.prod(shape)
    first = position * (span or count)
    if dtype == torch.bool:
        return torch.tensor([scatter_bits(7, first + i) % 2 for i in range(count)], dtype=dtype).reshape(shape)
    room = ROOM.get(dtype, 1 << 24)
    return _to_tensor([(first + i) % room + 1 for i in range(count)], dtype, shape)


def contribution(
    shape: Shape, dtype: torch.dtype, op: str, size: int, seed: int, position: int = 0, fill: str = "distinct"
) -> torch.Tensor:
    """The input of the member at ``position`` of ``size`` to a reduction by ``op``, which is exact; values differ by ``seed``. With the
    fill ``edges``, one member contributes the special value, the others small ones."""
    if fill == "edges" and op != "avg" and dtype != torch.bool:
        return contributions(dense(shape, dtype, fill, seed), op, size, seed)[position]
    seed += 10 * position
    if fill == "wide" and op != "product" and dtype != torch.bool:
        return dense(shape, dtype, fill, seed) * (size if op == "avg" else 1)
    bits = [scatter_bits(seed, i) for i in range(math.prod(shape))]
    signed = dtype.is_signed or dtype.is_complex
    if dtype == torch.bool:
        return torch.tensor([bool(bit % 2) for bit in bits], dtype=dtype).reshape(shape)
    if op == "product":
        return _to_tensor([(1, 2, -1, -2)[bit % (4 if signed else 2)] for bit in bits], dtype, shape)
    if op in ("min", "max"):
        return _to_tensor([bit % 120 - (60 if signed else 0) for bit in bits], dtype, shape)
    if op in ("band", "bor", "bxor"):
        return _to_tensor([bit % 128 for bit in bits], dtype, shape)
    return _to_tensor([(bit % 31 - (15 if signed else 0)) * (size if op == "avg" else 1) for bit in bits], dtype, shape)


def _to_tensor(values: list[int], dtype: torch.dtype, shape: Shape) -> torch.Tensor:
    if dtype.is_complex:
        return torch.tensor([complex(value, -2 * value) for value in values], dtype=dtype).reshape(shape)
    return torch.tensor(values, dtype=dtype).reshape(shape)
