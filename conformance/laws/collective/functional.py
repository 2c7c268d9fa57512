"""Laws of functional collectives: each returns a new tensor, for which any use of it waits, and leaves its input
unchanged.

The gradient of a member's input sums what it contributes to the outputs of all members.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from shardlaw.conformance import compat
from shardlaw.conformance.law import act
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.fields import Device, DtypeField, Rank
from shardlaw.conformance.law.law import Law, Limits
from shardlaw.conformance.laws.collective import draws
from shardlaw.conformance.laws.collective.fields import GROUP_FORMS, GivenAs, Group, RankDataField, group_ranks
from shardlaw.conformance.laws.collective.specs import CollectiveSpec, Row, one_each, parse_ints
from shardlaw.reference import collective
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.notation import NotationError
from shardlaw.reference.tensors import TensorSpec

SOURCE = "torch.distributed._functional_collectives, docstring of "


@dataclass(frozen=True)
class FunctionalData:
    """The inputs and expected outputs of each member, and the arguments of its call between the tensor and the group.
    ``backward``, for each output: computes the gradients of the inputs from those of the outputs, one for each
    member."""

    inputs: list[Row]
    expected: list[Row]
    arguments: list[list[Any]]
    backward: tuple[Callable[[Row], Row], ...]

    def output_gradients(self, spec: CollectiveSpec) -> list[Row]:
        """A gradient for each output of each member; their sums are exact."""
        return [
            [
                spec.contribution(at, spec.size + number, tuple(output.shape)).contiguous()
                for number, output in enumerate(outputs)
            ]
            for at, outputs in enumerate(self.expected)
        ]

    def input_gradients(self, output_gradients: list[Row]) -> list[Row]:
        """The gradient of each input of each member."""
        columns = [backward([row[number] for row in output_gradients]) for number, backward in enumerate(self.backward)]
        return [list(row) for row in zip(*columns, strict=True)]


def _all_reduce(case: Case, spec: CollectiveSpec) -> FunctionalData:
    inputs = [spec.contribution(at) for at in range(spec.size)]
    expected = collective.all_reduce(inputs, spec.op)

    def backward(gradients: Row) -> Row:
        """Of an extreme: those who hold it share the gradient evenly."""
        if spec.op not in ("min", "max"):
            return collective.all_reduce(gradients, spec.op)
        held = [(x == most).to(x.dtype) for x, most in zip(inputs, expected, strict=True)]
        each = collective.reduction(gradients, "sum") / collective.reduction(held, "sum")
        return [each * holds for holds in held]

    return FunctionalData(one_each(inputs), one_each(expected), [[spec.op]] * spec.size, (backward,))


def _broadcast(case: Case, spec: CollectiveSpec) -> FunctionalData:
    inputs = [spec.payload(at) for at in range(spec.size)]

    def backward(gradients: Row) -> Row:
        total = collective.reduction(gradients, "sum")
        return [total if at == spec.root else torch.zeros_like(total) for at in range(spec.size)]

    expected = collective.broadcast(inputs, spec.root)
    return FunctionalData(one_each(inputs), one_each(expected), [[spec.root]] * spec.size, (backward,))


def _permute(case: Case, spec: CollectiveSpec) -> FunctionalData:
    inputs, to = [spec.payload(at) for at in range(spec.size)], list(parse_ints(case.get("to-position")))
    return FunctionalData(
        one_each(inputs),
        one_each(collective.permute(inputs, to)),
        [[to]] * spec.size,
        (lambda gradients: [gradients[at] for at in to],),
    )


def _all_gather(case: Case, spec: CollectiveSpec) -> FunctionalData:
    dim = case.integer("dim", 0)
    inputs = [spec.payload(at) for at in range(spec.size)]

    def backward(gradients: Row) -> Row:
        return collective.reduce_scatter([list(gradient.chunk(spec.size, dim)) for gradient in gradients], "sum")

    expected = [[collective.concatenate(inputs, dim)]] * spec.size
    return FunctionalData(one_each(inputs), expected, [[dim]] * spec.size, (backward,))


def _reduce_scatter(case: Case, spec: CollectiveSpec) -> FunctionalData:
    dim = case.integer("dim", 0)
    rows = [[spec.contribution(at, to) for to in range(spec.size)] for at in range(spec.size)]
    return FunctionalData(
        one_each([spec.concatenate(row, dim) for row in rows]),
        one_each(collective.reduce_scatter(rows, spec.op)),
        [[spec.op, dim]] * spec.size,
        (lambda gradients: [collective.concatenate(gradients, dim)] * spec.size,),
    )


def _all_to_all(case: Case, spec: CollectiveSpec) -> FunctionalData:
    members, tail = range(spec.size), spec.shape[1:]
    splits = [list(row) for row in spec.splits] or [[spec.shape[0]] * spec.size for _ in members]
    received = collective.all_to_all(splits)
    rows = [[spec.payload(at * spec.size + to, (splits[at][to], *tail)) for to in members] for at in members]
    inputs = [spec.concatenate(row) for row in rows]
    return FunctionalData(
        one_each(inputs),
        one_each(collective.all_to_all_single(inputs, splits)),
        [[received[at], splits[at]] if spec.splits else [None, None] for at in members],
        (lambda gradients: collective.all_to_all_single(gradients, received),),
    )


MakeData = Callable[[Case, CollectiveSpec], FunctionalData]


def _coalesced(make: MakeData) -> MakeData:
    """The data of one call on two tensors of different values, the second along the dim of the field ``then`` and of
    the dtype ``beside``."""

    def make_two(case: Case, spec: CollectiveSpec) -> FunctionalData:
        second_case = case.with_fields(dim=case.get("then")) if "then" in case else case
        dtype = DtypeField().parse(case.get("beside")) if "beside" in case else spec.dtype
        first, second = make(case, spec), make(second_case, replace(spec, dtype=dtype, index=1))
        (*others, dim), (*_, second_dim) = first.arguments[0], second.arguments[0]
        known: dict[Any, Any] = {_all_gather: [], _reduce_scatter: [*others, [dim, second_dim]]}
        return FunctionalData(
            [a + b for a, b in zip(first.inputs, second.inputs, strict=True)],
            [a + b for a, b in zip(first.expected, second.expected, strict=True)],
            [known.get(make, first.arguments[0])] * spec.size,
            first.backward + second.backward,
        )

    return make_two


@dataclass(frozen=True)
class Variant:
    """A functional collective. ``names``: its names in releases of torch, newest first. ``draw_options``: those of
    :func:`draws.calls`. ``corners``: the enumerated cases, if not the control alone."""

    names: tuple[str, ...]
    make: MakeData
    needs: str
    clause: str
    control: str
    draw_options: dict[str, Any]
    coalesced: bool = False
    backward: bool = False
    corners: tuple[str, ...] = ()


def read_case(case: Case) -> tuple[dict[int, Any], Any]:
    """By rank, for acts: the names of the function, of which the first that torch has is called, whether it takes a
    list, inputs, arguments, and the gradients of outputs; for due functions: inputs, due outputs, and the gradients of
    inputs."""
    name = case.get("call", case.law.partition("[")[2].removesuffix("]"))
    if name not in VARIANTS:
        raise NotationError(f"call={name}: want one of {', '.join(VARIANTS)}")
    ranks, variant = group_ranks(case), VARIANTS[name]
    if "results" in case and variant.backward:
        raise NotationError("results=zeroed: results that have gradients cannot be overwritten")
    if case.get("named", "old") != "old":
        raise NotationError(f"named={case.get('named')}: want old, for the name in earlier releases")
    spec = CollectiveSpec.from_case(case, variant.names[0], len(ranks))
    data = variant.make(case, spec)
    output_gradients: Any = data.output_gradients(spec) if variant.backward else [None] * spec.size
    gradients: Any = data.input_gradients(output_gradients) if variant.backward else [None] * spec.size
    names = variant.names[::-1] if "named" in case else variant.names
    function = [(names, variant.coalesced)] * spec.size
    for_act = zip(function, data.inputs, data.arguments, output_gradients, strict=True)
    expected = [list(map(torch.zeros_like, row)) for row in data.expected] if "results" in case else data.expected
    due = [[spec.due_value(output) for output in row] for row in expected]
    return dict(zip(ranks, for_act, strict=True)), dict(
        zip(ranks, zip(data.inputs, due, gradients, strict=True), strict=True)
    )


ARGUMENT_FIELDS = "dim", "then", "beside", "to-position", "named"
MemberArguments = Annotated[Any, RankDataField(read_case, *ARGUMENT_FIELDS)]


def start_functional(function, xs, coalesced, arguments, group):
    """The results of a functional collective, as a list."""
    result = function(xs if coalesced else xs[0], *arguments, group)
    return result if coalesced else [result]


def run_functional(call, group, start=start_functional, use=list):
    """Call a functional collective by ``start``, then ``use`` its results. With gradients of the results, compute those
    of the inputs."""
    (names, coalesced), given, arguments, output_gradients = call
    function = getattr(compat.functional, next(name for name in names if hasattr(compat.functional, name)))
    xs = [tensor.requires_grad_(output_gradients is not None) for tensor in given]
    results = use(start(function, xs, coalesced, arguments, group))
    found = {
        "result": [tensor.detach().clone() for tensor in results],
        "input": [tensor.detach() for tensor in xs],
    }
    if output_gradients is not None:
        torch.autograd.backward(results, output_gradients)
        found["gradient"] = [tensor.grad for tensor in given]
    return found


def zero_each(xs):
    """Overwrite tensors by zeros, one after the other: each is waited for only when its turn comes."""
    return [x.zero_() for x in xs]


def functional_due(x, rank: Rank):
    inputs, outputs, gradients = x[rank]
    return {"result": outputs, "input": inputs, **({} if gradients is None else {"gradient": gradients})}


def functional(
    x: MemberArguments,
    group: Group,
    device: Device,
    given: GivenAs | None = None,
    results: Literal["zeroed"] | None = None,
):
    group = group or dist.group.WORLD
    return run_functional(x, GROUP_FORMS[given](group, device) if given else group, use=zero_each if results else list)


def features(case: Case, variant: Variant) -> set[str]:
    more = ["functional", *["coalesced"] * variant.coalesced, *["backward", "requires-grad"] * variant.backward]
    return draws.features_of(case) | {*more}


def draw_variant(limits: Limits, variant: Variant) -> SearchStrategy[Case]:
    return draws.calls(limits, timing=False, outputs=False, **variant.draw_options)


def draw_groups(cases: SearchStrategy[Case]) -> SearchStrategy[Case]:
    """The cases, one in four with its group given in another form than a ProcessGroup."""
    forms = st.sampled_from([None] * 3 * len(GROUP_FORMS) + [*GROUP_FORMS])
    return st.builds(lambda case, given: case.with_fields(given=given), cases, forms)


def functional_law(name: str, variant: Variant) -> Law:
    """The law of one functional collective."""
    law = act.law(
        f"collective.functional[{name}]",
        clause=f"The functional {variant.names[-1]} leaves its input unchanged and {variant.clause}.",
        source=SOURCE + variant.names[-1],
        control=variant.control,
        features=lambda case: features(case, variant),
        sweep=act.texts(*(variant.corners or (variant.control,))),
        sweeps=max(len(variant.corners), 1),
        draw=lambda limits: draw_groups(draw_variant(limits, variant)),
        draws=30,
        members=True,
        needs=tuple(dict.fromkeys((variant.needs, *(("all_gather",) if variant.backward else ()), "subgroups"))),
        weight=0.2,
    )(functional)
    law.due(functional_due)
    return law


def _draw_permutation(draw: st.DrawFn, mesh: Mesh) -> dict[str, Any]:
    to = draws.join_ints(draw(st.permutations(range(mesh.size))))
    # matrices only in a group of all ranks, so that every rank gets the same error
    is_matrix = mesh.ranks == (0, 1) and draw(st.booleans())
    return {"to-position": to, **({"x": TensorSpec((2, 3)), "world": None} if is_matrix else {})}


ALONG: dict[str, Any] = {"min_dims": 2, "extra": {"dim": st.sampled_from((None, 1, 1, -1))}, "expanded": False}
SPLIT: dict[str, Any] = {"forms": ("joined",), "uneven": ("joined",), "splits": True, "min_dims": 1, "expanded": False}
PERMUTED: dict[str, Any] = {"extra": _draw_permutation, "min_dims": 1, "max_dims": 1}
FLOAT: dict[str, Any] = {"floats": True}
REDUCED: dict[str, Any] = {"reduces": True}
ROOTED: dict[str, Any] = {"root": True, "tables": False, "parts": False}
ONE, DIM, ROWS = "mesh=2 x=5x3", "mesh=2 x=5x3 dim=1", "mesh=2 x=3x2 splits=1.2/0.3"
OLD = f"{DIM} named=old"  # by the deprecated name
# reductions that have a gradient beside the sum
OTHERS = tuple(f"{ONE} op={op}" for op in ("avg", "max", "min")) if compat.torch_release() >= (2, 15) else ()
ZEROED, ONE_BY_ONE = f"{ONE} results=zeroed", "; their results can be waited for and overwritten one by one"
VARIANTS = {
    "all_reduce": Variant(
        ("all_reduce",), _all_reduce, "all_reduce", "gives every member the reduction of all members' tensors",
        ONE, REDUCED, corners=(ONE, *(f"{ONE} given={form}" for form in GROUP_FORMS)),
    ),
    "broadcast": Variant(
        ("broadcast",), _broadcast, "broadcast", "gives every member the source's tensor", f"{ONE} root=1", ROOTED,
    ),
    "all_gather_tensor": Variant(
        ("all_gather_single", "all_gather_tensor"), _all_gather, "all_gather",
        "concatenates all members' tensors along a dim", DIM, ALONG,
        corners=(DIM, "mesh=2 x=1x3 dim=-1", OLD),
    ),
    "reduce_scatter_tensor": Variant(
        ("reduce_scatter_single", "reduce_scatter_tensor"), _reduce_scatter, "reduce_scatter",
        "gives the member at position i block i of the reduction along a dim", DIM, ALONG | REDUCED,
        corners=(DIM, f"{OLD} op=max"),
    ),
    "all_to_all_single": Variant(
        ("all_to_all_single",), _all_to_all, "all_to_all", "sends each member its rows, for any splits", ROWS,
        SPLIT, corners=(ROWS, "mesh=2 x=3x2:-:complex64 splits=1.2/0.3"),
    ),
    "permute_tensor": Variant(
        ("permute_tensor",), _permute, "all_to_all", "sends the tensor of member i to member to[i]",
        "mesh=3 x=5 to-position=1.2.0", PERMUTED,
        corners=("mesh=3 x=5 to-position=1.2.0", *(f"mesh=2 x=5 to-position=1.0 given={form}" for form in GROUP_FORMS)),
    ),
    "all_reduce_coalesced": Variant(
        ("all_reduce_coalesced",), _coalesced(_all_reduce), "all_reduce",
        f"reduces several tensors separately{ONE_BY_ONE}", ONE, REDUCED, coalesced=True, corners=(ONE, ZEROED),
    ),
    "all_gather_coalesced": Variant(
        ("all_gather_single_coalesced", "all_gather_into_tensor_coalesced"), _coalesced(_all_gather), "all_gather",
        f"gathers several tensors separately{ONE_BY_ONE}", ONE, {"min_dims": 1}, coalesced=True,
        corners=(ONE, ZEROED, f"{ONE} beside=float64", f"{ONE}:-:complex64", f"{ONE} named=old"),
    ),
    "reduce_scatter_coalesced": Variant(
        ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"), _coalesced(_reduce_scatter),
        "reduce_scatter", f"reduces and scatters several tensors separately{ONE_BY_ONE}", ONE,
        {"min_dims": 2, "expanded": False, "reduces": True}, coalesced=True,
        corners=(DIM, f"{ONE} then=1", ZEROED, f"{ONE} then=-1", f"{ONE} named=old then=1 op=max"),
    ),
    "all_gather_autograd": Variant(
        ("all_gather_single_autograd", "all_gather_tensor_autograd"), _all_gather, "reduce_scatter",
        "concatenates along a dim; the gradient of a block is the sum of all members' gradients of it", DIM,
        ALONG | FLOAT, backward=True, corners=(DIM, OLD),
    ),
    "reduce_scatter_autograd": Variant(
        ("reduce_scatter_single_autograd", "reduce_scatter_tensor_autograd"), _reduce_scatter, "reduce_scatter",
        "reduces blocks along a dim; the gradient of its input has the gradients of all blocks", DIM, ALONG | FLOAT,
        backward=True, corners=(DIM, OLD),
    ),
    "all_to_all_autograd": Variant(
        ("all_to_all_single_autograd",), _all_to_all, "all_to_all",
        "sends each member its rows; their gradients are sent back", ROWS, SPLIT | FLOAT | {"uneven_one_in": 1},
        backward=True,
    ),
    "all_reduce_autograd": Variant(
        ("all_reduce",), _all_reduce, "all_reduce",
        "reduces; the gradient is that of all members' gradients, or their sum, shared by the holders of an extreme",
        ONE, FLOAT, backward=True, corners=(ONE, *OTHERS),
    ),
    "broadcast_autograd": Variant(
        ("broadcast",), _broadcast, "broadcast",
        "gives every member the source's tensor; the gradient is the sum of all members' on the source, zero elsewhere",
        "mesh=1 x=5x3", ROOTED | FLOAT, backward=True, corners=(f"{ONE} root=1",),
    ),
    "permute_autograd": Variant(
        ("permute_tensor",), _permute, "all_to_all", "sends each member's tensor to another; its gradient is sent back",
        "mesh=3 x=5 to-position=1.2.0", PERMUTED | FLOAT, backward=True,
    ),
    "all_reduce_coalesced_autograd": Variant(
        ("all_reduce_coalesced",), _coalesced(_all_reduce), "all_reduce",
        "reduces several tensors; the gradient of each is that of all members' gradients, or their sum, shared by the "
        "holders of an extreme", ONE, FLOAT, coalesced=True, backward=True, corners=(ONE, *OTHERS),
    ),
    "all_gather_coalesced_autograd": Variant(
        ("all_gather_single_coalesced", "all_gather_into_tensor_coalesced"), _coalesced(_all_gather), "reduce_scatter",
        "gathers several tensors; the gradient of a block is the sum of all members' gradients of it", ONE,
        {"min_dims": 1} | FLOAT, coalesced=True, backward=True,
    ),
    "reduce_scatter_coalesced_autograd": Variant(
        ("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"), _coalesced(_reduce_scatter),
        "reduce_scatter", "scatters several sums; the gradients of their inputs have the gradients of all blocks", ONE,
        {"min_dims": 2, "expanded": False} | FLOAT, coalesced=True, backward=True, corners=(f"{ONE} then=1",),
    ),
}  # fmt: skip
LAWS = [functional_law(name, variant) for name, variant in VARIANTS.items()]
