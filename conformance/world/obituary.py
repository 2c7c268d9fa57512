"""What is said for ranks that can no longer say it themselves."""

from __future__ import annotations

import os
import signal
import time

from conformance.world import protocol
from conformance.world.launch import Launcher
from conformance.world.output import tail, whole
from conformance.world.watch import share
from conformance.world.world import Flight, World

STACK_SECONDS = 0.3


def speak_for(world: World, flight: Flight, index: int) -> None:
    """Give the case at ``index`` an answer of every rank that has not given one: ``crashed``, ``silent``, or what is known of it."""
    from conformance.verdict import Answer

    job = flight.jobs[index]
    dead = world.dead()
    # what the others died of may be that the first one did
    first = next((rank for rank in (*world.ended, *dead) if not world.answered(rank, flight, index)), None)
    missing = [rank for rank in range(world.size) if rank not in job.answers]
    for rank in missing:
        stack, output = whole(f"{world.folder}/rank-{rank}.stack"), tail(f"{world.folder}/rank-{rank}.out")
        if rank in dead and not world.answered(rank, flight, index):
            job.answers[rank] = Answer(rank, "crashed" if rank == first else "silent", stack=stack, output=output, reason=dead[rank])
        elif world.answered(rank, flight, index):
            job.answers[rank] = Answer(rank, "held", stack=stack, output=output)
        else:
            job.answers[rank] = Answer(rank, "silent", stack=stack, output=output)


def ask_for_stacks(world: World, flight: Flight, index: int, launcher: Launcher) -> None:
    """Have every live rank write down where it is, unless all have answered the case at ``index``."""
    if all(world.answered(rank, flight, index) for rank in range(world.size)):
        return
    ranks = [rank for rank in range(world.size) if rank not in world.dead()]
    paths = [f"{world.folder}/rank-{rank}.stack" for rank in ranks]
    sizes = {path: size(path) for path in paths}
    launcher.signal(world.number, protocol.DUMP_SIGNAL)
    until = time.monotonic() + STACK_SECONDS / share()
    while time.monotonic() < until and any(size(path) == sizes[path] for path in paths):
        time.sleep(0.002)
    time.sleep(0.005)  # the last of them may still be writing


def size(path: str) -> int:
    """The size of a file in bytes; 0 where there is none."""
    try:
        return os.path.getsize(path)
    except OSError:
        return 0


def how(status: int) -> str:
    """How a process ended, in words: an exit code, or a negative signal number."""
    if status >= 0:
        return f"exit code {status}"
    try:
        return f"signal {signal.Signals(-status).name}"
    except ValueError:
        return f"signal {-status}"
