"""One rank: a process forked from the warm server, which joins its world's process group and runs batches of cases."""

from __future__ import annotations

import faulthandler
import linecache
import os
import random
import socket
import sys
import threading
import time
import traceback
from collections import deque
from concurrent.futures import thread as executors
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import psutil
import torch
import torch.distributed as dist

from shardlaw.conformance import compat
from shardlaw.conformance.errors import UsageError
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.target import Target
from shardlaw.conformance.law.verdict import Answer, HarnessError, Raised
from shardlaw.conformance.laws import find
from shardlaw.conformance.rank.context import RankContext, Rejected
from shardlaw.conformance.rank.perform import try_case
from shardlaw.conformance.rank.reuse import MetadataCache
from shardlaw.conformance.rank.shared_plans import SharedPlans, why_unavailable
from shardlaw.conformance.rank.trace import Tracer
from shardlaw.conformance.world import protocol
from shardlaw.conformance.world.device import is_lost, synchronize
from shardlaw.conformance.world.exceptions import describe_error, is_raised_by_harness
from shardlaw.conformance.world.join import join_process_group
from shardlaw.conformance.world.output import read_tail
from shardlaw.conformance.world.progress import ANSWERED, IDLE, PARKED, RAISED, RUNNING, ProgressPage

FLUSH_SECONDS = 0.1
THREAD_EXIT_SECONDS = 0.2  # for threads of a check to end
NAP_SECONDS, MAX_NAP_SECONDS = 0.0005, 0.02


class LeftBehindError(Exception):
    """A check left the process in a state in which no further case may run."""


@dataclass
class Rank:
    """A rank of a live world; its driver is at the other end of ``stream``. ``plans``: set where ranks share plans. ``same_host``: all
    ranks of the world are on this host, and so on ``page``. ``metadata``: the folder in which ranks of this pool cache the metadata of
    results."""

    rank: int
    world: int
    target: Target
    stream: socket.socket
    page: ProgressPage
    plans: SharedPlans | None = None
    same_host: bool = True
    metadata: str = ""

    def __post_init__(self) -> None:
        self._frames = protocol.FrameDecoder(protocol.ToRank)
        self._waiting: deque[protocol.ToRank] = deque()
        self._last_flush = time.monotonic()
        self._meshes: dict[Any, Any] = {}
        self._groups: list[tuple[str, Any]] = []
        self._listed_groups: list[Any] = []
        try:
            self._registry, self._sequence_number = compat.name("groups"), compat.name("sequence_number")
        except ImportError:
            self._registry = self._sequence_number = None
        self._metadata_cache = MetadataCache(self.metadata)
        self._rng = torch.get_rng_state()
        self._process = psutil.Process()
        self._initial_threads = frozenset(threading.enumerate())  # those of the target's backend
        self._thread_count = len(self._initial_threads)
        self._is_unusable = self._is_outside_mesh = False

    def serve(self) -> None:
        """Run batches until the driver sends :class:`~shardlaw.conformance.world.protocol.Stop` or ends."""
        while not isinstance(message := self._next_message(), protocol.Stop):
            if isinstance(message, protocol.Batch):
                self._run_batch(message)

    def _run_batch(self, batch: protocol.Batch) -> None:
        total = self._count_collectives()
        for index, task in enumerate(batch.tasks):
            self.page.set_position(self.rank, batch.serial, index, RUNNING)
            printed = os.fstat(1).st_size
            answer = self._run_case(task, batch.serial, index)
            self._restore_globals()
            before, total = total, self._count_collectives()
            collectives = {name: count - before.get(name, 0) for name, count in total.items() if count != before.get(name, 0)}
            output = "" if answer.outcome == "held" else self._output_since(printed)
            message, data = pack_or_report(batch.serial, index, answer, output, collectives)
            self._buffer(data)
            if message.outcome != "held" or time.monotonic() - self._last_flush > FLUSH_SECONDS:
                self._flush()
            if (message.outcome == "deviates" or self._is_outside_mesh) and self.same_host:
                self.page.set_position(self.rank, batch.serial, index, ANSWERED)
                self._await_others(batch.serial, index)
            if message.outcome == "raised":
                self.page.set_position(self.rank, batch.serial, index, PARKED)
                self._park(protocol.Parked(batch.serial, index, total, collectives, self._is_unusable))
                total = self._count_collectives()
        files, threads, memory = resource_usage(self._process)
        self._send(protocol.BatchDone(batch.serial, files, threads, len(self._listed_groups), memory))
        self.page.set_position(self.rank, batch.serial, len(batch.tasks), IDLE)

    def _await_others(self, batch: int, index: int) -> None:
        """Wait until no rank runs the case any more: a rank that hangs in it must not pair with a collective of the next case. Naps grow
        longer, so that a long wait does not count as use of the CPU."""
        nap = NAP_SECONDS
        while not all(self.page.has_finished(rank, batch, index) for rank in range(self.world)):
            time.sleep(nap)
            nap = min(2 * nap, MAX_NAP_SECONDS)

    def _run_case(self, task: protocol.Task, batch: int, index: int) -> Answer:
        here = RankContext(self.rank, self.world, self.target, task.folder, self._meshes)
        here.stage = task.stage
        if task.traced:
            here.tracer = Tracer(partial(self._send_so_far, batch, index, here) if task.traced == "each step" else None)
        self._metadata_cache.begin_case(reuse=task.reuse)
        if self.plans is not None:
            self.plans.begin_case(f"{batch}.{index}" if task.reuse else "")
        self._is_outside_mesh = False
        try:
            case = Case.parse(task.text)
            self._is_outside_mesh = "mesh" in case and self.rank not in case.mesh().ranks
            try_case(find(task.law), case, here)
            synchronize(self.target.device)
            self._check_leftovers()
        except Rejected as rejected:
            return here.answer(rejected=str(rejected) or "rejected")
        except BaseException as error:
            self.page.set_position(self.rank, batch, index, RAISED)
            raised = describe_error(error)
            self._is_unusable |= is_lost(self.target.device)
            if isinstance(error, NameError) and is_raised_by_harness(error):
                raised = Raised(HarnessError.__name__, f"{raised.error}: {raised.text}", raised.stack)
            return here.answer(raised=raised)
        return here.answer()

    def _send_so_far(self, batch: int, index: int, here: RankContext) -> None:
        self._send(protocol.SoFar(protocol.pack_answer(batch, index, here.answer(), "", {})))

    def _check_leftovers(self) -> None:
        """Raises :class:`LeftBehindError` if the check has destroyed the default process group or left a thread running."""
        if not dist.is_initialized():
            self._is_unusable = True
            raise LeftBehindError("the default process group is gone")
        if threading.active_count() <= self._thread_count:
            return
        until = time.monotonic() + THREAD_EXIT_SECONDS
        while (left := list(filter(self._is_leftover, threading.enumerate()))) and time.monotonic() < until:
            left[0].join(0.01)
        self._thread_count = threading.active_count()
        if left:
            self._is_unusable = True
            raise LeftBehindError(f"a thread still runs: {left[0].name}")

    def _is_leftover(self, thread: threading.Thread) -> bool:
        """Whether a thread should have ended with the check.

        Not so are those that ran before the first check, those of executors, which wait for work until the process ends, those of the
        backend's package or of a library's class (a progress bar's), and those that Python did not start (torch's for gradients on a GPU).
        """
        runs = getattr(thread, "_target", None)
        own, of = (str(module).partition(".")[0] for module in (type(thread).__module__, getattr(runs, "__module__", None)))
        of_backend = bool(self.target.setup) and self.target.setup.partition(":")[0].partition(".")[0] in (own, of)
        of_others = own not in {"torch", *sys.stdlib_module_names} or isinstance(thread, threading._DummyThread)
        return not (thread in self._initial_threads or runs is executors._worker or of_backend or of_others)

    def _restore_globals(self) -> None:
        """Restore the global state that a law may have changed."""
        torch.set_rng_state(self._rng)
        random.seed(0)
        if torch.get_default_dtype() != torch.float32:
            torch.set_default_dtype(torch.float32)
        if not torch.is_grad_enabled():
            torch.set_grad_enabled(True)
        if torch.are_deterministic_algorithms_enabled():
            torch.use_deterministic_algorithms(False)

    def _park(self, parked: protocol.Parked) -> None:
        """Wait until the driver has the answers of all ranks, then verify the groups that it names."""
        self._send(parked)
        held_back: deque[protocol.ToRank] = deque()
        while not isinstance(message := self._next_message(), protocol.Resume):
            if isinstance(message, protocol.Stop):
                exit_now(0)
            held_back.append(message)
        self._waiting.extendleft(reversed(held_back))
        try:
            for verified, (name, group) in enumerate(self._live_groups()):
                if name in message.verify or protocol.EVERY_GROUP in message.verify:
                    self.page.set_position(self.rank, parked.batch, parked.index, PARKED, verified)
                    self._verify_group(group)
        except Exception as error:
            self._send(protocol.Failed(f"{type(error).__name__}: {describe_error(error).text}"))
            while not isinstance(self._next_message(), protocol.Stop):
                pass
            exit_now(0)

    def _verify_group(self, group: Any) -> None:
        ones = torch.ones(1, device=self.target.device)
        dist.all_reduce(ones, group=group)
        if ones.item() != dist.get_world_size(group):
            raise RuntimeError("a group no longer adds up")

    def _live_groups(self) -> list[tuple[str, Any]]:
        """The process groups of this rank that have a name, sorted by it, an order in which all their members agree; the default group
        where they cannot be listed."""
        if self._registry is None:
            return [("default", None)]
        if self._listed_groups != (live := list(self._registry.pg_map)):
            self._listed_groups = live
            named = []
            for group in live:
                with suppress(RuntimeError):  # a group that Python creates may have no name
                    named.append((str(group.group_name), group))
            self._groups = sorted(named, key=lambda item: (len(item[0]), item[0]))
            self._send_later(protocol.Groups({name: tuple(dist.get_process_group_ranks(group)) for name, group in self._groups}))
        return self._groups

    def _count_collectives(self) -> dict[str, int]:
        """How many collectives each group has run, of those whose backend counts them."""
        method = getattr(self._sequence_number, "__name__", "")
        counts = {}
        for name, group in self._live_groups():
            try:  # called on the group, not on the class: a backend in Python may override the method
                counts[name] = int(getattr(group, method)())
            except Exception:
                continue
        return counts

    def _output_since(self, since: int) -> str:
        """What this rank has printed after the first ``since`` bytes of its output, cut to its end."""
        flush_output()
        return read_tail("/dev/fd/1", since)

    def _next_message(self) -> protocol.ToRank:
        while not self._waiting:
            self._waiting.extend(protocol.receive(self.stream, self._frames))
        return self._waiting.popleft()

    def _send(self, message: protocol.FromRank) -> None:
        self._send_later(message)
        self._flush()

    def _send_later(self, message: protocol.FromRank) -> None:
        """Buffer a message, to be sent with the next flush."""
        self._buffer(protocol.encode_frame(message))

    def _buffer(self, data: bytes) -> None:
        if not self.page.buffer(self.rank, data):
            self._flush()
            if not self.page.buffer(self.rank, data):
                self.stream.sendall(data)

    def _flush(self) -> None:
        self.stream.sendall(self.page.unsent(self.rank))
        self.page.clear_buffer(self.rank)
        self._last_flush = time.monotonic()


def pack_or_report(batch: int, index: int, answer: Answer, output: str, collectives: dict[str, int]) -> tuple[protocol.PackedAnswer, bytes]:
    """An answer as a message and its frame. An answer that cannot be encoded becomes one that says that the rank raised."""
    try:
        message = protocol.pack_answer(batch, index, answer, output, collectives)
        return message, protocol.encode_frame(message)
    except Exception as error:
        message = protocol.PackedAnswer(batch, index, "raised", raised=describe_error(error), collectives=collectives)
        return message, protocol.encode_frame(message)


def resource_usage(process: psutil.Process) -> tuple[int, int, int]:
    """How many descriptors a process has open, how many threads it has, and its resident bytes; zeros where the system does not tell."""
    try:
        return process.num_fds(), process.num_threads(), process.memory_info().rss
    except (psutil.Error, OSError):
        return 0, 0, 0


def use_batch_scheduling() -> None:
    """Put this process into the kernel's batch class: a rank that a message wakes then does not preempt the sender. Where ranks outnumber
    the cores, this halves the CPU time of a collective."""
    with suppress(AttributeError, OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def skip_source_checks() -> None:
    """Stop ``linecache`` from checking source files for changes: none changes while a rank lives. torch records a stack for each sharding
    that it plans, and ``linecache`` would stat the file of each frame."""
    linecache.checkcache = lambda filename=None: None


def redirect_output(folder: str, rank: int) -> None:
    """Redirect all output of this process, C++ included, to a file of its own, and stacks dumped on a signal to another."""
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


def flush_output() -> None:
    """Flush what Python has printed."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()


def exit_now(code: int) -> NoReturn:
    """End this process at once, without waiting for its threads."""
    flush_output()
    os._exit(code)


def main(index: int, spawn: protocol.Spawn, stream: socket.socket) -> NoReturn:
    """Entry point of the server's child: become rank ``spawn.ranks[index]``."""
    rank = spawn.ranks[index]
    try:
        use_batch_scheduling()
        # a forked process creates its thread pool on first use, which must not happen in several autograd threads at once
        torch.set_num_threads(torch.get_num_threads())
        skip_source_checks()
        redirect_output(spawn.folder, rank)
        page = ProgressPage(f"{spawn.folder}/progress", spawn.size)
        try:
            join_process_group(rank, spawn.devices[index], spawn)
        except BaseException as error:
            text = " ".join(describe_error(error).text.split())[:500]
            if not isinstance(error, UsageError):
                traceback.print_exc()
                text = f"{type(error).__name__}: {text}"
            stream.sendall(protocol.encode_frame(protocol.Failed(text)))
            exit_now(1)
        stream.sendall(protocol.encode_frame(protocol.Ready()))
        same_host = len(spawn.ranks) == spawn.size
        plans = SharedPlans(rank, spawn.folder) if same_host and spawn.size > 1 and not why_unavailable() else None
        metadata = os.path.join(os.path.dirname(spawn.folder), "metadata")
        Rank(rank, spawn.size, spawn.target, stream, page, plans, same_host, metadata).serve()
    except (EOFError, ConnectionError):  # the driver has ended
        pass
    except BaseException:
        traceback.print_exc()
        exit_now(1)
    exit_now(0)
