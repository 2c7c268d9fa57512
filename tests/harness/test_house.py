"""The house rules that a machine can check: private names in one place, laws that name no target, whole law records."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from conformance import compat
from conformance.case import Case
from conformance.features import features_of
from conformance.law import CHAPTERS, Law, Limits
from conformance.laws import MODULES, laws_of

ROOT = Path(__file__).parents[2]
PACKAGES = ("reference", "strategies", "conformance")
TARGETS = re.compile(r"(cpu|cuda|xpu|mps)(:\d+)?|gloo|nccl|mpi|filesystem|FileSystem(Writer|Reader)|Fsspec\w+")
LAWS = [law for module in MODULES for law in laws_of(f"conformance.laws.{module}")]


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
        words += [name.rpartition(".")[2] for name in torch_names(tree)]
        assert [word for word in words if TARGETS.fullmatch(word)] == [], path


def test_rooms_stay_small() -> None:
    long = {str(path): lines for path, _ in modules(*PACKAGES) if (lines := len(path.read_text().splitlines())) > 430}
    assert long == {}


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.id)
def test_a_law_has_its_whole_record(law: Law) -> None:
    assert law.chapter in CHAPTERS
    assert law.clause.strip().endswith(".") or law.clause.strip()
    assert law.source.strip()
    assert law.planted.strip()
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
