"""Faults of meshes, layouts, redistributions and their gradients, planted one at a time: each law of these chapters meets its own."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.distributed import device_mesh
from torch.distributed.checkpoint import planner_helpers
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, _api, _redistribute, _utils
from torch.distributed.tensor.placement_types import _StridedShard

from tests.planted.hook import breaks, instead

# Meshes


@breaks("mesh.coordinates")
def mesh_coordinate_reversed() -> None:
    @instead(DeviceMesh, "get_coordinate")
    def fault(true: Any, self: Any) -> Any:
        coord = true(self)
        return coord if coord is None else coord[::-1]


@breaks("mesh.local-rank")
def mesh_local_rank_of_first_dim() -> None:
    @instead(DeviceMesh, "get_local_rank")
    def fault(true: Any, self: Any, mesh_dim: Any = None) -> Any:
        return true(self, mesh_dim if mesh_dim is None else 0)


@breaks("mesh.groups")
def mesh_groups_reversed() -> None:
    @instead(DeviceMesh, "get_group")
    def fault(true: Any, self: Any, mesh_dim: Any = None) -> Any:
        return true(self, self.ndim - 1 - mesh_dim if isinstance(mesh_dim, int) else mesh_dim)


@breaks("mesh.group-order")
def mesh_groups_descending() -> None:
    @instead(dist, "get_process_group_ranks")
    def fault(true: Any, group: Any) -> Any:
        return true(group)[::-1]


@breaks("mesh.equality")
def mesh_equal_by_shape() -> None:
    DeviceMesh.__eq__ = lambda self, other: isinstance(other, DeviceMesh) and self.shape == other.shape  # type: ignore[method-assign]
    DeviceMesh.__hash__ = lambda self: hash(self.shape)  # type: ignore[method-assign]


@breaks("mesh.slice-compose")
def mesh_hash_by_identity() -> None:
    DeviceMesh.__hash__ = object.__hash__  # type: ignore[method-assign]


@breaks("mesh.copies", "mesh.view-copies")
def mesh_pickle_reverses_ranks() -> None:
    @instead(DeviceMesh, "__getstate__")
    def fault(true: Any, self: Any) -> Any:
        return {**true(self), "_rank_map": self._rank_map.flip(0)}


@breaks("mesh.init", "mesh.init-backend")
def mesh_init_column_by_column() -> None:
    def columns(*sizes_and_strides: Any) -> Any:
        sizes, strides = sizes_and_strides[0], []
        for at in range(len(sizes)):
            strides.append(torch.Size(sizes[:at]).numel())
        return true(sizes, sizes_and_strides[1] if len(sizes_and_strides) > 1 else tuple(strides))

    true = device_mesh._MeshLayout.from_sizes_strides
    device_mesh._MeshLayout.from_sizes_strides = columns


@breaks("mesh.refusals")
def mesh_accepts_repeated_names() -> None:
    def forgiving(device_type, mesh_shape, *, mesh_dim_names=None, backend_override=None):  # type: ignore[no-untyped-def]
        table = torch.arange(torch.Size(mesh_shape).numel()).reshape(mesh_shape)
        return DeviceMesh(device_type, table, mesh_dim_names=mesh_dim_names)

    # whoever imported the function by its name meets the fault too
    device_mesh.init_device_mesh.__code__ = forgiving.__code__


@breaks("mesh.slice", "redistribute.on-view")
def mesh_slice_takes_leading_groups() -> None:
    @instead(DeviceMesh, "_create_sub_mesh")
    def fault(true: Any, self: Any, layout: Any, names: Any) -> Any:
        part = true(self, layout, names)
        part._dim_group_names = self._dim_group_names[: len(names)]
        return part


@breaks("mesh.slice-refusals", "mesh.overlap-refusals")
def mesh_slice_forgives_names() -> None:
    @instead(DeviceMesh, "__getitem__")
    def fault(true: Any, self: Any, names: Any) -> Any:
        names = (names,) if isinstance(names, str) else names
        known = tuple(dict.fromkeys(name for name in names if name in (self.mesh_dim_names or ())))
        return true(self, known or self.mesh_dim_names[:1])


@breaks("mesh.flatten")
def mesh_flatten_by_columns() -> None:
    kept: dict[Any, Any] = {}

    @instead(DeviceMesh, "_flatten")
    def fault(true: Any, self: Any, name: Any = None, backend_override: Any = None) -> Any:
        if id(self) not in kept:
            ranks = self.mesh.permute(tuple(reversed(range(self.ndim)))).flatten()
            kept[id(self)] = DeviceMesh(self.device_type, ranks, mesh_dim_names=(name,))
        return kept[id(self)]


@breaks("mesh.unflatten", "mesh.unflatten-one")
def mesh_unflatten_reverses_names() -> None:
    @instead(DeviceMesh, "_unflatten")
    def fault(true: Any, self: Any, dim: Any, sizes: Any, names: Any, *rest: Any) -> Any:
        return true(self, dim, sizes, names[::-1], *rest)


@breaks("mesh.from-group")
def mesh_from_group_ignores_table() -> None:
    @instead(DeviceMesh, "from_group")
    def fault(true: Any, group: Any, device_type: Any, mesh: Any = None, **options: Any) -> Any:
        return true(group, device_type, mesh if isinstance(group, list) else None, **options)


@breaks("mesh.from-groups")
def mesh_from_groups_reversed() -> None:
    @instead(DeviceMesh, "from_group")
    def fault(true: Any, group: Any, *args: Any, **options: Any) -> Any:
        return true(group[::-1] if isinstance(group, list) else group, *args, **options)


# Layouts


@breaks("layout.distribute")
def shard_tensor_floor() -> None:
    @instead(Shard, "_custom_chunk")
    def fault(true: Any, tensor: Any, num_chunks: int, dim: int) -> Any:
        run, rest = divmod(tensor.shape[dim], num_chunks)
        return list(tensor.split([run] * (num_chunks - 1) + [run + rest], dim))


@breaks("layout.scatter")
def scatter_skips_unpadding() -> None:
    @instead(Shard, "_maybe_unpad_tensor_with_sizes")
    def fault(true: Any, dim: int, local: Any, *rest: Any) -> Any:
        return local


@breaks("layout.source")
def broadcast_from_first() -> None:
    @instead(Replicate, "_make_replicate_tensor")
    def fault(true: Any, tensor: Any, mesh: Any, mesh_dim: int, src_data_rank: Any = 0) -> Any:
        return true(tensor, mesh, mesh_dim, 0 if src_data_rank else src_data_rank)


@breaks("layout.input-kept")
def scatter_zeroes_input() -> None:
    @instead(Shard, "_shard_tensor")
    def fault(true: Any, self: Any, tensor: Any, *args: Any, **options: Any) -> Any:
        local = true(self, tensor, *args, **options).clone()
        tensor.zero_()
        return local


@breaks("layout.offsets")
def nested_offset_is_local() -> None:
    @instead(_utils, "_get_shard_size_and_offsets")
    def fault(true: Any, *args: Any) -> Any:
        return true(*args[:4], None, *args[5:])


@breaks("layout.chunks")
def chunk_of_whole_tensor() -> None:
    @instead(planner_helpers, "_create_chunk_from_dtensor")
    def fault(true: Any, tensor: Any) -> Any:
        return dataclasses.replace(true(tensor), sizes=tensor.shape, offsets=torch.Size([0] * tensor.ndim))


@breaks("layout.full")
def gather_along_first_dim() -> None:
    @instead(funcol, "all_gather_single")
    def fault(true: Any, tensor: Any, gather_dim: int, group: Any, tag: str = "") -> Any:
        return true(tensor, 0, group, tag)


@breaks("layout.negative-dims")
def negative_dims_count_from_one() -> None:
    def moved(placements: Any) -> Any:
        return [Shard(min(p.dim + 1, 0)) if isinstance(p, Shard) and p.dim < 0 else p for p in placements]

    @instead(DTensor, "from_local")
    def of_locals(true: Any, local: Any, mesh: Any = None, placements: Any = None, **options: Any) -> Any:
        return true(local, mesh, placements and moved(placements), **options)

    @instead(DTensor, "redistribute")
    def redistributed(true: Any, self: Any, mesh: Any = None, placements: Any = None, **options: Any) -> Any:
        return true(self, mesh, placements and moved(placements), **options)


@breaks("layout.from-local")
def from_local_copies() -> None:
    @instead(DTensor, "from_local")
    def fault(true: Any, local: Any, *args: Any, **options: Any) -> Any:
        return true(local.clone(), *args, **options)


@breaks("layout.infer")
def infer_ignores_second_mesh_dim() -> None:
    @instead(_api, "compute_global_tensor_info")
    def fault(true: Any, tensor: Any, mesh: Any, placements: Any) -> Any:
        return true(tensor, mesh, (*placements[:1], *[Replicate()] * (len(placements) - 1)))


@breaks("layout.run-check")
def run_check_broadcasts_along_first_dim() -> None:
    @instead(_api, "mesh_broadcast")
    def fault(true: Any, tensor: Any, mesh: Any, mesh_dim: int = 0, **options: Any) -> Any:
        return true(tensor, mesh, mesh_dim=0, **options)


@breaks("layout.factory", "layout.factory-kinds")
def factory_ignores_second_mesh_dim() -> None:
    @instead(_api, "compute_local_shape_and_global_offset")
    def fault(true: Any, shape: Any, mesh: Any, placements: Any, **options: Any) -> Any:
        return true(shape, mesh, placements[:1], **options)


@breaks("layout.refusals", "redistribute.mixed-refusals")
def mixed_partials_accepted() -> None:
    @instead(_api, "assert_no_mixed_partial_types")
    def fault(true: Any, placements: Any) -> None:
        return None


@breaks("layout.context")
def context_shards_by_default() -> None:
    @instead(DTensor, "from_local")
    def fault(true: Any, local: Any, mesh: Any = None, placements: Any = None, **options: Any) -> Any:
        return true(local, mesh, placements or [Shard(0)], **options)


@breaks("layout.placement-equality")
def strided_equality_ignores_factor() -> None:
    _StridedShard.__eq__ = lambda self, other: isinstance(other, _StridedShard) and self.dim == other.dim  # type: ignore[method-assign]
    _StridedShard.__hash__ = lambda self: hash(self.dim)  # type: ignore[method-assign]


@breaks("layout.partition", "redistribute.linear")
def partition_keeps_whole_value() -> None:
    @instead(Partial, "_partition_value")
    def fault(true: Any, self: Any, tensor: Any, mesh: Any, mesh_dim: int) -> Any:
        return tensor


# Redistribution


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


# Gradients


@breaks(
    "gradient.redistribute",
    "gradient.adjoint",
    "gradient.graph",
    "gradient.parameter",
    "module.backward[mlp]",
    "module.backward[stacked]",
    "module.backward[norm]",
    "module.backward[tied]",
    "module.backward[attention]",
    "module.backward[transformer]",
    "module.step",
    "module.compiled-model",
)
def backward_counts_twice() -> None:
    @instead(_redistribute, "_redistribute_backward")
    def fault(true: Any, grad_output: Any, previous_spec: Any, **options: Any) -> Any:
        local, spec = true(grad_output, previous_spec, **options)
        return local + local, spec


@breaks("gradient.full-tensor", "gradient.to-local")
def grad_placements_ignored() -> None:
    @instead(_api._ToTorchTensor, "forward")
    def fault(true: Any, ctx: Any, tensor: Any, grad_placements: Any) -> Any:
        return true(ctx, tensor, None)


@breaks("gradient.accumulate")
def backward_overwrites() -> None:
    seen: set[int] = set()

    @instead(_redistribute, "_redistribute_backward")
    def fault(true: Any, grad_output: Any, previous_spec: Any, **options: Any) -> Any:
        local, spec = true(grad_output, previous_spec, **options)
        first = id(previous_spec) not in seen
        seen.add(id(previous_spec))
        return (local if first else torch.zeros_like(local)), spec


@breaks("gradient.second")
def second_backward_is_zero() -> None:
    @instead(_redistribute.NestedRedistribute, "backward")
    def fault(true: Any, ctx: Any, grad: Any) -> Any:
        return tuple(out if out is None else out * 0 for out in true(ctx, grad))
