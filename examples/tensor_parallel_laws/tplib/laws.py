"""What the layers promise, as laws: ``shardlaw run 'tplib.*'`` tries them on real ranks."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from conformance import Case, Here, Law, Limits
from reference.layout import Layout
from reference.placement import Shard
from reference.tensors import TensorSpec
from strategies import meshes
from tplib import layers

ROWS = (Shard(0),)


def draw_embedding(limits: Limits) -> SearchStrategy[Case]:
    """Tables of 1 to 7 rows on meshes of any ranks in any order; ids of 0, 1 or 2 dims."""

    @st.composite
    def case(draw: st.DrawFn) -> Case:
        mesh = draw(meshes(world_size=limits.world_size, max_dims=1))
        rows, width = draw(st.integers(1, 7)), draw(st.integers(1, 3))
        shape = draw(st.sampled_from([(6,), (2, 3), (), (0,)]))
        return Case.of("tplib.embedding", mesh=mesh, w=TensorSpec((rows, width)), i=TensorSpec(shape, None, "int64", f"index{rows}"))

    return case()


def check_embedding(case: Case, here: Here) -> None:
    mesh, table, ids = case.mesh(), case.tensor("w").build(case.seed), case.tensor("i").build(case.seed + 1)
    live, layout = here.mesh(mesh), Layout(tuple(table.shape), mesh, ROWS)
    coord = here.coord(mesh)
    if coord is not None:
        got = layers.embedding(here.tensor(ids), here.local(table, layout), layout.offset(coord)[0], live.get_group())
        here.same(got, table[ids], "rows", what="what was looked up")


def draw_linear(limits: Limits) -> SearchStrategy[Case]:
    """Weights whose columns the ranks share evenly, and one in seven that they cannot; the n-th rank holds the n-th columns."""

    @st.composite
    def case(draw: st.DrawFn) -> Case:
        mesh = draw(meshes(world_size=limits.world_size, max_dims=1, permuted=False, submeshes=False))
        columns = mesh.size * draw(st.integers(1, 3)) + draw(st.sampled_from((0,) * 6 + (1,)))
        w = TensorSpec((columns, draw(st.integers(1, 3))), ROWS, fill="small")
        return Case.of("tplib.column-linear", mesh=mesh, w=w, seed=draw(st.integers(0, 9)))

    return case()


def check_linear(case: Case, here: Here) -> None:
    mesh, weight = case.mesh(), case.tensor("w").build(case.seed)
    live, layout = here.mesh(mesh), Layout(tuple(weight.shape), mesh, ROWS)
    if here.coord(mesh) is not None:
        x = TensorSpec((3, weight.shape[1]), fill="small").build(case.seed + 1)
        got = layers.column_linear(here.tensor(x), here.local(weight, layout), len(weight), live.get_group())
        here.same(got, x @ weight.T, "product")


LAWS = [
    Law(
        id="tplib.embedding",
        clause="Looking up rows of a table that is sharded by rows gives every rank what the whole table gives.",
        source="tplib.layers.embedding",
        check=check_embedding,
        control="tplib.embedding mesh=2 w=5x2 i=6:-:int64:index5",
        planted="tplib.faults:last_row_is_nobodys",
        draw=draw_embedding,
        draws=60,
        needs=("all_reduce", "subgroups"),
    ),
    Law(
        id="tplib.column-linear",
        clause="A product with a weight that is sharded by columns is, on every rank, the product with the whole weight.",
        source="tplib.layers.column_linear",
        check=check_linear,
        control="tplib.column-linear mesh=2 w=4x3:S(0):float32:small",
        planted="tplib.faults:parts_in_reverse",
        draw=draw_linear,
        draws=60,
        needs=("all_gather", "subgroups"),
    ),
]

# what is known not to hold, with the reason
EXPECTATIONS = ["known.toml"]
