"""Arguments of acts that are computed from a case: how a rank builds them, and how a script writes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import parallel

from shardlaw.conformance.law.act import law
from shardlaw.conformance.law.due import Global
from shardlaw.conformance.law.fields import Field, ScriptArgument, TensorField, assemble_dtensor
from shardlaw.conformance.law.law import Law
from shardlaw.conformance.law.literal import literal, rank_table
from shardlaw.conformance.rank.context import to_torch
from shardlaw.reference.layout import Layout
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.placement import Placement

if TYPE_CHECKING:
    from shardlaw.conformance.law.case import Case
    from shardlaw.conformance.rank.context import RankContext


@dataclass(frozen=True)
class DTensorValue(Global):
    """The elements and layout of a DTensor. ``form``: ``leaf`` requires a gradient, ``parameter`` is an
    ``nn.Parameter``. ``field`` names the case's mesh."""

    form: str = ""
    field: str = "mesh"


@dataclass(frozen=True)
class ByRank:
    """Tensors of which each rank has its own: ``on_rank(rank)`` for the act, ``for_due`` for the due function."""

    on_rank: Callable[[int], Any]
    for_due: Any


@dataclass(frozen=True)
class ModuleCall:
    """A call of a function in plain torch code, with literal arguments, that returns a module. The script makes the
    same call."""

    function: Callable[..., nn.Module]
    arguments: tuple[Any, ...]
    options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self) -> nn.Module:
        return self.function(*self.arguments, **self.options)


@dataclass(frozen=True)
class Style:
    """A parallel style: the name of its class and its options."""

    name: str
    options: Mapping[str, Any]


def style(name: str, **options: Any) -> Style:
    return Style(name, options)


def dtensor(
    mesh: Mesh, full: torch.Tensor, *placements: Placement, form: str = "", seed: int = 0, field: str = "mesh"
) -> DTensorValue:
    """A dense tensor laid out on a mesh with these placements."""
    return DTensorValue(full.detach(), Layout(tuple(full.shape), mesh, placements), seed, form=form, field=field)


def module_input(tensor: DTensorValue, *, wrapped: bool) -> DTensorValue | ByRank:
    """The input of a module: a DTensor if ``wrapped``, else each rank's local tensor."""
    return tensor if wrapped else ByRank(tensor.local, for_due=tensor)


class FromCase(Field):
    """An argument that ``read_case`` computes from a case, of which it reads the fields ``names``. If the value has an
    attribute ``argument``, the act gets that, and the due function the value itself."""

    def __init__(self, read_case: Callable[[Case], Any], *names: str) -> None:
        self.read_case, self.names = read_case, names

    def fields(self, name: str) -> tuple[str, ...]:
        return self.names

    def is_given(self, case: Case, name: str) -> bool:
        return True

    def read(self, case: Case, name: str) -> Any:
        return self.read_case(case)

    def build(self, value: Any, here: RankContext) -> Any:
        match value:
            case DTensorValue():
                tensor = assemble_dtensor(value, here.tensor(value.local(here.rank)), here).detach()
                return (
                    nn.Parameter(tensor) if value.form == "parameter" else tensor.requires_grad_(value.form == "leaf")
                )
            case ByRank():
                return self.build(value.on_rank(here.rank), here)
            case ModuleCall():
                return value().to(here.device)
            case Style():
                return getattr(parallel, value.name)(**self.build(value.options, here))
            case Mapping():
                return {key: self.build(part, here) for key, part in value.items()}
            case list() | tuple():
                return type(value)(self.build(part, here) for part in value)
            case torch.Tensor():
                return here.tensor(value.clone())
        if isinstance(value, Placement):
            return to_torch(value)
        return self.build(value.argument, here) if hasattr(value, "argument") else value

    def due(self, value: Any, rank: int, world: int) -> Any:
        match value:
            case ByRank():
                return self.due(value.for_due, rank, world)
            case ModuleCall():
                return value()
            case list() | tuple():
                return type(value)(self.due(part, rank, world) for part in value)
            case torch.Tensor():
                return value.clone()
        return value

    def to_script(self, value: Any, name: str, world: int) -> ScriptArgument:
        match value:
            case DTensorValue():
                script = TensorField(value.field).to_script(value, name, world)
                forms = {
                    "leaf": f"{name}.detach().requires_grad_()",
                    "parameter": f"torch.nn.Parameter({name}.detach())",
                }
                return ScriptArgument(forms.get(value.form, name), ("\n".join(script.constants),), script.statements)
            case ByRank():
                table = rank_table(name.upper(), {rank: value.on_rank(rank) for rank in range(world)})
                return ScriptArgument(f"{name.upper()}[rank]", ("\n".join(table),))
            case ModuleCall():
                classes = tuple(part for part in value.arguments if isinstance(part, type))
                arguments = [part.__name__ if part in classes else literal(part) for part in value.arguments]
                arguments += [f"{key}={literal(part)}" for key, part in value.options.items()]
                return ScriptArgument(
                    f"{value.function.__name__}({', '.join(arguments)})", uses=(value.function, *classes)
                )
            case Style():
                parts = [(f"{key}=", part) for key, part in value.options.items()]
                line = f"from torch.distributed.tensor.parallel import {value.name}"
                return self.join_parts(parts, f"{value.name}(", ")", name, world, line)
            case Mapping():
                return self.join_parts([(f"{key!r}: ", part) for key, part in value.items()], "{", "}", name, world)
            case list() | tuple():
                opening, closing = "[]" if isinstance(value, list) else ("(", ",)" if len(value) == 1 else ")")
                return self.join_parts([("", part) for part in value], opening, closing, name, world)
        if hasattr(value, "argument"):
            return self.to_script(value.argument, name, world)
        return ScriptArgument(literal(value))

    def join_parts(
        self, parts: list[tuple[str, Any]], opening: str, closing: str, name: str, world: int, *imports: str
    ) -> ScriptArgument:
        """One expression of several parts, each a pair of a prefix and a value, between two brackets."""
        scripts = [self.to_script(part, f"{name}_{index}", world) for index, (_, part) in enumerate(parts)]

        def merge(field: str) -> tuple[Any, ...]:
            return tuple(dict.fromkeys(line for script in scripts for line in getattr(script, field)))

        text = ", ".join(f"{prefix}{script.expression}" for (prefix, _), script in zip(parts, scripts, strict=True))
        constants, statements, uses = merge("constants"), merge("statements"), merge("uses")
        return ScriptArgument(f"{opening}{text}{closing}", constants, statements, (*imports, *merge("imports")), uses)


def make_laws(
    act: Callable[..., Any], due: Callable[..., Any], records: Mapping[str, Mapping[str, Any]], **common: Any
) -> list[Law]:
    """Laws with the same act and due function. ``records``: the fields of each law's record by its id; ``common``:
    those of all of them."""
    laws = [law(id, **{**common, **record})(act) for id, record in records.items()]
    for each in laws:
        each.due(due)
    return laws
