"""The fields of the plan laws: leaves in boxes, the states of all ranks of a mesh, and the metadata of a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import torch
from torch.distributed.tensor import DTensor

from shardlaw.conformance import compat
from shardlaw.conformance.law import literal
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.fields import Field, ScriptArgument
from shardlaw.conformance.laws.checkpoint import trip
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
    """The leaves of a case by name, in the order of its fields."""
    return {name: ShardedLeaf.parse(text) for name, text in case.fields if len(name) == 1 and name in LEAVES}


def rank_count(mesh: Mesh) -> int:
    """How many ranks a world of this mesh has, those outside the mesh included."""
    return max(mesh.ranks) + 1


# Plain values (see torch_plans)


def item_values(item: WriteItem) -> tuple[Any, ...]:
    """A write item of the reference as a plain value."""
    if item.box is None:
        return (item.name,)
    return item.name, box_values(item.box), item.shape, DTYPES[item.dtype], item.replica


def leaf_values(leaf: ShardedLeaf) -> Any:
    """The entry of a leaf in metadata as a plain value: each distinct nonempty box once."""
    boxes = leaf.shards.without_empty().boxes
    return None if leaf.kind == "value" else (leaf.shape, DTYPES[leaf.dtype], sorted(boxes_values(boxes)))


class LeafField(Field):
    """Base of the fields that read all one-letter fields of a case, and ``further`` ones."""

    takes = LEAF_NOTATION
    always = True
    further: tuple[str, ...] = ("ranks",)

    def fields(self, name: str) -> tuple[str, ...]:
        return ("*", *self.further)


class PlansField(LeafField):
    """The local plan of every rank: plain items for the act, plans of the reference for the due function."""

    def read(self, case: Case, name: str) -> list[Plan]:
        return plans_of(parse_leaves(case), case.integer("ranks"))

    def build(self, value: Any, here: RankContext) -> Any:
        return [[item_values(item) for item in plan] for plan in value]


class LeavesField(LeafField):
    """For due functions: the due entry of every leaf in metadata, as plain values."""

    def read(self, case: Case, name: str) -> dict[str, Any]:
        return {name: leaf_values(leaf) for name, leaf in sorted(parse_leaves(case).items())}


class SavedLeavesField(LeafField):
    """The metadata of a checkpoint of the leaves, which are named ``NAME.leaf``, as plain values."""

    def read(self, case: Case, name: str) -> Metadata:
        plans = plans_of({f"{name}.leaf": leaf for name, leaf in parse_leaves(case).items()}, case.integer("ranks"))
        return describe(dedup(plans))

    def build(self, value: Any, here: RankContext) -> Any:
        return {
            name: None if entry is None else (entry.shape, DTYPES[entry.dtype], boxes_values(entry.chunks))
            for name, entry in value.entries.items()
        }


class DestinationField(LeafField):
    """What to load: the shape of each saved leaf, ``None`` for a value, and for the ``culprit`` what ``want`` says."""

    takes = "culprit=NAME want=SHAPE, or want=value"
    further = ("ranks", "culprit", "want")

    def read(self, case: Case, name: str) -> dict[str, Any]:
        shapes = {name: None if leaf.kind == "value" else leaf.shape for name, leaf in parse_leaves(case).items()}
        want = case.get("want")
        shapes[case.get("culprit")] = None if want == "value" else parse_shape(want)
        return {f"{name}.leaf": shape for name, shape in shapes.items()}


class HintsField(Field):
    """Index hints of :class:`MetadataIndex`: positions in a list of chunks, or none."""

    takes = "numbers, or - for none, such as 1,-,0"

    def parse(self, text: str) -> list[int | None]:
        try:
            return [None if hint == "-" else int(hint) for hint in text.split(",")]
        except ValueError:
            raise NotationError(f"{text!r} has others") from None


# Tensors on meshes


@dataclass(frozen=True)
class MeshState(trip.End):
    """A state whose tensors are sharded on a mesh or plain; builds the state of each rank, of zeros."""

    @property
    def layouts(self) -> list[Layout]:
        return [layout for name in self.specs if (layout := self.layout(name)) is not None]

    def local_shape(self, name: str, rank: int) -> tuple[int, ...]:
        layout, coord = self.layout(name), self.mesh.coord(rank)
        if layout is None:
            return self.specs[name].shape
        return (0,) * len(layout.shape) if coord is None else layout.local_shape(coord)

    def build_for(self, rank: int, here: RankContext) -> dict[str, Any]:
        """The state of a rank; its DTensors are on a mesh as that rank sees it."""
        return trip.build_state(self, lambda name: self._build_tensor(here, name, rank))

    def _build_tensor(self, here: RankContext, name: str, rank: int) -> torch.Tensor:
        spec = self.specs[name]
        local = torch.zeros(self.local_shape(name, rank), dtype=spec.torch_dtype)
        if spec.placements is None:
            return local
        mesh = compat.mesh_for_rank(here.device.type, literal.nested_ranks(self.mesh), rank)
        # as written in the case: a dim may be negative
        placements, shape = here.placements(spec.placements), torch.Size(spec.shape)
        return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=_stride(shape))

    def to_function(self, name: str) -> str:
        """The source of a function that builds the state of a rank, for a script."""
        lines = [f"mesh = {compat.MESH_FOR_RANK.format(literal.nested_ranks(self.mesh))}"] if self.layouts else []
        for tensor in dict.fromkeys(slot_names(self.state)):
            spec = self.specs[tensor]
            sizes = {rank: self.local_shape(tensor, rank) for rank in range(rank_count(self.mesh))}
            size = f"{sizes}[seat]" if len({*sizes.values()}) > 1 else f"{sizes[0]}"
            expression = f"torch.zeros({size}, dtype={spec.torch_dtype})"
            if spec.placements is not None:
                placements = literal.placements_literal(spec.placements)
                options = f"run_check=False, shape=torch.Size({spec.shape}), stride={_stride(spec.shape)}"
                expression = f"DTensor.from_local({expression}, mesh, {placements}, {options})"
            lines.append(f"{tensor} = {expression}")
        return "\n    ".join([f"def {name}(seat):", *lines, f"return {tree_text(self.state, '')}"])


def _stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def tensor_specs(case: Case) -> dict[str, TensorSpec]:
    return {name: case.tensor(name) for name in ("x", "a") if name in case}


class StatesField(LeafField):
    """The states of all ranks: the field ``state``, or without one a dict of the tensors by name."""

    takes = "a state such as {x:x,n:1}, its tensors x and a, and their mesh"
    further: tuple[str, ...] = ("mesh", "state")

    def read(self, case: Case, name: str) -> MeshState:
        specs = tensor_specs(case)
        return MeshState(trip.state_of(case, specs), case.mesh(), specs)

    def build(self, value: Any, here: RankContext) -> Any:
        return [value.build_for(rank, here) for rank in range(rank_count(value.mesh))]

    def to_script(self, value: Any, name: str, world: int) -> ScriptArgument:
        return ScriptArgument(
            f"[state(seat) for seat in range({rank_count(value.mesh)})]", (), (value.to_function("state"),)
        )


class LoadedStatesField(StatesField):
    """The states of all ranks at the load: the tensor ``x`` on the mesh of the load, with the placements ``to``."""

    takes = "placements such as S(0),R, or - for a plain tensor"
    further = ("mesh.load", "mesh", "to")

    def read(self, case: Case, name: str) -> MeshState:
        spec = case.tensor("x").with_placements(trip.placements_at_load(case, "x"))
        return MeshState({"x": Slot("x")}, trip.mesh_of_load(case), {"x": spec})


class SavedTensorField(SavedLeavesField):
    """The metadata of a checkpoint of the tensor ``x``, saved by all ranks of the mesh."""

    takes = "a tensor such as 5x6:S(0),R"
    further = ("mesh",)

    def read(self, case: Case, name: str) -> Metadata:
        spec, mesh = case.tensor("x"), case.mesh()
        if spec.placements is None:
            return describe([plain_items("x", spec.shape, spec.dtype)])
        layout = Layout(spec.shape, mesh, spec.placements)
        return describe(
            dedup([shard_items("x", layout, mesh.coord(rank), spec.dtype) for rank in range(rank_count(mesh))])
        )


class SavesField(StatesField):
    """A series of saves, each a list of the states of all ranks. ``order`` names the state of each save: ``a``; ``b``,
    with the difference that ``change`` names; ``c``, which is ``b`` with a further value on the last rank."""

    takes = "order=ab... change=WORD, and to.x where x is placed differently"
    further = ("mesh", "order", "change", "to.x")

    def read(self, case: Case, name: str) -> Any:
        names = {*case.get("order").replace("c", "b")}
        return case.get("order"), {name: self._read_state(case, name) for name in sorted(names)}

    def _read_state(self, case: Case, name: str) -> MeshState:
        specs, change = tensor_specs(case), case.get("change") if name == "b" else "same"
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
        if case.get("change") == "paths" and name == "a":
            state = {"p.q": state.pop("x"), **state}
        return MeshState(state, case.mesh(), specs)

    def build(self, value: Any, here: RankContext) -> Any:
        order, states = value
        built = {name: super(SavesField, self).build(state, here) for name, state in states.items()}
        if "c" in order:
            built["c"] = [*built["b"][:-1], {**built["b"][-1], "z": 3}]
        return [built[name] for name in order]

    def to_script(self, value: Any, name: str, world: int) -> ScriptArgument:
        order, states = value
        seats = max(rank_count(state.mesh) for state in states.values())
        functions = tuple(state.to_function(name) for name, state in states.items())
        if "c" in order:
            functions += (f"def c(seat):\n    return b(seat) | ({{'z': 3}} if seat == {seats - 1} else {{}})",)
        return ScriptArgument(
            f"[[state(seat) for seat in range({seats})] for state in ({', '.join(order)},)]", (), functions
        )


class TreeField(Field):
    """A state of plain tensors of two elements: the first tensor is filled with 1, the second with 2."""

    takes = "a state such as {x:x,n:[1,None]}"

    def parse(self, text: str) -> State:
        return parse_state(text)

    def build(self, value: State, here: RankContext) -> Any:
        return with_tensors(value, value)

    def to_script(self, value: State, name: str, world: int) -> ScriptArgument:
        lines = tuple(f"{slot} = torch.full((2,), {at}.0)" for at, slot in enumerate(slot_names(value), 1))
        return ScriptArgument(tree_text(value, ""), (), lines)


def with_tensors(tree: Any, state: State) -> Any:
    """A part of a state, with each slot replaced by its tensor."""
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
