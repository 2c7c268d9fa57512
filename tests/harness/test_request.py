"""What a run can be asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardlaw.conformance.errors import UsageError
from shardlaw.conformance.run.request import RunRequest, parse_duration, parse_shard


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("2m", 120), ("1m30s", 90), ("1.5h", 5400), ("45", 45), ("1h2m3s", 3723)])
def test_a_time_is_read(text: str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "s", "0s", "-3s", "3x", "1s1m", "2m2m", "30 s", "1m30", "1e3s", "nan"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="want a time such as 90s"):
        parse_duration(text)


def test_a_shard_is_read() -> None:
    assert parse_shard("2/4") == (2, 4)
    for text in ("0/4", "5/4", "1", "a/b", "1/0", "-1/2", "1/2/3"):
        with pytest.raises(UsageError, match="want I/N"):
            parse_shard(text)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"profile": "smok"}, "nearest: smoke"),
        ({"world_size": 0}, "--world-size 0"),
        ({"worlds": 0}, "-n 0"),
        ({"seed": -1}, "--seed -1"),
        ({"timeout": 0.0}, "--timeout 0"),
        ({"timeout": float("nan")}, "--timeout nan"),
        ({"shard": (3, 2)}, "--shard 3/2"),
        ({"expect": (Path("no-such-file"),)}, "no such file"),
        ({"known": Path("no-such-folder")}, "no such folder"),
        ({"no_expect": True, "expect": (Path(__file__),)}, "want one of them"),
    ],
)
def test_values_that_mean_nothing_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        RunRequest(**fields)
