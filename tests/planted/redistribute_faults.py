"""Faults of redistributions and pending reductions beyond those of :mod:`tests.planted.placement_faults`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, _redistribute, _utils
from torch.distributed.tensor import placement_types as types

from tests.planted.hook import breaks, instead


@breaks("redistribute.pairs")
def shard_to_shard_swaps_dims() -> None:
    @instead(Shard, "_to_new_shard_dim")
    def fault(true: Any, self: Any, *args: Any) -> Any:
        return true(self, *args).flip(self.dim)


@breaks("redistribute.idempotent")
def settled_placements_communicate() -> None:
    settled: set[int] = set()
    kept: list[Any] = []

    @instead(DTensor, "redistribute")
    def fault(true: Any, self: Any, mesh: Any = None, placements: Any = None, **options: Any) -> Any:
        if id(self) in settled and self.device_mesh.get_coordinate() is not None:
            funcol.wait_tensor(funcol.all_reduce(torch.zeros(1), "max", (self.device_mesh, 0)))
        made = true(self, mesh, placements, **options)
        settled.add(id(made))
        kept.append(made)
        return made


@breaks("redistribute.sequences")
def placements_are_read_once_too_often() -> None:
    @instead(DTensor, "redistribute")
    def fault(true: Any, self: Any, mesh: Any = None, placements: Any = None, **options: Any) -> Any:
        tuple(placements or ())
        return true(self, mesh, placements, **options)


@breaks("redistribute.counts")
def gathers_twice() -> None:
    @instead(Shard, "_to_replicate_tensor")
    def fault(true: Any, *args: Any) -> Any:
        true(*args)
        return true(*args)


@breaks("redistribute.linear-kept")
def scaling_reduces_first() -> None:
    def scaled(self: Any, other: Any) -> Any:
        return torch.mul(self.redistribute(placements=[Replicate()] * self.device_mesh.ndim), other)

    DTensor.__mul__ = scaled  # type: ignore[method-assign]


@breaks("redistribute.nonlinear")
def relu_of_each_contribution() -> None:
    DTensor.relu = lambda self: _of_locals(self, self.to_local().relu())  # type: ignore[method-assign]
    DTensor.__mul__ = lambda self, other: _of_locals(self, self.to_local() * _local(other))  # type: ignore[method-assign]


@breaks("redistribute.extreme")
def negated_maximum_stays_maximum() -> None:
    DTensor.__neg__ = lambda self: _of_locals(self, -self.to_local())  # type: ignore[method-assign]


def _local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def _of_locals(like: DTensor, local: torch.Tensor) -> DTensor:
    return DTensor.from_local(local, like.device_mesh, like.placements, shape=like.shape, stride=like.stride())


@breaks("redistribute.masked")
def mask_is_not_applied() -> None:
    @instead(types.MaskBuffer, "apply_mask")
    def fault(true: Any, self: Any, tensor: Any) -> None:
        return None


@breaks("redistribute.dtypes")
def half_arrives_halved() -> None:
    def halved(true: Any, self: Any, local: Any, *args: Any) -> Any:
        got = true(self, local, *args)
        return got * 0.5 if local.dtype == torch.float16 else got

    instead(Partial, "_reduce_value")(halved)
    instead(Shard, "_to_replicate_tensor")(halved)


@breaks("redistribute.replicas")
def reduction_rounds_by_rank() -> None:
    @instead(Partial, "_reduce_value")
    def fault(true: Any, *args: Any) -> Any:
        total = funcol.wait_tensor(true(*args))
        return torch.nextafter(total, total + 1) if dist.get_rank() == 1 else total


@breaks("redistribute.dtype-closure")
def integers_are_averaged() -> None:
    @instead(Partial, "_reduce_value")
    def fault(true: Any, self: Any, tensor: Any, mesh: Any, mesh_dim: int) -> Any:
        if self.reduce_op != "avg" or tensor.dtype.is_floating_point:
            return true(self, tensor, mesh, mesh_dim)
        return true(Partial("sum"), tensor, mesh, mesh_dim) // mesh.size(mesh_dim)


@breaks("redistribute.after")
def plans_are_remembered_by_placements() -> None:
    known: dict[Any, Any] = {}

    @instead(_redistribute, "_gen_transform_infos")
    def fault(true: Any, source: Any, to: Any, *rest: Any) -> Any:
        return known.setdefault((source.placements, to.placements, source.device_mesh), true(source, to, *rest))


@breaks("redistribute.explicit")
def redistributions_are_never_observed() -> None:
    @instead(_utils.ExplicitRedistributionContext, "observe_redistribution")
    def fault(true: Any, *args: Any) -> None:
        return None


@breaks("redistribute.apart")
def shards_are_views() -> None:
    @instead(Shard, "_replicate_to_shard")
    def fault(true: Any, self: Any, local: Any, mesh: Any, mesh_dim: int, index: int) -> Any:
        return local.tensor_split(mesh.size(mesh_dim), self.dim)[index]
