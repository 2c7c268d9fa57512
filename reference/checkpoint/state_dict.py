"""Nested states: trees of dicts and lists whose leaves are tensors or other values, as checkpoints save them.

The text of a state is one line of Python syntax without spaces::

    {w:x,opt:{0:{step:3,"exp.avg":y}},names:["a",None],hook:stateful({n:b"ab"})}

A bare word in place of a key is a string key (other keys are strings, numbers, ``True``, ``False``, ``None``, and tuples of keys).
Elsewhere it is the name of a tensor (:class:`Slot`), which the case has in another field; a name that occurs twice is one tensor under
two keys. ``stateful(...)`` is an object with ``state_dict()`` and ``load_state_dict()``. Printing is canonical: parsing what was printed
gives an equal state.

A checkpoint stores the leaves of the tree, each under its path joined by dots. :func:`flatten` gives the leaves: dicts are always
flattened; a list is, where a tensor or a dict is in it or in its nested lists; everything else is a leaf: numbers, strings, ``None``,
tuples, sets, and lists of these. Nothing is stored for an empty dict.

Source: the documentation of ``torch.distributed.checkpoint`` (``DefaultSavePlanner``, ``flatten_state_dict``).
"""

from __future__ import annotations

import ast
import keyword
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from shardlaw.reference.notation import NotationError

State = dict[str, Any]
Path = tuple[str | int, ...]
Key = str | int | float | bool | None | tuple[Any, ...]
KEYWORD = "stateful"


@dataclass(frozen=True)
class Slot:
    """A tensor in a state, by its name in the case."""

    name: str


@dataclass(frozen=True)
class Stateful:
    """An object with ``state_dict()`` and ``load_state_dict()``, by its state."""

    state: State


class FlattenError(ValueError):
    """Two leaves have the same path, such as those of ``{"a":{"b":1},"a.b":2}``."""


def parse_state(text: str) -> State:
    """A state from its text. Raises :class:`NotationError`, which quotes the invalid part."""
    try:
        node = ast.parse(text, mode="eval").body
    except SyntaxError as error:
        raise NotationError(f"state {text!r}: {error.msg}; want a dict such as {{w:x,n:[1,None]}}") from None
    if not isinstance(node, ast.Dict):
        raise NotationError(f"state {text!r}: want a dict such as {{w:x,n:[1,None]}}")
    return dict(_parse_value(node))


def _parse_value(node: ast.expr) -> Any:
    match node:
        case ast.Dict(keys=keys, values=values):
            return {_parse_key(key): _parse_value(value) for key, value in zip(keys, values, strict=True)}
        case ast.List(elts=items):
            return [_parse_value(item) for item in items]
        case ast.Tuple(elts=items):
            return tuple(_parse_value(item) for item in items)
        case ast.Name(id=name):
            return Slot(name)
        case ast.Call(func=ast.Name(id="stateful"), args=[ast.Dict() as state], keywords=[]):
            return Stateful(_parse_value(state))
    try:
        return ast.literal_eval(node)
    except ValueError:
        raise NotationError(f"state: {ast.unparse(node)!r} is no number, text, tensor name, dict, list, tuple or set") from None


def _parse_key(node: ast.expr | None) -> Key:
    if isinstance(node, ast.Constant) and type(node.value) in (str, int, float, bool, type(None)):
        return node.value  # type: ignore[return-value]
    if isinstance(node, ast.Tuple):
        return tuple(map(_parse_key, node.elts))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and type(number := _parse_key(node.operand)) in (int, float):
        return -number  # type: ignore[operator]
    if isinstance(node, ast.Name | ast.Attribute):
        return ast.unparse(node)
    raise NotationError(f"state: {ast.unparse(node) if node else '**'!r} is no key: want a word, a text, a number, True, None or a tuple")


def format_state(state: object) -> str:
    """The canonical text: the inverse of :func:`parse_state`."""
    match state:
        case Slot(name):
            return name
        case Stateful(inner):
            return f"{KEYWORD}({format_state(inner)})"
        case dict():
            return "{" + ",".join(f"{_format_key(key)}:{format_state(value)}" for key, value in state.items()) + "}"
        case list():
            return "[" + ",".join(map(format_state, state)) + "]"
        case tuple():
            return "(" + ",".join(map(format_state, state)) + ("," if len(state) == 1 else "") + ")"
        case set():
            return "{" + ",".join(sorted(map(format_state, state))) + "}" if state else "set()"
        case str():
            return '"' + "".join(map(_escape, state)) + '"'
        case bytes():
            return 'b"' + "".join(map(_escape, state.decode("latin-1"))) + '"'
    return repr(state).replace(" ", "")


def _escape(char: str) -> str:
    if char.isascii() and char.isprintable() and char not in ' "\\':
        return char
    return f"\\x{ord(char):02x}" if ord(char) < 256 else f"\\U{ord(char):08x}"


def _format_key(key: Key) -> str:
    words = key.split(".") if isinstance(key, str) else []
    bare = words and all(re.fullmatch(r"[A-Za-z_]\w*", word, re.ASCII) and not keyword.iskeyword(word) for word in words)
    return str(key) if bare else format_state(key)


def map_leaves(state: Any, leaf: Callable[[Any], Any]) -> Any:
    """The tree with ``leaf`` applied to every slot and every other value. A set counts as one value."""
    match state:
        case dict():
            return {key: map_leaves(value, leaf) for key, value in state.items()}
        case list():
            return [map_leaves(value, leaf) for value in state]
        case tuple():
            return tuple(map_leaves(value, leaf) for value in state)
        case Stateful(inner):
            return Stateful(map_leaves(inner, leaf))
    return leaf(state)


def slot_names(state: Any) -> Iterator[str]:
    """The names of the tensors of a state, each once, in order of appearance."""
    seen: dict[str, None] = {}
    map_leaves(state, lambda leaf: seen.setdefault(leaf.name) if isinstance(leaf, Slot) else None)
    yield from seen


def is_branch(value: Any) -> bool:
    """Whether the entries of a value are stored separately, not the value as one leaf."""
    if isinstance(value, Mapping):
        return True
    if not isinstance(value, list):
        return False
    return any(isinstance(entry, Slot) or (isinstance(entry, Mapping | list) and is_branch(entry)) for entry in value)


def flatten(state: State) -> dict[str, tuple[Path, Any]]:
    """Every leaf by its path joined by dots, with the path itself: keys as strings, positions in lists as numbers.

    A :class:`Stateful` at the top is replaced by its state. Raises :class:`FlattenError`.
    """
    flat: dict[str, tuple[Path, Any]] = {}

    def visit(path: Path, value: Any) -> None:
        if not is_branch(value):
            name = ".".join(map(str, path))
            if name in flat:
                raise FlattenError(f"two leaves are called {name!r}")
            flat[name] = (path, value)
        elif isinstance(value, Mapping):
            for key, entry in value.items():
                visit((*path, str(key)), entry)
        else:
            for position, entry in enumerate(value):
                visit((*path, position), entry)

    for key, value in state.items():
        visit((str(key),), value.state if isinstance(value, Stateful) else value)
    return flat


def unflatten(leaves: Mapping[str, tuple[Path, Any]]) -> State:
    """The tree with these paths: keys are strings, gaps in lists are ``None``."""
    root: State = {}
    for path, value in leaves.values():
        branch: Any = root
        for step, following in pairwise(path):
            branch = _get_or_insert(branch, step, [] if isinstance(following, int) else {})
        _get_or_insert(branch, path[-1], value)
    return root


def _get_or_insert(branch: Any, step: str | int, default: Any) -> Any:
    if isinstance(branch, list):
        assert isinstance(step, int)
        branch.extend([None] * (step + 1 - len(branch)))
        if branch[step] is None:
            branch[step] = default
        return branch[step]
    return branch.setdefault(step, default)


def spoil(value: Any) -> Any:
    """A state of the same structure and types with every value changed: a destination before a load.

    Slots stay. ``None`` becomes ``"unset"``; empty tuples, sets and lists get it as their item.
    """
    match value:
        case bool():
            return not value
        case int() | float() | complex():
            return value + 1
        case str():
            return value + "?"
        case bytes():
            return value + b"?"
        case None:
            return "unset"
        case set():
            return {*map(spoil, value)} if value else {"unset"}
        case list() if not value:
            return ["unset"]
        case tuple() if not value:
            return ("unset",)
        case Slot():
            return value
        case dict():
            return {key: spoil(entry) for key, entry in value.items()}
        case list():
            return [spoil(entry) for entry in value]
        case tuple():
            return tuple(spoil(entry) for entry in value)
        case Stateful(inner):
            return Stateful(spoil(inner))
    raise TypeError(f"no state holds a {type(value).__name__}")
