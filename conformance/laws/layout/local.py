"""Laws of tensors that are put together on each rank: ``from_local``, ``to_local``, the factories, and what they refuse."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor, distribute_tensor

from conformance.case import Case
from conformance.here import to_torch
from conformance.law import Law, Limits
from conformance.laws import draws, scripts
from conformance.laws.given import given
from conformance.laws.layout.distribute import RANK_SEED, keeps_grad, wants_grad
from conformance.report.reproducer import Script
from reference import simulate
from reference.mesh import Coord
from reference.placement import REDUCE_OPS, Partial, Placement, Replicate, Shard, StridedShard, shard_dim
from reference.tensors import TensorSpec, dense
from strategies import shapes
from strategies.placements import placements

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from conformance.here import Here

DOC = "torch.distributed.tensor docs"


def draw_from_local(limits: Limits) -> SearchStrategy[Case]:
    return draws.placed("layout.from-local", limits, kinds=("R", "S", "_S", "P"), memories=("plain", "transposed"), extra=keeps_grad)


def check_from_local(case: Case, here: Here) -> None:
    """``from_local`` with a global shape keeps what each rank gave, and ``to_local`` gives it back, on the same storage."""
    x, grad = given(case), wants_grad(case)
    outside = here.coord(x.layout.mesh) is None
    local = here.tensor(torch.empty(0) if outside else x.local(here.coord(x.layout.mesh))).requires_grad_(grad)
    got = DTensor.from_local(local, here.mesh(x.layout.mesh), here.placements(x.layout.placements), shape=x.full.shape, stride=x.stride)
    here.same_dtensor(got, x.full, "local", mesh=x.layout.mesh, placements=x.layout.placements)
    here.require(got.requires_grad == grad, "wrong-metadata", "requires_grad", "requires_grad differs", grad, got.requires_grad)
    here.require(tuple(got.stride()) == x.stride, "wrong-metadata", "stride", "global stride is not the one given", x.stride, got.stride())
    if outside:
        return
    back = got.to_local()
    here.same(back, local.detach(), "to_local", what="what to_local gives back")
    here.require(back.data_ptr() == local.data_ptr(), "wrong-value", "storage", "to_local gives another storage back")
    with torch.no_grad():
        here.require(
            got.to_local().data_ptr() == local.data_ptr(), "wrong-value", "no_grad", "without gradients to_local gives another storage back"
        )
        if not x.layout.has_partial():
            local.add_(1)
            here.same(back, local.detach(), "alias", what="what to_local gave back, once the local tensor was written")


def script_from_local(case: Case) -> Script:
    x = given(case)
    coords = {rank: x.layout.mesh.coord(rank) for rank in range(case.world)}
    passed = {rank: torch.empty(0) if coord is None else x.local(coord) for rank, coord in coords.items()}
    how = f"shape=torch.Size({x.layout.shape}), stride={x.stride}"
    body = [
        f"mesh = {scripts.mesh(x.layout.mesh)}",
        f"x = DTensor.from_local(X[rank], mesh, {scripts.placements(x.layout.placements)}, {how})",
        f"return ({x.layout.shape}, {x.stride}, X[rank]), (tuple(x.shape), x.stride(), x.to_local())",
    ]
    return scripts.script(body, world=case.world, constants=scripts.tensors("X", passed))


def draw_infer(limits: Limits) -> SearchStrategy[Case]:
    mesh_drawn = st.sampled_from(draws.meshes(limits, outside=False, least=2))
    odd = shapes(min_dims=1)
    shape_drawn = st.sampled_from([shapes(min_dims=1, min_size=2)] * 7 + [odd]).flatmap(lambda drawn: drawn)

    @st.composite
    def case(draw: st.DrawFn) -> Case:
        mesh, local = draw(mesh_drawn), draw(shape_drawn)
        at = draw(placements(mesh, len(local), kinds=("R", "S", "P")))
        spread = [math.prod(size for size, p in zip(mesh.shape, at, strict=True) if shard_dim(p) == dim) for dim in range(len(local))]
        shape = tuple(size * times for size, times in zip(local, spread, strict=True))
        spec = TensorSpec(shape, at, memory="plain" if min(local) < 2 else draw(st.sampled_from(["plain", "plain", "transposed"])))
        return Case.of("layout.infer", mesh=mesh, x=spec, seed=draw(draws.seeds()))

    return case()


def features_infer(case: Case) -> set[str]:
    """A local extent of 1 leaves the order of strides open, whatever the global extent is."""
    layout = given(case).layout
    return {"size-1"} if 1 in layout.local_shape((0,) * layout.mesh.ndim) else set()


def check_infer(case: Case, here: Here) -> None:
    """Without a shape, ``from_local`` takes the global shape and stride from even shards."""
    x = given(case)
    local = here.tensor(x.local(here.coord(x.layout.mesh)))
    got = DTensor.from_local(local, here.mesh(x.layout.mesh), here.placements(x.layout.placements))
    if here.coord(x.layout.mesh) is None:
        return  # its local tensor says nothing of the whole
    here.same_dtensor(got, x.full, "local", mesh=x.layout.mesh, placements=x.layout.placements)
    want = [step for step, size in zip(x.stride, x.full.shape, strict=True) if size > 1]
    told = [step for step, size in zip(got.stride(), got.shape, strict=True) if size > 1]
    here.require(
        0 in x.full.shape or told == want, "wrong-metadata", "stride", "global stride is not that of the whole", x.stride, got.stride()
    )


def script_infer(case: Case) -> Script:
    x = given(case)
    constants, body = scripts.source(x, case.world)
    body[-1] = f"x = DTensor.from_local(X[rank], mesh, {scripts.placements(x.layout.placements)})"
    wide = [step for step, size in zip(x.stride, x.layout.shape, strict=True) if size > 1]
    told = "[step for step, size in zip(x.stride(), x.shape) if size > 1]"
    body += [f"return ({x.layout.shape}, {wide}, X[rank]), (tuple(x.shape), {told}, x.to_local())"]
    return scripts.script(body, world=case.world, constants=constants)


CHECKED = ("data", "data", "data", "data", "shape", "dtype")


def draw_checked(limits: Limits) -> SearchStrategy[Case]:
    on = draws.meshes(limits, outside=False, tables=False, least=2)

    @st.composite
    def case(draw: st.DrawFn) -> Case:
        how = draw(st.sampled_from(CHECKED))
        base = draw(draws.placed("layout.run-check", limits, on=on, kinds=("R", "S"), min_dims=1))
        spec = base.tensor("x")
        if how == "data":
            return base.with_fields(how=how)
        return base.with_fields(how=how, x=TensorSpec(tuple(max(size, 1) for size in spec.shape), spec.placements))

    return case()


def sweep_checked(limits: Limits) -> list[Case]:
    """Shards of 1 and 3 rows where the layout says 2 and 2; replicas on meshes whose table does not ascend, and on a part of the world;
    tensors that lie otherwise in the memory of one rank."""
    uneven = (("2", "4x3"), ("2", "4"), ("3", "6x2"), ("4", "8x3"))
    sizes = [Case.of("layout.run-check", mesh=mesh, x=f"{shape}:S(0)", how="sizes") for mesh, shape in uneven]
    cases = [*sizes, Case.of("layout.run-check", mesh="2@0,2", x="4x3:R", how="data")]
    lies = [Case.of("layout.run-check", mesh=mesh, x=x, how="stride") for mesh, x in (("2", "4x6:S(0)"), ("3", "3x4:R"))]
    cases = [case for case in (*cases, *lies) if case.world <= limits.world_size]
    return cases + draws.out_of_order("layout.run-check", "R", how="data")(limits)


def _as_passed(case: Case, rank: int) -> torch.Tensor:
    """The local tensor that ``rank`` passes, with what is wrong about it."""
    x, how = given(case), case.get("how")
    coord = x.layout.mesh.coord(rank)
    if coord is None:
        return torch.empty(0)
    if how == "data":
        return simulate.take(x.spec.build(case.seed + RANK_SEED * (rank + 1)), x.layout, coord)
    local = simulate.take(x.full, x.layout, coord)
    odd = rank == max(x.layout.mesh.ranks)
    if how == "shape":
        largest = simulate.take(x.full, x.layout, (0,) * x.layout.mesh.ndim)
        return torch.cat([largest, dense((1, *largest.shape[1:]), local.dtype)]) if odd else local
    if how == "dtype":
        return local.to(torch.float64) if odd else local
    if how == "stride":
        return local.t().contiguous().t() if odd else local
    sizes = [1, 3, 1, 3] if x.layout.mesh.size == 4 else [1, *[2] * (x.layout.mesh.size - 2), 3]
    start = sum(sizes[: coord[0]])
    return x.full[start : start + sizes[coord[0]]].clone()


def _due_data(case: Case, coord: Coord) -> torch.Tensor:
    """What the rank at ``coord`` holds once the first rank of each replicated dim has been heard."""
    x = given(case)
    first = tuple(0 if isinstance(p, Replicate) else at for p, at in zip(x.layout.placements, coord, strict=True))
    source = x.layout.mesh.rank_at(first)
    return simulate.take(x.spec.build(case.seed + RANK_SEED * (source + 1)), x.layout, coord)


def features_checked(case: Case) -> set[str]:
    return {"other-sizes"} if case.get("how") == "sizes" else set()


def check_checked(case: Case, here: Here) -> None:
    """``run_check`` gives replicas the data of the first rank, and refuses ranks that disagree with each other or with the layout."""
    x, how = given(case), case.get("how")
    live, at, local = here.mesh(x.layout.mesh), here.placements(x.layout.placements), here.tensor(_as_passed(case, here.rank))
    whole: dict[str, Any] = {"shape": x.full.shape, "stride": x.full.stride()}
    if how == "data":
        got, coord = DTensor.from_local(local, live, at, run_check=True, **whole).to_local(), here.coord(x.layout.mesh)
        if coord is not None:
            here.same(got, _due_data(case, coord), "data", what="local tensor after the check")
        return
    options = whole if how == "sizes" else {}
    message = f"local tensors whose {how} the layout does not allow"
    here.refused(
        lambda: DTensor.from_local(local, live, at, run_check=True, **options),
        how,
        message,
        errors=(ValueError, RuntimeError, AssertionError),
    )


def script_checked(case: Case) -> Script:
    x, how = given(case), case.get("how")
    ranks = range(case.world)
    constants = scripts.tensors("X", {rank: _as_passed(case, rank) for rank in ranks})
    shape = "" if how in ("shape", "dtype", "stride") else f", shape=torch.Size({x.layout.shape}), stride={x.full.stride()}"
    made = f"DTensor.from_local(X[rank], mesh, {scripts.placements(x.layout.placements)}, run_check=True{shape})"
    body = [f"mesh = {scripts.mesh(x.layout.mesh)}"]
    if how != "data":
        return scripts.refused(case, body, made, constants=constants)
    members = {x.layout.mesh.rank_at(coord): _due_data(case, coord) for coord in x.layout.mesh.coords()}
    lines = [*body, f"got = {made}.to_local()", "return (WANT[rank], got) if rank in WANT else (None, None)"]
    return scripts.script(lines, world=case.world, constants=[*constants, *scripts.tensors("WANT", members)])


ALL_PLACEMENTS: tuple[Placement, ...] = (
    Replicate(), Shard(0), Shard(1), Shard(-1), StridedShard(0, 2), StridedShard(0, 3), StridedShard(1, 2), StridedShard(0, 1),
    *(Partial(op) for op in REDUCE_OPS),
)  # fmt: skip


def sweep_placements(limits: Limits) -> list[Case]:
    pairs = [(a, b) for at, a in enumerate(ALL_PLACEMENTS) for b in ALL_PLACEMENTS[at:]]
    return [Case.of("layout.placement-equality", a=a, b=b, world=2) for a, b in pairs]


def check_placements(case: Case, here: Here) -> None:
    """Two placements are equal exactly when their kind and what they are made with are; equal ones hash alike; each knows its kind."""
    one, other = case.placements("a")[0], case.placements("b")[0]
    a, b, due = to_torch(one), to_torch(other), one == other
    here.require((a == b) is due and (b == a) is due, "wrong-value", "equality", f"{one} and {other} compare otherwise", due, a == b)
    here.require((a != b) is not due, "wrong-value", "inequality", f"{one} and {other} compare otherwise by !=", not due, a != b)
    here.require(not due or hash(a) == hash(b), "wrong-value", "hash", f"{one} and {other} hash otherwise", hash(a), hash(b))
    here.require(len({a, b}) == 2 - due, "wrong-value", "set", "a set keeps another number of placements", 2 - due, len({a, b}))
    kinds = (a.is_replicate(), a.is_partial()) if isinstance(one, StridedShard) else (a.is_replicate(), a.is_partial(), a.is_shard())
    want = (isinstance(one, Replicate), isinstance(one, Partial), isinstance(one, Shard))
    here.require(kinds == want[: len(kinds)], "wrong-value", "kind", f"{one} does not know its kind", want, kinds)
    if isinstance(one, Shard):
        here.require(a.is_shard(one.dim) and not a.is_shard(one.dim + 1), "wrong-value", "dim", f"{one} does not know its dim")


def script_placements(case: Case) -> Script:
    one, other = case.placements("a")[0], case.placements("b")[0]
    due = one == other
    body = [f"a, b = {scripts.placement(one)}, {scripts.placement(other)}"]
    kinds = (isinstance(one, Replicate), isinstance(one, Partial))
    return scripts.compared(
        case, body, "(a == b, b == a, a.is_replicate(), a.is_partial())", dict.fromkeys(range(case.world), (due, due, *kinds))
    )


def draw_partition(limits: Limits) -> SearchStrategy[Case]:
    return draws.placed(
        "layout.partition", limits, kinds=("P", "R", "S"), reduce_ops=("sum", "avg", "min", "max"), dtypes=draws.FLOATS
    ).filter(lambda case: "P(" in case.text)


def check_partition(case: Case, here: Here) -> None:
    """What is distributed as pending reductions reduces to the tensor again."""
    x = given(case)
    got = distribute_tensor(here.tensor(x.full), here.mesh(x.layout.mesh), here.placements(x.layout.placements), src_data_rank=None)
    here.same_dtensor(got, x.full, "contributions", mesh=x.layout.mesh, placements=x.layout.placements, exact=False)


def script_partition(case: Case) -> Script:
    x = given(case)
    at = scripts.placements(x.layout.placements)
    body = [
        f"x = {scripts.tensor(x.full)}",
        f"mesh = {scripts.mesh(x.layout.mesh)}",
        f"d = distribute_tensor(x, mesh, {at}, src_data_rank=None)",
    ]
    made = scripts.holds(case, body, "d", x.full, x.layout)
    return Script(made.stages, made.imports, made.constants, tolerance=1e-4)


LAWS = (
    Law(
        id="layout.from-local",
        clause="from_local with a global shape keeps each rank's tensor and its storage, and to_local gives it back.",
        source=f"{DOC}, DTensor.from_local and DTensor.to_local",
        check=check_from_local,
        script=script_from_local,
        control="layout.from-local mesh=2x2 x=5x6:S(0),P(sum)",
        planted="from_local_copies",
        draw=draw_from_local,
        draws=110,
        weight=0.6,
    ),
    Law(
        id="layout.infer",
        clause="Without a global shape, from_local computes it from the local shape as if all shards were even.",
        source=f"{DOC}, DTensor.from_local (shape, stride)",
        check=check_infer,
        script=script_infer,
        features=features_infer,
        control="layout.infer mesh=2x2 x=4x6:S(0),S(1)",
        planted="infer_ignores_second_mesh_dim",
        draw=draw_infer,
        draws=70,
        weight=0.4,
    ),
    Law(
        id="layout.run-check",
        clause="from_local with run_check gives replicas the data of the first rank, and refuses local tensors that disagree.",
        source=f"{DOC}, DTensor.from_local (run_check)",
        check=check_checked,
        script=script_checked,
        features=features_checked,
        control="layout.run-check mesh=2x2 x=4x6:S(0),R how=data",
        planted="run_check_broadcasts_along_first_dim",
        draw=draw_checked,
        sweep=sweep_checked,
        sweeps=10,
        draws=60,
        needs=("broadcast", "object_collectives"),
        weight=0.6,
    ),
    Law(
        id="layout.placement-equality",
        clause="Placements are equal exactly when kind, dim, split factor and reduction are; equal ones hash alike.",
        source=f"{DOC}, Placement, Shard, Replicate, Partial",
        check=check_placements,
        script=script_placements,
        control="layout.placement-equality a=_S(0,2) b=_S(0,3) world=2",
        planted="strided_equality_ignores_factor",
        sweep=sweep_placements,
        sweeps=136,
        weight=0.2,
    ),
    Law(
        id="layout.partition",
        clause="A tensor distributed as contributions to a sum, average, minimum or maximum reduces to itself.",
        source="torch.distributed.tensor.placement_types, docstring of Partial._partition_value",
        check=check_partition,
        script=script_partition,
        control="layout.partition mesh=2 x=5x6:P(sum)",
        planted="partition_keeps_whole_value",
        draw=draw_partition,
        draws=40,
        weight=0.3,
        tier="extended",
    ),
)
