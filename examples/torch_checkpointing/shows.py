"""What torch-checkpointing 0.1.1 does, with torch and the engine alone: ``python shows.py [NAME ...]``.

Each function below runs on ranks of its own, on the CPU and gloo. The exit code is 1 while any of those that are named shows what its
docstring says, 0 once none does.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch_checkpointing import CheckpointManager, DefaultMetadataManager, ItemSpec, SyncCheckpointSaverConfig
from torch_checkpointing.default_resharder import DefaultResharder
from torch_checkpointing.storage.filesystem import LocalFileSystemStorage, LocalFileSystemStorageConfig


def manager(direct: bool = False) -> CheckpointManager:
    """One whose item ``model`` may be loaded into another layout. ``direct``: with direct I/O, the engine's default."""
    return CheckpointManager(
        CheckpointManager.Config(
            items={"model": ItemSpec(resharder=DefaultResharder())},
            save=SyncCheckpointSaverConfig(),
            storage_config=LocalFileSystemStorageConfig(use_direct_io=direct),
        )
    )


def gathered(self: Any, data: Any, process_group: Any = None) -> dict[int, Any]:
    """What the engine does on CUDA, without it."""
    every: list[Any] = [None] * dist.get_world_size(process_group)
    dist.all_gather_object(every, data, group=process_group)
    return dict(enumerate(every))


def rows(mesh: DeviceMesh, values: torch.Tensor) -> DTensor:
    """A tensor in two shards of two rows."""
    begin = 2 * mesh.get_local_rank()
    return DTensor.from_local(values[begin : begin + 2].clone(), mesh, [Shard(0)], run_check=False)


def metadata_on_cuda(folder: str) -> str:
    """A checkpoint whose tensors may be resharded is saved by several ranks through CUDA, which ranks on CPUs do not have."""
    try:
        manager().save(folder, {"model": {"x": torch.ones(4)}})
    except (AssertionError, RuntimeError) as error:
        return f"the save raised {type(error).__name__}: {error}"
    return ""


def values_left(folder: str) -> str:
    """A load into another layout leaves values that are no tensors as they were, says nothing, and not even with ``strict=True``."""
    DefaultMetadataManager._all_gather_pickled_data = gathered
    mesh = DeviceMesh("cpu", [0, 1])
    manager().save(folder, {"model": {"x": rows(mesh, torch.arange(4.0)), "step": 7}})
    dist.barrier()
    into = {"x": DTensor.from_local(torch.zeros(4), mesh, [Replicate()], run_check=False), "step": 0}
    loaded = manager().load(folder, into={"model": into}, strict=True)["model"]
    tensor = loaded["x"].to_local().tolist()
    return f"step is {loaded['step']}, was saved as 7; x is {tensor}" if loaded["step"] != 7 else ""


def outside_of_mesh(folder: str) -> str:
    """A rank that is no part of a tensor's mesh cannot load: it is to hold nothing of it."""
    DefaultMetadataManager._all_gather_pickled_data = gathered
    manager().save(folder, {"model": {"x": torch.arange(4.0)}})
    dist.barrier()
    alone = DeviceMesh("cpu", [1])
    local = torch.zeros(4) if dist.get_rank() == 1 else torch.zeros(0)
    into = DTensor.from_local(local, alone, [Shard(0)], run_check=False, shape=torch.Size([4]), stride=(1,))
    try:
        manager().load(folder, into={"model": {"x": into}})
    except ValueError as error:
        return f"the load raised {type(error).__name__}: {error}"
    return ""


def returns_early(folder: str) -> str:
    """A save returns on other ranks than the first before there is a checkpoint: nobody waits for the rename."""
    DefaultMetadataManager._all_gather_pickled_data = gathered
    true = LocalFileSystemStorage.rename

    def slowly(self: Any, *args: Any, **options: Any) -> None:
        time.sleep(1)
        true(self, *args, **options)

    LocalFileSystemStorage.rename = slowly
    manager().save(folder, {"model": {"x": torch.ones(4)}})
    there = os.path.exists(folder)
    dist.barrier()
    return "" if there else "the save has returned, and there is no checkpoint"


def direct_io(folder: str) -> str:
    """Direct I/O, the default, fails on file systems that want whole blocks: only an ``open`` that fails is tried again without."""
    DefaultMetadataManager._all_gather_pickled_data = gathered
    try:
        manager(direct=True).save(folder, {"model": {"x": torch.ones(4)}})
    except OSError as error:
        return f"the save raised {type(error).__name__}: {error}"
    return ""


def second_save(folder: str) -> str:
    """A save over an older checkpoint is refused by the rank that renames the folder, and by no other."""
    DefaultMetadataManager._all_gather_pickled_data = gathered
    manager().save(folder, {"model": {"x": torch.zeros(4)}})
    dist.barrier()
    try:
        manager().save(folder, {"model": {"x": torch.ones(4)}})
    except OSError as error:
        return f"the second save raised {type(error).__name__}"
    return ""


SHOWN = {
    function.__name__: function for function in (metadata_on_cuda, values_left, outside_of_mesh, returns_early, direct_io, second_save)
}


def on_rank(rank: int, name: str, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2)
    said = SHOWN[name](f"{folder}/checkpoint")
    print(f"{name}, rank {rank}: {said or 'not shown'}", flush=True)
    with open(f"{folder}/{rank}", "w") as file:
        file.write(said)
    os._exit(0)  # threads of the engine may be left


def shown(name: str) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        processes.start_processes(on_rank, (name, folder), nprocs=2, start_method="spawn")
        return any(os.path.getsize(f"{folder}/{rank}") for rank in range(2))


if __name__ == "__main__":
    names = sys.argv[1:] or [*SHOWN]
    if unknown := [name for name in names if name not in SHOWN]:
        print(f"shows: {unknown[0]}: want some of {', '.join(SHOWN)}", file=sys.stderr)
        sys.exit(2)
    sys.exit(int(sum(map(shown, names)) > 0))
