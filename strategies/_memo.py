"""Strategies that are made once: making a composite costs more than drawing from it."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import ParamSpec, TypeVar

from hypothesis.strategies import SearchStrategy

P = ParamSpec("P")
T = TypeVar("T")


def memoized(make: Callable[P, SearchStrategy[T]]) -> Callable[P, SearchStrategy[T]]:
    """Keep the last strategies that ``make`` gave, for arguments that can be hashed."""
    known = lru_cache(maxsize=512, typed=True)(make)

    @wraps(make)
    def found(*args: P.args, **kwargs: P.kwargs) -> SearchStrategy[T]:
        try:
            hash((args, *kwargs.values()))
        except TypeError:
            return make(*args, **kwargs)
        return known(*args, **kwargs)  # type: ignore[arg-type]

    return found
