"""What the file of a script may hold: imports, merged, of torch, the standard library and the target's own packages; no ``eval``."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Collection, Iterable, Iterator
from functools import lru_cache
from typing import TypeGuard

from shardlaw.conformance.law.script import ScriptError


def merge_imports(statements: Iterable[str]) -> list[str]:
    """Sort import statements and merge those from one module. Raises :class:`ScriptError`."""
    plain, names = set(), dict[str, set[str]]()
    for statement in statements:
        for module, name in _imported_names(statement):
            if module:
                names.setdefault(module, set()).add(name)
            else:
                plain.add(name)
    return sorted(plain) + [f"from {module} import {', '.join(sorted(names[module]))}" for module in sorted(names)]


@lru_cache(1024)
def _imported_names(statement: str) -> tuple[tuple[str, str], ...]:
    """The (module, name) pairs of ``from ... import``, or ``("", statement)`` for ``import ...``."""
    found = list[tuple[str, str]]()
    for node in _parse_python(statement).body:
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found += [(node.module, ast.unparse(alias)) for alias in node.names]
        elif isinstance(node, ast.Import):
            found.append(("", ast.unparse(node)))
        else:
            raise ScriptError(f"{statement!r} is no import")
    return tuple(found)


def _parse_python(text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except SyntaxError as error:
        raise ScriptError(f"not Python: {error}") from None


def check_file(text: str, packages: Collection[str] = ()) -> None:
    """Raise :class:`ScriptError` unless the file keeps the rules: imports only of torch, the standard library and ``packages``, no
    ``eval``."""
    tree = _parse_python(text)
    allowed = {"torch", *packages, *sys.stdlib_module_names}
    # a script is mostly literals: walk their nodes only if the text may contain a forbidden call
    may_call = not text.isascii() or re.search(r"(?<![\w.])(exec|eval|compile)\b", text)
    for node in ast.walk(tree) if may_call else _walk_statements(tree):
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        for module in modules:
            if module.partition(".")[0] not in allowed:
                raise ScriptError(f"imports {module}: only torch and the standard library may be imported")
        if isinstance(node, ast.Name) and node.id in ("exec", "eval", "compile"):
            raise ScriptError(f"calls {node.id}: a reproducer holds its statements literally")
    defined = [name for node in tree.body for name in _defined_names(node)]
    started = {node.id for block in tree.body if isinstance(block, ast.If) for node in ast.walk(block) if _is_bound(node)}
    twice = sorted({name for name in defined if defined.count(name) > 1 or name in started})
    if twice:
        raise ScriptError(f"{', '.join(twice)} is defined twice: it may be a name of the template")


def _walk_statements(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield every statement, exception handler and match case, without descending into expressions."""
    pending: list[ast.AST] = [tree]
    while pending:
        node = pending.pop()
        yield node
        for name in ("body", "orelse", "finalbody", "handlers", "cases"):
            inner = getattr(node, name, None)
            pending += inner if isinstance(inner, list) else []


def _is_bound(node: ast.AST) -> TypeGuard[ast.Name]:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


def _defined_names(node: ast.stmt) -> list[str]:
    """The names that a top-level statement binds."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    if isinstance(node, ast.With):
        return [item.optional_vars.id for item in node.items if isinstance(item.optional_vars, ast.Name)]
    return []
