"""Laws of meshes: their decorators, the meshes of their cases, and fields that name mesh dims."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from shardlaw.conformance.law.act import fields, law
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.fields import DIM_NAMES, Field
from shardlaw.conformance.law.law import Law, Limits
from shardlaw.conformance.laws.mesh.description import dim_names
from shardlaw.conformance.laws.shared import draws
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.notation import NotationError

DOC = "torch.distributed.device_mesh docs, DeviceMesh"


def mesh_law(name: str, source: str, control: str, *, needs: tuple[str, ...] = (), **record: Any) -> Callable[..., Law]:
    """Decorate the act of a law that needs groups of some ranks."""
    return law(f"mesh.{name}", source=source, control=control, needs=(*needs, "subgroups"), **record)


def every_mesh_law(name: str, source: str, **record: Any) -> Callable[..., Law]:
    """Decorate the act of a law whose cases are all meshes."""
    return law(
        f"mesh.{name}", source=source, control="mesh=2x2", sweep=sweep_meshes, sweeps=40, narrow=narrow, **record
    )


# meshes beyond those of draws.meshes, most of them with ascending ranks
MORE_MESHES = (
    *("1x1", "2@0,3", "2@1,3", "2@2,3", "1@2", "3@1,2,3", "3@0,2,3", "1x2@1,2", "2x1@0,3", "1x3@0,1,3", "1x4", "4x1"),
    *("1x1x2", "1x2x1", "2x1x1", "2x3", "3x2", "6", "2x4", "2x2x2", "8", "2x3@1,2,3,4,5,6"),
)


def all_meshes(limits: Limits) -> list[Mesh]:
    """Every mesh of :func:`draws.meshes` and of :data:`MORE_MESHES` once, the plainest first."""
    further = [mesh for mesh in map(Mesh.parse, MORE_MESHES) if max(mesh.ranks) < limits.world_size]
    return list(
        dict.fromkeys([*draws.meshes(limits, submeshes=False, permuted=False), *further, *draws.meshes(limits)])
    )


def ascending_meshes(limits: Limits) -> list[Mesh]:
    """The meshes of ranks 0, 1, ... in order."""
    return [mesh for mesh in all_meshes(limits) if mesh.ranks == tuple(range(mesh.size))]


def multi_dim_meshes(limits: Limits) -> list[Mesh]:
    """The meshes of several dims without a rank outside."""
    return [mesh for mesh in all_meshes(limits) if mesh.ndim > 1 and mesh.size == max(mesh.ranks) + 1]


def sweep_meshes(limits: Limits) -> list[Case]:
    return [fields(mesh=mesh) for mesh in all_meshes(limits)]


def narrow(case: Case) -> SearchStrategy[Case]:
    """The meshes of no more ranks than that of the case."""
    mesh = case.mesh()
    no_larger = [other for other in all_meshes(Limits(max(mesh.ranks) + 1)) if other.size <= mesh.size]
    return st.sampled_from(no_larger).map(lambda other: fields(mesh=other))


class MeshDimsField(Field):
    """Names of mesh dims, ``a,c``: the act gets the names, to index the mesh, the due function the numbers."""

    takes = "names of dims of the mesh, such as a or a,c"

    def __init__(self, separator: str = ",") -> None:
        self.separator = separator

    def fields(self, name: str) -> tuple[str, ...]:
        return name, "mesh"

    def read(self, case: Case, name: str) -> Any:
        return self.dims(case.get(name), case.mesh())

    def dims(self, text: str, mesh: Mesh) -> tuple[int, ...]:
        names = text.split(self.separator)
        if not {*names} <= {*dim_names(mesh)}:
            raise NotationError(f"{text!r} names others")
        return tuple(map(DIM_NAMES.index, names))

    def build(self, value: Any, here: Any) -> Any:
        names = tuple(DIM_NAMES[dim] for dim in value)
        return names[0] if len(names) == 1 else names


class MeshSlicesField(MeshDimsField):
    """The dims of several slices, ``a+b,c``."""

    takes = "names of dims of the mesh for each slice, such as a+b,c"

    def read(self, case: Case, name: str) -> Any:
        return [MeshDimsField("+").dims(names, case.mesh()) for names in case.get(name).split(",")]

    def build(self, value: Any, here: Any) -> Any:
        return [super(MeshSlicesField, self).build(dims, here) for dims in value]


Dims = Annotated[Any, MeshDimsField()]
