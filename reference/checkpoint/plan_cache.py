"""Plans that are kept between saves: what may be left unsaid when a state is saved again, and what may not.

A save that is like the one before need not be planned anew. Each rank compares its plan with the one that it kept and says nothing where
they are *the same*: of the same items, with all that metadata will tell of them (shape, dtype, box), and of the same paths. What a
rank does not say stands as it said it last. So the outcome is always the one of a save that is planned from the beginning; a plan
that is kept although anything of this has changed describes another state than the one that is written.

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
    """What a series of saves has said so far: for every rank its last plan, and the paths of its leaves."""

    plans: list[Plan] = field(default_factory=list)
    paths: list[Paths] = field(default_factory=list)

    def update(self, plans: Sequence[Plan], paths: Sequence[Paths]) -> list[bool]:
        """Which ranks have something to say, now that their plans are these; it is kept."""
        told = [at >= len(self.plans) or self.plans[at] != plan or dict(self.paths[at]) != dict(paths[at]) for at, plan in enumerate(plans)]
        self.plans, self.paths = list(plans), list(paths)
        return told

    def outcome(self) -> tuple[list[Plan], Metadata]:
        """What is written, and how it is described: planned from what every rank said last."""
        shared = dedup(self.plans)
        return shared, describe(shared)
