"""Laws of the shapes of a whole and of its shards, computed one from the other without a tensor."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from conformance import compat
from conformance.case import Case
from conformance.law import Law, Limits
from conformance.laws import draws, scripts
from conformance.laws.given import given
from conformance.report.reproducer import Script

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from conformance.here import Here


def draw_together(limits: Limits) -> SearchStrategy[Case]:
    lines, planes = (draws.meshes(limits, dims=dims) for dims in ((1,), (2,)))
    return draws.placed("layout.together", limits, on=[*lines * 2, *planes], kinds=("R", "S"), memories=("plain", "transposed"))


def check_together(case: Case, here: Here) -> None:
    """The shapes of uneven shards make that of the whole, on a mesh of one dim; even shards have the strides of the whole, shrunk."""
    x = given(case)
    layout, coord = x.layout, here.coord(x.layout.mesh)
    live, at = here.mesh(layout.mesh), here.placements(layout.placements)
    if coord is None:
        return
    compute, part = compat.name("global_tensor_shape"), compat.name("local_tensor_info")
    local = torch.Size(layout.local_shape(coord))
    if layout.mesh.ndim > 1:
        here.refused(lambda: compute(local, live, at), "dims", "the shapes of shards on a mesh of several dims")
    else:
        got = tuple(compute(local, live, at))
        here.require(got == layout.shape, "wrong-layout", "whole", "the shapes of the shards make another one", layout.shape, got)
    even = len({layout.local_shape(other) for other in layout.mesh.coords()}) == 1
    if even and all(layout.shape):
        # the extents of the shard, in the order that the whole has in memory
        order = sorted(range(len(local)), key=lambda dim: (x.stride[dim], layout.shape[dim]))
        due, step = [0] * len(local), 1
        for dim in order:
            due[dim], step = step, step * local[dim]
        shape, stride = part(torch.empty_strided(layout.shape, x.stride), live, at)
        here.require(tuple(shape) == tuple(local), "wrong-layout", "part", "the shape of an even shard", tuple(local), tuple(shape))
        wide = [dim for dim, extent in enumerate(local) if extent > 1]
        told, want = [stride[dim] for dim in wide], [due[dim] for dim in wide]
        here.require(told == want, "wrong-layout", "stride", "the strides of an even shard", want, told)


def script_together(case: Case) -> Script:
    layout = given(case).layout
    body = [f"mesh = {scripts.mesh(layout.mesh)}"]
    at = scripts.placements(layout.placements)
    shapes = {rank: layout.local_shape(layout.mesh.coord(rank) or ()) for rank in sorted(layout.mesh.ranks)}
    body += [f"local = {shapes}.get(rank)", "if local is None:", "    return None, None"]
    got = f"compute_global_tensor_shape(torch.Size(local), mesh, {at})"
    made = (
        scripts.refused(case, body, got)
        if layout.mesh.ndim > 1
        else scripts.compared(case, body, f"tuple({got})", dict.fromkeys(shapes, layout.shape))
    )
    return Script(made.stages, (*made.imports, "from torch.distributed.tensor._utils import compute_global_tensor_shape"), made.constants)


LAWS = (
    Law(
        id="layout.together",
        clause="The shapes of shards, uneven ones too, make that of the whole; even ones have its strides, without what others hold.",
        source="torch.distributed.tensor, docstrings of compute_global_tensor_shape and compute_local_tensor_info",
        check=check_together,
        script=script_together,
        control="layout.together mesh=2 x=5x6:S(0)",
        planted="whole_is_the_first_shard_twice",
        draw=draw_together,
        draws=16,
        needs=("all_gather",),
        weight=0.2,
    ),
)
