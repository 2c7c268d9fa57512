"""What is said for ranks that can no longer say it themselves."""

from __future__ import annotations

import signal

from conformance.world.world import Flight, World


def speak_for(world: World, flight: Flight, index: int) -> None:
    """Give the case at ``index`` an answer of every rank that has not given one: ``crashed``, ``silent``, or what is known of it."""
    from conformance.verdict import Answer

    job = flight.jobs[index]
    dead = world.dead()
    # what the others died of may be that the first one did
    first = next((rank for rank in (*world.ended, *dead) if not world.answered(rank, flight, index)), None)
    missing = [rank for rank in range(world.size) if rank not in job.answers]
    for rank in missing:
        stack, output = world.sight.left(rank)
        if rank in dead and not world.answered(rank, flight, index):
            job.answers[rank] = Answer(rank, "crashed" if rank == first else "silent", stack=stack, output=output, reason=dead[rank])
        elif world.answered(rank, flight, index):
            job.answers[rank] = Answer(rank, "held", stack=stack, output=output)
        else:
            job.answers[rank] = Answer(rank, "silent", stack=stack, output=output)


def ask_for_stacks(world: World, flight: Flight, index: int) -> None:
    """Have every live rank write down where it is, unless all have answered the case at ``index``."""
    if not all(world.answered(rank, flight, index) for rank in range(world.size)):
        world.sight.look(dump=[rank for rank in range(world.size) if rank not in world.dead()])


def how(status: int) -> str:
    """How a process ended, in words: an exit code, or a negative signal number."""
    if status >= 0:
        return f"exit code {status}"
    try:
        return f"signal {signal.Signals(-status).name}"
    except ValueError:
        return f"signal {-status}"
