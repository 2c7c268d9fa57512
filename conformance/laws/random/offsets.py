"""The law of where the numbers of each shard start: replicas alike, different shards apart, and all ranks go on from one place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from conformance import compat
from conformance.case import Case
from conformance.law import Law, Limits
from conformance.laws import draws, scripts
from conformance.laws.given import Given, given
from conformance.laws.random.numbers import DOC, same_shard
from conformance.report.reproducer import Script
from reference.mesh import Coord

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from conformance.here import Here


BEFORE = 40  # how far the generator has come before


def offsets(x: Given, here: Here) -> tuple[dict[Coord, tuple[int, int]], dict[Coord, tuple[int, int]]]:
    """Where the numbers of each coordinate start, and where those of the next tensor start: as computed, and as states are set."""
    layout, found, came = x.layout, {}, {}
    tracker = compat.name("OffsetBasedRNGTracker")
    try:
        compat.name("rng_offsets")
        compat.name("PhiloxState")
    except compat.TorchMovedError as moved:
        here.reject(str(moved))
    table = torch.tensor(layout.mesh.ranks).reshape(layout.mesh.shape)
    meta = compat.name("TensorMeta")(torch.Size(layout.shape), x.stride, x.full.dtype)
    for coord in layout.mesh.coords():
        live = compat.seated_mesh(here.device.type, table, layout.mesh.rank_at(coord))
        spec = compat.name("DTensorSpec")(live, tuple(here.placements(layout.placements)), tensor_meta=meta)
        of = object.__new__(tracker)
        found[coord] = tracker._compute_rng_offsets(of, spec)
        state: Any = compat.name("PhiloxState")(torch.zeros(16, dtype=torch.uint8))
        state.offset = old = torch.tensor([BEFORE])
        tracker._set_pre_op_offset(of, state, spec)
        begun = int(state.offset)
        tracker._set_post_op_offset(of, state, spec, old)
        came[coord] = begun - BEFORE, int(state.offset) - BEFORE
    return found, came


def check_offsets(case: Case, here: Here) -> None:
    """Replicas start alike, different shards apart and in the order in which they lie; afterwards all ranks go on behind the last, from
    the same place. The state of a generator is set so."""
    x = given(case)
    layout, (found, came) = x.layout, offsets(x, here)
    here.require(found == came, "wrong-value", "states", "states are set otherwise than computed", found, came)
    here.require(all(start % 4 == 0 and end % 4 == 0 for start, end in found.values()), "wrong-value", "fours", "not in fours", "", found)
    here.require(len({end for _, end in found.values()}) == 1, "wrong-value", "after", "ranks go on from different places", "", found)
    for one, (start, end) in found.items():
        here.require(end >= min(x.full.numel(), 1) and start >= 0, "wrong-value", "advance", "the generator does not advance", "", found)
        for other in (coord for coord in found if one < coord):
            if same_shard(layout, one, other):
                here.require(start == found[other][0], "wrong-value", "replicas", "replicas start apart", "", found)
            elif 0 not in (*layout.local_shape(one), *layout.local_shape(other)):
                later = found[other][0]
                here.require(start != later, "wrong-value", "shards", f"shards at {one} and {other} start alike", "", found)
                ahead = layout.offset(one) < layout.offset(other)
                turned = start != later and (start < later) != ahead
                here.require(
                    not turned, "wrong-value", "order", f"shards at {one} and {other} start in another order than they lie", "", found
                )


def draw_offsets(limits: Limits) -> SearchStrategy[Case]:
    wide = draws.placed("random.offsets", limits, on=draws.meshes(limits, outside=False), kinds=("R", "S"), min_dims=1)
    tiny = wide.filter(lambda case: "tiny-shards" in features_offsets(case))
    return draws.mostly(wide.filter(lambda case: "tiny-shards" not in features_offsets(case)), tiny, 10)


def sweep_offsets(limits: Limits) -> list[Case]:
    """Shards of one or two elements, and of a dim that two mesh dims shard, which few draws have."""
    shards = ((3, "5:S(0)"), (4, "2x4:S(1)"), ("2x2", "8x3:S(0),S(0)"), ("2x2", "3x8:S(1),S(1)"))
    cases = [Case.of("random.offsets", mesh=mesh, x=x) for mesh, x in shards]
    return [case for case in cases if case.world <= limits.world_size]


def features_offsets(case: Case) -> set[str]:
    layout = given(case).layout
    coords = list(layout.mesh.coords())
    largest = max(torch.Size(layout.local_shape(coord)).numel() for coord in coords)
    shards = [one for at, one in enumerate(coords) if not any(same_shard(layout, one, other) for other in coords[:at])]
    return {"random"} | ({"tiny-shards"} if largest <= 2 < len(shards) else set())


def script_offsets(case: Case) -> Script:
    x = given(case)
    constants, body = scripts.source(x, case.world)
    body += [
        "found = [None] * dist.get_world_size()",
        "tracker = object.__new__(OffsetBasedRNGTracker)",
        "dist.all_gather_object(found, tracker._compute_rng_offsets(x._spec)[0])",
    ]
    coords = list(x.layout.mesh.coords())
    first = [next(at for at, one in enumerate(coords) if same_shard(x.layout, one, coord)) for coord in coords]
    ranks = [x.layout.mesh.rank_at(coord) for coord in coords]
    body += [f"# ranks that hold one shard have one number: {dict(zip(ranks, first, strict=True))}"]
    end = [f"return {len(set(first))}, len(set(found))"]
    if not x.layout.empty_coords():  # then the order of the starts is that of the shards
        lie = {x.layout.mesh.rank_at(coord): x.layout.offset(coord) for coord in coords}
        order = [sorted(set(lie.values())).index(lie[rank]) for rank in sorted(lie)]
        end = ["starts = sorted(set(found))", f"return {order}, [starts.index(one) for one in found]"]
    made = scripts.script([*body, *end], world=case.world, constants=constants)
    return Script(made.stages, (*made.imports, "from torch.distributed.tensor._random import OffsetBasedRNGTracker"), made.constants)


LAWS = (
    Law(
        id="random.offsets",
        clause="Numbers of different shards start at different places of the generator, of replicas at one; all ranks go on alike.",
        source=f"{DOC}, docstrings of OffsetBasedRNGTracker._set_pre_op_offset and _set_post_op_offset",
        check=check_offsets,
        script=script_offsets,
        features=features_offsets,
        control="random.offsets mesh=2 x=5x6:S(0)",
        planted="offsets_round_down",
        sweep=sweep_offsets,
        sweeps=4,
        draw=draw_offsets,
        draws=40,
        weight=0.2,
    ),
)
