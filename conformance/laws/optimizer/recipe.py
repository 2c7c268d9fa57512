"""The law of the FSDP example in the docs of ``load_sharded_optimizer_state_dict``."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

from shardlaw.conformance.law.act import law
from shardlaw.conformance.law.due import Of
from shardlaw.conformance.law.fields import Device, Folder, Rank, WorldSize
from shardlaw.conformance.laws.checkpoint.calls import convert_failures, load, save
from shardlaw.conformance.laws.checkpoint.fields import Reader, Writer
from shardlaw.conformance.laws.checkpoint.models import OTHER_RATES, RATES, adam, saved_rates
from shardlaw.conformance.laws.optimizer.checkpointed import due_optimizer_contents, optimizer_contents, sharded_model
from shardlaw.conformance.laws.optimizer.fields import Gradients, WorldMesh
from shardlaw.conformance.laws.optimizer.sharded_load import DOCS

RECIPE_CASES = (
    "world=2 a=4x3:-:float32:small b=6:-:float32:small",
    "world=2 a=4x2:-:float32:small b=8:-:float32:small c=6x3:-:float32:small",
    "world=3 a=6x2:-:float32:small b=9:-:float32:small",
    "world=4 a=8x3:-:float32:small b=4:-:float32:small c=12:-:float32:small",
)


def local_tensors(state: dict[str, Any]) -> list[torch.Tensor]:
    """The local shards of the sharded tensors of a state."""
    return [shard.tensor for _, sharded in sorted(state.items()) for shard in sharded.local_shards()]


@law(
    "optimizer.recipe",
    source=f"{DOCS}: the example with FSDP; torch.distributed.fsdp docs, optim_state_dict_to_load",
    control=RECIPE_CASES[0],
    cases=RECIPE_CASES,
    needs=("checkpoint", "object_collectives"),
    features=lambda case: {"module", "fully-sharded", "way:fsdp1"},
    weight=0.3,
)
def recipe(grads: Gradients, mesh: WorldMesh, device: Device, writer: Writer, reader: Reader, folder: Folder):
    """The sharded states of an FSDP model and its optimizer, saved in a checkpoint, can be loaded into another FSDP
    model and its optimizer."""
    model, used = sharded_model(grads, "fsdp1", mesh, device)
    optimizer = adam([*model.parameters()], RATES)
    model().backward()
    optimizer.step()
    optimizer.zero_grad()
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = {"model": model.state_dict(), "optim": FullyShardedDataParallel.optim_state_dict(model, optimizer)}
        save(state, writer(folder))
    other, _ = sharded_model(grads, "fsdp1", mesh, device)
    second = adam([*other.parameters()], OTHER_RATES)
    with FullyShardedDataParallel.state_dict_type(other, StateDictType.SHARDED_STATE_DICT):
        target = {"model": other.state_dict()}
        load(target, reader(folder))
        with convert_failures():
            loaded = dcp.load_sharded_optimizer_state_dict(target["model"], "optim", reader(folder))
        converted = FullyShardedDataParallel.optim_state_dict_to_load(other, second, loaded["optim"])
        second.load_state_dict(converted)
    equal = all(map(torch.equal, local_tensors(state["model"]), local_tensors(target["model"])))
    return {"model as saved": equal, **optimizer_contents(other, second, "fsdp1", used)}


@recipe.due
def _(grads, rank: Rank, world: WorldSize):
    return {
        "model as saved": Of(True),
        **due_optimizer_contents(grads, "fsdp1", rank, world, [], saved_rates([*grads])),
    }
