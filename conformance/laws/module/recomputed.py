"""Laws of activation checkpointing: a parallel model whose activations are computed again gives the same outputs and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from conformance import compat
from conformance.case import Case
from conformance.law import Law, Limits
from conformance.laws.module.given import Modelled, features, judge_parameters, near
from conformance.laws.module.models import NEEDS, SCRIPTED, cases, run_backward, script

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from conformance.here import Here

# which modules of a model are computed again, where not the whole of it is
PARTS: dict[str, str] = {"mlp": "net1", "stacked": "layers.", "norm": "norm", "transformer": "layers."}
# what is recomputed, and how: the whole call, or parts; reentrant or not
WAYS = ("whole", "whole-reentrant", "parts", "parts-reentrant", "each")
MODES = ("eval", "eval", "keeps", "drops")


def ready(case: Case, model: nn.Module) -> nn.Module:
    """Eval mode, or train mode with dropout that drops nothing or everything: certain either way."""
    mode = case.get("mode")
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 1.0 if mode == "drops" else 0.0
    return model.train(mode != "eval")


def recomputing(case: Case, kind: str, model: nn.Module) -> Callable[..., Any]:
    """The model as a call that keeps few activations."""
    way = case.get("recompute")
    if way.startswith("whole"):
        return lambda x: checkpoint(model, x, use_reentrant=way == "whole-reentrant")
    wrappers = compat.name("activation_wrappers")
    how = wrappers.CheckpointImpl.REENTRANT if way == "parts-reentrant" else wrappers.CheckpointImpl.NO_REENTRANT
    chosen = {id(part) for name, part in model.named_modules() if name.startswith(PARTS[kind]) and name.count(".") <= 1}

    def wrap(part: nn.Module) -> nn.Module:
        wrapped: nn.Module = wrappers.checkpoint_wrapper(part, how)
        return wrapped

    wrappers.apply_activation_checkpointing(model, wrap, lambda part: isinstance(part, nn.Linear) if way == "each" else id(part) in chosen)
    return model


def check_recomputed(case: Case, here: Here) -> None:
    """Gradients of the input and of every parameter are the dense ones, and the parameters keep their names."""
    given = Modelled(case)
    dense = ready(case, given.model())
    model = given.parallel(dense, here)
    called = recomputing(case, given.kind, model)
    for at in range(2 if "again" in case else 1):
        x, whole = run_backward(given, here, called, dense, at)
        if whole.grad is not None:
            near(here, x.grad, given.part(whole.grad, given.plan.entry, here.rank), "input", "the gradient of the input")
    judge_parameters(here, given, model, dense, "gradients", grads=True)
    judge_parameters(here, given, model, dense, "parameters")
    keys, due = list(model.state_dict()), list(dense.state_dict())
    here.require(keys == due, "wrong-metadata", "state", "the state has other keys", due, keys)


def features_recomputed(case: Case) -> set[str]:
    mode = {"training"} if case.get("mode") != "eval" else set[str]()
    return features(case) | {"backward", "recomputed", f"recompute:{case.get('recompute')}"} | mode


def draw_recomputed(kind: str) -> Callable[[Limits], SearchStrategy[Case]]:
    tokens = kind == "transformer"  # what is reentrant wants an input that asks for a gradient: tokens cannot

    def strategy(limits: Limits) -> SearchStrategy[Case]:
        ways = [way for way in WAYS if not (tokens and way == "whole-reentrant")]
        more = {"recompute": st.sampled_from(ways), "mode": st.sampled_from(MODES), "again": st.sampled_from([None, None, 1])}
        return cases(f"module.recomputed[{kind}]", limits, kind, (), **more).filter(lambda case: "uneven-sequence" not in features(case))

    return strategy


CONTROLS = {
    "mlp": "mesh=2 way=pair dims=5x8x3 rows=3",
    "stacked": "mesh=2 way=pair dims=5x8 rows=3",
    "norm": "mesh=2 way=sequence dims=5x4 rows=3 length=4 norm=rms",
    "transformer": "mesh=2 way=sequence dims=2x2x5 rows=2 length=4",
}
LAWS = tuple(
    Law(
        id=f"module.recomputed[{kind}]",
        clause="Activations that are computed again in the backward pass leave the gradients of a parallel model as they are.",
        source="torch.utils.checkpoint docs; torch.distributed.algorithms, checkpoint_wrapper",
        check=check_recomputed,
        script=script if kind in SCRIPTED else None,
        features=features_recomputed,
        control=f"module.recomputed[{kind}] {control} recompute=parts mode=eval",
        planted="recomputed_from_halved_inputs",
        draw=draw_recomputed(kind),
        draws=2 if kind == "transformer" else 5,
        needs=NEEDS,
        weight=0.1,
    )
    for kind, control in CONTROLS.items()
)
