"""Laws of methods and functions for plain tensors that DTensors support too: copying, pickling, assigning, reading and
comparing."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Annotated, Literal

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from shardlaw.conformance.law.act import fields, law
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Claimed, Global, Of, Refused, caught
from shardlaw.conformance.law.fields import Placements, Rank, WordField
from shardlaw.conformance.law.law import Limits
from shardlaw.conformance.laws.layout.distribute import DOC
from shardlaw.conformance.laws.shared import draws
from shardlaw.conformance.laws.shared.derived import DerivedField, operand


def save_and_load(x):
    """Pass a tensor through torch.save and torch.load."""
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file)


def replicate_async(x):
    """Replicas, whose communication may be unfinished."""
    return x.redistribute(placements=[Replicate()] * x.device_mesh.ndim, async_op=True)


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda x: pickle.loads(pickle.dumps(x)), "save": save_and_load}
# into memory that processes share; the call returns the tensor itself
SHARED = {"shared": lambda x: copy.deepcopy(x).share_memory_()}
# what is copied of a DTensor of two dims: itself, a leaf, or a part at another storage offset
PARTS = {
    "itself": lambda x: x,
    "leaf": lambda x: x.detach().requires_grad_(),
    "parameter": nn.Parameter,
    "frozen": lambda x: nn.Parameter(x, requires_grad=False),
    "columns": lambda x: x[:, 1:],
    "rows": lambda x: x[1:],
    "first": lambda x: x[:, :1],
    "turned": lambda x: x.t(),
    "row": lambda x: x[1],
    "moved": replicate_async,
}
DENSE_PARTS = {**PARTS, "moved": lambda x: x}  # the same of a dense tensor
LAYOUTS = (("2", "4x3:S(0)"), ("2", "4x4:S(1)"), ("3", "4x3:S(0)"), ("2x2", "4x6:R,S(1)"), ("2", "3x3:R"))
SUBMESH = ("2@1,2", "3x2:R")


def sweep_copies(limits: Limits) -> list[Case]:
    """Every part with every copy, alternating between :data:`LAYOUTS`; the parts that ranks outside a mesh have, which
    are those without slices, on a sub-mesh."""
    pairs = [(part, how) for part in PARTS for how in COPIES]
    cases = [(*LAYOUTS[at % len(LAYOUTS)], part, how) for at, (part, how) in enumerate(pairs)]
    cases += [("2", "4x3:S(0)", "moved", how) for how in COPIES]
    cases += [(*SUBMESH, part, how) for part in ("itself", "leaf", "parameter") for how in COPIES]
    cases += [(*LAYOUTS[0], part, how) for part in ("itself", "parameter") for how in SHARED]
    found = [fields(mesh=mesh, x=x, part=part, how=how) for mesh, x, part, how in cases]
    # pickle does not wait for communication: its result depends on timing
    timed = ("moved", "pickle")
    return [case for case in found if case.world <= limits.world_size and (case.get("part"), case.get("how")) != timed]


@law(
    "layout.copies",
    source="copy.deepcopy, pickle, torch.save: a torch.Tensor is copied with its elements and requires_grad; "
    f"{DOC}, DTensor: a torch.Tensor subclass",
    control="mesh=2 x=4x3:S(0) part=parameter how=save",
    sweep=sweep_copies,
    sweeps=len(PARTS) * len(COPIES) + 14,
    weight=0.4,
    features=lambda case: {f"way:{case.get('how')}"},
    needs=("all_gather",),
)
def copies(x: DTensor, part: Annotated[str, WordField(PARTS)], how: Annotated[str, WordField(COPIES | SHARED)]):
    """A copied, pickled or saved DTensor, part of a DTensor or parameter has the same elements, layout and class, and
    its own memory."""
    given = PARTS[part](x)
    copied = (COPIES | SHARED)[how](given)
    attributes = isinstance(copied, nn.Parameter), copied.requires_grad, copied.is_leaf
    elements = copied.detach().clone()
    with torch.no_grad():
        copied.to_local().zero_()
    return {"copy": elements, "told": attributes, "given": given.detach()}


@copies.due
def _(x: Global, part, rank: Rank):
    full = DENSE_PARTS[part](x.full)
    attributes = isinstance(full, nn.Parameter), full.requires_grad, True
    same = Claimed(full.detach(), x.mesh) if x.mesh.coord(rank) is not None else ...
    return {"copy": same, "told": Of(attributes), "given": same}


def assign_data(x, other):
    x.data = other


WRITES = {
    "copied": lambda x, other: x.copy_(other),
    "swapped": torch.utils.swap_tensors,
    "data": assign_data,
    "data-copied": lambda x, other: x.data.copy_(other),
    "vector": lambda x, other: nn.utils.vector_to_parameters(nn.utils.parameters_to_vector([other]), [x]),
    "applied": lambda x, other: x.apply_(lambda value: value * 2),
}
REPLACES = ("swapped", "data")  # these replace the layout of the tensor too


def draw_assigned(limits: Limits) -> SearchStrategy[Case]:
    moves = draws.redistribution_cases(limits, kinds=("R", "S"), targets=("R", "S"), dtypes=draws.FLOATS)
    # docs/open-questions.md: what has a rank outside the mesh of a 0-d tensor?
    fit = moves.filter(lambda case: bool(case.tensor("x").shape) or len(case.mesh().ranks) == case.world)
    return st.tuples(fit, st.sampled_from(list(WRITES))).map(lambda pair: pair[0].with_fields(how=pair[1]))


def sweep_assigned(limits: Limits) -> list[Case]:
    """Every write, of a tensor with the same placements and with others."""
    layouts = (
        ("2", "4x3:S(0)", "S(0)"),
        ("2", "4x4:S(0)", "R"),
        ("2x2", "4x4:S(0),R", "S(0),R"),
        ("3", "6:S(0)", "S(0)"),
    )
    cases = [fields(mesh=mesh, x=x, to=to, how=how) for how in WRITES for mesh, x, to in layouts]
    return [case for case in cases if case.world <= limits.world_size]


@law(
    "layout.assigned",
    source="torch.nn.utils docs, vector_to_parameters; torch.utils docs, swap_tensors; Tensor.copy_ and Tensor.data; "
    f"{DOC}, DTensor: a torch.Tensor subclass",
    control="mesh=2 x=4x3:S(0) to=S(0) how=copied",
    draw=draw_assigned,
    draws=8,
    sweep=sweep_assigned,
    sweeps=24,
    weight=0.4,
    features=lambda case: {f"way:{case.get('how')}"},
    needs=("all_gather",),
    refusal="allowed",
)
def assigned(x: DTensor, to: Placements, how: Annotated[str, WordField(WRITES)]):
    """A DTensor into which another one is copied has its elements; one whose data another replaces has its placements
    too."""
    other = x.redistribute(placements=to) * 2
    WRITES[how](x, other)
    return x


@assigned.due
def _(x: Global, to, how):
    after = x.holding(x.full * 2)
    return after.under(to) if how in REPLACES else after


# reads of elements that are no ops of DTensors
READS = {
    "list": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy().tolist(),
    "exported": lambda x: torch.from_dlpack(x).tolist(),
    "within": lambda x: [number in x for number in range(8)],
    "number": float,
    "truth": bool,
}
ONE_ELEMENT = ("number", "truth")


def sweep_read(limits: Limits) -> list[Case]:
    """Every read of tensors with each kind of placement."""
    several, single = ("4x3:R", "4x3:S(0)", "3x4:S(1)", "4:P(max)"), ("1:R", "1:S(0)", "1x1:S(1)", "():P(sum)")
    return [fields(mesh="2", x=x, how=how) for how in READS for x in (single if how in ONE_ELEMENT else several)]


@law(
    "layout.read",
    source="Tensor.tolist, numpy, from_dlpack, Python's in, float and bool of a tensor: they give its elements; "
    f"{DOC}, DTensor: a torch.Tensor subclass",
    control="mesh=2 x=4x3:R how=within",
    sweep=sweep_read,
    sweeps=len(READS) * 4,
    weight=0.4,
    features=lambda case: {f"way:{case.get('how')}"},
    refusal="allowed",
)
def read(x: DTensor, how: Annotated[str, WordField(READS)]):
    """Reading the elements of a DTensor gives those of the global tensor on every rank, or is refused by all ranks."""
    return {"read": READS[how](x)}


@read.due
def _(x: Global, how):
    return {"read": Of(READS[how](x.full), "wrong-value")}


COMPARED = (
    "mesh=2 x=5x3:S(0) by=close",
    "mesh=2 x=4x3:R by=close at=5",
    "mesh=2 x=5x3:S(0) by=close at=14",
    "mesh=2x2 x=4x6:S(0),S(1) by=close at=0",
    "mesh=2 x=5x3:S(0) by=equal",
    "mesh=3 x=5x3:S(0) by=equal at=14",
    "mesh=2x2 x=4x6:R,S(1) by=equal at=23",
)


def read_other(case: Case) -> Global:
    """The tensor ``x``, with the element at the position ``at``, if any, changed."""
    x = operand(case)
    full = x.full.clone()
    if "at" in case:
        full.view(-1)[case.integer("at")] += 1
    return x.holding(full)


@law(
    "layout.compared",
    source=f"torch.testing docs, assert_close: raises where actual and expected are not close; torch.equal; {DOC}",
    control=COMPARED[0],
    cases=COMPARED,
    features=lambda case: {f"way:{case.get('by')}"},
    needs=("all_reduce",),
    weight=0.3,
)
def compared(
    x: DTensor,
    other: Annotated[DTensor, DerivedField(read_other)],
    by: Literal["close", "equal"],
    at: int | None = None,
):
    """torch.equal and assert_close find one different element on every rank, whichever rank holds it."""
    if by == "equal":
        return {"told apart": not torch.equal(x, other)}
    return {"told apart": caught(torch.testing.assert_close, x, other)}


@compared.due
def _(at: int | None, by: str):
    if by == "equal":
        return {"told apart": Of(at is not None, "wrong-value")}
    return {"told apart": Of(None, "wrong-error") if at is None else Refused((AssertionError,))}
