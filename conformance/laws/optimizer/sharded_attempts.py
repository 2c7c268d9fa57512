"""The law of the planner, the refusals and the warnings of ``load_sharded_optimizer_state_dict``."""

from __future__ import annotations

import warnings
from typing import Any, Literal

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner

from shardlaw.conformance.law.act import law
from shardlaw.conformance.law.due import Of, Refused, caught
from shardlaw.conformance.law.fields import Folder, Rank, WorldSize
from shardlaw.conformance.laws.checkpoint.calls import convert_failures
from shardlaw.conformance.laws.checkpoint.fields import Reader, Writer
from shardlaw.conformance.laws.optimizer.sharded_load import DOCS
from shardlaw.conformance.laws.sharded_tensor.act_helpers import describe_if_sharded
from shardlaw.conformance.laws.sharded_tensor.fields import FullTensor, due_rows

ATTEMPTS = ("planner", "short", "unread", "unflattened", "warned")
SHAPES = ("world=2 x=4x3", "world=3 x=5x2")


@law(
    "optimizer.sharded-attempts",
    source=f"{DOCS}: planner; storage_reader",
    control="world=2 x=4x3 attempt=planner",
    cases=[f"{on} attempt={attempt}" for attempt in ATTEMPTS for on in SHAPES],
    needs=("checkpoint", "object_collectives"),
    features=lambda case: {"must-refuse"} if case.get("attempt") in ("unread", "unflattened") else set(),
    weight=0.2,
)
def attempts(
    x: FullTensor,
    attempt: Literal["planner", "short", "unread", "unflattened", "warned"],
    writer: Writer,
    reader: Reader,
    folder: Folder,
):
    """load_sharded_optimizer_state_dict refuses metadata that it cannot read on every rank, uses the given planner,
    warns that it is deprecated, and loads tensors outside of parameters' states in chunks of rows."""
    planners: list[Any] = []

    class RecordingPlanner(DefaultLoadPlanner):
        def create_local_plan(self):
            planners.append(self)
            return super().create_local_plan()

    def raise_error(*args: Any, **options: Any) -> Any:
        raise OSError("the metadata cannot be read")

    def load_optimizer() -> Any:
        planner = RecordingPlanner() if attempt == "planner" else None
        with convert_failures():
            return dcp.load_sharded_optimizer_state_dict({}, "opt", source, planner)

    state = {"total": x} if attempt == "short" else {"state": {"w": {"total": x}}}
    with convert_failures():
        planner = DefaultSavePlanner(flatten_state_dict=attempt != "unflattened")
        dcp.save({"opt": state}, storage_writer=writer(folder), planner=planner)
    source = reader(folder)
    if attempt == "unread":
        source.read_metadata = raise_error
    with warnings.catch_warnings(record=True) as caught_warnings:
        warnings.simplefilter("always")
        found = caught(load_optimizer)
    if isinstance(found, Exception):
        return {"loaded": found, "asked": bool(planners), "warned": False}
    loaded = found["opt"] if attempt == "short" else found["opt"]["state"]["w"]
    deprecated = any(one.category is FutureWarning and "load_state_dict" in str(one.message) for one in caught_warnings)
    return {"loaded": describe_if_sharded(loaded["total"]), "asked": bool(planners), "warned": deprecated}


@attempts.due
def _(x, attempt: str, rank: Rank, world: WorldSize):
    refused = attempt in ("unread", "unflattened")
    return {
        "loaded": Refused() if refused else due_rows(x, range(world), rank),
        "asked": Of(attempt == "planner"),
        "warned": Of(not refused) if attempt == "warned" else ...,
    }
