"""``shardlaw twin``: compare an unsharded model with its sharded version step by step; writes text, twin.json and twin.html."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from shardlaw.conformance.errors import UsageError, one_of


def twin(
    make: str,
    options: Sequence[str],
    sizes: Sequence[str],
    values: Sequence[str],
    steps: int,
    seed: int,
    target: str,
    report: Path,
    shrink: bool,
    resume: Sequence[str] | None = None,
    dropout: bool = False,
) -> int:
    """Run the comparison, print and write the result; returns 1 if the sharded model deviates, else 0. Raises :class:`UsageError`."""
    from shardlaw.conformance.report.writer import check_folder
    from shardlaw.conformance.twin.report import html_page, script, terminal_lines, to_json
    from shardlaw.conformance.twin.session import Session
    from shardlaw.conformance.twin.session import twin as compare_twin
    from shardlaw.conformance.twin.spec import VALUES

    if steps < 1:
        raise UsageError(f"--steps {steps}: want 1 or more")
    for value in values:
        if value not in VALUES:
            raise UsageError(f"--values {value}: unknown ({one_of(value, VALUES)})")
    check_folder("--report", report)
    with Session(target, tell=lambda text: print(f"  {text}", flush=True)) as session:
        result = compare_twin(
            make,
            target=session,
            options=_parse_pairs("--option", options),
            sizes=_parse_sizes("--size", sizes),
            values=values,
            steps=steps,
            seed=seed,
            shrink=shrink,
            resume=_parse_sizes("--resume", [text for text in resume if text != "same"]) if resume else None,
            dropout=dropout,
        )
    print(*terminal_lines(result), sep="\n", flush=True)
    try:
        report.mkdir(parents=True, exist_ok=True)
        (report / "twin.json").write_bytes(msgspec.json.format(msgspec.json.encode(to_json(result))))
        if result.smallest is not None:
            (report / "twin.py").write_text(script(result), "utf-8")
        (report / "twin.html").write_text(html_page(result), "utf-8")
    except OSError as error:
        raise UsageError(f"--report {report}: cannot be written: {error.strerror}") from None
    print(f"{report / 'twin.html'}")
    return 1 if result.departs else 0


def _parse_pairs(option: str, texts: Sequence[str]) -> dict[str, str]:
    found = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not (sign and name.isidentifier()):
            raise UsageError(f"{option} {text}: want NAME=VALUE")
        found[name] = value
    return found


def _parse_sizes(option: str, texts: Sequence[str]) -> dict[str, int]:
    pairs = _parse_pairs(option, texts)
    for name, text in pairs.items():
        if not re.fullmatch(r"[1-9]\d{0,8}", text, re.ASCII):
            raise UsageError(f"{option} {name}={text}: want a whole number of 1 or more")
    return {name: int(text) for name, text in pairs.items()}
