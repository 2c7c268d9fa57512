"""What a trace listens to in torch, and where the faults of a chapter are looked for: files by how they begin (of each the functions that
count, or all), and names of functions. With :mod:`shardlaw.conformance.compat` the only file that names what is private in torch.
"""

from __future__ import annotations

import re

RULES = "torch/distributed/tensor/_ops/"
NO_RULES = ("utils.py", "single_dim_strategy.py", "strategy_validation.py")


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
STEPS: dict[str, tuple[str, ...] | None] = {
    **dict.fromkeys((*MOVES, *HANDLERS, *CHECKPOINTS, *MAKERS, *MODULES, *RANDOM, *MESHES, *SHARDED)),
    "torch/distributed/tensor/_utils.py": ("compute_local_shape_and_global_offset", "_compute_local_shape_and_global_offset"),
    "torch/distributed/tensor/_sharding_prop.py": (),
}
# where the faults of a chapter's laws are looked for first
HOMES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("plan", "roundtrip", "optimizer"), CHECKPOINTS),
    **dict.fromkeys(("op", "gradient"), HANDLERS),
    "sharded_tensor": (*SHARDED, *CHECKPOINTS),
    "module": MODULES,
    "random": RANDOM,
    "mesh": MESHES,
    "layout": MAKERS,
    "redistribute": MOVES,
}
# of the functions there those that do something say so with a verb; properties, wrappers and helpers do not
DOES = re.compile(
    "_*(broadcast|check|cached?|compare|compute|consolidate|copy|create|cut|dedup|distribute|enumerate|fill|finish|flatten|gather|generate"
    "|get_model|get_optim|handle|init|iterate|load|local_map|make|maybe|offload|optimize|pad|partition|plan|prepare|propagate|read"
    "|redistribute|reduce|replicate|reset|reshard|rewrite|save|scatter|select|set|shard|shards_get|slice|split|stage|to|transform|traverse"
    "|unflatten|unpack|unpad|unwrap|update|validate|write)(_|$)"
)
# what only hands on: it stands in the stack of most errors, or is called for every tensor
HANDS_ON = re.compile(
    "_dispatch_get_local_results_slow_path|_propagate_op_sharding_dispatch_slow_path|propagate_single_input_strategy|strategy_fn"
    "|__torch_dispatch__|wrap|unwrap|wait_tensor|trigger_wait|all_gather|all_gather_single|all_reduce|reduce_scatter|broadcast_object"
    "|gather_object|scatter_object|create_stream|create_from_tensor"
)
