"""Classify functions of torch in a trace, and list where to look for the faults of each chapter.

A *place* is a function as ``NAME, FILE:LINE``. Files are matched by the beginning of their path, functions by their names. Like
:mod:`shardlaw.conformance.compat`, this file uses private names of torch.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from traceback import FrameSummary
from typing import Any

RULES = "torch/distributed/tensor/_ops/"


def _files(root: str, names: str) -> tuple[str, ...]:
    return tuple(f"torch/distributed/{root}{name}" for name in names.split())


# where shards are cut, gathered and reduced
MOVES = _files("tensor/", "placement_types.py _redistribute.py")
CUTS = _files("tensor/", "placement_types.py _collective_utils.py")
# ops that have a kernel of their own beside their rule
HANDLERS = _files("tensor/", "_nonlinear_redux.py _tp_conv.py")
CHECKPOINTS = _files("", "checkpoint/ _state_dict_utils.py")
MAKERS = _files("tensor/", "_api.py _shards_wrapper.py _collective_utils.py")
MODULES = (*_files("tensor/", "parallel/ experimental/"), *_files("", "fsdp/ _composable/"))
RANDOM = _files("tensor/", "_random.py")
MESHES = _files("", "device_mesh.py _mesh_layout.py")
SHARDED = _files("", "_shard/")
COLLECTIVES = _files("", "distributed_c10d.py _functional_collectives.py")
LOCAL_SHAPES = ("compute_local_shape_and_global_offset", "_compute_local_shape_and_global_offset")
STEPS: dict[str, tuple[str, ...] | None] = {
    **dict.fromkeys((*MOVES, *HANDLERS, *CHECKPOINTS, *MAKERS, *MODULES, *RANDOM, *MESHES, *SHARDED)),
    "torch/distributed/tensor/_utils.py": LOCAL_SHAPES,
    "torch/distributed/tensor/_sharding_prop.py": (),
}
# the files in which to look first for the faults of a chapter's laws
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
# what few laws outside of its own chapters call
SPECIAL = (*CHECKPOINTS, *MODULES, *SHARDED, *RANDOM)
ABOUT = ("mesh", "redistribute", "random")  # chapters whose homes no other chapter is about
# helpers that build specs and plans, which every op and every redistribution calls
GENERIC = re.compile(
    "torch/distributed/tensor/(_ops/(utils|single_dim_strategy|strategy_validation)|_dtensor_spec|_op_schema|_collective_utils|_utils)[.]py"
)
# the functions that plan a redistribution, and the one that merges several collectives into one
PLANS_MOVE = re.compile(r"DTensorRedistributePlanner[.]generate_\w+_infos, ")
MERGES_MOVES = re.compile(r"_optimize_transform_infos, ")
# functions whose names begin with one of these verbs do the work; properties, wrappers and helpers have other names
ACTIVE_VERB = re.compile(
    "_*(all|broadcast|check|cached?|compare|compute|consolidate|copy|create|cut|dedup|distribute|enumerate|fill|finish|flatten|from|gather"
    "|generate|get_model|get_optim|handle|init|iterate|load|local_map|make|maybe|offload|optimize|pad|parallelize|partition|permute|plan"
    "|prepare|propagate|read|redistribute|reduce|replicate|reset|reshard|rewrite|save|scatter|select|set|setup|shard|shards_get|slice|split|stage|to|transform|traverse"
    "|unflatten|unpack|unpad|unwrap|update|validate|write)(_|$)"
)
# functions that only forward a call: they are in the stacks of most errors, or called for every tensor
FORWARDS = re.compile(
    "_dispatch_get_local_results_slow_path|_propagate_op_sharding_dispatch_slow_path|propagate_single_input_strategy|strategy_fn"
    "|__torch_dispatch__|wrap|unwrap|wrapper|inner|inner_func|wait_tensor|trigger_wait|all_gather|all_gather_single|all_reduce|reduce_scatter|broadcast_object"
    "|gather_object|scatter_object|create_stream|create_from_tensor|_explicit_or_backed_hint|_guarded_hint_int"
)

# functions that call a collective, by name
CALLED = re.compile(r"_*(all_gather|all_reduce|all_to_all|reduce_scatter|broadcast|gather|reduce|scatter|send|recv|barrier)(?=_|$)")
CALLERS = re.compile(r"torch/distributed/(distributed_c10d|_functional_collectives)[.]py")
# functions that are never traced: wrappers that log calls, and queries that every call makes
UNTRACED = re.compile(
    ".*, torch/distributed/(checkpoint/)?(c10d_logger|logger|logging_handlers)[.]py"
    "|(get_rank|get_world_size|_rank_not_in_group|_group_or_default_group|_get_default_group|_World[.]\\w+|_is_wrapped_exception), "
)

REFUSED_BY = "refused by "  # prefix of the function whose own statement raised an error
PLANS_OP = "propagate_op_sharding_non_cached"
FINDS_METADATA = "_propagate_tensor_meta_non_cached"
GIVES_SPEC = "_dispatch_fast_path_python_tail"  # to the operand of an op in place
# the collective that a method of a placement calls
CALLS = {
    "_to_replicate_tensor": "all_gather",
    "_to_new_shard_dim": "all_to_all",
    "_reduce_value": "all_reduce",
    "_reduce_shard_value": "reduce_scatter",
    "_reduce_shard_tensor": "reduce_scatter",
    "_shard_tensor": "scatter",
    "_replicate_tensor": "broadcast",
}
REDISTRIBUTES = "redistribute_local_tensor"  # from one spec to another, whatever lies between


def spec_of(tensor: Any) -> Any:
    """The mesh, the placements and the global shape of a DTensor."""
    return tensor._spec


def shards_missing_dim(spec: Any) -> bool:
    """Whether a spec shards a dim that its tensor does not have."""
    return any(not 0 <= getattr(placement, "dim", 0) < max(1, len(spec.shape)) for placement in spec.placements)


def written_arguments(op: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that an overload mutates."""
    declared = op._schema.arguments
    values = {argument.name: value for argument, value in zip(declared, args, strict=False)} | dict(kwargs)
    named = [argument.name for argument in declared if argument.alias_info is not None and argument.alias_info.is_write]
    return [values[name] for name in named if name in values]


def place(code: Any) -> str:
    """The place of a function of torch, from its code object; empty for one that is not traced, and for what runs when a module is
    imported."""
    if not code.co_flags & inspect.CO_OPTIMIZED:
        return ""
    found = f"{code.co_qualname.replace('<locals>.', '')}, {short(code.co_filename)}:{code.co_firstlineno}"
    return "" if UNTRACED.match(found) else found


def short(file: str) -> str:
    """A path of torch, from ``torch/`` on."""
    return file[file.find("torch/distributed/") :].replace("\\", "/")


def reported_frames(error: BaseException) -> list[FrameSummary]:
    """The stack of the lowest rank that failed, which an error of a checkpoint reports to all; empty for other errors."""
    failures = getattr(error, "failures", None)
    return list(failures[min(failures)][1] or ()) if isinstance(failures, dict) and failures else []


def place_in_frame(frame: FrameSummary) -> str:
    """The place of a frame of torch.distributed, in a stack that any rank may have sent; empty for other frames."""
    if frame.lineno is None or "torch/distributed/" not in frame.filename:
        return ""
    functions = [each for each in _functions_in(frame.filename) if each[1] <= frame.lineno <= each[2]]
    if not functions:
        return ""
    name, first, _ = max(functions, key=lambda each: each[1])
    found = f"{name}, {short(frame.filename)}:{first}"
    return "" if UNTRACED.match(found) else found


@cache
def _parse(file: str) -> ast.Module:
    """The syntax tree of a source file; an empty one if it cannot be read."""
    with suppress(OSError, SyntaxError, UnicodeDecodeError):
        return ast.parse(Path(file).read_text("utf-8"))
    return ast.Module([], [])


@cache
def _functions_in(file: str) -> list[tuple[str, int, int]]:
    """The functions that a source file defines: qualified name, first line with its decorators, last line."""
    found: list[tuple[str, int, int]] = []

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
                first = _first_line(child)
                found.append((f"{prefix}{child.name}", first, child.end_lineno or first))
            visit(child, f"{prefix}{child.name}." if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) else prefix)

    visit(_parse(file), "")
    return found


def source_of(place: str) -> str:
    """The source of a function of torch, with its decorators; empty if it cannot be read."""
    import torch

    file, _, first = _file(place).rpartition(":")
    path = Path(torch.__file__).parents[1] / file
    last = next((last for _, start, last in _functions_in(str(path)) if str(start) == first), None)
    return "\n".join(_lines_of(str(path))[int(first) - 1 : last]) if last is not None else ""


@cache
def _lines_of(file: str) -> list[str]:
    return Path(file).read_text("utf-8").splitlines()


def _first_line(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The first line of a function, with its decorators."""
    return min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])


@cache
def _functions_at(place: str) -> list[ast.FunctionDef]:
    """The syntax tree of a function of torch, as a list; empty if there is none at its line."""
    import torch

    file, _, first = _file(place).rpartition(":")
    tree = _parse(str(Path(torch.__file__).parents[1] / file))
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and _first_line(node) == int(first)]


@cache
def tail_calls(place: str) -> dict[int, str]:
    """By the line of each ``return`` of a function of torch that returns what another function does: the name of that function."""
    returns = (node for function in _functions_at(place) for node in ast.walk(function) if isinstance(node, ast.Return))
    calls = {node.lineno: node.value for node in returns if isinstance(node.value, ast.Call)}
    return {line: call.func.id for line, call in calls.items() if isinstance(call.func, ast.Name)}


@cache
def names_in(place: str) -> frozenset[str]:
    """The names that the source of a function of torch mentions; empty if there is no function at its line."""
    nodes = (node for function in _functions_at(place) for node in ast.walk(function))
    return frozenset(node.id if isinstance(node, ast.Name) else node.attr for node in nodes if isinstance(node, (ast.Name, ast.Attribute)))


@cache
def raise_lines(place: str) -> frozenset[int]:
    """The lines at which a function of torch raises or asserts by itself."""
    nodes = (node for function in _functions_at(place) for node in ast.walk(function))
    return frozenset(node.lineno for node in nodes if isinstance(node, (ast.Raise, ast.Assert)))


def is_backward(place: str) -> bool:
    """Whether it is the backward of an autograd function."""
    return _name(place) == "backward"


def backward_in_error(text: str) -> str:
    """The ``backward`` of the autograd function whose gradient torch's engine refuses in an error; else empty."""
    found = re.search(r"Function (\w+)Backward returned an invalid gradient", text)
    return f"{found[1]}.backward" if found else ""


def is_step(place: str) -> bool:
    """Whether a call of this function is a step worth listing: it works on sharded tensors or checkpoints."""
    functions = next((functions for file, functions in STEPS.items() if _file(place).startswith(file)), ())
    return is_candidate(place) and (functions is None or _name(place) in functions)


def _name(place: str) -> str:
    """The name of a function without that of its class."""
    return place.partition(",")[0].rpartition(".")[2] or place.partition(",")[0]


def _file(place: str) -> str:
    """``FILE:LINE`` of a place."""
    return place.partition(", ")[2]


def collective_of(place: str) -> str:
    """The collective that a method of a placement calls; empty for other functions."""
    return CALLS.get(_name(place), "") if "/placement_types.py" in place else ""


def collective_called_by(place: str) -> str:
    """The collective that a function calls, judging by its name; else empty."""
    called = CALLED.match(_name(place)) if CALLERS.match(_file(place)) else None
    return called[1] if called else collective_of(place)


@cache
def only_forwards(place: str) -> bool:
    """Whether a function only forwards a call."""
    return FORWARDS.fullmatch(_name(place)) is not None


def is_generic(place: str) -> bool:
    """Whether every op and every redistribution calls it."""
    return GENERIC.match(_file(place)) is not None


def is_candidate(place: str) -> bool:
    """Whether a fault may be in a function: not in dunder methods, ``is_`` predicates, lambdas or comprehensions."""
    name = _name(place)
    return not (name.startswith("<") or (name.startswith("__") and name.endswith("__")) or name.startswith(("is_", "_is_shard_like")))


def constructs_sharded_tensor(place: str) -> bool:
    """Whether it is the constructor of a sharded tensor, or of a container of its shards."""
    return _name(place) in ("__new__", "__init__") and _file(place).startswith((*MAKERS, *SHARDED))


def plans_op(place: str) -> bool:
    """Whether it is the function that calls the rule of an op."""
    return _name(place) == PLANS_OP


def finds_metadata(place: str) -> bool:
    """Whether it is the function that finds the metadata of an op's result, on global shapes."""
    return _name(place) == FINDS_METADATA


def gives_spec(place: str) -> bool:
    """Whether it is the function that gives the operand of an op in place the spec of the op's result."""
    return _name(place) == GIVES_SPEC


@cache
def identifies_cause(place: str) -> bool:
    """Whether a place identifies a cause: every op goes through the other places."""
    generic = is_generic(place) and _name(place) not in LOCAL_SHAPES
    return bool(place) and not (plans_op(place) or finds_metadata(place) or generic)


def is_redistribution(place: str) -> bool:
    """Whether it is the function that carries a planned redistribution out."""
    return _name(place) == REDISTRIBUTES


def cuts_shards(place: str) -> bool:
    """Whether it is a method of a placement, or a helper that cuts, pads and fills shards."""
    return _file(place).startswith(CUTS) and is_candidate(place)


def is_in_home(place: str, chapter: str) -> bool:
    """Whether a function is in one of the files in which to look for the faults of a chapter's laws."""
    return _file(place).startswith(HOMES.get(chapter, ()))


def is_home(place: str, chapter: str) -> bool:
    """Whether to look in a function for the faults of a chapter's laws: it does work in one of the chapter's files, or in one that few
    other laws call."""
    there = _file(place).startswith((*HOMES.get(chapter, ()), *SPECIAL))
    return there and ACTIVE_VERB.match(_name(place)) is not None and not only_forwards(place) and is_candidate(place)


def chapter_about(place: str) -> str:
    """The chapter whose laws are about a function, if one chapter's are."""
    file = _file(place)
    return "op" if file.startswith((RULES, *HANDLERS)) else next((name for name in ABOUT if file.startswith(HOMES[name])), "")


def is_about_meshes(place: str) -> bool:
    """Whether it is a function of device meshes, which most calls use."""
    return _file(place).startswith(MESHES)


def is_about_ops(law: str) -> bool:
    """Whether a law is about ops or redistributions, so that rules and planners come first."""
    return law.startswith(("op.", "redistribute.", "gradient."))


def plans_decomposition(place: str) -> bool:
    """Whether it plans ops by their decomposition."""
    return "tensor/_decompositions.py" in place


def is_derived_partial(place: str) -> bool:
    """Whether it is a method of an undocumented placement derived from ``Partial``."""
    owner = place.partition(".")[0]
    return "/placement_types.py" in place and owner.startswith("_") and owner.endswith("Partial")


def place_in_stack(line: str) -> str:
    """The place in a line of a Python stack, if it is in ``torch.distributed``; else empty."""
    found = re.search(r'File "[^"]*?(torch/distributed/[^"]+)", line (\d+) in (\S+)', line)
    return f"{found[3]}, {found[1]}:{found[2]}" if found else ""


def _begins_with(*verbs: str) -> Callable[[str], bool]:
    """A function that says whether the name of a place begins with one of these verbs."""
    beginning = re.compile(f"_*({'|'.join(verbs)})_")
    return lambda place: beginning.match(_name(place)) is not None


is_comparison = _begins_with("compare")
is_check = _begins_with("check", "compare", "validate", "verify")
analyzes = _begins_with("analyze")  # finds what other methods of its class then apply
applies_analysis = _begins_with("rewrite", "apply")
selects = _begins_with("select")  # chooses among strategies
expands_strategies = _begins_with("expand_to")  # from a rule for one mesh dim to strategies for the whole mesh
