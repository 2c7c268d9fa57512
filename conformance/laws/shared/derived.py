"""Fields that follow from others of a case (operands, gradients, placements beside ``x``), and calls by their names."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any

import torch
from torch.distributed.tensor import DTensor

from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Global
from shardlaw.conformance.law.fields import Field, PlacementsField, ScriptArgument, TensorField
from shardlaw.conformance.law.literal import literal
from shardlaw.reference.notation import NotationError
from shardlaw.reference.placement import Placements as RefPlacements

Made = Global | torch.Tensor | None


def operand(case: Case, name: str = "x") -> Global:
    """The tensor field ``name`` of a case, on its mesh."""
    return Global.of(case.tensor(name), case.mesh(), case.seed)


class Derived(TensorField):
    """A tensor that ``of`` makes of a case.

    Of a :class:`Global` the act gets a DTensor (with ``local`` the rank's part of it), of a dense tensor a copy, of
    ``None`` none. ``named`` are the fields that only it reads.
    """

    def __init__(self, of: Callable[[Case], Made], *, local: bool = False, named: tuple[str, ...] = ()) -> None:
        super().__init__(local=local)
        self.of, self.named = of, named

    def fields(self, name: str) -> tuple[str, ...]:
        return self.named

    def read(self, case: Case, name: str) -> Any:
        return self.of(case)

    def build(self, value: Made, here: Any) -> Any:
        if isinstance(value, Global):
            return super().build(value, here)
        return None if value is None else here.tensor(value.clone())

    def to_script(self, value: Made, name: str, world: int) -> ScriptArgument:
        return super().to_script(value, name, world) if isinstance(value, Global) else ScriptArgument(literal(value))


class PlacementsOfX(PlacementsField):
    """The placements that the field ``x`` has."""

    def fields(self, name: str) -> tuple[str, ...]:
        return ()

    def read(self, case: Case, name: str) -> RefPlacements:
        return case.tensor("x").placements or ()


@dataclass(frozen=True)
class Call:
    """An expression in operands, as a function of them; not ``exact`` where it rounds."""

    operands: str
    text: str
    exact: bool = True

    def __call__(self, *operands: Any) -> Any:
        return self._function(*operands)

    @cached_property
    def _function(self) -> Callable[..., Any]:
        function: Callable[..., Any] = eval(self.source, {"torch": torch, "DTensor": DTensor})
        return function

    @property
    def source(self) -> str:
        return f"lambda {self.operands}: {self.text}"


class CallField(Field):
    """The name of one of some expressions in ``operands``; those in ``rounding`` are not exact."""

    def __init__(self, operands: str, texts: Mapping[str, str], rounding: Collection[str] = ()) -> None:
        self.calls = {name: Call(operands, text, name not in rounding) for name, text in texts.items()}
        self.takes = f"one of {', '.join(texts)}"

    def parse(self, text: str) -> Call:
        if text not in self.calls:
            raise NotationError(f"{text!r} is none of them")
        return self.calls[text]

    def to_script(self, value: Call, name: str, world: int) -> ScriptArgument:
        return ScriptArgument(value.source)


Whole = Annotated[torch.Tensor, Derived(lambda case: case.tensor("x").build(case.seed))]
OwnPlacements = Annotated[list[Any], PlacementsOfX()]
