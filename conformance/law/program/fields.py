"""The types of the field ``steps``, a function that runs on ranks and in scripts, and of the operands that it names."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Annotated, Any

import torch

from shardlaw.conformance import compat
from shardlaw.conformance.law import literal as texts
from shardlaw.conformance.law.due import Global
from shardlaw.conformance.law.fields import Field, ScriptArgument, TensorField, assemble_dtensor
from shardlaw.conformance.law.program.parse import Program as Steps
from shardlaw.reference.notation import NotationError

if TYPE_CHECKING:
    from shardlaw.conformance.law.case import Case
    from shardlaw.conformance.rank.context import RankContext


class ProgramField(Field):
    """A program of steps.

    Torch caches how it planned an op. The cache is cleared before and after the act with ``fresh``, and where a known fault of the cache
    would show in later cases: with ``tensor(``, since a plan for a number is used for a 0-d tensor and vice versa, and with ``out=``, since
    a plan for one placement of the output is used for others.
    """

    takes = "steps such as b=sum(a,0);relu(b)"

    def __init__(self, *, fresh: bool = False) -> None:
        self.fresh = fresh

    def parse(self, text: str) -> Steps:
        return Steps.parse(text)

    def surround(self, value: Steps) -> AbstractContextManager[Any]:
        return compat.without_cached_plans() if self.fresh or "tensor(" in value.text or "out=" in value.text else nullcontext()

    def build(self, value: Steps, here: RankContext) -> Any:
        return value.run

    def to_script(self, value: Steps, name: str, world: int) -> ScriptArgument:
        return ScriptArgument("steps", tuple(value.function.lines))


@lru_cache(4)
def operands_of(case: Case) -> dict[str, Global | torch.Tensor]:
    """The tensors that the steps of a case name, in the order of its fields; plain ones as dense tensors. Callers must not change them."""
    wanted, mesh = Steps.parse(case.get("steps")).names(), case.mesh()
    found: dict[str, Global | torch.Tensor] = {}
    for at, operand in enumerate(name for name, _ in case.fields if name in wanted):
        spec, seed = case.tensor(operand), case.seed * 64 + 7 * at + 1
        found[operand] = spec.build(seed) if spec.placements is None else replace(Global.of(spec, mesh, seed), laid=True)
    missing = sorted(wanted - {*found})
    if missing:
        tensors = [name for name, _ in case.fields if re.fullmatch(r"[a-z]\d?", name)]
        raise NotationError(f"steps name {missing[0]!r}, which is no field: want {' or '.join(tensors) or 'a field for each tensor'}")
    return found


class OperandsField(Field):
    """The operands of the program in the field ``steps``, each with different values."""

    field, takes = "steps", TensorField.takes
    reads = ("*", "mesh", "steps")

    def is_given(self, case: Case, name: str) -> bool:
        return True

    def read(self, case: Case, name: str) -> dict[str, Global | torch.Tensor]:
        return operands_of(case)

    def build(self, value: Mapping[str, Global | torch.Tensor], here: RankContext) -> dict[str, Any]:
        return {
            name: assemble_dtensor(x, here.tensor(x.local(here.rank)), here) if isinstance(x, Global) else here.tensor(x.clone())
            for name, x in value.items()
        }

    def to_script(self, value: Mapping[str, Global | torch.Tensor], name: str, world: int) -> ScriptArgument:
        constants, statements, parts = list[str](), list[str](), []
        for operand, x in value.items():
            if isinstance(x, torch.Tensor):
                parts.append(f"{operand!r}: {texts.tensor_literal(x)}")
                continue
            one = TensorField().to_script(x, operand, world)
            constants += one.constants
            statements += [line for line in one.statements if line not in statements]
            parts.append(f"{operand!r}: {one.expression}")
        return ScriptArgument(f"{{{', '.join(parts)}}}", tuple(constants), tuple(statements))


Program = Annotated[Callable[[Mapping[str, Any]], list[Any]], ProgramField()]
Operands = Annotated[dict[str, Any], OperandsField()]
