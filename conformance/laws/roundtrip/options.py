"""Laws on the options of writers and planners, and on torch's storages for fsspec and Hugging Face's safetensors."""

from __future__ import annotations

import importlib.util
import json
import os
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Annotated, Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch.distributed.device_mesh import DeviceMesh

from shardlaw.conformance import compat
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Meaningless, Of, Refused, caught
from shardlaw.conformance.law.fields import Folder, Rank, Word
from shardlaw.conformance.law.law import Limits
from shardlaw.conformance.laws.checkpoint.calls import CheckpointFailed, load, save
from shardlaw.conformance.laws.checkpoint.contents import Contents
from shardlaw.conformance.laws.checkpoint.fields import Destination, Newer, Saved, StateField, WriterOptions
from shardlaw.conformance.laws.checkpoint.trip import world_sizes
from shardlaw.conformance.laws.roundtrip.cases import DOCS, NEEDS_FILES, add_load, save_act, trip_law, trips

HF_DTYPES = ("float32", "float64", "bfloat16", "int64", "bool")


def require_package(module: str) -> None:
    """Raise :class:`Meaningless` where a package is not installed."""
    if importlib.util.find_spec(module) is None:
        raise Meaningless(f"{module} is not installed")


def format_features(case: Case) -> set[str]:
    return {"storage:safetensors-in-files"} if case.get("format", "") == "safetensors" else set()


# functions that make a further tensor of a state, of which the memory or the dtype is uncommon
FURTHER: dict[str, Callable[[], torch.Tensor]] = {
    "conjugated": lambda: torch.tensor([1 + 2j, 3 - 4j]).conj(),
    "scales": lambda: torch.tensor([0.5, 4.0]).to(torch.float8_e8m0fnu),
}

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
    "mesh=2x2 mesh.load=2 x=5x6:S(0),S(1) a=7x3:S(0),S(0) b=6:R,S(0) to.x=S(1) to.a=R to.b=S(0) hf=consolidated "
    "index=two threads=2",
    "mesh=1 mesh.load=2 x=5x6:- a=7:-:int64 b=():- to.x=S(0) to.a=- hf=whole",
    "mesh=2x2@0,2,1,3 mesh.load=1 x=7x3x2:S(2),S(0) a=3:S(0),R to.x=R to.a=- hf=consolidated",
    "mesh=2 x=5:S(0):int64 a=4:R:bool hf=shards threads=2 index=two",
    "mesh=3 mesh.load=2 x=2x4:S(0) a=0x3:S(0) b=5:S(0) to.x=R hf=shards",
    "mesh=2 x=5x2:S(0) a=4x3:R hf=consolidated",
    "mesh=2 x=3x4x5:S(1) a=3x2x4x2:S(2) hf=consolidated",
    "mesh=2 x=5:S(0):int64 hf=consolidated",
    "mesh=2 a=():R x=4:S(0) hf=consolidated",
    "mesh=2 x=5x2:S(0) state={x:x,n:1} hf=shards",
    "mesh=2 x=5x6:S(0):float32:distinct:sliced hf=shards",
    "mesh=2 x=6x4:S(0):float32:distinct:transposed hf=shards",
    "mesh=2 x=5:S(0) hf=consolidated id=given",
    "mesh=1 world.save=2 mesh.load=2 x=5x6:R a=7:R:int64 to.x=S(0) to.a=- hf=whole",
    "mesh=2 mesh.load=3 x=5x6:S(0) a=7:S(0):bfloat16 b=4x3:S(1) to.x=S(1) to.b=R hf=together index=two",
    "mesh=3 mesh.load=2 x=5x7:S(1):float64 a=8:S(0) to.x=S(0) hf=together threads=2",
    "mesh=1 world.save=2 mesh.load=2 x=5x6:R a=7:R:int64 b=3:R to.x=S(0) to.a=- hf=whole index=two",
    "mesh=2 x=5x2:S(0) a=4x3:R hf=consolidated index=more",
    "mesh=1 mesh.load=2 x=5x6:- a=7:-:int64 to.x=S(0) to.a=- hf=whole index=more",
    "mesh=2 x=5x2:S(0) a=7:S(0) hf=together index=two group=yes",
    "mesh=2@1,2 world.save=3 mesh.load=2 x=5x2:S(0) a=7:S(0) hf=together index=two group=yes",
    "mesh=2 x=5x6:R a=5x6:R hf=whole",
    "mesh=2 mesh.load=3 x=5x6:R a=7:R:int64 b=5x6:R to.x=S(0) hf=whole index=two",
    "mesh=2 x=4x6:S(1) held=wrapper cut=1@0,2@0,1@1,2@1 hf=shards",
    "mesh=2 x=4x3:S(0) a=4x2:S(0) held=sharded cut=1@0,3@1 to.x=S(1) hf=consolidated",
    "mesh=2 x=6x3:S(0) held=sharded cut=1@0,2@1,3@0 hf=consolidated",
    "mesh=2 mesh.load=3 x=3:S(0):bfloat16 a=5x2:S(0) b=3x5:S(1):float64 to.x=R to.a=S(1) to.b=S(0) hf=consolidated",
    *(f"mesh={mesh} x=2:S(0) hf=shards value={value}" for mesh, value in enumerate(FURTHER, 1)),
)
OVERWRITTEN = (
    "mesh=2 x=5x2:S(0) a=4x3:S(1) hf=shards",
    "mesh=2 mesh.load=3 x=5x2:S(0) a=4x3:S(0):bfloat16 b=7:S(0) to.x=S(1) to.a=R to.b=S(0) hf=consolidated",
    "mesh=1 mesh.load=2 x=5x6:- a=7:-:int64 to.x=S(0) to.a=- hf=whole",
)


options = trip_law(
    "options",
    clause="With any options of writer and planner, a load gives the saved state.",
    source=f"{DOCS}, FileSystemWriter: sync_files, thread_count, per_thread_copy_ahead; DefaultSavePlanner: "
    "flatten_state_dict",
    control="mesh=2 x=5:S(0) a=4:R state={x:x,a:a,d:{n:1}} nested=kept inner=kept sync=1",
    texts=OPTIONS,
    features=format_features,
)(save_act)


@options.due
def _(state, format_: Word = ""):
    if format_ == "safetensors":
        require_package("safetensors")
    return {"source": state}


add_load(options)


def fsspec_worlds(case: Case) -> tuple[int, ...]:
    """The sizes of the worlds; one world where files are in the memory of its process."""
    return (1,) if case.get("through") == "memory" else world_sizes(case)


class InMemoryField(StateField):
    """The destination of a load in the first world; an empty state where only the second world loads."""

    def read(self, case: Case, name: str) -> Contents:
        destination = super().read(case, name)
        return destination if case.get("through") == "memory" else destination.with_tree({})


@trip_law(
    "fsspec",
    source=f"{DOCS}, save: infers the writer from checkpoint_id; FsspecWriter: overwrite, single_file_per_rank; "
    "FsspecReader",
    control="mesh=2 x=5:S(0) a=4:R through=files",
    texts=FSSPEC,
    stages=fsspec_worlds,
    needs=NEEDS_FILES,
    features=lambda case: {f"storage:fsspec-{case.get('through')}"} | ({"checkpoint-id"} if "id" in case else set()),
)
def fsspec(
    state: Saved,
    newer: Newer,
    loaded: Annotated[dict[str, Any], InMemoryField("load", fill="poison")],
    options: WriterOptions,
    folder: Folder,
    through: Word,
    id: Word = "",
):
    """A checkpoint through fsspec, in files or in memory, by a writer and reader or by its checkpoint_id, loads as
    saved; a save over it with overwrite=False is refused on all ranks."""
    urls = {
        "memory": f"memory://{uuid.uuid4().hex}",
        "folder": f"{folder}/through",
        "files": f"file://{folder}/through",
    }
    url = urls[through]
    if id:
        save(state, None, checkpoint_id=url)
    else:
        save(state, compat.fsspec_writer(url, **{"sync_files": False, **options}))
    refused = caught(lambda: save(newer, compat.fsspec_writer(url, sync_files=False, overwrite=False)))
    if through == "memory":
        load(loaded, None if id else compat.fsspec_reader(url), **({"checkpoint_id": url} if id else {}))
    return {"save over it": refused, "loaded": loaded}


@fsspec.due
def _(loaded):
    require_package("fsspec")
    return {"save over it": Refused((CheckpointFailed,)), "loaded": loaded}


@fsspec.then
def _(state: Destination, folder: Folder, through: Word, id: Word = "", files: Word = "rank"):
    url = f"{'file://' if through == 'files' else ''}{folder}/through"
    paths = [info.relative_path for info in compat.fsspec_reader(url).read_metadata().storage_data.values()]
    return {
        "loaded": load(state, None if id else compat.fsspec_reader(url), **({"checkpoint_id": url} if id else {})),
        "a file for each item": files != "item" or len({*paths}) == len(paths),
    }


@fsspec.due
def _(state):
    return {"loaded": state, "a file for each item": Of(True, "wrong-layout")}


def draw_safetensors(limits: Limits) -> SearchStrategy[Case]:
    def extra(draw: st.DrawFn, names: list[str]) -> dict[str, object]:
        mode = draw(st.sampled_from(("shards", "consolidated")))
        return {"hf": mode, "threads": draw(st.sampled_from((None, 2))), "index": draw(st.sampled_from((None, "two")))}

    supported = replace(limits, dtypes=tuple(name for name in limits.dtypes if name in HF_DTYPES))
    return trips(supported, extra=extra)


def hf_features(case: Case) -> set[str]:
    mode = "consolidated" if case.get("hf") == "together" else case.get("hf")
    return {f"storage:safetensors-{mode}"} | ({"checkpoint-id"} if "id" in case else set())


def file_numbers(names: Iterable[str]) -> dict[str, int]:
    """The number of the file of each tensor, where there are two."""
    return {name: at % 2 + 1 for at, name in enumerate(names)}


def hf_options(hf: str, numbers: Mapping[str, int]) -> dict[str, Any]:
    """Options of a writer of safetensors: its mode ``hf``, and the numbers of files where ``numbers`` is not empty."""
    options: dict[str, Any] = {"save_distributed": hf != "whole", "enable_consolidation": hf == "consolidated"}
    return options | ({"fqn_to_index_mapping": dict(numbers)} if numbers else {})


@trip_law(
    "hugging-face",
    source=f"{DOCS}, HuggingFaceStorageWriter: save_distributed, enable_consolidation; "
    "consolidate_safetensors_files_on_every_rank; StorageWriter.write_data: views and strides",
    control="mesh=2 x=5x2:S(0) a=4:R hf=consolidated",
    texts=SAFETENSORS,
    draw=draw_safetensors,
    draws=4,
    needs=NEEDS_FILES,
    features=hf_features,
)
def hugging_face(
    state: Saved,
    mesh: DeviceMesh,
    rank: Rank,
    folder: Folder,
    hf: Word,
    threads: int = 0,
    index: Word = "",
    id: Word = "",
    group: bool = False,
    value: Word = "",
):
    """Tensors saved as safetensors, as shards or consolidated by one rank, all or a group, load into any layout as
    saved."""
    numbers = file_numbers(state) if index else dict.fromkeys(state, 1)
    # an index of a model names tensors that a state may lack, such as the second name of a tied parameter
    if value:
        state["value"] = FURTHER[value]()
    options = hf_options(hf, numbers | {"not.saved": 1} if index == "more" else numbers if index else {})
    if threads:
        options |= {"thread_count": threads, "thread_count_consolidation": threads}
    path = f"{folder}/made" if id else f"{folder}/sharded" if hf == "together" else folder
    save(state, compat.HuggingFaceStorageWriter(path, **options), **({"checkpoint_id": folder} if id else {}))
    process_group = mesh.get_group(0) if group and mesh.get_coordinate() is not None else None
    if hf == "together" and (process_group is not None or not group):
        compat.consolidate_on_every_rank(path, folder, numbers, threads or 1, process_group)
    index_path = f"{folder}/model.safetensors.index.json"
    if hf == "shards" or rank != (int(mesh.mesh.min()) if group else 0):
        return {"in the index": [], "files": [], "bytes in the index": 0, "files that are not there": []}
    if not os.path.exists(index_path):
        return {"in the index": "no model.safetensors.index.json"}
    with open(index_path) as file:
        content = json.load(file)
    files = content["weight_map"]
    return {
        "in the index": sorted(files),
        "files": sorted({*files.values()}),
        "bytes in the index": content["metadata"]["total_size"],
        "files that are not there": [name for name in files.values() if not os.path.exists(f"{folder}/{name}")],
    }


@hugging_face.due
def _(state: Contents, rank: Rank, hf, index, group):
    require_package("safetensors")
    first = min(state.end.mesh.ranks) if group else 0
    names = sorted(state.trip.values) if hf != "shards" and rank == first else []
    count = min(len(names), 2 if index else 1)
    return {
        "in the index": Of(names),
        "files": Of([f"model-{at:05}-of-{count:05}.safetensors" for at in range(1, count + 1)]),
        "bytes in the index": Of(sum(state.full(name).nbytes for name in names)),
        "files that are not there": Of([]),
    }


@hugging_face.then
def _(
    state: Destination,
    second: Destination,
    folder: Folder,
    hf: Word,
    threads: int = 1,
    id: Word = "",
    value: Word = "",
):
    loaded: dict[str, Any] = {}
    if value:
        state["value"] = torch.zeros_like(FURTHER[value]())
    if hf in ("consolidated", "together") and not id:
        loaded["shards"] = load(second, compat.HuggingFaceStorageReader(f"{folder}/sharded", thread_count=threads))
    load(state, compat.HuggingFaceStorageReader(folder, thread_count=threads))
    if value:
        loaded["value"] = state.pop("value")
    return {**loaded, hf: state}


@hugging_face.due
def _(state, hf, id, value):
    both = hf in ("consolidated", "together") and not id
    further = {"value": FURTHER[value]().clone()} if value else {}
    return further | ({"shards": state, hf: state} if both else {hf: state})


def save_safetensors(state: dict[str, Any], folder: str, hf: str, in_two: bool) -> None:
    """Save a state as safetensors, in two files or in one."""
    save(state, compat.HuggingFaceStorageWriter(folder, **hf_options(hf, file_numbers(state) if in_two else {})))


@trip_law(
    "hugging-face-anew",
    source=f"{DOCS}, HuggingFaceStorageWriter: path; FileSystemWriter: overwrite, which is so by default",
    control="mesh=2 x=5x2:S(0) hf=consolidated",
    texts=OVERWRITTEN,
    needs=NEEDS_FILES,
    features=hf_features,
)
def hf_overwrite(
    state: Saved, older: Annotated[dict[str, Any], StateField("save", fill="poison")], folder: Folder, hf: Word
):
    """Tensors saved as safetensors over older ones, into more or fewer files, load as the new ones."""
    save_safetensors(older, f"{folder}/fewer", hf, in_two=True)
    save_safetensors(state, f"{folder}/fewer", hf, in_two=False)
    save_safetensors(older, f"{folder}/more", hf, in_two=True)
    save_safetensors(older, f"{folder}/more", hf, in_two=False)
    save_safetensors(state, f"{folder}/more", hf, in_two=True)
    return {"source": state}


@hf_overwrite.due
def _(state):
    require_package("safetensors")
    return {"source": state}


@hf_overwrite.then
def _(state: Destination, second: Destination, folder: Folder):
    return {
        "in fewer files": load(state, compat.HuggingFaceStorageReader(f"{folder}/fewer")),
        "in more files": load(second, compat.HuggingFaceStorageReader(f"{folder}/more")),
    }


@hf_overwrite.due
def _(state):
    return {"in fewer files": state, "in more files": state}


LAWS = (options,)
