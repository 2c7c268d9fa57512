"""Reproducers of the sharded tensor chapter: the global tensor is a constant, and what a rank must hold a table of its slices."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from conformance.case import Case
from conformance.laws import scripts
from conformance.laws.sharded_tensor.given import described, members, values_of
from conformance.report.reproducer import Script, Stage
from reference.box import Box
from reference.sharded_tensor import ChunkSpec, Part, Spec

SPECS = "from torch.distributed._shard.sharding_spec import ChunkShardingSpec, EnumerableShardingSpec, ShardMetadata"
SHARDED = "import torch.distributed._shard.sharded_tensor as st"


def spec(of: Spec) -> str:
    """The expression of a sharding spec."""
    if isinstance(of, ChunkSpec):
        placements = [f"rank:{rank}/cpu" for rank in of.ranks]
        return f"ChunkShardingSpec({of.dim}, {placements})"
    return f"EnumerableShardingSpec([{', '.join(shard(box, rank) for box, rank in of.boxes)}])"


def shard(box: Box, rank: int) -> str:
    return f'ShardMetadata({[*box.offset]}, {[*box.size]}, "rank:{rank}/cpu")'


def cut(box: Box, name: str = "X") -> str:
    """A box of a tensor as an indexing."""
    slices = ", ".join(f"{start}:{stop}" for start, stop in zip(box.offset, box.end, strict=True))
    return f"{name}[{slices}]" if slices else name


def entered(case: Case) -> list[str]:
    """Lines that make the group and send the other ranks away."""
    if "group" not in case:
        return []
    ranks = [*members(case)]
    return [f"group = dist.new_group({ranks})", f"if rank not in {ranks}:", "    return None, None"]


def group(case: Case, *, leading: bool = True) -> str:
    """The keyword argument that names the group."""
    return (", " if leading else "") + "process_group=group" if "group" in case else ""


def from_parts(case: Case, parts: Sequence[Part], name: str = "t") -> list[str]:
    """Lines that make a sharded tensor of these boxes."""
    table = held(parts, members(case))
    return [
        f"mine = [st.Shard.from_tensor_and_offsets(x.contiguous(), [*at], rank) for at, x in {table}[rank]]",
        f"{name} = st.init_from_local_shards(mine, *X.shape{group(case)})",
    ]


def held(parts: Sequence[Part], ranks: Iterable[int], *, full: str = "X") -> str:
    """The table, by rank, of the offsets and elements of its boxes."""
    rows = []
    for rank in ranks:
        boxes = [Box(offset, size) for offset, size, holder in described(parts) if holder == rank]
        rows.append(f"{rank}: [{', '.join(f'({box.offset}, {cut(box, full)})' for box in boxes)}]")
    return "{" + ", ".join(rows) + "}"


def judged(case: Case, body: Sequence[str], parts: Sequence[Part], *, full: str = "X", name: str = "t") -> Script:
    """A script in which ``name``, made by ``body``, must have these boxes on every rank."""
    lines = [
        *entered(case),
        *body,
        f"got = [(tuple(s.metadata.shard_offsets), s.tensor) for s in {name}.local_shards() if s.tensor.numel()]",
        f"return {held(parts, members(case), full=full)}[rank], sorted(got, key=lambda part: part[0])",
    ]
    return told(case, lines)


def told(case: Case, lines: Sequence[str], *, imports: Iterable[str] = ()) -> Script:
    """A script of one stage with the global tensor as ``X``."""
    text = "\n".join(lines)
    used = [SPECS] if "ShardingSpec" in text or "ShardMetadata" in text else []
    used += [SHARDED] if "st." in text else []
    return Script((Stage(case.world, tuple(lines)),), (*used, *imports), (f"X = {scripts.tensor(values_of(case))}",))
