"""A law: a statement that must hold for every input of a kind, with everything needed to try it.

A law is data. Its ``check`` is a plain function ``check(case, here)``: SPMD code that every rank runs, that names no device,
backend or storage, and that says what it finds through ``here`` (see :class:`conformance.here.Here`). It returns nothing
and does not raise for a deviation: it goes on, so that no rank leaves the others waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from conformance.case import Case

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from conformance.here import Here
    from conformance.report.reproducer import Script

CHAPTERS = ("mesh", "layout", "collective", "redistribute", "op", "gradient", "random", "module", "plan", "roundtrip",
            "sharded_tensor", "optimizer", "fault")  # fmt: skip
Tier = Literal["core", "extended", "advisory"]
Refusal = Literal["never", "allowed"]
Profile = Literal["smoke", "ci", "nightly"]


@dataclass(frozen=True)
class Limits:
    """What the target and the request allow a case to be."""

    world_size: int = 4
    dtypes: tuple[str, ...] = ("float32", "float64", "bfloat16", "int64", "int32", "uint8", "bool")
    cannot: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Law:
    """One entry of the catalogue.

    ``id``: ``chapter.name`` or ``chapter.name[variant]``. ``clause``: one sentence. ``source``: where the promise is made.
    ``needs``: capabilities (a target that declares one as missing leaves the law ``untested``). ``smallest``: the fewest ranks on
    which it says something. ``weight``: its share of a budget. ``draw``: a Hypothesis strategy of cases, of which a ``smoke``
    run draws ``draws``; ``sweep``: an enumerator whose first ``sweeps`` cases it takes. ``narrow``: a strategy of cases no larger
    than a given one, to shrink what the sweep found. ``profile``: the smallest that tries it. ``control``: the text of a case that
    must hold. ``planted``: the name of a fault in ``tests/planted`` that the law must catch. ``refusal``: whether all ranks may refuse a
    case alike.
    ``stages``: world sizes, one after the other, for a law whose case runs in several worlds (``here.stage`` tells which).
    ``features``: features of a case beyond those that :mod:`conformance.features` reads from its fields.
    ``script``: the literal body of a reproducer. ``checks``: how many questions a case stands for, where that is more than one.
    """

    id: str
    clause: str
    source: str
    check: Callable[[Case, Here], None]
    control: str
    planted: str
    draw: Callable[[Limits], SearchStrategy[Case]] | None = None
    draws: int = 0
    sweep: Callable[[Limits], Sequence[Case]] | None = None
    sweeps: int = 0
    narrow: Callable[[Case], SearchStrategy[Case]] | None = None
    profile: Profile = "smoke"
    tier: Tier = "core"
    needs: tuple[str, ...] = ()
    smallest: int = 2
    weight: float = 1.0
    refusal: Refusal = "never"
    stages: Callable[[Case], tuple[int, ...]] | None = None
    features: Callable[[Case], set[str]] | None = None
    script: Callable[[Case], Script] | None = None
    checks: Callable[[Case], int] | None = None
    aliases: tuple[str, ...] = field(default=())

    @property
    def chapter(self) -> str:
        return self.id.split(".")[0]

    @property
    def name(self) -> str:
        """The id without its variant: ``op.forward`` of ``op.forward[mean]``."""
        return self.id.partition("[")[0]

    @property
    def variant(self) -> str:
        return self.id.partition("[")[2].removesuffix("]")
