"""``shardlaw verify``: check that a folder is the report of a certified run of this version.

Its files must agree with each other, with the profile, and with the laws and expectations of this version. A consistent forgery is found
only by ``--rerun``, which runs cases again on the target as it is configured here.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from shardlaw import __version__
from shardlaw.conformance.errors import UsageError
from shardlaw.conformance.law.features.features import features_of
from shardlaw.conformance.law.target import CAPABILITIES
from shardlaw.conformance.law.verdict import KINDS
from shardlaw.conformance.laws import catalogue, find
from shardlaw.conformance.report.certificate import FILE, make_certificate
from shardlaw.conformance.report.html import render_html
from shardlaw.conformance.report.junit import render_junit
from shardlaw.conformance.report.markdown import render_markdown
from shardlaw.conformance.report.run_report import Certificate, RunReport, read_case_lines, read_report
from shardlaw.conformance.run import expectations
from shardlaw.conformance.run.certified_profile import (
    ABSENT,
    EXPECTED,
    MISSING,
    RANKS,
    UNSAID,
    CertifiedProfile,
    profile_names,
    read_profile,
)
from shardlaw.conformance.run.finding_file import read_finding

if TYPE_CHECKING:
    from shardlaw.conformance.law.case import Case

WORDS = {"held", "refused", MISSING, ABSENT, UNSAID, *KINDS}
NOT_JUDGED = {MISSING, ABSENT, UNSAID}
FOLDER_MARK = "\N{OBJECT REPLACEMENT CHARACTER}"  # in place of the report's folder, which occurs only in the pages


def verify(folder: Path, rerun: int = 0) -> int:
    """Print the problems of a report, or what it certifies; returns 1 or 0. Raises :class:`UsageError` if it has no certificate, or its
    cases cannot be run here."""
    if rerun < 0:
        raise UsageError(f"--rerun {rerun}: want a number of cases, 0 or more")
    report = read_report(folder)
    if report.certificate is None:
        raise UsageError(f"{folder}: its report has no certificate: want the folder of shardlaw run --certify")
    found = list(find_problems(folder, report, report.certificate))
    rerun_note = ""
    if not found and rerun:
        found, tried = _rerun_cases(folder, report, report.certificate, rerun)
        rerun_note = f"; {tried} of its cases were tried again"
    for problem in found:
        print(f"  {problem}")
    print(f"{folder}: {'not verified' if found else f'verified{rerun_note}'}: {report.certificate.line()}")
    return 1 if found else 0


def find_problems(folder: Path, report: RunReport, claimed: Certificate) -> Iterator[str]:
    """Yield a line for each contradiction in a report."""
    name = f"{claimed.profile}-{claimed.release}"
    if name not in profile_names():
        yield f"{name} is no certified profile of this version ({', '.join(profile_names())})"
        return
    profile = read_profile(name)
    if claimed.sha256 != profile.sha256:
        yield f"it was run on another list than {name}: sha256 {claimed.sha256[:12]}..., must be {profile.sha256[:12]}..."
        return
    yield from _check_request(report, claimed)
    try:
        text = (folder / FILE).read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        yield f"{FILE} cannot be read"
        return
    if hashlib.sha256(text.encode()).hexdigest() != claimed.verdicts:
        yield f"{FILE} is not the file that the certificate names"
    words = _parse_words(text, profile)
    if words is None:
        yield f"{FILE} does not list the cases of {name}, each once and in order, with a verdict of this version"
        return
    counted = make_certificate(profile, words, claimed.loaded, text, report.exit == 0 and not report.target.stale)
    for field in msgspec.structs.fields(Certificate):
        if getattr(counted, field.name) != getattr(claimed, field.name):
            yield f"the certificate says {field.name} {getattr(claimed, field.name)}, by {FILE} it is {getattr(counted, field.name)}"
    words_by_case = {case.text: word for case, word in zip(profile.cases, words, strict=True)}
    yield from _check_laws(report, profile, words_by_case)
    yield from _check_findings(folder, report, words_by_case)
    yield from _check_expected(report, profile, words_by_case)
    yield from _check_cases(folder, report, profile, words_by_case)
    yield from _check_pages(folder, report)


def _check_request(report: RunReport, claimed: Certificate) -> Iterator[str]:
    """Check the request and the environment of the run."""
    target, loaded = report.target, claimed.loaded
    for what, got, want in (
        ("version of shardlaw", report.harness, __version__),
        ("version of shardlaw in the ranks", loaded.harness, __version__),
        ("torch in the ranks", loaded.torch, target.torch),
        ("python in the ranks", loaded.python, target.python),
        ("shard", report.shard, "1/1"),
        ("profile", report.profile, "smoke"),
        ("stopped by", report.stopped_by, None),
        ("complete", report.complete, True),
    ):
        if got != want:
            yield f"{what}: {got}, must be {want}"
    if not (loaded.torch and loaded.torch_git):
        yield "it does not say which torch its ranks had loaded"
    if target.world_size < RANKS:
        yield f"its largest world has {target.world_size} ranks, must have {RANKS} or more"
    if report.errors:
        yield f"{len(report.errors)} errors of the harness: the first while {report.errors[0].law} was tried"
    if unknown := sorted(set(target.cannot) - {*CAPABILITIES}):
        yield f"it declares {', '.join(unknown)} as missing, which is no word for a capability"
    if target.stale:
        yield f"it declares {', '.join(target.stale)} as missing, which works"
    if (report.exit == 0) != (not report.new()):
        yield f"exit {report.exit} with {len(report.new())} new findings"


def _parse_words(text: str, profile: CertifiedProfile) -> list[str] | None:
    """Parse ``verdicts.txt`` into a word for each case of the profile; ``None`` if the file does not fit it."""
    lines = text.splitlines()
    if len(lines) != len(profile.cases):
        return None
    words = []
    for line, case in zip(lines, profile.cases, strict=True):
        word = line.removesuffix(f" {case.text}")
        if word == line or not (word in WORDS or (word.split()[:1] == [EXPECTED] and word.split()[2:] and word.split()[2] in KINDS)):
            return None
        words.append(word)
    return words


def _check_laws(report: RunReport, profile: CertifiedProfile, words_by_case: dict[str, str]) -> Iterator[str]:
    """Check that the report has the profile's laws as this version defines them, and that their counts agree with the verdicts."""
    laws = {law_id: find(law_id) for law_id in profile.laws}
    if [line.id for line in report.laws] != [law.id for law in laws.values()]:
        yield "its laws are not those of the list, in their order"
        return
    for line, (law_id, law) in zip(report.laws, laws.items(), strict=True):
        words = [words_by_case[case.text] for case in profile.laws[law_id]]
        judged = [word for word in words if word not in NOT_JUDGED]
        new, expected = any(word in KINDS for word in words), sum(word.startswith(EXPECTED) for word in words)
        if (line.tier, line.clause, line.chapter) != (law.tier, law.clause, law.chapter):
            yield f"{line.id}: tier, clause or chapter are not those of this version"
        further = line.cases - len(judged)
        if further and not (line.refused and 0 < further <= 2):  # a law that refuses has its control tried
            yield f"{line.id}: the report counts {line.cases} cases, the verdicts {len(judged)}"
        if not expected <= line.expected <= expected + max(further, 0):
            yield f"{line.id}: the report counts {line.expected} expected cases, the verdicts {expected}"
        outcomes = {"deviates"} if new else {"untested"} if not judged else {"expected"} if line.expected else {"held", "stale"}
        if line.outcome not in outcomes and not (not judged and line.cases):
            yield f"{line.id}: its outcome is {line.outcome}, its verdicts are {_count_words(words)}"
        lacks = sorted(set(law.needs) & set(report.target.cannot))
        if lacks != line.lacks or bool(lacks) != (MISSING in words):
            yield f"{line.id}: it needs {', '.join(law.needs) or 'nothing'}, of which {', '.join(lacks) or 'nothing'} is declared missing"
    yield from _check_totals(report)


def _check_totals(report: RunReport) -> Iterator[str]:
    """Check that the totals are the sums of the lines."""
    summed = ("cases", "checks", "rejected", "refused", "skipped_expected")
    counts = {name: sum(getattr(line, name) for line in report.laws) for name in summed}
    counts |= {"findings": len(report.findings), "new": len(report.new()), "unconfirmed": len(report.unconfirmed)}
    for name, count in counts.items():
        if getattr(report.totals, name) != count:
            yield f"its total of {name} is {getattr(report.totals, name)}, by its lines it is {count}"


def _check_findings(folder: Path, report: RunReport, words_by_case: dict[str, str]) -> Iterator[str]:
    """Check that each deviating law has a finding, and each finding its file."""
    wrong = Counter(text.split(" ", 1)[0] for text, word in words_by_case.items() if word in KINDS)
    for law_id in sorted(set(wrong) ^ {found.law for found in report.new()}):
        yield (
            f"{law_id}: {wrong[law_id]} verdicts deviate, and it has no finding"
            if law_id in wrong
            else f"{law_id}: a finding, and all holds"
        )
    for found in report.findings:
        try:
            stored = read_finding(folder / "findings" / f"{found.id}.json")
        except UsageError as error:
            yield f"finding {found.id}: {error}"
            continue
        same = ("law", "kind", "status", "message", "signature")
        if stored["case"].to_json() != found.case or any(stored[name] != getattr(found, name) for name in same):
            yield f"finding {found.id}: its file tells another one"
    for left in sorted({path.stem for path in (folder / "findings").glob("*")} - {found.id for found in report.findings}):
        yield f"finding {left}: a file of it, and the report has no such finding"


def _check_expected(report: RunReport, profile: CertifiedProfile, words_by_case: dict[str, str]) -> Iterator[str]:
    """Check the expectations of the report, and that they account for each expected case."""
    ours = _load_shipped(report.target.torch, report.target.name)
    keys = {(entry.file.name, entry.law, entry.kind, tuple(entry.requirements), entry.reason) for entry in ours.entries}
    for line in report.expectations:
        file = line.where.rpartition(":")[0]
        if (Path(file).name, line.law, line.kind, tuple(line.features), line.reason) not in keys:
            yield f"{line.where}: an expectation that this version does not have for torch {report.target.torch}"
    for case in profile.cases:
        word, cause, kind = (*words_by_case[case.text].split(), "", "")[:3]
        if word == EXPECTED:
            features = features_of(case, find(case.law))
            if not any(
                entry.cause and entry.cause.id == cause and entry.kind == kind and case.law in entry.laws
                and entry.covers(case, features | {name for name in entry.features if name.startswith("op:")})
                for entry in ours.entries
            ):  # fmt: skip
                yield f"{case.text}: no cause {cause} accounts for its {kind}"


@cache
def _load_shipped(torch: str, target: str) -> expectations.Expectations:
    return expectations.load_for_certificate(list(catalogue().values()), torch, target)[0]


def _check_cases(folder: Path, report: RunReport, profile: CertifiedProfile, words_by_case: dict[str, str]) -> Iterator[str]:
    """Check ``cases.txt`` against the profile, the verdicts and the counts of the report."""
    lines = read_case_lines(folder)
    if lines is None:
        yield "cases.txt cannot be read"
        return
    judged: dict[str, list[str]] = {}
    controls = {find(law_id).control for law_id in profile.laws}
    for line in lines:
        word, _, text = (*line.split(" ", 2), "", "")[:3]
        if (text not in words_by_case and text not in controls) or word not in WORDS or text.split(" ", 1)[0] not in profile.laws:
            yield f"cases.txt: {line!r} is no case of the list with a verdict"
            return
        judged.setdefault(text, []).append(word)
    yield from _check_counts(report, judged)
    unsure = {line.law for line in report.unconfirmed if line.kind in judged.get(line.text, ())}
    for each in report.unconfirmed:
        if each.law not in unsure:
            yield f"{each.text}: unconfirmed {each.kind}, {_count_words(judged.get(each.text, ['not judged']))} in cases.txt"
    for case in profile.cases:
        yield from _check_case(case, words_by_case[case.text], judged.get(case.text, []), case.law in unsure)


def _check_counts(report: RunReport, judged: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """Check the counts of each law against the words that ``cases.txt`` has by case."""
    words_by_law: dict[str, Counter[str]] = {}
    for text, words in judged.items():
        words_by_law.setdefault(text.split(" ", 1)[0], Counter()).update(words)
    for law in report.laws:
        count = words_by_law.get(law.id, Counter())
        counts = {"cases": count.total() - count[ABSENT], "rejected": count[ABSENT], "refused": count["refused"]}
        counts["wrong"] = sum(count[kind] for kind in KINDS)
        for name, number in counts.items():
            if getattr(law, name) != number:
                yield f"{law.id}: the report counts {getattr(law, name)} under {name}, cases.txt {number}"


def _check_case(case: Case, word: str, judged: Sequence[str], is_unsure: bool) -> Iterator[str]:
    """Check the word of a case in ``verdicts.txt`` against those in ``cases.txt``; ``is_unsure``: its law has an unconfirmed deviation."""
    kind = word.rpartition(" ")[2] if word.startswith(EXPECTED) else word
    if word in (MISSING, UNSAID):
        if judged and word == MISSING:
            yield f"{case.text}: {word} in {FILE}, and judged in cases.txt"
    elif len(set(judged)) > 1 and judged != ["refused", kind]:  # a refusal is tried again where support was lost
        yield f"{case.text}: {_count_words(judged)} in cases.txt"
    elif kind not in judged and not (is_unsure and set(judged) & {*KINDS}):
        yield f"{case.text}: {kind} in {FILE}, {_count_words(judged or ['not judged'])} in cases.txt"


def _check_pages(folder: Path, report: RunReport) -> Iterator[str]:
    """Check that the pages are those of this report, whatever its folder was named when they were written."""
    pages = {
        "report.html": render_html(report, folder, shown_folder=FOLDER_MARK),
        "report.md": render_markdown(report, Path(FOLDER_MARK)),
        "junit.xml": render_junit(report),
    }
    for name, page in pages.items():
        first, *others = map(re.escape, page.split(FOLDER_MARK))
        written = "".join(f"(?P=folder){part}" if at else f"(?P<folder>[^<>\n]+){part}" for at, part in enumerate(others))
        try:
            if not re.fullmatch(first + written, (folder / name).read_text("utf-8")):
                yield f"{name} is not the page of this report.json"
        except (OSError, UnicodeDecodeError):
            yield f"{name} cannot be read"


def _rerun_cases(folder: Path, report: RunReport, claimed: Certificate, rerun: int) -> tuple[list[str], int]:
    """Run up to ``rerun`` random cases again. Returns the differences, and how many cases were run. Raises :class:`UsageError` if the
    target is not configured here."""
    from shardlaw.conformance.run.certified_profile import query_loaded
    from shardlaw.conformance.target.config import find_target
    from shardlaw.conformance.world import Pool, WorldError

    profile = read_profile(f"{claimed.profile}-{claimed.release}")
    words = _parse_words((folder / FILE).read_text("utf-8"), profile) or []
    judged = [(case, word) for case, word in zip(profile.cases, words, strict=True) if word not in NOT_JUDGED]
    chosen = judged if rerun >= len(judged) else random.SystemRandom().sample(judged, rerun)
    target = find_target(report.target.name, report.target.storage, None, RANKS)
    found: list[str] = []
    try:
        with Pool(target) as pool:
            for case, word in chosen:
                law = find(case.law)
                (verdict,) = pool.check(law, [case])
                want = word.split()[-1]
                if verdict.word != want:
                    verdict = pool.check_fresh(law, case)
                if verdict.word != want:
                    found.append(f"{case.text}: {word} in the report, {verdict.word} here")
            here = query_loaded(pool, target)
    except WorldError as error:
        raise UsageError(f"target {target.name} cannot start: {error}") from None
    for name in ("torch", "torch_git", "packages"):
        if here.get(name) != getattr(claimed.loaded, name):
            found.append(f"{name}: {getattr(claimed.loaded, name)} in the report, {here.get(name)} here")
    return found, len(chosen)


def _count_words(words: Sequence[str]) -> str:
    return ", ".join(f"{count} {word}" for word, count in Counter(words).most_common())
