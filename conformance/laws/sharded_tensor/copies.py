"""Laws of casts, copies and pickles of a sharded tensor, of global sizes inferred from shards, and of ops that users
register for sharded tensors."""

from __future__ import annotations

import copy
import pickle
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
from hypothesis import strategies as st

from shardlaw.conformance import compat
from shardlaw.conformance.law.act import fields
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.choices import ChoiceField
from shardlaw.conformance.law.due import Of, Refused, caught
from shardlaw.conformance.law.fields import Device, Rank, WorldSize
from shardlaw.conformance.law.law import Limits
from shardlaw.conformance.laws.plan.torch_plans import box_slices
from shardlaw.conformance.laws.sharded_tensor.act_helpers import describe, from_boxes, outcome, spec_boxes
from shardlaw.conformance.laws.sharded_tensor.draws import DTYPES, FLOATS, acting_ranks, dtypes, sharded_law
from shardlaw.conformance.laws.sharded_tensor.fields import (
    SOURCE,
    EnumeratedSpec,
    EqualsField,
    FullTensor,
    Group,
    OwnBoxes,
    ShardingSpec,
    Size,
    due_boxes,
    due_description,
)
from shardlaw.reference.shards import shards_along
from shardlaw.reference.tensors import TensorSpec
from shardlaw.strategies import shapes
from shardlaw.strategies.shard_specs import chunk_specs, specs


def unpickle(data: bytes, group: Any) -> Any:
    with compat.load_with_process_group(group):
        return pickle.loads(data)


def copy_into_zeros(t: Any) -> Any:
    """A clone of ``t`` that is filled with zeros, and then with ``t`` by ``copy_``."""
    target = t.clone()
    for shard in target.local_shards():
        shard.tensor.zero_()
    return target.copy_(t)


CASTS = {
    "dtype": lambda t, dtype, device, group: t.to(dtype),
    "named": lambda t, dtype, device, group: t.to(dtype=dtype),
    "pair": lambda t, dtype, device, group: t.to(device, dtype),
    "like": lambda t, dtype, device, group: t.to(torch.zeros(1, dtype=dtype, device=device)),
    "type-as": lambda t, dtype, device, group: t.type_as(torch.zeros(1, dtype=dtype, device=device)),
}
IDENTITIES = {
    "same-dtype": lambda t, dtype, device, group: t.to(t.dtype),
    "device": lambda t, dtype, device, group: t.to(device),
    "device-text": lambda t, dtype, device, group: t.to(str(device)),
    "to-cpu": lambda t, dtype, device, group: t.cpu(),
}
COPIES = {
    "copy": lambda t, dtype, device, group: t.to(dtype=t.dtype, copy=True),
    "clone": lambda t, dtype, device, group: t.clone(),
    "deepcopy": lambda t, dtype, device, group: copy.deepcopy(t),
    "pickle": lambda t, dtype, device, group: unpickle(pickle.dumps(t), group),
    "overwritten": lambda t, dtype, device, group: copy_into_zeros(t),
}
ALIASES = {
    "detach": lambda t, dtype, device, group: t.requires_grad_().detach(),
    "stated": lambda t, dtype, device, group: compat.init_from_local_shards_and_metadata(
        t.local_shards(), t.metadata(), process_group=group
    ),
}
CALLS = {**CASTS, **IDENTITIES, **COPIES, **ALIASES}


@st.composite
def draw_copied(draw: st.DrawFn, limits: Limits) -> Case:
    how = draw(st.sampled_from(sorted(CALLS)))
    world, ranks, group_field = draw(acting_ranks(limits))
    shape = draw(shapes(min_dims=1))
    spec = draw(specs(shape, ranks))
    x = TensorSpec(shape, None, draw(dtypes(limits, FLOATS if how == "detach" else DTYPES)))
    to = draw(dtypes(limits)) if how in CASTS else None
    return fields(world=world, **group_field, x=x, spec=spec, how=how, to=to, seed=draw(st.integers(0, 9)) or None)


EACH_CALL = [f"world=2 x=5x3 spec=chunk(0)@0,1 how={how}{' to=float64' if how in CASTS else ''}" for how in CALLS]
MORE_CASES = [f"world=3 x=5x3 spec=chunk(0)@1,2 group=1,2 how={how}" for how in ("dtype to=float64", "pickle", "clone")]
# ranks that are the same in the group and in the world; several shards on a rank
MORE_CASES += ["world=3 x=5x3 spec=chunk(0)@0,1 group=0,1 how=pickle"]
MORE_CASES += [f"world=2 x=5x3 spec=0:2,0:3@0;2:4,0:3@1;4:5,0:3@0 how={how}" for how in ("overwritten", "clone")]


@sharded_law(
    "sharded_tensor.copied",
    source=(
        f"{SOURCE}, ShardedTensor.cpu, load_with_process_group; torch.Tensor.to: returns self where nothing has to "
        "be done"
    ),
    control="world=2 x=4x3 spec=chunk(0)@0,1 how=dtype to=float64",
    cases=(*EACH_CALL, *MORE_CASES),
    draw=draw_copied,
    draws=20,
)
def copied(
    x: FullTensor,
    boxes: OwnBoxes,
    how: Annotated[Any, ChoiceField(CALLS)],
    pickles: Annotated[bool, EqualsField("how", "pickle")],
    rank: Rank,
    device: Device,
    to: torch.dtype | None = None,
    group: Group = None,
):
    """A cast, copy, pickle or detached view of a sharded tensor has the same boxes and elements; a cast that changes
    nothing returns the tensor itself."""
    sharded = from_boxes(x, boxes, rank, group)
    result = how(sharded, to or x.dtype, device, group)
    source_shards, shards = ([shard.tensor for shard in one.local_shards()] for one in (sharded, result))
    gradients = [
        result.requires_grad,
        result.metadata().tensor_properties.requires_grad,
        *(shard.requires_grad for shard in shards),
    ]
    return {
        **describe(result),
        "spec": spec_boxes(result),
        "asks for a gradient": any(gradients),
        "itself": result is sharded or any(shard.device != device for shard in shards),
        "shares memory": any(
            one.data_ptr() == other.data_ptr() for one in source_shards for other in shards if other.numel()
        ),
        "kept": describe(sharded),
        **(unpickle_elsewhere(sharded, group) if pickles else {}),
    }


def unpickle_elsewhere(sharded: Any, group: Any) -> dict[str, Any]:
    """The outcomes of unpickling on another rank than the one that pickled, and without the group of the tensor."""
    pickles: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(pickles, pickle.dumps(sharded), group=group)
    position = dist.get_rank(group)
    return {
        "of another rank": outcome(unpickle, pickles[(position + 1) % len(pickles)], group),
        "of a group": outcome(pickle.loads, pickles[position]),
    }


@copied.due
def _(x, boxes, how, pickles, rank, to, group, world: WorldSize):
    full = x.to(to or x.dtype)
    is_copy = how in COPIES or full.dtype != x.dtype
    elsewhere = {
        "of another rank": Refused() if (world if group is None else len(group)) > 1 else ...,
        "of a group": ... if group is None else Refused(),
    }
    return {
        **due_description(full, boxes, rank),
        "spec": Of(due_boxes(boxes)),
        "asks for a gradient": Of(False),
        "itself": Of(True) if how in IDENTITIES else ...,
        "shares memory": False if is_copy else ...,
        "kept": due_description(x, boxes, rank),
        **(elsewhere if pickles else {}),
    }


# Inferred sizes


@st.composite
def draw_inferred(draw: st.DrawFn, limits: Limits) -> Case:
    world = draw(st.sampled_from([size for size in (2, 3, 4) if size <= limits.world_size]))
    counts = [draw(st.integers(1, 4)) for _ in range(world)]
    shape = (sum(counts), *draw(shapes(max_dims=2)))
    spec = shards_along(shape, 0, zip(counts, range(world), strict=True))
    x = TensorSpec(shape, None, draw(dtypes(limits)))
    return fields(world=world, x=x, spec=str(spec), seed=draw(st.integers(0, 9)) or None)


@sharded_law(
    "sharded_tensor.inferred",
    source=f"{SOURCE}, ShardedTensor._init_from_local_shards: None for the size that is not known",
    control="world=2 x=4x3 spec=0:1,0:3@0;1:4,0:3@1",
    draw=draw_inferred,
    draws=8,
    smallest=2,
)
def inferred(x: FullTensor, boxes: OwnBoxes, rank: Rank):
    """A sharded tensor can be created from the rows of each rank without a global size, which is the sum of theirs."""
    rows = compat.ShardOfTensor.from_tensor_and_offsets(x[box_slices(*boxes[0])].contiguous(), [0] * x.ndim, rank)
    return describe(compat.init_from_local_shards([rows], None, *x.shape[1:]))


@inferred.due
def _(x, boxes, rank):
    return due_description(x, boxes, rank)


# User-defined ops


@st.composite
def draw_custom(draw: st.DrawFn, limits: Limits) -> Case:
    world, ranks, group_field = draw(acting_ranks(limits))
    shape = draw(shapes(min_dims=1, min_size=1))
    spec = draw(chunk_specs(shape, ranks))
    return fields(
        world=world, **group_field, x=TensorSpec(shape), spec=spec, by=draw(st.sampled_from(("function", "spec")))
    )


def new_override() -> Any:
    """A function that dispatches through ``__torch_function__`` of its arguments."""

    def override(*args: Any, **options: Any) -> Any:
        tensors = [x for x in (*args, *options.values()) if isinstance(x, torch.Tensor)]
        return torch.overrides.handle_torch_function(override, tensors, *args, **options)

    return override


@sharded_law(
    "sharded_tensor.custom",
    source=f"{SOURCE}, custom_sharded_op_impl, custom_sharding_spec_op",
    control="world=2 x=4x3 spec=chunk(0)@0,1 by=function",
    # within a group, where a sharded tensor of all ranks exists too
    cases=[f"world=3 group=1,2 x=5x3 spec=chunk(0)@1,2 by={by}" for by in ("function", "spec")],
    draw=draw_custom,
    draws=6,
)
def custom(x: Size, spec: ShardingSpec, other: EnumeratedSpec, by: Literal["function", "spec"], group: Group = None):
    """An op that is registered for all sharded tensors, or those of a spec, is called with the arguments of the
    function."""
    factories, dense, answer, calls = compat.sharded_tensor, torch.ones(2), object(), []
    sharded, boxed = factories.zeros(spec, x, process_group=group), factories.zeros(other, x, process_group=group)
    override, unregistered = new_override(), new_override()
    register = (
        compat.custom_sharding_spec_op(type(spec), override)
        if by == "spec"
        else factories.custom_sharded_op_impl(override)
    )

    def record(types: Any, args: Any, kwargs: Any, process_group: Any) -> object:
        calls.append((types, args, kwargs, process_group))
        return answer

    registered = register(record)

    def call(*args: Any, **options: Any) -> list[Any]:
        calls.clear()
        return [override(*args, **options) is answer, *(call_matches(*entry, args, options) for entry in calls)]

    return {
        "first": call(sharded, dense, to=3),
        "last": call(dense, sharded),
        "named": call(dense, other=sharded),
        "unknown op": outcome(unregistered, sharded),
        "no sharded tensor": outcome(registered, (), (dense,), {}, group),
        "no tensor": outcome(registered, (), (), {}, group),
        "other spec": caught(call, boxed),
        "other group": None if group is None else outcome(lambda: override(sharded, factories.zeros(spec, x))),
    }


def call_matches(types: Any, received: Any, kwargs: Any, group: Any, args: Any, options: Any) -> list[Any]:
    """Whether a registered op received the arguments, the keywords and the type of the call; the ranks of its group."""
    same_arguments = len(received) == len(args) and all(one is other for one, other in zip(received, args, strict=True))
    return [
        same_arguments,
        (kwargs or {}) == options,
        compat.ShardedTensor in types,
        dist.get_process_group_ranks(group),
    ]


@custom.due
def _(by, group, world: WorldSize):
    ranks = list(range(world)) if group is None else group
    due_call = [True, [True, True, Of(True), Of(ranks)]]
    refused = dict.fromkeys(("unknown op", "no sharded tensor", "no tensor"), Refused())
    return {
        **dict.fromkeys(("first", "last", "named"), due_call),
        **refused,
        "other spec": Refused() if by == "spec" else due_call,
        "other group": ... if group is None else Refused(),
    }
