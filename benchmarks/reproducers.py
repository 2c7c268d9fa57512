"""Whether the reproducers show what they say: ``python -m benchmarks.reproducers [LAW ...]``.

Writes the script of every expectation that names a case, of the laws that are asked for, and of every case in ``docs/findings.md``, runs
each one for itself in a process that has imported torch before, and prints those that do not exit 1. The last line counts them; exits 1
where any does not.
"""

from __future__ import annotations

import os
import re
import runpy
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed.tensor

from conformance.case import Case
from conformance.expectations import layers, load
from conformance.laws import catalogue, find
from conformance.report.reproducer import LIMIT_SECONDS, ScriptError, reproducer
from conformance.selection import select
from conformance.target import Target

FINDINGS = Path(__file__).parent.parent / "docs/findings.md"
NOT_FOUND = 127
# ranks that have imported torch answer at once: one that waits for good is waited for no longer than this
SECONDS = 6


def cases(patterns: list[str]) -> Iterator[tuple[str, str]]:
    """Cases of known faults with the kind that each shows, ``""`` where only the document names it."""
    laws = list(catalogue().values())
    wanted = {law.id for law in select(laws, patterns, ())}
    found = {entry.case: entry.kind for entry in load(layers(Target()), laws, torch.__version__).entries if entry.case}
    sections = re.split(r"^##? ", FINDINGS.read_text(), flags=re.MULTILINE)
    told = [section for section in sections if speaks_of(section.partition("\n")[0], torch.__version__)]
    rows = [row for section in told for row in re.findall(r"\| `([^`]+)` \|$", section, re.MULTILINE)]
    for text in dict.fromkeys([*rows, *found]):
        if Case.parse(text).law in wanted:
            yield text, found.get(text, "")


def speaks_of(heading: str, version: str) -> bool:
    """Whether a section is about a version of torch: the one that its heading names, or any where it names none."""
    named = re.search(r"torch (\d+(\.\d+)+)", heading)
    return named is None or version.partition("+")[0] == named[1]


def ran(path: Path) -> int:
    """The exit code of a script that runs in a fork of this process; what it prints is thrown away."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    code = NOT_FOUND
    try:
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, 1)
        os.dup2(sink, 2)
        runpy.run_path(str(path), run_name="__main__")
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        os._exit(code)


def main(patterns: list[str]) -> int:
    torch.set_num_threads(1)
    right, without, other = 0, 0, 0
    with tempfile.TemporaryDirectory() as folder:
        for at, (told, kind) in enumerate(cases(patterns)):
            case, path = Case.parse(told), Path(folder) / f"case{at}.py"
            try:
                text = reproducer(find(case.law), case, kind)
                path.write_text(text.replace(f"signal.alarm({LIMIT_SECONDS})", f"signal.alarm({SECONDS})"))
            except ScriptError as error:
                without += 1
                print(f"no script: {told}: {error}", flush=True)
                continue
            code = ran(path)
            right += code == 1
            other += code != 1
            if code != 1:
                print(f"exit {code}: {told}", flush=True)
    print(f"{right} scripts exit 1, {other} do not, {without} cases have none")
    return int(other > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
