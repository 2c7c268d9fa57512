"""The law of functions that fill a sharded tensor (initializers), or create one like another."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from hypothesis import strategies as st
from torch import nn

from shardlaw.conformance.law.act import fields
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.choices import ChoiceField
from shardlaw.conformance.law.due import Of
from shardlaw.conformance.law.fields import Rank
from shardlaw.conformance.law.law import Limits
from shardlaw.conformance.laws.sharded_tensor.act_helpers import describe, from_boxes
from shardlaw.conformance.laws.sharded_tensor.draws import DTYPES, FLOATS, acting_ranks, dtypes, sharded_law
from shardlaw.conformance.laws.sharded_tensor.fields import SOURCE, FullTensor, OwnBoxes, due_description
from shardlaw.reference.tensors import TensorSpec
from shardlaw.strategies import shapes
from shardlaw.strategies.shard_specs import specs

# distributions with a single value, so that the result is known
IN_PLACE = {
    "constant": lambda t, dtype: nn.init.constant_(t, 3.0),
    "uniform": lambda t, dtype: nn.init.uniform_(t, 3.0, 3.0),
    "normal": lambda t, dtype: nn.init.normal_(t, 3.0, 0.0),
}
LIKE = {
    "full-like": lambda t, dtype: torch.full_like(t, 3, dtype=dtype),
    "ones-like": lambda t, dtype: torch.ones_like(t, dtype=dtype),
    "zeros-like": lambda t, dtype: torch.zeros_like(t, dtype=dtype),
}
CALLS = IN_PLACE | LIKE
VALUES = {"ones-like": 1, "zeros-like": 0}
TWO_EACH = "world=2 x=5x4 spec=0:2,0:4@0;2:5,0:1@1;2:3,1:4@0;3:5,1:4@1"


@st.composite
def draw_filled(draw: st.DrawFn, limits: Limits) -> Case:
    how = draw(st.sampled_from(sorted(CALLS)))
    world, ranks, _ = draw(acting_ranks(limits, groups=False))
    shape = draw(shapes(min_dims=1))
    spec = draw(specs(shape, ranks))
    x = TensorSpec(shape, None, draw(dtypes(limits, FLOATS if how in IN_PLACE else DTYPES)))
    to = draw(dtypes(limits)) if how in LIKE else None
    return fields(world=world, x=x, spec=spec, how=how, to=to)


@sharded_law(
    "sharded_tensor.filled",
    source=f"{SOURCE}, docstrings of its initializers: fills the tensors in tensor.local_shards; torch.full_like",
    control="world=2 x=4x3 spec=chunk(0)@0,1 how=constant",
    cases=[f"{TWO_EACH} how={how}{' to=float64' if how in LIKE else ''}" for how in CALLS],
    draw=draw_filled,
    draws=10,
)
def filled(
    x: FullTensor,
    boxes: OwnBoxes,
    how: Annotated[Any, ChoiceField(CALLS)],
    rank: Rank,
    to: torch.dtype | None = None,
):
    """An initializer fills all shards of every rank; full_like and its like return a sharded tensor of the same boxes
    with the given dtype."""
    sharded = from_boxes(x, boxes, rank)
    result = how(sharded, to)
    return {**describe(result), "itself": result is sharded}


@filled.due
def _(x, boxes, how, rank, to):
    full = torch.full_like(x, VALUES.get(how, 3), dtype=to or x.dtype)
    return {**due_description(full, boxes, rank), "itself": Of(how in IN_PLACE)}
