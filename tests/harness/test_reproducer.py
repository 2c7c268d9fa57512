"""Scripts that show a finding with torch alone."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.law import Law
from shardlaw.conformance.law.script import Script, ScriptError, Stage
from shardlaw.conformance.law.target import Target
from shardlaw.conformance.report import reproducer as template
from shardlaw.conformance.report.reproducer import FaultInfo, ScriptTarget, render, render_reproducer
from shardlaw.conformance.run import proof
from shardlaw.conformance.run.case_check import resolve_law

HEADER = ["A reduction adds what all ranks hold.", "collective.sum mesh=2 x=3", "Seen with torch 2.13.0."]
ADD = ("x = torch.full((3,), float(rank))", "dist.all_reduce(x)")
SHARD = (
    "from torch.distributed.tensor import DTensor, Shard, distribute_tensor",
    "from torch.distributed.device_mesh import init_device_mesh",
)


def alone(text: str, folder: Path, limit: int = 60) -> subprocess.CompletedProcess[str]:
    """A script as a user runs it; the others are forked from a process that has torch loaded."""
    path = folder / "script.py"
    path.write_text(text)
    return subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=limit, check=False, cwd=folder)


def held(text: str) -> str:
    """The text, after what every reproducer must be."""
    ast.parse(text)
    return text


@pytest.mark.ranks
def test_a_script_whose_ranks_are_right_exits_0(tmp_path: Path) -> None:
    done = alone(held(render(Script((Stage(2, (*ADD, "return torch.ones(3), x")),)), HEADER)), tmp_path)
    assert done.returncode == 0, done.stderr
    assert "rank 0: right" in done.stdout
    assert "rank 1: right" in done.stdout
    assert "expected tensor([1., 1., 1.])" in done.stdout


@pytest.mark.ranks
def test_one_wrong_rank_is_the_fault(tmp_path: Path) -> None:
    body = (*ADD, "if rank == 2:", "    return ..., None", "return torch.full((3,), 3.0), x + (rank == 1)")
    done = alone(held(render(Script((Stage(3, body),)), HEADER)), tmp_path)
    assert done.returncode == 1
    assert "rank 2: nothing is due here\n" in done.stdout
    assert done.stdout.endswith("The fault is there. Exit codes of the ranks: [0, 1, 0]\n"), "where 'The fault is gone.' is written"
    assert "rank 0: right" in done.stdout
    assert "rank 1: WRONG" in done.stdout
    assert "got tensor([4., 4., 4.])" in done.stdout


RAISES = ("if rank == 1:", "    raise ValueError('no such shard')", "return 1, 1")
DIES = ("if rank == 1:", "    import os", "    os.kill(os.getpid(), 9)", "return 1, 1")
UNREADABLE = ("return 1, type('Unreadable', (), {'__eq__': lambda *_: 1 / 0})()",)
WAIT_ALL = ("dist.recv(torch.ones(1), 1 - rank)", "return 1, 1")
WAITS = ("if rank == 0:", "    dist.recv(torch.ones(1), 1)", "return 1, 1")


@pytest.mark.ranks
def test_a_rank_that_loses_one_whose_time_is_up_is_part_of_the_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "LIMIT_SECONDS", 4)
    monkeypatch.setattr(template, "WAITING_SECONDS", 4)
    monkeypatch.setattr(template, "GRACE_SECONDS", 6)
    early = ("import os, signal, time", "if rank == 1:", "    time.sleep(1)", "    os.kill(os.getpid(), signal.SIGALRM)", *WAITS)
    done = proof.run_script(held(render(Script((Stage(2, early),)), HEADER, about=FaultInfo("hang"))))
    assert done.code == 1, done.output
    assert "closed by peer" in done.output


@pytest.mark.parametrize(
    ("body", "about", "code", "said"),
    [
        (RAISES, FaultInfo("wrong-value"), 2, "ValueError: no such shard"),
        (RAISES, FaultInfo("raised", "ValueError"), 1, "ValueError: no such shard"),
        (RAISES, FaultInfo("raised", "RuntimeError"), 2, "ValueError: no such shard"),
        (UNREADABLE, FaultInfo("wrong-layout"), 1, "[4, 4]"),
        (UNREADABLE, FaultInfo("raised", "ZeroDivisionError"), 1, "[1, 1]"),
        (("if rank == 1:", "    raise ValueError", *UNREADABLE), FaultInfo("wrong-layout"), 2, "ValueError"),
        (DIES, FaultInfo("wrong-value"), 2, "-9"),
        (WAITS, FaultInfo("wrong-value"), 2, "-14"),
        (WAITS, FaultInfo("hang"), 1, "-14"),
        (WAITS, FaultInfo("divergence"), 1, "[-14, 0]"),
        (WAIT_ALL, FaultInfo("divergence"), 2, "-14"),
        (("import torch.no_such_module", "return 1, 1"), FaultInfo("wrong-value"), 2, "no_such_module"),
    ],
)
@pytest.mark.ranks
def test_only_what_a_script_is_about_is_the_fault(
    body: tuple[str, ...], about: FaultInfo, code: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template, "LIMIT_SECONDS", 4)
    monkeypatch.setattr(template, "WAITING_SECONDS", 4)
    monkeypatch.setattr(template, "GRACE_SECONDS", 6)
    done = proof.run_script(held(render(Script((Stage(2, body),)), HEADER, about=about)))
    assert done.code == code, done.output
    assert said in done.output


@pytest.mark.ranks
def test_what_the_body_catches_is_no_fault() -> None:
    body = (
        "try:",
        "    DTensor.from_local(torch.ones(2), None, 5)",
        "except Exception:",
        '    return "refused", "refused"',
        'return "refused", "accepted"',
    )
    done = proof.run_script(held(render(Script((Stage(2, body),), SHARD), HEADER)))
    assert done.code == 0, done.output


@pytest.mark.ranks
def test_stages_run_one_after_another_and_share_a_folder() -> None:
    save = Stage(2, ('torch.save(WANT[rank], f"{folder}/{rank}")', "return None, None"))
    load = Stage(3, ("if rank > 1:", "    return None, None", 'return WANT[rank], torch.load(f"{folder}/{rank}")'))
    script = Script((save, load), constants=("WANT = {0: torch.arange(3), 1: torch.zeros(0, 4)}",))
    done = proof.run_script(held(render(script, HEADER)))
    assert done.code == 0, done.output
    assert done.output.count("right") == 5


@pytest.mark.ranks
def test_a_first_stage_at_fault_ends_the_script() -> None:
    script = Script((Stage(2, ("return 1, 2",)), Stage(1, ('print("second")', "return 1, 1"))))
    done = proof.run_script(render(script, HEADER))
    assert done.code == 1
    assert "second" not in done.output


@pytest.mark.parametrize(
    ("expected", "got", "right"),
    [
        ("torch.tensor([1, 2])", "torch.tensor([1, 2])", True),
        ("torch.tensor([1, 2])", "torch.tensor([1., 2.])", False),
        ("torch.tensor([1.])", "torch.tensor([1., 1.])", False),
        ("torch.tensor([float('nan'), 1.])", "torch.tensor([float('nan'), 1.])", True),
        ("torch.tensor([True, False])", "torch.tensor([True, True])", False),
        ("(torch.ones(2), 'a', [1])", "(torch.ones(2), 'a', [1])", True),
        ("(torch.ones(2), 'a')", "(torch.zeros(2), 'a')", False),
        ("torch.zeros(0, 3)", "torch.zeros(0, 4)", False),
        ("torch.Size([2])", "(2,)", True),
        ("None", "torch.ones(1)", False),
        ("1", "float('nan')", False),
        ("(type, ValueError, TypeError)", "TypeError('one too many')", True),
        ("(type, ValueError, 'few', 'many')", "ValueError('one too many')", True),
        ("(type, ValueError, 'few', 'many')", "ValueError('wrong')", False),
        ("(type, ValueError, 'few')", "TypeError('too few')", False),
    ],
)
def test_what_counts_as_the_same(expected: str, got: str, right: bool) -> None:
    compares = ("tensor", "list", "number", "errors")
    text = render(Script((Stage(1, ("return None, None",)),), compares=compares), HEADER)
    import torch

    scope: dict[str, object] = {"torch": torch}
    same = next(node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef) and node.name == "agrees")
    exec(compile(ast.Module([same], []), "agrees", "exec"), scope)
    a, b = eval(expected, scope), eval(got, scope)
    assert scope["agrees"](a, b) is right  # type: ignore[operator]


def test_a_tolerance_is_written_out() -> None:
    text = held(render(Script((Stage(1, ("return None, None",)),), tolerance=1e-5), HEADER))
    assert "torch.allclose(want, got.cpu(), 0, 1e-05, equal_nan=True)" in text


@pytest.mark.ranks
def test_a_history_runs_first_in_the_same_ranks() -> None:
    earlier = Script((Stage(2, ("torch.served = NUMBER", "raise ValueError('ignored')")),), constants=("NUMBER = 7",))
    last = Script((Stage(2, ("return 7, torch.served",)),))
    text = held(render(last, HEADER, [earlier]))
    assert proof.run_script(text).code == 0
    assert proof.run_script(held(render(last, HEADER))).code == 1


INTERRUPTED = """
import os, signal
from shardlaw.conformance.run.proof import Prover, prove
signal.signal(signal.SIGINT, lambda *_: None)
Prover.load_torch()
os.killpg(0, signal.SIGINT)  # as the keyboard does
print(prove("raise SystemExit(1)"))
"""


def test_an_interrupt_does_not_reach_the_process_that_scripts_are_forked_from() -> None:
    command = [sys.executable, "-W", "ignore", "-c", INTERRUPTED]
    done = subprocess.run(command, start_new_session=True, capture_output=True, text=True, timeout=100, check=False)
    assert (done.stdout, done.stderr) == ("proven\n", "")


def test_imports_are_merged_and_cut() -> None:
    names = ", ".join(f"a_rather_long_name_{at}" for at in range(8))
    text = held(render(Script((Stage(1, ("return 1, 1",)),), (*SHARD, f"from torch.futures import {names}", "import os")), HEADER))
    assert text.count("from torch.futures import") == 1
    assert "import os\nimport torch\n" in text


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (Script((Stage(1, ("return (1",)),)), "not Python"),
        (Script((Stage(1, ("return 1, 1",)),), ("import numpy",)), "only torch and the standard library"),
        (Script((Stage(1, ("from shardlaw.conformance.law import law", "return 1, 1")),)), "only torch and the standard library"),
        (Script((Stage(1, ("exec('1')", "return 1, 1")),)), "literally"),
        (Script((Stage(1, ("return 1, 1",)),), ("torch.ones(1)",)), "is no import"),
        (Script((Stage(1, ("return 1, 1",)),), constants=("agrees = 1",)), "defined twice"),
        (Script((Stage(1, ("return 1, 1",)),), definitions=("def ranks():\n    pass",)), "ranks is defined twice"),
    ],
)
def test_what_cannot_be_told_is_said_rather_than_written(script: Script, message: str) -> None:
    with pytest.raises(ScriptError, match=message):
        render(script, HEADER)


def test_a_script_has_no_code_that_its_case_does_not_use() -> None:
    text = make_text("roundtrip.staged mesh=2 x=5:S(0) value=negated async=stager")
    assert "'negated': lambda" in text
    assert "Tally" not in text, "the object of another value"
    assert "DeviceMesh" not in make_text("collective.functional[all_reduce] mesh=2 x=5x3"), "for a group given as a mesh"
    case = "redistribute.local mesh=2 x=4:S(0) to=R"
    assert "returned = " not in make_text(case), "any error shows the fault"
    assert make_text(case, "wrong-value").count("returned = ") == 2


def make_text(text: str, kind: str = "") -> str:
    case = Case.parse(text)
    return held(render_reproducer(resolve_law(case.law), case, FaultInfo(kind)))


def test_a_docstring_may_hold_anything() -> None:
    text = held(render(Script((Stage(1, ("return 1, 1",)),)), ['A clause with """ and \\ in it. ' * 8, "law x='\\n'", "seen"]))
    assert ast.get_docstring(ast.parse(text)) is not None


def test_a_law_without_a_script_says_so() -> None:
    law = Law("mesh.x", "A clause.", "docs", "mesh.x mesh=2", lambda case, here: None)
    with pytest.raises(ScriptError, match=r"mesh\.x has no reproducer"):
        render_reproducer(law, Case.parse("mesh.x mesh=2"))


def test_the_header_names_clause_case_and_version() -> None:
    law = Law(
        "mesh.x",
        "A clause.",
        "docs",
        "mesh.x mesh=2",
        lambda case, here: None,
        script=lambda case: Script((Stage(1, ("return 1, 1",)),)),
    )
    text = held(render_reproducer(law, Case.parse("mesh.x mesh=2 x=5x6:S(0)"), FaultInfo("wrong-value"), "2.13.0"))
    assert text.startswith('"""A clause.\nmesh.x mesh=2 x=5x6:S(0)\nSeen with torch 2.13.0 (wrong-value). Exits 1 while')


@pytest.mark.ranks
def test_a_script_is_about_the_backend_of_its_target() -> None:
    join = ScriptTarget.from_target(Target(backend="gloo", setup="torch.distributed:is_available", env=(("MINE", "a b"),)))
    text = held(render(Script((Stage(2, (*ADD, "return torch.ones(3), x")),)), HEADER, join=join))
    assert (
        "        os.environ.update({'MINE': 'a b'})\n        torch.distributed.is_available()\n        dist.init_process_group(\"gloo\","
        in text
    )
    assert proof.run_script(text).code == 0


def test_a_script_may_import_the_backend_and_no_other() -> None:
    script = Script((Stage(1, ("return 1, 1",)),))
    text = render(script, HEADER, join=ScriptTarget.from_target(Target(backend="mine", setup="my_package.c10d:register")))
    assert "import my_package.c10d\n" in text
    assert '        my_package.c10d.register()\n        dist.init_process_group("mine",' in text
    alone = render(script, HEADER, join=ScriptTarget.from_target(Target(backend="mine", setup="my_package.c10d")))
    assert "import my_package.c10d\n" in alone
    assert "my_package.c10d." not in alone
    with pytest.raises(ScriptError, match="imports numpy"):
        render(Script(script.stages, ("import numpy",)), HEADER, join=ScriptTarget(setup="my_package:register"))
    assert ScriptTarget.from_target(Target(device="cuda", backend="nccl")) == ScriptTarget()
