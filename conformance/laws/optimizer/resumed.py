"""Laws of optimizer states saved during training, of the state that is set on a model, of frozen parameters, and of the
states of one module.

A case is a model as :mod:`shardlaw.conformance.laws.optimizer.nets` describes it. ``how`` are the options of the state
(see :mod:`~.both_states`); ``since`` says what differs between the saved optimizer and the target:

``trained``    nothing
``untrained``  the last parameter had no gradient before the save
``frozen``     the last parameter does not require a gradient after the save
``stateless``  the optimizers have no state of any parameter
``named``      the target optimizer has the names of its parameters, the saved one has not
``unnamed``    the saved optimizer has the names of its parameters, the target has not
``begun``      the target optimizer already has a state of all parameters but the last
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from shardlaw.conformance.law.act import law
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Of
from shardlaw.conformance.law.fields import Rank
from shardlaw.conformance.laws.checkpoint.models import (
    OTHER_RATES,
    RATES,
    adam,
    dense,
    frozen,
    keeps,
    learned,
    saved_rates,
    with_rates,
)
from shardlaw.conformance.laws.optimizer.both_states import (
    DOCS,
    SMALL,
    How,
    Traits,
    Wrap,
    optimizer_state_names,
    sweep_record,
)
from shardlaw.conformance.laws.optimizer.both_states import features as features_of_both
from shardlaw.conformance.laws.optimizer.fields import Poisoned, StateTensors, Tensors, values_with_grads
from shardlaw.conformance.laws.optimizer.nets import Net, by_state_name, state_options, train_step, wrap_model

Since = Literal["trained", "untrained", "frozen", "stateless", "named", "unnamed", "begun"]
SINCE = {"untrained": "stateless", "stateless": "stateless", "frozen": "frozen"}
FORMS = ("plain", "flat", "whole", "broadcast")


def features(case: Case) -> set[str]:
    since = SINCE.get(case.get("since", "trained"))
    return features_of_both(case) - {"broadcast-both"} | ({since} if since else set())


def make_optimizer(net: Net, rates: Sequence[float], since: Since, names: bool) -> torch.optim.Optimizer:
    """Adam with a group for each parameter, or a stateless SGD."""
    if since == "stateless":
        return torch.optim.SGD(with_rates([[one] for one in net.parameters()], rates), foreach=False)
    if not names:
        return adam([*net.parameters()], rates)
    groups = with_rates([[one] for one in net.named_parameters()], rates)
    return torch.optim.Adam(groups, betas=(0.5, 0.5), foreach=False)


EACH_FORM = [(since, how) for since in ("trained", "frozen", "stateless", "named", "unnamed") for how in FORMS]
RESUMED = (
    *(
        f"mesh=2 x=5x2:S(0):{SMALL} a=4:R:{SMALL} since={since} how={how}"
        for since, how in (*EACH_FORM, *(("untrained", how) for how in ("plain", "flat", "whole")))
    ),
    f"mesh=3 x=7:S(0):{SMALL} a=4x3:S(1):{SMALL} b=2:-:{SMALL} since=frozen",
    f"mesh=2x2 x=5x4:S(0),S(1):{SMALL} a=6:R,S(0):{SMALL} since=named how=plain,offload",
    *(f"mesh=2 x=5x2:S(0):{SMALL} a=4:-:{SMALL} since=begun how={how}" for how in ("plain", "whole")),
    # not in smoke: if the ranks hang, it takes the time limit of a case
    f"mesh=2 x=5x2:S(0):{SMALL} a=4:R:{SMALL} since=untrained how=broadcast",
)


@law(
    "optimizer.resumed",
    source=f"{DOCS}, get_optimizer_state_dict, set_optimizer_state_dict: load the state of optimizers; torch.optim",
    control=f"mesh=2 x=4x2:S(0):{SMALL} a=2:R:{SMALL}",
    features=features,
    **sweep_record(*RESUMED, untried=1),
)
def resumed(tensors: Tensors, others: Poisoned, rank: Rank, how: How = (), since: Since = "trained"):
    """set_optimizer_state_dict restores exactly the saved state, whichever parameters were frozen before the save, or
    are now, and whether or not the optimizers know their names."""
    net = Net(tensors)
    optimizer, last = make_optimizer(net, RATES, since, since == "unnamed"), [*net.parameters()][-1]
    last.requires_grad_(since != "untrained")
    train_step(optimizer)
    last.requires_grad_(since != "frozen")
    options = state_options(how)
    get_options = replace(options, broadcast_from_rank0=False)
    state: Any = get_optimizer_state_dict(net, optimizer, options=get_options)

    net = Net(others)
    optimizer, last = make_optimizer(net, OTHER_RATES, since, since == "named"), [*net.parameters()][-1]
    last.requires_grad_(since not in ("frozen", "begun"))
    if since == "begun":  # a state of all parameters but the last
        train_step(optimizer)
        last.requires_grad_(True)
    set_optimizer_state_dict(net, optimizer, state if rank == 0 or "broadcast" not in how else {}, options=options)
    last.requires_grad_(True)
    parameters = net.optimizer_parameters()
    if since == "untrained":
        optimizer.state.pop(parameters.popitem()[1], None)
    return {
        "entries": len(optimizer.state),
        **learned(parameters, optimizer),
        "options": [repr(group.get("betas")) for group in optimizer.param_groups],
    }


@resumed.due
def _(others, since):
    values = values_with_grads(others)
    rates = saved_rates([*values])
    if since == "untrained":
        values.popitem()
    due = keeps(values, rates)
    if since == "stateless":
        due |= {"steps": dict.fromkeys(values), "averages": {path: dict[str, Any]() for path in values}}
    return {
        "entries": Of(0 if since == "stateless" else len(values)),
        **due,
        "options": Of(["(0.5, 0.5)"] * len(rates)) if since == "trained" else ...,
    }


UNCHANGED = (
    f"mesh=2 x=5x2:S(0):{SMALL} a=4:R:{SMALL}",
    f"mesh=2 x=5x2:-:{SMALL} a=4:-:{SMALL} wrap=ddp",
    f"mesh=2 x=5x2:S(0):{SMALL} a=4:R:{SMALL} wrap=compile",
    f"mesh=2 x=5x2:S(0):{SMALL} a=4:R:{SMALL} how=whole",
    f"mesh=2 x=5x2:S(0):{SMALL} a=4:R:{SMALL} how=broadcast",
    f"mesh=3 x=7:S(0):{SMALL} a=4x3:S(1):{SMALL} b=3:R:int64 with=extra,tied",
)


@law(
    "optimizer.left-alone",
    source=f"{DOCS}, set_model_state_dict: model_state_dict; torch.nn.Module.load_state_dict, which takes a copy",
    control=f"mesh=2 x=4x2:S(0):{SMALL} a=2:R:{SMALL}",
    features=features,
    **sweep_record(*UNCHANGED),
)
def leave_unchanged(
    tensors: StateTensors, others: Poisoned, rank: Rank, how: How = (), with_: Traits = (), wrap: Wrap = "none"
):
    """set_model_state_dict does not change the state that it sets, so that it can be set on another model."""
    extra = {"_extra_state": {"count": 3}} if "extra" in with_ else None
    state = by_state_name(tensors, with_, extra) if rank == 0 or "broadcast" not in how else {}
    before = dict(state)
    set_model_state_dict(wrap_model(Net(others, with_, other=True), wrap), state, options=state_options(how))
    return {
        "names": sorted(state),
        "other values": [name for name, value in before.items() if name in state and state[name] is not value],
    }


@leave_unchanged.due
def _(tensors, rank: Rank, how, with_):
    extra: dict[str, Any] | None = {"_extra_state": {}} if "extra" in with_ else None
    state = by_state_name(tensors, with_, extra) if rank == 0 or "broadcast" not in how else {}
    return {"names": Of(sorted(state)), "other values": Of([], "wrong-value")}


UNFROZEN = (
    f"mesh=2 x=5x2:S(0):{SMALL} a=4:R:{SMALL} with=frozen,tied",
    f"mesh=2 x=5x2:S(0):{SMALL} a=4:R:{SMALL} with=frozen,same",
    f"mesh=2 x=5x2:-:{SMALL} a=4:-:{SMALL} b=2:-:int64 wrap=ddp with=frozen",
    f"mesh=2 x=5x2:S(0):{SMALL} a=4:R:{SMALL} with=frozen wrap=compile how=whole",
    f"mesh=2 x=5x2:S(0):{SMALL} a=4:R:{SMALL} by=module",
    f"mesh=2 x=5x2:-:{SMALL} a=4:R:{SMALL} b=2:-:{SMALL} c=3:S(0):{SMALL} with=frozen,tied by=module how=whole",
    f"mesh=2 x=5x2:S(0):{SMALL} a=4:R:{SMALL} b=2:R:{SMALL} with=frozen by=module",
    f"mesh=2 x=2:S(0):{SMALL} a=2:R:{SMALL} with=renamed,rested",
)


@law(
    "optimizer.unfrozen",
    source=f"{DOCS}, StateDictOptions: ignore_frozen_params, the state has no frozen parameters",
    control=f"mesh=2 x=4x2:S(0):{SMALL} a=2:R:{SMALL} with=frozen",
    features=features,
    **sweep_record(*UNFROZEN),
)
def unfrozen(
    tensors: Tensors, how: How = (), with_: Traits = (), wrap: Wrap = "none", by: Literal["module"] | None = None
):
    """With ignore_frozen_params, the state of a model, or of one of its modules, has no name of a frozen parameter."""
    options = StateDictOptions(full_state_dict="whole" in how, ignore_frozen_params=True)
    net = Net(tensors, with_)
    model: nn.Module = wrap_model(net, wrap)
    return {"names": sorted(get_model_state_dict(model, submodules={net.inner} if by else None, options=options))}


@unfrozen.due
def _(tensors, with_, by):
    frozen_names = frozen(dense(tensors)) if "frozen" in with_ else []
    prefix = "inner." if by else ""
    names = by_state_name({name: name for name in tensors}, with_)
    if "rested" in with_:
        del names["kept.weight"]
    taken = [path for path, name in names.items() if name not in frozen_names and path.startswith(prefix)]
    return {"names": Of(sorted(taken))}


OF_MODULE = (
    f"mesh=2 x=2:R:{SMALL} a=2:R:{SMALL} call=optimizer",
    f"mesh=2 x=5x2:S(0):{SMALL} a=4:S(0):{SMALL} b=3:R:{SMALL} call=both",
    f"mesh=2 x=2:R:{SMALL} a=2:R:{SMALL} call=both how=flat",
    f"mesh=3 x=4x2:S(0):{SMALL} a=5:S(0):{SMALL} b=3:R:int64 call=model how=whole",
)


@law(
    "optimizer.of-module",
    source=f"{DOCS}, get_state_dict and get_optimizer_state_dict: submodules, only the parameters that belong to the "
    "submodules; their warning: a state_dict of the model or the optimizer of the submodules only",
    control=f"mesh=2 x=4x2:S(0):{SMALL} a=2:R:{SMALL} call=model",
    features=features,
    **sweep_record(*OF_MODULE),
)
def of_module(tensors: Tensors, call: Literal["model", "optimizer", "both"], how: How = ()):
    """The state of a model, and that of its optimizer, asked for one of its modules, have the parameters of that module
    alone."""
    net = Net(tensors)
    optimizer = adam([*net.parameters()], RATES)
    train_step(optimizer)
    options, model_state = state_options(how), dict[str, Any]()
    optimizer_state: dict[str, Any] = {"state": {}, "param_groups": []}
    if call == "both":
        model_state, optimizer_state = get_state_dict(net, optimizer, submodules={net.inner}, options=options)
    elif call == "model":
        model_state = get_model_state_dict(net, submodules={net.inner}, options=options)
    else:
        optimizer_state = get_optimizer_state_dict(net, optimizer, submodules={net.inner}, options=options)
    return {"model": sorted(model_state), "optimizer": optimizer_state_names(optimizer_state)["names"]}


@of_module.due
def _(tensors, call, how):
    taken = [path for path in by_state_name(tensors) if path.startswith("inner.")]
    trained = [path for path in values_with_grads(tensors) if path in taken]
    if "flat" in how:
        trained = [f"state.{path}.{key}" for path in trained for key in ("exp_avg", "exp_avg_sq", "step")]
    due = {"model": [] if call == "optimizer" else sorted(taken), "optimizer": [] if call == "model" else trained}
    return {key: Of(names) for key, names in due.items()}
