"""Fields of laws about a tensor ``x`` on a mesh: what each rank passes or holds of it, and its parts by themselves.

=============  =================================================  ==========================
annotation     the act gets                                       the due function gets
=============  =================================================  ==========================
``Whole``      the tensor, dense, in memory as its text says      :class:`~.due.Global`
``OwnWhole``   the same, on every rank of values of its own       :class:`OwnValues`
``Held``       what the rank holds of it, a plain tensor          :class:`~.due.Global`
``Shards``     its shards, where ``boxes`` says who holds what    :class:`Boxed`
``Offsets``    the offsets of these                               :class:`Boxed`
``ShapeOf``    its shape                                          a tuple
``StrideOf``   its global stride                                  a tuple
``DtypeOf``    its dtype                                          it
``PlacedAs``   its placements, as they are written                the reference's
``GlobalOf``   (of due functions alone)                           :class:`~.due.Global`
``BoxedOf``    (of due functions alone)                           :class:`Boxed`
=============  =================================================  ==========================
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
    """A tensor that every rank passes whole, in order to have it laid out."""

    def build(self, value: Global, here: RankContext) -> Any:
        return here.tensor(value.full)

    def to_script(self, value: Global, name: str, world: int) -> ScriptArgument:
        return ScriptArgument(texts.tensor_literal(value.full))


class ByRankField(Field):
    """What every rank has of its own: ``of`` gives it from the value that ``read_case`` makes of a case and its name.

    ``reads``: the fields that it takes, beside the mesh; its own where none is named.
    """

    takes = TensorField.takes

    def __init__(self, read_case: Callable[[Case, str], Any], of: Callable[[Any, int], Any], *reads: str) -> None:
        self.read_case, self.of, self.reads = read_case, of, reads

    def fields(self, name: str) -> tuple[str, ...]:
        return *(self.reads or (name,)), "mesh"

    def read(self, case: Case, name: str) -> Any:
        return self.read_case(case, name)

    def build(self, value: Any, here: RankContext) -> Any:
        own = self.of(value, here.rank)
        if isinstance(own, list):
            return [here.tensor(one) if isinstance(one, torch.Tensor) else one for one in own]
        return here.tensor(own)

    def to_script(self, value: Any, name: str, world: int) -> ScriptArgument:
        by_rank = {rank: self.of(value, rank) for rank in range(world)}
        return ScriptArgument(f"{name.upper()}[rank]", tuple(texts.rank_table(name.upper(), by_rank)))


def global_x(case: Case, name: str = "x") -> Global:
    """The tensor ``x``, whatever the field is called."""
    return Global.of(case.tensor("x"), case.mesh(), case.seed)


def held(x: Global, rank: int) -> torch.Tensor:
    """What a rank holds of a tensor; outside its mesh an empty tensor of one dim."""
    return torch.empty(0, dtype=x.full.dtype) if x.mesh.coord(rank) is None else x.local(rank)


@dataclass(frozen=True)
class OwnValues:
    """A tensor of which every rank has values of its own; ``step`` is how far the seeds of two ranks are apart."""

    spec: TensorSpec
    mesh: Mesh
    seed: int
    step: int = 31

    def of(self, rank: int) -> Global:
        """The tensor with the values of ``rank``."""
        return Global.of(self.spec, self.mesh, self.seed + self.step * (rank + 1))

    def whole(self, rank: int) -> torch.Tensor:
        return self.of(rank).full


def own_values(case: Case, name: str) -> OwnValues:
    return OwnValues(case.tensor(name), case.mesh(), case.seed)


@dataclass(frozen=True)
class Boxed:
    """A dense tensor ``full`` handed out in boxes, which no placements name, each with the rank that holds it."""

    full: torch.Tensor
    mesh: Mesh
    shards: shards.Shards

    @classmethod
    def of(cls, case: Case, name: str = "x") -> Boxed:
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
    """One part of what the field ``x`` says: it need not name a layout that there is."""

    takes = TensorField.takes

    def __init__(self, part: Literal["shape", "stride", "dtype", "placements"]) -> None:
        self.part = part

    def fields(self, name: str) -> tuple[str, ...]:
        return ("x",)

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


Whole = Annotated[torch.Tensor, WholeField()]
OwnWhole = Annotated[torch.Tensor, ByRankField(own_values, OwnValues.whole)]
Held = Annotated[torch.Tensor, ByRankField(global_x, held, "x")]
Shards = Annotated[list[torch.Tensor], ByRankField(Boxed.of, Boxed.parts, "x", "boxes")]
Offsets = Annotated[list[tuple[int, ...]], ByRankField(Boxed.of, Boxed.offsets, "x", "boxes")]
ShapeOf = Annotated[torch.Size, PartField("shape")]
StrideOf = Annotated[tuple[int, ...], PartField("stride")]
DtypeOf = Annotated[torch.dtype, PartField("dtype")]
PlacedAs = Annotated[list[Any], PartField("placements")]
GlobalOf = Annotated[Global, TensorField()]
BoxedOf = Annotated[Boxed, ByRankField(Boxed.of, Boxed.parts, "x", "boxes")]
