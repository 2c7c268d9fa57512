"""Laws of plans for thousands of ranks, which one process computes and compares with arithmetic.

``ranks`` and ``ranks.load`` are the shapes of the meshes of all ranks that save and load. A case names *kinds* of
tensors in fields of one letter; the model has ``times`` tensors of each kind. Ranks share items of equal boxes, so that
a million items fit into memory. The chunks from which a tensor is read do not depend on its name, so the law of loads
plans one tensor of each kind, for the boxes of all ranks at once.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import torch
from hypothesis import strategies as st
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from shardlaw.conformance import compat
from shardlaw.conformance.law import literal
from shardlaw.conformance.law.act import law, texts
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Of, as_metadata
from shardlaw.conformance.law.fields import Field, ScriptArgument, Shape
from shardlaw.conformance.law.law import Law
from shardlaw.conformance.laws.plan.torch_plans import Box, chunk_metadata, global_plan, write_item
from shardlaw.reference.checkpoint.scale import Grid
from shardlaw.reference.notation import format_shape
from shardlaw.reference.tensors import DTYPES, TensorSpec

if TYPE_CHECKING:
    from shardlaw.conformance.rank.context import RankContext

DOCS = "torch.distributed.checkpoint docs"
SECONDS = 600.0  # on a shared CPU

# 3-D meshes (replicas, shards, columns) of 1,024, 4,096 and 16,384 ranks, each with the mesh of the load.
MESHES = (("4x32x8", "16x8x8"), ("8x64x8", "16x16x16"), ("16x128x8", "32x32x16"))
# Eight kinds: an uneven embedding, weights sharded by rows and columns in both orders, dims that two mesh dims shard, a
# norm, a tensor with many empty shards, and one that is not replicated.
KINDS = (
    "a=32003x1024:R,S(0),S(1) to.a=S(0),S(1),R b=3072x1024:R,S(0),S(1):bfloat16 to.b=R,S(1),S(0) "
    "c=1024x1024:R,S(1),S(0) to.c=R,R,S(0) d=2817x1024:R,S(0),S(0) to.d=S(1),S(0),R e=1024x2817:R,S(1),S(1):int64 "
    "to.e=R,S(0),S(1) f=1024:R,S(0),R to.f=R,R,R g=100x7:R,S(0),S(1) to.g=S(0),R,S(1) "
    "h=64x130x33:S(0),S(1),S(2) to.h=S(2),S(1),S(0)"
)
TENSORS_PER_KIND = 256 // 8


class KindsField(Field):
    """The name, shape, dtype and placements of each kind of tensors at an ``end``, ``save`` or ``load``. At the load,
    ``to.KIND`` has the placements of a kind that differ."""

    takes = "tensors of one letter, such as a=64x32:R,S(0), on ranks, and to.a, their placements on ranks.load"
    always = True
    reads = ("*", "to.?", "ranks", "ranks.load")

    def __init__(self, end: str) -> None:
        self.end = end

    def read(self, case: Case, name: str) -> list[tuple[str, TensorSpec, Grid]]:
        mesh, found = case.shape("ranks.load" if self.end == "load" else "ranks"), []
        for kind in kind_names(case):
            spec = case.tensor(kind)
            if self.end == "load" and f"to.{kind}" in case:
                spec = spec.with_placements(case.placements(f"to.{kind}"))
            assert spec.placements is not None, f"{kind}: want placements"
            found.append((kind, spec, Grid(spec.shape, mesh, spec.placements)))
        return found

    def build(self, value: Any, here: RankContext) -> Any:
        return [(kind, spec.shape, spec.torch_dtype, here.placements(spec.placements)) for kind, spec, _ in value]

    def to_script(self, value: Any, name: str, world: int) -> ScriptArgument:
        kinds = (
            f"({kind!r}, {spec.shape}, {spec.torch_dtype}, {literal.placements_literal(spec.placements)})"
            for kind, spec, _ in value
        )
        return ScriptArgument(f"[{', '.join(kinds)}]")


Kinds = Annotated[list[Any], KindsField("save")]
LoadedKinds = Annotated[list[Any], KindsField("load")]


def kind_names(case: Case) -> list[str]:
    return [name for name, _ in case.fields if re.fullmatch("[a-z]", name)]


def rank_boxes(mesh: Any, shape: Any, placements: Any) -> list[Box]:
    """The box of every rank as torch computes it; equal boxes are one object."""
    sizes_and_offsets = (
        compat.local_shape_and_offset_at(shape, mesh, [*coordinate], placements)
        for coordinate in itertools.product(*map(range, mesh))
    )
    unique: dict[Box, Box] = {}
    return [unique.setdefault(box, box) for box in ((tuple(offset), tuple(size)) for size, offset in sizes_and_offsets)]


def local_plans(mesh: Any, kinds: Any, times: int) -> list[SavePlan]:
    """The local plan of every rank, with one item for each tensor; ranks share the items of equal boxes."""
    items: list[list[Any]] = [[] for _ in range(math.prod(mesh))]
    paths: dict[str, Any] = {}
    for kind, shape, dtype, placements in kinds:
        boxes = rank_boxes(mesh, shape, placements)
        templates = {box: write_item(None, kind, box, shape, dtype, False) for box in {*boxes}}
        for number in range(times):
            name = f"{kind}.{number}"
            paths[name] = (name,)
            named = {
                box: dataclasses.replace(item, index=dataclasses.replace(item.index, fqn=name))
                for box, item in templates.items()
            }
            for rank_items, box in zip(items, boxes, strict=True):
                rank_items.append(named[box])
    return [SavePlan(rank_items, planner_data=paths) for rank_items in items]


# Saves


def save(ranks: Shape, kinds: Kinds, times: int = 1):
    """In the plan of thousands of ranks, every element is written once, by a rank that holds it."""
    plans = local_plans(ranks, kinds, times)
    planned, metadata = global_plan(plans)
    not_held = 0
    for plan, local in zip(planned, plans, strict=True):
        held_boxes = {(item.index.fqn, item.index.offset) for item in local.items}
        not_held += sum((item.index.fqn, item.index.offset) not in held_boxes for item in plan.items)
    summaries: dict[str, list[Any]] = {kind: [] for kind, *_ in kinds}
    for name, entry in metadata.state_dict_metadata.items():
        summary = chunk_summary(entry)
        summaries[name[0]] += [] if summary in summaries[name[0]] else [summary]
    return {
        "ranks": len(planned),
        "tensors": len(metadata.state_dict_metadata),
        "not held": not_held,
        "chunks": summaries,
    }


def chunk_summary(entry: Any) -> dict[str, Any]:
    """The number of nonempty chunks of a tensor, the number of distinct ones, and their distinct (offset, size) along
    each dim."""
    dims = len(entry.size)
    nonempty = [[*chunk.offsets, *chunk.sizes] for chunk in entry.chunks if 0 not in chunk.sizes]
    rows = torch.tensor(nonempty, dtype=torch.int64).reshape(-1, 2 * dims)
    cuts = [torch.unique(rows[:, [dim, dims + dim]], dim=0).tolist() for dim in range(dims)]
    return {"written": len(rows), "different": len(torch.unique(rows, dim=0)), "cuts": cuts}


def due_save(ranks, kinds, times: int = 1):
    # as many distinct boxes as combinations of the (offset, size) of each dim are all these combinations
    summaries = {
        kind: [{"written": grid.boxes, "different": grid.boxes, "cuts": grid.cuts()}] for kind, _, grid in kinds
    }
    return as_metadata({"ranks": math.prod(ranks), "tensors": len(kinds) * times, "not held": 0, "chunks": summaries})


# Balance of writes


def balance(ranks: Shape, kinds: Kinds, times: int = 1):
    """Of thousands of ranks, the one with the fewest bytes so far writes an item that several hold."""
    plans = local_plans(ranks, kinds, times)
    writers = {id(item): rank for rank, plan in enumerate(compat.dedup_save_plans(plans)) for item in plan.items}
    holders: dict[int, list[int]] = {}
    sizes: dict[int, int] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            holders.setdefault(id(item), []).append(rank)
            data: Any = item.tensor_data
            sizes[id(item)] = data.chunk.sizes.numel() * data.properties.dtype.itemsize or 1
    load, passed_over = [0] * len(plans), 0
    for key, ranks_with_item in holders.items():
        passed_over += load[writers[key]] > min(load[rank] for rank in ranks_with_item)
        load[writers[key]] += sizes[key]
    return {"passed over": passed_over}


def due_balance():
    return as_metadata({"passed over": 0})


# Loads


def reshard(ranks: Shape, ranks__load: Shape, kinds: Kinds, wanted: LoadedKinds):
    """Thousands of ranks read each element of their shards once, to the right place, from the files of thousands of
    ranks with another layout, and open no file that they do not need."""
    planned, metadata = global_plan(local_plans(ranks, kinds, 1), True)
    writers = {(item.index.fqn, item.index.offset): rank for rank, plan in enumerate(planned) for item in plan.items}
    files: list[set[int]] = [set() for _ in range(math.prod(ranks__load))]
    reads, volume = {}, 0
    for kind, shape, dtype, placements in wanted:
        name, boxes = f"{kind}.0", rank_boxes(ranks__load, shape, placements)
        unique = [box for box in dict.fromkeys(boxes) if 0 not in box[1]]
        entry: Any = metadata.state_dict_metadata[name]
        items: list[Any] = create_read_items_for_chunk_list(name, entry, [chunk_metadata(box) for box in unique])
        reads[kind], elements = check_reads(items, unique, entry)
        writers_of_box: dict[Box, set[int]] = {box: set() for box in unique}
        for item in items:
            writers_of_box[unique[item.dest_index.index]].add(writers[name, item.storage_index.offset])
        size = dict(zip(unique, elements, strict=True))
        for files_of_rank, box in zip(files, boxes, strict=True):
            files_of_rank |= writers_of_box.get(box, set())
            volume += size.get(box, 0) * dtype.itemsize
    return {"reads": reads, "bytes": volume, "files": {"all": sum(map(len, files)), "most": max(map(len, files))}}


def check_reads(items: list[Any], boxes: list[Box], entry: Any) -> tuple[dict[str, int], list[int]]:
    """The counts of read items and of each kind of mistake in them, and the number of elements read into each box."""
    dims, index_pairs = len(entry.size), [(item.dest_index.index, item.storage_index.index) for item in items]
    pairs = torch.tensor(index_pairs, dtype=torch.int64).reshape(-1, 2)
    parts = torch.tensor(
        [[*item.dest_offsets, *item.storage_offsets, *item.lengths] for item in items], dtype=torch.int64
    ).reshape(-1, 3, dims)
    wanted = torch.tensor(boxes, dtype=torch.int64).reshape(-1, 2, dims)
    saved = torch.tensor([[[*chunk.offsets], [*chunk.sizes]] for chunk in entry.chunks], dtype=torch.int64)
    saved = saved.reshape(-1, 2, dims)
    to, source = wanted[pairs[:, 0]], saved[pairs[:, 1]]
    start = torch.maximum(to[:, 0], source[:, 0])
    length = torch.minimum(to.sum(1), source.sum(1)) - start
    astray = (parts[:, 0] + to[:, 0] != start) | (parts[:, 1] + source[:, 0] != start) | (parts[:, 2] != length)
    read = torch.zeros(len(boxes), dtype=torch.int64).index_add(0, pairs[:, 0], parts[:, 2].prod(1))
    wrong = {
        "astray": int(astray.any(1).sum()),
        "twice": len(pairs) - len(torch.unique(pairs, dim=0)),
        "unfilled": int((read != wanted[:, 1].prod(1)).sum()),
    }
    return {"items": len(items), **wrong}, read.tolist()


def due_reshard(kinds, wanted):
    reads, files, volume = {}, dict[int, set[int]](), 0
    for (kind, spec, saved), (_, _, loaded) in zip(kinds, wanted, strict=True):
        reads[kind] = {"items": loaded.reads(saved), "astray": 0, "twice": 0, "unfilled": 0}
        volume += loaded.elements * DTYPES[spec.dtype].itemsize
        for rank, writers in loaded.files(saved).items():
            files[rank] = files.get(rank, set()) | writers
    counts = [*map(len, files.values())]
    opened = {"all": sum(counts), "most": max(counts, default=0)}
    return {"reads": Of(reads), "bytes": Of(volume, "wrong-value"), "files": Of(opened)}


# The laws


def features(case: Case) -> set[str]:
    return {"several-tensors", "several-chunks"}


@st.composite
def narrow(draw: st.DrawFn, case: Case) -> Case:
    """Cases with fewer kinds and fewer tensors, on smaller meshes."""
    kinds = [kind for kind in kind_names(case) if draw(st.booleans())] or kind_names(case)[:1]
    dropped = {name for kind in kind_names(case) if kind not in kinds for name in (kind, f"to.{kind}")}
    found = {name: value for name, value in case.fields if name not in dropped}
    for mesh in ("ranks", "ranks.load"):
        if mesh in found:
            sizes = tuple(draw(st.sampled_from(sorted({1, 2, size // 2 or 1, size}))) for size in case.shape(mesh))
            found[mesh] = format_shape(sizes)
    if "times" in found:
        found["times"] = str(draw(st.sampled_from(sorted({1, 2, case.integer("times")}))))
    return Case(case.law, tuple(found.items()))


def case_lines(load: bool) -> tuple[str, ...]:
    """A case for each of :data:`MESHES`."""
    kinds = " ".join(word for word in KINDS.split() if load or not word.startswith("to."))
    more = [f"ranks.load={other}" if load else f"times={TENSORS_PER_KIND}" for _, other in MESHES]
    return tuple(f"ranks={mesh} {one} {kinds}" for (mesh, _), one in zip(MESHES, more, strict=True))


def scale_law(variant: str, act: Callable[..., Any], due: Callable[..., Any], source: str, **record: Any) -> Law:
    load = variant == "reshard"
    small = "ranks=2x3x2 " + ("ranks.load=3x2x2 " if load else "times=2 ")
    kinds = "a=7x5:R,S(0),S(1) b=12:R,S(0),R h=3x5x4:S(0),S(1),S(2)"
    built = law(
        f"plan.scale[{variant}]",
        source=f"{DOCS}, {source}",
        control=f"{small}{kinds}{' to.a=S(0),R,S(1) to.b=R,R,R to.h=S(2),S(1),S(0)' if load else ''}",
        sweep=texts(*case_lines(load)),
        sweeps=len(MESHES),
        narrow=narrow,
        smallest=1,
        features=features,
        profile="nightly",
        seconds=SECONDS,
        **record,
    )(act)
    built.due(due)
    return built


LAWS = [
    scale_law("save", save, due_save, "SavePlanner.create_global_plan; Metadata"),
    scale_law("balance", balance, due_balance, "dedup_save_plans: the smallest plan keeps an entry", tier="advisory"),
    scale_law("reshard", reshard, due_reshard, "create_read_items_for_chunk_list; load-time resharding"),
]
