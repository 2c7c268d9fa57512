"""Run a case of a law on a rank: compute what is due, build the arguments, call the act, compare."""

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
    """Run a case of a law on this rank, and record deviations in ``here``. Raises what the act raises."""
    if not law.acts:
        assert law.check is not None
        with _trace_act(here):
            law.check(case, here)
        return
    act = law.acts[here.stage]
    watched = any(isinstance(parameter.type, ProgramField) for parameter in act.all_parameters().values())
    members = law.member_ranks(case, here.stage)
    if members is not None and here.rank not in members:
        act.arguments(case, here)  # all ranks must create its meshes and groups
        return
    try:
        with observe_plain_runs(RankWatcher(case, here)) if watched else nullcontext():
            wanted = due.by_key(act.due_on(case, here.rank, here.world))
    except due.Meaningless as error:
        raise Rejected(str(error)) from None
    except Exception as error:
        raise HarnessError(f"{law.id}: cannot compute what is due: {type(error).__name__}: {error}") from error
    try:
        arguments = act.arguments(case, here)
        with act.surround(case), _trace_act(here):
            got = due.by_key(act.function(**arguments))
    except (due.Meaningless, compat.TorchMovedError) as error:  # on all ranks alike
        raise Rejected(str(error)) from None
    compare(here, got, wanted)


def _trace_act(here: RankContext) -> AbstractContextManager[None]:
    return here.tracer.recording() if here.tracer is not None else nullcontext()


class RankWatcher(PlainRunObserver):
    """Adds features to a case by what its program does on plain tensors: the layouts to which it redistributes, and, on rank 0 alone, the
    aten overloads that it calls."""

    def __init__(self, case: Case, here: RankContext) -> None:
        self._case, self._here = case, here

    def plain_run_context(self) -> AbstractContextManager[Any]:
        add_feature = self._here.add_feature
        return compat.observe_overloads(lambda func, *_: add_feature(f"op:{func}")) if self._here.rank == 0 else nullcontext()

    def on_redistribute(self, tensor: Any, placements: str) -> None:
        for feature in placement_features(tuple(tensor.shape), self._case.get("mesh"), placements):
            self._here.add_feature(feature)


def compare(here: RankContext, got: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Compare key by key. A key that either side lacks is a deviation."""
    for key, want in wanted.items():
        if here.require(key in got, "wrong-metadata", key, f"there is no {key}", want, ""):
            due.compare(here, key, got[key], want)
    for key in got:
        if key not in wanted:
            here.deviates("wrong-metadata", key, f"there is a {key}, of which nothing is due", "", got[key])
