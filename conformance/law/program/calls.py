"""The features of a program, read from its steps.

The name of a function decides what an argument means: a number is an operand of ``add``, a dim of ``softmax``, an extent of ``reshape``.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

from shardlaw.conformance.law.program.parse import Program
from shardlaw.conformance.law.program.python import CONSTANTS, function_name, walk_expression
from shardlaw.reference.tensors import RARE_DTYPES


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# The tables hold names of functions, without the underscore of the in-place form.
# numbers are operands
SCALAR_OPERANDS = words(
    """add sub rsub mul div true_divide floor_divide remainder fmod pow float_power eq ne lt le gt ge maximum minimum where fill clamp
    clamp_min clamp_max masked_fill addcmul addcdiv lerp full_like bitwise_and bitwise_or bitwise_xor xlogy copysign threshold hypot
    atan2 logical_and logical_or logical_xor index_fill nan_to_num heaviside ldexp"""
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
    """sum mean amax amin var std prod any all logsumexp norm linalg.vector_norm linalg.matrix_norm var_mean std_mean nansum nanmean
    count_nonzero aminmax squeeze flip"""
)
VIEWS = words(
    """view reshape expand permute transpose t T mT squeeze unsqueeze select narrow getitem split chunk unbind flatten unflatten movedim
    swapaxes swapdims diagonal view_as expand_as real imag unfold tensor_split hsplit vsplit dsplit detach as_strided ravel"""
)
SEVERAL_OUTPUTS = words(
    """split chunk unbind sort topk var_mean std_mean aminmax cummax cummin kthvalue mode tensor_split hsplit vsplit dsplit
    split_with_sizes native_layer_norm meshgrid linalg.qr linalg.svd linalg.eigh"""
)
SEVERAL_WITH_DIM = words("max min median nanmedian")
# reductions that are undefined for no elements; so are norms of infinite order
NO_IDENTITY = words("amax amin max min argmax argmin aminmax mode kthvalue _foreach_max")
NORMS = words("norm linalg.norm linalg.vector_norm linalg.matrix_norm _foreach_norm")


@lru_cache(8192)
def program_features(text: str) -> frozenset[str]:
    """The features of a program of steps."""
    steps = Program.parse(text).tree.body
    found: set[str] = set()
    nodes = [node for step in steps for node in walk_expression(step.value)]  # type: ignore[attr-defined]
    calls = [name for node in nodes if isinstance(node, ast.Call) and (name := _plain_name(node)) not in ("slice", "tensor")]
    used = [node.id for node in nodes if isinstance(node, ast.Name) and node.id not in CONSTANTS]
    if len(calls) > 1:
        found.add("program")
    if len(set(used)) < len(used):
        found.add("reused")
    if len(set(calls)) < len(calls):
        found.add("repeated")
    views = {target.id for step in steps if isinstance(step, ast.Assign) and _is_view(step.value) for target in step.targets}  # type: ignore[attr-defined]
    for node in nodes:
        if isinstance(node, ast.Attribute) and node.attr in RARE_DTYPES:
            found.add("rare-dtype")
        elif isinstance(node, ast.Attribute) and _is_view(node):
            found.add("view")
        elif isinstance(node, ast.Call):
            found.update(_call_features(node, views))
    return frozenset(found)


def _call_features(call: ast.Call, views: set[str]) -> Iterator[str]:
    """The features of one call; ``views`` are the names of steps that are views."""
    plain, function = _plain_name(call), function_name(call)
    if plain == "redistribute":
        yield "redistributed"
    elif plain == "tensor":
        yield "scalar:tensor"
    if plain in ("redistribute", "tensor", "slice"):
        return
    args = call.args if function else [call.func.value, *call.args]  # type: ignore[attr-defined]
    operands, keywords = args[1:], {str(keyword.arg): keyword.value for keyword in call.keywords}
    if (function or _method(call)).endswith("_") or plain == "setitem":
        yield "in-place"
        if args and (_is_view(args[0]) or (isinstance(args[0], ast.Name) and args[0].id in views)):
            yield "write-through-view"
    if any(isinstance(arg, (ast.Tuple, ast.List)) and any(map(_is_operand, arg.elts)) for arg in call.args):
        yield "operands-in-list"
    yield from _result_features(plain, operands, keywords)
    yield from _option_features(plain, operands, keywords)
    if plain in SCALAR_OPERANDS:
        yield from (f"scalar:{type(_value(arg)).__name__}" for arg in call.args if type(_value(arg)) in (int, float, bool))
    elif plain in DIM_FIRST and operands:
        yield from _dim_features(operands[0], plain)
    elif plain not in NOT_DIMS:
        for arg in (*operands, *(keywords[name] for name in ("dim", "dims") if name in keywords)):
            yield from _dim_features(arg, plain)


def _result_features(function: str, operands: Sequence[ast.expr], keywords: Mapping[str, ast.expr]) -> Iterator[str]:
    """What kind of result a call has."""
    if function in VIEWS:
        yield "view"
    if function in SEVERAL_OUTPUTS or (function in SEVERAL_WITH_DIM and any(map(_is_literal, operands))):
        yield "several-outputs"
    orders = (*operands[:1], *(keywords[name] for name in ("ord", "p") if name in keywords))
    if function in NO_IDENTITY or (function in NORMS and any(map(_is_infinite_or_negative, orders))):
        yield "no-identity"


def _option_features(function: str, operands: Sequence[ast.expr], keywords: Mapping[str, ast.expr]) -> Iterator[str]:
    """The features of keyword arguments, and of ``keepdim`` where it is the third argument."""
    for name in keywords:
        if name == "out":
            yield "out-argument"
        elif name not in ("dim", "keepdim"):
            yield f"option:{name}"
    by_position = operands[1] if function in MANY_DIMS | SEVERAL_WITH_DIM and len(operands) > 1 else None
    keepdim = keywords.get("keepdim", by_position)
    if isinstance(keepdim, ast.Constant) and keepdim.value is True:
        yield "keepdim"


def _dim_features(arg: ast.expr, function: str) -> Iterator[str]:
    items = arg.elts if isinstance(arg, (ast.Tuple, ast.List)) else [arg]
    values = [_value(item) for item in items]
    if any(type(value) is int and value < 0 for value in values):
        yield "negative-dim"
    if function in MANY_DIMS and isinstance(arg, (ast.Tuple, ast.List)):
        yield "dim-tuple" if items else "dim-empty"
    if function in MANY_DIMS | SEVERAL_WITH_DIM and isinstance(arg, ast.Constant) and arg.value is None:
        yield "dim-none"


def _value(arg: ast.AST) -> object:
    """The value of a literal, else the tree itself."""
    match arg:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name) if name in CONSTANTS:
            return float(name)
        case ast.UnaryOp(operand=operand):
            return -_value(operand)  # type: ignore[operator]
    return arg


def _is_literal(arg: ast.AST) -> bool:
    return _value(arg) is not arg


def _is_infinite_or_negative(arg: ast.AST) -> bool:
    value = _value(arg)
    return isinstance(value, (int, float)) and (value == float("inf") or value < 0)


def _is_operand(arg: ast.AST) -> bool:
    return isinstance(arg, ast.Name) and arg.id not in CONSTANTS


def _method(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else ""


def _plain_name(call: ast.Call) -> str:
    """The name of the function without its in-place underscore; for an aten overload the name of the packet."""
    name = function_name(call) or _method(call)
    name = name.removeprefix("aten.").partition(".")[0] if name.startswith("aten.") else name
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


def _is_view(node: ast.AST) -> bool:
    if isinstance(node, ast.Attribute):
        return not (isinstance(node.value, ast.Name) and node.value.id == "torch")  # else a dtype
    return isinstance(node, ast.Call) and _plain_name(node) in VIEWS
