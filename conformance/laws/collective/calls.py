"""The collectives in plain torch, as the acts of this chapter call them.

A call is ``(name, xs, rooms, options)``: the collective, the tensors that this rank gives, the shape, dtype and memory
of each tensor that the results go to, and keyword arguments.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

# what stands in a buffer before anything arrives
STALE = 99
# how late a rank comes that is said to come late
LATE_SECONDS = 0.015
# these write their results over what they are given
CHANGING = ("all_reduce", "reduce", "broadcast")


def newest(*names):
    """The function of torch.distributed under the newest of its names that this version has."""
    return getattr(dist, next(name for name in names if hasattr(dist, name)))


CALLS = {
    "all_reduce": lambda xs, outs, **how: dist.all_reduce(xs[0], **how),
    "reduce": lambda xs, outs, **how: dist.reduce(xs[0], **how),
    "broadcast": lambda xs, outs, **how: dist.broadcast(xs[0], **how),
    "all_gather": lambda xs, outs, **how: dist.all_gather(outs, xs[0], **how),
    "all_gather_single": lambda xs, outs, **how: newest("all_gather_single", "all_gather_into_tensor")(
        outs[0], xs[0], **how
    ),
    "gather": lambda xs, outs, **how: dist.gather(xs[0], outs or None, **how),
    "scatter": lambda xs, outs, **how: dist.scatter(outs[0], xs or None, **how),
    "reduce_scatter": lambda xs, outs, **how: dist.reduce_scatter(outs[0], xs, **how),
    "reduce_scatter_single": lambda xs, outs, **how: newest("reduce_scatter_single", "reduce_scatter_tensor")(
        outs[0], xs[0], **how
    ),
    "all_to_all": lambda xs, outs, **how: dist.all_to_all(outs, xs, **how),
    "all_to_all_single": lambda xs, outs, **how: dist.all_to_all_single(outs[0], xs[0], **how),
}


def room(shape, dtype, memory, device):
    """A tensor to be written, all :data:`STALE`, with more beside it in memory."""
    if memory == "sliced" and shape:
        return torch.full((*shape[:-1], 2 * shape[-1] + 1), STALE, dtype=dtype, device=device)[..., 1::2]
    flat = torch.full((math.prod(shape) + 3,), STALE, dtype=dtype, device=device)[:-3]
    if memory == "transposed":
        return flat.view(shape[::-1]).permute(*reversed(range(len(shape))))
    return flat.view(shape)


def beside(tensor):
    """What lies in the memory of a tensor and not in it."""
    memory = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())
    hidden = torch.ones(len(memory), dtype=torch.bool, device=tensor.device)
    hidden.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).zero_()
    return memory[hidden]


def prepared(call, device):
    """A call with tensors for its results."""
    name, xs, rooms, options = call
    if "op" in options:
        options = {**options, "op": getattr(dist.ReduceOp, options["op"].upper())}
    return name, xs, [room(shape, dtype, memory, device) for shape, dtype, memory in rooms], options


def start(call, group, **work):
    """Make a prepared call. Returns its work where ``async_op`` is asked for."""
    name, xs, outs, options = call
    return CALLS[name](xs, outs, group=group, **options, **work)


def results(call):
    """Where the results of a prepared call are."""
    name, xs, outs, _ = call
    return xs if name in CHANGING else outs


def attempted(call, group, work=None):
    """What became of a prepared call: its results or the error; whether memory beside the results, and that of results
    where it was refused, is as it was; what was given, where it must be as it was; and whether finished work says that
    it is completed."""
    name, xs, outs, _ = call
    error, completed = None, True
    try:
        if work:
            started = start(call, group, async_op=True)
            started.wait()
            completed = started.is_completed()
        else:
            start(call, group)
    except Exception as raised:
        error = raised

    def untouched(tensors):
        return all(torch.equal(memory, torch.full_like(memory, STALE)) for memory in tensors)

    return {
        "result": error or results(call),
        "beside": untouched(map(beside, outs)),
        "written": error is not None and not untouched(outs),
        "input": xs if error or name not in CHANGING else None,
        "work": completed,
    }
