"""Compares one sharded run with the whole model, tensor by tensor, and attributes the first departure to a submodule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from shardlaw.conformance.twin.align import Aligner, TensorComparison
from shardlaw.conformance.twin.record import BACKWARD, BEFORE_STEP, FORWARD, GRADIENTS, PHASES, START, STEP, Key, LocalTensor
from shardlaw.conformance.twin.spec import Plan
from shardlaw.conformance.twin.steps import RankRun, WholeRun

MAX_TRIES = 8  # ops of one name that are tried as the counterpart of an op of the whole model
NO_GRADIENT = "there is no gradient on rank"


@dataclass(frozen=True)
class Departure:
    """The first tensor that departs.

    - ``path``: the submodule that computed it, or ``(loss)``, ``(before_step)``, ``(optimizer)``.
    - ``via``: the tensor before it that is right only as a sum over ranks; the reduction may be missing.
    - ``op``: the first op in the submodule that departs; ``trail``: the submodule's ops on rank 0.
    """

    plan: Plan
    path: str
    judged: TensorComparison
    via: str = ""
    op: TensorComparison | None = None
    trail: tuple[str, ...] = ()

    @property
    def signature(self) -> tuple[str, str, str]:
        """What stays the same while a plan shrinks: the path without numbers, the phase, and which tensor."""
        letters = "".join("#" if letter.isdigit() else letter for letter in self.path)
        return letters, self.judged.key.phase, self.judged.key.what

    def lines(self) -> list[str]:
        """The report, line by line."""
        one = self.judged
        lines = [f"departs first: {self.path or '(the model)'}"]
        lines += [f"  {one.key}"]
        if one.word:
            lines += [f"  {one.word}"]
        elif one.rank >= 0:
            times = f"{one.ratio:,.0f} times the bound" if one.bound else "bound zero: these sums are exact"
            lines += [f"  on rank {one.rank} {one.wrong} elements differ, by up to {one.seen:.3g}, and may by {one.bound:.3g}: {times}"]
        lines += [f"    {list(index)} is {got:.9g}, must be {want:.9g}" for index, got, want in one.elements]
        if one.key.phase == START:
            lines += ["  values that are drawn or loaded after sharding are another model's: shard those that it has"]
        lines += [f"  held as {one.layout}"] if one.layout != "none" else []
        lines += [f"  before it, {self.via}"] if self.via else []
        if self.op is not None:
            lines += [f"  the op behind it: {self.op.key.what.removeprefix('op ')}, off by {self.op.seen:.3g}, bound {self.op.bound:.3g}"]
        return lines


@dataclass(frozen=True)
class RunComparison:
    """The comparison of one run. ``silent``: submodules of the whole model without any tensor in the sharded one. ``failed``: why the
    sharded model did not run."""

    plan: Plan
    judged: tuple[TensorComparison, ...] = ()
    departure: Departure | None = None
    classes: dict[str, str] = field(default_factory=dict)
    silent: tuple[str, ...] = ()
    failed: str = ""

    @property
    def departs(self) -> bool:
        """Whether the sharded model differs from the whole one, or does not run."""
        return self.departure is not None or bool(self.failed)


def compare_run(plan: Plan, whole: WholeRun, parts: Sequence[RankRun]) -> RunComparison:
    """Compare what the ranks recorded with the whole model."""
    aligner = Aligner(plan.reference_mesh(), tuple(plan.mesh), any(key.phase == BEFORE_STEP for key in whole.tensors))
    judged: list[TensorComparison] = []
    for key, want in whole.tensors.items():
        if key.is_op:
            continue
        pieces = {rank: part.pieces[key] for rank, part in enumerate(parts) if key in part.pieces}
        one = aligner.compare(key, want, whole.bounds[key], pieces) if pieces else None
        lost = _missing_gradient(key, want, whole.bounds[key], parts) if key.phase not in (START, FORWARD) else None
        if lost is not None or one is not None:
            judged.append(lost or one)  # type: ignore[arg-type]
    for key, rank, piece in _unexpected_gradients(whole, parts):
        word = f"there is a gradient on rank {rank}, of which the whole model has none"
        judged.append(TensorComparison(key, float(piece.local.abs().max()), 0.0, "none", word=word, rank=rank))
    judged.sort(key=lambda one: (one.key.step, PHASES.index(one.key.phase)))
    met = {one.key.path for one in judged}
    silent = tuple(path for path in dict.fromkeys(key.path for key in whole.tensors) if path not in met)
    found = next((at for at, one in enumerate(judged) if one.departs), None)
    if found is None:
        return RunComparison(plan, tuple(judged), None, whole.classes, silent)
    op = _first_op(whole, parts, aligner, judged[found].key) if plan.ops is not None else None
    return RunComparison(plan, tuple(judged), replace(_attribute_departure(plan, judged, found), op=op), whole.classes, silent)


def _first_op(whole: WholeRun, parts: Sequence[RankRun], aligner: Aligner, within: Key) -> TensorComparison | None:
    """The first op of the whole model, in the step and phase of ``within``, whose result the sharded model does not have.

    Its counterpart is looked for among the next :data:`MAX_TRIES` ops of the same name: the sharded model may run others in between.
    """
    given: dict[Key, dict[int, LocalTensor]] = {}
    for rank, part in enumerate(parts):
        for key in filter(lambda key: key.is_op, part.pieces):
            given.setdefault(key, {})[rank] = part.pieces[key]
    rows: dict[Key, list[Key]] = {}
    for key in given:
        rows.setdefault(_without_number(key), []).append(key)
    met = dict.fromkeys(rows, 0)
    for key, want in whole.tensors.items():
        row = _without_number(key)
        if not key.is_op or row not in rows or (key.step, key.phase) != (within.step, within.phase):
            continue
        tries = [aligner.compare(key, want, whole.bounds[key], given[other]) for other in rows[row][met[row] : met[row] + MAX_TRIES]]
        same = next((at for at, one in enumerate(tries) if not one.departs), None)
        if same is not None:
            met[row] += same + 1
        elif tries := [one for one in tries if not one.word]:
            return min(tries, key=lambda one: one.seen)
    return None


def _without_number(key: Key) -> Key:
    """The key without the op's number."""
    return replace(key, what=key.what.partition("#")[0])


def _missing_gradient(key: Key, want: torch.Tensor, bound: float, parts: Sequence[RankRun]) -> TensorComparison | None:
    """A departure where a rank has a tensor but not its gradient."""
    if key.phase not in (BACKWARD, GRADIENTS, BEFORE_STEP) or not bool(want.count_nonzero()):
        return None
    owner = replace(key, phase=FORWARD) if key.phase == BACKWARD else replace(key, step=-1, phase=START)
    if key.phase == BACKWARD and any(key in part.pieces for part in parts):
        return None  # a rank may have a tensor only as the result of others, without a gradient
    for rank, part in enumerate(parts):
        if key not in part.pieces and owner in part.pieces and part.pieces[owner].local.numel():
            return TensorComparison(key, torch.inf, bound, "none", word=f"{NO_GRADIENT} {rank}", rank=rank)
    return None


def _unexpected_gradients(whole: WholeRun, parts: Sequence[RankRun]) -> list[tuple[Key, int, LocalTensor]]:
    """The first gradient of a parameter for which the whole model has none."""
    known = {key for key in whole.tensors if key.phase == START}
    return [
        (key, rank, piece)
        for rank, part in enumerate(parts)
        for key, piece in part.pieces.items()
        if key.phase == GRADIENTS and key not in whole.tensors and replace(key, step=-1, phase=START) in known
        if bool(piece.local.count_nonzero())
    ][:1]


def _attribute_departure(plan: Plan, judged: Sequence[TensorComparison], at: int) -> Departure:
    """The first departure with its submodule: an output belongs to its own submodule, an input to the parent that passed it; in backward
    the other way round."""
    first = judged[at]
    path, what, phase = first.key.path, first.key.what, first.key.phase
    if (phase == FORWARD and what.startswith("input")) or (phase == BACKWARD and what.startswith("output")):
        path = path.rpartition(".")[0] if path else "(the batch)" if phase == FORWARD else "(loss)"
    elif phase == BEFORE_STEP and any(one.key == replace(first.key, phase=GRADIENTS) for one in judged):
        path = f"(before_step) {path}"
    elif phase == STEP:
        path = f"(optimizer) {path}"
    around = BACKWARD if phase in (GRADIENTS, BEFORE_STEP) else phase
    before = [one for one in judged[:at] if (one.key.step, one.key.phase) == (first.key.step, around)]
    pending = None
    while before and before[-1].pending:
        pending = before.pop()
    if pending is None or phase in (START, STEP):
        return Departure(plan, path, first)
    return Departure(plan, pending.key.path, first, f"{pending.key} is whole only as a sum over ranks ({pending.layout})")
