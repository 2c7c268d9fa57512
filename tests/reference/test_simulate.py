"""The simulated world: whatever is handed out can be put together again, exactly."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardlaw.reference.layout import Layout
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.placement import REDUCE_OPS, Partial, Replicate, Shard, parse_placements
from shardlaw.reference.simulate import assemble, assemble_replicas, can_reduce, contributions, distribute, redistribute, reduce_by, take
from shardlaw.reference.tensors import DTYPES, FILLS, MEMORIES, TensorSpec, dense, lay_out
from shardlaw.strategies import layouts, redistributions

INTEGER_FILLS = tuple(fill for fill in FILLS if fill not in ("unit", "edges"))


@given(layouts(kinds=("R", "S", "_S", "P"), reduce_ops=("sum", "max", "min", "avg", "product")), st.integers(0, 5))
def test_what_is_distributed_is_assembled_again(layout: Layout, seed: int) -> None:
    full = dense(layout.shape, torch.float32, seed=seed)
    world = distribute(full, layout, seed)
    assert set(world) == set(layout.mesh.coords())
    for replica in assemble_replicas(world, layout).values():
        assert torch.equal(replica, full)
    assert torch.equal(assemble(world, layout), full)


@given(layouts())
def test_a_local_tensor_holds_the_elements_that_its_lists_name(layout: Layout) -> None:
    full = dense(layout.shape, torch.int64)
    for coord, local in distribute(full, layout).items():
        assert tuple(local.shape) == layout.local_shape(coord)
        assert local.is_contiguous()
        for at, element in zip(itertools.product(*map(range, local.shape)), itertools.product(*layout.owned(coord)), strict=True):
            assert local[at] == full[element]


def test_a_local_tensor_is_a_copy() -> None:
    full = torch.zeros(4)
    layout = Layout((4,), Mesh.of(2), (Replicate(),))
    take(full, layout, (0,)).fill_(1)
    assert not full.any()


@pytest.mark.parametrize("op", REDUCE_OPS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_contributions_reduce_exactly_and_no_rank_alone_holds_the_value(dtype: str, op: str) -> None:
    if not can_reduce(DTYPES[dtype], op):
        with pytest.raises(ValueError, match=f"no contributions of {DTYPES[dtype]} reduce by {op}"):
            contributions(torch.zeros(2, dtype=DTYPES[dtype]), op, 2)
        return
    for fill, parts, shape in itertools.product(INTEGER_FILLS, (1, 2, 3, 4), ((5, 7), (), (0, 3))):
        full = dense(shape, DTYPES[dtype], fill, seed=parts)
        given_ = contributions(full, op, parts, seed=3)
        assert len(given_) == parts
        assert all(part.shape == full.shape and part.dtype == full.dtype for part in given_)
        assert torch.equal(reduce_by(op, given_), full), (fill, parts, shape)
        if fill == "distinct" and parts > 1 and shape == (5, 7):
            assert all(not torch.equal(part, full) for part in given_)
            assert any(not torch.equal(part, given_[0]) for part in given_)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal, NaN where the other one is."""
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


@pytest.mark.parametrize("op", ["sum", "product", "min", "max", "bxor"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_contributions_of_edges_reduce_to_them_and_a_nan_is_with_one_rank_alone(dtype: str, op: str) -> None:
    for parts in (2, 3, 8) if can_reduce(DTYPES[dtype], op) else ():
        full = dense((30,), DTYPES[dtype], "edges", seed=parts)
        given_ = contributions(full, op, parts, seed=3)
        assert same(reduce_by(op, given_), full)
        assert all(count <= 1 for count in sum(part.isnan().int() for part in given_).tolist())


def test_edges_are_what_they_are_called() -> None:
    full = dense((13,), torch.float32, "edges")
    assert full.isnan().sum() == 1
    assert full.isinf().sum() == 2
    assert (full == 0).sum() == 2
    assert sorted((1 / full[full == 0]).tolist()) == [-float("inf"), float("inf")]
    assert 1.401298464324817e-45 in full.tolist()
    assert {2**63 - 1, -(2**63)} <= set(dense((7,), torch.int64, "edges").tolist())


@pytest.mark.parametrize("dtype", [name for name in DTYPES if name not in ("bool", "uint8", "complex64", "complex128")])
def test_wide_values_fill_their_dtype_and_sums_over_eight_ranks_are_exact(dtype: str) -> None:
    full = dense((50,), DTYPES[dtype], "wide")
    assert (full.to(torch.int64) % 2 == 1).all()
    times = 64 if full.is_floating_point() else 8  # averages are summed eightfold
    assert torch.equal((full.to(torch.int64) * times).to(full.dtype).to(torch.int64), full.to(torch.int64) * times)
    if dtype in ("float64", "int64"):
        assert not torch.equal(full.float().to(full.dtype), full)


@pytest.mark.parametrize(
    "placements", ["P(sum),P(sum)", "P(max),P(max)", "P(avg),P(sum)", "P(sum),R", "R,P(min)", "P(product),S(0)", "_S(0,2),P(sum)"]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_reductions_over_several_mesh_dims(placements: str, dtype: str) -> None:
    for shape in ((2, 2), (2, 3), (1, 2), (3, 2)):
        layout = Layout((5, 3), Mesh.of(*shape), parse_placements(placements))
        full = dense((5, 3), DTYPES[dtype], seed=1)
        for replica in assemble_replicas(distribute(full, layout, 9), layout).values():
            assert torch.equal(replica, full)


def test_cancelling_contributions_are_not_zero() -> None:
    parts = contributions(torch.zeros(5, 7), "sum", 3)
    assert all(part.count_nonzero() > 10 for part in parts)
    assert not reduce_by("sum", parts).any()


def test_every_set_of_replicas_is_read() -> None:
    layout = Layout((4,), Mesh.of(2, 2), (Replicate(), Partial("sum")))
    world = distribute(dense((4,), torch.float32), layout)
    world[1, 0] = world[1, 0] + 1
    first, second = assemble_replicas(world, layout).values()
    assert torch.equal(second, first + 1)
    assert torch.equal(assemble(world, layout), first)


def test_a_local_tensor_of_another_shape_is_refused() -> None:
    layout = Layout((5,), Mesh.of(2), (Shard(0),))
    world = distribute(torch.arange(5), layout)
    world[1,] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"local tensor at \(1,\) has shape \(3,\), its layout says \(2,\)"):
        assemble(world, layout)


@given(redistributions(source_kinds=("R", "S", "_S", "P"), target_kinds=("R", "S", "_S", "P"), reduce_ops=("sum", "max")))
def test_redistribution_ends_where_distribution_would_have(pair: tuple[Layout, Layout]) -> None:
    source, target = pair
    full = dense(source.shape, torch.float32)
    world = redistribute(distribute(full, source, 2), source, target, 2)
    if not target.has_partial():
        direct = distribute(full, target)
        assert all(torch.equal(world[coord], direct[coord]) for coord in direct)
    assert torch.equal(assemble(world, target), full)


@settings(max_examples=30)
@given(st.sampled_from(sorted(DTYPES)), st.sampled_from(FILLS), st.integers(0, 99))
def test_a_dense_tensor_is_a_function_of_its_description(dtype: str, fill: str, seed: int) -> None:
    one = dense((4, 5), DTYPES[dtype], fill, seed)
    torch.manual_seed(seed)
    assert same(one, dense((4, 5), DTYPES[dtype], fill, seed))
    assert one.dtype == DTYPES[dtype]
    assert one.shape == (4, 5)
    assert one.is_contiguous()


def test_distinct_elements_are_distinct_and_exact() -> None:
    for dtype in ("float32", "float64", "float16", "int64", "int32", "int16"):
        full = dense((7, 8), DTYPES[dtype])
        assert full.unique().numel() == 56
        assert torch.equal(full, full.to(torch.int64).to(full.dtype))
        assert (full < 0).any()
        assert (full > 0).any()
        assert (full != 0).all()


@pytest.mark.parametrize("memory", MEMORIES)
def test_memory_changes_how_elements_lie_and_nothing_else(memory: str) -> None:
    for shape in ((3, 4), (5,), (), (0, 2), (1, 3, 2)):
        full = dense(shape, torch.float32)
        laid = lay_out(full, memory)
        want = full[:1].expand(shape) if memory == "expanded" and shape and shape[0] else full
        assert torch.equal(laid, want)
    spec = TensorSpec((3, 4), None, memory=memory)
    assert spec.build(0).is_contiguous() == (memory in ("plain", "offset", "channels-last"))


@pytest.mark.parametrize("seed", [4, 6, 11, 12])
def test_a_product_of_numbers_at_the_limits_does_not_depend_on_the_order_of_mesh_dims(seed: int) -> None:
    full = dense((12,), torch.float32, "edges", seed)
    world = distribute(full, Layout((12,), Mesh.of(2, 2), (Partial("product"), Partial("product"))), seed)
    by_row = torch.stack([torch.stack([world[i, j] for j in range(2)]) for i in range(2)])
    for order in (by_row.prod(1).prod(0), by_row.prod(0).prod(0)):
        torch.testing.assert_close(order, full, rtol=0, atol=0, equal_nan=True)
