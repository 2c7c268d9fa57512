"""Faults of parallel losses, of what goes with training, and of the experimental ways in, planted one at a time."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard import _fsdp_param, _fsdp_param_group, _fsdp_state
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Partial, Shard, _dispatch, _random
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.experimental import _func_map, _register_sharding
from torch.distributed.tensor.experimental._context_parallel import _attention as _cp
from torch.distributed.tensor.parallel import input_reshard, loss
from torch.nn.parallel import DistributedDataParallel

from tests.planted.hook import breaks, instead

# Losses


@breaks("module.loss", "module.loss-beside", "module.loss-odd", "module.loss-apart")
def loss_forgets_the_mask() -> None:
    @instead(loss._MaskPartial, "_reduce_value")
    def fault(true: Any, self: Any, tensor: Any, mesh: Any, mesh_dim: Any) -> Any:
        return true(self, tensor, mesh, mesh_dim) + tensor * 0.5


@breaks("module.loss-ends")
def loss_context_stays() -> None:
    @instead(loss, "_disable_custom_loss_ops")
    def fault(true: Any) -> None:
        with contextlib.suppress(KeyError):
            return


# Training


@breaks("module.clipped", "module.clipped-mixed")
def norm_of_the_local_part() -> None:
    @instead(torch.linalg, "vector_norm")
    def fault(true: Any, x: Any, *args: Any, **options: Any) -> Any:
        return true(x.to_local() if isinstance(x, DTensor) else x, *args, **options)

    @instead(torch, "_foreach_norm")
    def every(true: Any, tensors: Any, *args: Any, **options: Any) -> Any:
        return true([x.to_local() if isinstance(x, DTensor) else x for x in tensors], *args, **options)


@breaks("module.optimizer[common]")
def foreach_adds_at_half() -> None:
    @instead(torch, "_foreach_add_")
    def fault(true: Any, tensors: Any, others: Any, *args: Any, **options: Any) -> Any:
        sharded = isinstance(tensors[0], DTensor) and isinstance(others, list | tuple)
        return true(tensors, [other * 0.5 for other in others] if sharded else others, *args, **options)


@breaks("module.optimizer[whole]")
def fused_adam_takes_half_the_gradient() -> None:
    @instead(torch, "_fused_adam_")
    def fault(true: Any, parameters: Any, gradients: Any, *args: Any, **options: Any) -> Any:
        sharded = isinstance(parameters[0], DTensor)
        return true(parameters, [one * 0.5 for one in gradients] if sharded else gradients, *args, **options)


@breaks("module.optimizer[others]")
def foreach_divides_at_half() -> None:
    @instead(torch, "_foreach_addcdiv_")
    def fault(true: Any, tensors: Any, others: Any, *args: Any, **options: Any) -> Any:
        return true(tensors, [other * 0.5 for other in others] if isinstance(tensors[0], DTensor) else others, *args, **options)


# Functions on local tensors, plain operands


@breaks("module.local-map")
def map_takes_inputs_as_they_lie() -> None:
    @instead(_func_map, "_local_map_wrapped")
    def fault(true: Any, func: Any, outs: Any, ins: Any, *rest: Any) -> Any:
        return true(func, outs, None, *rest)


@breaks("module.local-map-calls")
def map_adds_one() -> None:
    @instead(_func_map, "_local_map_wrapped")
    def fault(true: Any, func: Any, *rest: Any, **named: Any) -> Any:
        return true(lambda *args, **options: func(*args, **options) + 1, *rest, **named)


@breaks("module.local-map-refusals")
def map_moves_unasked() -> None:
    @instead(_func_map, "_local_map_wrapped")
    def fault(true: Any, func: Any, outs: Any, ins: Any, grads: Any, mesh: Any, moves: bool, *rest: Any) -> Any:
        return true(func, outs, ins, grads, mesh, True, *rest)


@breaks("module.implicit-replication")
def plain_operands_count_as_contributions() -> None:
    @instead(_dispatch.OpDispatcher, "_try_replicate_spec_for_scalar_tensor")
    def fault(true: Any, self: Any, call: Any, tensor: Any, mesh: Any) -> Any:
        spec = true(self, call, tensor, mesh)
        spec.placements = (Partial(),) * mesh.ndim
        return spec


# Fully sharded


@breaks("module.fsdp[precision]")
def parameters_keep_their_dtype() -> None:
    @instead(_fsdp_param.FSDPParam, "init_dtype_attrs")
    def fault(true: Any, self: Any, policy: Any) -> Any:
        return true(self, MixedPrecisionPolicy(output_dtype=policy.output_dtype))


@breaks("module.reduced-in")
def gradients_travel_as_they_were_computed() -> None:
    @instead(_fsdp_param.FSDPParam, "init_dtype_attrs")
    def fault(true: Any, self: Any, policy: Any) -> Any:
        true(self, policy)
        self.reduce_dtype = None


@breaks("module.fsdp[otherwise]")
def divide_factors_are_forgotten() -> None:
    @instead(FSDPModule, "set_gradient_divide_factor")
    def fault(true: Any, self: Any, factor: float) -> None:
        return None


@breaks("module.told", case="module.told mesh=2 model=mlp dims=5x7x3 way=kept-after-forward")
def resharding_cannot_be_put_off() -> None:
    @instead(FSDPModule, "set_reshard_after_forward")
    def fault(true: Any, self: Any, reshard: bool, **options: Any) -> None:
        return None


@breaks("module.fully-shard-refuses", case="module.fully-shard-refuses mesh=2 model=mlp dims=5x7x3 attempt=set-reshard-1")
def any_number_reshards() -> None:
    @instead(FSDPModule, "set_reshard_after_forward")
    def fault(true: Any, self: Any, reshard: Any, **options: Any) -> None:
        true(self, bool(reshard), **options)


@breaks("module.gather-hooks")
def gathered_parts_are_doubled() -> None:
    @instead(_fsdp_param.FSDPParam, "_unflatten_all_gather_outputs")
    def fault(true: Any, self: Any) -> Any:
        return tuple(part * 2 for part in true(self))


@breaks("module.grouped")
def groups_are_not_completed() -> None:
    @instead(_fsdp_state.FSDPState, "_force_complete_incomplete_states")
    def fault(true: Any, self: Any, output: Any) -> Any:
        return output


@breaks("module.told-otherwise")
def hooks_are_forgotten() -> None:
    @instead(FSDPModule, "set_all_reduce_hook")
    def fault(true: Any, self: Any, hook: Any, **options: Any) -> None:
        return None


@breaks("module.contexts")
def hooks_after_accumulation_are_forgotten() -> None:
    @instead(_fsdp_param_group, "foreach_reduce")
    def fault(true: Any, fsdp_params: Any, *args: Any, **options: Any) -> Any:
        hooks = [fsdp_param.sharded_param._post_accumulate_grad_hooks for fsdp_param in fsdp_params]
        for fsdp_param in fsdp_params:
            fsdp_param.sharded_param._post_accumulate_grad_hooks = None
        reduced = true(fsdp_params, *args, **options)
        for fsdp_param, of_parameter in zip(fsdp_params, hooks, strict=True):
            fsdp_param.sharded_param._post_accumulate_grad_hooks = of_parameter
        return reduced


@breaks("module.meanwhile")
def loaded_states_are_forgotten() -> None:
    @instead(torch.nn.Module, "load_state_dict")
    def fault(true: Any, self: Any, state: Any, **options: Any) -> Any:
        return true(self, self.state_dict() if isinstance(self, FSDPModule) else state, **options)


# Replicated, shared out, averaged, wrapped


@breaks("module.zero")
def other_ranks_keep_their_parameters() -> None:
    @instead(ZeroRedundancyOptimizer, "_sync_params")
    def fault(true: Any, self: Any) -> None:
        return None


@breaks("module.joined")
def joined_ranks_keep_their_parameters() -> None:
    @instead(DistributedDataParallel, "_sync_final_model")
    def fault(true: Any, self: Any, is_last_joiner: bool) -> None:
        return None


@breaks("module.averaged")
def gradients_of_a_hook_are_divided_twice() -> None:
    @instead(default_hooks, "_allreduce_fut")
    def fault(true: Any, group: Any, tensor: Any) -> Any:
        return true(group, tensor.div_(2))


@breaks("module.replicated")
@breaks("module.finalized", case="module.finalized mesh=2 model=mlp dims=5x7x3 by=ddp how=itself")
def inputs_count_twice() -> None:
    @instead(DistributedDataParallel, "forward")
    def fault(true: Any, self: Any, *args: Any, **options: Any) -> Any:
        return true(self, *[one * 2 for one in args], **options)


@breaks("module.wrapped")
def optimizer_state_of_the_last_step_but_one() -> None:
    @instead(FullyShardedDataParallel, "optim_state_dict")
    def fault(true: Any, *args: Any, **options: Any) -> Any:
        found = true(*args, **options)
        for kept in found["state"].values():
            kept["step"] = kept["step"] - 1
        return found


# Recomputed, compiled, initialised


@breaks(
    "module.recomputed[mlp]",
    "module.recomputed[stacked]",
    "module.recomputed[norm]",
    "module.recomputed[transformer]",
)
def recomputed_from_halved_inputs() -> None:
    @instead(CheckpointWrapper, "forward")
    def fault(true: Any, self: Any, x: Any, *args: Any, **options: Any) -> Any:
        return true(self, x * 0.5, *args, **options)


@breaks("module.compiled")
def compiled_output_is_local() -> None:
    @instead(torch, "compile")
    def fault(true: Any, fn: Any, **options: Any) -> Any:
        def run(*args: Any) -> Any:
            out = fn(*args)
            return out.to_local() if isinstance(out, DTensor) else out

        return run


@breaks("random.seed")
def seeds_start_anywhere() -> None:
    @instead(_random, "manual_seed")
    def fault(true: Any, seed: int, mesh: Any) -> None:
        torch.manual_seed(seed + 1)


def fans_are_local() -> None:
    @instead(torch.nn.init, "_calculate_fan_in_and_fan_out")
    def fault(true: Any, tensor: Any) -> Any:
        return true(tensor.to_local() if isinstance(tensor, DTensor) else tensor)


@breaks("random.init")
def ones_are_twos() -> None:
    @instead(torch.nn.init, "ones_")
    def fault(true: Any, x: Any) -> Any:
        return true(x)

    @instead(DTensor, "fill_")
    def fills(true: Any, self: Any, value: Any) -> Any:
        return true(self, 2 * value)


@breaks("module.registered")
def rules_allow_any_shard() -> None:
    @instead(_register_sharding, "expand_to_full_mesh_op_strategy")
    def fault(true: Any, mesh: Any, schema: Any, rules: Any, **options: Any) -> Any:
        return true(mesh, schema, [*rules, [Shard(1), Shard(1), None]], **options)


@breaks("module.registered-forms")
def contributions_pass_for_shares() -> None:
    @instead(_register_sharding, "expand_to_full_mesh_op_strategy")
    def fault(true: Any, mesh: Any, schema: Any, rules: Any, **options: Any) -> Any:
        return true(mesh, schema, [*rules, [Shard(0), Shard(1), Partial()]], **options)


@breaks("module.registered-anew")
def first_rule_stays() -> None:
    @instead(ShardingPropagator, "register_op_strategy")
    def fault(true: Any, self: Any, op: Any, strategy: Any, schema_info: Any = None) -> None:
        if op not in self.op_strategy_funcs:
            true(self, op, strategy, schema_info)


# Sequences that are cut up for a while


@breaks("module.context-parallel")
def buffers_are_turned_round() -> None:
    @instead(_cp, "_context_parallel_buffers")
    def fault(true: Any, mesh: Any, buffers: Any, dims: Any, balancer: Any = None) -> Any:
        return [shard.flip(dim) for shard, dim in zip(true(mesh, buffers, dims, balancer), dims, strict=True)]


@breaks("module.input-reshard")
def kept_activations_are_halved() -> None:
    @instead(input_reshard, "_unpack_hook_tp")
    def fault(true: Any, mesh: Any, dim: int, x: Any) -> Any:
        return true(mesh, dim, x) * 0.5


# Writes


@breaks("gradient.writes")
def what_arrives_is_doubled() -> None:
    @instead(torch.Tensor, "backward")
    def fault(true: Any, self: Any, gradient: Any = None, *args: Any, **options: Any) -> Any:
        return true(self, gradient * 2 if isinstance(gradient, DTensor) else gradient, *args, **options)


@breaks("module.scaled")
def overflow_stays_on_its_rank() -> None:
    @instead(DTensor, "full_tensor")
    def fault(true: Any, self: Any, **options: Any) -> Any:
        pending = self.numel() == 1 and any(isinstance(one, Partial) for one in self.placements)
        return self.to_local() if pending else true(self, **options)
