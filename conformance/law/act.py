"""How a law is written: an *act* in plain torch code, a *due* function that uses the reference alone, and the law's record as decorator.

::

    @law("redistribute.back", source=DOC, control="mesh=2x2 x=5x6:S(0),S(0) to=R,S(0)", draw=moved(kinds=("R", "S")), draws=120)
    def back(x: DTensor, to: Placements):
        \"\"\"A tensor that is redistributed and redistributed back has the same bits on every rank as before.\"\"\"
        there = x.redistribute(placements=to)
        return {"there": there, "back": there.redistribute(placements=x.placements)}

    @back.due
    def _(x: Global, to):
        return {"there": x.under(to), "back": x}

The act is what a user would write: torch, the standard library, and helpers that are plain torch code themselves. Its docstring is the
law's clause, its parameters are the fields of the law's cases (:mod:`shardlaw.conformance.law.fields`). Three things are derived from the
two functions: the check on a rank (:mod:`shardlaw.conformance.rank.perform`), the validation of cases, and the script of a finding
(:mod:`shardlaw.conformance.report.reproducer`). A law over several worlds has an act and a due function for each; ``@back.then`` adds one.

Laws that spy on calls, make them fail, kill or time ranks may have a ``check`` and a ``script`` of their own, each with a ``reason``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.fields import Field, ScriptArgument
from shardlaw.conformance.law.law import Law, Limits
from shardlaw.conformance.law.schema import Parameter, annotation_field, check_fields, field_name, read_parameters

if TYPE_CHECKING:
    from shardlaw.conformance.rank.context import RankContext


@dataclass
class Act:
    """An act, which every rank calls, and the due function that returns the expected result, each with its parameters."""

    function: Callable[..., Any]
    parameters: dict[str, Parameter]
    due: Callable[..., Any] | None = None
    due_parameters: dict[str, Parameter] = field(default_factory=dict)

    @classmethod
    def from_function(cls, function: Callable[..., Any]) -> Act:
        return cls(function, read_parameters(function))

    def set_due(self, function: Callable[..., Any]) -> None:
        """Set the due function. A parameter that the act has too is the same field."""
        self.due, self.due_parameters = function, read_parameters(function, self.parameters)

    def all_parameters(self) -> dict[str, Parameter]:
        return {**self.parameters, **self.due_parameters}

    def arguments(self, case: Case, here: RankContext) -> dict[str, Any]:
        """The arguments of the act on a rank."""
        return {
            name: parameter.type.build(parameter.read(case), here) if parameter.is_given(case) else parameter.read(case)
            for name, parameter in self.parameters.items()
        }

    def surround(self, case: Case) -> ExitStack:
        """The contexts in which a rank calls the act."""
        stack = ExitStack()
        for parameter in self.parameters.values():
            if type(parameter.type).surround is not Field.surround and parameter.is_given(case):
                stack.enter_context(parameter.type.surround(parameter.read(case)))
        return stack

    def script_arguments(self, case: Case, world: int) -> dict[str, ScriptArgument]:
        """The arguments of the act in a script of ``world`` ranks."""
        from shardlaw.conformance.law.literal import literal

        return {
            name: parameter.type.to_script(parameter.read(case), parameter.field.replace(".", "_"), world)
            if parameter.is_given(case)
            else ScriptArgument(literal(parameter.read(case)))
            for name, parameter in self.parameters.items()
        }

    def due_on(self, case: Case, rank: int, world: int) -> Any:
        """The expected result on a rank. Raises :class:`~shardlaw.conformance.law.due.Meaningless` where the case has no defined result."""
        assert self.due is not None, f"{self.function.__qualname__} has no due function"
        given = {
            name: parameter.type.due(parameter.read(case), rank, world) if parameter.is_given(case) else parameter.read(case)
            for name, parameter in self.due_parameters.items()
        }
        return self.due(**given)


def law(
    id: str, *, source: str, control: str, clause: str = "", cases: Sequence[str] = (), **record: Any
) -> Callable[[Callable[..., Any]], Law]:
    """Decorate the first act of a law. ``record``: the other fields of :class:`~shardlaw.conformance.law.law.Law`.

    ``control`` is the text of a case without the law's id. ``cases``: the texts of all cases of the sweep, which has them in this order.
    ``draw``, ``sweep`` and ``narrow`` may return cases of any law, such as those of :func:`fields`; their id is replaced by this law's.
    """

    if cases:
        record = {"sweep": texts(*cases), "sweeps": len(cases), **record}

    def decorate(function: Callable[..., Any]) -> Law:
        text = clause or first_paragraph(function)
        return Law(id=id, clause=text, source=source, control=f"{id} {control}", acts=[Act.from_function(function)], **record)

    return decorate


def first_paragraph(function: Callable[..., Any]) -> str:
    """The first paragraph of a docstring, on one line."""
    text = inspect.getdoc(function) or ""
    return " ".join(text.partition("\n\n")[0].split())


def fields(**values: Any) -> Case:
    """A case without a law: the law that draws or enumerates it puts its id in. See :meth:`Case.of`."""
    return Case.of("-", **values)


def texts(*lines: str) -> Callable[[Limits], list[Case]]:
    """A sweep of the cases with these texts of fields; cases that need more ranks than allowed are left out."""

    def sweep(limits: Limits) -> list[Case]:
        return [case for line in lines if (case := Case.parse(f"- {line}")).world <= limits.most]

    return sweep


def law_parameters(law: Law) -> list[Parameter]:
    """The parameters of a law's acts and due functions, and those of the fields that its record names."""
    found = [parameter for act in law.acts for parameter in act.all_parameters().values()]
    return found + [Parameter(name, field_name(name), annotation_field(annotation), None) for name, annotation in law.fields.items()]


def check_case(law: Law, case: Case) -> None:
    """Raise :class:`NotationError` for a case with a field that its law does not have or cannot read."""
    if known := law_parameters(law):
        check_fields(case, known)
