"""The result of a case: an :class:`Answer` of each rank, and the :class:`Verdict` of the world.

:func:`shardlaw.conformance.world.verdicts.combine_answers` makes the verdict from the answers.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    import torch

    from shardlaw.conformance.law.case import Case
    from shardlaw.conformance.law.evidence import Evidence

Kind = Literal["crash", "hang", "divergence", "raised", "wrong-error", "wrong-layout", "wrong-metadata", "wrong-value"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Outcome = Literal["held", "deviates", "raised", "rejected", "crashed", "silent"]
# when a rank sends the trace of a case: never, with its answer, or at each step too, so that it is not lost with the rank
Tracing = Literal["", "at end", "each step"]
Status = Literal["held", "refused", "rejected", "deviates", "error"]


class HarnessError(Exception):
    """An error of the harness or of a law, not of what is validated: the law is untested, and the run ends with exit code 3."""


@dataclass(frozen=True)
class Raised:
    """An exception that ended a check: its class, its text, and its stack, outermost frame first."""

    error: str
    text: str
    stack: str


@dataclass(frozen=True)
class Deviation:
    """One wrong result on one rank. ``expected`` and ``got`` are texts for people."""

    kind: Kind
    check: str
    message: str
    expected: str = ""
    got: str = ""


@dataclass(frozen=True)
class Deposit:
    """A contribution to a pending reduction, which the driver reduces with those of the other ranks and then compares.

    ``want`` is the expected full tensor; only the lowest member rank sends it.
    """

    check: str
    shape: str
    mesh: str
    placements: str
    local: torch.Tensor
    want: torch.Tensor | None
    exact: bool


@dataclass(frozen=True)
class Answer:
    """The result of one rank for one case.

    ``outcome`` is ``held``, ``deviates``, ``raised`` or ``rejected`` (the case has no defined result: the plain run fails too). For a rank
    that did not answer, the driver sets ``crashed`` or ``silent``.
    """

    rank: int
    outcome: Outcome
    deviations: tuple[Deviation, ...] = ()
    raised: Raised | None = None
    deposits: tuple[Deposit, ...] = ()
    features: tuple[str, ...] = ()
    stack: str = ""
    output: str = ""
    reason: str = ""
    trace: tuple[str, ...] = ()
    evidence: Evidence | None = None


@dataclass(frozen=True)
class Verdict:
    """The result of a world for one case. Where it deviates, ``kind`` is set and ``ranks`` has every rank's answer. With status ``error``,
    ``error`` is the traceback of the harness."""

    case: Case
    status: Status
    kind: Kind | None = None
    check: str = ""
    message: str = ""
    error: str = ""
    ranks: tuple[Answer, ...] = ()
    features: tuple[str, ...] = ()
    history: tuple[Case, ...] = field(default=(), compare=False, repr=False)

    @property
    def word(self) -> str:
        """The kind of the deviation, else the status."""
        return self.kind or self.status

    @property
    def signature(self) -> str:
        """Law, kind, check, and the pattern of the error. Deviations with one signature count as the same fault."""
        return " | ".join([self.case.law, self.word, self.check, error_pattern(self.error)])


def error_pattern(text: str) -> str:
    """The first line of an error text, with placeholders for numbers, quoted names, addresses and lists, which differ between cases.
    The next line follows where the first only says what raised it, as those of torch.compile do, or names the class alone."""
    first, *rest = map(str.strip, text.strip().splitlines() or [""])
    line = " ".join([first, *rest[:1]]) if re.search(r"( raised|^[\w.]+):$", first) else first
    line = re.sub(r"0x[0-9a-fA-F]+|'[^']*'|\"[^\"]*\"", "_", line)
    line = re.sub(r"[\[(][^\[\]()]*[\])]", "_", re.sub(r"[\[(][^\[\]()]*[\])]", "_", line))
    return re.sub(r"-?\d+(\.\d+)?", "#", line)[:200]


def place_names(where: str, calls: Iterable[str]) -> frozenset[str]:
    """The names that an entry's ``at`` may have for a deviation: the function to look at first, and the collectives that were called."""
    return frozenset({where.partition(",")[0], *calls} - {""})


def collectives_in(features: Iterable[str]) -> list[str]:
    """The collectives that features name."""
    return [name.removeprefix("collective:") for name in features if name.startswith("collective:")]


def finding_id(signature: str, features: tuple[str, ...]) -> str:
    """The id of a finding: 8 hex digits from its signature and the features of its smallest case."""
    return hashlib.sha256("\n".join([signature, *sorted(features)]).encode()).hexdigest()[:8]
