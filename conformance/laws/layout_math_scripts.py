"""Bodies of reproducers for the laws of the arithmetic of layouts: one question, or all that a case stands for, with the answers due."""

from __future__ import annotations

import math

from conformance.case import Case
from conformance.laws import scripts
from conformance.report.reproducer import Script, ScriptError, Stage
from reference.layout import Layout, split
from reference.placement import Placements, StridedShard, shard_dim

CALL = "_compute_local_shape_and_global_offset"


def _named(case: Case) -> tuple[tuple[int, ...], list[Placements]]:
    """The shape and the combinations of placements that a case asks about."""
    from conformance.laws.layout_math import placements_of, shape_of

    found = placements_of(case)
    if len(found) * case.mesh().size > 200:
        raise ScriptError(f"{len(found)} combinations of placements are too many for a script: the message names the one that is wrong")
    return shape_of(case), found


def _script(body: list[str], *imports: str) -> Script:
    made = scripts.script(body, world=1)
    return Script((Stage(1, tuple(body)),), (*made.imports, *imports))


def offsets(case: Case) -> Script:
    shape, found = _named(case)
    mesh = case.mesh()
    rows = []
    for placements in found:
        layout = Layout(shape, mesh, placements)
        due = {coord: (layout.local_shape(coord), layout.offset(coord)) for coord in mesh.coords()}
        rows.append(f"({scripts.placements(placements)}, {due}),")
    body = [
        "due = [",
        *(f"    {row}" for row in rows),
        "]",
        f"got = [(p, {{at: {CALL}({shape}, {mesh.shape}, at, p) for at in want}}) for p, want in due]",
        "wrong = [(want, told) for want, told in zip(due, got) if want[1] != told[1]]",
        "return [want for want, _ in wrong], [told for _, told in wrong]",
    ]
    return _script(body, f"from torch.distributed.tensor._utils import {CALL}")


def split_up(case: Case) -> Script:
    shape, found = _named(case)
    parts = case.mesh().size
    rows = []
    for (placement,) in found:
        dim = shard_dim(placement)
        if dim is not None:
            rows.append(f"({scripts.placement(placement)}, {split(tuple(range(shape[dim])), parts, placement)}),")
    body = [
        f"tensor = torch.arange({math.prod(shape)}).reshape({shape})",
        "due, got = [], []",
        "for placement, owned in [",
        *(f"    {row}" for row in rows),
        "]:",
        "    due += [tensor.index_select(placement.dim, torch.tensor(part, dtype=torch.int64)) for part in owned]",
        f"    got += placement._split_tensor(tensor, {parts}, with_padding=False)[0]",
        "return due, got",
    ]
    return _script(body)


def global_shape(case: Case) -> Script:
    shape, found = _named(case)
    mesh = case.mesh()
    rows = []
    for placements in found:
        if any(isinstance(placement, StridedShard) for placement in placements):
            continue
        due = list(shape)
        for size, placement in zip(mesh.shape, placements, strict=True):
            if (dim := shard_dim(placement)) is not None:
                due[dim] *= size
        rows.append(f"({scripts.placements(placements)}, {due}),")
    body = [
        f"mesh = {scripts.mesh(mesh).removesuffix(')')}, _init_backend=False, _rank=0)",
        "due = [",
        *(f"    {row}" for row in rows),
        "]",
        f"return due, [(p, list(compute_global_tensor_info(torch.empty({shape}), mesh, p)[0])) for p, _ in due]",
    ]
    return _script(body, "from torch.distributed.tensor._utils import compute_global_tensor_info")
