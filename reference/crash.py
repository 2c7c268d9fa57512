"""What a crash may leave of a folder into which several processes were writing.

Every process took *steps*: it wrote to a file, synced it, renamed it. At some of them, which are *meetings*, the processes waited for one
another. A crash ends all of them at one moment, a *cut*: of each process the first so many steps are done, and nobody has passed a meeting
that somebody whom it waits for had not reached. How the steps of different processes were interleaved in the run that was recorded does not
matter; what matters is who waits for whom.

What is done need not last. A ``disk`` says what does:

``kill``   the processes end and the machine goes on: everything that was done lasts
``posix``  the machine goes down: what was written to a file lasts once the file was synced, a name (made, moved or removed) once its folder
           was. The rest lasts or is lost, effect by effect, in any order. Two things are kept together: the bytes that were written after
           a file was cut to a size need that cut, and a name that moved is at its old place or at its new one

For a cut, these are tried: nothing is lost, everything that may be, each step alone, everything but one step, and of each write its second
half. Of more than two processes only two are inside their steps between two meetings, the others before or behind them. So few losses are
enough for most faults of this kind (Mohan et al., OSDI 2018: CrashMonkey and ACE; Pillai et al., OSDI 2014: ALICE).
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

MAX_INSIDE = 2  # processes that a cut finds between two meetings
MAX_AHEAD = 2  # meetings that one process may be ahead of another
MAX_STATES = 4096  # states of a scenario
ROOT = 0


@dataclass(frozen=True)
class Step:
    """One step of a process; paths are relative to the folder, which is ``""`` itself.

    ==========  ==================================================================================================
    make        there is a folder ``path``
    open        there is a file ``path``, emptied where ``at`` is 1
    write       ``data`` stands in the file ``path`` from byte ``at`` on
    cut         the file ``path`` is ``at`` bytes long
    sync        the file or the folder ``path`` was synced; with ``other="all"`` everything was
    move        what was called ``path`` is called ``other``
    link        what is called ``path`` is called ``other`` too
    remove      nothing is called ``path``
    meet        all wait for ``all``, or process ``at`` waits for all (``to``), or all wait for process ``at`` (``from``)
    ==========  ==================================================================================================

    ``when``: a number that orders the steps of all processes as they came in the run, no two of which are equal within a process.
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
    """What a step does to the disk: to the bytes of a file (``kind`` ``bytes``), to its size (``size``), or to the ``name`` of a file or a
    folder.

    ``inode`` is the file's number, or that of what gets the name (``None``: the name goes), which is a ``file`` or a folder. ``folder`` and
    ``name`` say which name, ``moved`` which name it had before.
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
    """Files and folders by number, and their names. ``tree`` gives the files by path; a folder's content is ``None``."""

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
        """The number of what is called ``path``."""
        found: int | None = ROOT
        for part in filter(None, path.split("/")):
            found = None if found is None else self.names.get((found, part))
        return found

    def creation_effects(self, path: str, folder: bool) -> Iterator[Effect]:
        """The effects after which there is a file or a folder ``path``; each must be done before the next is asked for."""
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
        held = self.files.setdefault(effect.inode, bytearray())  # its name may have been lost
        if effect.kind == "size":
            del held[effect.at :]
            held.extend(bytes(effect.at - len(held)))
        else:
            held.extend(bytes(max(0, effect.at - len(held))))
            held[effect.at : effect.at + len(effect.data)] = effect.data

    def tree(self) -> dict[str, bytes | None]:
        """Everything that has a path."""
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
    """The effects of each step, in order, with whether a later step made them last. Does them to ``disk``."""
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
    """Whether syncing what has this number makes the effect last: a file's bytes and size, a folder's names."""
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
    """What is left of a folder that held ``base``, after steps of which those with a number in ``lost`` are lost, as far as they did not
    come to last; of the bytes that step ``half`` wrote, the second half is. Bytes that need a lost change of size are lost with it."""
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
    """Which steps are lost, and of which the second half is, in all ways that are tried; in the first of them none is."""
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
"""What a process does between two meetings: its threads' steps, each in order."""


def split_at_meetings(log: Sequence[Step], threads: int = 1) -> tuple[list[Segment], list[tuple[str, int]]]:
    """A process's steps between its meetings, and these. What several threads do is ordered for each file alone."""
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
    """Every moment at which a crash may find the processes: for each of them the steps that it has done. Those with few steps come first.

    Raises ``ValueError`` where the processes did not meet alike.
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
    """Which processes must have done all their steps up to the next meeting, since somebody is past it. None: nobody can be there."""
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
    """How many steps of each thread of a segment may be done, and how many threads are then inside their steps."""
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
"""A step: the number of its process, and its own there, from 1, meetings left out."""


@dataclass(frozen=True, repr=False)
class State:
    """What a crash may leave: the files by path (``None`` for a folder), which it is in words, and the kinds of effects that were lost."""

    tree: Mapping[str, bytes | None]
    description: str
    kinds: frozenset[str]

    def __repr__(self) -> str:
        return self.description


def order_steps(logs: Sequence[Sequence[Step]]) -> dict[StepId, Step]:
    """The steps of all processes by their places, in an order in which they may have come: between two meetings one process after the
    other, whatever the order was in the run, so that a state is the same in every run."""
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
    """The state of a folder that held ``base`` after these steps, of which some are ``lost`` and of one the second ``half``. ``done`` tells
    which steps they are."""
    places = [*steps]
    gone = {places.index(place) for place in lost}
    cut = None if half is None else places.index(half)
    effects = apply_steps(Disk(base), steps.values())
    kinds = {effect.kind for at, own in enumerate(effects) for effect, lasts in own if not lasts and (at in gone or at == cut)}
    last = {process: step for (process, _), step in steps.items()}
    told = [done, *(f"rank {process} is behind: {step}" for process, step in sorted(last.items()))]
    told += [f"lost: {steps[place]}" for place in lost]
    told += [f"lost: the second half of {steps[half]}"] if half is not None else []
    return State(surviving_tree(base, [*steps.values()], gone, cut), "; ".join(told), frozenset(kinds))


def format_moment(done: Iterable[int], lost: Iterable[StepId], half: StepId | None) -> str:
    """Which state it is as fields of a case: ``done=3,1 lost=0.2,1.1 half=0.3``."""
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
    at most :data:`MOST` of them.

    ``logs`` are the steps of each process. ``returned``: after all steps alone.
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
