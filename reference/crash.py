"""The states of a folder that a crash may leave while several processes write into it.

Every process takes *steps*: it writes to a file, syncs it, renames it. Some steps are *meetings*, at which processes wait for each other. A
crash stops all processes at a *cut*: each has done a prefix of its steps, and none has passed a meeting before those that it waits for
reached it. Cuts depend on these waits alone, not on the interleaving of the recorded run.

Not every step survives the crash. The ``disk`` decides which do:

``kill``   the processes die, the machine does not: every step survives
``posix``  the machine goes down: bytes survive once their file is synced, a name (created, moved or removed) once its folder is. Other
           effects survive or are lost independently, with two exceptions: bytes written after a file was truncated are lost with the
           truncation, and a moved name is either at its old or at its new place

For each cut these losses are tried: nothing, everything that may be lost, each step alone, everything but one step, and the second half of
each write. Of more than two processes, at most two are between two meetings; the others are at one. This finds most faults of this kind
(Mohan et al., OSDI 2018: CrashMonkey and ACE; Pillai et al., OSDI 2014: ALICE).
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

MAX_INSIDE = 2  # processes that are between two meetings at a cut
MAX_AHEAD = 2  # meetings by which one process may be ahead of another
MAX_STATES = 4096  # states that are returned
ROOT = 0


@dataclass(frozen=True)
class Step:
    """One step of a process; paths are relative to the folder, which is ``""`` itself.

    ==========  ==================================================================================================
    make        create the folder ``path``
    open        create the file ``path``, or open it; truncate it where ``at`` is 1
    write       write ``data`` to the file ``path`` at byte ``at``
    cut         truncate or extend the file ``path`` to ``at`` bytes
    sync        sync the file or the folder ``path``; with ``other="all"`` everything
    move        rename ``path`` to ``other``
    link        link ``path`` as ``other`` too
    remove      remove the name ``path``
    meet        all wait for ``all``, or process ``at`` waits for all (``to``), or all wait for process ``at`` (``from``)
    ==========  ==================================================================================================

    ``when``: orders the steps of all processes in the recorded run; distinct within a process.
    """

    kind: str
    path: str = ""
    other: str = ""
    at: int = 0
    data: bytes = b""
    when: int = 0

    def __str__(self) -> str:
        text = {"move": f"{self.path} to {self.other}", "write": f"{len(self.data)} bytes at {self.at} of {self.path}"}
        return f"{self.kind} {text.get(self.kind, self.path)}"


@dataclass(frozen=True)
class Effect:
    """A change of the disk: of the ``bytes`` of a file, of its ``size``, or of a ``name``.

    ``inode``: the number of the file, or of what gets the name, which is a ``file`` or a folder; ``None`` removes the name. ``folder`` and
    ``name``: the new name; ``moved``: the old one.
    """

    kind: str
    inode: int | None
    folder: int = ROOT
    name: str = ""
    at: int = 0
    data: bytes = b""
    moved: tuple[int, str] | None = None
    file: bool = False


class Disk:
    """Files and folders by number, and their names. In a ``tree``, by path, the content of a folder is ``None``."""

    def __init__(self, tree: Mapping[str, bytes | None]) -> None:
        self.names: dict[tuple[int, str], int] = {}
        self.files: dict[int, bytearray] = {}
        self.next = ROOT + 1
        for path, content in sorted(tree.items()):
            for effect in self.creation_effects(path, content is None):
                self.apply(effect)
            if content is not None:
                self.files[self.at(path) or ROOT][:] = content

    def at(self, path: str) -> int | None:
        """The number of the file or folder ``path``, or ``None``."""
        found: int | None = ROOT
        for part in filter(None, path.split("/")):
            found = None if found is None else self.names.get((found, part))
        return found

    def creation_effects(self, path: str, folder: bool) -> Iterator[Effect]:
        """The effects that create a file or a folder ``path`` with its parents. Apply each before taking the next."""
        parts = [part for part in path.split("/") if part]
        where = ROOT
        for depth, part in enumerate(parts):
            if (where, part) not in self.names:
                number, self.next = self.next, self.next + 1
                yield Effect("name", number, where, part, file=depth == len(parts) - 1 and not folder)
            where = self.names[where, part]

    def apply(self, effect: Effect) -> None:
        if effect.kind == "name":
            if effect.moved and self.names.get(effect.moved) == effect.inode:
                del self.names[effect.moved]
            if effect.inode is None:
                self.names.pop((effect.folder, effect.name), None)
            else:
                self.names[effect.folder, effect.name] = effect.inode
                if effect.file:
                    self.files.setdefault(effect.inode, bytearray())
            return
        assert effect.inode is not None
        content = self.files.setdefault(effect.inode, bytearray())  # its name may have been lost
        if effect.kind == "size":
            del content[effect.at :]
            content.extend(bytes(effect.at - len(content)))
        else:
            content.extend(bytes(max(0, effect.at - len(content))))
            content[effect.at : effect.at + len(effect.data)] = effect.data

    def tree(self) -> dict[str, bytes | None]:
        """Contents by path."""
        below: dict[int, list[tuple[str, int]]] = {}
        for (folder, name), number in self.names.items():
            below.setdefault(folder, []).append((name, number))
        found: dict[str, bytes | None] = {}

        def walk(folder: int, before: str) -> None:
            for name, number in below.get(folder, ()):
                found[before + name] = bytes(self.files[number]) if number in self.files else None
                if number not in self.files:
                    walk(number, f"{before}{name}/")

        walk(ROOT, "")
        return found


def apply_steps(disk: Disk, steps: Iterable[Step]) -> list[list[tuple[Effect, bool]]]:
    """Apply steps to ``disk``. Returns the effects of each step, each with whether a later sync made it durable."""
    found: list[list[tuple[Effect, bool]]] = []
    for step in steps:
        if step.kind == "sync":
            number = disk.at(step.path)
            found = [
                [(effect, lasts or step.other == "all" or _is_synced_by(effect, number, disk)) for effect, lasts in effects]
                for effects in found
            ]
        found.append([])
        for effect in _step_effects(step, disk):
            disk.apply(effect)
            found[-1].append((effect, False))
    return found


def _is_synced_by(effect: Effect, number: int | None, disk: Disk) -> bool:
    """Whether syncing the file or folder ``number`` makes the effect durable: a file's bytes and size, a folder's names."""
    if effect.kind == "name":
        return number is not None and number not in disk.files and effect.folder == number
    return effect.inode == number


def _step_effects(step: Step, disk: Disk) -> Iterator[Effect]:
    folder, _, name = step.path.rpartition("/")
    if step.kind in ("make", "open"):
        yield from disk.creation_effects(step.path, step.kind == "make")
    number = disk.at(step.path)
    if number is None:
        return
    if (step.kind == "open" and step.at and disk.files.get(number)) or step.kind == "cut":
        yield Effect("size", number, at=step.at if step.kind == "cut" else 0)
    if step.kind == "write":
        yield Effect("bytes", number, at=step.at, data=step.data)
    if step.kind in ("move", "link"):
        into, _, called = step.other.rpartition("/")
        before = (disk.at(folder) or ROOT, name) if step.kind == "move" else None
        yield Effect("name", number, disk.at(into) or ROOT, called, moved=before, file=number in disk.files)
    if step.kind == "remove":
        yield Effect("name", None, disk.at(folder) or ROOT, name)


def surviving_tree(
    base: Mapping[str, bytes | None], steps: Sequence[Step], lost: Collection[int] = (), half: int | None = None
) -> dict[str, bytes | None]:
    """The folder after a crash: ``base`` with the effects of ``steps``, except those of the steps numbered in ``lost`` that are not
    durable, and the second half of the bytes that step ``half`` wrote. Bytes written after a lost change of size are lost with it."""
    disk, gone = Disk(base), set[int | None]()
    for number, effects in enumerate(apply_steps(Disk(base), steps)):
        for effect, lasts in effects:
            if (number in lost and not lasts) or (effect.kind != "name" and effect.inode in gone):
                gone |= {effect.inode} if effect.kind == "size" else set()
            elif number == half and effect.kind == "bytes":
                disk.apply(replace(effect, data=effect.data[: len(effect.data) // 2]))
            else:
                disk.apply(effect)
    return disk.tree()


def loss_choices(effects: Sequence[Sequence[tuple[Effect, bool]]], disk: str) -> Iterator[tuple[frozenset[int], int | None]]:
    """The choices of lost steps, and of a step whose second half is lost, that are tried; first the loss of nothing."""
    yield frozenset(), None
    loose = frozenset(number for number, own in enumerate(effects) if not all(lasts for _, lasts in own))
    if disk == "kill" or not loose:
        return
    yield loose, None
    for number in sorted(loose):
        yield frozenset({number}), None
    for number in sorted(loose):
        yield loose - {number}, None
    for number in sorted(loose):
        if any(effect.kind == "bytes" and len(effect.data) > 1 for effect, _ in effects[number]):
            yield frozenset(), number


Segment = list[list[Step]]
"""The steps of a process between two meetings: a list for each thread, in order."""


def split_at_meetings(log: Sequence[Step], threads: int = 1) -> tuple[list[Segment], list[tuple[str, int]]]:
    """The segments of a process, and the meetings between them. With several threads, only the steps on one file are ordered."""
    found: list[list[Step]] = [[]]
    meetings = []
    for step in log:
        if step.kind == "meet":
            meetings.append((step.other, step.at))
            found.append([])
        else:
            found[-1].append(step)
    if threads == 1:
        return [[steps] for steps in found], meetings
    return [[[step for step in steps if step.path == path] for path in sorted({step.path for step in steps})] for steps in found], meetings


def cuts(logs: Sequence[Sequence[Step]], threads: int = 1) -> list[list[list[Step]]]:
    """Every cut, as the steps that each process has done; those with few steps come first.

    Raises ``ValueError`` where the processes did not have the same meetings.
    """
    parts = [split_at_meetings(log, threads) for log in logs]
    meetings = parts[0][1]
    if any(other != meetings for _, other in parts):
        raise ValueError("the processes did not meet in one order")
    found: dict[tuple[tuple[int, ...], ...], list[list[Step]]] = {}
    for reached in itertools.product(range(len(meetings) + 1), repeat=len(logs)):
        through = _must_reach_meeting(reached, meetings) if max(reached) - min(reached) <= MAX_AHEAD else None
        if through is None:
            continue
        choices = [_thread_progress(own[at], threads, whole) for (own, _), at, whole in zip(parts, reached, through, strict=True)]
        for places in itertools.product(*choices):
            if sum(inside for _, inside in places) > MAX_INSIDE:
                continue
            done = []
            for (own, _), at, (counts, _) in zip(parts, reached, places, strict=True):
                before = [step for segment in own[:at] for lane in segment for step in lane]
                done.append(before + [step for lane, count in zip(own[at], counts, strict=True) for step in lane[:count]])
            found.setdefault(tuple(tuple(step.when for step in own) for own in done), done)
    return sorted(found.values(), key=lambda done: (sum(map(len, done)), *map(len, done)))


def _must_reach_meeting(reached: Sequence[int], meetings: Sequence[tuple[str, int]]) -> list[bool] | None:
    """Which processes must have done all steps before their next meeting, since another is past it. None where the cut is impossible."""
    through = [False] * len(reached)
    for number, (kind, root) in enumerate(meetings):
        past = [process for process, at in enumerate(reached) if at > number]
        if kind == "to":
            awaited = range(len(reached)) if root in past else past
        elif kind == "from":
            awaited = [root] if past else []
        else:
            awaited = range(len(reached)) if past else []
        for process in awaited:
            if reached[process] < number:
                return None
            through[process] |= reached[process] == number
    return through


def _thread_progress(segment: Segment, threads: int, whole: bool) -> list[tuple[tuple[int, ...], int]]:
    """The possible numbers of done steps of each thread of a segment, each with how many threads have done some but not all."""
    sizes = [len(lane) for lane in segment]
    if whole:
        return [(tuple(sizes), 0)]
    found = []
    for counts in itertools.product(*(range(size + 1) for size in sizes)):
        inside = sum(0 < count < size for count, size in zip(counts, sizes, strict=True))
        begun = [at for at, count in enumerate(counts) if count]
        waits = any(sum(counts[before] < sizes[before] for before in range(at)) >= threads for at in begun) and threads > 1
        if inside <= MAX_INSIDE and not waits:
            found.append((counts, inside))
    return found


StepId = tuple[int, int]
"""A step: the number of its process, and its own in that process, from 1, meetings not counted."""


@dataclass(frozen=True, repr=False)
class State:
    """What a crash may leave: contents by path (``None`` for a folder), a description, and the kinds of effects that were lost."""

    tree: Mapping[str, bytes | None]
    description: str
    kinds: frozenset[str]

    def __repr__(self) -> str:
        return self.description


def order_steps(logs: Sequence[Sequence[Step]]) -> dict[StepId, Step]:
    """The steps of all processes by id, in a possible order: between two meetings one process after the other. It does not depend on the
    recorded run, so that a state is the same in every run."""
    found = []
    for process, log in enumerate(logs):
        met = number = 0
        for step in log:
            if step.kind == "meet":
                met += 1
            else:
                number += 1
                found.append((met, process, number, step))
    return {(process, number): step for _, process, number, step in sorted(found, key=lambda item: item[:3])}


def state_at(
    base: Mapping[str, bytes | None], steps: Mapping[StepId, Step], done: str, lost: Collection[StepId] = (), half: StepId | None = None
) -> State:
    """The state of a folder that held ``base``, after ``steps`` of which some are ``lost``, and of one the second ``half``. ``done``
    describes the steps."""
    places = [*steps]
    gone = {places.index(place) for place in lost}
    cut = None if half is None else places.index(half)
    effects = apply_steps(Disk(base), steps.values())
    kinds = {effect.kind for at, own in enumerate(effects) for effect, lasts in own if not lasts and (at in gone or at == cut)}
    last = {process: step for (process, _), step in steps.items()}
    words = [done, *(f"rank {process} is behind: {step}" for process, step in sorted(last.items()))]
    words += [f"lost: {steps[place]}" for place in lost]
    words += [f"lost: the second half of {steps[half]}"] if half is not None else []
    return State(surviving_tree(base, [*steps.values()], gone, cut), "; ".join(words), frozenset(kinds))


def format_moment(done: Iterable[int], lost: Iterable[StepId], half: StepId | None) -> str:
    """A state as fields of a case: ``done=3,1 lost=0.2,1.1 half=0.3``."""
    text = f"done={','.join(map(str, done))}"
    text += "".join(f"{' lost=' if at == 0 else ','}{process}.{number}" for at, (process, number) in enumerate(lost))
    return text + ("" if half is None else f" half={half[0]}.{half[1]}")


def states(
    base: Mapping[str, bytes | None],
    logs: Sequence[Sequence[Step]],
    disk: str = "posix",
    threads: int = 1,
    returned: bool = False,
) -> list[State]:
    """The states in which a crash may leave a folder that held ``base``: each once, those after few steps first, and
    at most :data:`MAX_STATES` of them.

    ``logs`` are the steps of each process. ``returned``: only states after all steps.
    """
    every = order_steps(logs)
    found: dict[frozenset[tuple[str, bytes | None]], State] = {}
    at_all = cuts(logs, threads)
    for done in at_all[-1:] if returned else at_all:
        moment = {(process, step.when) for process, own in enumerate(done) for step in own}
        steps = {place: step for place, step in every.items() if (place[0], step.when) in moment}
        places = [*steps]
        for lost, half in loss_choices(apply_steps(Disk(base), steps.values()), disk):
            tree = surviving_tree(base, [*steps.values()], lost, half)
            key = frozenset(tree.items())
            if key not in found:
                gone, cut = [places[at] for at in sorted(lost)], None if half is None else places[half]
                found[key] = state_at(base, steps, format_moment(map(len, done), gone, cut), gone, cut)
            if len(found) == MAX_STATES:
                return [*found.values()]
    return [*found.values()]
