"""The law of rules that a user registers for an op (register_sharding)."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from conformance.case import Case
from conformance.law import Law, Limits
from conformance.laws import draws, scripts
from conformance.laws.given import given
from conformance.report.reproducer import Script
from reference.layout import Layout
from reference.placement import Shard as RefShard

if TYPE_CHECKING:
    from collections.abc import Callable

    from hypothesis.strategies import SearchStrategy

    from conformance.here import Here


def shifted(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Each element less the largest along ``dim``: what no rank can tell from a part of that dim."""
    return x - x.amax(dim, keepdim=True)


def shifted_by(x: torch.Tensor, *, dim: int) -> torch.Tensor:
    """The same, told its dim by name alone."""
    return shifted(x, dim)


def rule(x: Any, dim: int) -> list[tuple[list[Any], list[Any]]]:
    """Replicas, or shards of any other dim."""
    others = [at for at in range(x.ndim) if at != dim % x.ndim]
    whole: tuple[list[Any], list[Any]] = ([Replicate()], [Replicate(), None])
    return [whole, *(([Shard(at)], [Shard(at), None]) for at in others)]


def rule_by(x: Any, *, dim: int) -> list[tuple[list[Any], list[Any]]]:
    return [(after, before[:1]) for after, before in rule(x, dim)]


@cache
def registered(named: bool) -> Callable[[Any, int], Any]:
    """The op, made and given its rule once in a process."""
    name, make, of = ("shifted_by", shifted_by, rule_by) if named else ("shifted", shifted, rule)
    op: Any = torch.library.custom_op(f"shardlaw::{name}", make, mutates_args=())
    op.register_fake(lambda x, dim: torch.empty_like(x))
    called: Any = getattr(torch.ops.shardlaw, name).default
    register_sharding(called)(of)
    return lambda x, dim: called(x, dim=dim) if named else called(x, dim)


def check_registered(case: Case, here: Here) -> None:
    """The op gives the dense result, placed as one of the registered rules says, also when it was called with other dims before."""
    x, ndim = given(case), given(case).full.ndim
    op, live = registered(case.get("by", "place") == "name"), x.dtensor(here)
    for dim in (*(at for at in range(ndim) if at != case.integer("dim") % ndim), case.integer("dim")):
        got = op(live, dim)
        if here.same_dtensor(got, shifted(x.full, dim), f"result-{dim}", mesh=x.layout.mesh):
            at = got.placements
            kept = all(isinstance(one, Replicate) or (isinstance(one, Shard) and one.dim != dim % ndim) for one in at)
            here.require(kept, "wrong-metadata", "rule", "the result is placed as no rule says", "replicas, or shards of other dims", at)


def draw_registered(limits: Limits) -> SearchStrategy[Case]:
    def extra(draw: st.DrawFn, layout: Layout) -> dict[str, Any]:
        ndim = len(layout.shape)
        return {"dim": draw(st.integers(-ndim, ndim - 1)), "by": draw(st.sampled_from([None, "name"]))}

    drawn = draws.placed("module.registered", limits, kinds=("R", "S", "S", "P"), min_dims=1, on=inside(limits), extra=extra)
    return drawn.filter(lambda case: 0 not in case.tensor("x").shape)


def inside(limits: Limits) -> list[Any]:
    return draws.meshes(limits, outside=False, tables=False, least=2)


def features_registered(case: Case) -> set[str]:
    x, found = given(case), {"registered-rule"} | ({"negative-dim"} if case.integer("dim") < 0 else set())
    dim = case.integer("dim") % x.full.ndim
    return found | ({"redistributed"} if any(isinstance(at, RefShard) and at.dim == dim for at in x.layout.placements) else set())


def script_registered(case: Case) -> Script:
    x, dim = given(case), case.integer("dim")
    constants, body = scripts.source(x, case.world)
    star, told, none = ("*, ", "dim=", "") if case.get("by", "place") == "name" else ("", "", ", None")
    body = [
        f"def shifted(x: torch.Tensor, {star}dim: int) -> torch.Tensor:",
        "    return x - x.amax(dim, keepdim=True)",
        'op = torch.library.custom_op("mine::shifted", shifted, mutates_args=())',
        "op.register_fake(lambda x, dim: torch.empty_like(x))",
        f"def rule(x, {star}dim):",
        "    others = [at for at in range(x.ndim) if at != dim % x.ndim]",
        f"    return [([Replicate()], [Replicate(){none}])] + [([Shard(at)], [Shard(at){none}]) for at in others]",
        "register_sharding(torch.ops.mine.shifted.default)(rule)",
        *body,
        *(f"torch.ops.mine.shifted.default(x, {told}{at})" for at in range(x.full.ndim) if at != dim % x.full.ndim),
        f"return {scripts.tensor(shifted(x.full, dim))}, torch.ops.mine.shifted.default(x, {told}{dim}).full_tensor()",
    ]
    made = scripts.script(body, world=case.world, constants=constants)
    return Script(made.stages, (*made.imports, "from torch.distributed.tensor.experimental import register_sharding"), made.constants)


LAWS = (
    Law(
        id="module.registered",
        clause="An op whose rule a user registers gives the dense result from any placements, placed as one of the rules says.",
        source="torch.distributed.tensor.experimental docs, register_sharding",
        check=check_registered,
        script=script_registered,
        features=features_registered,
        control="module.registered mesh=2 x=4x6:S(1) dim=1",
        planted="rules_allow_any_shard",
        draw=draw_registered,
        draws=20,
        needs=("all_gather", "all_reduce", "all_to_all", "reduce_scatter"),
        weight=0.1,
    ),
)
