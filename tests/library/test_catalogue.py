"""Laws of other packages: how they join the catalogue, and what is said of those that cannot."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardlaw import law
from shardlaw.conformance import laws
from shardlaw.conformance.errors import UsageError
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.run.case_check import check_case

pytestmark = pytest.mark.ranks

LAW = """
from hypothesis import strategies as st
from shardlaw import Case, Law

def check(case, here):
    here.require(here.world == 2, "wrong-value", "world", "no two ranks")
def law(**changed):
    return Law(**{"id": "mylib.two", "clause": "There are two ranks.", "source": "mylib", "check": check, "control": "mylib.two world=2",
                  "draw": lambda limits: st.just(Case.of("mylib.two", world=2)), "draws": 1, **changed})
"""


def offer(folder: Path, text: str, *, entry: str = "mylib = mylib", expectations: str = "") -> None:
    """An installed package with a module ``mylib``."""
    (folder / "mylib.py").write_text(LAW + text)
    info = folder / "mylib-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mylib\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[shardlaw.laws]\n{entry}\n")
    if expectations:
        (folder / "mylib.toml").write_text(expectations)


def shardlaw(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(folder)}
    env.pop("SHARDLAW_LAWS", None)
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "shardlaw", *arguments], cwd=folder, env=env, capture_output=True, text=True, check=False
    )


@pytest.fixture
def forgetful(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What is known of other packages is looked up anew, before and after."""

    def forget() -> None:
        laws.offered.cache_clear()
        laws.laws_of.cache_clear()
        sys.modules.pop("mylib", None)

    monkeypatch.delenv(laws.VARIABLE, raising=False)
    forget()
    yield
    forget()


def test_laws_of_an_installed_package_stand_in_the_catalogue(tmp_path: Path) -> None:
    offer(tmp_path, "LAWS = [law()]")
    done = shardlaw(tmp_path, "laws", "mylib.*")
    assert (done.returncode, done.stderr) == (0, "")
    assert "mylib.two  (core)\n    There are two ranks.\n    source: mylib\n    case:   mylib.two " in done.stdout


ACT = "import shardlaw\n@shardlaw.law('mylib.a', source='s', control='a=1')\ndef act(a: {}):\n    'c'\n"


@pytest.mark.parametrize(
    ("text", "entry", "said"),
    [
        ("import nowhere", "mylib = mylib", "mylib cannot be imported: ModuleNotFoundError: No module named 'nowhere'"),
        ("1 / 0", "mylib = mylib", "mylib cannot be imported: ZeroDivisionError: division by zero"),
        ("", "mylib = mylib", "mylib has no LAWS: want a list of Law"),
        ("LAWS = 'law'", "mylib = mylib", "mylib has LAWS = 'law': want a list of Law"),
        ("", "mylib = missing", "missing cannot be imported: ModuleNotFoundError: No module named 'missing'"),
        ("", "mylib = mylib:LAWS", "= 'mylib:LAWS': want the name of a module with LAWS"),
        ("LAWS = [law(id='two')]", "mylib = mylib", "law 'two': want an id such as mylib.embedding or mylib.embedding[variant]"),
        ("LAWS = [law(clause=' ')]", "mylib = mylib", "law 'mylib.two': want a clause"),
        ("LAWS = [law(needs=('warp',))]", "mylib = mylib", "law 'mylib.two': needs: unknown 'warp' (nearest: "),
        ("LAWS = [law(draws=0)]", "mylib = mylib", "law 'mylib.two': want a strategy and how many cases of it (draw, draws)"),
        (ACT.format("int"), "mylib = mylib", "law 'mylib.a': want a function that returns what is due, decorated with @NAME.due"),
        (ACT.format("set"), "mylib = mylib", "TypeError: act: parameter 'a': set is no type of a field: want DTensor, "),
        ("LAWS = [law(control='mylib.two wrong')]", "mylib = mylib", "control: case 'mylib.two wrong': 'wrong' is not NAME=VALUE"),
        ("LAWS = [law(control='mylib.three a=1')]", "mylib = mylib", "want a case of this law, such as 'mylib.two mesh=2'"),
    ],
)  # fmt: skip
def test_a_broken_module_of_laws_is_one_line(
    text: str, entry: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forgetful: None
) -> None:
    offer(tmp_path, text, entry=entry)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match=r"^entry point mylib of shardlaw\.laws") as refused:
        laws.catalogue.__wrapped__()
    assert said in str(refused.value)


def test_a_command_says_so_and_ends_with_2(tmp_path: Path) -> None:
    offer(tmp_path, "1 / 0")
    done = shardlaw(tmp_path, "laws")
    said = "shardlaw: entry point mylib of shardlaw.laws: mylib cannot be imported: ZeroDivisionError: division by zero\n"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)


def test_two_laws_of_one_id_are_one_line(tmp_path: Path) -> None:
    offer(tmp_path, "LAWS = [law(), law()]")
    done = shardlaw(tmp_path, "run", "mylib.two", "--list")
    assert (done.returncode, done.stderr) == (2, "shardlaw: two laws are called mylib.two: one in mylib, one in mylib\n")


def test_known_findings_come_with_the_laws(tmp_path: Path) -> None:
    entry = '[[expect]]\nlaw = "mylib.two"\nkind = "wrong-value"\nfeatures = ["own:odd"]\nreason = "we know"\n'
    offer(tmp_path, "LAWS = [law()]\nEXPECTATIONS = ['mylib.toml']", expectations=entry)
    code = "from shardlaw import Target; from shardlaw.conformance import laws; from shardlaw.conformance.run import expectations\n"
    code += "loaded = expectations.load(expectations.expectation_files(Target()), list(laws.catalogue().values()), '2.13.0')\n"
    code += "print([entry.reason for entry in loaded.entries if entry.law == 'mylib.two'])"
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], env=env, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("['we know']\n", "")


def test_a_file_of_known_findings_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    offer(tmp_path, "LAWS = [law()]\nEXPECTATIONS = ['gone.toml']")
    done = shardlaw(tmp_path, "run", "mylib.two", "--report", "x")
    assert done.returncode == 2
    assert f"EXPECTATIONS of mylib: no such file {tmp_path}/gone.toml" in done.stderr
    assert done.stderr.count("\n") == 1


def test_importing_the_package_and_the_plugin_loads_nothing_heavy() -> None:
    code = "import sys, shardlaw, shardlaw.conformance.plugin; "
    code += "print(sorted({'torch', 'hypothesis', 'numpy', 'shardlaw.strategies'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_every_public_name_is_there_and_documented() -> None:
    import shardlaw as public
    from shardlaw import strategies

    for package in (public, strategies):
        for name in package.__all__:
            assert (getattr(package, name).__doc__ or "").strip(), name
    with pytest.raises(AttributeError, match="no attribute 'chekc'"):
        _ = public.chekc


def test_an_error_in_a_due_function_is_one_line_with_its_place() -> None:
    @law("mylib.a", source="s", control="world=2 a=1")
    def act(a: int) -> int:
        """One."""
        return a

    @act.due
    def _(a: int) -> float:
        return a / 0

    with pytest.raises(UsageError, match=r"its due function raised ZeroDivisionError: division by zero \(\S+test_catalogue.py:\d+\)"):
        check_case(act, Case.parse(act.control))
