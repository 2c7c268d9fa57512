"""Hooks into torch's planning of ops: replace and cache it, find out what a plan depends on, and which rule makes it.

Everything here uses private names of torch, like :mod:`shardlaw.conformance.compat`.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard, _redistribute

from shardlaw.conformance import compat
from shardlaw.conformance.compat import trace as torch_trace
from shardlaw.conformance.compat.trace import FINDS_METADATA, PLANS_OP

_GENERATOR_MODULE = "_ops.autogen"  # the module that generates rules for overloads
PLAIN_TYPES = {type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format}
SPEC_HASH = "_hash"  # the attribute of a spec for its cached hash, which differs between processes
# functions of specs that are called many times for each plan
_CACHED_FUNCTIONS = ("redistribute_cost", "is_tensor_shardable")
_PLANNER_FLAGS = ("_FORCE_MIN_COST_REDISTRIBUTION_PLAN", "_DISABLE_REDISTRIBUTE_TRANSFORM_OPTIMIZATION")
_COORDINATE_METHODS = ("get_coordinate", "get_local_rank", "_sym_get_coordinate")  # of DeviceMesh, torch 2.11 to 2.15


@functools.cache
def spec_type() -> Any:
    """The class ``DTensorSpec``, cached: it is needed often."""
    return compat.name("DTensorSpec")


def override_planning(plan: Callable[[Callable[[Any], Any], Any], Any]) -> Callable[[], None]:
    """Make torch plan ops by ``plan(original, schema)``, where ``original`` is its own function. Returns a function that undoes it."""
    return _override_method(PLANS_OP, "plan an op once for several ranks", plan)


def override_metadata(find: Callable[[Callable[[Any], Any], Any], Any]) -> Callable[[], None]:
    """Make torch find the metadata of results by ``find(original, schema)``, as :func:`override_planning` does with plans."""
    return _override_method(FINDS_METADATA, "find the metadata of a result once", find)


def cache_within_plans() -> tuple[Callable[[], None], Callable[[], None]]:
    """Make torch cache, by the parts of specs, new specs, the cost of a redistribution, and whether a shape can be sharded.

    Returns a function that clears the caches, and one that undoes it all.
    """
    spec = spec_type()
    plain = {Shard, Replicate, Partial, compat.name("StridedShard"), compat.name("TensorMeta")}
    numbers, by_id = dict[Any, int](), dict[int, int]()  # equal plain parts have the same number
    specs, results = dict[Any, dict[str, Any]](), dict[Any, Any]()
    references: list[Any] = []  # keeps parts alive, since an id is unique only while its object lives
    original_init = spec.__init__

    def number(part: Any) -> int:
        references.append(part)
        identity = (type(part), part, *(map(type, part) if isinstance(part, tuple) else ())) if type(part) in plain else id(part)
        try:
            return by_id.setdefault(id(part), numbers.setdefault(identity, len(numbers) + 1))
        except TypeError:  # a symbolic size has no hash
            return by_id.setdefault(id(part), numbers.setdefault(id(part), len(numbers) + 1))

    @functools.wraps(original_init)
    def init(self: Any, mesh: Any, placements: Any, *rest: Any, **options: Any) -> None:
        if type(placements) is not tuple:
            original_init(self, mesh, placements, *rest, **options)
            return
        key = *[by_id.get(id(part)) or number(part) for part in (mesh, *placements, *rest, *options.values())], *options
        if key in specs:
            vars(self).update(specs[key], placements=placements)
        else:
            original_init(self, mesh, placements, *rest, **options)
            specs[key] = dict(vars(self))

    def cached(function: Callable[..., Any]) -> Callable[..., Any]:
        def freeze(argument: Any) -> Any:
            if type(argument) is not spec:
                return argument
            parts = (argument.mesh, *argument.placements, argument.tensor_meta, argument.shard_order)
            return tuple([by_id.get(id(part)) or number(part) for part in parts])

        @functools.wraps(function)
        def lookup(*args: Any, **options: Any) -> Any:
            key = function, *map(freeze, args), *options.items(), *_flags()
            try:
                if key not in results:
                    results[key] = function(*args, **options)
            except TypeError:
                return function(*args, **options)
            return results[key]

        return lookup

    def clear() -> None:
        for cache in (numbers, by_id, specs, results, references):
            cache.clear()

    originals = [(module, name, vars(module)[name]) for module in dtensor_modules() for name in _CACHED_FUNCTIONS if _has(module, name)]
    replacements = {function: cached(function) for *_, function in originals}

    def undo() -> None:
        spec.__init__ = original_init
        for original in originals:
            setattr(*original)
        clear()

    spec.__init__ = init
    for module, name, function in originals:
        setattr(module, name, replacements[function])
    return clear, undo


@functools.cache
def dtensor_modules() -> list[types.ModuleType]:
    """The modules of DTensor. The server asks first: it takes each forked rank long to go through all modules of the process."""
    return [module for path, module in sys.modules.items() if path.startswith("torch.distributed.tensor.")]


def _has(module: types.ModuleType, name: str) -> bool:
    return isinstance(vars(module).get(name), types.FunctionType)


def _override_method(method: str, what: str, function: Callable[[Callable[[Any], Any], Any], Any]) -> Callable[[], None]:
    planner = compat.name("planner")
    own = compat.find_private(what, f"{type(planner).__module__}:{type(planner).__name__}.{method}").__name__
    setattr(planner, own, lambda schema: function(functools.partial(getattr(type(planner), own), planner), schema))
    return lambda: delattr(planner, own)


def is_plan_shareable(op: Any) -> bool:
    """Whether an overload is sharded by a rule of its own or its decomposition, by a plan that does not adjust shapes in its arguments to
    the rank."""
    planner = compat.name("planner")
    local = ("op_to_shape_and_stride_idx", "op_to_scalar_shape_adjuster")
    is_local = any(op in getattr(planner, table, ()) for table in local)
    return not is_local and (_has_rule(op) or bool(compat.name("has_decomposition")(op)))


def record_decomposition(op: Any) -> None:
    """Record for a decomposed op which arguments are the key of its cached plans, as torch does when it first plans the op."""
    if not _has_rule(op):
        planner, note = compat.name("planner"), compat.name("note_decomposed")
        strategy = getattr(planner, "decomp_strategy", None)
        note(op, planner) if strategy is None else note(strategy, op)  # torch 2.11 has no strategy object


def _has_rule(op: Any) -> bool:
    planner = compat.name("planner")
    return any(op in getattr(planner, table, ()) for table in ("op_to_rules", "op_strategy_funcs", "op_single_dim_strategy_funcs"))


def plan_settings() -> tuple[Any, ...]:
    """The settings on which a plan depends beside its schema."""
    return (torch.get_default_dtype(), *_flags())


def _flags() -> tuple[Any, ...]:
    return tuple([getattr(_redistribute, flag, None) for flag in _PLANNER_FLAGS])


def observe_coordinate_reads(on_read: Callable[[], object]) -> Callable[[], None]:
    """Call ``on_read()`` whenever a mesh is asked for this rank's coordinate. Returns a function that undoes it."""
    from torch.distributed.device_mesh import DeviceMesh

    def set_methods(methods: dict[str, Any]) -> None:
        for method in methods.items():
            setattr(DeviceMesh, *method)

    originals = {method: getattr(DeviceMesh, method) for method in _COORDINATE_METHODS}
    set_methods({name: _observed(method, on_read) for name, method in originals.items()})
    return functools.partial(set_methods, originals)


def _observed(method: Callable[..., Any], on_read: Callable[[], object]) -> Callable[..., Any]:
    @functools.wraps(method)
    def observed(*args: Any, **options: Any) -> Any:
        on_read()
        return method(*args, **options)

    return observed


def rule_of(op: Any) -> str:
    """What decides how an overload is sharded, as ``NAME, FILE:LINE``: its handler, its rule, or what plans its decomposition; empty where
    there is none. Of a rule that is a closure it is the table or the function that has it (:func:`_generated_rule`)."""
    planner = compat.name("planner")
    info = getattr(planner, "op_single_dim_strategy_funcs", {}).get(op)
    rule = _handlers().get(op) or getattr(info, "func", info) or planner.op_strategy_funcs.get(op) or planner.op_to_rules.get(op)
    if rule is None:
        decomposes = compat.name("has_decomposition")
        return torch_trace.place(_decomposition_planner(decomposes).__code__) if decomposes(op) else ""
    while isinstance(rule, functools.partial):
        rule = rule.func
    return _generated_rule(op, rule) if "<locals>" in rule.__qualname__ else torch_trace.place(rule.__code__)


def _decomposition_planner(decomposes: Any) -> Any:
    """The function that plans ops by their decomposition; it is in the class of ``has_decomposition``."""
    return getattr(sys.modules[decomposes.__module__], decomposes.__qualname__.partition(".")[0]).propagate_strategy


def _handlers() -> dict[Any, Callable[..., Any]]:
    from torch.distributed.tensor import DTensor

    return getattr(DTensor._op_dispatcher, "_custom_op_handlers", {})


def _generated_rule(op: Any, rule: Callable[..., Any]) -> str:
    """The origin of a rule that is a closure: a table in its module that lists the op, else the only function that calls the closure's
    maker, else the maker. As ``NAME, FILE:LINE``."""
    module = sys.modules[rule.__module__]
    maker = rule.__qualname__.partition(".<locals>")[0]
    tables = [name for name, value in vars(module).items() if isinstance(value, (list, dict)) and op in value]
    functions = [value for value in vars(module).values() if hasattr(value, "__code__") and value.__module__ == module.__name__]
    callers = [function.__name__ for function in functions if maker in function.__code__.co_names]
    name = tables[0] if tables else callers[0] if len(callers) == 1 else maker
    return f"{name}, {torch_trace.short(rule.__code__.co_filename)}:{rule.__code__.co_firstlineno}"


def rule_generator(op: Any) -> str:
    """The function that generates rules for overloads from those of the same op, if ``op`` has no rule and another overload has one; else
    empty."""
    planner = compat.name("planner")
    packet = op.overloadpacket
    others = [getattr(packet, name) for name in packet.overloads()]
    rules = [getattr(info, "func", info) for info in getattr(planner, "op_single_dim_strategy_funcs", {}).values()]
    derived = next((rule for rule in rules if rule.__module__.endswith(_GENERATOR_MODULE)), None)
    return _generated_rule(op, derived) if derived is not None and not _has_rule(op) and any(map(_has_rule, others)) else ""


def similar_rule(op: Any) -> str:
    """The rule of the op with the shortest name that contains the name of ``op``; empty where there is none."""
    planner, name = compat.name("planner"), op.overloadpacket.__name__
    tables = ("op_to_rules", "op_strategy_funcs", "op_single_dim_strategy_funcs")
    ruled = {other for table in tables for other in getattr(planner, table, ()) if hasattr(other, "overloadpacket")}
    similar = [other for other in ruled if name in other.overloadpacket.__name__]
    return rule_of(min(similar, key=lambda other: (len(other.overloadpacket.__name__), str(other)))) if similar else ""
