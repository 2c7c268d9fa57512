"""Laws of refusals: unsupported dtypes and reductions, invalid arguments, members whose arguments differ."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Annotated, Any

import torch
import torch.distributed as dist

from shardlaw.conformance import compat
from shardlaw.conformance.law.act import fields, law
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Either, Of, Refused, caught
from shardlaw.conformance.law.fields import Device, Field, Rank, ScriptArgument, WordField
from shardlaw.conformance.law.law import Law, Limits
from shardlaw.conformance.laws.collective import draws
from shardlaw.conformance.laws.collective.calls import CALLS, prepare, run_call
from shardlaw.conformance.laws.collective.fields import Call, Group
from shardlaw.conformance.laws.collective.specs import REDUCING
from shardlaw.reference.placement import REDUCE_OPS
from shardlaw.reference.tensors import DTYPES, TensorSpec

if TYPE_CHECKING:
    from shardlaw.conformance.rank.context import RankContext


def sweep_dtypes(limits: Limits) -> list[Case]:
    """Every collective in every dtype, with every reduction where it reduces."""
    return [
        fields(
            mesh="2",
            x=TensorSpec((2, 3), None, dtype),
            call=name,
            op=op if op != "sum" else None,
            form="joined" if name.endswith("_single") else None,
        )
        for dtype in DTYPES
        for name in CALLS
        for op in (REDUCE_OPS if name in REDUCING else ("sum",))
    ]


class IsDeclaredField(Field):
    """Whether the target declares the dtype of the tensor."""

    field = "x"

    def read(self, case: Case, name: str) -> str:
        return case.tensor(name).dtype

    def build(self, value: str, here: RankContext) -> bool:
        return value in here.target.dtypes

    def to_script(self, value: str, name: str, world: int) -> ScriptArgument:
        return ScriptArgument("True")


def sum_of_ones(device, group=None):
    """An all_reduce, which shows that a group still works: the number of its members, twice."""
    ones = torch.ones(2, device=device)
    dist.all_reduce(ones, group=group)
    return ones.tolist()


@law(
    "collective.dtypes",
    source=draws.DOC + "ReduceOp, and the table of what backends support",
    control="mesh=2 x=2x3:-:int64 call=all_reduce",
    features=draws.features_of_call,
    sweep=sweep_dtypes,
    sweeps=480,
    members=True,
    needs=("all_gather", "all_reduce", "all_to_all", "broadcast", "gather", "reduce", "reduce_scatter", "scatter"),
    weight=0.5,
)
def dtypes(call: Call, group: Group, device: Device, declared: Annotated[bool, IsDeclaredField()]):
    """A collective computes each dtype and reduction correctly, or all ranks refuse it, keep their inputs, and go on; a
    dtype that the target declares is refused only where the reduction is not defined for it."""
    found = run_call(prepare(call, device), group)
    error = found["result"] if isinstance(found["result"], Exception) else None
    return {
        "declared": f"refused, {type(error).__name__}: {error}" if declared and error else "",
        "words": error is None or bool(str(error).strip()),
        **found,
        "afterwards": sum_of_ones(device, group),
    }


@dtypes.due
def _(call, rank: Rank):
    is_defined, inputs = call.spec.is_defined, call.member_data(rank).inputs
    return {
        "declared": Of("", "wrong-error") if is_defined else ...,
        "words": Of(True, "wrong-error"),
        "result": Either((call.due(rank), Refused())) if is_defined else ...,
        "beside": True if is_defined else ...,
        "written": ...,
        "input": Either((None, inputs)) if call.in_place else inputs,
        "is_completed()": True,
        "afterwards": [float(call.spec.size)] * 2,
    }


# invalid calls, made by every rank; ``size`` is the number of ranks
ATTEMPTS = {
    "list-too-short": lambda rank, size: dist.all_gather([torch.ones(2) for _ in range(size - 1)], torch.ones(2)),
    "list-too-long": lambda rank, size: dist.all_gather([torch.ones(2) for _ in range(size + 1)], torch.ones(2)),
    "rows-too-few": lambda rank, size: dist.reduce_scatter(torch.ones(2), [torch.ones(2) for _ in range(size - 1)]),
    "exchange-too-few": lambda rank, size: dist.all_to_all(
        [torch.ones(2) for _ in range(size - 1)], [torch.ones(2) for _ in range(size - 1)]
    ),
    "splits-do-not-add-up": lambda rank, size: dist.all_to_all_single(
        torch.ones(size), torch.ones(size), [1] * size, [2] * size
    ),
    "too-many-splits": lambda rank, size: dist.all_to_all_single(
        torch.ones(size + 1), torch.ones(size + 1), [1] * (size + 1), [1] * (size + 1)
    ),
    "rows-that-do-not-divide": lambda rank, size: dist.all_to_all_single(torch.ones(size + 1), torch.ones(size + 1)),
    "output-of-another-dtype": lambda rank, size: dist.all_gather(
        [torch.ones(2, dtype=torch.int64) for _ in range(size)], torch.ones(2)
    ),
    "output-of-another-size": lambda rank, size: dist.all_gather([torch.ones(3) for _ in range(size)], torch.ones(2)),
    "no-root": lambda rank, size: dist.broadcast(torch.ones(2)),
    "two-roots": lambda rank, size: dist.broadcast(torch.ones(2), src=0, group_src=0),
    "root-outside": lambda rank, size: dist.broadcast(torch.ones(2), src=size + 3),
    "no-tensor": lambda rank, size: dist.all_reduce([1, 2]),
    "to-oneself": lambda rank, size: dist.send(torch.ones(2), rank),
    "rank-twice-in-group": lambda rank, size: dist.new_group([0, 0]),
    "gradient-of-a-product": lambda rank, size: (
        compat.functional.all_reduce(torch.ones(2, requires_grad=True), "product", dist.group.WORLD).sum().backward()
    ),
    "gradient-of-a-scattered-maximum": lambda rank, size: (
        compat.functional.reduce_scatter_tensor(torch.ones(size, requires_grad=True), "max", 0, dist.group.WORLD)
        .sum()
        .backward()
    ),
    "rank-outside-group": lambda rank, size: dist.new_group([0, size + 3]),
    "maximum-of-complex-numbers": lambda rank, size: dist.all_reduce(
        torch.ones(2, dtype=torch.complex64), dist.ReduceOp.MAX
    ),
    "scattered-maximum-of-complex-numbers": lambda rank, size: compat.functional.reduce_scatter_tensor(
        torch.ones(size, dtype=torch.complex64), "max", 0, dist.group.WORLD
    ),
    "functional-rows-that-do-not-divide": lambda rank, size: compat.functional.all_to_all_single(
        torch.ones(size + 1), None, None, dist.group.WORLD
    ).sum(),
    "functional-splits-of-one-side": lambda rank, size: compat.functional.all_to_all_single(
        torch.ones(size), [1] * size, None, dist.group.WORLD
    ),
    "functional-splits-of-fractions": lambda rank, size: compat.functional.all_to_all_single(
        torch.ones(size), [1] * size, [1.0] * size, dist.group.WORLD
    ),
    "scattered-size-that-does-not-divide": lambda rank, size: compat.functional.reduce_scatter_tensor(
        torch.ones(size, size + 1), "sum", 1, dist.group.WORLD
    ),
    "scattered-together-size-that-does-not-divide": lambda rank, size: (
        compat.functional.reduce_scatter_tensor_coalesced([torch.ones(size + 1)], "sum", [0], dist.group.WORLD)
    ),
    "scattered-together-along-too-many-dims": lambda rank, size: compat.functional.reduce_scatter_tensor_coalesced(
        [torch.ones(size)], "sum", [0, 0], dist.group.WORLD
    ),
    "gradient-of-products-together": lambda rank, size: (
        compat.functional.all_reduce_coalesced([torch.ones(2, requires_grad=True)], "product", dist.group.WORLD)[0]
        .sum()
        .backward()
    ),
    "gradient-of-maxima-scattered-together": lambda rank, size: (
        compat.functional.reduce_scatter_tensor_coalesced(
            [torch.ones(size, requires_grad=True)], "max", [0], dist.group.WORLD
        )[0]
        .sum()
        .backward()
    ),
    "group-of-a-pair-of-numbers": lambda rank, size: compat.functional.all_reduce(torch.ones(2), "sum", (0, 1)),
    "group-of-an-unknown-name": lambda rank, size: compat.functional.all_reduce(torch.ones(2), "sum", "unknown"),
    "no-group": lambda rank, size: compat.functional.all_reduce(torch.ones(2), "sum", None),
    "functional-splits-of-the-other-side": lambda rank, size: compat.functional.all_to_all_single(
        torch.ones(size), None, [1] * size, dist.group.WORLD
    ),
    "rank-in-two-subgroups": lambda rank, size: dist.new_subgroups_by_enumeration([[*range(size)], [size - 1]]),
}


if compat.torch_release() < (2, 15):  # from then on these have gradients, which collective.functional asks for
    ATTEMPTS["gradient-of-a-maximum"] = lambda rank, size: (
        compat.functional.all_reduce(torch.ones(2, requires_grad=True), "max", dist.group.WORLD).sum().backward()
    )
    ATTEMPTS["gradient-of-minima-together"] = lambda rank, size: (
        compat.functional.all_reduce_coalesced([torch.ones(2, requires_grad=True)], "min", dist.group.WORLD)[0]
        .sum()
        .backward()
    )

# calls that torch does not check: it passes them to the backend
LEFT_TO_BACKENDS = ("list-too-short", "list-too-long", "root-outside")


def make_invalid_call(group: Group, attempt: Annotated[str, WordField(ATTEMPTS)], device: Device):
    got = caught(lambda: ATTEMPTS[attempt](dist.get_rank(), dist.get_world_size()))
    return {"refusal": got, "afterwards": sum_of_ones(device)}


def invalid_call_due(group):
    return {"refusal": Refused(), "afterwards": [float(len(group))] * 2}


def refusal_law(id: str, clause: str, names: Collection[str], **record: Any) -> Law:
    """A law of invalid calls."""
    made = law(
        id,
        clause=clause,
        source=draws.DOC + "arguments of each collective, new_group",
        features=lambda case: draws.features_of(case) | {f"refused-call:{case.get('attempt')}"},
        sweep=lambda limits: [fields(mesh=size, attempt=name) for name in names for size in (2, 3)],
        sweeps=2 * len(names),
        **record,
    )(make_invalid_call)
    made.due(invalid_call_due)
    return made


refusals = refusal_law(
    "collective.refusals",
    "Every rank refuses a call with invalid arguments, and the group still works.",
    [name for name in ATTEMPTS if name not in LEFT_TO_BACKENDS],
    control="mesh=2 attempt=two-roots",
    needs=("all_gather", "all_reduce", "all_to_all", "broadcast", "p2p", "reduce_scatter"),
    weight=0.2,
)

backend_refusals = refusal_law(
    "collective.backend-refusals",
    "On every rank the backend refuses a call with invalid arguments that torch does not check, and the group still "
    "works.",
    LEFT_TO_BACKENDS,
    control="mesh=2 attempt=list-too-short",
    needs=("all_gather", "all_reduce", "broadcast"),
    tier="extended",
    weight=0.1,
)


MISMATCHES = {
    "kind": lambda rank: dist.all_reduce(None if rank else [1]),
    "dtype": lambda rank: dist.all_reduce(torch.ones(2, dtype=torch.int32 if rank else torch.float32)),
    "op": lambda rank: dist.all_reduce(torch.ones(2), dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM),
    "shape": lambda rank: dist.all_reduce(torch.ones((2, 3) if rank else (3, 2))),
}


@law(
    "collective.mismatch",
    source=draws.DOC + "TORCH_DISTRIBUTED_DEBUG: checks of consistency; silent on what happens without them",
    control="mesh=2 attempt=kind",
    features=lambda case: draws.features_of(case) | {f"mismatch:{case.get('attempt')}"},
    sweep=lambda limits: [fields(mesh=size, attempt=name) for name in MISMATCHES for size in (2, 3)],
    sweeps=8,
    tier="advisory",
    needs=("all_reduce",),
    weight=0.1,
)
def mismatch(group: Group, attempt: Annotated[str, WordField(MISMATCHES)]):
    """A collective whose members pass different dtypes, reductions or shapes raises; it gives no wrong result."""
    return {"refusal": caught(lambda: MISMATCHES[attempt](dist.get_rank()))}


@mismatch.due
def _():
    return {"refusal": Refused()}
