"""All ops, by name."""

from __future__ import annotations

from strategies.op_families import FAMILIES
from strategies.op_pointwise import POINTWISE
from strategies.op_reductions import GATHERING
from strategies.op_shapes import MOVING
from strategies.ops import Op

OPS: dict[str, Op] = {op.name: op for op in (*POINTWISE, *GATHERING, *MOVING, *FAMILIES)}
