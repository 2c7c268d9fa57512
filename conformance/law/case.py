"""A case: one input on which a law is tried.

A case is pure data: the id of its law, and named fields whose values are texts in the notations of ``reference`` (shapes, meshes,
placements, tensors) or of :mod:`shardlaw.conformance.law.program.parse` (steps). It has a text of one line, ``redistribute.local mesh=2x2
x=5x6:S(0),R to=R,S(1) seed=3``, and a JSON form. Both are complete: reading either gives an equal case on every machine.

Fields that all laws share: ``mesh`` (``mesh.NAME`` for further ones), ``seed``, ``steps``, and ``world`` where the case needs more ranks
than its meshes have. ``after`` holds the cases that the same world must run before it, oldest first, for faults that depend on history.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from shardlaw.reference.mesh import Mesh
from shardlaw.reference.notation import NotationError, Shape, parse_shape
from shardlaw.reference.placement import Placements, parse_placements
from shardlaw.reference.tensors import TensorSpec

SCHEMA = 1


@dataclass(frozen=True)
class Case:
    """One input of ``law``; ``fields`` maps names to canonical texts, in the order in which they are printed."""

    law: str
    fields: tuple[tuple[str, str], ...]
    after: tuple[Case, ...] = ()

    @classmethod
    def of(cls, law: str, /, *, after: tuple[Case, ...] = (), **fields: object) -> Case:
        """A case from values, each as its ``str``. ``None`` is left out, a tuple becomes a list joined by commas, and ``from_`` and
        ``mesh__b`` become the fields ``from`` and ``mesh.b``."""
        printed = []
        for name, value in fields.items():
            if value is None:
                continue
            text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            if not text or any(char.isspace() for char in text):
                raise NotationError(f"field {name}={text!r}: want a text without spaces")
            printed.append((name.rstrip("_").replace("__", "."), text))
        return cls(law, tuple(printed), after)

    @classmethod
    def parse(cls, text: str) -> Case:
        """The inverse of :attr:`text`. Raises :class:`NotationError`."""
        law, *words = text.split() or [""]
        if not law:
            raise NotationError("an empty case: want LAW NAME=VALUE ...")
        fields: list[tuple[str, str]] = []
        for word in words:
            name, equals, value = word.partition("=")
            if not (name and equals and value):
                raise NotationError(f"case {text!r}: {word!r} is not NAME=VALUE")
            if name in dict(fields):
                raise NotationError(f"case {text!r}: {name!r} is given twice")
            fields.append((name, value))
        return cls(law, tuple(fields))

    @cached_property
    def text(self) -> str:
        """The case on one line, without its history."""
        return " ".join([self.law, *(f"{name}={value}" for name, value in self.fields)])

    def __str__(self) -> str:
        return self.text

    def to_json(self) -> dict[str, Any]:
        """A JSON object that :meth:`from_json` reads back."""
        return {
            "schema": SCHEMA,
            "law": self.law,
            "world": self.world,
            "fields": dict(self.fields),
            "after": [case.to_json() for case in self.after],
        }

    @classmethod
    def from_json(cls, data: Any) -> Case:
        """Raises :class:`NotationError` for anything that :meth:`to_json` would not write."""
        try:
            if data["schema"] != SCHEMA:
                raise NotationError(f"case schema {data['schema']!r}: this version reads {SCHEMA}")
            fields = tuple((str(name), str(value)) for name, value in data["fields"].items())
            return cls(str(data["law"]), fields, tuple(map(cls.from_json, data["after"])))
        except (KeyError, TypeError, AttributeError) as error:
            raise NotationError(f"no case: {type(error).__name__} {error}") from None

    def get(self, name: str, default: str | None = None) -> str:
        """The text of a field. Raises :class:`NotationError` where it is missing and has no default."""
        value = self._by_name.get(name, default)
        if value is None:
            raise NotationError(f"case {self.text!r} has no field {name!r}")
        return value

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    @cached_property
    def _by_name(self) -> dict[str, str]:
        return dict(self.fields)

    def mesh(self, name: str = "mesh") -> Mesh:
        return Mesh.parse(self.get(name))

    def shape(self, name: str = "shape") -> Shape:
        return parse_shape(self.get(name))

    def placements(self, name: str) -> Placements:
        return parse_placements(self.get(name))

    def tensor(self, name: str) -> TensorSpec:
        return TensorSpec.parse(self.get(name))

    def integer(self, name: str, default: int | None = None) -> int:
        text = self.get(name, None if default is None else str(default))
        try:
            return int(text)
        except ValueError:
            raise NotationError(f"case {self.text!r}: {name}={text} is no whole number") from None

    @property
    def seed(self) -> int:
        return self.integer("seed", 0)

    @cached_property
    def meshes(self) -> tuple[Mesh, ...]:
        """Every mesh of the case, in the order of its fields."""
        return tuple(Mesh.parse(value) for name, value in self.fields if name == "mesh" or name.startswith("mesh."))

    @cached_property
    def world(self) -> int:
        """How many ranks the case needs."""
        if "world" in self:
            return self.integer("world")
        return max((rank + 1 for mesh in self.meshes for rank in mesh.ranks), default=1)

    def with_fields(self, **fields: object) -> Case:
        """A copy with some fields replaced (or added at the end)."""
        return replace(self, fields=tuple({**dict(self.fields), **dict(Case.of(self.law, after=(), **fields).fields)}.items()))

    def with_after(self, after: tuple[Case, ...]) -> Case:
        return replace(self, after=after)
