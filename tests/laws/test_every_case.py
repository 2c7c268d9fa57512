"""What a run tries of every law: its cases read back, say what their law takes, have features that are known, and become scripts.

No ranks are started: ``test_every_law.py`` and ``test_every_op.py`` try cases on some.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shardlaw.conformance.law.act import check_case
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.features.features import features_of, is_known
from shardlaw.conformance.law.law import CHAPTERS, Law, Limits
from shardlaw.conformance.law.program.fields import operands_of
from shardlaw.conformance.law.program.parse import Program
from shardlaw.conformance.laws import MODULES
from shardlaw.conformance.laws.op.backward import leaf_names, run_dense
from shardlaw.conformance.laws.op.results import dense_operands, specs
from shardlaw.conformance.report.reproducer import render_reproducer
from shardlaw.conformance.run.search import draw, law_seed
from tests.laws.planting import in_room

# laws of ops are many of a kind; those of one op, which read the same samples, stand together
PART = 100
LAWS = {room: sorted(in_room(room), key=lambda law: law.variant) for room in MODULES}
PARTS = [
    # the samples of torch's database take a minute to read
    pytest.param(room, part, marks=[pytest.mark.ranks] if room.startswith("op.") else [])
    for room, laws in LAWS.items()
    for part in range(0, len(laws), PART)
]
SPREAD = 10
RUN_PLAIN = ("op.forward", "op.backward", "op.programs")
ONE_PROCESS = ("plan.", "layout.arithmetic")


def record(law: Law) -> Iterator[str]:
    """What a law leaves out of its record."""
    if law.chapter not in CHAPTERS:
        yield "is of no chapter"
    if not (law.clause.strip() and law.source.strip() and (law.acts or law.check)):
        yield "has no clause, no source or nothing that checks"
    if not (law.sweeps or law.draws) or bool(law.sweeps) != (law.sweep is not None) or bool(law.draws) != (law.draw is not None):
        yield "makes no cases, or does not say how many"


def cases_of(law: Law, first: int, drawn: int) -> tuple[list[Case], list[Case], list[Case]]:
    """The control and the first cases of an enumerator, those that are spread over it, and those that are drawn."""
    cases, spread, found = [Case.parse(law.control)], list[Case](), list[Case]()
    if law.sweep is not None:
        listed = law.sweep(Limits())
        cases += [listed[at] for at in range(min(first, len(listed)))]
        spread = [listed[at] for at in range(0, len(listed), max(1, len(listed) // SPREAD))]
        tried = [listed[at] for at in range(min(law.sweeps, len(listed)))]
        assert tried, "no case is enumerated"
        assert tried == [listed[at] for at in range(len(tried))], "other cases are enumerated the second time"
        spread += tried
    if law.draw is not None:
        draw(law.draw(Limits()), law_seed(0, law.id), drawn, found.append)
    return cases, spread, found


def told(law: Law, case: Case, room: str) -> Iterator[str]:
    """What is wrong with a case as a text."""
    if case.law != law.id:
        yield "is of another law"
    if room.startswith(ONE_PROCESS) and case.world != 1:
        yield "is for more than one process"
    if Case.parse(case.text) != case or Case.from_json(case.to_json()) != case:
        yield "reads back to another case"
    if case.world > 4:
        yield f"wants {case.world} ranks"
    yield from (f"has an unknown feature {feature}" for feature in features_of(case, law) if not is_known(feature))
    check_case(law, case)


def script(law: Law, case: Case, room: str) -> Iterator[str]:
    """What is wrong with the script of a case, beyond what keeps a script from being written."""
    text = render_reproducer(law, case)
    if "dist.init_process_group" not in text or (law.chapter == "op" and "shardlaw" in text):
        yield "has a script that is none of torch alone"
    if case.text == law.control:
        compile(text, law.id, "exec")


def plain(law: Law, case: Case, room: str) -> Iterator[str]:
    """What is wrong with the steps of a case on plain tensors."""
    steps = Program.parse(case.get("steps"))
    if str(steps) != case.get("steps"):
        yield "has steps that print otherwise"
    if "wrt" in case:
        run = run_dense(case)
        if not run.output_grads or [*run.grads] != leaf_names(case):
            yield f"gives gradients to {[*run.grads]}"
    elif room != "op.forward" or not any(0 in spec.shape or spec.memory != "plain" for spec in specs(case).values()):
        steps.run_plain(dense_operands(operands_of(case)))


def wrong_with(law: Law, room: str) -> Iterator[str]:
    yield from record(law)
    of_op = law.chapter == "op"
    some, spread, drawn = cases_of(law, 3 if of_op else 24, 5 if of_op else 24)
    tried = [(told, case) for case in dict.fromkeys([*some, *spread, *drawn])]
    tried += [(script, case) for case in (some[:1] if of_op else dict.fromkeys([*some[:7], *drawn[:6]]))]
    tried += [(plain, case) for case in dict.fromkeys([*some, *drawn[:3]]) if room in RUN_PLAIN]
    for look, case in tried:
        try:
            yield from (f"{case}: {one}" for one in look(law, case, room))
        except Exception as error:
            yield f"{case}: {look.__name__}: {type(error).__name__}: {error}"


@pytest.mark.parametrize(("room", "part"), PARTS, ids=str)
def test_every_case_can_be_told_again_and_has_a_script(room: str, part: int) -> None:
    wrong = {law.id: found for law in LAWS[room][part : part + PART] if (found := [*wrong_with(law, room)])}
    assert wrong == {}
