"""Six models that people know: without a fault nothing departs, and each planted fault is found where it was planted."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardlaw.conformance.errors import UsageError
from shardlaw.conformance.twin.session import Result, Session, make_plan
from shardlaw.conformance.twin.spec import VALUES

pytestmark = pytest.mark.ranks

FOLDER = Path(__file__).parents[2] / "examples" / "twins"
MODELS = ("llama", "vocab", "moe", "context", "fsdp_tp", "tables")
SEEDS = (1, 2)


def faults() -> Iterator[tuple[str, str, str]]:
    """Each model with a fault and the submodule where that is, as the file says."""
    import sys

    sys.path.insert(0, str(FOLDER))
    for name in MODELS:
        spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield from ((name, fault, where) for fault, where in module.FAULTS.items())


PLANTED = list(faults())


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with Session() as live:
        yield live


def ask(session: Session, name: str, seed: int = 0, **options: str) -> Result:
    plan, twin = make_plan(f"{FOLDER / name}.py:make", options, seed=seed)
    return session.investigate(plan, twin.values, shrink=False)


def test_there_are_twenty_faults() -> None:
    assert len(PLANTED) >= 20
    assert {name for name, _, _ in PLANTED} == {*MODELS}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", MODELS)
def test_without_a_fault_nothing_departs(session: Session, name: str, seed: int) -> None:
    result = ask(session, name, seed)
    assert not result.departs, result.departure
    assert tuple(one.plan.values for one in result.compared) == VALUES
    assert all(one.silent == () for one in result.compared)


@pytest.mark.parametrize(("name", "fault", "where"), PLANTED, ids=lambda text: text)
def test_a_planted_fault_is_found_in_its_submodule(session: Session, name: str, fault: str, where: str) -> None:
    result = ask(session, name, fault=fault)
    assert result.departure is not None, [one.failed for one in result.compared]
    path = result.departure.path
    assert (path if where.startswith("(") else path.rpartition(" ")[2]).startswith(where), path


@pytest.mark.parametrize("name", [*MODELS, "dropout"])
def test_a_fault_that_is_not_known_is_not_planted(name: str) -> None:
    with pytest.raises(UsageError, match=r"unknown fault 'nope' \(known: \w+"):
        make_plan(f"{FOLDER / name}.py:make", {"fault": "nope"})


@pytest.mark.parametrize(("fault", "mesh"), [("", {"dp": 4, "tp": 1}), ("moments", {"dp": 2, "tp": 2})])
def test_a_run_goes_on_from_its_checkpoint_on_another_mesh(session: Session, fault: str, mesh: dict[str, int]) -> None:
    plan, _ = make_plan(f"{FOLDER / 'fsdp_tp'}.py:make", {"fault": fault})
    result = session.investigate(plan, ("float32",), shrink=False, resume=mesh)
    assert [one.plan.load for one in result.compared] == [0, 1]
    assert [one.departs for one in result.compared] == [False, bool(fault)]
    assert not fault or (result.departure is not None and result.departure.path.startswith("(optimizer)"))
