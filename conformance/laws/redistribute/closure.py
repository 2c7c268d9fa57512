"""Laws of ops on pending reductions: linear ops may apply to the contributions, all others reduce them first or refuse;
and of lookups in an embedding table that is sharded by rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal

from hypothesis import strategies as st
from torch.distributed.tensor import DTensor
from torch.nn import functional

from shardlaw.conformance import compat
from shardlaw.conformance.law.act import fields, law
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Claimed, Global
from shardlaw.conformance.law.fields import Placements
from shardlaw.conformance.law.law import Law, Limits
from shardlaw.conformance.laws.redistribute.values import draw_pending
from shardlaw.conformance.laws.shared import draws
from shardlaw.conformance.laws.shared.derived import CallField, DerivedField, operand
from shardlaw.reference.placement import Partial, Placement, Replicate, Shard
from shardlaw.reference.tensors import TensorSpec
from shardlaw.strategies import shapes

DOC = "torch.distributed.tensor docs, Partial: the value of a DTensor is the reduction of its contributions"

# calls on x, on y with the same placements, and on r, which is replicated where x is pending
LINEAR = {
    "add": "x + y",
    "sub": "x - y",
    "twice": "x + x",
    "weighted": "torch.add(x, y, alpha=-2)",
    "scale": "x * 3",
    "scale-float": "0.5 * x",
    "scale-tensor": "x * torch.tensor(-2)",
    "halve": "x / 2",
    "neg": "-x",
    "product": "x * r",
    "product-left": "r * x",
    "sum": "x.sum()",
    "sum-dim": "x.sum(-1)",
    "sum-keep": "x.sum(0, keepdim=True)",
    "mean": "x.mean(0)",
    "double": "x.to(torch.float64)",
    "transpose": "x.transpose(0, -1)",
    "unsqueeze": "x.unsqueeze(0)",
    "stack": "torch.stack([x, y])",
    "affine": "x + r",  # r is divided among the ranks
    "affine-left": "r - x",
    "shift": "x + 1",
    "shift-left": "1 - x",
}
# calls that keep a sum or an average pending, without a collective
KEEPS = ("add", "sub", "twice", "scale", "scale-float", "halve", "neg", "product", "double")
NONLINEAR = {
    "product": "x * y",
    "square": "x * x",
    "power": "x**2",
    "relu": "x.relu()",
    "abs": "x.abs()",
    "exp": "(x / 64).exp()",
    "positive": "x > 0",
    "compare": "x >= y",
    "equal": "x == r",
    "to-int": "x.to(torch.int32)",
    "to-bool": "x.to(torch.bool)",
    "round": "x.round()",
    "floor": "x.floor()",
    "sign": "x.sign()",
    "clamp": "x.clamp(-2, 3)",
    "maximum": "torch.maximum(x, r)",
    "minimum": "torch.minimum(x, y)",
    "where": "torch.where(x > 0, x, r)",
    "amax": "x.amax(0)",
    "amin": "x.amin(0)",
    "remainder": "torch.remainder(x, 3)",
    "sum-abs": "x.sum(0).abs()",
    "isfinite": "torch.isnan(x)",
}
MONOTONE = ("add", "sub", "twice", "scale", "neg", "halve", "product", "affine", "affine-left", "shift", "shift-left",
            "sum", "mean", "double")  # fmt: skip
EXTREME = {
    **{name: NONLINEAR[name] for name in NONLINEAR if name not in ("remainder", "isfinite", "product")},
    **{name: LINEAR[name] for name in MONOTONE},
    "scale-minus": "x * -2",
    "scale-zero": "x * 0",
    "neg-twice": "x.neg().neg()",
    "neg-relu": "x.neg().relu()",
    "times": NONLINEAR["product"],
}
ROUNDING = ("mean", "affine", "affine-left", "exp")
CALLS = {
    f"redistribute.{name}": CallField("x, y, r", calls, ROUNDING)
    for name, calls in {"linear": LINEAR, "linear-kept": LINEAR, "nonlinear": NONLINEAR, "extreme": EXTREME}.items()
}


class LawCallField(CallField):
    """The name of a call of the case's law."""

    def __init__(self) -> None:
        super().__init__("x, y, r", {**LINEAR, **NONLINEAR, **EXTREME})

    def read(self, case: Case, name: str) -> Any:
        return CALLS[case.law].read(case, name)


def _second_operand(name: str, seed: int) -> DerivedField:
    """The operand ``y`` or ``r``, with other values than ``x``; ``None`` if the call does not use it."""

    def read_case(case: Case) -> Global | None:
        if not re.search(rf"\b{name}\b", CALLS[case.law].read(case, "call").text):
            return None
        spec = case.tensor("x")
        at = (Replicate() if name == "r" and isinstance(p, Partial) else p for p in spec.placements or ())
        return Global.of(TensorSpec(spec.shape, tuple(at), fill="small"), case.mesh(), case.seed + seed)

    return DerivedField(read_case)


Call = Annotated[Callable[..., Any], LawCallField()]
Y = Annotated[DTensor, _second_operand("y", 1)]
R = Annotated[DTensor, _second_operand("r", 2)]


def draw_calls(
    calls: Iterable[str], ops: tuple[str, ...], fills: tuple[str, ...] = ("distinct",)
) -> Callable[[Limits], st.SearchStrategy[Case]]:
    """Cases of a tensor with a pending reduction and a call on it."""

    @st.composite
    def case(draw: st.DrawFn, limits: Limits) -> Case:
        mesh = draw(st.sampled_from(draws.meshes(limits, permuted=False, submeshes=False, min_size=2)))
        shape, op = draw(shapes(min_dims=1, min_size=1)), draw(st.sampled_from(ops))
        x = TensorSpec(shape, draw_pending(draw, mesh, len(shape), op), fill=draw(st.sampled_from(fills)))
        return fields(mesh=mesh, x=x, call=draw(st.sampled_from(tuple(calls))), seed=draw(draws.seeds()))

    return case


def features_of_call(case: Case) -> set[str]:
    return {"reused"} if case.get("call") in ("twice", "square", "where") else set()


def apply_call(x: DTensor, y: Y, r: R, call: Call):
    return call(x, y, r)


def value_due(x: Global, y, r, call):
    """With any placements, the result has the value of the call on the values of the operands, not on contributions."""
    operands = (operand and operand.full for operand in (x, y, r))
    return Claimed(call(*operands), x.mesh, call.exact)


def pending_law(id: str, clause: str, **record: Any) -> Law:
    """A law of calls on a tensor with a pending reduction."""
    made = law(id, clause=clause, source=DOC, features=features_of_call, draws=29, **record)(apply_call)
    made.due(value_due)
    return made


@law(
    "redistribute.linear-kept",
    source="torch.distributed.tensor._ops._pointwise_ops: linear pointwise ops keep Partial",
    control="mesh=2x2 x=5x3:P(sum),S(0) call=scale",
    features=features_of_call,
    draw=draw_calls(KEEPS, ("sum", "avg")),
    draws=18,
    weight=0.3,
    tier="advisory",
)
def linear_kept(x: DTensor, y: Y, r: R, call: Call):
    """A linear op on a pending sum or average applies to the contributions, without a collective."""
    with compat.CommDebugMode() as traffic:
        mapped = call(x, y, r)
    return {"collectives": traffic.get_total_counts(), "kept": mapped}


@linear_kept.due
def _(x: Global, y, r, call):
    return {"collectives": 0, "kept": x.holding(value_due(x, y, r, call).full)}


USES = ("twice", "both", "apart", "then")


@st.composite
def draw_masked(draw: st.DrawFn, limits: Limits) -> Case:
    mesh = draw(st.sampled_from(draws.meshes(limits, permuted=False, submeshes=False, min_size=2)))
    index = draw(shapes(min_dims=1, max_dims=2, min_size=1))
    rows, columns = (draw(st.sampled_from((2, 3, 5, 7, 4, 8, 1, 6))) for _ in range(2))
    table, at, rowwise = list[Placement](), list[Placement](), draw(st.integers(0, mesh.ndim - 1))
    for dim in range(mesh.ndim):
        kind = "rows" if dim == rowwise else draw(st.sampled_from(["none", "batch", "columns"]))
        table.append({"rows": Shard(0), "columns": Shard(1)}.get(kind, Replicate()))
        unsharded: list[Placement] = (
            [Replicate(), Replicate(), Partial("sum"), Partial("max")] if kind == "rows" else [Replicate()]
        )
        at.append(Shard(draw(st.integers(0, len(index) - 1))) if kind == "batch" else draw(st.sampled_from(unsharded)))
    targets: list[Placement] = [Replicate(), *map(Shard, range(len(index) + 1))]
    out = tuple(draw(st.sampled_from(targets)) for _ in range(mesh.ndim))
    w, i = TensorSpec((rows, columns), tuple(table)), TensorSpec(index, tuple(at), "int64", f"index{rows}")
    use = draw(st.sampled_from(("once", "once", *USES)))
    return fields(mesh=mesh, w=w, i=i, out=out, use=use, seed=draw(draws.seeds()))


def features_masked(case: Case) -> set[str]:
    index, found = case.tensor("i"), {"derived", *(["reused"] if case.get("use") == "twice" else [])}
    sides = case.mesh().shape, case.tensor("w").placements or (), index.placements or (), case.placements("out")
    by_dim = [*zip(*sides, strict=True)]
    rows = {Shard(dim) for dim in range(len(index.shape))}
    # shards that are nested in one of these are gathered too
    targets = {to for size, table, _, to in by_dim if table == Shard(0) and size > 1}
    others = [(at, to) for _, table, at, to in by_dim if table != Shard(0)]
    if targets and any(not rows.isdisjoint((at, to)) and (at != to or at in targets) for at, to in others):
        found.add("masked-rows-moved")
    return found


def _second_indices(case: Case) -> Global | None:
    """The indices of a second lookup: those of the first (``both``), or others of the same shape."""
    seeds = {"both": case.seed, "apart": case.seed + 1, "then": case.seed + 1}
    return operand(case.with_fields(seed=seeds[case.get("use")]), "i") if case.get("use") in seeds else None


@law(
    "redistribute.masked",
    source="torch.distributed.tensor.placement_types, docstring of _MaskPartial: row-wise sharded embedding",
    control="mesh=2 w=5x3:S(0) i=4:R:int64:index5 out=R use=once",
    features=features_masked,
    draw=draw_masked,
    draws=48,
    # the reduction of a lookup, of any kind, must drop its mask: the next lookup has another
    cases=[
        f"mesh=2 w=5x4:S(0) i={shape}:R:int64:index5 out={out} use=then"
        for shape, out in (("4", "R"), ("4", "S(0)"), ("6", "S(1)"), ("4x3", "S(1)"))
    ],
    needs=("all_reduce",),
    weight=0.8,
)
def masked(
    w: DTensor,
    i: DTensor,
    j: Annotated[DTensor, DerivedField(_second_indices)],
    out: Placements,
    use: Literal["once", "twice", "both", "apart", "then"],
):
    """A lookup in an embedding table that is sharded by rows gives, once reduced, the right row for every index."""
    lookup: Any = functional.embedding
    found: list[Any] = [lookup(i, w)]
    if use == "then":
        return [found[0].redistribute(placements=out), lookup(j, w).redistribute(placements=out)]
    if use == "twice":
        found *= 2
    elif use != "once":
        try:
            found.append(lookup(j, w))
        except RuntimeError:
            found[0].redistribute(placements=out)  # drops its mask, which would break later lookups
            raise
    return [rows.redistribute(placements=out) for rows in found]


@masked.due
def _(w: Global, i: Global, j, out, use):
    indices = {"once": [i], "twice": [i, i]}.get(use, [i, j])
    return [w.holding(functional.embedding(index.full, w.full)).under(out) for index in indices]


LAWS = (
    pending_law(
        "redistribute.linear",
        "Linear and affine ops on a pending sum or average give the value of the op on the reduced tensor.",
        control="mesh=2x2 x=5x3:P(sum),S(0) call=affine",
        draw=draw_calls(LINEAR, ("sum", "avg"), ("distinct", "distinct", "small", "unit", "zeros")),
    ),
    pending_law(
        "redistribute.nonlinear",
        "Nonlinear ops on a pending reduction reduce it first, or are refused; they never apply to the contributions.",
        control="mesh=2x2 x=5x3:P(sum),S(0) call=product",
        draw=draw_calls(NONLINEAR, ("sum", "sum", "avg", "product"), ("distinct", "small", "unit", "zeros")),
        refusal="allowed",
    ),
    pending_law(
        "redistribute.extreme",
        "Ops on a pending maximum or minimum give the value of the op on the reduced tensor: increasing ops keep the "
        "reduction, decreasing ops swap maximum and minimum, all others reduce first.",
        control="mesh=2x2 x=5x3:P(max),S(0) call=neg",
        draw=draw_calls(EXTREME, ("max", "min"), ("distinct", "distinct", "small", "unit", "zeros")),
        refusal="allowed",
    ),
)
