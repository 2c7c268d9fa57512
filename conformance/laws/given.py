"""What a case of the mesh, layout, redistribute and gradient chapters names, as tensors and layouts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from conformance.case import Case
from reference import simulate
from reference.layout import Layout
from reference.mesh import Coord, Mesh
from reference.tensors import TensorSpec, lay_out

if TYPE_CHECKING:
    from conformance.here import Here

NAMES = ("a", "b", "c")


# meshes with views made of them, kept as the world keeps plain ones: by table, slice and flattened dims
_VIEWED: dict[tuple[Mesh, str, str], DeviceMesh] = {}


@dataclass(frozen=True)
class Given:
    """A tensor field of a case: its values, its layout, and how its elements lie in memory."""

    spec: TensorSpec
    full: torch.Tensor
    layout: Layout
    seed: int

    @property
    def stride(self) -> tuple[int, ...]:
        """The global stride that a DTensor of it claims."""
        return self.full.stride() if self.spec.memory == "transposed" else self.full.contiguous().stride()

    def local(self, coord: Coord | None) -> torch.Tensor:
        """The local tensor at a coordinate (with unequal contributions where a reduction is pending); outside, an empty one."""
        if coord is None:
            return torch.empty((0,) if self.full.ndim else (), dtype=self.full.dtype)
        if self.layout.has_partial():
            local = simulate.distribute(self.full, self.layout, self.seed)[coord]
        else:
            local = simulate.take(self.full, self.layout, coord)
        return lay_out(local, "transposed") if self.spec.memory == "transposed" else local

    def local_of(self, to: Layout, rank: int) -> torch.Tensor:
        """What a rank of the mesh must hold under another layout without pending reductions."""
        coord = to.mesh.coord(rank)
        assert coord is not None
        return simulate.take(self.full, to, coord)

    def dtensor(self, here: Here, *, mesh: DeviceMesh | None = None, requires_grad: bool = False) -> DTensor:
        """It as a DTensor, put together from local tensors without communication."""
        local = here.tensor(self.local(here.coord(self.layout.mesh))).requires_grad_(requires_grad)
        return DTensor.from_local(
            local,
            mesh or here.mesh(self.layout.mesh),
            here.placements(self.layout.placements),
            run_check=False,
            shape=self.full.shape,
            stride=self.stride,
        )


def given(case: Case, name: str = "x", mesh: str = "mesh") -> Given:
    """The tensor field ``name`` of a case."""
    spec = case.tensor(name)
    return Given(spec, spec.build(case.seed), Layout(spec.shape, case.mesh(mesh), spec.placements or ()), case.seed)


def target(case: Case, source: Given, name: str = "to") -> Layout:
    """The layout that the field ``name`` asks for."""
    return source.layout.replace(case.placements(name))


def viewed(case: Case, here: Here) -> DeviceMesh:
    """The mesh of a case with named dims, of which the views that the fields ``slice`` and ``flatten`` name have been made."""
    mesh, part, flat = case.mesh(), case.get("slice", ""), case.get("flatten", "")
    if (mesh, part, flat) not in _VIEWED:
        live = here.mesh(mesh, fresh=True, names=NAMES[: mesh.ndim])
        if part:
            live[part].size()
        if flat:
            live[tuple(flat.split(","))]._flatten("flat")
        _VIEWED[mesh, part, flat] = live
    return _VIEWED[mesh, part, flat]
