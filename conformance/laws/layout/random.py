"""A law of factories: random ones, dims that count from the end, strided shards."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.tensor as dtensor
from hypothesis import strategies as st

from conformance import compat
from conformance.case import Case
from conformance.law import Law, Limits
from conformance.laws import draws, scripts
from conformance.laws.given import given
from conformance.report.reproducer import Script
from reference import simulate
from reference.layout import Layout

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from conformance.here import Here

RANDOM_DOC = "torch.distributed.tensor._random, docstrings of is_rng_supported_mesh and manual_seed"
IMPORT = "import torch.distributed.tensor as dtensor"


def _check_random(case: Case, here: Here) -> None:
    """Replicas agree, shards differ and a seed gives the same again, where the device has random DTensors; elsewhere they are refused."""
    x, make = given(case), case.get("make")
    live, at = here.mesh(x.layout.mesh), here.placements(x.layout.placements)

    def made() -> Any:
        return getattr(dtensor, make)(x.layout.shape, device_mesh=live, placements=at)

    if not compat.name("is_rng_supported_mesh")(live):
        here.refused(made, make, f"{make} on a device without random DTensors")
        return
    coord = here.coord(x.layout.mesh)
    torch.manual_seed(case.seed + 1)
    one = made()
    torch.manual_seed(case.seed + 1)
    other = made()
    if coord is None:
        return
    full = one.full_tensor()
    whole = torch.tensor(full.tolist(), dtype=full.dtype).reshape(full.shape)
    here.same(one.to_local(), simulate.take(whole, x.layout, coord), "replicas", what="this rank's part of the whole")
    here.same(other.to_local(), one.to_local(), "seed", what="what the same seed gives again")
    inside = bool(((full >= 0) & (full < 1)).all()) if make == "rand" else bool(full.isfinite().all())
    here.require(inside, "wrong-value", "range", "an element is outside the range of the distribution", "", full)
    counts = full.unique().numel()
    here.require(
        counts == full.numel() or full.numel() > 64, "wrong-value", "alike", "two elements of the whole are alike", full.numel(), counts
    )


def _script_random(case: Case) -> Script:
    x = given(case)
    made = f"dtensor.{case.get('make')}({x.layout.shape}, device_mesh=mesh, placements={scripts.placements(x.layout.placements)})"
    body = [f"mesh = {scripts.mesh(x.layout.mesh)}", "try:", f"    {made}", "except Exception as error:"]
    body += ['    return "refused in words", "refused in words" if str(error) else repr(error)', 'return "refused", "accepted"']
    script = scripts.script(body, world=case.world)
    return Script(script.stages, (IMPORT, *script.imports), script.constants)


MAKERS = {"zeros": 0.0, "ones": 1.0, "full": 3.0, "empty": 0.0}
RANDOM = ("rand", "randn")


def draw_made(limits: Limits) -> SearchStrategy[Case]:
    law = "layout.factory-kinds"

    def how(draw: st.DrawFn, layout: Layout) -> dict[str, Any]:
        return {"make": draw(st.sampled_from(list(MAKERS)))}

    def chance(draw: st.DrawFn, layout: Layout) -> dict[str, Any]:
        return {"make": draw(st.sampled_from(RANDOM))}

    inside = [mesh for mesh in draws.meshes(limits, tables=False) if mesh.size > max(mesh.ranks)]
    plain = draws.placed(law, limits, kinds=("S", "_S", "R"), min_dims=1, extra=how)
    negative = draws.placed(law, limits, kinds=("S", "_S", "R"), min_dims=1, negative=True, extra=how)
    random = draws.placed(law, limits, on=inside, kinds=("R", "S"), min_dims=1, extra=chance)
    return draws.mostly(draws.mostly(plain, negative.filter(lambda case: "(-" in case.text), 9), random, 9)


def features_made(case: Case) -> set[str]:
    return {"random"} if case.get("make") in RANDOM else set()


def check_made(case: Case, here: Here) -> None:
    """A factory takes a dim as the other makers of DTensors do: from either end, of any kind of shard."""
    if case.get("make") in RANDOM:
        _check_random(case, here)
        return
    x, make = given(case), case.get("make")
    live, at, shape = here.mesh(x.layout.mesh), here.placements(case.tensor("x").placements or ()), x.layout.shape
    value = {"fill_value": MAKERS[make]} if make == "full" else {}
    got = getattr(dtensor, make)(shape, **value, device_mesh=live, placements=at)
    if make == "empty":
        got.to_local().zero_()
    here.same_dtensor(got, torch.full(shape, MAKERS[make]), make, mesh=x.layout.mesh, placements=x.layout.placements)


def script_made(case: Case) -> Script:
    if case.get("make") in RANDOM:
        return _script_random(case)
    x, make = given(case), case.get("make")
    shape, value = x.layout.shape, MAKERS[make]
    at = scripts.placements(case.tensor("x").placements or ())
    arguments = f"{shape}, 3" if make == "full" else f"{shape}"
    body = [f"mesh = {scripts.mesh(x.layout.mesh)}", f"d = dtensor.{make}({arguments}, device_mesh=mesh, placements={at})"]
    body += ["d.to_local().zero_()"] if make == "empty" else []
    made = scripts.holds(case, body, "d", torch.full(shape, value), x.layout)
    return Script(made.stages, (IMPORT, *made.imports), made.constants)


LAWS = (
    Law(
        id="layout.factory-kinds",
        clause="A factory takes strided shards and dims from either end; random ones agree on replicas and obey the seed, or are refused.",
        source=f"torch.distributed.tensor docs, DTensor factory functions (placements); {RANDOM_DOC}",
        check=check_made,
        script=script_made,
        features=features_made,
        control="layout.factory-kinds mesh=2 x=5x6:_S(1,2) make=full",
        planted="factory_ignores_second_mesh_dim",
        draw=draw_made,
        draws=80,
        weight=0.3,
    ),
)
