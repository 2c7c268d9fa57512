"""Programs of steps: what an op case asks torch to do, as one line of text.

A program is steps joined by ``;``, in the syntax of Python calls and without spaces: ``b=sum(a,0);relu(b)``. A step may name its
result; the value of the last step is the result of the program. It is parsed into a small tree and evaluated by walking
that tree, so a text can only call what the rules below name.

===========================================  ========================================================================
``a``, ``b``                                 a tensor of the case, or the result of a step before
``2``, ``-1.5``, ``True``, ``None``, ``'x'``  literals; ``inf`` and ``nan``; ``...``; ``(a,2)``, ``[a,b]``
``torch.int64``                              a dtype
``mean(a,1,keepdim=True)``                   a function of ``torch``; where it has none, the tensor method of the first argument
``add_(a,2)``                                a name that ends in ``_`` is always the in-place method of the first argument
``nn.functional.softmax(a,-1)``              a function of ``torch.nn.functional``, ``linalg``, ``special``, ``fft`` or ``masked``
``aten.mean.dim(a,[0])``                     an overload of ``torch.ops.aten``
``a.add_(2)``, ``a.T``                       a tensor method; the attributes ``T``, ``mT``, ``real`` and ``imag``
``getitem(a,(slice(0,2),None))``             ``a[0:2, None]``
``setitem(a,0,2)``                           ``a[0] = 2``; its value is ``a``
``redistribute(a,'S(0),R')``                 the same tensor placed otherwise; nothing at all to a plain tensor
``tensor(2,dtype=torch.int64)``              a plain tensor
===========================================  ========================================================================

Printing is canonical: parsing what was printed gives the same program.
"""

from __future__ import annotations

import ast
import math
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, cast

import torch

from conformance import compat
from reference.notation import NotationError
from reference.placement import Partial, Placement, Replicate, Shard, StridedShard, parse_placements
from reference.tensors import DTYPES

ATTRIBUTES = ("T", "mT", "real", "imag")
NAMESPACES = ("nn.functional", "linalg", "special", "fft", "masked")
CONSTANTS = {"inf": math.inf, "nan": math.nan}
FORBIDDEN_METHODS = ("apply_", "map_", "map2_", "numpy", "share_memory_", "register_hook", "data_ptr", "storage")


@dataclass(frozen=True)
class Name:
    """A tensor of the case, or the result of an earlier step."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Literal:
    """A number, ``True``, ``None``, a string or ``...``."""

    value: Any

    def __str__(self) -> str:
        if self.value is ...:
            return "..."
        if isinstance(self.value, float) and not math.isfinite(self.value):
            return str(self.value)
        return repr(self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Literal) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))


@dataclass(frozen=True)
class Dtype:
    """``torch.int64`` and its like."""

    name: str

    def __str__(self) -> str:
        return f"torch.{self.name}"


@dataclass(frozen=True)
class Row:
    """A tuple or a list."""

    items: tuple[Node, ...]
    tuple_: bool

    def __str__(self) -> str:
        inner = ",".join(map(str, self.items))
        if not self.tuple_:
            return f"[{inner}]"
        return f"({inner},)" if len(self.items) == 1 else f"({inner})"


@dataclass(frozen=True)
class Call:
    """A function by name, or (``base`` set) a method of ``base``."""

    function: str
    args: tuple[Node, ...]
    kwargs: tuple[tuple[str, Node], ...] = ()
    base: Node | None = None

    def __str__(self) -> str:
        given = ",".join([*map(str, self.args), *(f"{key}={value}" for key, value in self.kwargs)])
        return f"{'' if self.base is None else f'{self.base}.'}{self.function}({given})"


@dataclass(frozen=True)
class Attribute:
    """``a.T`` and its like."""

    base: Node
    name: str

    def __str__(self) -> str:
        return f"{self.base}.{self.name}"


Node = Name | Literal | Dtype | Row | Call | Attribute


@dataclass(frozen=True)
class Step:
    """One expression, and the name of its result where it has one."""

    node: Node
    target: str = ""

    def __str__(self) -> str:
        return f"{self.target}={self.node}" if self.target else str(self.node)


@dataclass(frozen=True)
class Program:
    """Steps, run in order."""

    steps: tuple[Step, ...]

    @classmethod
    def parse(cls, text: str) -> Program:
        """The inverse of ``str``. Raises :class:`NotationError`, which names what is wrong."""
        return _parse(text)

    def __str__(self) -> str:
        return ";".join(map(str, self.steps))

    def functions(self) -> list[str]:
        """The names of all functions and methods that are called, in the order of the text."""
        return [node.function for step in self.steps for node in _walk(step.node) if isinstance(node, Call)]

    def names(self) -> frozenset[str]:
        """The tensors that the program wants from its case."""
        return self._names

    @cached_property
    def _names(self) -> frozenset[str]:
        wanted: set[str] = set()
        made: set[str] = set()
        for step in self.steps:
            wanted |= {node.name for node in _walk(step.node) if isinstance(node, Name)} - made
            made.add(step.target)
        return frozenset(wanted)

    def run(self, tensors: Mapping[str, Any], redistribute: Callable[[Any, str], Any] | None = None) -> list[Any]:
        """The value of every step. ``redistribute`` places a tensor otherwise; without it, placements mean nothing."""
        known = dict(tensors)
        place = redistribute or (lambda tensor, placements: tensor)
        values = []
        for step in self.steps:
            values.append(_value(step.node, known, place))
            if step.target:
                known[step.target] = values[-1]
        return values

    def source(self, result: str = "out") -> list[str]:
        """The program as lines of Python that need ``torch`` and placements alone; the last step's value is called ``result``."""
        lines = []
        for at, step in enumerate(self.steps):
            last = at == len(self.steps) - 1
            if isinstance(step.node, Call) and step.node.function == "setitem":
                base, index, value = step.node.args
                lines.append(f"{_source(base)}[{_index_source(index)}] = {_source(value)}")
                name = result if last else step.target
                lines += [f"{name} = {_source(base)}"] if name else []
                continue
            name = result if last else step.target
            lines.append(f"{name} = {_source(step.node)}" if name else _source(step.node))
        return lines


@cache
def _parse(text: str) -> Program:
    def wrong(reason: str) -> NotationError:
        return NotationError(f"steps {text!r}: {reason}")

    def literal(node: ast.expr) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name) and node.id in CONSTANTS:
            return CONSTANTS[node.id]
        raise wrong(f"{ast.unparse(node)} is no literal")

    def dotted(node: ast.expr) -> str | None:
        if isinstance(node, ast.Name):
            return node.id
        if isinstance(node, ast.Attribute):
            base = dotted(node.value)
            return f"{base}.{node.attr}" if base else None
        return None

    def read(node: ast.expr) -> Node:
        match node:
            case ast.Name(id=name):
                return Literal(CONSTANTS[name]) if name in CONSTANTS else Name(name)
            case ast.Constant(value=value) if not isinstance(value, bytes):
                return Literal(value)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                value = literal(operand)
                if isinstance(value, bool) or not isinstance(value, (int, float, complex)):
                    raise wrong(f"-{ast.unparse(operand)} is no number")
                return Literal(-value)
            case ast.Tuple(elts=items):
                return Row(tuple(map(read, items)), True)
            case ast.List(elts=items):
                return Row(tuple(map(read, items)), False)
            case ast.Attribute(value=ast.Name(id="torch"), attr=name):
                if name not in DTYPES:
                    raise wrong(f"torch.{name} is no dtype of {', '.join(DTYPES)}")
                return Dtype(name)
            case ast.Attribute(value=base, attr=name):
                if name not in ATTRIBUTES:
                    raise wrong(f"the attribute .{name} is none of {', '.join(ATTRIBUTES)}")
                return Attribute(read(base), name)
            case ast.Call(func=func, args=args, keywords=keywords):
                if any(keyword.arg is None for keyword in keywords):
                    raise wrong("** is not allowed")
                given = tuple(map(read, args)), tuple((str(keyword.arg), read(keyword.value)) for keyword in keywords)
                called = dotted(func)
                if called and (isinstance(func, ast.Name) or called.rpartition(".")[0] in NAMESPACES or called.startswith("aten.")):
                    _callable(called, text)
                    return Call(called, *given)
                if isinstance(func, ast.Attribute):
                    _method(func.attr, text)
                    return Call(func.attr, *given, base=read(func.value))
        raise wrong(f"{ast.unparse(node)!r} is no name, literal, list or call")

    try:
        body = ast.parse(text).body
    except SyntaxError as error:
        raise wrong(f"{error.msg} at character {error.offset}") from None
    steps = []
    for statement in body:
        match statement:
            case ast.Expr(value=value):
                steps.append(Step(read(value)))
            case ast.Assign(targets=[ast.Name(id=target)], value=value):
                steps.append(Step(read(value), target))
            case _:
                raise wrong(f"{ast.unparse(statement)!r} is neither CALL nor NAME=CALL")
    if not steps:
        raise wrong("want at least one step, such as mean(a,1)")
    return Program(tuple(steps))


def _walk(node: Node) -> Iterator[Node]:
    yield node
    children: tuple[Node, ...] = ()
    if isinstance(node, Row):
        children = node.items
    elif isinstance(node, Attribute):
        children = (node.base,)
    elif isinstance(node, Call):
        children = (*((node.base,) if node.base is not None else ()), *node.args, *(value for _, value in node.kwargs))
    for child in children:
        yield from _walk(child)


def _getitem(base: Any, index: Any) -> Any:
    return base[index]


def _setitem(base: Any, index: Any, value: Any) -> Any:
    base[index] = value
    return base


SPECIAL: dict[str, Callable[..., Any]] = {"getitem": _getitem, "setitem": _setitem, "slice": slice, "tensor": torch.tensor}


@cache
def _functions() -> frozenset[str]:
    """The functions of ``torch`` that are ops."""
    return frozenset({*torch.functional.__all__, *dir(compat.name("functions"))})


@cache
def _callable(name: str, text: str) -> Callable[..., Any] | None:
    """The function behind a name; ``None`` for the tensor method of the first argument. Raises :class:`NotationError`."""
    if name in SPECIAL or name == "redistribute":
        return SPECIAL.get(name)
    if name.startswith("aten."):
        found: Any = torch.ops.aten
        for part in name.split(".")[1:]:
            found = getattr(found, part, None)
        if isinstance(found, compat.name("OpOverload")):
            return cast(Callable[..., Any], found)
        raise NotationError(f"steps {text!r}: torch.ops.{name} is no overload, such as aten.mean.dim")
    space, _, last = name.rpartition(".")
    if space:
        module: Any = torch
        for part in space.split("."):
            module = getattr(module, part)
        found = getattr(module, last, None)
        if isinstance(found, (types.FunctionType, types.BuiltinFunctionType)) and not last.startswith("_"):
            return found
        raise NotationError(f"steps {text!r}: torch.{space} has no function {last!r}")
    if name in _functions() and not name.startswith("__") and not (name.endswith("_") and hasattr(torch.Tensor, name)):
        return getattr(torch, name)  # type: ignore[no-any-return]
    _method(name, text)
    return None


def _method(name: str, text: str) -> None:
    if name.startswith("_") or name in FORBIDDEN_METHODS or not callable(getattr(torch.Tensor, name, None)):
        raise NotationError(f"steps {text!r}: no op is called {name!r}, neither a function of torch nor a tensor method")


def _value(node: Node, known: Mapping[str, Any], place: Callable[[Any, str], Any]) -> Any:
    match node:
        case Name(name):
            if name not in known:
                raise NotationError(f"steps: {name!r} is neither a tensor of the case nor the result of an earlier step")
            return known[name]
        case Literal(value):
            return value
        case Dtype(name):
            return DTYPES[name]
        case Row(items, tuple_):
            values = [_value(item, known, place) for item in items]
            return tuple(values) if tuple_ else values
        case Attribute(base, name):
            return getattr(_value(base, known, place), name)
    args = [_value(arg, known, place) for arg in node.args]
    kwargs = {key: _value(value, known, place) for key, value in node.kwargs}
    if node.base is not None:
        return getattr(_value(node.base, known, place), node.function)(*args, **kwargs)
    if node.function == "redistribute":
        return place(*args, **kwargs)
    function = _callable(node.function, "")
    if function is not None:
        return function(*args, **kwargs)
    if not args:
        raise NotationError(f"steps: {node} has no first argument to be a method of")
    return getattr(args[0], node.function)(*args[1:], **kwargs)


def _source(node: Node) -> str:
    match node:
        case Literal(value) if isinstance(value, float) and not math.isfinite(value):
            return f'float("{value}")'
        case Name() | Literal() | Dtype():
            return str(node)
        case Row(items, tuple_):
            inner = ", ".join(map(_source, items))
            return f"({inner},)" if tuple_ and len(items) == 1 else f"({inner})" if tuple_ else f"[{inner}]"
        case Attribute(base, name):
            return f"{_source(base)}.{name}"
    if node.function == "getitem":
        return f"{_source(node.args[0])}[{_index_source(node.args[1])}]"
    if node.function == "setitem":
        raise NotationError(f"steps: {node} must be a step of its own")
    if node.function == "redistribute":
        return f"{_source(node.args[0])}.redistribute(placements={placements_source(node.args[1])})"
    given = [*map(_source, node.args), *(f"{key}={_source(value)}" for key, value in node.kwargs)]
    if node.base is not None:
        return f"{_source(node.base)}.{node.function}({', '.join(given)})"
    if node.function == "slice":
        return f"slice({', '.join(given)})"
    if node.function.startswith("aten."):
        return f"torch.ops.{node.function}({', '.join(given)})"
    if node.function == "tensor" or _callable(node.function, "") is not None:
        return f"torch.{node.function}({', '.join(given)})"
    return f"{given[0]}.{node.function}({', '.join(given[1:])})"


def _index_source(node: Node) -> str:
    items = node.items if isinstance(node, Row) and node.tuple_ and node.items else (node,)
    texts = [_slice_source(item) for item in items]
    return f"{texts[0]}," if isinstance(node, Row) and node.tuple_ and len(texts) == 1 else ", ".join(texts)


def _slice_source(node: Node) -> str:
    if not (isinstance(node, Call) and node.function == "slice" and node.base is None):
        return _source(node)
    parts = ["" if isinstance(arg, Literal) and arg.value is None else _source(arg) for arg in node.args]
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
