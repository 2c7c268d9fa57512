"""The house rules that a machine can check: rooms, private names in one place, laws that name no target, whole law records."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
import torch

from shardlaw.conformance import compat
from shardlaw.conformance.compat import trace
from shardlaw.conformance.law.law import CHAPTERS
from shardlaw.conformance.laws import MODULES, laws_of

ROOT = Path(__file__).parents[2]
COMPAT = sorted((ROOT / "conformance" / "compat").glob("*.py"))
PACKAGES = ("reference", "strategies", "conformance")
SHADOWS = {"torch", "random", "math"}
ROOT_FILES = 6
TARGETS = re.compile(r"(cpu|cuda|xpu|mps)(:\d+)?|gloo|nccl|mpi|filesystem|FileSystem(Writer|Reader)|Fsspec\w+")
REACHING = {"getattr", "hasattr", "setattr", "delattr", "attrgetter", "methodcaller"}
# what is private elsewhere than in torch
NOT_OF_TORCH = {"_target": "of threading.Thread, which does not say otherwise what it runs"}
LAWS = [law for module in MODULES for law in laws_of(f"shardlaw.conformance.laws.{module}")]
SOURCES = {law.source for law in LAWS}


def files(*packages: str) -> list[Path]:
    return [path for package in packages for path in sorted((ROOT / package).rglob("*.py"))]


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def modules(*packages: str) -> Iterator[tuple[Path, ast.Module]]:
    return ((path, parsed(path)) for path in files(*packages))


@cache
def nodes(tree: ast.Module) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree))


def torch_names(tree: ast.Module) -> Iterator[str]:
    """Every dotted name of torch that a module imports or reaches by attribute."""
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute):
            yield ast.unparse(node)


def sources() -> dict[str, ast.Module]:
    """Every file that is installed, by the name under which it is imported."""
    found = {}
    for path, tree in modules("public", *PACKAGES):
        parts = path.relative_to(ROOT).with_suffix("").parts
        inside = parts[1:] if parts[0] == "public" else parts
        found[".".join(("shardlaw", *inside)).removesuffix(".__init__")] = tree
    return found


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def imported(tree: ast.AST, known: set[str]) -> Iterator[str]:
    """The files that a file imports when it runs, those that only its functions import among them."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import):
            yield from known & {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            yield from known & (names if names <= known else {*names, node.module})
        elif is_for_types(node):
            for other in node.orelse:  # type: ignore[attr-defined]
                yield from imported(other, known)
        else:
            yield from imported(node, known)


def test_no_two_files_import_each_other() -> None:
    found = sources()
    try:
        TopologicalSorter({name: {*imported(tree, {*found})} - {name} for name, tree in found.items()}).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_the_root_has_few_files_and_no_file_a_name_of_somebody_else() -> None:
    assert len([*(ROOT / "conformance").glob("*.py")]) <= ROOT_FILES
    assert [name for name in sources() if name.rpartition(".")[2] in SHADOWS] == []


def test_every_package_of_the_tree_is_installed() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]["packages"]
    folders = {path.parent.relative_to(ROOT).parts for path in files(*PACKAGES)}
    assert listed == sorted(["shardlaw", *(".".join(("shardlaw", *parts)) for parts in folders)])


def bound(tree: ast.Module) -> set[str]:
    """What a module defines: functions, classes, variables, and attributes of its own objects."""
    stored = [node for node in nodes(tree) if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store)]
    return {
        *(node.name for node in nodes(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)),
        *(node.id for node in stored if isinstance(node, ast.Name)),
        *(node.attr for node in stored if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "cls")),
    }


def of_the_standard_library(tree: ast.Module) -> set[str]:
    """The names under which a module has parts of the standard library."""
    found = set()
    for node in nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            homes = [(alias, getattr(node, "module", None) or alias.name) for alias in node.names]
            found |= {alias.asname or alias.name for alias, home in homes if home.partition(".")[0] in sys.stdlib_module_names}
    return found


def private_names(tree: ast.Module) -> Iterator[str]:
    """Private names of others that a module imports, reaches as an attribute or gives as an argument, or that a text in it does: one that
    may go into a script. No such text are docstrings, nor what laws cite."""
    own, standard = bound(tree), of_the_standard_library(tree)
    notes = {id(node.value) for node in nodes(tree) if isinstance(node, ast.Expr)}
    for name in torch_names(tree):
        if re.match(r"torch(\.\w+)*\._[a-zA-Z]", name):
            yield name
    for node in nodes(tree):
        match node:
            case ast.Attribute(attr=name) if is_private(name) and name not in own:
                if ast.unparse(node).partition(".")[0] not in standard:
                    yield ast.unparse(node)
            case ast.Call(func=ast.Name(id=called) | ast.Attribute(attr=called), args=args) if called in REACHING:
                words = [arg.value for arg in args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
                yield from (word for word in words if is_private(word) and word not in own | {*NOT_OF_TORCH})
            case ast.keyword(arg=str(name)) if is_private(name):
                yield f"{name}="
            case ast.Constant(value=str(text)) if id(node) not in notes:
                yield from (name for name in private_in_text(text) if not is_cited(text))


def is_private(name: str) -> bool:
    return bool(re.match("_[a-zA-Z]", name))


def private_in_text(text: str) -> Iterator[str]:
    """What a text reaches or imports that is private, and what it names that compat has."""
    reached = re.finditer(r"(\w*)\._[a-zA-Z]\w*", text)
    yield from (found[0] for found in reached if found[1] not in sys.stdlib_module_names)
    yield from re.findall(r"\bimport\b.*?\b_[a-zA-Z]\w*", text)
    yield from known_to_compat() & {*re.findall(r"\b_[a-zA-Z]\w*", text)}


@cache
def known_to_compat() -> set[str]:
    return {*re.findall(r"\b_[a-zA-Z]\w*", "".join(path.read_text("utf-8") for path in COMPAT))}


def is_cited(text: str) -> bool:
    """Whether a text is of a source that a law cites: its beginning, or some words of it."""
    return any(source.startswith(text) or (" " in text and text in source) for source in SOURCES)


def test_private_names_of_torch_are_touched_in_one_module_only() -> None:
    every = [(path, tree) for path, tree in modules("public", *PACKAGES) if path not in COMPAT]
    assert [f"{path.relative_to(ROOT)}: {name}" for path, tree in every for name in private_names(tree)] == []


@pytest.mark.parametrize(
    "line",
    [
        "from torch.distributed import _functional_collectives as collectives",
        "from torch.testing._internal import common_utils",
        "mesh._flatten('flat')",
        "self._spec",
        "torch._C._len_torch_function_stack()",
        "x.redistribute()._local_tensor = y",
        "getattr(mesh, '_flatten_mapping')",
        "DeviceMesh('cpu', table, _rank=seat)",
        "line = f'{view} = {mesh}._flatten()'",
        "line = 'from torch.distributed.tensor.placement_types import Shard, _StridedShard'",
        "line = '_StridedShard(0, split_factor=2)'",
        "file = 'torch/distributed/tensor/_redistribute.py'",
    ],
)
def test_a_private_name_is_seen(line: str) -> None:
    assert [*private_names(ast.parse(line))] != []


@pytest.mark.parametrize(
    "line",
    [
        "import os\nos._exit(2)",
        "line = 'os._exit(2)'",
        "self._mine = 1\nother._mine",
        "x.__torch_dispatch__",
        "case = 'x=8:_S(0,2) steps=_foreach_add([a],2)'",
        "def act():\n    'The same as mesh._flatten.'",
        f"source = {LAWS[0].source!r}",
    ],
)
def test_what_is_no_private_name_of_torch_is_let_alone(line: str) -> None:
    assert [*private_names(ast.parse(line))] == []


def test_every_file_that_a_trace_listens_to_is_there() -> None:
    home = Path(torch.__file__).parents[1]
    assert [place for place in (*trace.STEPS, trace.RULES) if not (home / place).exists()] == []


@pytest.mark.parametrize("key", sorted(compat.NAMES))
def test_every_private_name_is_where_the_installed_torch_keeps_it(key: str) -> None:
    assert compat.name(key) is not None


def test_a_private_name_that_is_gone_is_named() -> None:
    with pytest.raises(compat.TorchMovedError, match=r"torch .* has none of torch:nothing_of_the_kind: needed to test this"):
        compat.find_private("test this", "torch:nothing_of_the_kind")


def test_no_law_names_a_device_a_backend_or_a_storage() -> None:
    for path, tree in modules("conformance/laws"):
        words = [node.value for node in nodes(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        words += [name.rpartition(".")[2] for name in torch_names(tree) if not re.fullmatch(r"\w+(\(\))?\.cpu", name)]  # a method
        assert [word for word in words if TARGETS.fullmatch(word)] == [], path


def test_rooms_stay_small() -> None:
    long = {str(path): lines for path in files("public", *PACKAGES, "tests") if (lines := len(path.read_text().splitlines())) > 400}
    assert long == {}


def test_smoke_is_wide_enough() -> None:
    planned = dict.fromkeys(CHAPTERS, 0)
    for law in LAWS:
        planned[law.chapter] += law.sweeps + law.draws
    assert {chapter for chapter, count in planned.items() if count} >= {"mesh", "layout", "redistribute", "op", "roundtrip"}
    assert planned["op"] >= 1500
    assert planned["redistribute"] >= 1000
    assert planned["roundtrip"] >= 40
