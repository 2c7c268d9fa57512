"""The fields of cases of collectives: groups, calls, and other data that each rank computes from the whole case."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import signature
from typing import TYPE_CHECKING, Annotated, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardlaw.conformance import compat
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.fields import Field, ScriptArgument, WordField
from shardlaw.conformance.law.literal import rank_table
from shardlaw.conformance.laws.collective.calls import CALLS, IN_PLACE
from shardlaw.conformance.laws.collective.specs import REDUCING, CollectiveSpec, MemberData, member_data
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.notation import NotationError
from shardlaw.reference.tensors import lay_out

if TYPE_CHECKING:
    from shardlaw.conformance.rank.context import RankContext

NO_RANK_ORDER = "this version of torch keeps no order of ranks"
NO_SPLIT = "this version of torch splits no group without a device that is bound to it"
ROOT_OPTIONS = {"reduce": "dst", "broadcast": "src", "gather": "dst", "scatter": "src"}
# the collective that a law calls, by the form in which tensors stand for lists
CALLS_BY_FORM = {
    "collective.all-gather": {"list": "all_gather", "joined": "all_gather_single", "stacked": "all_gather_single"},
    "collective.reduce-scatter": {
        "list": "reduce_scatter",
        "joined": "reduce_scatter_single",
        "stacked": "reduce_scatter_single",
    },
    "collective.all-to-all": {"list": "all_to_all", "joined": "all_to_all_single"},
    "collective.again": {"": "all_reduce"},
}
MESH_FIELDS = {"a": "mesh", "b": "mesh.b", "c": "mesh.c"}


def supports_rank_order() -> bool:
    """Whether ``new_group`` of the installed torch can keep the order of its list of ranks."""
    return "sort_ranks" in signature(dist.new_group).parameters


def supports_split() -> bool:
    """Whether the installed torch splits groups that have no device of their own, as those of gloo."""
    return compat.torch_release() >= (2, 15)


def group_ranks(case: Case, mesh: str = "mesh") -> tuple[int, ...]:
    """The ranks of a group by position: ascending, or with ``ranks=kept`` in the order of the mesh."""
    if case.get("ranks", "kept") != "kept":
        raise NotationError(f"ranks={case.get('ranks')}: want kept")
    ranks = case.mesh(mesh).ranks
    return ranks if "ranks" in case else tuple(sorted(ranks))


class GroupsField(Field):
    """The process group of ``mesh``; or, if ``several``, those of ``mesh``, ``mesh.b`` and ``mesh.c`` as ``a``, ``b``
    and ``c``. ``None`` is the group of all ranks. A due function gets the ranks of each by position."""

    field, takes = "mesh", "a 1-D mesh of ranks such as 3 or 2@0,2"

    def __init__(self, *, several: bool) -> None:
        self.several = several

    def fields(self, name: str) -> tuple[str, ...]:
        return (*MESH_FIELDS.values(), "ranks") if self.several else ("mesh", "ranks")

    def read(self, case: Case, name: str) -> Any:
        return {key: group_ranks(case, mesh) for key, mesh in MESH_FIELDS.items() if mesh in case}, "ranks" in case

    def build(self, value: Any, here: RankContext) -> Any:
        groups, keep_order = value
        if keep_order and not supports_rank_order():
            here.reject(NO_RANK_ORDER)
        built = {key: here.group(ranks, sort_ranks=not keep_order) for key, ranks in groups.items()}
        return built if self.several else built["a"]

    def due(self, value: Any, rank: int, world: int) -> Any:
        return value[0] if self.several else value[0]["a"]

    def to_script(self, value: Any, name: str, world: int) -> ScriptArgument:
        order = ", sort_ranks=False" if value[1] else ""
        texts = [
            f"{key!r}: None" if ranks == tuple(range(world)) else f"{key!r}: dist.new_group({[*ranks]}{order})"
            for key, ranks in value[0].items()
        ]
        statement = f"groups = {{{', '.join(texts)}}}"
        return ScriptArgument("groups" if self.several else "groups['a']", (), (statement,))


@dataclass(frozen=True)
class GroupCall:
    """One collective of a case in the group of ``ranks``. ``by_position``: its root is passed as a position, not as a
    rank."""

    spec: CollectiveSpec
    ranks: tuple[int, ...]
    by_position: bool

    @classmethod
    def from_case(cls, case: Case, name: str, mesh: str = "mesh", index: int = 0) -> GroupCall:
        """Raises :class:`NotationError` for a call without a meaning."""
        ranks = group_ranks(case, mesh)
        if name not in CALLS:
            raise NotationError(f"{name!r} is no collective: want one of {', '.join(CALLS)}")
        spec = CollectiveSpec.from_case(case, name, len(ranks), index)
        try:
            member_data(spec)
        except (IndexError, RuntimeError) as error:
            raise NotationError(str(error)) from None
        return cls(spec, ranks, case.get("by", "rank") == "position")

    @property
    def in_place(self) -> bool:
        """Whether it writes its results into its input."""
        return self.spec.name in IN_PLACE

    @property
    def mesh(self) -> Mesh:
        return Mesh((len(self.ranks),), self.ranks)

    def member_data(self, rank: int) -> MemberData | None:
        """The data of a rank; ``None`` outside the group."""
        return member_data(self.spec)[self.ranks.index(rank)] if rank in self.ranks else None

    def due(self, rank: int) -> Any:
        """The due results of a rank; ``...`` where nothing is promised."""
        data = self.member_data(rank)
        return ... if data is None or data.expected is None else [self.spec.due_value(x) for x in data.expected]

    def for_act(self, rank: int) -> Any:
        """``(name, xs, outputs, options)`` of one rank; ``None`` outside the group."""
        spec, data = self.spec, self.member_data(rank)
        if data is None:
            return None
        outputs = [] if self.in_place else [(tuple(x.shape), x.dtype, spec.out) for x in data.expected or ()]
        options: dict[str, Any] = {"op": spec.op} if spec.name in REDUCING else {}
        if spec.name in ROOT_OPTIONS:
            option = ROOT_OPTIONS[spec.name]
            options.update({f"group_{option}": spec.root} if self.by_position else {option: self.ranks[spec.root]})
        if spec.splits and spec.name == "all_to_all_single":
            at = self.ranks.index(rank)
            options["output_split_sizes"] = [row[at] for row in spec.splits]
            options["input_split_sizes"] = list(spec.splits[at])
        return spec.name, data.inputs, outputs, options


class RankDataField(Field):
    """Data of every rank that ``read_case`` computes from the whole case: by rank for acts, as one value for due
    functions. Tensors are copied to the device, in the memory layout of ``x``. ``extra_fields``: fields that it reads
    besides those of a collective."""

    field, takes = "x", "a tensor SHAPE:-:DTYPE:FILL:MEMORY, with the fields of a collective"

    def __init__(self, read_case: Callable[[Case], tuple[Mapping[int, Any], Any]], *extra_fields: str) -> None:
        self.read_case, self.extra_fields = read_case, extra_fields

    def fields(self, name: str) -> tuple[str, ...]:
        return "x", "mesh", "ranks", "op", "root", "by", "form", "extents", "splits", "out", *self.extra_fields

    def read(self, case: Case, name: str) -> Any:
        return *self.read_case(case), case.tensor("x").memory

    def build(self, value: Any, here: RankContext) -> Any:
        by_rank, _, memory = value
        # all ranks reject the case, also those outside the group: creating a group takes all ranks
        lists = any(isinstance(data, tuple) and data[0] == "all_to_all" for data in by_rank.values())
        if lists and not compat.supports_all_to_all(here.target.backend):
            here.reject(f"{here.target.backend} of this version of torch exchanges no lists of tensors")
        return to_device(by_rank.get(here.rank), memory, here)

    def due(self, value: Any, rank: int, world: int) -> Any:
        return value[1]

    def to_script(self, value: Any, name: str, world: int) -> ScriptArgument:
        return ScriptArgument(
            "GIVEN[rank]", tuple(rank_table("GIVEN", {rank: value[0].get(rank) for rank in range(world)}))
        )


def to_device(value: Any, memory: str, here: RankContext) -> Any:
    """The same value with copies of its tensors on the device; those that are not contiguous in the layout
    ``memory``."""
    if isinstance(value, list | tuple):
        return type(value)(to_device(part, memory, here) for part in value)
    if not isinstance(value, torch.Tensor):
        return value
    copy = here.tensor(value.clone(memory_format=torch.contiguous_format))
    return copy if value.is_contiguous() else lay_out(copy, memory)


def read_call(case: Case) -> tuple[Mapping[int, Any], Any]:
    """The one collective of a case, by rank and as a :class:`GroupCall`."""
    forms, form = CALLS_BY_FORM.get(case.law, {}), case.get("form", "")
    if forms and form not in forms:
        raise NotationError(f"form={form}: want one of {', '.join(forms)}")
    name = forms[form] if forms else case.get("call", case.law.removeprefix("collective.").replace("-", "_"))
    call = GroupCall.from_case(case, name)
    return {rank: call.for_act(rank) for rank in call.ranks}, call


def read_calls(case: Case) -> tuple[Mapping[int, Any], Any]:
    """The collectives of a case, by rank and as pairs of group and :class:`GroupCall`: ``a:all_reduce/b:reduce`` calls
    all_reduce in the group of ``mesh``, then reduce in that of ``mesh.b``."""
    words = [word.rpartition(":") for word in case.get("calls").split("/")]
    unknown = [key for key, _, _ in words if MESH_FIELDS.get(key or "a", "") not in case]
    if unknown:
        raise NotationError(f"calls={case.get('calls')}: there is no group {unknown[0]!r}")
    calls = [
        (key or "a", GroupCall.from_case(case, name, MESH_FIELDS[key or "a"], index))
        for index, (key, _, name) in enumerate(words)
    ]
    return {rank: [(key, call.for_act(rank)) for key, call in calls] for rank in range(max(case.world, 2))}, calls


Group = Annotated[Any, GroupsField(several=False)]
Groups = Annotated[Any, GroupsField(several=True)]
Call = Annotated[Any, RankDataField(read_call, "call")]
Calls = Annotated[Any, RankDataField(read_calls, "calls", "mesh.b", "mesh.c")]


# how a process group is given to a functional collective
GROUP_FORMS = {
    "name": lambda group, device: group.group_name,
    "ranks": lambda group, device: dist.get_process_group_ranks(group),
    "lists": lambda group, device: [dist.get_process_group_ranks(group)],
    "mesh": lambda group, device: DeviceMesh.from_group(group, device.type),
    "mesh-dim": lambda group, device: (DeviceMesh.from_group(group, device.type), 0),
}


class GroupFormField(WordField):
    """A key of :data:`GROUP_FORMS`."""

    def read(self, case: Case, name: str) -> Any:
        return self.parse(case.get(name)), group_ranks(case)

    def build(self, value: tuple[str, tuple[int, ...]], here: RankContext) -> str:
        form, ranks = value
        # all ranks reject the case, also those outside the group: creating a group takes all ranks
        if form in ("ranks", "lists") and ranks != tuple(range(here.world)):
            here.reject("a list of ranks stands for any group of these ranks, whatever its order")
        return form

    def due(self, value: tuple[str, tuple[int, ...]], rank: int, world: int) -> str:
        return value[0]

    def to_script(self, value: Any, name: str, world: int) -> ScriptArgument:
        return ScriptArgument(repr(value[0]))


GivenAs = Annotated[str, GroupFormField(GROUP_FORMS)]
