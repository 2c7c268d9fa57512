"""What is no sharded tensor: refused on all ranks that take part, in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from conformance.case import Case
from conformance.here import Here
from conformance.law import Limits
from conformance.laws.plan.torch import need
from conformance.laws.sharded_tensor import given as g
from conformance.laws.sharded_tensor import scripts
from conformance.laws.sharded_tensor.draws import law_of
from conformance.report.reproducer import Script
from reference.box import Box
from reference.sharded_tensor import EnumerableSpec, of_rank
from reference.tensors import TensorSpec
from strategies import shapes
from strategies.tilings import damaged

# what is attempted -> what is wrong with it, and the expression that attempts it, on a 4x3 tensor of two ranks
X = "4x3"
ROWS = "st.Shard.from_tensor_and_offsets(torch.zeros(2, 3), [2 * rank, 0], rank)"
CHUNKS = 'ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"])'
MADE = f"st.zeros({CHUNKS}, 4, 3)"
TWICE = 'st.zeros(ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"] * 2), 4, 3)'


def _beside(more: str) -> str:
    """Two shards on each rank, the second of which is made with another option."""
    first, second = (
        f"st.Shard.from_tensor_and_offsets(torch.zeros(1, 3{how}), [2 * rank + {at}, 0], rank)" for at, how in enumerate(("", more))
    )
    return f"st.init_from_local_shards([{first}, {second}], 4, 3)"


def _stated(shards: str = f"[{ROWS}]", *, second: str = "[2, 0], [2, 3]", size: str = "[4, 3]", how: str = "") -> str:
    """Local shards beside metadata that says what all ranks hold."""
    boxes = f'ShardMetadata([0, 0], [2, 3], "rank:0/cpu"), ShardMetadata({second}, "rank:1/cpu")' if second else ""
    metadata = f"st.ShardedTensorMetadata([{boxes}], torch.Size({size}), st.TensorProperties({how}))"
    return f"st.ShardedTensor._init_from_local_shards_and_global_metadata({shards}, {metadata})"


WRONG: dict[str, tuple[str, str]] = {
    "no-boxes": ("a spec of no boxes", "EnumerableShardingSpec([])"),
    "mixed-dims": (
        "boxes of different numbers of dims",
        'EnumerableShardingSpec([ShardMetadata([0], [4], "rank:0/cpu"), ShardMetadata([0, 0], [4, 3], "rank:1/cpu")])',
    ),
    "other-dims": (
        "boxes of another number of dims than the tensor",
        'st.zeros(EnumerableShardingSpec([ShardMetadata([0], [2], "rank:0/cpu"), ShardMetadata([2], [2], "rank:1/cpu")]), 4, 3)',
    ),
    "dim-fraction": ("chunks along dim 0.5", 'ChunkShardingSpec(0.5, ["rank:0/cpu", "rank:1/cpu"])'),
    "dim-text": ("chunks along a dim by name", 'ChunkShardingSpec("rows", ["rank:0/cpu", "rank:1/cpu"])'),
    "dim-outside": ("chunks along dim 2 of two", 'st.zeros(ChunkShardingSpec(2, ["rank:0/cpu", "rank:1/cpu"]), 4, 3)'),
    "dim-before": ("chunks along dim -3 of two", 'st.zeros(ChunkShardingSpec(-3, ["rank:0/cpu", "rank:1/cpu"]), 4, 3)'),
    "rank-outside": ("chunks on a rank that is not there", 'st.zeros(ChunkShardingSpec(0, ["rank:0/cpu", "rank:7/cpu"]), 4, 3)'),
    "nobody": ("a tensor of which no rank holds a shard", "st.init_from_local_shards([], 4, 3)"),
    "shard-size": (
        "a shard of another size than it says",
        'st.Shard(torch.zeros(2, 3), ShardMetadata([2 * rank, 0], [1, 3], f"rank:{rank}/cpu"))',
    ),
    "other-rank": (
        "a shard that is said to lie on another rank",
        "st.init_from_local_shards([st.Shard.from_tensor_and_offsets(torch.zeros(2, 3), [2 * rank, 0], 1 - rank)], 4, 3)",
    ),
    "strides": (
        "a shard that is not contiguous",
        "st.init_from_local_shards([st.Shard.from_tensor_and_offsets(torch.zeros(3, 2).t(), [2 * rank, 0], rank)], 4, 3)",
    ),
    "dtypes": (
        "shards of different dtypes",
        "st.init_from_local_shards([st.Shard.from_tensor_and_offsets(torch.zeros(2, 3, dtype=(torch.int64, torch.float32)[rank]), "
        "[2 * rank, 0], rank)], 4, 3)",
    ),
    "sizes": ("ranks that name different sizes", f"st.init_from_local_shards([{ROWS}], 4, 3 + rank)"),
    "requires-grad": (
        "shards of which one asks for a gradient",
        "st.init_from_local_shards([st.Shard.from_tensor_and_offsets(torch.zeros(2, 3, requires_grad=rank == 0), "
        "[2 * rank, 0], rank)], 4, 3)",
    ),
    "other-specs": (
        "a tensor that ranks hand out by different specs",
        '_shard_tensor(torch.zeros(4, 3), ChunkShardingSpec(rank, ["rank:0/cpu", "rank:1/cpu"]))',
    ),
    "other-sources": (
        "a tensor that ranks take from different sources",
        '_shard_tensor(torch.zeros(4, 3), ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"]), src_rank=rank)',
    ),
    "strided-input": (
        "a tensor to hand out that is not contiguous",
        '_shard_tensor(torch.zeros(3, 4).t(), ChunkShardingSpec(0, ["rank:0/cpu", "rank:1/cpu"]))',
    ),
    "offset-negative": ("a shard before the beginning", 'ShardMetadata([-1, 0], [4, 3], "rank:0/cpu")'),
    "size-negative": ("a shard of fewer than no rows", 'ShardMetadata([0, 0], [-1, 3], "rank:0/cpu")'),
    "fewer-offsets": ("a shard with fewer offsets than sizes", 'ShardMetadata([0], [4, 3], "rank:0/cpu")'),
    "shard-device": (
        "a shard on another device than it says",
        'st.Shard(torch.zeros(2, 3, device="meta"), ShardMetadata([2 * rank, 0], [2, 3], f"rank:{rank}/cpu"))',
    ),
    "no-placement": (
        "a shard that nobody holds",
        "st.init_from_local_shards([st.Shard(torch.zeros(2, 3), ShardMetadata([2 * rank, 0], [2, 3]))], 4, 3)",
    ),
    "sparse": (
        "a shard that is sparse",
        "st.init_from_local_shards([st.Shard(torch.zeros(2, 3).to_sparse(), "
        'ShardMetadata([2 * rank, 0], [2, 3], f"rank:{rank}/cpu"))], 4, 3)',
    ),
    "dtypes-beside": ("shards of different dtypes on one rank", _beside(", dtype=torch.int64")),
    "grad-beside": ("shards on one rank of which one asks for a gradient", _beside(", requires_grad=True")),
    "no-spec": ("a tensor by something that is no spec", 'st.zeros("rows", 4, 3)'),
    "size-fraction": ("a tensor of 4.5 rows", f"st.zeros({CHUNKS}, 4.5, 3)"),
    "layout": ("a tensor of sparse shards", f"st.zeros({CHUNKS}, 4, 3, layout=torch.sparse_coo)"),
    "format": ("a tensor of shards that are not contiguous", f"st.zeros({CHUNKS}, 4, 3, memory_format=torch.channels_last)"),
    "remote": ("shards of other ranks where there are no references to them", f"{MADE}.remote_shards()"),
    "references": ("references to shards without a framework that makes them", f"st.zeros({CHUNKS}, 4, 3, init_rrefs=True)"),
    "gather-nowhere": ("a gather into nothing", f"{MADE}.gather(dst=rank)"),
    "gather-size": ("a gather into a tensor of another size", f"{MADE}.gather(dst=rank, out=torch.ones(3, 4))"),
    "gather-elsewhere": ("a gather into a tensor on another rank", f"{MADE}.gather(dst=1 - rank, out=torch.ones(4, 3))"),
    "local-of-two": ("the local tensor of two shards", f"{TWICE}.local_tensor()"),
    "reshard-two": ("two shards on a rank to be resharded", f'{TWICE}.reshard(ChunkShardingSpec(1, ["rank:0/cpu", "rank:1/cpu"]))'),
    "cpu-format": ("a tensor in the memory of a cpu, in another order", f"{MADE}.cpu(memory_format=torch.channels_last)"),
    "to-list": ("a tensor as a list", f"{MADE}.to([1])"),
    "unknown-op": ("an op that nobody has registered for sharded tensors", f"torch.sort({MADE})"),
    "op-of-three": ("an op of another number of arguments", "st.custom_sharded_op_impl(torch.sort)(lambda types, args, kwargs: None)"),
    "local-strides": (
        "a local tensor that is not contiguous",
        f"st.ShardedTensor._init_from_local_tensor(torch.zeros(3, 2).t(), {CHUNKS}, 4, 3)",
    ),
    "stated-shards": ("fewer shards than the metadata says", _stated("[]")),
    "stated-nothing": ("metadata of no shards", _stated("[]", second="")),
    "stated-size": ("metadata of shards that are not all of the tensor", _stated(size="[5, 3]")),
    "stated-overlap": ("metadata of shards that overlap", _stated(second="[1, 0], [3, 3]")),
    "stated-layout": ("metadata of sparse shards", _stated(how="layout=torch.sparse_coo")),
    "stated-dtype": ("shards of another dtype than the metadata says", _stated(how="dtype=torch.int64")),
    "stated-grad": ("shards that do not ask for the gradient that the metadata says", _stated(how="requires_grad=True")),
    "stated-strides": (
        "a shard that is not contiguous beside its metadata",
        _stated("[st.Shard.from_tensor_and_offsets(torch.zeros(3, 2).t(), [2 * rank, 0], rank)]"),
    ),
    "reshard-boxes": (
        "a tensor of boxes to be resharded",
        f'st.init_from_local_shards([{ROWS}], 4, 3).reshard(EnumerableShardingSpec([ShardMetadata([0, 0], [4, 3], "rank:0/cpu")]))',
    ),
}
DAMAGES = ("gap", "overlap", "shifted", "grown", "duplicated", "outside")


def check_refused(case: Case, here: Here) -> None:
    """Every rank refuses what is attempted."""
    attempt = case.get("attempt")
    if attempt not in WRONG:
        spec = g.spec_of(case)
        assert isinstance(spec, EnumerableSpec)
        full, room = g.values_of(case), _room(spec, case.tensor("x").shape)
        parts = list(spec.boxes)
        here.refused(lambda: _held(here, room, full.shape, parts), "refused", f"local shards that do not tile their tensor ({attempt})")
        return
    what, text = WRONG[attempt]
    call = _compiled(here, text)
    here.refused(call, "refused", what)


def _held(here: Here, room: torch.Tensor, shape: tuple[int, ...], parts: list[tuple[Box, int]]) -> Any:
    shard, make = need(here, "ShardOfTensor", "init_from_local_shards")
    with g.without_warnings():
        mine = [
            shard.from_tensor_and_offsets(here.tensor(room[box.slices()].contiguous()), [*box.offset], here.rank)
            for box in of_rank(parts, here.rank)
        ]
        return make(mine, *shape)


def _room(spec: EnumerableSpec, shape: tuple[int, ...]) -> torch.Tensor:
    """Zeros out to the end of every box."""
    ends = [max([size, *(box.end[dim] for box, _ in spec.boxes)]) for dim, size in enumerate(shape)]
    return torch.zeros(ends)


def _compiled(here: Here, text: str) -> Callable[[], object]:
    """The expression as a call on this rank."""
    names = ("sharded_tensor", "ChunkShardingSpec", "EnumerableShardingSpec", "ShardMetadata", "shard_tensor")
    found = dict(zip(("st", *names[1:4], "_shard_tensor"), need(here, *names), strict=True))
    code = compile(text, "attempt", "eval")

    def call() -> object:
        with g.without_warnings():
            return eval(code, {"torch": torch, "rank": here.rank, **found})

    return call


def refused_script(case: Case) -> Script:
    attempt = case.get("attempt")
    lines = ["try:"]
    if attempt in WRONG:
        lines += [f"    {WRONG[attempt][1]}"]
    else:
        spec = g.spec_of(case)
        assert isinstance(spec, EnumerableSpec)
        rows = {rank: [(box.offset, box.size) for box in of_rank(list(spec.boxes), rank)] for rank in range(case.world)}
        lines += [
            f"    mine = [st.Shard.from_tensor_and_offsets(torch.zeros(size), [*at], rank) for at, size in {rows}[rank]]",
            "    st.init_from_local_shards(mine, *X.shape)",
        ]
    lines += ["except Exception:", '    return "refused", "refused"', 'return "refused", "accepted"']
    shares = ["from torch.distributed._shard.api import _shard_tensor"] if "_shard_tensor" in "".join(lines) else []
    return scripts.told(case, lines, imports=shares)


def _sweep(limits: Limits) -> list[Case]:
    return [Case.of("sharded_tensor.refuses", world=2, x=X, attempt=attempt) for attempt in WRONG]


def _damaged(limits: Limits) -> SearchStrategy[Case]:
    @st.composite
    def case(draw: st.DrawFn) -> Case:
        shape, boxes, damage = draw(damaged(shapes(min_dims=1, min_size=1), kinds=DAMAGES))
        world = draw(st.sampled_from([size for size in (2, 3, 4) if size <= limits.world_size]))
        number = draw(st.integers(0, 1 << 16))
        parts = []
        for box in boxes:
            number, rank = divmod(number, world)
            parts.append((box, rank))
        spec = EnumerableSpec(tuple(parts))
        return Case.of("sharded_tensor.refuses", world=world, x=TensorSpec(shape), spec=str(spec) or None, attempt=damage)

    return case().filter(lambda case: "spec" in case)


def _features(case: Case) -> set[str]:
    if "spec" not in case:
        return {"must-refuse"}
    return {"must-refuse", "untiled", f"damaged:{case.get('attempt')}"}


LAWS = (
    law_of(
        "refuses",
        clause="What is no sharded tensor is refused, in words, by every rank that takes part.",
        source=f"{g.SOURCE}, ChunkShardingSpec, EnumerableShardingSpec, init_from_local_shards, _shard_tensor, ShardedTensor.gather",
        check=check_refused,
        holds=f"world=2 x={X} attempt=sizes",
        planted="sizes_that_differ_accepted",
        sweep=_sweep,
        sweeps=len(WRONG),
        draw=_damaged,
        draws=30,
        smallest=2,
        features=_features,
        script=refused_script,
    ),
)
