"""Fields for boxes of a tensor, which acts get as ``(offset, size)``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from shardlaw.conformance.law.fields import Field
from shardlaw.reference.box import Box, parse_box, parse_boxes
from shardlaw.reference.notation import Shape
from shardlaw.reference.tensors import TensorSpec

if TYPE_CHECKING:
    from shardlaw.conformance.law.case import Case
    from shardlaw.conformance.rank.context import RankContext


def box_values(box: Box) -> tuple[Shape, Shape]:
    return box.offset, box.size


def boxes_values(boxes: Iterable[Box]) -> list[tuple[Shape, Shape]]:
    return [*map(box_values, boxes)]


class BoxesField(Field):
    """Boxes of the tensor, or shape, in the field ``tensor``."""

    takes = "boxes START:END,...;..., a START:END for each dim of the tensor, or - for none"

    def __init__(self, tensor: str = "x") -> None:
        self.tensor = tensor

    def fields(self, name: str) -> tuple[str, ...]:
        return name, self.tensor

    def ndim(self, case: Case) -> int:
        return len(TensorSpec.parse(case.get(self.tensor)).shape)

    def read(self, case: Case, name: str) -> Any:
        return parse_boxes(case.get(name), self.ndim(case))

    def build(self, value: Sequence[Box], here: RankContext) -> Any:
        return boxes_values(value)


class BoxField(BoxesField):
    """One box of the tensor in the field ``tensor``."""

    takes = "a box START:END,..., a START:END for each dim of the tensor, such as 0:4,2:6"

    def read(self, case: Case, name: str) -> Box:
        return parse_box(case.get(name), self.ndim(case))

    def build(self, value: Any, here: RankContext) -> Any:
        return box_values(value)


BoxOfX = Annotated[tuple[Any, Any], BoxField()]
BoxesOfX = Annotated[list[Any], BoxesField()]
