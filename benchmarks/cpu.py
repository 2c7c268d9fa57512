"""Where a run's CPU-seconds go, by chapter and by what: ``python -m benchmarks.cpu -- COMMAND ...``.

    python -m benchmarks.cpu -- python -m shardlaw run --profile smoke

runs the command, and prints what the ranks spent on what, chapter by chapter, and what the driver and the server of the ranks did.
Each process is interrupted once in 10 ms of its own CPU time and notes the innermost of its functions that says what it is at; time in
threads that run no Python (those of gloo) counts for what the main thread is at.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from types import FrameType

HERE = Path(__file__).parent
NOTES, TICK = "SHARDLAW_CPU", 0.01

# what a function is at, by a part of the path of its file, or of `path:function`
SUBJECTS = {
    "importlib": "imports",
    "tensor/_sharding_prop.py:_propagate_tensor_meta_non_cached": "planning: metadata",
    "tensor/_decompositions.py": "planning: decompositions",
    "tensor/_ops/utils.py:expand_to_full_mesh_op_strategy": "planning: expansion",
    "tensor/_ops/single_dim_strategy.py": "planning: expansion",
    "tensor/_sharding_prop.py": "planning: rest",
    "tensor/_redistribute.py": "redistribution",
    "_functional_collectives.py": "redistribution",
    "distributed/distributed_c10d.py": "collectives, groups",
    "distributed/device_mesh.py": "meshes",
    "distributed/checkpoint/": "checkpoints",
    "rank/shared_plans.py": "sharing plans",
    "world/join.py:join_process_group": "start of ranks",
    "world/worker.py:_restore_globals": "between cases",
    "world/worker.py:_await_others": "between cases",
    "world/worker.py:_next_message": "messages",
    "world/protocol.py": "messages",
    "conformance/law/due.py": "judging",
    "shardlaw/reference/": "due",
    "rank/perform.py:compare": "judging",
    "conformance/world/verdicts.py": "judging",
    "conformance/law/features/": "features",
    "conformance/law/act.py:due_on": "due",
    "conformance/law/act.py:arguments": "building",
    "rank/perform.py:try_case": "acts: rest",
    "hypothesis/": "drawing",
    "conformance/report/": "report",
    "conformance/run/proof.py": "proving scripts",
    "conformance/world/worker.py": "between cases",
    "conformance/laws/__init__.py:catalogue": "catalogue",
    "conformance/world/pool.py": "pool",
}  # fmt: skip


def install() -> None:
    """Note from now on what this process and those that it forks are at, in a file each in the folder that the environment names."""
    signal.signal(signal.SIGPROF, _note)
    _begin()
    os.register_at_fork(after_in_child=_begin)


def _begin() -> None:
    global _file
    _file = os.open(f"{os.environ[NOTES]}/{os.getpid()}", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    signal.setitimer(signal.ITIMER_PROF, TICK, TICK)


def _note(_: int, frame: FrameType | None) -> None:
    what, who, law = "rest", "other", ""
    while frame is not None:
        place = f"{frame.f_code.co_filename}:{frame.f_code.co_name}"
        if what == "rest":
            what = next((subject for part, subject in SUBJECTS.items() if part in place), what)
        if place.endswith("rank/perform.py:try_case"):
            law = frame.f_locals["law"].id
        for part, kind in (("world/worker.py:main", "rank"), ("world/server.py:main", "server"), ("run/engine.py", "driver")):
            if part in place and who == "other":
                who = kind
        frame = frame.f_back
    os.write(_file, f"{who}\t{law}\t{what}\n".encode())


def main(command: list[str]) -> int:
    """Runs ``command`` and prints what it spent; returns its exit code."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.pathsep.join([str(HERE / "cpu_site"), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
        code = subprocess.run(command, env={**os.environ, "PYTHONPATH": path, NOTES: folder}, check=False).returncode
        notes = [tuple(line.split("\t")) for file in Path(folder).iterdir() for line in file.read_text().splitlines()]
    by_place: dict[str, Counter[str]] = {}
    by_law: Counter[str] = Counter()
    for who, law, what in notes:
        by_place.setdefault(law.partition(".")[0] or f"({who})", Counter())[what] += 1
        by_law[law.partition("[")[0]] += 1
    print(f"{len(notes) * TICK:.0f} CPU-seconds")
    for place, spent in sorted(by_place.items(), key=lambda item: -item[1].total()):
        parts = ", ".join(f"{what} {count * TICK:.1f}" for what, count in spent.most_common() if count * TICK >= 0.3)
        print(f"{place}: {spent.total() * TICK:.1f} ({parts})")
    print("laws: " + ", ".join(f"{law} {count * TICK:.1f}" for law, count in by_law.most_common(30) if law))
    return code


if __name__ == "__main__":
    if "--" not in sys.argv[:-1]:
        sys.exit("benchmarks.cpu: no command: python -m benchmarks.cpu -- COMMAND ...")
    sys.exit(main(sys.argv[sys.argv.index("--") + 1 :]))
