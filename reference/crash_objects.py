"""The states of an object store that a crash may leave while several processes put objects into it.

An object store has no folders, no rename and no sync. A ``put`` is atomic and durable: until it ends, readers see the old object,
afterwards the new one. A multipart put is visible once it is completed. A rename is a put under the new name, then a removal of the old
one; a crash may come between them. Reads and lists are consistent.

So a crash loses no step, and leaves what was done at some *cut*; steps, meetings and cuts are those of
:mod:`shardlaw.reference.crash`. Source: Amazon S3 user guide, "Amazon S3 data consistency model" and "Uploading and copying objects using
multipart upload".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardlaw.reference.crash import State, Step, cuts, format_moment, order_steps


def objects_after(base: Mapping[str, bytes], logs: Sequence[Sequence[Step]], done: Sequence[int]) -> State:
    """The objects by name after each process has ``done`` so many of its steps, in a store that held ``base``."""
    tree: dict[str, bytes | None] = dict(base)
    last: dict[int, str] = {}
    for (process, number), step in order_steps(logs).items():
        if number <= done[process]:
            last[process] = f"rank {process} is behind: {step.kind} {step.path}"
            if step.kind == "put":
                tree[step.path] = step.data
            else:
                tree.pop(step.path, None)
    return State(tree, "; ".join([format_moment(done, (), None), *(last[process] for process in sorted(last))]), frozenset())


def object_states(base: Mapping[str, bytes], logs: Sequence[Sequence[Step]], returned: bool = False) -> list[State]:
    """The states in which a crash may leave a store that held ``base``: each once, those after few steps first. ``returned``: only that
    after all steps."""
    found: dict[frozenset[tuple[str, bytes | None]], State] = {}
    at_all = cuts(logs)
    for done in at_all[-1:] if returned else at_all:
        state = objects_after(base, logs, [*map(len, done)])
        found.setdefault(frozenset(state.tree.items()), state)
    return [*found.values()]
