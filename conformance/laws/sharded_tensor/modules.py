"""The law of modules whose parameters a sharding plan shards."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from shardlaw.conformance import compat
from shardlaw.conformance.law.due import Refused, caught
from shardlaw.conformance.law.fields import Rank
from shardlaw.conformance.laws.sharded_tensor.act_helpers import describe
from shardlaw.conformance.laws.sharded_tensor.draws import sharded_law
from shardlaw.conformance.laws.sharded_tensor.fields import FullTensor, Group, ShardingSpec, due_description
from shardlaw.reference.sharded_tensor import shards_of

MODULES = (
    "world=2 x=5x3 spec=chunk(0)@0,1",
    "world=3 x=4x6:-:float64 spec=chunk(1)@2,0,1 src=1",
    "world=2 x=4x4 spec=chunk(0)@0,1 respec=chunk(1)@1,0",
    "world=2 x=4x6 spec=chunk(0)@0,1 gives=local",
    "world=2 x=2x3:-:bfloat16 spec=chunk(0)@1,0 gives=local",
    "world=2 x=4x2 spec=chunk(0)@0,1 respec=chunk(1)@0,1 gives=local",
    "world=3 x=2x4 spec=chunk(0)@1,2 gives=local src=1 group=1,2",
    "world=2 x=4x3 spec=chunk(0)@0,1 gives=swapped",
    "world=2 x=5x3 spec=chunk(0)@0,1 gives=whole",
    "world=3 x=5x2:-:float64 spec=chunk(0)@0,1,2 gives=whole",
)


class ReturnsWeight(nn.Module):
    """A module whose output is a copy of its parameter."""

    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self) -> Any:
        return self.weight.clone()


class Outer(nn.Module):
    """A module that calls its only submodule."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self) -> Any:
        return self.inner()


@sharded_law(
    "sharded_tensor.module",
    source="torch.distributed._shard, docstrings of shard_module, shard_parameter, _collect_local_shard, ShardingPlan",
    control="world=2 x=4x3 spec=chunk(0)@0,1",
    cases=MODULES,
)
def sharded_module(
    x: FullTensor,
    spec: ShardingSpec,
    gives: Literal["sharded", "local", "swapped", "whole"] = "sharded",
    respec: ShardingSpec = None,
    src: int = 0,
    group: Group = None,
):
    """shard_module shards a parameter, with the values of the source rank, and the module's outputs as its plan says; a
    sharder's module replaces the original."""

    class WrappingSharder(compat.shard_api.Sharder):  # type: ignore[misc]
        def shard(self, module: nn.Module) -> nn.Module:
            return Outer(module)

    weight = x.clone() if dist.get_rank(group) == src else torch.zeros_like(x)
    model = Outer(ReturnsWeight(weight))
    if gives == "swapped":
        compat.shard_api.shard_module(model, compat.shard_api.ShardingPlan({"inner": WrappingSharder()}), src, group)
        return {"inside": type(model.inner).__name__}
    plan = compat.shard_api.ShardingPlan(
        {"inner.weight": spec},
        None if respec is None else {"inner": respec},
        ["inner"] if gives == "local" else None,
    )
    compat.shard_api.shard_module(model, plan, src, group)
    if gives == "whole":
        return {"whole": get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))}
    output, parameter = model(), model.inner.weight
    absent = caught(lambda: compat.shard_api.shard_parameter(model.inner, "absent", spec, src, group))
    return {
        "parameter": describe(parameter),
        "given": output.detach().clone() if gives == "local" else describe(output),
        "an absent parameter": absent,
    }


@sharded_module.due
def _(x, spec, rank: Rank, gives="sharded", respec=None, group=None):
    if gives == "swapped":
        return {"inside": "Around"}
    if gives == "whole":
        return {"whole": {"inner.weight": x}}
    shape = tuple(x.shape)
    shards = shards_of(respec or spec, shape)
    output: Any = due_description(x, shards, rank)
    if gives == "local":
        (box,) = shards.boxes_of(rank)
        dim = (respec or spec).dim
        part = x[box.slices()].contiguous()
        output = part.squeeze(dim) if part.shape[dim] == 1 else part
    return {
        "parameter": due_description(x, shards_of(spec, shape), rank),
        "given": output,
        "an absent parameter": Refused(),
    }
