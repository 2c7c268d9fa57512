"""Laws on checkpoints saved with one layout in one world, and loaded with another layout in a world of another size.

Every case runs in two worlds, one after the other, that share only a folder. The destination is poisoned before the
load, and compared bit by bit on every rank. :mod:`shardlaw.conformance.laws.checkpoint.trip` reads a case, and
:mod:`shardlaw.conformance.laws.checkpoint.fields` builds its states.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch.distributed import checkpoint as dcp
from torch.distributed.tensor import DTensor

from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Either, Of
from shardlaw.conformance.law.features.feature_lines import LINES
from shardlaw.conformance.law.fields import Folder, Placements, WordField
from shardlaw.conformance.law.law import Limits
from shardlaw.conformance.laws.checkpoint.calls import caught_failure, load, save, wait_for_save
from shardlaw.conformance.laws.checkpoint.fields import Destination, InFiles, Reader, Saved, StateField, Writer
from shardlaw.conformance.laws.checkpoint.trip import world_sizes
from shardlaw.conformance.laws.roundtrip.cases import (
    DOCS,
    add_load,
    after_save,
    due_loaded,
    due_source,
    round_trip,
    save_only,
    trip_law,
    trips,
)
from shardlaw.conformance.laws.roundtrip.saves import make_stager

LAYOUTS = (
    "mesh=2 mesh.load=3 x=5x6:S(0) to.x=S(1) a=7:S(0):int64 to.a=S(0) b=():R:float64 to.b=R c=4x3:S(1):bool to.c=R "
    "seed=1",
    "mesh=3 mesh.load=2 x=2x5:S(0):int32 to.x=S(1) a=5:S(0):bfloat16 to.a=R b=1:S(0) to.b=S(0) c=0x3:S(1) to.c=S(0) "
    "seed=2",
    "mesh=2x2 mesh.load=2 x=5x6:S(0),S(1) to.x=S(0) a=7x3:S(0),S(0):uint8 to.a=S(1) b=6:R,S(0):bool to.b=S(0) seed=3",
    "mesh=2x2@0,2,1,3 mesh.load=3@2,0,1 x=5x7:S(1),R to.x=S(0) a=9:S(0),S(0):float64 to.a=S(0) b=3x3:S(1),S(0) "
    "to.b=R seed=4",
    "mesh=2@1,2 mesh.load=2x1@1,0 x=7x2:S(0):int64 to.x=S(0),S(1) a=3:R to.a=S(0),R b=5x3:S(1) to.b=R,S(0) seed=5",
    "mesh=1 mesh.load=2x2 x=6x5:S(0) to.x=S(1),S(0) a=8:R:bfloat16 to.a=S(0),S(0) b=3x2x5:S(2) to.b=S(2),S(1) seed=6",
    "mesh=1x3 mesh.load=2@0,2 x=4x7:R,S(1):float64 to.x=S(1) a=7x3:S(1),S(0):int32 to.a=S(0) b=2:R,S(0):uint8 to.b=R "
    "seed=7",
    "mesh=2x2 mesh.load=1 x=9x2:_S(0,2),S(0) to.x=R a=8x3:_S(0,2),S(0):int64 to.a=S(0) b=7:S(0),S(0) to.b=S(0) seed=8",
    "mesh=2 mesh.load=2x2 x=8x3:S(0) to.x=_S(0,2),S(0) a=12:R:int32 to.a=_S(0,2),S(0) seed=9",
    "mesh=4 mesh.load=3@2,0,1 x=13x3:S(0) to.x=S(0) a=3x11:S(1):int32 to.a=S(1) b=2x2:S(0) to.b=S(1)",
)
PLAIN = (
    "mesh=2 mesh.load=3 x=5x2:- to.x=S(0) a=4:R:int64 to.a=- b=3x3:S(1):bool to.b=- c=():-:float64 to.c=R",
    "mesh=3 mesh.load=2 x=7:S(0) to.x=- a=2x5:-:int32 to.a=S(1) b=0x2:- to.b=S(1) c=6:-:bfloat16 to.c=-",
    "mesh=2x2 mesh.load=1 x=5x3:S(0),S(1) to.x=- a=7:S(0),S(0):uint8 to.a=- b=3:- to.b=R",
    "mesh=2@0,2 mesh.load=2@1,2 x=5:- to.x=S(0) a=4x3:S(1) to.a=- b=():R to.b=-",
)
STRIDED = (
    "mesh=2 x=5:R to.x=_S(0,2)",
    "mesh=2 x=8x3:S(0) to.x=_S(0,2)",
    "mesh=2 x=8:_S(0,2) to.x=R",
    "mesh=2x2 mesh.load=2 x=12:_S(0,2),S(0) to.x=_S(0,3)",
    "mesh=2x2 mesh.load=2 x=7:_S(0,2),S(0) to.x=S(0)",
    "mesh=2x2 mesh.load=1 x=5x6:_S(1,2),S(0) to.x=R",
)
DTYPES = (
    "mesh=2 mesh.load=3 x=5x2:S(0) a=4:R dtype=int64",
    "mesh=2 x=5x2:S(0):int64 a=4:-:int32 dtype=float32 to.x=S(1)",
    "mesh=3 mesh.load=2 x=7:S(0) a=3x3:S(1):float64 dtype=bfloat16",
    "mesh=2 x=5:S(0):bfloat16 a=6:R:uint8 dtype=float64 to.x=R",
    "mesh=2 x=5:S(0):bool a=6:R:bool dtype=int32",
)
VIEWS = (
    "mesh=2 mesh.load=3 x=5x6:S(0):float32:distinct:sliced a=4x3:-:int64:distinct:transposed memory=sliced",
    "mesh=2 x=4x6:S(1):int32:distinct:transposed to.x=S(0) a=7:S(0):bool:distinct:sliced memory=transposed",
    "mesh=3 mesh.load=2 x=5x4:R:float64:distinct:expanded a=3x2x4:S(2):float32:distinct:sliced memory=sliced",
    "mesh=2 x=5x6:-:float32:distinct:sliced to.x=S(0) a=6:S(0):float32:distinct:expanded to.a=- memory=sliced",
    "mesh=2 x=64x64:S(0):float64:distinct:sliced a=999:-:int64:distinct:sliced to.x=S(1) memory=transposed",
)
MAX_OVERHEAD = 4096  # bytes of a stored tensor beyond its elements
# integers whose bits are reinterpreted as floats: NaN of any payload and zeros of both signs among them
BITS = (
    "mesh=2 mesh.load=3 x=9x3:S(0):int32:edges to.x=S(1) a=5:R:int32:wide as=float32",
    "mesh=2 x=13:S(0):int16:edges a=4x3:-:int16:wide as=float16",
    "mesh=3 mesh.load=2 x=9x2:S(0):int16:edges to.x=R as=bfloat16",
    "mesh=2 mesh.load=1 x=15:S(0):int8:wide a=9:R:int8:edges as=float8_e4m3fn",
    "mesh=2 x=9x2:S(1):int64:edges a=7:S(0):int64:wide to.a=R as=complex64",
    "mesh=2 x=9x2:S(0):int64:edges to.x=S(1) as=float64",
    "mesh=2 mesh.load=3 x=13:S(0):complex128:edges to.x=R as=complex128",
)
# dtypes of tensors, and the dtypes as which their bits are saved
REINTERPRETED = (
    ("int16", "float16"),
    ("int8", "float8_e4m3fn"),
    ("int64", "complex64"),
    ("complex128", "complex128"),
)
BITS_BY_LAYOUT = (
    "mesh=3 mesh.load=2x2 x=7x5:S(1):{of}:edges a=13:S(0):{of}:wide to.x=S(0),S(1) to.a=R,S(0)",
    "mesh=2x2@0,2,1,3 mesh.load=1 x=5x6:S(0),S(1):{of}:edges a=():R,R:{of} to.x=R to.a=-",
    "mesh=2@0,2 mesh.load=2 x=9:S(0):{of}:edges a=0x3:S(1):{of}",
    "mesh=2 x=5x6:S(0):{of}:edges:sliced a=4x3:-:{of}:wide:transposed memory=sliced",
    "mesh=1x3 mesh.load=2@1,0 x=4x7:R,S(1):{of}:edges a=2:R,S(0):{of} to.x=S(0) to.a=S(0)",
    "mesh=2 mesh.load=3 x=1x9:S(0):{of}:edges a=3x2x5:S(2):{of}:wide to.x=S(1) to.a=S(0)",
    "mesh=2x2x2 mesh.load=2 x=5x6x3:S(0),S(1),S(2):{of}:edges a=9:S(0),S(0),S(0):{of}:wide to.x=S(1) to.a=R",
    "mesh=2 mesh.load=2x2x2 x=4x7:S(0):{of}:edges a=3x3:-:{of}:wide to.x=S(1),S(0),S(1) to.a=R,S(0),R",
    "mesh=2x2x2@7,3,5,1,6,2,4,0 mesh.load=5 x=6x4:S(1),R,S(0):{of}:edges a=9:S(0),S(0),R:{of}:wide to.x=S(0) to.a=S(0)",
)
ALL_BITS = BITS + tuple(f"{line.format(of=of)} as={as_}" for of, as_ in REINTERPRETED for line in BITS_BY_LAYOUT)
META = (
    "mesh=2 mesh.load=3 x=5x6:S(0) to.x=S(1) a=7:S(0):int64 to.a=S(0) b=():R:float64 to.b=R",
    "mesh=2x2 mesh.load=2 x=5x3:S(0),S(1) to.x=S(0) a=4:-:bool to.a=- b=3:R,R:bfloat16 to.b=S(0)",
    "mesh=3 mesh.load=2x2 x=7x3:S(0) to.x=S(0),S(0) a=5:R to.a=R,S(0) state={d:{x:x,l:[a,1]}}",
    "mesh=2 mesh.load=2@0,2 x=5:S(0) to.x=S(0)",
)
UNFINISHED = (
    "mesh=2 x=4x6:S(0) via=S(1) to.x=S(0)",
    "mesh=2 mesh.load=3 x=5x6:S(0) via=R to.x=S(1)",
    "mesh=2x2 mesh.load=2 x=4x6:S(0),R:int64 via=S(0),S(1) to.x=R a=5x2:S(0),S(0) to.a=S(0)",
    "mesh=3 x=7:S(0):float64 via=R to.x=-",
    "mesh=2 x=4x6:S(0) via=S(1) to.x=S(0) async=writer",
    "mesh=2 mesh.load=3 x=5x6:S(0) via=R to.x=S(1) async=writer",
    "mesh=2 mesh.load=3 x=5x6:S(0) via=R to.x=S(1) async=stager",
)


def draw_strided(limits: Limits) -> SearchStrategy[Case]:
    return trips(limits, tensors=1, kinds=("R", "S", "_S"), plain=False)


@save_only
@trip_law(
    "strided",
    source="torch.distributed.tensor docs, _StridedShard; LoadPlan: read items cover the destination",
    control="mesh=2x2 mesh.load=2 x=8:_S(0,2),S(0) to.x=S(0)",
    texts=STRIDED,
    draw=draw_strided,
    draws=4,
)
def strided(state: Saved, writer: Writer, folder: Folder):
    """A DTensor with a strided shard is loaded with the saved elements, or refused on all ranks."""
    if caught_failure(lambda: save(state, writer(folder))):
        open(os.path.join(folder, "refused"), "w").close()
    return {}


@strided.then
def _(state: Destination, reader: Reader, folder: Folder):
    refused = os.path.exists(os.path.join(folder, "refused")) or caught_failure(lambda: load(state, reader(folder)))
    return {"loaded": "refused" if refused else state}


@strided.due
def _(state):
    return {"loaded": Either((state, Of("refused")))}


@add_load
@save_only
@trip_law(
    "unfinished",
    source="torch.distributed.tensor docs, DTensor.redistribute: async_op; torch.distributed.checkpoint docs, save",
    control=UNFINISHED[0],
    texts=UNFINISHED,
)
def unfinished(
    state: Saved, via: Placements, writer: Writer, folder: Folder, async_: Literal["writer", "stager"] | None = None
):
    """What is loaded of DTensors that were saved while their redistribution was not waited for has their elements."""
    tensors = {key: value for key, value in state.items() if isinstance(value, DTensor)}
    moved = state | {key: x.redistribute(placements=via, async_op=True) for key, x in tensors.items()}
    for key in tensors:  # what a copy finds in memory that is used again must not be the elements by chance
        _ = torch.full(moved[key].to_local().shape, 99, dtype=moved[key].dtype)
    if async_:
        wait_for_save(dcp.async_save(moved, storage_writer=writer(folder), async_stager=make_stager(async_)))
    else:
        save(moved, writer(folder))
    return {}


def draw_views(limits: Limits) -> SearchStrategy[Case]:
    def extra(draw: st.DrawFn, names: list[str]) -> dict[str, object]:
        return {"memory": draw(st.sampled_from(("sliced", "transposed")))}

    return trips(limits, tensors=2, memories=("sliced", "transposed", "expanded", "plain"), extra=extra)


def gap_elements(tensor: torch.Tensor) -> torch.Tensor:
    """The elements in the storage of a tensor, or of its local tensor, that are not elements of the tensor."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    memory = torch.empty(0, dtype=local.dtype, device=local.device).set_(local.untyped_storage())
    own = torch.arange(len(memory)).as_strided(local.shape, local.stride(), local.storage_offset()).flatten()
    in_gaps = torch.ones(len(memory), dtype=torch.bool)
    in_gaps[own] = False
    return memory[in_gaps.to(local.device)]


def oversized_tensors(metadata: Any) -> list[str]:
    """The tensors of which a stored chunk is larger than its elements and :data:`MAX_OVERHEAD`."""
    names = []
    for index, info in metadata.storage_data.items():
        leaf = metadata.state_dict_metadata[index.fqn]
        sizes = [chunk.sizes.numel() for chunk in leaf.chunks if chunk.offsets == index.offset]
        if info.length > max(sizes) * leaf.properties.dtype.itemsize + MAX_OVERHEAD:
            names.append(index.fqn)
    return sorted(names)


@after_save(
    "views",
    source=f"{DOCS}, StorageWriter.write_data: of a view only the projection is saved; tensors need not be contiguous",
    control="mesh=2 x=5x6:S(0):float32:distinct:sliced memory=sliced",
    texts=VIEWS,
    draw=draw_views,
    draws=6,
)
def views(state: Destination, reader: Reader, in_files: InFiles, folder: Folder):
    """Tensors that are not contiguous are saved without the memory between their elements, and loaded in place; that
    memory does not change."""
    before = {name: (tensor, gap_elements(tensor)) for name, tensor in state.items()}
    load(state, reader(folder))
    others = [name for name, (tensor, _) in before.items() if state[name] is not tensor]
    overwritten = [name for name, (tensor, memory) in before.items() if not torch.equal(gap_elements(tensor), memory)]
    larger = oversized_tensors(reader(folder).read_metadata()) if in_files else []
    return {
        "loaded": state,
        "other tensors": others,
        "changed between the elements": overwritten,
        "stored with more": larger,
    }


@views.due
def _(state):
    return {
        "loaded": state,
        "other tensors": Of([]),
        "changed between the elements": [],
        "stored with more": Of([]),
    }


@after_save(
    "meta",
    source=f"{DOCS}, load; DefaultLoadPlanner.set_up_planner initialises meta tensors",
    control="mesh=2 x=5x2:S(0)",
    texts=META,
)
def meta(state: Annotated[dict[str, Any], StateField("load", fill="meta")], reader: Reader, folder: Folder):
    """A destination on the meta device gets memory and the saved elements, and keeps its layout and strides."""
    before = list_strides(state)
    loaded = load(state, reader(folder))
    return {"loaded": loaded, "strides as before": list_strides(loaded) == before}


def list_strides(value: Any) -> list[tuple[int, ...]]:
    """The strides of the tensors in a state."""
    if isinstance(value, torch.Tensor):
        return [value.stride()]
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [stride for entry in inside for stride in list_strides(entry)]


@meta.due
def _(state):
    return {"loaded": state, "strides as before": Of(True)}


def sweep_bits(limits: Limits) -> Sequence[Case]:
    """All cases that have few enough ranks: a checkpoint needs no backend that supports the dtype."""
    return [case for text in ALL_BITS if max(world_sizes(case := Case.parse(f"- {text}"))) <= limits.most]


def view_as(state, dtype):
    """The same tensors viewed as another dtype, in the same memory."""

    def view(value):
        if not isinstance(value, DTensor):
            return value.view(dtype)
        options: dict[str, Any] = {"run_check": False, "shape": value.shape, "stride": value.stride()}
        return DTensor.from_local(value.to_local().view(dtype), value.device_mesh, value.placements, **options)

    return {key: view(value) for key, value in state.items()}


FLOATS = ("float32", "float16", "bfloat16", "float8_e4m3fn", "complex64", "float64", "complex128")
AsDtype = Annotated[Any, WordField(FLOATS)]


@trip_law(
    "bits",
    source=f"{DOCS}: a checkpoint holds what was saved",
    control="mesh=2 x=13:S(0):int16:edges as=float16",
    texts=ALL_BITS,
    sweep=sweep_bits,
    features=lambda case: {"nan"} | ({f"dtype:{case.get('as')}"} & {*LINES["dtypes"]}),
)
def bits(state: Saved, as_: AsDtype, writer: Writer, folder: Folder):
    """A load gives every bit that was saved, of every dtype: any NaN, zeros of both signs, denormals."""
    save(view_as(state, getattr(torch, as_)), writer(folder))
    return {"source": state}


bits.due(due_source)


@bits.then
def _(state: Destination, as_: AsDtype, reader: Reader, folder: Folder):
    load(view_as(state, getattr(torch, as_)), reader(folder))
    return {"loaded": state}


bits.due(due_loaded)


LAWS = (
    round_trip(
        "dtensor",
        clause="A DTensor saved with one layout has the same bits when it is loaded with another layout in another "
        "world.",
        source=f"{DOCS}: load-time resharding, which enables saving in one cluster topology and loading into another",
        control="mesh=2 mesh.load=3 x=5x6:S(0) to.x=S(1) a=7:S(0):int64 to.a=S(0)",
        texts=LAYOUTS,
        sweeps=8,
        draw=lambda limits: trips(limits, plain=False),
        draws=24,
        weight=3.0,
    ),
    round_trip(
        "plain",
        clause="A saved plain tensor loads into a DTensor of any layout, and a saved DTensor into a plain tensor.",
        source=f"{DOCS}, load: regular tensors, DTensor, ShardedTensor",
        control="mesh=2 x=5x2:- to.x=S(0) a=4:S(0) to.a=-",
        texts=PLAIN,
        draw=trips,
        draws=6,
    ),
    round_trip(
        "dtype",
        clause="A load converts the saved elements to the dtype of the destination.",
        source=f"{DOCS}, LoadPlanner.commit_tensor: the loaded tensor is copied into the destination",
        control="mesh=2 x=5:S(0) dtype=int64",
        texts=DTYPES,
        sweeps=4,
    ),
)
