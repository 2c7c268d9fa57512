"""What laws of gradients share: the gradient that arrives, and how one that leaves is placed, cut and judged."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from conformance.case import Case
from conformance.law import Limits
from conformance.laws import draws, scripts
from conformance.laws.given import Given, given
from conformance.report.reproducer import Script
from reference import simulate
from reference.layout import Layout
from reference.mesh import Coord, Mesh
from reference.placement import Partial, Replicate
from reference.tensors import dense

if TYPE_CHECKING:
    from conformance.here import Here


DOC = "torch.distributed.tensor docs"


TABLE = f"{DOC}, DTensor.from_local, the table of gradient placements"


GRAD_SEED = 977


def incoming(x: Given, at: int = 0) -> torch.Tensor:
    """The global gradient that arrives: small integers, the same on every rank unless ``at`` says which."""
    return dense(x.layout.shape, x.full.dtype, "small", x.seed + GRAD_SEED + 13 * at)


def returned(layout: Layout) -> Layout:
    """How a gradient leaves for a local tensor of ``layout``: shards as shards, replicas and contributions as replicas."""
    return layout.replace(tuple(Replicate() if isinstance(p, Partial) else p for p in layout.placements))


def part(full: torch.Tensor, layout: Layout, coord: Coord | None) -> torch.Tensor:
    """The slice at a coordinate; what a rank outside holds instead."""
    return torch.empty((0,), dtype=full.dtype) if coord is None else simulate.take(full, layout, coord)


def backward(out: torch.Tensor, grad: torch.Tensor) -> None:
    """The backward pass from ``out``; the graph stays, for a second one."""
    torch.autograd.backward([out], [grad], retain_graph=True)


def expect_grad(here: Here, local: torch.Tensor, want: torch.Tensor, check: str) -> None:
    """The gradient of a local tensor is there, also where it has no elements, and is what it must be."""
    if here.require(local.grad is not None, "wrong-value", check, "there is no gradient", want, "None") and local.grad is not None:
        here.same(local.grad, want, check, what="gradient of the local tensor")


def leaf(x: Given, here: Here) -> tuple[torch.Tensor, DTensor]:
    """A local tensor that requires a gradient, and the DTensor of it."""
    local = here.tensor(x.local(here.coord(x.layout.mesh))).requires_grad_()
    at = here.placements(x.layout.placements)
    return local, DTensor.from_local(local, here.mesh(x.layout.mesh), at, shape=x.full.shape, stride=x.stride)


def scripted(case: Case, body: list[str], grads: Mapping[int, torch.Tensor], want: Mapping[int, torch.Tensor]) -> Script:
    """``body`` makes ``out`` from the leaf ``x``; what arrives at ``out`` and what ``x.grad`` must be are given by rank."""
    x = given(case)
    locals_ = scripts.tensors("X", {rank: x.local(x.layout.mesh.coord(rank)) for rank in range(case.world)})
    made = (
        f"d = DTensor.from_local(x, mesh, {scripts.placements(x.layout.placements)}, shape=torch.Size({x.layout.shape}), stride={x.stride})"
    )
    if not x.layout.shape:
        made = f"d = DTensor.from_local(x, mesh, {scripts.placements(x.layout.placements)})"
    lines = ["x = X[rank].requires_grad_()", f"mesh = {scripts.mesh(x.layout.mesh)}", made, *body, "out.backward(G[rank])"]
    lines += ["if rank not in WANT:", "    return None, None"] if len(want) < case.world else []
    constants = [*locals_, *scripts.tensors("G", grads), *scripts.tensors("WANT", want)]
    return scripts.script([*lines, "return WANT[rank], x.grad"], world=case.world, constants=constants)


def sliced(full: torch.Tensor, layout: Layout, world: int) -> dict[int, torch.Tensor]:
    return {rank: part(full, layout, layout.mesh.coord(rank)) for rank in range(world)}


def on_members(full: torch.Tensor, layout: Layout) -> dict[int, torch.Tensor]:
    return {rank: part(full, layout, layout.mesh.coord(rank)) for rank in sorted(layout.mesh.ranks)}


def inside(limits: Limits) -> list[Mesh]:
    """Meshes over the whole world."""
    return draws.meshes(limits, outside=False, tables=False, least=2)


def outside(limits: Limits) -> list[Mesh]:
    """Meshes that leave ranks of the world out."""
    return [mesh for mesh in draws.meshes(limits, tables=False) if mesh.size <= max(mesh.ranks)]
