"""How torch plans an op, for ranks that share plans: where a plan is made, what it depends on, and what it leaves behind. Private in
torch; beside :mod:`shardlaw.conformance.compat`, which is about everything else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from shardlaw.conformance import compat

SPEC_HASH = "_hash"  # where a spec keeps its hash, which is of its process alone
PLANS_AN_OP = "propagate_op_sharding_non_cached"
FINDS_METADATA = "_propagate_tensor_meta_non_cached"
_PLANNER_FLAGS = ("_FORCE_MIN_COST_REDISTRIBUTION_PLAN", "_DISABLE_REDISTRIBUTE_TRANSFORM_OPTIMIZATION")
_READS_WHERE_IT_STANDS = ("get_coordinate", "get_local_rank", "_sym_get_coordinate")  # of a mesh: torch 2.11 to 2.15


def plan_by(plan: Callable[[Callable[[Any], Any], Any], Any]) -> Callable[[], None]:
    """From here on torch plans an op by ``plan(true, schema)``, ``true`` being its own function; what is returned undoes it."""
    return _in_place_of(PLANS_AN_OP, "plan an op once for several ranks", plan)


def find_metadata_by(find: Callable[[Callable[[Any], Any], Any], Any]) -> Callable[[], None]:
    """From here on torch finds the metadata of an op's result by ``find(true, schema)``, as :func:`plan_by` says."""
    return _in_place_of(FINDS_METADATA, "find the metadata of a result once", find)


def _in_place_of(method: str, what: str, function: Callable[[Callable[[Any], Any], Any], Any]) -> Callable[[], None]:
    planner = compat.name("planner")
    own = compat.private(what, f"{type(planner).__module__}:{type(planner).__name__}.{method}").__name__
    setattr(planner, own, lambda schema: function(functools.partial(getattr(type(planner), own), planner), schema))
    return lambda: delattr(planner, own)


def is_planned_alike(op: Any) -> bool:
    """Whether an overload is sharded by its own rule or by its decomposition, and its plan leaves the shapes in its arguments alone."""
    planner = compat.name("planner")
    local = ("op_to_shape_and_stride_idx", "op_to_scalar_shape_adjuster")
    alike = not any(op in getattr(planner, table, ()) for table in local)
    return alike and (_has_rule(op) or bool(compat.name("has_decomposition")(op)))


def taken(op: Any) -> None:
    """Leave behind what planning an op for the first time leaves behind beside the plan: by which arguments those of a decomposed op are
    remembered."""
    if not _has_rule(op):
        planner, note = compat.name("planner"), compat.name("note_decomposed")
        strategy = getattr(planner, "decomp_strategy", None)
        note(op, planner) if strategy is None else note(strategy, op)  # torch 2.11 has no strategy object


def _has_rule(op: Any) -> bool:
    planner = compat.name("planner")
    return any(op in getattr(planner, table, ()) for table in ("op_to_rules", "op_strategy_funcs", "op_single_dim_strategy_funcs"))


def plans_depend_on() -> tuple[Any, ...]:
    """What a plan depends on beside its schema."""
    import torch
    from torch.distributed.tensor import _redistribute

    return (torch.get_default_dtype(), *(getattr(_redistribute, flag, None) for flag in _PLANNER_FLAGS))


def note_coordinates(note: Callable[[], object]) -> Callable[[], None]:
    """From here on ``note`` is called whenever a mesh is asked where in it this rank stands; what is returned undoes it."""
    from torch.distributed.device_mesh import DeviceMesh

    def put(methods: dict[str, Any]) -> None:
        for method in methods.items():
            setattr(DeviceMesh, *method)

    true = {method: getattr(DeviceMesh, method) for method in _READS_WHERE_IT_STANDS}
    put({method: _noted(own, note) for method, own in true.items()})
    return functools.partial(put, true)


def _noted(true: Callable[..., Any], note: Callable[[], object]) -> Callable[..., Any]:
    @functools.wraps(true)
    def noting(*args: Any, **options: Any) -> Any:
        note()
        return true(*args, **options)

    return noting
