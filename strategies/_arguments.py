"""Checks of arguments, shared by all strategies: one error and one form of message, raised when a strategy is created."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument
from hypothesis.strategies import SearchStrategy

from shardlaw.reference.mesh import Mesh
from shardlaw.reference.notation import Shape

T = TypeVar("T")


def format_arguments(**arguments: object) -> str:
    """``name=value`` for each argument, with which every message of this package starts."""
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items())


def check_count(name: str, value: object, least: int = 0) -> int:
    """A whole number, ``least`` or more. Raises ``InvalidArgument``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidArgument(f"{format_arguments(**{name: value})}: want a whole number, {least} or more")
    return value


def check_range(least: str, least_value: object, most: str, most_value: object, start: int = 0) -> tuple[int, int]:
    """Two whole numbers in order. Raises ``InvalidArgument``."""
    low, high = check_count(least, least_value, start), check_count(most, most_value, start)
    if low > high:
        raise InvalidArgument(f"{format_arguments(**{least: low, most: high})}: want {least} <= {most}")
    return low, high


def check_choices(name: str, value: Iterable[T] | str, known: Sequence[T] | None = None) -> tuple[T, ...]:
    """One or more values, without repetition, each of them ``known``. Raises ``InvalidArgument``."""
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise InvalidArgument(f"{format_arguments(**{name: value})}: want a sequence of choices")
    chosen = tuple(dict.fromkeys(value))
    if not chosen:
        raise InvalidArgument(f"{name} is empty: want at least one choice")
    unknown = [choice for choice in chosen if known is not None and choice not in known]
    if unknown:
        raise InvalidArgument(f"{name}: {unknown[0]!r} is none of {', '.join(map(str, known or ()))}")
    return chosen


def check_sizes(name: str, value: Iterable[int], least: int = 0) -> tuple[int, ...]:
    """One or more whole numbers, each ``least`` or more. Raises ``InvalidArgument``."""
    return tuple(check_count(f"{name}[{at}]", size, least) for at, size in enumerate(check_choices(name, value)))


def mesh_or_strategy(value: Mesh | SearchStrategy[Mesh] | None, default: SearchStrategy[Mesh]) -> SearchStrategy[Mesh]:
    """A strategy for the argument ``mesh``; ``default`` where it is left out. Raises ``InvalidArgument``."""
    if value is None or isinstance(value, SearchStrategy):
        return default if value is None else value
    if not isinstance(value, Mesh):
        raise InvalidArgument(f"{format_arguments(mesh=value)}: want a shardlaw.reference.mesh.Mesh or a strategy")
    return st.just(value)


def shape_or_strategy(value: Shape | SearchStrategy[Shape] | None, default: SearchStrategy[Shape]) -> SearchStrategy[Shape]:
    """A strategy for the argument ``shape``; ``default`` where it is left out. Raises ``InvalidArgument``."""
    if value is None or isinstance(value, SearchStrategy):
        return default if value is None else value
    if not isinstance(value, tuple):
        raise InvalidArgument(f"{format_arguments(shape=value)}: want a tuple of extents, such as (5, 6), or a strategy")
    return st.just(tuple(check_count(f"shape[{at}]", size) for at, size in enumerate(value)))
