"""Laws on how a checkpoint lies in storage, and on saves that follow one another: files, metadata, duplicates, kept plans, staging."""

from __future__ import annotations

import os
from concurrent.futures import Future
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from conformance import trip as t
from conformance.case import Case
from conformance.here import Here
from conformance.laws import roundtrip_scripts
from conformance.laws.roundtrip_cases import law_of, trips
from conformance.report.reproducer import Script
from conformance.target import storage
from reference.box import Box, tiling_errors
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


def check_kept(case: Case, here: Here) -> None:
    """A writer that may not overwrite refuses on all ranks, and the checkpoint that is there stays as it is."""
    trip = t.read_trip(case)
    if here.stage == 0:
        t.save(trip, here)
        newer = replace(trip, values={name: _other(full) for name, full in trip.values.items()}, writer={**trip.writer, "overwrite": False})
        here.refused(lambda: t.save(newer, here), "save", "a save over a checkpoint without leave", errors=(t.CheckpointFailed,))
    else:
        t.judge(trip, here, t.load(here, t.destination(trip, here)), check="kept")


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


def check_overwrite(case: Case, here: Here) -> None:
    """A checkpoint that is saved over another one is the new one, whatever the old one was."""
    trip = t.read_trip(case)
    if here.stage == 0:
        t.save(trip, here)
        return
    newer = t.Trip(trip.load, trip.load, trip.worlds, {name: _other(full) for name, full in trip.values.items()}, trip.writer, trip.planner)
    if here.stage == 1:
        t.save(newer, here)
        return
    again = t.End(trip.load.state, trip.save.mesh, trip.save.specs)
    back = t.Trip(trip.load, again, trip.worlds, newer.values, trip.writer, trip.planner)
    t.judge(back, here, t.load(here, t.destination(back, here)))


def _other(full: torch.Tensor) -> torch.Tensor:
    """Values that differ from ``full`` in every element."""
    return ~full if full.dtype == torch.bool else full + 1


def overwrite_worlds(case: Case) -> tuple[int, ...]:
    save, load = t.worlds(case)
    return save, load, save


def check_caching(case: Case, here: Here) -> None:
    """A planner that keeps its plans writes what one that makes them anew writes, in every order of saves."""
    trip = t.read_trip(case)
    order = case.get("order")
    ends = {"a": trip.save, "b": trip.load}
    folders = [os.path.join(here.folder(), str(at)) for at in range(len(order))]
    values = [trip.values]
    for _ in order[1:]:
        values.append({name: _other(full) for name, full in values[-1].items()})
    # plans are kept by the name of the planner's class: one of this case alone
    kind: Any = type(f"Planner{abs(hash(case))}", (DefaultSavePlanner,), {})
    saved = []
    for which, folder, full in zip(order, folders, values, strict=True):
        one = t.Trip(ends[which], ends[which], trip.worlds, full, trip.writer, trip.planner)
        saved.append(one)
        t.save(one, here, folder=folder, planner=kind(enable_plan_caching=True, **trip.planner))
    for at, (one, folder) in enumerate(zip(saved, folders, strict=True)):
        metadata = storage.reader(here.target, folder).read_metadata()
        names, due = {*metadata.state_dict_metadata}, {*flatten(one.save.state)}
        message = f"save {at} names other leaves than it was given"
        if here.require(names == due, "wrong-metadata", "names", message, sorted(due), sorted(names)):
            for name, (path, leaf) in flatten(one.save.state).items():
                entry: Any = metadata.state_dict_metadata[name]
                told = (metadata.planner_data or {}).get(name)
                here.require(told == path, "wrong-metadata", "path", f"save {at}: the path of {name} is another", path, told)
                if isinstance(leaf, Slot) and isinstance(entry, TensorStorageMetadata):
                    want, got = one.save.specs[leaf.name].torch_dtype, entry.properties.dtype
                    here.require(got == want, "wrong-metadata", "dtype", f"save {at}: {name} is described with another dtype", want, got)
        t.judge(one, here, t.load(here, t.destination(one, here), folder=folder), check=f"loaded {order[: at + 1]}")


def caching_script(case: Case) -> Script:
    trip = t.read_trip(case)
    return roundtrip_scripts.caching(case, {"a": trip.save, "b": trip.load}, case.get("order"))


def check_async(case: Case, here: Here) -> None:
    """An asynchronous save holds the values of the moment at which it was called, whatever happens to them afterwards."""
    trip = t.read_trip(case)
    if here.stage == 1:
        t.judge(trip, here, t.load(here, t.destination(trip, here)))
        return
    stager = case.get("async")
    options = {"cache_staged_state_dict": True} if stager == "cached" else {}
    writer = storage.writer(here.target, here.folder(), **trip.writer, **options)
    own = DefaultStager(StagingOptions(False, False, False, False)) if stager == "stager" else None
    state = t.source(trip, here)
    if stager == "cached":
        # the first of two saves through one cache: the second must not give its values
        older = t.Trip(trip.save, trip.save, trip.worlds, {n: _other(full) for n, full in trip.values.items()}, {}, {})
        _finish(t.dcp.async_save(t.source(older, here), storage_writer=writer))
    with t.told_plainly():
        pending = t.dcp.async_save(state, storage_writer=writer, async_stager=own)
        _scramble(state)
        metadata = _finish(pending)
    message = f"the save gave a {type(metadata).__name__}, must give its metadata"
    here.require(isinstance(metadata, Metadata), "wrong-metadata", "result", message)
    if own is not None:
        own.close()


def _finish(pending: Any) -> Any:
    future: Future[Any] = pending if isinstance(pending, Future) else pending.upload_completion
    return future.result()


def _scramble(value: Any) -> None:
    """Change every tensor of a state in place, and every dict and list."""
    if isinstance(value, torch.Tensor):
        with torch.no_grad():
            local = value.to_local() if hasattr(value, "to_local") else value
            local.copy_(t.poison(local))
    elif isinstance(value, t.App):
        _scramble(value.state)
    elif isinstance(value, dict):
        for entry in value.values():
            _scramble(entry)
        value["late"] = 1
    elif isinstance(value, list):
        for entry in value:
            _scramble(entry)
        value.append("late")


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
DEDUP = (
    "mesh=3 x=5x6:R a=7:R:int64 b=4:S(0) dedup=lowest state={x:x,a:a,b:b,n:1,m:2}",
    "mesh=2x2 x=6:S(0),R a=4x4:R,R b=5:R,S(0) dedup=lowest",
    "mesh=2@1,2 x=6:R a=4:- b=5:S(0) dedup=lowest",
    "mesh=2 a=4:R b=4:R c=4:R d=4:R x=4:R e=4:R",
    "mesh=3 a=4:- b=4:- c=4:- d=4:- x=4:-",
    "mesh=2x2 x=6:S(0),R a=4x4:R,R b=5:R,S(0) c=8:S(0),S(0)",
)
OVERWRITE = (
    "mesh=3 mesh.load=2 x=7:S(0) a=4x3:R:int64 to.x=S(0) to.a=S(1)",
    "mesh=2 mesh.load=3 x=5x2:S(0) a=6:S(0):bool to.x=S(1) to.a=R state={x:x,a:a,n:1} into={x:x,a:a,n:2} threads=2",
    "mesh=2 x=5:S(0) a=4:R state={x:x,a:a,n:1} into={x:x}",
    "mesh=1 mesh.load=2 x=5:S(0) a=4:- to.x=R to.a=R",
)
KEPT = (
    "mesh=2 x=5:S(0) a=4:R state={x:x,a:a,n:1}",
    "mesh=3 mesh.load=2 x=7:S(0):int64 a=4:- to.x=S(0)",
    "mesh=1 x=5x2:S(0)",
)
CACHING = (
    "mesh=2 x=6:S(0) a=5:S(0) state={x:x} into={x:x,a:a} order=abb",
    "mesh=2 x=6:S(0) to.x=R order=aab",
    "mesh=2 x=6:S(0) a=3:R state={x:x,n:1} into={a:a,n:2} order=aba",
    "mesh=3 x=7:S(0) a=3:R to.x=R to.a=S(0) order=abba",
    "mesh=2 x=6:S(0) order=ab dtype=int64",
    'mesh=2 x=6:S(0) state={"d.w":x} into={d:{w:x}} order=ab',
)
ASYNC = (
    "mesh=2 mesh.load=3 x=5x2:S(0) a=4:R:int64 async=writer state={x:x,d:{a:a,l:[1,2]},n:1}",
    "mesh=2 x=5:S(0) a=4:- async=stager state={x:x,d:{a:a,l:[a,2]},n:[1]}",
    "mesh=2 x=5:S(0) a=4:R:bool async=cached state={x:x,a:a,n:1}",
    "mesh=3 mesh.load=1 x=5x2:S(1):float64 a=3x2:-:float32:distinct:transposed async=stager",
    "mesh=2 x=():R a=4:S(0) async=writer threads=2",
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
    law_of(
        "overwrite",
        clause="A checkpoint that is saved over another one, by another world with another layout, loads as the new one.",
        source=f"{DOCS}, FileSystemWriter: overwrite",
        check=check_overwrite,
        script=roundtrip_scripts.overwrite,
        holds="mesh=2 mesh.load=3 x=7:S(0) a=4:R",
        planted="old_metadata_kept",
        texts=OVERWRITE,
        sweeps=4,
        stages=overwrite_worlds,
    ),
    law_of(
        "refuses[overwrite]",
        clause="A save over a checkpoint is refused on all ranks where the writer may not overwrite, and the checkpoint stays as it is.",
        source=f"{DOCS}, FileSystemWriter: overwrite",
        check=check_kept,
        script=roundtrip_scripts.kept,
        holds="mesh=2 x=5:S(0) a=4:R",
        planted="always_overwrites",
        texts=KEPT,
        sweeps=3,
        stages=t.worlds,
        features=lambda case: {"must-refuse", "storage-option"},
    ),
    law_of(
        "caching",
        clause="With enable_plan_caching every save holds what it was given, whatever was saved before it.",
        source=f"{DOCS}, DefaultSavePlanner: enable_plan_caching",
        check=check_caching,
        script=caching_script,
        holds="mesh=2 x=6:S(0) a=3:R state={x:x} into={a:a} order=ab",
        planted="stale_cached_metadata",
        texts=CACHING,
        sweeps=6,
    ),
    law_of(
        "async",
        clause="An asynchronous save holds the values of the moment at which it was called.",
        source=f"{DOCS}, async_save: de-stages the state_dict first; AsyncStager.stage",
        check=check_async,
        script=roundtrip_scripts.asynchronous,
        holds="mesh=2 x=5:S(0) a=4:R async=writer",
        planted="staging_without_copy",
        texts=ASYNC,
        sweeps=5,
        features=lambda case: {"staging-cache"} if case.get("async") == "cached" else set(),
        stages=t.worlds,
    ),
)
