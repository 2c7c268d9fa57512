"""The local tensors of all ranks, computed in one process.

A world is a mapping from coordinates to local tensors. :func:`distribute` computes it from a full tensor, :func:`assemble` computes the
full tensor from it, and :func:`redistribute` does one after the other: a real implementation must give the same result by any route.

A layout with pending reductions has many valid worlds: any contributions that reduce to the value. :func:`contributions` picks some with
which a wrong reduction is unlikely to be right by accident: unequal, of both signs, with extreme losers for ``min`` and ``max``.

Source: the documentation of ``torch.distributed.tensor`` (a DTensor denotes one full tensor; ``Partial`` names the reduction that
is pending).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial, reduce

import torch

from shardlaw.reference.layout import Layout
from shardlaw.reference.mesh import Coord
from shardlaw.reference.notation import Shape
from shardlaw.reference.placement import Partial, Replicate, is_reduction
from shardlaw.reference.tensors import dense, scatter_bits

World = dict[Coord, torch.Tensor]

COMBINE: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
    "product": torch.mul,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}


def take(full: torch.Tensor, layout: Layout, coord: Coord) -> torch.Tensor:
    """The elements of ``full`` that the rank at ``coord`` owns, as a new contiguous tensor of its local shape."""
    local = full
    for dim, owned in enumerate(layout.owned(coord)):
        if len(owned) != full.shape[dim] or layout.is_strided():
            local = local.index_select(dim, torch.tensor(owned, dtype=torch.int64))
    return local.clone(memory_format=torch.contiguous_format)


def can_reduce(dtype: torch.dtype, op: str) -> bool:
    """Whether elements of ``dtype`` have a reduction by ``op``: integers have no average, complex numbers no order, floats no bits."""
    floating = dtype.is_floating_point or dtype.is_complex
    if op == "avg":
        return floating
    if op in ("min", "max"):
        return not dtype.is_complex
    return op in ("sum", "product") or not floating


def contributions(full: torch.Tensor, op: str, parts: int, seed: int = 0, divided: torch.Tensor | None = None) -> list[torch.Tensor]:
    """``parts`` tensors that reduce to ``full`` by ``op``: unequal, and exact for the integer fills of :mod:`shardlaw.reference.tensors`.
    Elements that are not ``divided``, a tensor of bools, are given to one part whole: the others get neutral ones.

    For each element one part, the *winner*, is chosen such that the reduction gives the value. The winner differs between elements, so that
    no single rank holds the answer. Raises ``ValueError`` where the dtype has no such reduction.
    """
    if not can_reduce(full.dtype, op):
        raise ValueError(f"no contributions of {full.dtype} reduce by {op}")
    if parts == 1:
        return [full.clone()]
    # these seeds differ from those of the tensors of a case: noise equal to a value would hide a mistake
    noise = [dense(tuple(full.shape), full.dtype, "small", scatter_bits(seed, i)) for i in range(parts)]
    by = BOOL_REDUCTIONS.get(op, op) if full.dtype == torch.bool else op
    won, lost = _SPLITS[by](full, noise)
    exact = _sums_exactly(full) if divided is None else _sums_exactly(full) & divided
    if by in ("sum", "product", "min", "max") and not exact.all():  # with the others the sum would round or overflow
        won, lost = (
            [torch.where(exact, part, full) for part in won],
            [torch.where(exact, part, _neutral_element(by, part)) for part in lost],
        )
    winner = dense(tuple(full.shape), torch.int64, f"index{parts}", scatter_bits(seed, parts))
    return [torch.where(winner == i, won[i], lost[i]) for i in range(parts)]


def _sums_exactly(full: torch.Tensor) -> torch.Tensor:
    """Which elements are so far from the limits of their dtype that sums with small integers are exact."""
    if full.is_complex():
        return _sums_exactly(torch.view_as_real(full)).all(-1)
    if full.dtype.is_floating_point:
        return (full.abs() <= 2 / torch.finfo(full.dtype).eps) & (full * 64 == (full * 64).round()) & ~((full == 0) & full.signbit())
    if full.dtype == torch.bool:
        return torch.ones_like(full)
    ends = torch.iinfo(full.dtype)
    return (full < ends.max - 1) & (full > ends.min + 1) | torch.tensor(not full.dtype.is_signed)


def _neutral_element(op: str, like: torch.Tensor) -> torch.Tensor:
    """The neutral element of a reduction. For sums it is -0.0, which keeps the sign of either zero."""
    if op == "product":
        return torch.ones_like(like)
    if op == "sum":
        return -torch.zeros_like(like)
    ends = None if like.dtype.is_floating_point else torch.iinfo(like.dtype)
    least, most = (ends.min, ends.max) if ends else (-math.inf, math.inf)
    return torch.full_like(like, most if op == "min" else least)


# the bitwise reductions to which those of bools are equal
BOOL_REDUCTIONS = {"sum": "bor", "max": "bor", "product": "band", "min": "band"}
Split = tuple[list[torch.Tensor], list[torch.Tensor]]


def _split_sum(full: torch.Tensor, noise: list[torch.Tensor]) -> Split:
    if not full.dtype.is_signed:
        share = full // len(noise)
        return [full - share * (len(noise) - 1)] * len(noise), [share] * len(noise)
    total = sum(noise[1:], noise[0])
    return [full - (total - n) for n in noise], noise


def _split_avg(full: torch.Tensor, noise: list[torch.Tensor]) -> Split:
    total = sum(noise[1:], noise[0])
    return [full - (total - n) for n in noise], [full + n for n in noise]


def _split_product(full: torch.Tensor, noise: list[torch.Tensor]) -> Split:
    one = torch.ones_like(full)
    if not full.dtype.is_signed:
        return [full] * len(noise), [one] * len(noise)
    if full.dtype.is_complex or full.dtype.is_floating_point:
        factors = [torch.where(n.real < 0, -one, one) * torch.where(n.real == 1, one * 2, one) for n in noise]
    else:
        factors = [torch.where(n < 0, -one, one) for n in noise]
    # every factor is plus or minus a power of two: dividing by it is exact
    total = reduce(torch.mul, factors)
    won = [full / total * f if full.dtype.is_floating_point or full.dtype.is_complex else full * total * f for f in factors]
    return won, factors


def _split_extreme(sign: int, full: torch.Tensor, noise: list[torch.Tensor]) -> Split:
    if full.dtype.is_floating_point:
        return [full] * len(noise), [full + sign * 3 * (n.abs() + 9) for n in noise]
    range_ = torch.iinfo(full.dtype)
    losers = [full.to(torch.int64) + sign * 3 * (n.to(torch.int64).abs() + 9) for n in noise]
    return [full] * len(noise), [loser.clamp(range_.min, range_.max).to(full.dtype) for loser in losers]


def _split_bxor(full: torch.Tensor, noise: list[torch.Tensor]) -> Split:
    total = reduce(torch.bitwise_xor, noise)
    return [full ^ total ^ n for n in noise], noise


_SPLITS: dict[str, Callable[[torch.Tensor, list[torch.Tensor]], Split]] = {
    "sum": _split_sum,
    "avg": _split_avg,
    "product": _split_product,
    "min": partial(_split_extreme, 1),
    "max": partial(_split_extreme, -1),
    "band": lambda full, noise: ([full] * len(noise), [full | n for n in noise]),
    "bor": lambda full, noise: ([full] * len(noise), [full & n for n in noise]),
    "bxor": _split_bxor,
}


def distribute(full: torch.Tensor, layout: Layout, seed: int = 0) -> World:
    """The world of ``full`` under ``layout``; ``seed`` picks the contributions of pending reductions."""
    values: World = {(): full}
    # what is not divided once is not divided along another mesh dim either: the order in which both are reduced would show
    divided = _sums_exactly(full) if sum(map(is_reduction, layout.placements)) > 1 else None
    for dim, (size, placement) in enumerate(zip(layout.mesh.shape, layout.placements, strict=True)):
        split: World = {}
        for coord, value in values.items():
            if is_reduction(placement):
                op = placement.op if isinstance(placement, Partial) else "sum"
                for i, part in enumerate(contributions(value, op, size, seed + 101 * dim, divided)):
                    split[*coord, i] = part
            else:
                split.update({(*coord, i): value for i in range(size)})
        values = split
    return {coord: take(value, layout, coord) for coord, value in values.items()}


def assemble(world: Mapping[Coord, torch.Tensor], layout: Layout) -> torch.Tensor:
    """The full tensor of a world: pending reductions done, every shard in its place.

    Of replicas, the first along each mesh dim is read; :func:`assemble_replicas` reads all.
    Raises ``ValueError`` where a local tensor has not the shape that its layout names.
    """
    return next(iter(assemble_replicas(world, layout).values()))


def assemble_replicas(world: Mapping[Coord, torch.Tensor], layout: Layout) -> dict[Coord, torch.Tensor]:
    """The full tensor as each set of replicas denotes it, by the coordinate along the replicating mesh dims (0 elsewhere).

    A world is valid when all of them are equal. Raises ``ValueError`` as :func:`assemble` does.
    """
    partial_dims = [dim for dim, placement in enumerate(layout.placements) if is_reduction(placement)]
    replica_dims = [dim for dim, placement in enumerate(layout.placements) if isinstance(placement, Replicate)]
    groups: dict[Coord, dict[Coord, torch.Tensor]] = {}
    for coord in layout.mesh.coords():
        local, want = world[coord], layout.local_shape(coord)
        if tuple(local.shape) != want:
            raise ValueError(f"local tensor at {coord} has shape {tuple(local.shape)}, its layout says {want}")
        key = tuple(0 if dim in partial_dims else position for dim, position in enumerate(coord))
        groups.setdefault(key, {})[coord] = local
    found: dict[Coord, torch.Tensor] = {}
    for coord, members in groups.items():
        replica = tuple(position if dim in replica_dims else 0 for dim, position in enumerate(coord))
        value = _reduce(members, layout, partial_dims)
        full = found.setdefault(replica, torch.zeros(layout.shape, dtype=value.dtype))
        full[_index_grid(layout.owned(coord), layout.shape)] = value
    return found


def _reduce(members: dict[Coord, torch.Tensor], layout: Layout, dims: list[int]) -> torch.Tensor:
    for dim in reversed(dims):
        placement = layout.placements[dim]
        op = placement.op if isinstance(placement, Partial) else "sum"
        folded: dict[Coord, list[torch.Tensor]] = {}
        for coord in sorted(members):
            folded.setdefault((*coord[:dim], 0, *coord[dim + 1 :]), []).append(members[coord])
        members = {coord: reduce_by(op, values) for coord, values in folded.items()}
    return next(iter(members.values()))


def reduce_by(op: str, values: list[torch.Tensor]) -> torch.Tensor:
    """The reduction of equal-shaped tensors by ``op``, in the order given."""
    if values[0].dtype == torch.bool and op == "sum":
        return reduce(torch.logical_or, values)
    total = reduce(COMBINE[op], values)
    return total / len(values) if op == "avg" else total


def _index_grid(owned: tuple[tuple[int, ...], ...], shape: Shape) -> tuple[torch.Tensor, ...]:
    """Index tensors that address the open mesh of the owned lists."""
    grid = []
    for dim, indices in enumerate(owned):
        extents = [1] * len(shape)
        extents[dim] = len(indices)
        grid.append(torch.tensor(indices, dtype=torch.int64).reshape(extents))
    return tuple(grid)


def redistribute(world: Mapping[Coord, torch.Tensor], source: Layout, target: Layout, seed: int = 0) -> World:
    """The world of ``target`` that denotes the same full tensor as ``world`` does under ``source``."""
    return distribute(assemble(world, source), target, seed)
