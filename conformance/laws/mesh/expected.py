"""What a mesh must say of itself, by the reference: for what is due."""

from __future__ import annotations

from typing import Any

from shardlaw.conformance.law.due import Of
from shardlaw.conformance.law.fields import DIM_NAMES
from shardlaw.conformance.law.literal import nested_ranks
from shardlaw.reference.mesh import Mesh


def lines(mesh: Mesh, rank: int) -> list[list[int]]:
    """The ranks along each mesh dim through this one, in the order of the table; none for a rank outside."""
    coord = mesh.coord(rank)
    return [] if coord is None else [list(mesh.group(dim, coord)) for dim in range(mesh.ndim)]


def described(mesh: Mesh, names: tuple[str, ...] | None, rank: int) -> dict[str, Any]:
    """What :func:`~.description.description` must give."""
    return {
        "table": Of(nested_ranks(mesh), "wrong-layout"),
        "names": Of(names),
        "coordinate": mesh.coord(rank),
        "members": [sorted(line) for line in lines(mesh, rank)],
    }


def summed(mesh: Mesh, rank: int) -> list[int]:
    """What :func:`~.description.sums` must give."""
    return [sum(10**member for member in line) for line in lines(mesh, rank)]


def names_of(mesh: Mesh, dims: tuple[int, ...] | None = None) -> tuple[str, ...]:
    """The names of mesh dims, of all where none are given."""
    return tuple(DIM_NAMES[dim] for dim in (range(mesh.ndim) if dims is None else dims))


def slice_of(mesh: Mesh, dims: tuple[int, ...], rank: int) -> Mesh:
    """The slice through a rank of the mesh."""
    return mesh.slice(dims, mesh.coord(rank) or ())


def flat_of(mesh: Mesh, dims: tuple[int, ...], rank: int) -> Mesh:
    """The dims as one, through this rank; all dims also for a rank outside."""
    return mesh.flatten(dims, mesh.coord(rank) or (0,) * mesh.ndim)
