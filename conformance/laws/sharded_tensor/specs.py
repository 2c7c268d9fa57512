"""Laws on sharded tensors that are made from specs and moved between them: who holds what of them, on every rank.

A spec is the whole truth about a sharded tensor: its boxes, in the metadata that every rank holds and in the shards that each holds
itself, whichever way it was made. Values are judged by their places.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from conformance.case import Case
from conformance.here import Here
from conformance.laws.plan.torch import need
from conformance.laws.sharded_tensor import copies as sharded_tensor_copies
from conformance.laws.sharded_tensor import given as g
from conformance.laws.sharded_tensor import math as sharded_tensor_math
from conformance.laws.sharded_tensor import refusals as sharded_tensor_refusals
from conformance.laws.sharded_tensor import scripts
from conformance.laws.sharded_tensor import trips as sharded_tensor_trips
from conformance.laws.sharded_tensor.draws import law_of, made, placed
from conformance.report.reproducer import Script
from reference.sharded_tensor import ChunkSpec, of_rank

FILLED = {"zeros": 0, "ones": 1, "full": 3}
SAMPLE = 300
GATHERS = {"dtype": ", dtype=X.dtype", "enforced": ", enforce_dtype=True"}


def check_made(case: Case, here: Here) -> None:
    """A factory makes the boxes that the spec names, of the size and dtype that were asked for, each with its elements."""
    shape, dtype, make = case.tensor("x").shape, case.tensor("x").torch_dtype, case.get("make")
    group, spec = g.group_of(case, here), g.spec_of(case)
    if here.rank not in g.members(case):
        return
    (factories,) = need(here, "sharded_tensor")
    size: tuple[Any, ...] = shape if case.get("size", "") == "apart" else (shape,)
    with g.without_warnings():
        own = (shape, FILLED["full"]) if make == "full" else size

        def once() -> Any:
            return getattr(factories, make)(g.to_torch(here, spec), *own, dtype=dtype, process_group=group)

        got = once()
        if make == "rand":
            for shard in got.local_shards():
                inside = bool(((shard.tensor >= 0) & (shard.tensor < 1)).all())
                here.require(inside, "wrong-value", "random", "an element of rand lies outside [0, 1)", "[0, 1)", shard.tensor)
        if make == "randn":
            _judge_normal(here, once)
        for shard in got.local_shards() if make in ("empty", "rand", "randn") else ():
            shard.tensor.zero_()
        g.judge(here, got, torch.full(shape, FILLED.get(make, 0), dtype=dtype), spec.parts(shape), check="made")


def _judge_normal(here: Here, once: Callable[[], Any]) -> None:
    """Some hundred elements of this rank have mean 0 and variance 1, by six standard errors."""
    numel = sum(shard.tensor.numel() for shard in once().local_shards())
    if not numel:
        return
    drawn = torch.cat([shard.tensor.flatten().double() for _ in range(-(-SAMPLE // numel)) for shard in once().local_shards()])
    mean, spread = drawn.mean().item(), drawn.var().item()
    near = abs(mean) < 6 * SAMPLE**-0.5 and abs(spread - 1) < 6 * (2 / SAMPLE) ** 0.5
    here.require(near, "wrong-value", "random", f"{len(drawn)} elements have mean and variance", (0, 1), (mean, spread))


def made_script(case: Case) -> Script:
    spec, make = g.spec_of(case), case.get("make")
    dtype = f"dtype={case.tensor('x').torch_dtype}"
    own = ", 3" if make == "full" else ""
    zeroed = ["for s in t.local_shards(): s.tensor.zero_()"] if make in ("empty", "rand", "randn") else []
    body = [f"t = st.{make}({scripts.spec(spec)}, X.shape{own}, {dtype}{scripts.group(case)})", *zeroed]
    full = f"torch.full_like(X, {FILLED.get(make, 0)})"
    return scripts.judged(case, body, spec.parts(case.tensor("x").shape), full=full)


def check_scattered(case: Case, here: Here) -> None:
    """A tensor that one rank holds is handed out: every rank gets its chunk of it, whatever it holds itself."""
    full, spec, group = g.values_of(case), g.spec_of(case), g.group_of(case, here)
    if here.rank not in g.members(case):
        return
    (share,) = need(here, "shard_tensor")
    source = case.integer("src", 0)
    own = here.tensor(full.clone() if g.members(case)[source] == here.rank else torch.zeros_like(full))
    before = own.clone()
    with g.without_warnings():
        got = share(own, g.to_torch(here, spec), src_rank=source, process_group=group)
        g.judge(here, got, full, spec.parts(case.tensor("x").shape), check="scattered")
    here.same(own, before, "input", what="the tensor that was handed out")


def scattered_script(case: Case) -> Script:
    spec, source = g.spec_of(case), case.integer("src", 0)
    own = f"X.clone() if rank == {g.members(case)[source]} else torch.zeros_like(X)"
    body = [
        f"t = _shard_tensor({own}, {scripts.spec(spec)}, src_rank={source}{scripts.group(case)})",
    ]
    script = scripts.judged(case, body, spec.parts(case.tensor("x").shape))
    return Script(script.stages, (*script.imports, "from torch.distributed._shard.api import _shard_tensor"), script.constants)


def check_local_shards(case: Case, here: Here) -> None:
    """What every rank holds, in any boxes, is one tensor; the spec that it is found to have names the same boxes."""
    full, spec, group = g.values_of(case), g.spec_of(case), g.group_of(case, here)
    if here.rank not in g.members(case):
        return
    parts = spec.parts(case.tensor("x").shape)
    got = g.from_parts(here, full, parts, group)
    if g.judge(here, got, full, parts, check="gathered"):
        found = got.sharding_spec().build_metadata(got.size(), got.metadata().tensor_properties)
        due, told = g.described(parts), g.described(g.read_parts(found))
        here.require(told == due, "wrong-metadata", "spec", "the spec of the sharded tensor names other boxes than it has", due, told)


def local_shards_script(case: Case) -> Script:
    parts = g.spec_of(case).parts(case.tensor("x").shape)
    return scripts.judged(case, scripts.from_parts(case, parts), parts)


def check_local_tensor(case: Case, here: Here) -> None:
    """One local tensor on each rank, as the spec cuts: together they are one tensor, which shares their memory."""
    full, spec, group = g.values_of(case), g.spec_of(case), g.group_of(case, here)
    if here.rank not in g.members(case):
        return
    (kind,) = need(here, "ShardedTensor")
    parts = spec.parts(case.tensor("x").shape)
    (box,) = of_rank(parts, here.rank)
    local = here.tensor(full[box.slices()].contiguous())
    with g.without_warnings():
        got = kind._init_from_local_tensor(local, g.to_torch(here, spec), *full.shape, process_group=group)
        if g.judge(here, got, full, parts, check="made") and local.numel():
            same = got.local_tensor().data_ptr() == local.data_ptr()
            here.require(same, "wrong-metadata", "memory", "the local shard is a copy of the local tensor")


def local_tensor_script(case: Case) -> Script:
    spec = g.spec_of(case)
    parts = spec.parts(case.tensor("x").shape)
    table = ", ".join(f"{rank}: {scripts.cut(box)}" for box, rank in parts)
    made = f"t = st.ShardedTensor._init_from_local_tensor(own.contiguous(), {scripts.spec(spec)}, *X.shape{scripts.group(case)})"
    return scripts.judged(case, [f"own = {{{table}}}[rank]", made], parts)


def check_gathered(case: Case, here: Here) -> None:
    """One rank gets the whole tensor into the memory that it gives; the others need none, and the shards stay as they are."""
    full, spec, group = g.values_of(case), g.spec_of(case), g.group_of(case, here)
    if here.rank not in g.members(case):
        return
    parts = spec.parts(case.tensor("x").shape)
    held = g.from_parts(here, full, parts, group)
    to = case.integer("dst", 0)
    here_goes = g.members(case)[to] == here.rank
    out = here.tensor(torch.zeros_like(full)) if here_goes else None
    ways: dict[str, dict[str, Any]] = {"dtype": {"dtype": full.dtype}, "enforced": {"enforce_dtype": True}}
    how = ways.get(case.get("how", ""), {})
    with g.without_warnings():
        given = held.gather(dst=to, out=out, **how)
    here.require(given is None, "wrong-metadata", "result", "gather writes into `out`, it must not give anything", None, given)
    if out is not None:
        here.same(out, full, "gathered", what="the gathered tensor")
    g.judge(here, held, full, parts, check="kept")


def gathered_script(case: Case) -> Script:
    parts, to = g.spec_of(case).parts(case.tensor("x").shape), case.integer("dst", 0)
    how = GATHERS.get(case.get("how", ""), "")
    lines = [
        *scripts.entered(case),
        *scripts.from_parts(case, parts),
        f"out = torch.zeros_like(X) if rank == {g.members(case)[to]} else None",
        f"t.gather(dst={to}, out=out{how})",
        "return (None, None) if out is None else (X, out)",
    ]
    return scripts.told(case, lines)


def check_reshard(case: Case, here: Here) -> None:
    """A tensor in chunks along one dim becomes one in chunks along any dim, on the ranks in any order."""
    full, spec, other, group = g.values_of(case), g.spec_of(case), g.spec_of(case, "respec"), g.group_of(case, here)
    if here.rank not in g.members(case):
        return
    shape = case.tensor("x").shape
    (kind,) = need(here, "ShardedTensor")
    (box,) = of_rank(spec.parts(shape), here.rank)
    with g.without_warnings():
        local = here.tensor(full[box.slices()].contiguous())
        held = kind._init_from_local_tensor(local, g.to_torch(here, spec), *shape, process_group=group)
        got = held.reshard(g.to_torch(here, other))
        g.judge(here, got, full, other.parts(shape), check="resharded")
        now = got.sharding_spec()
        here.require(now == g.to_torch(here, other), "wrong-metadata", "spec", "the tensor does not have the spec that was asked for")


def reshard_script(case: Case) -> Script:
    spec, other = g.spec_of(case), g.spec_of(case, "respec")
    shape = case.tensor("x").shape
    table = ", ".join(f"{rank}: {scripts.cut(box)}" for box, rank in spec.parts(shape))
    made_ = f"t = st.ShardedTensor._init_from_local_tensor(own.contiguous(), {scripts.spec(spec)}, *X.shape{scripts.group(case)})"
    body = [f"own = {{{table}}}[rank]", made_, f"t = t.reshard({scripts.spec(other)})"]
    return scripts.judged(case, body, other.parts(shape))


def reshard_features(case: Case) -> set[str]:
    """Features of both specs, and of what they are to one another."""
    found = g.features("spec", "respec")(case)
    spec, other = g.spec_of(case), g.spec_of(case, "respec")
    assert isinstance(spec, ChunkSpec)
    assert isinstance(other, ChunkSpec)
    ndim = len(case.tensor("x").shape)
    if spec.dim % ndim == other.dim % ndim:
        found.add("same-dim")
        if spec.dim != other.dim:
            found.add("dim-named-twice")
    if any(other.ranks[spec.ranks.index(to)] != at for at, to in zip(spec.ranks, other.ranks, strict=True)):
        found.add("cyclic")
    return found


LAWS = (
    law_of(
        "made[chunk]",
        clause="A factory makes a sharded tensor of the chunks that its spec names: as torch.chunk cuts, each on its rank.",
        source=f"{g.SOURCE}, ChunkShardingSpec: in line with torch.chunk; sharded_tensor.zeros and others",
        check=check_made,
        holds="world=2 x=4x3 spec=chunk(0)@0,1 make=ones",
        planted="chunks_of_the_floor",
        draw=lambda limits: made("sharded_tensor.made[chunk]", limits, chunks=True),
        draws=40,
        features=g.features("spec"),
        script=made_script,
    ),
    law_of(
        "made[boxes]",
        clause="A factory makes a sharded tensor of the boxes that its spec enumerates, several on a rank or none.",
        source=f"{g.SOURCE}, EnumerableShardingSpec: exactly how each shard is laid out",
        check=check_made,
        holds="world=2 x=4x3 spec=0:1,0:3@0;1:4,0:3@1 make=ones",
        planted="boxes_of_the_next_rank",
        draw=lambda limits: made("sharded_tensor.made[boxes]", limits, chunks=False),
        draws=40,
        features=g.features("spec"),
        script=made_script,
    ),
    law_of(
        "scattered",
        clause="A tensor that one rank holds is handed out in the chunks of the spec, each to the rank that the spec names.",
        source=f"{g.SOURCE}, _shard_tensor: shards that tensor according to the sharding_spec; src_rank is the ground truth",
        check=check_scattered,
        holds="world=2 x=4x3 spec=chunk(0)@0,1",
        planted="chunks_by_position",
        draw=lambda limits: placed("sharded_tensor.scattered", limits, chunks=True, numbered="src"),
        draws=40,
        features=g.features("spec"),
        script=scattered_script,
    ),
    law_of(
        "local-shards",
        clause="Local shards in any boxes that tile a tensor are that tensor, and its spec names these boxes again.",
        source=f"{g.SOURCE}, init_from_local_shards; ShardedTensor.sharding_spec",
        check=check_local_shards,
        holds="world=2 x=4x3 spec=0:1,0:3@0;1:4,0:3@1",
        planted="shards_moved_by_one",
        draw=lambda limits: placed("sharded_tensor.local-shards", limits),
        draws=40,
        features=g.features("spec"),
        script=local_shards_script,
    ),
    law_of(
        "local-tensor",
        clause="Local tensors that are the chunks of a spec are one sharded tensor, without a copy.",
        source=f"{g.SOURCE}, ShardedTensor._init_from_local_tensor",
        check=check_local_tensor,
        holds="world=2 x=4x3 spec=chunk(0)@0,1",
        planted="chunks_of_the_floor",
        draw=lambda limits: placed("sharded_tensor.local-tensor", limits, chunks=True),
        draws=30,
        features=g.features("spec"),
        script=local_tensor_script,
    ),
    law_of(
        "gathered",
        clause="gather writes the whole tensor, bit for bit, into the tensor that the destination gives.",
        source=f"{g.SOURCE}, ShardedTensor.gather: creates a full tensor on rank dst",
        check=check_gathered,
        holds="world=2 x=4x3 spec=0:1,0:3@0;1:4,0:3@1",
        planted="gathered_in_order_of_ranks",
        draw=lambda limits: placed("sharded_tensor.gathered", limits, numbered="dst", hows=("plain", "dtype", "plain", "enforced")),
        draws=60,
        features=g.features("spec"),
        script=gathered_script,
    ),
    law_of(
        "reshard",
        clause="A sharded tensor of chunks becomes, by reshard, the one of any other chunks: along any dim, on the ranks in any order.",
        source=f"{g.SOURCE}, ShardedTensor.reshard",
        check=check_reshard,
        holds="world=2 x=4x4 spec=chunk(0)@0,1 respec=chunk(1)@0,1",
        planted="pieces_in_reverse_order",
        draw=lambda limits: placed("sharded_tensor.reshard", limits, chunks=True, again=True),
        draws=60,
        features=reshard_features,
        script=reshard_script,
    ),
    *sharded_tensor_copies.LAWS,
    *sharded_tensor_math.LAWS,
    *sharded_tensor_refusals.LAWS,
    *sharded_tensor_trips.LAWS,
)
