"""Steps of traces, on two ranks: an op, a redistribution, right and wrong ones."""

from __future__ import annotations

import torch

from shardlaw.conformance.law.evidence import Step, TracedTensor

FULL = torch.arange(4.0)
RULE = "some_strategy, torch/distributed/tensor/_ops/_some_ops.py:1"
PLANNER = "DTensorRedistributePlanner.generate_greedy_transform_infos, torch/distributed/tensor/_redistribute.py:2"
METHOD = "Shard._to_replicate_tensor, torch/distributed/tensor/placement_types.py:3"


def piece(local: torch.Tensor, placements: str = "S(0)") -> TracedTensor:
    return TracedTensor((4,), "2", placements, local)


def op(name: str, given: torch.Tensor, gave: torch.Tensor) -> Step:
    return Step("op", name, ((piece(given),), {}), (piece(gave), []), RULE, completed=True, rule_asked=True)


def move(given: torch.Tensor, gave: torch.Tensor, within: int | None = None) -> Step:
    return Step("move", "redistribute", piece(given), piece(gave, "R"), PLANNER, [METHOD], within, completed=True)


def ranks(*steps: tuple[Step, Step]) -> dict[int, tuple[Step, ...]]:
    return {rank: tuple(both[rank] for both in steps) for rank in range(2)}


def halves(full: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return full[:2], full[2:]


def right(name: str = "aten.neg.default") -> tuple[Step, Step]:
    return tuple(op(name, local, -local) for local in halves(FULL))  # type: ignore[return-value]


def wrong() -> tuple[Step, Step]:
    return tuple(op("aten.neg.default", local, local + rank) for rank, local in enumerate(halves(FULL)))  # type: ignore[return-value]
