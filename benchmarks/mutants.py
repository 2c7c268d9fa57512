"""Random changes of torch's own source, and whether the cases that run them notice::

    python -m benchmarks.mutants FOLDER [SEED [COUNT]]

FOLDER is what ``python -m benchmarks.chosen measure FOLDER`` left: which blocks of torch's source each case enters. COUNT functions are
drawn, and in each of them one thing that a chosen case of smoke runs is changed: a comparison is turned, a condition made constant, an
operand or a keyword left out, a number moved by one, two arguments exchanged, a statement left out, ``min`` taken for ``max``, the first
item for another, all items for some, one local variable for the next. Each change is planted in processes of its own,
on no disk, and the chosen cases that enter its block are judged, one law after another, for up to :data:`SECONDS` of CPU time as measured,
until one is no longer what it was. Prints a line for each change, and how many were noticed. What survives is to be read: many changes
make no difference, such as those of what is logged, remembered or prefetched, and cases that each run draws anew are not tried here.
"""

from __future__ import annotations

import ast
import importlib.machinery
import json
import os
import random
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import reach

if TYPE_CHECKING:
    from benchmarks.measured import Tried

HERE = Path(__file__).parent
PLANTED = "SHARDLAW_MUTANT"  # the change that this process and those that it starts have, as JSON
SECONDS = 15.0
LIMIT = 200.0  # seconds of a change, all in all
COMPARED = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">", ast.Eq: "!=", ast.NotEq: "==", ast.In: "not in", ast.NotIn: "in",
            ast.Is: "is not", ast.IsNot: "is"}  # fmt: skip
MISTAKEN = {"min": "max", "max": "min", "any": "all", "all": "any", "sorted": "list", "reversed": "list"}
RECKONED = {ast.Add: "-", ast.Sub: "+", ast.Mult: "+", ast.FloorDiv: "*", ast.Mod: "//"}
QUIET = {"warn", "warning", "warning_once", "debug", "info", "error", "format", "cast"}  # calls of which nothing is changed


@dataclass(frozen=True)
class Change:
    """The bytes of a file from ``start`` to ``end`` become ``new``; cases run them where they enter ``block``."""

    file: str
    line: int
    scope: str
    start: int
    end: int
    new: str
    block: int

    def applied(self, source: bytes) -> bytes:
        return source[: self.start] + self.new.encode() + source[self.end :]

    def __str__(self) -> str:
        source = Path(self.file).read_bytes()
        where = f"{self.file.partition('torch/distributed/')[2]}:{self.line} {self.scope}"
        return f"{where}: {' '.join(source[self.start : self.end].decode().split())} -> {self.new}"


class Source:
    """One file of torch, and the changes of what cases run of it."""

    def __init__(self, file: str, first: int, entered: frozenset[int]) -> None:
        self.file, self.text, self._entered = file, Path(file).read_bytes(), entered
        lines = self.text.splitlines(keepends=True)
        self._begins = [sum(map(len, lines[:at])) for at in range(len(lines))]
        self._tree = ast.parse(self.text)
        self._block = {id(one): first + at for at, (_, _, inside) in enumerate(reach.blocks(self._tree)) for one in inside}

    def changes(self) -> Iterator[Change]:
        for one in self._tree.body:
            yield from self._within(one, -1, "", [])

    def _within(self, node: ast.AST, block: int, scope: str, local: list[str]) -> Iterator[Change]:
        if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr) or (isinstance(node, ast.Call) and _called(node) in QUIET):
            return
        block = self._block.get(id(node), block)
        inside = [*ast.iter_child_nodes(node)]
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            scope, inside = node.name, node.body
            if not isinstance(node, ast.ClassDef):
                local = _parameters_and_variables(node)
        elif isinstance(node, ast.AnnAssign):
            inside = [node.value] if node.value else []
        if block in self._entered:
            for place, new in self._turned(node, local):
                start, end = self._span(place)
                yield Change(self.file, place.lineno, scope, start, end, new, block)  # type: ignore[attr-defined]
        for one in inside:
            yield from self._within(one, block, scope, local)

    def _turned(self, node: ast.AST, local: list[str]) -> Iterator[tuple[ast.AST, str]]:
        """What may stand in the place of a node, or of a part of it."""
        of = self._text
        match node:
            case ast.Compare(ops=[op]):
                yield node, f"({of(node.left)} {COMPARED[type(op)]} {of(node.comparators[0])})"
            case ast.BoolOp():
                words = (" or ", " and ") if isinstance(node.op, ast.And) else (" and ", " or ")
                yield node, f"({words[0].join(map(of, node.values))})"
                yield node, f"({words[1].join(map(of, node.values[1:]))})"
                yield node, f"({words[1].join(map(of, node.values[:-1]))})"
            case ast.UnaryOp(op=ast.Not()):
                yield node, f"({of(node.operand)})"
            case ast.BinOp() if type(node.op) in RECKONED and not isinstance(node.left, ast.Constant):
                yield node, f"({of(node.left)} {RECKONED[type(node.op)]} {of(node.right)})"
            case ast.Constant(value=bool()):
                yield node, str(not node.value)
            case ast.Constant(value=int()):
                yield node, str(node.value + 1)
            case ast.If():
                yield node.test, "False"
                yield node.test, "True"
            case ast.IfExp():
                yield node, f"({of(node.body)})"
                yield node, f"({of(node.orelse)})"
            case ast.Expr(value=ast.Call()) if _called(node.value) in QUIET:
                return
            case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
                yield node, "pass"
            case ast.Call(func=ast.Name(id=name)) if name in MISTAKEN:
                yield node.func, MISTAKEN[name]
            case ast.Call(args=[ast.expr() as one, ast.expr() as other], keywords=[]):
                yield node, f"{of(node.func)}({of(other)}, {of(one)})"
            case ast.Call(keywords=[_, *_]):
                yield node, f"{of(node.func)}({', '.join(map(of, [*node.args, *node.keywords[1:]]))})"
            case ast.Subscript(slice=ast.Slice(), ctx=ast.Load()):
                yield node, of(node.value)
            case ast.Subscript(slice=ast.Name(), ctx=ast.Load()):
                yield node.slice, "0"
            case ast.Name(ctx=ast.Load()) if node.id in local[:-1]:
                yield node, local[local.index(node.id) + 1]
            case ast.Continue():
                yield node, "break"

    def _span(self, node: ast.AST) -> tuple[int, int]:
        begin, end = self._begins[node.lineno - 1], self._begins[node.end_lineno - 1]  # type: ignore[attr-defined]
        return begin + node.col_offset, end + node.end_col_offset  # type: ignore[attr-defined]

    def _text(self, node: ast.AST) -> str:
        start, end = self._span(node)
        return self.text[start:end].decode()


def _parameters_and_variables(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    names = [one.arg for one in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]]
    names += [one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)]
    return [*dict.fromkeys(names)]


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


# Planting


class _Planting(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str):  # type: ignore[no-untyped-def]
        path = self.get_filename(fullname)
        return compile(Change(**json.loads(os.environ[PLANTED])).applied(self.get_data(path)), path, "exec", dont_inherit=True)


class _Finder(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, fullname, path=None, target=None):  # type: ignore[no-untyped-def]
        spec = super().find_spec(fullname, path, target) if fullname.startswith("torch.distributed") else None
        if spec is None or spec.origin != json.loads(os.environ[PLANTED])["file"]:
            return None
        spec.loader = _Planting(spec.name, spec.origin)
        return spec


def install() -> None:
    """Have the change in this process and those that it forks."""
    sys.meta_path.insert(0, _Finder)


def judge() -> None:
    """Print the first of the cases on standard input, words and texts, that is not what it was, and what it is."""
    from shardlaw.conformance.law.case import Case
    from shardlaw.conformance.law.target import Target
    from shardlaw.conformance.laws import find
    from shardlaw.conformance.world import Pool

    told, owed = [], 0
    with Pool(Target(), worlds=2) as pool:
        for word, text in json.load(sys.stdin):
            owed += 1

            def done(verdict, word=word, text=text):  # type: ignore[no-untyped-def]
                nonlocal owed
                owed -= 1
                if verdict.word not in (word, "rejected"):
                    told.append(f"{verdict.word} {text}")

            case = Case.parse(text)
            pool.submit(find(case.law), case, done)
            if told:
                break
        pool.wait_until(lambda: bool(told) or not owed)
        print(*told[:1], flush=True)


# Drawing and trying


def drawn(entered: frozenset[int], seed: int, count: int) -> list[Change]:
    """Changes of so many functions, one in each; of larger functions more are drawn."""
    first = reach.numbered()
    del first[""]
    groups: defaultdict[tuple[str, str], list[Change]] = defaultdict(list)
    for change in chain.from_iterable(Source(file, at, entered).changes() for file, at in first.items()):
        groups[change.file, change.scope].append(change)
    rng = random.Random(seed)
    order = sorted(groups.values(), key=lambda its: rng.random() ** (len(its) ** -0.5), reverse=True)
    return [rng.choice(its) for its in order[:count]]


def entering(block: int, cases: Iterable[Tried]) -> list[tuple[str, str]]:
    """The words and texts of the cases that enter a block, of each law one, then of each the next, for as long as :data:`SECONDS`."""
    laws: defaultdict[str, list[Tried]] = defaultdict(list)
    for case in cases:
        if block in case.blocks:
            laws[case.law].append(case)
    left, found = SECONDS, []
    for one in filter(None, chain.from_iterable(zip_longest(*laws.values()))):
        if one.cost <= left:
            left -= one.cost
            found.append((one.word, one.text))
    return found


def noticed(change: Change, cases: list[tuple[str, str]]) -> str:
    """The case that is not what it was, or what happens instead of any; empty where all are what they were."""
    path = os.pathsep.join([str(HERE / "mutants_site"), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": path, PLANTED: json.dumps(asdict(change))}
    command = [sys.executable, "-m", "benchmarks.mutants", "--judge"]
    try:
        found = subprocess.run(command, input=json.dumps(cases), env=env, capture_output=True, text=True, timeout=LIMIT, check=False)
    except subprocess.TimeoutExpired:
        return "no answer"
    return f"nothing starts: {found.stderr.strip().splitlines()[-1]}" if found.returncode else found.stdout.strip()


def main(folder: Path, seed: int = 0, count: int = 100) -> int:
    """Draw changes, try each, and print what came of it."""
    from benchmarks.chosen import SOUND
    from benchmarks.corners import planned
    from benchmarks.measured import tried

    chosen = {case.text for case in planned(())}
    cases = sorted((case for case in tried([folder]) if case.text in chosen and case.word in SOUND), key=lambda case: case.cost)
    changes, found = drawn(frozenset().union(*(case.blocks for case in cases)), seed, count), 0
    for change in changes:
        some = entering(change.block, cases)
        by = noticed(change, some)
        found += bool(by)
        print(f"{'noticed' if by else 'SURVIVED'} {change}\n    {by or f'{len(some)} cases'}", flush=True)
    print(f"{found} of {len(changes)} changes were noticed")
    return 0


if __name__ == "__main__":
    if sys.argv[1:] == ["--judge"]:
        judge()
    elif sys.argv[1:] and not sys.argv[1].startswith("-"):
        sys.exit(main(Path(sys.argv[1]), *map(int, sys.argv[2:4])))
    else:
        sys.exit("benchmarks.mutants: no folder: python -m benchmarks.mutants FOLDER [SEED [COUNT]]")
