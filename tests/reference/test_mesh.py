"""Meshes: a bijection between coordinates and ranks, and what follows from it."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlaw.reference.mesh import Mesh, MeshError
from shardlaw.strategies import meshes

MESHES = meshes(world_size=8)


@given(MESHES)
def test_coordinates_and_ranks_are_a_bijection(mesh: Mesh) -> None:
    assert [mesh.rank_at(coord) for coord in mesh.coords()] == list(mesh.ranks)
    assert [mesh.coord(rank) for rank in mesh.ranks] == list(mesh.coords())
    assert all(mesh.coord(rank) is None for rank in range(-1, 9) if rank not in mesh.ranks)


@given(MESHES)
def test_the_groups_along_a_mesh_dim_partition_the_ranks(mesh: Mesh) -> None:
    for dim in range(mesh.ndim):
        groups = {mesh.group(dim, coord) for coord in mesh.coords()}
        assert all(len(group) == mesh.shape[dim] for group in groups)
        assert sorted(rank for group in groups for rank in group) == sorted(mesh.ranks)
        for coord in mesh.coords():
            assert mesh.group(dim, coord)[coord[dim]] == mesh.rank_at(coord)


@given(MESHES, st.data())
def test_a_slice_is_the_part_of_the_table_that_keeps_the_other_coordinates(mesh: Mesh, data: st.DataObject) -> None:
    dims = tuple(data.draw(st.permutations(range(mesh.ndim)))[: data.draw(st.integers(1, mesh.ndim))])
    coord = data.draw(st.sampled_from(list(mesh.coords())))
    part = mesh.slice(dims, coord)
    assert part.shape == tuple(mesh.shape[dim] for dim in dims)
    others = [dim for dim in range(mesh.ndim) if dim not in dims]
    inside = {rank for rank in mesh.ranks if all((mesh.coord(rank) or ())[dim] == coord[dim] for dim in others)}
    assert set(part.ranks) == inside
    for inner, rank in zip(part.coords(), part.ranks, strict=True):
        assert tuple((mesh.coord(rank) or ())[dim] for dim in dims) == inner
    flat = mesh.flatten(dims, coord)
    assert flat.shape == (part.size,)
    assert flat.ranks == part.ranks
    assert mesh.slice((dims[0],), coord).ranks == mesh.group(dims[0], coord)


def test_a_slice_of_all_dims_is_the_mesh() -> None:
    mesh = Mesh.parse("2x3@5,3,1,0,2,4")
    assert mesh.slice((0, 1), (1, 2)) == mesh
    assert mesh.slice((1, 0), (0, 0)) == Mesh.parse("3x2@5,0,3,2,1,4")


@pytest.mark.parametrize(
    ("shape", "ranks"),
    [((), ()), ((0,), ()), ((2, 0), ()), ((2,), (0,)), ((2,), (0, 0)), ((2,), (0, -1)), ((2, 2), (0, 1, 2)), ((-1,), (0,))],
)
def test_no_meshes(shape: tuple[int, ...], ranks: tuple[int, ...]) -> None:
    with pytest.raises(MeshError):
        Mesh(shape, ranks)


def test_there_is_no_rank_outside_the_table() -> None:
    for coord in itertools.chain([(0, 3), (-1, 0), (2, 0)]):
        with pytest.raises(IndexError, match="lies outside mesh 2x3"):
            Mesh.of(2, 3).rank_at(coord)
