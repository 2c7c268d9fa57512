"""Sharding specs: their notation, the boxes that they name, and what is none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlaw.reference.box import Box, tiles_exactly
from shardlaw.reference.notation import NotationError, Shape
from shardlaw.reference.sharded_tensor import ChunkSpec, Spec, parse_spec, shards_of, spec_errors
from shardlaw.reference.shards import Shards
from shardlaw.strategies import shapes
from shardlaw.strategies.shard_specs import specs


@given(shapes(min_dims=1).flatmap(lambda shape: st.tuples(st.just(shape), specs(shape, (0, 1, 3)))))
def test_the_boxes_of_a_spec_tile_its_tensor(drawn: tuple[Shape, Spec]) -> None:
    shape, spec = drawn
    shards = shards_of(spec, shape)
    assert tiles_exactly(shape, [box for box, _ in shards.parts])
    assert parse_spec(str(spec), shape) == spec
    held = [box for rank in {rank for _, rank in shards.holdings()} for box in shards.boxes_of(rank)]
    assert sorted(box.volume for box in held) == sorted(box.volume for box, _ in shards.parts)


def test_chunks_are_cut_as_torch_chunk_cuts() -> None:
    found = ChunkSpec(-1, (2, 0, 1, 3)).shards((2, 5))
    assert [*found.holdings()] == [
        (Box((0, 0), (2, 2)), 2),
        (Box((0, 2), (2, 2)), 0),
        (Box((0, 4), (2, 1)), 1),
        (Box((0, 5), (2, 0)), 3),
    ]


@given(st.integers(-4, 3))
def test_a_dim_that_is_not_there(dim: int) -> None:
    spec = ChunkSpec(dim, (0, 1))
    assert bool(spec.errors((4, 4))) == (dim not in (-2, -1, 0, 1))
    if spec.errors((4, 4)):
        with pytest.raises(ValueError, match="no dim"):
            spec.shards((4, 4))


@pytest.mark.parametrize("text", ["", "0:2@0;3:4@0", "0:2@0;1:4@1", "0:2@0;2:5@1"])
def test_boxes_that_are_no_tensor(text: str) -> None:
    spec = parse_spec(text, (4,)) if text else Shards((4,), ())
    assert spec_errors(spec, (4,))
    with pytest.raises(ValueError, match=r"."):
        shards_of(spec, (4,))


def test_no_box_is_no_spec() -> None:
    assert Shards((0,), ()).errors() == []
    assert spec_errors(Shards((0,), ()), (0,)) == ["there is no box"]


@pytest.mark.parametrize("text", ["chunk(0)", "chunk(a)@0", "0:2", "0:2@x", "2:0@1", "0:2,0:1@0", "0:2@0+1"])
def test_what_is_no_spec(text: str) -> None:
    with pytest.raises(NotationError, match=r"want"):
        parse_spec(text, (4,))
