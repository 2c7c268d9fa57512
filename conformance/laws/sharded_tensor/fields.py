"""The fields of the sharded tensor laws, their due values, and their features.

``x`` is the global tensor, without placements; ``spec`` a sharding spec in the notation of
:mod:`shardlaw.reference.sharded_tensor`; ``world`` the number of ranks; ``group`` the acting ranks, if not all act.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import torch

from shardlaw.conformance import compat
from shardlaw.conformance.law import literal
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Of
from shardlaw.conformance.law.fields import Field, IntsField, PlainTensorField, ScriptArgument
from shardlaw.conformance.laws.shared.box_fields import boxes_values
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.notation import Shape
from shardlaw.reference.sharded_tensor import ChunkSpec, Spec, parse_spec, shards_of, spec_errors
from shardlaw.reference.shards import Shards
from shardlaw.reference.tensors import TensorSpec

if TYPE_CHECKING:
    from shardlaw.conformance.rank.context import RankContext

SOURCE = "torch.distributed._shard docs"


def members(case: Case, stage: int = 0) -> tuple[int, ...]:
    """The acting ranks: those of the group, or all."""
    return tuple(map(int, case.get("group").split(","))) if "group" in case else tuple(range(case.world))


def spec_of(case: Case, name: str = "spec") -> Spec:
    """The sharding spec in a field of a case."""
    return parse_spec(case.get(name), case.tensor("x").shape)


def with_all_bits(full: torch.Tensor) -> torch.Tensor:
    """The tensor; int64 and float64 elements are changed to ones that no narrower dtype can represent."""
    if full.dtype == torch.int64:
        return full * 2**40 + full
    return full + full * 2.0**-40 if full.dtype == torch.float64 else full


class WideTensorField(PlainTensorField):
    """The full tensor on every rank; its int64 and float64 elements need all bits of the dtype."""

    def read(self, case: Case, name: str) -> torch.Tensor:
        return with_all_bits(super().read(case, name))


class SizeField(Field):
    """The shape of a tensor field."""

    takes = "a tensor such as 5x6 or 4:-:int64"

    def parse(self, text: str) -> Shape:
        return TensorSpec.parse(text).shape

    def build(self, value: Shape, here: RankContext) -> torch.Size:
        return torch.Size(value)


class SpecField(Field):
    """A sharding spec of ``x``. With ``boxes``: the enumerable spec of the nonempty boxes of the field ``spec``."""

    takes = "a spec chunk(DIM)@RANK,... or START:END,...@RANK;..."

    def __init__(self, *, boxes: bool = False) -> None:
        self.boxes = boxes

    def fields(self, name: str) -> tuple[str, ...]:
        return "spec" if self.boxes else name, "x"

    def is_given(self, case: Case, name: str) -> bool:
        return self.boxes or name in case

    def read(self, case: Case, name: str) -> Spec:
        if not self.boxes:
            return spec_of(case, name)
        return shards_of(spec_of(case), case.tensor("x").shape).without_empty()

    def build(self, value: Spec, here: RankContext) -> Any:
        if isinstance(value, ChunkSpec):
            return compat.ChunkShardingSpec(value.dim, [remote_device(here, rank) for rank in value.ranks])
        return compat.EnumerableShardingSpec(
            [compat.ShardMetadata(*shard) for shard in boxes_with_devices(value, here)]
        )

    def to_script(self, value: Spec, name: str, world: int) -> ScriptArgument:
        def device(rank: int) -> str:
            return f'"rank:{rank}/cpu"'

        if isinstance(value, ChunkSpec):
            expression = f"ChunkShardingSpec({value.dim}, [{', '.join(map(device, value.ranks))}])"
            return ScriptArgument(expression, imports=(compat.import_statement("ChunkShardingSpec"),))
        shards = [f"ShardMetadata({[*box.offset]}, {[*box.size]}, {device(rank)})" for box, rank in value.holdings()]
        expression = f"EnumerableShardingSpec([{', '.join(shards)}])"
        return ScriptArgument(
            expression, imports=tuple(map(compat.import_statement, ("EnumerableShardingSpec", "ShardMetadata")))
        )


def remote_device(here: RankContext, rank: int) -> str:
    """The placement of a shard on a rank, such as ``rank:0/cpu``."""
    kind = here.target.device
    numbered = torch.empty(0, device=kind).device.index is not None
    return f"rank:{rank}/" + (f"{kind}:{rank % torch.get_device_module(kind).device_count()}" if numbered else kind)


def boxes_with_devices(shards: Shards, here: RankContext) -> list[tuple[list[int], list[int], str]]:
    """The offset, the size and the placement of each box."""
    return [([*box.offset], [*box.size], remote_device(here, rank)) for box, rank in shards.holdings()]


class OwnBoxesField(Field):
    """The (offset, size) of this rank's boxes in the spec; the due function gets the :class:`Shards` of all ranks.

    The boxes of an enumerable spec need not tile the tensor.
    """

    takes = SpecField.takes
    reads = ("spec", "x")

    def is_given(self, case: Case, name: str) -> bool:
        return "spec" in case

    def read(self, case: Case, name: str) -> Shards:
        spec = spec_of(case)
        return spec if isinstance(spec, Shards) else spec.shards(case.tensor("x").shape)

    def build(self, value: Shards, here: RankContext) -> Any:
        return boxes_values(value.boxes_of(here.rank))

    def to_script(self, value: Shards, name: str, world: int) -> ScriptArgument:
        table = literal.rank_table("BOXES", {rank: boxes_values(value.boxes_of(rank)) for rank in range(world)})
        return ScriptArgument("BOXES[rank]", tuple(table))


class AllBoxesField(OwnBoxesField):
    """The (offset, size, placement) of the boxes of all ranks in the spec."""

    def build(self, value: Shards, here: RankContext) -> Any:
        return boxes_with_devices(value, here)

    def to_script(self, value: Shards, name: str, world: int) -> ScriptArgument:
        boxes = [([*box.offset], [*box.size], f"rank:{rank}/cpu") for box, rank in value.holdings()]
        return ScriptArgument(literal.literal(boxes))


class EqualsField(Field):
    """Whether a field of the case is a given word."""

    always = True

    def __init__(self, field: str, word: str) -> None:
        self.field, self.word = field, word

    def fields(self, name: str) -> tuple[str, ...]:
        return (self.field,)

    def read(self, case: Case, name: str) -> bool:
        return case.get(self.field, "") == self.word


class GroupField(IntsField):
    """The process group of these ranks, ``None`` on others. All ranks create it."""

    def build(self, value: Sequence[int], here: RankContext) -> Any:
        mesh = here.mesh(Mesh((len(value),), tuple(value)))
        return mesh.get_group() if here.rank in value else None

    def to_script(self, value: Sequence[int], name: str, world: int) -> ScriptArgument:
        return ScriptArgument("group", (), (f"group = dist.new_group({[*value]})",))


FullTensor = Annotated[torch.Tensor, WideTensorField()]
Size = Annotated[torch.Size, SizeField()]
ShardingSpec = Annotated[Any, SpecField()]
EnumeratedSpec = Annotated[Any, SpecField(boxes=True)]
OwnBoxes = Annotated[list[Any], OwnBoxesField()]
AllBoxes = Annotated[list[Any], AllBoxesField()]
Group = Annotated[Any, GroupField()]


# Due values


def due_boxes(shards: Shards) -> list[tuple[Shape, Shape, int]]:
    """The offset, size and rank of each nonempty box, sorted. Empty boxes may be anywhere, or missing."""
    return sorted((box.offset, box.size, rank) for box, rank in shards.without_empty().holdings())


def due_description(full: torch.Tensor, shards: Shards, rank: int) -> dict[str, Any]:
    """The due result of :func:`shardlaw.conformance.laws.sharded_tensor.act_helpers.describe` on a rank."""
    own = sorted(shards.without_empty().boxes_of(rank), key=lambda box: box.offset)
    return {
        "size": Of([tuple(full.shape)] * 2),
        "dtype": Of([full.dtype] * 2),
        "metadata": Of(due_boxes(shards)),
        "places": Of(boxes_values(own), "wrong-layout"),
        "shards": [full[box.slices()].contiguous() for box in own],
    }


def due_rows(full: torch.Tensor, ranks: Iterable[int], rank: int) -> dict[str, Any]:
    """The due description of a tensor in chunks of rows on these ranks."""
    return due_description(full, ChunkSpec(0, tuple(ranks)).shards(tuple(full.shape)), rank)


# Features


def features_of_shards(shards: Shards, ranks: Collection[int]) -> set[str]:
    """The features of the boxes of a tensor on these ranks."""
    counts = [len(shards.without_empty().boxes_of(rank)) for rank in ranks]
    sizes = {tuple(box.size for box in shards.boxes_of(rank)) for rank in ranks}
    found = {"uneven"} if len(sizes) > 1 else set()
    if 0 not in shards.shape and 0 in counts:
        found.add("empty-shard")
    if max(counts, default=0) > 1:
        found.add("several-shards")
    if any(not shards.boxes_of(rank) for rank in ranks):
        found.add("shardless")
    return found


def features_of_spec(shape: Shape, spec: Spec, ranks: Collection[int]) -> set[str]:
    """The features of a spec for a shape; none for a spec that is invalid for it."""
    if spec_errors(spec, shape):
        return set()
    found = features_of_shards(shards_of(spec, shape), ranks)
    if not isinstance(spec, ChunkSpec):
        return found | {"explicit-shards"}
    extent, count = shape[spec.dim], len(spec.ranks)
    if -(-extent // count) * (count - 1) > extent:
        found.add("beyond-the-end")
    if list(spec.ranks) != sorted(spec.ranks):
        found.add("permuted")
    return found | ({"negative-shard"} if spec.dim < 0 else set())


def spec_features(*names: str) -> Callable[[Case], set[str]]:
    """A function that gives the features of a case from the specs in these fields."""

    def of(case: Case) -> set[str]:
        found = {"group", "submesh"} if "group" in case else set()
        shape = case.tensor("x").shape
        return found.union(
            *(features_of_spec(shape, spec_of(case, name), members(case)) for name in names if name in case)
        )

    return of
