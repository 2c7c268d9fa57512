"""Fields whose value is computed from other fields of a case (operands, gradients), and named expressions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any

import torch
from torch.distributed.tensor import DTensor

from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Global
from shardlaw.conformance.law.fields import Field, ScriptArgument, TensorField
from shardlaw.conformance.law.literal import literal
from shardlaw.reference.notation import NotationError

DerivedValue = Global | torch.Tensor | None


def operand(case: Case, name: str = "x") -> Global:
    """The tensor field ``name`` of a case, on its mesh."""
    return Global.of(case.tensor(name), case.mesh(), case.seed)


class DerivedField(TensorField):
    """A tensor that ``derive`` computes from a case.

    If that returns a :class:`Global`, the act gets a DTensor, or with ``local`` its local tensor; if a dense tensor, a
    copy; if ``None``, ``None``. ``reads``: the fields of the case that no other parameter reads.
    """

    def __init__(
        self, derive: Callable[[Case], DerivedValue], *, local: bool = False, reads: tuple[str, ...] = ()
    ) -> None:
        super().__init__(local=local)
        self.derive, self.reads = derive, reads

    def fields(self, name: str) -> tuple[str, ...]:
        return self.reads

    def read(self, case: Case, name: str) -> Any:
        return self.derive(case)

    def build(self, value: DerivedValue, here: Any) -> Any:
        if isinstance(value, Global):
            return super().build(value, here)
        return None if value is None else here.tensor(value.clone())

    def to_script(self, value: DerivedValue, name: str, world: int) -> ScriptArgument:
        return super().to_script(value, name, world) if isinstance(value, Global) else ScriptArgument(literal(value))


@dataclass(frozen=True)
class Call:
    """A function of ``operands``, such as ``x, y``: the expression ``text``. ``exact``: it does not round."""

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
    """The name of one of the expressions ``texts``; those in ``rounding`` are not exact."""

    def __init__(self, operands: str, texts: Mapping[str, str], rounding: Collection[str] = ()) -> None:
        self.calls = {name: Call(operands, text, name not in rounding) for name, text in texts.items()}
        self.takes = f"one of {', '.join(texts)}"

    def parse(self, text: str) -> Call:
        if text not in self.calls:
            raise NotationError(f"{text!r} is none of them")
        return self.calls[text]

    def to_script(self, value: Call, name: str, world: int) -> ScriptArgument:
        return ScriptArgument(value.source)


DenseX = Annotated[torch.Tensor, DerivedField(lambda case: case.tensor("x").build(case.seed))]
