"""Read files of expectations: TOML with a table for each known cause in torch and a table for each entry that matches findings.

A cause with its entries::

    [[cause]]
    id = "loss-mean-of-local-means"
    title = "The mean of a loss over uneven shards is the mean of local means"
    where = "DecompShardingStrategy.propagate_strategy, torch/distributed/tensor/_decompositions.py"
    seen = ["2.11", "2.13"]            # the releases of torch on which a case of it deviates
    issue = "https://..."              # where there is one

    [[cause.expect]]
    law = "op.forward[nn.functional.mse_loss]"      # as on the command line
    kind = "wrong-value"               # or "refused": every rank refuses what an earlier torch did not
    features = ["uneven"]              # the case must have all of them
    where = { reduction = "mean" }     # conditions on fields: shardlaw.conformance.law.condition; needs a case that meets them
    at = "Shard._to_replicate_tensor"  # from a trace: the function to look at first, or a collective called; allows kind = "*"
    signature = "..."                  # part of the error text without numbers and names; required for raised, wrong-error, crash, refused
    torch = ">=2.14"                   # if it holds for other releases than the cause was seen on
    target = "nccl"                    # if it holds for some targets only: a name or a pattern
    finding = "f3a9c1e0"
    case = "op.forward[nn.functional.mse_loss] mesh=2 a=5x3:S(0) ..."    # the smallest known: shardlaw repro '...'
    wide = true                        # more than 20 % of a law's cases may match and hold
    rare = true                        # few of the matching cases deviate: the entry is not stale if none does in a run

A finding without a known cause is an ``[[expect]]`` table with the same keys and a ``reason``. ``shardlaw expect update`` writes
``reason = "..."``, and such an entry is refused until somebody fills it in.

The entries of a cause apply to the releases in ``seen``. On a release that no cause of the file lists they apply if ``seen`` has the
nearest listed release below or above it.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated, Any

import msgspec

from shardlaw.conformance.errors import UsageError, convert_table, one_of
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.condition import Condition
from shardlaw.conformance.law.selection import select_ids
from shardlaw.conformance.law.verdict import error_pattern
from shardlaw.conformance.run.entry import ANY_KIND, ENTRY_KINDS, SIGNED_KINDS, Cause, Entry, error_part
from shardlaw.conformance.run.finding_file import is_finding_id

Refuse = Callable[[str, str], UsageError]


def read_entries(
    file: Path,
    ids: Sequence[str],
    aliases: Mapping[str, str] | None = None,
    *,
    drafts: bool = False,
    check: Callable[[Entry, Refuse], None] | None = None,
) -> list[Entry]:
    """Read the entries of one file, those of its causes first. With ``drafts`` an entry may lack its reason. ``check`` is called with each
    entry and raises what its ``refuse(key, message)`` returns. Raises :class:`UsageError`, with file and line."""
    return _ExpectationFile(file, ids, dict(aliases or {}), check).entries(drafts)


Text = Annotated[str, msgspec.Meta(pattern=r"\S")]
Keys = Mapping[str, tuple[Any, str]]
TEXT_TYPE = (Text, "a text that is not empty")
ENTRY_TEXTS = ("law", "kind", "at", "signature", "torch", "target", "finding", "case", "issue")
ENTRY_FLAGS = ("wide", "rare")
CAUSE_ID = r"[a-z0-9]+(-[a-z0-9]+)*"
ENTRY_KEYS: Keys = {
    **dict.fromkeys(ENTRY_TEXTS, TEXT_TYPE),
    "features": (list[str], "a list of texts"),
    "where": (dict[str, Any], "a table of fields and what they hold"),
    **dict.fromkeys(ENTRY_FLAGS, (bool, "true or false")),
}
CAUSE_KEYS: Keys = {
    "id": (Annotated[str, msgspec.Meta(pattern=f"^{CAUSE_ID}$")], "small letters and digits, with dashes between words"),
    **dict.fromkeys(("title", "where", "issue"), TEXT_TYPE),
    "seen": (list[Annotated[str, msgspec.Meta(pattern=r"^\d+\.\d+$")]], "a list of releases such as '2.13'"),
    "expect": (list[dict[str, Any]], "[[cause.expect]] tables"),
}
LONE_KEYS: Keys = {**ENTRY_KEYS, "reason": TEXT_TYPE}


class _ExpectationFile:
    """One file: its tables, and the lines of their keys, which the TOML parser does not give."""

    def __init__(
        self, file: Path, ids: Sequence[str], aliases: dict[str, str], check: Callable[[Entry, Refuse], None] | None = None
    ) -> None:
        self.file, self._ids, self._aliases, self._check = file, ids, aliases, check
        try:
            text = file.read_text("utf-8")
            self._data = tomllib.loads(text)
        except UnicodeDecodeError:
            raise UsageError(f"{file}: no file of expectations: not UTF-8 text") from None
        except OSError as error:
            raise UsageError(f"{file}: cannot be read: {error.strerror}") from None
        except tomllib.TOMLDecodeError as error:
            at = re.search(r"\(at line (\d+), column \d+\)", str(error))
            line = at[1] if at else max(len(text.splitlines()), 1)
            raise UsageError(f"{file}:{line}: no TOML: {error}") from None
        self._lines = text.splitlines()
        self._headers: dict[str, list[int]] = {"expect": [], "cause": [], "cause.expect": []}
        quote = ""
        for number, line_text in enumerate(self._lines, 1):
            header = re.match(r"\s*\[\[\s*([\w.]+)\s*\]\]", line_text)
            if not quote and header:
                self._headers.setdefault(header[1], []).append(number)
            for mark in re.findall(r'"""|\'\'\'', line_text):
                quote = "" if mark == quote else quote or mark

    def entries(self, drafts: bool) -> list[Entry]:
        for key in self._data:
            if key not in ("cause", "expect"):
                raise UsageError(
                    f"{self._locate_key(key)}: unknown {key!r}: a file of expectations holds [[cause]] and [[expect]] tables only"
                )
        return [*self._cause_entries(), *self._lone_entries(drafts)]

    def _tables(self, name: str, tables: Any, first: int = 0) -> Iterator[tuple[dict[str, Any], int, Refuse]]:
        """Yield each table with its line and a function that makes the error for one of its keys."""
        if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
            raise UsageError(f"{self._locate_key(name)}: want [[{name}]] tables")
        for at, table in enumerate(tables, first):
            line = self._headers[name][at] if at < len(self._headers[name]) else 1

            def refuse(key: str, message: str, line: int = line) -> UsageError:
                return UsageError(f"{self._locate_key(key, line)}: {message}")

            yield table, line, refuse

    def _locate_key(self, key: str, table: int = 0) -> str:
        """``FILE:LINE`` of a key; ``table`` is the line where its table begins (0: anywhere in the file)."""
        headers = sorted(line for lines in self._headers.values() for line in lines)
        last = next((line - 1 for line in headers if line > table > 0), len(self._lines))
        first = table or 1
        for number in range(first, last + 1):
            if re.match(rf"\s*(\[+\s*)?[\"']?{re.escape(key)}[\"']?\s*[=.\]]", self._lines[number - 1]):
                return f"{self.file}:{number}"
        return f"{self.file}:{first}"

    def _cause_entries(self) -> Iterator[Entry]:
        blocks = list(self._tables("cause", self._data.get("cause", [])))
        for block, _, refuse in blocks:
            convert_table(block, CAUSE_KEYS, refuse)
        tried = {release for block, _, _ in blocks for release in block.get("seen", ())}
        known: dict[str, int] = {}
        entry_count = 0
        for block, line, refuse in blocks:
            for key in ("id", "title", "expect"):
                if key not in block:
                    raise refuse(key, f"a cause without {key}" if key != "expect" else "a cause without [[cause.expect]] tables")
            if block["id"] in known:
                raise refuse("id", f"id = {block['id']!r}: the cause in line {known[block['id']]} has it")
            known[block["id"]] = line
            fields = {key: block[key] for key in ("id", "title", "where", "issue") if key in block}
            seen = _sort_releases(block.get("seen", ()))
            elsewhere = not any(fnmatch("gloo", str(table.get("target", "*"))) for table in block["expect"])
            cause = Cause(**fields, seen=seen, tried=seen if elsewhere else _sort_releases(tried))
            for table, at, refuse_entry in self._tables("cause.expect", block["expect"], entry_count):
                convert_table(table, ENTRY_KEYS, refuse_entry)
                yield self._make_entry({"issue": cause.issue, **table, "reason": cause.title}, at, refuse_entry, cause)
            entry_count += len(block["expect"])

    def _lone_entries(self, drafts: bool) -> Iterator[Entry]:
        for block, line, refuse in self._tables("expect", self._data.get("expect", [])):
            convert_table(block, LONE_KEYS, refuse)
            entry = self._make_entry(block, line, refuse, None)
            if not (entry.has_reason or drafts):
                raise refuse("reason", f"reason = {entry.reason!r} is not filled in: say what causes it")
            yield entry

    def _make_entry(self, block: Mapping[str, Any], line: int, refuse: Refuse, cause: Cause | None) -> Entry:
        from shardlaw.conformance.law.features.features import FEATURES, is_known

        for key in ("law", "kind", "reason"):
            if key not in block:
                raise refuse(key, f"an expectation without {key}")
        for feature in block.get("features", ()):
            if not is_known(feature):
                raise refuse("features", f"unknown feature {feature!r} ({one_of(feature, FEATURES)})")
        if block["kind"] == ANY_KIND and "at" not in block:
            raise refuse("kind", "kind = '*': only where the entry says at which place")
        if block["kind"] not in (*ENTRY_KINDS, ANY_KIND):
            raise refuse("kind", f"unknown kind {block['kind']!r} ({one_of(block['kind'], ENTRY_KINDS)})")
        _check_signature(block, refuse)
        laws = self._select_laws(block["law"], refuse)
        _check_case(block.get("case", ""), laws, refuse)
        conditions = _parse_conditions(block, refuse)
        fields = {key: block[key] for key in (*ENTRY_TEXTS, *ENTRY_FLAGS, "reason") if key in block}
        features = frozenset(block.get("features", ()))
        entry = Entry(**fields, features=features, conditions=conditions, cause=cause, file=self.file, line=line, laws=laws)
        if self._check is not None:
            self._check(entry, refuse)
        return entry

    def _select_laws(self, pattern: str, refuse: Refuse) -> tuple[str, ...]:
        if pattern.startswith("!"):
            raise refuse("law", f"law = {pattern!r}: want what it is about, not what it is not")
        try:
            return tuple(select_ids(self._ids, [pattern], self._aliases))
        except UsageError as error:
            raise refuse("law", str(error)) from None


def _sort_releases(releases: Iterator[str] | AbstractSet[str] | Sequence[str]) -> tuple[str, ...]:
    from packaging.version import Version

    return tuple(sorted(set(releases), key=Version))


def _check_case(text: str, laws: Sequence[str], refuse: Refuse) -> None:
    from shardlaw.reference.notation import NotationError

    if not text:
        return
    try:
        case = Case.parse(text)
    except NotationError as error:
        raise refuse("case", f"case = {text!r}: {error}") from None
    if case.law not in laws:
        raise refuse("case", f"case = {text!r}: want a case of a law that the entry is about")


def _parse_conditions(block: Mapping[str, Any], refuse: Refuse) -> tuple[Condition, ...]:
    found = []
    for field_name, value in block.get("where", {}).items():
        shown = f"where.{field_name} = {value!r}"
        try:
            found.append(Condition.from_value(field_name, value))
        except ValueError as error:
            raise refuse("where", f"{shown}: {error}") from None
        if "case" not in block:
            raise refuse("where", f"{shown}: want a case that shows it")
        if not found[-1].matches(Case.parse(block["case"])):
            raise refuse("where", f"{shown}: the entry's own case has something else")
    return tuple(found)


def _check_signature(block: Mapping[str, Any], refuse: Refuse) -> None:
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    signature = block.get("signature", "")
    if block["kind"] in SIGNED_KINDS and not signature:
        raise refuse("kind", f"kind {block['kind']!r} wants a signature: part of the error text")
    error = error_part(signature)
    if error and error_pattern(error) != error.strip():
        raise refuse("signature", f"signature has numbers or names, which differ from case to case: want {error_pattern(error)!r}")
    if "finding" in block and not is_finding_id(block["finding"]):
        raise refuse("finding", f"finding = {block['finding']!r}: want the 8 hex digits of a finding's id")
    try:
        SpecifierSet(block.get("torch", ""))
    except InvalidSpecifier:
        raise refuse("torch", f"torch = {block['torch']!r}: want versions such as '>=2.11,<2.16'") from None
