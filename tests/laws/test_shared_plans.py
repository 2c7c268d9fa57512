"""Plans that ranks share: what is taken is what would be worked out, and faults of some ranks alone are found all the same."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardlaw.conformance import compat
from shardlaw.conformance.commands import cli
from shardlaw.conformance.compat import plans
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.target import Target
from shardlaw.conformance.law.verdict import Verdict
from shardlaw.conformance.laws import find
from shardlaw.conformance.rank import shared_plans
from shardlaw.conformance.rank.reuse import MetadataCache
from shardlaw.conformance.rank.shared_plans import NotShareableError, dump_plan, load_plan, plan_key
from shardlaw.conformance.run.law_run import SHARED_PLANS, reuses_plans
from shardlaw.conformance.world import Pool
from tests.laws.planting import ROOT, first_cases
from tests.planted import rank_faults

LAWS = ("op.forward[add]", "op.forward[mm]", "op.forward[sum]")
FAULTS = [name for name in vars(rank_faults) if name.startswith(("rank_1", "the_last", "ranks_outside"))]


def compared() -> None:
    """A target's ``setup``: whatever a rank takes it works out too, and raises where that is not the same."""
    true = shared_plans.load_plan

    def checked(answer: bytes, meshes: list[DeviceMesh]) -> Any:
        taken = true(answer, meshes)
        with open(os.environ["PLANS_TAKEN"], "a") as file:
            file.write(f"{taken.output_spec}\n")
        return taken

    shared_plans.load_plan = checked
    plan = shared_plans.SharedPlans._plan

    def both(self: Any, worked_out: Any, schema: Any) -> Any:
        before, self._has_taken = self._has_taken, False
        found = plan(self, worked_out, schema)
        taken, self._has_taken = self._has_taken, before or self._has_taken
        if taken and not alike(found, self._plan_alone(worked_out, schema)):
            raise AssertionError(f"what was taken of {schema} is not what is worked out")
        return found

    shared_plans.SharedPlans._plan = both  # type: ignore[method-assign]


def alike(one: Any, other: Any) -> bool:
    """Whether two plans, or parts of them, are the same in all that they hold."""
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, DeviceMesh):
        return one is other
    if type(one) is compat.DTensorSpec:
        return one == other and hash(one) == hash(other) and repr(one) == repr(other)
    if hasattr(one, "redistribute_schema"):
        return all(alike(getattr(one, name), getattr(other, name)) for name in PARTS)
    if hasattr(one, "args_schema"):
        parts = ("op", "args_schema", "schema_info")
        return one == other and hash(one) == hash(other) and all(alike(getattr(one, name), getattr(other, name)) for name in parts)
    return bool(one == other)


PARTS = ("output_spec", "redistribute_schema", "needs_redistribute", "use_val_from_redistribute_schema")


@pytest.fixture
def lonely() -> Iterator[DeviceMesh]:
    """A mesh of one rank, this process."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield DeviceMesh("cpu", torch.arange(4).reshape(2, 2))
    dist.destroy_process_group()


def planned(run: Any) -> list[tuple[Any, Any]]:
    """The schemas that torch plans while something runs, and their plans."""
    found = []

    def plan(true: Any, schema: Any) -> Any:
        found.append((schema, true(schema)))
        return found[-1][1]

    compat.name("op_plans")()
    undo = plans.override_planning(plan)
    try:
        run()
    finally:
        undo()
    return found


def test_what_is_read_is_what_was_written(lonely: DeviceMesh) -> None:
    places = [Shard(0), Shard(1), Replicate(), Partial(), compat.StridedShard(0, split_factor=2)]
    seen = 0
    for first in places:
        for second in places:
            x = DTensor.from_local(torch.ones(4, 4), lonely, [first, second], run_check=False)
            y = DTensor.from_local(torch.ones(4, 4), lonely, [Replicate(), Shard(1)], run_check=False)
            for op in (
                lambda x, y: x + 1,
                torch.add,
                torch.mm,
                lambda x, y: torch._foreach_mul([x, y], 2),
                lambda x, y: x.sum(0),
                torch.nn.functional.huber_loss,
                torch.equal,
            ):
                for schema, plan in planned(lambda op=op, x=x, y=y: attempted(op, x, y)):
                    try:
                        key, meshes = plan_key(schema)
                    except NotShareableError:
                        continue
                    assert meshes == [lonely]
                    assert plan_key(schema)[0] == key
                    assert alike(load_plan(dump_plan(plan, meshes), meshes), plan)
                    seen += 1
    assert seen > 80


def test_plans_are_the_same_where_specs_and_costs_are_remembered(lonely: DeviceMesh) -> None:
    places = [Shard(0), Shard(1), Replicate(), Partial(), compat.StridedShard(0, split_factor=2)]
    tensors = [
        DTensor.from_local(torch.ones(4, 4), lonely, [first, second], run_check=False, shape=(8, 8), stride=(8, 1))
        for first, second in itertools.product(places, places)
    ]
    ops = (torch.add, torch.mm, lambda x, y: x.sum(0), lambda x, y: torch.nn.functional.softmax(x, 1))

    def run() -> None:
        for x, y in zip(tensors, tensors[3:] + tensors[:3], strict=True):
            for op in ops:
                attempted(op, x, y)

    worked_out = planned(run)
    forget, undo = plans.cache_within_plans()
    try:
        remembered = planned(run)
        forget()
        again = planned(run)
    finally:
        undo()
    assert len(worked_out) > 80
    for those in (remembered, again):
        assert all(alike(one, other) for (_, one), (_, other) in zip(worked_out, those, strict=True))


def test_whoever_takes_the_plan_of_a_decomposed_op_remembers_it_as_who_made_it(lonely: DeviceMesh) -> None:
    x = DTensor.from_local(torch.ones(4, 4), lonely, [Shard(0), Replicate()], run_check=False)
    ((schema, _), *_) = planned(lambda: torch.nn.functional.huber_loss(x, x, reduction="sum"))
    remembered = compat.name("planner").op_to_schema_info
    made = remembered.pop(schema.op)
    plans.record_decomposition(schema.op)
    assert remembered[schema.op] == made
    assert made.static_argnum == 2
    ((schema, _), *_) = planned(lambda: torch.add(x, x))
    before = dict(remembered)
    plans.record_decomposition(schema.op)
    assert remembered == before


def attempted(op: Any, *args: Any) -> None:
    """Run an op that may be refused."""
    with suppress(RuntimeError, NotImplementedError):
        op(*args)


def test_norms_masks_tensors_and_generators_stay_apart(lonely: DeviceMesh) -> None:
    x = DTensor.from_local(torch.ones(4, 4), lonely, [Shard(0), Replicate()], run_check=False)
    (schema, plan), *_ = planned(lambda: torch.linalg.vector_norm(x, 3))
    with pytest.raises(NotShareableError):
        dump_plan(plan, plan_key(schema)[1])
    for item in (torch.ones(2), torch.Generator(), object()):
        schema.kwargs_schema["given"] = item
        with pytest.raises(NotShareableError):
            plan_key(schema)


def test_a_key_tells_apart_what_plans_depend_on(lonely: DeviceMesh) -> None:
    x = DTensor.from_local(torch.ones(4, 4), lonely, [Shard(0), Replicate()], run_check=False)
    keys = {plan_key(schema)[0] for value in (1, 1.0, True) for schema, _ in planned(lambda value=value: torch.add(x, value))}
    assert len(keys) == 3
    torch.set_default_dtype(torch.float64)
    try:
        keys |= {plan_key(schema)[0] for schema, _ in planned(lambda: torch.add(x, 1))}
    finally:
        torch.set_default_dtype(torch.float32)
    assert len(keys) == 4


def test_what_a_law_reuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SHARED_PLANS, raising=False)
    law = find("op.forward[add]")
    assert [reuses_plans(law, profile) for profile in ("smoke", "ci", "nightly")] == [True, True, False]
    assert not reuses_plans(find("op.history"), "smoke")
    monkeypatch.setenv(SHARED_PLANS, "0")
    assert not reuses_plans(law, "smoke")


def test_metadata_is_asked_for_once_whatever_the_layout(lonely: DeviceMesh, tmp_path: Path) -> None:
    asked, remembered = [], MetadataCache(str(tmp_path / "metadata"))
    compat.name("op_plans")()
    remembered.begin_case(reuse=True)
    own = remembered._find

    def counted(true: Any, schema: Any) -> Any:
        return own(lambda schema: asked.append(schema) or true(schema), schema)

    remembered._undo = *remembered._undo[:1], plans.override_metadata(counted)
    for dtype in (torch.int64, torch.float64):
        for placement in (Shard(0), Shard(1), Replicate()):
            x = DTensor.from_local(torch.ones(4, 4, dtype=dtype), lonely, [placement, Replicate()], shape=(4, 4), stride=(4, 1))
            for value in (1, 1.0, True):
                assert (x + value).dtype == (torch.ones(4, 4, dtype=dtype) + value).dtype
    assert len(asked) == 6, asked
    remembered.begin_case(reuse=False)
    compat.name("op_plans")()
    assert (x + 1).shape == (4, 4)
    assert len(asked) == 6


def test_metadata_that_one_rank_found_the_others_take(lonely: DeviceMesh, tmp_path: Path) -> None:
    ranks = [MetadataCache(str(tmp_path / "metadata")) for _ in range(3)]
    asked: list[list[Any]] = [[], [], []]
    shapes = range(1, 65)
    for rank, remembered in enumerate(ranks):

        def counted(true: Any, schema: Any, own: Any = remembered._find, noted: list[Any] = asked[rank]) -> Any:
            return own(lambda schema: noted.append(schema) or true(schema), schema)

        compat.name("op_plans")()
        undo = plans.override_metadata(counted)
        for rows in shapes:
            x = DTensor.from_local(torch.ones(rows), lonely, [Replicate(), Replicate()])
            assert (x + 1).shape == (rows,)
        undo()
    compat.name("op_plans")()
    assert len(asked[0]) == len(shapes)
    assert 0 < len(asked[1]) < len(shapes) / 4  # those that every rank asks for itself
    assert [str(schema) for schema in asked[1]] == [str(schema) for schema in asked[2]]


def test_metadata_of_a_rank_that_was_killed_while_it_wrote_is_asked_for_again(lonely: DeviceMesh, tmp_path: Path) -> None:
    folder = tmp_path / "metadata"
    for part in (1, 2):
        asked: list[Any] = []
        own = MetadataCache(str(folder))._find
        compat.name("op_plans")()
        undo = plans.override_metadata(lambda true, schema, own=own, asked=asked: own(lambda its: asked.append(its) or true(its), schema))
        for rows in range(1, 17):
            assert (DTensor.from_local(torch.ones(rows), lonely, [Replicate(), Replicate()]) + 1).shape == (rows,)
        undo()
        for at, file in enumerate([*folder.iterdir()] if part == 1 else []):
            if at % 2:
                data = file.read_bytes()
                file.unlink()
                (folder / f"{file.name}.7").write_bytes(data[: len(data) // 2])
    compat.name("op_plans")()
    assert 8 <= len(asked) < 16


def test_a_torch_without_the_hooks_shares_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shared_plans.why_unavailable() == ""
    monkeypatch.setattr(plans, "PLANS_OP", "nothing_of_the_kind")
    assert "nothing_of_the_kind: needed to plan an op once for several ranks" in shared_plans.why_unavailable()


@pytest.fixture(scope="module")
def comparing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Pool, Path]]:
    """Worlds in which what a rank takes is compared, and the file that lists it."""
    taken = tmp_path_factory.mktemp("compared") / "taken"
    env = (("PYTHONPATH", str(ROOT)), ("PLANS_TAKEN", str(taken)))
    with Pool(Target(setup="tests.laws.test_shared_plans:compared", env=env)) as pool:
        yield pool, taken


@pytest.mark.ranks
@pytest.mark.timeout(240)
@pytest.mark.parametrize("law", ["op.forward[add]", "op.forward[mm]", "op.forward[linalg.vector_norm]", "op.program"])
def test_what_is_taken_is_what_is_worked_out(law: str, comparing: tuple[Pool, Path]) -> None:
    pool, taken = comparing
    pool.end_worlds()  # ranks that have planned for another law take less
    taken.write_text("")
    verdicts: list[Verdict] = []
    for case in first_cases(find(law)):
        pool.submit(find(law), case, verdicts.append, reuse=True)
    pool.flush()
    assert [verdict.error for verdict in verdicts if "what was taken" in verdict.error] == []
    assert len(taken.read_text().splitlines()) > 20


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Pool, Path]]:
    """Worlds in which the fault is at work that a file names."""
    named = tmp_path_factory.mktemp("shared") / "fault"
    env = (("PYTHONPATH", str(ROOT)), ("RANK_FAULT_FILE", str(named)))
    with Pool(Target(setup="tests.planted.rank_faults:each_when_asked", env=env, timeout=10.0)) as pool:
        yield pool, named


def cases_of_size(rows: int) -> Iterator[Case]:
    """Cases that nobody has planned before: ops that move operands and ops that do not, on all ranks and on some."""
    sizes = (rows, rows + 100)
    for mesh, places in (("4", ("R", "S(0)", "S(1)")), ("2x2", ("R,S(0)", "S(1),R", "S(0),S(1)")), ("2@1,2", ("R", "S(0)"))):
        for size, a, b in itertools.product(sizes, places, places):
            x, y = (f"{size}x{size}:{place}:float32:small" for place in (a, b))
            yield Case.of("op.forward[mul]", mesh=mesh, a=x, b=y, steps="mul(a,b)", seed=1)
            yield Case.of("op.forward[mm]", mesh=mesh, a=x, b=y, steps="mm(a,b)", seed=1)


@pytest.mark.ranks
@pytest.mark.timeout(240)
@pytest.mark.parametrize("fault", ["", *FAULTS])
def test_a_fault_of_some_ranks_alone_is_seen(fault: str, asked: tuple[Pool, Path]) -> None:
    pool, named = asked
    named.write_text(fault)
    verdicts: list[Verdict] = []
    seen: list[Verdict] = []
    cases = cases_of_size(8 + 4 * FAULTS.index(fault) if fault else 4)
    while not seen and (some := [*itertools.islice(cases, 12)]):  # some of these faults make ranks hang
        for case in some:
            pool.submit(find(case.law), case, verdicts.append, reuse=True)
        pool.flush()
        seen = [verdict for verdict in verdicts if verdict.status == "deviates"]
    assert bool(seen) == bool(fault), [verdict.message for verdict in seen][:3]


@pytest.mark.ranks
@pytest.mark.timeout(480)
def test_a_fault_of_one_rank_alone_is_a_finding_of_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    named = tmp_path / "fault"
    named.write_text("rank_1_claims_its_results_whole")
    target = f'backend = "gloo"\nsetup = "tests.planted.hook:planted"\nenv = {{ PLANTED_FAULT_FILE = "{named}" }}\n'
    (tmp_path / "shardlaw.toml").write_text(f"[target.faulty]\n{target}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(SHARED_PLANS, raising=False)
    code = cli.main(["run", *LAWS, "--target", "faulty", "-x", "--report", "report"])
    assert code == 1, capsys.readouterr()
    report = json.loads((tmp_path / "report" / "report.json").read_text())
    assert [found["law"] for found in report["findings"] if found["status"] == "new"] != []
