"""The schema of a law's cases: the parameters of its functions, read from annotations, and the validation of cases against them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin, get_type_hints

from shardlaw.conformance.law.fields import COMMON_FIELDS, FIELD_TYPES, Between, Field, NumberField, WordField
from shardlaw.reference.notation import NotationError

if TYPE_CHECKING:
    from shardlaw.conformance.law.case import Case


def annotation_field(annotation: Any) -> Field:
    """The field type of an annotation. Raises ``TypeError``."""
    base: Any = annotation
    extra: tuple[Any, ...] = ()
    if get_origin(annotation) is Annotated:
        base, *rest = get_args(annotation)
        extra = tuple(rest)
    for part in extra:
        if isinstance(part, Field):
            return part
    if get_origin(base) is Literal:
        return WordField(get_args(base))
    optional = [part for part in get_args(base) if part is not type(None)]
    if type(None) in get_args(base) and len(optional) == 1:
        return annotation_field(optional[0])
    bounds = next((part for part in extra if isinstance(part, Between)), None)
    if bounds is not None and base in (int, float):
        return NumberField(base, bounds)
    if base in FIELD_TYPES:
        return FIELD_TYPES[base]
    known = ", ".join(getattr(each, "__name__", str(each)) for each in FIELD_TYPES)
    raise TypeError(f"{getattr(annotation, '__name__', annotation)} is no type of a field: want {known}, or a Literal")


def field_name(parameter: str) -> str:
    """The field of a parameter: ``from`` of ``from_``, ``mesh.b`` of ``mesh__b``."""
    return parameter.rstrip("_").replace("__", ".")


@dataclass(frozen=True)
class Parameter:
    """One parameter of an act or a due function."""

    name: str
    field: str
    type: Field
    default: Any = inspect.Parameter.empty

    @property
    def required(self) -> bool:
        return self.default is inspect.Parameter.empty

    def is_given(self, case: Case) -> bool:
        """Whether the case has a value for it."""
        return self.type.is_given(case, self.field)

    def read(self, case: Case) -> Any:
        """The value in terms of the reference; the default where the case has none. Raises :class:`NotationError` with the field's name."""
        if not self.is_given(case):
            if self.required:
                raise NotationError(f"case {case.text!r}: no field {self.field!r}: want {self.type.takes}")
            return self.default
        try:
            return self.type.read(case, self.field)
        except (NotationError, ValueError) as error:
            wanted = "" if ": want " in str(error) else f": want {self.type.takes}"
            raise NotationError(f"case {case.text!r}: field {self.field!r}: {error}{wanted}") from None


def read_parameters(function: Callable[..., Any], known: Mapping[str, Parameter] | None = None) -> dict[str, Parameter]:
    """The parameters of a function by name, those in ``known`` as they are there. Raises ``TypeError`` for a missing or unknown type,
    or for one of ``known`` that has another."""
    hints, signature = _hints_and_signature(function)
    found = {}
    for name, parameter in signature.parameters.items():
        if known is not None and name in known:
            found[name] = known[name]
            own = [data for data in getattr(hints.get(name), "__metadata__", ()) if isinstance(data, Field)]
            if own and own != [known[name].type]:
                raise TypeError(f"{function.__qualname__}: parameter {name!r} is another field than the act's of that name")
        else:
            if name not in hints:
                raise TypeError(f"{function.__qualname__}: parameter {name!r} has no annotation")
            try:
                type_ = annotation_field(hints[name])
            except TypeError as error:
                raise TypeError(f"{function.__qualname__}: parameter {name!r}: {error}") from None
            found[name] = Parameter(name, type_.field or field_name(name), type_, parameter.default)
    return found


@cache  # hundreds of laws of ops have the same act
def _hints_and_signature(function: Callable[..., Any]) -> tuple[dict[str, Any], inspect.Signature]:
    return get_type_hints(function, include_extras=True), inspect.signature(function)


def check_fields(case: Case, parameters: Iterable[Parameter]) -> None:
    """Raise :class:`NotationError` for a case with an unknown, missing or unreadable field."""
    parameters = list(parameters)
    allowed = {*COMMON_FIELDS, *(field for parameter in parameters for field in parameter.type.fields(parameter.field))}
    operands = "*" in allowed
    several = [pattern for pattern in allowed if "?" in pattern]
    for name, _ in case.fields:
        named = name in allowed or any(fnmatchcase(name, pattern) for pattern in several)
        if not named and not (operands and re.fullmatch(r"[a-z]\d?", name)):
            known = sorted(allowed - {"*"})
            raise NotationError(f"case {case.text!r}: unknown field {name!r}: {case.law} has {', '.join(known)}")
    for parameter in parameters:
        parameter.read(case)
    _ = case.meshes  # reading them is the check
