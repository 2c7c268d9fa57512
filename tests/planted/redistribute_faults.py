"""Faults of redistributions and pending reductions."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, _redistribute, _utils
from torch.distributed.tensor import placement_types as types

from tests.planted.hook import breaks, instead


@breaks("redistribute.local")
def new_shard_dim_keeps_padding() -> None:
    @instead(Shard, "_unpad_for_new_shard_dim")
    def fault(true: Any, logical: Any, local: Any, *rest: Any) -> Any:
        return local


@breaks("redistribute.path", "gradient.leaf")
def replicate_to_shard_takes_first() -> None:
    @instead(Shard, "_replicate_to_shard")
    def fault(true: Any, *args: Any) -> Any:
        return true(*args[:-1], 0)


@breaks("redistribute.back")
def gather_in_reverse() -> None:
    @instead(funcol, "all_gather_single")
    def fault(true: Any, tensor: Any, gather_dim: int, group: Any, tag: str = "") -> Any:
        whole = funcol.wait_tensor(true(tensor, gather_dim, group, tag))
        size = tensor.shape[gather_dim]
        return torch.cat(whole.split(size, gather_dim)[::-1], gather_dim) if size else whole


@breaks("redistribute.same")
def same_placements_communicate() -> None:
    @instead(DTensor, "redistribute")
    def fault(true: Any, self: Any, mesh: Any = None, placements: Any = None, **options: Any) -> Any:
        if tuple(placements or ()) == self.placements and self.device_mesh.get_coordinate() is not None:
            funcol.wait_tensor(funcol.all_reduce(torch.zeros(1), "max", (self.device_mesh, 0)))
        return true(self, mesh, placements, **options)


@breaks("redistribute.full", "module.by-hand")
def full_tensor_of_first_mesh_dim() -> None:
    @instead(DTensor, "full_tensor")
    def fault(true: Any, self: Any, **options: Any) -> Any:
        return self.redistribute(placements=[Replicate(), *self.placements[1:]]).to_local()


@breaks("redistribute.async")
def async_returns_source() -> None:
    @instead(_redistribute, "redistribute_local_tensor")
    def fault(true: Any, local: Any, *args: Any, async_op: bool = False, **options: Any) -> Any:
        return local if async_op else true(local, *args, **options)


@breaks("redistribute.quiet")
def chunking_communicates() -> None:
    @instead(Shard, "_replicate_to_shard")
    def fault(true: Any, self: Any, local: Any, mesh: Any, mesh_dim: int, *rest: Any) -> Any:
        funcol.wait_tensor(funcol.all_reduce(local, "max", (mesh, mesh_dim)))
        return true(self, local, mesh, mesh_dim, *rest)


@breaks("redistribute.budget")
def reduce_scatter_reduces_twice() -> None:
    @instead(Partial, "_reduce_shard_value")
    def fault(true: Any, self: Any, tensor: Any, mesh: Any, mesh_dim: int, *rest: Any) -> Any:
        funcol.wait_tensor(self._reduce_value(tensor, mesh, mesh_dim))
        return true(self, tensor, mesh, mesh_dim, *rest)


@breaks("redistribute.refusals")
def accepts_new_partial() -> None:
    @instead(DTensor, "redistribute")
    def fault(true: Any, self: Any, mesh: Any = None, placements: Any = None, **options: Any) -> Any:
        kept = placements and [Replicate() if p.is_partial() else p for p in placements]
        return true(self, mesh, kept, **options)


@breaks("redistribute.reduce")
def all_reduce_sums() -> None:
    @instead(Partial, "_reduce_value")
    def fault(true: Any, self: Any, *args: Any) -> Any:
        return true(Partial("sum"), *args)


@breaks("redistribute.reduce-scatter")
def reduce_scatter_sums() -> None:
    @instead(Partial, "_reduce_shard_value")
    def fault(true: Any, self: Any, *args: Any) -> Any:
        return true(Partial("sum"), *args)


@breaks("redistribute.keep-partial")
def gather_reduces_too() -> None:
    @instead(DTensor, "redistribute")
    def fault(true: Any, self: Any, mesh: Any = None, placements: Any = None, **options: Any) -> Any:
        if placements is None or not any(p.is_partial() for p in placements):
            return true(self, mesh, placements, **options)
        whole = true(self, mesh, [Replicate() if p.is_partial() else p for p in placements], **options)
        return DTensor.from_local(whole.to_local(), self.device_mesh, placements, shape=self.shape, stride=self.stride())


@breaks("redistribute.merged")
def merged_average_is_sum() -> None:
    @instead(_redistribute, "_optimize_transform_infos")
    def fault(true: Any, *args: Any) -> Any:
        infos = true(*args)
        return [dataclasses.replace(info, avg_scale=None) if getattr(info, "avg_scale", None) else info for info in infos]


@breaks("redistribute.merged-counts")
def flattened_mesh_is_not_found() -> None:
    @instead(_redistribute, "_get_flattened_mesh_by_layout")
    def fault(true: Any, *args: Any) -> Any:
        return None


@breaks("redistribute.bystander")
def flattening_drops_a_step() -> None:
    @instead(_redistribute, "_optimize_transform_infos")
    def fault(true: Any, infos: Any, mesh: Any, *rest: Any) -> Any:
        return true(infos[:-1] if mesh._get_root_mesh()._flatten_mapping else infos, mesh, *rest)


@breaks("redistribute.planner")
def graph_planner_drops_a_step() -> None:
    @instead(_redistribute.DTensorRedistributePlanner, "generate_graph_based_transform_infos")
    def fault(true: Any, *args: Any) -> Any:
        return true(*args)[:-1]


@breaks("redistribute.forward-dtype")
def forward_dtype_is_ignored() -> None:
    @instead(DTensor, "redistribute")
    def fault(true: Any, self: Any, *args: Any, forward_dtype: Any = None, **options: Any) -> Any:
        return true(self, *args, **options)


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
