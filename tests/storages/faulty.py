"""The storage in memory with a fault that a switch chooses: the name of one of :data:`FAULTS` in the file ``switch``."""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from tests.storages import memory

# what is wrong, by the name of the switch
FAULTS = {
    "drops-the-last-item": "the last item of a rank is not written",
    "swaps-two-items": "the contents of the first and the last item of a rank stand in for one another",
    "truncates": "the last item of a rank lacks its second half",
    "zeroes-the-end": "the last element of every tensor is written as 0",
    "loses-values": "values that are no tensors come back as None",
    "writes-memory": "a tensor that is a view is written in the order of its memory",
    "forgets-metadata": "a save finishes without metadata",
    "commits-late": "the metadata come a while after the save has returned",
    "keeps-the-first": "a key that is there is not written again",
    "always-overwrites": "a checkpoint that must stay is overwritten",
    "swallows-errors": "an item that cannot be had is left out",
    "remembers-metadata": "a reader goes by the metadata that it saw first at a place",
    "reads-from-the-start": "every part is read from the beginning of its chunk",
    "never-commits": "tensors are filled and not handed back",
    "fills-by-halves": "a reader that finds an item missing goes on to the next",
    "ignores-checkpoint-id": "a checkpoint_id is not heeded",
    "one-place-for-all": "every checkpoint lies at one place",
}


class Writer(memory.Writer):
    def __init__(self, path: memory.Id, switch: str, overwrite: bool = True) -> None:
        self.fault = Path(switch).read_text().strip()
        super().__init__(placed(path, self.fault), overwrite or self.fault == "always-overwrites")

    def reset(self, checkpoint_id: memory.Id | None = None) -> None:
        if self.fault != "ignores-checkpoint-id":
            super().reset(checkpoint_id and placed(checkpoint_id, self.fault))

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        contents = []
        for item in plan.items:
            try:
                contents.append((item, self.content(item, planner)))
            except Exception:
                if self.fault != "swallows-errors":
                    raise
        if contents and self.fault == "drops-the-last-item":
            contents.pop()
        if contents and self.fault == "truncates":
            item, content = contents[-1]
            contents[-1] = item, content[: len(content) // 2]
        if self.fault == "swaps-two-items":
            contents = [(item, other) for (item, _), (_, other) in zip(contents, reversed(contents), strict=True)]
        return memory.done([self.write(item, content) for item, content in contents])

    def content(self, item: WriteItem, planner: SavePlanner) -> bytes:
        if self.fault == "loses-values" and item.type == WriteItemType.BYTE_IO:
            return saved(None)
        if self.fault in ("zeroes-the-end", "writes-memory") and item.type != WriteItemType.BYTE_IO:
            value: Any = planner.resolve_data(item).detach()  # type: ignore[union-attr]
            if self.fault == "zeroes-the-end":
                value = value.clone(memory_format=torch.contiguous_format)
                value.view(-1)[-1:] = 0
            elif not value.is_contiguous():
                value = torch.as_strided(value, (value.numel(),), (1,)).reshape(value.shape).clone()
            return saved(value)
        return super().content(item, planner)

    def write(self, item: WriteItem, content: bytes) -> WriteResult:
        if self.fault != "keeps-the-first":
            return super().write(item, content)
        key = f"{self.place.name}/{item.index.fqn}/{item.index.offset}"
        if not self.place.has(key):
            self.place.put(key, content)
        return WriteResult(item.index, len(content), key)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        if self.fault == "commits-late":
            threading.Thread(target=lambda: (time.sleep(0.2), memory.Writer.finish(self, metadata, results))).start()
        elif self.fault != "forgets-metadata":
            super().finish(metadata, results)


class Reader(memory.Reader):
    seen: dict[str, Metadata] = {}  # noqa: RUF012

    def __init__(self, path: memory.Id, switch: str) -> None:
        self.fault = Path(switch).read_text().strip()
        super().__init__(placed(path, self.fault))

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self.fault != "remembers-metadata":
            return super().read_metadata(*args, **kwargs)
        if self.place.name not in self.seen:
            self.seen[self.place.name] = super().read_metadata(*args, **kwargs)
        return self.seen[self.place.name]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        if self.fault == "never-commits":
            planner.commit_tensor = lambda *args: None  # type: ignore[method-assign]
        if self.fault != "fills-by-halves":
            return super().read_data(plan, planner)
        for item in plan.items:
            try:
                super().read_data(LoadPlan([item]), planner)
            except Exception:
                continue
        return memory.done(None)

    def part(self, chunk: torch.Tensor, offsets: Sequence[int], lengths: Sequence[int]) -> torch.Tensor:
        return super().part(chunk, [0] * len(offsets) if self.fault == "reads-from-the-start" else offsets, lengths)


def placed(path: memory.Id, fault: str) -> str:
    address, _, name = str(path).partition("/")
    return f"{address}/all" if fault == "one-place-for-all" else f"{address}/{name}"


def saved(value: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()
