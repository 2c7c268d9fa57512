"""Types of fields: how a field's text is parsed, built into an argument on a rank, and printed into a script.

The parameters of a law's act and due functions are the fields of its cases: ``to: Placements`` is the field ``to``, ``from_`` the
field ``from``, ``mesh__b`` the field ``mesh.b``; a default value stands for a missing field. The annotation selects a :class:`Field`:

=====================  ==========================  =====================================  ==========================
annotation             text                        the act gets                           the due function gets
=====================  ==========================  =====================================  ==========================
``DTensor``            ``5x6:S(0),R:int64``        a DTensor, built without communication :class:`~.due.Global`
``torch.Tensor``       ``5x6``                     the full tensor, on the device         a dense tensor
``LocalTensor``        ``5x6:S(0),R``              this rank's part as a plain tensor     :class:`~.due.Global`
``DeviceMesh``         ``2x2@0,2,1,3``             the live mesh                          the reference's mesh
``NamedMesh``          the same                    a new mesh, dims ``a``, ``b``, ..      the reference's mesh
``KeptNamedMesh``      the same                    a cached one, dims ``a``, ``b``, ..    the reference's mesh
``MeshTable``          the same                    the nested list of its ranks           the reference's mesh
``Placements``         ``R,S(1)``                  torch's placements, a list             the reference's
``Shape``              ``5x6``                     ``torch.Size``                         a tuple
``torch.dtype``        ``int64``                   the dtype                              the dtype
``Literal["a", "b"]``  one of the words            a text                                 a text
``bool``               ``yes`` or ``no``           a bool                                 a bool
``int``, ``float``     a number                    a number                               a number
``Ints``               ``2,0,1``                   a list of ints                         a list of ints
``Word``               any text                    a text                                 a text
``Program``            ``b=sum(a,0);relu(b)``      a function of the operands             a program, with ``run_plain``
``Operands``           the tensors of ``steps``    a dict: DTensors and plain ones        a dict of :class:`~.due.Global`
=====================  ==========================  =====================================  ==========================

``Rank``, ``WorldSize``, ``Device``, ``Folder`` and ``Seed`` belong to no field: they describe the rank on which the act runs. Bounds of
a number: ``Annotated[int, Between(0, 3)]``. For another type put an instance of a :class:`Field` subclass into an ``Annotated``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardlaw.conformance.law import literal as texts
from shardlaw.conformance.law.due import Global
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.notation import NotationError, parse_shape
from shardlaw.reference.placement import parse_placements
from shardlaw.reference.tensors import DTYPES, TensorSpec

if TYPE_CHECKING:
    from shardlaw.conformance.law.case import Case
    from shardlaw.conformance.rank.context import RankContext

# fields that the cases of every law may have
COMMON_FIELDS = ("seed", "world", "sample")
DIM_NAMES = ("a", "b", "c")


@dataclass(frozen=True)
class ScriptArgument:
    """An argument of the act in a script: constants of the module, statements before the call, and the expression in the call.

    They may need lines of ``imports``, and functions or classes of plain torch code (``uses``), which are copied into the script.
    """

    expression: str
    constants: tuple[str, ...] = ()
    statements: tuple[str, ...] = ()
    imports: tuple[str, ...] = ()
    uses: tuple[Callable[..., Any], ...] = ()


class Field:
    """The type of a parameter.

    ``takes``: what a text must be, for error messages. ``field``: the case's field, where its name is not the parameter's. ``always``: the
    parameter has a value also in a case that has none of its fields. ``reads``: the fields of a case that it reads, where that is not the
    one that it is named after. ``to.?`` is a pattern, ``*`` stands for every field with the name of a tensor.
    """

    takes = "a text"
    field = ""
    always = False
    reads: tuple[str, ...] = ()

    def fields(self, name: str) -> tuple[str, ...]:
        """The fields of a case that it reads, as the parameter ``name``."""
        return self.reads or (name,)

    def is_given(self, case: Case, name: str) -> bool:
        """Whether the case has a value for it: the first of the fields that it reads, if it reads any."""
        read = self.fields(name)
        return self.always or not read or read[0] == "*" or read[0] in case

    def read(self, case: Case, name: str) -> Any:
        """The value in terms of the reference. Raises :class:`NotationError`."""
        return self.parse(case.get(name))

    def parse(self, text: str) -> Any:
        return text

    def build(self, value: Any, here: RankContext) -> Any:
        """The argument of the act on a rank. All ranks call it; it must not communicate."""
        return value

    def due(self, value: Any, rank: int, world: int) -> Any:
        """The argument of the due function, for one rank of the case's world."""
        return value

    def to_script(self, value: Any, name: str, world: int) -> ScriptArgument:
        """The argument of the act in a script of ``world`` ranks; in its statements ``rank`` is this rank."""
        return ScriptArgument(texts.literal(self.build(value, None)))  # type: ignore[arg-type]

    def surround(self, value: Any) -> AbstractContextManager[Any]:
        """The context in which a rank calls the act."""
        return nullcontext()


class TensorField(Field):
    """A DTensor; with ``local`` its local tensor as a plain tensor. ``mesh`` names the field of its mesh."""

    takes = "a tensor SHAPE:PLACEMENTS:DTYPE:FILL:MEMORY such as 5x6:S(0),R:int64"

    def __init__(self, mesh: str = "mesh", *, local: bool = False) -> None:
        self.mesh, self.local = mesh, local

    def fields(self, name: str) -> tuple[str, ...]:
        return name, self.mesh

    def read(self, case: Case, name: str) -> Global:
        spec, mesh = TensorSpec.parse(case.get(name)), case.mesh(self.mesh)
        return Global.of(spec, mesh, case.seed)

    def build(self, value: Global, here: RankContext) -> Any:
        local = here.tensor(value.local(here.rank))
        return local if self.local else assemble_dtensor(value, local, here)

    def to_script(self, value: Global, name: str, world: int) -> ScriptArgument:
        constants = texts.rank_table(name.upper(), {rank: value.local(rank) for rank in range(world)})
        local = f"{name.upper()}[rank]"
        if self.local:
            return ScriptArgument(local, tuple(constants))
        return ScriptArgument(
            name, tuple(constants), (mesh_line(value.mesh, self.mesh), f"{name} = {dtensor_expression(value, local, mesh_name(self.mesh))}")
        )


def assemble_dtensor(value: Global, local: torch.Tensor, here: RankContext, mesh: DeviceMesh | None = None) -> DTensor:
    """A DTensor from this rank's local tensor, without communication."""
    places = here.placements(value.placements)
    return DTensor.from_local(local, mesh or here.mesh(value.mesh), places, run_check=False, shape=value.full.shape, stride=value.stride)


def dtensor_expression(value: Global, local: str, mesh: str = "mesh") -> str:
    """The expression with which a script does the same."""
    places, shape = texts.placements_literal(value.placements), tuple(value.full.shape)
    return f"DTensor.from_local({local}, {mesh}, {places}, run_check=False, shape=torch.Size({shape}), stride={value.stride})"


def mesh_name(field: str) -> str:
    return field.replace(".", "_")


def mesh_line(mesh: Mesh, field: str = "mesh", names: Sequence[str] | None = None) -> str:
    return f"{mesh_name(field)} = {texts.mesh_literal(mesh, names)}"


class PlainTensorField(Field):
    """A plain tensor, which every rank holds in full."""

    takes = "a tensor SHAPE:-:DTYPE:FILL:MEMORY such as 5x6 or 4:-:int64"

    def read(self, case: Case, name: str) -> torch.Tensor:
        return TensorSpec.parse(case.get(name)).build(case.seed)

    def build(self, value: torch.Tensor, here: RankContext) -> Any:
        return here.tensor(value.clone(memory_format=torch.preserve_format))

    def to_script(self, value: torch.Tensor, name: str, world: int) -> ScriptArgument:
        return ScriptArgument(texts.tensor_literal(value))


class SpecField(Field):
    """The spec of a tensor, for due functions."""

    takes = TensorField.takes

    def parse(self, text: str) -> TensorSpec:
        return TensorSpec.parse(text)


class MeshField(Field):
    """A mesh, which the world caches: acts must not change it. With ``fresh`` a new mesh for each case. The dims of a ``named`` one are
    called a, b, c."""

    takes = "a mesh such as 2x3 or 2x2@0,2,1,3"

    def __init__(self, *, named: bool = False, fresh: bool = False) -> None:
        self.named, self.fresh = named, fresh

    def parse(self, text: str) -> Mesh:
        return Mesh.parse(text)

    def names(self, value: Mesh) -> tuple[str, ...] | None:
        return DIM_NAMES[: value.ndim] if self.named else None

    def build(self, value: Mesh, here: RankContext) -> DeviceMesh:
        return here.mesh(value, fresh=self.fresh, names=self.names(value))

    def to_script(self, value: Mesh, name: str, world: int) -> ScriptArgument:
        return ScriptArgument(mesh_name(name), (), (mesh_line(value, name, self.names(value)),))


class TableField(MeshField):
    """The ranks of a mesh as nested lists, for acts that build the mesh themselves."""

    def build(self, value: Mesh, here: RankContext) -> Any:
        return texts.nested_ranks(value)

    def to_script(self, value: Mesh, name: str, world: int) -> ScriptArgument:
        return ScriptArgument(str(texts.nested_ranks(value)))


class PlacementsField(Field):
    takes = "placements, one for each mesh dim, such as R,S(1) or P(sum)"

    def parse(self, text: str) -> Any:
        return parse_placements(text)

    def build(self, value: Any, here: RankContext) -> Any:
        return here.placements(value)

    def to_script(self, value: Any, name: str, world: int) -> ScriptArgument:
        return ScriptArgument(texts.placements_literal(value))


class ShapeField(Field):
    takes = "a shape such as 5x6, 0x3 or ()"

    def parse(self, text: str) -> Any:
        return parse_shape(text)

    def build(self, value: Any, here: RankContext) -> Any:
        return torch.Size(value)


class DtypeField(Field):
    takes = f"a dtype: {', '.join(DTYPES)}"

    def parse(self, text: str) -> torch.dtype:
        if text not in DTYPES:
            raise NotationError(f"{text!r} is no dtype")
        return DTYPES[text]


class WordField(Field):
    """One of ``words``; without them any text."""

    def __init__(self, words: Iterable[str] = ()) -> None:
        self.words = tuple(words)
        self.takes = f"one of {', '.join(self.words)}" if self.words else "a text"

    def parse(self, text: str) -> str:
        if self.words and text not in self.words:
            raise NotationError(f"{text!r} is none of them")
        return text


class BoolField(Field):
    takes = "yes or no"

    def parse(self, text: str) -> bool:
        if text not in ("yes", "no", "1", "0"):
            raise NotationError(f"{text!r} is neither")
        return text in ("yes", "1")


@dataclass(frozen=True)
class Between:
    """Bounds of a number, both included."""

    least: float
    most: float


class NumberField(Field):
    def __init__(self, number: Callable[[str], Any], bounds: Between | None = None) -> None:
        self.number, self.bounds = number, bounds
        kind = "a whole number" if number is int else "a number"
        self.takes = kind + (f" between {bounds.least} and {bounds.most}" if bounds else "")

    def parse(self, text: str) -> Any:
        try:
            value = self.number(text)
        except ValueError:
            raise NotationError(f"{text!r} is none") from None
        if self.bounds and not self.bounds.least <= value <= self.bounds.most:
            raise NotationError(f"{text!r} is out of bounds")
        return value


class IntsField(Field):
    """Whole numbers, separated by ``between``."""

    takes = "whole numbers such as 2,0,1"

    def __init__(self, between: str = ",") -> None:
        self.between = between

    def parse(self, text: str) -> list[int]:
        try:
            return [int(part) for part in text.split(self.between) if part]
        except ValueError:
            raise NotationError(f"{text!r} has others") from None


class RankField(Field):
    """A property of the rank, not a field of the case. ``of_rank`` reads it on a rank, ``expression`` in a script, which may need more of
    a :class:`ScriptArgument`; ``at(rank, world)`` is what a due function gets."""

    def __init__(
        self,
        of_rank: Callable[[RankContext], Any],
        expression: str,
        at: Callable[[int, int], Any] = lambda rank, world: None,
        **script: Any,
    ) -> None:
        self.of_rank, self.script, self.at = of_rank, ScriptArgument(expression, **script), at

    def fields(self, name: str) -> tuple[str, ...]:
        return ()

    def is_given(self, case: Case, name: str) -> bool:
        return True

    def read(self, case: Case, name: str) -> Any:
        return None

    def build(self, value: Any, here: RankContext) -> Any:
        return self.of_rank(here)

    def due(self, value: Any, rank: int, world: int) -> Any:
        return self.at(rank, world)

    def to_script(self, value: Any, name: str, world: int) -> ScriptArgument:
        return self.script


class SeedField(Field):
    """The case's seed."""

    always = True

    def read(self, case: Case, name: str) -> int:
        return case.seed


LocalTensor = Annotated[torch.Tensor, TensorField(local=True)]
NamedMesh = Annotated[Any, MeshField(named=True, fresh=True)]
KeptNamedMesh = Annotated[Any, MeshField(named=True)]
MeshTable = Annotated[list[Any], TableField()]
Placements = Annotated[list[Any], PlacementsField()]
Shape = Annotated[torch.Size, ShapeField()]
Ints = Annotated[list[int], IntsField()]
Word = Annotated[str, WordField()]
Spec = Annotated[TensorSpec, SpecField()]
Rank = Annotated[int, RankField(lambda here: here.rank, "rank", lambda rank, world: rank)]
WorldSize = Annotated[int, RankField(lambda here: here.world, "dist.get_world_size()", lambda rank, world: world)]
Device = Annotated[torch.device, RankField(lambda here: here.device, 'torch.device("cpu")')]
Folder = Annotated[str, RankField(lambda here: here.folder(), "folder")]
Seed = Annotated[int, SeedField()]

#: the field types of bare annotations
FIELD_TYPES: dict[Any, Field] = {
    DTensor: TensorField(),
    torch.Tensor: PlainTensorField(),
    DeviceMesh: MeshField(),
    torch.dtype: DtypeField(),
    bool: BoolField(),
    int: NumberField(int),
    float: NumberField(float),
    str: WordField(),
}
