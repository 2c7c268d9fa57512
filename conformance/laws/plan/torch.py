"""Between torch's plans of checkpoints and the reference's: items, metadata, and meshes as any rank sees them.

A plan is made by every rank for itself and then by one of them for all, and none of it communicates. So one process plays all ranks:
it seats itself at each place of a mesh in turn (:func:`seated`), and hands the plans on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.metadata import Metadata as TorchMetadata
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan, TensorWriteData, WriteItemType
from torch.distributed.checkpoint.planner import WriteItem as TorchItem
from torch.distributed.tensor import DTensor

from conformance import compat
from reference.box import Box
from reference.checkpoint.save_plan import Metadata, Plan, TensorEntry, WriteItem
from reference.checkpoint.state_dict import Slot, State, mapped
from reference.layout import Layout
from reference.mesh import Mesh
from reference.tensors import DTYPES, TensorSpec

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from conformance.here import Here

NAMES = {dtype: name for name, dtype in DTYPES.items()}
PLACES = 256
_SEATED: dict[tuple[str, Mesh, int], DeviceMesh] = {}


def need(here: Here, *keys: str) -> list[Any]:
    """Private names of torch; where one is gone, the case is given up, and with all cases the law."""
    try:
        return [compat.name(key) for key in keys]
    except compat.TorchMovedError as moved:
        here.reject(str(moved))
        raise


def seated(here: Here, mesh: Mesh, rank: int) -> DeviceMesh:
    """The mesh as ``rank`` sees it."""
    key = (here.device.type, mesh, rank)
    if key not in _SEATED:
        if len(_SEATED) >= PLACES:
            _SEATED.clear()
        try:
            _SEATED[key] = compat.seated_mesh(here.device.type, torch.tensor(mesh.ranks).reshape(mesh.shape), rank)
        except compat.TorchMovedError as moved:
            here.reject(str(moved))
    return _SEATED[key]


def placed(here: Here, spec: TensorSpec, mesh: Mesh, rank: int) -> torch.Tensor:
    """What ``rank`` holds of a tensor of zeros: a DTensor, or a plain tensor where it has no placements."""
    if spec.placements is None:
        return torch.zeros(spec.shape, dtype=spec.torch_dtype)
    layout, coord = Layout(spec.shape, mesh, spec.placements), mesh.coord(rank)
    local = torch.zeros(layout.local_shape(coord) if coord is not None else (0,) * len(spec.shape), dtype=spec.torch_dtype)
    stride = torch.empty(spec.shape, device="meta").stride()
    live, given = seated(here, mesh, rank), here.placements(spec.placements)
    if not spec.shape:  # an explicit shape without dims counts as none
        return DTensor.from_local(local, live, given, run_check=False)
    return DTensor.from_local(local, live, given, run_check=False, shape=torch.Size(spec.shape), stride=stride)


def filled(state: State, tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """A state with its tensors in their places."""
    made: dict[str, Any] = mapped(state, lambda leaf: tensors[leaf.name] if isinstance(leaf, Slot) else leaf)
    return made


# to torch


def chunk(box: Box) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.size))


def item(of: WriteItem, hint: int | None = None) -> TorchItem:
    if of.box is None:
        return TorchItem(MetadataIndex(of.name, index=hint), WriteItemType.BYTE_IO)
    data = TensorWriteData(chunk(of.box), TensorProperties(DTYPES[of.dtype]), torch.Size(of.shape))
    kind = WriteItemType.TENSOR if of.replica else WriteItemType.SHARD
    return TorchItem(MetadataIndex(of.name, of.box.offset, hint), kind, tensor_data=data)


def save_plans(plans: Iterable[Plan]) -> list[SavePlan]:
    """Local plans as ranks send them, each leaf with its name as its path."""
    return [SavePlan([item(of) for of in plan], planner_data={of.name: (of.name,) for of in plan}) for plan in plans]


def entry(of: TensorEntry) -> TensorStorageMetadata:
    return TensorStorageMetadata(TensorProperties(DTYPES[of.dtype]), torch.Size(of.shape), [chunk(box) for box in of.chunks])


def metadata(of: Metadata) -> TorchMetadata:
    return TorchMetadata({name: BytesStorageMetadata() if known is None else entry(known) for name, known in of.entries.items()})


# from torch


def box(of: ChunkStorageMetadata) -> Box:
    return Box(tuple(of.offsets), tuple(of.sizes))


def read(of: TorchItem) -> WriteItem:
    """An item as the reference's. One whose index and box disagree raises ``ValueError``."""
    if of.type == WriteItemType.BYTE_IO or of.tensor_data is None:
        return WriteItem(of.index.fqn, replica=True)
    part = box(of.tensor_data.chunk)
    if of.index.offset is None or tuple(of.index.offset) != part.offset:
        raise ValueError(f"the index of {of.index.fqn} says {of.index.offset}, its chunk begins at {part.offset}")
    dtype = NAMES.get(of.tensor_data.properties.dtype, str(of.tensor_data.properties.dtype))
    return WriteItem(of.index.fqn, part, tuple(of.tensor_data.size), dtype, replica=of.type == WriteItemType.TENSOR)


def read_metadata(of: TorchMetadata) -> Metadata:
    """Metadata as the reference's."""
    entries: dict[str, TensorEntry | None] = {}
    for name, known in of.state_dict_metadata.items():
        if isinstance(known, TensorStorageMetadata):
            dtype = NAMES.get(known.properties.dtype, str(known.properties.dtype))
            entries[name] = TensorEntry(tuple(known.size), tuple(map(box, known.chunks)), dtype)
        else:
            entries[name] = None
    return Metadata(entries)


# what is asked of torch


def local_plan(state: Mapping[str, Any], *, coordinator: bool = False, planner: DefaultSavePlanner | None = None) -> SavePlan:
    """The plan of one rank for its state."""
    planner = planner or DefaultSavePlanner()
    planner.set_up_planner(dict(state), is_coordinator=coordinator)
    return planner.create_local_plan()


def global_plan(plans: Sequence[SavePlan], *, lowest: bool = False) -> tuple[list[SavePlan], TorchMetadata]:
    """The plan of all ranks, as the coordinator makes it, with the metadata."""
    planner = DefaultSavePlanner(dedup_save_to_lowest_rank=lowest)
    planner.set_up_planner({}, is_coordinator=True)
    return planner.create_global_plan(list(plans))


def load_plan(state: Mapping[str, Any], saved: TorchMetadata, *, partial: bool = False) -> LoadPlan:
    """What one rank is to read for its state."""
    planner = DefaultLoadPlanner(allow_partial_load=partial)
    planner.set_up_planner(dict(state), saved)
    return planner.create_local_plan()
