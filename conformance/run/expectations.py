"""Expectations: known findings, each written down with a reason, so that a run says what is new.

They come in layers, each a list of TOML files: those shipped for the torch version (one file a chapter), the target's own, the
user's. Where several entries match, the last layer's counts. An entry::

    [[expect]]
    law = "op.backward[amin]"          # as on the command line
    kind = "wrong-value"
    features = ["tie"]                 # all of them on the case
    signature = "..."                  # part of the error text without numbers and names; required for raised, wrong-error, crash
    torch = ">=2.11,<2.16"
    target = "nccl"                    # where it is true of one target only
    finding = "f3a9c1e0"
    case = "op.backward[amin] mesh=2 a=2x2:S(0):float32:ties steps=amin(a,0)"    # the smallest known: shardlaw repro '...'
    reason = "tie count is taken per shard"
    issue = "https://..."
    wide = true                        # it may match more than 20 % of a law's cases
    rare = true                        # it happens to few of the cases that it matches: a run without it says nothing

Of every entry a run counts its hits, and how many of a law's cases it would match whatever they do. An entry that would match more
than 20 % of a law's cases hides too much: a run warns of it, and ends with 1 under ``--strict``, unless it says ``wide = true``. An
entry that never happened though its features were reached 20 times is stale. What ``shardlaw expect update``
writes has ``reason = "..."`` and is refused until somebody says why.
"""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from shardlaw.conformance.errors import UsageError, one_of
from shardlaw.conformance.law.selection import glob, select_ids
from shardlaw.conformance.law.verdict import KINDS, struck

if TYPE_CHECKING:
    from shardlaw.conformance.law.law import Law
    from shardlaw.conformance.law.target import Target
    from shardlaw.conformance.law.verdict import Verdict

SHIPPED = Path(__file__).parents[1] / "expectations"
WIDEST_SHARE = 0.2
SIGNED_KINDS = frozenset({"raised", "wrong-error", "crash"})
AVOIDED_KINDS = frozenset({"hang", "crash"})
HITS_BEFORE_AVOIDED = 3
REACHED_TO_JUDGE = 20
UNFILLED = "..."


@dataclass(eq=False)
class Entry:
    """One known finding, where it is written, and what a run saw of it.

    ``laws`` are the ids that ``law`` selects. ``hits`` counts the deviations that it accounts for, ``cases`` by law the cases that it would
    match whatever their verdict, ``happened`` by law the deviations that matched, also those that a later layer's entry accounts for.
    """

    law: str
    kind: str
    reason: str
    features: frozenset[str] = frozenset()
    signature: str = ""
    torch: str = ""
    target: str = ""
    finding: str = ""
    case: str = ""
    issue: str = ""
    wide: bool = False
    rare: bool = False
    file: Path = Path()
    line: int = 0
    laws: tuple[str, ...] = ()
    hits: int = 0
    happened: Counter[str] = field(default_factory=Counter)
    cases: Counter[str] = field(default_factory=Counter)

    @property
    def where(self) -> str:
        return f"{self.file}:{self.line}"

    @property
    def filled_in(self) -> bool:
        """Whether its reason says anything."""
        return re.search(r"\w", self.reason) is not None

    @property
    def stale(self) -> bool:
        """Whether it did not happen though its features were reached often enough to tell."""
        return not (self.happened or self.rare) and self.cases.total() >= REACHED_TO_JUDGE

    def stale_in(self, law_id: str) -> bool:
        """Whether the cases of one law show that it happens there no longer."""
        return not (self.happened[law_id] or self.rare) and self.cases[law_id] >= REACHED_TO_JUDGE

    @cached_property
    def _error(self) -> re.Pattern[str]:
        # a whole signature ("law | kind | check | error"), as a finding has it, means its error
        error = self.signature.split(" | ", 3)[3] if self.signature.count(" | ") >= 3 else self.signature
        return re.compile(glob(error).pattern)

    def matches(self, kind: str, features: AbstractSet[str], error: str) -> bool:
        """Whether it accounts for a deviation of one of its laws."""
        return kind == self.kind and self.features <= features and (not self.signature or self._error.search(struck(error)) is not None)


@dataclass(frozen=True)
class TooWide:
    """An entry that matches so many of a law's cases that it is refused."""

    entry: Entry
    law: str
    share: float

    def __str__(self) -> str:
        return (
            f"{self.entry.where}: matches {self.share:.0%} of the cases of {self.law}, more than {WIDEST_SHARE:.0%}: "
            "refused, name more features or say wide = true"
        )


class Expectations:
    """The entries that hold for this torch and this target, and what a run counts of them. ``judged`` counts by law the cases so far."""

    def __init__(self, entries: Iterable[Entry] = (), judged: Mapping[str, int] | None = None) -> None:
        self.entries = tuple(entries)
        self._of_law: dict[str, list[Entry]] = {}
        self._judged: Counter[str] = Counter(judged)
        for entry in reversed(self.entries):
            for law_id in entry.laws:
                self._of_law.setdefault(law_id, []).append(entry)

    def match(self, law_id: str, kind: str, features: AbstractSet[str], error: str, *, count: bool = True) -> Entry | None:
        """The entry that accounts for a deviation, or ``None``. With ``count`` it is a hit."""
        found = [entry for entry in self._of_law.get(law_id, ()) if entry.matches(kind, features, error)]
        if count and found:
            found[0].hits += 1
            for entry in found:
                entry.happened[law_id] += 1
        return found[0] if found else None

    def match_verdict(self, law: Law, verdict: Verdict) -> Entry | None:
        """The entry that accounts for a deviating verdict, not counted as a hit."""
        from shardlaw.conformance.law.features.features import features_of

        features = features_of(verdict.case, law) | set(verdict.features)
        return self.match(law.id, verdict.kind or "", features, verdict.error, count=False)

    def avoid(self, law_id: str, features: AbstractSet[str]) -> Entry | None:
        """The expected hang or crash, met often enough, that a case would be; the case is then counted as one not judged."""
        for entry in self._of_law.get(law_id, ()):
            if entry.kind in AVOIDED_KINDS and entry.hits >= HITS_BEFORE_AVOIDED and entry.features <= features:
                self.judged(law_id, features)
                return entry
        return None

    def judged(self, law_id: str, features: AbstractSet[str]) -> None:
        """Count one case of a law towards the share that entries would match."""
        self._judged[law_id] += 1
        for entry in self._of_law.get(law_id, ()):
            if entry.features <= features:
                entry.cases[law_id] += 1

    def masked(self, entry: Entry) -> float:
        """The largest share, from 0 to 1, of the cases of one of its laws that an entry would match."""
        return max((count / self._judged[law_id] for law_id, count in entry.cases.items()), default=0.0)

    def too_wide(self) -> list[TooWide]:
        """The entries to refuse, each with the law of which it matches most. Laws with fewer than 20 cases say nothing."""
        found = []
        for entry in self.entries:
            shares = {
                law_id: count / self._judged[law_id] for law_id, count in entry.cases.items() if self._judged[law_id] >= REACHED_TO_JUDGE
            }
            law_id = max(shares, key=shares.__getitem__, default="")
            if law_id and not entry.wide and shares[law_id] > WIDEST_SHARE:
                found.append(TooWide(entry, law_id, shares[law_id]))
        return found

    def stale(self, law_id: str) -> bool:
        """Whether an entry that is about this law alone is stale, by the law's own cases. An entry about several laws is stale where it
        happens in none of them, and no one of them can tell."""
        return any(entry.stale_in(law_id) for entry in self._of_law.get(law_id, ()) if len(entry.laws) == 1)


def shipped() -> list[Path]:
    """The files that come with this package, in folders named after the version of torch in which their entries were first seen, the
    newest last. An entry says with ``torch`` where it holds, unless it holds in all."""
    from packaging.version import Version

    folders = sorted(SHIPPED.glob("torch-*"), key=lambda folder: Version(folder.name.removeprefix("torch-")))
    return [file for folder in folders for file in sorted(folder.glob("*.toml"))]


def layers(target: Target, extra: Sequence[Path] = ()) -> list[Path]:
    """All files of a run, the first layer first: shipped, those that come with the laws of others, the target's, the user's."""
    from shardlaw.conformance.laws import expectations as theirs

    return [*shipped(), *theirs(), *map(Path, target.expect), *extra]


def load(files: Sequence[Path], laws: Sequence[Law], torch_version: str, target: str = "gloo") -> Expectations:
    """The entries of ``files`` that hold for this torch and target.

    Raises :class:`UsageError`, with file and line, for an entry that means nothing.
    """
    ids = [law.id for law in laws]
    aliases = {alias: law.id for law in laws for alias in law.aliases}
    entries = [entry for file in files for entry in read(file, ids, aliases)]
    return Expectations(entry for entry in entries if holds(entry, torch_version, target))


def holds(entry: Entry, torch_version: str, target: str) -> bool:
    """Whether an entry is about this torch and this target."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import Version

    if entry.target and not glob(entry.target).fullmatch(target):
        return False
    return not entry.torch or Version(Version(torch_version).base_version) in SpecifierSet(entry.torch, prereleases=True)


def read(file: Path, ids: Sequence[str], aliases: Mapping[str, str] | None = None, *, drafts: bool = False) -> list[Entry]:
    """The entries of one file, in order; with ``drafts`` also those whose reason is not filled in. Raises :class:`UsageError`."""
    try:
        text = file.read_text("utf-8")
        data = tomllib.loads(text)
    except UnicodeDecodeError:
        raise UsageError(f"{file}: no file of expectations: not UTF-8 text") from None
    except OSError as error:
        raise UsageError(f"{file}: cannot be read: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        at = re.search(r"\(at line (\d+), column \d+\)", str(error))
        line = at[1] if at else max(len(text.splitlines()), 1)
        raise UsageError(f"{file}:{line}: no TOML: {error}") from None
    lines = _Lines(file, text)
    for key in data:
        if key != "expect":
            raise UsageError(f"{lines.of_key(key)}: unknown {key!r}: a file of expectations holds [[expect]] tables only")
    blocks = data.get("expect", [])
    if not isinstance(blocks, list) or not all(isinstance(block, dict) for block in blocks):
        raise UsageError(f"{lines.of_key('expect')}: want [[expect]] tables")
    entries = [_entry(block, at, lines, ids, dict(aliases or {})) for at, block in enumerate(blocks)]
    unfilled = [number for number, entry in enumerate(entries) if not entry.filled_in]
    if unfilled and not drafts:
        reason = entries[unfilled[0]].reason
        raise UsageError(f"{lines.of_key('reason', unfilled[0])}: reason = {reason!r} is not filled in: say what causes it")
    return entries


class _Lines:
    """Where the tables and keys of a file stand; TOML itself does not tell."""

    def __init__(self, file: Path, text: str) -> None:
        self.file = file
        self._lines = text.splitlines()
        self.headers: list[int] = []
        quote = ""
        for number, line in enumerate(self._lines, 1):
            if not quote and re.match(r"\s*\[\[\s*expect\s*\]\]", line):
                self.headers.append(number)
            for mark in re.findall(r'"""|\'\'\'', line):
                quote = "" if mark == quote else quote or mark

    def of_entry(self, at: int) -> int:
        return self.headers[at] if at < len(self.headers) else 1

    def of_key(self, key: str, at: int | None = None) -> str:
        """``FILE:LINE`` of a key: of the table ``at``, or anywhere."""
        first = 1 if at is None else self.of_entry(at)
        last = len(self._lines) if at is None or at + 1 >= len(self.headers) else self.headers[at + 1] - 1
        for number in range(first, last + 1):
            if re.match(rf"\s*(\[+\s*)?[\"']?{re.escape(key)}[\"']?\s*[=.\]]", self._lines[number - 1]):
                return f"{self.file}:{number}"
        return f"{self.file}:{first}"


MARKS = ("wide", "rare")
TEXTS = ("law", "kind", "reason", "signature", "torch", "target", "finding", "case", "issue")
KEYS: dict[str, tuple[Any, str]] = {
    **dict.fromkeys(TEXTS, (Annotated[str, msgspec.Meta(pattern=r"\S")], "a text that is not empty")),
    "features": (list[str], "a list of texts"),
    **dict.fromkeys(MARKS, (bool, "true or false")),
}
Refuse = Callable[[str, str], UsageError]


def _entry(block: Mapping[str, Any], at: int, lines: _Lines, ids: Sequence[str], aliases: dict[str, str]) -> Entry:
    from shardlaw.conformance.law.features.features import FEATURES, known

    def refuse(key: str, message: str) -> UsageError:
        return UsageError(f"{lines.of_key(key, at)}: {message}")

    for key, value in block.items():
        if key not in KEYS:
            raise refuse(key, f"unknown key {key!r} ({one_of(key, KEYS)})")
        kind, wanted = KEYS[key]
        try:
            msgspec.convert(value, kind)
        except msgspec.ValidationError:
            raise refuse(key, f"{key} = {value!r}: want {wanted}") from None
    features = block.get("features", [])
    for key in ("law", "kind", "reason"):
        if key not in block:
            raise refuse(key, f"an expectation without {key}")
    for feature in features:
        if not known(feature):
            raise refuse("features", f"unknown feature {feature!r} ({one_of(feature, FEATURES)})")
    if block["kind"] not in KINDS:
        raise refuse("kind", f"unknown kind {block['kind']!r} ({one_of(block['kind'], KINDS)})")
    _check_signature(block, refuse)
    laws = _laws(block["law"], ids, aliases, refuse)
    _check_case(block.get("case", ""), laws, refuse)
    return Entry(
        **{key: block[key] for key in TEXTS if key in block},
        features=frozenset(features),
        **{mark: block.get(mark, False) for mark in MARKS},
        file=lines.file,
        line=lines.of_entry(at),
        laws=laws,
    )


def _check_case(text: str, laws: Sequence[str], refuse: Refuse) -> None:
    from shardlaw.conformance.law.case import Case
    from shardlaw.reference.notation import NotationError

    if not text:
        return
    try:
        case = Case.parse(text)
    except NotationError as error:
        raise refuse("case", f"case = {text!r}: {error}") from None
    if case.law not in laws:
        raise refuse("case", f"case = {text!r}: want a case of a law that the entry is about")


def _check_signature(block: Mapping[str, Any], refuse: Refuse) -> None:
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    signature = block.get("signature", "")
    if block["kind"] in SIGNED_KINDS and not signature:
        raise refuse("kind", f"kind {block['kind']!r} wants a signature: part of the error text")
    error = signature.split(" | ", 3)[3] if signature.count(" | ") >= 3 else signature
    if error and struck(error) != error.strip():
        raise refuse("signature", f"signature has numbers or names, which differ from case to case: want {struck(error)!r}")
    if "finding" in block and not re.fullmatch(r"[0-9a-f]{8}", block["finding"]):
        raise refuse("finding", f"finding = {block['finding']!r}: want the 8 hex digits of a finding's id")
    try:
        SpecifierSet(block.get("torch", ""))
    except InvalidSpecifier:
        raise refuse("torch", f"torch = {block['torch']!r}: want versions such as '>=2.11,<2.16'") from None


def _laws(pattern: str, ids: Sequence[str], aliases: dict[str, str], refuse: Refuse) -> tuple[str, ...]:
    if pattern.startswith("!"):
        raise refuse("law", f"law = {pattern!r}: want what it is about, not what it is not")
    try:
        return tuple(select_ids(ids, [pattern], aliases))
    except UsageError as error:
        raise refuse("law", str(error)) from None
