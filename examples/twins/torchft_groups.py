"""The process groups of torchft under models that are cut by hand: a vocabulary over ranks, and experts that tokens travel to.

`--option model=moe` takes the second; `--option group=swallowing` is a group that keeps its errors, `group=dummy` one that does nothing.
"""

from dataclasses import replace

import moe
import torch.distributed as dist
import vocab
from torchft.process_group import ErrorSwallowingProcessGroupWrapper, ProcessGroupDummy, ProcessGroupGloo

KEPT = []  # stores of groups that live


def joined(kind, rank, size):
    """A group of torchft, its store on the first rank."""
    if kind == "dummy":
        return ProcessGroupDummy(0, 1)  # it wants to be alone
    KEPT.extend([dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)] if rank == 0 else [])
    port = [KEPT[-1].port if rank == 0 else 0]
    dist.broadcast_object_list(port, 0)
    group = ErrorSwallowingProcessGroupWrapper(ProcessGroupGloo()) if kind == "swallowing" else ProcessGroupGloo()
    group.configure(f"127.0.0.1:{port[0]}/twin", "twin", rank, size)
    return group


class Mesh:
    """What the models ask of a mesh, with a group of torchft."""

    def __init__(self, mesh, kind):
        self.size, self.get_local_rank = mesh.size, mesh.get_local_rank
        self.group = joined(kind, mesh.get_local_rank(), mesh.size())

    def get_group(self):
        return self.group


def make(model="vocab", group="gloo"):
    own = {"vocab": vocab, "moe": moe}[model].make()
    return replace(own, shard=lambda built, mesh: own.shard(built, Mesh(mesh, group)))
