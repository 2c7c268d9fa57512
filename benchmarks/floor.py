"""The floor: a loop written by hand that does the least that checks these ops on real ranks. ``python -m benchmarks.floor RANKS ROUNDS``.

Ranks are forked from one process. Each builds its inputs without communication, runs the op plain and sharded, and compares its own
local tensor with its slice; pending reductions are kept and gathered once a pass. Nobody listens, nothing is watched, and the first
deviation ends it. Prints one JSON line: wall and CPU seconds of each pass.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import time
import traceback

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from benchmarks.ops import KINDS, OPS, WARM_UP, Point, passes, points

PLACED = {"R": Replicate(), "S(0)": Shard(0), "S(1)": Shard(1)}
REDUCE = {"sum": torch.sum, "avg": torch.mean, "max": torch.amax, "min": torch.amin}
Pending = list[tuple[torch.Tensor, torch.Tensor, str]]


def one(point: Point, mesh: DeviceMesh, rank: int, pending: Pending) -> None:
    op, dense = OPS[point.op].run, point.inputs()
    want = op(*dense)
    pairs = zip(dense, point.places, strict=True)
    got = op(*(distribute_tensor(full, mesh, [PLACED[place]], src_data_rank=None) for full, place in pairs))
    assert isinstance(got, DTensor)
    local, (placement,) = got.to_local(), got.placements
    if isinstance(placement, Partial):
        pending.append((local, want, placement.reduce_op))
        return
    if isinstance(placement, Shard):
        pieces = want.chunk(mesh.size(), placement.dim)
        want = pieces[rank] if rank < len(pieces) else want.narrow(placement.dim, 0, 0)
    assert torch.equal(local, want) or torch.allclose(local, want)


def settle(pending: Pending, ranks: int) -> None:
    """Gather all contributions of a pass at once, reduce and compare them."""
    if pending:
        flat = torch.cat([local.flatten() for local, _, _ in pending])
        everybody = torch.empty(ranks * flat.numel())
        dist.all_gather_into_tensor(everybody, flat)
        columns = everybody.reshape(ranks, -1).split([local.numel() for local, _, _ in pending], 1)
        for column, (_, want, op) in zip(columns, pending, strict=True):
            assert torch.allclose(REDUCE[op](column, 0), want.flatten(), atol=1e-6)
    pending.clear()


def timed(work: list[Point], mesh: DeviceMesh, rank: int) -> tuple[float, float]:
    """Wall and CPU seconds of one pass on this rank."""
    pending: Pending = []
    dist.barrier()
    began, used = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF)
    for point in work:
        one(point, mesh, rank, pending)
    settle(pending, mesh.size())
    dist.barrier()
    spent = resource.getrusage(resource.RUSAGE_SELF)
    return time.monotonic() - began, spent.ru_utime + spent.ru_stime - used.ru_utime - used.ru_stime


def loop(rank: int, ranks: int, rounds: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    mesh = DeviceMesh("cpu", torch.arange(ranks))
    timed(points(WARM_UP), mesh, rank)
    told: dict[str, list[tuple[float, float]]] = {}
    for kind in KINDS:
        for work in passes(kind, rounds):
            for state in ("distinct", "repeated"):
                told.setdefault(f"{kind} {state}", []).append(timed(work, mesh, rank))
    with open(f"{folder}/{rank}.json", "w") as file:
        json.dump(told, file)
    dist.barrier()


def main() -> int:
    ranks, rounds = map(int, sys.argv[1:3])
    with tempfile.TemporaryDirectory() as folder:
        children = []
        for rank in range(ranks):
            child = os.fork()
            if child == 0:
                try:
                    loop(rank, ranks, rounds, folder)
                except Exception:
                    traceback.print_exc()
                finally:
                    os._exit(not os.path.exists(f"{folder}/{rank}.json"))
            children.append(child)
        if sum(os.waitpid(child, 0)[1] for child in children):
            return 1
        told = []
        for rank in range(ranks):
            with open(f"{folder}/{rank}.json") as file:
                told.append(json.load(file))
    each = {
        kind: [(max(one[kind][at][0] for one in told), sum(one[kind][at][1] for one in told)) for at in range(rounds)] for kind in told[0]
    }
    print(json.dumps({"cases": {kind: len(passes(kind, 1)[0]) for kind in KINDS}, "passes": each}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
