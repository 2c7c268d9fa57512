"""The house rules that a machine can check: rooms, private names in one place, laws that name no target, whole law records."""

import ast
import re
import tomllib
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from shardlaw.conformance import compat
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.features.features import features_of
from shardlaw.conformance.law.law import CHAPTERS, Law, Limits
from shardlaw.conformance.laws import MODULES, laws_of

ROOT = Path(__file__).parents[2]
PACKAGES = ("reference", "strategies", "conformance")
SHADOWS = {"torch", "random", "math"}
ROOT_FILES = 8
TARGETS = re.compile(r"(cpu|cuda|xpu|mps)(:\d+)?|gloo|nccl|mpi|filesystem|FileSystem(Writer|Reader)|Fsspec\w+")
LAWS = [law for module in MODULES for law in laws_of(f"shardlaw.conformance.laws.{module}")]


def modules(*packages: str) -> Iterator[tuple[Path, ast.Module]]:
    for package in packages:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield path, ast.parse(path.read_text(encoding="utf-8"))


def torch_names(tree: ast.Module) -> Iterator[str]:
    """Every dotted name of torch that a module imports or reaches by attribute."""
    for node in ast.walk(tree):
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
    files = sources()
    try:
        TopologicalSorter({name: {*imported(tree, {*files})} - {name} for name, tree in files.items()}).prepare()
    except CycleError as error:
        pytest.fail(" imports ".join(reversed(error.args[1])))


def test_the_root_has_few_files_and_no_file_a_name_of_somebody_else() -> None:
    assert len([*(ROOT / "conformance").glob("*.py")]) <= ROOT_FILES
    assert [name for name in sources() if name.rpartition(".")[2] in SHADOWS] == []


def test_every_package_of_the_tree_is_installed() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["setuptools"]["packages"]
    folders = {path.parent.relative_to(ROOT).parts for path, _ in modules(*PACKAGES)}
    assert listed == sorted(["shardlaw", *(".".join(("shardlaw", *parts)) for parts in folders)])


def test_private_names_of_torch_are_touched_in_one_module_only() -> None:
    touched = [
        f"{path.relative_to(ROOT)}: {name}"
        for path, tree in modules(*PACKAGES)
        if path.name != "compat.py"
        for name in torch_names(tree)
        if re.match(r"torch(\.\w+)*\._[a-zA-Z]", name) or name.startswith("torch.testing._internal")
    ]
    assert touched == []


@pytest.mark.parametrize("key", sorted(compat.NAMES))
def test_every_private_name_is_where_the_installed_torch_keeps_it(key: str) -> None:
    assert compat.name(key) is not None


def test_a_private_name_that_is_gone_is_named() -> None:
    with pytest.raises(compat.TorchMovedError, match=r"torch .* has none of torch:nothing_of_the_kind: needed to test this"):
        compat.private("test this", "torch:nothing_of_the_kind")


def test_no_law_names_a_device_a_backend_or_a_storage() -> None:
    for path, tree in modules("conformance/laws"):
        words = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)]
        words += [name.rpartition(".")[2] for name in torch_names(tree) if not re.fullmatch(r"\w+(\(\))?\.cpu", name)]  # a method
        assert [word for word in words if TARGETS.fullmatch(word)] == [], path


def test_rooms_stay_small() -> None:
    long = {str(path): lines for path, _ in modules(*PACKAGES) if (lines := len(path.read_text().splitlines())) > 430}
    assert long == {}


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.id)
def test_a_law_has_its_whole_record(law: Law) -> None:
    assert law.chapter in CHAPTERS
    assert law.clause.strip().endswith(".") or law.clause.strip()
    assert law.source.strip()
    assert law.acts or law.check
    assert law.sweeps or law.draws
    assert bool(law.sweeps) == (law.sweep is not None)
    assert bool(law.draws) == (law.draw is not None)
    control = Case.parse(law.control)
    assert control.law == law.id
    assert Case.parse(control.text) == control
    assert Case.from_json(control.to_json()) == control
    assert control.world <= 4
    features_of(control, law)


@pytest.mark.parametrize("law", [law for law in LAWS if law.sweep is not None], ids=lambda law: law.id)
def test_enumerated_cases_come_by_index_and_are_of_their_law(law: Law) -> None:
    assert law.sweep is not None
    cases = law.sweep(Limits())
    assert len(cases) > 0
    some = [cases[at] for at in range(min(law.sweeps, len(cases)))]
    assert some == [cases[at] for at in range(len(some))]
    for case in some:
        assert case.law == law.id
        assert Case.parse(case.text) == case


def test_smoke_is_wide_enough() -> None:
    planned = dict.fromkeys(CHAPTERS, 0)
    for law in LAWS:
        planned[law.chapter] += law.sweeps + law.draws
    assert {chapter for chapter, count in planned.items() if count} >= {"mesh", "layout", "redistribute", "op", "roundtrip"}
    assert planned["op"] >= 1500
    assert planned["redistribute"] >= 1000
    assert planned["roundtrip"] >= 40
