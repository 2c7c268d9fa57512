"""Hooks of ``mkdocs build``: the front page and the catalogue are made, and files of the repository that a page names stay names.

``tox -e docs`` builds the site into ``build/site``.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from shardlaw.conformance.law.law import Law
from shardlaw.conformance.laws import catalogue

ROOT = Path(__file__).parents[1]


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are made: ``index.md`` of the README, and ``catalogue.md`` of the laws."""
    from mkdocs.structure.files import File

    for name, text in (("index.md", front_page()), ("catalogue.md", catalogue_page(list(catalogue().values())))):
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """A link to a file of the repository becomes its name: no site holds it. Raises ``ValueError`` where there is no such file."""
    return re.sub(r"\[([^]]+)\]\(\.\./([^)#]+)(?:#[^)]*)?\)", lambda link: _named(link[1], link[2]), markdown)


def _named(text: str, path: str) -> str:
    if not (ROOT / path).exists():
        raise ValueError(f"a page of docs/ leads to {path}, which is not there")
    return text if path in text else f"{text} (`{path}`)"


def front_page() -> str:
    """The README, with its links as they are from ``docs/``."""
    text = (ROOT / "README.md").read_text("utf-8")
    links = re.sub(r"\]\((?!docs/|https?:|#)", "](../", text)
    return links.replace("](docs/", "](")


def catalogue_page(laws: list[Law]) -> str:
    """Every law by chapter: id, tier, clause and source. Laws of one family with one clause stand together."""
    lines = [
        "# Every law",
        "",
        f"{len(laws)} laws. Begin with [which-laws.md](which-laws.md); `shardlaw laws LAW` also says what the cases of one may say.",
    ]
    chapters: dict[str, dict[tuple[str, str, str, str], list[str]]] = {}
    for law in laws:
        family, _, variant = law.id.partition("[")
        key = (family, law.tier, law.clause, law.source)
        chapters.setdefault(law.chapter, {}).setdefault(key, []).append(variant.removesuffix("]"))
    for chapter, families in chapters.items():
        lines += ["", f"## {chapter}", "", "| law | tier | what must hold | source |", "| --- | --- | --- | --- |"]
        for (family, tier, clause, source), variants in families.items():
            named = [variant for variant in variants if variant]
            of = f" of {', '.join(f'`{name}`' for name in named)}" if named else ""
            lines.append(f"| `{family}`{_cell(of)} | {tier} | {_cell(clause)} | {_cell(source)} |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")
