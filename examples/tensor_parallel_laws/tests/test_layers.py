"""The library's own tests: its layers on live ranks, its laws, and that each law is worth its name."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from tplib import embedding, faults, laws

from shardlaw import Law, RankContext, Worlds
from shardlaw.reference.layout import Layout
from shardlaw.reference.placement import Shard
from shardlaw.strategies import layouts, meshes

LAWS = [laws.embedding, laws.column_linear]
# the fault that each of them must notice
FAULTS = {"tplib.embedding": faults.last_row_is_nobodys, "tplib.column-linear": faults.parts_in_reverse}


def look_up(here: RankContext, layout: Layout, ids: torch.Tensor) -> torch.Tensor | None:
    """What this rank finds in the table 0, 1, 2, ... of ``layout``, or None outside its mesh."""
    live, coord = here.mesh(layout.mesh), here.coord(layout.mesh)
    if coord is None:
        return None
    table = torch.arange(layout.shape[0]).reshape(-1, 1)
    return embedding(ids, here.local(table, layout), layout.offset(coord)[0], live.get_group())


@pytest.mark.shardlaw(world=4, needs=["all_reduce", "subgroups"])
@settings(deadline=None, max_examples=20)
@given(layout=layouts(mesh=meshes(world_size=4, max_dims=1), shape=(7, 1)).map(lambda layout: layout.replace((Shard(0),))))
def test_every_member_finds_every_row(world: Worlds, layout: Layout) -> None:
    found = world.run(look_up, layout, torch.arange(7))
    for rank, rows in enumerate(found):
        assert (rows is None) == (rank not in layout.mesh.ranks)
        assert rows is None or rows.flatten().tolist() == list(range(7))


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.id)
def test_the_control_holds(world: Worlds, law: Law) -> None:
    assert world.check(law).status == "held"


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.id)
def test_the_planted_fault_is_seen(world: Worlds, law: Law) -> None:
    with world.planted(FAULTS[law.id]) as broken:
        assert broken.check(law).status == "deviates"
