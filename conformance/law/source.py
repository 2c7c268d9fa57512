"""Copies the source of a function, and of everything it uses, into a script that imports torch alone.

The names in a function are looked up in the source of its module. Functions, classes and constants of this project are copied, with the
names that they use in turn. Imports of torch and the standard library become imports of the script; ``compat.NAME`` becomes an import from
its place in the installed torch. Annotations, docstrings and most decorators are removed.
"""

from __future__ import annotations

import ast
import builtins
import copy
import importlib
import inspect
import symtable
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, cast

from shardlaw.conformance import compat
from shardlaw.conformance.law.literal import literal

PACKAGE = "shardlaw"
COMPAT = compat.__name__
KEPT_DECORATORS = {"staticmethod", "classmethod", "property", "contextmanager", "cache", "no_grad", "override", "wraps"}


class SourceError(ValueError):
    """A function that cannot be copied into a script: it uses the harness, or its source cannot be found."""


@dataclass
class Sources:
    """The imports and definitions of a script, by name, each definition after those that it uses. ``homes``: the module of each name."""

    imports: dict[str, str] = field(default_factory=dict)
    definitions: dict[str, str] = field(default_factory=dict)
    homes: dict[str, str] = field(default_factory=dict)

    def add(self, function: Callable[..., Any], name: str = "") -> str:
        """Add a function, as ``name`` where one is given. Returns its name in the script."""
        self._free_variables(function)
        bound = {*inspect.signature(function).parameters, *function.__code__.co_freevars}
        name = name or function.__name__
        code = function.__code__
        self._define(
            name, function.__module__, lambda: _function_definition(function.__module__, code.co_firstlineno, code.co_name, name), bound
        )
        return name

    def include(self, item: Any) -> None:
        """Add a function or a class under its ``__name__``."""
        if isinstance(item, types.LambdaType) and item.__code__.co_name == "<lambda>":
            self.add(item, item.__name__)
        else:
            self._include(item.__name__, sys.modules[item.__module__])

    def _free_variables(self, function: Callable[..., Any]) -> None:
        cells = getattr(function, "__closure__", None) or ()
        for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
            value = cell.cell_contents
            if isinstance(value, types.FunctionType):
                self.add(value)
                continue
            try:
                self.definitions[name] = f"{name} = {literal(value)}"
            except TypeError as error:
                raise SourceError(f"{function.__qualname__} closes over {name}: {error}") from None

    def _define(self, name: str, module: str, find: Callable[[], Definition], bound: set[str] | None = None) -> None:
        if name in self.homes:
            if self.homes[name] != module:
                raise SourceError(f"{name} is one thing in {self.homes[name]} and another in {module}")
            return
        self.homes[name] = module
        found = find()
        own = {name, *(bound or ())}
        for private in found.privates:
            if private in compat.NAMES:
                own.add(self.import_private(private).partition(".")[0])
            else:
                own.add(private)
                self._include(private, compat)
        for needed in found.needs:
            if needed not in own:
                self._include(needed, sys.modules[module])
        self.definitions[name] = found.text

    def _include(self, name: str, module: types.ModuleType) -> None:
        found = _bindings(module).get(name)
        if found is None:
            if not hasattr(builtins, name) and module.__name__ == COMPAT and name in compat.NAMES:
                self.import_private(name)
            return
        if isinstance(found, ast.Import):
            alias = next(alias for alias in found.names if (alias.asname or alias.name.partition(".")[0]) == name)
            self._import(alias.name, module)
            self.imports[name] = ast.unparse(ast.Import([alias]))
        elif isinstance(found, ast.ImportFrom):
            self._include_import(name, found, module)
        else:
            self._define(name, module.__name__, lambda: _binding_definition(module.__name__, name))

    def _include_import(self, name: str, found: ast.ImportFrom, module: types.ModuleType) -> None:
        alias = next(alias for alias in found.names if (alias.asname or alias.name) == name)
        source = _absolute(found, module)
        if not _is_ours(source):
            self.imports[name] = ast.unparse(ast.ImportFrom(source, [alias], 0))
        elif source == COMPAT and alias.name in compat.NAMES:
            self.import_private(alias.name)
        elif source == COMPAT.rpartition(".")[0] and alias.name == "compat":
            return  # _Cleaner has replaced its attributes
        else:
            home = importlib.import_module(source)
            if isinstance(getattr(home, alias.name, None), types.ModuleType) or alias.name not in _bindings(home):
                raise SourceError(f"{module.__name__} names {source}.{alias.name}, which is of the harness: a script has torch alone")
            if alias.asname and alias.asname != alias.name:
                raise SourceError(f"{module.__name__} imports {alias.name} of {source} as {alias.asname}: a script needs its own name")
            self._include(alias.name, home)

    def _import(self, source: str, module: types.ModuleType) -> None:
        if _is_ours(source):
            raise SourceError(f"{module.__name__} imports {source}, which is of the harness: a script has torch alone")

    def import_private(self, name: str) -> str:
        """Add the import of a name of :mod:`compat`. Returns its name in the script."""
        path, statement = _torch_import(name)
        self.imports[path.partition(".")[0]] = statement
        return path


@cache
def _torch_import(name: str) -> tuple[str, str]:
    """The name in a script of a name of :mod:`compat`, and its import statement."""
    source, _, path = compat.location_of(name).partition(":")
    first, _, rest = path.partition(".")
    if rest:
        return path, f"from {source} import {first}"
    if not path:
        parent, _, last = source.rpartition(".")
        return name, f"from {parent} import {last} as {name}" if parent else f"import {source} as {name}"
    return name, f"from {source} import {first}" + (f" as {name}" if name != first else "")


@dataclass(frozen=True)
class Definition:
    """A definition of a script: its text, the names of :mod:`compat` that it uses, and all names that it reads but does not bind."""

    text: str
    privates: tuple[str, ...]
    needs: tuple[str, ...]


@cache
def _function_definition(module: str, line: int, code: str, name: str) -> Definition:
    """The definition of a function, under its name in the script."""
    node = _function_node(module, line, code)
    return _definition(name, ast.Assign([ast.Name(name, ast.Store())], node) if isinstance(node, ast.Lambda) else node, module)


@cache
def _binding_definition(module: str, name: str) -> Definition:
    """The definition of a top-level name of a module."""
    return _definition(name, _bindings_of(module)[name], module)


def _definition(name: str, written: ast.stmt, module: str) -> Definition:
    cleaner = _Cleaner()
    cleaned = ast.fix_missing_locations(cleaner.visit(copy.deepcopy(written)))
    text = ""
    if isinstance(cleaned, ast.FunctionDef) and isinstance(written, ast.FunctionDef):
        cleaned.name, body = name, _without_docstring(written.body)
        if [*map(ast.dump, cleaned.body)] == [*map(ast.dump, body)]:  # nothing was removed: keep the original text with its comments
            head = ast.unparse(ast.FunctionDef(name, cleaned.args, [ast.Pass()], cleaned.decorator_list, lineno=1))
            text = head.removesuffix("    pass") + _lines(module, body)
    text = text or ast.unparse(cleaned)
    return Definition(text, tuple(cleaner.privates), tuple(_free_names(text)))


class _Cleaner(ast.NodeTransformer):
    """Removes annotations, docstrings and the decorators of laws, and replaces ``compat.NAME`` by its name in the script.

    ``privates``: the names of :mod:`compat` that were replaced."""

    def __init__(self) -> None:
        self.privates = dict[str, None]()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.decorator_list = [one for one in node.decorator_list if _mentioned_names(one) & KEPT_DECORATORS]
        node.returns = None
        arguments = node.args
        for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]:
            if argument is not None:
                argument.annotation = None
        node.body = _without_docstring(node.body)
        self.generic_visit(node)
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.body = _without_docstring(node.body)
        for at, line in enumerate(node.body):
            if isinstance(line, ast.AnnAssign):
                node.body[at] = ast.AnnAssign(line.target, ast.Name("object", ast.Load()), line.value, 1)
        self.generic_visit(node)
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        if isinstance(node.annotation, ast.Name) and node.annotation.id == "object":
            return self.generic_visit(node)
        if node.value is None:
            return None
        return self.generic_visit(ast.copy_location(ast.Assign([node.target], node.value), node))

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if isinstance(node.value, ast.Name) and node.value.id == "compat" and node.attr in compat.NAMES:
            self.privates[node.attr] = None
            return ast.copy_location(ast.parse(_torch_import(node.attr)[0], mode="eval").body, node)
        if isinstance(node.value, ast.Name) and node.value.id == "compat" and node.attr in _bindings(compat):
            self.privates[node.attr] = None
            return ast.copy_location(ast.Name(node.attr, ast.Load()), node)
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        # typing.cast means nothing in an unannotated script
        if isinstance(node.func, ast.Name) and node.func.id == "cast" and len(node.args) == 2:
            return cast("ast.AST", self.visit(node.args[1]))
        return self.generic_visit(node)


def _lines(module: str, body: list[ast.stmt]) -> str:
    """Statements as in the source of their module, indented by four spaces."""
    first, last = body[0].lineno, max(statement.end_lineno or statement.lineno for statement in body)
    decorators = getattr(body[0], "decorator_list", [])
    first = min([first, *(one.lineno for one in decorators)])
    return textwrap.indent(textwrap.dedent("\n".join(_text(module).splitlines()[first - 1 : last])), "    ")


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    first = body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        return body[1:] or [ast.Pass()]
    return body


def _mentioned_names(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)} | {
        one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute)
    }


def _free_names(text: str) -> Iterator[str]:
    """The names that a definition reads but does not bind, each once."""

    def read(table: symtable.SymbolTable) -> Iterator[str]:
        for symbol in table.get_symbols():
            if symbol.is_referenced() and (symbol.is_global() or table.get_type() == "module"):
                yield symbol.get_name()
        for inner in table.get_children():
            yield from read(inner)

    yield from dict.fromkeys(read(symtable.symtable(text, "definition", "exec")))


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in (PACKAGE, "tests")


def _absolute(node: ast.ImportFrom, module: types.ModuleType) -> str:
    if not node.level:
        return node.module or ""
    parts = module.__name__.split(".")
    return ".".join([*parts[: len(parts) - node.level], *filter(None, [node.module])])


@cache
def _text(module: str) -> str:
    file = sys.modules[module].__file__
    if file is None:
        raise SourceError(f"{module} has no source")
    return Path(file).read_text("utf-8")


@cache
def _tree(module: str) -> ast.Module:
    return ast.parse(_text(module))


@cache
def _bindings_of(module: str) -> dict[str, ast.stmt]:
    found: dict[str, ast.stmt] = {}
    for node in _tree(module).body:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                found[name] = node
            case ast.Assign(targets=targets):
                for target in targets:
                    found.update((one.id, node) for one in ast.walk(target) if isinstance(one, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name), value=value) if value is not None:
                found[name] = node
            case ast.Import(names=aliases):
                found.update((alias.asname or alias.name.partition(".")[0], node) for alias in aliases)
            case ast.ImportFrom(names=aliases):
                found.update((alias.asname or alias.name, node) for alias in aliases)
    return found


def _bindings(module: types.ModuleType) -> dict[str, ast.stmt]:
    """The statements that bind the top-level names of a module. Callers must not change the trees."""
    return _bindings_of(module.__name__)


def _function_node(module: str, line: int, code: str) -> ast.FunctionDef | ast.Lambda:
    """The tree of a function, found by its first line, since names may repeat. A line may start one lambda only."""
    found = _functions(module).get((line, code))
    if found is None:
        raise SourceError(f"{module}.{code}, line {line}: its source is not where it was")
    return found


@cache
def _functions(module: str) -> dict[tuple[int, str], ast.FunctionDef | ast.Lambda]:
    """The functions of a module, by first line and code name. Callers must not change the trees."""
    found: dict[tuple[int, str], ast.FunctionDef | ast.Lambda] = {}
    for node in ast.walk(_tree(module)):
        if isinstance(node, ast.FunctionDef):
            found.setdefault((min([node.lineno, *(one.lineno for one in node.decorator_list)]), node.name), node)
        elif isinstance(node, ast.Lambda):
            found.setdefault((node.lineno, "<lambda>"), node)
    return found
