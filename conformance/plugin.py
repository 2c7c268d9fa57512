"""The pytest plugin: laws as items, and live ranks as fixtures.

``pytest --pyargs shardlaw.conformance.laws`` collects an item for each law, named by its id, so that ``FILE::LAW-ID`` selects one. Your own
tests use the fixture :func:`world`; the marker ``shardlaw`` says what a test needs; ``--shardlaw-target NAME`` (ini: ``shardlaw_target``)
sets the target. ``pytest --shardlaw PROFILE`` runs the laws beside the tests of any repository; expected deviations are xfails.

pytest loads the plugin in every environment that has Shardlaw, so it imports torch, hypothesis and the rest of the project only on use.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from shardlaw.conformance.api import Worlds
    from shardlaw.conformance.law.law import Law
    from shardlaw.conformance.run.engine import Run
    from shardlaw.conformance.twin.session import Result
    from shardlaw.conformance.twin.spec import Twin

MARKER = "shardlaw(world=N, needs=[...]): of the ranks that the fixture 'world' runs, how many, and what their target must be able to do"
PROFILES = ("smoke", "ci", "nightly")
LAWS_FOLDER = Path(__file__).parent / "laws"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("shardlaw", "sharded tensors on live ranks")
    group.addoption("--shardlaw", metavar="PROFILE", choices=PROFILES, help="try the laws too: smoke, ci or nightly; -k selects")
    on = "what tests that use the fixtures 'world' and 'twin' run on; see 'shardlaw targets'"
    group.addoption("--shardlaw-target", metavar="NAME", help=on)
    parser.addini("shardlaw_target", "as --shardlaw-target", default="gloo")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", MARKER)
    if config.getoption("--shardlaw-target"):
        with usage_errors():
            from shardlaw.conformance.api import find_target

            find_target(target_name(config), config_folders(config))
    if config.getoption("--shardlaw"):
        if hasattr(config, "workerinput") or getattr(config.option, "numprocesses", None):
            raise pytest.UsageError("--shardlaw: ranks are started by one process: want no -n")
        with usage_errors():
            config.args += [str(LAWS_FOLDER), *map(str, law_files())]


def pytest_report_header(config: pytest.Config) -> str | None:
    name = target_name(config)
    return f"shardlaw: target {name}" if name != "gloo" else None


def target_name(config: pytest.Config) -> str:
    return config.getoption("--shardlaw-target") or str(config.getini("shardlaw_target"))


def config_folders(config: pytest.Config) -> tuple[Path, ...]:
    """The folders to search for a config file of targets: the current one, then pytest's rootdir."""
    return config.invocation_params.dir, config.rootpath


@contextmanager
def usage_errors() -> Iterator[None]:
    """Turn a :class:`UsageError` into pytest's, which ends pytest with one line."""
    from shardlaw.conformance.errors import UsageError

    try:
        yield
    except UsageError as error:
        raise pytest.UsageError(f"shardlaw: {error}") from None


@pytest.fixture(scope="session")
def world(request: pytest.FixtureRequest) -> Iterator[Worlds]:
    """Live ranks of the target, started on first use, for the whole session.

    ``world(4).run(function, *args)`` runs ``function(here, *args)`` on four ranks and returns the results by rank; ``world.run`` uses the
    number of ranks in the test's marker (``@pytest.mark.shardlaw(world=4)``), or 2. ``world.check(law, case)`` runs a case of a law. See
    :class:`shardlaw.conformance.api.Worlds`. The fixture has session scope, so tests with ``@given`` may use it.
    """
    with get_worlds(request.config) as found:
        yield found


@pytest.fixture(scope="session")
def twin(request: pytest.FixtureRequest) -> Iterator[Callable[..., Result]]:
    """``twin("my_package.twin:make")``, or ``twin(make)`` with a module-level function: fails the test if the sharded model deviates from
    the unsharded one. Takes and returns the same as :func:`shardlaw.twin`."""
    from shardlaw.conformance.api import find_target
    from shardlaw.conformance.twin.report import terminal_lines
    from shardlaw.conformance.twin.session import Session
    from shardlaw.conformance.twin.session import twin as run_twin

    @wraps(run_twin)
    def check_twin(make: str | Callable[..., Twin], **options: Any) -> Result:
        __tracebackhide__ = True
        result = run_twin(make, **{"target": session, **options})
        if result.departs:
            raise AssertionError("\n".join(terminal_lines(result)))
        return result

    with usage_errors():
        target = find_target(target_name(request.config), config_folders(request.config))
    with Session(target) as session:
        yield check_twin


WORLDS: pytest.StashKey[Worlds] = pytest.StashKey()


def get_worlds(config: pytest.Config) -> Worlds:
    if WORLDS not in config.stash:
        with usage_errors():
            from shardlaw.conformance.api import Worlds, find_target

            config.stash[WORLDS] = Worlds(find_target(target_name(config), config_folders(config)))
    return config.stash[WORLDS]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Set the default size of ``world`` from the marker, and skip the test if the target lacks what it needs."""
    marker = item.get_closest_marker("shardlaw")
    if marker is None and WORLDS not in item.config.stash:
        return
    from shardlaw.conformance.api import parse_marker
    from shardlaw.conformance.errors import UsageError

    worlds = get_worlds(item.config)
    wrong = reason = ""
    try:
        worlds.ranks, needs = parse_marker(marker.args if marker else (), marker.kwargs if marker else {})
        reason = worlds.lacks(needs, worlds.ranks) if marker else ""
    except UsageError as error:
        wrong = str(error)
    if wrong:
        pytest.fail(f"@pytest.mark.shardlaw: {wrong}", pytrace=False)
    if reason:
        pytest.skip(reason)


def law_files() -> dict[Path, str]:
    """The files with laws of other packages, and their module names. Raises :class:`UsageError` for a module that cannot be imported."""
    from shardlaw.conformance.errors import UsageError
    from shardlaw.conformance.laws import foreign

    found = {}
    for module, where in foreign().items():
        try:
            spec = importlib.util.find_spec(module)
        except Exception as error:
            raise UsageError(f"{where}: {module} cannot be imported: {type(error).__name__}: {error}") from None
        if spec is not None and spec.origin:
            found[Path(spec.origin).resolve()] = module
    return found


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    if file_path.suffix != ".py":
        return None
    is_own = LAWS_FOLDER in file_path.parents and file_path.name != "__init__.py"
    is_selected = parent.session.isinitpath(file_path)
    module: str | None
    if not (is_own or (is_selected and has_foreign_laws())):
        return None
    from shardlaw.conformance.errors import UsageError
    from shardlaw.conformance.laws import modules

    try:
        if is_own:
            module = ".".join(("shardlaw.conformance.laws", *file_path.relative_to(LAWS_FOLDER).with_suffix("").parts))
        else:
            module = law_files().get(file_path.resolve())
        return LawFile.from_parent(parent, path=file_path, law_module=module) if module in modules() else None
    except UsageError as error:
        # a broken package of laws must not break other tests: only our own files report it
        if is_own:
            raise pytest.UsageError(f"shardlaw: {error}") from None
        return None


@cache
def has_foreign_laws() -> bool:
    """Whether an entry point or the environment names a module of laws, as ``shardlaw.conformance.laws.foreign`` does, which is not
    imported here."""
    return bool(os.environ.get("SHARDLAW_LAWS") or entry_points(group="shardlaw.laws"))


class LawFile(pytest.File):
    """A module of laws as a pytest file."""

    def __init__(self, *, law_module: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.law_module = law_module

    def collect(self) -> Iterator[LawItem]:
        from shardlaw.conformance.errors import UsageError
        from shardlaw.conformance.laws import laws_of

        try:
            laws = laws_of(self.law_module)
        except UsageError as error:
            raise self.CollectError(f"shardlaw: {error}") from None
        for law in laws:
            yield LawItem.from_parent(self, name=law.id, law=law)


class LawItem(pytest.Item):
    """One law as a pytest item: fails on a new finding, is an xfail if only expected ones occurred, skipped if no case was judged."""

    def __init__(self, *, law: Law, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.law = law

    def runtest(self) -> None:
        result = get_run(self.session).try_law(self.law, self.next_laws())
        if result.outcome == "expected":
            pytest.xfail("; ".join(result.reasons))
        if result.outcome == "untested":
            pytest.skip(result.reason or "no case was judged")
        if result.outcome == "deviates":
            raise LawDeviates("\n".join(result.lines))

    def next_laws(self) -> Iterator[Law]:
        """The laws of the items after this one, in order."""
        items = self.session.items
        return (item.law for item in items[items.index(self) + 1 :] if isinstance(item, LawItem))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> str | Any:
        if isinstance(excinfo.value, (LawDeviates, pytest.xfail.Exception)):  # pytest's own text would quote our source, which takes long
            return str(excinfo.value)
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int | None, str]:
        return self.path, None, self.law.id


class LawDeviates(Exception):
    """A law deviates; the text lists its new findings."""


RUN: pytest.StashKey[Run] = pytest.StashKey()


def get_run(session: pytest.Session) -> Run:
    """The run of this session: that of ``shardlaw run``, or a new one for the laws that a user's pytest has collected."""
    config = session.config
    if RUN not in config.stash:
        from shardlaw.conformance.report.reporter import Reporter
        from shardlaw.conformance.run.request import RunRequest
        from shardlaw.conformance.run.start import start_run
        from shardlaw.conformance.target.config import find_target

        laws = tuple(item.law.id for item in session.items if isinstance(item, LawItem))
        with usage_errors():
            request = RunRequest(laws=laws, target=target_name(config), profile=config.getoption("--shardlaw") or "smoke")
            target = find_target(request.target, None, None, request.world_size)
            config.stash[RUN] = run = start_run(request, target, Reporter(request.report, quiet=True))
        config.stash[OWNS_RUN] = True
        config.add_cleanup(run.close)
    return config.stash[RUN]


OWNS_RUN: pytest.StashKey[bool] = pytest.StashKey()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """End a run that a user's pytest started, and write its final report."""
    if OWNS_RUN in session.config.stash:
        run = session.config.stash[RUN]
        interrupted = session.exitstatus == pytest.ExitCode.INTERRUPTED
        run.stopped_by = run.stopped_by or ("interrupt" if interrupted else None)
        run.close()
        run.write(130 if interrupted else 3 if run.failure is not None else run.exit_code())


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if OWNS_RUN in config.stash:
        run = config.stash[RUN]
        new = sum(found.status == "new" for found in run.findings)
        expected = len(run.findings) - new
        terminalreporter.write_line(
            f"shardlaw: {run.judged} cases, {new} new findings, {expected} expected: {run.request.report}/report.html"
        )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if RUN not in config.stash:
        return
    run = config.stash[RUN]
    order = {law.id: at for at, law in enumerate(run.laws)}
    selected = sorted((item for item in items if isinstance(item, LawItem) and item.law.id in order), key=lambda item: order[item.law.id])
    dropped = [item for item in items if item not in set(selected)]
    items[:] = selected
    if dropped:
        config.hook.pytest_deselected(items=dropped)
