"""Laws of functional collectives: each gives a new tensor, which any use waits for, and leaves its input as it was.

Those with a gradient give the gradient of the whole: what a member's input adds to what all members got.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from shardlaw.conformance import compat
from shardlaw.conformance.law import act
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.fields import Rank
from shardlaw.conformance.law.law import Law, Limits
from shardlaw.conformance.laws.collective import draws
from shardlaw.conformance.laws.collective.case_fields import ByRank, Group, members
from shardlaw.conformance.laws.collective.pieces import Ask, Row, alone, numbers
from shardlaw.reference import collective
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.tensors import TensorSpec

SOURCE = "torch.distributed._functional_collectives, docstring of "


@dataclass(frozen=True)
class Pieces:
    """One functional collective of a case: what each member gives and must get, and its arguments between the tensor
    and the group, one list each. ``back`` gives the gradients of what comes back to each member."""

    given: list[Row]
    wanted: list[Row]
    arguments: list[list[Any]]
    back: Callable[[Row], Row] | None = None

    def upstream(self, ask: Ask) -> Row:
        """What comes back to each member: other numbers for each, whose sums are exact."""
        return [ask.added(at, ask.size, tuple(want[0].shape)).contiguous() for at, want in enumerate(self.wanted)]


def _all_reduce(case: Case, ask: Ask) -> Pieces:
    given = [ask.added(at) for at in range(ask.size)]
    return Pieces(
        alone(given), alone(collective.all_reduce(given, ask.op)), [[ask.op]] * ask.size, collective.all_reduce
    )


def _broadcast(case: Case, ask: Ask) -> Pieces:
    given = [ask.given(at) for at in range(ask.size)]

    def back(upstream: Row) -> Row:
        total = collective.reduction(upstream, "sum")
        return [total if at == ask.root else torch.zeros_like(total) for at in range(ask.size)]

    return Pieces(alone(given), alone(collective.broadcast(given, ask.root)), [[ask.root]] * ask.size, back)


def _permute(case: Case, ask: Ask) -> Pieces:
    given, to = [ask.given(at) for at in range(ask.size)], list(numbers(case.get("to-position")))
    return Pieces(
        alone(given),
        alone(collective.permute(given, to)),
        [[to]] * ask.size,
        lambda upstream: [upstream[at] for at in to],
    )


def _all_gather(case: Case, ask: Ask) -> Pieces:
    dim = case.integer("dim", 0)
    given = [ask.given(at) for at in range(ask.size)]

    def back(upstream: Row) -> Row:
        return collective.reduce_scatter([list(value.chunk(ask.size, dim)) for value in upstream], "sum")

    return Pieces(alone(given), [[collective.concatenate(given, dim)]] * ask.size, [[dim]] * ask.size, back)


def _reduce_scatter(case: Case, ask: Ask) -> Pieces:
    dim = case.integer("dim", 0)
    rows = [[ask.added(at, to) for to in range(ask.size)] for at in range(ask.size)]
    given = [ask.joined(row, dim) for row in rows]
    wanted = collective.reduce_scatter(rows, ask.op)
    return Pieces(
        alone(given),
        alone(wanted),
        [[ask.op, dim]] * ask.size,
        lambda upstream: [collective.concatenate(upstream, dim)] * ask.size,
    )


def _all_to_all(case: Case, ask: Ask) -> Pieces:
    places = range(ask.size)
    table = [list(row) for row in ask.splits] or [[ask.shape[0]] * ask.size for _ in places]
    turned = collective.all_to_all(table)
    sent = [[ask.given(at * ask.size + to, (table[at][to], *ask.shape[1:])) for to in places] for at in places]
    given = [ask.joined(row) for row in sent]
    return Pieces(
        alone(given),
        alone(collective.all_to_all_single(given, table)),
        [[turned[at], table[at]] if ask.splits else [None, None] for at in places],
        lambda upstream: collective.all_to_all_single(upstream, turned),
    )


def _twice(make: Callable[[Case, Ask], Pieces]) -> Callable[[Case, Ask], Pieces]:
    """Two of them in one call, on tensors of different values, the second along the dim that ``then`` says."""

    def both(case: Case, ask: Ask) -> Pieces:
        other_case = case.with_fields(dim=case.get("then")) if "then" in case else case
        one, other = make(case, ask), make(other_case, Ask.of(case, ask.name, ask.size, 1))
        (*first, last), (*_, then) = one.arguments[0], other.arguments[0]
        known: dict[Any, Any] = {_all_gather: [], _reduce_scatter: [*first, [last, then]]}
        arguments = known.get(make, [*first, last])
        given, wanted = zip(one.given, other.given, strict=True), zip(one.wanted, other.wanted, strict=True)
        return Pieces([a + b for a, b in given], [a + b for a, b in wanted], [arguments] * ask.size)

    return both


@dataclass(frozen=True)
class Variant:
    """A functional collective under its names, newest first."""

    names: tuple[str, ...]
    make: Callable[[Case, Ask], Pieces]
    needs: str
    clause: str
    control: str
    ways: dict[str, Any]
    coalesced: bool = False
    backward: bool = False
    corners: tuple[str, ...] = ()


def made(case: Case) -> tuple[dict[int, Any], Any]:
    """What each rank gives, with which arguments, and what comes back to it; and the whole, for what is due."""
    ranks, variant = members(case), VARIANTS[case.law.partition("[")[2].removesuffix("]")]
    ask = Ask.of(case, variant.names[0], len(ranks))
    pieces = variant.make(case, ask)
    upstream: Any = pieces.upstream(ask) if variant.backward else [None] * ask.size
    gradients = pieces.back(upstream) if variant.backward and pieces.back else [None] * ask.size
    by_rank = dict(zip(ranks, zip(pieces.given, pieces.arguments, upstream, strict=True), strict=True))
    wanted = [[ask.rounded(want) for want in row] for row in pieces.wanted]
    return by_rank, dict(zip(ranks, zip(pieces.given, wanted, gradients, strict=True), strict=True))


Given = Annotated[Any, ByRank(made, "dim", "then", "to-position")]


def law_of(name: str, variant: Variant) -> Law:
    names, coalesced, backward = variant.names, variant.coalesced, variant.backward

    def draw(limits: Limits) -> SearchStrategy[Case]:
        return draws.calls(limits, works=False, outputs=False, **variant.ways)

    def features(case: Case) -> set[str]:
        more = {"coalesced": coalesced} | dict.fromkeys(("backward", "requires-grad"), backward)
        return draws.features_of(case) | {"functional"} | {name for name, held in more.items() if held}

    def called(x: Given, group: Group):
        xs, arguments, upstream = x
        function = getattr(compat.functional, next(name for name in names if hasattr(compat.functional, name)))
        xs = [one.requires_grad_(backward) for one in xs]
        got = function(xs if coalesced else xs[0], *arguments, group or dist.group.WORLD)
        found = {
            "result": [one.detach().clone() for one in (got if coalesced else [got])],
            "input": [one.detach() for one in xs],
        }
        if backward:
            got.backward(upstream)
            found["gradient"] = xs[0].grad
        return found

    law = act.law(
        f"collective.functional[{name}]",
        clause=f"The functional {names[-1]} {variant.clause}, and leaves its input as it was.",
        source=SOURCE + names[-1],
        control=variant.control,
        features=features,
        sweep=act.texts(*(variant.corners or (variant.control,))),
        sweeps=max(len(variant.corners), 1),
        draw=draw,
        draws=30,
        members=True,
        needs=tuple(dict.fromkeys((variant.needs, *(("all_gather",) if backward else ()), "subgroups"))),
        weight=0.2,
    )(called)

    @law.due
    def _(x, rank: Rank):
        given, wanted, gradient = x[rank]
        return {"result": wanted, "input": given, **({"gradient": gradient} if backward else {})}

    return law


def _dim(draw: st.DrawFn, mesh: Mesh) -> dict[str, Any]:
    return {"dim": draw(st.sampled_from((None, 1, 1, -1)))}


def _to(draw: st.DrawFn, mesh: Mesh) -> dict[str, Any]:
    to = ".".join(map(str, draw(st.permutations(range(mesh.size)))))
    # of more than one dim: of all ranks, so that an error is one of every rank
    wide = mesh.ranks == (0, 1) and draw(st.booleans())
    return {"to-position": to, **({"x": TensorSpec((2, 3)), "world": None} if wide else {})}


ALONG: dict[str, Any] = {"min_dims": 2, "extra": _dim, "expanded": False}
SPLIT: dict[str, Any] = {"forms": ("joined",), "uneven": ("joined",), "splits": True, "min_dims": 1, "expanded": False}
FLOAT: dict[str, Any] = {"floats": True}
REDUCED: dict[str, Any] = {"reduces": True}
ONE, DIM, ROWS = "mesh=2 x=5x3", "mesh=2 x=5x3 dim=1", "mesh=2 x=3x2 splits=1.2/0.3"
VARIANTS = {
    "all_reduce": Variant(
        ("all_reduce",), _all_reduce, "all_reduce", "gives every member the reduction of all members' tensors",
        ONE, REDUCED,
    ),
    "broadcast": Variant(
        ("broadcast",), _broadcast, "broadcast", "gives every member what the source has", f"{ONE} root=1",
        {"root": True, "tables": False, "parts": False},
    ),
    "all_gather_tensor": Variant(
        ("all_gather_single", "all_gather_tensor"), _all_gather, "all_gather",
        "joins what all members have along a dim", DIM, ALONG, corners=(DIM, "mesh=2 x=1x3 dim=-1"),
    ),
    "reduce_scatter_tensor": Variant(
        ("reduce_scatter_single", "reduce_scatter_tensor"), _reduce_scatter, "reduce_scatter",
        "gives the member at position i block i, along a dim, of the reduction", DIM, ALONG | REDUCED,
    ),
    "all_to_all_single": Variant(
        ("all_to_all_single",), _all_to_all, "all_to_all", "sends each member its rows, for splits of any sizes", ROWS,
        SPLIT,
    ),
    "permute_tensor": Variant(
        ("permute_tensor",), _permute, "all_to_all", "sends what member i has to the member that the list names",
        "mesh=3 x=5 to-position=1.2.0", {"extra": _to, "min_dims": 1, "max_dims": 1},
    ),
    "all_reduce_coalesced": Variant(
        ("all_reduce_coalesced",), _twice(_all_reduce), "all_reduce", "reduces several tensors, each as if alone",
        ONE, REDUCED, coalesced=True,
    ),
    "all_gather_coalesced": Variant(
        ("all_gather_single_coalesced", "all_gather_into_tensor_coalesced"), _twice(_all_gather), "all_gather",
        "gathers several tensors, each as if alone", ONE, {"min_dims": 1}, coalesced=True,
    ),
    "reduce_scatter_coalesced": Variant(
        ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"), _twice(_reduce_scatter),
        "reduce_scatter", "reduces and scatters several tensors, each as if alone", ONE,
        {"min_dims": 2, "expanded": False, "reduces": True}, coalesced=True,
        corners=(DIM, f"{ONE} then=1"),
    ),
    "all_gather_autograd": Variant(
        ("all_gather_single_autograd", "all_gather_tensor_autograd"), _all_gather, "reduce_scatter",
        "joins along a dim, and gives back the sum of what came for each block", DIM, ALONG | FLOAT, backward=True,
    ),
    "reduce_scatter_autograd": Variant(
        ("reduce_scatter_single_autograd", "reduce_scatter_tensor_autograd"), _reduce_scatter, "reduce_scatter",
        "reduces blocks along a dim, and gives every member back what came for all blocks", DIM, ALONG | FLOAT,
        backward=True,
    ),
    "all_to_all_autograd": Variant(
        ("all_to_all_single_autograd",), _all_to_all, "all_to_all",
        "sends each member its rows, and their gradients back", ROWS, SPLIT | FLOAT | {"uneven_one_in": 1},
        backward=True,
    ),
    "all_reduce_autograd": Variant(
        ("all_reduce",), _all_reduce, "all_reduce", "sums, and gives every member back the sum of what came",
        ONE, FLOAT, backward=True,
    ),
    "broadcast_autograd": Variant(
        ("broadcast",), _broadcast, "broadcast", "gives back to the source what came for all, to others nothing",
        "mesh=1 x=5x3", {"root": True, "tables": False, "parts": False} | FLOAT, backward=True,
        corners=(f"{ONE} root=1",),
    ),
    "permute_autograd": Variant(
        ("permute_tensor",), _permute, "all_to_all", "sends what member i has to another, and its gradient back",
        "mesh=3 x=5 to-position=1.2.0", {"extra": _to, "min_dims": 1, "max_dims": 1} | FLOAT, backward=True,
    ),
}  # fmt: skip
LAWS = [law_of(name, variant) for name, variant in VARIANTS.items()]
