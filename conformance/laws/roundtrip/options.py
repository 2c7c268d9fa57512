"""Laws on the options of a save, and on the storages of torch that are no plain folders: fsspec, and Hugging Face's safetensors."""

from __future__ import annotations

import importlib.util
import json
import os
import uuid
from dataclasses import replace
from typing import Any

from conformance import compat
from conformance import trip as t
from conformance.case import Case
from conformance.here import Here
from conformance.laws.roundtrip.cases import IN_FILES, law_of, trips
from conformance.report.reproducer import Script
from conformance.trip_script import load_lines, save_lines, script

DOCS = "torch.distributed.checkpoint docs"


def check_fsspec(case: Case, here: Here) -> None:
    """Through fsspec a checkpoint is what it is in files, whether the storage is made by hand or found by the name of the place."""
    _want(here, "fsspec")
    trip = t.read_trip(case)
    memory, plain = case.get("through") == "memory", case.get("through") == "folder"
    place = f"memory://{uuid.uuid4().hex}" if memory else f"{'' if plain else 'file://'}{here.folder()}/through"
    named = {"checkpoint_id": place} if "id" in case else {}
    if here.stage == 0:
        writer = None if named else compat.name("fsspec_writer")(place, **{"sync_files": False, **trip.writer})
        with t.told_plainly():
            t.dcp.save(t.source(trip, here), storage_writer=writer, **named)
    if here.stage == 1 or memory:
        state = t.destination(trip, here)
        with t.told_plainly():
            t.dcp.load(state, storage_reader=None if named else compat.name("fsspec_reader")(place), **named)
        t.judge(trip, here, state)


def fsspec_worlds(case: Case) -> tuple[int, ...]:
    """Files in memory last as long as the process that holds them."""
    return (1,) if case.get("through") == "memory" else t.worlds(case)


def fsspec_script(case: Case) -> Script:
    trip, memory = t.read_trip(case), case.get("through") == "memory"
    prefix = "" if case.get("through") == "folder" else "file://"
    place = '"memory://shared"' if memory else f'f"{prefix}{{folder}}/through"'
    options = ", ".join(f"{key}={value!r}" for key, value in {"sync_files": False, **trip.writer}.items())
    saving = save_lines(trip, writer=f"FsspecWriter({place}, {options})")
    loading = load_lines(trip, reader=f"FsspecReader({place})")
    if "id" in case:
        saving = save_lines(trip, writer=f"None, checkpoint_id={place}")
        loading = load_lines(trip, reader=f"None, checkpoint_id={place}")
    stages = [(1, [*saving, *loading])] if memory else [(trip.worlds[0], saving), (trip.worlds[1], loading)]
    return script(trip, stages, imports=["from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter"])


def check_options(case: Case, here: Here) -> None:
    """A trip; one through files of safetensors wants that package."""
    if case.get("format", "") == "safetensors":
        _want(here, "safetensors")
    t.round_trip(case, here)


def check_hugging_face(case: Case, here: Here) -> None:
    """Tensors that were saved as safetensors load again: the shards, and the whole tensors that they were consolidated into."""
    _want(here, "safetensors")
    trip = t.read_trip(case)
    if here.stage == 0:
        folder = here.folder()
        made = os.path.join(folder, "made") if "id" in case else folder
        named: dict[str, Any] = {"checkpoint_id": folder} if "id" in case else {}
        t.save(trip, here, writer=compat.name("HuggingFaceStorageWriter")(made, **hugging_options(case)), **named)
        if case.get("hf") != "shards" and here.rank == 0:
            _judge_index(case, here, trip)
        return
    reader = compat.name("HuggingFaceStorageReader")
    for check, folder in places(case, here.folder()):
        threads = trip.writer.get("thread_count", 1)
        t.judge(trip, here, t.load(here, t.destination(trip, here), reader=reader(folder, thread_count=threads)), check=check)


def _judge_index(case: Case, here: Here, trip: t.Trip) -> None:
    """The index beside whole tensors names the file of each of them."""
    path = os.path.join(here.folder(), "model.safetensors.index.json")
    if here.require(os.path.exists(path), "wrong-metadata", "index", "there is no model.safetensors.index.json beside the tensors"):
        with open(path) as file:
            told = json.load(file)["weight_map"]
        right = {*told} == {*trip.values} and all(os.path.exists(os.path.join(here.folder(), name)) for name in told.values())
        here.require(right, "wrong-metadata", "index", "the index names other tensors or files than there are", sorted(trip.values), told)


def places(case: Case, folder: str) -> list[tuple[str, str]]:
    """What is loaded, by name, and where it lies."""
    sharded = [("shards", os.path.join(folder, "sharded"))] if case.get("hf") == "consolidated" and "id" not in case else []
    return [*sharded, (case.get("hf"), folder)]


def hugging_options(case: Case) -> dict[str, Any]:
    how = case.get("hf")
    index = {"fqn_to_index_mapping": {n: at % 2 + 1 for at, n in enumerate(t.tensor_names(case))}} if "index" in case else {}
    threads = {"thread_count": case.integer("threads"), "thread_count_consolidation": case.integer("threads")} if "threads" in case else {}
    return {"save_distributed": how != "whole", "enable_consolidation": how == "consolidated", **index, **threads}


def hugging_script(case: Case) -> Script:
    trip = t.read_trip(case)
    options = ", ".join(f"{key}={value!r}" for key, value in hugging_options(case).items())
    made, named = ('f"{folder}/made"', ", checkpoint_id=folder") if "id" in case else ("folder", "")
    saving = save_lines(replace(trip, writer={}), writer=f"HuggingFaceStorageWriter({made}, {options})", how=named)
    loading = load_lines(trip, reader="HuggingFaceStorageReader(folder)")
    used = "from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter"
    return script(trip, [(trip.worlds[0], saving), (trip.worlds[1], loading)], imports=[used])


def _want(here: Here, module: str) -> None:
    if importlib.util.find_spec(module) is None:
        here.reject(f"{module} is not installed")


def of_hugging_face(case: Case) -> set[str]:
    found = {f"storage:safetensors-{case.get('hf')}"} | ({"checkpoint-id"} if "id" in case else set())
    specs = [case.tensor(name) for name in t.tensor_names(case)]
    if any(not spec.torch_dtype.is_floating_point for spec in specs):
        found.add("integers")
    return found


def of_options(case: Case) -> set[str]:
    found = {"storage:safetensors-in-files"} if case.get("format", "") == "safetensors" else set()
    return found | ({"only-inner-flattened"} if "nested" in case and "inner" not in case else set())


OPTIONS = (
    "mesh=2 mesh.load=3 x=5x2:S(0) a=4:R state={x:x,a:a,n:1} sync=1",
    "mesh=3 mesh.load=2 x=7:S(0):int64 a=3x3:S(1):bool to.x=R threads=4 sync=1 files=item",
    "mesh=2 x=5x2:S(0) a=64:S(0) b=9:- state={x:x,a:a,b:b,n:1} ahead=1 threads=2",
    "mesh=2 mesh.load=1 x=4:S(0) a=4:R state={x:x,a:a,n:1,m:2,k:3} dedup=balanced ahead=0 threads=1",
    "mesh=2 mesh.load=3 x=5x2:S(0) a=4:- to.x=S(1) state={x:x,a:a,n:1,d:{0:1,p:{}},l:[1,{q:None}]} nested=kept",
    "mesh=3 x=7:S(0) a=3:- state={x:x,d:{a:a,l:[a,2]},n:None} nested=kept files=item",
    "mesh=2 mesh.load=3 x=5x2:S(0) a=4:R to.x=R state={x:x,d:{a:a},n:1} inner=kept",
    "mesh=1 mesh.load=2 x=5x2:S(0) a=4:R:bool state={x:x,a:a,n:1} nested=kept inner=kept dedup=lowest threads=4",
    "mesh=2 mesh.load=3 x=0x3:S(0) a=():R b=2:S(0) files=item threads=4 dedup=balanced",
    "mesh=2 x=5:S(0) a=4:R format=torch_save sync=0",
    "mesh=2 x=5:S(0) format=safetensors",
)
FSSPEC = (
    "mesh=2 mesh.load=3 x=5x2:S(0) a=4:R to.x=S(1) state={x:x,a:a,n:1} through=files threads=2",
    "mesh=3 mesh.load=2 x=7:S(0):int64 a=3:-:bool to.x=R state={x:x,d:{a:a},n:None} through=files id=found",
    'mesh=1 x=5x3:S(0) a=():R:float64 state={x:x,l:[a,(1,2)],b:b"ab"} through=memory',
    "mesh=1 x=5x2:S(0) a=4:-:int32 to.a=S(0) through=memory id=found",
    "mesh=2 x=0x3:S(0) a=2x2:S(1) b=9:R through=files files=item sync=1",
    "mesh=2 mesh.load=3 x=5x2:S(0) a=4:R to.x=S(1) state={x:x,a:a,n:1} through=folder id=found",
)
SAFETENSORS = (
    "mesh=2 mesh.load=3 x=5x6:S(0) a=7:S(0):bfloat16 b=4:R to.x=S(1) to.a=R to.b=S(0) hf=shards",
    "mesh=3 mesh.load=2 x=5x7:S(1):float64 a=8:S(0) to.x=S(0) hf=consolidated",
    "mesh=2x2 mesh.load=2 x=5x6:S(0),S(1) a=7x3:S(0),S(0) b=6:R,S(0) to.x=S(1) to.a=R to.b=S(0) hf=consolidated index=two threads=2",
    "mesh=1 mesh.load=2 x=5x6:- a=7:-:int64 b=():- to.x=S(0) to.a=- hf=whole",
    "mesh=2x2@0,2,1,3 mesh.load=1 x=7x3x2:S(2),S(0) a=3:S(0),R to.x=R to.a=- hf=consolidated",
    "mesh=2 x=5:S(0):int64 a=4:R:bool hf=shards threads=2 index=two",
    "mesh=3 mesh.load=2 x=2x4:S(0) a=0x3:S(0) b=5:S(0) to.x=R hf=shards",
    "mesh=2 x=5x2:S(0) a=4x3:R hf=consolidated",
    "mesh=2 x=5:S(0):int64 hf=consolidated",
    "mesh=2 a=():R x=4:S(0) hf=consolidated",
    "mesh=2 x=5x2:S(0) state={x:x,n:1} hf=shards",
    "mesh=2 x=5x6:S(0):float32:distinct:sliced hf=shards",
    "mesh=2 x=6x4:S(0):float32:distinct:transposed hf=shards",
    "mesh=2 x=5:S(0) hf=consolidated id=given",
)
HF_DTYPES = ("float32", "float64", "bfloat16", "int64", "bool")


def _safetensors_draws(limits: Any) -> Any:
    def extra(draw: Any, names: list[str]) -> dict[str, object]:
        from hypothesis import strategies as st

        how = draw(st.sampled_from(("shards", "consolidated")))
        return {"hf": how, "threads": draw(st.sampled_from((None, 2))), "index": draw(st.sampled_from((None, "two")))}

    fit = replace(limits, dtypes=tuple(name for name in limits.dtypes if name in HF_DTYPES))
    return trips("roundtrip.hugging-face", fit, extra=extra)


LAWS = (
    law_of(
        "options",
        clause="Whatever the options of writer and planner: what is loaded is what was saved.",
        source=f"{DOCS}, FileSystemWriter: sync_files, thread_count, per_thread_copy_ahead; DefaultSavePlanner: flatten_state_dict",
        check=check_options,
        holds="mesh=2 x=5:S(0) a=4:R state={x:x,a:a,d:{n:1}} nested=kept inner=kept sync=1",
        planted="nested_values_forgotten",
        texts=OPTIONS,
        sweeps=len(OPTIONS),
        stages=t.worlds,
        features=of_options,
    ),
    law_of(
        "fsspec",
        clause="A checkpoint through fsspec, in files or in memory, by hand or found by the name of its place, loads as it was saved.",
        source=f"{DOCS}, save: infers the writer from checkpoint_id; FsspecWriter, FsspecReader",
        check=check_fsspec,
        script=fsspec_script,
        holds="mesh=2 x=5:S(0) a=4:R through=files",
        planted="fsspec_forgets_the_end",
        texts=FSSPEC,
        sweeps=len(FSSPEC),
        stages=fsspec_worlds,
        needs=IN_FILES,
        features=lambda case: {f"storage:fsspec-{case.get('through')}"} | ({"checkpoint-id"} if "id" in case else set()),
    ),
    law_of(
        "hugging-face",
        clause="Tensors saved as safetensors, as shards or consolidated, load under any layout as they were saved.",
        source=f"{DOCS}, HuggingFaceStorageWriter: save_distributed, enable_consolidation; StorageWriter.write_data: views and strides",
        check=check_hugging_face,
        script=hugging_script,
        holds="mesh=2 x=5x2:S(0) a=4:R hf=consolidated",
        planted="consolidated_from_the_first_offset",
        texts=SAFETENSORS,
        sweeps=len(SAFETENSORS),
        draw=_safetensors_draws,
        draws=4,
        stages=t.worlds,
        needs=IN_FILES,
        features=of_hugging_face,
    ),
)
