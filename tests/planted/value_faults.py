"""Faults of backends that handle most values right: sums that lose NaN, doubles that are reduced as floats, payloads that end at 64 KiB."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from tests.planted.hook import breaks, instead

LARGEST = 1 << 16


def every(change: Callable[[torch.Tensor], Any], **functions: tuple[str, ...]) -> None:
    """Let these functions of torch.distributed, and of its functional collectives, give what ``change`` makes of their result."""
    for name in functions["in_place"]:
        _in_place(name, change)
    for name in functions["functional"]:
        if hasattr(funcol, name):
            _functional(name, change)


def _in_place(name: str, change: Callable[[torch.Tensor], Any]) -> None:
    @instead(dist, name)
    def fault(true: Any, output: Any, *args: Any, **options: Any) -> Any:
        work = true(output, *args, **options)
        for tensor in output if isinstance(output, list) else [output]:
            if isinstance(tensor, torch.Tensor):
                change(tensor)
        return work


def _functional(name: str, change: Callable[[torch.Tensor], Any]) -> None:
    @instead(funcol, name)
    def fault(true: Any, *args: Any, **options: Any) -> Any:
        made = funcol.wait_tensor(true(*args, **options))
        change(made)
        return made


def reductions_lose_nan() -> None:
    reduced = ("all_reduce", "reduce_scatter_single")
    every(lambda tensor: tensor.nan_to_num_(0.0) if tensor.is_floating_point() else tensor, in_place=reduced, functional=reduced)


def doubles_are_reduced_as_floats() -> None:
    def rounded(tensor: torch.Tensor) -> None:
        if tensor.dtype == torch.float64:
            tensor.copy_(tensor.float())

    reduced = ("all_reduce", "reduce_scatter_single")
    every(rounded, in_place=reduced, functional=reduced)


@breaks("collective.large", "redistribute.large")
def payloads_end_at_64_kib() -> None:
    def cut(tensor: torch.Tensor) -> None:
        tensor.view(-1)[LARGEST // tensor.element_size() :].zero_()

    moved = ("all_reduce", "all_gather", "all_gather_single", "reduce_scatter_single", "all_to_all_single", "broadcast")
    every(cut, in_place=moved, functional=("all_reduce", "all_gather_single", "reduce_scatter_single", "all_to_all_single"))


@breaks("collective.bits", "redistribute.bits")
def every_nan_is_the_same() -> None:
    def plain(tensor: torch.Tensor) -> None:
        if tensor.is_floating_point():
            tensor.nan_to_num_(float("nan"))
            tensor[tensor.isnan()] = float("nan")

    every(plain, in_place=("all_gather",), functional=("all_gather_single", "all_to_all_single"))


@breaks("roundtrip.bits")
def every_nan_that_is_loaded_is_the_same() -> None:
    @instead(DefaultLoadPlanner, "commit_tensor")
    def fault(true: Any, self: Any, item: Any, tensor: torch.Tensor) -> None:
        if tensor.is_floating_point():
            tensor[tensor.isnan()] = float("nan")
        true(self, item, tensor)
