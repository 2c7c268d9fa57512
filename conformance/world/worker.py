"""One rank: a process forked from the warm server that joins its world's process group and serves batches of cases."""

from __future__ import annotations

import faulthandler
import importlib
import linecache
import os
import random
import resource
import socket
import sys
import threading
import time
import traceback
from collections import deque
from concurrent.futures import thread as executors
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from operator import attrgetter
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from shardlaw.conformance import compat
from shardlaw.conformance.compat import gloo
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.target import Target
from shardlaw.conformance.law.verdict import Answer, HarnessError, Raised
from shardlaw.conformance.laws import find
from shardlaw.conformance.rank.context import RankContext, Rejected
from shardlaw.conformance.rank.perform import try_case
from shardlaw.conformance.rank.reuse import Remembered
from shardlaw.conformance.rank.shared_plans import SharedPlans, lacking
from shardlaw.conformance.rank.trace import Tracer
from shardlaw.conformance.world import protocol
from shardlaw.conformance.world.device import is_lost, synchronize
from shardlaw.conformance.world.exceptions import describe, of_harness
from shardlaw.conformance.world.output import tail
from shardlaw.conformance.world.progress import ANSWERED, IDLE, PARKED, RAISED, RUNNING, Page

FLUSH_SECONDS = 0.1
LEAVE_SECONDS = 0.2  # for threads that end by themselves
NAP_SECONDS, LONGEST_NAP_SECONDS = 0.0005, 0.02
LARGEST_MEMORY = 4 << 30  # bytes that a rank on the CPU may ask for


class LeftBehindError(Exception):
    """A check left the process in a state that no later case may start from."""


@dataclass
class Rank:
    """A rank of a live world, serving its driver at the other end of ``stream``; ``plans`` where its ranks share them. ``together``: all
    ranks have their places on ``page``; ``metadata``: the folder of what ranks of this pool found of results."""

    rank: int
    world: int
    target: Target
    stream: socket.socket
    page: Page
    plans: SharedPlans | None = None
    together: bool = True
    metadata: str = ""

    def __post_init__(self) -> None:
        self._frames = protocol.Frames(protocol.ToRank)
        self._waiting: deque[protocol.ToRank] = deque()
        self._sent = time.monotonic()
        self._meshes: dict[Any, Any] = {}
        self._groups: list[tuple[str, Any]] = []
        self._known: list[Any] = []
        try:
            self._registry, self._count = compat.name("groups"), compat.name("sequence_number")
        except ImportError:
            self._registry = self._count = None
        self._remembered = Remembered(self.metadata)
        self._rng = torch.get_rng_state()
        self._at_first = frozenset(threading.enumerate())  # the target's own
        self._threads = len(self._at_first)
        self._spoilt = self._outside = False

    def serve(self) -> None:
        """Until the driver says stop, or is gone."""
        while True:
            message = self._next()
            if isinstance(message, protocol.Stop):
                return
            if isinstance(message, protocol.Batch):
                self._run(message)

    def _run(self, batch: protocol.Batch) -> None:
        total = self._counts()
        for index, task in enumerate(batch.tasks):
            self.page.enter(self.rank, batch.serial, index, RUNNING)
            printed = os.fstat(1).st_size
            answer = self._answer(task, batch.serial, index)
            self._restore()
            before, total = total, self._counts()
            ran = {name: count - before.get(name, 0) for name, count in total.items() if count != before.get(name, 0)}
            output = "" if answer.outcome == "held" else self._output(printed)
            said, data = packed(batch.serial, index, answer, output, ran)
            self._hold_back(data)
            if said.outcome != "held" or time.monotonic() - self._sent > FLUSH_SECONDS:
                self._flush()
            if (said.outcome == "deviates" or self._outside) and self.together:
                self.page.enter(self.rank, batch.serial, index, ANSWERED)
                self._await_others(batch.serial, index)
            if said.outcome == "raised":
                self.page.enter(self.rank, batch.serial, index, PARKED)
                self._park(protocol.Parked(batch.serial, index, total, ran, self._spoilt))
                total = self._counts()
        files, threads, memory = burden()
        self._send(protocol.Done(batch.serial, files, threads, len(self._known), memory))
        self.page.enter(self.rank, batch.serial, len(batch.tasks), IDLE)

    def _await_others(self, batch: int, index: int) -> None:
        """Wait until no rank runs a case any more: one that hangs in it must not meet a collective of the next. Whoever waits for long must
        not look busy."""
        nap = NAP_SECONDS
        while not all(self.page.has_done(rank, batch, index) for rank in range(self.world)):
            time.sleep(nap)
            nap = min(2 * nap, LONGEST_NAP_SECONDS)

    def _answer(self, task: protocol.Task, batch: int, index: int) -> Answer:
        here = RankContext(self.rank, self.world, self.target, task.folder, self._meshes)
        here.stage = task.stage
        if task.traced:
            here.tracer = Tracer()
        self._remembered.begin(wanted=task.reuse)
        if self.plans is not None:
            self.plans.begin(f"{batch}.{index}" if task.reuse else "")
        self._outside = False
        try:
            case = Case.parse(task.text)
            self._outside = "mesh" in case and self.rank not in case.mesh().ranks
            try_case(find(task.law), case, here)
            synchronize(self.target.device)
            self._look_around()
        except Rejected as rejected:
            return here.answer(rejected=str(rejected) or "rejected")
        except BaseException as error:
            self.page.enter(self.rank, batch, index, RAISED)
            raised = describe(error)
            self._spoilt |= is_lost(self.target.device)
            if isinstance(error, NameError) and of_harness(error):
                raised = Raised(HarnessError.__name__, f"{raised.error}: {raised.text}", raised.stack)
            return here.answer(raised=raised)
        return here.answer()

    def _look_around(self) -> None:
        """Raises :class:`LeftBehindError` for what a check must not leave behind, here or on any rank."""
        if not dist.is_initialized():
            self._spoilt = True
            raise LeftBehindError("the default process group is gone")
        if threading.active_count() <= self._threads:
            return
        until = time.monotonic() + LEAVE_SECONDS
        while (left := list(filter(self._is_left, threading.enumerate()))) and time.monotonic() < until:
            left[0].join(0.01)
        self._threads = threading.active_count()
        if left:
            self._spoilt = True
            raise LeftBehindError(f"a thread still runs: {left[0].name}")

    def _is_left(self, thread: threading.Thread) -> bool:
        """Whether a thread is the check's to end: not one that ran before the first check, nor an executor's, which waits for work for
        as long as the process lives, nor one that runs code of the backend's package, nor one that was not begun by Python: the threads
        in which torch works out gradients on a GPU, and which only the end of the process ends."""
        runs = getattr(thread, "_target", None)
        package, _, _ = str(getattr(runs, "__module__", None) or type(thread).__module__).partition(".")
        of_backend = bool(self.target.setup) and package == self.target.setup.partition(":")[0].partition(".")[0]
        foreign = isinstance(thread, threading._DummyThread)
        return not (thread in self._at_first or runs is executors._worker or of_backend or foreign)

    def _restore(self) -> None:
        """Undo what a law may have changed for the whole process."""
        torch.set_rng_state(self._rng)
        random.seed(0)
        if torch.get_default_dtype() != torch.float32:
            torch.set_default_dtype(torch.float32)
        if not torch.is_grad_enabled():
            torch.set_grad_enabled(True)
        if torch.are_deterministic_algorithms_enabled():
            torch.use_deterministic_algorithms(False)

    def _park(self, parked: protocol.Parked) -> None:
        """Wait until the driver knows that all ranks are here; show that the groups that it names still add up."""
        self._send(parked)
        held_back: deque[protocol.ToRank] = deque()
        while not isinstance(message := self._next(), protocol.Go):
            if isinstance(message, protocol.Stop):
                leave(0)
            held_back.append(message)
        self._waiting.extendleft(reversed(held_back))
        try:
            for name, group in self._live_groups():
                if name in message.prove or protocol.EVERY_GROUP in message.prove:
                    self._prove(group)
        except Exception as error:
            self._send(protocol.Failed(f"{type(error).__name__}: {describe(error).text}"))
            self._wait_for_the_end()

    def _prove(self, group: Any) -> None:
        ones = torch.ones(1, device=self.target.device)
        dist.all_reduce(ones, group=group)
        if ones.item() != dist.get_world_size(group):
            raise RuntimeError("a group no longer adds up")

    def _wait_for_the_end(self) -> NoReturn:
        while not isinstance(self._next(), protocol.Stop):
            pass
        leave(0)

    def _live_groups(self) -> list[tuple[str, Any]]:
        """The process groups of this rank, in the order in which their members name them; the default one where they cannot be listed."""
        if self._registry is None:
            return [("default", None)]
        if self._known != (live := list(self._registry.pg_map)):
            self._known = live
            self._groups = sorted(((str(group.group_name), group) for group in live), key=lambda item: (len(item[0]), item[0]))
            self._say(protocol.Groups({name: tuple(dist.get_process_group_ranks(group)) for name, group in self._groups}))
        return self._groups

    def _counts(self) -> dict[str, int]:
        """How many collectives each group has run; empty where the backend does not count."""
        try:
            return {name: self._count_of(group) for name, group in self._live_groups()}
        except Exception:
            return {}

    def _count_of(self, group: Any) -> int:
        # asked of the group, not of its class: a backend in Python may have its own answer
        return int(getattr(group, self._count.__name__)())

    def _output(self, since: int) -> str:
        """What this rank has printed after the first ``since`` bytes of its output, at most the last of it."""
        flush()
        return tail("/dev/fd/1", since)

    def _next(self) -> protocol.ToRank:
        while not self._waiting:
            self._waiting.extend(protocol.receive(self.stream, self._frames))
        return self._waiting.popleft()

    def _send(self, message: protocol.FromRank) -> None:
        self._say(message)
        self._flush()

    def _say(self, message: protocol.FromRank) -> None:
        """Send a message with the next ones."""
        self._hold_back(protocol.frame(message))

    def _hold_back(self, data: bytes) -> None:
        if not self.page.keep(self.rank, data):
            self._flush()
            if not self.page.keep(self.rank, data):
                self.stream.sendall(data)

    def _flush(self) -> None:
        self.stream.sendall(self.page.unsent(self.rank))
        self.page.sent(self.rank)
        self._sent = time.monotonic()


def packed(batch: int, index: int, answer: Answer, output: str, ran: dict[str, int]) -> tuple[protocol.Said, bytes]:
    """An answer as a message and its bytes; one that cannot be sent becomes one that says so."""
    try:
        said = protocol.pack_answer(batch, index, answer, output, ran)
        return said, protocol.frame(said)
    except Exception as error:
        raised = describe(error)
        said = protocol.Said(batch, index, "raised", raised=(raised.error, raised.text, raised.stack), ran=ran)
        return said, protocol.frame(said)


def burden() -> tuple[int, int, int]:
    """How many descriptors this process has open, how many threads it has, and how many bytes of it are resident; zeros where the system
    does not tell."""
    try:
        with open("/proc/self/statm", "rb") as file:
            pages = int(file.read().split()[1])
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), pages * resource.getpagesize()
    except OSError:
        return 0, 0, 0


def schedule() -> None:
    """Tell the kernel that this process works in bulk: a rank that a message wakes does not interrupt the one that sent it. Where ranks
    outnumber the cores, a collective takes half the CPU time that way."""
    with suppress(AttributeError, OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def settle_sources() -> None:
    """No source file changes while a rank lives. torch notes a stack for each sharding that it plans, which asks the file system for each
    frame's file otherwise."""
    linecache.checkcache = lambda filename=None: None


def redirect(folder: str, rank: int) -> None:
    """Send all that this process prints, C++ included, to a file of its own; stacks, asked for by signal, to another."""
    output = os.open(f"{folder}/rank-{rank}.out", os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, place in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, place)
    os.close(output)
    os.close(nothing)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w", buffering=1), open(2, "w", buffering=1)  # noqa: SIM115
    stacks = open(f"{folder}/rank-{rank}.stack", "a")  # noqa: SIM115
    faulthandler.enable(stacks)
    faulthandler.register(protocol.DUMP_SIGNAL, stacks, all_threads=True)


def start(rank: int, device: int, target: Target, spawn: protocol.Spawn) -> None:
    """Join the world's process group as the target says: ``{folder}``, ``{host}`` and ``{port}`` in ``init_method`` are the world's."""
    gloo.share_device()
    if target.setup:
        called(target.setup)
    if target.device == "cpu":
        limit = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (LARGEST_MEMORY if limit < 0 else min(limit, LARGEST_MEMORY), limit))
    else:
        devices = torch.get_device_module(target.device)
        devices.set_device(device % devices.device_count())
    host = spawn.host or "localhost"
    method = target.init_method or ("tcp://{host}:{port}" if spawn.host else "file://{folder}/store")
    dist.init_process_group(
        target.backend,
        init_method=method.format(folder=spawn.folder, host=f"[{host}]" if ":" in host else host, port=spawn.port),
        rank=rank,
        world_size=spawn.size,
        timeout=timedelta(seconds=max(60.0, 6 * target.timeout)),
        **init_options(target),
    )


def init_options(target: Target) -> dict[str, Any]:
    """The further arguments of ``init_process_group`` that a target asks for, on a rank that has chosen its device."""
    found = dict(target.init_options)
    if found.pop("device_id", False):
        found["device_id"] = torch.device(target.device, torch.get_device_module(target.device).current_device())
    if "pg_options" in found:
        found["pg_options"] = called(found["pg_options"])
    return found


def called(place: str) -> Any:
    """What ``module:function`` returns; of a module alone, which it only imports, nothing."""
    module, _, function = place.partition(":")
    found = importlib.import_module(module)
    return attrgetter(function)(found)() if function else None


def flush() -> None:
    """Bring what Python has printed into its file."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()


def leave(code: int) -> NoReturn:
    """End this process at once, whatever its threads are doing."""
    flush()
    os._exit(code)


def main(at: int, spawn: protocol.Spawn, target: Target, stream: socket.socket) -> NoReturn:
    """What the server's child runs: the rank at this place among those that ``spawn`` asks for."""
    code, rank = 1, spawn.ranks[at]
    try:
        schedule()
        # a forked process gets its pool of threads on first use, and one that autograd's threads ask for at once is none to some of them
        torch.set_num_threads(torch.get_num_threads())
        settle_sources()
        redirect(spawn.folder, rank)
        page = Page(f"{spawn.folder}/progress", spawn.size)
        try:
            start(rank, spawn.devices[at], target, spawn)
        except BaseException as error:
            traceback.print_exc()
            text = " ".join(describe(error).text.split())[:500]
            stream.sendall(protocol.frame(protocol.Failed(f"{type(error).__name__}: {text}")))
            leave(1)
        stream.sendall(protocol.frame(protocol.Ready()))
        together = len(spawn.ranks) == spawn.size
        plans = SharedPlans(rank, spawn.folder) if together and spawn.size > 1 and not lacking() else None
        metadata = os.path.join(os.path.dirname(spawn.folder), "metadata")
        Rank(rank, spawn.size, target, stream, page, plans, together, metadata).serve()
        code = 0
    except (EOFError, ConnectionError):
        code = 0
    except BaseException:
        traceback.print_exc()
    leave(code)
