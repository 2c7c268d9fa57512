"""Probe what two ranks of a target can do: the law ``doctor.call``, which no run includes, tries each capability that a law may need.

A capability that hangs or kills its rank gets a verdict like any other. One that works here may still deviate in the laws about it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.law import Law, Limits
from shardlaw.conformance.law.target import Target

if TYPE_CHECKING:
    from shardlaw.conformance.law.verdict import Verdict
    from shardlaw.conformance.rank.context import RankContext
    from shardlaw.conformance.world import Pool

RANKS = 2
# (expected, got) on one rank
ExpectedAndGot = tuple[object, object]


def _rank_tensor(here: RankContext) -> torch.Tensor:
    return here.tensor(torch.arange(4.0) + 10 * here.rank)


def _all_reduce(here: RankContext) -> ExpectedAndGot:
    got = _rank_tensor(here)
    dist.all_reduce(got)
    return [10.0, 12.0, 14.0, 16.0], got.tolist()


def _all_gather(here: RankContext) -> ExpectedAndGot:
    got = [torch.empty_like(_rank_tensor(here)) for _ in range(here.world)]
    dist.all_gather(got, _rank_tensor(here))
    return [[0.0, 1.0, 2.0, 3.0], [10.0, 11.0, 12.0, 13.0]], [item.tolist() for item in got]


def _all_to_all(here: RankContext) -> ExpectedAndGot:
    got = torch.empty_like(_rank_tensor(here))
    dist.all_to_all_single(got, _rank_tensor(here))
    at = 2.0 * here.rank
    return [at, at + 1, at + 10, at + 11], got.tolist()


def _broadcast(here: RankContext) -> ExpectedAndGot:
    got = _rank_tensor(here)
    dist.broadcast(got, src=1)
    return [10.0, 11.0, 12.0, 13.0], got.tolist()


def _gather(here: RankContext) -> ExpectedAndGot:
    got = [torch.empty_like(_rank_tensor(here)) for _ in range(here.world)] if here.rank == 1 else None
    dist.gather(_rank_tensor(here), got, dst=1)
    return None if got is None else [[0.0, 1.0, 2.0, 3.0], [10.0, 11.0, 12.0, 13.0]], got and [item.tolist() for item in got]


def _reduce(here: RankContext) -> ExpectedAndGot:
    got = _rank_tensor(here)
    dist.reduce(got, dst=1)
    return ([10.0, 12.0, 14.0, 16.0], got.tolist()) if here.rank == 1 else (None, None)


def _reduce_scatter(here: RankContext) -> ExpectedAndGot:
    got = here.tensor(torch.empty(2))
    dist.reduce_scatter_tensor(got, _rank_tensor(here))
    return [10.0 + 4 * here.rank, 12.0 + 4 * here.rank], got.tolist()


def _scatter(here: RankContext) -> ExpectedAndGot:
    got = here.tensor(torch.empty(4))
    dist.scatter(got, [_rank_tensor(here), _rank_tensor(here) + 1] if here.rank == 0 else None, src=0)
    return [float(here.rank + at) for at in range(4)], got.tolist()


def _object_collectives(here: RankContext) -> ExpectedAndGot:
    got: list[object] = [None] * here.world
    dist.all_gather_object(got, {"rank": here.rank})
    return [{"rank": 0}, {"rank": 1}], got


def _p2p(here: RankContext) -> ExpectedAndGot:
    got = here.tensor(torch.zeros(4))
    if here.rank == 0:
        dist.send(_rank_tensor(here), 1)
        return None, None
    dist.recv(got, 0)
    return [0.0, 1.0, 2.0, 3.0], got.tolist()


def _p2p_any_source(here: RankContext) -> ExpectedAndGot:
    got = here.tensor(torch.zeros(4))
    if here.rank == 0:
        dist.send(_rank_tensor(here), 1)
        return None, None
    source = dist.recv(got)
    return (0, [0.0, 1.0, 2.0, 3.0]), (source, got.tolist())


def _p2p_tags(here: RankContext) -> ExpectedAndGot:
    """Send two messages and receive them in the opposite order, by their tags."""
    got = {tag: here.tensor(torch.zeros(4)) for tag in (2, 1)}
    if here.rank == 0:
        works = [dist.isend(_rank_tensor(here) + tag, 1, tag=tag) for tag in (1, 2)]
    else:
        works = [dist.irecv(room, 0, tag=tag) for tag, room in got.items()]
    for work in works:
        if work is not None:
            work.wait()
    want = {tag: [tag + 0.0, tag + 1.0, tag + 2.0, tag + 3.0] for tag in got}
    return (want, {tag: room.tolist() for tag, room in got.items()}) if here.rank == 1 else (None, None)


def _subgroups(here: RankContext) -> ExpectedAndGot:
    groups = [dist.new_group([rank]) for rank in range(here.world)]
    got = _rank_tensor(here)
    dist.all_reduce(got, group=groups[here.rank])
    return _rank_tensor(here).tolist(), got.tolist()


def _checkpoint(here: RankContext) -> ExpectedAndGot:
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    from shardlaw.conformance.rank.storage import make_reader, make_writer

    state = {"x": here.tensor(torch.arange(4.0))}
    save(state, storage_writer=make_writer(here.target, here.folder()))
    loaded = {"x": here.tensor(torch.zeros(4))}
    load(loaded, storage_reader=make_reader(here.target, here.folder()))
    return [0.0, 1.0, 2.0, 3.0], loaded["x"].tolist()


PROBES: dict[str, Callable[[RankContext], ExpectedAndGot]] = {
    "all_gather": _all_gather,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "checkpoint": _checkpoint,
    "gather": _gather,
    "object_collectives": _object_collectives,
    "p2p": _p2p,
    "p2p_any_source": _p2p_any_source,
    "p2p_tags": _p2p_tags,
    "reduce": _reduce,
    "reduce_scatter": _reduce_scatter,
    "scatter": _scatter,
    "subgroups": _subgroups,
}


def _case(name: str) -> Case:
    return Case.of("doctor.call", call=name, world=RANKS)


def _cases(limits: Limits) -> list[Case]:
    return [_case(name) for name in PROBES]


def _check(case: Case, here: RankContext) -> None:
    expected, got = PROBES[case.get("call")](here)
    here.require(expected == got, "wrong-value", case.get("call"), f"{case.get('call')} gave another result than it must", expected, got)


LAWS = (
    Law(
        id="doctor.call",
        clause="A capability that is not declared as missing works on two ranks.",
        source="the target's description",
        check=_check,
        control="doctor.call call=all_reduce world=2",
        sweep=_cases,
        sweeps=len(PROBES),
    ),
)


def probe(pool: Pool, name: str) -> tuple[Verdict, float]:
    """The verdict on a capability, and the seconds that it took. Raises ``WorldError`` where ranks do not start."""
    began = time.monotonic()
    verdict = pool.check(LAWS[0], [_case(name)])[0]
    return verdict, time.monotonic() - began


def stale_declarations(pool: Pool, target: Target) -> list[str]:
    """The capabilities that the target declares as missing, but that work on two ranks; none where ranks do not start."""
    from shardlaw.conformance.world import WorldError

    try:
        return [name for name in target.cannot if name in PROBES and probe(pool, name)[0].status == "held"]
    except WorldError:
        return []


def describe_verdict(verdict: Verdict) -> str:
    """A verdict in one line."""
    line = " ".join(verdict.message.split())
    return f"{verdict.word}: {line[:200]}"
