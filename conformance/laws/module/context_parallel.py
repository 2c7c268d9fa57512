"""Laws of sequences that are cut up for attention: buffers of every kind, attention in a ring, keys that are
gathered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

import torch
from torch import nn
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional
from torch.nn.attention.flex_attention import create_block_mask

from shardlaw.conformance import compat
from shardlaw.conformance.law.act import law
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Near, caught
from shardlaw.conformance.law.fields import KeptNamedMesh, Rank, Seed
from shardlaw.conformance.laws.module.experimental import balanced_order
from shardlaw.conformance.laws.module.local_map import DOC
from shardlaw.reference.mesh import Mesh
from shardlaw.strategies.modules import eighths

NEEDS = ("all_gather", "all_to_all", "reduce_scatter")

# Buffers

Buffers = Literal["own", "rows", "turned", "columns", "batch", "from-end", "none"]
Around = Literal["once", "together", "raised", "twice", "refused", "cut-before", "cut-within"]
BUFFER_CASES = (
    *(f"mesh=2 length=8 of={of}" for of in get_args(Buffers)),
    "mesh=3 length=6 of=rows",
    "mesh=2x2 length=8 of=own",
    "mesh=4 length=8 of=batch",
    *(f"mesh=2 length=4 of=own around={around}" for around in get_args(Around) if around != "once"),
    "mesh=3 length=12 of=rows around=raised",
    # parts of unequal lengths
    "mesh=2 length=5 of=own",
    "mesh=4 length=6 of=columns",
    "mesh=2 length=5 of=own around=together",
)


def make_buffers(
    of: str, length: int, device: str | None = None
) -> tuple[torch.Tensor, list[torch.Tensor] | None, list[int] | None]:
    """A table, the buffers, which lie in it, and the dim of the sequence in each: the table itself; its first rows;
    its rows as columns; its first columns; the inputs and the labels of a batch. ``none``: none is given."""
    shapes = {"rows": (length + 3, 2), "turned": (length, 2), "columns": (2, length + 3), "batch": (2, length + 1)}
    sizes = shapes.get(of, (2, length))
    table = torch.arange(sizes[0] * sizes[1], device=device).reshape(sizes)
    if of == "none":
        return table, None, None
    if of == "batch":
        return table, [table[:, :-1], table[:, 1:]], [1, 1]
    buffer = {"rows": table[:length], "turned": table.t(), "columns": table[:, :length]}.get(of, table)
    return table, [buffer], [{"rows": 0, "from-end": -1}.get(of, 1)]


def enter_and_raise(mesh: Any, buffers: Any, dims: Any) -> None:
    """Cut buffers up for a body that raises."""
    with context_parallel(mesh, buffers=buffers, buffer_seq_dims=dims):
        raise KeyError("a body that raises")


def own_positions(mesh: Mesh, length: int, rank: int, dealt: bool = True) -> torch.Tensor:
    """The positions of a sequence that a rank has: dealt from both ends, where the length allows it, or a part."""
    ranks = mesh.shape[-1]
    even = length % (2 * ranks) == 0
    order = balanced_order((length,), ranks) if dealt and even else torch.arange(length)
    return order.tensor_split([-(-length // ranks) * at for at in range(1, ranks)])[(mesh.coord(rank) or (0,))[-1]]


def features_buffers(case: Case) -> set[str]:
    return {"context-parallel", f"way:{case.get('around', case.get('of'))}"}


@law(
    "module.context-buffers",
    source=f"{DOC}, context_parallel: buffers, which are optional, are sharded within the context and restored after "
    "it; attention is another function within it",
    control=BUFFER_CASES[0],
    cases=BUFFER_CASES,
    features=features_buffers,
    needs=NEEDS,
    refusal="allowed",
    weight=0.1,
)
def buffers(mesh: KeptNamedMesh, length: int, of: Buffers, around: Around = "once"):
    """context_parallel cuts buffers up and restores them whatever they are parts of, leaves what lies beside them
    alone, and exchanges attention until it ends, whatever came before it and happens within it."""
    ring = mesh[mesh.mesh_dim_names[-1]]
    table, given, dims = make_buffers(of, length, ring.device_type)
    positions = torch.arange(2 * ring.size(), device=ring.device_type)
    attention, other, patched = functional.scaled_dot_product_attention, positions.clone().reshape(1, -1), []
    balancer = compat.DocumentBalancer([[2 * ring.size()]], ring.size(), ring.device_type)
    try:
        if around == "raised":
            caught(lambda: enter_and_raise(ring, [other], [1]))
        if around == "refused":  # a sequence that cannot be balanced, and a dim that a buffer does not have
            caught(lambda: enter_and_raise(ring, [torch.ones_like(positions)[: ring.size()], other], [0, 7]))
        if around == "cut-before":  # as it comes
            compat.context_parallel_shard(ring, [other], [1], None)
        with context_parallel(ring, buffers=given, buffer_seq_dims=dims):
            if around == "twice":
                with context_parallel(ring, buffers=[other], buffer_seq_dims=[1]):
                    pass
            if around == "cut-within":
                compat.context_parallel_shard(ring, [other], [1], balancer)
            patched.append(functional.scaled_dot_product_attention is not attention)
            taken = [buffer.clone() for buffer in given or []]
            if around == "together":
                taken = compat.context_parallel_unshard(ring, taken, dims)
        patched.append(functional.scaled_dot_product_attention is not attention)
    finally:  # whatever became of it, attention is as it was, and sequences are balanced again
        functional.scaled_dot_product_attention = attention
        compat.context_parallel_shard(ring, [positions], [0], balancer)
    return {"patched": patched, "taken": taken, "restored": given, "table": table, "other": other}


@buffers.due
def _(mesh: Mesh, length: int, of: str, around: str, rank: Rank):
    table, given, dims = make_buffers(of, length)
    own = torch.arange(length) if around == "together" else own_positions(mesh, length, rank)
    taken = [buffer.index_select(dim, own) for buffer, dim in zip(given or [], dims or [], strict=True)]
    other = torch.arange(2 * mesh.shape[-1]).reshape(1, -1)
    return {"patched": [True, False], "taken": taken, "restored": given, "table": table, "other": other}


# Attention, plain torch for acts


def attend(query: Any, key: Any, value: Any, *, is_causal: bool = False) -> tuple[Any, Any]:
    """Attention of queries to keys that groups of their heads share, and the logarithms of what its rows are divided
    by, which are float32 whatever the dtype of the attention."""
    groups, dtype = query.shape[1] // key.shape[1], query.dtype
    query, key, value = query.float(), key.float(), value.float()
    scores = query @ key.repeat_interleave(groups, 1).transpose(-1, -2)
    if is_causal:
        scores = scores.masked_fill(torch.ones_like(scores).triu(1) > 0, float("-inf"))
    sums = scores.logsumexp(-1)
    return ((scores - sums.unsqueeze(-1)).exp() @ value.repeat_interleave(groups, 1)).to(dtype), sums


def attend_backward(
    *, grad_out: Any, query: Any, key: Any, value: Any, out: Any, logsumexp: Any, is_causal: bool
) -> tuple[Any, ...]:
    """The gradients of :func:`attend`, for keys that may be some of those that ``out`` and ``logsumexp`` are made
    of."""
    heads, groups, dtype = key.shape[1], query.shape[1] // key.shape[1], query.dtype
    grad_out, query, key, value, out = grad_out.float(), query.float(), key.float(), value.float(), out.float()
    keys, values = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ keys.transpose(-1, -2)
    if is_causal:
        scores = scores.masked_fill(torch.ones_like(scores).triu(1) > 0, float("-inf"))
    shares = (scores - logsumexp.unsqueeze(-1)).exp()
    slopes = shares * (grad_out @ values.transpose(-1, -2) - (grad_out * out).sum(-1, keepdim=True))
    grad_key = (slopes.transpose(-1, -2) @ query).unflatten(1, (heads, groups)).sum(2)
    grad_value = (shares.transpose(-1, -2) @ grad_out).unflatten(1, (heads, groups)).sum(2)
    return (slopes @ keys).to(dtype), grad_key.to(dtype), grad_value.to(dtype)


def attention_inputs(length: int, others: int, groups: int, seed: int, device: str | None = None) -> list[torch.Tensor]:
    """Queries, keys, values and the gradient of their attention; values are wider than keys."""
    shapes = ((2, 2 * groups, length, 2), (2, 2, others, 2), (2, 2, others, 3), (2, 2 * groups, length, 3))
    return [eighths(shape, seed + number).float().to(device) for number, shape in enumerate(shapes)]


def attention_due(
    length: int, others: int, groups: int, seed: int, causal: bool, dtype: torch.dtype = torch.float32
) -> list[Any]:
    """The attention of :func:`attention_inputs` in a dtype, its logarithms and its gradients."""
    *inputs, grad = attention_inputs(length, others, groups, seed)
    leaves = [tensor.requires_grad_() for tensor in inputs]
    out, sums = attend(*leaves, is_causal=causal)
    out.backward(grad)
    grads = [Near(leaf.grad.to(dtype)) for leaf in leaves if leaf.grad is not None]
    return [Near(out.detach().to(dtype)), Near(sums.detach()), *grads]


RING_CASES = (
    "mesh=2 length=8 causal=yes",
    "mesh=3 length=12 causal=yes rotate=alltoall",
    "mesh=4 length=8 causal=yes groups=2",
    "mesh=2 length=4 causal=yes rotate=alltoall groups=2",
    "mesh=2x2 length=8 causal=yes",
    # lengths that cannot be balanced; without a mask all keys may be others than the queries' own
    "mesh=3 length=9 causal=yes",
    "mesh=2 length=6 causal=yes rotate=alltoall",
    "mesh=3 length=3 causal=no groups=2",
    "mesh=2 length=6 others=10 causal=no rotate=alltoall",
    "mesh=4 length=4 others=12 causal=no",
    "mesh=2x2 length=6 causal=no rotate=alltoall",
    "mesh=2 length=8 causal=yes dtype=bfloat16",
)


@law(
    "module.ring-attention",
    source=f"{DOC}, context_parallel and set_rotate_method; docstring of _templated_ring_attention",
    control=RING_CASES[0],
    cases=RING_CASES,
    features=lambda case: {"context-parallel", "backward"},
    needs=NEEDS,
    weight=0.2,
)
def ring_attention(
    mesh: KeptNamedMesh,
    length: int,
    causal: bool,
    seed: Seed,
    rank: Rank,
    others: int | None = None,
    groups: int = 1,
    rotate: Literal["allgather", "alltoall"] = "allgather",
    dtype: torch.dtype = torch.float32,
):
    """Attention in which keys and values go round in a ring, and its gradients, put together again, are those of the
    whole sequence and have its dtype, with a causal mask or without, dealt from both ends or not, whichever way they
    go round."""
    ring = mesh[mesh.mesh_dim_names[-1]]
    seed += rank // ring.size()  # each ring has sequences of its own
    inputs = attention_inputs(length, others or length, groups, seed, ring.device_type)
    query, key, value, grad = parts = [part.to(dtype) for part in inputs]
    compat.set_rotate_method(rotate)
    try:
        with context_parallel(ring, buffers=[*parts], buffer_seq_dims=[2] * 4):
            group = ring.get_group()
            out, sums = compat.ring_attention(group, 2, attend, query, key, value, is_causal=causal)
            gradients = compat.ring_attention_backward(
                group, 2, attend_backward, grad, "grad_out", query, key, value, out, sums, causal
            )
            wholes = compat.context_parallel_unshard(ring, [out, sums, *gradients], [2] * 5)
    finally:
        compat.set_rotate_method("allgather")
    return {"attention": wholes[:2], "gradients": wholes[2:]}


@ring_attention.due
def _(mesh: Mesh, length: int, causal: bool, seed: int, rank: Rank, others: int | None, groups: int, dtype):
    due = attention_due(length, others or length, groups, seed + rank // mesh.shape[-1], causal, dtype)
    return {"attention": due[:2], "gradients": due[2:]}


# Keys and values that are gathered


class Attention(nn.Module):
    """Attention, without a mask."""

    def forward(self, query: Any, key: Any, value: Any) -> Any:
        return attend(query, key, value)[0]


Given = Literal["list", "mapping", "other-order"]
GATHERED_CASES = (
    "mesh=2 length=6 given=list",
    "mesh=2 length=4 given=list by=name dealt=yes",
    "mesh=3 length=9 given=list by=name",
    "mesh=2x2 length=8 given=list dealt=yes",
    "mesh=2 length=6 given=mapping",
    "mesh=3 length=6 given=mapping dealt=yes",
    "mesh=2 length=6 given=other-order",
    "mesh=2 length=256 given=list blocks=32",
)


def precedes(batch: Any, head: Any, query: Any, key: Any) -> Any:
    """Whether a query may see a key: none that comes after it."""
    return query >= key


def cut(mesh: Any, buffers: Mapping[str, Any], dims: Mapping[str, int], given: str, balancer: Any) -> Any:
    """The parts of buffers that this rank has, given by name or in a list."""
    if given == "list":
        parts = compat.context_parallel_shard(mesh, [*buffers.values()], [dims[name] for name in buffers], balancer)
        return dict(zip(buffers, parts, strict=True))
    *names, rows, columns = dims
    ordered = [*names, columns, rows] if given == "other-order" else dims
    return compat.context_parallel_shard(mesh, buffers, {name: dims[name] for name in ordered}, balancer)


@law(
    "module.gathered-keys",
    source="docstrings of _context_parallel_shard and flex_cp_allgather: each rank keeps its part of the queries, and "
    "keys and values are gathered",
    control=GATHERED_CASES[0],
    cases=GATHERED_CASES,
    # without a balancer: no later context of the process balances its sequences
    own_world=lambda case: case.get("dealt", "") != "yes",
    features=lambda case: {"context-parallel", "backward"},
    needs=NEEDS,
    weight=0.1,
)
def gathered_keys(
    mesh: KeptNamedMesh,
    length: int,
    given: Given,
    seed: Seed,
    by: Literal["place", "name"] = "place",
    dealt: bool = False,
    blocks: int | None = None,
):
    """A module of attention whose keys and values are gathered has the attention and the gradients of the whole
    sequence, whether buffers are cut up by name or in a list, and however they are dealt to the ranks. A mask of
    blocks is cut into parts of the same blocks."""
    ring = mesh[mesh.mesh_dim_names[-1]]
    query, key, value, grad = attention_inputs(length, length, 1, seed, ring.device_type)
    table = torch.arange(length * length, device=ring.device_type).reshape(length, length)
    buffers = {"query": query, "key": key, "value": value, "grad": grad, "rows": table, "columns": table.clone()}
    balancer = compat.DocumentBalancer([[length]], ring.size(), ring.device_type) if dealt else None
    parts = cut(ring, buffers, {"query": 2, "key": 2, "value": 2, "grad": 2, "rows": 0, "columns": 1}, given, balancer)
    style = compat.ContextParallel
    module = parallelize_module(Attention(), ring, style(2, style.AttentionType.FLEX))
    leaves = [parts[name].clone().requires_grad_() for name in ("query", "key", "value")]
    out = module(leaves[0], key=leaves[1], value=leaves[2]) if by == "name" else module(*leaves)
    out.backward(parts["grad"])
    wholes = compat.context_parallel_unshard(ring, [out, *(leaf.grad for leaf in leaves)], [2] * 4, balancer)
    found = {"attention": wholes[:1], "gradients": wholes[1:], "tables": [parts["rows"], parts["columns"]]}
    if blocks is not None:
        with torch.compiler.set_stance("force_eager"):
            whole = create_block_mask(precedes, None, None, length, length, ring.device_type, blocks)
            (mask,) = compat.context_parallel_shard(ring, [whole], [2], balancer)
        found |= {"sizes": list(mask.BLOCK_SIZE), "blocks": mask.to_dense()[0, 0]}
    return found


@gathered_keys.due
def _(mesh: Mesh, length: int, seed: int, dealt: bool, blocks: int | None, rank: Rank):
    own = own_positions(mesh, length, rank, dealt)
    attention, _, *gradients = attention_due(length, length, 1, seed, causal=False)
    table = torch.arange(length * length).reshape(length, length)
    due: dict[str, Any] = {"attention": [attention], "gradients": gradients, "tables": [table[own], table[:, own]]}
    if blocks is not None:  # a block is there where one of its queries comes after one of its keys
        rows = own[::blocks] // blocks
        due |= {"sizes": [blocks] * 2, "blocks": (rows.unsqueeze(1) >= torch.arange(length // blocks)).int()}
    return due
