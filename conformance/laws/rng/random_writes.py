"""The law of calls that fill a sharded tensor with random numbers in place."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Annotated, Any, Literal

import torch
from torch.distributed.tensor import DTensor

from shardlaw.conformance.law.act import law
from shardlaw.conformance.law.due import Alike, Global, Of
from shardlaw.conformance.law.fields import Device, Seed, WordField
from shardlaw.conformance.laws.rng.random_ops import features_random

# calls, each with the smallest and the largest number that it may draw
WRITES: dict[str, tuple[Callable[..., Any], float, float]] = {
    "cauchy_": (lambda x, **by: x.cauchy_(**by), float("-inf"), float("inf")),
    "exponential_": (lambda x, **by: x.exponential_(**by), 0.0, float("inf")),
    "geometric_": (lambda x, **by: x.geometric_(0.25, **by), 1.0, float("inf")),
    "log_normal_": (lambda x, **by: x.log_normal_(**by), 0.0, float("inf")),
    "normal_": (lambda x, **by: x.normal_(**by), float("-inf"), float("inf")),
    "random_": (lambda x, **by: x.random_(3, 9, **by), 3.0, 8.0),
    "uniform_": (lambda x, **by: x.uniform_(3.0, 4.0, **by), 3.0, 4.0),
}
# shards, replicas and both; ranks without elements; what is pending
TENSORS = (
    "mesh=2 x=5x3:S(0)",
    "mesh=2x2 x=4x6:R,S(1)",
    "mesh=3 x=2x4:S(0)",
    "mesh=2 x=4x3:P(sum)",
    "mesh=2x2 x=4x3:P(sum),S(0)",
)
CASES = (
    *(f"{tensor} call={call}" for call, tensor in itertools.product(WRITES, TENSORS)),
    *(f"mesh=2 x=4x3:R call={call} by=generator" for call in WRITES),
    "mesh=2x2 x=4x6:R,S(1) call=uniform_ by=generator",
)


@law(
    "random.writes",
    source="torch.Tensor.cauchy_, exponential_, geometric_, log_normal_, normal_, random_, uniform_: filled in place; "
    "generator: a pseudorandom number generator for sampling",
    control="mesh=2 x=5x3:S(0) call=cauchy_",
    features=lambda case: features_random(case) | {"in-place"},
    cases=CASES,
    refusal="allowed",
    needs=("all_gather",),
    weight=0.1,
)
def writes(
    x: DTensor,
    call: Annotated[str, WordField(WRITES)],
    seed: Seed,
    device: Device,
    by: Literal["generator"] | None = None,
):
    """A call that fills a tensor with random numbers leaves no shard as it was, nor an element out of the range that it
    draws from, keeps the placements and gives replicas equal numbers, which come from the generator that it is given,
    or is refused."""
    function, least, most = WRITES[call]
    before, placements = x.to_local().clone(), x.placements
    generator = torch.Generator(device).manual_seed(seed + 1)
    state = generator.get_state()
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        if by:
            function(x.clone())  # makes the plan: what makes it takes no generator
        out = function(x, generator=generator) if by else function(x)
    local = x.to_local()
    return {
        "generator used": not torch.equal(generator.get_state(), state),
        "itself": out is x,
        "placements": x.placements == placements,
        "kept": local.numel() > 0 and torch.equal(local, before),
        "out of range": local[(local < least) | (local > most) | local.isnan()].tolist(),
        "replicas": x.full_tensor(),
    }


@writes.due
def _(x: Global, by: str | None):
    placements, used = Of(True, "wrong-layout"), {"generator used": Of(by is not None, "wrong-value")}
    return used | {
        "itself": True,
        "placements": placements,
        "kept": False,
        "out of range": [],
        "replicas": Alike(x.mesh),
    }
