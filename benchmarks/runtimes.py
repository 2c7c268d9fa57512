"""Ours beside upstream's runtimes, in one run: ``python -m benchmarks.runtimes [--smoke-only]``. See ``benchmarks/README.md``."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROUNDS = 3


def run(*command: str) -> dict[str, Any]:
    """Run a contender to its end; what it printed, with wall and CPU seconds of all its processes."""
    began = time.monotonic()
    process = subprocess.Popen([sys.executable, "-m", *command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    printed = process.stdout.read()
    _, _, usage = os.wait4(process.pid, 0)
    process.returncode = 0
    lines = [line for line in printed.splitlines() if line.startswith("{")]
    told = json.loads(lines[-1]) if lines else {}
    return {**told, "wall": time.monotonic() - began, "cpu": usage.ru_utime + usage.ru_stime}


def median(rounds: list[dict[str, Any]], value: str) -> float:
    return statistics.median(float(told[value]) for told in rounds)


def row(name: str, per_second: float, per_cpu_second: float | None, note: str) -> None:
    cpu = "" if per_cpu_second is None else f"{per_cpu_second:10.2f}"
    print(f"{name:34} {per_second:10.1f} {cpu:>10}  {note}")


def contenders() -> None:
    """The table of runtimes: medians of :data:`ROUNDS` rounds, taken in turn."""
    rounds: dict[str, list[dict[str, Any]]] = {"ours": [], "ours2": [], "spawn": [], "persistent": []}
    for _ in range(ROUNDS):
        rounds["ours"].append(run("benchmarks.ours", "4"))
        rounds["ours2"].append(run("benchmarks.ours", "2"))
        rounds["spawn"].append(run("benchmarks.upstream", "spawn"))
        rounds["persistent"].append(run("benchmarks.upstream", "persistent"))
    print(f"{'runtime':34} {'cases/s':>10} {'cases/cpu-s':>10}  note")
    for key, ranks in (("ours", 4), ("ours2", 2)):
        told = rounds[key]
        cases = told[0]["cases"]
        for kind in ("distinct", "repeated"):
            row(f"ours, {ranks} ranks, {kind}", cases / median(told, kind), None, "warm world; wall of that pass")
        whole = (2 * cases + 1) / median(told, "cpu")
        row(f"ours, {ranks} ranks, whole process", (2 * cases + 1) / median(told, "wall"), whole, "start-up included")
        print(f"{'':34} first verdict after {median(told, 'first_verdict'):.1f} s")
    for key, name in (("spawn", "upstream, spawn per test"), ("persistent", "upstream, persistent ranks")):
        told = rounds[key]
        row(name, told[0]["cases"] / median(told, "wall"), told[0]["cases"] / median(told, "cpu"), "4 ranks, whole process")
    ours = (2 * rounds["ours"][0]["cases"] + 1) / median(rounds["ours"], "cpu")
    for key, name in (("spawn", "spawn per test"), ("persistent", "persistent ranks")):
        theirs = rounds[key][0]["cases"] / median(rounds[key], "cpu")
        print(f"ours / {name}, cases a CPU-second, whole process: {ours / theirs:.1f}x")


def smoke() -> None:
    """A whole smoke run on 4 ranks: distinct cases a second."""
    with tempfile.TemporaryDirectory() as folder:
        told = run("conformance", "run", "--profile", "smoke", "--report", folder)
        report = json.loads((Path(folder) / "report.json").read_text())
    distinct = report["totals"]["distinct"]
    rate, cpu_rate = distinct / report["seconds"], distinct / told["cpu"]
    print(f"smoke run, largest world 4 ranks: {distinct} distinct cases in {report['seconds']:.1f} s")
    print(f"{rate:.1f} a second, {cpu_rate:.1f} a CPU-second")
    print("(start-up and shrinking included)")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke-only", action="store_true", help="leave the runtimes out")
    arguments = parser.parse_args()
    print(f"cores {os.cpu_count()}, load {os.getloadavg()[0]:.1f} before")
    if not arguments.smoke_only:
        contenders()
    smoke()
    print(f"load {os.getloadavg()[0]:.1f} after")
    return 0


if __name__ == "__main__":
    sys.exit(main())
