"""The law of extra states of modules in the state of a model.

A case is a model as :mod:`shardlaw.conformance.laws.optimizer.nets` describes it. ``kind`` names the extra state of its
inner module, ``how`` the options of the state.
"""

from __future__ import annotations

from collections import namedtuple
from dataclasses import replace
from typing import Any, Literal

import torch
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict

from shardlaw.conformance.law.act import law
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Of
from shardlaw.conformance.law.fields import Rank
from shardlaw.conformance.laws.optimizer.both_states import SMALL, How, Wrap, sweep_record
from shardlaw.conformance.laws.optimizer.both_states import features as features_of_both
from shardlaw.conformance.laws.optimizer.fields import Poisoned, StateTensors
from shardlaw.conformance.laws.optimizer.nets import Net, state_options, wrap_model

Place = namedtuple("Place", ("epoch", "batch"))
EXTRAS: dict[str, Any] = {
    "dict": {"count": 3, "name": "saved"},
    "none": None,
    "list": [1, 2.5, None, b"four"],
    "set": {1, 2},
    "frozenset": frozenset((3,)),
    "complex": {"phase": 1 + 2j},
    "range": [range(3)],
    "class": {"loss": torch.nn.MSELoss},
    "size": torch.Size((2, 3)),
    "named": Place(4, 7),
}
MODEL = f"mesh=2 x=5x2:S(0):{SMALL} a=4:R:{SMALL}"
PLAIN = f"mesh=2 x=5x2:-:{SMALL} a=4:-:{SMALL}"
EXTRA_CASES = (
    f"{MODEL} kind=dict",
    f"{MODEL} kind=list how=whole",
    *(f"{MODEL} kind={kind}" for kind in ("set", "complex", "named")),
    *(f"{MODEL} kind={kind} how=whole" for kind in ("set", "frozenset", "complex", "range", "class", "size", "named")),
    *(
        f"{MODEL} kind=none{how}"
        for how in ("", " how=whole", " how=broadcast", " wrap=compile", " wrap=inside how=whole")
    ),
    f"{PLAIN} kind=none wrap=ddp",
    f"{PLAIN} kind=list wrap=ddp how=whole",
)


def features(case: Case) -> set[str]:
    return features_of_both(case) | {"extra-state"}


@law(
    "optimizer.extra",
    source=(
        "torch.distributed.checkpoint.state_dict docs, get_model_state_dict and set_model_state_dict; torch.nn docs, "
        "Module.get_extra_state: anything that can be pickled"
    ),
    control=EXTRA_CASES[0],
    features=features,
    **sweep_record(*EXTRA_CASES),
)
def extra(
    tensors: StateTensors,
    others: Poisoned,
    kind: Literal["dict", "none", "list", "set", "frozenset", "complex", "range", "class", "size", "named"],
    rank: Rank,
    how: How = (),
    wrap: Wrap = "none",
):
    """The state of a model contains a module's extra state of any kind unchanged, and sets it on another model."""
    source, target = Net(tensors, ("extra",)), Net(others, ("extra",), other=True)
    source.inner.extra = EXTRAS[kind]
    model, target_model = wrap_model(source, wrap), wrap_model(target, wrap)
    options = state_options(how)
    state = get_model_state_dict(model, options=replace(options, broadcast_from_rank0=False))
    (taken,) = (value for name, value in state.items() if name.endswith("_extra_state"))
    set_model_state_dict(target_model, state if rank == 0 or "broadcast" not in how else {}, options=options)
    given = target.inner.extra
    return {"taken": taken, "its class": type(taken).__name__, "given": given, "class given": type(given).__name__}


@extra.due
def _(kind: str):
    value = EXTRAS[kind]
    due_value, due_class = Of(value, "wrong-value"), Of(type(value).__name__, "wrong-metadata")
    return {"taken": due_value, "its class": due_class, "given": due_value, "class given": due_class}
