"""Caches strategies: creating a composite strategy costs more than drawing from it."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import ParamSpec, TypeVar

from hypothesis.strategies import SearchStrategy

P = ParamSpec("P")
T = TypeVar("T")


def memoized(make: Callable[P, SearchStrategy[T]]) -> Callable[P, SearchStrategy[T]]:
    """Cache the strategies that ``make`` returns, by its arguments where all are hashable."""
    cached = lru_cache(maxsize=512, typed=True)(make)

    @wraps(make)
    def make_or_reuse(*args: P.args, **kwargs: P.kwargs) -> SearchStrategy[T]:
        try:
            hash((args, *kwargs.values()))
        except TypeError:
            return make(*args, **kwargs)
        return cached(*args, **kwargs)  # type: ignore[arg-type]

    return make_or_reuse
