"""Collectives in plain torch, for acts.

A call is ``(name, xs, outputs, options)``: the collective, the input tensors of this rank, the shape, dtype and memory
layout of each output tensor, and keyword arguments.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

# the elements of outputs before the call
STALE = 99
# the delay of the rank in the field ``late``
LATE_SECONDS = 0.015
# collectives that write their results into their input
IN_PLACE = ("all_reduce", "reduce", "broadcast")


def newest_function(*names):
    """The function of torch.distributed under the first of its names that the installed torch has."""
    return getattr(dist, next(name for name in names if hasattr(dist, name)))


CALLS = {
    "all_reduce": lambda xs, outs, **options: dist.all_reduce(xs[0], **options),
    "reduce": lambda xs, outs, **options: dist.reduce(xs[0], **options),
    "broadcast": lambda xs, outs, **options: dist.broadcast(xs[0], **options),
    "all_gather": lambda xs, outs, **options: dist.all_gather(outs, xs[0], **options),
    "all_gather_single": lambda xs, outs, **options: newest_function("all_gather_single", "all_gather_into_tensor")(
        outs[0], xs[0], **options
    ),
    "gather": lambda xs, outs, **options: dist.gather(xs[0], outs or None, **options),
    "scatter": lambda xs, outs, **options: dist.scatter(outs[0], xs or None, **options),
    "reduce_scatter": lambda xs, outs, **options: dist.reduce_scatter(outs[0], xs, **options),
    "reduce_scatter_single": lambda xs, outs, **options: newest_function(
        "reduce_scatter_single", "reduce_scatter_tensor"
    )(outs[0], xs[0], **options),
    "all_to_all": lambda xs, outs, **options: dist.all_to_all(outs, xs, **options),
    "all_to_all_single": lambda xs, outs, **options: dist.all_to_all_single(outs[0], xs[0], **options),
}


def make_output(shape, dtype, memory, device):
    """An output tensor that is a part of a larger storage; all elements of the storage are :data:`STALE`."""
    if memory == "sliced" and shape:
        return torch.full((*shape[:-1], 2 * shape[-1] + 1), STALE, dtype=dtype, device=device)[..., 1::2]
    flat = torch.full((math.prod(shape) + 3,), STALE, dtype=dtype, device=device)[:-3]
    if memory == "transposed":
        return flat.view(shape[::-1]).permute(*reversed(range(len(shape))))
    return flat.view(shape)


def elements_outside(tensor):
    """The elements of a tensor's storage that do not belong to the tensor."""
    storage = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())
    outside = torch.ones(len(storage), dtype=torch.bool, device=tensor.device)
    outside.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).zero_()
    return storage[outside]


def prepare(call, device):
    """The same call with output tensors for their shapes, and the reduction as a ``ReduceOp``."""
    name, xs, outputs, options = call
    if "op" in options:
        options = {**options, "op": getattr(dist.ReduceOp, options["op"].upper())}
    return name, xs, [make_output(shape, dtype, memory, device) for shape, dtype, memory in outputs], options


def start(call, group, **async_op):
    """Start a prepared call. Returns its work with ``async_op=True``."""
    name, xs, outs, options = call
    return CALLS[name](xs, outs, group=group, **options, **async_op)


def results(call):
    """The tensors that have the results of a prepared call."""
    name, xs, outs, _ = call
    return xs if name in IN_PLACE else outs


def run_call(call, group, work=None, start=start):
    """Run a prepared call; with ``work`` asynchronously. ``start``: what starts it.

    ``result``: its results or the error. ``beside``: whether the storage outside the outputs is unchanged. ``written``:
    whether the outputs of a refused call are changed. ``input``: inputs that must be unchanged. ``work``: whether the
    work is completed after its wait.
    """
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

    def is_stale(tensors):
        return all(torch.equal(memory, torch.full_like(memory, STALE)) for memory in tensors)

    return {
        "result": error or results(call),
        "beside": is_stale(map(elements_outside, outs)),
        "written": error is not None and not is_stale(outs),
        "input": xs if error or name not in IN_PLACE else None,
        "is_completed()": completed,
    }
