"""What a trace listens to in torch, and where the faults of a chapter are looked for: files by how they begin (of each the functions that
count, or all), and names of functions. With :mod:`shardlaw.conformance.compat` the only file that names what is private in torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

RULES = "torch/distributed/tensor/_ops/"


def _files(root: str, names: str) -> tuple[str, ...]:
    return tuple(f"torch/distributed/{root}{name}" for name in names.split())


# where shards are cut, gathered and reduced
MOVES = _files("tensor/", "placement_types.py _redistribute.py")
# ops that have a kernel of their own beside their rule
HANDLERS = _files("tensor/", "_nonlinear_redux.py _tp_conv.py")
CHECKPOINTS = _files("", "checkpoint/ _state_dict_utils.py")
MAKERS = _files("tensor/", "_api.py _shards_wrapper.py _collective_utils.py")
MODULES = (*_files("tensor/", "parallel/ experimental/"), *_files("", "fsdp/ _composable/"))
RANDOM = _files("tensor/", "_random.py")
MESHES = _files("", "device_mesh.py _mesh_layout.py")
SHARDED = _files("", "_shard/")
COLLECTIVES = _files("", "distributed_c10d.py _functional_collectives.py")
STEPS: dict[str, tuple[str, ...] | None] = {
    **dict.fromkeys((*MOVES, *HANDLERS, *CHECKPOINTS, *MAKERS, *MODULES, *RANDOM, *MESHES, *SHARDED)),
    "torch/distributed/tensor/_utils.py": ("compute_local_shape_and_global_offset", "_compute_local_shape_and_global_offset"),
    "torch/distributed/tensor/_sharding_prop.py": (),
}
# where the faults of a chapter's laws are looked for first
HOMES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("plan", "roundtrip", "optimizer", "crash"), CHECKPOINTS),
    "collective": COLLECTIVES,
    "sharded_tensor": (*SHARDED, *CHECKPOINTS),
    "module": MODULES,
    "random": RANDOM,
    "mesh": MESHES,
    "layout": MAKERS,
    "redistribute": MOVES,
}
# what every op and every redistribution goes through, whatever comes of it: functions to build specs and plans with
GENERIC = re.compile(
    "torch/distributed/tensor/(_ops/(utils|single_dim_strategy|strategy_validation)|_dtensor_spec|_op_schema|_collective_utils|_utils)[.]py"
)
# the functions that plan a redistribution, and what makes one collective of several
PLANS_MOVE = re.compile(r"DTensorRedistributePlanner[.]generate_\w+_infos, ")
MERGES_MOVES = re.compile(r"_optimize_transform_infos, ")
# of the functions there those that do something say so with a verb; properties, wrappers and helpers do not
DOES = re.compile(
    "_*(all|broadcast|check|cached?|compare|compute|consolidate|copy|create|cut|dedup|distribute|enumerate|fill|finish|flatten|from|gather"
    "|generate|get_model|get_optim|handle|init|iterate|load|local_map|make|maybe|offload|optimize|pad|parallelize|partition|permute|plan"
    "|prepare|propagate|read|redistribute|reduce|replicate|reset|reshard|rewrite|save|scatter|select|set|shard|shards_get|slice|split|stage|to|transform|traverse"
    "|unflatten|unpack|unpad|unwrap|update|validate|write)(_|$)"
)
# what only hands on: it stands in the stack of most errors, or is called for every tensor
HANDS_ON = re.compile(
    "_dispatch_get_local_results_slow_path|_propagate_op_sharding_dispatch_slow_path|propagate_single_input_strategy|strategy_fn"
    "|__torch_dispatch__|wrap|unwrap|wrapper|inner|inner_func|wait_tensor|trigger_wait|all_gather|all_gather_single|all_reduce|reduce_scatter|broadcast_object"
    "|gather_object|scatter_object|create_stream|create_from_tensor"
)

# functions that call a collective, by how they are named
CALLED = re.compile(r"_*(all_gather|all_reduce|all_to_all|reduce_scatter|broadcast|gather|reduce|scatter|send|recv|barrier)(?=_|$)")
CALLERS = re.compile(r"torch/distributed/(distributed_c10d|_functional_collectives)[.]py")
# what is never noted: who logs calls, and what every call asks of the process
UNHEARD = re.compile(
    ".*, torch/distributed/(checkpoint/)?(c10d_logger|logger|logging_handlers)[.]py"
    "|(get_rank|get_world_size|_rank_not_in_group|_group_or_default_group|_get_default_group|_World[.]\\w+|_is_wrapped_exception), "
)

REFUSED_BY = "refused by "  # before the function whose own statement raised an error
PLANS_AN_OP = "propagate_op_sharding_non_cached"
ASKS_WHOLE = "_propagate_tensor_meta_non_cached"
# by which collective of the back end a method of a placement moves data
CALLS = {
    "_to_replicate_tensor": "all_gather",
    "_to_new_shard_dim": "all_to_all",
    "_reduce_value": "all_reduce",
    "_reduce_shard_value": "reduce_scatter",
    "_reduce_shard_tensor": "reduce_scatter",
    "_shard_tensor": "scatter",
    "_replicate_tensor": "broadcast",
}
MOVES_ONE = "redistribute_local_tensor"  # from one spec to another, whatever lies between


def spec_of(tensor: Any) -> Any:
    """The mesh, the placements and the global shape of a DTensor."""
    return tensor._spec


def written(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that an overload writes to."""
    declared = op._schema.arguments
    given = {argument.name: value for argument, value in zip(declared, args, strict=False)} | dict(kwargs)
    named = [argument.name for argument in declared if argument.alias_info is not None and argument.alias_info.is_write]
    return [given[name] for name in named if name in given]


def place(code: Any) -> str:
    """``NAME, FILE:LINE`` of a function of torch; nothing of one that is not to be heard."""
    found = f"{code.co_qualname.replace('<locals>.', '')}, {short(code.co_filename)}:{code.co_firstlineno}"
    return "" if UNHEARD.match(found) else found


def short(file: str) -> str:
    """A file of torch from ``torch/`` on."""
    return file[file.find("torch/distributed/") :].replace("\\", "/")


def is_step(place: str) -> bool:
    """Whether a call of a function says what torch does with a sharded tensor or a checkpoint."""
    for file, functions in STEPS.items():
        if place.partition(", ")[2].startswith(file):
            return does(place) and (functions is None or _name(place) in functions)
    return False


def _name(place: str) -> str:
    return place.partition(",")[0].rpartition(".")[2] or place.partition(",")[0]


def collective_of(place: str) -> str:
    """The collective by which a function moves data, as far as a method of a placement tells; else nothing."""
    return CALLS.get(_name(place), "") if "/placement_types.py" in place else ""


def called_in(place: str) -> str:
    """The collective that a function calls, by its name; else nothing."""
    called = CALLED.match(_name(place)) if CALLERS.match(place.partition(", ")[2]) else None
    return called[1] if called else collective_of(place)


def carries(place: str) -> bool:
    """Whether a function only hands on."""
    return HANDS_ON.fullmatch(_name(place)) is not None


def is_generic(place: str) -> bool:
    """Whether every op and every redistribution goes through it."""
    return GENERIC.match(place.partition(", ")[2]) is not None


def does(place: str) -> bool:
    """Whether a function is one to look at: none of those that Python calls by itself, no question about a type, no expression."""
    name = _name(place)
    return not (name.startswith("<") or (name.startswith("__") and name.endswith("__")) or name.startswith(("is_", "_is_shard_like")))


def constructs(place: str) -> bool:
    """Whether a function makes a sharded tensor, or what holds shards of one."""
    return _name(place) in ("__new__", "__init__") and any(place.partition(", ")[2].startswith(file) for file in (*MAKERS, *SHARDED))


def plans_an_op(place: str) -> bool:
    """Whether a function asks the rules."""
    return _name(place) == PLANS_AN_OP


def asks_whole(place: str) -> bool:
    """Whether a function asks what an op gives on whole tensors."""
    return _name(place) == ASKS_WHOLE


def tells(place: str) -> bool:
    """Whether a place alone says what is wrong: not one that every op goes through."""
    return bool(place) and not (plans_an_op(place) or asks_whole(place) or is_generic(place))


def moves(place: str) -> bool:
    """Whether a function redistributes, as others say."""
    return _name(place) == MOVES_ONE


def redistributes(place: str) -> bool:
    """Whether every redistribution, or every one of its kind, goes through it: a planner, or a method of a placement."""
    return any(place.partition(", ")[2].startswith(file) for file in MOVES)


def is_home(place: str, chapter: str) -> bool:
    """Whether the faults of a chapter's laws are looked for in a function: it does something, and stands in one of its files."""
    there = any(place.partition(", ")[2].startswith(file) for file in HOMES.get(chapter, ()))
    return there and DOES.match(_name(place)) is not None and not carries(place) and does(place)


def is_of_meshes(place: str) -> bool:
    """Whether it is a function of device meshes, which most calls ask something."""
    return any(place.partition(", ")[2].startswith(file) for file in MESHES)


def is_of_steps(law: str) -> bool:
    """Whether a law is about ops or redistributions, of which the rules and the planners are looked at first."""
    return law.startswith(("op.", "redistribute.", "gradient."))


def decomposes(place: str) -> bool:
    """Whether it plans ops by their decomposition."""
    return "tensor/_decompositions.py" in place


def carries_out(place: str) -> bool:
    """Whether a function does what others of its class have found out."""
    return re.match("_*(rewrite|apply)_", _name(place)) is not None


def finds_out(place: str) -> bool:
    """Whether a function finds out what others of its class are to do."""
    return re.match("_*analyze_", _name(place)) is not None


def chooses(place: str) -> bool:
    """Whether a function chooses among what it is offered."""
    return re.match("_*select_", _name(place)) is not None


def offers(place: str) -> bool:
    """Whether a function makes the offers of which one is chosen, from what a rule says of one mesh dim."""
    return re.match("_*expand_to_", _name(place)) is not None


def transforms(place: str) -> bool:
    """Whether it is a method of a placement that torch derives from those of the documentation."""
    owner = place.partition(".")[0]
    return "/placement_types.py" in place and owner.startswith("_") and owner.endswith("Partial")


def in_stack(line: str) -> str:
    """The place that a line of a stack of Python names, if it is in torch's distributed part."""
    found = re.search(r'File "[^"]*?(torch/distributed/[^"]+)", line (\d+) in (\S+)', line)
    return f"{found[3]}, {found[1]}:{found[2]}" if found else ""


def judges(place: str) -> bool:
    """Whether a function is there to say whether something is right."""
    return re.match("_*(check|compare|validate|verify)_", _name(place)) is not None
