"""The law of models under ``FullyShardedDataParallel``: their steps, gradient norms and full state dicts.

Fields of a case: ``strategy`` is what is sharded (``full``: parameters, ``grad``: gradients and optimizer state,
``none``: nothing; on a mesh of two dims ``hybrid`` and ``hybrid-grad`` shard along the second and replicate along the
first), ``orig`` whether the optimizer gets the original parameters, ``units`` whether a layer is wrapped
separately, ``clip`` the order of the norm by which gradients are clipped, ``host`` whether the full optimizer state is
offloaded to the CPU, ``given`` in which container the model is given its input, to which it adds an entry, ``added``
whether the gradients of all passes are added up before one step, shared after the last alone (``kept``) or after each
(``shared``), ``turned`` whether weights lie by columns in memory, ``hook`` the communication hook of torch by which
gradients are shared, ``filled`` whether whole parameters are filled first, and what becomes of it: it stays (``kept``)
or not (``dropped``), also once the model was evaluated (``dropped-later``).
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import nullcontext
from functools import partial
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

from shardlaw.conformance import compat
from shardlaw.conformance.law.act import fields, law
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Near, Of
from shardlaw.conformance.law.fields import NamedMesh, Rank
from shardlaw.conformance.law.law import Limits
from shardlaw.conformance.laws.module.arguments import FromCase
from shardlaw.conformance.laws.module.fsdp_methods import MLPModel
from shardlaw.conformance.laws.module.fully_shard import read_rank_batches
from shardlaw.conformance.laws.module.model_fields import NEEDS, Pairs, mean_backward
from shardlaw.conformance.laws.shared import draws
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.notation import format_shape
from shardlaw.strategies.meshes import palette_meshes

MODEL = "mesh=2 model=mlp dims=5x7x3"
CASES = (
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
    f"{MODEL} strategy=full given=list",
    f"{MODEL} strategy=grad given=defaultdict",
    "mesh=2x2 model=mlp dims=5x7x3 strategy=hybrid units=yes clip=2.0 compute=float32",
    "mesh=2x1 model=mlp dims=5x4x2 strategy=hybrid",
    "mesh=1x2 model=mlp dims=5x4x2 strategy=hybrid-grad orig=yes host=no",
    "mesh=2@1,2 model=mlp dims=5x4x2 strategy=full",
    "mesh=2@1,2 model=mlp dims=5x4x2 strategy=grad orig=yes host=no",
    f"{MODEL} strategy=full units=yes added=kept",
    f"{MODEL} strategy=grad added=shared",
    "mesh=2x2 model=mlp dims=5x4x2 strategy=hybrid-grad added=kept clip=2.0 compute=float32",
    "mesh=3 model=mlp dims=5x4x2 strategy=none",
    "mesh=4 model=mlp dims=5x4x2 strategy=none orig=yes added=kept",
    f"{MODEL} strategy=full turned=1",
    f"{MODEL} strategy=grad orig=yes host=no turned=1",
    f"{MODEL} strategy=full hook=reduce_scatter",
    f"{MODEL} strategy=full hook=fp16_compress",
    f"{MODEL} strategy=none hook=bf16_compress",
    "mesh=2x2 model=mlp dims=5x4x2 strategy=full",
    "mesh=1x2 model=mlp dims=5x4x2 strategy=full",
    f"{MODEL} strategy=full units=yes filled=kept",
    f"{MODEL} strategy=grad filled=dropped",
    f"{MODEL} strategy=none filled=dropped",
    f"{MODEL} strategy=full filled=dropped-later",
)
STRATEGIES = {
    "full": "FULL_SHARD",
    "grad": "SHARD_GRAD_OP",
    "none": "NO_SHARD",
    "hybrid": "HYBRID_SHARD",
}


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """Adam with small steps where gradients are small."""
    return torch.optim.Adam(model.parameters(), lr=0.25, eps=1.0, foreach=False)


def note_in(module: nn.Module, given: tuple[Any, ...]) -> None:
    """Add an entry to the container that a model is given."""
    if isinstance(given[0], dict):
        given[0]["seen"].append(1)
    else:
        given[0].append(1)


def take_out(module: nn.Module, given: tuple[Any, ...]) -> Any:
    """The input of a model, out of the container in which it is given."""
    return given[0]["x"] if isinstance(given[0], dict) else given[0][0]


def features(case: Case) -> set[str]:
    found = {"module", "backward", "way:fsdp1", "repeated"}
    found |= {"fully-sharded"} if case.get("strategy") != "none" else set()
    return found | ({"clipped", f"norm:{case.get('clip')}"} if "clip" in case else set())


@st.composite
def draw_fsdp1(draw: st.DrawFn, limits: Limits) -> Case:
    mesh = draw(st.sampled_from(palette_meshes(("2", "2", "3", "4", "2x2", "3x1", "2@1,2"), limits.world_size)))
    sizes = st.sampled_from([3, 5, 7, 4, 2])
    values: dict[str, Any] = {"model": "mlp", "dims": format_shape(draw(st.tuples(sizes, sizes, sizes)))}
    strategies = ("hybrid", "hybrid-grad") if mesh.ndim > 1 else ("full", "full", "grad", "none")
    values["strategy"] = draw(st.sampled_from(strategies))
    values |= {name: draw(st.sampled_from((None, "yes"))) for name in ("orig", "units")}
    values["clip"] = draw(st.sampled_from((None, "2.0", "1.0", "0.5", "inf", "0.0", "-inf", "-1.0")))
    values["compute"] = draw(st.sampled_from((None, "float32", "float32", "float32"))) if values["clip"] else None
    values["added"] = draw(st.sampled_from((None, None, "kept", "shared")))
    values["host"] = draw(st.sampled_from((None, None, "no")))
    return fields(mesh=mesh, **values, seed=draw(draws.seeds()))


@law(
    "module.wrapped",
    source=(
        "torch.distributed.fsdp docs, FullyShardedDataParallel: clip_grad_norm_, the norm of all gradients as a "
        "single vector; state_dict_type; optim_state_dict; register_comm_hook; docstrings of fp16_compress_hook and "
        "bf16_compress_hook: compressed gradients are cast back to the parameters' precision; summon_full_params: "
        "changes are discarded with writeback=False, but where parameters are not sharded"
    ),
    control=CASES[0],
    draw=draw_fsdp1,
    draws=10,
    cases=CASES,
    features=features,
    needs=NEEDS,
    weight=0.3,
)
def fsdp1(
    model: MLPModel,
    mesh: NamedMesh,
    inputs: Annotated[Pairs, FromCase(read_rank_batches)],
    strategy: Literal["full", "grad", "none", "hybrid", "hybrid-grad"],
    orig: bool = False,
    units: bool = False,
    clip: float | None = None,
    host: bool = True,
    compute: torch.dtype = torch.float64,
    given: Literal["list", "defaultdict"] | None = None,
    added: Literal["kept", "shared"] | None = None,
    turned: bool = False,
    hook: Literal["reduce_scatter", "fp16_compress", "bf16_compress"] | None = None,
    filled: Literal["kept", "dropped", "dropped-later"] | None = None,
):
    """A model under FullyShardedDataParallel has the dense outputs, clips by the dense norm of any order, and returns
    the full state dicts of the dense model and its optimizer, also where gradients of several passes are added up or go
    through a hook, which may compress them. It may add to a container that it is given. What is written into whole
    parameters stays, or is discarded, as was asked."""
    if mesh.get_coordinate() is None:
        return {}
    model.to(compute)
    for parameter in model.parameters() if turned else ():
        parameter.data = parameter.data.T.contiguous().T if parameter.ndim == 2 else parameter.data
    group = mesh.get_group() if mesh.ndim == 1 else None
    named = STRATEGIES.get(strategy)
    options: dict[str, Any] = {
        "sharding_strategy": ShardingStrategy[named] if named else compat.hybrid_shard_of_gradients,
        **({"process_group": group} if group else {"device_mesh": mesh}),
        "device_id": torch.device(mesh.device_type),
        "use_orig_params": orig,
    }
    if units:
        model.net1 = FullyShardedDataParallel(model.net1, **options)
    noted: list[int] = []
    if given is not None:
        model.register_forward_pre_hook(take_out)
        model.register_forward_pre_hook(note_in, prepend=True)
    parallel = FullyShardedDataParallel(model, **options)
    if hook is not None:
        hooks = compat.fsdp_comm_hooks
        state = hooks.LowPrecisionState(mesh.get_group(), compute)
        parallel.register_comm_hook(state, getattr(hooks, f"{hook}_hook"))
    if filled is not None:
        with torch.no_grad():
            if filled == "dropped-later":
                parallel(inputs[0][0].to(compute))
            with FullyShardedDataParallel.summon_full_params(parallel, writeback=filled == "kept"):
                for parameter in parallel.parameters():
                    parameter.fill_(0.5)
    optim, outs, norms = adam(parallel), [], []
    for number, (x, grad) in enumerate(inputs, 1):
        goes_on = added is not None and number < len(inputs)
        x = x.to(compute)
        box: Any = defaultdict(list, x=x) if given == "defaultdict" else [x] if given == "list" else x
        with parallel.no_sync() if goes_on and added == "kept" else nullcontext():
            outs.append(parallel(box))
            outs[-1].backward(grad.to(compute))
        noted += [] if given is None else [len(box)]
        if goes_on:
            continue
        if clip is not None:
            norms.append(parallel.clip_grad_norm_(512.0 if clip == 0 else 0.25, clip))
        optim.step()
        optim.zero_grad()
    configs = FullStateDictConfig(), FullOptimStateDictConfig(offload_to_cpu=host)
    with FullyShardedDataParallel.state_dict_type(parallel, StateDictType.FULL_STATE_DICT, *configs):
        state = {name: value.detach().clone() for name, value in parallel.state_dict().items()}
        optim_state = FullyShardedDataParallel.optim_state_dict(parallel, optim, group=group)["state"]
    learned = {
        name: {key: float(value) if value.ndim == 0 else value for key, value in values.items()}
        for name, values in optim_state.items()
    }
    return {"forward": outs, "norms": norms, "state": state, "learned": learned, "noted": noted}


@fsdp1.due
def _(
    model,
    mesh: Mesh,
    inputs: list[Pairs],
    clip: float | None,
    compute,
    given: str | None,
    added: str | None,
    hook: str | None,
    filled: str | None,
    strategy: str,
    rank: Rank,
):
    if rank not in mesh.ranks:
        return {}
    model.to(compute)
    is_whole = strategy == "none" or mesh.shape[-1] == 1  # nothing is sharded
    for parameter in model.parameters() if filled == "kept" or (filled and is_whole) else ():
        parameter.data.fill_(0.5)
    near = partial(Near, rounding={"fp16_compress": torch.float16, "bf16_compress": torch.bfloat16}.get(hook or ""))
    optim, outs, norms = adam(model), [], []
    for number, pairs in enumerate(inputs, 1):
        outs.append(near(mean_backward(model, pairs)[mesh.ranks.index(rank)].detach()))
        if added is not None and number < len(inputs):
            continue
        if clip is not None:
            total = torch.nn.utils.clip_grad_norm_(model.parameters(), 512.0 if clip == 0 else 0.25, clip)
            norms.append(Near(total) if clip else ...)  # the norm of order 0 counts tensors instead of elements
        optim.step()
        optim.zero_grad()

    def due_state(parameter: nn.Parameter) -> dict[str, Any]:
        return {key: near(float(value) if value.ndim == 0 else value) for key, value in optim.state[parameter].items()}

    return {
        "forward": outs,
        "norms": norms,
        "state": {name: near(parameter.detach()) for name, parameter in model.named_parameters()},
        "learned": {name: due_state(parameter) for name, parameter in model.named_parameters()},
        "noted": [] if given is None else [Of(2, "wrong-value")] * len(inputs),
    }
