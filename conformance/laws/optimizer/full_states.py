"""Laws of full states that rank 0 or each rank sets, and of states of optimizers of several kinds, numbers, groups."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from shardlaw.conformance.law.act import fields, law, texts
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Refused, caught
from shardlaw.conformance.law.fields import Rank
from shardlaw.conformance.law.law import Limits
from shardlaw.conformance.laws.checkpoint.calls import poison
from shardlaw.conformance.laws.checkpoint.models import (
    OTHER_RATES,
    RATES,
    adam,
    changed,
    keeps,
    learned,
    saved_rates,
    with_rates,
)
from shardlaw.conformance.laws.optimizer.fields import FullTensors, Poisoned, Tensors, values_with_grads
from shardlaw.conformance.laws.optimizer.nets import (
    OPTIMIZERS,
    WITHOUT_STEPS,
    Net,
    Opt,
    by_state_name,
    state_options,
    train_step,
)
from shardlaw.conformance.laws.shared.draws import meshes
from shardlaw.reference.tensors import TensorSpec
from shardlaw.strategies import placements, shapes

DOCS = "torch.distributed.checkpoint.state_dict docs"
COMMON: dict[str, Any] = {"needs": ("checkpoint", "object_collectives"), "smallest": 1}
FORM_FEATURES = {"flat": {"flat-state"}, "each": {"whole-state"}}
OFTEN = ("adagrad", "sgd", "momentum", "adam", "rmsprop")
SELDOM = (
    *(f"mesh=2 x=4x2:S(0):float32:small a=2:R:float32:small opt={opt}" for opt in ("decayed", "dampened")),
    *(f"mesh=2 x=2:-:float32:small a=4x3:-:float32:small opt={opt}" for opt in ("nadam", "radam", "adamax")),
    *(f"mesh=2 x=2:-:float32:small a=4x3:-:float32:small opt={opt}" for opt in ("rprop", "asgd", "lbfgs")),
    *(f"mesh=2 x=3x2:-:float32:small a=4x3:-:float32:small opt={opt}" for opt in ("adadelta", "adafactor", "muon")),
    "mesh=2 x=2:-:float32:small a=4x3:-:float32:small opt=sparse",
    "mesh=2 x=4x2:S(0):float32:small a=2:R:float32:small opt=sgd when=after",
    "mesh=2 x=4x2:S(0):float32:small a=2:R:float32:small opt=momentum grads=float64",
    "mesh=2 x=3:-:float32:small opt=sgd grads=bfloat16",
)


# full states whose names are in reverse order on odd ranks, or whose tensors are transposed or have one element
ODD_STATES = (
    "mesh=2 x=5x2:S(0):{} a=5x2:S(0):{} how=turned",
    "mesh=3 x=7:S(0):{} a=7:S(0):{} b=7:S(0):{} how=turned",
    "mesh=2 x=4x3:S(0):{} a=3x2:-:{} how=transposed",
    "mesh=2 x=1:S(0):{} a=1x1:R:{} how=each",
)


def model_cases(
    *choices: str, floats: bool = True, plain: bool = True, min_tensors: int = 1, field: str = "how"
) -> Callable[[Limits], SearchStrategy[Case]]:
    """Cases of models of up to three tensors, with one of ``choices`` in ``field``. ``floats``: all tensors are
    parameters. ``plain``: no sub-meshes and no strided shards."""

    def draw_of(limits: Limits) -> SearchStrategy[Case]:
        mesh_palette = meshes(limits, permuted=False, submeshes=not plain)
        kinds = ("R", "S") if plain else ("R", "S", "_S")
        dtypes = ("float32", "float32", "float64") if floats else ("float32", "float64", "bfloat16", "int64")

        @st.composite
        def case(draw: st.DrawFn) -> Case:
            mesh = draw(st.sampled_from(mesh_palette))
            case_fields: dict[str, Any] = {"mesh": mesh}
            for name in "xab"[: draw(st.integers(min_tensors, 3))]:
                shape, dtype = draw(shapes()), draw(st.sampled_from(dtypes))
                chosen = draw(placements(mesh, len(shape), kinds=kinds if shape else ("R",)))
                case_fields[name] = TensorSpec(shape, chosen, dtype, "small" if floats else "distinct")
            if choices:
                case_fields[field] = draw(st.sampled_from(choices))
            return fields(**case_fields, seed=draw(st.integers(0, 9)) or None)

        return case()

    return draw_of


# not in smoke: if ranks wait, it takes the time limit of a case
SHARDED_STATE = "mesh=2 x=5x2:S(0):float64 a=4:-:float64 how=sharded"

Form = Literal["broadcast", "each", "turned", "transposed"]
ModelForm = Literal["broadcast", "each", "turned", "transposed", "sharded"]
OWN_STATE = ("each", "turned")


def full_state_options(how: str) -> StateDictOptions:
    """The options to set a full state: each rank its own, or that of rank 0."""
    return state_options(["whole" if how in OWN_STATE else "broadcast"])


def state_on_rank(state: dict[str, Any], how: str, rank: int) -> dict[str, Any]:
    """The full state that a rank passes; an empty one on other ranks than 0 if rank 0 broadcasts."""
    if rank and how not in OWN_STATE:
        return {}
    if how == "turned" and rank % 2:
        return dict(reversed([*state.items()]))
    transpose = how == "transposed"
    return {
        path: value.mT.contiguous().mT if transpose and isinstance(value, torch.Tensor) and value.dim() > 1 else value
        for path, value in state.items()
    }


@law(
    "optimizer.whole-model",
    source=f"{DOCS}, StateDictOptions: full_state_dict, broadcast_from_rank0",
    control="mesh=2 x=4x2:S(0) how=broadcast",
    draw=model_cases("broadcast", "each", floats=False, plain=False),
    draws=16,
    sweep=texts(*(line.replace("{}", "float64") for line in ODD_STATES), SHARDED_STATE),
    sweeps=len(ODD_STATES),
    refusal=lambda case, text: case.get("how") == "sharded",
    **COMMON,
)
def full_model_state(tensors: FullTensors, others: Poisoned, rank: Rank, how: ModelForm):
    """A full state of a model, of rank 0 or of each rank, can be set on a model of any layout. If rank 0 gives the
    sharded state of the model itself, every rank refuses it, or the model stays as it is."""
    net = Net(others)
    state: dict[str, Any] = net.state_dict() if how == "sharded" else by_state_name(tensors)
    set_model_state_dict(net, state_on_rank(state, how, rank), options=full_state_options(how))
    return net.held()


@full_model_state.due
def _(others, how):
    values = by_state_name(others)
    return {path: changed(value, poison) for path, value in values.items()} if how == "sharded" else values


@law(
    "optimizer.whole",
    source=f"{DOCS}, set_optimizer_state_dict; StateDictOptions: full_state_dict, broadcast_from_rank0",
    control="mesh=2 x=4x2:S(0):float32:small how=broadcast",
    draw=model_cases("broadcast", "each", plain=False),
    draws=14,
    cases=[line.replace("{}", "float32:small") for line in ODD_STATES],
    **COMMON,
)
def full_optimizer_state(tensors: FullTensors, others: Poisoned, rank: Rank, how: Form):
    """A full state of an optimizer, of rank 0 or of each rank, can be set on the optimizer of a model of any layout."""
    net = Net(others)
    optimizer = adam([*net.parameters()], OTHER_RATES)
    grads = by_state_name(tensors)
    state: dict[str, Any] = {}
    for path in net.optimizer_parameters():
        averages = {"exp_avg": grads[path] / 2, "exp_avg_sq": grads[path] * grads[path] / 2}
        state[path] = {"step": torch.tensor(3.0), **state_on_rank(averages, how, 0)}
    groups = [
        {**group, "params": [path], "lr": rate}
        for path, rate, group in zip(state, RATES, optimizer.param_groups, strict=False)
    ]
    state_dict = (
        {"state": state_on_rank(state, how, rank), "param_groups": groups} if rank == 0 or how in OWN_STATE else {}
    )
    set_optimizer_state_dict(net, optimizer, state_dict, options=full_state_options(how))  # type: ignore[arg-type]
    return {**learned(net.optimizer_parameters(), optimizer), "model": net.held()}


@full_optimizer_state.due
def _(others):
    model = {path: changed(value, poison) for path, value in by_state_name(others).items()}
    return {**keeps(values_with_grads(others), saved_rates(others), 3.0), "model": model}


@law(
    "optimizer.pending",
    source=f"{DOCS}, set_optimizer_state_dict: loads the optimizers state_dict",
    control="mesh=2 x=4x2:S(0):float32:small a=2:R:float32:small",
    draw=model_cases("plain", "flat", "each"),
    draws=16,
    features=lambda case: {"pending-gradients"} | FORM_FEATURES.get(case.get("how", ""), set()),
    **COMMON,
)
def pending(tensors: Tensors, others: Poisoned, how: Literal["plain", "flat", "each"] = "plain"):
    """A state can be set on an optimizer while its parameters have gradients."""
    net = Net(tensors)
    optimizer = adam([*net.parameters()], RATES)
    train_step(optimizer)
    options = state_options(["whole"] if how == "each" else [how])
    state = get_optimizer_state_dict(net, optimizer, options=options)
    net, grads = Net(others), by_state_name(tensors)
    optimizer = adam([*net.parameters()], OTHER_RATES)
    for path, parameter in net.optimizer_parameters().items():
        parameter.grad = grads[path].clone()
    set_optimizer_state_dict(net, optimizer, state, options=options)
    return learned(net.optimizer_parameters(), optimizer)


@pending.due
def due_after_step(tensors):
    return keeps(values_with_grads(tensors), saved_rates(tensors))


def parameter_groups(net: Net, opt: str) -> list[Any]:
    """A group for each parameter, with different learning rates; for LBFGS the parameters, in one group."""
    parameters = [*net.parameters()]
    return parameters if opt == "lbfgs" else with_rates([[parameter] for parameter in parameters], RATES)


def differing_names(tensors: dict[str, Any], others: dict[str, Any]) -> list[str]:
    """The names of the tensors in both dicts whose local elements differ."""
    common = [name for name, value in tensors.items() if isinstance(value, torch.Tensor) and name in others]
    return [name for name in common if not torch.equal(to_local(tensors[name]), to_local(others[name]))]


def to_local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@law(
    "optimizer.asked",
    source=f"{DOCS}, get_optimizer_state_dict: return the combined state_dict for optimizers",
    control="mesh=2 x=4x2:S(0):float32:small opt=adagrad",
    draw=model_cases(*OFTEN, field="opt"),
    draws=16,
    cases=SELDOM,
    **COMMON,
)
def get_state(
    tensors: Tensors, opt: Opt, when: Literal["before", "after"] = "before", grads: torch.dtype | None = None
):
    """get_optimizer_state_dict changes no optimizer, model or gradient: the next step is the first one. Parameters may
    ask for gradients of another dtype."""
    nets = [Net({name: tensor.clone() for name, tensor in tensors.items()}) for _ in range(2)]
    for parameter in () if grads is None else [*nets[0].parameters(), *nets[1].parameters()]:
        parameter.grad_dtype = grads
    optimizers = [OPTIMIZERS[opt](parameter_groups(net, opt)) for net in nets]
    for path, grad in by_state_name(tensors).items() if when == "after" else ():
        nets[0].held()[path].grad = grad.clone()
    get_optimizer_state_dict(nets[0], optimizers[0])
    model = {path: parameter.detach().clone() for path, parameter in nets[0].held().items()}
    gradients = [path for path, parameter in nets[0].held().items() if parameter.grad is not None]
    for net, optimizer in zip(nets, optimizers, strict=True):
        for path, grad in by_state_name(tensors).items():
            net.held()[path].grad = grad.to_sparse() if opt == "sparse" else grad.to(grads or grad.dtype, copy=True)
        optimizer.step(lambda: torch.zeros(()))
    states = [learned(net.optimizer_parameters(), optimizer) for net, optimizer in zip(nets, optimizers, strict=True)]
    return {
        "model": model,
        "gradients": sorted(gradients),
        "stepped otherwise": differing_names(nets[0].held(), nets[1].held()),
        "kept otherwise": {
            path: differing_names(kept, states[1]["averages"][path]) for path, kept in states[0]["averages"].items()
        },
        "steps": [state["steps"] for state in states],
    }


@get_state.due
def _(tensors, opt, when="before"):
    steps = dict.fromkeys(by_state_name(tensors), None if opt in WITHOUT_STEPS else 1.0)
    differing = {path: list[str]() for path in by_state_name(tensors)}
    return {
        "model": by_state_name(tensors),
        "gradients": sorted(by_state_name(tensors)) if when == "after" else [],
        "stepped otherwise": [],
        "kept otherwise": differing,
        "steps": [steps] * 2,
    }


SEVERAL = (
    "mesh=2 x=4x2:S(0):float32:small a=2:R:float32:small b=3:S(0):float32:small how=plain apart=no",
    "mesh=2 x=2:R:float32:small a=2:R:float32:small how=flat opt=sgd",
    "mesh=2 x=2:R:float32:small a=2:R:float32:small how=plain opt=sgd",
    "mesh=2 x=2:R:float32:small a=2:R:float32:small how=plain opt=sgd apart=no",
)


@law(
    "optimizer.several",
    source=f"{DOCS}, get_optimizer_state_dict: return the combined state_dict for optimizers",
    control="mesh=2 x=4x2:S(0):float32:small a=2:R:float32:small how=plain",
    draw=model_cases("plain", "flat", min_tensors=2),
    draws=10,
    cases=SEVERAL,
    features=lambda case: {"several-optimizers"} | FORM_FEATURES.get(case.get("how"), set()),
    **COMMON,
)
def several(
    tensors: Tensors,
    others: Poisoned,
    how: Literal["plain", "flat"],
    opt: Literal["adam", "sgd"] = "adam",
    apart: bool = True,
):
    """Several optimizers of one model have one state together, which can be set on them in any order, as that of one
    with several groups can."""
    net = Net(tensors)
    optimizers = make_optimizers(net, RATES, opt, apart)
    for optimizer in optimizers:
        train_step(optimizer)
    state = get_optimizer_state_dict(net, optimizers, options=state_options([how]))
    net = Net(others)
    optimizers = make_optimizers(net, OTHER_RATES, opt, apart, reverse=True)
    set_optimizer_state_dict(net, optimizers, state, options=state_options([how]))
    return learned(net.optimizer_parameters(), *optimizers)


def make_optimizers(
    net: Net, rates: Sequence[float], opt: str, apart: bool, reverse: bool = False
) -> list[torch.optim.Optimizer]:
    """Optimizers of a parameter each, or one that has a group for each."""
    groups = with_rates([[parameter] for parameter in net.parameters()], rates)
    groups = groups[::-1] if reverse else groups
    return [OPTIMIZERS[opt](part) for part in ([[group] for group in groups] if apart else [groups])]


@several.due
def _(tensors, opt):
    due = due_after_step(tensors)
    nothing: dict[str, Any] = {"steps": dict.fromkeys(due["steps"]), "averages": {path: {} for path in due["averages"]}}
    return {**due, **(nothing if opt == "sgd" else {}), "rates": due["rates"][::-1]}


def regrouping_cases(limits: Limits) -> SearchStrategy[Case]:
    """Cases of groups that are merged or split, with equal or different learning rates."""
    more = st.sampled_from(({"rates": "equal"}, {"rates": "equal", "groups": "apart"}, {"rates": "differ"}))
    return st.tuples(model_cases(min_tensors=2)(limits), more).map(lambda pair: pair[0].with_fields(**pair[1]))


@law(
    "optimizer.regrouped",
    source=f"{DOCS}, StateDictOptions: flatten_optimizer_state_dict; groups should have the same saved value",
    control="mesh=2 x=4:S(0):float32:small a=2:R:float32:small rates=equal",
    draw=regrouping_cases,
    draws=10,
    features=lambda case: {"flat-state", *(["must-refuse"] if case.get("rates") == "differ" else [])},
    **COMMON,
)
def regrouped(
    tensors: Tensors,
    others: Poisoned,
    rates: Literal["equal", "differ"],
    groups: Literal["together", "apart"] = "together",
):
    """A flat state can be set on an optimizer with other groups if their parameters had equal options, else it is
    refused."""
    before, after = ("one", "each") if groups == "apart" else ("each", "one")
    net = Net(tensors)
    optimizer = adam([*net.parameters()], RATES if rates == "differ" else RATES[:1], before)
    state = get_optimizer_state_dict(net, optimizer, options=state_options(["flat"]))
    net = Net(others)
    optimizer = adam([*net.parameters()], OTHER_RATES, after)
    if rates == "differ":
        return {
            "regrouped": caught(
                lambda: set_optimizer_state_dict(net, optimizer, state, options=state_options(["flat"]))
            )
        }
    set_optimizer_state_dict(net, optimizer, state, options=state_options(["flat"]))
    return {"rates": [group["lr"] for group in optimizer.param_groups]}


@regrouped.due
def _(tensors, rates, groups):
    return (
        {"regrouped": Refused()}
        if rates == "differ"
        else {"rates": [RATES[0]] * (len(tensors) if groups == "apart" else 1)}
    )
