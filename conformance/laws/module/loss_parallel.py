"""Laws of loss_parallel: the cross entropy of logits sharded by class, its gradient, and what holds after the
context."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any, Literal

import torch
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.functional import cross_entropy, kl_div, log_softmax, nll_loss, softmax

from shardlaw.conformance.law.act import fields, law, texts
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Claimed, Global, Near, Refused, caught
from shardlaw.conformance.law.fields import WordField
from shardlaw.conformance.law.law import Limits
from shardlaw.conformance.laws.module.arguments import DTensorValue, FromCase, dtensor, make_laws
from shardlaw.conformance.laws.shared import draws
from shardlaw.reference.layout import Layout
from shardlaw.reference.placement import Partial, Placement, Placements, Shard
from shardlaw.reference.placement import Replicate as R
from shardlaw.reference.tensors import TensorSpec
from shardlaw.strategies.meshes import palette_meshes
from shardlaw.strategies.modules import eighths, indices, output_gradient

DOC = "torch.distributed.tensor.parallel docs, loss_parallel"
NEEDS = ("all_gather", "all_reduce")


# Fields


def read_logits(case: Case) -> DTensorValue:
    """Logits, in eighths, or in steps of 64 for a ``wide`` tensor; a leaf that requires a gradient."""
    spec = case.tensor("x")
    full = eighths(spec.shape, case.seed) * (512 if spec.fill == "wide" else 1)
    return dtensor(case.mesh(), full.to(spec.torch_dtype), *(spec.placements or ()), form="leaf")


def class_dim(layout: Layout) -> int:
    """The dim of the classes."""
    return 1 if len(layout.shape) > 1 else 0


def label_placements(layout: Layout) -> Placements:
    """The placements of the logits, without the dim of the classes."""
    classes = class_dim(layout)

    def without_classes(placement: Placement) -> Placement:
        if not isinstance(placement, Shard):
            return placement
        return R() if placement.dim == classes else Shard(placement.dim - (placement.dim > classes))

    return tuple(map(without_classes, layout.placements))


def read_labels(case: Case) -> DTensorValue | torch.Tensor:
    """The targets: class indices, of which every third is ``ignore`` if the case has that field, or class
    probabilities."""
    x, targets = read_logits(case), WordField(("sharded", "chances", "")).parse(case.get("targets", ""))
    shape, classes = x.layout.shape, class_dim(x.layout)
    full = indices(shape[:classes] + shape[classes + 1 :], shape[classes], case.seed)
    if "ignore" in case:
        full = torch.where(torch.arange(full.numel()).reshape(full.shape) % 3 == 2, case.integer("ignore"), full)
    if targets == "chances":
        full = torch.full(shape, 1 / shape[classes], dtype=x.full.dtype)
    placements = case.placements("labels") if "labels" in case else label_placements(x.layout)
    return dtensor(x.mesh, full, *placements) if targets == "sharded" or "labels" in case else full


def read_weight(case: Case) -> DTensorValue | torch.Tensor | None:
    """A power of two for each class, as a weight."""
    if "weight" not in case:
        return None
    x, form = read_logits(case), WordField(("plain", "sharded")).parse(case.get("weight"))
    count = x.layout.shape[class_dim(x.layout)]
    full = 2.0 ** (torch.arange(count, dtype=x.full.dtype) % 4 - 1)
    return full if form == "plain" else dtensor(x.mesh, full, *(R(),) * x.mesh.ndim)


def read_output_gradient(case: Case) -> DTensorValue | None:
    """The gradient of a loss without reduction, with the placements of the field ``arrives`` or else of the labels."""
    if case.get("reduction", "mean") != "none":
        return None
    x = read_logits(case)
    shape, classes = x.layout.shape, class_dim(x.layout)
    full = output_gradient(shape[:classes] + shape[classes + 1 :], case.seed).to(x.full.dtype)
    return dtensor(x.mesh, full, *(case.placements("arrives") if "arrives" in case else label_placements(x.layout)))


Logits = Annotated[DTensor, FromCase(read_logits, "x", "mesh")]
Labels = Annotated[torch.Tensor, FromCase(read_labels, "targets", "labels", "ignore")]
Weight = Annotated[torch.Tensor | None, FromCase(read_weight, "weight")]
OutputGradient = Annotated[torch.Tensor | None, FromCase(read_output_gradient, "reduction", "arrives")]


# The loss and its gradient


@contextlib.contextmanager
def restoring_loss_parallel() -> Iterator[None]:
    """loss_parallel, which is also left when its body raises, whatever torch does."""
    try:
        with loss_parallel():
            yield
    except BaseException:
        with loss_parallel():
            pass
        raise


def loss(
    x: Logits,
    labels: Labels,
    weight: Weight,
    grad: OutputGradient,
    reduction: Literal["mean", "sum", "none"] = "mean",
    ignore: int = -100,
    smooth: float = 0.0,
):
    with restoring_loss_parallel():
        out = cross_entropy(x, labels, weight, ignore_index=ignore, reduction=reduction, label_smoothing=smooth)
        out.backward(grad)
    return {"loss": out, "gradient": x.grad}


def to_full(value: Any) -> Any:
    """The elements of a tensor that a due function gets."""
    return value.full if isinstance(value, Global) else value


def loss_due(x: Global, labels, weight, grad, reduction: str, ignore: int, smooth: float):
    full: Any = x.full.clone().requires_grad_()
    labels, weight, grad = to_full(labels), to_full(weight), to_full(grad)
    out = cross_entropy(full, labels, weight, ignore_index=ignore, reduction=reduction, label_smoothing=smooth)
    out.backward(grad)
    # documented: where samples are sharded, the sum of the loss is pending
    placements = label_placements(x.layout)
    if reduction != "none":
        placements = tuple(Partial("sum") if isinstance(at, Shard) else at for at in placements)
    due = Claimed(out.detach(), x.mesh, exact=False) if smooth else dtensor(x.mesh, out, *placements).near()
    return {"loss": due, "gradient": Claimed(full.grad, x.mesh, exact=False)}


def features_loss(case: Case) -> set[str]:
    """The features of the arguments of the loss."""
    found = {"module", "parallel-loss", "backward", f"option:reduction-{case.get('reduction', 'mean')}"}
    return found | {f"option:{name}" for name in ("ignore", "weight", "smooth") if name in case}


@st.composite
def draw_loss(draw: st.DrawFn, limits: Limits, mesh_texts: tuple[str, ...], unsupported: bool = False) -> Case:
    """Cases on these meshes; ``unsupported``: with options that the documents leave out, which may be refused."""
    meshes = palette_meshes(mesh_texts, limits.world_size)
    mesh, count = draw(st.sampled_from(meshes)), draw(st.sampled_from([5, 7, 8, 6, 4, 3, 9]))
    rows = draw(st.sampled_from([3, 4, 5, 1]))
    shapes = [(rows, count), (rows, count), (rows, count, 2), (count,), (2, count, 3, 2)]
    shape: tuple[int, ...] = draw(st.sampled_from(shapes))
    classes = 1 if len(shape) > 1 else 0
    class_mesh_dim = draw(st.integers(0, mesh.ndim - 1))
    others = [R()] + [Shard(dim) for dim in range(len(shape)) if dim != classes]
    at: Placements = tuple(
        Shard(classes) if dim == class_mesh_dim else draw(st.sampled_from(others)) for dim in range(mesh.ndim)
    )
    samples_sharded = any(isinstance(p, Shard) and p.dim != classes for p in at)
    values: dict[str, Any] = {"x": TensorSpec(shape, at, draw(st.sampled_from(["float64", "float64", "float32"])))}
    values["reduction"] = draw(st.sampled_from(["mean", "sum", "none"] if mesh.ndim == 1 else ["sum", "none", "none"]))
    if values["reduction"] == "none":
        choices = st.sampled_from([R(), *map(Shard, range(len(shape) - 1))])
        values["arrives"] = draw(st.sampled_from([None, None, 1])) and draw(st.tuples(*[choices] * mesh.ndim))
    values["weight"] = draw(st.sampled_from([None, None, "plain", "sharded"]))
    values["ignore"] = draw(st.sampled_from([None, None, 0, 1, -100, 255]))
    values["targets"] = "sharded" if samples_sharded else draw(st.sampled_from([None, "sharded"]))
    if unsupported:
        values["smooth"] = draw(st.sampled_from(["0.25", None]))
        if values["smooth"] is None and len(shape) > 1 and not samples_sharded:
            values |= {"targets": "chances", "ignore": None}
        elif mesh.ndim > 1:
            values["reduction"] = "mean"
    return fields(mesh=mesh, **values, seed=draw(draws.seeds()))


LAWS = make_laws(
    loss,
    loss_due,
    {
        "module.loss": {
            "clause": (
                "Within loss_parallel the cross entropy of logits sharded by class and its gradient are the dense ones."
            ),
            "control": "mesh=2 x=4x5:S(1):float64 reduction=mean",
            "draw": partial(draw_loss, mesh_texts=("2", "2", "2", "3", "3", "4")),
            "draws": 14,
            "sweep": texts(
                "mesh=2 x=4x6:S(1):float64 reduction=none arrives=S(0)",
                "mesh=2 x=5x6:S(1):float64 reduction=mean ignore=1 weight=plain",
                "mesh=2 x=4x7:S(1):float32:wide reduction=mean",  # exponentials of what is not shifted overflow
            ),
            "sweeps": 3,
            "weight": 0.2,
        },
        "module.loss-beside": {
            "clause": (
                "On a mesh of two dims, whether samples are sharded too or not, the loss is the dense one and has "
                "the documented placements."
            ),
            "control": "mesh=2x2 x=4x6:S(0),S(1):float64 reduction=sum targets=sharded",
            "draw": partial(draw_loss, mesh_texts=("2x2", "2x2", "1x2", "2x1")),
            "draws": 8,
            "sweep": texts(
                *(
                    f"mesh=2x2 x={x}:float64 reduction=none targets=sharded arrives={arrives}"
                    for x, arrives in (("4x6:S(0),S(1)", "R,R"), ("4x6:S(1),S(0)", "R,R"))
                )
            ),
            "sweeps": 2,
            "refusal": "allowed",
            "weight": 0.2,
        },
        "module.loss-odd": {
            "clause": (
                "What loss_parallel does not support (label smoothing, class probabilities, means on meshes of two "
                "dims) is refused or right."
            ),
            "control": "mesh=2 x=4x5:S(1):float64 reduction=mean",
            "draw": partial(draw_loss, mesh_texts=("2", "3", "2x2"), unsupported=True),
            "draws": 12,
            "sweep": texts("mesh=2x2 x=4x6:S(0),S(1):float64 reduction=mean targets=sharded"),
            "sweeps": 1,
            "refusal": "allowed",
            "weight": 0.1,
        },
    },
    source=DOC,
    features=features_loss,
    needs=NEEDS,
)


# Other functions of the logits

FUNCTIONS = {
    "nll": lambda x: nll_loss(log_softmax(x, 1), torch.zeros(len(x), dtype=torch.int64)),
    "weighed": lambda x: (log_softmax(x, 1) * x.detach()).sum(),
    "entropy": lambda x: (log_softmax(x, 1).exp() * log_softmax(x, 1)).sum(),
    "divergence": lambda x: kl_div(log_softmax(x, 1), x.detach().sigmoid(), reduction="sum"),
    "softmax": lambda x: (softmax(x, 1) * x.detach()).sum(),
    "logsumexp": lambda x: x.logsumexp(1).square().sum(),
}


@law(
    "module.loss-apart",
    source=f"{DOC}: cross entropy is computed in parallel within the context; of other functions nothing else is said",
    control="mesh=2 x=4x6:S(1):float64 use=nll",
    cases=[f"mesh={at} use={use}" for use in FUNCTIONS for at in ("2 x=4x6:S(1):float64", "3 x=3x7:S(1):float64")],
    features=lambda case: {"module", "parallel-loss", "backward"},
    needs=NEEDS,
    weight=0.2,
)
def other_functions(x: Logits, use: Annotated[str, WordField(FUNCTIONS)]):
    """Within loss_parallel other functions of the logits have the dense result and gradient."""
    with restoring_loss_parallel():
        out = FUNCTIONS[use](x)
        out.backward()
    return {"result": out, "gradient": x.grad}


@other_functions.due
def _(x: Global, use: str):
    full: Any = x.full.clone().requires_grad_()
    out = FUNCTIONS[use](full)
    out.backward()
    return {
        "result": Claimed(out.detach(), x.mesh, exact=False),
        "gradient": Claimed(full.grad, x.mesh, exact=False),
    }


# Refusals, and the end of the context

REFUSED: dict[str, tuple[type[Exception], ...]] = {
    "mesh=2 x=4x6:S(0) way=classes-whole": (ValueError,),
    "mesh=2 x=4x6:R way=classes-replicated": (ValueError,),
    "mesh=2x2 x=4x6:S(0),S(1) way=rows-plain": (ValueError,),
    "mesh=2 x=4x6:S(1) labels=S(0) way=labels-elsewhere": (ValueError, RuntimeError),
    "mesh=2x2 x=4x8:S(1),S(1) labels=R,R way=classes-twice": (ValueError,),
    "mesh=2x2 x=4x6:P(sum),S(1) labels=R,R way=pending-sum reduction=sum": (ValueError,),
    "mesh=1x2 x=4x6:P(max),S(1) labels=R,R way=pending-extreme reduction=sum": (ValueError,),
}
ERRORS = {text.partition("way=")[2].partition(" ")[0]: errors for text, errors in REFUSED.items()}
AFTER = ("over", "raised", "again")


def features_after_context(case: Case) -> set[str]:
    return {"module", "parallel-loss", f"way:{case.get('way')}"} | (
        {"must-refuse"} if case.get("way") not in AFTER else set()
    )


@law(
    "module.loss-ends",
    source=DOC,
    control="mesh=2 x=4x6:R labels=R way=over",
    cases=(*REFUSED, *(f"mesh=2 x=4x6:R labels=R way={way}" for way in AFTER)),
    features=features_after_context,
    needs=NEEDS,
    weight=0.1,
)
def after_context(
    x: Logits,
    labels: Labels,
    way: Annotated[str, WordField((*ERRORS, *AFTER))],
    reduction: Literal["mean", "sum"] = "mean",
):
    """loss_parallel refuses logits and labels with wrong placements, and has no effect after its context."""

    def within() -> torch.Tensor:
        with restoring_loss_parallel():
            return cross_entropy(x, labels, reduction=reduction)

    if way not in AFTER:
        return {"refused": caught(within)}
    try:
        for _ in range(2 if way == "again" else 1):
            with contextlib.suppress(KeyError), loss_parallel():
                if way == "raised":
                    raise KeyError("a body that raises")
        # classes are not sharded: within the context this would be refused
        return {"afterwards": cross_entropy(x, labels, reduction=reduction).full_tensor()}  # type: ignore[attr-defined]
    finally:
        with loss_parallel():
            pass


@after_context.due
def _(x: Global, labels, way: str, reduction: str):
    if way not in AFTER:
        return {"refused": Refused(ERRORS[way])}
    return {"afterwards": Near(cross_entropy(x.full, to_full(labels), reduction=reduction))}
