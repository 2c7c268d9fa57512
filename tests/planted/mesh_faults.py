"""Faults of meshes beyond those of :mod:`tests.planted.placement_faults`."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh

from tests.planted.hook import breaks, instead


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
