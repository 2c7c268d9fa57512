"""How a case of a round trip is read, and what stands behind the name of a storage."""

from __future__ import annotations

import pytest
import torch

from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.target import Target
from shardlaw.conformance.laws.checkpoint.calls import poison
from shardlaw.conformance.laws.checkpoint.holders import elements, shards_of_cut
from shardlaw.conformance.laws.checkpoint.trip import read_trip, world_sizes
from shardlaw.conformance.rank.storage import make_reader, make_writer, target_storage
from shardlaw.reference.box import Box
from shardlaw.reference.checkpoint.state_dict import Slot
from shardlaw.reference.layout import Layout
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.notation import NotationError
from shardlaw.reference.placement import parse_placements


def test_what_is_left_out_is_as_it_was_saved():
    trip = read_trip(Case.parse("roundtrip.dtensor mesh=2 x=5:S(0):int64 a=3:-"))
    assert trip.save == trip.load
    assert trip.save.state == {"x": Slot("x"), "a": Slot("a")}
    assert trip.world_sizes == (2, 2)
    assert trip.save.layout("a") is None


def test_the_load_may_differ_in_everything():
    case = Case.parse(
        "roundtrip.dtensor mesh=2@0,2 mesh.load=1x2 world.load=4 x=5:S(0) a=3:R to.x=R,S(0) to.a=- dtype=int64 into={y:x} memory=sliced"
    )
    trip = read_trip(case)
    assert world_sizes(case) == trip.world_sizes == (3, 4)
    assert str(trip.load.layout("x")) == "5 on 1x2 as R,S(0)"
    assert trip.load.layout("a") is None
    assert trip.load.specs["x"].dtype == "int64"
    assert trip.full_tensor(trip.load, "x").dtype == torch.int64


def test_a_state_that_names_no_tensor_of_the_case_is_refused():
    with pytest.raises(NotationError, match="'y'"):
        read_trip(Case.parse("roundtrip.kinds mesh=2 x=3:R state={a:y}"))


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int8, torch.bfloat16, torch.float64, torch.complex64])
def test_poison_differs_everywhere(dtype):
    want = torch.tensor([0, 1, 113, 114, 2]).to(dtype)
    assert poison(want).dtype == dtype
    assert not (poison(want) == want).any()


def test_a_cut_hands_out_a_dim():
    layout = Layout((6, 2), Mesh.of(2), parse_placements("S(0)"))
    assert str(shards_of_cut(layout, "1@0,3@1,2@0")) == "0:1,0:2@0;1:4,0:2@1;4:6,0:2@0"
    assert str(shards_of_cut(layout)) == "0:3,0:2@0;3:6,0:2@1"
    assert elements(torch.ones(6, 2), Box((4, 0), (3, 2))).tolist() == [[1, 1], [1, 1], [0, 0]]


@pytest.mark.parametrize("cut", ["1", "1@", "x@0", "1@0;2@1"])
def test_a_cut_that_is_none_is_refused(cut):
    with pytest.raises(NotationError, match="SIZE@RANK"):
        shards_of_cut(Layout((6,), Mesh.of(2), parse_placements("S(0)")), cut)


def test_the_storage_of_a_target_is_found_by_name(tmp_path):
    import torch.distributed.checkpoint as dcp

    target = Target()
    dcp.save({"n": 1, "x": torch.ones(3)}, storage_writer=make_writer(target, tmp_path, thread_count=2), no_dist=True)
    assert {*make_reader(target, tmp_path).read_metadata().state_dict_metadata} == {"n", "x"}
    with pytest.raises(KeyError, match="no-such"):
        target_storage(Target(storage="no-such"))
