"""The site: every page is in it, every link leads somewhere, and what two pages show is what comes out."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from benchmarks.docs_site import catalogue_page, front_page, on_page_markdown
from shardlaw.conformance.commands.show import show
from shardlaw.conformance.laws import catalogue
from tests.harness.shells import Shell
from tests.library.surroundings import ROOT

DOCS = ROOT / "docs"
MADE = {"index.md", "catalogue.md"}
PAGES = sorted(path.name for path in DOCS.glob("*.md"))
HOUR = (DOCS / "first-hour.md").read_text("utf-8")


def test_every_page_is_in_the_navigation_once() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:")[2]
    assert sorted(re.findall(r"[\w-]+\.md", navigation)) == sorted([*PAGES, *MADE])


@pytest.mark.parametrize("name", [*PAGES, *sorted(MADE)])
def test_every_link_of_a_page_leads_somewhere(name: str) -> None:
    texts = {"index.md": front_page, "catalogue.md": lambda: catalogue_page(list(catalogue().values()))}
    text = texts[name]() if name in MADE else (DOCS / name).read_text("utf-8")
    text = on_page_markdown(text, None, None, None)
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", re.sub(r"```.*?```|`[^`]*`", "", text, flags=re.DOTALL))
    assert {link for link in links if not link.startswith("http")} <= {*PAGES, *MADE}


def test_a_link_to_a_file_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match=r"leads to conformance/nowhere.py"):
        on_page_markdown("[x](../conformance/nowhere.py)", None, None, None)
    assert on_page_markdown("[the act](../conformance/law/act.py#L3)", None, None, None) == "the act (`conformance/law/act.py`)"


def test_the_catalogue_has_every_law() -> None:
    page = catalogue_page(list(catalogue().values()))
    listed = set()
    for family, variants in re.findall(r"^\| `([\w.-]+)`(?: of (.*?))? \| (?:core|extended|advisory) \|", page, re.MULTILINE):
        listed |= {f"{family}[{one}]" for one in re.findall(r"`([^`]+)`", variants)} if variants else {family}
    assert listed == set(catalogue())


def test_what_the_page_on_sharding_shows_is_what_is_printed() -> None:
    shown = re.findall(r"```console\n\$ (shardlaw show [^\n]*)\n(.*?)\n```", (DOCS / "sharding.md").read_text("utf-8"), re.DOTALL)
    assert len(shown) == 7
    for command, printed in shown:
        shape, _, mesh, _, place = shlex.split(command)[2:]
        assert show(shape, mesh, place) == printed, command


@pytest.mark.ranks
def test_the_first_hour_finds_what_it_says_and_its_mends_mend_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in re.findall(r"```(?:python|toml)\n# (ring\.py|shardlaw\.toml)\n(.*?)```", HOUR, re.DOTALL):
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    shardlaw = Shell(tmp_path, capsys)
    found = shardlaw("run", "--target", "ring", "collective.all-reduce")
    assert found.returncode == 1, found.stdout + found.stderr
    for case in ("collective.all-reduce mesh=2 x=3\n", "collective.all-reduce mesh=2 x=2 work=async\n"):
        assert case in HOUR
        assert case in found.stdout
    text = (tmp_path / "ring.py").read_text()
    for diff in re.findall(r"```diff\n(.*?)```", HOUR, re.DOTALL):
        old, new = ("".join(f"{line[1:]}\n" for line in diff.splitlines() if line[:1] == sign) for sign in "-+")
        assert old in text
        text = text.replace(old, new, 1)
    (tmp_path / "ring.py").write_text(text)
    assert shardlaw("replay", "shardlaw-report").returncode == 0
    behind = shardlaw("run", "--target", "ring", "collective.all-reduce")
    assert {path.name for path in tmp_path.iterdir()} <= {"ring.py", "shardlaw.toml", "shardlaw-report", "__pycache__"}
    (features,) = re.findall(r"^ +features: .*edge.*$", HOUR, re.MULTILINE)
    assert features.strip() in behind.stdout
    (of_gloo,) = re.findall(r"`shardlaw replay '(collective.reduce .*?)'`", HOUR)
    assert "which is expected: On gloo, a maximum" in shardlaw("replay", of_gloo).stdout
    named = re.findall(r"^    wrong-\w+ [0-9a-f]{8}$", HOUR, re.MULTILINE)
    assert [name.strip() in found.stdout + behind.stdout for name in named] == [True] * 3, behind.stdout
