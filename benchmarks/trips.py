"""Checkpoint round trips on 4 ranks, ours beside a bare loop of save and load: ``python -m benchmarks.trips ROUNDS``.

Both save two sharded tensors and load them under other placements, through files in memory where there are such. The bare loop compares
each rank's own slice. Prints one JSON line.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
import traceback

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor

from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.target import Target
from shardlaw.conformance.laws import find
from shardlaw.conformance.world import Pool
from shardlaw.conformance.world.manager import temporary_root

RANKS = 4
TRIPS = 24


def bare(rank: int, rounds: int, folder: str) -> list[float]:
    """Seconds of each round of trips on this rank."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    mesh, spent = DeviceMesh("cpu", torch.arange(RANKS)), []
    for number in range(rounds + 1):
        dist.barrier()
        began = time.monotonic()
        for at in range(TRIPS):
            full = {name: torch.arange(float(8 * (at + 4))).reshape(8, at + 4) + number for name in "ab"}
            saved = {name: distribute_tensor(one, mesh, [Shard(0)], src_data_rank=None) for name, one in full.items()}
            loaded = {
                name: distribute_tensor(torch.full_like(one, -77), mesh, [Shard(1)], src_data_rank=None) for name, one in full.items()
            }
            path = f"{folder}/{number}-{at}"
            dcp.save(saved, checkpoint_id=path)
            dcp.load(loaded, checkpoint_id=path)
            for name, one in full.items():
                pieces = one.chunk(RANKS, 1)
                assert torch.equal(loaded[name].to_local(), pieces[rank] if rank < len(pieces) else one[:, :0])
        dist.barrier()
        spent.append(time.monotonic() - began)
    return spent[1:]


def bare_loop(rounds: int) -> list[float]:
    folder = tempfile.mkdtemp(dir=temporary_root())
    children = []
    for rank in range(RANKS):
        child = os.fork()
        if child == 0:
            try:
                torch.set_num_threads(1)
                spent = bare(rank, rounds, folder)
                with open(f"{folder}/told-{rank}", "w") as file:
                    json.dump(spent, file)
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(not os.path.exists(f"{folder}/told-{rank}"))
        children.append(child)
    if sum(os.waitpid(child, 0)[1] for child in children):
        raise SystemExit("the bare loop failed")
    with open(f"{folder}/told-0") as file:
        spent = json.load(file)
    shutil.rmtree(folder)
    return [float(seconds) for seconds in spent]


def ours(rounds: int) -> list[float]:
    spent = []
    with Pool(Target()) as pool:
        law = find("roundtrip.dtensor")
        for number in range(rounds + 1):
            cases = [
                Case.of(law.id, mesh=RANKS, x=f"8x{at + 4}:S(0)", y=f"8x{at + 4}:S(0)", **{"to.x": "S(1)", "to.y": "S(1)"}, seed=number)
                for at in range(TRIPS)
            ]
            began = time.monotonic()
            verdicts = pool.check(law, cases)
            spent.append(time.monotonic() - began)
            assert {verdict.status for verdict in verdicts} == {"held"}, verdicts[0]
    return spent[1:]


def main() -> int:
    rounds = int(sys.argv[1])
    bare_seconds, our_seconds = bare_loop(rounds), ours(rounds)
    print(json.dumps({"trips": TRIPS, "bare": bare_seconds, "ours": our_seconds}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
