"""Laws of what goes with training on sharded parameters: gradients that are clipped, and steps of every optimizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import torch
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import DTensor

from shardlaw.conformance.law.act import fields
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Claimed, Global, Near
from shardlaw.conformance.law.fields import WordField
from shardlaw.conformance.law.law import Limits
from shardlaw.conformance.laws.module.arguments import DTensorValue, FromCase, dtensor, make_laws
from shardlaw.conformance.laws.shared import draws
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.placement import Partial
from shardlaw.reference.placement import Replicate as R
from shardlaw.reference.tensors import TensorSpec
from shardlaw.strategies import shapes
from shardlaw.strategies.meshes import palette_meshes
from shardlaw.strategies.modules import eighths
from shardlaw.strategies.placements import placements

NEEDS = ("all_gather", "all_reduce")
CLIP = "torch.nn.utils.clip_grad_norm_ and clip_grad_value_: the norm of all gradients as one vector; in place"
OPTIM = "torch.optim, and torch.distributed.tensor docs: a DTensor parameter takes part as its dense tensor would"
MESHES = (*("2",) * 5, *("3",) * 4, *("2x2",) * 3, *("1x2",) * 2, "4", "2@1,0")
NAMES = ("a", "b", "c")


# What cases say


def tensor_of(case: Case, name: str, at: int, field: str = "", form: str = "") -> DTensorValue:
    """A parameter (0) or one of its gradients (from 1 on): eighths, placed as ``field`` says or as the parameter is."""
    spec, mesh = case.tensor(name), f"mesh.{name}" if f"mesh.{name}" in case else "mesh"
    full = eighths(spec.shape, case.seed + NAMES.index(name) + 5 * at).to(spec.build(0).dtype)
    where = case.placements(field) if field in case else spec.placements or ()
    return dtensor(case.mesh(mesh), full, *where, form=form, seed=case.seed, field=mesh)


def parameters_of(case: Case) -> list[DTensorValue]:
    """A parameter for each of the tensors ``a``, ``b`` and ``c``, each on the mesh ``mesh`` or on its own,
    ``mesh.b``."""
    return [tensor_of(case, name, 0, form="parameter") for name in NAMES if name in case]


def gradients_of(case: Case, steps: int = 1) -> list[list[DTensorValue | None]]:
    """The gradients that arrive in each of some steps, placed as their parameters are or as ``grad.a`` says; one of
    the field ``without`` is
    missing but in the second step."""

    def gradient(name: str, step: int) -> DTensorValue | None:
        missing = name == case.get("without", "") and step != 1
        return None if missing else tensor_of(case, name, step + 1, f"grad.{name}")

    return [[gradient(name, step) for name in NAMES if name in case] for step in range(steps)]


SAID = ("mesh", *(f"{part}{name}" for part in ("", "mesh.", "grad.") for name in NAMES), "without")
Parameters = Annotated[list[nn.Parameter], FromCase(parameters_of, *SAID)]
OneStep = Annotated[list[Any], FromCase(gradients_of)]
ThreeSteps = Annotated[list[Any], FromCase(lambda case: gradients_of(case, 3))]


def dense(
    parameters: Sequence[Global], rows: Sequence[Sequence[Global | None]]
) -> tuple[list[nn.Parameter], list[list[Any]]]:
    """The same parameters and gradients, whole."""
    return [nn.Parameter(one.full.clone()) for one in parameters], [
        [one and one.full.clone() for one in row] for row in rows
    ]


def kept(tensors: Sequence[torch.Tensor], parameters: Sequence[Global]) -> list[Any]:
    """What is due of tensors that lie where the parameters lay."""
    return [dtensor(one.mesh, whole, *one.placements).near() for whole, one in zip(tensors, parameters, strict=True)]


def claimed(
    tensors: Sequence[torch.Tensor | None], parameters: Sequence[Global], rounding: torch.dtype | None = None
) -> list[Any]:
    """What is due of gradients, wherever they lie, computed in their own dtype or in that of ``rounding``."""
    pairs = zip(tensors, parameters, strict=True)
    return [None if whole is None else Claimed(whole, one.mesh, exact=False, rounding=rounding) for whole, one in pairs]


# Plain torch, for acts


def arrive(parameters: Sequence[nn.Parameter], row: Sequence[torch.Tensor | None]) -> None:
    """Give each parameter its gradient."""
    for parameter, gradient in zip(parameters, row, strict=True):
        parameter.grad = gradient


def copies(parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    """The parameters as they are now."""
    return [parameter.detach().clone() for parameter in parameters]


def whole(tensor: Any) -> Any:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


# Clipping


def clip(by: str, of: Sequence[nn.Parameter], most: float, norm: float, foreach: bool | None) -> torch.Tensor | None:
    """Clip the gradients. Returns their norm, where there is one."""
    if by == "value":
        torch.nn.utils.clip_grad_value_(of, most, foreach=foreach)
        return None
    if by == "norm":
        return torch.nn.utils.clip_grad_norm_(of, most, norm, foreach=foreach)
    total = torch.nn.utils.get_total_norm([p.grad for p in of if p.grad is not None], norm, foreach=foreach)
    torch.nn.utils.clip_grads_with_norm_(of, most, total, foreach=foreach)
    return total


def clipped(
    parameters: Parameters,
    gradients: OneStep,
    by: Literal["norm", "parts", "value"],
    most: float,
    norm: float = 2.0,
    foreach: bool | None = None,
):
    arrive(parameters, gradients[0])
    total = clip(by, parameters, most, norm, foreach)
    return {
        "norm": None if total is None else whole(total).float(),
        "parameters": [*parameters],
        "gradients": [one.grad for one in parameters],
    }


def clipped_due(parameters: list[Global], gradients, by: str, most: float, norm: float, foreach):
    plain, rows = dense(parameters, gradients)
    arrive(plain, rows[0])
    total = clip(by, plain, most, norm, foreach)
    # what is scaled by a norm is as exact as the coarsest gradient in it
    dtypes = [one.grad.dtype for one in plain if one.grad is not None and total is not None]
    rounding = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=None)
    return {
        "norm": None if total is None else Near(total.float()),
        "parameters": kept(plain, parameters),
        "gradients": claimed([one.grad for one in plain], parameters, rounding),
    }


def features_training(case: Case) -> set[str]:
    found = {"module"} | {f"option:{name}" for name in ("norm", "foreach", "options") if name in case}
    if any(f"grad.{name}" in case for name in NAMES):
        found.add("unlike-placements")
    if "by" in case:
        found.add("clipped")
    if "norm" in case:
        found.add(f"norm:{case.get('norm')}")
    if "optimizer" in case:
        found |= {f"optimizer:{case.get('optimizer')}", "repeated"}
    return found


def meshes(limits: Limits) -> list[Mesh]:
    return palette_meshes(MESHES, limits.world_size)


def draw_tensors(draw: st.DrawFn, mesh: Mesh, *, pending: bool = False) -> dict[str, Any]:
    """Two or three parameters; seldom the gradient of one lies differently."""
    drawn: dict[str, Any] = {}
    kinds = ("R", "S", "S", "_S") if mesh.ndim == 1 else ("R", "S")
    for name in NAMES[: draw(st.sampled_from([2, 2, 3]))]:
        shape = draw(shapes(min_dims=1, max_dims=2, min_size=1))
        at = draw(placements(mesh, len(shape), kinds=kinds))
        drawn[name] = TensorSpec(shape, at, draw(st.sampled_from(["float64", "float64", "float64", "float32"])))
    if pending and draw(st.integers(0, 4)) == 4:
        spec = drawn["a"]
        drawn["grad__a"] = draw(
            st.sampled_from([(R(),) * mesh.ndim, (Partial("sum"),) + (R(),) * (mesh.ndim - 1), spec.placements])
        )
    return drawn


@st.composite
def draw_clipped(draw: st.DrawFn, limits: Limits) -> Case:
    mesh = draw(st.sampled_from(meshes(limits)))
    by = draw(st.sampled_from(["norm", "norm", "parts", "value"]))
    said = draw_tensors(draw, mesh, pending=by != "value")
    said |= {"by": by, "most": draw(st.sampled_from(["0.5", "0.25", "64"]))}
    if by != "value":
        said["norm"] = draw(st.sampled_from(["2.0", "2.0", "1.0", "inf", "inf", "0.0", "3.0", "-inf"]))
    said["foreach"] = draw(st.sampled_from([None, "yes", "no"]))
    said["without"] = draw(st.sampled_from([None, None, "b"]))
    return fields(mesh=mesh, **said, seed=draw(draws.seeds()))


@st.composite
def draw_mixed(draw: st.DrawFn, limits: Limits) -> Case:
    """Parameters on two meshes of the same ranks, as where some are sharded along one dim and others along two."""
    pairs = [("2", "1x2"), ("2", "2x1"), ("4", "2x2"), ("2x2", "4"), ("1x2", "2"), ("2", "2@1,0")]
    mesh_pairs = [(Mesh.parse(one), Mesh.parse(two)) for one, two in pairs if Mesh.parse(one).size <= limits.world_size]
    first, second = draw(st.sampled_from(mesh_pairs))
    said: dict[str, Any] = {"mesh__b": second}
    for name, mesh in (("a", first), ("b", second)):
        shape = draw(shapes(min_dims=1, max_dims=2, min_size=2))
        said[name] = TensorSpec(shape, draw(placements(mesh, len(shape), kinds=("R", "S", "S"))), "float64")
    said |= {"by": draw(st.sampled_from(["norm", "norm", "value"])), "most": "0.5"}
    said["norm"] = draw(st.sampled_from(["2.0", "1.0"])) if said["by"] == "norm" else None
    said["foreach"] = draw(st.sampled_from([None, "yes", "no"]))
    return fields(mesh=first, **said, seed=draw(draws.seeds()))


CLIPPED = "mesh=2 a=4x3:S(0):float64 b=5:S(0):float64 by=norm most=0.5 norm=2.0"
LAWS = make_laws(
    clipped,
    clipped_due,
    {
        "module.clipped": {
            "clause": (
                "Clipping sharded gradients by norm or value gives the dense norm, of any order, and the dense "
                "gradients, in place."
            ),
            "draw": draw_clipped,
            "draws": 12,
            "weight": 0.3,
        },
        "module.clipped-mixed": {
            "clause": (
                "Gradients on two meshes of the same ranks are clipped as the dense ones, or all ranks refuse to."
            ),
            "draw": draw_mixed,
            "draws": 10,
            "refusal": "allowed",
            "weight": 0.1,
        },
    },
    source=CLIP,
    control=CLIPPED,
    features=features_training,
    needs=NEEDS,
)


# Optimizers

# an optimizer by name: its class, its options, and those that it may be given beside them
STEPPED: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any], dict[Any, dict[str, Any]]]] = {
    "sgd": (
        torch.optim.SGD,
        {"lr": 0.5},
        {
            "momentum": {"momentum": 0.5},
            "nesterov": {"momentum": 0.5, "nesterov": True},
            "decay": {"weight_decay": 0.25},
            "dampening": {"momentum": 0.5, "dampening": 0.5, "maximize": True},
        },
    ),
    "adam": (
        torch.optim.Adam,
        {"lr": 0.25, "eps": 1.0},
        {"decay": {"weight_decay": 0.25}, "amsgrad": {"amsgrad": True}},
    ),
    "adamw": (
        torch.optim.AdamW,
        {"lr": 0.25, "eps": 1.0},
        {"decay": {"weight_decay": 0.25}, "amsgrad": {"amsgrad": True}},
    ),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.25, "eps": 1.0}, {"decay": {"weight_decay": 0.25}}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 0.25, "eps": 1.0}, {"momentum": {"momentum": 0.5, "centered": True}}),
    "adadelta": (torch.optim.Adadelta, {"lr": 0.25, "eps": 1.0}, {}),
    "adamax": (torch.optim.Adamax, {"lr": 0.25, "eps": 1.0}, {}),
    "nadam": (torch.optim.NAdam, {"lr": 0.25, "eps": 1.0}, {"decay": {"weight_decay": 0.25}}),
    "radam": (torch.optim.RAdam, {"lr": 0.25, "eps": 1.0}, {}),
    "asgd": (torch.optim.ASGD, {"lr": 0.25}, {}),
}


def state_of(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, Any]:
    """What an optimizer keeps of a parameter, numbers as numbers."""
    state = sorted(optimizer.state[parameter].items())
    return {
        key: value if value is None or getattr(value, "ndim", False) else float(whole(value)) for key, value in state
    }


def stepped(
    parameters: Sequence[nn.Parameter],
    gradients: Any,
    optimizer: str,
    options: str | None,
    foreach: bool | None,
    zero: str | None,
) -> dict[str, Any]:
    """Parameters after each step, what the optimizer keeps of them, and their gradients once they are set to zero."""
    made, own, more = STEPPED[optimizer]
    stepping, steps = made(parameters, **own, **more.get(options, {}), foreach=foreach), []
    for row in gradients:
        arrive(parameters, row)
        stepping.step()
        steps.append(copies(parameters))
    state = [state_of(stepping, parameter) for parameter in parameters]
    stepping.zero_grad(set_to_none=zero != "kept")
    return {"steps": steps, "state": state, "gradients": [parameter.grad for parameter in parameters]}


def optimizer(
    parameters: Parameters,
    gradients: ThreeSteps,
    optimizer: Annotated[str, WordField(STEPPED)],
    options: str | None = None,
    foreach: bool | None = None,
    zero: Literal["kept"] | None = None,
):
    return stepped(parameters, gradients, optimizer, options, foreach, zero)


def optimizer_due(parameters: list[Global], gradients, optimizer: str, options, foreach, zero):
    def lies(value: Any, one: Global) -> Any:
        return (
            dtensor(one.mesh, value, *one.placements).near()
            if isinstance(value, torch.Tensor)
            else value and Near(value)
        )

    want = stepped(*dense(parameters, gradients), optimizer, options, bool(foreach), zero)
    state = zip(want["state"], parameters, strict=True)
    return {
        "steps": [kept(row, parameters) for row in want["steps"]],
        "state": [{key: lies(value, one) for key, value in kept_of.items()} for kept_of, one in state],
        "gradients": claimed(want["gradients"], parameters),
    }


@st.composite
def draw_optimizer(draw: st.DrawFn, limits: Limits, names: tuple[str, ...]) -> Case:
    mesh, name = draw(st.sampled_from(meshes(limits))), draw(st.sampled_from(names))
    said = draw_tensors(draw, mesh)
    said |= {"optimizer": name, "options": draw(st.sampled_from([None, *STEPPED[name][2]]))}
    said |= {"foreach": draw(st.sampled_from([None, "yes", "no"])), "without": draw(st.sampled_from([None, None, "b"]))}
    said["zero"] = draw(st.sampled_from([None, None, "kept"]))
    return fields(mesh=mesh, **said, seed=draw(draws.seeds()))


COMMON = ("sgd", "sgd", "sgd", "adam", "adam", "adamw", "adamw")
OTHERS = ("adagrad", "rmsprop", "adadelta", "adamax", "nadam", "radam", "asgd")
STEP = "mesh=2 a=4x3:S(0):float64 b=5:S(0):float64"
LAWS += make_laws(
    optimizer,
    optimizer_due,
    {
        "module.optimizer[common]": {
            "clause": (
                "SGD, Adam and AdamW step sharded parameters as dense ones, one by one or all at once; their state "
                "lies as they do."
            ),
            "control": f"{STEP} optimizer=sgd options=momentum foreach=yes",
            "draw": partial(draw_optimizer, names=COMMON),
            "draws": 6,
            "weight": 0.3,
        },
        "module.optimizer[others]": {
            "clause": (
                "The other optimizers of torch.optim step sharded parameters as dense ones, and their state lies "
                "as the parameters do."
            ),
            "control": f"{STEP} optimizer=adagrad foreach=yes",
            "draw": partial(draw_optimizer, names=OTHERS),
            "draws": 5,
            "refusal": "allowed",
            "weight": 0.2,
        },
    },
    source=OPTIM,
    features=features_training,
    needs=NEEDS,
)
