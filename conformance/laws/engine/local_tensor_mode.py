"""Laws of ``LocalTensorMode``, in which one process computes the local tensors of all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from shardlaw.conformance import compat
from shardlaw.conformance.law import literal as texts
from shardlaw.conformance.law.act import fields, law
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Global
from shardlaw.conformance.law.fields import Placements, Rank, ScriptArgument, TensorField
from shardlaw.conformance.law.law import Limits
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.placement import format_placements
from shardlaw.strategies.redistributions import placement_pairs

SOURCE = "torch.distributed._local_tensor, docstring of LocalTensorMode"
# meshes; of each, one in so many pairs of placements
MESHES = (("2", 1), ("3", 1), ("2x2", 6), ("2x2@0,2,1,3", 24), ("4", 2), ("2x3", 12), ("2x2x2", 90))


class PartsField(TensorField):
    """The local tensors of ``x`` by rank."""

    def fields(self, name: str) -> tuple[str, ...]:
        return "x", "mesh"

    def read(self, case: Case, name: str) -> Global:
        return super().read(case, "x")

    def build(self, value: Global, here: Any) -> Any:
        return {rank: value.local(rank) for rank in value.mesh.ranks}

    def to_script(self, value: Global, name: str, world: int) -> ScriptArgument:
        return ScriptArgument("PARTS", tuple(texts.rank_table("PARTS", self.build(value, None))))


def sweep_simulated(limits: Limits) -> list[Case]:
    """Pairs of placements; ranks and the single process take turns in which redistributes first; extents are even and
    uneven."""

    def mesh_cases(text: str, one_in: int) -> Iterator[Case]:
        mesh, turn = Mesh.parse(text), count()
        for source, to in [*placement_pairs(mesh.ndim, 2, kinds=("R", "S", "P"), reduce_ops=("sum", "max"))][::one_in]:
            if "P" not in format_placements(to):
                shape = ("5x3", "4x6", "7x5")[next(turn) % 3]
                first = ("ranks", "process")[next(turn) // 2 % 2]
                yield fields(mesh=mesh, x=f"{shape}:{format_placements(source)}", to=to, first=first)

    cases = [case for text, one_in in MESHES for case in mesh_cases(text, one_in)]
    mixed = sorted(enumerate(cases), key=lambda pair: pair[0] * 0.618034 % 1)
    return [case for _, case in mixed if case.world <= limits.world_size]


@law(
    "engine.simulated",
    source=SOURCE,
    control="mesh=2 x=5x3:S(0) to=R first=ranks",
    features=lambda case: {"simulated"},
    sweep=sweep_simulated,
    sweeps=60,
    weight=0.3,
    tier="extended",
)
def simulated(x: DTensor, parts: Annotated[Any, PartsField()], to: Placements, first: Literal["ranks", "process"]):
    """One process that computes all ranks' local tensors redistributes as the ranks do, whichever of the two runs
    first."""
    compat.clear_redistribution_plans()
    options: dict[str, Any] = {"run_check": False, "shape": x.shape, "stride": x.stride()}
    moved_parts: dict[int, Any] = {}

    def redistribute_in_one_process():
        with compat.LocalTensorMode(frozenset(parts)):
            simulated_x = DTensor.from_local(compat.LocalTensor(parts), x.device_mesh, x.placements, **options)
            moved = simulated_x.redistribute(placements=to).to_local()
            compat.tensor_map(moved, lambda rank, part: moved_parts.setdefault(int(rank), part.clone()))

    try:
        if first == "process":
            redistribute_in_one_process()
        on_ranks = x.redistribute(placements=to).to_local()
        if first == "ranks":
            redistribute_in_one_process()
        return {"on ranks": torch.as_tensor(on_ranks), "in one process": moved_parts[dist.get_rank()]}
    finally:
        compat.clear_redistribution_plans()


@simulated.due
def _(x: Global, to, rank: Rank):
    due = x.under(to).due_local(rank)
    return {"on ranks": due, "in one process": due}
