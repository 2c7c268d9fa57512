"""A law as a rank tries it: read the case, ask what is due, build the arguments, act, compare."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from shardlaw.conformance import compat
from shardlaw.conformance.law import due
from shardlaw.conformance.law.features.layout_features import placement_features
from shardlaw.conformance.law.program.fields import ProgramField
from shardlaw.conformance.law.program.parse import PlainRunObserver, observe_plain_runs
from shardlaw.conformance.law.verdict import HarnessError
from shardlaw.conformance.rank.context import Rejected

if TYPE_CHECKING:
    from shardlaw.conformance.law.case import Case
    from shardlaw.conformance.law.law import Law
    from shardlaw.conformance.rank.context import RankContext


def try_case(law: Law, case: Case, here: RankContext) -> None:
    """Try a law on this rank, and record in ``here`` what deviates. What the act raises comes out of it."""
    if not law.acts:
        assert law.check is not None
        with _traced(here):
            law.check(case, here)
        return
    act = law.acts[here.stage]
    watched = any(isinstance(parameter.type, ProgramField) for parameter in act.all_parameters().values())
    members = law.member_ranks(case, here.stage)
    if members is not None and here.rank not in members:
        act.arguments(case, here)  # making meshes and groups takes all ranks
        return
    try:
        with observe_plain_runs(RankWatcher(case, here)) if watched else nullcontext():
            wanted = due.by_key(act.due_on(case, here.rank, here.world))
    except due.Meaningless as error:
        raise Rejected(str(error)) from None
    except Exception as error:
        raise HarnessError(f"{law.id}: what is due cannot be said: {type(error).__name__}: {error}") from error
    try:
        arguments = act.arguments(case, here)
        with act.surround(case), _traced(here):
            got = due.by_key(act.function(**arguments))
    except (due.Meaningless, compat.TorchMovedError) as none:  # on all ranks alike: there is nothing here that the law is about
        raise Rejected(str(none)) from None
    compare(here, got, wanted)


def _traced(here: RankContext) -> AbstractContextManager[None]:
    return here.tracer.listening() if here.tracer is not None else nullcontext()


class RankWatcher(PlainRunObserver):
    """Counts what a program does on plain tensors as features of its case: the layouts that it asks for and, on one rank, which is
    enough, the aten overloads that it calls."""

    def __init__(self, case: Case, here: RankContext) -> None:
        self._case, self._here = case, here

    def plain_run_context(self) -> AbstractContextManager[Any]:
        reached = self._here.reached
        return compat.each_overload(lambda func, *given: reached(f"op:{func}")) if self._here.rank == 0 else nullcontext()

    def on_redistribute(self, tensor: Any, placements: str) -> None:
        for feature in placement_features(tuple(tensor.shape), self._case.get("mesh"), placements):
            self._here.reached(feature)


def compare(here: RankContext, got: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Compare key by key; a key that one of the two lacks is a deviation of it."""
    for key, want in wanted.items():
        if here.require(key in got, "wrong-metadata", key, f"there is no {key}", want, ""):
            due.compare(here, key, got[key], want)
    for key in got:
        if key not in wanted:
            here.deviates("wrong-metadata", key, f"there is a {key}, of which nothing is due", "", got[key])
