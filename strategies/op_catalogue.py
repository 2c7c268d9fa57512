"""All ops, by name."""

from __future__ import annotations

from shardlaw.strategies.op_families import FAMILIES
from shardlaw.strategies.op_pointwise import POINTWISE
from shardlaw.strategies.op_reductions import GATHERING
from shardlaw.strategies.op_shapes import MOVING
from shardlaw.strategies.ops import Op

OPS: dict[str, Op] = {op.name: op for op in (*POINTWISE, *GATHERING, *MOVING, *FAMILIES)}
