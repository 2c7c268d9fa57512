"""torch-checkpointing behind the storage interface of ``torch.distributed.checkpoint``, so that the laws of checkpoints can be tried on it.

The engine takes whole states and has metadata and a resharder of its own. So of a plan nothing is used here but the values to load: every
rank hands the state that the planner was set up with, flat, to the engine to save, or to load into. ``save`` and ``load`` of torch
still plan and check names, sizes and kinds; where data lie, which ranks read what of them, and how they come into another layout is
the engine's. The metadata of torch, which a load asks for first, are one more file in the engine's folder.
"""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future
from torch_checkpointing import (
    CheckpointBase,
    CheckpointItem,
    CheckpointLoader,
    CheckpointReader,
    DefaultMetadataManager,
    SyncCheckpointSaverConfig,
    make_sync_checkpoint_saver,
)
from torch_checkpointing.default_resharder import DefaultResharder
from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig
from torch_checkpointing.types import RankInfo

Id = str | os.PathLike[str]
ITEM = "state"
METADATA = "torch.metadata"


def done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


class State(CheckpointBase):
    """A state as the engine takes it: one item, which may be resharded."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def get_items(self) -> dict[str, CheckpointItem]:
        return {ITEM: CheckpointItem(self.state, resharder=DefaultResharder())}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self.state = state_dict[ITEM]


class OnAnyDevice(DefaultMetadataManager):
    """The engine's own metadata, gathered as objects: 0.1.1 gathers them on CUDA, whatever device the tensors are on."""

    def _all_gather_pickled_data(self, data: Any, process_group: Any = None) -> dict[int, Any]:
        gathered: list[Any] = [None] * dist.get_world_size(process_group)
        dist.all_gather_object(gathered, data, group=process_group)
        return dict(enumerate(gathered))


class Engine:
    """Where a checkpoint lies, and what saves and loads there. ``direct``, ``strict``, ``mmap``: options of the engine."""

    def __init__(self, path: Id, *, direct: bool = False, strict: bool = True, mmap: bool = True) -> None:
        self.folder, self.strict, self.mmap = Path(path), strict, mmap
        self.files = LocalFileSystemStorageConfig(use_direct_io=direct)
        there = dist.is_initialized()
        rank, world = (dist.get_rank(), dist.get_world_size()) if there else (0, 1)
        self.rank = RankInfo(global_rank=rank, global_world_size=world, role_rank=rank, role_world_size=world)

    def save(self, state: dict[str, Any]) -> None:
        metadata = OnAnyDevice(self.rank, enable_serialization=False)
        config = SyncCheckpointSaverConfig()
        saver = make_sync_checkpoint_saver(config, self.rank, storage_config=self.files, checkpoint_metadata_manager=metadata)
        with closing(metadata), closing(saver):
            saver.save(str(self.folder), State(state))

    def load(self, state: dict[str, Any]) -> dict[str, Any]:
        """Into the tensors in place; all values by their names."""
        metadata = OnAnyDevice(self.rank)
        reader = CheckpointReader(self.rank, self.files, not self.mmap)
        wanted = State(state)
        with closing(metadata), closing(CheckpointLoader(reader, metadata)) as loader:
            loader.load(self.folder, wanted, strict=self.strict)
        return wanted.state

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Id) -> bool:
        return "://" not in os.fspath(checkpoint_id)

    def reset(self, checkpoint_id: Id | None = None) -> None:
        self.folder = self.folder if checkpoint_id is None else Path(checkpoint_id)

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        return plans

    def set_up(self, *args: Any, **options: Any) -> None:
        """There is nothing to prepare: a manager is made for each call."""


class Writer(Engine, StorageWriter):
    """A ``StorageWriter``: each rank hands its state to the engine where it is to write its data."""

    set_up_storage_writer = Engine.set_up

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        self.save(planner.state_dict)  # type: ignore[attr-defined]
        return done([])

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        metadata.storage_data = {}
        (self.folder / METADATA).write_bytes(pickle.dumps(metadata))


class Reader(Engine, StorageReader):
    """A ``StorageReader``: each rank has the engine fill its state where it is to read its data."""

    set_up_storage_reader = Engine.set_up

    def read_metadata(self, *args: Any, **options: Any) -> Metadata:
        metadata: Metadata = pickle.loads((self.folder / METADATA).read_bytes())
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        loaded = self.load(planner.state_dict)  # type: ignore[attr-defined]
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                stream = io.BytesIO()
                torch.save(loaded[item.storage_index.fqn], stream)
                stream.seek(0)
                planner.load_bytes(item, stream)
        return done(None)
