"""The law on what ``load_sharded_optimizer_state_dict`` cannot read, and on the planner that it is given."""

from __future__ import annotations

import warnings
from typing import Any, Literal

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner

from shardlaw.conformance.law.act import law, texts
from shardlaw.conformance.law.due import Of, Refused, caught
from shardlaw.conformance.law.fields import Folder, Rank, WorldSize
from shardlaw.conformance.laws.checkpoint.calls import convert_failures
from shardlaw.conformance.laws.checkpoint.fields import Reader, Writer
from shardlaw.conformance.laws.optimizer.sharded_load import DOCS, due_in_rows
from shardlaw.conformance.laws.sharded_tensor.fields import Whole
from shardlaw.conformance.laws.sharded_tensor.shards import as_told

ATTEMPTS = ("planner", "short", "unread", "unflattened", "warned")
SHAPES = ("world=2 x=4x3", "world=3 x=5x2")


@law(
    "optimizer.sharded-attempts",
    source=f"{DOCS}: planner; storage_reader",
    control="world=2 x=4x3 attempt=planner",
    sweep=texts(*(f"{on} attempt={attempt}" for attempt in ATTEMPTS for on in SHAPES)),
    sweeps=len(ATTEMPTS) * len(SHAPES),
    needs=("checkpoint", "object_collectives"),
    features=lambda case: {"must-refuse"} if case.get("attempt") in ("unread", "unflattened") else set(),
    weight=0.2,
)
def attempts(
    x: Whole,
    attempt: Literal["planner", "short", "unread", "unflattened", "warned"],
    writer: Writer,
    reader: Reader,
    folder: Folder,
):
    """Metadata that cannot be read, or that know no paths, are refused on every rank; a tensor that stands less deep
    than those of parameters is loaded in chunks of rows; a planner that is given is asked; each call warns that what it
    calls is deprecated."""
    asked: list[Any] = []

    class Asked(DefaultLoadPlanner):
        def create_local_plan(self):
            asked.append(self)
            return super().create_local_plan()

    def unread(*args: Any, **options: Any) -> Any:
        raise OSError("the metadata cannot be read")

    def loaded() -> Any:
        planner = Asked() if attempt == "planner" else None
        with convert_failures():
            return dcp.load_sharded_optimizer_state_dict({}, "opt", source, planner)

    state = {"total": x} if attempt == "short" else {"state": {"w": {"total": x}}}
    with convert_failures():
        planner = DefaultSavePlanner(flatten_state_dict=attempt != "unflattened")
        dcp.save({"opt": state}, storage_writer=writer(folder), planner=planner)
    source = reader(folder)
    if attempt == "unread":
        source.read_metadata = unread
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        found = caught(loaded)
    if isinstance(found, Exception):
        return {"loaded": found, "asked": bool(asked), "warned": False}
    held = found["opt"] if attempt == "short" else found["opt"]["state"]["w"]
    deprecated = any(one.category is FutureWarning and "load_state_dict" in str(one.message) for one in warned)
    return {"loaded": as_told(held["total"]), "asked": bool(asked), "warned": deprecated}


@attempts.due
def _(x, attempt: str, rank: Rank, world: WorldSize):
    refused = attempt in ("unread", "unflattened")
    return {
        "loaded": Refused() if refused else due_in_rows(x, range(world), rank),
        "asked": Of(attempt == "planner"),
        "warned": Of(not refused) if attempt == "warned" else ...,
    }
