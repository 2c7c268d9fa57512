"""Laws on the files and the metadata of a checkpoint, on deduplication, and on what a load reads."""

from __future__ import annotations

import os
from itertools import pairwise
from typing import Annotated, Any

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan

from shardlaw.conformance.law.due import Either, Of
from shardlaw.conformance.law.fields import Field, Folder, Rank, Word, WorldSize
from shardlaw.conformance.laws.checkpoint import trip as t
from shardlaw.conformance.laws.checkpoint.calls import load, save
from shardlaw.conformance.laws.checkpoint.contents import Contents
from shardlaw.conformance.laws.checkpoint.fields import (
    Destination,
    InFiles,
    PlannerField,
    Reader,
    Saved,
    SavePlanner,
    Writer,
)
from shardlaw.conformance.laws.roundtrip.cases import DOCS, add_load, after_save, one_world_law, trip_law, trips
from shardlaw.conformance.laws.shared.box_fields import boxes_values
from shardlaw.reference.box import Box
from shardlaw.reference.checkpoint.load_plan import read_items
from shardlaw.reference.checkpoint.state_dict import Slot, flatten
from shardlaw.reference.notation import Shape

Item = tuple[str, Shape | None]

FILES = (
    "mesh=2 mesh.load=3 x=5x3:S(0) a=7:R:int64 b=4:S(0):bool c=():R threads=2 "
    'state={x:x,a:a,b:b,c:c,n:1,m:None,k:(1,2),s:"text"}',
    'mesh=2 mesh.load=1 x=5x3:S(0) a=7:R:int64 b=4x4:S(1):float64 files=item state={x:x,l:[a,b],n:1,m:b"xy"}',
    "mesh=2 mesh.load=2 x=3:S(0) a=9x2:S(0) b=2:- c=6:R:uint8 threads=3 files=item state={x:x,a:a,b:b,c:c,n:1,m:2,k:3}",
    "mesh=3 mesh.load=2 x=5x3:S(1) a=7:R b=4:S(0):int32 c=8:S(0):bfloat16 threads=3 files=rank",
    "mesh=2 x=64:S(0) a=3:R:bool b=5:R threads=4 state={n:1,x:x,a:a,b:b,m:2,k:3,l:4,o:5}",
    "mesh=1 mesh.load=2 x=5x3:S(1) a=7:R b=4:S(0):int32 threads=2 files=rank state={x:x,a:a,b:b,n:[1,2],m:{k:1}}",
)
METADATA = (
    "mesh=2 x=5x6:S(0) a=7:R:int64 b=():R:float64 state={x:x,d:{a:a,b:b},n:1,l:[x,2]}",
    "mesh=3 x=7:S(0):bool a=2:S(0) b=4x4:S(1):int32 threads=2",
    "mesh=2x2 x=5x6:S(0),S(1) a=5:S(0),S(0):float64 b=3x3:R,S(1) c=2x2:R,R",
    "mesh=2@0,2 x=5:S(0) a=3:- b=0x2:S(1) files=item",
    "mesh=1 x=5x2:S(0) a=():R state={x:x,a:a,k:{p:{q:None}}}",
    "mesh=2x2@0,2,1,3 x=7x3:S(0),S(0) a=8:_S(0,2),S(0) b=4:S(0),R dedup=lowest",
    "mesh=2 x=5:- a=4:- trained=x",
    "mesh=2 x=4x6:S(1):float64 held=sharded",
)
READS = (
    "mesh=2 mesh.load=3 x=5x6:S(0) a=7:S(0):int64 b=():R to.x=S(1) to.a=S(0) to.b=R",
    "mesh=3 mesh.load=2 x=7x2:S(0) a=6:S(0) b=4:- to.x=S(0) to.a=S(0) to.b=S(0)",
    "mesh=2x2 mesh.load=3@2,0,1 x=5x4:S(0),S(1) a=8:S(0),S(0) to.x=S(0) to.a=R",
    "mesh=2 mesh.load=2x2 x=6x3:S(1) a=2:S(0) b=0x3:S(1) to.x=S(0),S(1) to.a=S(0),S(0) to.b=R,S(0)",
)
DEDUP = (
    "mesh=3 x=5x6:R a=7:R:int64 b=4:S(0) dedup=lowest state={x:x,a:a,b:b,n:1,m:2}",
    "mesh=2x2 x=6:S(0),R a=4x4:R,R b=5:R,S(0) dedup=lowest",
    "mesh=2@1,2 x=6:R a=4:- b=5:S(0) dedup=lowest",
    "mesh=2 a=4:R b=4:R c=4:R d=4:R x=4:R e=4:R",
    "mesh=3 a=4:- b=4:- c=4:- d=4:- x=4:-",
    "mesh=2x2 x=6:S(0),R a=4x4:R,R b=5:R,S(0) c=8:S(0),S(0)",
)


@trip_law(
    "files",
    source=f"{DOCS}, FileSystemWriter: single_file_per_rank, thread_count",
    control="mesh=2 x=5:S(0) a=4:R threads=2 state={x:x,a:a,n:1,m:2,k:3}",
    texts=FILES,
)
def files(
    state: Saved,
    writer: Writer,
    reader: Reader,
    world: WorldSize,
    in_files: InFiles,
    folder: Folder,
    threads: int = 1,
    files: str = "rank",
):
    """With any number of threads, and one file a rank or an item, a save writes that many files, and a load gives the
    saved state."""
    save(state, writer(folder))
    paths = [info.relative_path for info in reader(folder).read_metadata().storage_data.values()] if in_files else []
    most = len(paths) if files == "item" else world * threads
    least = len(paths) if files == "item" else min(len(paths), 1)
    return {"source": state, "as many files as asked for": least <= len({*paths}) <= most}


@files.due
def _(state):
    return {"source": state, "as many files as asked for": Of(True, "wrong-layout")}


add_load(files)


def stored_spans(metadata: Any, folder: str) -> list[tuple[str, int, int, int]]:
    """The file, the first byte, the end and the size of the file of every stored item."""
    spans = []
    for info in metadata.storage_data.values():
        path = os.path.join(folder, info.relative_path)
        size = os.path.getsize(path) if os.path.exists(path) else 0
        spans.append((info.relative_path, info.offset, info.offset + info.length, size))
    return sorted(spans)


def stored_offsets(metadata: Any) -> dict[str, list[Any]]:
    """The offsets of the stored chunks of every leaf; ``None`` for one that is no tensor."""
    stored: dict[str, list[Any]] = {name: [] for name in metadata.state_dict_metadata}
    for index in metadata.storage_data:
        stored[index.fqn].append(None if index.offset is None else tuple(index.offset))
    return {name: sorted(offsets, key=repr) for name, offsets in stored.items()}


@one_world_law(
    "metadata",
    source=f"{DOCS}, Metadata; StorageWriter.finish",
    control="mesh=2 x=5x6:S(0) a=7:R:int64 state={x:x,d:{a:a},n:1}",
    texts=METADATA,
    draw=trips,
    draws=4,
)
def metadata(
    state: Saved,
    writer: Writer,
    reader: Reader,
    planner: SavePlanner,
    in_files: InFiles,
    folder: Folder,
    trained: Word = "",
):
    """The metadata has every leaf and tells which tensors require a gradient; the chunks of a tensor are its shards and
    tile it, and are disjoint in the files. A save returns what is read of it afterwards."""
    if trained:
        state[trained].requires_grad_()
    returned = save(state, writer(folder), planner)
    metadata = reader(folder).read_metadata()
    leaves = metadata.state_dict_metadata
    tensors = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, TensorStorageMetadata)}
    chunks = {
        name: sorted((tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in leaf.chunks)
        for name, leaf in tensors.items()
    }
    described = {
        "names": sorted(leaves),
        "tensors": {name: (tuple(leaf.size), leaf.properties.dtype) for name, leaf in tensors.items()},
        "trained": [name for name, leaf in tensors.items() if leaf.properties.requires_grad],
        "chunks": {name: [chunk for chunk in all_chunks if 0 not in chunk[1]] for name, all_chunks in chunks.items()},
        "paths": metadata.planner_data,
    }
    parts = ("state_dict_metadata", "planner_data", *(("storage_data",) if in_files else ()))
    described["returned otherwise"] = [part for part in parts if getattr(returned, part) != getattr(metadata, part)]
    if not in_files:
        return {**described, "stored otherwise": [], "outside of their files": [], "sharing bytes": []}
    spans, stored = stored_spans(metadata, folder), stored_offsets(metadata)
    offsets = {name: sorted(offset for offset, _ in chunks[name]) if name in chunks else [None] for name in leaves}
    return {
        **described,
        "stored otherwise": [name for name in leaves if stored[name] != sorted(offsets[name], key=repr)],
        "outside of their files": [span for span in spans if not 0 <= span[1] < span[2] <= span[3]],
        "sharing bytes": [
            (span, after) for span, after in pairwise(spans) if span[0] == after[0] and span[2] > after[1]
        ],
    }


@metadata.due
def _(state: Contents, trained):
    leaves = flatten(state.tree)
    tensors = {name: leaf.name for name, (_, leaf) in leaves.items() if isinstance(leaf, Slot)}
    specs = state.end.specs
    return {
        "names": Of(sorted(leaves)),
        "tensors": Of({name: (specs[slot].shape, specs[slot].torch_dtype) for name, slot in tensors.items()}),
        "trained": Of([trained] if trained else []),
        "chunks": Of({name: sorted(boxes_values(chunks_of(state, slot))) for name, slot in tensors.items()}),
        "paths": Of({name: path for name, (path, _) in leaves.items()}),
        "returned otherwise": [],
        "stored otherwise": Of([]),
        "outside of their files": Of([]),
        "sharing bytes": Of([]),
    }


def chunks_of(state: Contents, name: str) -> tuple[Box, ...]:
    """The distinct shards of a saved tensor that have elements."""
    return state.trip.save.shards(name, range(state.trip.world_sizes[0])).without_empty().boxes


class RecordingSavePlanner(DefaultSavePlanner):
    """Records the items with elements that this rank writes: pairs of name and offset."""

    items: list[Any]

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        plan = super().finish_plan(new_plan)
        self.items = [
            (item.index.fqn, None if item.index.offset is None else tuple(item.index.offset))
            for item in plan.items
            if item.tensor_data is None or item.tensor_data.chunk.sizes.numel()
        ]
        return plan


class HoldersField(Field):
    """The ranks that have each item with elements of the saved state, lowest first."""

    always = True

    def read(self, case: Any, name: str) -> dict[Item, list[int]]:
        end, world = t.read_trip(case).save, case.world
        holders: dict[Item, list[int]] = {}
        for key, (_, leaf) in flatten(end.state).items():
            if not isinstance(leaf, Slot):
                holders[key, None] = [*range(world)]
                continue
            for box, ranks in end.shards(leaf.name, range(world)).without_empty().parts:
                holders[key, box.offset] = sorted(ranks)
        return holders


@one_world_law(
    "dedup",
    source=f"{DOCS}, DefaultSavePlanner; dedup_save_plans: only the smallest SavePlan keeps a duplicate",
    control="mesh=2 x=6:R a=4:R dedup=lowest",
    texts=DEDUP,
)
def dedup(
    state: Saved,
    writer: Writer,
    planner: Annotated[Any, PlannerField(saves=True, planner_class=RecordingSavePlanner)],
    holders: Annotated[dict[Any, list[int]], HoldersField()],
    rank: Rank,
    folder: Folder,
):
    """An item that several ranks have is written by one of them: with dedup=lowest by the lowest, else in even
    shares."""
    save(state, writer(folder), planner)
    written = planner.items
    return {
        "twice": [item for item in written if written.count(item) > 1],
        "not held": [item for item in written if rank not in holders[item]],
        "held alone": [item for item, ranks in holders.items() if ranks == [rank] and item not in written],
        "written": sorted(written, key=repr),
        "shared": sum(item in written for item, ranks in holders.items() if len(ranks) > 1),
    }


@dedup.due
def _(holders, rank: Rank, world: WorldSize, dedup: str = ""):
    lowest = sorted((item for item, ranks in holders.items() if ranks[0] == rank), key=repr)
    is_replicated = all(ranks == [*range(world)] for ranks in holders.values())
    share = len(holders) // world, -(-len(holders) // world)
    return {
        "twice": Of([]),
        "not held": Of([]),
        "held alone": Of([]),
        "written": Of(lowest) if dedup == "lowest" else ...,
        "shared": Either((Of(share[0]), Of(share[1]))) if is_replicated and dedup != "lowest" else ...,
    }


class RecordingLoadPlanner(DefaultLoadPlanner):
    """Records the tensor reads of this rank: name, offset of the chunk, offsets in the chunk and the shard, lengths."""

    reads: list[Any]

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        plan = super().finish_plan(new_plan)
        self.reads = []
        for item in plan.items:
            chunk = item.storage_index.offset
            if chunk is not None:
                region = tuple(item.storage_offsets), tuple(item.dest_offsets), tuple(item.lengths)
                self.reads.append((item.dest_index.fqn, tuple(chunk), *region))
        self.reads.sort()
        return plan


@after_save(
    "reads",
    source=f"{DOCS}, load: each rank reads the least that is necessary; ReadItem",
    control="mesh=2x2 x=4x2:S(0),S(1)",
    texts=READS,
    draw=trips,
    draws=4,
)
def reads(
    state: Destination,
    reader: Reader,
    planner: Annotated[Any, PlannerField(saves=False, planner_class=RecordingLoadPlanner)],
    folder: Folder,
):
    """A rank reads from every saved chunk the elements of its own shards, once each, and no others."""
    return {"loaded": load(state, reader(folder), planner), "reads": planner.reads}


@reads.due
def _(state: Contents, rank: Rank):
    due = []
    for name, (_, leaf) in flatten(state.tree).items():
        if isinstance(leaf, Slot):
            chunks = chunks_of(state, leaf.name)
            for item in read_items(chunks, state.end.boxes(leaf.name, rank)):
                due.append((name, chunks[item.chunk].offset, item.chunk_offset, item.box_offset, item.lengths))
    return {"loaded": state, "reads": Of(sorted(due))}
