"""Laws of parallel models: outputs, gradients and optimizer steps of the sharded model are those of the dense one on
every rank, also where
activations are computed again."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import checkpoint

from shardlaw.conformance import compat
from shardlaw.conformance.law.act import law
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Near, Of
from shardlaw.conformance.law.fields import Rank
from shardlaw.conformance.law.law import Limits
from shardlaw.conformance.laws.module.arguments import dtensor, make_laws
from shardlaw.conformance.laws.module.model_fields import (
    NEEDS,
    Model,
    ModelMesh,
    OneBatch,
    StylePlan,
    TwoBatches,
    cases,
    copied_parameters,
    features,
    forward_backward,
    reduced_gradients,
)
from shardlaw.conformance.laws.module.plans import Plan
from shardlaw.reference.mesh import Mesh
from shardlaw.strategies.modules import ZOO

STYLES_DOC = (
    "torch.distributed.tensor.parallel docs, parallelize_module: the parallelised module computes what the dense "
    "one does"
)
DRAWS = {"mlp": 10, "stacked": 6, "norm": 8, "tied": 6, "attention": 4, "transformer": 8}
CONTROLS = {
    "mlp": "mesh=2 way=pair dims=5x8x3 rows=3",
    "stacked": "mesh=2 way=pair dims=5x8 rows=3",
    "norm": "mesh=2 way=sequence dims=5x4 rows=3 length=4 norm=rms",
    "tied": "mesh=2 way=local dims=5x3 rows=2 length=3",
    "attention": "mesh=2 way=heads dims=2x3 rows=2 length=3",
    "transformer": "mesh=2 way=sequence dims=2x2x5 rows=2 length=3",
}


def parallelized(model: nn.Module, mesh: Any, plan: Any) -> Any:
    """The model, parallelised; weights that were one are one again."""
    parallel: Any = parallelize_module(model, mesh, plan)
    if hasattr(parallel, "tok"):
        parallel.out.weight = parallel.tok.weight
    return parallel


def make_optimizer(name: str, params: Iterable[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
    """An optimizer that keeps its steps well conditioned."""
    if name == "sgd":
        return torch.optim.SGD(params, lr=0.5, momentum=0.5, weight_decay=0.125, **options)
    return torch.optim.AdamW(params, lr=0.25, eps=1.0, weight_decay=0.125, **options)


def forward(model: Model, mesh: ModelMesh, way: StylePlan, batches: TwoBatches):
    """A model parallelised by styles gives the dense model's output on every rank, laid out as the styles document."""
    model = parallelized(model, mesh, way)
    with torch.no_grad():
        return {"parameters": copied_parameters(model), "forward": [model(x) for x, _ in batches]}


def dense_forward(model, mesh: Mesh, way: Plan, batches, rank: Rank):
    outputs = [way.output(model(x), mesh, rank) for x, _ in batches]
    return {"parameters": way.parameters(copied_parameters(model), mesh), "forward": outputs}


def backward(model: Model, mesh: ModelMesh, way: StylePlan, batches: OneBatch):
    """Gradients of the input and of every parameter of a parallelised model are the dense model's, and add up over
    passes."""
    model = parallelized(model, mesh, way)
    for x, grad in batches:
        forward_backward(model, x, grad)
    return {
        "input": [x.grad for x, _ in batches],
        "gradients": reduced_gradients(model),
        "parameters": copied_parameters(model),
    }


def dense_backward(model, mesh: Mesh, way: Plan, batches, rank: Rank):
    for x, grad in batches:
        forward_backward(model, x, grad)
    return {
        "input": [None if x.grad is None else Near(dtensor(mesh, x.grad, way.entry).local(rank)) for x, _ in batches],
        "gradients": way.gradients(reduced_gradients(model), mesh),
        "parameters": way.parameters(copied_parameters(model), mesh),
    }


def drawing(kind: str, **more: Any) -> Callable[[Limits], SearchStrategy[Case]]:
    """The cases of a law for one model."""
    return lambda limits: cases(limits, kind, **more)


LAWS = [
    *make_laws(
        forward,
        dense_forward,
        {
            f"module.forward[{kind}]": {"control": CONTROLS[kind], "draw": drawing(kind), "draws": DRAWS[kind]}
            for kind in ZOO
        },
        source=STYLES_DOC,
        features=features,
        needs=NEEDS,
        weight=0.2,
    ),
    # some of those that go backward do so twice
    *make_laws(
        backward,
        dense_backward,
        {
            f"module.backward[{kind}]": {
                "control": CONTROLS[kind],
                "draw": drawing(kind, again=st.sampled_from([None, None, 1])),
                "draws": DRAWS[kind],
            }
            for kind in ZOO
        },
        source=STYLES_DOC,
        features=features,
        needs=NEEDS,
        weight=0.2,
    ),
]


def draw_step(limits: Limits) -> SearchStrategy[Case]:
    kinds = (("mlp", ("pair", "kept", "scattered", "rows-first")), ("norm", ()), ("tied", ()))
    optimizers, ways = st.sampled_from(["sgd", "adamw"]), st.sampled_from(["yes", "no"])
    return st.one_of(
        *(cases(limits, kind, only, model=st.just(kind), optimizer=optimizers, foreach=ways) for kind, only in kinds)
    )


@law(
    "module.step",
    source=(
        "torch.distributed.tensor.parallel tutorial: optimizers over the DTensor parameters of a parallelised module"
    ),
    control="mesh=2 way=pair dims=5x8x3 rows=3 model=mlp optimizer=sgd foreach=yes",
    draw=draw_step,
    draws=10,
    features=features,
    needs=NEEDS,
    weight=0.2,
)
def step(
    model: Model,
    mesh: ModelMesh,
    way: StylePlan,
    batches: TwoBatches,
    optimizer: Literal["sgd", "adamw"],
    foreach: bool,
):
    """Optimizer steps, one by one or all at once, leave sharded parameters where they lie and as the dense ones are."""
    model = parallelized(model, mesh, way)
    stepping, steps = make_optimizer(optimizer, model.parameters(), foreach=foreach), []
    for x, grad in batches:
        forward_backward(model, x, grad)
        stepping.step()
        stepping.zero_grad()
        steps.append(copied_parameters(model))
    return {"steps": steps}


@step.due
def _(model, mesh: Mesh, way: Plan, batches, optimizer):
    stepping, steps = make_optimizer(optimizer, model.parameters()), []
    for x, grad in batches:
        forward_backward(model, x, grad)
        stepping.step()
        stepping.zero_grad()
        steps.append(way.parameters(copied_parameters(model), mesh))
    return {"steps": steps}


@law(
    "module.state",
    source="torch.distributed.tensor docs, DTensor as parameters; torch.nn.Module.state_dict",
    control="mesh=2 way=pair dims=5x8x3 rows=3 model=mlp",
    draw=lambda limits: st.one_of(*(cases(limits, kind, model=st.just(kind)) for kind in ("mlp", "stacked", "norm"))),
    draws=8,
    fields={"rows": int, "length": int},
    features=features,
    needs=NEEDS,
    weight=0.1,
)
def state(model: Model, mesh: ModelMesh, way: StylePlan):
    """The state dict of a parallelised model has the dense model's keys and the parameters as they lie, and loads into
    another."""
    other = parallelized(copy.deepcopy(model), mesh, way)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    state = parallelized(model, mesh, way).state_dict()
    other.load_state_dict(state)
    return {"state": dict(state), "loaded": copied_parameters(other)}


@state.due
def _(model, mesh: Mesh, way: Plan):
    return {
        "state": way.parameters(model.state_dict(), mesh),
        "loaded": way.parameters(copied_parameters(model), mesh),
    }


# Activations that are computed again

# which modules of a model are computed again, where not the whole of it is
PARTS = {"MLP": "net1", "Stacked": "layers.", "Normed": "norm", "Transformer": "layers."}
# what is recomputed, and how: the whole call, or parts; reentrant or not
WAYS = ("whole", "whole-reentrant", "parts", "parts-reentrant", "each")
MODES = ("eval", "eval", "keeps", "drops")
RECOMPUTED = {"mlp": 5, "stacked": 5, "norm": 5, "transformer": 2}


def ready(model: nn.Module, mode: str) -> nn.Module:
    """The model in eval mode, or in train mode with dropout that drops nothing or everything: certain either way."""
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 1.0 if mode == "drops" else 0.0
    return model.train(mode != "eval")


def recomputing(model: nn.Module, way: str) -> Callable[[Any], Any]:
    """The model as a call that keeps few activations."""
    if way.startswith("whole"):
        return lambda x: checkpoint(model, x, use_reentrant=way == "whole-reentrant")
    kinds = compat.activation_wrappers.CheckpointImpl
    kind = kinds.REENTRANT if way == "parts-reentrant" else kinds.NO_REENTRANT
    named = model.named_modules()
    chosen = {part for name, part in named if name.startswith(PARTS[type(model).__name__]) and name.count(".") <= 1}
    compat.activation_wrappers.apply_activation_checkpointing(
        model,
        lambda part: compat.activation_wrappers.checkpoint_wrapper(part, kind),
        lambda part: isinstance(part, nn.Linear) if way == "each" else part in chosen,
    )
    return model


def unwrapped(named: dict[str, Any]) -> dict[str, Any]:
    """By the names that the parameters had before anything was wrapped."""
    return {name.replace(compat.CHECKPOINT_PREFIX, ""): value for name, value in named.items()}


def recomputed(
    model: Model,
    mesh: ModelMesh,
    way: StylePlan,
    batches: OneBatch,
    recompute: Literal["whole", "whole-reentrant", "parts", "parts-reentrant", "each"],
    mode: Literal["eval", "keeps", "drops"],
):
    """Activations that are computed again in the backward pass leave the gradients of a parallel model as they are."""
    model = parallelized(ready(model, mode), mesh, way)
    called = recomputing(model, recompute)
    for x, grad in batches:
        forward_backward(called, x, grad)
    return {
        "input": [x.grad for x, _ in batches],
        "gradients": unwrapped(reduced_gradients(model)),
        "parameters": unwrapped(copied_parameters(model)),
        "state": [*model.state_dict()],
    }


def dense_recomputed(model, mesh: Mesh, way: Plan, batches, mode: str, rank: Rank):
    return {**dense_backward(ready(model, mode), mesh, way, batches, rank), "state": Of([*model.state_dict()])}


def features_recomputed(case: Case) -> set[str]:
    mode = {"training"} if case.get("mode") != "eval" else set[str]()
    return features(case) | {"backward", "recomputed", f"recompute:{case.get('recompute')}"} | mode


def draw_recomputed(kind: str) -> Callable[[Limits], SearchStrategy[Case]]:
    tokens = kind == "transformer"  # what is reentrant wants an input that asks for a gradient: tokens cannot
    ways = [way for way in WAYS if not (tokens and way == "whole-reentrant")]
    more: dict[str, Any] = {
        "recompute": st.sampled_from(ways),
        "mode": st.sampled_from(MODES),
        "again": st.sampled_from([None, None, 1]),
    }
    return lambda limits: cases(limits, kind, **more)


LAWS += make_laws(
    recomputed,
    dense_recomputed,
    {
        f"module.recomputed[{kind}]": {
            "control": f"{CONTROLS[kind].replace('length=3', 'length=4')} recompute=parts mode=eval",
            "draw": draw_recomputed(kind),
            "draws": draws,
        }
        for kind, draws in RECOMPUTED.items()
    },
    source="torch.utils.checkpoint docs; torch.distributed.algorithms, checkpoint_wrapper",
    features=features_recomputed,
    needs=NEEDS,
    weight=0.1,
)
