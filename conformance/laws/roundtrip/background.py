"""Laws on work outside the calling thread: asynchronous saves, staging, and threads that read files."""

from __future__ import annotations

import os
import time
from concurrent.futures import Future
from typing import Any, Literal
from unittest import mock

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.staging import AsyncStager, DefaultStager, StagingOptions

from shardlaw.conformance import compat
from shardlaw.conformance.law.due import Refused, caught
from shardlaw.conformance.law.fields import Folder, Rank
from shardlaw.conformance.laws.checkpoint.calls import CheckpointFailed, PlainWriter, load, save, wait_for_save
from shardlaw.conformance.laws.checkpoint.fields import Destination, Reader, Saved, Writer
from shardlaw.conformance.laws.roundtrip.cases import DOCS, NEEDS_FILES, one_world_law
from shardlaw.conformance.laws.roundtrip.options import file_numbers, hf_options, require_package

SLOW_SECONDS = 0.2
CLOSING_SECONDS = 8.0  # the longest time from the end of a save until its stager is closed

ASYNC_OPTIONS = (
    "mesh=2 x=5x2:S(0) a=4:R:int64 state={x:x,d:{a:a},n:1} way=apart",
    "mesh=3 x=7:R a=4:-:bfloat16 state={x:x,a:a,n:1} way=alone",
    "mesh=2x2 x=5x4:S(0),S(1) a=3:- way=planner",
    "mesh=3 x=7:S(0) a=4:- way=apart",
)
STAGING = (
    "mesh=2 x=5x2:S(0) a=4:R:int64 state={x:x,d:{a:a,l:[1,2]},n:1}",
    "mesh=1 x=():R a=4x3:-:bool",
    "mesh=2x2 x=7x2:S(0),S(0) a=3:R,R:bfloat16",
)
FAILING = (
    "mesh=2 x=5:S(0) a=4:R",
    "mesh=3 x=7:S(0)",
    "mesh=2x2 x=4x3:S(0),S(1) a=5:-",
    "mesh=1 x=5:S(0) failed=before",
    "mesh=3 x=7:S(0) a=4:- failed=before",
)
THREADS = (
    "mesh=2 x=5x2:S(0) a=4x3:S(1) at=commit_tensor",
    "mesh=2 x=5x2:S(0) a=4x3:S(1) b=3:S(0) at=resolve_tensor ranks=1",
    "mesh=3 x=7:S(0) a=6x2:S(0) at=resolve_tensor",
)


@one_world_law(
    "async-options",
    source=f"{DOCS}, async_save: planner, no_dist, use_collectives, as those of save",
    control="mesh=2 x=5:S(0) a=4:R way=planner",
    texts=ASYNC_OPTIONS,
    needs=NEEDS_FILES,
    features=lambda case: {"async-save"},
)
def async_options(
    state: Saved,
    destination: Destination,
    writer: Writer,
    reader: Reader,
    rank: Rank,
    folder: Folder,
    way: Literal["planner", "apart", "alone"],
):
    """An asynchronous save calls the given planner; without collectives it writes metadata for each rank, and with
    no_dist it saves on one rank."""
    planned = []

    class Planner(DefaultSavePlanner):
        def create_local_plan(self):
            planned.append(way)
            return super().create_local_plan()

    options: dict[str, dict[str, Any]] = {
        "planner": {"planner": Planner()},
        "apart": {"use_collectives": False},
        "alone": {"no_dist": True},
    }
    path = f"{folder}/{rank}" if way == "alone" else folder
    wait_for_save(dcp.async_save(state, storage_writer=writer(path), **options[way]))
    return {
        "planned": len(planned),
        "metadata of this rank": os.path.exists(f"{path}/__{rank}.metadata"),
        "loaded": load(destination, reader(path), no_dist=way == "alone"),
    }


@async_options.due
def _(destination, way):
    return {"planned": int(way == "planner"), "metadata of this rank": way == "apart", "loaded": destination}


class Slow:
    """A value whose copy takes a while."""

    def __deepcopy__(self, memo: Any) -> Slow:
        time.sleep(SLOW_SECONDS)
        return Slow()


@one_world_law(
    "staging-ends",
    source=f"{DOCS}, DefaultStager.synchronize_staging: with use_async_staging, waits until staging is complete",
    control="mesh=2 x=5:S(0) a=4:R",
    texts=STAGING,
    features=lambda case: {"async-save"},
)
def staging_ends(state: Saved):
    """Once synchronize_staging of a background stager returns, the state is staged, and equal."""
    stager = DefaultStager(StagingOptions(False, False, True, False))
    pending: Any = stager.stage({"slow": Slow(), **state})
    stager.synchronize_staging()
    is_done = pending.done()
    staged = pending.result()
    stager.close()
    return {"ended": is_done, "staged": {key: value for key, value in staged.items() if key != "slow"}}


@staging_ends.due
def _(state):
    return {"ended": True, "staged": state}


@one_world_law(
    "staging-fails",
    source=f"{DOCS}, AsyncSaveResponse: staging_completion indicates when the local copy is complete",
    control="mesh=2 x=5:S(0)",
    texts=FAILING,
    features=lambda case: {"async-save", "must-refuse"},
)
def staging_fails(state: Saved, writer: Writer, folder: Folder, failed: Literal["before", "after"] = "after"):
    """An error in staging, before or after async_save returns, completes the futures of the staging and of the upload
    with that error."""
    staged: Future[Any] = Future()
    if failed == "before":
        staged.set_exception(RuntimeError("planted in stage"))

    class FailingStager(AsyncStager):
        def stage(self, state_dict):
            return staged

        def synchronize_staging(self):
            pass

        def close(self):
            pass

    pending: Any = dcp.async_save(state, storage_writer=writer(folder), async_stager=FailingStager())
    if failed == "after":
        staged.set_exception(RuntimeError("planted in stage"))
    return {
        "staging": caught(lambda: pending.staging_completion.result()),
        "upload": caught(lambda: pending.upload_completion.result()),
    }


@staging_fails.due
def _():
    return {"staging": Refused((RuntimeError,)), "upload": Refused((RuntimeError,))}


class Uncopied:
    """A value that cannot be copied."""

    def __deepcopy__(self, memo: Any) -> Uncopied:
        raise RuntimeError("planted in a copy")


class FailingWriter(PlainWriter):
    """A writer that cannot write."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        raise RuntimeError("planted in write_data")


@one_world_law(
    "stager-closed",
    source=f"{DOCS}, async_save: internally created default stagers are closed automatically",
    control="mesh=2 x=5:S(0)",
    texts=("mesh=2 x=5x2:S(0) fails=write", "mesh=1 x=7:S(0) a=4:- fails=stage", "mesh=2@1,0 x=3:R a=5:S(0):int64"),
    features=lambda case: {"async-save"},
    seconds=2 * CLOSING_SECONDS,
)
def stager_closed(state: Saved, writer: Writer, folder: Folder, fails: Literal["no", "stage", "write"] = "no"):
    """A stager that an asynchronous save has made is closed once, when the save has ended or failed."""
    to = (FailingWriter if fails == "write" else PlainWriter)(writer(folder))
    if fails == "stage":
        state["value"] = Uncopied()
    with mock.patch.object(DefaultStager, "close", autospec=True, side_effect=DefaultStager.close) as close:
        failure = caught(lambda: wait_for_save(dcp.async_save(state, storage_writer=to)))
        end = time.monotonic() + CLOSING_SECONDS
        while not close.called and time.monotonic() < end:
            time.sleep(0.01)
    return {"failure": failure if isinstance(failure, Exception) else None, "closed": close.call_count}


@stager_closed.due
def _(fails):
    return {"failure": Refused((RuntimeError, CheckpointFailed)) if fails != "no" else None, "closed": 1}


@one_world_law(
    "threads-fail",
    source=f"{DOCS}, HuggingFaceStorageReader: thread_count; CheckpointException",
    control="mesh=2 x=5x2:S(0) a=4x3:S(0) at=commit_tensor",
    texts=THREADS,
    needs=NEEDS_FILES,
    smallest=2,
    features=lambda case: {"must-refuse", "storage:safetensors-shards"},
)
def threads_fail(
    state: Saved,
    destination: Destination,
    rank: Rank,
    folder: Folder,
    at: Literal["resolve_tensor", "commit_tensor"],
    ranks: int = 0,
):
    """If one of several threads that read files fails on one rank, the load is refused on all ranks."""

    def fail(*args: Any) -> Any:
        raise RuntimeError(f"planted in {at}")

    save(state, compat.HuggingFaceStorageWriter(folder, **hf_options("shards", file_numbers(state))))
    planner = DefaultLoadPlanner()
    if rank == ranks:
        setattr(planner, at, fail)
    reader = compat.HuggingFaceStorageReader(folder, thread_count=2)
    return {"load": caught(lambda: load(destination, reader, planner))}


@threads_fail.due
def _():
    require_package("safetensors")
    return {"load": Refused((CheckpointFailed,))}
