"""The law of passes forward and backward within contexts, with hooks, and beside tensors that are not sharded."""

from __future__ import annotations

import functools
import threading
from contextlib import AbstractContextManager, nullcontext
from typing import Annotated, Any

import torch
from torch.autograd import graph
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint as checkpoints
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from shardlaw.conformance import compat
from shardlaw.conformance.law.act import law
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Claimed, Global, Near
from shardlaw.conformance.law.fields import Rank, WordField
from shardlaw.conformance.laws.gradient.conversions import DOC

# Plain torch, for acts


class Stop(torch.autograd.Function):
    """The input, without a gradient."""

    @staticmethod
    def forward(ctx: Any, x):
        return x * 1

    @staticmethod
    def backward(ctx: Any, g):
        return None


class Doubling(TorchFunctionMode):
    """Doubles the result of each matmul."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        return out * 2 if func in (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__) else out


def product(x, w):
    return (x @ w.t()).relu()


def moved(x, placement):
    """A sharded tensor with another placement along each mesh dim; a plain tensor as it is."""
    return x.redistribute(placements=[placement] * x.device_mesh.ndim) if isinstance(x, DTensor) else x


def whole(x):
    """The elements of a tensor as a plain one."""
    return moved(x, Replicate()).to_local() if isinstance(x, DTensor) else x * 1


def within(forward=nullcontext, backward=nullcontext, function=product):
    """A pass forward in one context, and backward in another."""

    def run(x, w):
        with forward():
            y = function(x, w)
        with backward():
            y.sum().backward()
        return {"value": y}

    return run


def changed(change, where):
    """A pass in which a hook changes the gradient: of the leaf, of the result, or after it was accumulated."""

    def accumulated(leaf):
        leaf.grad = change(leaf.grad)

    def run(x, w):
        y = product(x, w)
        if where == "after":
            x.register_post_accumulate_grad_hook(accumulated)
        else:
            (x if where == "leaf" else y).register_hook(change)
        y.sum().backward()
        return {"value": y}

    return run


def in_thread(function):
    """What a function returns in a thread of its own."""
    returned = list[Any]()
    thread = threading.Thread(target=lambda: returned.append(function()))
    thread.start()
    thread.join()
    return returned[0]


def autocast(x, **options) -> AbstractContextManager[Any]:
    return torch.autocast(x.device.type, dtype=torch.bfloat16, **options)


def cast(also_backward=False, **options):
    """A pass under autocast, forward or whole."""

    def run(x, w):
        with autocast(x, **options):
            y = product(x, w)
        with autocast(x, **options) if also_backward else nullcontext():
            y.sum().backward()
        return {"value": y}

    return run


def partly_autocast(x, w):
    """A product under autocast, and one of its result where that is switched off."""
    with autocast(x):
        y = product(x, w)
        with autocast(x, enabled=False):
            return product(y.to(x.dtype), y.to(x.dtype))


def twice_autocast(x, w):
    """Two products under autocast, which casts each operand once."""
    with autocast(x):
        return product(x, w) + product(x, w)


def mutated(x, w):
    """What backward needs is changed in place, where that is allowed."""
    with graph.allow_mutation_on_saved_tensors():
        y = product(x * 1, w)
        z = y * y
        y.mul_(3)
        (z + y).sum().backward()
    return {"value": y}


def gradients_of(x, w):
    """Gradients that are asked for: of a result that depends on one tensor alone, and of several at once."""
    y = product(x, w)
    unused = torch.autograd.grad(y.sum(), [x, w.detach().requires_grad_()], allow_unused=True, retain_graph=True)
    zeros = torch.autograd.grad(
        y.sum(), w.detach().requires_grad_(), allow_unused=True, materialize_grads=True, retain_graph=True
    )
    directions = torch.stack([torch.ones_like(y), torch.zeros_like(y)]).detach()
    batch = torch.autograd.grad(y, x, directions, is_grads_batched=True, retain_graph=True)
    y.sum().backward(inputs=[x])
    return {"value": y, "asked": [unused[0], zeros[0], batch[0]], "unused": unused[1] is None}


def heard(x, w):
    """Hooks that only listen, and a gradient that an inner tensor retains."""
    heard = list[Any]()
    y = product(x, w)
    y.retain_grad()
    graph.register_multi_grad_hook((x, w), lambda gradients: heard.extend(gradients))
    y.grad_fn.register_prehook(lambda gradients: heard.append(gradients[0]))
    y.sum().backward()
    return {"value": y, "asked": [heard[0], y.grad], "heard": len(heard)}


def counted(x, w):
    with FlopCounterMode(display=False) as counter:
        y = product(x, w)
        y.sum().backward()
    return {"value": y, "flops": counter.get_total_flops()}


def stopped(through):
    """A gradient that ends behind ``through``: ``w`` gets none, and ``x`` gets that of the other way."""

    def run(x, w):
        y = product(x, w)
        (y.sum() + Stop.apply(through(w * 1)).sum() + (x * 2).sum()).backward()
        return {"value": y}

    return run


def stopped_leaf(through):
    """A gradient that ends behind ``through``, which alone uses ``w``: ``w`` gets none at all, and not zeros."""

    def run(x, w):
        y = x * 2
        (y.sum() + Stop.apply(through(w)).sum()).backward()
        return {"value": y}

    return run


def copied_by_shards(x):
    """A tensor of the local tensor of ``x``."""
    return DTensor.from_local(x.to_local(), x.device_mesh, x.placements) if isinstance(x, DTensor) else x


def after_scalar(x, w):
    """A plain tensor without dims beside the others, which an optimizer trains with the gradient that it got."""
    scale = torch.tensor(3.0, requires_grad=True, dtype=x.dtype, device=x.device)
    y = product(x, w)
    (y * scale).sum().backward()
    torch.optim.SGD([scale], lr=0.5, foreach=False).step()
    return {"value": y, "scale": scale.detach()}


def changed_in_place(through):
    """What is made of the result is changed in place."""

    def run(x, w):
        y = through(product(x, w) * 1)
        y.mul_(3)
        y.sum().backward()
        return {"whole": y}

    return run


def save_matmuls(context, op, *args, **options):
    saved = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def recomputed(early=True, times=1, **options):
    """A pass that is computed again, ``times`` within one another."""

    def again(x, w):
        function = product
        for _ in range(times):
            function = functools.partial(checkpoint, function, **({"use_reentrant": False} | options))
        with checkpoints.set_checkpoint_early_stop(early):
            return function(x, w)

    return within(function=again)


def default_dtype(x, w):
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return product(x, w)
    finally:
        torch.set_default_dtype(before)


WAYS = {
    "plain": within(),
    "autocast": cast(),
    "autocast-backward": cast(also_backward=True),
    "autocast-uncached": cast(cache_enabled=False),
    "autocast-partly": within(function=partly_autocast),
    "autocast-twice": within(function=twice_autocast),
    "saved-on-cpu": within(graph.save_on_cpu),
    "saved-copies": within(lambda: graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x)),
    "saved-wider": within(lambda: graph.saved_tensors_hooks(lambda x: (x.dtype, x.double()), lambda p: p[1].to(p[0]))),
    "saved-hooks-refused": within(lambda: graph.disable_saved_tensors_hooks("no hooks here")),
    "saved-mutated": mutated,
    "anomaly": within(torch.autograd.detect_anomaly, torch.autograd.detect_anomaly),
    "anomaly-unchecked": within(*[lambda: torch.autograd.detect_anomaly(check_nan=False)] * 2),
    "one-thread": within(backward=lambda: torch.autograd.set_multithreading_enabled(False)),
    "forward-in-thread": within(function=lambda x, w: in_thread(lambda: product(x, w))),
    "backward-in-thread": lambda x, w: in_thread(lambda: within()(x, w)),
    "hook-leaf": changed(lambda g: g * 2, "leaf"),
    "hook-result": changed(lambda g: g * 2, "result"),
    "hook-after": changed(lambda g: g * 2, "after"),
    "hook-leaf-moved": changed(lambda g: moved(g, Replicate()), "leaf"),
    "hook-result-moved": changed(lambda g: moved(g, Shard(1)), "result"),
    "hook-after-moved": changed(lambda g: moved(g, Shard(0)), "after"),
    "hooks-listen": heard,
    "asked": gradients_of,
    "recomputed": recomputed(),
    "recomputed-reentrant": recomputed(use_reentrant=True),
    "recomputed-whole": recomputed(early=False),
    "recomputed-within": recomputed(times=2),
    "recomputed-partly": recomputed(context_fn=lambda: create_selective_checkpoint_contexts(save_matmuls)),
    "function-mode": within(Doubling),
    "flops": counted,
    "default-dtype": within(function=default_dtype),
    "default-device": within(lambda: torch.device("meta"), lambda: torch.device("meta")),
    "stopped": stopped(lambda x: x),
    "stopped-moved": stopped(lambda x: moved(x, Replicate())),
    "stopped-whole": stopped(lambda x: x.full_tensor() if isinstance(x, DTensor) else x),
    "scalar": after_scalar,
    "in-place-moved": changed_in_place(lambda x: moved(x, Replicate())),
    "in-place-whole": changed_in_place(whole),
    "stopped-local": stopped_leaf(lambda x: x.to_local() if isinstance(x, DTensor) else x),
    "stopped-local-copy": stopped_leaf(copied_by_shards),
}
LAYOUTS = (
    "mesh=2 x=5x3:S(0):float32:small w=4x3:R:float32:small",
    "mesh=2 x=4x6:S(1):float32:small w=5x6:S(1):float32:small",
    "mesh=2x2 x=4x5:S(0),R:float32:small w=3x5:R,S(0):float32:small",
)


def may_be_refused(case: Case, text: str) -> bool:
    """Detecting anomalies asks each gradient whether it has a NaN, for which DTensor has no rule. Several gradients at
    once view their dims as one, which older releases refuse where the second is sharded."""
    older = compat.torch_release() < (2, 13) and "Attempted to flatten multiple dimensions" in text
    unknown = "not have a sharding strategy registered" in text
    return (case.get("way") == "anomaly" and unknown) or (case.get("way") == "asked" and older)


@law(
    "gradient.contexts",
    source=f"{DOC}, DTensor: works with autograd as torch.Tensor does; torch docs, autograd, amp and utils.checkpoint",
    control=f"{LAYOUTS[0]} way=hook-leaf",
    cases=[f"{LAYOUTS[at % 3]} way={way}" for at, way in enumerate(WAYS)],
    features=lambda case: {"backward", f"way:{case.get('way')}"},
    needs=("all_gather", "all_reduce", "all_to_all", "reduce_scatter"),
    refusal=may_be_refused,
    weight=0.5,
)
def contexts(x: DTensor, w: DTensor, way: Annotated[str, WordField(WAYS)]):
    """Ops on DTensors and their gradients are those of dense tensors under autocast, with hooks on gradients and on
    what is saved, in other threads, under modes, computed again in the backward pass, with a gradient that ends, and
    beside plain tensors without dims; results may be changed in place."""
    leaves = [x.detach().requires_grad_(), w.detach().requires_grad_()]
    got = WAYS[way](*leaves)
    values = {name: value.detach() if isinstance(value, torch.Tensor) else value for name, value in got.items()}
    return values | dict(zip("xw", (leaf.grad for leaf in leaves), strict=True))


@contexts.due
def _(x: Global, w: Global, way, rank: Rank):
    leaves = [part.full.clone().requires_grad_() for part in (x, w)]
    got = WAYS[way](*leaves) | dict(zip("xw", (leaf.grad for leaf in leaves), strict=True))
    due: dict[str, Any] = {}
    for name, value in got.items():
        is_plain = name == "scale" or (name == "whole" and way == "in-place-whole")
        if isinstance(value, list):
            due[name] = [Claimed(part, x.mesh, exact=False) for part in value]
        elif isinstance(value, torch.Tensor):
            due[name] = Near(value.detach()) if is_plain else Claimed(value.detach(), x.mesh, exact=False)
        else:
            due[name] = value
    return due
