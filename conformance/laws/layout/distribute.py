"""Laws of layouts: what ``distribute_tensor`` puts on each rank, and what torch says that each rank holds."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor, distribute_tensor

from conformance import compat
from conformance.case import Case
from conformance.law import Law, Limits
from conformance.laws import draws, scripts
from conformance.laws.given import Given, given
from conformance.report.reproducer import Script
from reference.box import Box
from reference.layout import Layout

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from conformance.here import Here

DOC = "torch.distributed.tensor docs"
OFFSETS = "torch.distributed.tensor._utils, docstring of compute_local_shape_and_global_offset"
MEMORIES = ("plain", "transposed", "sliced", "expanded")
RANK_SEED = 31


def keeps_grad(draw: st.DrawFn, layout: Layout) -> dict[str, Any]:
    """Sometimes the field ``requires_grad=1``: the tensor requires a gradient."""
    return {"requires_grad": draw(st.sampled_from([None, None, None, 1]))}


def wants_grad(case: Case) -> bool:
    """Whether the case asks for a gradient, and its dtype has one."""
    return case.integer("requires_grad", 0) == 1 and case.tensor("x").torch_dtype.is_floating_point


def draw_distribute(limits: Limits) -> SearchStrategy[Case]:
    return draws.placed("layout.distribute", limits, dtypes=limits.dtypes, memories=MEMORIES, extra=keeps_grad)


def check_distribute(case: Case, here: Here) -> None:
    """Each rank takes its slice of its own tensor; shape, stride, dtype and requires_grad are the tensor's, which is untouched."""
    x, grad = given(case), wants_grad(case)
    tensor = here.tensor(x.full).requires_grad_(grad)
    at = here.placements(x.layout.placements)
    got = distribute_tensor(tensor, here.mesh(x.layout.mesh), at, src_data_rank=None)
    here.same_dtensor(got, x.full, "local", mesh=x.layout.mesh, placements=x.layout.placements)
    here.require(got.requires_grad == grad, "wrong-metadata", "requires_grad", "requires_grad differs", grad, got.requires_grad)
    here.require(got.is_leaf, "wrong-metadata", "leaf", "the DTensor is no leaf")
    here.require(
        got.stride() == tensor.stride(), "wrong-metadata", "stride", "global stride is not the tensor's", tensor.stride(), got.stride()
    )
    here.same(tensor, case.tensor("x").build(case.seed), "input", what="the tensor that was distributed")


def script_distribute(case: Case) -> Script:
    x = given(case)
    grad = ".requires_grad_()" if wants_grad(case) else ""
    body = [
        f"mesh = {scripts.mesh(x.layout.mesh)}",
        f"d = distribute_tensor({scripts.tensor(x.full)}{grad}, mesh, {scripts.placements(x.layout.placements)}, src_data_rank=None)",
    ]
    return scripts.holds(case, body, "d", x.full, x.layout)


def of_rank(case: Case, rank: int) -> torch.Tensor:
    """The tensor that ``rank`` passes where every rank passes another one."""
    return case.tensor("x").build(case.seed + RANK_SEED * (rank + 1))


def draw_scatter(limits: Limits) -> SearchStrategy[Case]:
    on = draws.meshes(limits, tables=False)
    plain = draws.placed("layout.scatter", limits, on=on, kinds=("R", "S"), dtypes=limits.dtypes, memories=MEMORIES)
    return draws.mostly(plain, draws.placed("layout.scatter", limits, on=on, dtypes=limits.dtypes), 8)


def draw_source(limits: Limits) -> SearchStrategy[Case]:
    def source(draw: st.DrawFn, layout: Layout) -> dict[str, Any]:
        return {"src": draw(st.integers(1, min(layout.mesh.shape) - 1))}

    on = [mesh for mesh in draws.meshes(limits, tables=False) if min(mesh.shape) > 1]
    plain = draws.placed("layout.source", limits, on=on, kinds=("R", "S"), dtypes=limits.dtypes, extra=source)
    return draws.mostly(plain, draws.placed("layout.source", limits, on=on, extra=source), 8)


SECOND_FIRST = draws.out_of_order("layout.source", "S(0)", src=1)


def check_scatter(case: Case, here: Here) -> None:
    """Every rank passes other data: those of the source rank along each mesh dim, the first by default, are what all hold slices of."""
    x = given(case)
    options = {"src_data_rank": case.integer("src")} if "src" in case else {}
    source = x.layout.mesh.rank_at((case.integer("src", 0),) * x.layout.mesh.ndim)
    at = here.placements(x.layout.placements)
    got = distribute_tensor(here.tensor(of_rank(case, here.rank)), here.mesh(x.layout.mesh), at, **options)
    here.same_dtensor(got, of_rank(case, source), "local", mesh=x.layout.mesh, placements=x.layout.placements)


def script_scatter(case: Case) -> Script:
    x = given(case)
    source = x.layout.mesh.rank_at((case.integer("src", 0),) * x.layout.mesh.ndim)
    option = f", src_data_rank={case.get('src')}" if "src" in case else ""
    body = [
        f"mesh = {scripts.mesh(x.layout.mesh)}",
        f"d = distribute_tensor(X[rank], mesh, {scripts.placements(x.layout.placements)}{option})",
    ]
    constants = scripts.tensors("X", {rank: of_rank(case, rank) for rank in range(case.world)})
    return scripts.holds(case, body, "d", of_rank(case, source), x.layout, constants=constants)


def draw_kept(limits: Limits) -> SearchStrategy[Case]:
    sharded = draws.placed("layout.input-kept", limits, kinds=("S",), dtypes=limits.dtypes, memories=MEMORIES, min_dims=1)
    return draws.mostly(sharded, draws.placed("layout.input-kept", limits, kinds=("R",)), 8)


def check_kept(case: Case, here: Here) -> None:
    """Distributing a tensor leaves it as it was, on every rank."""
    x = given(case)
    tensor = here.tensor(of_rank(case, here.rank))
    distribute_tensor(tensor, here.mesh(x.layout.mesh), here.placements(x.layout.placements))
    here.same(tensor, of_rank(case, here.rank), "input", what="the tensor that was distributed")


def script_kept(case: Case) -> Script:
    x = given(case)
    body = [
        "x = X[rank].clone()",
        f"mesh = {scripts.mesh(x.layout.mesh)}",
        f"d = distribute_tensor(x, mesh, {scripts.placements(x.layout.placements)})",
        "return X[rank], x",
    ]
    return scripts.script(body, world=case.world, constants=scripts.tensors("X", {rank: of_rank(case, rank) for rank in range(case.world)}))


def draw_offsets(limits: Limits) -> SearchStrategy[Case]:
    return draws.placed("layout.offsets", limits, kinds=("R", "S", "_S", "P"))


def check_offsets(case: Case, here: Here) -> None:
    """The local shape and offset that torch computes are the lengths and first indices of what this rank owns."""
    x = given(case)
    compute = compat.name("local_shape_and_offset")
    coord = here.coord(x.layout.mesh)
    shape, offset = compute(torch.Size(x.layout.shape), here.mesh(x.layout.mesh), here.placements(x.layout.placements))
    want = ((0,), ()) if coord is None else (x.layout.local_shape(coord), x.layout.offset(coord))
    here.require(tuple(shape) == want[0], "wrong-layout", "shape", "local shape differs", want[0], tuple(shape))
    here.require(tuple(offset) == want[1], "wrong-layout", "offset", "global offset differs", want[1], tuple(offset))


def script_offsets(case: Case) -> Script:
    layout = given(case).layout
    coords = {rank: layout.mesh.coord(rank) for rank in range(case.world)}
    want = {rank: ((0,), ()) if at is None else (layout.local_shape(at), layout.offset(at)) for rank, at in coords.items()}
    name = "compute_local_shape_and_global_offset"
    got = f"{name}(torch.Size({layout.shape}), mesh, {scripts.placements(layout.placements)})"
    return scripts.compared(case, [f"mesh = {scripts.mesh(layout.mesh)}"], got, want)


def draw_chunks(limits: Limits) -> SearchStrategy[Case]:
    return draws.mostly(draws.placed("layout.chunks", limits, kinds=("R", "S")), draws.placed("layout.chunks", limits), 4)


def check_chunks(case: Case, here: Here) -> None:
    """The chunks that a DTensor lists for a checkpoint hold exactly the elements that this rank owns."""
    x = given(case)
    coord = here.coord(x.layout.mesh)
    live = x.dtensor(here)
    if coord is None:
        return
    got = [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in live.__create_chunk_list__()]  # type: ignore[no-untyped-call]
    due = x.layout.box(coord)
    if due is not None:
        here.require(got == [due], "wrong-layout", "box", "the chunk is not what this rank owns", due, got)
        return
    listed = sorted(at for box in got for at in itertools.product(*(range(a, b) for a, b in zip(box.offset, box.end, strict=True))))
    owned = sorted(itertools.product(*x.layout.owned(coord)))
    here.require(listed == owned, "wrong-layout", "elements", "the chunks hold other elements than this rank owns", owned, got)


def script_chunks(case: Case) -> Script:
    x = given(case)
    constants, body = scripts.source(x, case.world)
    coords = {rank: x.layout.mesh.coord(rank) for rank in sorted(x.layout.mesh.ranks)}
    want = {rank: sorted(itertools.product(*x.layout.owned(at or ()))) for rank, at in coords.items()}
    body += [
        "listed = []",
        "for chunk in x.__create_chunk_list__() if mesh.get_coordinate() is not None else []:",
        "    ranges = [range(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes)]",
        "    listed += itertools.product(*ranges)",
    ]
    made = scripts.compared(case, body, "sorted(listed)", want, constants=constants)
    return Script(made.stages, ("import itertools", *made.imports), made.constants)


def draw_full(limits: Limits) -> SearchStrategy[Case]:
    on = draws.meshes(limits, tables=False)
    plain = draws.placed("layout.full", limits, on=on, kinds=("R", "S"), dtypes=limits.dtypes, memories=MEMORIES)
    return draws.mostly(plain, draws.placed("layout.full", limits, on=on), 5)


def check_full(case: Case, here: Here) -> None:
    """``full_tensor`` of what was distributed is the tensor, on every rank."""
    x = given(case)
    at = here.placements(x.layout.placements)
    got = distribute_tensor(here.tensor(x.full), here.mesh(x.layout.mesh), at, src_data_rank=None).full_tensor()
    if here.coord(x.layout.mesh) is None:
        here.require(got.numel() == 0, "wrong-layout", "outside", "a rank outside the mesh got elements", "nothing", got)
    else:
        here.same(got, x.full, "full", what="full tensor")


def script_full(case: Case) -> Script:
    x = given(case)
    body = [
        f"x = {scripts.tensor(x.full)}",
        f"mesh = {scripts.mesh(x.layout.mesh)}",
        f"d = distribute_tensor(x, mesh, {scripts.placements(x.layout.placements)}, src_data_rank=None)",
        "full = d.full_tensor()",
        "return (x, full) if mesh.get_coordinate() is not None else (None, None)",
    ]
    return scripts.script(body, world=case.world)


def draw_negative(limits: Limits) -> SearchStrategy[Case]:
    def how(draw: st.DrawFn, layout: Layout) -> dict[str, Any]:
        return {"how": draw(st.sampled_from(["distribute", "from_local", "redistribute"]))}

    drawn = draws.placed("layout.negative-dims", limits, kinds=("S", "_S", "R"), min_dims=1, negative=True, extra=how)
    return drawn.filter(lambda case: "(-" in case.text)


def check_negative(case: Case, here: Here) -> None:
    """A shard of dim -1 is a shard of the last dim: the DTensor says so and holds it; the list that was passed stays as it was."""
    x, how = given(case), case.get("how")
    live, at = here.mesh(x.layout.mesh), here.placements(case.tensor("x").placements or ())
    if how == "distribute":
        got = distribute_tensor(here.tensor(x.full), live, at, src_data_rank=None)
    elif how == "from_local":
        local = here.local(x.full, x.layout)
        outside = here.coord(x.layout.mesh) is None
        local = here.tensor(x.full) if outside else local  # a rank outside has no local tensor of as many dims
        got = DTensor.from_local(local, live, at, shape=x.full.shape, stride=x.full.stride())
    else:
        whole = here.placements(x.layout.replace(draws.replicated(x.layout)).placements)
        got = distribute_tensor(here.tensor(x.full), live, whole, src_data_rank=None).redistribute(placements=at)
    here.same_dtensor(got, x.full, how, mesh=x.layout.mesh)
    due = here.placements(x.layout.placements)
    here.require(list(got.placements) == due, "wrong-metadata", "placements", "negative dims are not normalised", due, list(got.placements))
    passed = here.placements(case.tensor("x").placements or ())
    here.require(at == passed, "wrong-value", "argument", "the list of placements that was passed is another afterwards", passed, at)


def script_negative(case: Case) -> Script:
    x, how = given(case), case.get("how")
    at = scripts.placements(case.tensor("x").placements or ())
    if how == "from_local":
        constants, body = scripts.source(Given(x.spec, x.full, x.layout, x.seed), case.world)
        body[-1] = body[-1].replace(scripts.placements(x.layout.placements), "at")
        body = [f"at = {at}", *body, f"assert at == {at}"]
        return scripts.holds(case, body, "x", x.full, x.layout, constants=constants)
    whole = scripts.placements(draws.replicated(x.layout))
    body = [f"x = {scripts.tensor(x.full)}", f"mesh, at = {scripts.mesh(x.layout.mesh)}, {at}"]
    body += [f"d = distribute_tensor(x, mesh, {'at' if how == 'distribute' else whole}, src_data_rank=None)"]
    body += ["d = d.redistribute(placements=at)"] if how == "redistribute" else []
    return scripts.holds(case, [*body, f"assert at == {at}"], "d", x.full, x.layout)


LAWS = (
    Law(
        id="layout.distribute",
        clause="distribute_tensor without a source rank leaves on each rank the slice of its tensor that the placements name.",
        source=f"{DOC}, distribute_tensor (src_data_rank=None) and Shard (torch.chunk semantic)",
        check=check_distribute,
        script=script_distribute,
        control="layout.distribute mesh=2x2 x=5x6:S(0),S(1)",
        planted="shard_tensor_floor",
        draw=draw_distribute,
        draws=200,
        weight=1.2,
    ),
    Law(
        id="layout.scatter",
        clause="distribute_tensor gives every rank its slice of the tensor of the first rank of each mesh dim.",
        source=f"{DOC}, distribute_tensor (src_data_rank)",
        check=check_scatter,
        script=script_scatter,
        control="layout.scatter mesh=2x2 x=5x6:S(0),S(1)",
        planted="scatter_skips_unpadding",
        draw=draw_scatter,
        sweep=draws.out_of_order("layout.scatter", "S(0)"),
        sweeps=3,
        draws=120,
        needs=("broadcast", "scatter"),
        weight=1.2,
    ),
    Law(
        id="layout.source",
        clause="With src_data_rank=k every rank gets its slice of the tensor of the rank at position k of each mesh dim.",
        source=f"{DOC}, distribute_tensor (src_data_rank)",
        check=check_scatter,
        script=script_scatter,
        control="layout.source mesh=2 x=5x6:S(1) src=1",
        planted="broadcast_from_first",
        draw=draw_source,
        draws=60,
        sweep=lambda limits: [case for case in SECOND_FIRST(limits) if min(case.mesh().shape) > 1],
        sweeps=2,
        needs=("broadcast", "scatter"),
        weight=0.8,
    ),
    Law(
        id="layout.input-kept",
        clause="distribute_tensor does not change the tensor that it is given.",
        source=f"{DOC}, distribute_tensor: an out-of-place function",
        check=check_kept,
        script=script_kept,
        control="layout.input-kept mesh=2 x=5x6:S(1)",
        planted="scatter_zeroes_input",
        features=lambda case: {"replicated"} if set(case.get("x").split(":")[1].split(",")) == {"R"} else set(),
        draw=draw_kept,
        draws=30,
        needs=("broadcast", "scatter"),
        weight=0.3,
        tier="advisory",
    ),
    Law(
        id="layout.offsets",
        clause="A rank's local shape is how much it owns of each dim, its offset the first index, or the extent where it owns nothing.",
        source=OFFSETS,
        check=check_offsets,
        script=script_offsets,
        control="layout.offsets mesh=2x2 x=5x6:S(0),S(0)",
        planted="nested_offset_is_local",
        draw=draw_offsets,
        draws=180,
        weight=0.6,
    ),
    Law(
        id="layout.chunks",
        clause="The chunks that a DTensor lists hold the elements that the rank owns, all of them and no others.",
        source="torch.distributed.tensor, docstring of DTensor.__create_chunk_list__",
        check=check_chunks,
        script=script_chunks,
        control="layout.chunks mesh=2x2 x=5x6:S(0),S(0)",
        planted="chunk_of_whole_tensor",
        draw=draw_chunks,
        draws=90,
        weight=0.5,
    ),
    Law(
        id="layout.full",
        clause="full_tensor of a distributed tensor is the tensor.",
        source=f"{DOC}, DTensor.full_tensor",
        check=check_full,
        script=script_full,
        control="layout.full mesh=2x2 x=5x6:S(0),S(1)",
        planted="gather_along_first_dim",
        draw=draw_full,
        sweep=draws.out_of_order("layout.full", "S(0)"),
        sweeps=3,
        draws=120,
        needs=("all_gather",),
        weight=1.2,
    ),
    Law(
        id="layout.negative-dims",
        clause="A shard of a negative dim is a shard of the dim counted from the end, and a DTensor names it so.",
        source=f"{DOC}, DTensor.from_local and distribute_tensor (Shard dims are normalised)",
        check=check_negative,
        script=script_negative,
        control="layout.negative-dims mesh=2 x=5x6:S(-1) how=distribute",
        planted="negative_dims_count_from_one",
        draw=draw_negative,
        draws=50,
        weight=0.4,
    ),
)
