"""Worlds with planted faults, and the first cases of a law: what the tests of all chapters share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.law import Law, Limits
from shardlaw.conformance.law.target import Target
from shardlaw.conformance.law.verdict import Verdict
from shardlaw.conformance.laws import MODULES, laws_of
from shardlaw.conformance.run.search import draw, law_seed
from shardlaw.conformance.world import Pool

ROOT = Path(__file__).parents[2]
FIRST_CASES = 48
PLANT = "tests.planted.hook:plant"
UNSEEN = ("held", "refused", "rejected", "hang", "crash")  # what does not show that a fault was seen


def in_folders(*folders: str) -> list[Law]:
    """The laws of these folders of the catalogue."""
    return [law for room in MODULES if room.partition(".")[0] in folders for law in in_room(room)]


def in_room(room: str) -> tuple[Law, ...]:
    """The laws of one module of the catalogue."""
    return laws_of(f"shardlaw.conformance.laws.{room}")


def first_cases(law: Law, count: int = FIRST_CASES) -> list[Case]:
    """What a run tries first, after the control."""
    cases, limits = [Case.parse(law.control)], Limits()
    if law.sweep is not None:
        listed = law.sweep(limits)
        cases += [listed[at] for at in range(min(count, len(listed)))]
    if law.draw is not None:
        draw(law.draw(limits), law_seed(0, law.id), count, cases.append)
    return list(dict.fromkeys(cases))


@dataclass
class Plant:
    """Worlds in which one fault at a time is planted: every case goes to worlds of its own, made after the fault was named."""

    pool: Pool
    named: Path

    def verdict(self, law: Law, case: Case, fault: str = "") -> Verdict:
        """The verdict on a case in a fresh world with the fault."""
        self.named.write_text(fault)
        return self.pool.check_fresh(law, case)

    def judge(self, law: Law, cases: Sequence[Case], fault: str = "") -> str:
        """What is said of the first case that deviates, or else of the last."""
        said = ""
        for case in cases:
            verdict = self.verdict(law, case, fault)
            said = verdict.kind or verdict.status
            if verdict.status == "deviates":
                break
        return said

    def holds(self, law: Law, case: Case) -> str:
        """What is said of a case in a world that has served others, without any fault."""
        self.named.write_text("")
        (verdict,) = self.pool.check(law, [case])
        return verdict.message if verdict.status != "held" else "held"


@contextmanager
def planting(folder: Path) -> Iterator[Plant]:
    """Worlds whose ranks plant what a file names, from a module of ``tests.planted``."""
    named = folder / "fault"
    named.write_text("")
    with Pool(plantable(named)) as pool:
        yield Plant(pool, named)


def plantable(named: Path, timeout: float = Target.timeout) -> Target:
    """A target whose ranks plant the fault that a file names when they start."""
    env = (("PYTHONPATH", str(ROOT)), ("PLANTED_FAULT_FILE", str(named)))
    return Target(setup="tests.planted.hook:planted", env=env, timeout=timeout)
