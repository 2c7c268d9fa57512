"""A whole world in one process: what every rank must hold, with values.

The world is a mapping from coordinates to local tensors. :func:`distribute` makes it from a full tensor,
:func:`assemble` reads the full tensor back, and :func:`redistribute` is one after the other: whatever route a real
implementation takes, it must end where this ends.

A layout with pending reductions has no one right world: any contributions that reduce to the value will do.
:func:`contributions` picks some that are hard to get right by accident: unequal, of both signs, with large losers for ``min``
and ``max``.

Source: SPEC sections 1.4, 2.1 and 2.2; LAWS P1, P12 and P15.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce

import torch

from reference.layout import Layout
from reference.mesh import Coord
from reference.notation import Shape
from reference.placement import Partial, is_reduction
from reference.tensors import dense

World = dict[Coord, torch.Tensor]

COMBINE = {
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


def contributions(full: torch.Tensor, op: str, parts: int, seed: int = 0) -> list[torch.Tensor]:
    """``parts`` tensors that reduce to ``full`` by ``op``: unequal, and exact for integer values of moderate size.

    Raises ``ValueError`` for an average of integers and for bitwise reductions of floats: they have none.
    """
    if parts == 1:
        return [full.clone()]
    floating = full.dtype.is_floating_point or full.dtype.is_complex
    if op == "avg" and not floating or op in ("band", "bor", "bxor") and floating:
        raise ValueError(f"no contributions of {full.dtype} reduce by {op}")
    shape, dtype = tuple(full.shape), full.dtype
    noise = [dense(shape, dtype, "small", seed + 17 * i + 1) for i in range(parts)]
    winner = dense(shape, torch.int64, f"index{parts}", seed + 5)
    if op in ("sum", "avg"):
        total = full * parts if op == "avg" else full
        rest = noise[:-1]
        return [*rest, total - sum(rest[1:], rest[0])] if dtype != torch.bool else _disjunction(full, noise)
    if op == "product":
        signs = [torch.where(n >= 0, 1, -1).to(dtype) if dtype != torch.uint8 else torch.ones_like(full) for n in noise]
        return [*signs[:-1], full * reduce(torch.mul, signs[:-1])]
    if op in ("min", "max"):
        loss = [torch.full_like(full, 3) * (n.abs() + 9) for n in noise] if dtype != torch.bool else None
        if loss is None:
            losers = [full | n if op == "min" else full & n for n in noise]
        else:
            losers = [full + extra if op == "min" else full - extra for extra in loss]
        return [torch.where(winner == i, full, losers[i]) for i in range(parts)]
    if op == "band":
        return [torch.where(winner == i, full, full | n) for i, n in enumerate(noise)]
    if op == "bor":
        return [torch.where(winner == i, full, full & n) for i, n in enumerate(noise)]
    return [*noise[:-1], full ^ reduce(torch.bitwise_xor, noise[:-1])]


def _disjunction(full: torch.Tensor, noise: list[torch.Tensor]) -> list[torch.Tensor]:
    """A sum of bools is a disjunction: the last contribution is the value, the others imply it."""
    return [*(full & extra for extra in noise[:-1]), full.clone()]


def distribute(full: torch.Tensor, layout: Layout, seed: int = 0) -> World:
    """What every coordinate holds of ``full``; ``seed`` picks the contributions of pending reductions."""
    whole: World = {(): full}
    for dim, (size, placement) in enumerate(zip(layout.mesh.shape, layout.placements, strict=True)):
        handed: World = {}
        for coord, value in whole.items():
            if is_reduction(placement):
                op = placement.op if isinstance(placement, Partial) else "sum"
                for i, part in enumerate(contributions(value, op, size, seed + 101 * dim)):
                    handed[*coord, i] = part
            else:
                handed.update({(*coord, i): value for i in range(size)})
        whole = handed
    return {coord: take(value, layout, coord) for coord, value in whole.items()}


def assemble(world: Mapping[Coord, torch.Tensor], layout: Layout) -> torch.Tensor:
    """The full tensor that a world of local tensors denotes: pending reductions done, every shard in its place.

    Replicas are taken from the first rank that holds them. Raises ``ValueError`` where a local tensor has not the shape
    that its layout names.
    """
    partial_dims = [dim for dim, placement in enumerate(layout.placements) if is_reduction(placement)]
    groups: dict[Coord, dict[Coord, torch.Tensor]] = {}
    for coord, local in world.items():
        want = layout.local_shape(coord)
        if tuple(local.shape) != want:
            raise ValueError(f"local tensor at {coord} has shape {tuple(local.shape)}, its layout says {want}")
        key = tuple(0 if dim in partial_dims else position for dim, position in enumerate(coord))
        groups.setdefault(key, {})[coord] = local
    first = next(iter(world.values()))
    full = torch.zeros(layout.shape, dtype=first.dtype)
    for coord, members in groups.items():
        value = _reduce(members, layout, partial_dims)
        full[_grid(layout.owned(coord), layout.shape)] = value
    return full


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


def _grid(owned: tuple[tuple[int, ...], ...], shape: Shape) -> tuple[torch.Tensor, ...]:
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


