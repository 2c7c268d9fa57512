"""Programs of ops that have gradients, on two leaves."""

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

# ops without a gradient, or whose gradient is undefined for equal elements or zeros
NO_SETTLED_GRADIENT = re.compile(r"^(sign|floor|to|abs|amax|amin|maximum|sqrt|linalg)\b|torch\.")


def build_gradient_program(choose: Choose, scenario: Scenario) -> Backward:
    """A chain of two to four calls on a tensor ``a``, some of which take a second leaf ``b`` of the same shape or of its last dim.

    ``a`` has the kinds of placements of the scenario. Where it has a pending reduction other than a sum or an average, whose gradient is
    undefined, only ``b`` is a leaf.
    """
    mesh, sizes = scenario.mesh, choose_sizes(choose, scenario, ("m", "n"))
    x, a, b = Value("a", ("m", "n")), Value("a", ("m", "n")), Value("b", choose((("m", "n"), ("n",))))
    unsettled = bool({*scenario.kinds} & {"max", "min", "product"})
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
        lies = choose_placements(choose, scenario, shape, kinds=scenario.kinds if value is a else ())
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
    """A chain for each of many scenarios."""
    return [
        build_gradient_program(choose_by_number(at), scenario)
        for at, scenario in enumerate(enumerate_scenarios(world_size, SCENARIO_COUNT))
    ]
