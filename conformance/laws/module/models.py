"""Laws of parallel models: outputs, gradients and optimizer steps of the sharded model are those of the dense one on every rank."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import DTensor

from conformance.case import Case
from conformance.law import Law, Limits
from conformance.laws import draws, scripts
from conformance.laws.given import NAMES
from conformance.laws.module import plans as module_plans
from conformance.laws.module.given import Modelled, features, incoming, judge_parameters, near, near_dtensor
from conformance.laws.module.plans import PLANS
from conformance.report.reproducer import Script
from reference.mesh import Mesh
from reference.placement import Placement
from reference.placement import Replicate as R
from strategies import modules
from strategies.modules import ZOO, module_sizes

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from conformance.here import Here

STYLES_DOC = "torch.distributed.tensor.parallel docs, parallelize_module: the parallelised module computes what the dense one does"
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, float]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.5, "momentum": 0.5, "weight_decay": 0.125}),
    "adamw": (torch.optim.AdamW, {"lr": 0.25, "eps": 1.0, "weight_decay": 0.125}),
}
# lengths of a sequence, 0 for as many steps as there are ranks
LENGTHS = {"norm": (0, 0, 4, 5), "tied": (3, 0, 5, 7), "attention": (3, 4, 5, 1), "transformer": (3, 0, 5, 7)}
MESHES = {"2": 6, "3": 5, "4": 1, "2x2": 2}


def meshes(limits: Limits) -> list[Mesh]:
    palette = [(Mesh.parse(text), weight) for text, weight in MESHES.items()]
    return [mesh for mesh, weight in palette if mesh.size <= limits.world_size for _ in range(weight)]


def cases(law: str, limits: Limits, kind: str, only: tuple[str, ...] = (), **more: SearchStrategy[Any]) -> SearchStrategy[Case]:
    """Cases of a model of the zoo under any of its plans."""
    on, plans = meshes(limits), sorted(only or PLANS[kind])

    @st.composite
    def case(draw: st.DrawFn) -> Case:
        mesh, name = draw(st.sampled_from(on)), draw(st.sampled_from(plans))
        part = draw(st.sampled_from(NAMES[: mesh.ndim])) if mesh.ndim > 1 else None
        plan, ranks = PLANS[kind][name], mesh.shape[0]
        cut = {getattr(at, "dim", None) for at in (plan.entry, plan.leave)}
        fields: dict[str, Any] = {"dims": "x".join(map(str, draw(module_sizes(kind, ranks, even=plan.even))))}
        fields["rows"] = ranks * draw(st.sampled_from([1, 2])) if 0 in cut else draw(st.sampled_from([2, 3, 1, 5]))
        if ZOO[kind].sequences or kind == "tied":
            fields["length"] = ranks * draw(st.sampled_from([1, 2])) if 1 in cut else draw(st.sampled_from(LENGTHS[kind])) or ranks
        fields["bias"] = draw(st.sampled_from([None, None, "no"])) if kind not in ("tied", "transformer") else None
        fields["norm"] = draw(st.sampled_from(["rms", "layer"])) if kind == "norm" else None
        fields |= {key: draw(strategy) for key, strategy in more.items()}
        return Case.of(law, mesh=mesh, slice=part, way=name, **fields, seed=draw(draws.seeds()))

    return case().filter(lambda case: "empty-shard" not in features(case))


def entered(given: Modelled, here: Here, at: int = 0) -> torch.Tensor:
    """What this rank gives the parallel model."""
    return here.tensor(given.part(given.entry(at), given.plan.entry, here.rank)).contiguous()


def judge_output(here: Here, given: Modelled, got: Any, want: torch.Tensor, check: str) -> None:
    """The output is the dense one, laid out as the plan documents."""
    plan = given.plan
    if plan.wrapped:
        near_dtensor(here, got, want, check, "the output", (plan.leave,))
    elif here.require(not isinstance(got, DTensor), "wrong-metadata", check, "the output is a DTensor, must be a local tensor"):
        near(here, got, given.part(want, plan.leave, here.rank), check, "the output")


def check_forward(case: Case, here: Here) -> None:
    """The model gives the dense output, twice in a row; its parameters lie where the styles put them and hold the dense weights."""
    given = Modelled(case)
    dense = given.model()
    model = given.parallel(dense, here)
    judge_parameters(here, given, model, dense, "parameters")
    with torch.no_grad():
        for at in (0, 1):
            judge_output(here, given, model(entered(given, here, at)), dense(given.entry(at)), f"forward-{at}")


def run_backward(
    given: Modelled, here: Here, model: Callable[..., Any], dense: nn.Module, at: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """A forward and a backward pass of both models. Returns what went in, of the parallel one and of the dense one."""
    x, whole = entered(given, here, at), given.entry(at)
    if whole.is_floating_point():
        x.requires_grad_()
        whole.requires_grad_()
    want = dense(whole)
    grad = incoming(want, given.case.seed + at)
    want.backward(grad)
    got = model(x)
    part = here.tensor(given.part(grad, given.plan.leave, here.rank)).contiguous()
    if given.plan.wrapped:
        at_leave = here.placements((given.plan.leave,))
        part = DTensor.from_local(part, got.device_mesh, at_leave, shape=grad.shape, stride=grad.stride())
    got.backward(part)
    return x, whole


def check_backward(case: Case, here: Here) -> None:
    """Gradients of the input and of every parameter are the dense ones; a second pass adds to them."""
    given = Modelled(case)
    dense = given.model()
    model = given.parallel(dense, here)
    for at in range(2 if "again" in case else 1):
        x, whole = run_backward(given, here, model, dense, at)
        if whole.grad is not None:
            near(here, x.grad, given.part(whole.grad, given.plan.entry, here.rank), "input", "the gradient of the input")
    judge_parameters(here, given, model, dense, "gradients", grads=True)
    judge_parameters(here, given, model, dense, "parameters")


def check_step(case: Case, here: Here) -> None:
    """Two steps of an optimizer leave the parameters as they leave the dense ones, where they were."""
    given = Modelled(case)
    dense = given.model()
    model = given.parallel(dense, here)
    kind, options = OPTIMIZERS[case.get("optimizer")]
    declared = {"foreach": case.get("foreach") == "yes"}
    make: Any = kind
    ours, theirs = make(model.parameters(), **options, **declared), make(dense.parameters(), **options)
    for at in (0, 1):
        run_backward(given, here, model, dense, at)
        ours.step()
        theirs.step()
        judge_parameters(here, given, model, dense, f"step-{at}")
        ours.zero_grad()
        theirs.zero_grad()


def check_state(case: Case, here: Here) -> None:
    """The state has the dense names and the parameters as they lie; another parallel model that loads it computes the same."""
    given = Modelled(case)
    dense = given.model()
    model, other = given.parallel(dense, here), given.parallel(given.model(), here)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    state, wanted = model.state_dict(), dense.state_dict()
    here.require(list(state) == list(wanted), "wrong-metadata", "keys", "the state has other keys", list(wanted), list(state))
    for name, value in state.items():
        at = given.placement(name)
        if at is None:
            near(here, value, wanted[name], "state", name)
        else:
            near_dtensor(here, value, wanted[name], "state", name, (at,))
    other.load_state_dict(state)
    judge_parameters(here, given, other, dense, "loaded")


def _model(given: Modelled) -> tuple[list[str], list[str]]:
    """Definitions and statements that make the dense model with its weights, as a sequence of torch's own modules."""
    dims, bias = given.case.shape("dims"), "bias" not in given.case
    parts: dict[str, str] = {}
    if given.kind == "mlp":
        parts = {
            "net1": f"nn.Linear({dims[0]}, {dims[1]}, {bias})",
            "relu": "nn.ReLU()",
            "net2": f"nn.Linear({dims[1]}, {dims[2]}, {bias})",
        }
    elif given.kind == "stacked":
        fed = f"w1=nn.Linear({dims[0]}, {dims[1]}, {bias}), gelu=nn.GELU(), w2=nn.Linear({dims[1]}, {dims[0]}, {bias})"
        parts = {"layers": f"nn.Sequential(*(nn.Sequential(OrderedDict({fed})) for _ in range(2)))"}
    elif given.kind == "norm":
        rms = given.case.get("norm") == "rms"
        norm = f"nn.RMSNorm({dims[0]}, eps=0.125)" if rms else f"nn.LayerNorm({dims[0]}, eps=0.125, bias={bias})"
        parts = {"norm": norm, "out": f"nn.Linear({dims[0]}, {dims[1]}, {bias})"}
    else:
        parts = {"tok": f"nn.Embedding({dims[0]}, {dims[1]})", "out": f"nn.Linear({dims[1]}, {dims[0]}, False)"}
    told = ", ".join(f"{name}={part}" for name, part in parts.items())
    fill = inspect.getsource(modules.eighths).replace(": Shape", "").splitlines()
    body = [
        f"dense = nn.Sequential(OrderedDict({told})).double().eval()",
        *(["dense.out.weight = dense.tok.weight"] if given.plan.tied else []),
        "for at, (name, p) in enumerate(dense.named_parameters()):",
        f'    p.data = eighths(p.shape, {given.case.seed} + 3 * at) + (1 / 128 if name.endswith("net1.bias") else 0)',
    ]
    return [line for line in fill if '"""' not in line], body


def script(case: Case) -> Script:
    """Both models on every rank: the output, or the gradients, or the parameters after a step."""
    given, name = Modelled(case), case.law.partition("[")[0]
    constants, body = _model(given)
    plan, shape = given.plan, tuple(given.entry().shape)
    tokens = ZOO[given.kind].tokens
    count = None if tokens is None else case.shape("dims")[tokens]
    sliced = f'["{case.get("slice")}"]' if "slice" in case else ""
    styles = ", ".join(f'"{key}": {value}' for key, value in plan.styles.items())
    body += [
        f"full = {f'eighths({shape}, {case.seed} + 5)' if count is None else scripts.tensor(given.entry())}",
        f"mesh = {scripts.mesh(given.mesh, NAMES[: given.mesh.ndim] if sliced else ())}{sliced}",
        f"model = parallelize_module(copy.deepcopy(dense), mesh, {{{styles}}})",
        *(["model.out.weight = model.tok.weight"] if plan.tied else []),
        *_called(case, _chunk("full", plan.entry)),
        f"want{', out' if plan.wrapped else ''} = dense(full){', out.full_tensor()' if plan.wrapped else ''}",
    ]
    leave = R() if plan.wrapped else plan.leave
    if name == "module.forward":
        body += [f"return {_chunk('want', leave)}.detach(), out.detach()"]
    else:
        body += ["whole = lambda t: t.full_tensor() if isinstance(t, DTensor) else t"]
    if name == "module.state":
        body += ["return list(dense.state_dict().values()), [whole(v) for v in model.state_dict().values()]"]
    elif name != "module.forward":
        body += [f"grad = eighths(want.shape, {case.seed} + 7)", "want.backward(grad)", f"out.backward({_chunk('grad', leave)})"]
        if name == "module.step":
            kind, options = OPTIMIZERS[case.get("optimizer")]
            told = ", ".join(f"{key}={value}" for key, value in options.items())
            many = case.get("foreach") == "yes"
            body += [f"for m in (dense, model): torch.optim.{kind.__name__}(m.parameters(), {told}, foreach={many}).step()"]
        got = "p.detach()" if name == "module.step" else "p.grad"
        body += [f"return [{got} for p in dense.parameters()], [whole({got}) for p in model.parameters()]"]
    made = scripts.script(body, world=case.world, constants=constants)
    needed = ["import copy", "from collections import OrderedDict", "from torch import nn"]
    if "recompute" in case:
        needed += [
            f"import {WRAPPER} as wrapper" if "whole" not in case.get("recompute") else "from torch.utils.checkpoint import checkpoint"
        ]
    return Script(made.stages, (*made.imports, *needed, module_plans.imports(list(plan.styles.values()))), made.constants, tolerance=1e-6)


WRAPPER = "torch.distributed.algorithms._checkpoint.checkpoint_wrapper"


def _called(case: Case, x: str) -> list[str]:
    """The call of the parallel model: as it is, compiled, or with activations that are computed again."""
    way = case.get("recompute", "")
    if case.law == "module.compiled-model":
        return [f'out = torch.compile(model, backend="{case.get("backend", "aot_eager")}")({x})']
    if way.startswith("whole"):
        floats = "" if ZOO[Modelled(case).kind].tokens is not None else ".clone().requires_grad_()"
        return [f"out = checkpoint(model, {x}{floats}, use_reentrant={way == 'whole-reentrant'})"]
    if way:
        wrap = "wrapper.checkpoint_wrapper"
        if way == "parts-reentrant":
            wrap = f"lambda m: {wrap}(m, wrapper.CheckpointImpl.REENTRANT)"
        return [f"wrapper.apply_activation_checkpointing(model, {wrap}, lambda m: isinstance(m, nn.Linear))", f"out = model({x})"]
    return [f"out = model({x})"]


def _chunk(name: str, at: Placement) -> str:
    """A rank's part of a tensor that splits evenly."""
    return name if isinstance(at, R) else f"{name}.chunk(mesh.size(), {getattr(at, 'dim', 0)})[mesh.get_local_rank()]"


DRAWS = {"mlp": 10, "stacked": 6, "norm": 8, "tied": 6, "attention": 4, "transformer": 3}
CONTROLS = {
    "mlp": "mesh=2 way=pair dims=5x8x3 rows=3",
    "stacked": "mesh=2 way=pair dims=5x8 rows=3",
    "norm": "mesh=2 way=sequence dims=5x4 rows=3 length=4 norm=rms",
    "tied": "mesh=2 way=local dims=5x3 rows=2 length=3",
    "attention": "mesh=2 way=heads dims=2x3 rows=2 length=3",
    "transformer": "mesh=2 way=sequence dims=2x2x5 rows=2 length=3",
}
SCRIPTED = ("mlp", "stacked", "norm", "tied")
NEEDS = ("all_gather", "all_reduce", "broadcast", "reduce_scatter", "scatter")


def drawing(way: str, kind: str) -> Callable[[Limits], SearchStrategy[Case]]:
    """The cases of a law for one model; some of those that go backward do so twice."""
    again = {"again": st.sampled_from([None, None, 1])} if way == "backward" else {}
    return lambda limits: cases(f"module.{way}[{kind}]", limits, kind, (), **again)


FORWARD = tuple(
    Law(
        id=f"module.forward[{kind}]",
        clause="A model parallelised by styles gives the dense model's output on every rank, laid out as the styles document.",
        source=STYLES_DOC,
        check=check_forward,
        script=script if kind in SCRIPTED else None,
        features=features,
        control=f"module.forward[{kind}] {CONTROLS[kind]}",
        planted="rowwise_stays_pending" if kind not in ("norm", "transformer") else "colwise_ignores_output_layout",
        draw=drawing("forward", kind),
        draws=DRAWS[kind],
        needs=NEEDS,
        weight=0.2,
    )
    for kind in ZOO
)
BACKWARD = tuple(
    Law(
        id=f"module.backward[{kind}]",
        clause="Gradients of the input and of every parameter of a parallelised model are the dense model's, and add up over passes.",
        source=STYLES_DOC,
        check=check_backward,
        script=script if kind in SCRIPTED else None,
        features=features,
        control=f"module.backward[{kind}] {CONTROLS[kind]}",
        planted="backward_counts_twice",
        draw=drawing("backward", kind),
        draws=DRAWS[kind],
        needs=NEEDS,
        weight=0.2,
    )
    for kind in ZOO
)
LAWS = (
    *FORWARD,
    *BACKWARD,
    Law(
        id="module.step",
        clause="Optimizer steps, one by one or all at once, leave sharded parameters where they lie and as the dense ones are.",
        source="torch.distributed.tensor.parallel tutorial: optimizers over the DTensor parameters of a parallelised module",
        check=check_step,
        script=script,
        features=features,
        control="module.step mesh=2 way=pair dims=5x8x3 rows=3 model=mlp optimizer=sgd foreach=yes",
        planted="backward_counts_twice",
        draw=lambda limits: st.one_of(
            *(
                cases(
                    "module.step",
                    limits,
                    kind,
                    only,
                    model=st.just(kind),
                    optimizer=st.sampled_from(["sgd", "adamw"]),
                    foreach=st.sampled_from(["yes", "no"]),
                )
                for kind, only in (("mlp", ("pair", "kept", "scattered", "rows-first")), ("norm", ()), ("tied", ()))
            )
        ),
        draws=10,
        needs=NEEDS,
        weight=0.2,
    ),
    Law(
        id="module.state",
        clause="The state dict of a parallelised model has the dense model's keys and the parameters as they lie, and loads into another.",
        source="torch.distributed.tensor docs, DTensor as parameters; torch.nn.Module.state_dict",
        check=check_state,
        script=script,
        features=features,
        control="module.state mesh=2 way=pair dims=5x8x3 rows=3 model=mlp",
        planted="state_holds_local_tensors",
        draw=lambda limits: st.one_of(*(cases("module.state", limits, kind, model=st.just(kind)) for kind in ("mlp", "stacked", "norm"))),
        draws=8,
        needs=NEEDS,
        weight=0.1,
    ),
)
