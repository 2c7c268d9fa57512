"""Plans that are cached from one save to the next.

A save that is like the one before need not be planned again. Each rank compares its plan with its cached one, and sends it only where they
differ: in an item, in anything that metadata has of it (shape, dtype, box), or in the paths of the leaves. For a rank that sends nothing
the coordinator uses its last plan. So the result always equals that of a save without a cache; an implementation that uses a cached plan
although any of this has changed writes metadata of another state.

Source: the documentation of ``torch.distributed.checkpoint`` (``DefaultSavePlanner``, ``enable_plan_caching``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shardlaw.reference.checkpoint.save_plan import Metadata, Plan, dedup, describe
from shardlaw.reference.checkpoint.state_dict import Path

Paths = Mapping[str, Path]


@dataclass
class PlanCache:
    """The last plan of every rank in a series of saves, and the paths of its leaves."""

    plans: list[Plan] = field(default_factory=list)
    paths: list[Paths] = field(default_factory=list)

    def update(self, plans: Sequence[Plan], paths: Sequence[Paths]) -> list[bool]:
        """Store the plans of a save. Returns which ranks must send theirs."""
        changed = [
            at >= len(self.plans) or self.plans[at] != plan or dict(self.paths[at]) != dict(paths[at]) for at, plan in enumerate(plans)
        ]
        self.plans, self.paths = list(plans), list(paths)
        return changed

    def outcome(self) -> tuple[list[Plan], Metadata]:
        """The plans that are written, and their metadata, from the last plans of all ranks."""
        shared = dedup(self.plans)
        return shared, describe(shared)
