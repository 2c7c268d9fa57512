"""The law of meshes that are made again after their groups, or all of ``torch.distributed``, have ended."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from shardlaw.conformance import compat
from shardlaw.conformance.law.act import law, texts
from shardlaw.conformance.law.due import Global, Near
from shardlaw.conformance.law.fields import Device, Folder, MeshTable, Placements, Rank, WordField, WorldSize
from shardlaw.conformance.laws.checkpoint.calls import load, save
from shardlaw.conformance.laws.checkpoint.fields import Reader, Writer
from shardlaw.reference import placement as ref
from shardlaw.reference.layout import Layout
from shardlaw.reference.mesh import Mesh

OPS = {
    "none": lambda x: x,
    "clone": lambda x: x.clone(),
    "sum": lambda x: x.sum(0),
    "product": lambda x: x @ x.t(),
}
How = Literal["groups", "all", "turned", "aborted"]
ABORTED = (  # the group of a mesh of one dim is that of all ranks
    "mesh=2x2 x=5x6 to=R,S(0) use=none how=aborted",
    "mesh=2 x=5x6 to=S(0) use=none how=aborted",
)
CASES = (
    "mesh=2 x=5x6 to=S(0) use=none how=turned",
    "mesh=2 x=5x6 to=R use=clone how=turned",
    "mesh=2x2 x=5x6 to=S(0),S(1) use=none how=turned",
    "mesh=2x2 x=5x6 to=R,S(0) use=clone how=groups",
    "mesh=2x2 x=5x6 to=S(0),S(1) use=sum how=all",
    "mesh=2x2 x=5x6 to=R,S(0) use=none how=groups",
    "mesh=2 x=5x6 to=S(0) use=checkpoint how=turned",
    "mesh=2 x=5x6 to=S(0) use=model how=all",
    # tried from profile ci on: each case takes a world of its own
    "mesh=2 x=5x6 to=S(1) use=product how=turned",
    "mesh=2x2 x=5x6 to=S(0),S(1) use=clone how=turned",
    "mesh=3 x=7x4 to=S(0) use=product how=all",
    "mesh=2x2 x=5x6 to=R,S(0) use=sum how=groups",
    "mesh=2@1,2 x=5x6 to=S(0) use=none how=groups",
    "mesh=2x2 x=5x6 to=R,S(0) use=model how=groups",
    "mesh=2x2 x=5x6 to=R,S(0) use=checkpoint how=all",
    *(ABORTED if compat.torch_release() >= (2, 15) else ()),
)


def step_model(x, mesh):
    """The parameters of a fully sharded layer after a step, whole, and its output."""
    layer = nn.Linear(x.shape[1], x.shape[0], bias=False, device=x.device)
    with torch.no_grad():
        layer.weight.copy_(x)
    fully_shard(layer, mesh=mesh)
    out = layer(x)
    out.sum().backward()
    torch.optim.SGD(layer.parameters(), lr=0.5).step()
    weight: Any = layer.weight
    return weight.full_tensor().detach(), out.detach()


def use_mesh(x, mesh, to, use, writer, reader):
    """Place a tensor on a mesh, and return what ``use`` makes of it, whole and cut along a dim."""
    if use == "model":
        whole, cut = step_model(x, mesh)
    elif use == "checkpoint":
        read = distribute_tensor(torch.zeros_like(x), mesh, [Shard(1)] * mesh.ndim)
        save({"x": distribute_tensor(x.clone(), mesh, to)}, writer)
        load({"x": read}, reader)
        whole, cut = read.full_tensor(), read.to_local()
    else:
        y = OPS[use](distribute_tensor(x.clone(), mesh, to))
        whole = y.full_tensor()
        cut = y.redistribute(placements=[Shard(0)] * mesh.ndim).to_local()
    return {"whole": whole, "cut": cut.clone()}


@law(
    "mesh.renewed",
    source="torch.distributed docs, destroy_process_group, which resets the count of groups for trainers "
    "that create them again; torch.distributed.tensor docs: a DTensor has the semantics of the global tensor",
    control=CASES[0],
    sweep=texts(*CASES),
    sweeps=8,
    features=lambda case: {f"way:{case.get('how')}"},
    own_world=lambda case: True,
    needs=("all_gather", "subgroups"),
    weight=0.3,
)
def renewed(
    mesh: MeshTable,
    x: torch.Tensor,
    to: Placements,
    use: Annotated[str, WordField([*OPS, "model", "checkpoint"])],
    how: How,
    writer: Writer,
    reader: Reader,
    rank: Rank,
    world: WorldSize,
    folder: Folder,
    device: Device,
):
    """A mesh that is made again after its groups, or all, were destroyed gives the results that it gave before, also
    where ranks have changed places or the mesh was aborted first."""
    names, members = ("a", "b")[: torch.tensor(mesh).ndim], torch.tensor(mesh).flatten().tolist()
    first: Any = DeviceMesh(device.type, mesh, mesh_dim_names=names)
    storage = writer(f"{folder}/first"), reader(f"{folder}/first")
    found = [use_mesh(x, first, to, use, *storage) if rank in members else None]
    if how == "groups":
        for group in first.get_all_groups() if rank in members else ():
            dist.destroy_process_group(group)
    else:
        backend = dist.get_backend()
        dist.barrier()
        if how == "aborted":
            first.abort()
        if dist.is_initialized():
            dist.destroy_process_group()
        rank = world - 1 - rank if how == "turned" else rank
        dist.init_process_group(backend, init_method=f"file://{folder}/again", rank=rank, world_size=world)
    second = DeviceMesh(device.type, mesh, mesh_dim_names=names)
    storage = writer(f"{folder}/second"), reader(f"{folder}/second")
    found.append(use_mesh(x, second, to, use, *storage) if rank in members else None)
    return {"first": found[0], "second": found[1]}


def due_use(x: torch.Tensor, mesh: Mesh, use: str, rank: int) -> Any:
    """What :func:`use_mesh` must return on a rank."""
    if mesh.coord(rank) is None:
        return None
    if use == "model":
        return {"whole": Near(x - 0.5 * x.sum(0)), "cut": Near(x @ x.t())}
    whole = OPS[use](x) if use in OPS else x
    cut = ref.Shard(1 if use == "checkpoint" else 0)
    return {"whole": whole, "cut": Global(whole, Layout(tuple(whole.shape), mesh, (cut,) * mesh.ndim)).local(rank)}


@renewed.due
def _(mesh, x: torch.Tensor, use, how, rank: Rank, world: WorldSize):
    place = world - 1 - rank if how == "turned" else rank
    return {"first": due_use(x, mesh, use, rank), "second": due_use(x, mesh, use, place)}
