"""What is said for ranks that can no longer say it themselves."""

from __future__ import annotations

import signal

from shardlaw.conformance.world.world import Batch, World


def speak_for(world: World, batch: Batch, index: int) -> None:
    """Give the case at ``index`` an answer of every rank that has not given one: ``crashed``, ``silent``, or what is known of it."""
    from shardlaw.conformance.law.verdict import Answer

    job = batch.jobs[index]
    dead = world.dead()
    # what the others died of may be that the first one did
    first = next((rank for rank in (*world.ended, *dead) if not world.answered(rank, batch, index)), None)
    missing = [rank for rank in range(world.size) if rank not in job.answers]
    for rank in missing:
        stack, output = world.observer.left(rank)
        if rank in dead and not world.answered(rank, batch, index):
            job.answers[rank] = Answer(rank, "crashed" if rank == first else "silent", stack=stack, output=output, reason=dead[rank])
        elif world.answered(rank, batch, index):
            job.answers[rank] = Answer(rank, "held", stack=stack, output=output)
        else:
            job.answers[rank] = Answer(rank, "silent", stack=stack, output=output)


def ask_for_stacks(world: World, batch: Batch, index: int) -> None:
    """Have every live rank write down where it is, unless all have answered the case at ``index``."""
    if not all(world.answered(rank, batch, index) for rank in range(world.size)):
        world.observer.look(dump=[rank for rank in range(world.size) if rank not in world.dead()])


def how(status: int) -> str:
    """How a process ended, in words: an exit code, or a negative signal number."""
    if status >= 0:
        return f"exit code {status}"
    try:
        return f"signal {signal.Signals(-status).name}"
    except ValueError:
        return f"signal {-status}"
