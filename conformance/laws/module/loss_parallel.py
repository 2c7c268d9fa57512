"""Laws of loss_parallel: the cross entropy of logits whose classes are sharded, its gradient, and where the context
ends."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
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


def logits_of(case: Case) -> DTensorValue:
    """Eighths, as a leaf."""
    spec = case.tensor("x")
    return dtensor(
        case.mesh(), eighths(spec.shape, case.seed).to(spec.build(0).dtype), *(spec.placements or ()), form="leaf"
    )


def classes_of(layout: Layout) -> int:
    """The dim of the classes."""
    return 1 if len(layout.shape) > 1 else 0


def placed_as_labels(layout: Layout) -> Placements:
    """The placements of the logits without the dim of the classes."""
    classes = classes_of(layout)

    def without(dim: int) -> Placement:
        return R() if dim == classes else Shard(dim - (dim > classes))

    return tuple(without(at.dim) if isinstance(at, Shard) else at for at in layout.placements)


def labels_of(case: Case) -> DTensorValue | torch.Tensor:
    """Classes, or chances of them; every third label is the one to ignore, if any is."""
    x, targets = logits_of(case), WordField(("sharded", "chances", "")).parse(case.get("targets", ""))
    shape, classes = x.layout.shape, classes_of(x.layout)
    made = indices(shape[:classes] + shape[classes + 1 :], shape[classes], case.seed)
    if "ignore" in case:
        made = torch.where(torch.arange(made.numel()).reshape(made.shape) % 3 == 2, case.integer("ignore"), made)
    if targets == "chances":
        made = torch.full(shape, 1 / shape[classes], dtype=x.full.dtype)
    at = case.placements("labels") if "labels" in case else placed_as_labels(x.layout)
    return dtensor(x.mesh, made, *at) if targets == "sharded" or "labels" in case else made


def weight_of(case: Case) -> DTensorValue | torch.Tensor | None:
    """A power of two for each class."""
    if "weight" not in case:
        return None
    x, how = logits_of(case), WordField(("plain", "sharded")).parse(case.get("weight"))
    count = x.layout.shape[classes_of(x.layout)]
    full = 2.0 ** (torch.arange(count, dtype=x.full.dtype) % 4 - 1)
    return full if how == "plain" else dtensor(x.mesh, full, *(R(),) * x.mesh.ndim)


def arriving_of(case: Case) -> DTensorValue | None:
    """The gradient of a loss that is not reduced, as the labels lie where the case does not say otherwise."""
    if case.get("reduction", "mean") != "none":
        return None
    x = logits_of(case)
    shape, classes = x.layout.shape, classes_of(x.layout)
    full = output_gradient(shape[:classes] + shape[classes + 1 :], case.seed).to(x.full.dtype)
    return dtensor(x.mesh, full, *(case.placements("arrives") if "arrives" in case else placed_as_labels(x.layout)))


Logits = Annotated[DTensor, FromCase(logits_of, "x", "mesh")]
Labels = Annotated[torch.Tensor, FromCase(labels_of, "targets", "labels", "ignore")]
Weight = Annotated[torch.Tensor | None, FromCase(weight_of, "weight")]
Arriving = Annotated[torch.Tensor | None, FromCase(arriving_of, "reduction", "arrives")]


# The loss and its gradient


@contextlib.contextmanager
def parallel_loss() -> Iterator[None]:
    """The context; a body that raises leaves nothing of it behind, whatever torch does."""
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
    grad: Arriving,
    reduction: Literal["mean", "sum", "none"] = "mean",
    ignore: int = -100,
    smooth: float = 0.0,
):
    with parallel_loss():
        out = cross_entropy(x, labels, weight, ignore_index=ignore, reduction=reduction, label_smoothing=smooth)
        out.backward(grad)
    return {"loss": out, "gradient": x.grad}


def whole(value: Any) -> Any:
    """A tensor that a due function gets, whole."""
    return value.full if isinstance(value, Global) else value


def loss_due(x: Global, labels, weight, grad, reduction: str, ignore: int, smooth: float):
    full: Any = x.full.clone().requires_grad_()
    labels, weight, grad = whole(labels), whole(weight), whole(grad)
    out = cross_entropy(full, labels, weight, ignore_index=ignore, reduction=reduction, label_smoothing=smooth)
    out.backward(grad)
    # what the documents say of the loss: sums are pending where samples are sharded
    at = placed_as_labels(x.layout)
    leaves = at if reduction == "none" else tuple(Partial("sum") if isinstance(one, Shard) else one for one in at)
    due = Claimed(out.detach(), x.mesh, exact=False) if smooth else dtensor(x.mesh, out, *leaves).near()
    return {"loss": due, "gradient": Claimed(full.grad, x.mesh, exact=False)}


def features_loss(case: Case) -> set[str]:
    """What is asked of the loss."""
    found = {"module", "parallel-loss", "backward", f"option:reduction-{case.get('reduction', 'mean')}"}
    return found | {f"option:{name}" for name in ("ignore", "weight", "smooth") if name in case}


@st.composite
def drawn_loss(draw: st.DrawFn, limits: Limits, mesh_texts: tuple[str, ...], odd: bool) -> Case:
    palette = palette_meshes(mesh_texts, limits.world_size)
    mesh, count = draw(st.sampled_from(palette)), draw(st.sampled_from([5, 7, 8, 6, 4, 3, 9]))
    rows = draw(st.sampled_from([3, 4, 5, 1]))
    wide = [(rows, count), (rows, count), (rows, count, 2), (count,), (2, count, 3, 2)]
    shape: tuple[int, ...] = draw(st.sampled_from(wide))
    classes = 1 if len(shape) > 1 else 0
    along = draw(st.integers(0, mesh.ndim - 1))
    others = [R()] + [Shard(dim) for dim in range(len(shape)) if dim != classes]
    at: Placements = tuple(
        Shard(classes) if dim == along else draw(st.sampled_from(others)) for dim in range(mesh.ndim)
    )
    beside = any(isinstance(one, Shard) and one.dim != classes for one in at)
    said: dict[str, Any] = {"x": TensorSpec(shape, at, draw(st.sampled_from(["float64", "float64", "float32"])))}
    said["reduction"] = draw(st.sampled_from(["mean", "sum", "none"] if mesh.ndim == 1 else ["sum", "none", "none"]))
    if said["reduction"] == "none":
        ways = st.sampled_from([R(), *map(Shard, range(len(shape) - 1))])
        said["arrives"] = draw(st.sampled_from([None, None, 1])) and draw(st.tuples(*[ways] * mesh.ndim))
    said["weight"] = draw(st.sampled_from([None, None, "plain", "sharded"]))
    said["ignore"] = draw(st.sampled_from([None, None, 0, 1, -100, 255]))
    said["targets"] = "sharded" if beside else draw(st.sampled_from([None, "sharded"]))
    if odd:
        said["smooth"] = draw(st.sampled_from(["0.25", None]))
        if said["smooth"] is None and len(shape) > 1 and not beside:
            said |= {"targets": "chances", "ignore": None}
        elif mesh.ndim > 1:
            said["reduction"] = "mean"
    return fields(mesh=mesh, **said, seed=draw(draws.seeds()))


def draw_loss(*mesh_texts: str, odd: bool = False) -> Callable[[Limits], SearchStrategy[Case]]:
    """Cases on these meshes; ``odd`` ones are those that the documents leave out, which may be refused."""
    return lambda limits: drawn_loss(limits, mesh_texts, odd)


LAWS = make_laws(
    loss,
    loss_due,
    {
        "module.loss": {
            "clause": (
                "Within loss_parallel the cross entropy of logits sharded by classes is the dense loss, and their "
                "gradient the dense one."
            ),
            "control": "mesh=2 x=4x5:S(1):float64 reduction=mean",
            "draw": draw_loss("2", "2", "2", "3", "3", "4"),
            "draws": 14,
            "sweep": texts("mesh=2 x=4x6:S(1):float64 reduction=none arrives=S(0)"),
            "sweeps": 1,
            "weight": 0.2,
        },
        "module.loss-beside": {
            "clause": (
                "On a mesh of two dims, samples sharded or not beside the classes, the loss is the dense one and "
                "placed as documented."
            ),
            "control": "mesh=2x2 x=4x6:S(0),S(1):float64 reduction=sum targets=sharded",
            "draw": draw_loss("2x2", "2x2", "1x2", "2x1"),
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
                "What loss_parallel does not support, smoothed labels, chances, means on meshes of two dims, is "
                "refused or right."
            ),
            "control": "mesh=2 x=4x5:S(1):float64 reduction=mean",
            "draw": draw_loss("2", "3", "2x2", odd=True),
            "draws": 12,
            "refusal": "allowed",
            "weight": 0.1,
        },
    },
    source=DOC,
    features=features_loss,
    needs=NEEDS,
)


# What is made of the logits beside the loss

USES = {
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
    sweep=texts(*(f"mesh={at} use={use}" for use in USES for at in ("2 x=4x6:S(1):float64", "3 x=3x7:S(1):float64"))),
    sweeps=2 * len(USES),
    features=lambda case: {"module", "parallel-loss", "backward"},
    needs=NEEDS,
    weight=0.2,
)
def apart(x: Logits, use: Annotated[str, WordField(USES)]):
    """Within loss_parallel other functions of the logits, of their log_softmax too, have the dense gradient."""
    with parallel_loss():
        out = USES[use](x)
        out.backward()
    return {"result": out, "gradient": x.grad}


@apart.due
def _(x: Global, use: str):
    full: Any = x.full.clone().requires_grad_()
    out = USES[use](full)
    out.backward()
    return {
        "result": Claimed(out.detach(), x.mesh, exact=False),
        "gradient": Claimed(full.grad, x.mesh, exact=False),
    }


# What is refused, and what is over at the end

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
ENDS = ("over", "raised", "again")


def features_ends(case: Case) -> set[str]:
    return {"module", "parallel-loss", f"way:{case.get('way')}"} | (
        {"must-refuse"} if case.get("way") not in ENDS else set()
    )


@law(
    "module.loss-ends",
    source=DOC,
    control="mesh=2 x=4x6:R labels=R way=over",
    sweep=texts(*REFUSED, *(f"mesh=2 x=4x6:R labels=R way={way}" for way in ENDS)),
    sweeps=10,
    features=features_ends,
    needs=NEEDS,
    weight=0.1,
)
def ends(
    x: Logits,
    labels: Labels,
    way: Annotated[str, WordField((*ERRORS, *ENDS))],
    reduction: Literal["mean", "sum"] = "mean",
):
    """loss_parallel refuses logits and labels that it does not take, and leaves nothing behind when it is over."""

    def within() -> torch.Tensor:
        with parallel_loss():
            return cross_entropy(x, labels, reduction=reduction)

    if way not in ENDS:
        return {"refused": caught(within)}
    try:
        for _ in range(2 if way == "again" else 1):
            with contextlib.suppress(KeyError), loss_parallel():
                if way == "raised":
                    raise KeyError("a body that raises")
        # classes are whole: within the context this is refused
        return {"afterwards": cross_entropy(x, labels, reduction=reduction).full_tensor()}  # type: ignore[attr-defined]
    finally:
        with loss_parallel():
            pass


@ends.due
def _(x: Global, labels, way: str, reduction: str):
    if way not in ENDS:
        return {"refused": Refused(ERRORS[way])}
    return {"afterwards": Near(cross_entropy(x.full, whole(labels), reduction=reduction))}
