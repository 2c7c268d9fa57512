"""How torch plans an op, for ranks that share plans: where a plan is made, what it depends on, and what it leaves behind. Private in
torch; beside :mod:`shardlaw.conformance.compat`, which is about everything else.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import Any

from torch.distributed.tensor import Partial, Replicate, Shard, _redistribute

from shardlaw.conformance import compat
from shardlaw.conformance.compat import trace as heard
from shardlaw.conformance.compat.trace import PLANS_AN_OP

_DERIVES = "_ops.autogen"  # the module that derives rules of overloads
SPEC_HASH = "_hash"  # where a spec keeps its hash, which is of its process alone
FINDS_METADATA = "_propagate_tensor_meta_non_cached"
# functions of specs that each plan asks again and again
_ASKED_AGAIN = ("redistribute_cost", "is_tensor_shardable")
_PLANNER_FLAGS = ("_FORCE_MIN_COST_REDISTRIBUTION_PLAN", "_DISABLE_REDISTRIBUTE_TRANSFORM_OPTIMIZATION")
_READS_WHERE_IT_STANDS = ("get_coordinate", "get_local_rank", "_sym_get_coordinate")  # of a mesh: torch 2.11 to 2.15


@functools.cache
def spec_type() -> Any:
    """The class of what a plan is made of, which is asked for often."""
    return compat.name("DTensorSpec")


def plan_by(plan: Callable[[Callable[[Any], Any], Any], Any]) -> Callable[[], None]:
    """From here on torch plans an op by ``plan(true, schema)``, ``true`` being its own function; what is returned undoes it."""
    return _in_place_of(PLANS_AN_OP, "plan an op once for several ranks", plan)


def find_metadata_by(find: Callable[[Callable[[Any], Any], Any], Any]) -> Callable[[], None]:
    """From here on torch finds the metadata of an op's result by ``find(true, schema)``, as :func:`plan_by` says."""
    return _in_place_of(FINDS_METADATA, "find the metadata of a result once", find)


def remember_within_plans() -> tuple[Callable[[], None], Callable[[], None]]:
    """From here on torch makes specs of the same parts once, and asks once what it costs to move from one to another and whether a shape
    can be sharded so. Gives what forgets all that, and what undoes it."""
    spec = spec_type()
    plain = {Shard, Replicate, Partial, compat.name("StridedShard"), compat.name("TensorMeta")}
    numbers, known = dict[Any, int](), dict[int, int]()  # of parts, and by their ids: the same one for equal plain ones
    made, said = dict[Any, dict[str, Any]](), dict[Any, Any]()
    held: list[Any] = []  # an id is an object's for as long as it lives
    true_init = spec.__init__

    def number(part: Any) -> int:
        held.append(part)
        told = (type(part), part, *(map(type, part) if isinstance(part, tuple) else ())) if type(part) in plain else id(part)
        try:
            return known.setdefault(id(part), numbers.setdefault(told, len(numbers) + 1))
        except TypeError:  # a symbolic size has no hash
            return known.setdefault(id(part), numbers.setdefault(id(part), len(numbers) + 1))

    @functools.wraps(true_init)
    def init(self: Any, mesh: Any, placements: Any, *rest: Any, **options: Any) -> None:
        if type(placements) is not tuple:
            true_init(self, mesh, placements, *rest, **options)
            return
        key = *[known.get(id(part)) or number(part) for part in (mesh, *placements, *rest, *options.values())], *options
        if key in made:
            vars(self).update(made[key], placements=placements)
        else:
            true_init(self, mesh, placements, *rest, **options)
            made[key] = dict(vars(self))

    def asked_once(function: Callable[..., Any]) -> Callable[..., Any]:
        def told(one: Any) -> Any:
            if type(one) is not spec:
                return one
            parts = (one.mesh, *one.placements, one.tensor_meta, one.shard_order)
            return tuple([known.get(id(part)) or number(part) for part in parts])

        @functools.wraps(function)
        def asking(*args: Any, **options: Any) -> Any:
            key = function, *map(told, args), *options.items(), *_flags()
            try:
                if key not in said:
                    said[key] = function(*args, **options)
            except TypeError:
                return function(*args, **options)
            return said[key]

        return asking

    def forget() -> None:
        for remembered in (numbers, known, made, said, held):
            remembered.clear()

    true = [(module, name, getattr(module, name)) for name in _ASKED_AGAIN for module in _naming(name)]
    once = {function: asked_once(function) for *_, function in true}

    def undo() -> None:
        spec.__init__ = true_init
        for place in true:
            setattr(*place)
        forget()

    spec.__init__ = init
    for module, name, function in true:
        setattr(module, name, once[function])
    return forget, undo


def _naming(name: str) -> list[Any]:
    """The modules of DTensor that call a function by this name."""
    modules = [module for at, module in sys.modules.items() if at.startswith("torch.distributed.tensor.")]
    return [module for module in modules if isinstance(vars(module).get(name), types.FunctionType)]


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

    return (torch.get_default_dtype(), *_flags())


def _flags() -> tuple[Any, ...]:
    return tuple([getattr(_redistribute, flag, None) for flag in _PLANNER_FLAGS])


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


def decider(op: Any) -> str:
    """What decides how an overload is sharded: the handler that it has for itself, its rule, or, where a function was made for each op of a
    table, that table, or what made it. As ``NAME, FILE:LINE``; empty where nothing does."""
    planner = compat.name("planner")
    info = getattr(planner, "op_single_dim_strategy_funcs", {}).get(op)
    rule = _handlers().get(op) or getattr(info, "func", info) or planner.op_strategy_funcs.get(op) or planner.op_to_rules.get(op)
    if rule is None:
        decomposes = compat.name("has_decomposition")
        return heard.place(_decomposer(decomposes).__code__) if decomposes(op) else ""
    return _made_for(op, rule) if "<locals>" in rule.__qualname__ else heard.place(rule.__code__)


def _decomposer(decomposes: Any) -> Any:
    """What plans ops by their decomposition: it stands beside the function that knows which they are."""
    return getattr(sys.modules[decomposes.__module__], decomposes.__qualname__.partition(".")[0]).propagate_strategy


def _handlers() -> dict[Any, Callable[..., Any]]:
    from torch.distributed.tensor import DTensor

    return getattr(DTensor._op_dispatcher, "_custom_op_handlers", {})


def _made_for(op: Any, rule: Callable[..., Any]) -> str:
    """The table of its module that has an op whose rule is a closure; or what had the rule made: the one function of its module that calls
    the maker, or the maker."""
    module = sys.modules[rule.__module__]
    maker = rule.__qualname__.partition(".<locals>")[0]
    tables = [name for name, value in vars(module).items() if isinstance(value, (list, dict)) and op in value]
    functions = [value for value in vars(module).values() if hasattr(value, "__code__") and value.__module__ == module.__name__]
    callers = [function.__name__ for function in functions if maker in function.__code__.co_names]
    name = tables[0] if tables else callers[0] if len(callers) == 1 else maker
    return f"{name}, {heard.short(rule.__code__.co_filename)}:{rule.__code__.co_firstlineno}"


def lacking(op: Any) -> str:
    """What gives overloads the rules of others of their op, where an overload without a rule has such others; empty elsewhere."""
    planner = compat.name("planner")
    packet = op.overloadpacket
    others = [getattr(packet, name) for name in packet.overloads()]
    rules = [getattr(info, "func", info) for info in getattr(planner, "op_single_dim_strategy_funcs", {}).values()]
    derived = next((rule for rule in rules if rule.__module__.endswith(_DERIVES)), None)
    return _made_for(op, derived) if derived is not None and not _has_rule(op) and any(map(_has_rule, others)) else ""


def called_alike(op: Any) -> str:
    """What decides the op with a rule whose name holds the name of an overload without one, the shortest of these; empty where there is
    none."""
    planner, name = compat.name("planner"), op.overloadpacket.__name__
    tables = ("op_to_rules", "op_strategy_funcs", "op_single_dim_strategy_funcs")
    ruled = {other for table in tables for other in getattr(planner, table, ()) if hasattr(other, "overloadpacket")}
    fitting = [other for other in ruled if name in other.overloadpacket.__name__]
    return decider(min(fitting, key=lambda other: (len(other.overloadpacket.__name__), str(other)))) if fitting else ""
