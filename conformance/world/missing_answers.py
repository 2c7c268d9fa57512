"""Answers for ranks that hang or have died, and their stacks."""

from __future__ import annotations

import signal
from dataclasses import replace

from shardlaw.conformance.law.verdict import Answer
from shardlaw.conformance.world.world import Batch, World


def fill_missing_answers(world: World, batch: Batch, index: int) -> None:
    """Add to the case at ``index`` an answer for every rank that sent none: ``crashed`` for the first rank that died, ``held`` for a rank
    that is past the case, else ``silent``; with the trace that the rank has sent so far."""
    job = batch.jobs[index]
    dead = world.dead_ranks()
    # the death of the first rank may have caused those of the others
    first = next((rank for rank in (*world.ended, *dead) if not world.has_answered(rank, batch, index)), None)
    missing = [rank for rank in range(world.size) if rank not in job.answers]
    for rank in missing:
        stack, output = world.observer.stacks_and_output(rank)
        so_far = job.so_far.get(rank, Answer(rank, "silent"))
        answer = Answer(rank, "silent", stack=stack, output=output, trace=so_far.trace, evidence=so_far.evidence)
        if world.has_answered(rank, batch, index):
            answer = replace(answer, outcome="held")
        elif rank in dead:
            answer = replace(answer, outcome="crashed" if rank == first else "silent", reason=dead[rank])
        job.answers[rank] = answer


def dump_stacks(world: World, batch: Batch, index: int) -> None:
    """Have every live rank write its stacks to a file, unless all have answered the case at ``index``."""
    if not all(world.has_answered(rank, batch, index) for rank in range(world.size)):
        world.observer.refresh(dump=[rank for rank in range(world.size) if rank not in world.dead_ranks()])


def describe_exit(status: int) -> str:
    """Describe how a process ended. ``status`` is an exit code, or a negative signal number."""
    if status >= 0:
        return f"exit code {status}"
    try:
        return f"signal {signal.Signals(-status).name}"
    except ValueError:
        return f"signal {-status}"
