"""The law of the context in which what an op redistributes by itself is refused, or warned of."""

from __future__ import annotations

import contextlib
import itertools
from typing import TYPE_CHECKING, Any

from conformance import compat
from conformance.case import Case
from conformance.law import Law, Limits
from conformance.laws import scripts
from conformance.laws.given import given
from conformance.report.reproducer import Script
from reference.mesh import Mesh

if TYPE_CHECKING:
    from conformance.here import Here

DOC = "torch.distributed.tensor._utils, docstring of ExplicitRedistributionContext"

# a context by name: what it is made with
MADE: dict[str, dict[str, Any]] = {
    "loose": {},
    "strict": {"strict": True},
    "warn": {"mode": "warn"},
    "off": {"enable": False},
}
# the operands of a sum along the last mesh dim, by what the sum needs: data from others, a cut of replicas, nothing
NEEDS = {"moved": ("S(0)", "S(1)"), "cut": ("S(0)", "R"), "alike": ("S(0)", "S(0)")}
# the contexts that a call stands in, the outermost first; those after a ! were entered last, and are over
WAYS = ("loose", "strict", "warn", "off", "loose,off", "loose,strict", "strict,loose", "strict,off", "loose!off", "strict!loose",
        "loose!loose", "strict,off!strict", "!strict", "loose!warn")  # fmt: skip


def refuses(way: str, need: str) -> bool:
    """Whether a sum that needs ``need`` is refused within the contexts of ``way``: the innermost that is not over decides."""
    inner = way.partition("!")[0].rpartition(",")[2]
    return (need == "moved" and inner in ("loose", "strict")) or (need == "cut" and inner == "strict")


def sweep_explicit(limits: Limits) -> list[Case]:
    cases = []
    for text, by, way, need in itertools.product(("2", "2x2", "3", "1x2"), (None, "hand"), WAYS, NEEDS):
        mesh = Mesh.parse(text)
        rest = "R," * (mesh.ndim - 1)
        a, b = (f"6x4:{rest}{at}" for at in NEEDS[need])
        if by is None or need != "alike":
            cases.append(Case.of("redistribute.explicit", mesh=mesh, x=a, w=b, way=way, by=by))
    return [case for case in cases if case.world <= limits.world_size]


def need_of(case: Case) -> str:
    last = case.tensor("w").placements or ()
    return next(name for name, (_, other) in NEEDS.items() if str(last[-1]) == other)


def check_explicit(case: Case, here: Here) -> None:
    """What must be redistributed and is not by hand is refused where the innermost context says so, and done everywhere else."""
    x, w, way = given(case), given(case, "w"), case.get("way")
    one, other = x.dtensor(here), w.dtensor(here)
    within, _, over = way.partition("!")
    made = compat.name("ExplicitRedistributionContext")
    with contextlib.ExitStack() as stack:
        for name in filter(None, within.split(",")):
            stack.enter_context(made(**MADE[name]))
        for name in filter(None, over.split(",")):
            with made(**MADE[name]):
                pass
        if "by" in case:
            other = other.redistribute(placements=here.placements(x.layout.placements))
        elif refuses(way, need_of(case)):
            here.refused(lambda: one + other, "within", "a sum that redistributes its operands", errors=(RuntimeError,))
            return
        here.same_dtensor(one + other, x.full + w.full, "within", mesh=x.layout.mesh)


def features_explicit(case: Case) -> set[str]:
    return {"explicit-context"} | ({"must-refuse"} if "by" not in case and refuses(case.get("way"), need_of(case)) else set())


def script_explicit(case: Case) -> Script:
    x, w, way = given(case), given(case, "w"), case.get("way")
    constants, body = scripts.source(x, case.world)
    more, made = scripts.source(w, case.world, "w")
    within, _, over = way.partition("!")
    body += made[1:]
    told = {name: f"ExplicitRedistributionContext({', '.join(f'{k}={v!r}' for k, v in MADE[name].items())})" for name in MADE}
    pad = ""
    for name in filter(None, within.split(",")):
        body.append(f"{pad}with {told[name]}:")
        pad += "    "
    for name in filter(None, over.split(",")):
        body += [f"{pad}with {told[name]}:", f"{pad}    pass"]
    by_hand = f".redistribute(placements={scripts.placements(x.layout.placements)})" if "by" in case else ""
    due = "refused" if "by" not in case and refuses(way, need_of(case)) else "done"
    body += [f"{pad}try:", f"{pad}    x + w{by_hand}", f'{pad}    return "{due}", "done"', f"{pad}except RuntimeError:"]
    body += [f'{pad}    return "{due}", "refused"']
    told_again = scripts.script(body, world=case.world, constants=[*constants, *more])
    imports = (*told_again.imports, "from torch.distributed.tensor._utils import ExplicitRedistributionContext")
    return Script(told_again.stages, imports, told_again.constants)


LAWS = (
    Law(
        id="redistribute.explicit",
        clause="Within ExplicitRedistributionContext an op that would redistribute its operands is refused; the innermost context decides.",
        source=DOC,
        check=check_explicit,
        script=script_explicit,
        features=features_explicit,
        control="redistribute.explicit mesh=2 x=6x4:S(0) w=6x4:S(1) way=loose",
        planted="redistributions_are_never_observed",
        sweep=sweep_explicit,
        sweeps=56,
        needs=("all_gather",),
        weight=0.3,
        tier="extended",
    ),
)
