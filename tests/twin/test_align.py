"""How what ranks hold is held against the whole: layouts that are claimed, found, pending, scaled, and replicas."""

from __future__ import annotations

import math

import pytest
import torch

from shardlaw.conformance.twin.align import Aligner, TensorComparison
from shardlaw.conformance.twin.build import exact_values, float64_casts, move_by_ulp, to_float64, unchanged
from shardlaw.conformance.twin.record import Key, LocalTensor
from shardlaw.conformance.twin.steps import bitwise_equal, distance
from shardlaw.reference.mesh import Mesh

WHOLE = torch.arange(24.0).reshape(4, 6) + 1
MESH = Mesh.of(2, 2)


def judged(
    pieces: list[LocalTensor], phase: str = "forward", bound: float = 1e-6, aligner: Aligner | None = None, what: str = "output 0"
) -> TensorComparison:
    aligner = aligner or Aligner(MESH, ("dp", "tp"), waits=False)
    return aligner.compare(Key(0, phase, "layer", what), WHOLE, bound, dict(enumerate(pieces)))


def plain(*locals_: torch.Tensor) -> list[LocalTensor]:
    return [LocalTensor(local) for local in locals_]


HALVES = list(WHOLE.chunk(2))


@pytest.mark.parametrize(
    ("pieces", "layout"),
    [
        (plain(*[WHOLE] * 4), "R,R"),
        (plain(HALVES[0], HALVES[0], HALVES[1], HALVES[1]), "S(0),R"),
        (plain(HALVES[0], HALVES[1], HALVES[0], HALVES[1]), "R,S(0)"),
        (plain(*[half for part in HALVES for half in part.chunk(2, 1)]), "S(0),S(1)"),
        (plain(WHOLE - 1, torch.ones(4, 6), WHOLE - 1, torch.ones(4, 6)), "R,P(sum)"),
        ([LocalTensor(HALVES[rank // 2], f"2@{rank % 2},{rank % 2 + 2}", "S(0)", (4, 6)) for rank in range(4)], "S(0),R"),
    ],
)
def test_a_plain_tensor_lies_as_ranks_hold_it(pieces: list[LocalTensor], layout: str) -> None:
    found = judged(pieces)
    assert not found.departs
    assert found.layout == f"dp tp: {layout}"


def test_a_wrong_shard_departs_and_says_where() -> None:
    wrong = HALVES[1].clone()
    wrong[1, 2] += 0.5
    found = judged(plain(HALVES[0], HALVES[0], HALVES[1], wrong))
    assert found.departs
    assert (found.rank, found.wrong, found.seen) == (3, 1, 0.5)
    assert found.elements[0] == ((3, 2), float(wrong[1, 2]), float(HALVES[1][1, 2]))


def test_a_dtensor_is_judged_by_its_claim() -> None:
    """Two swapped shards gather to a whole tensor; the placements say that they are swapped."""
    claims = [LocalTensor(HALVES[1 - rank % 2], f"2@{2 * (rank // 2)},{2 * (rank // 2) + 1}", "S(0)", (4, 6)) for rank in range(4)]
    assert judged(claims).departs
    claims = [LocalTensor(HALVES[rank % 2], f"2@{2 * (rank // 2)},{2 * (rank // 2) + 1}", "S(0)", (4, 6)) for rank in range(4)]
    assert not judged(claims).departs


def test_a_shape_that_no_layout_gives_departs() -> None:
    found = judged(plain(*[WHOLE[:3]] * 4))
    assert found.departs
    assert "no layout of the whole tensor" in found.word


def test_gradients_are_scaled_by_a_mesh_dim_all_or_none() -> None:
    aligner = Aligner(MESH, ("dp", "tp"), waits=False)
    cut = [HALVES[0], HALVES[0], HALVES[1], HALVES[1]]
    assert not judged(plain(*(2 * part for part in cut)), "backward", aligner=aligner).departs
    assert not judged(plain(*(2 * part for part in cut)), "backward", aligner=aligner, what="input 0").departs
    assert judged(plain(*cut), "backward", aligner=aligner, what="input 1").departs
    assert judged(plain(*(3 * part for part in cut)), "backward").departs


def test_a_parameter_keeps_its_layout() -> None:
    aligner = Aligner(MESH, ("dp", "tp"), waits=False)
    assert not judged(plain(*[WHOLE] * 4), "start", 0.0, aligner, "weight").departs
    halved = plain(WHOLE - 1, torch.ones(4, 6), WHOLE - 1, torch.ones(4, 6))
    assert judged(halved, "gradients", 1e-6, aligner, "weight").departs
    waiting = Aligner(MESH, ("dp", "tp"), waits=True)
    assert not judged(plain(*[WHOLE] * 4), "start", 0.0, waiting, "weight").departs
    assert not judged(halved, "gradients", 1e-6, waiting, "weight").departs
    assert judged(halved, "before step", 1e-6, waiting, "weight").departs


def test_equal_contributions_are_no_sum() -> None:
    assert judged(plain(*[WHOLE / 2] * 4)).departs


def test_replicas_of_a_parameter_are_alike_bit_by_bit() -> None:
    other = torch.nextafter(WHOLE, WHOLE + 1)
    aligner = Aligner(MESH, ("dp", "tp"), waits=False)
    judged(plain(*[WHOLE] * 4), "start", 0.0, aligner, "weight")
    found = judged(plain(WHOLE, WHOLE, WHOLE, other), "step", 1.0, aligner, "weight")
    assert found.word == "the replica on rank 3 is not bit by bit that on rank 0"


def test_distances_know_what_is_no_number() -> None:
    one = torch.tensor([1.0, math.nan, math.nan, math.inf])
    assert distance(one, torch.tensor([1.5, math.nan, 0.0, math.inf])).tolist() == [0.5, 0.0, math.inf, 0.0]
    assert bitwise_equal(one, one.clone())
    assert not bitwise_equal(one, torch.zeros(4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_move_is_one_unit_in_the_last_place(dtype: torch.dtype) -> None:
    value = torch.tensor([1.0, -3.0, 0.0, 100.0], dtype=dtype)
    after = move_by_ulp(torch.Generator().manual_seed(0))(value)
    up, down = (torch.nextafter(value, torch.full_like(value, end)) for end in (math.inf, -math.inf))
    assert bool(((after == up) | (after == down) | (value == 0)).all())
    assert after[2] == 0
    assert value.tolist() == [1.0, -3.0, 0.0, 100.0]


def test_exact_values_are_quarters() -> None:
    generator = torch.Generator().manual_seed(0)
    filled = exact_values(torch.randn(64), generator)
    assert {*filled.tolist()} == {-0.5, -0.25, 0.0, 0.25, 0.5}
    assert {*exact_values(torch.ones(64), generator).tolist()} == {0.5, 1.0, 2.0}


def test_in_float64_what_a_model_casts_is_float64_too() -> None:
    x = torch.ones(3, dtype=torch.float64) / 3
    with float64_casts(unchanged):
        assert x.float().dtype == torch.float32
    with float64_casts(to_float64):
        assert bitwise_equal(x.float(), x)
        assert torch.softmax(x, 0, dtype=torch.float32).dtype == torch.float64
        assert x.to(torch.int64).dtype == torch.int64
