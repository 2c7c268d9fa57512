"""Laws of redistributions between any placements: the local tensor of every rank is compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from torch.distributed.tensor import DTensor, Partial

from shardlaw.conformance import compat
from shardlaw.conformance.law.act import law
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Global, Of
from shardlaw.conformance.law.fields import Placements, Rank
from shardlaw.conformance.law.law import Law, Limits
from shardlaw.conformance.laws.shared import draws

DOC = "torch.distributed.tensor docs, DTensor.redistribute"


def draw_moves(
    *, kinds: tuple[str, ...] = ("R", "S", "_S", "P"), permuted: bool = True, **options: Any
) -> Callable[[Limits], st.SearchStrategy[Case]]:
    """Redistributions from and to placements of these kinds; ``options``: see :func:`draws.redistribution_cases`."""

    def draw(limits: Limits) -> st.SearchStrategy[Case]:
        on = draws.meshes(limits, permuted=permuted)
        return draws.redistribution_cases(limits, on=on, kinds=kinds, targets=kinds, dtypes=limits.dtypes, **options)

    return draw


def draw_moves_to_values(
    dims: tuple[int, ...] = (1, 2, 3), **options: Any
) -> Callable[[Limits], st.SearchStrategy[Case]]:
    """Redistributions to replicas and shards, on meshes of ascending ranks."""

    def draw(limits: Limits) -> st.SearchStrategy[Case]:
        plain = {"on": draws.meshes(limits, dims=dims, permuted=False), "kinds": ("R", "S", "P"), "targets": ("R", "S")}
        return draws.redistribution_cases(limits, **{**plain, **options})

    return draw


@law(
    "redistribute.local",
    source=DOC,
    control="mesh=2x2 x=5x3:S(0),R to=S(1),R",
    draw=draw_moves(reduce_ops=("sum", "max", "avg", "min"), memories=("plain", "transposed")),
    draws=420,
    # strided shards along either dim of a mesh, whose other dim shards nothing or another tensor dim; a nested shard
    # whose outer mesh dim is another
    cases=(
        "mesh=2x2 x=16:R,_S(0,2) to=R,S(0)",
        "mesh=2x2 x=12x3:_S(0,3),R to=S(0),R",
        "mesh=2x2 x=16:R,S(0) to=R,_S(0,2)",
        "mesh=2x2 x=7x5:S(1),_S(0,2) to=S(1),S(0)",
        "mesh=2x2 x=5x7:_S(1,2),P(sum) to=S(1),R",
        "mesh=2x1x2 x=8x3:S(0),R,S(0) to=R,S(0),S(0)",
    ),
    weight=3.0,
)
def local(x: DTensor, to: Placements):
    """After a redistribution each rank has the slice that the target placements name, and the source is unchanged."""
    moved = x.redistribute(placements=to)
    return {"local": moved, "input": x.to_local()}


@local.due
def _(x: Global, to, rank: Rank):
    return {"local": x.under(to), "input": x.due_local(rank)}


@law(
    "redistribute.path",
    source=DOC,
    control="mesh=2x2 x=5x6:S(0),S(1) via=S(1),R to=S(0),S(0)",
    draw=draw_moves(permuted=False, via=True),
    draws=160,
    sweep=draws.permuted_mesh_cases("S(0)", via="R", to="S(1)"),
    sweeps=3,
    weight=1.5,
)
def path(x: DTensor, via: Placements, to: Placements):
    """A redistribution through other placements gives what the direct one gives."""
    between = x.redistribute(placements=via)
    return {"between": between, "local": between.redistribute(placements=to)}


@path.due
def _(x: Global, via, to):
    return {"between": x.under(via), "local": x.under(to)}


@law(
    "redistribute.back",
    source=DOC,
    control="mesh=2x2 x=5x6:S(0),S(1) to=R,S(0)",
    draw=draw_moves(kinds=("R", "S", "_S"), permuted=False),
    draws=120,
    sweep=draws.permuted_mesh_cases("S(1)", to="S(0)"),
    sweeps=3,
    weight=1.2,
)
def back(x: DTensor, to: Placements):
    """A tensor that is redistributed and redistributed back has the same bits on every rank as before."""
    there = x.redistribute(placements=to)
    return {"there": there, "back": there.redistribute(placements=x.placements)}


@back.due
def _(x: Global, to):
    return {"there": x.under(to), "back": x}


def under_target(x: Global, to):
    """The due function of an act that redistributes ``x`` to the placements ``to``."""
    return x.under(to)


def moving_law(id: str, clause: str, source: str = DOC, **record: Any) -> Law:
    """A law with the act and due function of ``redistribute.local``, for other cases."""
    (act,) = local.acts
    made = law(id, clause=clause, source=source, **record)(act.function)
    made.due(act.due)
    return made


def draw_same(limits: Limits) -> st.SearchStrategy[Case]:
    on = draws.meshes(limits, permuted=False)
    return draws.tensor_cases(limits, on=on, kinds=("R", "S", "_S", "P"), reduce_ops=("sum", "max", "avg"))


@law(
    "redistribute.same",
    source=DOC,
    control="mesh=2x2 x=5x6:S(0),P(sum)",
    draw=draw_same,
    draws=60,
    sweep=draws.permuted_mesh_cases("S(0)"),
    sweeps=3,
    weight=0.4,
)
def same(x: DTensor):
    """A redistribution to the placements that a tensor has runs no collective and changes nothing."""
    with compat.CommDebugMode() as traffic:
        moved = x.redistribute(placements=x.placements)
    return {"collectives": traffic.get_total_counts(), "local": moved}


@same.due
def _(x: Global):
    return {"collectives": 0, "local": x}


def draw_full(limits: Limits) -> st.SearchStrategy[Case]:
    ops = ("sum", "max", "avg", "min", "product")
    on, kinds = draws.meshes(limits, permuted=False), ("R", "S", "_S", "P")
    return draws.tensor_cases(limits, on=on, kinds=kinds, reduce_ops=ops, memories=("plain", "transposed"))


@law(
    "redistribute.full",
    source="torch.distributed.tensor docs, DTensor.full_tensor",
    control="mesh=2x2 x=5x6:S(0),P(sum)",
    draw=draw_full,
    draws=150,
    sweep=draws.permuted_mesh_cases("S(0)"),
    sweeps=3,
    weight=1.2,
)
def full(x: DTensor):
    """full_tensor returns the global tensor from any placements, with pending reductions done, contiguous if the local
    tensors are; on a rank outside the mesh it has no elements."""
    full = x.full_tensor()
    return {"type": type(full).__name__, "elements": full.numel(), "full": full, "contiguous": full.is_contiguous()}


@full.due
def _(x: Global, rank: Rank):
    inside = x.mesh.coord(rank) is not None
    contiguous = Of(True) if inside and x.memory == "plain" else ...
    elements = Of(x.full.numel() if inside else 0, "wrong-layout")
    return {"type": Of("Tensor"), "elements": elements, "full": x.full if inside else ..., "contiguous": contiguous}


@law(
    "redistribute.async",
    source=f"{DOC} (async_op)",
    control="mesh=2x2 x=5x6:S(0),S(1) to=R,S(1)",
    draw=draw_moves(permuted=False),
    draws=70,
    sweep=draws.permuted_mesh_cases("S(0)", to="R"),
    sweeps=3,
    weight=0.8,
)
def asynchronous(x: DTensor, to: Placements):
    """An asynchronous redistribution gives, once its result is used, the result of the synchronous one."""
    moved: Any = x.redistribute(placements=to, async_op=True)
    pending = any(isinstance(placement, Partial) for placement in to)
    return {"local": moved, "use": None if pending else (moved + moved).to_local()}


@asynchronous.due
def _(x: Global, to, rank: Rank):
    moved, doubled = x.under(to), x.holding(x.full + x.full).under(to)
    return {"local": moved, "use": None if moved.layout.has_partial() else doubled.due_local(rank)}
