"""Faults of planning on some ranks alone, planted one at a time: a run in which ranks share plans must find them too.

Every function plants one fault when it is called in a rank process, before the process group starts.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor._sharding_prop import ShardingPropagator

from tests.planted.hook import breaks, instead


def _first(_: Any) -> bool:
    return dist.get_rank() == 1


def _last(_: Any) -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


def _outside(schema: Any) -> bool:
    return any(spec.mesh.get_coordinate() is None for spec in schema.args_spec)


def _plans(where: Callable[[Any], bool], change: Callable[[Any, Any], None], only: str = "") -> None:
    """On ranks ``where`` it says so, a plan is changed; ``only`` while a fault of this name is asked for."""

    @instead(ShardingPropagator, "propagate_op_sharding_non_cached")
    def fault(true: Any, self: Any, schema: Any) -> Any:
        found = true(self, schema)
        if where(schema) and (not only or Path(os.environ["RANK_FAULT_FILE"]).read_text() == only):
            change(found, schema)
        return found


def each_when_asked() -> None:
    """A target's ``setup``: all faults are planted, and the file that RANK_FAULT_FILE names says which one is at work."""
    global _plans
    plans = _plans
    for name, plant in [*globals().items()]:
        if name.startswith(("rank_1", "the_last", "ranks_outside")):
            _plans = functools.partial(plans, only=name)
            plant()
    _plans = plans


def _specs(found: Any) -> list[Any]:
    specs = found.output_spec if isinstance(found.output_spec, (list, tuple)) else [found.output_spec]
    return [spec for spec in specs if spec is not None]


def _claims(placement: Any) -> Callable[[Any, Any], None]:
    def change(found: Any, schema: Any) -> None:
        for spec in _specs(found):
            spec.placements = tuple(placement for _ in spec.placements)

    return change


def _describes(change: Callable[[Any], Any]) -> Callable[[Any, Any], None]:
    def changed(found: Any, schema: Any) -> None:
        for spec in _specs(found):
            spec.tensor_meta = change(spec.tensor_meta)

    return changed


def rank_1_claims_its_results_whole() -> None:
    _plans(_first, _claims(Replicate()))


def the_last_rank_claims_its_results_whole() -> None:
    _plans(_last, _claims(Replicate()))


def rank_1_claims_its_results_pending() -> None:
    _plans(_first, _claims(Partial()))


def the_last_rank_claims_its_results_sharded() -> None:
    _plans(_last, _claims(Shard(0)))


def rank_1_takes_results_for_longer() -> None:
    _plans(_first, _describes(lambda meta: meta._replace(shape=torch.Size([size + 1 for size in meta.shape] or [1]))))


def the_last_rank_claims_its_results_pending_maxima() -> None:
    _plans(_last, _claims(Partial("max")))


def rank_1_moves_no_operand() -> None:
    def change(found: Any, schema: Any) -> None:
        if not found.use_val_from_redistribute_schema:
            found.needs_redistribute = False

    _plans(_first, change)


def the_last_rank_swaps_mesh_dims() -> None:
    def change(found: Any, schema: Any) -> None:
        for spec in _specs(found):
            spec.placements = spec.placements[::-1]

    _plans(_last, change)


def rank_1_refuses() -> None:
    def change(found: Any, schema: Any) -> None:
        raise RuntimeError("rank 1 finds no plan")

    _plans(_first, change)


@breaks("op.plans-agree")
def needless_moves_asked_by_rank_1() -> None:
    """Rank 1 says that operands are to be moved, and moves none."""

    def change(found: Any, schema: Any) -> None:
        if not found.needs_redistribute:
            found.needs_redistribute, found.redistribute_schema = True, schema

    _plans(_first, change)


def ranks_outside_a_mesh_take_results_for_longer() -> None:
    _plans(_outside, _describes(lambda meta: meta._replace(shape=torch.Size([size + 1 for size in meta.shape] or [1]))))


def ranks_outside_a_mesh_refuse() -> None:
    def change(found: Any, schema: Any) -> None:
        raise RuntimeError("a rank outside the mesh finds no plan")

    _plans(_outside, change)
