"""Bodies of reproducers for the laws of the arithmetic of layouts: all that a case asks, with the answers worked out beside it."""

from __future__ import annotations

import math

from conformance.case import Case
from conformance.laws import scripts
from conformance.report.reproducer import Script, Stage
from reference.placement import Placement, Placements, StridedShard

CALL = "_compute_local_shape_and_global_offset"
CUT = [
    "def chunk(run, parts):",
    "    step = -(-len(run) // parts) or 1",
    "    return [run[i * step : (i + 1) * step] for i in range(parts)]",
    "def cut(run, parts, p):",
    "    runs = [chunk(r, parts) for r in chunk(run, getattr(p, 'split_factor', 1))]",
    "    return [sum((r[i] for r in runs), []) for i in range(parts)]",
]


def _asked(case: Case, *, strided: bool = True) -> tuple[tuple[int, ...], list[str]]:
    """The shape, and statements that make ``asked``: the combinations of placements that a case is about."""
    from conformance.laws.layout.math import shape_of, single

    mesh = case.mesh()
    if "x" in case:
        return shape_of(case), [f"asked = [{_tuple(case.tensor('x').placements or ())}]"]
    choices: list[Placement] = [
        placement for placement in single(len(case.shape()), mesh.ndim) if strided or not isinstance(placement, StridedShard)
    ]
    return case.shape(), [f"asked = itertools.product({scripts.placements(tuple(choices))}, repeat={mesh.ndim})"]


def _tuple(placements: Placements) -> str:
    return f"tuple({scripts.placements(placements)})"


def _script(body: list[str], *imports: str) -> Script:
    made = scripts.script(body, world=1)
    more = ["import itertools"] if any("itertools" in line for line in body) else []
    return Script((Stage(1, tuple(body)),), (*made.imports, *imports, *more))


def offsets(case: Case) -> Script:
    shape, asked = _asked(case)
    mesh = case.mesh().shape
    body = [
        *CUT,
        *asked,
        "wrong = []",
        f"places = {list(case.mesh().coords())}",
        "for placements in asked:",
        "    for at in places:",
        f"        owned = [list(range(n)) for n in {shape}]",
        f"        for i, n, p in zip(at, {mesh}, placements):",
        "            if hasattr(p, 'dim'):",
        "                owned[p.dim] = cut(owned[p.dim], n, p)[i]",
        f"        due = tuple(map(len, owned)), tuple(o[0] if o else n for o, n in zip(owned, {shape}))",
        f"        got = {CALL}({shape}, {mesh}, at, placements)",
        "        wrong += [(placements, at, due, got)] if due != tuple(map(tuple, got)) else []",
        "return [], wrong[:3]",
    ]
    return _script(body, f"from torch.distributed.tensor._utils import {CALL}")


def split_up(case: Case) -> Script:
    shape, asked = _asked(case)
    parts = case.mesh().size
    body = [
        *CUT,
        *asked,
        f"tensor = torch.arange({math.prod(shape)}).reshape({shape})",
        "due, got = [], []",
        "for (p,) in asked:",
        "    if hasattr(p, 'dim'):",
        f"        owned = cut(list(range(tensor.size(p.dim))), {parts}, p)",
        "        due += [tensor.index_select(p.dim, torch.tensor(part, dtype=torch.int64)) for part in owned]",
        f"        got += p._split_tensor(tensor, {parts}, with_padding=False)[0]",
        "return due, got",
    ]
    return _script(body)


def global_shape(case: Case) -> Script:
    shape, asked = _asked(case, strided=False)
    mesh = case.mesh()
    body = [
        f"mesh = {scripts.mesh(mesh).removesuffix(')')}, _init_backend=False, _rank=0)",
        *asked,
        "due, got = [], []",
        "for placements in asked:",
        f"    shape = list({shape})",
        f"    for n, p in zip({mesh.shape}, placements):",
        "        if hasattr(p, 'dim'):",
        "            shape[p.dim] *= n",
        "    due.append((placements, shape))",
        f"    got.append((placements, list(compute_global_tensor_info(torch.empty({shape}), mesh, placements)[0])))",
        "return due, got",
    ]
    return _script(body, "from torch.distributed.tensor._utils import compute_global_tensor_info")
