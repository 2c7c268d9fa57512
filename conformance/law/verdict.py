"""What ranks say of a case, and what the driver makes of it.

Every rank gives an :class:`Answer`. :func:`shardlaw.conformance.world.judge.judge` turns the answers of a world into one :class:`Verdict`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

    from shardlaw.conformance.law.case import Case
    from shardlaw.conformance.law.evidence import Evidence

KINDS = ("crash", "hang", "divergence", "raised", "wrong-error", "wrong-layout", "wrong-metadata", "wrong-value")
Kind = Literal["crash", "hang", "divergence", "raised", "wrong-error", "wrong-layout", "wrong-metadata", "wrong-value"]
Outcome = Literal["held", "deviates", "raised", "rejected", "crashed", "silent"]
Status = Literal["held", "refused", "rejected", "deviates", "error"]


class HarnessError(Exception):
    """An error of the harness, or of a law's own text, and not of what is validated: the law is untested, the run ends with exit code 3."""


@dataclass(frozen=True)
class Raised:
    """An exception that ended a check: its class, its text, and where it came from, outermost frame first."""

    error: str
    text: str
    stack: str


@dataclass(frozen=True)
class Deviation:
    """One thing that was not as it must be, on one rank. ``expected`` and ``got`` are texts for people."""

    kind: Kind
    check: str
    message: str
    expected: str = ""
    got: str = ""


@dataclass(frozen=True)
class Deposit:
    """A local tensor that only the locals of all ranks together can judge: contributions of a pending reduction.

    ``want`` is the full tensor that the layout must denote; the lowest member rank alone sends it.
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
    """What one rank says of one case.

    ``outcome`` is ``held``, ``deviates``, ``raised``, ``rejected`` (the case means nothing: the plain run fails too), or, said by
    the driver of a rank that did not answer, ``crashed`` or ``silent``.
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
    """What is to be said of one case. ``kind`` is set when it deviates; ``ranks`` then holds every rank's answer. Of an ``error`` of the
    harness ``error`` is the traceback."""

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
        """The kind of a deviation, or what else became of the case."""
        return self.kind or self.status

    @property
    def signature(self) -> str:
        """Law, kind, check, and the error with numbers and names struck out: what makes two deviations one."""
        return " | ".join([self.case.law, self.word, self.check, error_pattern(self.error)])


def error_pattern(text: str) -> str:
    """The first line of an error text without what changes from case to case: numbers, quoted names, addresses, lists."""
    line = text.strip().splitlines()[0] if text.strip() else ""
    line = re.sub(r"0x[0-9a-fA-F]+|'[^']*'|\"[^\"]*\"", "_", line)
    line = re.sub(r"[\[(][^\[\]()]*[\])]", "_", re.sub(r"[\[(][^\[\]()]*[\])]", "_", line))
    return re.sub(r"-?\d+(\.\d+)?", "#", line)[:200]


def place_names(where: str, calls: Iterable[str]) -> frozenset[str]:
    """Where an expectation may say that a deviation is: the function to look at first, by name, and the collectives that were called."""
    return frozenset({where.partition(",")[0], *calls} - {""})


def finding_id(signature: str, features: tuple[str, ...]) -> str:
    """The id of a finding: 8 hex digits from its signature and the features of its smallest case."""
    return hashlib.sha256("\n".join([signature, *sorted(features)]).encode()).hexdigest()[:8]
