"""What the calls of a program depart in: features read from its steps.

What an argument means is known by the name of the function: a number is an operand of ``add``, a dim of ``softmax``, an extent of
``reshape``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache

from conformance.program import Program
from conformance.program_tree import Attribute, Call, Literal, Name, Node, Row, walk


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Names of functions, without the underscore of the in-place form.
# numbers are operands
SCALAR_OPERANDS = words(
    """add sub rsub mul div true_divide floor_divide remainder fmod pow float_power eq ne lt le gt ge maximum minimum where
    fill clamp clamp_min clamp_max masked_fill addcmul addcdiv lerp full_like bitwise_and bitwise_or bitwise_xor xlogy
    copysign threshold hypot atan2 logical_and logical_or logical_xor index_fill nan_to_num heaviside ldexp"""
)
# numbers are extents, positions or counts
NOT_DIMS = words(
    """view reshape expand roll getitem setitem pad tile repeat unflatten select narrow split chunk tril triu diag diagonal
    nn.functional.pad new_zeros new_full linspace round one_hot nn.functional.one_hot"""
)
# the first number is a dim, the others are not
DIM_FIRST = words("select narrow")
# one dim or several
MANY_DIMS = words(
    """sum mean amax amin var std prod any all logsumexp norm linalg.vector_norm linalg.matrix_norm var_mean std_mean nansum
    nanmean count_nonzero aminmax squeeze flip"""
)
VIEWS = words(
    """view reshape expand permute transpose t T mT squeeze unsqueeze select narrow getitem split chunk unbind flatten
    unflatten movedim swapaxes swapdims diagonal view_as expand_as real imag unfold tensor_split hsplit vsplit dsplit detach
    as_strided ravel"""
)
SEVERAL_OUTPUTS = words(
    """split chunk unbind sort topk var_mean std_mean aminmax cummax cummin kthvalue mode tensor_split hsplit vsplit dsplit
    split_with_sizes native_layer_norm meshgrid linalg.qr linalg.svd linalg.eigh"""
)
SEVERAL_WITH_DIM = words("max min median nanmedian")
# reductions that no elements at all do not have; with an infinite order norms are, too
NO_IDENTITY = words("amax amin max min argmax argmin aminmax mode kthvalue _foreach_max")
NORMS = words("norm linalg.norm linalg.vector_norm linalg.matrix_norm _foreach_norm")


@lru_cache(8192)
def of_steps(text: str) -> frozenset[str]:
    """What a program of steps departs in."""
    program = Program.parse(text)
    found: set[str] = set()
    nodes = [node for step in program.steps for node in walk(step.node)]
    calls = [node for node in nodes if isinstance(node, Call) and node.function not in ("slice", "tensor")]
    used = [node.name for node in nodes if isinstance(node, Name)]
    if len(calls) > 1:
        found.add("program")
    if len(set(used)) < len(used):
        found.add("reused")
    if len({_plain_name(call) for call in calls}) < len(calls):
        found.add("repeated")
    views = {step.target for step in program.steps if _is_view(step.node)}
    for step in program.steps:
        for node in walk(step.node):
            if isinstance(node, Attribute):
                found.add("view")
            elif isinstance(node, Call):
                found.update(_of_call(node, views))
    return frozenset(found)


def _of_call(call: Call, views: set[str]) -> Iterator[str]:
    plain, operands = _plain_name(call), call.args if call.base is not None else call.args[1:]
    if plain == "redistribute":
        yield "redistributed"
        return
    if plain in ("tensor", "slice"):
        yield from ["scalar:tensor"] * (plain == "tensor")
        return
    changed = call.base if call.base is not None else call.args[0] if call.args else None
    if call.function.endswith("_") or plain == "setitem":
        yield "in-place"
        if changed is not None and (_is_view(changed) or (isinstance(changed, Name) and changed.name in views)):
            yield "write-through-view"
    if plain in VIEWS:
        yield "view"
    if plain in SEVERAL_OUTPUTS or (plain in SEVERAL_WITH_DIM and any(isinstance(arg, Literal) for arg in operands)):
        yield "several-outputs"
    if any(isinstance(arg, Row) and any(isinstance(item, Name) for item in arg.items) for arg in call.args):
        yield "operands-in-list"
    keywords = dict(call.kwargs)
    if plain in NO_IDENTITY or (plain in NORMS and any(map(_is_infinite, (*operands, *keywords.values())))):
        yield "no-identity"
    for name in keywords:
        if name == "out":
            yield "out-argument"
        elif name not in ("dim", "keepdim"):
            yield f"option:{name}"
    kept = keywords.get("keepdim", operands[1] if plain in MANY_DIMS | SEVERAL_WITH_DIM and len(operands) > 1 else None)
    if isinstance(kept, Literal) and kept.value is True:
        yield "keepdim"
    if plain in SCALAR_OPERANDS:
        yield from (
            f"scalar:{type(arg.value).__name__}" for arg in call.args if isinstance(arg, Literal) and type(arg.value) in (int, float, bool)
        )
    elif plain in DIM_FIRST and operands:
        yield from _of_dim(operands[0], plain)
    elif plain not in NOT_DIMS:
        for arg in (*operands, *(keywords[name] for name in ("dim", "dims") if name in keywords)):
            yield from _of_dim(arg, plain)


def _of_dim(arg: Node, function: str) -> Iterator[str]:
    items = arg.items if isinstance(arg, Row) else (arg,)
    if any(isinstance(item, Literal) and type(item.value) is int and item.value < 0 for item in items):
        yield "negative-dim"
    if function in MANY_DIMS and isinstance(arg, Row):
        yield "dim-tuple" if items else "dim-empty"
    if function in MANY_DIMS | SEVERAL_WITH_DIM and isinstance(arg, Literal) and arg.value is None:
        yield "dim-none"


def _is_infinite(arg: Node) -> bool:
    return isinstance(arg, Literal) and arg.value in (math.inf, -math.inf)


def _plain_name(call: Call) -> str:
    """The function without its in-place underscore; of an overload of aten, the packet."""
    name = call.function.removeprefix("aten.").partition(".")[0] if call.function.startswith("aten.") else call.function
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


def _is_view(node: Node) -> bool:
    return isinstance(node, Attribute) or (isinstance(node, Call) and _plain_name(node) in VIEWS)
