"""The law of models that ``FullyShardedDataParallel`` wraps: their steps, norms and whole states.

``strategy`` says what is sharded (``full``: parameters, ``grad``: gradients and the state of the optimizer, ``none``:
nothing), ``orig`` whether the optimizer gets the parameters themselves, ``units`` whether a layer is a unit of its own.
Gradients are clipped by the norm of order ``clip``; ``host`` says whether the whole state of the optimizer is brought
there.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    ShardingStrategy,
    StateDictType,
)

from shardlaw.conformance.law.act import fields, law, texts
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Near
from shardlaw.conformance.law.fields import NamedMesh, Rank
from shardlaw.conformance.law.law import Limits
from shardlaw.conformance.laws.module.arguments import FromCase
from shardlaw.conformance.laws.module.fsdp_methods import Whole
from shardlaw.conformance.laws.module.fully_shard import inputs_of
from shardlaw.conformance.laws.module.model_fields import NEEDS, Pairs
from shardlaw.conformance.laws.shared import draws
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.notation import format_shape
from shardlaw.strategies.meshes import palette_meshes

MODEL = "mesh=2 model=mlp dims=5x7x3"
SHOWN = (
    f"{MODEL} strategy=full",
    "mesh=3 model=mlp dims=5x4x2 strategy=full units=yes clip=3.0 compute=float32",
    f"{MODEL} strategy=grad orig=yes clip=2.0 compute=float32",
    f"{MODEL} strategy=none units=yes clip=inf compute=float32",
    f"{MODEL} strategy=full orig=yes",
    f"{MODEL} strategy=full orig=yes host=no",
    f"{MODEL} strategy=full clip=0.0 compute=float32",
    f"{MODEL} strategy=full units=yes clip=-inf compute=float32",
    "mesh=2 model=mlp dims=2x1x2 strategy=grad clip=-1.0 compute=float32 seed=7",
    f"{MODEL} strategy=full clip=2.0",
)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """Adam that moves little where gradients are small."""
    return torch.optim.Adam(model.parameters(), lr=0.25, eps=1.0, foreach=False)


def features(case: Case) -> set[str]:
    found = {"module", "backward", "way:fsdp1", "repeated"}
    found |= {"fully-sharded"} if case.get("strategy") != "none" else set()
    return found | ({"clipped", f"norm:{case.get('clip')}"} if "clip" in case else set())


@st.composite
def draw_wrapped(draw: st.DrawFn, limits: Limits) -> Case:
    mesh, sizes = (
        draw(st.sampled_from(palette_meshes(("2", "2", "3", "4"), limits.world_size))),
        st.sampled_from([3, 5, 7, 4, 2]),
    )
    said: dict[str, Any] = {"model": "mlp", "dims": format_shape(draw(st.tuples(sizes, sizes, sizes)))}
    said["strategy"] = draw(st.sampled_from(("full", "full", "grad", "none")))
    said |= {name: draw(st.sampled_from((None, "yes"))) for name in ("orig", "units")}
    said["clip"] = draw(st.sampled_from((None, "2.0", "1.0", "0.5", "inf", "0.0", "-inf", "-1.0")))
    said["compute"] = draw(st.sampled_from((None, "float32", "float32", "float32"))) if said["clip"] else None
    said["host"] = draw(st.sampled_from((None, None, "no")))
    return fields(mesh=mesh, **said, seed=draw(draws.seeds()))


@law(
    "module.wrapped",
    source=(
        "torch.distributed.fsdp docs, FullyShardedDataParallel: clip_grad_norm_, the norm of all gradients as a "
        "single vector; state_dict_type; optim_state_dict"
    ),
    control=SHOWN[0],
    draw=draw_wrapped,
    draws=10,
    sweep=texts(*SHOWN),
    sweeps=len(SHOWN),
    features=features,
    needs=NEEDS,
    weight=0.3,
)
def wrapped(
    model: Whole,
    mesh: NamedMesh,
    inputs: Annotated[Pairs, FromCase(inputs_of)],
    strategy: Literal["full", "grad", "none"],
    orig: bool = False,
    units: bool = False,
    clip: float | None = None,
    host: bool = True,
    compute: torch.dtype = torch.float64,
):
    """A wrapped model computes the dense outputs, clips by the dense norm of any order, and gives the states of the
    dense model and of its optimizer as whole ones."""
    kinds = {"full": "FULL_SHARD", "grad": "SHARD_GRAD_OP", "none": "NO_SHARD"}
    model.to(compute)
    options: dict[str, Any] = {
        "sharding_strategy": ShardingStrategy[kinds[strategy]],
        "process_group": mesh.get_group(),
        "device_id": torch.device(mesh.device_type),
        "use_orig_params": orig,
    }
    if units:
        model.net1 = FullyShardedDataParallel(model.net1, **options)
    parallel = FullyShardedDataParallel(model, **options)
    stepping, outs, norms = adam(parallel), [], []
    for x, grad in inputs:
        outs.append(parallel(x.to(compute)))
        outs[-1].backward(grad.to(compute))
        if clip is not None:
            norms.append(parallel.clip_grad_norm_(512.0 if clip == 0 else 0.25, clip))
        stepping.step()
        stepping.zero_grad()
    kept = FullStateDictConfig(), FullOptimStateDictConfig(offload_to_cpu=host)
    with FullyShardedDataParallel.state_dict_type(parallel, StateDictType.FULL_STATE_DICT, *kept):
        state = {name: one.detach().clone() for name, one in parallel.state_dict().items()}
        found = FullyShardedDataParallel.optim_state_dict(parallel, stepping)["state"]
    learned = {
        name: {key: float(one) if one.ndim == 0 else one for key, one in kept.items()} for name, kept in found.items()
    }
    return {"forward": outs, "norms": norms, "state": state, "learned": learned}


@wrapped.due
def _(model, mesh: Mesh, inputs: list[Pairs], clip: float | None, compute, rank: Rank):
    model.to(compute)
    stepping, outs, norms, place = adam(model), [], [], mesh.ranks.index(rank)
    for pairs in inputs:
        every = [model(x.to(compute)) for x, _ in pairs]
        for out, (_, grad) in zip(every, pairs, strict=True):
            out.backward(grad.to(compute) / len(pairs))
        outs.append(Near(every[place].detach()))
        if clip is not None:
            total = torch.nn.utils.clip_grad_norm_(model.parameters(), 512.0 if clip == 0 else 0.25, clip)
            norms.append(Near(total) if clip else ...)  # of order 0, plain tensors count instead of elements
        stepping.step()
        stepping.zero_grad()
    named = dict(model.named_parameters())
    learned = {
        name: {key: Near(float(kept) if kept.ndim == 0 else kept) for key, kept in stepping.state[one].items()}
        for name, one in named.items()
    }
    return {
        "forward": outs,
        "norms": norms,
        "state": {name: Near(one.detach()) for name, one in named.items()},
        "learned": learned,
    }
