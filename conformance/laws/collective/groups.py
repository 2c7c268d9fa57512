"""Laws of barriers, of groups, and of collectives that are made of others."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from conformance.case import Case
from conformance.law import Law, Limits
from conformance.laws import scripts
from conformance.laws.collective import scripts as texts
from conformance.laws.collective.calls import LATE_SECONDS, NO_ORDER, STALE, Ask, keeps_order, members, team
from conformance.laws.collective.draws import drawn, features, one_in
from conformance.laws.collective.values import DOC
from conformance.report.reproducer import Script
from reference import collective
from reference.mesh import Mesh
from strategies.collectives import groups

if TYPE_CHECKING:
    from conformance.here import Here

# a byte that is doubled so often is 0
AGAIN = 8


def draw_barrier(limits: Limits) -> SearchStrategy[Case]:
    @st.composite
    def case(draw: st.DrawFn) -> Case:
        mesh = draw(groups(world_size=limits.world_size, tables=False))
        late = draw(st.sampled_from(mesh.ranks))
        return Case.of("collective.barrier", mesh=mesh, late=late, work="async" if draw(one_in(3)) else None)

    return case()


def check_barrier(case: Case, here: Here) -> None:
    """Nobody leaves a barrier before all members have come to it: whoever leaves finds the mark of each."""
    on = team(case, here)
    if on.position is None:
        return
    folder = Path(here.folder())
    for turn in range(2):
        if case.get("late") == str(here.rank):
            time.sleep(LATE_SECONDS)
        (folder / f"{turn}-{here.rank}").touch()
        if "work" in case:
            dist.barrier(group=on.group, async_op=True).wait()
        else:
            dist.barrier(group=on.group)
        missing = [rank for rank in on.ranks if not (folder / f"{turn}-{rank}").exists()]
        here.require(not missing, "wrong-value", "mark", f"left a barrier before ranks {missing} had come", [], missing)


def script_barrier(case: Case) -> Script:
    body = [*texts.group(case), *texts.outsiders(case), "missing = []", "for turn in range(2):"]
    wait = "dist.barrier(group=group, async_op=True).wait()" if "work" in case else "dist.barrier(group=group)"
    ranks = list(members(case))
    body += [f"    time.sleep({LATE_SECONDS} if rank == {case.get('late')} else 0)", '    open(f"{folder}/{turn}-{rank}", "w").close()']
    body += [f"    {wait}", f'    missing += [at for at in {ranks} if not os.path.exists(f"{{folder}}/{{turn}}-{{at}}")]']
    made_of = scripts.script([*body, "return [], missing"], world=case.world)
    return Script(made_of.stages, (*made_of.imports, "import os", "import time"), made_of.constants)


COMPOSED = ("reduce-broadcast", "reduce-scatter", "scatter-gather", "there-and-back")


def draw_composed(limits: Limits) -> SearchStrategy[Case]:
    def how(draw: st.DrawFn, mesh: Mesh) -> dict[str, Any]:
        return {"how": draw(st.sampled_from(COMPOSED))}

    return drawn("collective.composed", limits, root=True, reduces=True, memories=False, works=False, min_dims=1, extra=how)


def composed(case: Case) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What every member starts with, and must end with."""
    how, ask = case.get("how"), Ask.of(case, "all_reduce", len(members(case)))
    places = range(ask.size)
    if how == "reduce-broadcast":
        given = [ask.added(at) for at in places]
        return given, collective.all_reduce(given, ask.op)
    if how == "reduce-scatter":
        rows = [[ask.added(at, part) for part in places] for at in places]
        return [collective.stacked(row) for row in rows], collective.reduce_scatter(rows, ask.op)
    given = [collective.stacked([ask.given(ask.size * at + part) for part in places]) for at in places]
    return given, [given[ask.root]] * ask.size if how == "scatter-gather" else given


# what follows what, as statements on ``x`` (what this rank has), ``group``, ``root`` and ``op``; the last line is what it ends with
STEPS = {
    "reduce-broadcast": ["dist.reduce(x, root, op, group=group)", "dist.broadcast(x, root, group=group)", "x"],
    "reduce-scatter": [
        "dist.reduce(x, root, op, group=group)",
        "out = torch.zeros_like(x[0])",
        "dist.scatter(out, list(x) if rank == root else None, root, group=group)",
        "out",
    ],
    "scatter-gather": [
        "out, outs = torch.zeros_like(x[0]), [torch.zeros_like(part) for part in x]",
        "dist.scatter(out, list(x) if rank == root else None, root, group=group)",
        "dist.all_gather(outs, out, group=group)",
        "torch.stack(outs)",
    ],
    "there-and-back": [
        "there, back = torch.zeros_like(x), torch.zeros_like(x)",
        "dist.all_to_all_single(there, x, group=group)",
        "dist.all_to_all_single(back, there, group=group)",
        "back",
    ],
}


def check_composed(case: Case, here: Here) -> None:
    """One after the other they give what the whole gives: reduce and broadcast an all_reduce, reduce and scatter a reduce_scatter,
    scatter and all_gather what was there, all_to_all and its reverse too."""
    on, how = team(case, here), case.get("how")
    if on.position is None:
        return
    ask = Ask.of(case, "all_reduce", len(on.ranks))
    given, wanted = composed(case)
    x, root, op = here.tensor(given[on.position].clone()), on.ranks[ask.root], getattr(dist.ReduceOp, ask.op.upper())
    out, outs = torch.full_like(x[0] if len(x) else x, STALE), [torch.full_like(part, STALE) for part in x]
    if how.startswith("reduce"):
        dist.reduce(x, root, op, group=on.group)
    if how == "reduce-broadcast":
        dist.broadcast(x, root, group=on.group)
    elif how in ("reduce-scatter", "scatter-gather"):
        dist.scatter(out, list(x) if here.rank == root else None, root, group=on.group)
    if how == "scatter-gather":
        dist.all_gather(outs, out, group=on.group)
    if how == "there-and-back":
        there, back = torch.full_like(x, STALE), torch.full_like(x, STALE)
        dist.all_to_all_single(there, x, group=on.group)
        dist.all_to_all_single(back, there, group=on.group)
        x = back
    got = {"reduce-scatter": out, "scatter-gather": torch.stack(outs) if outs else x}.get(how, x)
    exact = ask.op != "avg" or ask.size in (1, 2, 4, 8)
    here.same(got, wanted[on.position], how, exact=exact, what=f"what went through {how}")


def script_composed(case: Case) -> Script:
    given, wanted = composed(case)
    ranks, how = members(case), case.get("how")
    constants = texts.table("GIVEN", dict(zip(ranks, given, strict=True))) + texts.table("WANT", dict(zip(ranks, wanted, strict=True)))
    body = [*texts.group(case), *texts.outsiders(case), "x = GIVEN[rank]", f"root = {ranks[case.integer('root', 0)]}"]
    body += [f"op = dist.ReduceOp.{case.get('op', 'sum').upper()}"] if how.startswith("reduce") else []
    return scripts.script([*body, *STEPS[how][:-1], f"return WANT[rank], {STEPS[how][-1]}"], world=case.world, constants=constants)


def sweep_again(limits: Limits) -> list[Case]:
    """Bools, whose sums and products are idempotent too."""
    ops = ("sum", "product", "max", "min")
    return [Case.of("collective.again", mesh=size, x="5x4:-:bool", op=op if op != "sum" else None) for op in ops for size in (2, 3)]


def draw_again(limits: Limits) -> SearchStrategy[Case]:
    return drawn("collective.again", limits, reduces=True, memories=False, works=False, idempotent=True)


def check_again(case: Case, here: Here) -> None:
    """A reduction by which equals are no more than one (min, max, and, or, avg; of bools also sum and product) may be repeated."""
    on = team(case, here)
    if on.position is None:
        return
    ask = Ask.of(case, "all_reduce", len(on.ranks))
    x, once = here.tensor(ask.added(on.position)), collective.reduced([ask.added(at) for at in range(ask.size)], ask.op)
    for _ in range(AGAIN):
        dist.all_reduce(x, getattr(dist.ReduceOp, ask.op.upper()), group=on.group)
    here.same(x, once, "again", exact=ask.op != "avg", what=f"what was reduced {AGAIN} times")


def script_again(case: Case) -> Script:
    ranks = members(case)
    ask = Ask.of(case, "all_reduce", len(ranks))
    given = [ask.added(at) for at in range(ask.size)]
    constants = texts.table("GIVEN", dict(zip(ranks, given, strict=True)))
    body = [*texts.group(case), *texts.outsiders(case), "x = GIVEN[rank]", f"for _ in range({AGAIN}):"]
    body += [f"    dist.all_reduce(x, op=dist.ReduceOp.{ask.op.upper()}, group=group)"]
    return scripts.script([*body, f"return {scripts.tensor(collective.reduced(given, ask.op))}, x"], world=case.world, constants=constants)


def draw_new_group(limits: Limits) -> SearchStrategy[Case]:
    @st.composite
    def case(draw: st.DrawFn) -> Case:
        mesh = draw(groups(world_size=limits.world_size))
        kept = "kept" if list(mesh.ranks) != sorted(mesh.ranks) and draw(st.booleans()) else None
        world = max(mesh.ranks) + 2
        return Case.of(
            "collective.new-group", mesh=mesh, ranks=kept, world=world if world <= limits.world_size and draw(one_in(4)) else None
        )

    return case()


def check_new_group(case: Case, here: Here) -> None:
    """A new group has the members that it was made of, counts them in their order, works, and can be destroyed and made again."""
    ranks = members(case)
    options: dict[str, Any] = {"sort_ranks": False} if case.get("ranks", "") == "kept" else {}
    if options and not keeps_order():
        here.reject(NO_ORDER)
    for turn in range(2):
        group = dist.new_group(list(case.mesh().ranks), **options)
        if here.rank not in ranks:
            here.require(group is dist.GroupMember.NON_GROUP_MEMBER, "wrong-value", "outside", "a rank outside was given a group")
            continue
        at = ranks.index(here.rank)
        said = (dist.get_process_group_ranks(group), dist.get_world_size(group), dist.get_rank(group))
        here.require(said == (list(ranks), len(ranks), at), "wrong-value", "members", "the group counts other members",
                     (list(ranks), len(ranks), at), said)  # fmt: skip
        places = [dist.get_group_rank(group, rank) for rank in ranks], [dist.get_global_rank(group, at) for at in range(len(ranks))]
        due = list(range(len(ranks))), list(ranks)
        here.require(places == due, "wrong-value", "places", "the group places its members otherwise", due, places)
        out = [here.tensor(torch.full((1,), STALE)) for _ in ranks]
        dist.all_gather(out, here.tensor(torch.tensor([here.rank + 10 * turn])), group=group)
        got, want = [int(value) for value in out], [rank + 10 * turn for rank in ranks]
        here.require(got == want, "wrong-value", "traffic", "the group carries other values", want, got)
        dist.destroy_process_group(group)


def script_new_group(case: Case) -> Script:
    ranks = list(members(case))
    kept = ", sort_ranks=False" if case.get("ranks", "") == "kept" else ""
    body = ["said = []", "for turn in range(2):", f"    group = dist.new_group({list(case.mesh().ranks)}{kept})"]
    body += [f"    if rank not in {ranks}:", "        continue"] if len(ranks) < case.world else []
    body += ["    out = [torch.zeros(1) for _ in range(dist.get_world_size(group))]"]
    body += ["    dist.all_gather(out, torch.full((1,), float(rank + 10 * turn)), group=group)"]
    body += ["    said.append((dist.get_process_group_ranks(group), [int(value) for value in out]))"]
    body += ["    dist.destroy_process_group(group)"]
    want = [(ranks, [rank + 10 * turn for rank in ranks]) for turn in range(2)]
    return scripts.script([*body, f"return {want} if rank in {ranks} else [], said"], world=case.world)


def features_new_group(case: Case) -> set[str]:
    return features(case) | {"new-group"}


def features_again(case: Case) -> set[str]:
    return features(case) | {"repeated"}


LAWS = (
    Law(
        id="collective.barrier",
        clause="Nobody leaves a barrier before all members of its group have come to it.",
        source=DOC + "barrier",
        check=check_barrier,
        script=script_barrier,
        features=features,
        control="collective.barrier mesh=2 late=1",
        planted="barrier_does_not_wait",
        draw=draw_barrier,
        draws=20,
        needs=("subgroups",),
        weight=0.3,
    ),
    Law(
        id="collective.composed",
        clause="reduce and broadcast are all_reduce, reduce and scatter reduce_scatter; all_gather undoes scatter, all_to_all itself.",
        source="MPI standard, collective communication; torch.distributed docs, collective functions",
        check=check_composed,
        script=script_composed,
        features=features,
        control="collective.composed mesh=2 x=5x3 how=reduce-scatter",
        planted="scatter_swaps_last_two",
        draw=draw_composed,
        draws=40,
        needs=("all_gather", "all_to_all", "broadcast", "reduce", "scatter", "subgroups"),
        weight=0.3,
    ),
    Law(
        id="collective.again",
        clause="A reduction by which equals are no more than one of them gives the same when it is repeated.",
        source="torch.distributed docs, ReduceOp; a sum of bools is true where any is",
        check=check_again,
        script=script_again,
        features=features_again,
        control="collective.again mesh=2 x=5x3 op=max",
        planted="all_reduce_takes_sum",
        sweep=sweep_again,
        sweeps=4,
        draw=draw_again,
        draws=40,
        needs=("all_reduce", "subgroups"),
        weight=0.2,
    ),
    Law(
        id="collective.new-group",
        clause="A new group has its members in their order, carries what they send, and can be destroyed and made again.",
        source=DOC + "new_group, destroy_process_group",
        check=check_new_group,
        script=script_new_group,
        features=features_new_group,
        control="collective.new-group mesh=2",
        planted="new_group_counts_backwards",
        draw=draw_new_group,
        draws=12,
        needs=("all_gather", "subgroups"),
        weight=0.3,
    ),
)
