"""A checkpoint storage that its author might have written: it keeps everything in the memory of a server, under keys.

``path`` is ``HOST:PORT/NAME``: where a ``torch.distributed.TCPStore`` listens, and what the checkpoint is called there.
"""

from __future__ import annotations

import io
import os
import pickle
import uuid
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch.distributed import TCPStore
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

Id = str | os.PathLike[str]


@cache
def connected(host: str, port: int) -> TCPStore:
    """This process's line to the server."""
    return TCPStore(host, port, is_master=False, wait_for_workers=False)


class Place:
    """Where a checkpoint lies: a server, and the name before its keys."""

    def __init__(self, path: Id) -> None:
        host, _, rest = os.fspath(path).partition(":")
        port, _, self.name = rest.partition("/")
        self.store = connected(host, int(port))

    def put(self, key: str, value: bytes) -> None:
        self.store.set(key, value)
        self.store.check([key])  # a set returns before the server has read it; what follows on the same line does not

    def get(self, key: str) -> bytes:
        if not self.has(key):
            raise FileNotFoundError(f"nothing is stored under {key}")
        return bytes(self.store.get(key))

    def has(self, key: str) -> bool:
        return bool(self.store.check([key]))

    def metadata(self, rank: int | None) -> str:
        return f"{self.name}/metadata" if rank is None else f"{self.name}/metadata-{rank}"


def done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


class Writer(StorageWriter):
    """Writes every item under a key of its own, new in every save, so that the metadata alone say what belongs together."""

    def __init__(self, path: Id, overwrite: bool = True) -> None:
        self.place = Place(path)
        self.overwrite = overwrite
        self.alone: int | None = None

    def reset(self, checkpoint_id: Id | None = None) -> None:
        if checkpoint_id is not None:
            self.place = Place(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.alone = None if kwargs.get("use_collectives", True) else kwargs.get("rank")

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        if not self.overwrite and self.place.has(self.place.metadata(self.alone)):
            raise RuntimeError(f"there is a checkpoint at {self.place.name}")
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        return done([self.write(item, self.content(item, planner)) for item in plan.items])

    def content(self, item: WriteItem, planner: SavePlanner) -> bytes:
        """The bytes of one item."""
        value = planner.resolve_data(item)
        if item.type == WriteItemType.BYTE_IO:
            return value.getvalue()  # type: ignore[union-attr]
        stream = io.BytesIO()
        torch.save(value.detach().cpu().clone(memory_format=torch.contiguous_format), stream)  # type: ignore[union-attr]
        return stream.getvalue()

    def write(self, item: WriteItem, content: bytes) -> WriteResult:
        key = f"{self.place.name}/{uuid.uuid4().hex}"
        self.place.put(key, content)
        return WriteResult(item.index, len(content), key)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        where = {result.index: result.storage_data for written in results for result in written}
        self.place.put(self.place.metadata(self.alone), pickle.dumps(replace(metadata, storage_data=where)))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Id) -> bool:
        return ":" in os.fspath(checkpoint_id)


class Reader(StorageReader):
    """Reads what :class:`Writer` wrote."""

    def __init__(self, path: Id) -> None:
        self.place = Place(path)
        self.where: dict[Any, str] = {}

    def reset(self, checkpoint_id: Id | None = None) -> None:
        if checkpoint_id is not None:
            self.place = Place(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return pickle.loads(self.place.get(self.place.metadata(kwargs.get("rank"))))  # type: ignore[no-any-return]

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.where = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            content = io.BytesIO(self.place.get(self.where[item.storage_index]))
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, content)
                continue
            part = self.part(torch.load(content, weights_only=True), item.storage_offsets, item.lengths)
            target = planner.resolve_tensor(item).detach()
            target.copy_(part)
            planner.commit_tensor(item, target)
        return done(None)

    def part(self, chunk: torch.Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
        """The elements that are wanted of a chunk."""
        return chunk[tuple(slice(start, start + length) for start, length in zip(offsets, lengths, strict=True))]

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Id) -> bool:
        return Writer.validate_checkpoint_id(checkpoint_id)
