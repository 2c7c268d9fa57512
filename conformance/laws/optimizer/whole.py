"""Laws on states that are whole: given on one rank or on each, they are handed out to models and optimizers of any layout."""

from __future__ import annotations

from typing import Any

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

from conformance import trip as t
from conformance.case import Case
from conformance.here import Here
from conformance.law import Law, Limits
from conformance.laws.draws import meshes
from conformance.laws.roundtrip import model as m
from conformance.laws.roundtrip.model_scripts import asked, given_whole, pending_lines, regrouped, several
from reference.tensors import TensorSpec
from strategies import placements, shapes

DOCS = "torch.distributed.checkpoint.state_dict docs"
STEPS = 3
KINDS = (*(("R", "S"),) * 7, ("R", "S", "_S"))


def handed(case: Case) -> StateDictOptions:
    """How a whole state is handed out: from rank 0, or by each rank from its own."""
    return StateDictOptions(full_state_dict=True, broadcast_from_rank0=case.get("how") == "broadcast")


def whole_model(trip: t.Trip) -> dict[str, Any]:
    return {path: trip.values[name].clone() for name, path in m.names_in_model(trip).items()}


def whole_optimizer(trip: t.Trip, optimizer: torch.optim.Optimizer, model: m.Model) -> dict[str, Any]:
    """The state of an optimizer after :data:`STEPS` steps, as one process alone would have it; its averages are those of one."""
    path_of = {parameter: path for path, parameter in model.named_parameters()}
    grads = {path: trip.values[name] for name, path in m.names_in_model(trip).items()}
    state, groups = {}, []
    for at, group in enumerate(optimizer.param_groups):
        path = path_of[group["params"][0]]
        grad = grads[path]
        state[path] = {"step": torch.tensor(float(STEPS)), "exp_avg": grad / 2, "exp_avg_sq": grad * grad / 2}
        others = {key: value for key, value in group.items() if key not in ("params", "lr")}
        groups.append({"params": [path], "lr": m.RATES[at % len(m.RATES)], **others})
    return {"state": state, "param_groups": groups}


def check_model(case: Case, here: Here) -> None:
    """A whole state makes every model the one that it is of, however that is sharded."""
    trip = t.read_trip(case)
    model = m.model_of(trip, here, trip.save, poisoned=True)
    given = whole_model(trip) if here.rank == 0 or case.get("how") == "each" else {}
    set_model_state_dict(model, given, options=handed(case))
    m.judge_model(trip, here, trip.save, model, "given")


def check_optimizer(case: Case, here: Here) -> None:
    """A whole state makes every optimizer the one that it is of, however the model is sharded."""
    trip = t.read_trip(case)
    model = m.model_of(trip, here, trip.save, poisoned=True)
    optimizer = m.optimizer_of(model, m.OTHER_RATES)
    given: Any = whole_optimizer(trip, optimizer, model) if here.rank == 0 or case.get("how") == "each" else {}
    set_optimizer_state_dict(model, optimizer, given, options=handed(case))
    m.judge_optimizer(trip, here, trip.save, model, optimizer, check="given", steps=STEPS)
    m.judge_model_unchanged(trip, here, trip.save, model)


def check_pending(case: Case, here: Here) -> None:
    """A state is taken over by an optimizer whose parameters have gradients already, as by any other."""
    trip = t.read_trip(case)
    source = m.model_of(trip, here, trip.save, poisoned=False)
    trained = m.optimizer_of(source, m.RATES)
    for name, parameter in m.trained_of(trip, source):
        parameter.grad = t.placed(here, trip.save, name, trip.values[name], torch.clone)
    trained.step()
    how = case.get("how", "plain")
    options = StateDictOptions(full_state_dict=how == "each", flatten_optimizer_state_dict=how == "flat")
    state: Any = get_optimizer_state_dict(source, trained, options=options)
    model = m.model_of(trip, here, trip.save, poisoned=True)
    optimizer = m.optimizer_of(model, m.OTHER_RATES)
    for name, parameter in m.trained_of(trip, model):
        parameter.grad = t.placed(here, trip.save, name, trip.values[name], torch.clone)
    set_optimizer_state_dict(model, optimizer, state, options=options)
    m.judge_optimizer(trip, here, trip.save, model, optimizer, check="taken over")


# the optimizers of all parameters of ``m``, as scripts write them
WRITTEN = {
    "adam": "Adam(m.parameters(), lr=0.5, betas=(0.5, 0.5), foreach=False)",
    "sgd": "SGD(m.parameters(), lr=0.5, foreach=False)",
    "momentum": "SGD(m.parameters(), lr=0.5, momentum=0.5, foreach=False)",
    "adagrad": "Adagrad(m.parameters(), lr=0.5, foreach=False)",
    "rmsprop": "RMSprop(m.parameters(), lr=0.5, alpha=0.5, foreach=False)",
}
OPTIMIZERS: dict[str, Any] = {
    "adam": lambda held: torch.optim.Adam(held, lr=0.5, betas=(0.5, 0.5), foreach=False),
    "sgd": lambda held: torch.optim.SGD(held, lr=0.5, foreach=False),
    "momentum": lambda held: torch.optim.SGD(held, lr=0.5, momentum=0.5, foreach=False),
    "adagrad": lambda held: torch.optim.Adagrad(held, lr=0.5, foreach=False),
    "rmsprop": lambda held: torch.optim.RMSprop(held, lr=0.5, alpha=0.5, foreach=False),
}


def check_asked(case: Case, here: Here) -> None:
    """Whoever asks for the state of an optimizer finds it as it was: the next step is that of an optimizer that nobody asked."""
    trip = t.read_trip(case)
    made = [m.model_of(trip, here, trip.save, poisoned=False) for _ in range(2)]
    mine, other = (OPTIMIZERS[case.get("opt")]([p for p in model.parameters() if p.requires_grad]) for model in made)
    get_optimizer_state_dict(made[0], mine)
    m.judge_model(trip, here, trip.save, made[0], "model")
    for model, optimizer in zip(made, (mine, other), strict=True):
        for name, parameter in m.trained_of(trip, model):
            here.require(parameter.grad is None, "wrong-value", "gradients", f"asking for a state left {name} a gradient")
            parameter.grad = t.placed(here, trip.save, name, trip.values[name], torch.clone)
        optimizer.step()
    for (name, got_there), (_, want) in zip(m.trained_of(trip, made[0]), m.trained_of(trip, made[1]), strict=True):
        here.same(local(got_there.data), local(want.data), "stepped", what=f"{name}, after a step")
        for key, value in other.state[want].items():
            got = mine.state[got_there].get(key)
            if isinstance(value, torch.Tensor) and isinstance(got, torch.Tensor):
                here.same(local(got), local(value), "state", what=f"{key} of {name}, after a step")


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def check_regrouped(case: Case, here: Here) -> None:
    """A flat state knows the options of every parameter: one group of parameters whose options differ is refused, of equal ones not."""
    trip = t.read_trip(case)
    rates, apart = m.RATES if case.get("rates") == "differ" else (0.5,), case.get("groups", "together") == "apart"
    source = m.model_of(trip, here, trip.save, poisoned=False)
    trained = in_one_group(source, 0.5) if apart else m.optimizer_of(source, rates)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    state: Any = get_optimizer_state_dict(source, trained, options=options)
    model = m.model_of(trip, here, trip.save, poisoned=True)
    together = m.optimizer_of(model, m.OTHER_RATES) if apart else in_one_group(model, 0.75)
    if case.get("rates") == "differ":
        message = "one group of parameters that were saved with different rates"
        here.refused(lambda: set_optimizer_state_dict(model, together, state, options=options), "regrouped", message)
        return
    set_optimizer_state_dict(model, together, state, options=options)
    got = [group["lr"] for group in together.param_groups]
    here.require({*got} == {0.5}, "wrong-value", "rate", "the rate of a group is not that of its parameters", 0.5, got)


def in_one_group(model: m.Model, rate: float) -> torch.optim.Optimizer:
    return torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=rate, betas=(0.5, 0.5), foreach=False)


def check_several(case: Case, here: Here) -> None:
    """The optimizers of one model, one for each parameter, give one state together, and take it back in any order."""
    trip = t.read_trip(case)
    options = StateDictOptions(flatten_optimizer_state_dict=case.get("how") == "flat")
    source = m.model_of(trip, here, trip.save, poisoned=False)
    for name, parameter in m.trained_of(trip, source):
        parameter.grad = t.placed(here, trip.save, name, trip.values[name], torch.clone)
    trained = one_for_each(source, m.RATES)
    for optimizer in trained:
        optimizer.step()
    state: Any = get_optimizer_state_dict(source, trained, options=options)
    model = m.model_of(trip, here, trip.save, poisoned=True)
    others = one_for_each(model, m.OTHER_RATES)
    set_optimizer_state_dict(model, others[::-1], state, options=options)
    m.judge_optimizer(trip, here, trip.save, model, Together(others), check="taken over")


def one_for_each(model: m.Model, rates: tuple[float, ...]) -> list[torch.optim.Optimizer]:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [torch.optim.Adam([p], lr=rates[at % len(rates)], betas=(0.5, 0.5), foreach=False) for at, p in enumerate(trained)]


class Together:
    """The groups and the states of several optimizers."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self.param_groups = [group for optimizer in optimizers for group in optimizer.param_groups]
        self.state = {parameter: state for optimizer in optimizers for parameter, state in optimizer.state.items()}


def _drawn(
    law: str, limits: Limits, hows: tuple[str, ...], *, floats: bool, plain: bool = False, least: int = 1, field: str = "how"
) -> SearchStrategy[Case]:
    on = meshes(limits, tables=False, outside=False)
    outside = [mesh for mesh in meshes(limits, tables=False) if mesh.ranks != tuple(range(mesh.size))]

    @st.composite
    def case(draw: st.DrawFn) -> Case:
        mesh = draw(st.sampled_from(outside if draw(st.integers(0, 15)) == 7 and outside and not plain else on))
        kinds = draw(st.sampled_from(KINDS)) if not plain else ("R", "S")
        fields: dict[str, Any] = {"mesh": mesh}
        for name in "xab"[: draw(st.integers(least, 3))]:
            shape = draw(shapes(min_dims=0 if draw(st.integers(0, 9)) == 9 else 1))
            chosen = kinds if shape else ("R",)
            fill = "small" if floats else "distinct"
            dtype = draw(st.sampled_from(("float32", "float32", "float64") if floats else ("float32", "float64", "bfloat16", "int64")))
            fields[name] = TensorSpec(shape, draw(placements(mesh, len(shape), kinds=chosen)), dtype, fill)
        if hows:
            fields[field] = draw(st.sampled_from(hows))
        return Case.of(law, **fields, seed=draw(st.integers(0, 9)) or None)

    return case()


def _regrouped(limits: Limits) -> SearchStrategy[Case]:
    drawn = _drawn("optimizer.regrouped", limits, (), floats=True, plain=True, least=2)
    # of one rate for all: into one group, or out of one
    told = st.sampled_from(({"rates": "equal"}, {"rates": "equal", "groups": "apart"}) * 4 + ({"rates": "differ"},))
    return st.tuples(drawn, told).map(lambda pair: pair[0].with_fields(**pair[1]))


# those that count their steps seldom: being asked is one of them
ASKED = (*("adagrad", "sgd", "momentum") * 4, "adam", "rmsprop")
COMMON: dict[str, Any] = {"needs": ("checkpoint", "object_collectives"), "smallest": 1}
LAWS = (
    Law(
        id="optimizer.whole-model",
        clause="A whole state, from rank 0 or from each rank's own, makes a model of any layout the one that the state is of.",
        source=f"{DOCS}, StateDictOptions: full_state_dict, broadcast_from_rank0",
        check=check_model,
        control="optimizer.whole-model mesh=2 x=4x2:S(0) how=broadcast",
        planted="first_slice_for_all",
        draw=lambda limits: _drawn("optimizer.whole-model", limits, ("broadcast", "each"), floats=False),
        draws=16,
        script=lambda case: given_whole(case, m.RATES, m.OTHER_RATES),
        **COMMON,
    ),
    Law(
        id="optimizer.whole",
        clause="A whole state, from rank 0 or from each rank's own, makes the optimizer of a model of any layout the one that it is of.",
        source=f"{DOCS}, set_optimizer_state_dict; StateDictOptions: full_state_dict, broadcast_from_rank0",
        check=check_optimizer,
        control="optimizer.whole mesh=2 x=4x2:S(0):float32:small how=broadcast",
        planted="first_slice_for_all",
        draw=lambda limits: _drawn("optimizer.whole", limits, ("broadcast", "each"), floats=True),
        draws=14,
        script=lambda case: given_whole(case, m.RATES, m.OTHER_RATES, steps=STEPS),
        **COMMON,
    ),
    Law(
        id="optimizer.pending",
        clause="A state is taken over whether or not the parameters have gradients.",
        source=f"{DOCS}, set_optimizer_state_dict: loads the optimizers state_dict",
        check=check_pending,
        control="optimizer.pending mesh=2 x=4x2:S(0):float32:small a=2:R:float32:small",
        planted="rates_of_the_last_group",
        draw=lambda limits: _drawn(
            "optimizer.pending", limits, ("plain", "plain", "plain", "plain", "flat", "each"), floats=True, plain=True
        ),
        draws=16,
        features=lambda case: {
            "pending-gradients",
            *({"flat-state"} if case.get("how", "") == "flat" else ()),
            *({"whole-state"} if case.get("how", "") == "each" else ()),
        },
        script=lambda case: pending_lines(case, m.RATES, m.OTHER_RATES),
        **COMMON,
    ),
    Law(
        id="optimizer.asked",
        clause="Asking for the state of an optimizer changes neither it nor its model: the step that follows is its first.",
        source=f"{DOCS}, get_optimizer_state_dict: return the combined state_dict for optimizers",
        check=check_asked,
        control="optimizer.asked mesh=2 x=4x2:S(0):float32:small opt=adagrad",
        planted="asking_changes_the_model",
        draw=lambda limits: _drawn("optimizer.asked", limits, ASKED, floats=True, plain=True, field="opt"),
        draws=16,
        script=lambda case: asked(case, WRITTEN[case.get("opt")]),
        features=lambda case: {"never-stepped"} if case.get("opt") in ("adam", "rmsprop") else set(),
        **COMMON,
    ),
    Law(
        id="optimizer.several",
        clause="The optimizers of one model give one state together, of which each takes back its own.",
        source=f"{DOCS}, get_optimizer_state_dict: return the combined state_dict for optimizers",
        check=check_several,
        control="optimizer.several mesh=2 x=4x2:S(0):float32:small a=2:R:float32:small how=plain",
        planted="groups_of_the_last_optimizer",
        draw=lambda limits: _drawn("optimizer.several", limits, ("plain", "flat"), floats=True, plain=True, least=2),
        draws=10,
        features=lambda case: {"several-optimizers", *({"flat-state"} if case.get("how") == "flat" else ())},
        script=lambda case: several(case, m.RATES, m.OTHER_RATES),
        **COMMON,
    ),
    Law(
        id="optimizer.regrouped",
        clause="A flat state loads into other groups where the options of their parameters agree, and is refused where they differ.",
        source=f"{DOCS}, StateDictOptions: flatten_optimizer_state_dict; all parameters of a group should have the same saved value",
        check=check_regrouped,
        control="optimizer.regrouped mesh=2 x=4:S(0):float32:small a=2:R:float32:small rates=equal",
        planted="rates_lost_when_flat",
        draw=_regrouped,
        script=lambda case: regrouped(case, m.RATES if case.get("rates") == "differ" else (0.5,)),
        draws=10,
        features=lambda case: {"flat-state", *({"must-refuse", "rates-differ"} if case.get("rates") == "differ" else ())},
        **COMMON,
    ),
)
