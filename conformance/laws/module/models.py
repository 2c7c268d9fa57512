"""Laws of tensor-parallel models: outputs, gradients and optimizer steps are those of the dense model on every rank,
also with activation checkpointing."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal, get_args

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
    take_step,
)
from shardlaw.conformance.laws.module.plans import Plan
from shardlaw.reference.mesh import Mesh

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


def parallelize(model: nn.Module, mesh: Any, plan: Any) -> Any:
    """Parallelise the model, and tie its weights again where it has tied ones."""
    parallel: Any = parallelize_module(model, mesh, plan)
    if hasattr(parallel, "tok"):
        parallel.out.weight = parallel.tok.weight
    return parallel


def make_optimizer(name: str, params: Iterable[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
    """An optimizer whose steps are well conditioned."""
    if name == "sgd":
        return torch.optim.SGD(params, lr=0.5, momentum=0.5, weight_decay=0.125, **options)
    return torch.optim.AdamW(params, lr=0.25, eps=1.0, weight_decay=0.125, **options)


def forward(model: Model, mesh: ModelMesh, way: StylePlan, batches: TwoBatches):
    """A model parallelised by styles has the dense output on every rank, with the documented placements."""
    model = parallelize(model, mesh, way)
    with torch.no_grad():
        return {"parameters": copied_parameters(model), "forward": [model(x) for x, _ in batches]}


def forward_due(model, mesh: Mesh, way: Plan, batches, rank: Rank):
    outputs = [way.output(model(x), mesh, rank) for x, _ in batches]
    return {"parameters": way.parameters(copied_parameters(model), mesh), "forward": outputs}


def backward(model: Model, mesh: ModelMesh, way: StylePlan, batches: OneBatch):
    """The gradients of the input and of every parameter of a parallelised model are the dense ones, and add up over
    passes."""
    model = parallelize(model, mesh, way)
    for x, grad in batches:
        forward_backward(model, x, grad)
    return {
        "input": [x.grad for x, _ in batches],
        "gradients": reduced_gradients(model),
        "parameters": copied_parameters(model),
    }


def backward_due(model, mesh: Mesh, way: Plan, batches, rank: Rank):
    for x, grad in batches:
        forward_backward(model, x, grad)
    return {
        "input": [None if x.grad is None else Near(dtensor(mesh, x.grad, way.entry).local(rank)) for x, _ in batches],
        "gradients": way.gradients(reduced_gradients(model), mesh),
        "parameters": way.parameters(copied_parameters(model), mesh),
    }


COMMON: dict[str, Any] = {"source": STYLES_DOC, "features": features, "needs": NEEDS, "weight": 0.2}
LAWS = [
    *make_laws(
        forward,
        forward_due,
        {
            f"module.forward[{kind}]": {"control": CONTROLS[kind], "draw": partial(cases, kind=kind), "draws": draws}
            for kind, draws in DRAWS.items()
        },
        **COMMON,
    ),
    # in some cases two passes are accumulated
    *make_laws(
        backward,
        backward_due,
        {
            f"module.backward[{kind}]": {
                "control": CONTROLS[kind],
                "draw": partial(cases, kind=kind, again=st.sampled_from([None, None, 1])),
                "draws": draws,
            }
            for kind, draws in DRAWS.items()
        },
        **COMMON,
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
    """Optimizer steps, foreach or not, update sharded parameters as dense ones and keep their placements."""
    model = parallelize(model, mesh, way)
    optim, steps = make_optimizer(optimizer, model.parameters(), foreach=foreach), []
    for x, grad in batches:
        forward_backward(model, x, grad)
        steps.append(take_step(model, optim)["parameters"])
    return {"steps": steps}


@step.due
def _(model, mesh: Mesh, way: Plan, batches, optimizer):
    optim, steps = make_optimizer(optimizer, model.parameters()), []
    for x, grad in batches:
        forward_backward(model, x, grad)
        steps.append(way.parameters(take_step(model, optim)["parameters"], mesh))
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
    """The state dict of a parallelised model has the dense model's keys and the sharded parameters, and loads into
    another model."""
    other = parallelize(copy.deepcopy(model), mesh, way)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    state = parallelize(model, mesh, way).state_dict()
    other.load_state_dict(state)
    return {"state": dict(state), "loaded": copied_parameters(other)}


@state.due
def _(model, mesh: Mesh, way: Plan):
    return {
        "state": way.parameters(model.state_dict(), mesh),
        "loaded": way.parameters(copied_parameters(model), mesh),
    }


# Activation checkpointing

# the modules that are recomputed, by the start of their names, unless the whole model is
CHECKPOINTED = {"MLP": "net1", "Stacked": "layers.", "Normed": "norm", "Transformer": "layers."}
# what is recomputed: the whole model, the modules above, or each linear layer
Recompute = Literal["whole", "whole-reentrant", "parts", "parts-reentrant", "each"]
MODES = ("eval", "eval", "keeps", "drops")
RECOMPUTED_DRAWS = {"mlp": 5, "stacked": 5, "norm": 5, "transformer": 2}


def set_mode(model: nn.Module, mode: str) -> nn.Module:
    """Set eval mode, or train mode with dropout that keeps or drops everything, so that the result is certain."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 1.0 if mode == "drops" else 0.0
    return model.train(mode != "eval")


def checkpoint_activations(model: nn.Module, way: str) -> Callable[[Any], Any]:
    """The model, as a function with activation checkpointing."""
    if way.startswith("whole"):
        return lambda x: checkpoint(model, x, use_reentrant=way == "whole-reentrant")
    wrappers, prefix = compat.activation_wrappers, CHECKPOINTED[type(model).__name__]
    impl = wrappers.CheckpointImpl.REENTRANT if way == "parts-reentrant" else wrappers.CheckpointImpl.NO_REENTRANT
    chosen = {module for name, module in model.named_modules() if name.startswith(prefix) and name.count(".") <= 1}
    wrappers.apply_activation_checkpointing(
        model,
        lambda module: wrappers.checkpoint_wrapper(module, impl),
        lambda module: isinstance(module, nn.Linear) if way == "each" else module in chosen,
    )
    return model


def without_wrapper_names(named: dict[str, Any]) -> dict[str, Any]:
    """Tensors under the names that the parameters have without wrappers."""
    return {name.replace(compat.CHECKPOINT_PREFIX, ""): value for name, value in named.items()}


def recomputed(
    model: Model,
    mesh: ModelMesh,
    way: StylePlan,
    batches: OneBatch,
    recompute: Recompute,
    mode: Literal["eval", "keeps", "drops"],
):
    """Activation checkpointing does not change the gradients of a parallel model."""
    model = parallelize(set_mode(model, mode), mesh, way)
    function = checkpoint_activations(model, recompute)
    for x, grad in batches:
        forward_backward(function, x, grad)
    return {
        "input": [x.grad for x, _ in batches],
        "gradients": without_wrapper_names(reduced_gradients(model)),
        "parameters": without_wrapper_names(copied_parameters(model)),
        "state": [*model.state_dict()],
    }


def recomputed_due(model, mesh: Mesh, way: Plan, batches, mode: str, rank: Rank):
    return {**backward_due(set_mode(model, mode), mesh, way, batches, rank), "state": Of([*model.state_dict()])}


def features_recomputed(case: Case) -> set[str]:
    mode = {"training"} if case.get("mode") != "eval" else set[str]()
    return features(case) | {"backward", "recomputed", f"recompute:{case.get('recompute')}"} | mode


def draw_recomputed(kind: str) -> Callable[[Limits], SearchStrategy[Case]]:
    tokens = kind == "transformer"  # reentrant checkpointing needs an input with a gradient: tokens have none
    ways = [way for way in get_args(Recompute) if not (tokens and way == "whole-reentrant")]
    more: dict[str, Any] = {
        "recompute": st.sampled_from(ways),
        "mode": st.sampled_from(MODES),
        "again": st.sampled_from([None, None, 1]),
    }
    return partial(cases, kind=kind, **more)


LAWS += make_laws(
    recomputed,
    recomputed_due,
    {
        f"module.recomputed[{kind}]": {
            "control": f"{CONTROLS[kind].replace('length=3', 'length=4')} recompute=parts mode=eval",
            "draw": draw_recomputed(kind),
            "draws": draws,
        }
        for kind, draws in RECOMPUTED_DRAWS.items()
    },
    source="torch.utils.checkpoint docs; torch.distributed.algorithms, checkpoint_wrapper",
    features=features_recomputed,
    needs=NEEDS,
    weight=0.1,
)
