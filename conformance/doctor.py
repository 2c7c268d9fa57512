"""What can be validated here: the targets that are known, whether their ranks start, and what they can do.

The collectives that a law may need are tried by a law of our own on two live ranks, so that one that hangs or kills its rank
becomes an answer and nothing worse.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from conformance import __version__
from conformance.case import Case
from conformance.errors import UsageError
from conformance.law import Law
from conformance.target.builtin import devices_needed, devices_seen
from conformance.target.config import check_target, known_targets, named_target, read_config
from conformance.target.target import CAPABILITIES, Target

if TYPE_CHECKING:
    from conformance.here import Here
    from conformance.verdict import Verdict
    from conformance.world import Pool

RANKS = 2


def _mine(here: Here) -> torch.Tensor:
    return here.tensor(torch.arange(4.0) + 10 * here.rank)


def _all_reduce(here: Here) -> tuple[object, object]:
    got = _mine(here)
    dist.all_reduce(got)
    return [10.0, 12.0, 14.0, 16.0], got.tolist()


def _all_gather(here: Here) -> tuple[object, object]:
    got = [torch.empty_like(_mine(here)) for _ in range(here.world)]
    dist.all_gather(got, _mine(here))
    return [[0.0, 1.0, 2.0, 3.0], [10.0, 11.0, 12.0, 13.0]], [item.tolist() for item in got]


def _all_to_all(here: Here) -> tuple[object, object]:
    got = torch.empty_like(_mine(here))
    dist.all_to_all_single(got, _mine(here))
    at = 2.0 * here.rank
    return [at, at + 1, at + 10, at + 11], got.tolist()


def _broadcast(here: Here) -> tuple[object, object]:
    got = _mine(here)
    dist.broadcast(got, src=1)
    return [10.0, 11.0, 12.0, 13.0], got.tolist()


def _reduce_scatter(here: Here) -> tuple[object, object]:
    got = here.tensor(torch.empty(2))
    dist.reduce_scatter_tensor(got, _mine(here))
    return [10.0 + 4 * here.rank, 12.0 + 4 * here.rank], got.tolist()


def _scatter(here: Here) -> tuple[object, object]:
    got = here.tensor(torch.empty(4))
    dist.scatter(got, [_mine(here), _mine(here) + 1] if here.rank == 0 else None, src=0)
    return [float(here.rank + at) for at in range(4)], got.tolist()


def _object_collectives(here: Here) -> tuple[object, object]:
    got: list[object] = [None] * here.world
    dist.all_gather_object(got, {"rank": here.rank})
    return [{"rank": 0}, {"rank": 1}], got


def _p2p(here: Here) -> tuple[object, object]:
    got = here.tensor(torch.zeros(4))
    if here.rank == 0:
        dist.send(_mine(here), 1)
        return None, None
    dist.recv(got, 0)
    return [0.0, 1.0, 2.0, 3.0], got.tolist()


def _subgroups(here: Here) -> tuple[object, object]:
    groups = [dist.new_group([rank]) for rank in range(here.world)]
    got = _mine(here)
    dist.all_reduce(got, group=groups[here.rank])
    return _mine(here).tolist(), got.tolist()


def _checkpoint(here: Here) -> tuple[object, object]:
    from torch.distributed.checkpoint.state_dict_loader import load
    from torch.distributed.checkpoint.state_dict_saver import save

    from conformance.target.storage import reader, writer

    state = {"x": here.tensor(torch.arange(4.0))}
    save(state, storage_writer=writer(here.target, here.folder()))
    loaded = {"x": here.tensor(torch.zeros(4))}
    load(loaded, storage_reader=reader(here.target, here.folder()))
    return [0.0, 1.0, 2.0, 3.0], loaded["x"].tolist()


TRIES: dict[str, Callable[[Here], tuple[object, object]]] = {
    "all_gather": _all_gather,
    "all_reduce": _all_reduce,
    "all_to_all": _all_to_all,
    "broadcast": _broadcast,
    "checkpoint": _checkpoint,
    "object_collectives": _object_collectives,
    "p2p": _p2p,
    "reduce_scatter": _reduce_scatter,
    "scatter": _scatter,
    "subgroups": _subgroups,
}


def _check(case: Case, here: Here) -> None:
    expected, got = TRIES[case.get("call")](here)
    here.require(expected == got, "wrong-value", case.get("call"), f"{case.get('call')} gave another result than it must", expected, got)


LAWS = (
    Law(
        id="doctor.call",
        clause="A capability that is not declared as missing works on two ranks.",
        source="the target's description",
        check=_check,
        control="doctor.call call=all_reduce world=2",
        planted="",
    ),
)


@contextmanager
def _pool(target: Target) -> Iterator[Pool]:
    """A pool whose ranks know the law above. Raises :class:`UsageError` when the target cannot start."""
    from conformance.world import Pool, WorldError

    before = os.environ.get("SHARDLAW_LAWS")
    os.environ["SHARDLAW_LAWS"] = ",".join(filter(None, [before, __name__]))
    try:
        with Pool(target) as pool:
            yield pool
    except WorldError as error:
        raise UsageError(f"target {target.name} cannot start: {error}") from None
    finally:
        os.environ.pop("SHARDLAW_LAWS")
        if before is not None:
            os.environ["SHARDLAW_LAWS"] = before


def _call(pool: Pool, name: str) -> tuple[Verdict, float]:
    began = time.monotonic()
    verdict = pool.judge(LAWS[0], [Case.of("doctor.call", call=name, world=RANKS)])[0]
    return verdict, time.monotonic() - began


def _told(verdict: Verdict) -> str:
    line = " ".join(verdict.message.split())
    return f"{verdict.kind or verdict.status}: {line[:200]}"


def examine(name: str) -> int:
    """Print what is installed and whether a target works; returns 0, or 2 where its ranks do not start or cannot reduce."""
    target = named_target(name, read_config())
    print(f"shardlaw {__version__}, python {platform.python_version()}, torch {torch.__version__}")
    print(f"hypothesis {metadata.version('hypothesis')}, pytest {metadata.version('pytest')}, {os.cpu_count()} cpus, {platform.platform()}")
    print(f"target {target.name}: device {target.device}, backend {target.backend}, storage {target.storage}")
    check_target(target, RANKS)
    needed = devices_needed(target, RANKS)
    if needed:
        print(f"ok  {devices_seen(target)} devices seen, {needed} needed for {RANKS} ranks")
    began = time.monotonic()
    with _pool(target) as pool:
        verdict, seconds = _call(pool, "all_reduce")
        if verdict.status != "held":
            raise UsageError(f"target {target.name}: all_reduce over {RANKS} ranks failed: {_told(verdict)}")
        print(f"ok  backend {target.backend} loads, {RANKS} ranks start and reduce: {time.monotonic() - began:.1f} s")
        verdict, seconds = _call(pool, "all_reduce")
        if verdict.status != "held":
            raise UsageError(f"target {target.name}: a second all_reduce failed: {_told(verdict)}")
        print(f"ok  all_reduce in a warm world: {seconds * 1000:.0f} ms")
    print(f"target {target.name} can be validated here")
    return 0


def list_targets(probe: bool) -> int:
    """Print every known target; with ``probe`` also what its ranks can do. Returns 0."""
    config = read_config()
    for name, source in known_targets(config).items():
        try:
            target = named_target(name, config)
        except UsageError as error:
            print(f"{name}: {error}")
            continue
        cannot = f", cannot {', '.join(target.cannot)}" if target.cannot else ""
        print(f"{name}: device {target.device}, backend {target.backend}, storage {target.storage}{cannot} ({source})")
        try:
            check_target(target, RANKS)
            if probe:
                _probe(target)
        except UsageError as error:
            print(f"    not here: {error}")
    if config.storages:
        print(f"storages: filesystem, {', '.join(config.storages)}")
    return 0


def _probe(target: Target) -> None:
    with _pool(target) as pool:
        for name in CAPABILITIES:
            verdict, _ = _call(pool, name)
            works, declared = verdict.status == "held", name in target.cannot
            note = ("declared missing, but it works" if works else "declared missing") if declared else "works" if works else _told(verdict)
            print(f"    {name:20}{note}", flush=True)
