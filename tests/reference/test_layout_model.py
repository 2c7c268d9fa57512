"""The layout against a second model of it, written the other way round.

The reference splits lists of indices among ranks. The model here never sees a list: it follows one element at a time and computes
from sizes alone which coordinate owns it and where it lies there. Both must agree on every element of every layout.
"""

from __future__ import annotations

import itertools
import random
from functools import cache

from shardlaw.reference.layout import Layout
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.placement import Partial, Placement, Replicate, Shard, StridedShard, shard_dim

LAYOUTS = 100_000  # distinct ones
MESHES = [Mesh.of(*shape) for shape in ((2,), (3,), (4,), (5,), (1,), (2, 2), (2, 3), (3, 2), (1, 3), (4, 1), (2, 4), (2, 2, 2), (2, 1, 3))]
EXTENTS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 13)
FACTORS = (1, 2, 3, 4, 5)


def ceil(a: int, b: int) -> int:
    return (a + b - 1) // b


def piece(length: int, parts: int, i: int) -> int:
    """How many of ``length`` things the ``i``-th of ``parts`` ranks gets."""
    step = ceil(length, parts)
    return max(0, min(step, length - i * step))


def follow(position: int, length: int, ranks: int, runs: int) -> tuple[int, int]:
    """Which rank gets the element at ``position`` of ``length``, and at which position of its part. One run: a plain shard."""
    run_step = ceil(length, runs)
    run, within = divmod(position, run_step)
    this_run = min(run_step, length - run * run_step)
    step = ceil(this_run, ranks)
    owner, at = divmod(within, step)
    before = sum(piece(piece(length, runs, earlier), ranks, owner) for earlier in range(run))
    return owner, before + at


def lengths(length: int, ranks: int, runs: int, owner: int) -> int:
    """How many of ``length`` elements the rank ``owner`` gets."""
    return sum(piece(piece(length, runs, run), ranks, owner) for run in range(runs))


@cache  # what one tensor dim gives, the others do not change
def owners(extent: int, cuts: tuple[tuple[int, int], ...]) -> dict[tuple[int, ...], tuple[int, ...]]:
    """For each choice of ranks along the mesh dims that cut this tensor dim: the global indices by their local positions."""
    found: dict[tuple[int, ...], dict[int, int]] = {who: {} for who in itertools.product(*(range(ranks) for ranks, _ in cuts))}
    for index in range(extent):
        position, length, who = index, extent, []
        for ranks, runs in cuts:
            owner, position = follow(position, length, ranks, runs)
            length = lengths(length, ranks, runs, owner)
            who.append(owner)
        assert position not in found[tuple(who)], "two elements at one place"
        found[tuple(who)][position] = index
    for held in found.values():
        assert sorted(held) == list(range(len(held))), "a hole in the local tensor"
    return {who: tuple(held[position] for position in range(len(held))) for who, held in found.items()}


def model(shape: tuple[int, ...], mesh: Mesh, placements: tuple[Placement, ...]) -> dict[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """What every coordinate owns, dim by dim."""
    by_dim = []
    for dim, extent in enumerate(shape):
        cutting = [at for at, placement in enumerate(placements) if shard_dim(placement) == dim]
        cuts = tuple((mesh.shape[at], getattr(placements[at], "split_factor", 1)) for at in cutting)
        by_dim.append((cutting, owners(extent, cuts)))
    return {
        coord: tuple([found[tuple([coord[at] for at in cutting])] for cutting, found in by_dim])
        for coord in itertools.product(*map(range, mesh.shape))
    }


def drawn(rng: random.Random) -> tuple[tuple[int, ...], Mesh, tuple[Placement, ...]]:
    mesh = rng.choice(MESHES)
    shape = tuple(rng.choice(EXTENTS) for _ in range(rng.choice((0, 1, 1, 2, 2, 3))))
    placements: list[Placement] = []
    for _ in mesh.shape:
        kind = rng.random()
        if not shape or kind < 0.15:
            placements.append(Replicate() if kind < 0.1 else Partial())
        elif kind < 0.6:
            placements.append(Shard(rng.randrange(len(shape))))
        else:
            placements.append(StridedShard(rng.randrange(len(shape)), rng.choice(FACTORS)))
    return shape, mesh, tuple(placements)


def test_the_layout_and_the_model_agree_on_every_element() -> None:
    rng = random.Random(20240229)
    seen = set()
    while len(seen) < LAYOUTS:
        shape, mesh, placements = drawn(rng)
        if (shape, mesh.shape, placements) in seen:
            continue
        seen.add((shape, mesh.shape, placements))
        layout = Layout(shape, mesh, placements)
        want = model(shape, mesh, placements)
        assert {coord: layout.owned(coord) for coord in mesh.coords()} == want, str(layout)


def test_what_is_read_off_a_layout_follows_from_what_is_owned() -> None:
    rng = random.Random(7)
    for _ in range(5_000):
        layout = Layout(*drawn(rng))
        held = {coord: set(itertools.product(*layout.owned(coord))) for coord in layout.mesh.coords()}
        elements = set(itertools.product(*map(range, layout.shape)))
        assert set().union(*held.values()) == elements
        for element in elements:
            assert sum(element in mine for mine in held.values()) == layout.replicas()
        for coord, mine in held.items():
            box = layout.box(coord)
            inside = set() if box is None else set(itertools.product(*(range(a, b) for a, b in zip(box.offset, box.end, strict=True))))
            assert box is None or inside == mine
            runs = all(list(owned) == list(range(owned[0], owned[0] + len(owned))) for owned in layout.owned(coord) if owned)
            assert (box is not None) == runs
            assert layout.local_shape(coord) == tuple(len(owned) for owned in layout.owned(coord))
            assert layout.offset(coord) == tuple(min(owned, default=n) for owned, n in zip(layout.owned(coord), layout.shape, strict=True))
        assert (len({len(mine) for mine in held.values()}) == 1) or not layout.is_even()
        assert layout.empty_coords() == [coord for coord, mine in held.items() if not mine]
