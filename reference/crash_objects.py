"""What a crash may leave of an object store into which several processes were putting objects.

An object store knows no folders, no renaming and nothing to sync. A ``put`` is atomic: before it has ended the object of that name is
what it was, afterwards it is the new one, and that lasts. Of a put in several parts nothing is there before they are completed. A rename
is a put under the new name, then a removal of the old one: a crash may come between them. Whoever reads or lists sees what is there.

So nothing that was done is lost, and a crash leaves what some *cut* has done; steps, meetings and cuts are those of
:mod:`shardlaw.reference.crash`. Source: Amazon S3 user guide, "Amazon S3 data consistency model" and "Uploading and copying objects using
multipart upload".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardlaw.reference.crash import State, Step, cuts, format_moment, order_steps


def objects_after(base: Mapping[str, bytes], logs: Sequence[Sequence[Step]], done: Sequence[int]) -> State:
    """The objects by name after each process has ``done`` so many of its steps, in a store that held ``base``."""
    tree: dict[str, bytes | None] = dict(base)
    told: dict[int, str] = {}
    for (process, number), step in order_steps(logs).items():
        if number <= done[process]:
            told[process] = f"rank {process} is behind: {step.kind} {step.path}"
            if step.kind == "put":
                tree[step.path] = step.data
            else:
                tree.pop(step.path, None)
    return State(tree, "; ".join([format_moment(done, (), None), *(told[process] for process in sorted(told))]), frozenset())


def object_states(base: Mapping[str, bytes], logs: Sequence[Sequence[Step]], returned: bool = False) -> list[State]:
    """The states in which a crash may leave a store that held ``base``: each once, those after few steps first. ``returned``: after all
    steps alone."""
    found: dict[frozenset[tuple[str, bytes | None]], State] = {}
    at_all = cuts(logs)
    for done in at_all[-1:] if returned else at_all:
        state = objects_after(base, logs, [*map(len, done)])
        found.setdefault(frozenset(state.tree.items()), state)
    return [*found.values()]
