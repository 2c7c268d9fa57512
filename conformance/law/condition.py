"""Conditions on the fields of a case, as an expectation writes them: ``where = { attempt = "rank-twice", steps = '/cumsum\\(/' }``.

A field is named as in the text of a case. ``x.dtype`` is a part of the tensor ``x``, ``*.dtype`` that of any tensor. Parts are ``shape``,
``placements``, ``dtype``, ``fill``, ``memory`` (with defaults filled in), ``elements`` (how many it has), ``shards`` (how many different
shards there are) and ``largest`` (how many elements the largest shard has); a tensor on a view of the mesh has neither of these.

The value is a text, a list of texts of which one must match, a regular expression between slashes that must be found in the field, or a
bool: whether the case has the field.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardlaw.reference.layout import Layout, LayoutError
from shardlaw.reference.notation import NotationError, format_shape
from shardlaw.reference.placement import Replicate
from shardlaw.reference.tensors import TensorSpec

if TYPE_CHECKING:
    from shardlaw.conformance.law.case import Case

PARTS = ("shape", "placements", "dtype", "fill", "memory", "elements", "shards", "largest")
DEFAULTS = ("float32", "distinct", "plain")
HAS_ELEMENTS = "*.elements=/^[1-9]/"  # a fact worth knowing, since most faults do not show on tensors without elements
PLACEMENT_FIELDS = ("*.placements", "to")
EXPECTED = "a text, a list of texts, '/a regular expression/', or true or false"


@dataclass(frozen=True)
class Condition:
    """A condition on one field of a case."""

    field: str
    wanted: tuple[str, ...] | re.Pattern[str] | bool

    @classmethod
    def from_value(cls, field: str, value: object) -> Condition:
        """A condition from a TOML value. Raises :class:`ValueError`."""
        if isinstance(value, str) and len(value) > 2 and value[0] == value[-1] == "/":
            try:
                return cls(field, re.compile(value[1:-1]))
            except re.error as error:
                raise ValueError(f"no regular expression: {error}") from None
        if isinstance(value, bool):
            return cls(field, value)
        values = value if isinstance(value, list) else [value]
        texts = tuple(text for text in values if isinstance(text, str) and text)
        if not texts or len(texts) < len(values):
            raise ValueError(f"want {EXPECTED}")
        return cls(field, texts)

    def matches(self, case: Case) -> bool:
        """Whether a case meets the condition. Without the field it meets only ``false``."""
        texts = list(_field_texts(self.field, case))
        if isinstance(self.wanted, bool):
            return bool(texts) is self.wanted
        if isinstance(self.wanted, tuple):
            return any(text in self.wanted for text in texts)
        return any(self.wanted.search(text) for text in texts)

    def __str__(self) -> str:
        if isinstance(self.wanted, bool):
            return f"{self.field} given" if self.wanted else f"{self.field} not given"
        return f"{self.field}=" + ("|".join(self.wanted) if isinstance(self.wanted, tuple) else f"/{self.wanted.pattern}/")


def case_facts(case: Case) -> frozenset[str]:
    """Conditions of the form ``NAME=WORD`` that a case meets: fields whose value is a word, every dtype, fill and memory of its tensors
    other than the default, whether a tensor has elements, and the kinds of placements that tensors have or are redistributed to."""
    found = {f"{name}={text}" for name, text in case.fields if name != "world" and re.fullmatch(r"[A-Za-z][\w.-]*", text)}
    parts = [f"{name}.{part}" for name, _ in case.fields for part in ("dtype", "fill", "memory")]
    found |= {f"{field}={text}" for field in parts for text in _field_texts(field, case) if text not in DEFAULTS}
    found |= {HAS_ELEMENTS} if "mesh" in case and any(text != "0" for text in _field_texts("*.elements", case)) else set()
    return frozenset(
        found | {f"{field}=/{kind}/" for field in PLACEMENT_FIELDS for text in _field_texts(field, case) for kind in "SPR" if kind in text}
    )


def _field_texts(field: str, case: Case) -> Iterator[str]:
    if field in case:
        yield case.get(field)
        return
    name, _, part = field.rpartition(".")
    if part not in PARTS:
        return
    for tensor, text in case.fields:
        if re.fullmatch(r"[a-z]\d?", tensor) and name in (tensor, "*"):
            with suppress(NotationError, LayoutError):
                yield _tensor_part(TensorSpec.parse(text), part, case)


def _tensor_part(spec: TensorSpec, part: str, case: Case) -> str:
    if part == "shape":
        return format_shape(spec.shape)
    if part == "placements":
        return "-" if spec.placements is None else ",".join(map(str, spec.placements))
    if part == "elements":
        return str(math.prod(spec.shape))
    if part in ("shards", "largest"):
        layout = Layout(spec.shape, case.mesh(), spec.placements or (Replicate(),) * case.mesh().ndim)
        sizes = [math.prod(layout.local_shape(coord)) for coord in layout.mesh.coords()]
        return str(max(sizes) if part == "largest" else len(sizes) // layout.replicas())
    return str(getattr(spec, part))
