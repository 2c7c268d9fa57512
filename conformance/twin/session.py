"""Compares a sharded model with the whole one: each kind of values, the first departure, the op that causes it, a smaller plan."""

from __future__ import annotations

import re
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

from shardlaw.conformance.api import Worlds, explain
from shardlaw.conformance.errors import UsageError, one_of
from shardlaw.conformance.law.target import Target
from shardlaw.conformance.law.verdict import Verdict
from shardlaw.conformance.rank.spmd import Function
from shardlaw.conformance.twin.comparison import Departure, RunComparison, compare_run
from shardlaw.conformance.twin.dropout import compare_dropout as dropout_judged
from shardlaw.conformance.twin.spec import VALUES, Plan, Twin, call_make, find_make
from shardlaw.conformance.twin.steps import RankRun, WholeRun

RANK_MODULE = "shardlaw.conformance.twin.steps"
SECONDS = 120.0  # the limit of one run on ranks
SHRINK_SECONDS = 20.0
COMMON_FRAMES = r"\n *\S*(?:torch/nn/modules/module|conformance/twin/steps|conformance/rank/perform)\.py:\d+ in .*\n.*"


@dataclass(frozen=True)
class Result:
    """One :class:`RunComparison` for each kind of values up to the first that departs. ``smallest``: the same departure, shrunk."""

    name: str
    compared: tuple[RunComparison, ...]
    smallest: Departure | None = None
    seconds: float = 0.0

    @property
    def departs(self) -> bool:
        """Whether the sharded model departs from the whole one."""
        return any(one.departs for one in self.compared)

    @property
    def departure(self) -> Departure | None:
        """The first departure."""
        return next((one.departure for one in self.compared if one.departure), None)


class Session:
    """Live ranks for the twins of one process. A context manager. ``tell`` is called with what is tried next."""

    def __init__(self, target: str | Target = "gloo", seconds: float = SECONDS, tell: Callable[[str], None] = lambda text: None) -> None:
        self._worlds, self._tell = Worlds(target, timeout=seconds), tell
        self._whole_runs: dict[str, WholeRun] = {}

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *error: object) -> None:
        self._worlds.close()

    def run(self, plan: Plan) -> RunComparison:
        """Run a plan, whole and sharded, and compare. Raises :class:`UsageError` where the whole model does not run."""
        whole = self._run_whole(plan)
        parts, failed = self._run_sharded(plan)
        return RunComparison(plan, classes=whole.classes, failed=failed) if failed else compare_run(plan, whole, parts)

    def run_resumed(self, plan: Plan, mesh: Mapping[str, int]) -> RunComparison:
        """Run the first half of the steps and save; load into a new model on ``mesh``, run the second half, and compare that."""
        half = max(1, plan.steps // 2)
        with tempfile.TemporaryDirectory(prefix="shardlaw-twin-") as folder:
            first = replace(plan, save=half, folder=folder)
            _, failed = self._run_sharded(first)
            if failed:
                return RunComparison(first, failed=failed)
            return self.run(replace(plan, load=half, folder=folder, mesh=dict(mesh)))

    def run_with_dropout(self, plan: Plan, calm: RunComparison) -> RunComparison:
        """Run the first step with dropout and check what ranks drop; ``calm`` is the run without. Raises :class:`UsageError`."""
        plan = replace(plan, values=calm.plan.values, steps=1, dropout=True)
        parts, failed = self._run_sharded(plan)
        if failed:
            return RunComparison(plan, classes=calm.classes, failed=failed)
        if not any(part.chances for part in parts):
            raise UsageError("dropout: the sharded model has no torch.nn.Dropout that drops anything; what functions drop cannot be seen")
        return dropout_judged(plan, calm, parts)

    def investigate(
        self,
        plan: Plan,
        kinds: tuple[str, ...],
        shrink: bool = True,
        name: str = "",
        resume: Mapping[str, int] | None = None,
        dropout: bool = False,
    ) -> Result:
        """Run each kind of values until one departs; then find the op that causes it, and the smallest plan with the same departure.
        ``resume``: also save in the middle and resume on this mesh; ``dropout``: also check what ranks drop. Raises :class:`UsageError`."""
        if resume is not None and plan.steps < 2:
            raise UsageError(f"{plan.steps} steps: want 2 or more to resume in the middle")
        started = time.monotonic()
        seen: list[RunComparison] = []
        for values in kinds:
            self._tell(f"values {values}: the whole model, and the sharded one on {plan.ranks} ranks")
            seen.append(self.run(replace(plan, values=values)))
            if resume is not None and not seen[-1].departs:
                seen.append(self.run_resumed(replace(plan, values=values), resume))
            if seen[-1].departs:
                break
        if dropout and not seen[-1].departs:
            seen.append(self.run_with_dropout(plan, seen[0]))
        last = seen[-1]
        smallest = None
        if last.departure is not None and not last.plan.load and not last.plan.dropout:
            seen[-1] = replace(last, departure=self._with_first_op(last.departure))
            if shrink:
                self._tell(f"something departs: looking for the smallest that shows it, {SHRINK_SECONDS:.0f} s or somewhat more")
                smallest = self._shrink(last.departure)
        return Result(name or str(plan.make), tuple(seen), smallest, time.monotonic() - started)

    def _run_sharded(self, plan: Plan) -> tuple[list[RankRun], str]:
        """The runs of all ranks; or none, and why the sharded model does not run."""
        outcome = self._worlds(plan.ranks).judge(f"{RANK_MODULE}:run_sharded", plan, sys.path)
        if outcome.verdict.status != "held":
            return [], describe_failure(outcome.verdict)
        return [outcome.returned[rank] for rank in range(plan.ranks)], ""

    def _run_whole(self, plan: Plan) -> WholeRun:
        key = str(replace(plan, mesh={}, save=0, load=0, folder="").__dict__)
        if key not in self._whole_runs:
            outcome = self._worlds(1).judge(f"{RANK_MODULE}:run_whole", plan, sys.path)
            if outcome.verdict.status != "held":
                raised = next((answer.raised for answer in outcome.verdict.ranks if answer.raised), None)
                if raised is None or raised.error == "UsageError":
                    raise UsageError(raised.text if raised else f"the whole model does not run ({plan}): {outcome.verdict.message}")
                where = next((line for line in reversed(raised.stack.splitlines()) if "torch/" not in line and line.strip()), "")
                raise UsageError(f"the whole model does not run ({plan}): {raised.error}: {raised.text} {where.strip()}")
            self._whole_runs[key] = outcome.returned[0]
        return self._whole_runs[key]

    def _with_first_op(self, departure: Departure) -> Departure:
        """The departure with the first op that departs in its submodule."""
        path = departure.path.rpartition(" ")[2]
        if path.startswith("(") or departure.judged.key.phase not in ("forward", "backward"):
            return departure
        plan = replace(departure.plan, ops=path)
        whole = self._run_whole(plan)
        parts, failed = self._run_sharded(plan)
        if failed:
            return departure
        found = compare_run(plan, whole, parts).departure
        return replace(departure, op=found.op if found else None, trail=parts[0].trail)

    def _shrink(self, departure: Departure) -> Departure:
        """The departure under the smallest plan that shows it. Takes any smaller plan that does, until none does or the time is up."""
        deadline = time.monotonic() + SHRINK_SECONDS
        best = departure
        least = {**departure.plan.twin().smallest(), **dict.fromkeys(departure.plan.mesh, 1)}

        def shows(plan: Plan) -> Departure | None:
            try:
                found = self.run(plan).departure
            except UsageError:  # the model does not run with these sizes
                return None
            return found if found is not None and found.signature == departure.signature else None

        again = True
        while again and time.monotonic() < deadline:
            again = False
            for smaller in smaller_plans(best.plan, least, best.judged.key.step):
                if time.monotonic() > deadline:
                    break
                found = shows(smaller)
                if found is not None:
                    best, again = found, True
                    break
        return replace(self._with_first_op(best), plan=best.plan)


def describe_failure(verdict: Verdict) -> str:
    """Why a sharded model does not run: the ranks' errors, each text once, without the frames that all of them have."""
    head, *blocks = re.split(r"\n  rank (?=\d)", explain(verdict))
    ranks: dict[str, list[str]] = {}
    for block in blocks:
        number, _, text = block.partition(" ")
        ranks.setdefault(re.sub(COMMON_FRAMES, "", text), []).append(number)
    errors = [f"{'ranks' if len(numbers) > 1 else 'rank'} {', '.join(numbers)} {text}" for text, numbers in ranks.items()]
    return "\n".join([head.partition("\n")[0], *errors])


def smaller_plans(plan: Plan, least: Mapping[str, int], step: int) -> list[Plan]:
    """Plans that are smaller in one respect, the smallest first."""
    plans = [replace(plan, steps=max(step, 0) + 1)] if max(step, 0) + 1 < plan.steps else []
    for sizes in (plan.sizes, plan.mesh):
        for name, size in sizes.items():
            for less in sorted({least.get(name, size), size // 2, size - 1}):
                if least.get(name, size) <= less < size:
                    changed = {**sizes, name: less}
                    plans.append(replace(plan, sizes=changed) if sizes is plan.sizes else replace(plan, mesh=changed))
    return [one for one in plans if one.ranks > 1]


def make_plan(
    make: str | Callable[..., Twin],
    options: Mapping[str, str] | None = None,
    sizes: Mapping[str, int] | None = None,
    **rest: Any,
) -> tuple[Plan, Twin]:
    """The plan of a twin, and the twin. ``sizes`` overrides sizes of the twin, those of its mesh among them. Raises :class:`UsageError`."""
    function = find_make(make) if isinstance(make, str) else Function.from_callable(make)
    twin = call_make(function.load(), options or {})
    chosen = {**twin.mesh, **twin.largest(), **(sizes or {})}
    for name, size in chosen.items():
        if name not in twin.mesh and name not in twin.sizes:
            raise UsageError(f"size {name}={size}: the twin has no such size or mesh dim ({one_of(name, [*twin.mesh, *twin.sizes])})")
    replace(twin, mesh={name: chosen[name] for name in twin.mesh}, sizes={name: chosen[name] for name in twin.sizes}).check()
    mesh, own = ({name: chosen[name] for name in known} for known in (twin.mesh, twin.sizes))
    return Plan(function, dict(options or {}), mesh, own, **rest), twin


def resume_mesh(own: Twin, plan: Plan, mesh: Mapping[str, int] | None) -> dict[str, int] | None:
    """The mesh on which a run resumes: the plan's, with the sizes in ``mesh``. Raises :class:`UsageError`."""
    if mesh is None:
        return None
    for name, size in mesh.items():
        if name not in plan.mesh:
            raise UsageError(f"resume {name}={size}: the twin has no such mesh dim ({one_of(name, plan.mesh)})")
    replace(own, mesh={**plan.mesh, **mesh}).check()
    return {**plan.mesh, **mesh}


def twin(
    make: str | Callable[..., Twin],
    *,
    target: str | Target | Session = "gloo",
    options: Mapping[str, str] | None = None,
    sizes: Mapping[str, int] | None = None,
    values: Sequence[str] = (),
    steps: int = 2,
    seed: int = 0,
    shrink: bool = True,
    resume: Mapping[str, int] | None = None,
    dropout: bool = False,
) -> Result:
    """Is a sharded model the whole one? ``make`` is a function at the top of a module, or its ``module:name``.

    - ``target``: on which back end, or on which ranks that are live already.
    - ``options`` are given to ``make``; ``sizes``: instead of the twin's own, those of its mesh among them.
    - ``values``: which of ``exact``, ``float32`` and ``bfloat16`` to try; the twin's own where there are none.
    - ``steps`` of the optimizer; ``seed`` of all values.
    - ``shrink``: whether to look for the smallest sizes and mesh that show a departure.
    - ``resume``: sizes of a mesh on which it goes on from a checkpoint in the middle; ``{}`` for the same mesh.
    - ``dropout``: whether to try what ranks drop.

    Raises :class:`UsageError`.
    """
    for value in values:
        if value not in VALUES:
            raise UsageError(f"values={values!r}: unknown {value!r} ({one_of(value, VALUES)})")
    if steps < 1:
        raise UsageError(f"steps={steps}: want 1 or more")
    plan, own = make_plan(make, options, sizes, steps=steps, seed=seed)
    again = resume_mesh(own, plan, resume)
    with Session(target) if isinstance(target, str | Target) else nullcontext(target) as session:
        return session.investigate(plan, tuple(values) or own.values, shrink, make if isinstance(make, str) else "", again, dropout)
