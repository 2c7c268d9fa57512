"""The start of a run: its ranks load torch while the driver does. Imports nothing slow."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from shardlaw.conformance.errors import UsageError
from shardlaw.conformance.world import Pool, WorldError
from shardlaw.conformance.world.launch import ForkserverLauncher

if TYPE_CHECKING:
    from shardlaw.conformance.law.target import Target
    from shardlaw.conformance.run.engine import Run
    from shardlaw.conformance.run.request import RunRequest
    from shardlaw.conformance.run.state import Listener
    from shardlaw.conformance.world.manager import Launch

MAX_WORLDS_PER_SIZE = 3  # with more, worlds would wait for the process that draws the cases


def start_run(request: RunRequest, target: Target, listener: Listener, launch: Launch | None = None) -> Run:
    """Start the target's server and load the laws meanwhile. ``launch`` starts the ranks if they are on several hosts. Raises
    :class:`UsageError`."""
    try:
        pool = Pool(target, worlds=worlds_per_size(request, target, launch), launch=launch or ForkserverLauncher)
    except WorldError as error:
        raise UsageError(str(error)) from None
    try:
        from shardlaw.conformance.run.engine import Run

        run = Run(request, target, listener, pool)
        run.write()
    except OSError as error:
        pool.close()
        raise UsageError(f"--report {request.report}: cannot be written: {error.strerror}") from None
    except BaseException:
        pool.close()
        raise
    return run


def worlds_per_size(request: RunRequest, target: Target, launch: Launch | None) -> int:
    """How many worlds of one size work in parallel: as requested, or as many as keep the cores of this machine busy."""
    if request.worlds is not None:
        return request.worlds
    only_one = target.device != "cpu" or launch is not None
    return 1 if only_one else min(MAX_WORLDS_PER_SIZE, 1 + len(os.sched_getaffinity(0)) // 2)
