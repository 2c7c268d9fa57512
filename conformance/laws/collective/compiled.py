"""Laws of torch.compile: compiled collectives, which it rewrites into functional ones, give the results that they give
uncompiled."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from shardlaw.conformance.law.act import texts
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.fields import Device, WordField
from shardlaw.conformance.law.law import Limits
from shardlaw.conformance.laws.collective import draws
from shardlaw.conformance.laws.collective.calls import prepare, results, run_call, start
from shardlaw.conformance.laws.collective.fields import GROUP_FORMS, Call, GivenAs, Group, RankDataField
from shardlaw.conformance.laws.collective.functional import (
    ARGUMENT_FIELDS,
    VARIANTS,
    draw_groups,
    draw_variant,
    features,
    functional_due,
    read_case,
    run_functional,
    start_functional,
)
from shardlaw.conformance.laws.collective.values import collective_due
from shardlaw.conformance.laws.shared.compiler import fresh_compiler


def start_on_copies(call, group):
    """A call on copies of its tensors, whose results are copied into its own."""
    name, xs, outs, options = call
    copies = name, [x.clone() for x in xs], [out.clone() for out in outs], options
    start(copies, group)
    for result, copy in zip(results(call), results(copies), strict=True):
        result.copy_(copy)


PROGRAMS = {"given": start, "copies": start_on_copies}

# the draws of each collective that is rewritten: options of draws.calls
DRAWN: dict[str, dict[str, Any]] = {
    "all_reduce": {"reduces": True, "in_place": True},
    "all_gather": {"forms": ("list",), "uneven": ("list",), "all_ranks": ("list",)},
    "all_gather_single": {"forms": ("joined", "stacked"), "all_ranks": ("stacked",)},
    "reduce_scatter": {"forms": ("list",), "uneven": ("list",), "reduces": True, "expanded": False},
    "reduce_scatter_single": {
        "forms": ("joined", "stacked"), "all_ranks": ("stacked",), "reduces": True, "expanded": False,
    },
    "all_to_all_single": {"forms": ("joined",), "uneven": ("joined",), "splits": True, "min_dims": 1},
}  # fmt: skip
SWEEP = (
    "mesh=2 x=5x3 call=all_reduce",
    "mesh=3 x=5x3 call=all_gather_single",
    "mesh=2 x=5x3 call=all_gather",
    "mesh=2 x=5x3 call=reduce_scatter_single op=max",
    "mesh=2 x=3x2 call=all_to_all_single splits=1.2/0.3",
    "mesh=2@1,2 x=5x3 call=all_reduce on=copies",
    "mesh=2 x=5x3 call=all_reduce work=async",
    "mesh=2 x=5x3 call=broadcast root=1",
    "mesh=2 x=5x3 call=all_reduce op=avg dynamic=yes",
)
FUNCTIONAL_SWEEP = (
    "mesh=2 x=5x3 call=all_reduce compiles=use",
    "mesh=2 x=5x3 dim=1 call=all_gather_autograd",
    "mesh=2 x=5x3 then=1 call=reduce_scatter_coalesced_autograd",
    "mesh=2 x=5x3 dim=1 call=reduce_scatter_autograd compiles=use",
    "mesh=2 x=3x2 splits=1.2/0.3 call=all_to_all_single given=name",
    "mesh=2 x=5x3 call=all_gather_coalesced_autograd compiles=use given=ranks",
    *(f"{variant.control} call={name}" for name, variant in VARIANTS.items()),
)
COMMON: dict[str, Any] = {
    "needs": ("all_gather", "all_reduce", "all_to_all", "broadcast", "reduce_scatter"),
    "draws": 2,
    "members": True,
    "seconds": 60.0,  # the first compilation of a process, on a busy machine
    "weight": 0.2,
}


def draw_compiled(limits: Limits) -> SearchStrategy[Case]:
    def drawn(name: str) -> SearchStrategy[Case]:
        extra = {
            "call": st.just(name),
            "on": st.sampled_from((None, "copies")),
            "dynamic": st.sampled_from((None, None, "yes")),
        }
        return draws.calls(limits, timing=False, extra=extra, **DRAWN[name])

    return st.one_of(*map(drawn, DRAWN))


@draws.collective_law(
    "compiled",
    "torch.compile docs; torch.distributed._functional_collectives, dynamo remappings",
    "mesh=2 x=5x3 call=all_reduce",
    features=lambda case: draws.features_of_call(case) | {"compiled"},
    sweep=texts(*SWEEP),
    sweeps=5,
    draw=draw_compiled,
    **COMMON,
)
def compiled(
    call: Call,
    group: Group,
    device: Device,
    on: Annotated[str, WordField(PROGRAMS)] = "given",
    dynamic: bool | None = None,
    work: Literal["async"] | None = None,
):
    """A compiled collective leaves its results where it leaves them uncompiled, and writes nothing else."""
    call = prepare(call, device)
    _, xs, outs, _ = call
    with fresh_compiler():
        found = run_call(call, group, work, torch.compile(PROGRAMS[on], backend="aot_eager", dynamic=dynamic))
    refused = isinstance(found["result"], Exception)
    if refused and all(tensor.is_contiguous() for tensor in (*xs, *outs)):
        raise found["result"]
    return {**found, "refused": torch.tensor(refused)}


compiled.due(collective_due)


def clone_each(xs):
    return [x.clone() for x in xs]


def draw_compiled_functional(limits: Limits) -> SearchStrategy[Case]:
    def drawn(name: str) -> SearchStrategy[Case]:
        dynamic = st.sampled_from((None, None, "yes"))
        compiles = st.sampled_from((None, "use"))
        cases = draw_groups(draw_variant(limits, VARIANTS[name]))
        fields = st.fixed_dictionaries({"call": st.just(name), "compiles": compiles, "dynamic": dynamic})
        return st.builds(lambda case, fields: case.with_fields(**fields), cases, fields)

    return st.one_of(*map(drawn, VARIANTS))


@draws.collective_law(
    "compiled-functional",
    "torch.compile docs; torch.distributed._functional_collectives",
    "mesh=2 x=5x3 call=all_reduce",
    features=lambda case: features(case, VARIANTS[case.get("call")]) | {"compiled"},
    sweep=texts(*FUNCTIONAL_SWEEP),
    sweeps=6,
    draw=draw_compiled_functional,
    **COMMON,
)
def compiled_functional(
    x: Annotated[Any, RankDataField(read_case, *ARGUMENT_FIELDS, "call")],
    group: Group,
    device: Device,
    compiles: Literal["use"] | None = None,
    given: GivenAs | None = None,
    dynamic: bool | None = None,
):
    """A functional collective in a compiled function has its results and gradients, and so has a compiled function of
    results that are not waited for."""
    group = group or dist.group.WORLD
    group = GROUP_FORMS[given](group, device) if given else group
    with fresh_compiler():
        if compiles:
            return run_functional(x, group, use=torch.compile(clone_each, backend="aot_eager", dynamic=dynamic))
        return run_functional(x, group, torch.compile(start_functional, backend="aot_eager", dynamic=dynamic))


compiled_functional.due(functional_due)
