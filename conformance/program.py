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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

from conformance.program_names import NAMESPACES, function_of, want_method
from conformance.program_source import expression, index_source
from conformance.program_tree import Attribute, Call, Dtype, Literal, Name, Node, Row, Step, walk
from reference.notation import NotationError
from reference.tensors import DTYPES

ATTRIBUTES = ("T", "mT", "real", "imag")
CONSTANTS = {"inf": math.inf, "nan": math.nan}


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
        return [node.function for step in self.steps for node in walk(step.node) if isinstance(node, Call)]

    def names(self) -> frozenset[str]:
        """The tensors that the program wants from its case."""
        return self._names

    @cached_property
    def _names(self) -> frozenset[str]:
        wanted: set[str] = set()
        made: set[str] = set()
        for step in self.steps:
            wanted |= {node.name for node in walk(step.node) if isinstance(node, Name)} - made
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
                lines.append(f"{expression(base)}[{index_source(index)}] = {expression(value)}")
                name = result if last else step.target
                lines += [f"{name} = {expression(base)}"] if name else []
                continue
            name = result if last else step.target
            lines.append(f"{name} = {expression(step.node)}" if name else expression(step.node))
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
                    function_of(called, text)
                    return Call(called, *given)
                if isinstance(func, ast.Attribute):
                    want_method(func.attr, text)
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
    function = function_of(node.function, "")
    if function is not None:
        return function(*args, **kwargs)
    if not args:
        raise NotationError(f"steps: {node} has no first argument to be a method of")
    return getattr(args[0], node.function)(*args[1:], **kwargs)
