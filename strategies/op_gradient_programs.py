"""Chains of ops that have gradients, over two leaves."""

from __future__ import annotations

import re
from functools import cache

from hypothesis.strategies import SearchStrategy

from shardlaw.reference.tensors import TensorSpec
from shardlaw.strategies.op_gradients import Backward, incoming_options
from shardlaw.strategies.op_operands import (
    SCENARIO_COUNT,
    Choose,
    Scenario,
    choose_by_number,
    choose_placements,
    choose_sizes,
    enumerate_scenarios,
    strategy_of,
)
from shardlaw.strategies.op_programs import NAMES, Value, join_calls, links
from shardlaw.strategies.ops import Sample

# ops without a gradient, or whose gradient is not settled where elements are equal or zero
NO_SETTLED_GRADIENT = re.compile(r"^(sign|floor|to|abs|amax|amin|maximum|sqrt|linalg)\b|torch\.")


def build_gradient_program(choose: Choose, ground: Scenario) -> Backward:
    """A chain of two to four calls on a tensor ``a``, some of which take a second leaf ``b`` of the same shape or of its last dim.

    What lies as the ground says is ``a``; where it waits for a reduction that is no sum or average, of which nobody says what its gradient
    is, it has none, and its value counts in that of ``b``.
    """
    mesh, sizes = ground.mesh, choose_sizes(choose, ground, ("m", "n"))
    x, a, b = Value("a", ("m", "n")), Value("a", ("m", "n")), Value("b", choose((("m", "n"), ("n",))))
    unsettled = bool({*ground.kinds} & {"max", "min", "product"})
    calls: list[str] = []
    for at in range(choose((2, 3, 4))):
        options = []
        other = b if unsettled and not at else choose((b, a))
        for link in links(x, other, mesh.ndim):
            without = NO_SETTLED_GRADIENT.search(link.call) or (len(other.dims) < 2 and link.call.startswith("mm"))
            if link.kind == "float" and not without and ("{a}" in link.call or at or not unsettled):
                options.append(link)
        link = choose(options)
        calls.append(link.call.replace("{x}", x.name).replace("{a}", other.name))
        x = Value(NAMES[at] if at < len(NAMES) else "", link.dims, link.kind, link.exact)
    steps, specs = join_calls(calls), []
    for value in (a, b):
        shape = tuple(sizes[dim] for dim in value.dims)
        lies = choose_placements(choose, ground, shape, kinds=ground.kinds if value is a else ())
        specs.append((value.name, TensorSpec(shape, lies, "float32", "small")))
    used = tuple((name, spec) for name, spec in specs if re.search(rf"\b{name}\b", steps))
    leaves = tuple(name for name, _ in used if name != "a" or not unsettled)
    return Backward(Sample(mesh, used, steps), leaves, choose(incoming_options(mesh)))


def gradient_programs(*, world_size: int = 4) -> SearchStrategy[Backward]:
    """Chains of calls that have gradients.

    Shrinks to two calls on 2x2 tensors on the mesh ``2``.
    """
    return strategy_of(build_gradient_program, world_size)


@cache
def enumerate_gradient_programs(world_size: int) -> list[Backward]:
    """A chain on each of many grounds."""
    return [
        build_gradient_program(choose_by_number(at), ground) for at, ground in enumerate(enumerate_scenarios(world_size, SCENARIO_COUNT))
    ]
