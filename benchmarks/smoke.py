"""How long a smoke run takes, in seconds and in terms of the machine: ``python -m benchmarks.smoke [OPTION ...]``.

The unit is the time that two processes side by side need for a loop of 30 million multiplications and additions in Python: machines, and
what else they do, differ threefold. It is taken before and after the run, whose options follow ``shardlaw run --profile smoke``.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time

LOOP = "x = 0\nfor i in range(30_000_000):\n    x += i * i"


def unit() -> float:
    """Seconds for two loops side by side."""
    began = time.monotonic()
    for loop in [subprocess.Popen([sys.executable, "-c", LOOP]) for _ in range(2)]:
        loop.wait()
    return time.monotonic() - began


def main(options: list[str]) -> int:
    """Print the figures; returns the exit code of the run."""
    units = [unit()]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "shardlaw", "run", "--profile", "smoke", "--report", folder, *options]
        code = subprocess.run(command, check=False).returncode
    seconds = time.monotonic() - began
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    units.append(unit())
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    mean = sum(units) / len(units)
    print(f"smoke: exit {code}, {seconds:.0f} s, {spent:.0f} CPU-seconds of processes that were waited for; load {os.getloadavg()[0]:.1f}")
    print(f"unit: {units[0]:.2f} s before, {units[1]:.2f} s after; {seconds / mean:.1f} units")
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
