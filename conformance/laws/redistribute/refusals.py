"""Laws of refusals: invalid redistributions, mixed reductions, and ops that a context forbids to redistribute."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any, Literal

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from shardlaw.conformance import compat
from shardlaw.conformance.law.act import fields, law, texts
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Claimed, Global, Refused, caught
from shardlaw.conformance.law.fields import Placements, Rank, Word
from shardlaw.conformance.law.law import Limits
from shardlaw.conformance.laws.redistribute.placements import DOC
from shardlaw.conformance.laws.shared.derived import DenseX
from shardlaw.conformance.laws.shared.tensor_fields import PlacementsOf
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.placement import REDUCE_OPS
from shardlaw.reference.placement import Partial as RefPartial
from shardlaw.reference.placement import Placements as RefPlacements
from shardlaw.reference.placement import Shard as RefShard
from shardlaw.reference.tensors import scatter_bits

# invalid redistributions of the first mesh dim: (source, target); "-": the target is in INVALID_TARGETS
ATTEMPTS = {
    "to-partial": ("R", "P(sum)"),
    "partial-to-other": ("P(sum)", "P(max)"),
    "shard-to-partial": ("S(0)", "P(sum)"),
    "strided-to-partial": ("_S(0,2)", "P(sum)"),
    "dim-out": ("R", "S(2)"),
    "dim-far-out": ("S(0)", "S(5)"),
    "dim-far-below": ("R", "S(-3)"),
    "none": ("R", "-"),
    "partial-to-average": ("P(sum)", "P(avg)"),
    "strided-dim-out": ("S(0)", "_S(2,2)"),
    "strided-dim-below": ("R", "_S(-3,2)"),
    "none-inside": ("R", "-"),
    "text-inside": ("S(0)", "-"),
    "number-inside": ("S(1)", "-"),
    "no-placements": ("S(0)", "-"),
    "other-mesh": ("S(0)", "R"),
    "other-mesh-same": ("S(0)", "S(0)"),
}
INVALID_TARGETS: dict[str, Any] = {
    "none": None,
    "none-inside": [None],
    "text-inside": ["S(0)"],
    "number-inside": [0],
    "no-placements": [],
}
REFUSAL_MESHES = ("2", "1x2", "2x1", "3", "2@0,2", "1x2@0,2", "2x2")


def refusal_texts() -> list[str]:
    """The texts of cases that must be refused, on each mesh."""
    lines = []
    for (attempt, (source, to)), text in itertools.product(ATTEMPTS.items(), REFUSAL_MESHES):
        mesh, rest = Mesh.parse(text), ",R" * text.count("x")
        other = f" mesh.b={Mesh(mesh.shape, mesh.ranks[::-1])}" if attempt.startswith("other-mesh") else ""
        target = "" if to == "-" else f" to={to}{rest}"
        lines.append(f"mesh={text}{other} x=5x4:{source}{rest}{target} attempt={attempt}")
    for text in REFUSAL_MESHES:
        rest = ",R" * text.count("x")
        lines.append(f"mesh={text} x=5x4:R{rest} to=S(0),R{rest} attempt=many")
        if rest:
            lines.append(f"mesh={text} x=5x4:R,R to=S(0) attempt=few")
            lines.append(f"mesh={text} x=5x4:P(sum),R to=P(sum),P(max) attempt=mixed-partial")
    for text, rest in (("3", ""), ("4", ""), ("1x2", ",R")):  # shards are empty on some ranks
        lines.append(f"mesh={text} x=1x4:S(0){rest} to=S(2){rest} attempt=dim-out")
        lines.append(f"mesh={text} x=1x4:S(0){rest} to=P(sum){rest} attempt=shard-to-partial")
        lines.append(f"mesh={text} x=():R{rest} to=S(0){rest} attempt=shard-of-0-d")
    moves = (
        ("P(sum),R", "R,P(sum)"),
        ("S(0),P(sum)", "P(sum),P(sum)"),
        ("P(max),S(1)", "P(max),P(max)"),
        ("R,S(0)", "R,P(sum)"),
    )
    for (source, to), text in itertools.product(moves, ("2x2", "1x2", "2x1")):
        lines.append(f"mesh={text} x=5x4:{source} to={to} attempt=new-partial")
    lines += [
        "mesh=2 mesh.b=1x2 x=5x4:S(0) to=S(0),R attempt=another-mesh",
        "mesh=2x2 mesh.b=4 x=5x4:R,R to=R attempt=another-mesh",
        "mesh=2 mesh.b=2@0,2 x=5x4:S(0) to=S(0) attempt=another-mesh",
        "mesh=3 mesh.b=2 x=5x4:S(0) to=S(0) attempt=another-mesh",
    ]
    return lines


def is_supported(x: Global, to: RefPlacements | None, attempt: str) -> bool:
    """Whether the installed torch supports the redistribution: from 2.14 on a shard may become a contribution to a
    sum."""
    if attempt not in ("shard-to-partial", "new-partial") or compat.torch_release() < (2, 14):
        return False
    moves = zip(x.placements, to or (), strict=True)
    return all(old == new or (isinstance(old, RefShard) and new == RefPartial("sum")) for old, new in moves)


@law(
    "redistribute.refusals",
    source=f"{DOC} and its notes",
    control="mesh=2 x=5x4:R to=P(sum) attempt=to-partial",
    features=lambda case: {"few-placements"} if case.get("attempt") == "no-placements" else set(),
    sweep=texts(*refusal_texts()),
    sweeps=180,
    weight=0.4,
    members=True,
)
def refusals(x: DTensor, attempt: Word, whole: DenseX, to: Placements | None = None, mesh__b: DeviceMesh | None = None):
    """Every rank refuses redistributions to Partial, to too few or too many placements, to a missing dim and to another
    mesh, and the mesh still works."""
    refused = caught(lambda: x.redistribute(mesh__b, INVALID_TARGETS[attempt] if to is None else to))
    placements = [Shard(0) if x.ndim else Replicate(), *[Replicate()] * (x.device_mesh.ndim - 1)]
    gathered = distribute_tensor(whole, x.device_mesh, placements, src_data_rank=None).full_tensor()
    return {"refused": refused, "input": x.to_local(), "afterwards": gathered}


@refusals.due
def _(x: Global, attempt, whole, to, rank: Rank):
    refused = x.under(to) if is_supported(x, to, attempt) else Refused()
    return {"refused": refused, "input": x.local(rank), "afterwards": whole}


def sweep_mixed(limits: Limits) -> list[Case]:
    """Every two reductions on two mesh dims, except sums with averages, which are supported."""
    cases = {}
    pairs = itertools.product(itertools.permutations(REDUCE_OPS, 2), ("1x2", "2x1", "2x2", "1x2x2", "2x1x2"))
    for number, (ops, text) in enumerate(pairs):
        mesh = Mesh.parse(text)
        at = [f"P({ops[0]})", *(["R"] if mesh.ndim > 2 and number % 2 else []), f"P({ops[1]})"]
        at += ["S(0)"] * (mesh.ndim - len(at))
        dtype = ":int64" if {"band", "bor", "bxor"} & {*ops} else ""
        if {*ops} != {"sum", "avg"} and mesh.size <= limits.world_size:
            how = ("from_local", "distribute")[number % 3 == 0]
            cases[number] = fields(mesh=mesh, x=f"5x4:{','.join(at)}{dtype}", how=how)
    return [cases[number] for number in sorted(cases, key=lambda number: scatter_bits(0, number))]


@law(
    "redistribute.mixed-refusals",
    source="torch.distributed.tensor docs, DTensor.from_local, Raises; README of the package, placement restrictions",
    control="mesh=1x2 x=5x4:P(sum),P(max) how=from_local",
    sweep=sweep_mixed,
    sweeps=70,
    weight=0.2,
)
def mixed_refusals(x: torch.Tensor, mesh: DeviceMesh, at: PlacementsOf, how: Literal["from_local", "distribute"]):
    """Two different pending reductions of one tensor, except sums with averages, are refused by ValueError."""
    with compat.CommDebugMode() as traffic:
        refused = caught(lambda: (DTensor.from_local if how == "from_local" else distribute_tensor)(x, mesh, at))
    return {"refused": refused, "collectives": traffic.get_total_counts()}


@mixed_refusals.due
def _():
    return {"refused": Refused((ValueError,)), "collectives": 0}


# the options of contexts
CONTEXTS: dict[str, Any] = {
    "loose": {}, "strict": {"strict": True}, "warn": {"mode": "warn"}, "off": {"enable": False},
    "strict-off": {"enable": False, "strict": True},
}  # fmt: skip
# the placements of two operands on the last mesh dim, by what their sum needs: communication, local chunking, nothing
OPERANDS = {"communication": ("S(0)", "S(1)"), "chunking": ("S(0)", "R"), "nothing": ("S(0)", "S(0)")}
# the contexts of a call, the outermost first; contexts after a ! are entered and left before the call
WAYS = ("loose", "strict", "warn", "off", "loose,off", "loose,strict", "strict,loose", "strict,off", "loose!off",
        "strict!loose", "loose!loose", "strict,off!strict", "!strict", "loose!warn")  # fmt: skip


def refuses(way: str, w: RefPlacements | None, by: str | None) -> bool:
    """Whether the sum with ``w`` is refused in the contexts ``way``: the innermost open one decides."""
    need = next(name for name, (_, other) in OPERANDS.items() if str((w or ())[-1]) == other)
    inner = way.partition("!")[0].rpartition(",")[2]
    refusing = {"communication": ("loose", "strict"), "chunking": ("strict",), "nothing": ()}
    return by is None and inner in refusing[need]


def sweep_explicit(limits: Limits) -> list[Case]:
    cases = [fields(mesh="2", x="6x4:S(0)", w="6x4:S(1)", way="strict-off")]
    for text, by, way, need in itertools.product(("2", "2x2", "3", "1x2"), (None, "hand"), WAYS, OPERANDS):
        mesh = Mesh.parse(text)
        rest = "R," * (mesh.ndim - 1)
        x, w = (f"6x4:{rest}{at}" for at in OPERANDS[need])
        if by is None or need != "nothing":
            cases.append(fields(mesh=mesh, x=x, w=w, way=way, by=by))
    return [case for case in cases if case.world <= limits.world_size]


def features_explicit(case: Case) -> set[str]:
    refused = refuses(case.get("way"), case.tensor("w").placements, case.get("by") if "by" in case else None)
    return {"explicit-context", *(["must-refuse"] if refused else [])}


@law(
    "redistribute.explicit",
    source="torch.distributed.tensor._utils, docstring of ExplicitRedistributionContext",
    control="mesh=2 x=6x4:S(0) w=6x4:S(1) way=loose",
    features=features_explicit,
    sweep=sweep_explicit,
    sweeps=57,
    needs=("all_gather",),
    weight=0.3,
    tier="extended",
)
def explicit(x: DTensor, w: DTensor, way: Word, by: Literal["hand"] | None = None):
    """Within the innermost ExplicitRedistributionContext, an op that would redistribute its operands is refused."""
    open_contexts, _, left_contexts = way.partition("!")
    with contextlib.ExitStack() as stack:
        for name in filter(None, open_contexts.split(",")):
            stack.enter_context(compat.ExplicitRedistributionContext(**CONTEXTS[name]))
        for name in filter(None, left_contexts.split(",")):
            with compat.ExplicitRedistributionContext(**CONTEXTS[name]):
                pass
        if by == "hand":
            w = w.redistribute(placements=x.placements)
        return caught(lambda: x + w)


@explicit.due
def _(x: Global, w: Global, way, by):
    return Refused((RuntimeError,)) if refuses(way, w.placements, by) else Claimed(x.full + w.full, x.mesh)
