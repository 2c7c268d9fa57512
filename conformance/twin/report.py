"""The result of a twin as text, JSON, a script and an HTML page."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from shardlaw.conformance.report.templates import render_template
from shardlaw.conformance.twin.align import TensorComparison
from shardlaw.conformance.twin.comparison import Departure, RunComparison
from shardlaw.conformance.twin.record import BACKWARD, BEFORE_STEP, FORWARD, GRADIENTS, LOSS, Key
from shardlaw.conformance.twin.session import Result

SCHEMA = 1
KINDS = ("forward", "backward", "gradients", "parameters")
KIND_OF = {FORWARD: "forward", LOSS: "forward", BACKWARD: "backward", GRADIENTS: "gradients", BEFORE_STEP: "gradients"}
LOWEST, HIGHEST = -12.0, 2.0  # the powers of ten at the ends of a bar


@dataclass(frozen=True)
class Cell:
    """The worst tensor of one kind in a submodule. ``seen``: its distance; ``bound``: the largest that is allowed."""

    kind: str
    tensors: int
    seen: float
    bound: float
    ratio: float
    what: str
    departs: bool

    @property
    def shown(self) -> tuple[float, float]:
        """The lengths of the bars of ``seen`` and ``bound``, in percent."""
        return _bar_length(self.seen), _bar_length(self.bound)


@dataclass
class Node:
    """A submodule: ``cells`` has its worst tensors, one of each kind, ``parts`` its children. ``first``: the first departure is here."""

    path: str
    name: str
    kind: str
    cells: list[Cell] = field(default_factory=list)
    parts: list[Node] = field(default_factory=list)
    first: bool = False
    silent: bool = False

    @property
    def departs(self) -> bool:
        """Whether a tensor of it, or of a descendant, departs."""
        return any(cell.departs for cell in self.cells) or any(part.departs for part in self.parts)


def submodule_tree(compared: RunComparison) -> Node:
    """The root of a run's submodules."""
    rows: dict[str, dict[str, list[TensorComparison]]] = {}
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


def _cell(kind: str, judged: Sequence[TensorComparison]) -> Cell:
    worst = max(judged, key=lambda one: (one.departs, one.ratio))
    return Cell(kind, len(judged), worst.seen, worst.bound, worst.ratio, str(worst.key), worst.departs)


def _bar_length(value: float) -> float:
    if value <= 0:
        return 0.0
    power = HIGHEST if math.isinf(value) else math.log10(value)
    return round(100 * min(max((power - LOWEST) / (HIGHEST - LOWEST), 0.01), 1.0), 1)


def headline(result: Result) -> str:
    """The result in one line."""
    if result.departure is not None:
        return f"departs first at {result.departure.path or '(the model)'}"
    if result.departs:
        return "the sharded model does not run"
    return f"the sharded model is the whole one: {sum(len(one.judged) for one in result.compared)} tensors"


def terminal_lines(result: Result) -> Iterator[str]:
    """The result for a terminal, line by line."""
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


def to_json(result: Result) -> dict[str, Any]:
    """The result for JSON; infinite numbers are strings."""
    return {
        "schema": SCHEMA,
        "name": result.name,
        "torch": str(torch.__version__),
        "departs": result.departs,
        "headline": headline(result),
        "seconds": round(result.seconds, 1),
        "runs": [
            {
                "plan": _plan_json(one),
                "failed": one.failed,
                "departure": _departure_json(one.departure),
                "silent": list(one.silent),
                "tensors": [_comparison_json(judged) for judged in one.judged],
            }
            for one in result.compared
        ],
        "smallest": None if result.smallest is None else {"plan": _plan_json(result.smallest), **(_departure_json(result.smallest) or {})},
    }


def _plan_json(one: RunComparison | Departure) -> dict[str, Any]:
    plan = one.plan
    sizes = {"mesh": dict(plan.mesh), "sizes": dict(plan.sizes), "options": dict(plan.options)}
    return {**sizes, "values": plan.values, "steps": plan.steps, "seed": plan.seed, "resumed": plan.load}


def _departure_json(departure: Departure | None) -> dict[str, Any] | None:
    if departure is None:
        return None
    one = departure.judged
    elements = [{"index": list(index), "is": _number(got), "must": _number(want)} for index, got, want in one.elements]
    op = _comparison_json(departure.op) if departure.op else None
    return {
        "path": departure.path,
        **_comparison_json(one),
        "elements": elements,
        "via": departure.via,
        "op": op,
        "trail": list(departure.trail),
    }


def _comparison_json(one: TensorComparison) -> dict[str, Any]:
    numbers = {"bound": _number(one.bound), "seen": _number(one.seen), "ratio": _number(one.ratio)}
    key = {"step": one.key.step, "phase": one.key.phase, "submodule": one.key.path, "what": one.key.what, "call": one.key.call}
    return {**key, **numbers, "departs": one.departs, "layout": one.layout, "rank": one.rank, "wrong": one.wrong, "word": one.word}


def _number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def script(result: Result) -> str:
    """A script that runs the smallest plan that departs; it exits 1 while the fault is there. Empty where nothing departs."""
    least = result.smallest
    if least is None:
        return ""
    plan = least.plan
    name = plan.make.file or plan.make.module
    comment = "".join(f"# {line}\n" for line in least.lines())
    return f"""{comment}import sys

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


def html_page(result: Result) -> str:
    """The result as one HTML file without external resources."""
    return render_template(
        "twin.html.j2",
        title=f"shardlaw twin: {headline(result)}",
        result=result,
        runs=[(one, submodule_tree(one)) for one in result.compared],
        lines=[one.lines() if one is not None else [] for one in (result.departure, result.smallest)],
        torch=str(torch.__version__),
        script=script(result),
    )
