"""Bodies of reproducers for laws on meshes, layouts and redistributions: what a case says, as literal lines of torch.

Every helper returns lines. A rank's tensors are literal tables by rank, what it must hold is literal too, and the statements are
those that a user would write.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import torch

from conformance.case import Case
from conformance.laws.given import Given
from conformance.report.reproducer import Script, Stage
from reference import simulate
from reference.layout import Layout
from reference.mesh import Mesh
from reference.placement import Partial, Placement, Placements, Shard, StridedShard

IMPORTS = {
    "torch.distributed.device_mesh": ("DeviceMesh", "init_device_mesh"),
    "torch.distributed.tensor": ("DTensor", "Partial", "Replicate", "Shard", "distribute_tensor"),
    "torch.distributed.tensor._redistribute": ("disable_redistribute_transform_optimization", "use_min_cost_redistribution_plan"),
    "torch.distributed.tensor._utils": ("compute_local_shape_and_global_offset",),
    "torch.distributed.tensor.debug": ("CommDebugMode",),
    "torch.distributed.tensor.placement_types": ("_StridedShard",),
}


def script(body: Sequence[str], *, world: int, constants: Iterable[str] = ()) -> Script:
    """A script of one stage; the names that its lines use are imported."""
    constants, lines = tuple(constants), tuple(body)
    text = "\n".join((*constants, *lines))
    imports = []
    for module, names in IMPORTS.items():
        used = [name for name in names if re.search(rf"(?<![\w.]){name}\b", text)]
        if used:
            imports.append(f"from {module} import {', '.join(used)}")
    return Script((Stage(world, lines),), tuple(imports), constants)


def compared(
    case: Case, body: Sequence[str], got: str, want: Mapping[int, object], *, constants: Iterable[str] = (), world: int = 0
) -> Script:
    """A script that compares the expression ``got`` with what each rank of ``want`` must see; other ranks say nothing."""
    world = world or case.world
    values = {literal(value) for value in want.values()}
    if len(values) == 1 and len(want) == world:
        return script([*body, f"return {values.pop()}, {got}"], world=world, constants=constants)
    table = ["WANT = {", *(f"    {rank}: {literal(value)}," for rank, value in want.items()), "}"]
    only = [] if len(want) == world else ["if rank not in WANT:", "    return None, None"]
    return script([*body, *only, f"return WANT[rank], {got}"], world=world, constants=[*constants, *table])


def refused(
    case: Case, body: Sequence[str], attempt: str, *, constants: Iterable[str] = (), world: int = 0, errors: str = "Exception"
) -> Script:
    """A script whose ``attempt`` must raise on every rank."""
    lines = [*body, "try:", f"    {attempt}", f"except {errors}:", '    return "refused", "refused"', 'return "refused", "accepted"']
    return script(lines, world=world or case.world, constants=constants)


def holds(
    case: Case, body: Sequence[str], result: str, want: torch.Tensor, layout: Layout, *, constants: Iterable[str] = (), world: int = 0
) -> Script:
    """A script in which the DTensor ``result`` must be ``want`` under ``layout`` on every rank of its mesh.

    Where the layout has pending reductions, the full tensor is compared instead of the contributions.
    """
    world = world or case.world
    if layout.has_partial():
        full = dict.fromkeys(sorted(layout.mesh.ranks), want)
        table = tensors("FULL", full)
        return script([*body, f"got = ({result}).full_tensor()", *_members(layout, world, "FULL"), "return FULL[rank], got"],
                      world=world, constants=[*constants, *table])  # fmt: skip
    table = tensors("WANT", {layout.mesh.rank_at(coord): simulate.take(want, layout, coord) for coord in layout.mesh.coords()})
    lines = [
        *body,
        f"got = {result}",
        *_members(layout, world, "WANT"),
        f"expected = ({placements(layout.placements)}, {layout.shape}, WANT[rank])",
        "return expected, (list(got.placements), tuple(got.shape), got.to_local().detach())",
    ]
    return script(lines, world=world, constants=[*constants, *table])


def _members(layout: Layout, world: int, table: str) -> list[str]:
    return [] if layout.mesh.size == world else [f"if rank not in {table}:", "    return None, None"]


def source(given: Given, world: int, name: str = "x") -> tuple[list[str], list[str]]:
    """Constants and statements that put a DTensor called ``name`` together from literal local tensors."""
    layout, full = given.layout, given.full
    locals_ = {rank: given.local(layout.mesh.coord(rank)) for rank in range(world)}
    stride = given.stride
    made = f"{name} = DTensor.from_local({name.upper()}[rank], mesh, {placements(layout.placements)}, "
    how = f"shape=torch.Size({tuple(full.shape)}), stride={stride})" if full.ndim else "run_check=False)"
    return tensors(name.upper(), locals_), [f"mesh = {mesh(layout.mesh)}", made + how]


def mesh(of: Mesh, names: Sequence[str] = ()) -> str:
    """The call that makes a mesh."""
    named = f", mesh_dim_names={tuple(names)}" if names else ""
    return f'DeviceMesh("cpu", {torch.tensor(of.ranks).reshape(of.shape).tolist()}{named})'


def placement(of: Placement) -> str:
    match of:
        case Shard(dim):
            return f"Shard({dim})"
        case StridedShard(dim, factor):
            return f"_StridedShard({dim}, split_factor={factor})"
        case Partial(op):
            return f'Partial("{op}")'
    return "Replicate()"


def placements(of: Placements) -> str:
    return f"[{', '.join(map(placement, of))}]"


def tensors(name: str, by_rank: Mapping[int, torch.Tensor]) -> list[str]:
    """A table ``NAME = {rank: tensor}``."""
    return [f"{name} = {{", *(f"    {rank}: {tensor(value)}," for rank, value in by_rank.items()), "}"]


def tensor(value: torch.Tensor) -> str:
    """A tensor as the expression that makes it, its strides included."""
    value = value.detach()
    flat, shape = value.flatten().tolist(), tuple(value.shape)
    default = value.dtype in (torch.float32, torch.int64, torch.bool) and flat
    made = f"torch.tensor({flat}{'' if default else f', dtype={value.dtype}'})"
    if len(shape) != 1:
        made += f".reshape({shape})"
    if not value.is_contiguous() and 0 in value.stride():
        return f"{tensor(value[:1].clone())}.expand({shape})"
    if not value.is_contiguous():
        return f"torch.empty_strided({shape}, {value.stride()}, dtype={value.dtype}).copy_({made})"
    return made


def literal(value: object) -> str:
    return tensor(value) if isinstance(value, torch.Tensor) else repr(value)
