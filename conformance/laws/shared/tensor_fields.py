"""Fields of laws about a tensor ``x`` on a mesh: the full tensor, its shards, and its shape, stride, dtype, placements.

=================  ==========================================  ==========================
annotation         the act gets                                the due function gets
=================  ==========================================  ==========================
``FullTensor``     the full tensor, dense, with its memory     :class:`Global`
``OwnFullTensor``  the same, with other values on every rank   :class:`OwnValues`
``LocalShard``     the local shard of the rank                 :class:`Global`
``Shards``         the local shards, of the field ``boxes``    :class:`BoxedTensor`
``Offsets``        the offsets of these                        :class:`BoxedTensor`
``ShapeOf``        the shape                                   a tuple
``StrideOf``       the global stride                           a tuple
``DtypeOf``        the dtype                                   the dtype
``PlacementsOf``   the placements, as the case writes them     those of the reference
``GlobalOf``       (for due functions only)                    :class:`Global`
``BoxedOf``        (for due functions only)                    :class:`BoxedTensor`
=================  ==========================================  ==========================
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import torch

from shardlaw.conformance.law import literal as texts
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Global
from shardlaw.conformance.law.fields import Field, ScriptArgument, TensorField
from shardlaw.reference import shards
from shardlaw.reference.box import Box
from shardlaw.reference.layout import Layout
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.tensors import TensorSpec, lay_out

if TYPE_CHECKING:
    from shardlaw.conformance.rank.context import RankContext


def layout_of(case: Case) -> Layout:
    """The layout of the tensor ``x`` of a case."""
    spec = case.tensor("x")
    return Layout(spec.shape, case.mesh(), spec.placements or ())


class WholeField(TensorField):
    """The full tensor, on every rank."""

    def build(self, value: Global, here: RankContext) -> Any:
        return here.tensor(value.full)

    def to_script(self, value: Global, name: str, world: int) -> ScriptArgument:
        return ScriptArgument(texts.tensor_literal(value.full))


class ByRankField(Field):
    """A value that differs by rank: ``value_of(value, rank)``, where ``value`` is ``read_case(case, name)``.

    ``reads``: the fields of the case that it reads besides ``mesh``; by default its own.
    """

    takes = TensorField.takes

    def __init__(self, read_case: Callable[[Case, str], Any], value_of: Callable[[Any, int], Any], *reads: str) -> None:
        self.read_case, self.value_of, self.reads = read_case, value_of, reads

    def fields(self, name: str) -> tuple[str, ...]:
        return *(self.reads or (name,)), "mesh"

    def read(self, case: Case, name: str) -> Any:
        return self.read_case(case, name)

    def build(self, value: Any, here: RankContext) -> Any:
        own = self.value_of(value, here.rank)
        if isinstance(own, list):
            return [here.tensor(one) if isinstance(one, torch.Tensor) else one for one in own]
        return here.tensor(own)

    def to_script(self, value: Any, name: str, world: int) -> ScriptArgument:
        by_rank = {rank: self.value_of(value, rank) for rank in range(world)}
        return ScriptArgument(f"{name.upper()}[rank]", tuple(texts.rank_table(name.upper(), by_rank)))


def global_x(case: Case, name: str = "x") -> Global:
    """The tensor ``x`` of a case, whatever the name of the parameter."""
    return Global.of(case.tensor("x"), case.mesh(), case.seed)


def local_shard(x: Global, rank: int) -> torch.Tensor:
    """The local shard of a rank; outside the mesh an empty 1-D tensor."""
    return torch.empty(0, dtype=x.full.dtype) if x.mesh.coord(rank) is None else x.local(rank)


@dataclass(frozen=True)
class OwnValues:
    """A tensor with different values on every rank; ``step``: the difference between the seeds of two ranks."""

    spec: TensorSpec
    mesh: Mesh
    seed: int
    step: int = 31

    def of(self, rank: int) -> Global:
        """The tensor with the values of ``rank``."""
        return Global.of(self.spec, self.mesh, self.seed + self.step * (rank + 1))

    def full(self, rank: int) -> torch.Tensor:
        return self.of(rank).full


def own_values(case: Case, name: str) -> OwnValues:
    return OwnValues(case.tensor(name), case.mesh(), case.seed)


@dataclass(frozen=True)
class BoxedTensor:
    """A dense tensor ``full`` that ranks hold in boxes which need not be those of placements."""

    full: torch.Tensor
    mesh: Mesh
    shards: shards.Shards

    @classmethod
    def of(cls, case: Case, name: str = "x") -> BoxedTensor:
        spec = case.tensor("x")
        return cls(
            spec.build(case.seed), case.mesh(), shards.Shards.parse(spec.shape, case.get("boxes"), one_rank_each=True)
        )

    def boxes(self, rank: int) -> tuple[Box, ...]:
        return self.shards.boxes_of(rank)

    def parts(self, rank: int) -> list[torch.Tensor]:
        """The elements in the boxes of a rank."""
        return [self.full[box.slices()].clone(memory_format=torch.contiguous_format) for box in self.boxes(rank)]

    def offsets(self, rank: int) -> list[tuple[int, ...]]:
        return [box.offset for box in self.boxes(rank)]


class PartField(Field):
    """One attribute of the field ``x``, which need not be a valid layout."""

    takes = TensorField.takes
    reads = ("x",)

    def __init__(self, part: Literal["shape", "stride", "dtype", "placements"]) -> None:
        self.part = part

    def read(self, case: Case, name: str) -> Any:
        spec = case.tensor("x")
        match self.part:
            case "dtype":
                return spec.torch_dtype
            case "stride":
                memory = spec.memory if spec.memory == "transposed" else "plain"
                return lay_out(torch.empty(spec.shape, device="meta"), memory).stride()
        return getattr(spec, self.part) or ()

    def build(self, value: Any, here: RankContext) -> Any:
        if self.part == "placements":
            return here.placements(value)
        return torch.Size(value) if self.part == "shape" else value

    def to_script(self, value: Any, name: str, world: int) -> ScriptArgument:
        if self.part == "placements":
            return ScriptArgument(texts.placements_literal(value))
        return ScriptArgument(texts.literal(torch.Size(value) if self.part == "shape" else value))


FullTensor = Annotated[torch.Tensor, WholeField()]
OwnFullTensor = Annotated[torch.Tensor, ByRankField(own_values, OwnValues.full)]
LocalShard = Annotated[torch.Tensor, ByRankField(global_x, local_shard, "x")]
Shards = Annotated[list[torch.Tensor], ByRankField(BoxedTensor.of, BoxedTensor.parts, "x", "boxes")]
Offsets = Annotated[list[tuple[int, ...]], ByRankField(BoxedTensor.of, BoxedTensor.offsets, "x", "boxes")]
ShapeOf = Annotated[torch.Size, PartField("shape")]
StrideOf = Annotated[tuple[int, ...], PartField("stride")]
DtypeOf = Annotated[torch.dtype, PartField("dtype")]
PlacementsOf = Annotated[list[Any], PartField("placements")]
GlobalOf = Annotated[Global, TensorField()]
BoxedOf = Annotated[BoxedTensor, ByRankField(BoxedTensor.of, BoxedTensor.parts, "x", "boxes")]
