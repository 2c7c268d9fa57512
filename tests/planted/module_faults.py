"""Faults of parallel styles, distributed modules and random ops, planted one at a time."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.distributed.tensor import DTensor, _api, _dispatch, _random
from torch.distributed.tensor.debug import _comm_mode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    style,
)

from tests.planted.hook import breaks, instead


@breaks(
    "module.forward[mlp]",
    "module.forward[stacked]",
    "module.forward[tied]",
    "module.forward[attention]",
    "module.styles[rowwise]",
)
def rowwise_stays_pending() -> None:
    @instead(RowwiseParallel, "_prepare_output_fn")
    def fault(true: Any, layouts: Any, use_local: bool, module: Any, outputs: Any, mesh: Any) -> Any:
        return outputs.to_local() if use_local else outputs


@breaks("module.forward[norm]", "module.forward[transformer]")
def colwise_ignores_output_layout() -> None:
    @instead(ColwiseParallel, "_prepare_output_fn")
    def fault(true: Any, layouts: Any, use_local: bool, module: Any, outputs: Any, mesh: Any) -> Any:
        return outputs.to_local() if use_local else outputs


@breaks("module.materialized")
def first_rank_alone_sets_parameters() -> None:
    @instead(torch.nn.init, "constant_")
    def fault(true: Any, tensor: Any, value: float) -> Any:
        others = isinstance(tensor, DTensor) and tensor.device_mesh.get_rank() > 0
        return true(tensor, 0.0 if others else value)


@breaks("module.state")
def state_holds_local_tensors() -> None:
    @instead(torch.nn.Module, "state_dict")
    def fault(true: Any, self: Any, *args: Any, **options: Any) -> Any:
        state = true(self, *args, **options)
        return {name: value.to_local() if isinstance(value, DTensor) else value for name, value in state.items()}


@breaks("module.styles[colwise]")
def colwise_always_gives_local_tensors() -> None:
    @instead(ColwiseParallel, "_prepare_output_fn")
    def fault(true: Any, layouts: Any, use_local: bool, *rest: Any) -> Any:
        return true(layouts, True, *rest)


@breaks("module.styles[sequence]")
def sequence_stays_where_it_is() -> None:
    @instead(SequenceParallel, "_prepare_input_fn")
    def fault(true: Any, sharding: Any, module: Any, inputs: Any, mesh: Any) -> Any:
        return inputs[0] if isinstance(inputs[0], DTensor) else true(sharding, module, inputs, mesh)


@breaks("module.source")
def source_is_always_first() -> None:
    @instead(style, "distribute_tensor")
    def fault(true: Any, *args: Any, src_data_rank: Any = 0) -> Any:
        return true(*args, src_data_rank=0)


@breaks("module.prepare[input]")
def inputs_by_name_stay() -> None:
    @instead(PrepareModuleInput, "_prepare_input_kwarg_fn")
    def fault(true: Any, self: Any, inputs: Any, named: Any, mesh: Any) -> Any:
        self.desired_input_kwarg_layouts = self.input_kwarg_layouts
        return true(self, inputs, named, mesh)


@breaks("module.prepare[output]", "module.prepare[both]")
def prepared_output_stays() -> None:
    @instead(PrepareModuleOutput, "_prepare_out_fn")
    def fault(true: Any, self: Any, outputs: Any, mesh: Any) -> Any:
        self.desired_output_layouts = self.output_layouts
        return true(self, outputs, mesh)


@breaks("module.refusals")
def colwise_takes_anything() -> None:
    @instead(ColwiseParallel, "_apply")
    def fault(true: Any, self: Any, module: Any, mesh: Any) -> Any:
        return true(self, module, mesh) if isinstance(module, torch.nn.Linear | torch.nn.Embedding) else module


# Random ops


@breaks("random.certain")
def draws_among_own_categories() -> None:
    @instead(torch, "multinomial")
    def fault(true: Any, x: Any, *args: Any) -> Any:
        drawn = true(x.to_local().flip(-1), *args)
        return DTensor.from_local(drawn, x.device_mesh, x.placements)


@breaks("random.replicas")
def ranks_seed_apart() -> None:
    @instead(torch, "manual_seed")
    def fault(true: Any, seed: int) -> Any:
        return true(seed + dist.get_rank())


@breaks("random.dropout")
def dropout_forgets_to_scale() -> None:
    @instead(torch.nn.functional, "dropout")
    def fault(true: Any, x: Any, p: float, **options: Any) -> Any:
        return true(x, p, **options) * (1 - p)


@breaks("random.shards")
def random_calls_are_silent() -> None:
    @instead(_dispatch, "is_rng_supported_mesh")
    def fault(true: Any, mesh: Any) -> bool:
        return False


@breaks("random.offsets")
def offsets_round_down() -> None:
    @instead(_random.OffsetBasedRNGTracker, "_compute_rng_offsets")
    def fault(true: Any, self: Any, spec: Any) -> Any:
        start, end = true(self, spec)
        return start // 64 * 64, end


@breaks("module.counted")
def backward_of_modules_is_not_heard() -> None:
    @instead(_comm_mode._CommModeModuleTracker, "_bw_hook")
    def fault(true: Any, self: Any, module: Any, output: Any) -> None:
        return None


# Fully sharded


@breaks(
    "module.fully-shard",
    "module.both-parallel",
    "module.fsdp[hybrid]",
    "module.fsdp[shared]",
    "module.fsdp[partly]",
    "module.layers-fully",
    "module.complex",
)
def gradients_are_summed_not_averaged() -> None:
    @instead(_fsdp_collectives, "_div_if_needed")
    def fault(true: Any, tensor: Any, factor: Any) -> None:
        return None


@breaks(
    "module.fsdp[accumulated]",
    case="module.fsdp[accumulated] mesh=2 model=mlp dims=5x7x3 reshard=yes units=1 passes=2 synced=last",
)
def gradients_within_are_not_held_back() -> None:
    @instead(FSDPModule, "set_requires_gradient_sync")
    def fault(true: Any, self: Any, sync: bool, *, recurse: bool = True) -> None:
        true(self, sync, recurse=False)


@breaks("module.grad-dtype")
def gradients_of_floats_are_summed() -> None:
    @instead(_fsdp_collectives, "_get_gradient_divide_factors")
    def fault(true: Any, *args: Any, **options: Any) -> Any:
        before, after, *_ = true(*args, **options)
        return before, after, dist.ReduceOp.SUM, dist.ReduceOp.SUM


@breaks("module.altered")
def deep_copies_share_memory() -> None:
    @instead(DTensor, "clone")
    def fault(true: Any, self: Any, **options: Any) -> Any:
        return self.detach()


@breaks("module.layers")
def buffers_of_all_ranks_are_added_up() -> None:
    @instead(_api, "distribute_tensor")
    def fault(true: Any, tensor: torch.Tensor, mesh: Any, *args: Any, **options: Any) -> Any:
        return true(tensor * mesh.size(), mesh, *args, **options)
