"""Dropout by its documents: no value can be compared with the whole model's, but what is dropped follows rules.

``torch.nn.Dropout``: an element is zero or ``1 / (1 - p)`` times what it was, each chosen by itself with probability ``p``. ``manual_seed``
of ``torch.distributed.tensor``: ranks of one mesh keep one state of random numbers, so that replicas agree. Shards of a DTensor differ
where its device has random DTensors; elsewhere torch warns and promises nothing, and nothing is judged of them.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from shardlaw.conformance.twin.align import TensorComparison
from shardlaw.conformance.twin.comparison import Departure, RunComparison
from shardlaw.conformance.twin.record import BACKWARD, FORWARD, Key, LocalTensor
from shardlaw.conformance.twin.spec import Plan
from shardlaw.conformance.twin.steps import RankRun
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.placement import shard_dim

FALSE_ALARM = 1e-9  # that what is right is called wrong


def compare_dropout(plan: Plan, calm: RunComparison, parts: Sequence[RankRun]) -> RunComparison:
    """What the ranks of a run with dropout dropped; ``calm`` is the run without, which says who holds which part."""
    lies = {one.key: one for one in calm.judged}
    chances = {path: chance for part in parts for path, chance in part.chances.items()}
    found = []
    for key in dict.fromkeys(key for part in parts for key in part.pieces):
        if key.path in chances and (key.phase, key.what) == (FORWARD, "output 0") and not key.step and key in lies:
            word = _dropout_fault(key, chances[key.path], plan.reference_mesh(), lies[key], parts)
            found.append(TensorComparison(key, math.inf if word else 0.0, 0.0, lies[key].layout, word=word))
    first = next((one for one in found if one.word), None)
    return RunComparison(plan, tuple(found), Departure(plan, first.key.path, first) if first else None, calm.classes)


def _dropout_fault(key: Key, chance: float, mesh: Mesh, lies: TensorComparison, parts: Sequence[RankRun]) -> str:
    """What is wrong with the elements that one call of one module dropped on all ranks; empty where nothing is."""
    given = replace(key, what="input 0")
    pairs = {rank: (part.pieces[given], part.pieces[key]) for rank, part in enumerate(parts) if key in part.pieces}
    dropped = {}
    for rank, (x, y) in pairs.items():
        dropped[rank] = (y.local == 0) & (x.local != 0)
        if not _is_scaled(x.local, y.local, dropped[rank], chance):
            return f"on rank {rank} an element is neither zero nor {1 / (1 - chance):g} times what it was"
        after, before = (parts[rank].pieces.get(replace(one, phase=BACKWARD)) for one in (key, given))
        if after and before and not _is_scaled(after.local, before.local, dropped[rank], chance):
            return f"on rank {rank} backward does not drop what forward dropped"
    held = _ranks_by_part(mesh, lies, pairs)
    for ranks in held:
        for rank in ranks[1:]:
            if not torch.equal(dropped[ranks[0]], dropped[rank]):
                return f"ranks {ranks[0]} and {rank} hold the same part of it, and drop other elements"
    firsts = [ranks[0] for ranks in held]
    for one, other in itertools.combinations(firsts, 2):
        if _must_differ(pairs[one][1]) and dropped[one].shape == dropped[other].shape:
            both = (pairs[one][0].local != 0) & (pairs[other][0].local != 0)
            alike = torch.equal(dropped[one][both], dropped[other][both])
            if alike and (chance**2 + (1 - chance) ** 2) ** int(both.sum()) < FALSE_ALARM:
                return f"ranks {one} and {other} hold other parts of it, and drop the same elements of them: they draw the same numbers"
    much = sum(int((pairs[rank][0].local != 0).sum()) for rank in firsts)
    count = sum(int(dropped[rank].sum()) for rank in firsts)
    if abs(count - chance * much) > math.sqrt(much * math.log(2 / FALSE_ALARM) / 2):  # Hoeffding's inequality
        return f"{count} of {much} elements are dropped, of which each is with probability {chance:g}"
    return ""


def _is_scaled(x: torch.Tensor, y: torch.Tensor, dropped: torch.Tensor, chance: float) -> bool:
    """Whether an element is zero where it is dropped, and elsewhere ``x / (1 - chance)``: two roundings."""
    due = torch.where(dropped, 0.0, x.double() / (1 - chance))
    return bool(((y.double() - due).abs() <= 2 * torch.finfo(y.dtype).eps * due.abs()).all())


def _ranks_by_part(mesh: Mesh, lies: TensorComparison, pairs: Mapping[int, object]) -> list[list[int]]:
    """Ranks that hold the same part; contributions to one sum count as the same: their sum is dropped as a whole."""
    held: dict[tuple[int, ...], list[int]] = {}
    for coord in mesh.coords():
        rank = mesh.rank_at(coord)
        if rank in pairs:
            place = tuple(at for at, placement in zip(coord, lies.placements, strict=True) if shard_dim(placement) is not None)
            held.setdefault(place, []).append(rank)
    return list(held.values())


def _must_differ(piece: LocalTensor) -> bool:
    """Whether shards of it must differ."""
    return not piece.placements
