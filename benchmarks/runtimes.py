"""Ours beside upstream's runtimes and a floor, in one run: ``python -m benchmarks.runtimes``. See ``benchmarks/README.md``."""

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
RANKS = (2, 3, 4)
Told = dict[str, Any]


def run(*command: str) -> Told:
    """Run a contender to its end; what it printed, with wall and CPU seconds of all its processes."""
    began = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", *command], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    printed = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    lines = [line for line in printed.splitlines() if line.startswith("{")]
    if process.returncode or not lines:
        raise SystemExit(f"python -m {' '.join(command)} ended with {process.returncode}")
    told: Told = json.loads(lines[-1])
    return {**told, "wall": time.monotonic() - began, "cpu": usage.ru_utime + usage.ru_stime}


def rates(told: Told, kind: str) -> tuple[float, float]:
    """Cases a second and cases a CPU-second: the medians of a contender's passes of one kind."""
    count = told["cases"][kind.partition(" ")[0]]
    walls, cpus = zip(*told["passes"][kind], strict=True)
    return count / statistics.median(walls), count / statistics.median(cpus)


def row(name: str, rate: tuple[float, float], note: str = "") -> None:
    print(f"{name:44} {rate[0]:10.1f} {rate[1]:12.2f}  {note}", flush=True)


def load() -> str:
    return f"load {os.getloadavg()[0]:.1f}"


def runtimes(rounds: int, spawns: int) -> None:
    """The table of runtimes and the ratios that matter."""
    print(f"{'runtime':44} {'cases/s':>10} {'cases/CPU-s':>12}")
    ours, floor = {}, {}
    for ranks in RANKS:
        floor[ranks] = run("benchmarks.floor", str(ranks), str(rounds))
        ours[ranks] = run("benchmarks.ours", str(ranks), str(rounds))
        for kind in floor[ranks]["passes"]:
            row(f"floor loop, {ranks} ranks, {kind}", rates(floor[ranks], kind), load())
        for kind in ours[ranks]["passes"]:
            row(f"ours, {ranks} ranks, {kind}", rates(ours[ranks], kind), load())
    theirs = {}
    for name, title in (("persistent", "upstream, persistent ranks"), ("threads", "upstream, threads"), ("local", "upstream, LocalTensor")):
        theirs[name] = run("benchmarks.upstream", name, str(rounds))
        for kind in theirs[name]["passes"]:
            row(f"{title}, 4, {kind}", rates(theirs[name], kind), load())
    spawned = [run("benchmarks.upstream", "spawn", "1") for _ in range(spawns)]
    spawn = tuple(statistics.median(told["cases"]["all"] / told[unit] for told in spawned) for unit in ("wall", "cpu")) if spawned else None
    if spawn is not None:
        row("upstream, spawned ranks, a test an op", (spawn[0], spawn[1]), f"start-up included; {load()}")
    print()
    mine, least = ours[4], floor[4]
    for kind, against in (
        ("all distinct",) * 2,
        ("all repeated",) * 2,
        ("free distinct",) * 2,
        ("free repeated",) * 2,
        ("free drawn", "free distinct"),
    ):
        print(f"ours / floor, 4 ranks, {kind}: {rates(mine, kind)[0] / rates(least, against)[0]:.0%} of its cases/s")
    for kind in ("all distinct", "all repeated"):
        print(f"ours / persistent, {kind}: {rates(mine, kind)[1] / rates(theirs['persistent'], kind)[1]:.1f}x its cases/CPU-s")
    if spawn is not None:
        print(f"ours / spawned, all distinct: {rates(mine, 'all distinct')[1] / spawn[1]:.0f}x its cases/CPU-s")


def worlds(rounds: int) -> None:
    """What a world costs when it starts and when it is lost, and checkpoints."""
    told = run("benchmarks.worlds", str(max(rounds, 5)))
    replaced = statistics.median(told["replace"])
    print(f"start-up to first verdict: {told['first_verdict']:.1f} s; a dead world of 4 ranks is replaced in {replaced:.2f} s")
    trips = run("benchmarks.trips", str(rounds))
    mine, bare = (trips["trips"] / statistics.median(trips[name]) for name in ("ours", "bare"))
    print(f"checkpoint round trips: {mine:.1f}/s, bare save and load {bare:.1f}/s: {mine / bare:.0%}")
    plans = run("benchmarks.plans")
    print(
        "without peers: "
        + ", ".join(f"{plans[name]:,.0f} {name.replace('_', ' ')}" for name in ("plan_cases_a_second", "layouts_a_second"))
    )


def smoke() -> None:
    """A whole smoke run on 4 ranks: distinct cases a second."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        subprocess.run([sys.executable, "-m", "shardlaw", "run", "--report", folder], check=False, capture_output=True)
        report = json.loads((Path(folder) / "report.json").read_text())
    distinct, seconds = report["totals"]["distinct"], time.monotonic() - began
    print(f"a smoke run: {distinct} distinct cases in {seconds:.0f} s, {distinct / seconds:.0f} a second, start-up included; {load()}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="passes of each kind; figures are their medians")
    parser.add_argument("--spawns", type=int, default=ROUNDS, help="runs of the spawn-per-test runtime, each of ten tests")
    parser.add_argument("--no-smoke", action="store_true", help="leave the whole run out")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    print(f"cores {os.cpu_count()}, {load()} before")
    runtimes(arguments.rounds, arguments.spawns)
    worlds(arguments.rounds)
    if not arguments.no_smoke:
        smoke()
    print(f"{load()} after")
    return 0


if __name__ == "__main__":
    sys.exit(main())
