"""The reference never asks torch.distributed: shown by reading its code, and by running it without."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from shardlaw import reference

ROOT = Path(reference.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
STANDARD = {"__future__", "ast", "collections", "dataclasses", "functools", "itertools", "keyword", "math", "operator", "re", "typing"}
# randomness that hides in torch itself
RANDOM = {
    "rand",
    "randn",
    "randint",
    "randperm",
    "rand_like",
    "randn_like",
    "randint_like",
    "normal",
    "bernoulli",
    "manual_seed",
    "Generator",
}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_by_reading(path: Path) -> None:
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import"
            names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
            names = names[:1] if (node.module or "").partition(".")[0] != "torch" else names
        else:
            names = []
        for name in names:
            root, _, rest = name.partition(".")
            assert root in STANDARD or name.startswith("shardlaw.reference") or (root == "torch" and not rest), (
                f"line {node.lineno} imports {name}"
            )
        if isinstance(node, ast.Attribute):
            assert node.attr not in {"distributed", "_C", "ops", "multiprocessing", *RANDOM}, f"line {node.lineno} uses .{node.attr}"
            assert node.attr not in {"__dict__", "__class__", "__globals__", "__builtins__"}, f"line {node.lineno} uses .{node.attr}"
        if isinstance(node, ast.Name):
            assert node.id not in {"__import__", "eval", "exec", "getattr", "globals", "vars", "open"}, f"line {node.lineno} uses {node.id}"


WITHOUT = """
import sys, types
import torch

class Gone(types.ModuleType):
    def __getattr__(self, name):
        raise AssertionError(f"torch.distributed was asked for {name}")

gone = Gone("torch.distributed")
for name in [name for name in sys.modules if name == "torch.distributed" or name.startswith("torch.distributed.")]:
    sys.modules[name] = gone
sys.modules["torch.distributed"] = gone
torch.distributed = gone
try:
    torch.distributed.is_available()
except AssertionError:
    pass
else:
    sys.exit("torch.distributed still answers")

from shardlaw.reference.box import tiling_errors
from shardlaw.reference.checkpoint import state_dict
from shardlaw.reference.checkpoint.sharded_leaf import ShardedLeaf, plans_of
from shardlaw.reference.checkpoint.plan_cache import PlanCache
from shardlaw.reference.checkpoint.load_plan import cover_errors, read_items
from shardlaw.reference.checkpoint.save_plan import dedup, describe, metadata_errors, shard_items
from shardlaw.reference.layout import Layout
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.placement import parse_placements
from shardlaw.reference.simulate import assemble, distribute, redistribute
from shardlaw.reference.tensors import DTYPES, TensorSpec

worked = 0
for mesh_text in ("2", "3@2,0,1", "2x2", "2x3@5,3,1,0,2,4", "2x1x2"):
    mesh = Mesh.parse(mesh_text)
    for shape in ((), (0,), (5,), (5, 7), (3, 1, 4)):
        for one in ("R", "S(0)", "_S(0,2)", "P(sum)", "P(max)", "S(-1)"):
            for other in ("R", "S(0)", "S(-1)", "_S(-1,3)"):
                if not shape and "S(" in one + other:
                    continue
                placements = parse_placements(",".join([one, *[other] * (mesh.ndim - 1)]))
                layout = Layout(shape, mesh, placements)
                spec = TensorSpec(shape, placements, "int64")
                full = TensorSpec.parse(str(spec)).build(3)
                world = distribute(full, layout, 1)
                assert torch.equal(assemble(world, layout), full)
                redistribute(world, layout, layout.replace(parse_placements(",".join(["R"] * mesh.ndim))))
                boxes = [layout.box(coord) for coord in mesh.coords()]
                if None not in boxes:
                    assert not tiling_errors(shape, set(boxes))
                    if not layout.has_partial():
                        saved = describe(dedup([shard_items("x", layout, coord) for coord in mesh.coords()]))
                        assert metadata_errors(saved) == []
                        assert cover_errors(read_items(saved.entries["x"].chunks, boxes), boxes) == []
                mesh.slice((0,), next(mesh.coords())), str(layout), layout.empty_coords()
                worked += 1
leaves = {"a": ShardedLeaf.parse("5x6/0:2,0:6@0+1;2:5,0:6@1"), "n": ShardedLeaf.parse("value@0+1")}
cache = PlanCache()
assert cache.update(plans_of(leaves, 2), [{}, {}]) == [True, True] and metadata_errors(cache.outcome()[1]) == []
print(worked)
"""


def test_by_running_without_it() -> None:
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WITHOUT], cwd=ROOT.parent, capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) > 300
