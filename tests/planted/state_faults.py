"""Faults of the states of models and optimizers in checkpoints, planted one at a time in the rank processes."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch.distributed import _state_dict_utils
from torch.distributed.checkpoint import default_planner, state_dict, state_dict_saver

from tests.planted.hook import breaks, instead


@breaks("optimizer.whole-model", "optimizer.whole", "roundtrip.model-whole")
def first_slice_for_all() -> None:
    """What comes from rank 0 is cut at the beginning on every rank."""
    true = _state_dict_utils.compute_local_shape_and_global_offset

    def fault(*args: Any) -> Any:
        shape, offset = true(*args)
        return shape, (0,) * len(offset)

    _state_dict_utils.compute_local_shape_and_global_offset = fault


@breaks("roundtrip.model")
def model_loaded_without_its_inner_part() -> None:
    """Of the state of a model only what has no dot in its name is loaded."""
    true = state_dict._load_model_state_dict

    def fault(model: Any, state: dict[str, Any], info: Any) -> Any:
        held = state_dict._get_model_state_dict(model, info)
        return true(model, {**state, **{name: value for name, value in held.items() if "." in name and name in state}}, info)

    state_dict._load_model_state_dict = fault


@breaks("optimizer.extra")
def extra_states_lose_a_value() -> None:
    """Of a dict that is the extra state of a module, the last value is lost when the state of the model is asked for."""
    true = state_dict._get_model_state_dict

    def fault(model: Any, info: Any) -> Any:
        state = true(model, info)
        for name in [name for name in state if name.endswith("_extra_state")]:
            state[name] = dict([*state[name].items()][:-1])
        return state

    state_dict._get_model_state_dict = fault


@breaks("roundtrip.model-part")
def prefixes_always_kept() -> None:
    """The state of a module inside has the names of the model, whatever was asked for."""
    true = state_dict._get_model_state_dict

    def fault(model: Any, info: Any) -> Any:
        return true(model, dataclasses.replace(info, keep_submodule_prefixes=True))

    state_dict._get_model_state_dict = fault


@breaks("roundtrip.optimizer")
def rates_in_reverse() -> None:
    """An optimizer that is asked for its state before its first step gets the rates of its groups back in reverse."""
    true = state_dict._init_optim_state

    def fault(optimizer: torch.optim.Optimizer) -> None:
        empty = not optimizer.state
        true(optimizer)
        rates = [group["lr"] for group in optimizer.param_groups]
        for group, rate in zip(optimizer.param_groups, rates[::-1] if empty else rates, strict=True):
            group["lr"] = rate

    state_dict._init_optim_state = fault


@breaks("roundtrip.optimizer-whole")
def optimizer_from_rank_zero_cut_at_the_beginning() -> None:
    """What comes from rank 0 is cut at the beginning on every rank."""
    first_slice_for_all()


def parameters_replaced_when_set() -> None:
    """A model has other parameters with the same elements once its state was set: see ``test_states``."""

    @instead(state_dict, "_load_model_state_dict")
    def fault(true: Any, model: torch.nn.Module, *args: Any) -> Any:
        found = true(model, *args)
        for module in model.modules():
            for name, parameter in [*module.named_parameters(recurse=False)]:
                module.register_parameter(name, torch.nn.Parameter(parameter.detach(), parameter.requires_grad))
        return found


def parameters_become_buffers() -> None:
    """A model has buffers in the place of parameters once its state was set: see ``test_states``."""

    @instead(state_dict, "_load_model_state_dict")
    def fault(true: Any, model: torch.nn.Module, *args: Any) -> Any:
        found = true(model, *args)
        for module in model.modules():
            for name, parameter in [*module.named_parameters(recurse=False)]:
                delattr(module, name)
                module.register_buffer(name, parameter.detach())
        return found


def states_set_as_zeros() -> None:
    """Whatever state is set, the model has zeros: see ``test_states``."""

    @instead(state_dict, "_load_model_state_dict")
    def fault(true: Any, model: torch.nn.Module, *args: Any) -> Any:
        found = true(model, *args)
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.zero_()
        return found


def metadata_returned_without_paths() -> None:
    """A save returns metadata that lack the paths of values: see ``test_states``."""

    @instead(state_dict_saver, "_save_state_dict")
    def fault(true: Any, *args: Any, **how: Any) -> Any:
        return dataclasses.replace(true(*args, **how), planner_data=None)


def values_left_as_they_were() -> None:
    """A load leaves values that are no tensors as they were: see ``test_states``."""
    default_planner.DefaultLoadPlanner.load_bytes = lambda *_: None  # type: ignore[method-assign]
