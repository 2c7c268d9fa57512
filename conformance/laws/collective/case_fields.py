"""The fields of cases of collectives: the group, the calls, and whatever else each rank makes of the whole case."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import signature
from typing import TYPE_CHECKING, Annotated, Any

import torch
import torch.distributed as dist

from shardlaw.conformance import compat
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.fields import Field, ScriptArgument
from shardlaw.conformance.law.literal import rank_table
from shardlaw.conformance.laws.collective.calls import CALLS, CHANGING, room
from shardlaw.conformance.laws.collective.pieces import REDUCING, Ask, Pieces, pieces
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.notation import NotationError
from shardlaw.reference.tensors import lay_out

if TYPE_CHECKING:
    from shardlaw.conformance.rank.context import RankContext

NO_ORDER = "this version of torch keeps no order of ranks"
ROOTS = {"reduce": "dst", "broadcast": "src", "gather": "dst", "scatter": "src"}
# what a law calls: by the form of what it takes or gives, or always the same
CALLED = {
    "collective.all-gather": {"list": "all_gather", "joined": "all_gather_single", "stacked": "all_gather_single"},
    "collective.reduce-scatter": {
        "list": "reduce_scatter",
        "joined": "reduce_scatter_single",
        "stacked": "reduce_scatter_single",
    },
    "collective.all-to-all": {"list": "all_to_all", "joined": "all_to_all_single"},
    "collective.again": {"": "all_reduce"},
}
MESHES = {"a": "mesh", "b": "mesh.b", "c": "mesh.c"}


def keeps_order() -> bool:
    """Whether this version of torch can make a group whose ranks are counted in the order of their list."""
    return "sort_ranks" in signature(dist.new_group).parameters


def members(case: Case, name: str = "mesh") -> tuple[int, ...]:
    """The ranks of a group in its order: ascending, unless the case says that the order of its list is kept."""
    if case.get("ranks", "kept") != "kept":
        raise NotationError(f"ranks={case.get('ranks')}: want kept")
    ranks = case.mesh(name).ranks
    return ranks if "ranks" in case else tuple(sorted(ranks))


class GroupsField(Field):
    """The process groups of the meshes ``mesh``, ``mesh.b`` and ``mesh.c`` of a case, as ``a``, ``b`` and ``c``;
    ``None`` for that of all ranks. A due function gets the ranks of each in the order of the group."""

    field, takes = "mesh", "a 1-D mesh of ranks such as 3 or 2@0,2"

    def fields(self, name: str) -> tuple[str, ...]:
        return *MESHES.values(), "ranks"

    def read(self, case: Case, name: str) -> Any:
        return {key: members(case, field) for key, field in MESHES.items() if field in case}, "ranks" in case

    def build(self, value: Any, here: RankContext) -> Any:
        groups, kept = value
        if kept and not keeps_order():
            here.reject(NO_ORDER)
        return {key: here.group(ranks, sort_ranks=not kept) for key, ranks in groups.items()}

    def due(self, value: Any, rank: int, world: int) -> Any:
        return value[0]

    def to_script(self, value: Any, name: str, world: int) -> ScriptArgument:
        order = ", sort_ranks=False" if value[1] else ""
        texts = {
            key: "None" if ranks == tuple(range(world)) else f"dist.new_group({[*ranks]}{order})"
            for key, ranks in value[0].items()
        }
        return ScriptArgument(
            "groups", (), (f"groups = {{{', '.join(f'{key!r}: {text}' for key, text in texts.items())}}}",)
        )


class GroupField(GroupsField):
    """The first of them, of a case that has no other."""

    def fields(self, name: str) -> tuple[str, ...]:
        return "mesh", "ranks"

    def build(self, value: Any, here: RankContext) -> Any:
        return super().build(value, here)["a"]

    def due(self, value: Any, rank: int, world: int) -> Any:
        return value[0]["a"]

    def to_script(self, value: Any, name: str, world: int) -> ScriptArgument:
        return ScriptArgument("groups['a']", (), super().to_script(value, name, world).statements)


@dataclass(frozen=True)
class Call:
    """One collective of a case in the group of ``ranks``; its root is named by position in the group or by rank."""

    ask: Ask
    ranks: tuple[int, ...]
    by_position: bool

    @classmethod
    def of(cls, case: Case, name: str, mesh: str = "mesh", turn: int = 0) -> Call:
        """Raises :class:`NotationError` for what means nothing."""
        ranks = members(case, mesh)
        if name not in CALLS:
            raise NotationError(f"{name!r} is no collective: want one of {', '.join(CALLS)}")
        call = cls(Ask.of(case, name, len(ranks), turn), ranks, case.get("by", "rank") == "position")
        try:
            pieces(call.ask)
        except (IndexError, RuntimeError) as error:
            raise NotationError(str(error)) from None
        return call

    @property
    def changes(self) -> bool:
        """Whether it writes its results over what it is given."""
        return self.ask.name in CHANGING

    @property
    def mesh(self) -> Mesh:
        return Mesh((len(self.ranks),), self.ranks)

    def of_rank(self, rank: int) -> Pieces | None:
        return pieces(self.ask)[self.ranks.index(rank)] if rank in self.ranks else None

    def wanted(self, rank: int) -> Any:
        """What a rank must have as results; ``...`` where nothing is promised."""
        mine = self.of_rank(rank)
        return ... if mine is None or mine.wanted is None else [self.ask.rounded(want) for want in mine.wanted]

    def for_act(self, rank: int) -> Any:
        """``(name, xs, rooms, options)`` of one rank, ``None`` of one outside the group."""
        ask, mine = self.ask, self.of_rank(rank)
        if mine is None:
            return None
        rooms = [] if self.changes else [(tuple(want.shape), want.dtype, ask.out) for want in mine.wanted or ()]
        options: dict[str, Any] = {"op": ask.op} if ask.name in REDUCING else {}
        if ask.name in ROOTS:
            root = ROOTS[ask.name]
            options.update({f"group_{root}": ask.root} if self.by_position else {root: self.ranks[ask.root]})
        if ask.splits and ask.name == "all_to_all_single":
            at = self.ranks.index(rank)
            options["output_split_sizes"], options["input_split_sizes"] = (
                [row[at] for row in ask.splits],
                list(ask.splits[at]),
            )
        return ask.name, mine.given, rooms, options


class ByRank(Field):
    """What every rank makes of the whole case: ``make`` gives what each has, for acts, and the whole, for due
    functions. Tensors go to the device, their memory laid out as that of ``x``."""

    field, takes = "x", "a tensor SHAPE:-:DTYPE:FILL:MEMORY, with the fields of a collective"

    def __init__(self, make: Callable[[Case], tuple[Mapping[int, Any], Any]], *also: str) -> None:
        self.make, self.also = make, also

    def fields(self, name: str) -> tuple[str, ...]:
        return "x", "mesh", "ranks", "op", "root", "by", "form", "extents", "splits", "out", *self.also

    def read(self, case: Case, name: str) -> Any:
        return *self.make(case), case.tensor("x").memory

    def build(self, value: Any, here: RankContext) -> Any:
        given, memory = value[0].get(here.rank), value[2]
        # of the whole case, not of this rank's part: ranks outside would else make groups alone
        lists = any(isinstance(one, tuple) and one[0] == "all_to_all" for one in value[0].values())
        if lists and not compat.supports_all_to_all(here.target.backend):
            here.reject(f"{here.target.backend} of this version of torch exchanges no lists of tensors")
        return on_device(given, memory, here)

    def due(self, value: Any, rank: int, world: int) -> Any:
        return value[1]

    def to_script(self, value: Any, name: str, world: int) -> ScriptArgument:
        return ScriptArgument(
            "GIVEN[rank]", tuple(rank_table("GIVEN", {rank: value[0].get(rank) for rank in range(world)}))
        )


def on_device(value: Any, memory: str, here: RankContext) -> Any:
    """The same with copies of all tensors."""
    if isinstance(value, list | tuple):
        return type(value)(on_device(one, memory, here) for one in value)
    if not isinstance(value, torch.Tensor):
        return value
    copy = here.tensor(value.clone(memory_format=torch.contiguous_format))
    if value.is_contiguous():
        return copy
    if memory == "sliced":
        return room(tuple(value.shape), value.dtype, memory, here.device).copy_(copy)
    return lay_out(copy, memory)


def call_of(case: Case) -> tuple[Mapping[int, Any], Any]:
    """The one collective of a case."""
    forms, form = CALLED.get(case.law, {}), case.get("form", "")
    if forms and form not in forms:
        raise NotationError(f"form={form}: want one of {', '.join(forms)}")
    usual = case.law.removeprefix("collective.").replace("-", "_")
    call = Call.of(case, forms[form] if forms else case.get("call", usual))
    return {rank: call.for_act(rank) for rank in call.ranks}, call


def calls_of(case: Case) -> tuple[Mapping[int, Any], Any]:
    """Several, one after another: ``a:all_reduce/b:reduce`` calls them in the groups of ``mesh`` and ``mesh.b``."""
    words = [word.rpartition(":") for word in case.get("calls").split("/")]
    unknown = [key for key, _, _ in words if MESHES.get(key or "a", "") not in case]
    if unknown:
        raise NotationError(f"calls={case.get('calls')}: there is no group {unknown[0]!r}")
    calls = [(key or "a", Call.of(case, name, MESHES[key or "a"], turn)) for turn, (key, _, name) in enumerate(words)]
    return {rank: [(key, call.for_act(rank)) for key, call in calls] for rank in range(max(case.world, 2))}, calls


Group = Annotated[Any, GroupField()]
Groups = Annotated[Any, GroupsField()]
Calling = Annotated[Any, ByRank(call_of, "call")]
Callings = Annotated[Any, ByRank(calls_of, "calls", "mesh.b", "mesh.c")]
