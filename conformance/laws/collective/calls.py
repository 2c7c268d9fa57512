"""The collectives as the laws of their chapter call them: what each member gives and must get, and the call itself.

A :class:`Ask` is what a case says of one collective. From it come the :class:`Part` of every member, by the reference, and the
:class:`Call`, which a rank makes and a reproducer prints.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from conformance import compat
from conformance.case import Case
from reference import collective
from reference.notation import Shape
from reference.tensors import DTYPES, lay_out
from strategies.collectives import contribution, payload

if TYPE_CHECKING:
    from conformance.here import Here

# what stands in a buffer before anything arrives
STALE = 99
# how late a rank comes that is said to come late
LATE_SECONDS = 0.015
Row = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Ask:
    """One collective among ``size`` members: ``root`` is a position in the group; ``extents`` are the rows of each member, ``splits`` the
    rows that each sends to each; ``form`` is how a tensor stands for a list; ``out`` is how the memory of outputs is laid out,
    ``turn`` tells calls of one case apart."""

    name: str
    size: int
    shape: Shape
    dtype: torch.dtype
    memory: str = "plain"
    out: str = "plain"
    op: str = "sum"
    root: int = 0
    form: str = "joined"
    extents: tuple[int, ...] = ()
    splits: tuple[tuple[int, ...], ...] = ()
    seed: int = 0
    turn: int = 0

    @classmethod
    def of(cls, case: Case, name: str, size: int, turn: int = 0) -> Ask:
        spec = case.tensor("x")
        return cls(
            name,
            size,
            spec.shape,
            DTYPES[spec.dtype],
            spec.memory,
            case.get("out", "plain"),
            case.get("op", "sum"),
            case.integer("root", 0),
            case.get("form", "joined"),
            numbers(case.get("extents", "")),
            tuple(numbers(row) for row in case.get("splits").split("/")) if "splits" in case else (),
            case.seed,
            turn,
        )

    def shape_of(self, position: int) -> Shape:
        """The shape that belongs to a member."""
        return (self.extents[position], *self.shape[1:]) if self.extents else self.shape

    @property
    def span(self) -> int:
        """How many elements the largest piece has."""
        rows = max((*self.extents, *(count for row in self.splits for count in row)), default=self.shape[0] if self.shape else 1)
        return rows * math.prod(self.shape[1:])

    def given(self, position: int, shape: Shape | None = None) -> torch.Tensor:
        """The piece at ``position`` of all that is handed over and not reduced, with its memory laid out."""
        at = position + self.turn * self.size**2
        return lay_out(payload(self.shape if shape is None else shape, self.dtype, at, self.span), self.memory)

    def added(self, position: int, part: int = 0, shape: Shape | None = None) -> torch.Tensor:
        """What a member adds to a reduction, with its memory laid out."""
        seed = 10000 * self.turn + 1000 * self.seed + 10 * position + 100 * part + 1
        return lay_out(contribution(self.shape if shape is None else shape, self.dtype, self.op, self.size, seed), self.memory)


def numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split("."))) if text else ()


def dotted(values: Sequence[int]) -> str:
    return ".".join(map(str, values))


def slashed(table: Sequence[Sequence[int]]) -> str:
    return "/".join(map(dotted, table))


@dataclass(frozen=True)
class Part:
    """What one member gives and must get. ``wanted`` is ``None`` where nothing is promised; ``changes``: what it gives is overwritten."""

    given: Row
    wanted: Row | None
    changes: bool = False


@dataclass(frozen=True)
class Kind:
    """One collective. ``arguments`` names what a call passes: ``x``, ``xs`` (what is given, one or a list), ``out``, ``outs``."""

    functions: tuple[str, ...]
    arguments: tuple[str, ...]
    parts: Callable[[Ask], list[Part]]
    needs: str
    reduces: bool = False
    root: str = ""

    @property
    def function(self) -> str:
        """Its name in this version of torch."""
        return next((name for name in self.functions if hasattr(dist, name)), self.functions[-1])


def _all_reduce(ask: Ask) -> list[Part]:
    given = [ask.added(at) for at in range(ask.size)]
    return [Part((x,), (want,), True) for x, want in zip(given, collective.all_reduce(given, ask.op), strict=True)]


def _reduce(ask: Ask) -> list[Part]:
    given = [ask.added(at) for at in range(ask.size)]
    wanted = collective.reduce(given, ask.op, ask.root)
    return [Part((x,), None if want is None else (want,), True) for x, want in zip(given, wanted, strict=True)]


def _broadcast(ask: Ask) -> list[Part]:
    given = [ask.given(at) for at in range(ask.size)]
    return [Part((x,), (want,), True) for x, want in zip(given, collective.broadcast(given, ask.root), strict=True)]


def _gathered(ask: Ask) -> list[torch.Tensor]:
    return [ask.given(at, ask.shape_of(at)) for at in range(ask.size)]


def _all_gather(ask: Ask) -> list[Part]:
    given = _gathered(ask)
    return [Part((x,), tuple(want)) for x, want in zip(given, collective.all_gather(given), strict=True)]


def _all_gather_single(ask: Ask) -> list[Part]:
    given = _gathered(ask)
    whole = collective.stacked(given) if ask.form == "stacked" else collective.joined(given)
    return [Part((x,), (whole,)) for x in given]


def _gather(ask: Ask) -> list[Part]:
    given = _gathered(ask)
    return [Part((x,), tuple(want or ())) for x, want in zip(given, collective.gather(given, ask.root), strict=True)]


def _scatter(ask: Ask) -> list[Part]:
    row = [ask.given(ask.root * ask.size + at, ask.shape_of(at)) for at in range(ask.size)]
    wanted = collective.scatter([row if at == ask.root else None for at in range(ask.size)], ask.root)
    return [Part(tuple(row) if at == ask.root else (), (want,)) for at, want in enumerate(wanted)]


def _reduce_scatter(ask: Ask) -> list[Part]:
    rows = [[ask.added(at, to, ask.shape_of(to)) for to in range(ask.size)] for at in range(ask.size)]
    return [Part(tuple(row), (want,)) for row, want in zip(rows, collective.reduce_scatter(rows, ask.op), strict=True)]


def _reduce_scatter_single(ask: Ask) -> list[Part]:
    rows = [[ask.added(at, to) for to in range(ask.size)] for at in range(ask.size)]
    join = collective.stacked if ask.form == "stacked" else collective.joined
    given = [lay_out(join(row), ask.memory) for row in rows]
    return [Part((x,), (want,)) for x, want in zip(given, collective.reduce_scatter(rows, ask.op), strict=True)]


def _all_to_all(ask: Ask) -> list[Part]:
    def shape(at: int, to: int) -> Shape:
        return (ask.splits[at][to], *ask.shape[1:]) if ask.splits else ask.shape

    rows = [[ask.given(at * ask.size + to, shape(at, to)) for to in range(ask.size)] for at in range(ask.size)]
    return [Part(tuple(row), tuple(want)) for row, want in zip(rows, collective.all_to_all(rows), strict=True)]


def _all_to_all_single(ask: Ask) -> list[Part]:
    rows = [sum(split) for split in ask.splits] or [ask.size * ask.shape[0]] * ask.size
    first, span = ask.turn * ask.size, ask.size * max(ask.span, math.prod(ask.shape))
    given = [lay_out(payload((count, *ask.shape[1:]), ask.dtype, first + at, span), ask.memory) for at, count in enumerate(rows)]
    wanted = collective.all_to_all_single(given, ask.splits or None)
    return [Part((x,), (want,)) for x, want in zip(given, wanted, strict=True)]


KINDS = {
    "all_reduce": Kind(("all_reduce",), ("x",), _all_reduce, "all_reduce", reduces=True),
    "reduce": Kind(("reduce",), ("x",), _reduce, "reduce", reduces=True, root="dst"),
    "broadcast": Kind(("broadcast",), ("x",), _broadcast, "broadcast", root="src"),
    "all_gather": Kind(("all_gather",), ("outs", "x"), _all_gather, "all_gather"),
    "all_gather_single": Kind(("all_gather_single", "all_gather_into_tensor"), ("out", "x"), _all_gather_single, "all_gather"),
    "gather": Kind(("gather",), ("x", "outs"), _gather, "gather", root="dst"),
    "scatter": Kind(("scatter",), ("out", "xs"), _scatter, "scatter", root="src"),
    "reduce_scatter": Kind(("reduce_scatter",), ("out", "xs"), _reduce_scatter, "reduce_scatter", reduces=True),
    "reduce_scatter_single": Kind(
        ("reduce_scatter_single", "reduce_scatter_tensor"), ("out", "x"), _reduce_scatter_single, "reduce_scatter", reduces=True
    ),
    "all_to_all": Kind(("all_to_all",), ("outs", "xs"), _all_to_all, "all_to_all"),
    "all_to_all_single": Kind(("all_to_all_single",), ("out", "x"), _all_to_all_single, "all_to_all"),
}


@dataclass(frozen=True)
class Team:
    """The members of a group in the order of the group, the live group (``None`` for the default one), and where this rank stands."""

    ranks: tuple[int, ...]
    group: Any
    position: int | None


NO_ORDER = "this version of torch keeps no order of ranks"
# groups that this world has made, by their ranks and whether their order was kept
_MADE: dict[tuple[tuple[int, ...], bool], Any] = {}


def team(case: Case, here: Here, name: str = "mesh") -> Team:
    """The group that a mesh field names; every rank of the world asks for it."""
    ranks, kept = members(case, name), case.get("ranks", "") == "kept"
    position = ranks.index(here.rank) if here.rank in ranks else None
    if ranks == tuple(range(here.world)):
        return Team(ranks, None, position)
    if (ranks, kept) not in _MADE:
        if kept and not keeps_order():
            here.reject(NO_ORDER)
        _MADE[ranks, kept] = dist.new_group(list(ranks), sort_ranks=False) if kept else dist.new_group(list(ranks))
    return Team(ranks, _MADE[ranks, kept], position)


def keeps_order() -> bool:
    """Whether this version of torch can make a group whose ranks are counted in the order of their list."""
    return "sort_ranks" in signature(dist.new_group).parameters


def members(case: Case, name: str = "mesh") -> tuple[int, ...]:
    """The ranks of a group in its order: ascending, unless the case says that the order of its list is kept."""
    ranks = case.mesh(name).ranks
    return ranks if case.get("ranks", "") == "kept" else tuple(sorted(ranks))


def buffer(shape: Shape, dtype: torch.dtype, memory: str, device: torch.device | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor to be written, all :data:`STALE`, and what lies beside it in memory."""
    if memory == "sliced" and shape:
        wide = torch.full((*shape[:-1], 2 * shape[-1] + 1), STALE, dtype=dtype, device=device)
        return wide[..., 1::2], wide[..., ::2]
    long = torch.full((math.prod(shape) + 3,), STALE, dtype=dtype, device=device)
    if memory == "transposed":
        return long[:-3].view(shape[::-1]).permute(tuple(reversed(range(len(shape))))), long[-3:]
    return long[:-3].view(shape), long[-3:]


def placed(here: Here, dense: torch.Tensor, memory: str) -> torch.Tensor:
    """A copy of a tensor on the device, its memory laid out."""
    copy = here.tensor(dense.clone(memory_format=torch.contiguous_format))
    if memory == "sliced" and dense.ndim:
        view = buffer(tuple(dense.shape), dense.dtype, memory, here.device)[0]
        return view.copy_(copy)
    return lay_out(copy, memory)


@dataclass
class Call:
    """One collective as one rank calls it: its buffers, what must be in them, and what must stay as it is."""

    ask: Ask
    part: Part
    team: Team
    by_position: bool
    given: list[torch.Tensor]
    outputs: list[tuple[torch.Tensor, torch.Tensor]]

    @classmethod
    def of(cls, case: Case, here: Here, ask: Ask, part: Part, on: Team) -> Call:
        given = [placed(here, x, ask.memory) for x in part.given]
        outputs = [] if part.changes else [buffer(tuple(want.shape), want.dtype, ask.out, here.device) for want in part.wanted or ()]
        return cls(ask, part, on, case.get("by", "rank") == "position", given, outputs)

    @property
    def kind(self) -> Kind:
        return KINDS[self.ask.name]

    def options(self) -> dict[str, Any]:
        """The keyword arguments of the call."""
        found: dict[str, Any] = {"group": self.team.group}
        if self.kind.reduces:
            found["op"] = getattr(dist.ReduceOp, self.ask.op.upper())
        if self.kind.root and self.by_position:
            found[f"group_{self.kind.root}"] = self.ask.root
        elif self.kind.root:
            found[self.kind.root] = self.team.ranks[self.ask.root]
        if self.ask.splits and self.ask.name == "all_to_all_single":
            at = self.team.position or 0
            found["output_split_sizes"] = [row[at] for row in self.ask.splits]
            found["input_split_sizes"] = list(self.ask.splits[at])
        return found

    def start(self, **more: Any) -> Any:
        """Make the call. Returns its work where ``async_op`` is asked for."""
        outs = [out for out, _ in self.outputs]
        passed = {
            "x": self.given[0] if self.given else None,
            "xs": self.given or None,
            "outs": outs or None,
            "out": outs[0] if outs else None,
        }
        return getattr(dist, self.kind.function)(*(passed[name] for name in self.kind.arguments), **self.options(), **more)

    def judge(self, here: Here, check: str = "result") -> None:
        """Hold what this rank now has against what it must have: results, what lies beside them, and what was only read."""
        if self.part.wanted is not None:
            got = self.given if self.part.changes else [out for out, _ in self.outputs]
            exact = self.ask.op != "avg" or self.ask.size in (1, 2, 4, 8)
            for at, (mine, want) in enumerate(zip(got, self.part.wanted, strict=True)):
                here.same(mine, want, check, exact=exact, what=f"output {at} of {self.ask.name}")
        for _, beside in self.outputs:
            held = bool((beside == torch.full_like(beside, STALE)).all())
            here.require(held, "wrong-value", "beside", f"{self.ask.name} wrote beside its output", STALE, beside)
        if not self.part.changes:
            self.judge_inputs(here, "input")

    def judge_inputs(self, here: Here, check: str) -> None:
        """Hold what this rank gave against what it gave."""
        for at, (mine, was) in enumerate(zip(self.given, self.part.given, strict=True)):
            here.same(mine, was, check, what=f"input {at} of {self.ask.name}")


def went(case: Case, here: Here, call: Call, **more: Any) -> bool:
    """Make a call and wait for its end. Returns whether it went: memory that is not contiguous may be refused, by every rank alike."""
    if case.get("late", "") == str(call.team.position):
        time.sleep(LATE_SECONDS)
    try:
        if case.get("work", "") == "async" and not more:
            work = call.start(async_op=True)
            work.wait()
            here.require(bool(work.is_completed()), "wrong-metadata", "work", "work that was waited for says that it is not completed")
        else:
            call.start(**more)
    except Exception as error:
        if "contiguous" not in str(error) or (call.ask.memory, call.ask.out) == ("plain", "plain"):
            raise
        call.judge_inputs(here, "refused input")
        return False
    return True


def made(case: Case, here: Here, name: str, field: str = "mesh", turn: int = 0) -> Call | None:
    """The call of the collective ``name`` in the group of a mesh field; ``None`` on ranks outside it."""
    if name == "all_to_all" and not compat.exchanges_lists(here.target.backend):
        here.reject(f"{here.target.backend} of this version of torch exchanges no lists of tensors")
    on = team(case, here, field)
    if on.position is None:
        return None
    ask = Ask.of(case, name, len(on.ranks), turn)
    return Call.of(case, here, ask, KINDS[name].parts(ask)[on.position], on)
