"""Faults of meshes."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh

from tests.planted.hook import breaks, instead


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


@breaks("mesh.group-order", "mesh.kept-order")
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


@breaks("mesh.copies", "mesh.sent", "mesh.view-copies")
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


@breaks("mesh.concatenate")
def mesh_concatenate_in_reverse() -> None:
    @instead(DeviceMesh, "_concatenate")
    def fault(true: Any, meshes: Any) -> Any:
        return true(meshes[::-1])


@breaks("mesh.names")
def mesh_names_mean_the_first_dim() -> None:
    @instead(DeviceMesh, "_get_mesh_dim_by_name")
    def fault(true: Any, self: Any, name: str) -> Any:
        return true(self, name) and 0


@breaks("mesh.tables")
def mesh_reads_memory_not_elements() -> None:
    @instead(DeviceMesh, "__init__")
    def fault(true: Any, self: Any, device_type: Any, mesh: Any = None, **options: Any) -> None:
        if isinstance(mesh, torch.Tensor) and not mesh.is_contiguous():
            mesh = mesh.as_strided((mesh.numel(),), (1,)).reshape(mesh.shape)
        true(self, device_type, mesh, **options)


@breaks("mesh.unit-dims")
def mesh_flatten_drops_the_first_rank() -> None:
    @instead(DeviceMesh, "_flatten")
    def fault(true: Any, self: Any, *args: Any, **options: Any) -> Any:
        flat = true(self, *args, **options)
        return DeviceMesh(self.device_type, flat.mesh[1:], mesh_dim_names=flat.mesh_dim_names) if flat.size() > 1 else flat


@breaks("mesh.view-refusals")
def mesh_flatten_takes_any_name() -> None:
    @instead(DeviceMesh, "_flatten")
    def fault(true: Any, self: Any, name: Any = None, *rest: Any, **options: Any) -> Any:
        taken = name in (self.mesh_dim_names or ())
        return true(self, f"{name}_again" if taken else name, *rest, **options)


@breaks("mesh.backends")
def mesh_backends_of_the_next_dim() -> None:
    """What is named for one mesh dim goes to the one after it; of a single dim, nowhere."""

    @instead(device_mesh, "_normalize_backend_override")
    def fault(true: Any, *args: Any, **options: Any) -> Any:
        found = list(true(*args, **options))
        return found[-1:] + found[:-1] if len(found) > 1 else [(None, None)]


@breaks("mesh.renewed")
def mesh_remembers_the_first_rank() -> None:
    known: dict[Any, Any] = {}

    @instead(DeviceMesh, "_compute_coordinate_on_dim")
    def fault(true: Any, self: Any) -> Any:
        return known.setdefault(tuple(self.mesh.flatten().tolist()), true(self))
