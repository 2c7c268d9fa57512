"""Laws of what fully_shard can be asked for: hybrid meshes, several passes, other dtypes, shared weights, other
dims."""

from __future__ import annotations

import copy
from functools import partial
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from shardlaw.conformance.law.act import fields, law, texts
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Near
from shardlaw.conformance.law.fields import NamedMesh, Rank
from shardlaw.conformance.law.law import Limits
from shardlaw.conformance.laws.module.arguments import FromCase, dtensor, make_laws
from shardlaw.conformance.laws.module.fully_shard import FSDP, Reshard, inputs_of
from shardlaw.conformance.laws.module.model_fields import NEEDS, Model, Pairs, copied_parameters, reduced_gradients
from shardlaw.conformance.laws.shared import draws
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.notation import format_shape
from shardlaw.reference.placement import Placements
from shardlaw.reference.placement import Replicate as R
from shardlaw.reference.placement import Shard as S
from shardlaw.strategies.meshes import palette_meshes

CLAUSES = {
    "hybrid": (
        "On a mesh of two dims parameters are replicated along the first and sharded along the second; gradients "
        "are means over all."
    ),
    "accumulated": (
        "Gradients of several backward passes add up whether each is shared with the other ranks or the last alone; a "
        "parameter that is frozen between two steps gets none."
    ),
    "precision": (
        "Parameters compute in param_dtype, gradients travel in reduce_dtype and arrive in the parameter's own dtype."
    ),
    "shared": "A weight that two modules share is sharded once, and its gradient is the sum of both uses.",
    "partly": (
        "Parameters may stay sharded over fewer ranks between the forward and the backward pass; gradients are the "
        "same."
    ),
    "otherwise": (
        "Parameters are sharded on the dim that shard_placement_fn names, gradients divided by the factor that was set."
    ),
}
CONTROLS = {
    "hybrid": "mesh=2x2 model=mlp dims=5x7x3 reshard=yes",
    "accumulated": "mesh=2 model=mlp dims=5x7x3 reshard=yes passes=2 synced=last",
    "precision": "mesh=2 model=mlp dims=5x7x3 reshard=yes compute=float32 reduce=float64",
    "shared": "mesh=2 model=tied dims=5x3 reshard=yes",
    "partly": "mesh=4 model=mlp dims=5x7x3 reshard=2 units=1",
    "otherwise": "mesh=2 model=mlp dims=4x6x2 reshard=yes dim=1 factor=1.0",
}


def sgd(model: nn.Module, named: dict[str, Any]) -> None:
    """A step of plain gradient descent with such gradients."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if named[name] is not None:  # frozen
                parameter -= 0.5 * named[name]  # type: ignore[misc]


def asked_in(model: nn.Module, asks: str, last: bool) -> None:
    """The first parameter has a gradient of the last pass alone, or the first half of them of all but the last and the
    others of that."""
    every = list(model.parameters())
    for at, parameter in enumerate(every[:1] if asks == "late" else every):
        parameter.requires_grad_(last if asks == "late" else (at >= len(every) // 2) == last)


def fsdp(
    model: Model,
    mesh: NamedMesh,
    inputs: Annotated[Pairs, FromCase(inputs_of)],
    reshard: Reshard,
    units: bool = False,
    passes: int = 1,
    synced: Literal["last", "each", "held"] | None = None,
    compute: torch.dtype | None = None,
    reduce: torch.dtype | None = None,
    output: torch.dtype | None = None,
    dim: int | None = None,
    factor: float | None = None,
    looked: bool = False,
    freezes: bool = False,
    asks: Literal["late", "turns"] | None = None,
):
    options = {"mesh": mesh, "reshard_after_forward": reshard}
    if compute is not None:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce, output_dtype=output)
    if dim is not None:
        options["shard_placement_fn"] = lambda parameter: Shard(dim if parameter.ndim > 1 else 0)
    layers = [part for part in model.modules() if isinstance(part, nn.Linear)]
    for part in [*layers, model] if units else [model]:
        fully_shard(part, **options)
    if factor is not None:
        for part in [part for part in model.modules() if isinstance(part, FSDPModule)]:
            part.set_gradient_divide_factor(factor)
    stepping, steps, looks = torch.optim.SGD(model.parameters(), lr=0.5), [{"parameters": copied_parameters(model)}], {}
    for step in range(2):
        if freezes and step:
            next(model.parameters()).requires_grad_(False)
        outs = []
        for at, (x, grad) in enumerate(inputs[step * passes : (step + 1) * passes]):
            if asks is not None:
                asked_in(model, asks, at == passes - 1)
            if synced == "held":  # shared with the ranks that shard, held back from those that replicate
                model.set_requires_all_reduce(at == passes - 1)  # type: ignore[operator]
            elif synced is not None:
                model.set_requires_gradient_sync(at == passes - 1 or synced == "each")  # type: ignore[operator]
            outs.append(model(x))
            outs[-1].backward(grad.to(outs[-1].dtype))
        arrived = reduced_gradients(model)
        stepping.step()
        stepping.zero_grad()
        steps.append({"forward": outs, "gradients": arrived, "parameters": copied_parameters(model)})  # type: ignore[dict-item]
    if looked:
        model.unshard()  # type: ignore[operator]
        looks["unshard"] = {name: one.detach().clone() for name, one in model.named_parameters(recurse=not units)}
        model.reshard()  # type: ignore[operator]
        looks["reshard"] = copied_parameters(model)
    return {"steps": steps, "looked": looks}


def fsdp_due(
    model,
    mesh: Mesh,
    inputs: list[Pairs],
    units,
    passes: int,
    compute,
    output,
    dim: int | None,
    factor,
    looked,
    freezes,
    asks,
    rank: Rank,
):
    dtype, place = compute or torch.float64, mesh.ranks.index(rank)
    scale = mesh.size if factor is None else factor

    def sharded(named: dict[str, Any]) -> dict[str, Any]:
        at = {
            name: (R(),) * (mesh.ndim - 1) + (S((dim or 0) if whole.ndim > 1 else 0),) for name, whole in named.items()
        }
        return {name: dtensor(mesh, whole.double(), *at[name]).near(compute) for name, whole in named.items()}

    def arrived(named: dict[str, Any]) -> dict[str, Any]:
        present = {name: whole for name, whole in named.items() if whole is not None}
        return dict.fromkeys(named) | sharded(present)

    steps: list[Any] = [{"parameters": sharded(copied_parameters(model))}]
    looks: dict[str, Any] = {}
    for step in range(2):
        computed, outs = copy.deepcopy(model).to(dtype), []
        if freezes and step:
            next(computed.parameters()).requires_grad_(False)
        for at, pairs in enumerate(inputs[step * passes : (step + 1) * passes]):
            if asks is not None:
                asked_in(computed, asks, at == passes - 1)
            every = [computed(x.to(dtype) if x.is_floating_point() else x) for x, _ in pairs]
            for out, (_, grad) in zip(every, pairs, strict=True):
                out.backward((grad / scale).to(out.dtype))
            outs.append(Near(every[place].detach().to(output or dtype), compute))
        sgd(model, reduced_gradients(computed))
        steps.append(
            {
                "forward": outs,
                "gradients": arrived(reduced_gradients(computed)),
                "parameters": sharded(copied_parameters(model)),
            }
        )
    if looked:  # in the dtype that they compute in
        whole = {name: one.detach().to(dtype) for name, one in model.named_parameters(recurse=not units)}
        looks = {
            "unshard": {name: Near(one, compute) for name, one in whole.items()},
            "reshard": sharded(copied_parameters(model)),
        }
    return {"steps": steps, "looked": looks}


@st.composite
def draw_fsdp(draw: st.DrawFn, limits: Limits, kind: str) -> Case:
    texts_by_kind = {"hybrid": ("2x2", "2x2", "1x2", "2x1"), "accumulated": ("2", "3", "2x2"), "partly": ("4",)}
    meshes = [
        mesh
        for mesh in palette_meshes(texts_by_kind.get(kind, ("2", "2", "3")), limits.world_size)
        if kind != "partly" or mesh.size == 4
    ]
    mesh, sizes = draw(st.sampled_from(meshes)), st.sampled_from([3, 5, 7, 4, 2])
    model = "tied" if kind == "shared" else draw(st.sampled_from(["mlp", "mlp", "norm"]))
    dims: tuple[int, ...] = draw(st.tuples(sizes, sizes, sizes)) if model == "mlp" else draw(st.tuples(sizes, sizes))
    said: dict[str, Any] = {"reshard": draw(st.sampled_from(["yes", "no"]))}
    if kind == "partly":
        said["reshard"] = "2"
    said["units"] = draw(st.sampled_from([None, 1])) if model != "tied" else None
    said["looked"] = draw(st.sampled_from([None, 1]))
    if kind == "accumulated":
        said |= {"passes": draw(st.sampled_from([2, 3])), "synced": draw(st.sampled_from(["last", "last", "each"]))}
    if kind == "precision":
        said |= {"compute": "float32", "reduce": draw(st.sampled_from([None, "float32", "float64"]))}
        said["output"] = draw(st.sampled_from([None, "float64"]))
    if kind == "otherwise":
        dims = tuple(mesh.size * draw(st.sampled_from([1, 2])) for _ in dims)
        said |= {"dim": draw(st.sampled_from([1, 1, 0])), "factor": draw(st.sampled_from([None, "1.0", "8.0"]))}
    return fields(mesh=mesh, model=model, dims=format_shape(dims), **said, seed=draw(draws.seeds()))


def features_fsdp(case: Case) -> set[str]:
    uneven = {"uneven"} if any(extent % case.mesh().shape[-1] for extent in case.shape("dims")) else set()
    return {"module", "fully-sharded", "backward", f"way:{case.law.partition('[')[2].removesuffix(']')}"} | uneven


@law(
    "module.reduced-in",
    source=FSDP + ", reduce_dtype of MixedPrecisionPolicy",
    control="mesh=2 rows=3 reduce=float32",
    sweep=texts(
        "mesh=2 rows=3 reduce=float32",
        "mesh=4 rows=5 reduce=float32 passes=2",
        "mesh=2 rows=4 reduce=bfloat16",
        "mesh=2@1,0 rows=2 reduce=bfloat16 passes=2",
        "mesh=2x2 rows=3 reduce=float32",
        "mesh=2x2 rows=4 reduce=bfloat16 passes=2",
        "mesh=1x2 rows=3 reduce=float32 split=1",
        "mesh=2x2 rows=4 reduce=float32 split=1 passes=2",
        "mesh=1x2 rows=4 reduce=bfloat16 split=1",
    ),
    sweeps=9,
    features=lambda case: {"module", "fully-sharded", "backward"},
    needs=NEEDS,
    weight=0.3,
)
def reduced_in(mesh: NamedMesh, rows: int, reduce: torch.dtype, passes: int = 1, split: bool = False):
    """Gradients that were computed in param_dtype are added up over ranks and passes in reduce_dtype, also over those
    ranks that split a batch beside fully_shard."""
    model: Any = nn.Linear(1, rows, bias=False)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce)
    over, beside = (mesh["a"], mesh["b"]) if split else (mesh, None)
    if beside is not None:  # each of whose ranks has a row of the batch
        model.weight = nn.Parameter(distribute_tensor(model.weight.data, beside, [Replicate()]))
    fully_shard(model, mesh=over, mp_policy=policy)
    place = mesh.mesh.flatten().tolist().index(dist.get_rank())
    for at in range(passes):
        model.set_requires_gradient_sync(at == passes - 1)
        x = torch.full((1, 1), {0: 256.0, 1 if split else mesh.size() - 1: 1.0}.get(place, 0.0))
        model(x if beside is None else DTensor.from_local(x, beside, [Shard(0)])).sum().backward()
    return reduced_gradients(model)


@reduced_in.due
def _(mesh: Mesh, rows, reduce, passes: int, split: bool):
    # of eight bits that bfloat16 has, 257 needs nine
    ranks = mesh.shape[0] if split else mesh.size
    whole = torch.full((rows, 1), (256.0 + (reduce is torch.float32)) * passes / ranks)
    at: Placements = (S(0), R()) if split else (*(R(),) * (mesh.ndim - 1), S(0))
    return {"weight": dtensor(mesh, whole, *at)}


@law(
    "module.grad-dtype",
    source=f"{FSDP}; torch.Tensor.grad_dtype: the dtype that the gradient of a leaf has",
    control="mesh=2 rows=3 asked=float32",
    sweep=texts(
        "mesh=2 rows=3 asked=float32",
        "mesh=2 rows=3 asked=float64",
        "mesh=2 rows=4 asked=bfloat16",
        "mesh=2x2 rows=3 asked=float64",
        "mesh=2 rows=4 asked=float64 compute=bfloat16",
    ),
    sweeps=5,
    features=lambda case: {"module", "fully-sharded", "backward"},
    needs=NEEDS,
    weight=0.2,
)
def grad_dtype(mesh: NamedMesh, rows: int, asked: torch.dtype, compute: torch.dtype | None = None):
    """A parameter that asks for gradients of a dtype gets them in it when it is fully sharded too."""
    model: Any = nn.Linear(1, rows, bias=False)
    model.weight.grad_dtype = asked
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=compute))
    model(torch.ones(1, 1)).sum().backward()
    return reduced_gradients(model)


@grad_dtype.due
def _(mesh: Mesh, rows, asked: torch.dtype, compute):
    return {"weight": dtensor(mesh, torch.ones(rows, 1, dtype=asked), *(R(),) * (mesh.ndim - 1), S(0))}


# cases that few draws would meet
ALWAYS = {
    "hybrid": ("mesh=2x2 model=norm dims=5x7 reshard=yes",),
    "accumulated": (
        "mesh=2x2 model=mlp dims=5x7x3 reshard=yes passes=3 synced=held",
        "mesh=2 model=mlp dims=5x7x3 reshard=no freezes=1",
        "mesh=2 model=mlp dims=5x5x5 reshard=yes passes=2 synced=last asks=turns",
        "mesh=2x2 model=mlp dims=5x5x5 reshard=yes passes=2 synced=held asks=turns",
        "mesh=2x2 model=mlp dims=5x7x3 reshard=yes passes=2 synced=held asks=late",
    ),
    "partly": ("mesh=4 model=mlp dims=4x8x4 reshard=2 units=1 dim=1",),
    "precision": (
        "mesh=2 model=mlp dims=5x7x3 reshard=yes passes=2 synced=last compute=float32 reduce=float64",
        "mesh=2 model=mlp dims=5x7x3 reshard=yes passes=2 synced=last compute=float32 reduce=float64 asks=late",
        "mesh=2 model=mlp dims=5x7x3 reshard=yes passes=2 synced=last compute=float32 asks=late",
    ),
}
LAWS = make_laws(
    fsdp,
    fsdp_due,
    {
        f"module.fsdp[{kind}]": {
            "clause": clause,
            "control": CONTROLS[kind],
            "draw": partial(draw_fsdp, kind=kind),
            "draws": 3 if kind == "partly" else 5,
            **({"sweep": texts(*ALWAYS[kind]), "sweeps": len(ALWAYS[kind])} if kind in ALWAYS else {}),
        }
        for kind, clause in CLAUSES.items()
    },
    source=FSDP,
    features=features_fsdp,
    needs=NEEDS,
    weight=0.1,
)
