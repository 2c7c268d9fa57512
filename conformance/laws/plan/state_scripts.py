"""Bodies of reproducers for the plan laws on states: leaves and their paths, and plans that are kept."""

from __future__ import annotations

import re

from conformance.case import Case
from conformance.laws.plan.scripts import attempt, script, tensor_lines, tree
from conformance.report.reproducer import Script
from reference.checkpoint.state_dict import FlattenError, flatten, parse_state, slots, unflatten
from reference.tensors import TensorSpec


def flattened(case: Case) -> Script:
    state = parse_state(case.get("state"))
    made = [f"{name} = torch.full((2,), {at}.0)" for at, name in enumerate(slots(state), 1)]
    literal = tree(state).replace("(seat)", "")
    try:
        leaves = flatten(state)
    except FlattenError:
        return script(attempt([*made, f"state = {literal}"], "flatten_state_dict(state)"))
    paths = {name: path for name, (path, _) in leaves.items()}
    back = tree(unflatten(leaves)).replace("(seat)", "")
    lines = [
        f"flat, paths = flatten_state_dict({literal})",
        f"due = {paths}",
        f"whole = repr(unflatten_state_dict(flat, paths)) == repr({back})",
        "return (due, True), (paths, whole)",
    ]
    return script([*made, *lines])


def kept(case: Case) -> Script:
    """A series of saves, each planned with caching on, and planned anew."""
    from conformance.laws.plan.state import tree_of

    mesh = case.mesh()
    specs = {name: case.tensor(name) for name in ("x", "a") if name in case}
    used: dict[str, TensorSpec] = {}
    trees: dict[str, str] = {}
    for which in sorted(set(case.get("order"))):
        state, changed = tree_of(case, which)
        used |= {f"{name}_{which}": changed[name] for name in specs if name in slots(state)}
        trees[which] = re.sub(r"\b([xa])\(seat\)", rf"\1_{which}(seat)", tree(state))
    count = max(mesh.ranks) + 1
    body = [
        *tensor_lines(used, mesh),
        f"kinds = [type(f'Seat{{seat}}', (DefaultSavePlanner,), {{}}) for seat in range({count})]",
        "def save(keep, make):",
        "    planners = [kind(enable_plan_caching=keep) for kind in kinds]",
        "    for seat, planner in enumerate(planners):",
        "        planner.set_up_planner(make(seat), is_coordinator=seat == 0)",
        "    sent, metadata = planners[0].create_global_plan([planner.create_local_plan() for planner in planners])",
        "    plans = [planner.finish_plan(plan).items for planner, plan in zip(planners, sent)]",
        "    return repr((plans, metadata.state_dict_metadata, metadata.planner_data))",
        *(f"{which} = lambda seat: {text}" for which, text in trees.items()),
        f"got = [save(True, state) for state in ({', '.join(case.get('order'))})]",
        f"return [save(False, state) for state in ({', '.join(case.get('order'))})], got",
    ]
    return script(body)
