"""Translates a program of steps (:mod:`shardlaw.conformance.law.program.parse`) into a function of plain torch code."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed.tensor import Partial, Replicate, Shard

from shardlaw.conformance import compat
from shardlaw.conformance.law import literal
from shardlaw.conformance.law.program.names import NAMESPACES, check_method, place_of
from shardlaw.reference.notation import NotationError
from shardlaw.reference.placement import MaskPartial, parse_placements
from shardlaw.reference.tensors import DTYPES, FORMATS, RARE_DTYPES

ATTRIBUTES = ("T", "mT", "real", "imag")
CONSTANTS = ("inf", "nan")
# names in the code other than operands and steps
GLOBALS = ("torch", "slice", "Partial", "Replicate", "Shard", compat.STRIDED_SHARD, "redistribute", "operands")


class StepsFunction:
    """``steps(operands)``, which returns the value of every step. With ``plain`` it calls a function ``redistribute`` instead of the
    method of a DTensor.

    ``lines`` are its source, ``names`` the operands that it takes. Raises :class:`NotationError`.
    """

    def __init__(self, program: ast.Module, *, plain: bool = False) -> None:
        if not program.body:
            raise NotationError("want at least one step, such as mean(a,1)")
        self._plain = plain
        self._bound: set[str] = set()
        self.names: set[str] = set()
        targets = [_step_target(step) for step in program.body]
        body, results = list[str](), list[str]()
        for at, (step, target) in enumerate(zip(program.body, targets, strict=True)):
            result = target if target and target not in targets[at + 1 :] else f"step{at + 1}"  # a name that no later step rebinds
            body += self._lines(list(dict.fromkeys(filter(None, (result, target)))), step.value)  # type: ignore[attr-defined]
            self._bound.add(target)
            results.append(result)
        taken = [f"{name} = operands[{name!r}]" for name in sorted(self.names)]
        self.lines = [
            "def steps(operands):",
            *(f"    {line}" for line in [*taken, *body, f"return [{', '.join(results)}]"]),
        ]

    def compiled(self, **more: Any) -> Callable[..., Any]:
        """The function; ``more`` are further globals."""
        text = "\n".join(self.lines)
        known = {"torch": torch, "Partial": Partial, "Replicate": Replicate, "Shard": Shard, **more}
        if compat.STRIDED_SHARD in text:
            known[compat.STRIDED_SHARD] = compat.name("StridedShard")
        exec(compile(text, "<steps>", "exec"), known)
        return known["steps"]  # type: ignore[no-any-return]

    def _lines(self, names: list[str], value: ast.expr) -> list[str]:
        match value:
            case ast.Call(func=ast.Name(id="setitem"), args=[base, index, new], keywords=[]):
                written = self._text(base)
                named = " = ".join([*names, written])
                if isinstance(base, ast.Name):
                    return [f"{written}[{self._index(index)}] = {self._text(new)}", named]
                return [named, f"{names[0]}[{self._index(index)}] = {self._text(new)}"]
        return [" = ".join([*names, self._text(value)])]

    def _text(self, node: ast.expr) -> str:
        """An expression of the notation as torch code."""
        match node:
            case ast.Name(id=name):
                if name in CONSTANTS:
                    return f"torch.{name}"
                if name not in self._bound:
                    self.names.add(name)
                return name
            case ast.Constant(value=value) if not isinstance(value, bytes):
                return "..." if value is ... else repr(value)
            case ast.UnaryOp(op=ast.USub(), operand=operand) if _is_number(operand):
                return f"-{self._text(operand)}"
            case ast.Tuple(elts=items):
                return f"({self._texts(items)}{',' * (len(items) == 1)})"
            case ast.List(elts=items):
                return f"[{self._texts(items)}]"
            case ast.Attribute(value=ast.Name(id="torch"), attr=name):
                if name not in (known := (*DTYPES, *RARE_DTYPES, *FORMATS)):
                    raise NotationError(f"torch.{name} is none of {', '.join(known)}")
                return f"torch.{name}"
            case ast.Attribute(value=base, attr=name):
                if name not in ATTRIBUTES:
                    raise NotationError(f"the attribute .{name} is none of {', '.join(ATTRIBUTES)}")
                return f"{self._text(base)}.{name}"
            case ast.Call():
                return self._call(node)
        raise NotationError(f"{ast.unparse(node)!r} is no name, literal, list or call")

    def _texts(self, nodes: Sequence[ast.expr]) -> str:
        return ", ".join(map(self._text, nodes))

    def _call(self, node: ast.Call) -> str:
        if any(keyword.arg is None for keyword in node.keywords):
            raise NotationError("** is not allowed")
        given = ", ".join([*map(self._text, node.args), *(f"{keyword.arg}={self._text(keyword.value)}" for keyword in node.keywords)])
        called = function_name(node)
        if not called:
            if not isinstance(node.func, ast.Attribute):
                raise NotationError(f"{ast.unparse(node)!r} is no name, literal, list or call")
            check_method(node.func.attr)
            return f"{self._text(node.func.value)}.{node.func.attr}({given})"
        match called, node.args:
            case "getitem", [base, index]:
                return f"{self._text(base)}[{self._index(index)}]"
            case "redistribute", [base, ast.Constant(value=str(placements))]:
                return f"redistribute({given})" if self._plain else f"{self._text(base)}.redistribute(placements={_placements(placements)})"
            case "slice", [_, *_]:
                return f"slice({given})"
            case "tensor", [_, *_]:
                return f"torch.tensor({given})"
            case (("getitem" | "setitem" | "redistribute" | "slice" | "tensor"), _):
                raise NotationError(f"{ast.unparse(node)} is not as the notation says; a write is a step of its own")
        place = place_of(called)
        if place is not None:
            return f"{place}({given})"
        if not node.args:
            raise NotationError(f"{ast.unparse(node)} has no first argument to be a method of")
        first = self._text(node.args[0])
        return f"{first}.{called}({given[len(first) :].removeprefix(', ')})"

    def _index(self, node: ast.expr) -> str:
        """The text between the brackets of ``x[...]``."""
        match node:
            case ast.Tuple(elts=[item]):
                return f"{self._index(item)},"
            case ast.Tuple(elts=[_, *_] as items):
                return ", ".join(map(self._index, items))
            case ast.Call(func=ast.Name(id="slice"), args=[_, *_] as given, keywords=[]) if len(given) <= 3:
                parts = ["" if isinstance(arg, ast.Constant) and arg.value is None else self._text(arg) for arg in given]
                start, stop, *step = parts if len(parts) > 1 else ["", *parts]
                return ":".join([start, stop, *filter(None, step)])
        return self._text(node)


def _step_target(step: ast.stmt) -> str:
    match step:
        case ast.Expr():
            return ""
        case ast.Assign(targets=[ast.Name(id=name)]) if name not in (*GLOBALS, *CONSTANTS):
            return name
    raise NotationError(f"{ast.unparse(step)!r} is neither CALL nor NAME=CALL")


def _is_number(node: ast.expr) -> bool:
    return (isinstance(node, ast.Name) and node.id in CONSTANTS) or (
        isinstance(node, ast.Constant) and type(node.value) in (int, float, complex)
    )


def function_name(node: ast.Call) -> str:
    """The name of the function that a call of the notation calls; empty for a method of an expression."""
    if isinstance(node.func, ast.Name):
        return node.func.id
    name = _path(node.func)
    return name if name.rpartition(".")[0] in NAMESPACES or name.startswith("aten.") else ""


def _path(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=base, attr=name) if path := _path(base):
            return f"{path}.{name}"
    return ""


def walk_expression(node: ast.expr) -> Iterator[ast.expr]:
    """An expression of the notation and all its subexpressions, except names of functions, methods and dtypes."""
    yield node
    below: list[ast.expr] = []
    if isinstance(node, ast.Call):
        below = [*node.args, *(keyword.value for keyword in node.keywords)]
        if not function_name(node) and isinstance(node.func, ast.Attribute):
            below.insert(0, node.func.value)
    elif isinstance(node, (ast.Tuple, ast.List)):
        below = node.elts
    elif isinstance(node, ast.Attribute) and not (isinstance(node.value, ast.Name) and node.value.id == "torch"):
        below = [node.value]
    for child in below:
        yield from walk_expression(child)


def _placements(text: str) -> str:
    placements = parse_placements(text)
    if any(isinstance(placement, MaskPartial) for placement in placements):
        raise NotationError(f"{text!r}: a masked reduction is made by operators only")
    return literal.placements_literal(placements)
