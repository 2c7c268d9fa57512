"""Render a finding as a script that needs only torch and the backend.

The script contains the source of the law's act, the arguments of the case and the expected result as literals. It starts its own ranks,
prints what each expected and got, and exits

=  ============================================================================================
1  if the fault occurs: the same result deviates, or the same error is raised
0  if it does not
2  if that cannot be told: another error, a missing module, ranks that do not answer in time
=  ============================================================================================

:mod:`shardlaw.conformance.run.proof` runs every script before it is handed out.
"""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from string import Template
from typing import TYPE_CHECKING

from shardlaw.conformance.law.script import Script, ScriptError
from shardlaw.conformance.report.script_rules import check_file, merge_imports

if TYPE_CHECKING:
    from shardlaw.conformance.law.case import Case
    from shardlaw.conformance.law.law import Law
    from shardlaw.conformance.law.target import Target
    from shardlaw.conformance.law.verdict import Verdict

COLUMNS = 110
LONG_SCRIPT_LINES = 200
LIMIT_SECONDS = 60
WAITING_SECONDS = 30  # the limit where the fault is that ranks wait: how long a proven script takes
GRACE_SECONDS = 5
BEGIN = "sys.excepthook = lambda *error: (sys.__excepthook__(*error), os._exit(2))"
# the branches of `agrees`, one for each form of expected value; a script gets only those that it needs. Comparing may communicate, so every
# rank compares all parts, even after one was wrong.
AGREES = {
    "either": """
    if isinstance(want, dict) and "either" in want:
        return any(agrees(one, got) for one in want["either"])""",
    "exactly": """
    if isinstance(want, dict) and [*want] == ["exactly"]:
        want = want["exactly"]
        alike = agrees if isinstance(want, torch.Tensor) else lambda one, other: one == other and len(repr(one)) == len(repr(other))
        return type(want) is type(got) and alike(want, got)""",
    "shards": """
    if isinstance(want, dict) and "shards" in want:
        held = got.to_local() if isinstance(got, DTensor) else got
        if hasattr(held, "global_offsets"):
            boxes = [zip(*box) for box in zip(held.local_offsets, held.local_sizes)]
            shape, found = ..., [held[tuple(slice(at, at + size) for at, size in box)] for box in boxes]
            found = [*zip(held.global_offsets, found)]
        elif hasattr(held, "local_offsets"):
            shape, found = tuple(held.size()), [*zip(map(tuple, held.local_offsets()), held.local_shards())]
        else:
            shape, found = ..., [(tuple(s.metadata.shard_offsets), s.tensor) for s in getattr(held, "local_shards", list)()]
        return agrees(want["shards"], found) and (want["shape"] in (..., shape))""",
    "stateful": """
    if isinstance(want, dict) and [*want] == ["stateful"]:
        return hasattr(got, "state_dict") and agrees(want["stateful"], got.state_dict())""",
    "dtensor": """
    if isinstance(got, DTensor):
        if isinstance(want, dict):
            full = want.get("full")
            whole = agrees(full, got.full_tensor().detach()) and full.shape == got.shape
            return whole and want.get("placements", [*got.placements]) == [*got.placements]
        return isinstance(want, tuple) and agrees(want, ([*got.placements], tuple(got.shape), got.to_local().detach()))""",
    "tensor": """
    if isinstance(want, torch.Tensor):
        plain = isinstance(got, torch.Tensor) and not hasattr(got, "placements")
        alike = plain and want.shape == got.shape and want.dtype == got.dtype
        return alike and torch.allclose(want, got.cpu(), 0, TOLERANCE, equal_nan=True)""",
    "error": """
    if isinstance(want, type):
        return isinstance(got, want) and str(got) != \"\"""",
    "errors": """
    if isinstance(want, tuple) and want[:1] == (type,):
        errors = tuple(error for error in want[1:] if isinstance(error, type))
        words = [word for word in want if isinstance(word, str)] or [""]
        return isinstance(got, errors) and str(got) != "" and any(word in str(got) for word in words)""",
    "range": """
    if isinstance(want, range):
        return got in want""",
    "alike": """
    if isinstance(want, dict) and "alike on" in want:
        held = [None] * dist.get_world_size()
        dist.all_gather_object(held, got)
        return all(torch.equal(held[rank], held[want["alike on"][0]]) for rank in want["alike on"])""",
    "dict": """
    if isinstance(want, dict):
        return isinstance(got, dict) and want.keys() == got.keys() and all([agrees(want[key], got[key]) for key in want])""",
    "list": """
    if isinstance(want, (list, tuple)) and isinstance(got, (list, tuple)):
        return len(want) == len(got) and all([*map(agrees, want, got)])""",
    "number": """
    if isinstance(want, float) and isinstance(got, float):
        return abs(want - got) <= TOLERANCE or want == got or want != want and got != got""",
}
TEMPLATE = Template("""
def agrees(want, got):
    if want is ...:  # nothing is due
        return True$CASES
    return bool(want == got)

def tell(text):
    os.write(1, f"{text}\\n".encode())  # at once: ranks share the file

def serve(rank, world, stage, all_connected):
    signal.alarm($SECONDS)  # ends a rank that does not answer
$NOT_YET    try:
$JOINING        dist.init_process_group("$BACKEND", f"file://{folder}/.{stage.__name__}", rank=rank, world_size=world)
        all_connected.wait()  # a rank that ends at once would take those along that still look for it
        want, got = stage(rank)
$RETURNED        code = 0 if $RIGHT else 1
        compared = f"{'WRONG' if code else 'right'}\\n  expected {want}\\n  got {got}"
        tell(f"rank {rank}: {'nothing is due here' if want is ... else compared}")
    except BaseException as error:  # a CheckpointException is no Exception
        code = $RAISED
        tell(f"rank {rank}: raised {type(error).__name__}: {error}")
    else:
        signal.alarm($LONGER)  # a rank that answered outlives those that do not
        with contextlib.suppress(Exception):  # of a rank that is gone its own exit code tells
            dist.barrier()
    os._exit(code)

def judge(ends):
    if $FAULT:
        print(f"The fault is there. Exit codes of the ranks: {ends}")
        sys.exit(1)
    if any(ends):
        print(f"Neither shown nor gone. Exit codes of the ranks: {ends} ($CODES)")
        sys.exit(2)

if __name__ == "__main__":  # a process that an act starts reads this file again
    with tempfile.TemporaryDirectory() as folder:
        for world, staged in [$STAGES]:
            fork = multiprocessing.get_context("fork")
            all_connected = fork.Barrier(world)
            ranks = [fork.Process(None, serve, f"rank {rank}", (rank, world, staged, all_connected)) for rank in range(world)]
            for rank in ranks:
                rank.start()
            while alive := [rank.sentinel for rank in ranks if rank.exitcode is None]:
                multiprocessing.connection.wait(alive)
                if any(rank.exitcode for rank in ranks):  # the others may wait for it for ever
                    [rank.join($GRACE) for rank in ranks]
                    [rank.kill() for rank in ranks if rank.exitcode is None]
            judge([rank.exitcode for rank in ranks])
    print("The fault is gone.")
""")
# by the kind of a deviation: which exit codes of the ranks show it; a result that no rank can read is wrong
WRONG = "1 in ends or {*ends} == {4}"
FAULTS = {
    "hang": "-14 in ends and not {1, 2} & {*ends}",
    "crash": "any(end < 0 and end not in (-9, -14) for end in ends)",
    # some ranks answered and others did not, which ended the wait of the first
    "divergence": "1 in ends or -14 in ends and {0, -9} & {*ends}",
}


@dataclass(frozen=True)
class FaultInfo:
    """The fault that a script must show: the kind of deviation, the class of the error raised, and the key of the act that deviated."""

    kind: str = ""
    error: str = ""
    key: str = ""

    @classmethod
    def from_verdict(cls, verdict: Verdict) -> FaultInfo:
        raised = next((answer.raised.error for answer in verdict.ranks if answer.raised), "")
        return cls(verdict.kind or "", raised, verdict.check)


@dataclass(frozen=True)
class ScriptTarget:
    """The target of a script: backend, ``setup`` (a module, or ``module:function``, that registers the backend) and environment.

    ``storage`` maps torch's checkpoint writer and reader, as scripts name them, to the expressions that replace them; ``storages`` are
    the modules of these.
    """

    backend: str = "gloo"
    setup: str = ""
    env: tuple[tuple[str, str], ...] = ()
    storage: tuple[tuple[str, str], ...] = ()
    storages: tuple[str, ...] = ()

    @classmethod
    def from_target(cls, target: Target) -> ScriptTarget:
        """The script target of a target. Scripts use CPU tensors, so the backend of another device is replaced by gloo."""
        from shardlaw.conformance.rank.storage import script_replacements

        storage = tuple(script_replacements(target).items())
        modules = tuple(dict.fromkeys(place.partition(":")[0] for place in (target.writer, target.reader) if storage))
        ours = cls(storage=storage, storages=modules)
        return replace(ours, backend=target.backend, setup=target.setup, env=target.env) if target.device == "cpu" else ours

    @property
    def module(self) -> str:
        return self.setup.partition(":")[0]

    def lines(self) -> list[str]:
        """The statements that every rank runs before ``init_process_group``."""
        environment = [f"os.environ.update({dict(self.env)!r})"] if self.env else []
        return environment + ([f"{self.setup.replace(':', '.')}()"] if ":" in self.setup else [])


def render_reproducer(
    law: Law, case: Case, about: FaultInfo = FaultInfo(), torch_version: str = "", join: ScriptTarget | None = None
) -> str:
    """Render the script of a case with its history (``case.after``). Raises :class:`ScriptError`, which says why there is none."""
    from shardlaw.conformance.laws import find

    script = make_script(law, case, about.key)
    before = [make_script(find(earlier.law), earlier) for earlier in case.after]
    if not torch_version:
        import torch

        torch_version = torch.__version__
    kind = f" ({about.kind})" if about.kind else ""
    ends = "Exits 1 while the fault is there, 0 once it is gone, 2 when neither can be said."
    header = [law.clause, case.text, f"Seen with torch {torch_version}{kind}. {ends}"]
    laws = [law, *(find(earlier.law) for earlier in case.after)]
    homes = {each.acts[0].function.__module__.partition(".")[0] for each in laws if each.acts}
    return render(script, header, before, join or ScriptTarget(), about, homes)


def make_script(law: Law, case: Case, key: str = "") -> Script:
    """The literal part of a script. Any error becomes a :class:`ScriptError`, so that it does not cost the finding."""
    from shardlaw.conformance.law.act_script import act_script

    try:
        if law.acts:
            return act_script(law, case, key)
        if law.script is None:
            raise ScriptError(f"{law.id} has no reproducer")
        return law.script(case)
    except ScriptError:
        raise
    except Exception as error:
        raise ScriptError(f"{case.law} cannot tell {case.text!r}: {type(error).__name__}: {error}") from error


def render(
    script: Script,
    header: Sequence[str],
    before: Sequence[Script] = (),
    join: ScriptTarget = ScriptTarget(),
    about: FaultInfo = FaultInfo(),
    homes: Collection[str] = (),
) -> str:
    """Render the whole file. ``header`` becomes its docstring; the stages of ``before`` run first in the same ranks, whatever they return.
    ``homes``: packages of other laws, which the script may import. Raises :class:`ScriptError` for a file that would not run."""
    text = "\n".join(_script_lines(script, header, before, join, about)) + "\n"
    for expression, replacement in join.storage:
        text = text.replace(expression, replacement)
    check_file(text, {place.partition(".")[0] for place in (join.module, *join.storages, *homes)} - {"", "shardlaw"})
    return text


def _script_lines(script: Script, header: Sequence[str], before: Sequence[Script], join: ScriptTarget, about: FaultInfo) -> list[str]:
    if any(len(earlier.stages) != 1 for earlier in before) or (before and len(script.stages) != 1):
        raise ScriptError("a history over several worlds has no reproducer")

    def block(statements: Sequence[str]) -> list[str]:
        return [f"    {line}" if line else line for statement in statements for line in statement.split("\n")]

    parts = (script, *before)
    branches = _agrees_branches(script)
    imports = {"import torch", "import torch.distributed as dist", *(line for part in parts for line in part.imports)}
    imports |= {f"import {module}" for module in (join.module, *join.storages) if module}
    imports |= {"from torch.distributed.tensor import DTensor"} if "DTensor" in branches else set()
    lines = [
        *_docstring_lines(header),
        "import contextlib, multiprocessing.connection, os, signal, sys, tempfile",
        BEGIN,
        *merge_imports(imports),
    ]
    for text in dict.fromkeys(text for part in parts for text in part.definitions):
        lines += ["", text]
    if script.constants:
        lines += ["", *script.constants]
    calls = list[str]()
    for at, earlier in enumerate(before):
        lines += ["", f"def before_{at}(rank):", *block([*earlier.constants, *earlier.stages[0].body])]
        calls += ["with contextlib.suppress(Exception):", f"    before_{at}(rank)"]
    names = [f"stage_{at}" if len(script.stages) > 1 else "stage" for at in range(len(script.stages))]
    for name, stage in zip(names, script.stages, strict=True):
        lines += ["", f"def {name}(rank):", *block([*calls, *stage.body])]
    stages = ", ".join(f"({stage.world}, {name})" for name, stage in zip(names, script.stages, strict=True))
    return [*lines, *_fill_template(branches, stages, join, about)]


def _fill_template(branches: str, stages: str, join: ScriptTarget, about: FaultInfo) -> list[str]:
    """The end of a script, which starts the ranks and judges what they return; ``branches`` are those of ``agrees``, ``stages`` pairs of a
    world's size and a function."""
    shows_error = about.kind in ("raised", "divergence") and bool(about.error)
    # an error about a lost peer is a consequence of another rank's error or timeout
    lost = "'closed by peer' in str(error)"
    if shows_error:
        raised = f"1 if type(error).__name__ == {about.error!r} and not {lost} else 2"
    elif about.kind:
        raised = f"3 if {lost} else 2" if about.kind == "hang" else "4 if returned else 2"
    else:  # any error counts as the fault, except Meaningless: the case is invalid
        raised = "2 if type(error).__name__ == 'Meaningless' else 1"
    limit = WAITING_SECONDS if about.kind in ("hang", "divergence") else LIMIT_SECONDS
    reads_returned = "returned" in raised
    text = TEMPLATE.substitute(
        CASES=branches,
        SECONDS=limit,
        LONGER=limit + 2 * GRACE_SECONDS,
        GRACE=GRACE_SECONDS,
        JOINING="".join(f"        {line}\n" for line in join.lines()),
        BACKEND=join.backend,
        RIGHT="agrees(want, got) in (True, False)" if shows_error else "agrees(want, got)",  # reading a result may raise too
        RAISED=raised,
        NOT_YET="    returned = False\n" * reads_returned,
        RETURNED="        returned = True\n" * reads_returned,
        FAULT=FAULTS.get(about.kind, WRONG),
        CODES=f"2: another error, 3: lost a rank, 4: cannot read what was returned, -14: no answer in {limit} s",
        STAGES=stages,
    )
    return text.rstrip().split("\n")


def _agrees_branches(script: Script) -> str:
    """The branches of ``agrees`` that a script needs."""
    used = script.compares if script.compares is not None else ("tensor", "list", "number")
    found = "".join(text for name, text in AGREES.items() if name in used)
    return found.replace("TOLERANCE", f"{script.tolerance:g}")


def _docstring_lines(header: Sequence[str]) -> list[str]:
    text = [line for paragraph in header for line in textwrap.wrap(paragraph, COLUMNS - 8, break_on_hyphens=False)]
    safe = [line.replace("\\", "\\\\").replace('"""', "'''") for line in text]
    return [f'"""{safe[0]}', *safe[1:-1], f'{safe[-1]}"""'] if len(safe) > 1 else [f'"""{safe[0]}"""']
