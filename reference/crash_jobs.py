"""The states of a folder into which two jobs write at once: see :mod:`shardlaw.reference.crash`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardlaw.reference.crash import State, Step, surviving_tree


def overlapped_state(base: Mapping[str, bytes | None], jobs: tuple[Sequence[Step], Sequence[Step]], turns: tuple[int, int, int]) -> State:
    """The state of a folder that held ``base`` after two jobs took turns: ``turns`` is how many steps the first did, then the second, then
    the first again."""
    begun, other, more = turns
    first, second = jobs
    done = [*first[:begun], *second[:other], *first[begun : begun + more]]
    last = f"the first job is behind: {first[begun + more - 1]}" if begun + more else "the first job has done nothing"
    words = f"turns={begun},{other},{more}; {last}; the second job is behind: {second[other - 1] if other else 'nothing'}"
    return State(surviving_tree(base, done), words, frozenset())


def overlapped_states(base: Mapping[str, bytes | None], jobs: tuple[Sequence[Step], Sequence[Step]]) -> list[State]:
    """The states after two jobs that take turns: the second starts after any step of the first, then both finish, or one stops anywhere."""
    first, second = map(len, jobs)
    turns = [(begun, second, more) for begun in range(first + 1) for more in range(first - begun + 1)]
    turns += [(begun, other, 0) for begun in range(first + 1) for other in range(second)]
    found: dict[frozenset[tuple[str, bytes | None]], State] = {}
    for turn in turns:
        state = overlapped_state(base, jobs, turn)
        found.setdefault(frozenset(state.tree.items()), state)
    return [*found.values()]
