"""The library: run one case of a law, or your own functions, on live ranks.

::

    from shardlaw import Worlds

    with Worlds("gloo") as world:
        world.check("redistribute.local", "redistribute.local mesh=2 x=5:S(0) to=R")    # a Verdict
        world(4).run(function, 1, 2)                                                    # the results of function(here, 1, 2), by rank

:func:`check` runs a single case, on ranks that live until the process ends. Ranks start with the first call and serve all later ones; a
rank that hangs or dies costs its world only. A mistake of the caller raises :class:`UsageError`, one line that says how to fix it.

Nothing here is thread-safe.
"""

from __future__ import annotations

import atexit
import itertools
import json
import linecache
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import CodeType, TracebackType
from typing import TYPE_CHECKING, Any

from shardlaw.conformance.errors import UsageError, one_of
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.law import Law
from shardlaw.conformance.law.target import Target
from shardlaw.conformance.rank.spmd import CALL, PLANTED, Function, call_folder, read_results
from shardlaw.conformance.run.request import MAX_LOCAL_RANKS

if TYPE_CHECKING:
    from shardlaw.conformance.law.verdict import Answer, Verdict
    from shardlaw.conformance.world import Pool

DEFAULT_RANKS = 2
HOME = os.path.dirname(os.path.abspath(__file__))
INTERNAL_FRAMES = (f"{HOME}/world/", f"{HOME}/rank/spmd.py", 'File "<string>"')


class DeviationError(AssertionError):
    """A function raised, hung or recorded a deviation on some rank. The text has the answers of all ranks, ``verdict`` the same as data."""

    def __init__(self, text: str, verdict: Verdict) -> None:
        super().__init__(text)
        self.verdict = verdict


@dataclass(frozen=True)
class Outcome:
    """The result of a call: the verdict, and what the function returned, by rank, for the ranks on which it returned."""

    verdict: Verdict
    returned: Mapping[int, Any]


class Ranks:
    """A number of live ranks of one target, ready to run a function. Created by calling a :class:`Worlds`."""

    def __init__(self, worlds: Worlds, size: int) -> None:
        self._worlds = worlds
        self.size = size

    def __repr__(self) -> str:
        return f"<{self.size} ranks of {self._worlds.target.name}>"

    def run(self, function: Callable[..., Any] | str, *args: Any, **options: Any) -> list[Any]:
        """Call ``function(here, *args, **options)`` on every rank at once; returns what each returned, by rank.

        ``function`` stands at the top of a module, or is its ``module:name``; ``here`` is the rank's
        :class:`~shardlaw.conformance.rank.context.RankContext`. Arguments and results are copied: anything that can be pickled, tensors
        included (they arrive on the CPU), a DTensor not.

        Raises :class:`DeviationError` if a rank raises, dies, hangs, or records a deviation through ``here``; its text has the stack of
        every rank. Raises :class:`UsageError` if ranks cannot import the function.
        """
        __tracebackhide__ = True
        outcome = self.judge(function, *args, **options)
        if outcome.verdict.status != "held":
            raise DeviationError(explain(outcome.verdict, self._worlds.target), outcome.verdict)
        return [outcome.returned[rank] for rank in range(self.size)]

    def judge(self, function: Callable[..., Any] | str, *args: Any, **options: Any) -> Outcome:
        """As :meth:`run`, but returns an :class:`Outcome` and does not raise for a deviation."""
        __tracebackhide__ = True
        found = Function.from_callable(function)
        case = Case.of(CALL, world=self.size, function=found)
        return self._worlds._call(_function_law(), found, (args, options), case)


class Worlds:
    """Live ranks of one target, in worlds of any size. A context manager: leaving it ends every rank.

    ``target`` is a :class:`Target` or its name: built in, in the config file, or from a package. ``ranks`` is the default number of ranks
    of a call. ``timeout``: seconds for a case, instead of the target's. ``folder``: that of the config file (default: the current one).
    Raises :class:`UsageError` for an unknown target."""

    def __init__(
        self, target: str | Target = "gloo", *, ranks: int = DEFAULT_RANKS, timeout: float | None = None, folder: Path | None = None
    ) -> None:
        found = target if isinstance(target, Target) else find_target(target, (Path.cwd(),) if folder is None else (folder,))
        if timeout is not None and not timeout > 0:
            raise UsageError(f"timeout={timeout!r}: want seconds, more than 0")
        self.target: Target = found if timeout is None else replace(found, timeout=float(timeout))
        self.ranks = _check_size(ranks)
        self._pool: Pool | None = None
        self._call_numbers = itertools.count(1)
        self._checked_size = 0

    def __repr__(self) -> str:
        return f"<live ranks of {self.target.name}>"

    def __call__(self, size: int | None = None) -> Ranks:
        """``size`` ranks, or the default number. Raises :class:`UsageError` for an invalid number."""
        return Ranks(self, self.ranks if size is None else _check_size(size))

    def run(self, function: Callable[..., Any] | str, *args: Any, **options: Any) -> list[Any]:
        """:meth:`Ranks.run` on the default number of ranks."""
        __tracebackhide__ = True
        return self().run(function, *args, **options)

    def judge(self, function: Callable[..., Any] | str, *args: Any, **options: Any) -> Outcome:
        """:meth:`Ranks.judge` on the default number of ranks."""
        return self().judge(function, *args, **options)

    def check(self, law: str | Law, case: str | Case | None = None, *, fresh: bool = False) -> Verdict:
        """Run one case of a law.

        ``law`` is an id, or a law, which need not be in the catalogue if its check is a module-level function. ``case`` is a case or its
        text, with or without the law's id before it; default: the law's control. ``fresh``: in a world that has served no case before,
        under the target's full limits.

        Returns a :class:`~shardlaw.conformance.law.verdict.Verdict`: ``status`` is ``held``, ``deviates`` (``kind`` and ``message`` say
        how, ``ranks`` has the answer of each rank), ``refused`` (by all ranks alike, if the law allows it) or ``rejected`` (the case is
        invalid). Raises :class:`UsageError` for an unknown law, an unreadable case, and a capability that the target declares missing.
        """
        __tracebackhide__ = True
        from shardlaw.conformance.laws import catalogue
        from shardlaw.conformance.run.case_check import check_case

        law = _resolve_law(law)
        case = _resolve_case(law, case)
        check_case(law, case)
        if reason := self.lacks(law.needs):
            raise UsageError(f"{law.id} cannot be tried: {reason}")
        if catalogue().get(law.id) is law:
            return _check_readable(self._check_listed_law(law, case, fresh), case)
        sizes = law.stages(case) if law.stages else None
        stages = (lambda _: sizes) if sizes else None
        stand_in = replace(_function_law(), refusal=law.refusal, needs=law.needs, smallest=law.smallest, stages=stages)
        return _check_readable(self._call(stand_in, Function.from_law(law), case, case, fresh=fresh).verdict, case)

    def lacks(self, needs: Iterable[str] = (), size: int = 1) -> str:
        """Why the target cannot provide the capabilities ``needs`` on ``size`` ranks: one line, or an empty text.

        Raises :class:`UsageError` for an unknown capability.
        """
        from shardlaw.conformance.law.target import CAPABILITIES
        from shardlaw.conformance.target.builtin import check_devices

        needs = tuple(needs)
        for need in needs:
            if need not in CAPABILITIES:
                raise UsageError(f"needs: unknown {need!r} ({one_of(need, CAPABILITIES)})")
        missing = sorted(set(needs) & set(self.target.cannot))
        if missing:
            return f"target {self.target.name} declares that it cannot do {', '.join(missing)}"
        try:
            check_devices(self.target, size)
        except UsageError as error:
            return str(error)
        return ""

    def planted(self, *faults: Callable[[], object] | str) -> Worlds:
        """New worlds of the target, whose ranks call each of ``faults`` before the process group starts.

        A fault is a module-level function without arguments, or its ``module:name``, that breaks something which a law should notice.
        Raises :class:`UsageError` if ranks cannot import it.
        """
        setups = [*([Function.from_setup(self.target.setup)] if self.target.setup else []), *map(Function.from_callable, faults)]
        env = (*self.target.env, (PLANTED, json.dumps([asdict(setup) for setup in setups])))
        return Worlds(replace(self.target, setup="shardlaw.conformance.rank.spmd:plant_faults", env=env), ranks=self.ranks)

    def close(self) -> None:
        """End every rank. A later call starts new ones."""
        live, self._pool = self._pool, None
        if live is not None:
            live.close()

    def __enter__(self) -> Worlds:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _get_pool(self, size: int) -> Pool:
        __tracebackhide__ = True
        from shardlaw.conformance.target.config import check_target
        from shardlaw.conformance.world import Pool

        if size > self._checked_size:
            check_target(self.target, size)
            self._checked_size = size
        self._pool = self._pool or Pool(self.target)
        return self._pool

    def _call(self, law: Law, function: Function, arguments: object, case: Case, *, fresh: bool = False) -> Outcome:
        """Call ``function`` on every rank of a world; again in a fresh world if ranks ran out of time. ``case`` is put into the verdict."""
        __tracebackhide__ = True
        outcome = self._call_once(law, function, arguments, case, fresh)
        return self._call_once(law, function, arguments, case, True) if not fresh and _is_timeout(outcome.verdict) else outcome

    def _call_once(self, law: Law, function: Function, arguments: object, case: Case, fresh: bool) -> Outcome:
        __tracebackhide__ = True
        number, size = next(self._call_numbers), max(case.world, law.smallest)
        pool = self._get_pool(size)
        try:
            with call_folder(Path(pool.folder), number, function, arguments) as room:
                verdict = self._run_case(law, Case.of(CALL, world=case.world, call=number), fresh)
                return Outcome(replace(verdict, case=case, history=()), read_results(room, size))
        except TypeError as error:
            raise UsageError(f"{function}: {error}") from None

    def _check_listed_law(self, law: Law, case: Case, fresh: bool) -> Verdict:
        __tracebackhide__ = True
        self._get_pool(max(case.world, law.smallest))
        verdict = self._run_case(law, case, fresh or bool(case.after))
        # shared worlds have shorter limits: repeat a timeout in a fresh world, under the full limits
        return self._run_case(law, case, True) if not fresh and _is_timeout(verdict) else verdict

    def _run_case(self, law: Law, case: Case, fresh: bool) -> Verdict:
        __tracebackhide__ = True
        from shardlaw.conformance.run.supported import for_installed_torch
        from shardlaw.conformance.world import WorldError

        assert self._pool is not None
        law = for_installed_torch(law)
        try:
            return self._pool.check_fresh(law, case) if fresh else self._pool.check(law, [case])[0]
        except WorldError as error:
            self.close()
            raise UsageError(f"target {self.target.name} cannot start: {error}") from None
        except BaseException:
            # interrupted: the state of the ranks is unknown
            self.close()
            raise


def check(law: str | Law, case: str | Case | None = None, *, target: str | Target = "gloo", fresh: bool = False) -> Verdict:
    """Run one case of a law on live ranks of ``target``: see :meth:`Worlds.check`.

    The ranks serve later calls with the same target too, until :func:`close` or the end of the process.
    """
    __tracebackhide__ = True
    key = target if isinstance(target, str) else repr(target)
    if key not in _WORLDS_BY_TARGET:
        _WORLDS_BY_TARGET[key] = Worlds(target)
    return _WORLDS_BY_TARGET[key].check(law, case, fresh=fresh)


_WORLDS_BY_TARGET: dict[str, Worlds] = {}


@atexit.register
def close() -> None:
    """End the ranks that :func:`check` started."""
    while _WORLDS_BY_TARGET:
        _WORLDS_BY_TARGET.popitem()[1].close()


def explain(verdict: Verdict, target: Target | None = None) -> str:
    """Format a verdict: what is wrong, then for every rank its answer, stack, and last lines of output."""
    lines = [f"{verdict.word}{f' ({verdict.check})' if verdict.check else ''}: {verdict.message}"]
    lines += [f"  {verdict.case.text}" + (f"  on target {target.name}" if target else "")]
    for answer in verdict.ranks:
        lines += _answer_lines(answer)
    return "\n".join(lines)


def _answer_lines(answer: Answer) -> list[str]:
    outcomes = {"held": "came to its end", "silent": "did not answer", "crashed": f"ended: {answer.reason}", "rejected": answer.reason}
    first = answer.deviations[0] if answer.deviations else None
    if answer.raised is not None:
        text = f"raised {answer.raised.error}: {answer.raised.text}".removesuffix(": ")
    else:
        text = f"{first.kind} ({first.check}): {first.message}" if first else outcomes.get(answer.outcome, answer.outcome)
    lines = [f"  rank {answer.rank} {text}".replace("\n", "\n      ").rstrip()]
    if first is not None:
        lines += [f"      {name} {text}" for name, text in (("expected", first.expected), ("got", first.got)) if text]
    stack = answer.raised.stack if answer.raised else "" if answer.outcome == "held" else answer.stack
    lines += _frame_lines(stack.splitlines())
    if answer.output.strip():
        lines += ["      it printed:", *(f"      | {line}" for line in answer.output.rstrip().splitlines()[-20:])]
    return lines


def _frame_lines(stack: Iterable[str]) -> list[str]:
    """The frames of a stack with their source lines, without the harness's own frames."""
    lines = []
    for frame in stack:
        if any(ours in frame for ours in INTERNAL_FRAMES) or not frame.strip():
            continue
        lines.append(f"      {frame}")
        file, _, rest = frame.partition(":")
        number = rest.partition(" ")[0]
        code = linecache.getline(file, int(number)).strip() if number.isdigit() else ""
        lines += [f"          {code}"] if code else []
    return lines


def _function_law() -> Law:
    from shardlaw.conformance.laws import find

    return find(CALL)


def _is_timeout(verdict: Verdict) -> bool:
    """Whether a verdict is only about ranks that did not answer in time."""
    late = verdict.kind == "hang" or (verdict.kind == "divergence" and verdict.check == "process")
    return late and not any(answer.raised for answer in verdict.ranks)


def _check_readable(verdict: Verdict, case: Case) -> Verdict:
    """Return the verdict. Raises :class:`UsageError` if ranks could not parse the case."""
    from shardlaw.conformance.run.case_check import INVALID_CASE_ERRORS

    for answer in verdict.ranks:
        if answer.raised is not None and answer.raised.error in INVALID_CASE_ERRORS:
            raise UsageError(f"case {case.text!r}: {answer.raised.text}")
    return verdict


def find_target(name: str, folders: Sequence[Path]) -> Target:
    """The target with this name, by the config file in the first of ``folders`` that has one. Raises :class:`UsageError`."""
    from shardlaw.conformance.target.config import get_target, read_config, with_storage

    configs = [read_config(folder) for folder in folders]
    config = next((config for config in configs if config.path is not None), configs[0])
    return with_storage(get_target(name, config), None, config)


def parse_marker(args: Sequence[object], options: Mapping[str, Any]) -> tuple[int, tuple[str, ...]]:
    """Ranks and capabilities in ``@pytest.mark.shardlaw(world=N, needs=[...])``. Raises :class:`UsageError`."""
    for name in options:
        if name not in ("world", "needs"):
            raise UsageError(f"unknown {name!r} ({one_of(name, ('world', 'needs'))})")
    needs = options.get("needs", ())
    if args or not isinstance(needs, (list, tuple)) or not all(isinstance(need, str) for need in needs):
        raise UsageError("want world=N and needs=[...], such as world=4, needs=['all_to_all']")
    return _check_size(options.get("world", DEFAULT_RANKS)), tuple(needs)


def _check_size(size: int) -> int:
    if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= MAX_LOCAL_RANKS:
        raise UsageError(f"a world of {size!r} ranks: want a whole number from 1 to {MAX_LOCAL_RANKS}")
    return size


def _resolve_law(law: str | Law) -> Law:
    from shardlaw.conformance.laws import catalogue
    from shardlaw.conformance.run.case_check import resolve_law

    if isinstance(law, Law):
        known = catalogue().get(law.id)
        return known if known is not None and _is_same_law(known, law) else law
    return resolve_law(law)


def _law_code(law: Law) -> CodeType:
    """The code object of a law's act or check."""
    function: Any = law.acts[0].function if law.acts else law.check
    return function.__code__  # type: ignore[no-any-return]


def _is_same_law(law: Law, other: Law) -> bool:
    """Whether two laws are one: a module that was imported under two names defines its laws twice."""
    (name, file), (other_name, other_file) = ((code.co_qualname, code.co_filename) for code in map(_law_code, (law, other)))
    return name == other_name and bool(file) and os.path.abspath(file) == os.path.abspath(other_file)


def _resolve_case(law: Law, case: str | Case | None) -> Case:
    from shardlaw.reference.notation import NotationError

    if isinstance(case, Case):
        found = case
    else:
        text = law.control if case is None else case.strip()
        first = text.partition(" ")[0]
        try:
            found = Case.parse(f"{law.id} {text}" if "=" in first.partition("[")[0] else text)
        except NotationError as error:
            raise UsageError(str(error)) from None
    if found.law not in (law.id, *law.aliases):
        raise UsageError(f"case {found.text!r} is one of {found.law}, not of {law.id}")
    return Case(law.id, found.fields, found.after)
