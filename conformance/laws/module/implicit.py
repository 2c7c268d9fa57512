"""The law of plain tensors that count as replicas beside DTensors, within the context that says so and nowhere else."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from hypothesis import strategies as st
from torch.distributed.tensor.experimental import implicit_replication

from conformance.case import Case
from conformance.law import Law, Limits
from conformance.laws import draws, scripts
from conformance.laws.given import given
from conformance.laws.module.locally import DOC, NEEDS
from conformance.report.reproducer import Script
from reference.tensors import TensorSpec
from strategies import shapes
from strategies.placements import placements

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from conformance.here import Here


# an expression in the DTensor x and the plain tensor w
BESIDE: dict[str, tuple[str, Callable[[Any, Any], Any]]] = {
    "add": ("x + w", lambda x, w: x + w),
    "from-the-left": ("w - x", lambda x, w: w - x),
    "mul": ("torch.mul(x, w)", torch.mul),
    "maximum": ("torch.maximum(x, w)", torch.maximum),
    "where": ("torch.where(w > 0, x, w)", lambda x, w: torch.where(w > 0, x, w)),
    "matmul": ("x @ w.t()", lambda x, w: x @ w.t()),
    "equal": ("x == w", lambda x, w: x == w),
    "cat": ("torch.cat([x, w])", lambda x, w: torch.cat([x, w])),
    "in-place": ("x.add_(w)", lambda x, w: x.add_(w)),
    "lerp": ("torch.lerp(x, w, 0.5)", lambda x, w: torch.lerp(x, w, 0.5)),
}


def check_implicit(case: Case, here: Here) -> None:
    """Within the context the plain operand counts as a replica; after it, also after an error, it is refused as before."""
    x, run = given(case), BESIDE[case.get("call")][1]
    w = case.tensor("w").build(case.seed)
    live = x.dtensor(here)
    way = case.get("way", "once")
    want = run(x.full.clone(), w)
    if way == "raised":
        with contextlib.suppress(KeyError), implicit_replication():
            raise KeyError("a body that raises")
    else:
        with implicit_replication():
            if way == "nested":
                with implicit_replication():
                    pass
            got = run(live, here.tensor(w))
        here.same_dtensor(got, want, case.get("call"), exact=False, mesh=x.layout.mesh)  # a replica beside a pending sum is divided
        if case.get("call") == "in-place":
            here.same_dtensor(live, want, "operand", mesh=x.layout.mesh, placements=x.layout.placements)
    plain = here.tensor(torch.ones(2, *w.shape))  # a tensor of one element is taken as a number
    here.refused(lambda: live + plain, "afterwards", "a plain operand after the context", errors=(RuntimeError,))


def draw_implicit(limits: Limits) -> SearchStrategy[Case]:
    on = draws.meshes(limits, outside=False, tables=False, least=2)

    @st.composite
    def case(draw: st.DrawFn) -> Case:
        mesh, call = draw(st.sampled_from(on)), draw(st.sampled_from(sorted(BESIDE)))
        # what is written into may be refused where a dim of size 1 would be broadcast
        shape = draw(shapes(min_dims=2, max_dims=2, min_size=2 if call == "in-place" else 1))
        kinds = ("R", "S") if call == "in-place" else ("R", "S", "S", "P")
        at = draw(placements(mesh, 2, kinds=kinds))
        other = draw(st.sampled_from([shape, shape, (1, shape[1])])) if call not in ("cat", "lerp") else shape
        x, w = TensorSpec(shape, at, "float64", "small"), TensorSpec(other, None, "float64", "small")
        return Case.of("module.implicit-replication", mesh=mesh, x=x, w=w, call=call, seed=draw(draws.seeds()))

    def written(case: Case) -> bool:
        """What is written into may be refused where a rank holds nothing of it."""
        return case.get("call") != "in-place" or not given(case).layout.empty_coords()

    return case().filter(written)


def sweep_implicit(limits: Limits) -> list[Case]:
    x, w = "4x3:S(0):float64:small", "4x3:-:float64:small"
    return [Case.of("module.implicit-replication", mesh="2", x=x, w=w, call="add", way=way) for way in ("raised", "nested")]


def features_implicit(case: Case) -> set[str]:
    return {"implicit-replication", "plain-operand", f"way:{case.get('way', 'once')}"}


def script_implicit(case: Case) -> Script:
    x, w = given(case), case.tensor("w").build(case.seed)
    call, run = BESIDE[case.get("call")]
    constants, body = scripts.source(x, case.world)
    want = run(x.full.clone(), w)
    body += [f"w = {scripts.tensor(w)}", "with implicit_replication():"]
    if case.get("way", "once") == "nested":
        body += ["    with implicit_replication():", "        pass"]
    body += [f"    got = {call}", f"return {scripts.tensor(want)}, got.full_tensor()"]
    made = scripts.script(body, world=case.world, constants=constants)
    return Script(made.stages, (*made.imports, "from torch.distributed.tensor.experimental import implicit_replication"), made.constants)


LAWS = (
    Law(
        id="module.implicit-replication",
        clause="Within implicit_replication a plain tensor beside a sharded one counts as a replica; when it is over, it is refused again.",
        source=f"{DOC}, implicit_replication",
        check=check_implicit,
        script=script_implicit,
        features=features_implicit,
        control="module.implicit-replication mesh=2 x=4x3:S(0):float64:small w=4x3:-:float64:small call=add",
        planted="plain_operands_count_as_contributions",
        draw=draw_implicit,
        draws=12,
        sweep=sweep_implicit,
        sweeps=2,
        needs=NEEDS,
        weight=0.2,
    ),
)
