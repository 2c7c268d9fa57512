"""Strategies for nested states, as checkpoints save them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from shardlaw.reference.checkpoint.state_dict import FlattenError, Slot, State, Stateful, flatten
from shardlaw.strategies._arguments import check_choices, check_count

# Values that are no tensors, the plainest first: each type, and an empty value of each.
VALUES: tuple[Any, ...] = (1, None, "a", b"ab", 0.5, True, -7, "", b"", (1, 2), [], (), [1, None], {1, 2}, ("x", (2.0,)), [[1], "b"], 1j)
KEYS: tuple[str | int, ...] = ("n", "m", "opt", "w", "a.b", "Z", "_", "1")


def state_dicts(
    names: Iterable[str] = ("x",), *, max_entries: int = 4, max_depth: int = 3, stateful: bool = False, int_keys: bool = False
) -> SearchStrategy[State]:
    """Nested states that contain every tensor of ``names`` at least once, as a :class:`~shardlaw.reference.checkpoint.state_dict.Slot`.

    There are up to ``max_entries`` further entries: numbers, texts, bytes, ``None``, tuples, lists, sets, and dicts
    and lists up to ``max_depth`` deep. ``stateful``: some entries at the top are :class:`Stateful`. ``int_keys``: some nested dicts have
    numbers as keys. No two leaves have the same path.

    Shrinks to the tensors alone, each under its name.

    Raises ``InvalidArgument`` where an option is wrong.
    """
    tensors = check_choices("names", names)
    check_count("max_entries", max_entries)
    check_count("max_depth", max_depth, 1)
    leaves = st.sampled_from([*map(Slot, tensors), *VALUES])
    keys = st.sampled_from((*KEYS, 0, 3) if int_keys else KEYS)

    def inside(children: SearchStrategy[Any]) -> SearchStrategy[Any]:
        return st.one_of(st.lists(children, max_size=3), st.dictionaries(keys, children, max_size=3))

    trees: SearchStrategy[Any] = leaves
    for _ in range(max_depth - 1):
        trees = st.one_of(leaves, inside(trees))
    inner = st.dictionaries(st.sampled_from([key for key in KEYS if isinstance(key, str)][:4]), trees, min_size=1, max_size=3)
    entries = st.one_of(trees, inner.map(Stateful)) if stateful else trees

    @st.composite
    def state(draw: st.DrawFn) -> State:
        entries_by_key: State = {}
        for name in tensors:
            entries_by_key[name] = draw(st.sampled_from((Slot(name), {"w": Slot(name)}, [Slot(name)], {"g": [{"p": Slot(name)}]})))
        entries_by_key.update(
            draw(st.dictionaries(st.sampled_from([key for key in KEYS if isinstance(key, str)]), entries, max_size=max_entries))
        )
        return entries_by_key

    return state().filter(_flattens)


def _flattens(state: State) -> bool:
    try:
        flatten(state)
    except FlattenError:
        return False
    return True
