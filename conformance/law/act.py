"""A law told once: an *act* in plain torch code, what is *due* in terms of the reference, and the record as their decorator.

::

    @law("redistribute.back", source=DOC, control="mesh=2x2 x=5x6:S(0),S(0) to=R,S(0)", draw=moved(kinds=("R", "S")), draws=120)
    def back(x: DTensor, to: Placements):
        \"\"\"Redistributed and redistributed back, a tensor is on every rank what it was, bit by bit.\"\"\"
        there = x.redistribute(placements=to)
        return {"there": there, "back": there.redistribute(placements=x.placements)}

    @back.due
    def _(x: Global, to):
        return {"there": x.under(to), "back": x}

The act is what a user would write: it names no part of the harness but helpers that are plain torch code themselves. Its docstring is the
law's clause. Its parameters are the fields of its cases (:mod:`shardlaw.conformance.law.fields`). From the two functions follow the check
on a
rank (:mod:`shardlaw.conformance.rank.perform`), the refusal of cases that say something else, and the script of a finding
(:mod:`shardlaw.conformance.report.reproducer`). A law over several worlds has an act, and what is due, for each: ``@back.then`` adds one.

Laws that spy on calls, make them fail, kill or time ranks may have a ``check`` and a ``script`` of their own, each with a ``reason``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
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
    """One function of a law, which every rank runs, and what it must give, each with the fields that it takes."""

    function: Callable[..., Any]
    parameters: dict[str, Parameter]
    due: Callable[..., Any] | None = None
    due_parameters: dict[str, Parameter] = field(default_factory=dict)

    @classmethod
    def from_function(cls, function: Callable[..., Any]) -> Act:
        return cls(function, read_parameters(function))

    def set_due(self, function: Callable[..., Any]) -> None:
        """Say what the act must give: a function of the reference, whose parameters of the act's names are the act's fields."""
        self.due, self.due_parameters = function, read_parameters(function, self.parameters)

    def all_parameters(self) -> dict[str, Parameter]:
        return {**self.parameters, **self.due_parameters}

    def arguments(self, case: Case, here: RankContext) -> dict[str, Any]:
        """What the act is called with on a rank."""
        return {
            name: parameter.type.build(parameter.read(case), here) if parameter.is_given(case) else parameter.read(case)
            for name, parameter in self.parameters.items()
        }

    def surround(self, case: Case) -> ExitStack:
        """What surrounds the act on a rank."""
        stack = ExitStack()
        for parameter in self.parameters.values():
            if type(parameter.type).surround is not Field.surround and parameter.is_given(case):
                stack.enter_context(parameter.type.surround(parameter.read(case)))
        return stack

    def script_arguments(self, case: Case, world: int) -> dict[str, ScriptArgument]:
        """The same as texts of a script."""
        from shardlaw.conformance.law.literal import literal

        return {
            name: parameter.type.to_script(parameter.read(case), parameter.field.replace(".", "_"), world)
            if parameter.is_given(case)
            else ScriptArgument(literal(parameter.read(case)))
            for name, parameter in self.parameters.items()
        }

    def due_on(self, case: Case, rank: int, world: int) -> Any:
        """What is due on a rank. Raises :class:`~shardlaw.conformance.law.due.Meaningless` for a case that asks for nothing defined."""
        assert self.due is not None, f"{self.function.__qualname__} has no due function"
        given = {
            name: parameter.type.due(parameter.read(case), rank, world) if parameter.is_given(case) else parameter.read(case)
            for name, parameter in self.due_parameters.items()
        }
        return self.due(**given)


def law(
    id: str,
    *,
    source: str,
    control: str,
    clause: str = "",
    **record: Any,
) -> Callable[[Callable[..., Any]], Law]:
    """Make a law of the function below: its first act. ``record``: the further fields of :class:`~shardlaw.conformance.law.law.Law`.

    ``control`` is the text of the fields alone. ``draw``, ``sweep`` and ``narrow`` may make cases of any law (:func:`fields`): they become
    this one's.
    """

    def of(function: Callable[..., Any]) -> Law:
        text = clause or first_paragraph(function)
        return Law(id=id, clause=text, source=source, control=f"{id} {control}", acts=[Act.from_function(function)], **record)

    return of


def first_paragraph(function: Callable[..., Any]) -> str:
    """The first paragraph of a docstring, on one line."""
    text = inspect.getdoc(function) or ""
    return " ".join(text.partition("\n\n")[0].split())


def fields(**values: Any) -> Case:
    """The fields of a case of whichever law asks: see :meth:`Case.of`."""
    return Case.of("-", **values)


def texts(*lines: str) -> Callable[[Limits], list[Case]]:
    """A sweep of cases given as texts of their fields, as far as there are ranks enough."""

    def sweep(limits: Limits) -> list[Case]:
        return [case for line in lines if (case := Case.parse(f"- {line}")).world <= limits.most]

    return sweep


def law_parameters(law: Law) -> list[Parameter]:
    """What the cases of a law say: the parameters of its acts and of what is due, or the fields that it names."""
    found = [parameter for act in law.acts for parameter in act.all_parameters().values()]
    return found + [Parameter(name, field_name(name), annotation_field(annotation), None) for name, annotation in law.fields.items()]


def check_case(law: Law, case: Case) -> None:
    """Refuse a case that says what its law does not take. Raises ``NotationError``, which names the field and what would be right."""
    if taken := law_parameters(law):
        check_fields(case, taken)
