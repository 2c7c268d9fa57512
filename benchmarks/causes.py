"""The known causes: ``python -m benchmarks.causes [--try [CHAPTER ...]] [--issue ID] [--places [CHAPTER ...]]``.

Without an option it writes ``docs/findings.md`` and ``docs/releases.md`` anew from ``conformance/expectations/``. ``--try`` tries the case
of every entry in a fresh world of the torch at hand, prints those that do not deviate as they say, and notes in the files on which
release each cause was seen; of the chapters that are named, or of all. ``--issue`` prints the text of an issue for torch.
``--places`` prints how often the place that a trace names is the one that the cause gives, and which are not; of the chapters that are
named, or of all.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from shardlaw.conformance.errors import UsageError, one_of
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.features.features import features_of
from shardlaw.conformance.law.law import Limits
from shardlaw.conformance.law.target import Target
from shardlaw.conformance.law.verdict import Verdict
from shardlaw.conformance.laws import catalogue, find
from shardlaw.conformance.report.reproducer import FaultInfo, render_reproducer
from shardlaw.conformance.run.entry import Cause, Entry
from shardlaw.conformance.run.expectation_file import read_entries
from shardlaw.conformance.run.nearby import trace_controls, trace_nearby
from shardlaw.conformance.run.place import find_places
from shardlaw.conformance.run.suspicion import describe
from shardlaw.conformance.world import Pool

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "conformance" / "expectations"
FINDINGS, RELEASES = ROOT / "docs" / "findings.md", ROOT / "docs" / "releases.md"
HEARD = "torch/distributed/"
LIMITS = Limits(4, Target().dtypes, frozenset(Target().cannot))
CALLED = {
    "mesh": "Meshes",
    "redistribute": "Redistributions",
    "sharded_tensor": "Sharded tensors",
    "op": "Ops",
    "op_backward": "Backward passes of ops",
    "op_samples": "Ops, on the samples of OpInfo",
    "crash": "Crashes in the middle of a save",
    "gradient": "Gradients of redistributions",
    "module": "Modules and parallel styles",
    "optimizer": "States of models and optimizers",
    "plan": "Plans of checkpoints",
    "random": "Random numbers",
    "roundtrip": "Checkpoints",
}
Known = dict[Cause, list[Entry]]


def known(files: Iterable[Path]) -> dict[str, Known]:
    """The causes with their entries, by the name of their file."""
    ids = sorted(catalogue())
    found: dict[str, Known] = {}
    for file in files:
        causes = found.setdefault(file.stem, {})
        for entry in read_entries(file, ids):
            if entry.cause is not None:
                causes.setdefault(entry.cause, []).append(entry)
    return found


def silent(entries: Sequence[Entry]) -> bool:
    """Whether one of them goes on with something wrong, and says nothing."""
    return any(not entry.is_loud for entry in entries)


def example(entries: Sequence[Entry]) -> Entry:
    """The entry to show: a silent one, if there is one, with the shortest case."""
    return min(entries, key=lambda entry: (not entry.case, entry.is_loud, len(entry.case), entry.case))


# The pages


FINDINGS_HEAD = """\
# What was found in torch

{count} known causes, {silent} of them silent: the program goes on with something wrong. Each is a table of
`conformance/expectations/`, from which `python -m benchmarks.causes` writes this page. `shardlaw repro 'CASE'` prints a script that needs
torch alone; in a checkout, after `pip install .`, `python -m benchmarks.causes --issue ID` prints the text of an issue.
[releases.md](releases.md) says which release has which."""
RELEASES_HEAD = """\
# Which release of torch has which fault

Written by `python -m benchmarks.causes`, from what `python -m benchmarks.causes --try` saw on each release (`tox -e versions`). *seen*: a
case of the cause deviates there; *gone*: it was seen on an earlier release, and none does; *not yet*: it was seen on later ones only;
*not tried*: no case of it ran there, as of causes that are about other devices than the CPU.

"""
FINDINGS_COLUMNS = ["", "| what happens | where | seen on | case |", "| --- | --- | --- | --- |"]


def findings(chapters: dict[str, Known]) -> str:
    """``docs/findings.md``: the causes that were seen, by area, silent faults first."""
    chapters = {name: {cause: entries for cause, entries in causes.items() if cause.seen} for name, causes in chapters.items()}
    every = [entries for causes in chapters.values() for entries in causes.values()]
    lines = [FINDINGS_HEAD.format(count=len(every), silent=sum(map(silent, every)))]
    for name, causes in chapters.items():
        lines += ["", f"## {CALLED.get(name, f'{name.capitalize()}s')}", *FINDINGS_COLUMNS]
        for cause, entries in sorted(causes.items(), key=lambda item: (not silent(item[1]), item[0].title)):
            said = f'<a id="{cause.id}"></a>{_cell(cause.title)} ({"silent" if silent(entries) else "loud"})'
            lines.append(f"| {said} | {_place(cause)} | {', '.join(cause.seen)} | `{_cell(example(entries).case)}` |")
    return "\n".join(lines) + "\n"


def _place(cause: Cause) -> str:
    function, _, file = cause.where.partition(", ")
    return f"`{function}`, {file.removeprefix('torch/distributed/')}" if function else ""


def releases(chapters: dict[str, Known]) -> str:
    """``docs/releases.md``: causes by releases."""
    tried = sorted({one for causes in chapters.values() for cause in causes for one in cause.tried}, key=_key)
    lines = [f"| cause | {' | '.join(tried)} |", f"| --- |{' --- |' * len(tried)}"]
    for cause in sorted((cause for causes in chapters.values() for cause in causes if cause.seen), key=lambda cause: cause.id):
        cells = [_state(cause, release) for release in tried]
        lines.append(f"| [{cause.id}](findings.md#{cause.id}) | {' | '.join(cells)} |")
    return RELEASES_HEAD + "\n".join(lines) + "\n"


def _state(cause: Cause, release: str) -> str:
    if release in cause.seen:
        return "seen"
    if release not in cause.tried:
        return "not tried"
    return "not yet" if _key(release) < _key(cause.seen[0]) else "gone"


def _key(release: str) -> tuple[int, ...]:
    return tuple(map(int, release.split(".")))


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def issue(cause: Cause, entries: Sequence[Entry]) -> str:
    """The text of an issue: title, what happens, versions, where, and the script."""
    entry = example(entries)
    law, case = find(Case.parse(entry.case).law), Case.parse(entry.case)
    with Pool(Target()) as pool:
        verdict = pool.check_fresh(law, case)
    if verdict.status != "deviates":
        raise UsageError(f"--issue {cause.id}: torch {torch.__version__} does not show it")
    return "\n".join(
        [
            f"# {cause.title}",
            "",
            f"What is documented: {law.clause} ({law.source})",
            "",
            f"What happens: {' '.join(verdict.message.split())}",
            "",
            f"Seen on torch {', '.join(cause.seen)}; run on {torch.__version__}.",
            f"Where to look: {cause.where or 'not known'}",
            "",
            "The script exits with 1 while the fault is there:",
            "",
            "```python",
            render_reproducer(law, case, FaultInfo.from_verdict(verdict)).rstrip(),
            "```",
        ]
    )


# On the ranks


def try_all(files: Sequence[Path]) -> None:
    """Try the case of every entry, and note where its cause was seen."""
    release = ".".join(torch.__version__.split(".")[:2])
    with Pool(Target()) as pool:
        for file in files:
            seen = {cause.id: sum(_deviates(pool, entry) for entry in entries) > 0 for cause, entries in known([file])[file.stem].items()}
            _note(file, release, seen)
            print(f"{file.name}: {sum(seen.values())} of {len(seen)} causes are seen on torch {release}", flush=True)


def _deviates(pool: Pool, entry: Entry) -> bool:
    if not entry.case:
        return False
    case = Case.parse(entry.case)
    law = find(case.law)
    verdict = pool.check_fresh(law, case)
    features = features_of(case, law) | set(verdict.features)
    if entry.matches(case, verdict.word, features, verdict.error):
        return True
    said = f"{verdict.word} {verdict.error}"
    print(f"{entry.where}: wants {entry.kind} {entry.signature}, is {' '.join(said.split())[:120]}: {entry.case}", flush=True)
    return False


def _note(file: Path, release: str, seen: dict[str, bool]) -> None:
    import tomlkit  # of the extra `test`, which the other options do not need

    document = tomlkit.parse(file.read_text("utf-8"))
    for table in document["cause"]:  # type: ignore[union-attr]
        there = set(table.get("seen", [])) - {release} | ({release} if seen[table["id"]] else set())
        table["seen"] = sorted(there, key=_key)
    file.write_text(tomlkit.dumps(document), "utf-8")


def places(chapters: dict[str, Known]) -> None:
    """How often a trace names the place that a cause gives; first, and among the first three."""
    first = among = traced = 0
    unheard: list[str] = []
    controls: dict[str, list[Verdict]] = {}
    with Pool(Target()) as pool:
        for cause, entries in (item for causes in chapters.values() for item in causes.items()):
            entry = example([entry for entry in entries if entry.applies_to(torch.__version__, "gloo")] or entries)
            if not (cause.where and entry.case and entry.applies_to(torch.__version__, "gloo")):
                continue
            if not cause.where.partition(", ")[2].startswith(HEARD):
                unheard.append(cause.id)
                continue
            case = Case.parse(entry.case)
            law = find(case.law)
            verdict = pool.check_fresh(law, case, traced="at end")
            if verdict.kind in ("hang", "crash"):
                named = find_places(verdict, [])
            else:
                near, others = trace_nearby(pool, law, case, LIMITS), trace_controls(pool, law.chapter, LIMITS, controls)
                named = find_places(verdict, near, others, describe(law, verdict))
            hits = [_same_place(place, cause.where) for place in named]
            traced, first, among = traced + 1, first + (True in hits[:1]), among + any(hits[:3])
            if True not in hits[:1]:
                said = "; ".join(named) or "no place"
                print(f"{cause.id}: {cause.where}\n    {verdict.kind or verdict.status} {said}\n    {entry.case}", flush=True)
    print(f"{first} of {traced} places are those that the causes give, {among} are among the first three named")
    print(f"{len(unheard)} causes are outside of {HEARD}, where a trace does not hear: {', '.join(unheard)}")


def _same_place(named: str, where: str) -> bool:
    function, _, file = where.partition(" (")[0].partition(", ")
    return bool(named) and named.split(",", maxsplit=1)[0].rsplit(".", maxsplit=1)[-1] == function.split(".")[-1] and file in named


def main(arguments: list[str]) -> int:
    option, *more = arguments or [""]
    files = [SOURCES / f"{name}.toml" for name in more] if option in ("--try", "--places") and more else sorted(SOURCES.glob("*.toml"))
    try:
        if option == "--try":
            try_all(files)
        elif option == "--issue" and len(more) == 1:
            by_id = {cause.id: (cause, entries) for causes in known(files).values() for cause, entries in causes.items()}
            if more[0] not in by_id:
                raise UsageError(f"--issue {more[0]}: no cause is called so ({one_of(more[0], by_id)})")
            print(issue(*by_id[more[0]]))
        elif option == "--places":
            places(known(files))
        elif not option:
            FINDINGS.write_text(findings(known(files)), "utf-8")
            RELEASES.write_text(releases(known(files)), "utf-8")
        else:
            raise UsageError(f"{' '.join(arguments)}: want {textwrap.shorten(str(__doc__).splitlines()[0].partition(': ')[2], 120)}")
    except UsageError as error:
        print(f"causes: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
