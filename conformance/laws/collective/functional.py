"""Laws of functional collectives: each gives a new tensor, which any use waits for, and leaves its input as it was.

Those with a gradient give the gradient of the whole: what a member's input adds to what all members got.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from conformance import compat
from conformance.case import Case
from conformance.law import Law, Limits
from conformance.laws import scripts
from conformance.laws.collective import scripts as texts
from conformance.laws.collective.calls import Ask, members, numbers, placed, team
from conformance.laws.collective.draws import drawn, features, one_in
from conformance.report.reproducer import Script
from reference import collective
from reference.mesh import Mesh
from reference.tensors import TensorSpec

if TYPE_CHECKING:
    from conformance.here import Here

SOURCE = "torch.distributed._functional_collectives, docstring of "
Row = list[torch.Tensor]


@dataclass(frozen=True)
class Made:
    """One functional collective of a case: what each member gives and must get, lists where ``coalesced``, and its arguments between the
    tensor and the group, the same for all members or, in ``own``, one list each. ``gradients`` undo it on what comes back."""

    given: list[Row]
    wanted: list[Row]
    arguments: list[Any]
    own: list[list[Any]] | None = None
    gradients: Callable[[list[torch.Tensor]], list[torch.Tensor]] | None = None


def dim_of(case: Case) -> int:
    return case.integer("dim", 0)


def _tensors(ask: Ask, turn: int = 0) -> Row:
    return [ask.given(at + turn * ask.size) for at in range(ask.size)]


def _rows(row: Row) -> list[Row]:
    return [[value] for value in row]


def _all_reduce(case: Case, ask: Ask) -> Made:
    given = [ask.added(at) for at in range(ask.size)]
    return Made(_rows(given), _rows(collective.all_reduce(given, ask.op)), [ask.op])


def _broadcast(case: Case, ask: Ask) -> Made:
    given = _tensors(ask)
    return Made(_rows(given), _rows(collective.broadcast(given, ask.root)), [ask.root])


def _permute(case: Case, ask: Ask) -> Made:
    given, to = _tensors(ask), list(numbers(case.get("to-position")))
    return Made(_rows(given), _rows(collective.permuted(given, to)), [to])


def _all_gather(case: Case, ask: Ask) -> Made:
    given, dim = _tensors(ask), dim_of(case)

    def back(upstream: list[torch.Tensor]) -> list[torch.Tensor]:
        return collective.reduce_scatter([list(value.chunk(ask.size, dim)) for value in upstream], "sum")

    return Made(_rows(given), [[collective.joined(given, dim)] for _ in given], [dim], gradients=back)


def _reduce_scatter(case: Case, ask: Ask) -> Made:
    dim = dim_of(case)
    rows = [[ask.added(at, to) for to in range(ask.size)] for at in range(ask.size)]

    def back(upstream: list[torch.Tensor]) -> list[torch.Tensor]:
        return [collective.joined(upstream, dim) for _ in upstream]

    given = [[collective.joined(row, dim)] for row in rows]
    return Made(given, _rows(collective.reduce_scatter(rows, ask.op)), [ask.op, dim], gradients=back)


def _all_to_all(case: Case, ask: Ask) -> Made:
    table = [list(row) for row in ask.splits] or [[ask.shape[0]] * ask.size for _ in range(ask.size)]
    turned = collective.all_to_all(table)
    given = [
        torch.cat([ask.given(at * ask.size + to, (table[at][to], *ask.shape[1:])) for to in range(ask.size)]) for at in range(ask.size)
    ]
    own = [[turned[at], table[at]] if ask.splits else [None, None] for at in range(ask.size)]

    def back(upstream: list[torch.Tensor]) -> list[torch.Tensor]:
        return collective.all_to_all_single(upstream, turned)

    return Made(_rows(given), _rows(collective.all_to_all_single(given, table)), [], own, back)


def _twice(make: Callable[[Case, Ask], Made]) -> Callable[[Case, Ask], Made]:
    """Two of them in one call, on tensors of different values."""

    def both(case: Case, ask: Ask) -> Made:
        one, other = make(case, ask), make(case, Ask.of(case, ask.name, ask.size, 1))
        last = one.arguments[-1:]
        arguments = [*one.arguments[:-1], last * 2] if make is _reduce_scatter else [] if make is _all_gather else one.arguments
        return Made(
            [a + b for a, b in zip(one.given, other.given, strict=True)],
            [a + b for a, b in zip(one.wanted, other.wanted, strict=True)],
            arguments,
        )

    return both


@dataclass(frozen=True)
class Variant:
    """A functional collective under its names, newest first."""

    names: tuple[str, ...]
    make: Callable[[Case, Ask], Made]
    needs: str
    clause: str
    control: str
    planted: str
    ways: dict[str, Any]
    coalesced: bool = False
    backward: bool = False
    corner: str = ""

    def function(self) -> tuple[str, Any]:
        """Its name in this version of torch, and itself."""
        module = compat.name("functional")
        found = next((name for name in self.names if hasattr(module, name)), "")
        return found, getattr(module, found, None)


def check(case: Case, here: Here) -> None:
    """What comes back is what the list specification says; what was given is as it was; gradients are those of the whole."""
    variant = VARIANTS[case.law]
    on = team(case, here)
    _, function = variant.function()
    if function is None:
        here.reject(f"this version of torch has none of {', '.join(variant.names)}")
    if on.position is None:
        return
    ask = Ask.of(case, variant.names[0], len(on.ranks))
    made, at = variant.make(case, ask), on.position
    given = [placed(here, x, ask.memory).requires_grad_(variant.backward) for x in made.given[at]]
    arguments = made.own[at] if made.own else made.arguments
    group = on.group or dist.group.WORLD
    got = function(given if variant.coalesced else given[0], *arguments, group)
    got = list(got) if variant.coalesced else [got]
    exact = ask.op != "avg" or ask.size in (1, 2, 4, 8)
    for which, (value, want) in enumerate(zip(got, made.wanted[at], strict=True)):
        here.same(value.clone(), want, "result", exact=exact, what=f"result {which}")
    for x, was in zip(given, made.given[at], strict=True):
        here.same(x, was, "input", what="input")
    if variant.backward and made.gradients is not None:
        upstream = _upstream(ask, made)
        torch.autograd.backward([got[0]], [here.tensor(upstream[at])])
        due, grad = made.gradients(upstream)[at], given[0].grad
        if here.require(grad is not None, "wrong-value", "gradient", "no gradient came back") and grad is not None:
            here.same(grad.clone(), due, "gradient", what="gradient")


def _upstream(ask: Ask, made: Made) -> Row:
    """What comes back to each member: other numbers for each, whose sums are exact."""
    return [ask.added(at, ask.size, tuple(want[0].shape)).contiguous() for at, want in enumerate(made.wanted)]


def script(case: Case) -> Script:
    variant, ranks = VARIANTS[case.law], members(case)
    ask = Ask.of(case, variant.names[0], len(ranks))
    made = variant.make(case, ask)
    constants = texts.table("GIVEN", dict(zip(ranks, made.given, strict=True)))
    body = [*texts.group(case), *texts.outsiders(case), "group, x = group or dist.group.WORLD, GIVEN[rank]"]
    body += ["x = list(x)" if variant.coalesced else "x = x[0].requires_grad_()" if variant.backward else "x = x[0]"]
    if made.own:
        constants += ["OWN = {", *(f"    {rank}: {own}," for rank, own in zip(ranks, made.own, strict=True)), "}"]
    passed = "*OWN[rank]" if made.own else ", ".join(map(repr, made.arguments))
    name = variant.function()[0] or variant.names[0]
    body.append(f"got = {name}({', '.join(filter(None, ('x', passed, 'group')))})")
    wanted, got = made.wanted, "[value.detach().clone() for value in got]" if variant.coalesced else "[got.detach().clone()]"
    if variant.backward and made.gradients is not None:
        upstream = _upstream(ask, made)
        constants += texts.table("UPSTREAM", dict(zip(ranks, upstream, strict=True)))
        body.append("got.backward(UPSTREAM[rank])")
        wanted = [[*want, due] for want, due in zip(wanted, made.gradients(upstream), strict=True)]
        got = "[got.detach().clone(), x.grad.clone()]"
    constants += texts.table("WANT", dict(zip(ranks, wanted, strict=True)))
    judged = f"return (WANT[rank], GIVEN[rank]), ({got}, x)" if variant.coalesced else f"return WANT[rank], {got}"
    whole = scripts.script([*body, judged], world=case.world, constants=constants)
    return Script(whole.stages, (*whole.imports, f"from torch.distributed._functional_collectives import {name}"), whole.constants)


def features_functional(case: Case) -> set[str]:
    variant = VARIANTS[case.law]
    more = {"several-dims"} if len(case.tensor("x").shape) > 1 else set()
    more |= ({"coalesced"} if variant.coalesced else set()) | ({"backward", "requires-grad"} if variant.backward else set())
    more |= {"along-later-dim"} if dim_of(case) else set()
    return features(case) | {"functional"} | more


def _dim(draw: st.DrawFn, mesh: Mesh) -> dict[str, Any]:
    return {"dim": 1 if draw(one_in(16)) else None}


def _to(draw: st.DrawFn, mesh: Mesh) -> dict[str, Any]:
    to = ".".join(map(str, draw(st.permutations(range(mesh.size)))))
    # of more than one dim: seldom, and of all ranks, so that an error is one of every rank
    wide = mesh.ranks == (0, 1) and draw(one_in(3))
    return {"to-position": to, **({"x": TensorSpec((2, 3)), "world": None} if wide else {})}


ALONG: dict[str, Any] = {"min_dims": 2, "extra": _dim, "expanded": False}
FLOAT: dict[str, Any] = {"floats": True}
VARIANTS = {
    f"collective.functional[{name}]": variant
    for name, variant in {
        "all_reduce": Variant(
            ("all_reduce",), _all_reduce, "all_reduce", "gives every member the reduction of all members' tensors",
            "mesh=2 x=5x3", "functional_reduces_by_maximum", {"reduces": True},
        ),
        "broadcast": Variant(
            ("broadcast",), _broadcast, "broadcast", "gives every member what the source has",
            "mesh=2 x=5x3 root=1", "functional_broadcast_from_first", {"root": True, "tables": False, "parts": False},
        ),
        "all_gather_tensor": Variant(
            ("all_gather_single", "all_gather_tensor"), _all_gather, "all_gather", "joins what all members have along a dim",
            "mesh=2 x=5x3 dim=1", "functional_gathers_along_first_dim", ALONG,
        ),
        "reduce_scatter_tensor": Variant(
            ("reduce_scatter_single", "reduce_scatter_tensor"), _reduce_scatter, "reduce_scatter",
            "gives the member at position i block i, along a dim, of the reduction", "mesh=2 x=5x3 dim=1",
            "functional_scatters_along_first_dim", {**ALONG, "reduces": True},
        ),
        "all_to_all_single": Variant(
            ("all_to_all_single",), _all_to_all, "all_to_all", "sends each member its rows, for splits of any sizes",
            "mesh=2 x=3x2 splits=1.2/0.3", "functional_exchange_sends_back",
            {"forms": ("joined",), "uneven": ("joined",), "uneven_one_in": 2, "splits": True, "min_dims": 1, "expanded": False},
        ),
        "permute_tensor": Variant(
            ("permute_tensor",), _permute, "all_to_all", "sends what member i has to the member that the list names",
            "mesh=3 x=5 to-position=1.2.0", "functional_permutes_backwards", {"extra": _to, "min_dims": 1, "max_dims": 1},
        ),
        "all_reduce_coalesced": Variant(
            ("all_reduce_coalesced",), _twice(_all_reduce), "all_reduce", "reduces several tensors, each as if alone",
            "mesh=2 x=5x3", "functional_coalesced_reversed", {"reduces": True}, coalesced=True,
        ),
        "all_gather_coalesced": Variant(
            ("all_gather_single_coalesced", "all_gather_into_tensor_coalesced"), _twice(_all_gather), "all_gather",
            "gathers several tensors, each as if alone", "mesh=2 x=5x3", "functional_coalesced_reversed", {"min_dims": 1}, coalesced=True,
        ),
        "reduce_scatter_coalesced": Variant(
            ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"), _twice(_reduce_scatter), "reduce_scatter",
            "reduces and scatters several tensors, each as if alone", "mesh=2 x=5x3", "functional_coalesced_reversed",
            {"min_dims": 2, "expanded": False, "reduces": True}, coalesced=True, corner="mesh=2 x=5x3 dim=1",
        ),
        "all_gather_autograd": Variant(
            ("all_gather_single_autograd", "all_gather_tensor_autograd"), _all_gather, "reduce_scatter",
            "joins along a dim, and gives back the sum of what came for each block", "mesh=2 x=5x3 dim=1",
            "functional_gradient_is_local", {**ALONG, **FLOAT}, backward=True,
        ),
        "reduce_scatter_autograd": Variant(
            ("reduce_scatter_single_autograd", "reduce_scatter_tensor_autograd"), _reduce_scatter, "reduce_scatter",
            "reduces blocks along a dim, and gives every member back what came for all blocks", "mesh=2 x=5x3 dim=1",
            "functional_gradient_is_local", {**ALONG, **FLOAT}, backward=True,
        ),
        "all_to_all_autograd": Variant(
            ("all_to_all_single_autograd",), _all_to_all, "all_to_all", "sends each member its rows, and their gradients back",
            "mesh=2 x=3x2 splits=1.2/0.3", "functional_gradient_is_local",
            {"forms": ("joined",), "uneven": ("joined",), "uneven_one_in": 1, "splits": True, "min_dims": 1, "expanded": False, **FLOAT},
            backward=True,
        ),
    }.items()
}  # fmt: skip


def _law(law_id: str, variant: Variant) -> Law:
    def draw(limits: Limits) -> SearchStrategy[Case]:
        return drawn(law_id, limits, works=False, outputs=False, **variant.ways)

    def sweep(limits: Limits) -> list[Case]:
        return [Case.parse(f"{law_id} {variant.corner or variant.control}")]

    return Law(
        id=law_id,
        clause=f"The functional {variant.names[-1]} {variant.clause}, and leaves its input as it was.",
        source=SOURCE + variant.names[-1],
        check=check,
        script=script,
        features=features_functional,
        control=f"{law_id} {variant.control}",
        planted=variant.planted,
        sweep=sweep,
        sweeps=1,
        draw=draw,
        draws=30,
        needs=tuple(dict.fromkeys((variant.needs, *(("all_gather",) if variant.backward else ()), "subgroups"))),
        weight=0.2,
    )


LAWS: Sequence[Law] = tuple(_law(law_id, variant) for law_id, variant in VARIANTS.items())
