"""What a twin's run says: as text, as JSON, and as one page."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shardlaw.conformance.report.templates import render_template
from shardlaw.conformance.twin.align import Judged
from shardlaw.conformance.twin.judge import Compared, Departure
from shardlaw.conformance.twin.record import BACKWARD, BEFORE_STEP, FORWARD, GRADIENTS, LOSS, Key
from shardlaw.conformance.twin.session import Result

SCHEMA = 1
KINDS = ("forward", "backward", "gradients", "parameters")
KIND_OF = {FORWARD: "forward", LOSS: "forward", BACKWARD: "backward", GRADIENTS: "gradients", BEFORE_STEP: "gradients"}
LOWEST, HIGHEST = -12.0, 2.0  # powers of ten that a bar reaches from and to


@dataclass(frozen=True)
class Cell:
    """The worst of the tensors of one kind of a submodule: how far off, how far it may be."""

    kind: str
    tensors: int
    seen: float
    bound: float
    ratio: float
    what: str
    departs: bool

    @property
    def shown(self) -> tuple[float, float]:
        """How long the bars of ``seen`` and ``bound`` are, in percent."""
        return _percent(self.seen), _percent(self.bound)


@dataclass
class Node:
    """A submodule and those in it; ``cells`` by kind."""

    path: str
    name: str
    kind: str
    cells: list[Cell] = field(default_factory=list)
    parts: list[Node] = field(default_factory=list)
    first: bool = False
    silent: bool = False

    @property
    def departs(self) -> bool:
        """Whether a tensor of it, or of one in it, departs."""
        return any(cell.departs for cell in self.cells) or any(part.departs for part in self.parts)


def tree(compared: Compared) -> Node:
    """The submodules of one run, each with the worst tensor of each kind."""
    rows: dict[str, dict[str, list[Judged]]] = {}
    for one in compared.judged:
        rows.setdefault(one.key.path, {}).setdefault(_kind(one.key), []).append(one)
    nodes: dict[str, Node] = {}
    for path in [*compared.classes, *(["(loss)"] if "(loss)" in rows else [])]:
        cells = [_cell(kind, rows[path][kind]) for kind in KINDS if kind in rows.get(path, {})]
        name = path.rpartition(".")[2] or "(the model)"
        node = nodes[path] = Node(path, name, compared.classes.get(path, ""), cells, silent=path in compared.silent)
        node.first = compared.departure is not None and compared.departure.path.rpartition(" ")[2] == path
        if path:
            nodes[path.rpartition(".")[0]].parts.append(node)
    return nodes[""]


def _kind(key: Key) -> str:
    return KIND_OF.get(key.phase, "parameters")


def _cell(kind: str, judged: Sequence[Judged]) -> Cell:
    worst = max(judged, key=lambda one: (one.departs, one.ratio))
    return Cell(kind, len(judged), worst.seen, worst.bound, worst.ratio, str(worst.key), worst.departs)


def _percent(value: float) -> float:
    if value <= 0:
        return 0.0
    power = HIGHEST if math.isinf(value) else math.log10(value)
    return round(100 * min(max((power - LOWEST) / (HIGHEST - LOWEST), 0.01), 1.0), 1)


def headline(result: Result) -> str:
    """One line."""
    if result.departure is not None:
        return f"departs first at {result.departure.path or '(the model)'}"
    if result.departs:
        return "the sharded model does not run"
    return f"the sharded model is the whole one: {sum(len(one.judged) for one in result.compared)} tensors"


def text(result: Result) -> Iterator[str]:
    """For a terminal, line by line."""
    plan = result.compared[0].plan
    yield f"{result.name}: {str(plan).replace(f'; {plan.values}', '')}"
    for one in result.compared:
        label = one.plan.values + (f", resumed on {' '.join(f'{dim}={n}' for dim, n in one.plan.mesh.items())}" if one.plan.load else "")
        label += ", with dropout" if one.plan.dropout else ""
        if one.failed:
            yield f"  {label}: the sharded model does not run"
            yield from (f"    {line}" for line in one.failed.splitlines())
            continue
        zero, free = (sum(judged.bound == bound for judged in one.judged) for bound in (0.0, math.inf))
        count = f"{len(one.judged)} tensors, {zero} of them with bound zero" + (f", {free} that rounding decides" if free else "")
        if one.departure is None and one.plan.dropout:
            yield f"  {label}: held, {len(one.judged)} calls of dropout"
        elif one.departure is None:
            worst = max(one.judged, key=lambda judged: judged.ratio, default=None)
            yield f"  {label}: held, {count}" + (f"; nearest to its bound, {worst.ratio:.2f} of it: {worst.key}" if worst else "")
        else:
            yield f"  {label}: departs, {count}"
            yield from (f"    {line}" for line in one.departure.lines())
        if one.silent:
            yield f"    not compared, since the sharded model has none of them: {', '.join(one.silent)}"
    if result.smallest is not None:
        yield f"  smallest that shows it: {result.smallest.plan}"
        yield from (f"    {line}" for line in result.smallest.lines())


def data(result: Result) -> dict[str, Any]:
    """As JSON; infinite numbers are texts."""
    return {
        "schema": SCHEMA,
        "name": result.name,
        "torch": str(torch.__version__),
        "departs": result.departs,
        "headline": headline(result),
        "seconds": round(result.seconds, 1),
        "runs": [
            {
                "plan": _planned(one),
                "failed": one.failed,
                "departure": _departed(one.departure),
                "silent": list(one.silent),
                "tensors": [_judged(judged) for judged in one.judged],
            }
            for one in result.compared
        ],
        "smallest": None if result.smallest is None else {"plan": _planned(result.smallest), **(_departed(result.smallest) or {})},
    }


def _planned(one: Compared | Departure) -> dict[str, Any]:
    plan = one.plan
    sizes = {"mesh": dict(plan.mesh), "sizes": dict(plan.sizes), "options": dict(plan.options)}
    return {**sizes, "values": plan.values, "steps": plan.steps, "seed": plan.seed, "resumed": plan.load}


def _departed(departure: Departure | None) -> dict[str, Any] | None:
    if departure is None:
        return None
    one = departure.judged
    elements = [{"index": list(index), "is": _number(got), "must": _number(want)} for index, got, want in one.elements]
    op = _judged(departure.op) if departure.op else None
    return {"path": departure.path, **_judged(one), "elements": elements, "via": departure.via, "op": op, "trail": list(departure.trail)}


def _judged(one: Judged) -> dict[str, Any]:
    numbers = {"bound": _number(one.bound), "seen": _number(one.seen), "ratio": _number(one.ratio)}
    key = {"step": one.key.step, "phase": one.key.phase, "submodule": one.key.path, "what": one.key.what, "call": one.key.call}
    return {**key, **numbers, "departs": one.departs, "layout": one.layout, "rank": one.rank, "wrong": one.wrong, "word": one.word}


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def script(result: Result) -> str:
    """The smallest that shows it, to run by itself: it exits 1 while the fault is there."""
    least = result.smallest
    if least is None:
        return ""
    plan = least.plan
    name = plan.make.file or plan.make.module
    told = "".join(f"# {line}\n" for line in least.lines())
    return f"""{told}import sys

from shardlaw import twin

found = twin(
    {f"{name}:{plan.make.name}"!r},
    options={dict(plan.options)!r},
    sizes={ {**plan.mesh, **plan.sizes}!r},
    values={(plan.values,)!r},
    steps={plan.steps},
    seed={plan.seed},
    shrink=False,
)
print(*(found.departure.lines() if found.departure else ["it holds"]), sep="\\n")
sys.exit(found.departs)
"""


def page(result: Result) -> str:
    """One file of HTML that fetches nothing."""
    return render_template(
        "twin.html.j2",
        title=f"shardlaw twin: {headline(result)}",
        result=result,
        runs=[(one, tree(one)) for one in result.compared],
        lines=[one.lines() if one is not None else [] for one in (result.departure, result.smallest)],
        torch=str(torch.__version__),
        script=script(result),
    )
