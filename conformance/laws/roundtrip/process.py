"""The law on asynchronous saves in another process."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing import resource_sharer
from typing import Annotated, Any, Literal

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from shardlaw.conformance import compat
from shardlaw.conformance.law.due import Of, Refused, caught
from shardlaw.conformance.law.fields import Folder, Rank
from shardlaw.conformance.laws.checkpoint.calls import CheckpointFailed, wait_for_save
from shardlaw.conformance.laws.checkpoint.fields import Newer, Saved, Writer, WriterField
from shardlaw.conformance.laws.roundtrip.cases import NEEDS_FILES, add_both_loads, trip_law
from shardlaw.conformance.laws.roundtrip.saves import mutate

START_SECONDS = 30  # a few on an idle machine
PROCESS = (
    "mesh=2 mesh.load=1 x=5x2:S(0) a=4:R:int64 state={x:x,d:{a:a,l:[1,2]},n:1} to.x=R",
    'mesh=1 mesh.load=2 x=4x3:R:bfloat16 a=3:-:bool state={x:x,a:a,s:"ab"} to.x=S(1) threads=2',
    "mesh=3 x=7:S(0) a=5:R:float64 files=item",
    "mesh=2 x=5:S(0) group=own",
)


def end_children() -> int:
    """End the processes that this one has started, and the thread that shares tensors with them; return the number of
    processes."""
    children = multiprocessing.active_children()
    for child in children:
        child.terminate()
        child.join()
    compat.reset_async_process()
    resource_sharer.stop()
    return len(children)


@trip_law(
    "process",
    source="torch.distributed.checkpoint docs, async_save: async_checkpointer_type, planner, a Future that holds the "
    "Metadata",
    control="mesh=2 x=5:S(0) a=4:R",
    texts=PROCESS,
    needs=NEEDS_FILES,
    profile="ci",
    seconds=START_SECONDS,
    features=lambda case: {"async-save"},
)
def process(
    state: Saved,
    newer: Newer,
    writer: Writer,
    careful: Annotated[Any, WriterField(lambda case: {"overwrite": False})],
    rank: Rank,
    folder: Folder,
    group: Literal["own"] | None = None,
):
    """A save in another process stores the values at the call; the future raises an error of that process, which then
    serves further saves, with the given planner, also of a rank in a group of its own."""
    os.environ.setdefault("MASTER_ADDR", "localhost")
    in_process: dict[str, Any] = {"async_checkpointer_type": AsyncCheckpointerType.PROCESS}
    try:
        pending = dcp.async_save(state, storage_writer=writer(f"{folder}/first"), **in_process)
        mutate(state)
        metadata = wait_for_save(pending)
        over = dcp.async_save(newer, storage_writer=careful(f"{folder}/first"), **in_process)
        refused = caught(lambda: wait_for_save(over))
        planner = DefaultSavePlanner(dedup_save_to_lowest_rank=True)
        second = wait_for_save(
            dcp.async_save(newer, storage_writer=writer(f"{folder}/second"), planner=planner, **in_process)
        )
        if group:
            groups = [dist.new_group([each]) for each in range(dist.get_world_size())]
            to = writer(f"{folder}/of-{rank}")
            own = dcp.async_save({"rank": rank}, storage_writer=to, process_group=groups[rank], **in_process)
            wait_for_save(own)
    finally:
        count = end_children()
    # of what several ranks have and of chunks at the start, all are of the lowest rank
    first_items = [(index, info) for index, info in second.storage_data.items() if not any(index.offset or ())]
    written = os.path.exists(f"{folder}/of-{rank}/.metadata") if group else None
    return {
        "metadata given": isinstance(metadata, Metadata),
        "save over another": refused,
        "processes": count if group is None else None,
        "of other ranks": [index.fqn for index, info in first_items if not info.relative_path.startswith("__0_")],
        "own metadata": written,
    }


@process.due
def _(group):
    return {
        "metadata given": Of(True),
        "save over another": Refused((CheckpointFailed,)),
        "processes": None if group else 1,
        "of other ranks": Of([]),
        "own metadata": Of(True) if group else None,
    }


add_both_loads(process)
