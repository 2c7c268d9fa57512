"""Laws on the helpers that turn models and optimizers into states: their names, whole and sharded, through a checkpoint and back.

The model of a case has one parameter for each tensor of floats and one buffer for each other, every second one inside a submodule.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from conformance import trip as t
from conformance.case import Case
from conformance.here import Here
from conformance.laws.roundtrip import model_scripts as scripts
from conformance.laws.roundtrip.cases import law_of
from reference import simulate

DOCS = "torch.distributed.checkpoint.state_dict docs"
RATES = (0.5, 0.25, 0.125)
OTHER_RATES = (0.75, 0.875, 0.375)
INNER = "inner."


class Model(nn.Module):
    """The first tensor and every second one after it at the top, the others in ``inner``; those in ``frozen`` are not trained."""

    def __init__(self, tensors: dict[str, Any], frozen: Sequence[str] = ()) -> None:
        super().__init__()
        self.inner = nn.Module()
        for at, (name, tensor) in enumerate(tensors.items()):
            home = self.inner if at % 2 else self
            if tensor.dtype.is_floating_point:
                home.register_parameter(name, nn.Parameter(tensor, requires_grad=name not in frozen))
            else:
                home.register_buffer(name, tensor)


def model_of(trip: t.Trip, here: Here, end: t.End, *, poisoned: bool, frozen: Sequence[str] = ()) -> Model:
    """The model of one end, on this rank."""
    put = t.poison if poisoned else torch.clone
    return Model({name: t.placed(here, end, name, trip.due(end, name), put) for name in trip.values}, frozen)


def frozen_of(trip: t.Trip) -> list[str]:
    """The last one of several parameters."""
    return [name for name, full in trip.values.items() if full.dtype.is_floating_point][1:][-1:]


def names_in_model(trip: t.Trip) -> dict[str, str]:
    """The name in the model of each tensor of a case."""
    return {name: f"{INNER}{name}" if at % 2 else name for at, name in enumerate(trip.values)}


def judge_model(trip: t.Trip, here: Here, end: t.End, model: Model, check: str) -> None:
    """Every parameter and buffer holds what was saved."""
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, path in names_in_model(trip).items():
        tensor = held[path].data if isinstance(held[path], nn.Parameter) else held[path]
        t.judge_tensor(here, tensor, trip.due(end, name), end.layout(name), place=path, check=check)


def check_model(case: Case, here: Here) -> None:
    """A model's state, saved and loaded into a model that is sharded otherwise, is the model again."""
    trip = t.read_trip(case)
    if here.stage == 0:
        state = get_model_state_dict(model_of(trip, here, trip.save, poisoned=False))
        due = {*names_in_model(trip).values()}
        here.require({*state} == due, "wrong-metadata", "names", "the state of the model has other names than the model", due, {*state})
        t.save(trip, here, {"model": state})
        return
    state = t.load(here, {"model": get_model_state_dict(model_of(trip, here, trip.load, poisoned=True))})["model"]
    model = model_of(trip, here, trip.load, poisoned=True)
    set_model_state_dict(model, state)
    judge_model(trip, here, trip.load, model, "loaded")
    state.pop(next(iter(names_in_model(trip).values())))
    here.refused(lambda: set_model_state_dict(model, state), "missing", "a model's state without one of its parameters")


def check_whole(case: Case, here: Here) -> None:
    """Asked for whole, a model's state is whole; from rank 0, all ranks get their part; frozen parameters may be left out."""
    trip = t.read_trip(case)
    names, frozen = names_in_model(trip), frozen_of(trip)
    model = model_of(trip, here, trip.save, poisoned=False, frozen=frozen)
    whole: dict[str, Any] = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if here.require(
        {*whole} == {*names.values()}, "wrong-metadata", "names", "the whole state has other names than the model", names, {*whole}
    ):
        for name, path in names.items():
            if here.coord(trip.save.mesh) is not None:
                t.judge_tensor(here, whole[path], trip.values[name], None, place=path, check="whole")
    offloaded = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    due = {*names.values()} if here.rank == 0 else set()
    here.require(
        {*offloaded} == due, "wrong-metadata", "offloaded", "a whole state that is offloaded belongs to rank 0 alone", due, {*offloaded}
    )
    kept = {*get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True))}
    thawed = {path for name, path in names.items() if name not in frozen}
    here.require(kept == thawed, "wrong-metadata", "frozen", "without frozen parameters other names are left than must", thawed, kept)
    other = model_of(trip, here, trip.save, poisoned=True, frozen=frozen)
    full: dict[str, Any] = {path: trip.values[name].clone() for name, path in names.items()} if here.rank == 0 else {}
    set_model_state_dict(other, full, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    judge_model(trip, here, trip.save, other, "from rank 0")
    lacking: dict[str, Any] = {path: trip.values[name].clone() for name, path in [*names.items()][1:]} if here.rank == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    here.refused(lambda: set_model_state_dict(other, lacking, options=options), "missing", "a whole state without one of the parameters")


def check_part(case: Case, here: Here) -> None:
    """Of a module inside, a state has its tensors alone, under the names of the model or under its own."""
    trip = t.read_trip(case)
    model = model_of(trip, here, trip.save, poisoned=False)
    for kept in (True, False):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            options = StateDictOptions(keep_submodule_prefixes=kept)
            part: dict[str, Any] = get_model_state_dict(model, submodules={model.inner}, options=options)
        due = {path if kept else path.removeprefix(INNER): name for name, path in names_in_model(trip).items() if path.startswith(INNER)}
        message = f"the state of a module inside, asked for {'with' if kept else 'without'} its prefix, has other names than it must"
        if here.require({*part} == {*due}, "wrong-metadata", "names", message, sorted(due), sorted(part)):
            for path, name in due.items():
                t.judge_tensor(here, part[path], trip.values[name], trip.save.layout(name), place=path, check="part")


def optimizer_of(model: Model, rates: tuple[float, ...]) -> torch.optim.Optimizer:
    """Adam with a group for each trainable parameter, whose averages of small whole numbers are exact."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [{"params": [parameter], "lr": rates[at % len(rates)]} for at, parameter in enumerate(trained)]
    return torch.optim.Adam(groups, betas=(0.5, 0.5), foreach=False)


def check_optimizer(case: Case, here: Here) -> None:
    """An optimizer's state, saved and loaded into another world, is the state again: averages, steps, and each group's options."""
    trip = t.read_trip(case)
    end = trip.load if here.stage else trip.save
    model = model_of(trip, here, end, poisoned=bool(here.stage))
    optimizer = optimizer_of(model, OTHER_RATES if here.stage else RATES)
    options = StateDictOptions(flatten_optimizer_state_dict=case.get("flat", "no") == "yes")
    if here.stage == 0:
        for name, parameter in trained_of(trip, model):
            parameter.grad = t.placed(here, end, name, trip.values[name], torch.clone)
        optimizer.step()
        t.save(trip, here, {"optim": get_optimizer_state_dict(model, optimizer, options=options)})
        judge_optimizer(trip, here, end, model, optimizer, check="before")
        return
    state = t.load(here, {"optim": get_optimizer_state_dict(model, optimizer, options=options)})["optim"]
    rates = [group["lr"] for group in optimizer.param_groups]
    due = [OTHER_RATES[at % len(OTHER_RATES)] for at in range(len(rates))]
    here.require(rates == due, "wrong-value", "asked", "asking for the state of an optimizer changed its rates", due, rates)
    other = model_of(trip, here, end, poisoned=True)
    fresh = optimizer_of(other, OTHER_RATES)
    set_optimizer_state_dict(other, fresh, state, options=options)
    judge_optimizer(trip, here, end, other, fresh, check="loaded")
    judge_model_unchanged(trip, here, end, other)
    if "state" in state:
        state["state"].pop(next(iter(state["state"])))
        message = "an optimizer's state without that of one of its parameters"
        here.refused(lambda: set_optimizer_state_dict(other, fresh, state, options=options), "missing", message)


def check_optimizer_whole(case: Case, here: Here) -> None:
    """Asked for whole, an optimizer's state is whole; from rank 0, every rank's optimizer gets its part."""
    trip = t.read_trip(case)
    model = model_of(trip, here, trip.save, poisoned=False)
    optimizer = optimizer_of(model, RATES)
    for name, parameter in trained_of(trip, model):
        parameter.grad = t.placed(here, trip.save, name, trip.values[name], torch.clone)
    optimizer.step()
    whole: Any = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))
    paths = names_in_model(trip)
    for name, _ in trained_of(trip, model):
        held = whole["state"].get(paths[name], {})
        if here.require("exp_avg" in held, "wrong-metadata", "whole", f"the whole state of {name} has no exp_avg", "exp_avg", [*held]):
            t.judge_tensor(here, held["exp_avg"], trip.values[name] / 2, None, place=f"exp_avg of {name}", check="whole")
    other = model_of(trip, here, trip.save, poisoned=True)
    fresh = optimizer_of(other, OTHER_RATES)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_optimizer_state_dict(other, fresh, whole if here.rank == 0 else {}, options=options)
    judge_optimizer(trip, here, trip.save, other, fresh, check="from rank 0")


def trained_of(trip: t.Trip, model: Model) -> list[tuple[str, nn.Parameter]]:
    """The trainable parameters, by the name of their tensor in the case."""
    held = dict(model.named_parameters())
    return [(name, held[path]) for name, path in names_in_model(trip).items() if path in held and held[path].requires_grad]


def judge_optimizer(trip: t.Trip, here: Here, end: t.End, model: Model, optimizer: Any, *, check: str, steps: int = 1) -> None:
    """Averages are halves of the gradient and of its square, as after one step; so many ``steps`` are counted; each group has its rate."""
    for at, (name, parameter) in enumerate(trained_of(trip, model)):
        rate = optimizer.param_groups[at]["lr"]
        want = RATES[at % len(RATES)]
        here.require(float(rate) == want, "wrong-value", check, f"the rate of {name} is {rate}, must be {want}", want, rate)
        held = optimizer.state.get(parameter, {})
        step = held.get("step")
        value = step.to_local() if isinstance(step, DTensor) else step
        counted = value is not None and float(value) == steps
        here.require(counted, "wrong-value", check, f"the step of {name} is {value}, must be {steps}", steps, value)
        grad = trip.due(end, name)
        for key, full in (("exp_avg", grad / 2), ("exp_avg_sq", grad * grad / 2)):
            if here.require(key in held, "wrong-metadata", check, f"the state of {name} has no {key}", key, [*held]):
                t.judge_tensor(here, held[key], full, end.layout(name), place=f"{key} of {name}", check=check)


def judge_model_unchanged(trip: t.Trip, here: Here, end: t.End, model: Model) -> None:
    """Loading the state of an optimizer leaves the parameters of its model alone."""
    for name, parameter in trained_of(trip, model):
        layout = end.layout(name)
        coord = here.coord(layout.mesh) if layout else None
        full = t.poison(trip.due(end, name))
        if layout is None or coord is not None:
            local = parameter.data.to_local() if isinstance(parameter.data, DTensor) else parameter.data
            here.same(local, simulate.take(full, layout, coord) if layout and coord is not None else full, "parameters", what=name)


WHOLE_OPTIMIZERS = (
    "mesh=2 x=5x2:S(0):float32:small a=4x3:S(1):float32:small",
    "mesh=3 x=7:S(0):float32:small a=4:R:float32:small b=2x3:S(0):float64:small",
    "mesh=2x2 x=5x4:S(0),S(1):float32:small a=6:R,S(0):float32:small",
)
MODELS = (
    "mesh=2 mesh.load=3 x=5x2:S(0) a=4x3:S(1) to.x=S(1) to.a=S(0)",
    "mesh=2 x=7:S(0) a=4:R b=3x3:S(1):int64 to.x=R to.a=S(0) to.b=S(0)",
    "mesh=2x2 mesh.load=2 x=5x4:S(0),S(1) a=6:R,S(0) c=3:-:float64 to.x=S(0) to.a=S(0)",
    "mesh=3 mesh.load=2 x=2x3:S(0) a=4x3:S(0):bfloat16 to.x=S(1) to.a=S(1)",
)
OPTIMIZERS = (
    "mesh=2 mesh.load=3 x=5x2:S(0):float32:small a=4x3:S(1):float32:small b=3:R:float32:small to.x=S(1) to.a=S(0) to.b=R",
    "mesh=2 x=7:S(0):float32:small a=4:R:float32:small to.x=R to.a=S(0) flat=yes",
    "mesh=2x2 mesh.load=2 x=5x4:S(0),S(1):float64:small a=6:R,S(0):float32:small c=3:-:float32:small to.x=S(0) to.a=S(0)",
    "mesh=3 mesh.load=2 x=2x3:S(0):float32:small a=4x3:S(0):float64:small b=2:R to.x=S(1) to.a=S(1) to.b=R flat=yes",
)

WHOLES = (
    "mesh=2 x=5x2:S(0) a=4x3:S(1)",
    "mesh=3 x=7:S(0) a=4:R b=3x3:S(1):int64 c=2x2:S(0):float64",
    "mesh=2x2 x=5x4:S(0),S(1) a=6:R,S(0) c=3:-:float64",
    "mesh=3 x=2x3:S(0) a=4x3:S(0):bfloat16",
    "mesh=2x2@0,2,1,3 x=7x3:S(0),S(0) a=3:S(0),R b=8x2:_S(0,2),S(0)",
)

LAWS = (
    law_of(
        "model",
        clause="The state of a model, saved and loaded, makes a model sharded otherwise the same model; an incomplete one is refused.",
        source=f"{DOCS}, get_model_state_dict, set_model_state_dict",
        check=check_model,
        holds="mesh=2 x=5x2:S(0) a=4x3:S(1) to.x=S(1) to.a=S(0)",
        planted="model_loaded_without_its_inner_part",
        texts=MODELS,
        sweeps=4,
        stages=t.worlds,
        script=scripts.model,
    ),
    law_of(
        "model-whole",
        clause="Asked for whole, the state of a model is whole on every rank; given whole on rank 0 alone, all get their part of it.",
        source=f"{DOCS}, StateDictOptions: full_state_dict, broadcast_from_rank0, ignore_frozen_params, strict",
        check=check_whole,
        holds="mesh=2 x=5x2:S(0) a=4x3:S(1)",
        planted="first_slice_for_all",
        texts=WHOLES,
        sweeps=5,
        script=lambda case: scripts.whole(case, frozen_of(t.read_trip(case))),
    ),
    law_of(
        "model-part",
        clause="Of a module inside, the state has its tensors alone, under their names in the model or under their own, as asked.",
        source=f"{DOCS}, get_model_state_dict: submodules; StateDictOptions: keep_submodule_prefixes",
        check=check_part,
        holds="mesh=2 x=5x2:S(0) a=4x3:S(1)",
        planted="prefixes_always_kept",
        texts=WHOLES,
        sweeps=len(WHOLES),
        script=scripts.part,
    ),
    law_of(
        "optimizer",
        clause="The state of an optimizer, saved and loaded, is that of an optimizer whose model is sharded otherwise, group by group.",
        source=f"{DOCS}, get_optimizer_state_dict, set_optimizer_state_dict",
        check=check_optimizer,
        holds="mesh=2 x=3:S(0):float32:small a=2:R:float32:small",
        planted="rates_in_reverse",
        texts=OPTIMIZERS,
        sweeps=4,
        stages=t.worlds,
        script=lambda case: scripts.optimizer(case, RATES, OTHER_RATES),
    ),
    law_of(
        "optimizer-whole",
        clause="Asked for whole, the state of an optimizer is whole; given whole on rank 0 alone, every rank's optimizer gets its part.",
        source=f"{DOCS}, StateDictOptions: full_state_dict, broadcast_from_rank0",
        check=check_optimizer_whole,
        holds="mesh=2 x=3:S(0):float32:small a=2:R:float32:small",
        planted="optimizer_from_rank_zero_cut_at_the_beginning",
        texts=WHOLE_OPTIMIZERS,
        sweeps=3,
        script=lambda case: scripts.optimizer_whole(case, RATES, OTHER_RATES),
    ),
)
