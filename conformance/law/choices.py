"""A field that selects one of several functions by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from shardlaw.conformance.law.fields import Field, ScriptArgument
from shardlaw.reference.notation import NotationError

if TYPE_CHECKING:
    from shardlaw.conformance.rank.context import RankContext


class ChoiceField(Field):
    """One of the functions of a table, which are plain torch code, by name. The act gets the function, the due function its name."""

    def __init__(self, table: Mapping[str, Callable[..., Any]]) -> None:
        self.table = dict(table)
        self.takes = f"one of {', '.join(self.table)}"

    def parse(self, text: str) -> str:
        if text not in self.table:
            raise NotationError(f"{text!r} is none of them")
        return text

    def build(self, value: str, here: RankContext) -> Any:
        return self.table[value]

    def to_script(self, value: str, name: str, world: int) -> ScriptArgument:
        function = self.table[value]
        if function.__code__.co_name == "<lambda>":
            function.__name__ = name
        return ScriptArgument(function.__name__, uses=(function,))
