"""Which parts of torch's own source a run enters: ``python -m benchmarks.reach [PART ...] -- COMMAND ...``.

    python -m benchmarks.reach tensor/_redistribute checkpoint/ -- python -m shardlaw run --profile smoke

runs the command and then prints for each Python file of torch.distributed how many of its blocks (bodies of functions, branches, loops)
some process entered. For files whose path contains a PART it also lists those that were not: a fault there cannot be noticed. The run
is slower for it, and compiled functions may refuse the notes.
"""

from __future__ import annotations

import ast
import importlib.abc
import importlib.machinery
import importlib.util
import mmap
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import CodeType, ModuleType

HERE = Path(__file__).parent
NOTES, MARK = "SHARDLAW_REACH", "__shardlaw_reach__"
FOLDERS = ("tensor", "tensor/_ops", "tensor/parallel", "tensor/experimental", "tensor/experimental/_context_parallel", "checkpoint",
           "_shard", "_shard/sharded_tensor", "_shard/sharding_spec", "_shard/sharding_spec/chunk_sharding_spec_ops", "fsdp",
           "fsdp/_fully_shard", "_composable", "pipelining", "optim")  # fmt: skip
SINGLE = ("device_mesh.py", "_mesh_layout.py", "_state_dict_utils.py", "_functional_collectives.py")
PARTS = ("body", "orelse", "finalbody")

Block = tuple[ast.AST, str, list[ast.stmt]]


def files() -> list[Path]:
    """The files that are looked at, in a fixed order. Torch is found, not imported."""
    found = importlib.util.find_spec("torch")
    assert found is not None
    assert found.origin is not None
    root = Path(found.origin).parent / "distributed"
    return sorted({*(file for folder in FOLDERS for file in (root / folder).glob("*.py")), *(root / name for name in SINGLE)})


def blocks(tree: ast.Module) -> Iterator[Block]:
    """Every list of statements but those of modules and classes, with the node and the field that it stands in."""
    for node in ast.walk(tree):
        for part in PARTS if not isinstance(node, ast.Module | ast.ClassDef) else ():
            inside = getattr(node, part, None)
            if isinstance(inside, list) and inside and isinstance(inside[0], ast.stmt):
                yield node, part, inside


def numbered() -> dict[str, int]:
    """By file: the number of its first block. The last entry, without a name, is the number of all."""
    count, first = 0, {}
    for file in files():
        first[str(file)] = count
        count += sum(1 for _ in blocks(ast.parse(file.read_text("utf-8"))))
    return {**first, "": count}


# In the processes of the run


class _Noting(importlib.machinery.SourceFileLoader):
    """Compiles a file with a note at the start of each block."""

    first = 0

    def get_code(self, fullname: str) -> CodeType:
        path = self.get_filename(fullname)
        tree = ast.parse(self.get_data(path))
        for at, (node, _, inside) in enumerate(list(blocks(tree))):
            described = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(node, clean=False) is not None
            place = min(int(described), len(inside) - 1)
            note = ast.parse(f"{MARK}[{self.first + at}] = 1").body[0]
            for part in ast.walk(note):
                ast.copy_location(part, inside[place])
            inside.insert(place, note)
        return compile(tree, path, "exec", dont_inherit=True)  # type: ignore[no-any-return]


class Finder(importlib.abc.MetaPathFinder):
    """Has the files of torch.distributed loaded with notes."""

    def __init__(self, first: dict[str, int]) -> None:
        self.first = first

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith("torch.distributed"):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.origin in self.first:
            loader = _Noting(spec.name, spec.origin)
            loader.first, spec.loader = self.first[spec.origin], loader
        return spec


def install() -> None:
    """Note from now on what this process and those that it forks enter, in the file that the environment names."""
    import builtins

    with open(os.environ[NOTES], "r+b") as notes:
        setattr(builtins, MARK, mmap.mmap(notes.fileno(), 0))
    sys.meta_path.insert(0, Finder(numbered()))


# Afterwards


def missed(file: Path, entered: bytes) -> Iterator[tuple[int, str]]:
    """The line and text of each block of a file that was not entered, though what is around it was."""
    source = file.read_text("utf-8")
    tree, lines = ast.parse(source), source.splitlines()
    held = list(blocks(tree))
    inner = {id(node) for (_, _, inside), got in zip(held, entered, strict=True) if not got for one in inside for node in ast.walk(one)}
    for (node, part, inside), got in zip(held, entered, strict=True):
        if not got and id(node) not in inner:
            named = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            text = lines[getattr(node, "lineno", inside[0].lineno) - 1].strip()
            yield inside[0].lineno, text if named or part == "body" else f"{text} ... else: {lines[inside[0].lineno - 1].strip()}"


def main(parts: list[str], command: list[str]) -> int:
    """Runs ``command`` and prints what it entered; returns its exit code."""
    first = numbered()
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder) / "notes"
        notes.write_bytes(bytes(first.pop("")))
        path = os.pathsep.join([str(HERE / "reach_site"), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
        code = subprocess.run(command, env={**os.environ, "PYTHONPATH": path, NOTES: str(notes)}, check=False).returncode
        entered = notes.read_bytes()
    for (name, start), end in zip(first.items(), [*list(first.values())[1:], len(entered)], strict=True):
        file = Path(name)
        short = file.as_posix().partition("torch/distributed/")[2]
        print(f"{short}: {sum(entered[start:end])} of {end - start}")
        if any(part in short for part in parts):
            for line, text in sorted(missed(file, entered[start:end])):
                print(f"  {line}: {text}")
    print(f"entered: {sum(entered)} of {len(entered)} blocks")
    return code


if __name__ == "__main__":
    if "--" not in sys.argv[:-1]:
        sys.exit("benchmarks.reach: no command: python -m benchmarks.reach [PART ...] -- COMMAND ...")
    split = sys.argv.index("--")
    sys.exit(main(sys.argv[1:split], sys.argv[split + 1 :]))
