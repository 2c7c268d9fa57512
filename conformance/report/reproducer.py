"""A finding as a script that needs torch alone, and the backend that it is about.

A law gives the literal part (:class:`Script`): what its ranks hold, call and expect. :func:`render` puts it into a file that starts its
own gloo ranks, prints what each expected and got, exits 1 while the fault is there and 0 once it is gone. The file is short
enough to paste into an issue: at most :data:`MAX_LINES` lines of :data:`MAX_COLUMNS` columns.
"""

from __future__ import annotations

import ast
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from conformance.report.pasted import UnfitError, fitted

if TYPE_CHECKING:
    from conformance.case import Case
    from conformance.law import Law
    from conformance.target import Target

MAX_LINES = 60
MAX_COLUMNS = 110
LIMIT_SECONDS = 30
TEMPLATE = """
def same(a, b):
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if not (isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)):
        return bool(a == b or a != a and b != b)
    return a.shape == b.shape and a.dtype == b.dtype and torch.allclose(a, b, 0, TOLERANCE, equal_nan=True)

def serve(rank, world, stage):
    signal.alarm(SECONDS)  # kills a rank that does not answer
    dist.init_process_group("BACKEND", f"file://{folder}/.{stage.__name__}", rank=rank, world_size=world)
    expected, got = stage(rank)
    wrong = not same(expected, got)
    print(f"rank {rank}: {'WRONG' if wrong else 'right'}\\n  expected {expected}\\n  got {got}", flush=True)
    dist.barrier()
    sys.exit(wrong)

with tempfile.TemporaryDirectory() as folder:
    for world, stage in [STAGES]:
        fork = multiprocessing.get_context("fork").Process
        ranks = [fork(None, serve, f"rank {rank}", (rank, world, stage)) for rank in range(world)]
        for rank in ranks:
            rank.start()
        ends = [rank.join() or rank.exitcode for rank in ranks]
        if any(ends):
            sys.exit(f"The fault is there. Exit codes: {ends} (1: wrong or raised, -14: no answer in SECONDS s)")
print("The fault is gone.")
"""


class ScriptError(ValueError):
    """A case that cannot be told as a short script: too long, a line that cannot be cut, or an import that is not torch's."""


@dataclass(frozen=True)
class Stage:
    """One world of a script: ``body`` is the body of ``def stage(rank):``; it returns ``(expected, got)`` for its rank.

    Both are tensors, values that compare with ``==``, or lists and tuples of those; a rank with nothing to say returns
    ``(None, None)``. The variable ``folder`` names a temporary folder that all ranks and stages share.
    """

    world: int
    body: tuple[str, ...]


@dataclass(frozen=True)
class Script:
    """The literal part of a reproducer: imports beyond the template's, constants, and one stage for each world.

    The template imports ``torch``, ``torch.distributed as dist``, ``multiprocessing``, ``signal``, ``sys`` and ``tempfile``. Lines carry no
    indent of their own; those that are too long are cut at commas within brackets. ``tolerance`` is the largest absolute
    difference of two elements that still counts as equal.
    """

    stages: tuple[Stage, ...]
    imports: tuple[str, ...] = ()
    constants: tuple[str, ...] = ()
    tolerance: float = 0.0


@dataclass(frozen=True)
class Join:
    """How the ranks of a script join: the backend, the module, or ``module:function``, that makes it known to torch, the environment."""

    backend: str = "gloo"
    setup: str = ""
    env: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, target: Target) -> Join:
        """As the ranks of a target do. The tensors of a script lie on the CPU: what another device's backend does is not in it."""
        return cls(target.backend, target.setup, target.env) if target.device == "cpu" else cls()

    @property
    def module(self) -> str:
        return self.setup.partition(":")[0]

    def lines(self) -> list[str]:
        """What every rank does before it joins."""
        environment = [f"os.environ.update({dict(self.env)!r})"] if self.env else []
        return environment + ([f"{self.setup.replace(':', '.')}()"] if ":" in self.setup else [])


def reproducer(law: Law, case: Case, kind: str = "", torch_version: str = "", join: Join | None = None) -> str:
    """The script of a case, its history (``case.after``) included. Raises :class:`ScriptError`, which says why there is none."""
    from conformance.laws import find

    if law.script is None:
        raise ScriptError(f"{law.id} has no reproducer")
    script = _written(law.script, case)
    before = []
    for earlier in case.after:
        earlier_law = find(earlier.law)
        if earlier_law.script is None:
            raise ScriptError(f"its history needs {earlier_law.id}, which has no reproducer")
        before.append(_written(earlier_law.script, earlier))
    if not torch_version:
        import torch

        torch_version = torch.__version__
    seen = f"Seen with torch {torch_version}{f' ({kind})' if kind else ''}. Exits 1 while the fault is there, 0 once it is gone."
    return render(script, [law.clause, case.text, seen], before, join or Join())


def _written(script: Callable[[Case], Script], case: Case) -> Script:
    """The script of a case. What goes wrong in writing it must not cost the finding."""
    try:
        return script(case)
    except ScriptError:
        raise
    except Exception as error:
        raise ScriptError(f"{case.law} cannot tell {case.text!r}: {type(error).__name__}: {error}") from error


def render(script: Script, header: Sequence[str], before: Sequence[Script] = (), join: Join = Join()) -> str:
    """The whole file. ``header`` becomes its docstring; the stages of ``before`` run first in the same ranks, whatever they give.

    Raises :class:`ScriptError` rather than give a file that is too long, or that would not run.
    """
    try:
        lines = _lines(script, header, before, join, pack=False)
        if len(lines) > MAX_LINES:
            lines = _lines(script, header, before, join, pack=True)
    except UnfitError as error:
        raise ScriptError(str(error)) from None
    if len(lines) > MAX_LINES:
        lines = [line for line in lines if line]
    if len(lines) > MAX_LINES:
        raise ScriptError(f"the script has {len(lines)} lines, at most {MAX_LINES} make a reproducer")
    text = "\n".join(lines) + "\n"
    _check(text, join.module)
    return text


def _lines(script: Script, header: Sequence[str], before: Sequence[Script], join: Join, *, pack: bool) -> list[str]:
    if any(len(earlier.stages) != 1 for earlier in before) or (before and len(script.stages) != 1):
        raise ScriptError("a history over several worlds has no reproducer")

    def block(statements: Sequence[str]) -> list[str]:
        return [f"    {line}" if line else line for line in fitted(statements, MAX_COLUMNS - 4, pack=pack)]

    imports = {"import torch", "import torch.distributed as dist", *(line for part in (script, *before) for line in part.imports)}
    imports |= ({f"import {join.module}"} if join.setup else set()) | ({"import os"} if join.env else set())
    lines = [
        *_docstring(header),
        f"import {'contextlib, ' if before else ''}multiprocessing, signal, sys, tempfile",
        *_imports(imports),
    ]
    if script.constants:
        lines += ["", *fitted(script.constants, MAX_COLUMNS, pack=pack)]
    calls = []
    for at, earlier in enumerate(before):
        lines += ["", f"def before_{at}(rank):", *block([*earlier.constants, *earlier.stages[0].body])]
        calls += ["with contextlib.suppress(Exception):", f"    before_{at}(rank)"]
    names = [f"stage_{at}" if len(script.stages) > 1 else "stage" for at in range(len(script.stages))]
    for name, stage in zip(names, script.stages, strict=True):
        lines += ["", f"def {name}(rank):", *block([*calls, *stage.body])]
    stages = ", ".join(f"({stage.world}, {name})" for name, stage in zip(names, script.stages, strict=True))
    template = TEMPLATE.replace("TOLERANCE", f"{script.tolerance:g}").replace("SECONDS", str(LIMIT_SECONDS)).replace("STAGES", stages)
    joining = "".join(f"    {line}\n" for line in fitted(join.lines(), MAX_COLUMNS - 4))
    template = template.replace('    dist.init_process_group("BACKEND"', f'{joining}    dist.init_process_group("{join.backend}"')
    return [*lines, *template.rstrip().split("\n")]


def _docstring(header: Sequence[str]) -> list[str]:
    text = [line for paragraph in header for line in textwrap.wrap(paragraph, MAX_COLUMNS - 8, break_on_hyphens=False)]
    safe = [line.replace("\\", "\\\\").replace('"""', "'''") for line in text]
    return [f'"""{safe[0]}', *safe[1:-1], f'{safe[-1]}"""'] if len(safe) > 1 else [f'"""{safe[0]}"""']


def _imports(statements: Iterable[str]) -> list[str]:
    """Import statements in order, those from one module as one."""
    plain, names = set(), dict[str, set[str]]()
    for statement in statements:
        try:
            nodes = ast.parse(statement).body
        except SyntaxError:
            raise ScriptError(f"{statement!r} is no import") from None
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found = {alias.name + (f" as {alias.asname}" if alias.asname else "") for alias in node.names}
                names.setdefault(node.module, set()).update(found)
            elif isinstance(node, ast.Import):
                plain.add(ast.unparse(node))
            else:
                raise ScriptError(f"{statement!r} is no import")
    lines = [f"from {module} import {', '.join(sorted(names[module]))}" for module in sorted(names)]
    short = [line if len(line) <= MAX_COLUMNS else line.replace(" import ", " import (") + ")" for line in lines]
    return sorted(plain) + fitted(short, MAX_COLUMNS)


def _check(text: str, backend: str = "") -> None:
    """Hold a finished file against what a reproducer promises; ``backend`` is the module of the backend that it is about."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise ScriptError(f"not Python: {error}") from None
    for node in ast.walk(tree):
        modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        for module in modules:
            if module.partition(".")[0] not in {"torch", backend.partition(".")[0], *sys.stdlib_module_names}:
                raise ScriptError(f"imports {module}: only torch and the standard library may be imported")
        if isinstance(node, ast.Name) and node.id in ("exec", "eval", "compile"):
            raise ScriptError(f"calls {node.id}: a reproducer holds its statements literally")
    defined = [name for node in tree.body for name in _defines(node)]
    twice = sorted({name for name in defined if defined.count(name) > 1})
    if twice:
        raise ScriptError(f"{', '.join(twice)} is defined twice: it may be a name of the template")
    widest = max(text.splitlines(), key=len)
    if len(widest) > MAX_COLUMNS:
        raise ScriptError(f"a line of {len(widest)} columns, at most {MAX_COLUMNS} make a reproducer: {widest.strip()[:60]}")


def _defines(node: ast.stmt) -> list[str]:
    """The names that a statement of the module binds."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    if isinstance(node, ast.With):
        return [item.optional_vars.id for item in node.items if isinstance(item.optional_vars, ast.Name)]
    return []
