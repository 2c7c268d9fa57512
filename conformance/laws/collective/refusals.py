"""Laws of what a back end does not carry: dtypes and reductions, calls that mean nothing, members that do not call alike."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from conformance import compat
from conformance.case import Case
from conformance.law import Law, Limits
from conformance.laws import scripts
from conformance.laws.collective import scripts as texts
from conformance.laws.collective.calls import KINDS, Ask, Call, made, members
from conformance.laws.collective.draws import features
from conformance.laws.collective.values import DOC
from conformance.report.reproducer import Script
from reference.collective import reducible
from reference.placement import REDUCE_OPS
from reference.tensors import DTYPES, TensorSpec

if TYPE_CHECKING:
    from conformance.here import Here


@cache
def _matrix() -> tuple[Case, ...]:
    """Every collective in every dtype, with every reduction where it reduces."""
    found = []
    for dtype in DTYPES:
        for name, kind in KINDS.items():
            for op in REDUCE_OPS if kind.reduces else ("sum",):
                spec = TensorSpec((2, 3), None, dtype)
                form = "joined" if name.endswith("_single") else None
                found.append(Case.of("collective.dtypes", mesh="2", x=spec, call=name, op=op if op != "sum" else None, form=form))
    return tuple(found)


def sweep_dtypes(limits: Limits) -> list[Case]:
    return list(_matrix())


def check_dtypes(case: Case, here: Here) -> None:
    """What is carried is carried rightly. What is refused is refused by all before anything moves, and the group goes on; a dtype
    that the target declares is refused by no collective that has a meaning for it."""
    call = _made(case, here)
    if call is None:
        return
    meaning = not call.kind.reduces or reducible(call.ask.dtype, call.ask.op)
    try:
        call.start()
    except Exception as error:
        declared = case.tensor("x").dtype in here.target.dtypes
        what = f"{call.ask.name} of {case.tensor('x').dtype} by {call.ask.op}"
        said = f"{what}, which is declared: refused, {type(error).__name__}: {error}"
        here.require(not (declared and meaning), "wrong-error", "declared", said)
        here.require(bool(str(error).strip()), "wrong-error", "words", f"{what}: refused by {type(error).__name__} without a word")
        call.judge_inputs(here, "refused input")
    else:
        if meaning:
            call.judge(here)
    _goes_on(here, call)


def _made(case: Case, here: Here) -> Call | None:
    """The call of a case, where the reduction may have no meaning: then only what is given counts."""
    name, ask = case.get("call"), Ask.of(case, case.get("call"), 2)
    if not KINDS[name].reduces or reducible(ask.dtype, ask.op):
        return made(case, here, name)
    like = made(case.with_fields(op="sum"), here, name)
    if like is not None:
        like.ask = ask
    return like


def _goes_on(here: Here, call: Call) -> None:
    """The group still carries what it did before."""
    ones = here.tensor(torch.ones(2))
    dist.all_reduce(ones, group=call.team.group)
    here.same(ones, torch.full((2,), float(call.ask.size)), "afterwards", what="a sum of ones after it")


def script_dtypes(case: Case) -> Script:
    """Refused, what was given must be as it was; carried, the result must be right."""
    ask = Ask.of(case, case.get("call"), len(members(case)))
    if not KINDS[ask.name].reduces or reducible(ask.dtype, ask.op):
        return texts.call(case, ask, KINDS[ask.name].parts(ask))
    like = case.with_fields(op="sum")
    parts = KINDS[ask.name].parts(Ask.of(like, ask.name, ask.size))
    single = "x" in KINDS[ask.name].arguments
    given: dict[int, Any] = {at: part.given[0] if single else list(part.given) for at, part in enumerate(parts)}
    name = "x" if single else "xs"
    copied = "given.clone()" if single else "[part.clone() for part in given]"
    body = ["given, group = GIVEN[rank], None", f"{name} = {copied}"]
    body += [f"outs = [{', '.join(texts.room(want, 'plain') for want in parts[0].wanted or ())}]"] if not parts[0].changes else []
    body += ["try:", f"    {texts.statement(case, ask)})", "except Exception:", f"    return given, {name}", "return None, None"]
    return scripts.script(body, world=case.world, constants=texts.table("GIVEN", given))


def features_dtypes(case: Case) -> set[str]:
    return features(case) | {f"collective:{case.get('call')}"}


def two() -> torch.Tensor:
    return torch.ones(2)


def asks(size: int) -> torch.Tensor:
    return torch.ones(size, requires_grad=True)


def functional() -> Any:
    return compat.name("functional")


# what every rank is asked for, as a statement of a user; ``size`` is the number of ranks
ATTEMPTS: dict[str, tuple[Callable[[int, int], object], str]] = {
    "list-too-short": (
        lambda rank, size: dist.all_gather([two() for _ in range(size - 1)], two()),
        "dist.all_gather([torch.ones(2) for _ in range({size} - 1)], torch.ones(2))",
    ),
    "list-too-long": (
        lambda rank, size: dist.all_gather([two() for _ in range(size + 1)], two()),
        "dist.all_gather([torch.ones(2) for _ in range({size} + 1)], torch.ones(2))",
    ),
    "rows-too-few": (
        lambda rank, size: dist.reduce_scatter(two(), [two() for _ in range(size - 1)]),
        "dist.reduce_scatter(torch.ones(2), [torch.ones(2) for _ in range({size} - 1)])",
    ),
    "exchange-too-few": (
        lambda rank, size: dist.all_to_all([two() for _ in range(size - 1)], [two() for _ in range(size - 1)]),
        "dist.all_to_all([torch.ones(2) for _ in range({size} - 1)], [torch.ones(2) for _ in range({size} - 1)])",
    ),
    "splits-do-not-add-up": (
        lambda rank, size: dist.all_to_all_single(torch.ones(size), torch.ones(size), [1] * size, [2] * size),
        "dist.all_to_all_single(torch.ones({size}), torch.ones({size}), [1] * {size}, [2] * {size})",
    ),
    "too-many-splits": (
        lambda rank, size: dist.all_to_all_single(torch.ones(size + 1), torch.ones(size + 1), [1] * (size + 1), [1] * (size + 1)),
        "dist.all_to_all_single(torch.ones({size} + 1), torch.ones({size} + 1), [1] * ({size} + 1), [1] * ({size} + 1))",
    ),
    "rows-that-do-not-divide": (
        lambda rank, size: dist.all_to_all_single(torch.ones(size + 1), torch.ones(size + 1)),
        "dist.all_to_all_single(torch.ones({size} + 1), torch.ones({size} + 1))",
    ),
    "output-of-another-dtype": (
        lambda rank, size: dist.all_gather([torch.ones(2, dtype=torch.int64) for _ in range(size)], two()),
        "dist.all_gather([torch.ones(2, dtype=torch.int64) for _ in range({size})], torch.ones(2))",
    ),
    "output-of-another-size": (
        lambda rank, size: dist.all_gather([torch.ones(3) for _ in range(size)], two()),
        "dist.all_gather([torch.ones(3) for _ in range({size})], torch.ones(2))",
    ),
    "no-root": (lambda rank, size: dist.broadcast(two()), "dist.broadcast(torch.ones(2))"),
    "two-roots": (lambda rank, size: dist.broadcast(two(), src=0, group_src=0), "dist.broadcast(torch.ones(2), src=0, group_src=0)"),
    "root-outside": (lambda rank, size: dist.broadcast(two(), src=size + 3), "dist.broadcast(torch.ones(2), src={size} + 3)"),
    "no-tensor": (lambda rank, size: dist.all_reduce([1, 2]), "dist.all_reduce([1, 2])"),
    "to-oneself": (lambda rank, size: dist.send(two(), rank), "dist.send(torch.ones(2), rank)"),
    "rank-twice-in-group": (lambda rank, size: dist.new_group([0, 0]), "dist.new_group([0, 0])"),
    "gradient-of-a-maximum": (
        lambda rank, size: functional().all_reduce(asks(2), "max", dist.group.WORLD).sum().backward(),
        'funcol.all_reduce(torch.ones(2, requires_grad=True), "max", dist.group.WORLD).sum().backward()',
    ),
    "gradient-of-a-scattered-maximum": (
        lambda rank, size: functional().reduce_scatter_tensor(asks(size), "max", 0, dist.group.WORLD).sum().backward(),
        'funcol.reduce_scatter_tensor(torch.ones({size}, requires_grad=True), "max", 0, dist.group.WORLD).sum().backward()',
    ),
    "rank-outside-group": (lambda rank, size: dist.new_group([0, size + 3]), "dist.new_group([0, {size} + 3])"),
}


def sweep_refusals(limits: Limits) -> list[Case]:
    return [Case.of("collective.refusals", mesh=size, attempt=name) for name in ATTEMPTS for size in (2, 3)]


def check_refusals(case: Case, here: Here) -> None:
    """What means nothing for any backend is refused by every rank, by its own arguments alone, and the ranks go on together."""
    attempt, _ = ATTEMPTS[case.get("attempt")]
    here.refused(lambda: attempt(here.rank, here.world), case.get("attempt"), f"a call with {case.get('attempt')}")
    ones = here.tensor(torch.ones(2))
    dist.all_reduce(ones)
    here.same(ones, torch.full((2,), float(here.world)), "afterwards", what="a sum of ones after it")


def script_refusals(case: Case) -> Script:
    text = ATTEMPTS[case.get("attempt")][1].format(size=case.world)
    told = scripts.refused(case, [], text)
    imports = ("import torch.distributed._functional_collectives as funcol",) if "funcol" in text else ()
    return Script(told.stages, (*told.imports, *imports), told.constants)


def features_refusals(case: Case) -> set[str]:
    return features(case) | {f"refused-call:{case.get('attempt')}"}


MISMATCHES: dict[str, tuple[Callable[[int], object], str]] = {
    "kind": (lambda rank: dist.all_reduce(None if rank else [1]), "dist.all_reduce(None if rank else [1])"),
    "dtype": (
        lambda rank: dist.all_reduce(torch.ones(2, dtype=torch.int32 if rank else torch.float32)),
        "dist.all_reduce(torch.ones(2, dtype=torch.int32 if rank else torch.float32))",
    ),
    "op": (
        lambda rank: dist.all_reduce(torch.ones(2), dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM),
        "dist.all_reduce(torch.ones(2), dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM)",
    ),
    "shape": (
        lambda rank: dist.all_reduce(torch.ones((2, 3) if rank else (3, 2))),
        "dist.all_reduce(torch.ones((2, 3) if rank else (3, 2)))",
    ),
}


def sweep_mismatch(limits: Limits) -> list[Case]:
    return [Case.of("collective.mismatch", mesh=size, attempt=name) for name in MISMATCHES for size in (2, 3)]


def check_mismatch(case: Case, here: Here) -> None:
    """Members that disagree about dtype, reduction or shape are told so; none goes on with a wrong result."""
    attempt, _ = MISMATCHES[case.get("attempt")]
    here.refused(lambda: attempt(here.rank), case.get("attempt"), f"members that disagree in {case.get('attempt')}")


def script_mismatch(case: Case) -> Script:
    return scripts.refused(case, [], MISMATCHES[case.get("attempt")][1])


def features_mismatch(case: Case) -> set[str]:
    return features(case) | {f"mismatch:{case.get('attempt')}"}


LAWS = (
    Law(
        id="collective.dtypes",
        clause="Each dtype and reduction is carried rightly, or refused by every rank alike with all tensors as they were.",
        source=DOC + "ReduceOp, and the table of what backends support",
        check=check_dtypes,
        script=script_dtypes,
        features=features_dtypes,
        control="collective.dtypes mesh=2 x=2x3:-:int64 call=all_reduce",
        planted="integers_are_refused_late",
        sweep=sweep_dtypes,
        sweeps=480,
        needs=("all_gather", "all_reduce", "all_to_all", "broadcast", "gather", "reduce", "reduce_scatter", "scatter"),
        weight=0.5,
    ),
    Law(
        id="collective.refusals",
        clause="A call whose arguments mean nothing is refused by every rank, and the ranks go on together.",
        source=DOC + "arguments of each collective, new_group",
        check=check_refusals,
        script=script_refusals,
        features=features_refusals,
        control="collective.refusals mesh=2 attempt=two-roots",
        planted="any_root_will_do",
        sweep=sweep_refusals,
        sweeps=36,
        needs=("all_gather", "all_reduce", "all_to_all", "broadcast", "p2p", "reduce_scatter"),
        weight=0.2,
    ),
    Law(
        id="collective.mismatch",
        clause="Members that disagree about dtype, reduction or shape are told so, rather than go on with a wrong result.",
        source="torch.distributed docs, TORCH_DISTRIBUTED_DEBUG: checks of consistency; silent on what happens without them",
        check=check_mismatch,
        script=script_mismatch,
        features=features_mismatch,
        control="collective.mismatch mesh=2 attempt=kind",
        planted="all_reduce_takes_anything",
        sweep=sweep_mismatch,
        sweeps=8,
        tier="advisory",
        needs=("all_reduce",),
        weight=0.1,
    ),
)
