"""Checks dropout against its documentation, since its values cannot be compared with the whole model's.

``torch.nn.Dropout``: each element becomes zero with probability ``p``, independently, and otherwise ``1 / (1 - p)`` times its value.
``torch.distributed.tensor``: the ranks of a mesh share a random state, so that replicas drop the same elements. Shards of a DTensor drop
different ones on devices that support random DTensors. On others torch warns and promises nothing, so this is not checked.
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

FALSE_ALARM = 1e-9  # the probability of reporting dropout that is right


def compare_dropout(plan: Plan, calm: RunComparison, parts: Sequence[RankRun]) -> RunComparison:
    """Check what the ranks dropped. ``calm`` is the run without dropout, whose comparisons give the layouts."""
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
    """What is wrong with the elements that ranks dropped in one call of a module; empty where nothing is."""
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
    """Whether every element is zero where ``dropped``, else ``x / (1 - chance)`` up to two roundings."""
    due = torch.where(dropped, 0.0, x.double() / (1 - chance))
    return bool(((y.double() - due).abs() <= 2 * torch.finfo(y.dtype).eps * due.abs()).all())


def _ranks_by_part(mesh: Mesh, lies: TensorComparison, pairs: Mapping[int, object]) -> list[list[int]]:
    """The ranks by the shard that they hold. Contributions to one pending sum count as one shard: their sum is dropped as a whole."""
    held: dict[tuple[int, ...], list[int]] = {}
    for coord in mesh.coords():
        rank = mesh.rank_at(coord)
        if rank in pairs:
            place = tuple(at for at, placement in zip(coord, lies.placements, strict=True) if shard_dim(placement) is not None)
            held.setdefault(place, []).append(rank)
    return list(held.values())


def _must_differ(piece: LocalTensor) -> bool:
    """Whether different shards of it must drop different elements: so for plain tensors."""
    return not piece.placements
