"""The fields of the plan laws: leaves in boxes, tensors and states as every rank of a mesh holds them, what a
checkpoint has of them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import torch
from torch.distributed.tensor import DTensor

from shardlaw.conformance import compat
from shardlaw.conformance.law import literal
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.fields import Field, ScriptArgument
from shardlaw.conformance.laws.checkpoint import trip as t
from shardlaw.conformance.laws.checkpoint.state_text import tree_text
from shardlaw.conformance.laws.shared.box_fields import BoxesField, box_values, boxes_values
from shardlaw.reference.checkpoint.save_plan import Metadata, Plan, WriteItem, dedup, describe, plain_items, shard_items
from shardlaw.reference.checkpoint.sharded_leaf import ShardedLeaf, plans_of
from shardlaw.reference.checkpoint.state_dict import Slot, State, map_leaves, parse_state, slot_names
from shardlaw.reference.layout import Layout
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.notation import NotationError, parse_shape
from shardlaw.reference.tensors import DTYPES, TensorSpec

if TYPE_CHECKING:
    from shardlaw.conformance.rank.context import RankContext

# A leaf of a case is a field of one letter, in the notation of shardlaw.reference.checkpoint.sharded_leaf.
LEAVES = "abcdn"
LEAF_NOTATION = "leaves SHAPE[:DTYPE]/BOX@RANKS;..., SHAPE/whole@RANKS or value@RANKS, and how many ranks there are"


def parse_leaves(case: Case) -> dict[str, ShardedLeaf]:
    """The leaves of a case by name, in their order."""
    return {name: ShardedLeaf.parse(text) for name, text in case.fields if len(name) == 1 and name in LEAVES}


def rank_count(*meshes: Mesh) -> int:
    return max(rank + 1 for mesh in meshes for rank in mesh.ranks)


# The same as plain values


def item_values(item: WriteItem) -> tuple[Any, ...]:
    """A write item as the acts take it."""
    if item.box is None:
        return (item.name,)
    return item.name, box_values(item.box), item.shape, DTYPES[item.dtype], item.replica


def leaf_values(leaf: ShardedLeaf) -> Any:
    """A leaf as metadata describes it: each different box with elements once."""
    boxes = leaf.shards.without_empty().boxes
    return None if leaf.kind == "value" else (leaf.shape, DTYPES[leaf.dtype], sorted(boxes_values(boxes)))


class LeafField(Field):
    """What a case says in fields of one letter."""

    takes = LEAF_NOTATION
    always = True
    more: tuple[str, ...] = ("ranks",)

    def fields(self, name: str) -> tuple[str, ...]:
        return ("*", *self.more)


class PlansField(LeafField):
    """The local plan of every rank: the act gets lists of plain items, the due function the reference's plans."""

    def read(self, case: Case, name: str) -> list[Plan]:
        return plans_of(parse_leaves(case), case.integer("ranks"))

    def build(self, value: Any, here: RankContext) -> Any:
        return [[item_values(item) for item in plan] for plan in value]


class LeavesField(LeafField):
    """For due functions: what metadata must say of every leaf."""

    def read(self, case: Case, name: str) -> dict[str, Any]:
        return {name: leaf_values(leaf) for name, leaf in sorted(parse_leaves(case).items())}


class SavedLeavesField(LeafField):
    """What a checkpoint has of the leaves, each under a name of its own, as plain values."""

    def read(self, case: Case, name: str) -> Metadata:
        plans = plans_of({f"{name}.leaf": leaf for name, leaf in parse_leaves(case).items()}, case.integer("ranks"))
        return describe(dedup(plans))

    def build(self, value: Any, here: RankContext) -> Any:
        return {
            name: None if known is None else (known.shape, DTYPES[known.dtype], boxes_values(known.chunks))
            for name, known in value.entries.items()
        }


class DestinationField(LeafField):
    """What is loaded into: what was saved, by its shape, ``None`` for a value; but the culprit is as ``want`` says."""

    takes = "culprit=NAME want=SHAPE, or want=value"
    more = ("ranks", "culprit", "want")

    def read(self, case: Case, name: str) -> dict[str, Any]:
        found = {
            f"{name}.leaf": None if leaf.kind == "value" else leaf.shape for name, leaf in parse_leaves(case).items()
        }
        want = case.get("want")
        return {**found, f"{case.get('culprit')}.leaf": None if want == "value" else parse_shape(want)}


class HintsField(Field):
    """Numbers under which a chunk may be found first; ``-`` is none."""

    takes = "numbers, or - for none, such as 1,-,0"

    def parse(self, text: str) -> list[int | None]:
        try:
            return [None if hint == "-" else int(hint) for hint in text.split(",")]
        except ValueError:
            raise NotationError(f"{text!r} has others") from None


# Tensors on meshes


@dataclass(frozen=True)
class MeshState(t.End):
    """A state whose tensors lie on a mesh, or whole on every rank: as each rank holds it, of zeros."""

    @property
    def layouts(self) -> list[Layout]:
        return [layout for name in self.specs if (layout := self.layout(name)) is not None]

    def local_shape(self, name: str, rank: int) -> tuple[int, ...]:
        layout, coord = self.layout(name), self.mesh.coord(rank)
        if layout is None:
            return self.specs[name].shape
        return (0,) * len(layout.shape) if coord is None else layout.local_shape(coord)

    def live(self, here: RankContext, rank: int) -> dict[str, Any]:
        """The state as a rank holds it."""
        return t.build(self, lambda name: self._tensor(here, name, rank))

    def _tensor(self, here: RankContext, name: str, rank: int) -> torch.Tensor:
        spec = self.specs[name]
        local = torch.zeros(self.local_shape(name, rank), dtype=spec.torch_dtype)
        if spec.placements is None:
            return local
        live = compat.mesh_for_rank(here.device.type, literal.nested_ranks(self.mesh), rank)
        # as they are written: a dim may count from the end
        places, shape = here.placements(spec.placements), torch.Size(spec.shape)
        return DTensor.from_local(local, live, places, run_check=False, shape=shape, stride=_stride(shape))

    def function(self, name: str) -> str:
        """A function that makes the state as a rank holds it, for a script."""
        lines = [f"mesh = {compat.MESH_FOR_RANK.format(literal.nested_ranks(self.mesh))}"] if self.layouts else []
        for tensor in dict.fromkeys(slot_names(self.state)):
            spec = self.specs[tensor]
            sizes = {rank: self.local_shape(tensor, rank) for rank in range(rank_count(self.mesh))}
            own = f"{sizes}[seat]" if len({*sizes.values()}) > 1 else f"{sizes[0]}"
            made = f"torch.zeros({own}, dtype={spec.torch_dtype})"
            if spec.placements is not None:
                places = literal.placements_literal(spec.placements)
                how = f"shape=torch.Size({spec.shape}), stride={_stride(spec.shape)}"
                made = f"DTensor.from_local({made}, mesh, {places}, run_check=False, {how})"
            lines.append(f"{tensor} = {made}")
        return "\n    ".join([f"def {name}(seat):", *lines, f"return {tree_text(self.state, '')}"])


def _stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def tensor_specs(case: Case) -> dict[str, TensorSpec]:
    return {name: case.tensor(name) for name in ("x", "a") if name in case}


class StatesField(LeafField):
    """The field ``state``, or every tensor under its name: a list of the states that the ranks hold."""

    takes = "a state such as {x:x,n:1}, its tensors x and a, and their mesh"
    more: tuple[str, ...] = ("mesh", "state")

    def read(self, case: Case, name: str) -> MeshState:
        specs = tensor_specs(case)
        return MeshState(t.state_of(case, specs), case.mesh(), specs)

    def build(self, value: Any, here: RankContext) -> Any:
        return [value.live(here, rank) for rank in range(rank_count(value.mesh))]

    def to_script(self, value: Any, name: str, world: int) -> ScriptArgument:
        return ScriptArgument(
            f"[state(seat) for seat in range({rank_count(value.mesh)})]", (), (value.function("state"),)
        )


class LoadedStatesField(StatesField):
    """The tensor ``x`` as the ranks of the mesh of the load hold it: under the placements ``to``, or whole."""

    takes = "placements such as S(0),R, or - for a plain tensor"
    more = ("mesh.load", "mesh", "to")

    def read(self, case: Case, name: str) -> MeshState:
        spec = case.tensor("x").with_placements(t.placements_at_load(case, "x"))
        return MeshState({"x": Slot("x")}, t.mesh_of_load(case), {"x": spec})


class SavedTensorField(SavedLeavesField):
    """What a checkpoint has of the tensor ``x``, saved by all ranks of the mesh."""

    takes = "a tensor such as 5x6:S(0),R"
    more = ("mesh",)

    def read(self, case: Case, name: str) -> Metadata:
        spec, mesh = case.tensor("x"), case.mesh()
        if spec.placements is None:
            return describe([plain_items("x", spec.shape, spec.dtype)])
        layout = Layout(spec.shape, mesh, spec.placements)
        return describe(
            dedup([shard_items("x", layout, mesh.coord(rank), spec.dtype) for rank in range(rank_count(mesh))])
        )


class SavesField(StatesField):
    """A series of saves, each a list of the states that the ranks hold: of state ``a``; of ``b``, in which the thing
    that ``change`` names is another; or of ``c``, which is ``b`` with a value more on the last rank."""

    takes = "order=ab... change=WORD, and to.x where x is placed differently"
    more = ("mesh", "order", "change", "to.x")

    def read(self, case: Case, name: str) -> Any:
        wanted = {*case.get("order").replace("c", "b")}
        return case.get("order"), {which: self._state(case, which) for which in sorted(wanted)}

    def _state(self, case: Case, which: str) -> MeshState:
        specs, change = tensor_specs(case), case.get("change") if which == "b" else "same"
        state: State = {**{name: Slot(name) for name in specs}, "n": 1}
        x = specs["x"]
        match change:
            case "shape":
                specs["x"] = replace(x, shape=tuple(size + 1 for size in x.shape))
            case "dtype":
                specs["x"] = replace(x, dtype="int32" if x.dtype != "int32" else "int64")
            case "placed":
                specs["x"] = replace(x, placements=case.placements("to.x"))
            case "dropped":
                del state["n"]
            case "added":
                state["m"] = 2
            case "renamed":
                state = {"w" if name == "x" else name: value for name, value in state.items()}
            case "kind":
                state["x"] = 3
            case "value":
                state["n"] = 2
            case "paths":
                state = {"p": {"q": state.pop("x")}, **state}
        if case.get("change") == "paths" and which == "a":
            state = {"p.q": state.pop("x"), **state}
        return MeshState(state, case.mesh(), specs)

    def build(self, value: Any, here: RankContext) -> Any:
        order, states = value
        live = {which: super(SavesField, self).build(state, here) for which, state in states.items()}
        if "c" in order:
            live["c"] = [*live["b"][:-1], {**live["b"][-1], "z": 3}]
        return [live[which] for which in order]

    def to_script(self, value: Any, name: str, world: int) -> ScriptArgument:
        order, states = value
        seats = max(rank_count(state.mesh) for state in states.values())
        functions = tuple(state.function(which) for which, state in states.items())
        if "c" in order:
            more = f"return b(seat) | ({{'z': 3}} if seat == {seats - 1} else {{}})"
            functions += (f"def c(seat):\n    {more}",)
        return ScriptArgument(
            f"[[state(seat) for seat in range({seats})] for state in ({', '.join(order)},)]", (), functions
        )


class TreeField(Field):
    """A state of plain tensors of two elements: those of the first tensor are 1, those of the second 2."""

    takes = "a state such as {x:x,n:[1,None]}"

    def parse(self, text: str) -> State:
        return parse_state(text)

    def build(self, value: State, here: RankContext) -> Any:
        return with_tensors(value, value)

    def to_script(self, value: State, name: str, world: int) -> ScriptArgument:
        made = tuple(f"{slot} = torch.full((2,), {at}.0)" for at, slot in enumerate(slot_names(value), 1))
        return ScriptArgument(tree_text(value, ""), (), made)


def with_tensors(tree: Any, state: State) -> Any:
    """A part of a state with its tensors in their places."""
    tensors = {slot: torch.full((2,), float(at)) for at, slot in enumerate(slot_names(state), 1)}
    return map_leaves(tree, lambda leaf: tensors[leaf.name] if isinstance(leaf, Slot) else leaf)


Plans = Annotated[list[Any], PlansField()]
Leaves = Annotated[dict[str, Any], LeavesField()]
SavedLeaves = Annotated[dict[str, Any], SavedLeavesField()]
Destination = Annotated[dict[str, Any], DestinationField()]
Boxes = Annotated[list[Any], BoxesField("shape")]
Hints = Annotated[list[Any], HintsField()]
States = Annotated[list[Any], StatesField()]
LoadedStates = Annotated[list[Any], LoadedStatesField()]
SavedTensor = Annotated[dict[str, Any], SavedTensorField()]
Saves = Annotated[list[Any], SavesField()]
Tree = Annotated[dict[str, Any], TreeField()]
