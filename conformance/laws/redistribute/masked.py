"""Laws of masked contributions: what a lookup in a table that is sharded by rows leaves to be summed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st
from torch.distributed.tensor import DTensor
from torch.nn import functional

from conformance.case import Case
from conformance.law import Law, Limits
from conformance.laws import draws, scripts
from conformance.laws.given import Given, given
from conformance.report.reproducer import Script
from reference.layout import Layout
from reference.placement import Partial, Placement, Replicate, Shard
from reference.tensors import TensorSpec
from strategies import shapes

if TYPE_CHECKING:
    import torch
    from hypothesis.strategies import SearchStrategy

    from conformance.here import Here

DOC = "torch.distributed.tensor.placement_types, docstring of _MaskPartial: row-wise sharded embedding"
# what is known to deviate has cases of its own, so that it stays few: (mesh, table, index, out, use)
SEVERAL = (
    ("2x2", "5x3:S(0),R", "5:R,S(0)", "R,R", "once"),
    ("2x2", "3x3:R,S(0)", "2:R,R", "S(0),R", "once"),
    ("2x2", "4x2:S(0),R", "3x2:R,S(1)", "S(1),S(1)", "once"),
    ("2x2", "5x4:S(0),S(1)", "3:R,R", "R,R", "once"),
    ("2x2", "5x4:S(1),S(0)", "3:R,R", "R,S(0)", "once"),
    ("2x2", "4x3:R,S(0)", "5:S(0),R", "S(0),R", "once"),
    ("2x2", "5x4:S(0),S(1)", "3:R,P(sum)", "R,R", "once"),
    ("2x1x2", "5x3:R,R,S(0)", "5:R,S(0),R", "R,R,S(1)", "once"),
    ("1x2x2", "7x2:R,S(0),R", "4:R,R,S(0)", "R,R,R", "once"),
    ("2", "5x3:S(0)", "4:R", "R", "twice"),
    ("3", "7x2:S(0)", "5:R", "S(0)", "twice"),
    ("1x2", "4x4:R,S(0)", "3x2:R,R", "R,S(1)", "twice"),
    ("2x1", "4x4:S(0),R", "3:R,R", "R,R", "twice"),
    ("2", "5x3:S(0)", "4:R", "R", "both"),
    ("3", "7x2:S(0)", "3x2:R", "S(0)", "both"),
    ("2", "5x3:S(0)", "4:R", "R", "apart"),
    ("3", "7x2:S(0)", "3x2:R", "R", "apart"),
)


USES = {"twice": ("reused",), "both": ("two-pending",), "apart": ("two-pending",)}


def sweep_masked(limits: Limits) -> list[Case]:
    cases = []
    for mesh, table, index, out, use in SEVERAL:
        i = f"{index}:int64:index{table.partition('x')[0]}"
        cases.append(Case.of("redistribute.masked", mesh=mesh, w=table, i=i, out=out, use=use))
    return [case for case in cases if case.world <= limits.world_size]


def draw_masked(limits: Limits) -> SearchStrategy[Case]:
    palette = draws.meshes(limits, tables=False, outside=False, least=2)
    mesh_drawn = st.sampled_from([mesh for mesh in palette if sum(size > 1 for size in mesh.shape) < 2])
    index_drawn = shapes(min_dims=1, max_dims=2, min_size=1)
    size = st.sampled_from((2, 3, 5, 7, 4, 8, 1, 6))

    @st.composite
    def case(draw: st.DrawFn) -> Case:
        mesh, index, rows, columns = draw(mesh_drawn), draw(index_drawn), draw(size), draw(size)
        table: list[Placement] = []
        at: list[Placement] = []
        rowwise = draw(st.integers(0, mesh.ndim - 1))
        for dim in range(mesh.ndim):
            kind = "rows" if dim == rowwise else draw(st.sampled_from(["none", "batch", "columns"]))
            table.append({"rows": Shard(0), "columns": Shard(1)}.get(kind, Replicate()))
            kept: list[Placement] = [Replicate(), Replicate(), Partial("sum"), Partial("max")] if kind == "rows" else [Replicate()]
            at.append(Shard(draw(st.integers(0, len(index) - 1))) if kind == "batch" else draw(st.sampled_from(kept)))
        goals: list[Placement] = [Replicate(), *map(Shard, range(len(index) + 1))]
        to = tuple(draw(st.sampled_from(goals)) for _ in range(mesh.ndim))
        return Case.of("redistribute.masked", mesh=mesh, w=TensorSpec((rows, columns), tuple(table)),
                       i=TensorSpec(index, tuple(at), "int64", f"index{rows}"), out=to, use="once", seed=draw(draws.seeds()))  # fmt: skip

    return case()


def features_masked(case: Case) -> set[str]:
    sizes, table, index = case.mesh().shape, case.tensor("w").placements or (), case.tensor("i").placements or ()
    rows = [dim for dim, (size, placement) in enumerate(zip(sizes, table, strict=True)) if size > 1 and placement == Shard(0)]
    ends = [dim for dim, to in enumerate(case.placements("out")) if isinstance(to, Shard)]
    ends += [dim for dim, (one, other) in enumerate(zip(table, index, strict=True)) if one == Shard(1) or isinstance(other, Shard)]
    beside = any(sizes[dim] > 1 and dim not in rows for dim in ends)
    return {"derived", *USES.get(case.get("use"), ()), *(["masked-beside-shard"] if rows and beside else [])}


def _second(case: Case) -> Given:
    """The indices of a second lookup while the first is pending: the same, or others of the same shape."""
    return given(case if case.get("use") == "both" else case.with_fields(seed=case.seed + 1), "i")


def _wanted(case: Case) -> tuple[torch.Tensor, Layout]:
    full = functional.embedding(given(case, "i").full, given(case, "w").full)
    return full, Layout(tuple(full.shape), case.mesh(), case.placements("out"))


def check_masked(case: Case, here: Here) -> None:
    """Each row comes from the one rank that has it, however the sum is then placed, and as often as it is asked for."""
    table, index = given(case, "w"), given(case, "i")
    full, to = _wanted(case)
    w = table.dtensor(here)
    found: list[tuple[Any, torch.Tensor]] = [(functional.embedding(index.dtensor(here), w), full)]
    here.require(isinstance(found[0][0], DTensor), "wrong-metadata", "kind", "a lookup in a DTensor is no DTensor")
    if case.get("use") == "twice":
        found *= 2
    elif case.get("use") != "once":
        second = _second(case)
        try:
            found.append((functional.embedding(second.dtensor(here), w), functional.embedding(second.full, table.full)))
        except RuntimeError:
            found[0][0].redistribute(placements=here.placements(to.placements))  # so that no later case meets its mask
            raise
    for rows, want in found:
        got = rows.redistribute(placements=here.placements(to.placements))
        here.same_dtensor(got, want, "rows", mesh=to.mesh, placements=to.placements)


def script_masked(case: Case) -> Script:
    full, to = _wanted(case)
    constants, body = scripts.source(given(case, "w"), case.world, "w")
    more, lines = scripts.source(given(case, "i"), case.world, "i")
    body += [*lines[1:], "found = torch.nn.functional.embedding(i, w)"]
    moved = f"found.redistribute(placements={scripts.placements(to.placements)})"
    body += [moved] if case.get("use") == "twice" else []
    if case.get("use") in ("both", "apart"):
        again, lines = scripts.source(_second(case), case.world, "j")
        more, body = [*more, *again], [*body, *lines[1:], "torch.nn.functional.embedding(j, w)"]
    return scripts.holds(case, body, moved, full, to, constants=[*constants, *more])


LAWS = (
    Law(
        id="redistribute.masked",
        clause="A lookup in a table that is sharded by rows gives, once summed, each row as the rank that has it holds it.",
        source=DOC,
        check=check_masked,
        script=script_masked,
        features=features_masked,
        control="redistribute.masked mesh=2 w=5x3:S(0) i=4:R:int64:index5 out=R use=once",
        planted="mask_is_not_applied",
        sweep=sweep_masked,
        sweeps=17,
        draw=draw_masked,
        draws=30,
        needs=("all_reduce",),
        weight=0.8,
    ),
)
