"""The laws of meshes and their cases: the meshes that they are tried on, and the fields that name dims of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from shardlaw.conformance.law.act import fields, law
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.fields import DIM_NAMES, Field
from shardlaw.conformance.law.law import Law, Limits
from shardlaw.conformance.laws.mesh.expected import names_of
from shardlaw.conformance.laws.shared import draws
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.notation import NotationError

DOC = "torch.distributed.device_mesh docs, DeviceMesh"


def mesh_law(name: str, source: str, control: str, *, needs: tuple[str, ...] = (), **record: Any) -> Callable[..., Law]:
    """Decorates the act of a law for which groups of some ranks must be made."""
    return law(f"mesh.{name}", source=source, control=control, needs=(*needs, "subgroups"), **record)


def on_every_mesh(name: str, source: str, **record: Any) -> Callable[..., Law]:
    """Decorates the act of a law of which every mesh is a case."""
    every: dict[str, Any] = {"sweep": on_all_meshes, "sweeps": 40, "narrow": plainer}
    return law(f"mesh.{name}", source=source, control="mesh=2x2", **every, **record)


# further meshes: the plain and the outside ones are so many that tables out of order stay few among them
MORE = ("1x1", "2@0,3", "2@1,3", "2@2,3", "1@2", "3@1,2,3", "3@0,2,3", "1x2@1,2", "2x1@0,3", "1x3@0,1,3", "1x4", "4x1",
        "1x1x2", "1x2x1", "2x1x1", "2x3", "3x2", "6", "2x4", "2x2x2", "8", "2x3@1,2,3,4,5,6")  # fmt: skip


def all_meshes(limits: Limits) -> list[Mesh]:
    """Every mesh of the palette and more, each once, the plainest first."""
    further = [mesh for mesh in map(Mesh.parse, MORE) if max(mesh.ranks) < limits.world_size]
    return list(
        dict.fromkeys([*draws.meshes(limits, submeshes=False, permuted=False), *further, *draws.meshes(limits)])
    )


def ascending(limits: Limits) -> list[Mesh]:
    """Those of the ranks from 0 on in order."""
    return [mesh for mesh in all_meshes(limits) if mesh.ranks == tuple(range(mesh.size))]


def of_several_dims(limits: Limits) -> list[Mesh]:
    """Those of two dims and more in which all ranks have a place."""
    return [mesh for mesh in all_meshes(limits) if mesh.ndim > 1 and mesh.size == max(mesh.ranks) + 1]


def on_all_meshes(limits: Limits) -> list[Case]:
    return [fields(mesh=mesh) for mesh in all_meshes(limits)]


def plainer(case: Case) -> SearchStrategy[Case]:
    """The same on meshes of no more ranks."""
    mesh = case.mesh()
    fewer = [other for other in all_meshes(Limits(max(mesh.ranks) + 1)) if other.size <= mesh.size]
    return st.sampled_from(fewer).map(lambda other: fields(mesh=other))


class MeshDims(Field):
    """Dims of the named mesh by their names, ``a,c``: an act can index the mesh by them, a due gets numbers."""

    takes = "names of dims of the mesh, such as a or a,c"

    def __init__(self, between: str = ",") -> None:
        self.between = between

    def fields(self, name: str) -> tuple[str, ...]:
        return name, "mesh"

    def read(self, case: Case, name: str) -> Any:
        return self.dims(case.get(name), case.mesh())

    def dims(self, text: str, mesh: Mesh) -> tuple[int, ...]:
        names = text.split(self.between)
        if not {*names} <= {*names_of(mesh)}:
            raise NotationError(f"{text!r} names others")
        return tuple(map(DIM_NAMES.index, names))

    def build(self, value: Any, here: Any) -> Any:
        names = tuple(DIM_NAMES[dim] for dim in value)
        return names[0] if len(names) == 1 else names


class MeshParts(MeshDims):
    """The dims of several slices: ``a+b,c``."""

    takes = "names of dims of the mesh for each slice, such as a+b,c"

    def read(self, case: Case, name: str) -> Any:
        return [MeshDims("+").dims(part, case.mesh()) for part in case.get(name).split(",")]

    def build(self, value: Any, here: Any) -> Any:
        return [super(MeshParts, self).build(dims, here) for dims in value]


Dims = Annotated[Any, MeshDims()]
