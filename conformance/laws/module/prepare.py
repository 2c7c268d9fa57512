"""Laws of the styles that prepare what goes into a module and what comes out of it, and of what no style takes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from conformance.case import Case
from conformance.law import Law, Limits
from conformance.laws import draws, scripts
from conformance.laws.module import plans as module_plans
from conformance.laws.module.models import NEEDS
from conformance.laws.module.plans import Style, style
from conformance.laws.module.styles import DOC, lines
from conformance.report.reproducer import Script
from reference import simulate
from reference.layout import Layout
from reference.mesh import Mesh
from reference.notation import format_shape
from reference.placement import Partial, Placement
from reference.placement import Replicate as R
from reference.placement import Shard as S
from strategies.modules import eighths

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from conformance.here import Here


class Probe(nn.Module):
    """A module that gives back what it is given, and keeps it."""

    met: tuple[Any, ...] = ()

    def forward(self, first: Any, second: Any = None, *, extra: Any = None) -> Any:
        self.met = (first, second, extra)
        return first if second is None else (first, second)


def asked(case: Case) -> Style:
    """The style of a case: ``from`` and ``to`` of the first tensor, ``beside`` for a second one, ``extra`` for one by name."""
    first, last = case.placements("from")[0], case.placements("to")[0]
    ends = (("input", "input"), ("output", "output"))
    side = case.get("style")
    both: tuple[Any, Any] = (first, last)
    if case.get("beside", "none") != "none":
        second: Any = (None, None) if case.get("beside") == "plain" else (first, last)
        both = ((first, second[0]), (last, second[1]))
    options: dict[str, Any] = {}
    for name, _ in ends:
        if side in (name, "both") and case.get("extra", "") != "alone":
            options |= {f"{name}_layouts": both[0], f"desired_{name}_layouts": both[1]}
    if side in ("input", "both") and "extra" in case:
        options |= {"input_kwarg_layouts": {"extra": first}, "desired_input_kwarg_layouts": {"extra": last}}
    if side == "both":  # what comes out came in as it was to be
        out = both[1]
        options |= {"output_layouts": out, "desired_output_layouts": both[0] if not isinstance(first, Partial) else out}
        options |= {"use_local_input": False, "use_local_output": case.get("local") == "yes"}
    else:
        options["use_local_output"] = case.get("local") == "yes"
    return style({"input": "PrepareModuleInput", "output": "PrepareModuleOutput", "both": "PrepareModuleInputOutput"}[side], **options)


def whole(case: Case, at: int = 0) -> torch.Tensor:
    return eighths(case.shape("shape"), case.seed + 3 * at)


def held(full: torch.Tensor, at: Placement, mesh: Mesh, rank: int) -> torch.Tensor:
    """What a rank holds of a tensor; of a pending sum its own contribution."""
    layout = Layout(tuple(full.shape), mesh, (at,))
    coord = mesh.coord(rank)
    assert coord is not None
    return (simulate.distribute(full, layout, 3)[coord] if layout.has_partial() else simulate.take(full, layout, coord)).contiguous()


def given(case: Case, here: Here, at: int) -> Any:
    """The ``at``-th tensor as this rank gives it."""
    full, mesh, first = whole(case, at), case.mesh(), case.placements("from")[0]
    local = here.tensor(held(full, first, mesh, here.rank))
    if "wrapped" in case:
        return DTensor.from_local(local, here.mesh(mesh), here.placements((first,)), shape=full.shape, stride=full.stride())
    return local


def judge(here: Here, case: Case, got: Any, full: torch.Tensor, at: Placement, local: bool, check: str) -> None:
    """A prepared tensor lies as desired, in a DTensor or out of it."""
    if local and here.require(not isinstance(got, DTensor), "wrong-metadata", check, "it is a DTensor, must be a local tensor"):
        here.same(got, held(full, at, case.mesh(), here.rank), check)
    elif not local:
        here.same_dtensor(got, full, check, mesh=case.mesh(), placements=(at,))


def check_prepare(case: Case, here: Here) -> None:
    """The module meets its inputs as desired, and its outputs leave as desired; what has no layout passes as it is."""
    side, beside, one = case.get("style"), case.get("beside", "none"), asked(case)
    local, first, last = case.get("local") == "yes", case.placements("from")[0], case.placements("to")[0]
    probe = Probe()
    model = nn.ModuleDict({"probe": probe})
    parallelize_module(model, here.mesh(case.mesh()), {"probe": one.make()})
    plain = here.tensor(torch.ones(3))
    inputs = [given(case, here, 0)] + ([given(case, here, 1)] if beside == "alike" else [plain] if beside == "plain" else [])
    extra = {"extra": given(case, here, 2)} if "extra" in case else {}
    out = probe(*inputs, **extra)
    outs = out if isinstance(out, tuple) else (out,)
    here.require(len(outs) == len(inputs), "wrong-metadata", "outputs", "another number of outputs", len(inputs), len(outs))
    if side in ("input", "both"):
        inside, alone = local and side == "input", case.get("extra", "") == "alone"
        if alone:
            passed = all(got is one for got, one in zip(probe.met, inputs, strict=False))
            here.require(passed, "wrong-value", "passed", "a tensor by position, of which nothing is said, did not pass as it is")
        else:
            judge(here, case, probe.met[0], whole(case), last, inside, "first")
        if beside == "alike" and not alone:
            judge(here, case, probe.met[1], whole(case, 1), last, inside, "second")
        if extra:
            judge(here, case, probe.met[2], whole(case, 2), last, inside, "by-name")
    if side in ("output", "both"):
        after = last if side == "output" or isinstance(first, Partial) else first
        judge(here, case, outs[0], whole(case), after, local, "output")
        if beside == "alike":
            judge(here, case, outs[-1], whole(case, 1), after, local, "second-output")
    if beside == "plain":
        here.require(probe.met[1] is plain and outs[-1] is plain, "wrong-value", "plain", "a tensor without a layout did not pass as it is")


def features_prepare(case: Case) -> set[str]:
    extent = {at.dim for at in (*case.placements("from"), *case.placements("to")) if isinstance(at, S)}
    uneven = any(case.shape("shape")[dim] % case.mesh().size for dim in extent)
    pending = {"partial:sum"} if isinstance(case.placements("from")[0], Partial) else set()
    return {"module", f"style:{asked(case).name}"} | ({"uneven"} if uneven else set()) | pending


def script_prepare(case: Case) -> Script:
    """The first tensor, as the module meets it and as it leaves."""
    one, mesh, full = asked(case), case.mesh(), whole(case)
    first, last = case.placements("from")[0], case.placements("to")[0]
    after = last if case.get("style") != "both" or isinstance(first, Partial) else first
    alone = case.get("extra", "") == "alone"
    beside, at = case.get("beside", "none"), scripts.placements((first,))
    more = {"alike": ", x", "plain": ", torch.ones(3)", "none": ""}[beside]
    body = [
        f"mesh, x = {scripts.mesh(mesh)}, X[rank]",
        *([f"x = DTensor.from_local(x, mesh, {at}, shape={tuple(full.shape)}, stride={full.stride()})"] if "wrapped" in case else []),
        "met, net = [], torch.nn.Module()",
        "def forward(a, b=None, *, extra=None):",
        f"    met.extend([{'' if alone else 'a'}{'' if alone or 'extra' not in case else ', '}{'extra' if 'extra' in case else ''}])",
        "    return a if b is None else (a, b)",
        "net.forward = forward",
        f"parallelize_module(net, mesh, {one})",
        f"out = net(x{more}{', extra=x' if 'extra' in case else ''})",
        "out = out[0] if isinstance(out, tuple) else out",
        "local = lambda t: t.to_local() if isinstance(t, DTensor) else t",
        f"return [{'MET' if case.get('style') != 'output' else 'X'}[rank]] * len(met) + [WANT[rank]], [*map(local, met), local(out)]",
    ]
    out = first if alone else after if case.get("style") != "input" else last
    constants = scripts.tensors("X", {rank: held(full, first, mesh, rank) for rank in mesh.ranks})
    constants += scripts.tensors("MET", {rank: held(full, last, mesh, rank) for rank in mesh.ranks})
    constants += scripts.tensors("WANT", {rank: held(full, out, mesh, rank) for rank in mesh.ranks})
    told = scripts.script(body, world=case.world, constants=constants)
    return Script(told.stages, (*told.imports, module_plans.imports([one])), told.constants)


def draw_prepare(side: str) -> Callable[[Limits], SearchStrategy[Case]]:
    def strategy(limits: Limits) -> SearchStrategy[Case]:
        on = lines(limits)

        @st.composite
        def case(draw: st.DrawFn) -> Case:
            mesh, first = draw(st.sampled_from(on)), draw(st.sampled_from([S(0), S(1), R(), Partial("sum")]))
            last = draw(st.sampled_from([R(), S(0), S(1)]))
            wrapped = draw(st.sampled_from([None, 1]))
            shape = [draw(st.sampled_from([3, 5, 4, 6, 2])) for _ in range(2)]
            if not wrapped and isinstance(first, S):
                shape[first.dim] = mesh.size * draw(st.sampled_from([1, 2]))
            extra = draw(st.sampled_from([None, 1, "alone"] if side == "input" else [None, 1])) if side != "output" else None
            fields: dict[str, Any] = {"shape": format_shape(tuple(shape)), "from_": first, "to": last, "wrapped": wrapped}
            fields |= {"local": draw(st.sampled_from(["no", "yes"])), "beside": draw(st.sampled_from([None, "plain", "alike"]))}
            return Case.of(f"module.prepare[{side}]", mesh=mesh, style=side, **fields, extra=extra, seed=draw(draws.seeds()))

        return case()

    return strategy


def _linear() -> nn.Linear:
    return nn.Linear(6, 6)


# what is refused: the style, the module as text, what is done with it, and the error
REFUSED: dict[str, tuple[Style | str, str, str, type[Exception]]] = {
    "colwise-norm": (style("ColwiseParallel"), "torch.nn.LayerNorm(6)", "", NotImplementedError),
    "rowwise-norm": (style("RowwiseParallel"), "torch.nn.LayerNorm(6)", "", NotImplementedError),
    "colwise-model": (style("ColwiseParallel"), "torch.nn.Sequential(torch.nn.Linear(6, 6))", "", NotImplementedError),
    "rowwise-model": (style("RowwiseParallel"), "torch.nn.Sequential(torch.nn.Linear(6, 6))", "", NotImplementedError),
    "sequence-of-list": (style("SequenceParallel"), "torch.nn.LayerNorm(6)", "([1.0],)", ValueError),
    "no-desired-input": (style("PrepareModuleInput", input_layouts=R()), "torch.nn.ReLU()", "", AssertionError),
    "fewer-desired-inputs": (
        style("PrepareModuleInput", input_layouts=(R(), R()), desired_input_layouts=(R(),)), "torch.nn.ReLU()", "", AssertionError
    ),
    "fewer-desired-outputs": (
        style("PrepareModuleOutput", output_layouts=(R(), R()), desired_output_layouts=(R(),)), "torch.nn.ReLU()", "", AssertionError
    ),
    "fewer-desired-by-name": (
        style("PrepareModuleInput", input_kwarg_layouts={"a": R()}, desired_input_kwarg_layouts={}), "torch.nn.ReLU()", "", AssertionError
    ),
    "prepare-list": (
        style("PrepareModuleInput", input_layouts=R(), desired_input_layouts=R()), "torch.nn.ReLU()", "([1.0],)", AssertionError
    ),
    "more-layouts-than-inputs": (
        style("PrepareModuleInput", input_layouts=(R(), R()), desired_input_layouts=(R(), R())), "torch.nn.ReLU()", "(torch.ones(2),)",
        ValueError,
    ),
    "more-layouts-than-outputs": (
        style("PrepareModuleOutput", output_layouts=(R(), R()), desired_output_layouts=(R(), R())), "torch.nn.ReLU()", "(torch.ones(2),)",
        ValueError,
    ),
    "no-style": ("3", "torch.nn.Linear(6, 6)", "", TypeError),
    "columns-alone": (style("ColwiseParallel"), "COLUMNS", "(torch.ones(5, 6),)", RuntimeError),
}  # fmt: skip
MADE: dict[str, Callable[[], nn.Module]] = {
    "torch.nn.LayerNorm(6)": lambda: nn.LayerNorm(6),
    "torch.nn.Sequential(torch.nn.Linear(6, 6))": lambda: nn.Sequential(_linear()),
    "torch.nn.ReLU()": nn.ReLU,
    "torch.nn.Linear(6, 6)": _linear,
    "COLUMNS": lambda: nn.Sequential(nn.Linear(6, 12), nn.Linear(12, 3)),
}
INPUTS: dict[str, tuple[Any, ...]] = {
    "": (),
    "([1.0],)": ([1.0],),
    "(torch.ones(2),)": (torch.ones(2),),
    "(torch.ones(5, 6),)": (torch.ones(5, 6),),
}


def check_refusals(case: Case, here: Here) -> None:
    """A style on a module that it does not take, layouts that do not pair up, and shards where the whole is wanted are refused."""
    attempt, live = case.get("attempt"), here.mesh(case.mesh())
    if attempt in WARNED:
        check_warned(case, here)
        return
    one, text, inputs, error = REFUSED[attempt]

    def tried() -> object:
        plan: Any = one.make() if isinstance(one, Style) else 3
        module = MADE[text]()
        module = parallelize_module(module.to(here.device), live, {"0": plan} if text == "COLUMNS" else plan)
        given = [value.to(here.device) if isinstance(value, torch.Tensor) else value for value in INPUTS[inputs]]
        return module(*given) if inputs else module

    here.refused(tried, attempt, f"{one} on {text}{inputs}", errors=(error,))


WARNED = ("unknown-name", "no-plan")


def check_warned(case: Case, here: Here) -> None:
    """A name that no module has, and no plan at all, change nothing, with a warning."""
    net: nn.Module = nn.Sequential(_linear()).to(here.device)
    plan = {"1": style("ColwiseParallel").make()} if case.get("attempt") == "unknown-name" else None
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        got = parallelize_module(net, here.mesh(case.mesh()), plan)
    here.require(bool(warned), "wrong-error", "warning", "a plan that does nothing must be warned of, was accepted without a word")
    plain = got is net and not any(isinstance(parameter, DTensor) for parameter in net.parameters())
    here.require(plain, "wrong-value", "unchanged", "a plan that names nothing changed the module")


def script_refusals(case: Case) -> Script:
    attempt = case.get("attempt")
    body = [f"mesh = {scripts.mesh(case.mesh())}"]
    if attempt in WARNED:
        plan = '{"1": ColwiseParallel()}' if attempt == "unknown-name" else "None"
        body += ["net = torch.nn.Sequential(torch.nn.Linear(6, 6))", "with warnings.catch_warnings(record=True) as warned:"]
        body += ['    warnings.simplefilter("always")', f"    parallelize_module(net, mesh, {plan})"]
        made = scripts.script([*body, "return True, bool(warned)"], world=case.world)
        return Script(made.stages, (*made.imports, "import warnings", module_plans.imports([style("ColwiseParallel")])), made.constants)
    one, text, inputs, error = REFUSED[attempt]
    module = "torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.Linear(12, 3))" if text == "COLUMNS" else text
    plan = f'{{"0": {one}}}' if text == "COLUMNS" else f"{one}"
    call = f"(*{inputs})" if inputs else ""
    made = scripts.refused(case, body, f"parallelize_module({module}, mesh, {plan}){call}", errors=error.__name__)
    named = [one] if isinstance(one, Style) else []
    return Script(made.stages, (*made.imports, module_plans.imports(named)), made.constants)


def sweep_refusals(limits: Limits) -> list[Case]:
    cases = [Case.of("module.refusals", mesh="2", attempt=attempt) for attempt in (*REFUSED, *WARNED)]
    return [case for case in cases if case.world <= limits.world_size]


CONTROLS = {
    "input": "module.prepare[input] mesh=2 style=input shape=4x3 from=S(0) to=R local=no beside=plain extra=1",
    "output": "module.prepare[output] mesh=2 style=output shape=4x3 from=R to=S(0) local=yes",
    "both": "module.prepare[both] mesh=2 style=both shape=4x3 from=S(0) to=R local=yes",
}
PLANTED = {"input": "inputs_by_name_stay", "output": "prepared_output_stays", "both": "prepared_output_stays"}
NAMED = {"input": "PrepareModuleInput", "output": "PrepareModuleOutput", "both": "PrepareModuleInputOutput"}

LAWS = (
    *(
        Law(
            id=f"module.prepare[{side}]",
            clause="Tensors with a layout are taken as it says and laid out as desired, by position and by name; all else passes as it is.",
            source=f"{DOC}, {NAMED[side]}",
            check=check_prepare,
            script=script_prepare,
            features=features_prepare,
            control=CONTROLS[side],
            planted=PLANTED[side],
            draw=draw_prepare(side),
            draws=8,
            needs=NEEDS,
            weight=0.1,
        )
        for side in ("input", "output", "both")
    ),
    Law(
        id="module.refusals",
        clause="Styles refuse modules that they do not take and layouts that do not pair up; a plan that names nothing is warned of.",
        source=f"{DOC}, the styles (supported modules, lengths of layouts) and parallelize_module",
        check=check_refusals,
        script=script_refusals,
        control="module.refusals mesh=2 attempt=colwise-norm",
        planted="colwise_takes_anything",
        sweep=sweep_refusals,
        sweeps=16,
        needs=("broadcast", "scatter"),
        weight=0.1,
    ),
)
