"""Arguments that a function reads from a case: what they are made of says how a rank builds them and how a script
tells them."""

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
class OnMesh(Global):
    """A DTensor: a leaf that asks for a gradient with ``leaf``, a parameter with ``parameter``. ``field`` names its
    mesh."""

    form: str = ""
    field: str = "mesh"


@dataclass(frozen=True)
class ByRank:
    """Tensors that each rank has of its own, in whatever holds them; the due function gets ``whole``."""

    of: Callable[[int], Any]
    whole: Any


@dataclass(frozen=True)
class Call:
    """A module that a function of plain torch code makes of literal arguments; the script calls it too."""

    function: Callable[..., nn.Module]
    arguments: tuple[Any, ...]
    options: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self) -> nn.Module:
        return self.function(*self.arguments, **self.options)


@dataclass(frozen=True)
class Style:
    """A parallel style: the name of its class, and its options."""

    name: str
    options: Mapping[str, Any]


def style(name: str, **options: Any) -> Style:
    return Style(name, options)


def on(mesh: Mesh, full: torch.Tensor, *at: Placement, form: str = "", seed: int = 0, field: str = "mesh") -> OnMesh:
    """A dense tensor placed on a mesh."""
    return OnMesh(full.detach(), Layout(tuple(full.shape), mesh, at), seed, form=form, field=field)


def passed(tensor: OnMesh, *, wrapped: bool) -> OnMesh | ByRank:
    """A tensor of which each rank passes its part, or, ``wrapped``, a DTensor."""
    return tensor if wrapped else ByRank(tensor.local, tensor)


class FromCase(Field):
    """What a function reads from a case, of the fields with these names. What has an ``argument`` is that for the
    act."""

    def __init__(self, read: Callable[[Case], Any], *names: str) -> None:
        self.of, self.names = read, names

    def fields(self, name: str) -> tuple[str, ...]:
        return self.names

    def is_given(self, case: Case, name: str) -> bool:
        return True

    def read(self, case: Case, name: str) -> Any:
        return self.of(case)

    def build(self, value: Any, here: RankContext) -> Any:
        match value:
            case OnMesh():
                made = assemble_dtensor(value, here.tensor(value.local(here.rank)), here).detach()
                return nn.Parameter(made) if value.form == "parameter" else made.requires_grad_(value.form == "leaf")
            case ByRank():
                return self.build(value.of(here.rank), here)
            case Call():
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
                return self.due(value.whole, rank, world)
            case Call():
                return value()
            case list() | tuple():
                return type(value)(self.due(part, rank, world) for part in value)
            case torch.Tensor():
                return value.clone()
        return value

    def to_script(self, value: Any, name: str, world: int) -> ScriptArgument:
        match value:
            case OnMesh():
                told = TensorField(value.field).to_script(value, name, world)
                forms = {
                    "leaf": f"{name}.detach().requires_grad_()",
                    "parameter": f"torch.nn.Parameter({name}.detach())",
                }
                return ScriptArgument(forms.get(value.form, name), ("\n".join(told.constants),), told.statements)
            case ByRank():
                table = rank_table(name.upper(), {rank: value.of(rank) for rank in range(world)})
                return ScriptArgument(f"{name.upper()}[rank]", ("\n".join(table),))
            case Call():
                classes = tuple(one for one in value.arguments if isinstance(one, type))
                arguments = [one.__name__ if one in classes else literal(one) for one in value.arguments]
                arguments += [f"{key}={literal(one)}" for key, one in value.options.items()]
                return ScriptArgument(
                    f"{value.function.__name__}({', '.join(arguments)})", uses=(value.function, *classes)
                )
            case Style():
                parts = [(f"{key}=", one) for key, one in value.options.items()]
                line = f"from torch.distributed.tensor.parallel import {value.name}"
                return self.joined(parts, f"{value.name}(", ")", name, world, line)
            case Mapping():
                return self.joined([(f"{key!r}: ", one) for key, one in value.items()], "{", "}", name, world)
            case list() | tuple():
                first, last = "[]" if isinstance(value, list) else ("(", ",)" if len(value) == 1 else ")")
                return self.joined([("", one) for one in value], first, last, name, world)
        return (
            self.to_script(value.argument, name, world)
            if hasattr(value, "argument")
            else ScriptArgument(literal(value))
        )

    def joined(
        self, parts: list[tuple[str, Any]], first: str, last: str, name: str, world: int, *imports: str
    ) -> ScriptArgument:
        """Parts as one expression; each has what stands before it."""
        told = [self.to_script(one, f"{name}_{at}", world) for at, (_, one) in enumerate(parts)]

        def every(field: str) -> tuple[Any, ...]:
            return tuple(dict.fromkeys(line for one in told for line in getattr(one, field)))

        text = ", ".join(f"{before}{one.expression}" for (before, _), one in zip(parts, told, strict=True))
        return ScriptArgument(
            f"{first}{text}{last}",
            every("constants"),
            every("statements"),
            (*imports, *every("imports")),
            every("uses"),
        )


def family(
    act: Callable[..., Any], due: Callable[..., Any], records: Mapping[str, Mapping[str, Any]], **common: Any
) -> list[Law]:
    """Laws of one act and one due function: by id what is a law's own, and what all have in common."""
    laws = [law(id, **{**common, **record})(act) for id, record in records.items()]
    for one in laws:
        one.due(due)
    return laws
