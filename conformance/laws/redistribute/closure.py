"""Laws of what may be done to contributions: linear calls keep them, all others reduce them first, or refuse."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from hypothesis import strategies as st

from conformance import compat
from conformance.case import Case
from conformance.law import Law, Limits
from conformance.laws import draws, scripts
from conformance.laws.given import Given, given
from conformance.report.reproducer import Script
from reference.layout import Layout
from reference.placement import Partial, Placements, Replicate
from reference.tensors import TensorSpec
from strategies import shapes
from strategies.placements import placements

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from conformance.here import Here

DOC = "torch.distributed.tensor docs, Partial: the value of a DTensor is the reduction of its contributions"


@dataclass(frozen=True)
class Call:
    """A call on ``x``, on ``y`` that is placed as ``x`` is, and on ``r`` that is replicated where ``x`` is pending."""

    run: Callable[[Any, Any, Any], Any]
    text: str
    exact: bool = True


LINEAR = {
    "add": Call(lambda x, y, r: x + y, "x + y"),
    "sub": Call(lambda x, y, r: x - y, "x - y"),
    "twice": Call(lambda x, y, r: x + x, "x + x"),
    "weighted": Call(lambda x, y, r: torch.add(x, y, alpha=-2), "torch.add(x, y, alpha=-2)"),
    "scale": Call(lambda x, y, r: x * 3, "x * 3"),
    "scale-float": Call(lambda x, y, r: 0.5 * x, "0.5 * x"),
    "scale-tensor": Call(lambda x, y, r: x * torch.tensor(-2), "x * torch.tensor(-2)"),
    "halve": Call(lambda x, y, r: x / 2, "x / 2"),
    "neg": Call(lambda x, y, r: -x, "-x"),
    "product": Call(lambda x, y, r: x * r, "x * r"),
    "product-left": Call(lambda x, y, r: r * x, "r * x"),
    "sum": Call(lambda x, y, r: x.sum(), "x.sum()"),
    "sum-dim": Call(lambda x, y, r: x.sum(-1), "x.sum(-1)"),
    "sum-keep": Call(lambda x, y, r: x.sum(0, keepdim=True), "x.sum(0, keepdim=True)"),
    "mean": Call(lambda x, y, r: x.mean(0), "x.mean(0)", exact=False),
    "double": Call(lambda x, y, r: x.to(torch.float64), "x.to(torch.float64)"),
    "transpose": Call(lambda x, y, r: x.transpose(0, -1), "x.transpose(0, -1)"),
    "unsqueeze": Call(lambda x, y, r: x.unsqueeze(0), "x.unsqueeze(0)"),
    "stack": Call(lambda x, y, r: torch.stack([x, y]), "torch.stack([x, y])"),
    "affine": Call(lambda x, y, r: x + r, "x + r", exact=False),  # r is divided among the ranks
    "affine-left": Call(lambda x, y, r: r - x, "r - x", exact=False),
    "shift": Call(lambda x, y, r: x + 1, "x + 1"),
    "shift-left": Call(lambda x, y, r: 1 - x, "1 - x"),
}
# what leaves a sum or an average pending without any collective
KEEPS = ("add", "sub", "twice", "scale", "scale-float", "halve", "neg", "product", "double")
NONLINEAR = {
    "product": Call(lambda x, y, r: x * y, "x * y"),
    "square": Call(lambda x, y, r: x * x, "x * x"),
    "power": Call(lambda x, y, r: x**2, "x ** 2"),
    "relu": Call(lambda x, y, r: x.relu(), "x.relu()"),
    "abs": Call(lambda x, y, r: x.abs(), "x.abs()"),
    "exp": Call(lambda x, y, r: (x / 64).exp(), "(x / 64).exp()", exact=False),
    "positive": Call(lambda x, y, r: x > 0, "x > 0"),
    "compare": Call(lambda x, y, r: x >= y, "x >= y"),
    "equal": Call(lambda x, y, r: x == r, "x == r"),
    "to-int": Call(lambda x, y, r: x.to(torch.int32), "x.to(torch.int32)"),
    "to-bool": Call(lambda x, y, r: x.to(torch.bool), "x.to(torch.bool)"),
    "round": Call(lambda x, y, r: x.round(), "x.round()"),
    "floor": Call(lambda x, y, r: x.floor(), "x.floor()"),
    "sign": Call(lambda x, y, r: x.sign(), "x.sign()"),
    "clamp": Call(lambda x, y, r: x.clamp(-2, 3), "x.clamp(-2, 3)"),
    "maximum": Call(lambda x, y, r: torch.maximum(x, r), "torch.maximum(x, r)"),
    "minimum": Call(lambda x, y, r: torch.minimum(x, y), "torch.minimum(x, y)"),
    "where": Call(lambda x, y, r: torch.where(x > 0, x, r), "torch.where(x > 0, x, r)"),
    "amax": Call(lambda x, y, r: x.amax(0), "x.amax(0)"),
    "amin": Call(lambda x, y, r: x.amin(0), "x.amin(0)"),
    "remainder": Call(lambda x, y, r: torch.remainder(x, 3), "torch.remainder(x, 3)"),
    "sum-abs": Call(lambda x, y, r: x.sum(0).abs(), "x.sum(0).abs()"),
    "isfinite": Call(lambda x, y, r: torch.isnan(x), "torch.isnan(x)"),
}
MONOTONE = (
    "add",
    "sub",
    "twice",
    "scale",
    "neg",
    "halve",
    "product",
    "affine",
    "affine-left",
    "shift",
    "shift-left",
    "sum",
    "mean",
    "double",
)
EXTREME = {
    **{name: NONLINEAR[name] for name in NONLINEAR if name not in ("remainder", "isfinite", "product")},
    **{name: LINEAR[name] for name in (*MONOTONE, "double")},
    "scale-minus": Call(lambda x, y, r: x * -2, "x * -2"),
    "scale-zero": Call(lambda x, y, r: x * 0, "x * 0"),
    "neg-twice": Call(lambda x, y, r: x.neg().neg(), "x.neg().neg()"),
    "neg-relu": Call(lambda x, y, r: x.neg().relu(), "x.neg().relu()"),
    "times": NONLINEAR["product"],
}  # fmt: skip


def drawing(law: str, calls: tuple[str, ...], ops: tuple[str, ...], fills: tuple[str, ...]) -> Callable[[Limits], SearchStrategy[Case]]:
    """Cases of a tensor with a pending reduction and a call on it."""

    def draw(limits: Limits) -> SearchStrategy[Case]:
        mesh_drawn, shape_drawn = (
            st.sampled_from(draws.meshes(limits, tables=False, outside=False, least=2)),
            shapes(min_dims=1, min_size=1),
        )
        call_drawn, op_drawn, fill_drawn = st.sampled_from(calls), st.sampled_from(ops), st.sampled_from(fills)

        @st.composite
        def case(draw: st.DrawFn) -> Case:
            mesh, shape, op = draw(mesh_drawn), draw(shape_drawn), draw(op_drawn)
            free = draw(placements(mesh, len(shape), kinds=("P", "S", "R"), reduce_ops=(op,)))
            at = draw(st.integers(0, mesh.ndim - 1))
            placed = (*free[:at], Partial(op), *free[at + 1 :])
            return Case.of(
                law, mesh=mesh, x=TensorSpec(shape, placed, fill=draw(fill_drawn)), call=draw(call_drawn), seed=draw(draws.seeds())
            )

        return case()

    return draw


def operands(case: Case) -> tuple[Given, Given, Given]:
    """``x``; ``y``, placed alike and of other values; ``r``, of other values too, that nothing is pending of."""
    x = given(case)
    whole: Placements = tuple(Replicate() if isinstance(p, Partial) else p for p in x.layout.placements)

    def other(seed: int, at: Placements) -> Given:
        full = TensorSpec(x.spec.shape, at, fill="small").build(seed)
        return Given(x.spec.placed(at), full, x.layout.replace(at), seed)

    return x, other(case.seed + 1, x.layout.placements), other(case.seed + 2, whole)


def _checked(calls: dict[str, Call]) -> Callable[[Case, Here], None]:
    def check(case: Case, here: Here) -> None:
        """Whatever the result claims to be, it denotes the call on the value, not on the contributions."""
        given_ones = operands(case)
        call = calls[case.get("call")]
        got = call.run(*(one.dtensor(here) for one in given_ones))
        here.same_dtensor(got, call.run(*(one.full for one in given_ones)), "value", mesh=given_ones[0].layout.mesh, exact=call.exact)

    return check


def _scripted(calls: dict[str, Call]) -> Callable[[Case], Script]:
    def script(case: Case) -> Script:
        used = _sources(case, call := calls[case.get("call")])
        want = call.run(*(one.full for one in operands(case)))
        replicated = Layout(tuple(want.shape), case.mesh(), (Replicate(),) * case.mesh().ndim)
        result = f"({call.text}).redistribute(placements={scripts.placements(replicated.placements)})"
        return scripts.holds(case, used[1], result, want, replicated, constants=used[0])

    return script


def _sources(case: Case, call: Call) -> tuple[list[str], list[str]]:
    """Constants and statements for the operands that the call names."""
    constants: list[str] = []
    body: list[str] = []
    for name, one in zip("xyr", operands(case), strict=True):
        if name == "x" or re.search(rf"\b{name}\b", call.text):
            more, lines = scripts.source(one, case.world, name)
            constants += more
            body += lines[len(body) > 0 :]
    return constants, body


def check_keeps(case: Case, here: Here) -> None:
    """What is linear in the contributions is done to them where they are: no collective, and the reduction stays pending."""
    x, y, r = operands(case)
    call = LINEAR[case.get("call")]
    given_ones = [one.dtensor(here) for one in (x, y, r)]
    with compat.name("CommDebugMode")() as traffic:
        got = call.run(*given_ones)
    here.require(traffic.get_total_counts() == 0, "wrong-value", "traffic", "collectives for nothing", 0, dict(traffic.get_comm_counts()))
    want = call.run(x.full, y.full, r.full)
    here.same_dtensor(got, want, "kept", mesh=x.layout.mesh, placements=x.layout.placements, exact=call.exact)


def script_keeps(case: Case) -> Script:
    call = LINEAR[case.get("call")]
    constants, body = _sources(case, call)
    body += ["with CommDebugMode() as traffic:", f"    got = {call.text}"]
    at = scripts.placements(given(case).layout.placements)
    lines = [*body, f"return (0, {at}), (traffic.get_total_counts(), list(got.placements))"]
    return scripts.script(lines, world=case.world, constants=constants)


def features_of_call(case: Case) -> set[str]:
    return {"reused"} if case.get("call") in ("twice", "square", "where") else set()


LAWS = (
    Law(
        id="redistribute.linear",
        clause="Sums, scalings and other linear and affine maps of a pending sum or average denote the map of its value.",
        source=DOC,
        check=_checked(LINEAR),
        script=_scripted(LINEAR),
        features=features_of_call,
        control="redistribute.linear mesh=2x2 x=5x3:P(sum),S(0) call=affine",
        planted="partition_keeps_whole_value",
        draw=drawing("redistribute.linear", tuple(LINEAR), ("sum", "avg"), ("distinct", "distinct", "small", "unit", "zeros")),
        draws=29,
        weight=1.0,
    ),
    Law(
        id="redistribute.linear-kept",
        clause="A linear map of a pending sum or average is done to the contributions, without any collective.",
        source="torch.distributed.tensor._ops._pointwise_ops: linear pointwise ops keep Partial",
        check=check_keeps,
        script=script_keeps,
        features=features_of_call,
        control="redistribute.linear-kept mesh=2x2 x=5x3:P(sum),S(0) call=scale",
        planted="scaling_reduces_first",
        draw=drawing("redistribute.linear-kept", KEEPS, ("sum", "avg"), ("distinct",)),
        draws=18,
        weight=0.3,
        tier="advisory",
    ),
    Law(
        id="redistribute.nonlinear",
        clause="What is not linear reduces pending contributions first, or refuses; it is never done to the contributions.",
        source=DOC,
        check=_checked(NONLINEAR),
        script=_scripted(NONLINEAR),
        features=features_of_call,
        control="redistribute.nonlinear mesh=2x2 x=5x3:P(sum),S(0) call=product",
        planted="relu_of_each_contribution",
        draw=drawing("redistribute.nonlinear", tuple(NONLINEAR), ("sum", "sum", "avg", "product"), ("distinct", "small", "unit", "zeros")),
        draws=29,
        weight=1.0,
        refusal="allowed",
    ),
    Law(
        id="redistribute.extreme",
        clause="A pending maximum or minimum passes what is monotone, turns into the other by what is antitone, is done before all else.",
        source=DOC,
        check=_checked(EXTREME),
        script=_scripted(EXTREME),
        features=features_of_call,
        control="redistribute.extreme mesh=2x2 x=5x3:P(max),S(0) call=neg",
        planted="negated_maximum_stays_maximum",
        draw=drawing("redistribute.extreme", tuple(EXTREME), ("max", "min"), ("distinct", "distinct", "small", "unit", "zeros")),
        draws=29,
        weight=1.0,
        refusal="allowed",
    ),
)
