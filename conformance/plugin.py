"""Laws as pytest items.

``pytest --pyargs conformance.laws`` collects one item for each law, named by its id, so that ``FILE::LAW-ID`` selects one. The
plugin is loaded into every pytest of an environment that has Shardlaw installed: it imports neither torch nor hypothesis,
nor anything else of the project, until a file of laws is asked for.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conformance.engine import Run
    from conformance.law import Law

LAWS_FOLDER = Path(__file__).parent / "laws"


def law_files() -> dict[Path, str]:
    """The files that hold laws, each with its module's name: ours, and those that ``SHARDLAW_LAWS`` names."""
    found = {}
    for module in filter(None, os.environ.get("SHARDLAW_LAWS", "").split(",")):
        spec = importlib.util.find_spec(module)
        if spec is not None and spec.origin:
            found[Path(spec.origin).resolve()] = module
    return found


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    if file_path.suffix != ".py":
        return None
    ours = LAWS_FOLDER in file_path.parents and file_path.name != "__init__.py"
    asked = parent.session.isinitpath(file_path)
    module: str | None
    if ours:
        module = ".".join(("conformance.laws", *file_path.relative_to(LAWS_FOLDER).with_suffix("").parts))
    else:
        module = law_files().get(file_path.resolve()) if asked else None
    if module is None:
        return None
    from conformance.laws import modules

    return LawFile.from_parent(parent, path=file_path, law_module=module) if module in modules() else None


class LawFile(pytest.File):
    """A module of laws."""

    def __init__(self, *, law_module: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.law_module = law_module

    def collect(self) -> Iterator[LawItem]:
        from conformance.laws import laws_of

        for law in laws_of(self.law_module):
            yield LawItem.from_parent(self, name=law.id, law=law)


class LawItem(pytest.Item):
    """One law: it passes when the law held, or deviated only as expected; it is skipped when nothing could be judged."""

    def __init__(self, *, law: Law, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.law = law

    def runtest(self) -> None:
        result = running(self.config).law(self.law)
        if result.outcome == "untested":
            pytest.skip(result.reason or "no case was judged")
        if result.outcome == "deviates":
            raise Deviates("\n".join(result.lines))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> str | Any:
        if isinstance(excinfo.value, Deviates):
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        return self.path, None, self.law.id


class Deviates(Exception):
    """A law does not hold: the text lists its new findings."""


RUN: pytest.StashKey[Run] = pytest.StashKey()


def running(config: pytest.Config) -> Run:
    """The run that this pytest session is part of; started with the plainest request when a user runs pytest on the laws."""
    if RUN not in config.stash:
        from conformance.engine import Run
        from conformance.request import RunRequest

        run = Run.start(RunRequest())
        config.stash[RUN] = run
        config.add_cleanup(run.close)
    return config.stash[RUN]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if RUN not in config.stash:
        return
    run = config.stash[RUN]
    wanted = {law.id: at for at, law in enumerate(run.laws)}
    kept = sorted((item for item in items if isinstance(item, LawItem) and item.law.id in wanted), key=lambda item: wanted[item.law.id])
    dropped = [item for item in items if item not in set(kept)]
    items[:] = kept
    if dropped:
        config.hook.pytest_deselected(items=dropped)
