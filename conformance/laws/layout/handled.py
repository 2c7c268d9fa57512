"""Laws of what Python does with a DTensor as with any tensor: it is copied, pickled, saved, and given other data."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Annotated

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from shardlaw.conformance.law.act import fields, law
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Claimed, Global, Of
from shardlaw.conformance.law.fields import Placements, Rank, WordField
from shardlaw.conformance.law.law import Limits
from shardlaw.conformance.laws.layout.distribute import DOC
from shardlaw.conformance.laws.shared import draws


def saved(x):
    """What torch.load reads of what torch.save wrote."""
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file)


def moved(x):
    """Replicas whose elements may still be on their way."""
    return x.redistribute(placements=[Replicate()] * x.device_mesh.ndim, async_op=True)


HOWS = {"deepcopy": copy.deepcopy, "pickle": lambda x: pickle.loads(pickle.dumps(x)), "save": saved}
# put into memory that several processes see, by a call that gives the tensor itself
SHARED = {"shared": lambda x: copy.deepcopy(x).share_memory_()}
EVERY_HOW = HOWS | SHARED
# what is handled, of a DTensor of two dims: itself, or what has another place in memory than its first element
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
    "moved": moved,
}
PLAIN = {**PARTS, "moved": lambda x: x}  # the same of a dense tensor


PLACES = (("2", "4x3:S(0)"), ("2", "4x4:S(1)"), ("3", "4x3:S(0)"), ("2x2", "4x6:R,S(1)"), ("2", "3x3:R"))
OUTSIDE = ("2@1,2", "3x2:R")


def sweep_copies(limits: Limits) -> list[Case]:
    """Each part in each way, of tensors that lie in turn in each of some ways; and of one on a part of the world, whose
    ranks outside have no rows to cut."""
    pairs = [(part, how) for part in PARTS for how in HOWS]
    cases = [(*PLACES[at % len(PLACES)], part, how) for at, (part, how) in enumerate(pairs)]
    cases += [("2", "4x3:S(0)", "moved", how) for how in HOWS]
    cases += [(*OUTSIDE, part, how) for part in ("itself", "leaf", "parameter") for how in HOWS]
    cases += [(*PLACES[0], part, how) for part in ("itself", "parameter") for how in SHARED]
    # what is on its way is pickled as far as it has arrived by then: that depends on timing
    made = [
        fields(mesh=mesh, x=x, part=part, how=how) for mesh, x, part, how in cases if (part, how) != ("moved", "pickle")
    ]
    return [case for case in made if case.world <= limits.world_size]


@law(
    "layout.copies",
    source="copy.deepcopy, pickle, torch.save: a torch.Tensor is copied with its elements and requires_grad; "
    f"{DOC}, DTensor: a torch.Tensor subclass",
    control="mesh=2 x=4x3:S(0) part=parameter how=save",
    sweep=sweep_copies,
    sweeps=len(PARTS) * len(HOWS) + 14,
    weight=0.4,
    features=lambda case: {f"way:{case.get('how')}"},
    needs=("all_gather",),
)
def copies(x: DTensor, part: Annotated[str, WordField(PARTS)], how: Annotated[str, WordField(EVERY_HOW)]):
    """A DTensor, a part of one or a parameter that is copied, pickled or saved comes back as the same, in memory of
    its own."""
    given = PARTS[part](x)
    made = EVERY_HOW[how](given)
    told = isinstance(made, nn.Parameter), made.requires_grad, made.is_leaf
    own = made.detach().clone()
    with torch.no_grad():
        made.to_local().zero_()
    return {"copy": own, "told": told, "given": given.detach()}


@copies.due
def _(x: Global, part, rank: Rank):
    full = PLAIN[part](x.full)
    told = isinstance(full, nn.Parameter), full.requires_grad, True
    same = Claimed(full.detach(), x.mesh) if x.mesh.coord(rank) is not None else ...
    return {"copy": same, "told": Of(told), "given": same}


def assign(x, other):
    """Assign to the data of a tensor, as scripts do."""
    x.data = other


def assign_vector(x, other):
    """What torch.nn.utils writes of one vector into a list of parameters."""
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector([other]), [x])


WRITES = {
    "copied": lambda x, other: x.copy_(other),
    "swapped": torch.utils.swap_tensors,
    "data": assign,
    "data-copied": lambda x, other: x.data.copy_(other),
    "vector": assign_vector,
    "applied": lambda x, other: x.apply_(lambda value: value * 2),
}
AS_GIVEN = ("swapped", "data")  # the tensor lies afterwards as what it was given


def draw_assigned(limits: Limits) -> SearchStrategy[Case]:
    drawn = draws.redistribution_cases(limits, kinds=("R", "S"), targets=("R", "S"), dtypes=draws.FLOATS)
    # docs/open-questions.md: what has a rank outside the mesh of a 0-d tensor?
    fit = drawn.filter(lambda case: bool(case.tensor("x").shape) or len(case.mesh().ranks) == case.world)
    return st.tuples(fit, st.sampled_from(list(WRITES))).map(lambda pair: pair[0].with_fields(how=pair[1]))


def sweep_assigned(limits: Limits) -> list[Case]:
    """Each way, to a tensor that lies as what it is given, and to one that lies otherwise."""
    places = (
        ("2", "4x3:S(0)", "S(0)"),
        ("2", "4x4:S(0)", "R"),
        ("2x2", "4x4:S(0),R", "S(0),R"),
        ("3", "6:S(0)", "S(0)"),
    )
    cases = [fields(mesh=mesh, x=x, to=to, how=how) for how in WRITES for mesh, x, to in places]
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
    """A tensor that takes over another's elements, by a copy or by its data, holds them; where the other's data become
    its own, it lies as the other did."""
    other = x.redistribute(placements=to) * 2
    WRITES[how](x, other)
    return x


@assigned.due
def _(x: Global, to, how):
    after = x.holding(x.full * 2)
    return after.under(to) if how in AS_GIVEN else after


# what asks a tensor for its elements, or for what they are together, without an op of DTensors
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
    """Each way, of tensors that lie in each of some ways."""
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
    """What asks a DTensor for its elements gets those of the whole on every rank, or is refused by all of them."""
    return {"read": READS[how](x)}


@read.due
def _(x: Global, how):
    return {"read": Of(READS[how](x.full), "wrong-value")}
