"""A program of steps (:mod:`conformance.program`) as Python that needs torch alone: for reproducers."""

from __future__ import annotations

import math

from conformance.program_names import function_of
from conformance.program_tree import Attribute, Call, Dtype, Literal, Name, Node, Row
from reference.notation import NotationError
from reference.placement import Partial, Placement, Replicate, Shard, StridedShard, parse_placements


def expression(node: Node) -> str:
    """One step as a Python expression. Raises :class:`NotationError` for a write, which is a statement."""
    match node:
        case Literal(value) if isinstance(value, float) and not math.isfinite(value):
            return f'float("{value}")'
        case Name() | Literal() | Dtype():
            return str(node)
        case Row(items, tuple_):
            inner = ", ".join(map(expression, items))
            return f"({inner},)" if tuple_ and len(items) == 1 else f"({inner})" if tuple_ else f"[{inner}]"
        case Attribute(base, name):
            return f"{expression(base)}.{name}"
    if node.function == "getitem":
        return f"{expression(node.args[0])}[{index_source(node.args[1])}]"
    if node.function == "setitem":
        raise NotationError(f"steps: {node} must be a step of its own")
    if node.function == "redistribute":
        return f"{expression(node.args[0])}.redistribute(placements={placements_source(node.args[1])})"
    given = [*map(expression, node.args), *(f"{key}={expression(value)}" for key, value in node.kwargs)]
    if node.base is not None:
        return f"{expression(node.base)}.{node.function}({', '.join(given)})"
    if node.function == "slice":
        return f"slice({', '.join(given)})"
    if node.function.startswith("aten."):
        return f"torch.ops.{node.function}({', '.join(given)})"
    if node.function == "tensor" or function_of(node.function, "") is not None:
        return f"torch.{node.function}({', '.join(given)})"
    return f"{given[0]}.{node.function}({', '.join(given[1:])})"


def index_source(node: Node) -> str:
    """What stands between the brackets of ``x[...]``."""
    items = node.items if isinstance(node, Row) and node.tuple_ and node.items else (node,)
    texts = [_slice_source(item) for item in items]
    return f"{texts[0]}," if isinstance(node, Row) and node.tuple_ and len(texts) == 1 else ", ".join(texts)


def _slice_source(node: Node) -> str:
    if not (isinstance(node, Call) and node.function == "slice" and node.base is None):
        return expression(node)
    parts = ["" if isinstance(arg, Literal) and arg.value is None else expression(arg) for arg in node.args]
    start, stop, *step = [*parts] if len(parts) > 1 else ["", *parts]
    return ":".join([start, stop, *filter(None, step)])


def placements_source(node: Node | str) -> str:
    """Placements of our notation as a Python list: ``[Shard(0), Replicate()]``."""
    text = node if isinstance(node, str) else str(node.value) if isinstance(node, Literal) else ""
    if not text:
        raise NotationError(f"steps: {node} must be placements in quotes, such as 'S(0),R'")
    return f"[{', '.join(map(_placement_source, parse_placements(text)))}]"


def _placement_source(placement: Placement) -> str:
    match placement:
        case Replicate():
            return "Replicate()"
        case Shard(dim):
            return f"Shard({dim})"
        case StridedShard(dim, factor):
            return f"_StridedShard({dim}, split_factor={factor})"
        case Partial(op):
            return f"Partial({op!r})"
    raise NotationError(f"steps: {placement} is made by operators only")
