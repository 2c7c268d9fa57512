"""Laws of the options of fully_shard: hybrid meshes, several passes, mixed precision, shared weights, other dims."""

from __future__ import annotations

import copy
from functools import partial
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from shardlaw.conformance.law.act import fields, law, texts
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Near
from shardlaw.conformance.law.fields import NamedMesh, Rank
from shardlaw.conformance.law.law import Limits
from shardlaw.conformance.laws.module.arguments import FromCase, dtensor, make_laws
from shardlaw.conformance.laws.module.fully_shard import FSDP, Reshard, read_rank_batches
from shardlaw.conformance.laws.module.model_fields import (
    NEEDS,
    Model,
    Pairs,
    copied_parameters,
    mean_backward,
    reduced_gradients,
    sgd,
    take_step,
    uneven,
)
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
        "are means over all ranks."
    ),
    "accumulated": (
        "Gradients of several backward passes add up, whether each pass reduces them or the last one alone, before "
        "which no shard has one; a parameter that is frozen between two steps gets none."
    ),
    "precision": (
        "The model computes in param_dtype, gradients are reduced in reduce_dtype and stored in the parameter's dtype."
    ),
    "shared": "A weight that two modules share is sharded once, and its gradient is the sum of both uses.",
    "partly": (
        "Where parameters are resharded over fewer ranks after the forward pass, they and their gradients are the same."
    ),
    "otherwise": (
        "Parameters are sharded on the dim of shard_placement_fn, and gradients are divided by the factor that is set."
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


def set_requires_grad(model: nn.Module, asks: str, last: bool) -> None:
    """Choose which parameters require gradients in a pass. ``late``: the first one in the last pass alone. ``turns``:
    the second half in the last pass, the first half in all others."""
    parameters = list(model.parameters())
    for index, parameter in enumerate(parameters[:1] if asks == "late" else parameters):
        parameter.requires_grad_(last if asks == "late" else (index >= len(parameters) // 2) == last)


def fully_sharded(
    model: Model,
    mesh: NamedMesh,
    inputs: Annotated[Pairs, FromCase(read_rank_batches)],
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
    passed: bool = False,
    recurse: bool = True,
    named: bool = False,
):
    options = {"mesh": mesh, "reshard_after_forward": reshard}
    if compute is not None or output is not None:
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=reduce, output_dtype=output)
    if dim is not None:
        options["shard_placement_fn"] = lambda parameter: Shard(dim if parameter.ndim > 1 else 0)
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    for unit in [*layers, model] if units else [model]:
        fully_shard(unit, **options)
        if factor is not None:
            unit.set_gradient_divide_factor(factor)  # type: ignore[operator]
    optim = torch.optim.SGD(model.parameters(), lr=0.5)
    looks: dict[str, Any] = {}
    steps: list[dict[str, Any]] = [{"parameters": copied_parameters(model)}]
    for step in range(2):
        if freezes and step:
            next(model.parameters()).requires_grad_(False)
        outs, early = [], set[str]()
        for number, (x, grad) in enumerate(inputs[step * passes : (step + 1) * passes]):
            if asks is not None:
                set_requires_grad(model, asks, number == passes - 1)
            if synced == "held":  # each pass reduces over the ranks that shard, the last one over the replicas too
                model.set_requires_all_reduce(number == passes - 1, recurse=recurse)  # type: ignore[operator]
            elif synced is not None:
                model.set_requires_gradient_sync(number == passes - 1 or synced == "each")  # type: ignore[operator]
            outs.append(model(x=x) if named else model(x))
            outs[-1].backward(grad.to(outs[-1].dtype))
            if synced in ("last", "held") and number < passes - 1:  # a shard of a gradient takes communication
                early.update(name for name, parameter in model.named_parameters() if parameter.grad is not None)
        steps.append({"forward": outs, "early": sorted(early), **take_step(model, optim)})
    if looked:
        model.unshard()  # type: ignore[operator]
        looks["unshard"] = {
            name: parameter.detach().clone() for name, parameter in model.named_parameters(recurse=not units)
        }
        model.reshard()  # type: ignore[operator]
        looks["reshard"] = copied_parameters(model)
    if passed:  # a forward pass, after which they stay sharded over fewer ranks
        with torch.no_grad():
            model(inputs[0][0])
            kept: dict[str, Any] = copied_parameters(model)
            looks["forward"] = {name: parameter.full_tensor() for name, parameter in kept.items()}
            looks["trained"] = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    return {"steps": steps, "looked": looks}


def fully_sharded_due(
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
    passed,
    recurse,
    rank: Rank,
):
    dtype = compute or torch.float64

    def due(named: dict[str, Any]) -> dict[str, Any]:
        def place(full: torch.Tensor) -> Any:
            placements: Placements = (*(R(),) * (mesh.ndim - 1), S((dim or 0) % 2 if full.ndim > 1 else 0))
            return dtensor(mesh, full.double(), *placements).near(compute)

        return {name: None if full is None else place(full) for name, full in named.items()}

    steps: list[Any] = [{"parameters": due(copied_parameters(model))}]
    looks: dict[str, Any] = {}
    layers = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    # if the model alone is told, its layers reduce in every pass
    early = [name for name, _ in model.named_parameters() if not recurse and name.rpartition(".")[0] in layers]
    for step in range(2):
        trained, outs = copy.deepcopy(model).to(dtype), []
        if freezes and step:
            next(trained.parameters()).requires_grad_(False)
        for number, pairs in enumerate(inputs[step * passes : (step + 1) * passes]):
            if asks is not None:
                set_requires_grad(trained, asks, number == passes - 1)
            out = mean_backward(trained, pairs, mesh.size if factor is None else factor)[mesh.ranks.index(rank)]
            outs.append(Near(out.detach().to(output or dtype), compute))
        grads = reduced_gradients(trained)
        sgd(model, grads)
        steps.append(
            {
                "forward": outs,
                "early": sorted(early),
                "gradients": due(grads),
                "parameters": due(copied_parameters(model)),
            }
        )
    if looked:  # in the dtype that the model computes in
        full = {name: parameter.detach().to(dtype) for name, parameter in model.named_parameters(recurse=not units)}
        looks = {
            "unshard": {name: Near(parameter, compute) for name, parameter in full.items()},
            "reshard": due(copied_parameters(model)),
        }
    if passed:
        looks["forward"] = {name: Near(parameter) for name, parameter in copied_parameters(model).items()}
        looks["trained"] = {name: not freezes or at > 0 for at, (name, _) in enumerate(model.named_parameters())}
    return {"steps": steps, "looked": looks}


@st.composite
def draw_options(draw: st.DrawFn, limits: Limits, kind: str) -> Case:
    mesh_texts = {"hybrid": ("2x2", "2x2", "1x2", "2x1"), "accumulated": ("2", "3", "2x2"), "partly": ("4",)}
    meshes = [
        mesh
        for mesh in palette_meshes(mesh_texts.get(kind, ("2", "2", "3")), limits.world_size)
        if kind != "partly" or mesh.size == 4
    ]
    mesh, sizes = draw(st.sampled_from(meshes)), st.sampled_from([3, 5, 7, 4, 2])
    model = "tied" if kind == "shared" else draw(st.sampled_from(["mlp", "mlp", "norm"]))
    dims: tuple[int, ...] = draw(st.tuples(sizes, sizes, sizes)) if model == "mlp" else draw(st.tuples(sizes, sizes))
    values: dict[str, Any] = {"reshard": draw(st.sampled_from(["yes", "no"]))}
    if kind == "partly":
        values["reshard"] = "2"
    values["units"] = draw(st.sampled_from([None, 1])) if model != "tied" else None
    values["looked"] = draw(st.sampled_from([None, 1]))
    if kind == "accumulated":
        values |= {"passes": draw(st.sampled_from([2, 3])), "synced": draw(st.sampled_from(["last", "last", "each"]))}
    if kind == "precision":
        values |= {"compute": "float32", "reduce": draw(st.sampled_from([None, "float32", "float64"]))}
        values["output"] = draw(st.sampled_from([None, "float64"]))
    if kind == "otherwise":
        dims = tuple(mesh.size * draw(st.sampled_from([1, 2])) for _ in dims)
        values |= {"dim": draw(st.sampled_from([1, 1, 0])), "factor": draw(st.sampled_from([None, "1.0", "8.0"]))}
    return fields(mesh=mesh, model=model, dims=format_shape(dims), **values, seed=draw(draws.seeds()))


def features_options(case: Case) -> set[str]:
    found = {"module", "fully-sharded", "backward", f"way:{case.law.partition('[')[2].removesuffix(']')}"}
    return found | uneven(case.shape("dims"), case.mesh().shape[-1])


@law(
    "module.reduced-in",
    source=FSDP + ", reduce_dtype of MixedPrecisionPolicy",
    control="mesh=2 rows=3 reduce=float32",
    cases=(
        "mesh=2 rows=3 reduce=float32",
        "mesh=4 rows=5 reduce=float32 passes=2",
        "mesh=2 rows=4 reduce=bfloat16",
        "mesh=2@1,0 rows=2 reduce=bfloat16 passes=2",
        "mesh=2x2 rows=3 reduce=float32",
        "mesh=2x2 rows=4 reduce=bfloat16 passes=2",
        "mesh=1x2 rows=3 reduce=float32 split=1",
        "mesh=2x2 rows=4 reduce=float32 split=1 passes=2",
        "mesh=1x2 rows=4 reduce=bfloat16 split=1",
        "mesh=2 rows=3 reduce=float32 frozen=1",
        "mesh=3 rows=3 reduce=float32 ones=2 stored=bfloat16",
        "mesh=3 rows=3 reduce=float32 ones=2 stored=bfloat16 frozen=1",
    ),
    features=lambda case: {"module", "fully-sharded", "backward"},
    needs=NEEDS,
    weight=0.3,
)
def reduced_in(
    mesh: NamedMesh,
    rows: int,
    reduce: torch.dtype,
    passes: int = 1,
    split: bool = False,
    ones: int = 1,
    stored: torch.dtype = torch.float32,
    frozen: bool = False,
):
    """Gradients that are computed in param_dtype are summed over ranks and passes in reduce_dtype, also over the ranks
    among which another mesh dim splits the batch, and after a pass in which the parameters were frozen."""
    model: Any = nn.Linear(1, rows, bias=False, dtype=stored)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce)
    fsdp_mesh, batch_mesh = (mesh["a"], mesh["b"]) if split else (mesh, None)
    if batch_mesh is not None:  # each of its ranks has a row of the batch
        model.weight = nn.Parameter(distribute_tensor(model.weight.data, batch_mesh, [Replicate()]))
    fully_shard(model, mesh=fsdp_mesh, mp_policy=policy)
    if frozen:
        model.requires_grad_(False)
        model(torch.ones(1, 1))
        model.requires_grad_(True)
    index = mesh.mesh.flatten().tolist().index(dist.get_rank())
    last = 1 if split else mesh.size() - 1
    for number in range(passes):
        model.set_requires_gradient_sync(number == passes - 1)
        x = torch.full((1, 1), 256.0 if index == 0 else float(last - ones < index <= last))
        model(x if batch_mesh is None else DTensor.from_local(x, batch_mesh, [Shard(0)])).sum().backward()
    return reduced_gradients(model)


@reduced_in.due
def _(mesh: Mesh, rows, reduce, passes: int, split: bool, ones: int, stored):
    # 257 needs nine bits of precision, bfloat16 has eight
    ranks = mesh.shape[0] if split else mesh.size
    full = torch.full((rows, 1), (256.0 + ones * (reduce is torch.float32)) * passes / ranks, dtype=stored)
    placements: Placements = (S(0), R()) if split else (*(R(),) * (mesh.ndim - 1), S(0))
    return {"weight": dtensor(mesh, full, *placements)}


@law(
    "module.grad-dtype",
    source=f"{FSDP}; torch.Tensor.grad_dtype: the dtype that the gradient of a leaf has",
    control="mesh=2 rows=3 asked=float32",
    cases=(
        "mesh=2 rows=3 asked=float32",
        "mesh=2 rows=3 asked=float64",
        "mesh=2 rows=4 asked=bfloat16",
        "mesh=2x2 rows=3 asked=float64",
        "mesh=2 rows=4 asked=float64 compute=bfloat16",
    ),
    features=lambda case: {"module", "fully-sharded", "backward"},
    needs=NEEDS,
    weight=0.2,
)
def grad_dtype(mesh: NamedMesh, rows: int, asked: torch.dtype, compute: torch.dtype | None = None):
    """A fully sharded parameter with a grad_dtype gets its gradient in that dtype."""
    model: Any = nn.Linear(1, rows, bias=False)
    model.weight.grad_dtype = asked
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=compute))
    model(torch.ones(1, 1)).sum().backward()
    return reduced_gradients(model)


@grad_dtype.due
def _(mesh: Mesh, rows, asked: torch.dtype):
    return {"weight": dtensor(mesh, torch.ones(rows, 1, dtype=asked), *(R(),) * (mesh.ndim - 1), S(0))}


def shared_by_groups(case: Case, text: str) -> bool:
    """Whether a refusal says that two groups may not share a parameter."""
    return "is shared with a parameter already managed by another FSDP group" in text


# cases that are seldom drawn
SWEEPS = {
    "hybrid": ("mesh=2x2 model=norm dims=5x7 reshard=yes",),
    "accumulated": (
        "mesh=2x2 model=mlp dims=5x7x3 reshard=yes passes=3 synced=held",
        "mesh=2 model=mlp dims=5x7x3 reshard=no freezes=1",
        "mesh=2 model=mlp dims=5x5x5 reshard=yes passes=2 synced=last asks=turns",
        "mesh=2x2 model=mlp dims=5x5x5 reshard=yes passes=2 synced=held asks=turns",
        "mesh=2x2 model=mlp dims=5x7x3 reshard=yes passes=2 synced=held asks=late",
        "mesh=2 model=mlp dims=5x7x3 reshard=yes units=1 passes=2 synced=last",
        # the model itself, without its layer
        "mesh=2x2 model=norm dims=5x7 reshard=yes units=1 passes=2 synced=held recurse=no",
        "mesh=2x2 model=mlp dims=5x5x5 reshard=yes units=1 passes=2 synced=held asks=turns",
    ),
    "partly": (
        "mesh=4 model=mlp dims=4x8x4 reshard=2 units=1 dim=1",
        "mesh=4 model=mlp dims=5x8x4 reshard=2 passed=1",
        "mesh=4 model=mlp dims=5x5x3 reshard=2 passed=1",
        "mesh=4 model=norm dims=6x2 reshard=2 units=1 passed=1",
        # over one rank, over all ranks that shard, and beside replicas
        "mesh=4 model=mlp dims=5x7x3 reshard=1 units=1",
        "mesh=2 model=mlp dims=5x7x3 reshard=2 passed=1",
        "mesh=1x4 model=mlp dims=5x8x4 reshard=2 passed=1",
        "mesh=2x2 model=mlp dims=5x7x3 reshard=1",
        "mesh=4 model=mlp dims=5x8x4 reshard=2 passed=1 freezes=1",
    ),
    "otherwise": (
        "mesh=2 model=mlp dims=4x6x2 reshard=yes dim=-1",
        "mesh=3 model=mlp dims=3x6x3 reshard=no units=1 dim=-2 looked=1",
        # by the number of ranks that shard, in a dtype of which means are taken
        "mesh=2x2 model=mlp dims=4x6x2 reshard=yes factor=2.0 compute=float32 reduce=float32",
        "mesh=2x1 model=mlp dims=4x6x2 reshard=yes factor=4.0 compute=float32 reduce=float32",
    ),
    "shared": (
        "mesh=2 model=tied dims=5x3 reshard=yes units=1",  # in groups of their own
        "mesh=2 model=tied-by-name dims=5x3 reshard=yes",
        "mesh=3 model=tied-by-name dims=4x2 reshard=no",
    ),
    "precision": (
        "mesh=2 model=mlp dims=5x7x3 reshard=yes passes=2 synced=last compute=float32 reduce=float64",
        "mesh=2 model=mlp dims=5x7x3 reshard=yes passes=2 synced=last compute=float32 reduce=float64 asks=late",
        "mesh=2 model=mlp dims=5x7x3 reshard=yes passes=2 synced=last compute=float32 asks=late",
        "mesh=2 model=mlp dims=5x7x3 reshard=yes compute=float32 named=1",
        "mesh=2 model=mlp dims=5x7x3 reshard=yes output=float32",
    ),
}
LAWS = make_laws(
    fully_sharded,
    fully_sharded_due,
    {
        f"module.fsdp[{kind}]": {
            "clause": clause,
            "control": CONTROLS[kind],
            "draw": partial(draw_options, kind=kind),
            "draws": 3 if kind == "partly" else 5,
            **({"sweep": texts(*SWEEPS[kind]), "sweeps": len(SWEEPS[kind])} if kind in SWEEPS else {}),
            **({"refusal": shared_by_groups} if kind == "shared" else {}),
        }
        for kind, clause in CLAUSES.items()
    },
    source=FSDP,
    features=features_options,
    needs=NEEDS,
    weight=0.1,
)
