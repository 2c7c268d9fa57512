"""What the layers promise, as laws: ``shardlaw run 'tplib.*'`` tries them on real ranks."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardlaw import Case, Global, Limits, fields, law
from shardlaw.reference.placement import Shard
from shardlaw.reference.tensors import TensorSpec
from shardlaw.strategies import meshes
from tplib import layers

ROWS = (Shard(0),)


def draw_embedding(limits: Limits) -> SearchStrategy[Case]:
    """Tables of 1 to 7 rows on meshes of any ranks in any order; ids of 0, 1 or 2 dims."""

    @st.composite
    def case(draw: st.DrawFn) -> Case:
        mesh = draw(meshes(world_size=limits.world_size, max_dims=1))
        rows, width = draw(st.integers(1, 7)), draw(st.integers(1, 3))
        shape = draw(st.sampled_from([(6,), (2, 3), (), (0,)]))
        return fields(mesh=mesh, w=TensorSpec((rows, width), ROWS), i=TensorSpec(shape, None, "int64", f"index{rows}"))

    return case()


@law(
    "tplib.embedding",
    source="tplib.layers.embedding",
    control="mesh=2 w=5x2:S(0) i=6:-:int64:index5",
    members=True,
    draw=draw_embedding,
    draws=60,
    needs=("all_reduce", "subgroups"),
)
def embedding(mesh: DeviceMesh, w: DTensor, i: torch.Tensor):  # type: ignore[no-untyped-def]
    """Looking up rows of a table that is sharded by rows gives every rank what the whole table gives."""
    rows = -(-w.shape[0] // mesh.size())
    return layers.embedding(i, w.to_local(), rows * mesh.get_coordinate()[0], mesh.get_group())


@embedding.due
def _(w: Global, i: torch.Tensor) -> torch.Tensor:
    return w.full[i]


def draw_linear(limits: Limits) -> SearchStrategy[Case]:
    """Weights whose columns the ranks share evenly, and one in seven that they cannot; the n-th rank holds the n-th columns."""

    @st.composite
    def case(draw: st.DrawFn) -> Case:
        mesh = draw(meshes(world_size=limits.world_size, max_dims=1, permuted=False, submeshes=False))
        columns, width = mesh.size * draw(st.integers(1, 3)) + draw(st.sampled_from((0,) * 6 + (1,))), draw(st.integers(1, 3))
        w, x = TensorSpec((columns, width), ROWS, fill="small"), TensorSpec((3, width), fill="small")
        return fields(mesh=mesh, w=w, x=x, seed=draw(st.integers(0, 9)))

    return case()


@law(
    "tplib.column-linear",
    source="tplib.layers.column_linear",
    control="mesh=2 w=4x3:S(0):float32:small x=3x3:-:float32:small",
    members=True,
    draw=draw_linear,
    draws=60,
    needs=("all_gather", "subgroups"),
)
def column_linear(mesh: DeviceMesh, w: DTensor, x: torch.Tensor):  # type: ignore[no-untyped-def]
    """A product with a weight that is sharded by columns is, on every rank, the product with the whole weight."""
    return layers.column_linear(x, w.to_local(), w.shape[0], mesh.get_group())


@column_linear.due
def _(w: Global, x: torch.Tensor) -> torch.Tensor:
    return x @ w.full.T


# what is known not to hold, with the reason
EXPECTATIONS = ["known.toml"]
