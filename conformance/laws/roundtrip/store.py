"""Laws on how a checkpoint lies in storage: its files, its metadata, and what several ranks hold."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan

from conformance import trip as t
from conformance.case import Case
from conformance.here import Here
from conformance.laws.roundtrip import scripts as roundtrip_scripts
from conformance.laws.roundtrip.cases import law_of, trips
from conformance.report.reproducer import Script
from conformance.target import storage
from reference.box import Box, tiling_errors
from reference.checkpoint.load_plan import read_items
from reference.checkpoint.state_dict import Slot, flatten
from reference.notation import Shape

DOCS = "torch.distributed.checkpoint docs"


def check_files(case: Case, here: Here) -> None:
    """However a checkpoint is cut into files, it is the same; one file an item, or as many a rank as there are threads."""
    t.round_trip(case, here)
    if here.stage == 0:
        trip = t.read_trip(case)
        extents = storage.extents(here.target, here.folder(), storage.reader(here.target, here.folder()).read_metadata())
        if extents is not None:
            files = len({extent.file for extent in extents})
            most = here.world * trip.writer.get("thread_count", 1) if trip.writer.get("single_file_per_rank", True) else len(extents)
            least = 1 if trip.writer.get("single_file_per_rank", True) else len(extents)
            held = least <= files <= most
            here.require(held, "wrong-layout", "files", f"{len(extents)} items lie in {files} files", (least, most), files)


def check_metadata(case: Case, here: Here) -> None:
    """The metadata of a checkpoint describes what was saved, and where it lies."""
    trip = t.read_trip(case)
    t.save(trip, here)
    metadata = storage.reader(here.target, here.folder()).read_metadata()
    saved = flatten(trip.save.state)
    known = metadata.state_dict_metadata
    message = "the metadata names other leaves than were saved"
    here.require({*known} == {*saved}, "wrong-metadata", "names", message, sorted(saved), sorted(known))
    for name, (path, leaf) in saved.items():
        entry = known.get(name)
        kind: Any = TensorStorageMetadata if isinstance(leaf, Slot) else BytesStorageMetadata
        right = here.require(isinstance(entry, kind), "wrong-metadata", "kind", f"{name} is described as {type(entry).__name__}")
        if right and isinstance(leaf, Slot):
            _judge_tensor_entry(here, trip, leaf.name, name, entry)
        if metadata.planner_data is not None:
            told = metadata.planner_data.get(name)
            here.require(told == path, "wrong-metadata", "path", f"the path of {name} is another", path, told)
    _judge_extents(here, metadata)


def _judge_tensor_entry(here: Here, trip: t.Trip, slot: str, name: str, entry: Any) -> None:
    spec = trip.save.specs[slot]
    here.require(tuple(entry.size) == spec.shape, "wrong-metadata", "size", f"{name} has another size", spec.shape, tuple(entry.size))
    dtype = entry.properties.dtype
    here.require(dtype == spec.torch_dtype, "wrong-metadata", "dtype", f"{name} has another dtype", spec.torch_dtype, dtype)
    boxes = [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
    # in bounds, disjoint, and of the tensor's volume together
    errors = tiling_errors(spec.shape, [box for box in boxes if box.volume])
    here.require(not errors, "wrong-metadata", "tiling", f"the chunks of {name} do not tile it: {'; '.join(errors)}", spec.shape, boxes)
    # no shard is cut up: there are as many chunks as different shards
    due = due_chunks(trip, slot)
    found = sorted((box.offset, box.size) for box in boxes if box.volume)
    here.require(found == due, "wrong-metadata", "chunks", f"the chunks of {name} are not the shards that were saved", due, found)


def due_chunks(trip: t.Trip, slot: str) -> list[tuple[Shape, Shape]]:
    """Offset and size of every different shard with elements of a saved tensor."""
    layout, shape = trip.save.layout(slot), trip.save.specs[slot].shape
    boxes = {((0,) * len(shape), shape)}
    if layout is not None:
        boxes = {(layout.offset(coord), layout.local_shape(coord)) for coord in layout.mesh.coords()}
    return sorted((offset, size) for offset, size in boxes if 0 not in size)


def metadata_script(case: Case) -> Script:
    trip = t.read_trip(case)
    due: dict[str, list[Any]] = {}
    for name, (path, leaf) in flatten(trip.save.state).items():
        due[name] = [path]
        if isinstance(leaf, Slot):
            due[name] += [f"torch.{trip.save.specs[leaf.name].dtype}", trip.save.specs[leaf.name].shape, due_chunks(trip, leaf.name)]
    return roundtrip_scripts.metadata(case, due)


def _judge_extents(here: Here, metadata: Metadata) -> None:
    extents = storage.extents(here.target, here.folder(), metadata)
    if extents is None:
        return
    indices = set(metadata.storage_data or {})
    for name, entry in metadata.state_dict_metadata.items():
        wanted = [None] if isinstance(entry, BytesStorageMetadata) else [tuple(chunk.offsets) for chunk in entry.chunks]
        got = [None if index.offset is None else tuple(index.offset) for index in indices if index.fqn == name]
        same = sorted(map(repr, wanted)) == sorted(map(repr, got))
        here.require(same, "wrong-metadata", "storage", f"the items stored of {name} are not its chunks", wanted, got)
    extents.sort(key=lambda extent: (extent.file, extent.start, extent.end))
    for extent in extents:
        held = 0 <= extent.start < extent.end <= extent.size
        message = f"{extent.name} lies outside its file {extent.file}"
        here.require(held, "wrong-metadata", "extent", message, f"within {extent.size} bytes", extent)
    for one, other in pairwise(extents):
        apart = one.file != other.file or one.end <= other.start
        here.require(apart, "wrong-metadata", "extent", f"{one.name} and {other.name} share bytes of {one.file}", "", (one, other))


Item = tuple[str, Shape | None]


class Recorder(DefaultSavePlanner):
    """Notes which items this rank is to write."""

    items: list[Item]

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        plan = super().finish_plan(new_plan)
        self.items = [(item.index.fqn, None if item.index.offset is None else tuple(item.index.offset)) for item in plan.items]
        return plan


def check_dedup(case: Case, here: Here) -> None:
    """What several ranks hold is written by one of them: the lowest where that is asked for, else shared out evenly."""
    trip = t.read_trip(case)
    planner = Recorder(**trip.planner)
    t.save(trip, here, planner=planner)
    holders = holders_of(trip, here.world)
    mine = [item for item in planner.items if item in holders]
    here.require(len({*mine}) == len(mine), "wrong-metadata", "once", "this rank writes an item twice", "", mine)
    strange = [item for item in mine if here.rank not in holders[item]]
    here.require(not strange, "wrong-metadata", "holder", "this rank writes what it does not hold", holders, strange)
    if case.get("dedup", "") == "lowest":
        due, got = sorted((item for item, ranks in holders.items() if ranks[0] == here.rank), key=repr), sorted(mine, key=repr)
        here.require(got == due, "wrong-metadata", "lowest", "the lowest holder must write, no other", due, got)
        return
    alone = [item for item, ranks in holders.items() if ranks == [here.rank]]
    here.require({*alone} <= {*mine}, "wrong-metadata", "alone", "what this rank alone holds is not written by it", alone, mine)
    shared = [item for item, ranks in holders.items() if ranks == [*range(here.world)]]
    if len(shared) == len(holders):
        least, most = len(shared) // here.world, -(-len(shared) // here.world)
        written = len([item for item in mine if item in shared])
        message = f"{written} of {len(shared)} items that all ranks hold are written here"
        here.require(least <= written <= most, "wrong-metadata", "balance", message, (least, most), mine)


def holders_of(trip: t.Trip, world: int) -> dict[Item, list[int]]:
    """The ranks that hold each item with elements of what is saved, lowest first."""
    holders: dict[Item, list[int]] = {}
    for name, (_, leaf) in flatten(trip.save.state).items():
        layout = trip.save.layout(leaf.name) if isinstance(leaf, Slot) else None
        for rank in range(world):
            if layout is None:
                offset = (0,) * len(trip.save.specs[leaf.name].shape) if isinstance(leaf, Slot) else None
                holders.setdefault((name, offset), []).append(rank)
                continue
            coord = layout.mesh.coord(rank)
            if coord is not None and 0 not in layout.local_shape(coord):
                holders.setdefault((name, layout.offset(coord)), []).append(rank)
    return holders


def dedup_script(case: Case) -> Script:
    trip, world = t.read_trip(case), case.world
    holders = holders_of(trip, world)
    lowest = {rank: sorted((item for item, ranks in holders.items() if ranks[0] == rank), key=repr) for rank in range(world)}
    return roundtrip_scripts.dedup(case, lowest if case.get("dedup", "") == "lowest" else None)


Read = tuple[str, Shape, Shape, Shape, Shape]


class Reader(DefaultLoadPlanner):
    """Notes what this rank is to read: of every part the name, where its chunk begins, and its place in the chunk and in the shard."""

    reads: list[Read]

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        plan = super().finish_plan(new_plan)
        self.reads = []
        for item in plan.items:
            chunk = item.storage_index.offset
            if chunk is not None:
                place = tuple(item.storage_offsets), tuple(item.dest_offsets), tuple(item.lengths)
                self.reads.append((item.dest_index.fqn, tuple(chunk), *place))
        self.reads.sort()
        return plan


def check_reads(case: Case, here: Here) -> None:
    """A rank reads of every saved chunk what it has in common with its shards: all of it, once, and nothing else."""
    trip = t.read_trip(case)
    if here.stage == 0:
        t.save(trip, here)
        return
    planner = Reader()
    t.judge(trip, here, t.load(here, t.destination(trip, here), planner=planner))
    metadata = storage.reader(here.target, here.folder()).read_metadata()
    due: list[Read] = []
    for name, (_, leaf) in flatten(trip.load.state).items():
        entry: Any = metadata.state_dict_metadata[name]
        if isinstance(leaf, Slot):
            chunks = [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
            for item in read_items(chunks, wanted(trip.load, leaf.name, here.rank)):
                due.append((name, chunks[item.chunk].offset, item.chunk_offset, item.box_offset, item.lengths))
    message = "the parts that this rank reads are not what its shards have in common with the saved chunks"
    here.require(planner.reads == sorted(due), "wrong-metadata", "reads", message, sorted(due), planner.reads)


def wanted(end: t.End, name: str, rank: int) -> list[Box]:
    """The boxes of a tensor that a rank must fill."""
    layout, shape = end.layout(name), end.specs[name].shape
    if layout is None:
        return [Box((0,) * len(shape), shape)]
    coord = layout.mesh.coord(rank)
    box = None if coord is None else layout.box(coord)
    return [] if box is None else [box]


FILES = (
    'mesh=2 mesh.load=3 x=5x3:S(0) a=7:R:int64 b=4:S(0):bool c=():R threads=2 state={x:x,a:a,b:b,c:c,n:1,m:None,k:(1,2),s:"text"}',
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
LAWS = (
    law_of(
        "files",
        check=check_files,
        clause="Number of writer threads, one file a rank or one an item: what is loaded is what was saved.",
        source=f"{DOCS}, FileSystemWriter: single_file_per_rank, thread_count",
        holds="mesh=2 x=5:S(0) a=4:R threads=2 state={x:x,a:a,n:1,m:2,k:3}",
        planted="threads_drop_values",
        texts=FILES,
        sweeps=6,
        stages=t.worlds,
    ),
    law_of(
        "metadata",
        clause="The metadata describes every leaf; the chunks of a tensor are its shards and tile it; each lies in its file, apart.",
        source=f"{DOCS}, Metadata; StorageWriter.finish",
        check=check_metadata,
        script=metadata_script,
        holds="mesh=2 x=5x6:S(0) a=7:R:int64 state={x:x,d:{a:a},n:1}",
        planted="every_item_at_offset_zero",
        texts=METADATA,
        sweeps=6,
        draw=lambda limits: trips("roundtrip.metadata", limits),
        draws=4,
    ),
    law_of(
        "reads",
        clause="A rank reads of every saved chunk what it has in common with its shards, each element once, and nothing else.",
        source=f"{DOCS}, load: each rank reads the least that is necessary; ReadItem",
        check=check_reads,
        holds="mesh=2x2 x=4x2:S(0),S(1)",
        planted="neighbours_read_too",
        texts=READS,
        sweeps=4,
        draw=lambda limits: trips("roundtrip.reads", limits),
        draws=4,
        stages=t.worlds,
    ),
    law_of(
        "dedup",
        clause="What several ranks hold is written by exactly one of them: the lowest where that is asked for, else shared out.",
        source=f"{DOCS}, DefaultSavePlanner; dedup_save_plans: only the smallest SavePlan keeps a duplicate",
        check=check_dedup,
        script=dedup_script,
        holds="mesh=2 x=6:R a=4:R dedup=lowest",
        planted="duplicates_kept_by_the_highest",
        texts=DEDUP,
        sweeps=6,
    ),
)
