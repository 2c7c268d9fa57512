"""Laws of clipped gradients and of optimizers on sharded parameters."""

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
CLIP_DOC = "torch.nn.utils.clip_grad_norm_ and clip_grad_value_: the norm of all gradients as one vector; in place"
OPTIMIZER_DOC = (
    "torch.optim, and torch.distributed.tensor docs: a DTensor parameter takes part as its dense tensor would"
)
MESHES = (*("2",) * 5, *("3",) * 4, *("2x2",) * 3, *("1x2",) * 2, "4", "2@1,0")
NAMES = ("a", "b", "c")


# Fields


def read_tensor(case: Case, name: str, number: int, field: str = "", form: str = "") -> DTensorValue:
    """A parameter (``number`` 0) or its gradient in a step (``number`` from 1). Its placements are those of ``field``,
    or else the parameter's."""
    spec, mesh = case.tensor(name), f"mesh.{name}" if f"mesh.{name}" in case else "mesh"
    full = eighths(spec.shape, case.seed + NAMES.index(name) + 5 * number).to(spec.build(0).dtype)
    placements = case.placements(field) if field in case else spec.placements or ()
    return dtensor(case.mesh(mesh), full, *placements, form=form, seed=case.seed, field=mesh)


def read_parameters(case: Case) -> list[DTensorValue]:
    """A parameter for each of the tensors ``a``, ``b`` and ``c``, on the mesh ``mesh`` or on one of its own, such as
    ``mesh.b``."""
    return [read_tensor(case, name, 0, form="parameter") for name in NAMES if name in case]


def read_gradients(case: Case, steps: int = 1) -> list[list[DTensorValue | None]]:
    """The gradients of each step, with the placements of their parameters or of ``grad.a``. The gradient of the
    parameter ``without`` exists in the second step only."""

    def gradient(name: str, step: int) -> DTensorValue | None:
        missing = name == case.get("without", "") and step != 1
        return None if missing else read_tensor(case, name, step + 1, f"grad.{name}")

    return [[gradient(name, step) for name in NAMES if name in case] for step in range(steps)]


PARAMETER_FIELDS = ("mesh", *(f"{part}{name}" for part in ("", "mesh.", "grad.") for name in NAMES), "without")
Parameters = Annotated[list[nn.Parameter], FromCase(read_parameters, *PARAMETER_FIELDS)]
OneStep = Annotated[list[Any], FromCase(read_gradients)]
ThreeSteps = Annotated[list[Any], FromCase(lambda case: read_gradients(case, 3))]


def dense_copies(
    parameters: Sequence[Global], rows: Sequence[Sequence[Global | None]]
) -> tuple[list[nn.Parameter], list[list[Any]]]:
    """Dense copies of parameters and of the gradients of each step."""
    dense_parameters = [nn.Parameter(parameter.full.clone()) for parameter in parameters]
    return dense_parameters, [[gradient and gradient.full.clone() for gradient in row] for row in rows]


def due_parameters(tensors: Sequence[torch.Tensor], parameters: Sequence[Global]) -> list[Any]:
    """Due tensors that have the layouts of the parameters."""
    return [
        dtensor(parameter.mesh, full, *parameter.placements).near()
        for full, parameter in zip(tensors, parameters, strict=True)
    ]


def due_gradients(
    tensors: Sequence[torch.Tensor | None], parameters: Sequence[Global], rounding: torch.dtype | None = None
) -> list[Any]:
    """Due gradients of any placements, rounded as in their own dtype or in ``rounding``."""
    return [
        None if full is None else Claimed(full, parameter.mesh, exact=False, rounding=rounding)
        for full, parameter in zip(tensors, parameters, strict=True)
    ]


# Plain torch, for acts


def set_gradients(parameters: Sequence[nn.Parameter], row: Sequence[torch.Tensor | None]) -> None:
    """Set the gradient of each parameter."""
    for parameter, gradient in zip(parameters, row, strict=True):
        parameter.grad = gradient


def copied(parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    """Copies of the parameters."""
    return [parameter.detach().clone() for parameter in parameters]


def to_full(tensor: Any) -> Any:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


# Clipping


def clip_gradients(
    by: str, parameters: Sequence[nn.Parameter], most: float, norm: float, foreach: bool | None
) -> torch.Tensor | None:
    """Clip the gradients of the parameters. Returns their norm, or ``None`` if they are clipped by value."""
    if by == "value":
        torch.nn.utils.clip_grad_value_(parameters, most, foreach=foreach)
        return None
    if by == "norm":
        return torch.nn.utils.clip_grad_norm_(parameters, most, norm, foreach=foreach)
    total = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], norm, foreach=foreach)
    torch.nn.utils.clip_grads_with_norm_(parameters, most, total, foreach=foreach)
    return total


def clipped(
    parameters: Parameters,
    gradients: OneStep,
    by: Literal["norm", "parts", "value"],
    most: float,
    norm: float = 2.0,
    foreach: bool | None = None,
):
    set_gradients(parameters, gradients[0])
    total = clip_gradients(by, parameters, most, norm, foreach)
    return {
        "norm": None if total is None else to_full(total).float(),
        "parameters": [*parameters],
        "gradients": [parameter.grad for parameter in parameters],
    }


def clipped_due(parameters: list[Global], gradients, by: str, most: float, norm: float, foreach):
    dense, rows = dense_copies(parameters, gradients)
    set_gradients(dense, rows[0])
    total = clip_gradients(by, dense, most, norm, foreach)
    # gradients that are scaled by a norm are as exact as the coarsest gradient in the norm
    dtypes = [parameter.grad.dtype for parameter in dense if parameter.grad is not None and total is not None]
    rounding = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=None)
    return {
        "norm": None if total is None else Near(total.float()),
        "parameters": due_parameters(dense, parameters),
        "gradients": due_gradients([parameter.grad for parameter in dense], parameters, rounding),
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
    """Two or three parameters; with ``pending``, seldom a gradient with other placements."""
    values: dict[str, Any] = {}
    kinds = ("R", "S", "S", "_S") if mesh.ndim == 1 else ("R", "S")
    for name in NAMES[: draw(st.sampled_from([2, 2, 3]))]:
        shape = draw(shapes(min_dims=1, max_dims=2, min_size=1))
        at = draw(placements(mesh, len(shape), kinds=kinds))
        values[name] = TensorSpec(shape, at, draw(st.sampled_from(["float64", "float64", "float64", "float32"])))
    if pending and draw(st.integers(0, 4)) == 4:
        spec = values["a"]
        values["grad__a"] = draw(
            st.sampled_from([(R(),) * mesh.ndim, (Partial("sum"),) + (R(),) * (mesh.ndim - 1), spec.placements])
        )
    return values


@st.composite
def draw_clipped(draw: st.DrawFn, limits: Limits) -> Case:
    mesh = draw(st.sampled_from(meshes(limits)))
    by = draw(st.sampled_from(["norm", "norm", "parts", "value"]))
    values = draw_tensors(draw, mesh, pending=by != "value")
    values |= {"by": by, "most": draw(st.sampled_from(["0.5", "0.25", "64"]))}
    if by != "value":
        values["norm"] = draw(st.sampled_from(["2.0", "2.0", "1.0", "inf", "inf", "0.0", "3.0", "-inf"]))
    values["foreach"] = draw(st.sampled_from([None, "yes", "no"]))
    values["without"] = draw(st.sampled_from([None, None, "b"]))
    return fields(mesh=mesh, **values, seed=draw(draws.seeds()))


@st.composite
def draw_mixed(draw: st.DrawFn, limits: Limits) -> Case:
    """Parameters on two meshes of the same ranks, such as one sharded along one dim and one along two."""
    pairs = [("2", "1x2"), ("2", "2x1"), ("4", "2x2"), ("2x2", "4"), ("1x2", "2"), ("2", "2@1,0")]
    mesh_pairs = [(Mesh.parse(a), Mesh.parse(b)) for a, b in pairs if Mesh.parse(a).size <= limits.world_size]
    first, second = draw(st.sampled_from(mesh_pairs))
    values: dict[str, Any] = {"mesh__b": second}
    for name, mesh in (("a", first), ("b", second)):
        shape = draw(shapes(min_dims=1, max_dims=2, min_size=2))
        values[name] = TensorSpec(shape, draw(placements(mesh, len(shape), kinds=("R", "S", "S"))), "float64")
    values |= {"by": draw(st.sampled_from(["norm", "norm", "value"])), "most": "0.5"}
    values["norm"] = draw(st.sampled_from(["2.0", "1.0"])) if values["by"] == "norm" else None
    values["foreach"] = draw(st.sampled_from([None, "yes", "no"]))
    return fields(mesh=first, **values, seed=draw(draws.seeds()))


CLIP_CONTROL = "mesh=2 a=4x3:S(0):float64 b=5:S(0):float64 by=norm most=0.5 norm=2.0"
LAWS = make_laws(
    clipped,
    clipped_due,
    {
        "module.clipped": {
            "clause": (
                "Sharded gradients are clipped in place, by a norm of any order or by value, as the dense ones are."
            ),
            "draw": draw_clipped,
            "draws": 12,
            "weight": 0.3,
        },
        "module.clipped-mixed": {
            "clause": "Gradients on two meshes of the same ranks are clipped as the dense ones, or every rank refuses.",
            "draw": draw_mixed,
            "draws": 10,
            "refusal": "allowed",
            "weight": 0.1,
        },
    },
    source=CLIP_DOC,
    control=CLIP_CONTROL,
    features=features_training,
    needs=NEEDS,
)


# Optimizers

ADAPTIVE = {"lr": 0.25, "eps": 1.0}
DECAY: dict[str, dict[str, Any]] = {"decay": {"weight_decay": 0.25}}
AMSGRAD: dict[str, dict[str, Any]] = {**DECAY, "amsgrad": {"amsgrad": True}}
SGD: dict[str, dict[str, Any]] = {
    "momentum": {"momentum": 0.5},
    "nesterov": {"momentum": 0.5, "nesterov": True},
    "decay": {"weight_decay": 0.25},
    "dampening": {"momentum": 0.5, "dampening": 0.5, "maximize": True},
}
# by name: class, options of every case, and further options by the words of the field ``options``
OPTIMIZERS: dict[str, tuple[Callable[..., torch.optim.Optimizer], dict[str, Any], dict[Any, dict[str, Any]]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.5}, SGD),
    "adam": (torch.optim.Adam, ADAPTIVE, AMSGRAD),
    "adamw": (torch.optim.AdamW, ADAPTIVE, AMSGRAD),
    "adagrad": (torch.optim.Adagrad, ADAPTIVE, DECAY),
    "rmsprop": (torch.optim.RMSprop, ADAPTIVE, {"momentum": {"momentum": 0.5, "centered": True}}),
    "adadelta": (torch.optim.Adadelta, ADAPTIVE, {}),
    "adamax": (torch.optim.Adamax, ADAPTIVE, {}),
    "nadam": (torch.optim.NAdam, ADAPTIVE, DECAY),
    "radam": (torch.optim.RAdam, ADAPTIVE, {}),
    "asgd": (torch.optim.ASGD, {"lr": 0.25}, {}),
}


def optimizer_state(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, Any]:
    """The state of an optimizer for a parameter; 0-d tensors become numbers."""
    state = sorted(optimizer.state[parameter].items())
    return {
        key: value if value is None or getattr(value, "ndim", False) else float(to_full(value)) for key, value in state
    }


def run_steps(
    parameters: Parameters,
    gradients: ThreeSteps,
    optimizer: Annotated[str, WordField(OPTIMIZERS)],
    options: str | None = None,
    foreach: bool | None = None,
    zero: Literal["kept"] | None = None,
):
    """The parameters after each step, the optimizer's state for them, and their gradients after ``zero_grad``."""
    make, common, further = OPTIMIZERS[optimizer]
    optim, steps = make(parameters, **common, **further.get(options, {}), foreach=foreach), []
    for row in gradients:
        set_gradients(parameters, row)
        optim.step()
        steps.append(copied(parameters))
    state = [optimizer_state(optim, parameter) for parameter in parameters]
    optim.zero_grad(set_to_none=zero != "kept")
    return {"steps": steps, "state": state, "gradients": [parameter.grad for parameter in parameters]}


def run_steps_due(parameters: list[Global], gradients, optimizer: str, options, foreach, zero):
    def due(value: Any, parameter: Global) -> Any:
        if isinstance(value, torch.Tensor):
            return dtensor(parameter.mesh, value, *parameter.placements).near()
        return value and Near(value)

    want = run_steps(*dense_copies(parameters, gradients), optimizer, options, bool(foreach), zero)
    states = zip(want["state"], parameters, strict=True)
    return {
        "steps": [due_parameters(row, parameters) for row in want["steps"]],
        "state": [{key: due(value, parameter) for key, value in state.items()} for state, parameter in states],
        "gradients": due_gradients(want["gradients"], parameters),
    }


@st.composite
def draw_optimizer(draw: st.DrawFn, limits: Limits, names: tuple[str, ...]) -> Case:
    mesh, name = draw(st.sampled_from(meshes(limits))), draw(st.sampled_from(names))
    values = draw_tensors(draw, mesh)
    values |= {"optimizer": name, "options": draw(st.sampled_from([None, *OPTIMIZERS[name][2]]))}
    values["foreach"] = draw(st.sampled_from([None, "yes", "no"]))
    values["without"] = draw(st.sampled_from([None, None, "b"]))
    values["zero"] = draw(st.sampled_from([None, None, "kept"]))
    return fields(mesh=mesh, **values, seed=draw(draws.seeds()))


COMMON = ("sgd", "sgd", "sgd", "adam", "adam", "adamw", "adamw")
OTHERS = ("adagrad", "rmsprop", "adadelta", "adamax", "nadam", "radam", "asgd")
STEP_CONTROL = "mesh=2 a=4x3:S(0):float64 b=5:S(0):float64"
LAWS += make_laws(
    run_steps,
    run_steps_due,
    {
        "module.optimizer[common]": {
            "clause": (
                "SGD, Adam and AdamW, foreach or not, step sharded parameters as dense ones; their state has the "
                "parameters' layouts."
            ),
            "control": f"{STEP_CONTROL} optimizer=sgd options=momentum foreach=yes",
            "draw": partial(draw_optimizer, names=COMMON),
            "draws": 6,
            "weight": 0.3,
        },
        "module.optimizer[others]": {
            "clause": (
                "The other optimizers of torch.optim step sharded parameters as dense ones; their state has the "
                "parameters' layouts."
            ),
            "control": f"{STEP_CONTROL} optimizer=adagrad foreach=yes",
            "draw": partial(draw_optimizer, names=OTHERS),
            "draws": 5,
            "refusal": "allowed",
            "weight": 0.2,
        },
    },
    source=OPTIMIZER_DOC,
    features=features_training,
    needs=NEEDS,
)
