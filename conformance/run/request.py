"""The request for a run: plain data, checked before anything starts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from shardlaw.conformance.errors import UsageError, one_of
from shardlaw.conformance.run.certified_profile import check_profile_name

PROFILES = ("smoke", "ci", "nightly")
DEFAULT_REPORT = Path("shardlaw-report")
DEFAULT_WORLD, LARGER_WORLD = 4, 8  # ranks: of most cases, and of a few unless --world-size is given
MAX_RANKS = 4096
MAX_LOCAL_RANKS = 64  # of a world on one machine
MAX_WORLDS = 64
MAX_CASE_SECONDS = 86_400.0  # seconds
UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


@dataclass(frozen=True)
class RunRequest:
    """The options of one ``shardlaw run``. ``laws`` and ``ops`` are globs, ``target`` and ``storage`` names, times are in seconds.

    ``storage`` and ``timeout``: ``None`` means the target's. ``larger_world_size``: a few cases may have so many ranks, more than
    ``world_size``; 0 for none. ``shard`` is ``(i, n)`` with ``1 <= i <= n``. ``worlds`` is how many worlds of one size work in parallel;
    ``None``: as many as help. ``resumed_smoke_shares``: of a resumed run, whether the earlier one used the cases of ``smoke.txt``.
    Raises :class:`UsageError` for invalid values.
    """

    laws: tuple[str, ...] = ()
    target: str = "gloo"
    storage: str | None = None
    world_size: int = DEFAULT_WORLD
    larger_world_size: int = 0
    profile: str = "smoke"
    budget: float | None = None
    ops: tuple[str, ...] = ()
    seed: int = 0
    expect: tuple[Path, ...] = ()
    no_expect: bool = False
    strict: bool = False
    known: Path | None = None
    report: Path = DEFAULT_REPORT
    shard: tuple[int, int] = (1, 1)
    worlds: int | None = None
    timeout: float | None = None
    exitfirst: bool = False
    list: bool = False
    certify: str = ""
    last_failed: bool = False
    resume: bool = False
    resumed_smoke_shares: bool | None = None

    def __post_init__(self) -> None:
        if self.profile not in PROFILES:
            raise UsageError(f"--profile {self.profile}: no such profile ({one_of(self.profile, PROFILES)})")
        if not 1 <= self.world_size <= MAX_RANKS:
            raise UsageError(f"--world-size {self.world_size}: want 1 to {MAX_RANKS} ranks")
        if self.worlds is not None and not 1 <= self.worlds <= MAX_WORLDS:
            raise UsageError(f"-n {self.worlds}: want 1 to {MAX_WORLDS} worlds")
        if self.seed < 0:
            raise UsageError(f"--seed {self.seed}: want a whole number, 0 or more")
        if self.timeout is not None and not 0 < self.timeout <= MAX_CASE_SECONDS:
            raise UsageError(f"--timeout {self.timeout:g}: want more than 0 seconds, and at most {MAX_CASE_SECONDS:.0f}")
        if not 1 <= self.shard[0] <= self.shard[1]:
            raise UsageError(f"--shard {self.shard[0]}/{self.shard[1]}: want I/N with 1 <= I <= N")
        if self.certify:
            self._check_certified()
        if self.last_failed and self.resume:
            raise UsageError("--last-failed and --resume: want one of them")
        if self.no_expect and self.expect:
            raise UsageError("--expect and --no-expect: want one of them")
        for path in self.expect:
            if not path.is_file():
                raise UsageError(f"--expect {path}: no such file")
        if self.known is not None and not self.known.is_dir():
            raise UsageError(f"--known {self.known}: no such folder")

    @property
    def uses_smoke_shares(self) -> bool:
        """Whether the run tries the chosen cases alone: a smoke run that selects no law (:mod:`shardlaw.conformance.run.shares`)."""
        if self.resumed_smoke_shares is not None:
            return self.resumed_smoke_shares
        return self.profile == "smoke" and not (self.laws or self.ops or self.certify)

    def _check_certified(self) -> None:
        """Refuse the options that would make a certified run differ from others of the same profile."""
        check_profile_name(self.certify)
        plain = RunRequest()
        foreign = {
            "LAW": "laws",
            "--profile": "profile",
            "--budget": "budget",
            "--op": "ops",
            "--expect": "expect",
            "--no-expect": "no_expect",
            "--known": "known",
            "--shard": "shard",
            "-x": "exitfirst",
            "--list": "list",
            "--last-failed": "last_failed",
            "--resume": "resume",
        }
        for option, name in foreign.items():
            if getattr(self, name) != getattr(plain, name):
                raise UsageError(f"--certify {self.certify}: a certified run is the whole list: want no {option}")
        if self.world_size < DEFAULT_WORLD:
            raise UsageError(f"--certify {self.certify}: want --world-size {DEFAULT_WORLD} or more, not {self.world_size}")


def parse_duration(text: str) -> float:
    """``"90s"``, ``"2m"``, ``"1m30s"``, ``"1.5h"`` or a bare number of seconds → seconds. Raises :class:`UsageError`."""
    parts = re.findall(r"(\d+(?:\.\d+)?)([smh]?)", text, re.ASCII)
    parsed = "".join(number + unit for number, unit in parts)
    units = [unit for _, unit in parts]
    seconds = sum(float(number) * UNITS[unit] for number, unit in parts)
    in_order = units == sorted(set(units), key="hms".find) and (len(units) == 1 or "" not in units)
    if parsed != text or not in_order or seconds <= 0:
        raise UsageError(f"--budget {text}: want a time such as 90s, 2m or 1m30s")
    return seconds


def parse_shard(text: str) -> tuple[int, int]:
    """``"2/4"`` → ``(2, 4)``. Raises :class:`UsageError`."""
    match = re.fullmatch(r"(\d+)/(\d+)", text, re.ASCII)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise UsageError(f"--shard {text}: want I/N with 1 <= I <= N, such as 2/4")
    return int(match[1]), int(match[2])
