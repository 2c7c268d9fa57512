"""Laws of what goes with training on sharded parameters: gradients that are clipped, and steps of every optimizer."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import DTensor

from conformance.case import Case
from conformance.law import Law, Limits
from conformance.laws import draws, scripts
from conformance.laws.given import Given, given
from conformance.laws.module.given import near_dtensor
from conformance.report.reproducer import Script
from reference import simulate
from reference.mesh import Mesh
from reference.notation import Shape
from reference.placement import Partial, Placements
from reference.placement import Replicate as R
from reference.tensors import TensorSpec
from strategies import shapes
from strategies.modules import eighths
from strategies.placements import placements

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from conformance.here import Here

NEEDS = ("all_gather", "all_reduce")
CLIP = "torch.nn.utils.clip_grad_norm_ and clip_grad_value_: the norm of all gradients as one vector; in place"
OPTIM = "torch.optim, and torch.distributed.tensor docs: a DTensor parameter takes part as its dense tensor would"
MESHES = {"2": 5, "3": 4, "2x2": 3, "1x2": 2, "4": 1, "2@1,0": 1}
NAMES = ("a", "b", "c")


def parameters(case: Case, here: Here, at: int = 0) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The parameters of a case, each a leaf with the ``at``-th gradient: dense ones, and those of this rank."""
    dense, live = [], []
    for name in filter(case.__contains__, NAMES):
        x = given(case, name, f"mesh.{name}" if f"mesh.{name}" in case else "mesh")
        whole = nn.Parameter(value(case, name, x.layout.shape, 0).to(x.full.dtype))
        parameter = nn.Parameter(placed(here, whole.detach(), x, x.layout.placements))
        dense.append(whole)
        live.append(parameter)
    arrive(case, here, dense, live, at)
    return dense, live


def value(case: Case, name: str, shape: Shape, at: int) -> torch.Tensor:
    """Eighths for a parameter (0) or its gradients (from 1 on)."""
    return eighths(shape, case.seed + NAMES.index(name) + 5 * at)


def placed(here: Here, full: torch.Tensor, x: Given, at: Placements, seed: int = 0) -> Any:
    """A leaf that holds ``full`` under these placements on the mesh of ``x``."""
    layout = x.layout.replace(at)
    coord = here.coord(layout.mesh)
    assert coord is not None
    local = simulate.distribute(full, layout, seed)[coord] if layout.has_partial() else simulate.take(full, layout, coord)
    local = here.tensor(local).clone(memory_format=torch.contiguous_format)
    return DTensor.from_local(
        local, here.mesh(layout.mesh), here.placements(at), shape=full.shape, stride=full.contiguous().stride()
    ).detach()


def arrive(case: Case, here: Here, dense: list[nn.Parameter], live: list[nn.Parameter], at: int) -> None:
    """Give each parameter its ``at``-th gradient, placed as the parameter is, or as ``grad`` says; one in ``without`` has none."""
    for name, whole, parameter in zip(filter(case.__contains__, NAMES), dense, live, strict=True):
        if name == case.get("without", "") and at != 1:
            whole.grad = parameter.grad = None
            continue
        x = given(case, name, f"mesh.{name}" if f"mesh.{name}" in case else "mesh")
        grad = value(case, name, x.layout.shape, at + 1).to(x.full.dtype)
        place = case.placements(f"grad.{name}") if f"grad.{name}" in case else x.layout.placements
        whole.grad, parameter.grad = grad, placed(here, grad, x, place, case.seed)


def judge_all(here: Here, case: Case, dense: list[nn.Parameter], live: list[nn.Parameter], check: str, *, grads: bool) -> None:
    """Parameters, and their gradients if asked, are the dense ones; parameters lie where they lay."""
    for name, whole, parameter in zip(filter(case.__contains__, NAMES), dense, live, strict=True):
        x = given(case, name, f"mesh.{name}" if f"mesh.{name}" in case else "mesh")
        near_dtensor(here, parameter, whole, check, name, x.layout.placements)
        if not grads:
            continue
        missing = (whole.grad is None, parameter.grad is None)
        if (
            here.require(missing[0] == missing[1], "wrong-value", check, f"{name} has a gradient, must have none, or else")
            and not missing[0]
        ):
            near_dtensor(here, parameter.grad, whole.grad, check, f"gradient of {name}")  # type: ignore[arg-type]


# Clipping


def clipped(case: Case, of: list[nn.Parameter]) -> torch.Tensor | None:
    """Clip as the case says. Returns the norm, where there is one."""
    foreach = {"yes": True, "no": False, "open": None}[case.get("foreach", "open")]
    if case.get("by") == "value":
        torch.nn.utils.clip_grad_value_(of, float(case.get("most")), foreach=foreach)
        return None
    kind, most = float(case.get("norm")), float(case.get("most"))
    if case.get("by") == "parts":
        total = torch.nn.utils.get_total_norm([p.grad for p in of if p.grad is not None], kind, foreach=foreach)
        torch.nn.utils.clip_grads_with_norm_(of, most, total, foreach=foreach)
        return total
    return torch.nn.utils.clip_grad_norm_(of, most, kind, foreach=foreach)


def check_clipped(case: Case, here: Here) -> None:
    """The norm is that of the dense gradients, and the gradients come out as the dense ones do."""
    dense, live = parameters(case, here)
    want, got = clipped(case, dense), clipped(case, live)
    if want is not None and here.require(isinstance(got, torch.Tensor), "wrong-metadata", "norm", f"the norm is a {type(got).__name__}"):
        assert got is not None
        total = got.full_tensor() if isinstance(got, DTensor) else got
        here.same(total.float(), want.float(), "norm", exact=False, what="the norm")
    judge_all(here, case, dense, live, "clipped", grads=True)


def features_training(case: Case) -> set[str]:
    found = {"module"} | {f"option:{name}" for name in ("norm", "foreach", "options") if name in case}
    if any(f"grad.{name}" in case for name in NAMES):
        found.add("unlike-placements")
    if "by" in case:
        found.add("clipped")
    if "norm" in case:
        found.add(f"norm:{case.get('norm')}")
    if "optimizer" in case:
        found |= {f"optimizer:{case.get('optimizer')}", "repeated"}
    return found


def draw_clipped(limits: Limits) -> SearchStrategy[Case]:
    on = [mesh for mesh in map(Mesh.parse, MESHES) if mesh.size <= limits.world_size for _ in range(MESHES[str(mesh)])]

    @st.composite
    def case(draw: st.DrawFn) -> Case:
        mesh = draw(st.sampled_from(on))
        by = draw(st.sampled_from(["norm", "norm", "parts", "value"]))
        fields = _tensors(draw, mesh, pending=by != "value")
        fields |= {"by": by, "most": draw(st.sampled_from(["0.5", "0.25", "64"]))}
        if by != "value":
            fields["norm"] = draw(st.sampled_from(["2.0", "2.0", "1.0", "inf", "inf", "0.0", "3.0", "-inf"]))
        fields["foreach"] = draw(st.sampled_from([None, "yes", "no"]))
        fields["without"] = draw(st.sampled_from([None, None, "b"]))
        return Case.of("module.clipped", mesh=mesh, **fields, seed=draw(draws.seeds()))

    def unbounded(case: Case) -> bool:
        """The largest or smallest element of no elements: known to part the ranks, see the sweep."""
        empty = any(given(case, name).layout.empty_coords() for name in NAMES if name in case)
        return empty and "inf" in case.get("norm", "")

    return case().filter(lambda case: not unbounded(case))


def sweep_clipped(limits: Limits) -> list[Case]:
    """A rank without elements: one that is known to raise alone, for either bound."""
    fields = {"a": "1:S(0):float64", "b": "5:R:float64", "by": "norm", "most": "0.25"}
    return [Case("module.clipped", (("mesh", "2"), *fields.items(), ("norm", norm), ("foreach", "no"))) for norm in ("inf", "-inf")]


def draw_mixed(limits: Limits) -> SearchStrategy[Case]:
    """Parameters on two meshes of the same ranks, as where some are sharded along one dim and others along two."""
    pairs = [("2", "1x2"), ("2", "2x1"), ("4", "2x2"), ("2x2", "4"), ("1x2", "2"), ("2", "2@1,0")]
    on = [(Mesh.parse(one), Mesh.parse(two)) for one, two in pairs if Mesh.parse(one).size <= limits.world_size]

    @st.composite
    def case(draw: st.DrawFn) -> Case:
        first, second = draw(st.sampled_from(on))
        fields: dict[str, Any] = {"mesh__b": second}
        for name, mesh in (("a", first), ("b", second)):
            shape = draw(shapes(min_dims=1, max_dims=2, min_size=2))
            fields[name] = TensorSpec(shape, draw(placements(mesh, len(shape), kinds=("R", "S", "S"))), "float64")
        fields |= {"by": draw(st.sampled_from(["norm", "norm", "value"])), "most": "0.5"}
        fields["norm"] = draw(st.sampled_from(["2.0", "1.0"])) if fields["by"] == "norm" else None
        fields["foreach"] = draw(st.sampled_from([None, "yes", "no"]))
        return Case.of("module.clipped-mixed", mesh=first, **fields, seed=draw(draws.seeds()))

    return case()


def _tensors(draw: st.DrawFn, mesh: Mesh, *, pending: bool = False) -> dict[str, Any]:
    """Two or three parameters; seldom the gradient of one lies otherwise."""
    fields: dict[str, Any] = {}
    kinds = ("R", "S", "S", "_S") if mesh.ndim == 1 else ("R", "S")
    for name in NAMES[: draw(st.sampled_from([2, 2, 3]))]:
        shape = draw(shapes(min_dims=1, max_dims=2, min_size=1))
        at = draw(placements(mesh, len(shape), kinds=kinds))
        fields[name] = TensorSpec(shape, at, draw(st.sampled_from(["float64", "float64", "float64", "float32"])))
    if pending and draw(st.integers(0, 4)) == 4:
        spec = fields["a"]
        fields["grad__a"] = draw(st.sampled_from([(R(),) * mesh.ndim, (Partial("sum"),) + (R(),) * (mesh.ndim - 1), spec.placements]))
    return fields


def _made(case: Case) -> tuple[list[str], list[str]]:
    """Constants and statements of a script: the lists ``dense`` and ``live`` of parameters with gradients."""
    body = [f"mesh = {scripts.mesh(case.mesh())}", "dense, live = [], []"]
    for name in filter(case.__contains__, NAMES):
        x = given(case, name)
        full, grad = (value(case, name, x.layout.shape, at).to(x.full.dtype) for at in (0, 1))
        at = scripts.placements(x.layout.placements)
        put = scripts.placements(case.placements(f"grad.{name}")) if f"grad.{name}" in case else at
        pending = f"grad.{name}" in case and any(isinstance(one, Partial) for one in case.placements(f"grad.{name}"))
        body += [f"full, grad = {scripts.tensor(full)}, {scripts.tensor(grad)}"]
        for where, parameter, gradient in (
            ("dense", "full.clone()", "grad.clone()"),
            ("live", f"distribute_tensor(full, mesh, {at})", f"distribute_tensor(grad, mesh, {put})"),
        ):
            if where == "live" and pending:
                gradient = f"DTensor.from_local(grad * (rank == {case.mesh().ranks[0]}), mesh, {put})"
            body += [f"{where}.append(torch.nn.Parameter({parameter}))"]
            if name != case.get("without", ""):
                body += [f"{where}[-1].grad = {gradient}"]
    return [], body


WHOLE = "whole = lambda t: t.full_tensor() if isinstance(t, DTensor) else t"


def script_clipped(case: Case) -> Script:
    _, body = _made(case)
    foreach = {"yes": True, "no": False, "open": None}[case.get("foreach", "open")]
    kind, most = case.get("norm", "2.0"), case.get("most")
    kind = f'float("{kind}")' if "inf" in kind else kind
    call = f"clip_grad_value_(of, {most}, foreach={foreach})"
    if case.get("by") != "value":
        call = f"clip_grad_norm_(of, {most}, {kind}, foreach={foreach})"
    body += [f"clip = lambda of: torch.nn.utils.{call}", WHOLE, "want, got = clip(dense), clip(live)"]
    body += ["want, got = ([], []) if want is None else ([want], [whole(got)])"]
    body += ["return want + [p.grad for p in dense], got + [whole(p.grad) for p in live]"]
    made = scripts.script(body, world=case.world)
    return Script(made.stages, made.imports, made.constants, tolerance=1e-5)


# Optimizers

# an optimizer by name: its class, and the options that it may be given beside its own
STEPPED: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any], dict[str, dict[str, Any]]]] = {
    "sgd": (
        torch.optim.SGD,
        {"lr": 0.5},
        {
            "momentum": {"momentum": 0.5},
            "nesterov": {"momentum": 0.5, "nesterov": True},
            "decay": {"weight_decay": 0.25},
            "dampening": {"momentum": 0.5, "dampening": 0.5, "maximize": True},
        },
    ),
    "adam": (torch.optim.Adam, {"lr": 0.25, "eps": 1.0}, {"decay": {"weight_decay": 0.25}, "amsgrad": {"amsgrad": True}}),
    "adamw": (torch.optim.AdamW, {"lr": 0.25, "eps": 1.0}, {"decay": {"weight_decay": 0.25}, "amsgrad": {"amsgrad": True}}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.25, "eps": 1.0}, {"decay": {"weight_decay": 0.25}}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.25, "eps": 1.0}, {"momentum": {"momentum": 0.5, "centered": True}}),
    "adadelta": (torch.optim.Adadelta, {"lr": 0.25, "eps": 1.0}, {}),
    "adamax": (torch.optim.Adamax, {"lr": 0.25, "eps": 1.0}, {}),
    "nadam": (torch.optim.NAdam, {"lr": 0.25, "eps": 1.0}, {"decay": {"weight_decay": 0.25}}),
    "radam": (torch.optim.RAdam, {"lr": 0.25, "eps": 1.0}, {}),
    "asgd": (torch.optim.ASGD, {"lr": 0.25}, {}),
}
COMMON = ("sgd", "sgd", "sgd", "adam", "adam", "adamw", "adamw")
OTHERS = ("adagrad", "rmsprop", "adadelta", "adamax", "nadam", "radam", "asgd")


def settings(case: Case) -> dict[str, Any]:
    """The options of the optimizer of a case, without ``foreach``."""
    _, own, more = STEPPED[case.get("optimizer")]
    return own | more.get(case.get("options", ""), {})


def check_optimizer(case: Case, here: Here) -> None:
    """Three steps leave the parameters as the dense ones, where they lay; the state denotes the dense state, placed as they are."""
    dense, live = parameters(case, here)
    make: Any = STEPPED[case.get("optimizer")][0]
    foreach = {"yes": True, "no": False, "open": None}[case.get("foreach", "open")]
    ours, theirs = make(live, **settings(case), foreach=foreach), make(dense, **settings(case), foreach=False)
    for at in range(3):
        arrive(case, here, dense, live, at)
        ours.step()
        theirs.step()
        judge_all(here, case, dense, live, f"step-{at}", grads=False)
    for name, whole, parameter in zip(filter(case.__contains__, NAMES), dense, live, strict=True):
        judge_state(here, ours.state[parameter], theirs.state[whole], given(case, name).layout.placements, name)
    kept = case.get("zero", "") == "kept"
    for one in (ours, theirs):
        one.zero_grad(set_to_none=not kept)
    judge_all(here, case, dense, live, "zero-grad", grads=True)


def judge_state(here: Here, got: dict[str, Any], want: dict[str, Any], at: Placements, name: str) -> None:
    """What an optimizer keeps of a parameter: tensors of its shape lie as it does, numbers are plain or whole."""
    if not here.require(set(got) == set(want), "wrong-metadata", "state", f"state of {name} has other keys", set(want), set(got)):
        return
    for key, due in want.items():
        what = f"{key} of {name}"
        if isinstance(due, torch.Tensor) and (due.ndim or isinstance(got[key], DTensor)):
            near_dtensor(here, got[key], due, "state", what, at if due.ndim else None)
        elif isinstance(due, torch.Tensor):
            here.same(torch.as_tensor(got[key]).float(), due.float(), "state", exact=False, what=what)
        elif isinstance(due, int | float):
            here.require(math.isclose(got[key], due, rel_tol=1e-6), "wrong-value", "state", f"{what} differs", due, got[key])


def draw_optimizer(names: tuple[str, ...], law: str) -> Any:
    def strategy(limits: Limits) -> SearchStrategy[Case]:
        on = [mesh for mesh in map(Mesh.parse, MESHES) if mesh.size <= limits.world_size for _ in range(MESHES[str(mesh)])]

        @st.composite
        def case(draw: st.DrawFn) -> Case:
            mesh, name = draw(st.sampled_from(on)), draw(st.sampled_from(names))
            fields = _tensors(draw, mesh)
            fields |= {"optimizer": name, "options": draw(st.sampled_from([None, *STEPPED[name][2]]))}
            fields |= {"foreach": draw(st.sampled_from([None, "yes", "no"])), "without": draw(st.sampled_from([None, None, "b"]))}
            fields["zero"] = draw(st.sampled_from([None, None, "kept"]))
            return Case.of(law, mesh=mesh, **fields, seed=draw(draws.seeds()))

        return case()

    return strategy


def script_optimizer(case: Case) -> Script:
    _, body = _made(case)
    foreach = {"yes": True, "no": False, "open": None}[case.get("foreach", "open")]
    told = "".join(f", {key}={value}" for key, value in settings(case).items())
    body += [f"make = lambda of, foreach: torch.optim.{STEPPED[case.get('optimizer')][0].__name__}(of{told}, foreach=foreach)"]
    body += [f"ours, theirs = make(live, {foreach}), make(dense, False)", "for _ in range(3): ours.step(), theirs.step()"]
    body += ["return [p.detach() for p in dense], [p.full_tensor().detach() for p in live]"]
    made = scripts.script(body, world=case.world)
    return Script(made.stages, made.imports, made.constants, tolerance=1e-5)


LAWS = (
    Law(
        id="module.clipped",
        clause="Clipping sharded gradients by norm or value gives the dense norm, of any order, and the dense gradients, in place.",
        source=CLIP,
        check=check_clipped,
        script=script_clipped,
        features=features_training,
        control="module.clipped mesh=2 a=4x3:S(0):float64 b=5:S(0):float64 by=norm most=0.5 norm=2.0",
        planted="norm_of_the_local_part",
        draw=draw_clipped,
        draws=10,
        sweep=sweep_clipped,
        sweeps=2,
        needs=NEEDS,
        weight=0.3,
    ),
    Law(
        id="module.clipped-mixed",
        clause="Gradients on two meshes of the same ranks are clipped as the dense ones, or all ranks refuse to.",
        source=CLIP,
        check=check_clipped,
        features=features_training,
        control="module.clipped-mixed mesh=2 a=4x3:S(0):float64 b=5:S(0):float64 by=norm most=0.5 norm=2.0",
        planted="norm_of_the_local_part",
        draw=draw_mixed,
        draws=5,
        needs=NEEDS,
        refusal="allowed",
        weight=0.1,
    ),
    Law(
        id="module.optimizer[common]",
        clause="SGD, Adam and AdamW step sharded parameters as dense ones, one by one or all at once; their state lies as they do.",
        source=OPTIM,
        check=check_optimizer,
        script=script_optimizer,
        features=features_training,
        control="module.optimizer[common] mesh=2 a=4x3:S(0):float64 b=5:S(0):float64 optimizer=sgd options=momentum foreach=yes",
        planted="foreach_adds_at_half",
        draw=draw_optimizer(COMMON, "module.optimizer[common]"),
        draws=6,
        needs=NEEDS,
        weight=0.3,
    ),
    Law(
        id="module.optimizer[others]",
        clause="The other optimizers of torch.optim step sharded parameters as dense ones, and their state lies as the parameters do.",
        source=OPTIM,
        check=check_optimizer,
        script=script_optimizer,
        features=features_training,
        control="module.optimizer[others] mesh=2 a=4x3:S(0):float64 b=5:S(0):float64 optimizer=adagrad foreach=yes",
        planted="foreach_divides_at_half",
        draw=draw_optimizer(OTHERS, "module.optimizer[others]"),
        draws=5,
        needs=NEEDS,
        refusal="allowed",
        weight=0.2,
    ),
)
