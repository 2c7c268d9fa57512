"""Laws of the collectives that DTensor and checkpoints stand on: each gives every member what its list specification says."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hypothesis.strategies import SearchStrategy

from conformance.case import Case
from conformance.law import Law, Limits
from conformance.laws.collective import scripts as texts
from conformance.laws.collective.calls import KINDS, Ask, made, members, went
from conformance.laws.collective.draws import drawn, features
from conformance.report.reproducer import Script

if TYPE_CHECKING:
    from conformance.here import Here

DOC = "torch.distributed docs, "
# the function behind a law, by the form of what it takes or gives
FORMS = {
    "collective.all-gather": {"list": "all_gather", "joined": "all_gather_single", "stacked": "all_gather_single"},
    "collective.reduce-scatter": {"list": "reduce_scatter", "joined": "reduce_scatter_single", "stacked": "reduce_scatter_single"},
    "collective.all-to-all": {"list": "all_to_all", "joined": "all_to_all_single"},
}


def called(case: Case) -> str:
    """The collective that a case of one collective calls."""
    forms = FORMS.get(case.law)
    return forms[case.get("form")] if forms else case.law.removeprefix("collective.").replace("-", "_")


def check(case: Case, here: Here) -> None:
    """Each member gets what its list specification says; nothing beside it is written, and what was only read is as it was."""
    call = made(case, here, called(case))
    if call is not None and went(case, here, call):
        call.judge(here)


def script(case: Case) -> Script:
    ask = Ask.of(case, called(case), len(members(case)))
    return texts.call(case, ask, KINDS[ask.name].parts(ask))


def law(
    name: str, clause: str, control: str, planted: str, *, draws: int, corners: tuple[str, ...] = (), source: str = "", **ways: Any
) -> Law:
    """A law of one collective; ``corners`` are cases that every run tries, since they are drawn seldom."""
    law_id = f"collective.{name}"

    def sweep(limits: Limits) -> list[Case]:
        return [case for text in corners if (case := Case.parse(f"{law_id} {text}")).world <= limits.world_size]

    def draw(limits: Limits) -> SearchStrategy[Case]:
        return drawn(law_id, limits, **ways)

    def narrow(case: Case) -> SearchStrategy[Case]:
        return drawn(law_id, Limits(case.world, (case.tensor("x").dtype,)), **ways)

    strategy: Callable[[Limits], SearchStrategy[Case]] = draw
    return Law(
        id=law_id,
        clause=clause,
        source=DOC + (source or name.replace("-", "_")),
        check=check,
        script=script,
        features=features,
        control=f"{law_id} {control}",
        planted=planted,
        sweep=sweep,
        sweeps=len(corners),
        draw=strategy,
        draws=draws,
        narrow=narrow,
        needs=(name.replace("-", "_"), "subgroups"),
        weight=0.4,
    )


LAWS = (
    law(
        "all-reduce",
        "all_reduce leaves the reduction of all members' tensors with each of them.",
        "mesh=2 x=5x3",
        "all_reduce_takes_maximum",
        corners=(
            "mesh=2 x=5x3:-:float32:distinct:sliced",
            "mesh=3 x=5x3:-:float32:distinct:transposed op=max",
        ),
        draws=60,
        reduces=True,
        changes=True,
    ),
    law(
        "reduce",
        "reduce leaves the reduction of all members' tensors with the destination.",
        "mesh=2 x=5x3 root=1",
        "reduce_skips_last_member",
        corners=(
            "mesh=2 x=5x3:-:float32:distinct:sliced",
            "mesh=3 x=5x3:-:float32:distinct:transposed root=1",
        ),
        draws=50,
        root=True,
        reduces=True,
        changes=True,
    ),
    law(
        "broadcast",
        "broadcast leaves what the source has with every member, whether the source is named by rank or by position.",
        "mesh=2 x=5x3 root=1",
        "broadcast_from_first_member",
        corners=(
            "mesh=2 x=5x3:-:float32:distinct:sliced root=1",
            "mesh=3 x=5x3:-:float32:distinct:transposed root=1",
        ),
        draws=50,
        root=True,
        changes=True,
    ),
    law(
        "all-gather",
        "all_gather gives every member what all members have, in the order of the group, as a list or as one tensor.",
        "mesh=3 x=5x3 form=list",
        "all_gather_swaps_last_two",
        corners=(
            "mesh=2 x=5x3 form=stacked",
            "mesh=2 x=() form=stacked",
            "mesh=3 x=2x3 form=list extents=1.3.0",
            "mesh=2 x=5x3:-:float32:distinct:transposed form=list",
            "mesh=2 x=5x3:-:float32:distinct:sliced form=joined",
            "mesh=2 x=5x3 out=sliced form=list",
            "mesh=2 x=5x3 out=transposed form=joined",
        ),
        draws=100,
        source="all_gather, all_gather_single",
        forms=("joined",) * 16 + ("list",) * 15 + ("stacked",),
        uneven=("list",),
        uneven_one_in=14,
        whole=("list", "stacked"),
    ),
    law(
        "gather",
        "gather gives the destination what all members have, in the order of the group.",
        "mesh=3 x=5x3 root=1",
        "gather_drops_last_element",
        corners=(
            "mesh=2 x=5x3:-:float32:distinct:sliced",
            "mesh=2 x=5x3 out=transposed",
        ),
        draws=50,
        root=True,
    ),
    law(
        "scatter",
        "scatter gives the member at position i entry i of the list that the source has.",
        "mesh=3 x=5x3 root=1",
        "scatter_swaps_last_two",
        draws=50,
        corners=(
            "mesh=2 x=5x3:-:float32:distinct:transposed",
            "mesh=2 x=5x3 out=transposed",
        ),
        root=True,
    ),
    law(
        "reduce-scatter",
        "reduce_scatter gives the member at position i the reduction of all members' entries i, from lists or from one tensor each.",
        "mesh=2 x=5x3 form=joined",
        "reduce_scatter_rotates",
        corners=(
            "mesh=2 x=5x3 form=stacked",
            "mesh=2 x=() form=stacked",
            "mesh=2 x=5x3 form=list work=async",
            "mesh=2 x=5x3:-:float32:distinct:transposed form=list",
            "mesh=2 x=5x3:-:float32:distinct:sliced form=joined",
            "mesh=2 x=5x3 out=sliced form=list",
            "mesh=2 x=5x3 out=transposed form=joined",
        ),
        draws=100,
        source="reduce_scatter, reduce_scatter_single",
        forms=("joined",) * 16 + ("list",) * 15 + ("stacked",),
        reduces=True,
        uneven=("list",),
        whole=("stacked",),
        expanded=False,
        async_one_in=20,
    ),
    law(
        "all-to-all",
        "all_to_all gives the member at position j, as entry i, entry j of the member at position i, for splits of any sizes too.",
        "mesh=2 x=3x2 form=joined splits=1.2/0.3",
        "all_to_all_ignores_splits",
        corners=(
            "mesh=2 x=3x2 form=list splits=1.2/3.1",
            "mesh=3 x=3 form=list splits=1.2.0/3.1.1/0.0.2",
            "mesh=2 x=3x2 out=transposed form=joined",
            "mesh=2 x=3x2:-:float32:distinct:transposed form=joined",
            "mesh=2 x=3x2 out=sliced form=list",
        ),
        draws=100,
        source="all_to_all, all_to_all_single",
        forms=("joined",) * 5 + ("list",),
        uneven=("joined",),
        uneven_one_in=3,
        splits=True,
        min_dims=1,
    ),
)
