"""Run cases similar to one that deviates: simpler variants of it, the most similar cases of its law's plan, and the controls of other laws
of its chapter.

Those that hold tell which of the functions that the deviating case calls are not at fault.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.features.features import features_of, parse_spec
from shardlaw.conformance.laws import catalogue
from shardlaw.conformance.run.search import Plan, StopDrawing
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.notation import NotationError
from shardlaw.reference.placement import Partial, Placements, Replicate, format_placements, parse_placements
from shardlaw.reference.tensors import TensorSpec

if TYPE_CHECKING:
    from shardlaw.conformance.law.law import Law, Limits
    from shardlaw.conformance.law.verdict import Verdict
    from shardlaw.conformance.world import Pool

MAX_PLAN_CASES, MAX_SIMILAR = 60, 12
BATCH = 6
SECONDS = 5.0
MAX_CONTROLS = 12
NON_TENSOR_FIELDS = ("mesh", "steps", "seed", "world", "wrt")


def trace_nearby(pool: Pool, law: Law, case: Case, limits: Limits, seconds: float = SECONDS) -> list[Verdict]:
    """Trace the law's control and cases similar to ``case``: one batch at least, more until ``seconds`` have passed."""
    simpler = [other for other in simpler_cases(case) if _fits_target(law, other, limits)]
    control = Case.parse(law.control)
    verdicts = [pool.check_fresh(law, control, traced="at end")] if _fits_target(law, control, limits) else []
    pending = [*simpler, *most_similar_cases(law, case, limits)]
    deadline = time.monotonic() + seconds
    while pending:
        verdicts += pool.check(law, pending[:BATCH], traced="at end")
        pending = pending[BATCH:] if time.monotonic() < deadline else []
    return verdicts


def trace_controls(pool: Pool, chapter: str, limits: Limits, known: dict[str, list[Verdict]]) -> list[Verdict]:
    """The controls of a dozen laws of a chapter, evenly spread over it, that hold, traced and without their steps; ``known`` keeps them, by
    chapter. Where one hangs or crashes, no further ones are tried."""
    if chapter not in known:
        laws = [law for law in catalogue().values() if law.chapter == chapter]
        verdicts: list[Verdict] = []
        for law in laws[:: -(-len(laws) // MAX_CONTROLS) or 1]:
            control = Case.parse(law.control)
            if not _fits_target(law, control, limits) or law.needs_own_world(control):
                continue
            verdicts += pool.check(law, [control], traced="at end")
            if verdicts[-1].kind in ("hang", "crash"):
                break
        known[chapter] = [_without_steps(verdict) for verdict in verdicts if verdict.status == "held"]
    return known[chapter]


def _without_steps(verdict: Verdict) -> Verdict:
    """A verdict without the tensors of its traces: what ran is enough to tell that a function is not at fault."""
    ranks = (replace(answer, evidence=answer.evidence and replace(answer.evidence, steps=())) for answer in verdict.ranks)
    return replace(verdict, ranks=tuple(ranks))


def _fits_target(law: Law, case: Case, limits: Limits) -> bool:
    """Whether the target can do what a law needs and has enough ranks for a case, and the case has the fields that tell what world it
    needs."""
    try:
        law.needs_own_world(case)
        return limits.cannot.isdisjoint(law.needs) and max(law.worlds(case)) <= limits.most
    except NotationError:
        return False


def most_similar_cases(law: Law, case: Case, limits: Limits) -> list[Case]:
    """The cases, among the first of a law's plan, whose features differ least from those of ``case``."""
    found: list[Case] = []

    def take(other: Case, is_drawn: bool) -> None:
        found.append(other)
        if len(found) >= MAX_PLAN_CASES:
            raise StopDrawing

    with suppress(StopDrawing):
        Plan.for_law(law, limits, 0, "smoke").feed(take)
    features = features_of(case, law)
    others = [other for other in found if other != case]
    return sorted(others, key=lambda other: len(features_of(other, law) ^ features))[:MAX_SIMILAR]


def simpler_cases(case: Case) -> list[Case]:
    """Variants of a case that are simpler in one respect: mesh, one placement, one extent (even shards), dtype, fill, memory, fewer steps,
    or one field less. Some of them are invalid."""
    return list(dict.fromkeys(other for other in _simplify(case) if other != case))


def _simplify(case: Case) -> Iterator[Case]:
    mesh = case.mesh() if "mesh" in case else None
    if mesh is not None:
        yield from _simplify_mesh(case, mesh)
    ranks = mesh.size if mesh is not None else 2
    replicated: dict[str, str] = {}
    for name, text in case.fields:
        spec = None if name in NON_TENSOR_FIELDS or name.startswith("mesh.") else parse_spec(text)
        if spec is not None:
            yield from (case.with_fields(**{name: str(other)}) for other in _simplify_tensor(spec, ranks))
            replicated[name] = str(replace(spec, placements=spec.placements and (Replicate(),) * len(spec.placements)))
        elif name == "steps":
            steps = text.split(";")
            yield from (case.with_fields(**{name: ";".join(steps[:count])}) for count in range(1, len(steps)))
        elif (placements := _parse_placements(text)) is not None:
            yield from (case.with_fields(**{name: format_placements(other)}) for other in _simplify_placements(placements))
        elif name not in ("mesh", "world"):
            yield replace(case, fields=tuple(field for field in case.fields if field[0] != name))
    yield replace(case, fields=tuple((name, replicated.get(name, text)) for name, text in case.fields))


def _simplify_mesh(case: Case, mesh: Mesh) -> Iterator[Case]:
    """The case with ranks in order, without mesh dims of one rank, and on single mesh dims."""
    for sizes in (mesh.shape, [max(2, size) for size in mesh.shape]):
        yield case.with_fields(mesh="x".join(map(str, sizes)))
    if mesh.ndim > 1:
        for dim, size in enumerate(mesh.shape):
            yield _restrict_to_mesh_dim(case, dim, mesh.ndim, max(2, size))


def _simplify_tensor(spec: TensorSpec, ranks: int) -> Iterator[TensorSpec]:
    yield replace(spec, memory="plain")
    if not spec.fill.startswith("index"):
        yield replace(spec, fill="distinct")
        yield replace(spec, dtype="float32")
    for placements in _simplify_placements(spec.placements or ()):
        yield replace(spec, placements=placements)
    for at, extent in enumerate(spec.shape):
        even = max(ranks, -(-extent // ranks) * ranks)
        yield replace(spec, shape=(*spec.shape[:at], even, *spec.shape[at + 1 :]))


def _simplify_placements(placements: Placements) -> Iterator[Placements]:
    for at, placement in enumerate(placements):
        for other in (Replicate(), Partial("sum")) if isinstance(placement, Partial) else (Replicate(),):
            yield (*placements[:at], other, *placements[at + 1 :])


def _restrict_to_mesh_dim(case: Case, dim: int, ndim: int, size: int) -> Case:
    """The case on one dim of its mesh."""
    fields = []
    for name, text in case.fields:
        spec, placements = parse_spec(text), _parse_placements(text)
        if name == "mesh":
            text = str(size)
        elif spec is not None and spec.placements is not None and len(spec.placements) == ndim:
            text = str(replace(spec, placements=(spec.placements[dim],)))
        elif placements is not None and len(placements) == ndim:
            text = str(placements[dim])
        fields.append((name, text))
    return replace(case, fields=tuple(fields))


def _parse_placements(text: str) -> Placements | None:
    try:
        return parse_placements(text)
    except NotationError:
        return None
