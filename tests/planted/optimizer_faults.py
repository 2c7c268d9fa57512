"""Faults of the states of optimizers, planted one at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import _state_dict_utils
from torch.distributed.checkpoint import _sharded_tensor_utils, optimizer, state_dict
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp import _state_dict_utils as fsdp_state
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from tests.planted.hook import breaks, instead


@breaks("optimizer.offsets", "optimizer.loaded-part")
def offset_of_the_part_forgotten() -> None:
    @instead(optimizer._ReaderWithOffset, "__init__")
    def fault(true: Any, self: Any, offsets: Any) -> None:
        true(self, {name: [0] * len(offset) for name, offset in offsets.items()})


@breaks("optimizer.layout")
def parts_begin_at_zero() -> None:
    @instead(optimizer, "_get_state_dict_2d_layout")
    def fault(true: Any, state: Any) -> Any:
        found, group = true(state)
        return {name: (offset and [0] * len(offset), size) for name, (offset, size) in found.items()}, group


@breaks("optimizer.loaded")
def state_in_the_default_dtype() -> None:
    """Tensors of one element are given in the default dtype, and others begin with their last row."""

    @instead(optimizer, "_create_chunk_sharded_tensor")
    def fault(true: Any, tensor: torch.Tensor, *args: Any, **how: Any) -> Any:
        return true(torch.empty(tensor.shape, dtype=torch.float64), *args, **how)


@breaks("optimizer.recipe")
def averages_of_squares_for_both() -> None:
    @instead(optimizer, "unflatten_state_dict")
    def fault(true: Any, *args: Any) -> Any:
        found = true(*args)
        for kept in found.get("optim", {}).get("state", {}).values():
            kept["exp_avg"] = kept["exp_avg_sq"]
        return found


@breaks("optimizer.sharded-attempts")
def given_planner_is_ignored() -> None:
    @instead(optimizer, "load_state_dict")
    def fault(true: Any, *, planner: Any = None, **asked: Any) -> Any:
        return true(**asked)


@breaks("optimizer.state", "optimizer.pending", "optimizer.resumed")
def rates_of_the_last_group() -> None:
    """Every group gets the options of the last one."""

    @instead(state_dict, "_split_optim_state_dict")
    def fault(true: Any, *args: Any, **how: Any) -> Any:
        found = true(*args, **how)
        for group in found["param_groups"]:
            group["lr"] = found["param_groups"][-1]["lr"]
        return found


@breaks("optimizer.several")
def groups_of_the_last_optimizer() -> None:
    """Of several optimizers, the state has the groups of the last one alone."""

    @instead(state_dict, "_get_optim_state_dict")
    def fault(true: Any, model: Any, optimizers: Any, info: Any) -> Any:
        found = true(model, optimizers, info)
        if "param_groups" in found:
            found["param_groups"] = found["param_groups"][-1:]
        return found


@breaks("optimizer.asked")
def asking_changes_the_model() -> None:
    """Where a state is asked for, a parameter is changed."""

    @instead(state_dict, "_init_optim_state")
    def fault(true: Any, optim: Any) -> None:
        true(optim)
        with torch.no_grad():
            optim.param_groups[0]["params"][0].mul_(2)


@breaks("optimizer.regrouped")
def rates_lost_when_flat() -> None:
    @instead(state_dict, "_unflatten_optim_state_dict")
    def fault(true: Any, *args: Any, **how: Any) -> Any:
        found = true(*args, **how)
        found["param_groups"][0]["lr"] *= 2
        return found


def whole_tensors_in_reverse() -> None:
    """What is handed out by each rank begins with the last row."""

    @instead(_state_dict_utils, "distribute_tensor")
    def fault(true: Any, tensor: torch.Tensor, *args: Any) -> Any:
        return true(tensor.flip(0), *args)


@breaks("optimizer.nested")
def nested_offsets_not_added() -> None:
    """The chunk of a part is taken for one of the whole."""
    _sharded_tensor_utils._element_wise_add = lambda outer, inner: list(inner)


@breaks("optimizer.together")
def optimizer_is_not_set_with_its_model() -> None:
    """Where both states are given, that of the optimizer is left."""

    @instead(state_dict, "_load_optim_state_dict")
    def fault(true: Any, model: Any, optimizers: Any, state: Any, info: Any) -> Any:
        return None if info.handle_model else true(model, optimizers, state, info)


@breaks("optimizer.wrapped")
def prefixes_of_wrappers_stay() -> None:
    """Names keep what a wrapper puts before them."""

    @instead(state_dict, "_get_fqns")
    def fault(true: Any, model: Any, name: str, *args: Any, **how: Any) -> Any:
        return {name} if "module." in name or "_orig_mod." in name else true(model, name, *args, **how)


@breaks("optimizer.tied")
def tied_parameters_are_dropped() -> None:
    """A parameter under two names is in no group of a state that is set."""

    @instead(state_dict, "_split_optim_state_dict")
    def fault(true: Any, model: Any, optim: Any, state: Any, info: Any) -> Any:
        found = true(model, optim, state, info)
        tied = {name for name in info.shared_params_mapping if isinstance(name, str)}
        found["state"] = {name: held for name, held in found["state"].items() if name not in tied}
        return found


@breaks("optimizer.deep")
def inner_dicts_come_back_empty() -> None:
    """Of the state of an optimizer that is set, dicts within lose what is in them."""

    @instead(state_dict, "_unflatten_optim_state_dict")
    def fault(true: Any, *args: Any, **how: Any) -> Any:
        found = true(*args, **how)
        for held in found["state"].values():
            held.update({key: {} for key, value in held.items() if isinstance(value, dict)})
        return found


@breaks("optimizer.lenient")
def what_is_lacking_is_zero() -> None:
    """Parameters that a state lacks are set to zero."""

    @instead(state_dict, "_load_model_state_dict")
    def fault(true: Any, model: Any, state: Any, info: Any) -> Any:
        said = true(model, state, info)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in said.missing_keys:
                    parameter.zero_()
        return said


@breaks("optimizer.blank")
def memory_that_was_not_filled() -> None:
    """What gets memory with a whole state is ones."""
    true = torch.nn.Module.load_state_dict

    def fault(self: Any, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        if assign:
            state_dict = {key: torch.ones_like(held) if torch.is_tensor(held) else held for key, held in state_dict.items()}
        return true(self, state_dict, strict, assign)

    torch.nn.Module.load_state_dict = fault  # type: ignore[method-assign]


@breaks("optimizer.refuses")
def anything_is_taken() -> None:
    """Nothing that is asked of a state is looked at."""

    @instead(state_dict, "_verify_options")
    def fault(true: Any, model: Any, optims: Any, optim_only: bool, *, submodules: Any = None, options: Any = None) -> Any:
        if options is not None and options.broadcast_from_rank0:
            options.full_state_dict = True
        return true(model, optims, optim_only, submodules=submodules, options=options)


@breaks("optimizer.left-alone")
def given_state_is_used_up() -> None:
    """What a model is given is taken out of the state."""

    @instead(state_dict, "_load_model_state_dict")
    def fault(true: Any, model: Any, state: Any, info: Any) -> Any:
        said = true(model, state, info)
        state.popitem()
        return said


@breaks("optimizer.unfrozen")
def frozen_parameters_stay() -> None:
    @instead(state_dict, "_get_model_state_dict")
    def fault(true: Any, model: Any, info: Any) -> Any:
        info.ignore_frozen_params = False
        return true(model, info)


@breaks("optimizer.of-module")
def modules_asked_for_not_looked_at() -> None:
    """The state of a model has all parameters, whichever modules are asked for."""

    @instead(state_dict, "_get_model_state_dict")
    def fault(true: Any, model: Any, info: Any) -> Any:
        info.submodule_prefixes = set()
        return true(model, info)


@breaks("optimizer.fsdp-forms")
def whole_states_not_written_back() -> None:
    """What is loaded as a whole state does not reach the flat parameters."""

    @instead(fsdp_state, "_enter_unshard_params_ctx")
    def fault(true: Any, module: Any, state: Any, writeback: bool = False, **how: Any) -> None:
        true(module, state, writeback=False, **how)


@breaks("optimizer.fsdp-whole", "optimizer.fsdp-compiled")
def averages_of_fsdp_doubled() -> None:
    @instead(FullyShardedDataParallel, "optim_state_dict_to_load")
    def fault(true: Any, model: Any, optimizer: Any, state: Any, **how: Any) -> Any:
        for kept in state["state"].values():
            kept["exp_avg"] = kept["exp_avg"] * 2
        return true(model, optimizer, state, **how)


@breaks("optimizer.left-whole", case="optimizer.left-whole mesh=2 model=mlp dims=5x7x3 since=evaluation call=get-model")
def states_taken_of_whole_parameters() -> None:
    """Parameters are not sharded again before the state of a model is taken."""

    @instead(FSDPParamGroup, "_register_state_dict_hooks")
    def fault(true: Any, self: Any) -> None:
        pass
