"""``shardlaw replay``: run a case again, from a stored finding, a folder of findings, or its text."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from shardlaw.conformance.errors import UsageError
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.report.wording import one_line
from shardlaw.conformance.run.case_check import INVALID_CASE_ERRORS, check_case, resolve_law
from shardlaw.conformance.run.confirm import trace_spots
from shardlaw.conformance.run.finding_file import answer_fields, finding_files, is_finding_id, read_finding
from shardlaw.conformance.run.request import DEFAULT_REPORT
from shardlaw.conformance.run.supported import for_installed_torch
from shardlaw.conformance.world.verdicts import REFUSED_NOW
from shardlaw.reference.notation import NotationError

if TYPE_CHECKING:
    from shardlaw.conformance.law.law import Law
    from shardlaw.conformance.law.target import Target
    from shardlaw.conformance.law.verdict import Verdict
    from shardlaw.conformance.run.entry import Entry
    from shardlaw.conformance.run.expectations import Expectations
    from shardlaw.conformance.world import Pool

_one_line = partial(one_line, limit=400)


@dataclass(frozen=True)
class ReplayCase:
    """A case to run. For a stored finding ``name`` is its id, ``target``, ``storage`` and ``signature`` are those of the run that found it,
    and ``expected`` is the reason if it was expected there."""

    case: Case
    law: Law
    name: str = ""
    signature: str = ""
    expected: str = ""
    target: str = "gloo"
    storage: str = ""

    @property
    def place(self) -> tuple[str, str]:
        """Where it runs: the names of target and storage."""
        return self.target, self.storage


def replay(what: str, target: str | None = None, storage: str | None = None, times: int = 1, trace: bool = False) -> int:
    """Run ``what`` again, each time in a fresh world, and print every verdict. A stored finding runs on its own target and storage unless
    others are given.

    Returns 1 if a case deviates and no expectation covers it, else 0. Raises :class:`UsageError`.
    """
    from shardlaw.conformance.target.config import check_target, get_target, read_config, with_storage
    from shardlaw.conformance.world import Pool, WorldError

    if times < 1:
        raise UsageError(f"--times {times}: want 1 or more")
    found = [replace(item, target=target or item.target, storage=storage or item.storage) for item in _find_cases(what)]
    cases = sorted(found, key=lambda item: not item.expected)  # expected ones first, so that new ones end the output
    config = read_config()
    targets: dict[tuple[str, str], Target] = {}
    for item in cases:
        try:
            live = targets[item.place] = with_storage(get_target(item.target, config), item.storage or None, config)
        except UsageError as error:
            raise UsageError(f"{item.name + ': ' if item.name and not target else ''}{error}") from None
        check_target(live, max(item.case.world, item.law.smallest))
    judged, items_by_word = 0, dict[str, list[ReplayCase]]()
    with ExitStack() as stack:
        pools: dict[tuple[str, str], Pool] = {}
        for item in cases:
            try:
                if item.place not in pools:
                    pools[item.place] = stack.enter_context(Pool(targets[item.place]))
                verdicts = _run_fresh(item, pools[item.place], times, trace)
                word = _conclude(item, verdicts, _load_expectations(targets[item.place]), pools[item.place])
            except WorldError as error:
                raise UsageError(f"target {item.target} cannot start: {error}") from None
            judged += sum(verdict.status != "rejected" for verdict in verdicts)
            items_by_word.setdefault(word, []).append(item)
    if not judged:
        raise UsageError(f"no case was judged: {verdicts[-1].message}")
    new = items_by_word.get("new", [])
    if len(cases) > 1:
        counts = ", ".join(f"{len(items_by_word[word])} {word}" for word in ("held", "expected", "new") if word in items_by_word)
        print(f"{len(cases)} findings tried again: {counts}", *(f"  {item.name} {item.case.text}" for item in new), sep="\n")
    return 1 if new else 0


def reproducer_of(what: str) -> str:
    """The script of a stored finding, or of a case given as text. Raises :class:`UsageError` if there is none."""
    from shardlaw.conformance.law.script import ScriptError
    from shardlaw.conformance.report.reproducer import FaultInfo, ScriptTarget, render_reproducer
    from shardlaw.conformance.target.config import get_target, read_config

    path, join = _resolve_path(what), ScriptTarget()
    if not what.strip():
        raise UsageError("no case: want a finding's file, or LAW NAME=VALUE ...")
    if path.is_file() or (" " not in what and not _is_law_id(what)):
        data = read_finding(path)
        law, case, seen = resolve_law(data["case"].law, f"{path}: "), data["case"], str(data["target"].get("torch", ""))
        error = data["signature"].split(" | ")[-1].partition(":")[0]
        raised = any(rank.get("outcome") == "raised" for rank in data.get("ranks", ()))  # else the act returned what it caught
        about = FaultInfo(data["kind"], error if raised else "", data["check"])
        with suppress(UsageError):  # the config here may lack the target
            join = ScriptTarget.from_target(get_target(str(data["target"].get("name", "gloo")), read_config()))
    else:
        (item,) = _find_cases(what)
        law, case, about, seen = item.law, item.case, FaultInfo(), ""
    try:
        return render_reproducer(law, case, about, seen, join)
    except (ScriptError, NotationError) as error:
        raise UsageError(f"{what}: no reproducer: {error}") from None


def _resolve_path(what: str) -> Path:
    """The path that ``what`` names. A finding's id stands for its file in the default report folder."""
    stored = DEFAULT_REPORT / "findings" / f"{what}.json"
    return stored if is_finding_id(what) and stored.is_file() else Path(what)


def _find_cases(what: str) -> list[ReplayCase]:
    if not what.strip():
        raise UsageError("nothing to try: want a finding's file, a folder of them, or LAW NAME=VALUE ...")
    path = _resolve_path(what)
    if path.is_dir():
        files = finding_files(path)
        if not files:
            raise UsageError(f"{what}: no findings in this folder: want the folder of a report, or its folder findings/")
        return [_read_stored(file) for file in files]
    if path.is_file() or (path.suffix == ".json" and "=" not in what):
        return [_read_stored(path)]
    if " " not in what.strip() and "=" not in what and ("/" in what or "." not in what):
        raise UsageError(f"{what}: no such file or folder, and no case: want LAW NAME=VALUE ...")
    try:
        case = Case.parse(what)
    except NotationError as error:
        raise UsageError(str(error)) from None
    law = resolve_law(case.law)
    if _is_law_id(what):
        case = Case.parse(law.control)
    check_case(law, case)
    return [ReplayCase(Case(law.id, case.fields), law)]


def _is_law_id(what: str) -> bool:
    """Whether ``what`` is a law id, which stands for the law's control case."""
    return not Path(what).exists() and not what.endswith(".json") and "." in what and not {*what} & set(" =/")


def _read_stored(path: Path) -> ReplayCase:
    data = read_finding(path)
    case: Case = data["case"]
    law = resolve_law(case.law, f"{path}: ")
    check_case(law, case)
    expected = (data.get("note") or "as its report says") if data["status"] == "expected" else ""
    where, storage = str(data["target"].get("name") or "gloo"), str(data["target"].get("storage") or "")
    if data["check"] == REFUSED_NOW:  # a refusal that earlier releases did not have: it deviates
        law = law.with_no_refusal_allowed()
    return ReplayCase(case, law, data["id"], data["signature"], expected, where, storage)


@cache
def _load_expectations(target: Target) -> Expectations:
    """The expectations for a target and the installed torch."""
    import torch

    from shardlaw.conformance.laws import catalogue
    from shardlaw.conformance.run import expectations

    return expectations.load(expectations.expectation_files(target), list(catalogue().values()), torch.__version__, target.name)


def _run_fresh(item: ReplayCase, pool: Pool, times: int, trace: bool) -> list[Verdict]:
    history = f" (after {len(item.case.after)} earlier cases)" if item.case.after else ""
    print(f"{item.name + ': ' if item.name else ''}{item.case.text}{history}")
    verdicts: list[Verdict] = []
    for at in range(times):
        try:
            law = for_installed_torch(item.law)
            verdict = pool.check_fresh(law, item.case, traced="at end" if trace else "")
            if trace and verdict.kind == "crash":  # once more, as the trace was lost with the rank
                verdict = pool.check_fresh(law, item.case, traced="each step")
        except NotationError as error:
            raise UsageError(f"case {item.case.text!r}: {error}") from None
        for answer in verdict.ranks:
            if answer.raised is not None and answer.raised.error in INVALID_CASE_ERRORS:
                raise UsageError(f"case {item.case.text!r}: {answer.raised.text}")
        count = f"{at + 1} of {times}: " if times > 1 else ""
        print(f"  {count}{_verdict_text(verdict)}", flush=True)
        if trace or (verdict.status == "deviates" and not any(_has_same_outcome(verdict, seen) for seen in verdicts)):
            print(*_answer_lines(verdict, trace), sep="\n", flush=True)
        verdicts.append(verdict)
    return verdicts


def _has_same_outcome(a: Verdict, b: Verdict) -> bool:
    return (a.status, a.signature) == (b.status, b.signature)


def _verdict_text(verdict: Verdict) -> str:
    if verdict.status == "deviates":
        return f"{verdict.kind} ({verdict.check}): {_one_line(verdict.message)}"
    return verdict.status + (f": {_one_line(verdict.message)}" if verdict.message else "")


def _answer_lines(verdict: Verdict, trace: bool) -> list[str]:
    lines = []
    for answer in verdict.ranks:
        fields = answer_fields(answer)
        lines.append(f"    rank {answer.rank} {answer.outcome}" + (f": {_one_line(fields['message'])}" if fields["message"] else ""))
        lines += [f"      {key} {fields[key] if trace else _one_line(fields[key])}" for key in ("expected", "got") if fields[key]]
        if trace:
            lines += [f"      > {step}" for step in answer.trace]
            lines += [f"      | {line}" for key in ("stack", "output") for line in fields[key].splitlines()]
    return lines


def _find_entry(item: ReplayCase, verdict: Verdict, expected: Expectations, pool: Pool) -> Entry | None:
    """The entry that accounts for a deviation; the case is traced if an entry with ``at`` needs it."""
    entry = expected.match_verdict(item.law, verdict)
    if entry is None and expected.needs_trace(item.law, verdict):
        entry = expected.match_verdict(item.law, verdict, trace_spots(pool, for_installed_torch(item.law), verdict))
    return entry


def _conclude(item: ReplayCase, verdicts: list[Verdict], expected: Expectations, pool: Pool) -> str:
    """Print the conclusion from all runs of a case; returns ``held``, ``expected`` or ``new``."""
    times = len(verdicts)
    deviating = [verdict for verdict in verdicts if verdict.status == "deviates"]
    if not deviating:
        print(
            f"  {verdicts[0].status} {times} of {times} times" if len({v.status for v in verdicts}) == 1 else "  no deviation", flush=True
        )
        return "held"
    as_stored = sum(verdict.signature == item.signature for verdict in deviating)
    text = f"  deviates {len(deviating)} of {times} times"
    if item.signature:
        text += ", as stored" if as_stored == len(deviating) else f", {as_stored} of them as stored ({item.signature})"
    entries = [_find_entry(item, verdict, expected, pool) for verdict in deviating]
    reasons = [f"{entry.reason} ({entry.where})" for entry in dict.fromkeys(filter(None, entries))]
    if not all(entries) and item.expected and as_stored == len(deviating):
        reasons.append(item.expected)
    known = all(entries) or (as_stored == len(deviating) and bool(item.expected))
    print(text, *(f"  which is expected: {reason}" for reason in reasons if known), sep="\n", flush=True)
    return "expected" if known else "new"
