"""A small model in three layouts: each computes what the dense model does, and the checkpoint of each loads into every other.

    python examples/checkpoint_example/checkpoint_example.py

Four processes on the CPU, gloo. The layouts: tensor parallel on a mesh of four ranks, partly replicated on a mesh of two by two, and
on a part of the ranks, of which the others hold nothing.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

RANKS = 4


class SimpleMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net1, self.relu, self.net2 = nn.Linear(5, 128), nn.ReLU(), nn.Linear(128, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net2(self.relu(self.net1(x)))


def tensor_parallel(model: nn.Module) -> nn.Module:
    """The first layer by columns, the second by rows."""
    return parallelize_module(model, DeviceMesh("cpu", range(RANKS)), {"net1": ColwiseParallel(), "net2": RowwiseParallel()})


def partly_replicated(model: nn.Module) -> nn.Module:
    """The same along the second dim of a mesh of two by two; along the first there are replicas."""
    layouts = {"net1.weight": Shard(0), "net1.bias": Shard(0), "net2.weight": Shard(1), "net2.bias": Replicate()}
    return by_hand(model, DeviceMesh("cpu", [[0, 1], [2, 3]]), layouts)


def on_some_ranks(model: nn.Module) -> nn.Module:
    """On ranks 0 and 2 alone."""
    layouts = {"net1.weight": Shard(0), "net1.bias": Shard(0), "net2.weight": Shard(1), "net2.bias": Replicate()}
    return by_hand(model, DeviceMesh("cpu", [0, 2]), layouts)


def by_hand(model: nn.Module, mesh: DeviceMesh, layouts: dict[str, Shard | Replicate]) -> nn.Module:
    """Lay out each parameter along the last dim of a mesh; inputs are replicas, the output is reduced and given whole."""
    replicas = [Replicate()] * mesh.ndim

    def place(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for key, parameter in [*module.named_parameters(recurse=False)]:
            at = [*replicas[1:], layouts[f"{name}.{key}"]]
            module.register_parameter(key, nn.Parameter(distribute_tensor(parameter.data, mesh, at)))

    # the local tensor of an output whose sum is pending is not its value: full_tensor reduces
    return distribute_module(
        model,
        mesh,
        place,
        lambda module, inputs, mesh: DTensor.from_local(inputs[0], mesh, replicas, run_check=False),
        lambda module, output, mesh: output.full_tensor(),
    )


LAYOUTS = {"tensor parallel": tensor_parallel, "partly replicated": partly_replicated, "on some ranks": on_some_ranks}


def fresh(name: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return LAYOUTS[name](SimpleMLP())


def run(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=RANKS)
    try:
        torch.manual_seed(0)
        dense, x = SimpleMLP(), torch.arange(15.0).reshape(3, 5)
        for name in LAYOUTS:
            model = fresh(name, seed=0)
            output = model(x)
            member = name != "on some ranks" or rank in (0, 2)
            same = torch.allclose(output, dense(x), atol=1e-5) if member else output.numel() == 0
            dcp.save(model.state_dict(), checkpoint_id=f"{folder}/{name}")
            tell(rank, f"{name}: the output is {'that of the dense model' if same else 'WRONG'}")
        for saved in LAYOUTS:
            for name in LAYOUTS:
                model, want = fresh(name, seed=1), fresh(name, seed=0).state_dict()
                state = model.state_dict()
                dcp.load(state, checkpoint_id=f"{folder}/{saved}")
                model.load_state_dict(state)
                same = all(torch.equal(one.to_local(), want[key].to_local()) for key, one in model.state_dict().items())
                tell(rank, f"saved {saved}, loaded {name}: {'equal' if same else 'WRONG'}")
    finally:
        dist.destroy_process_group()


def tell(rank: int, line: str) -> None:
    """Print what all ranks say alike, once; a rank that says something else makes itself heard."""
    said: list[str | None] = [None] * RANKS
    dist.all_gather_object(said, line)
    if rank == 0:
        for one in dict.fromkeys(said):
            print(one, flush=True)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o700)
        mp.start_processes(run, (folder,), nprocs=RANKS, start_method="fork")


if __name__ == "__main__":
    main()
