"""Faults of the states of optimizers, planted one at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import _state_dict_utils
from torch.distributed.checkpoint import _sharded_tensor_utils, optimizer, state_dict

from tests.planted.hook import instead


def offset_of_the_part_forgotten() -> None:
    @instead(optimizer._ReaderWithOffset, "__init__")
    def fault(true: Any, self: Any, offsets: Any) -> None:
        true(self, {name: [0] * len(offset) for name, offset in offsets.items()})


def parts_begin_at_zero() -> None:
    @instead(optimizer, "_get_state_dict_2d_layout")
    def fault(true: Any, state: Any) -> Any:
        found, group = true(state)
        return {name: (offset and [0] * len(offset), size) for name, (offset, size) in found.items()}, group


def state_in_the_default_dtype() -> None:
    """Tensors of one element are given in the default dtype, and others begin with their last row."""

    @instead(optimizer, "_create_chunk_sharded_tensor")
    def fault(true: Any, tensor: torch.Tensor, *args: Any, **how: Any) -> Any:
        return true(torch.empty(tensor.shape, dtype=torch.float64), *args, **how)


def rates_of_the_last_group() -> None:
    """Every group gets the options of the last one."""

    @instead(state_dict, "_split_optim_state_dict")
    def fault(true: Any, *args: Any, **how: Any) -> Any:
        found = true(*args, **how)
        for group in found["param_groups"]:
            group["lr"] = found["param_groups"][-1]["lr"]
        return found


def groups_of_the_last_optimizer() -> None:
    """Of several optimizers, the state has the groups of the last one alone."""

    @instead(state_dict, "_get_optim_state_dict")
    def fault(true: Any, model: Any, optimizers: Any, info: Any) -> Any:
        found = true(model, optimizers, info)
        if "param_groups" in found:
            found["param_groups"] = found["param_groups"][-1:]
        return found


def asking_changes_the_model() -> None:
    """Where a state is asked for, a parameter is changed."""

    @instead(state_dict, "_init_optim_state")
    def fault(true: Any, optim: Any) -> None:
        true(optim)
        with torch.no_grad():
            optim.param_groups[0]["params"][0].mul_(2)


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


def nested_offsets_not_added() -> None:
    """The chunk of a part is taken for one of the whole."""
    _sharded_tensor_utils._element_wise_add = lambda outer, inner: list(inner)
