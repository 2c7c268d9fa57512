"""A checkpoint storage in files that commits as it should, and the same with one of many faults in the order in which it commits.

A save writes its files into a folder of its own, each under a temporary name first; it syncs the files, then the folder, then lets the
file ``latest`` name the folder, in one step. What was there before is removed at the end. A reader goes by ``latest``. The items are bare
bytes, so that nothing but the order of commit keeps what is torn from being read.

The file ``switch`` names the fault; every process reads it when it makes a writer or a reader.
"""

from __future__ import annotations

import io
import os
import pickle
import shutil
import threading
import time
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

Id = str | os.PathLike[str]
LATE_SECONDS = 1.0

FAULTS = {
    "pointer-before-data": "the pointer names the new folder as soon as there is one",
    "pointer-before-index": "the pointer names the new folder before its index is written",
    "pointer-by-first-rank-done": "the leading rank lets the pointer name its folder when its own data are written",
    "pointer-by-every-rank": "every rank lets the pointer name the new folder when its own data are written",
    "pointer-of-each-rank": "every rank has a pointer of its own, which it moves when its data are written",
    "pointer-not-synced": "the pointer takes its place before its bytes were synced",
    "pointer-synced-after-rename": "the pointer is synced when it has taken its place",
    "pointer-synced-before-flush": "the pointer is synced before its bytes have left the buffer",
    "pointer-in-place": "the pointer is written over the old one",
    "pointer-appended": "the pointer is a line at the end of a file",
    "pointer-removed-first": "the old pointer is removed before the new one takes its place",
    "pointer-copied": "the pointer is copied to its place",
    "pointer-name-not-synced": "the folder of the pointer is not synced",
    "index-not-synced": "the index is not synced",
    "index-synced-before-flush": "the index is synced before its bytes have left the buffer",
    "index-in-place": "there is one index, which is written over the old one",
    "data-not-synced": "no data are synced",
    "data-synced-by-leader": "only the leading rank syncs its data",
    "data-synced-by-others": "all ranks but the leading one sync their data",
    "last-item-not-synced": "the last file of every rank is not synced",
    "data-synced-before-flush": "data are synced before their bytes have left the buffer",
    "data-written-late": "a thread writes the data of a rank while the save goes on",
    "data-in-place": "data files have the same names in every save, and are written over the old ones",
    "data-replaced-in-place": "data files have the same names in every save, and take their places one by one",
    "data-linked": "data files begin as another name of the old ones, and are written over",
    "names-not-synced": "the folder of the data is not synced",
    "folder-not-synced": "the name of the new folder is not synced before the pointer names it",
    "old-removed-first": "what was there before is removed at the beginning",
    "old-removed-before-pointer": "what was there before is removed before the pointer is moved",
    "old-removed-before-sync": "what was there before is removed before the pointer was synced",
    "newest-folder-read": "a reader goes by the newest folder that has an index",
    "folder-renamed": "the new folder gets the name of the old one, which is removed first",
}


class Switched:
    """What a process knows of the fault that is planted."""

    def __init__(self, path: Id, switch: Id = "") -> None:
        self.path = Path(path)
        self.fault = Path(switch).read_text() if switch else ""

    def has(self, *faults: str) -> bool:
        assert FAULTS.keys() >= {*faults}
        return self.fault in faults

    def folder(self, name: str) -> Path:
        """The folder of a save."""
        return self.path / ("data" if self.has("data-in-place", "data-replaced-in-place") else name)

    def index(self, name: str) -> Path:
        """The file that says where the items of a save lie."""
        if self.has("index-in-place"):
            return self.path / "index"
        return self.folder(name) / (f"index-{name}" if self.has("data-in-place", "data-replaced-in-place") else "index")

    def pointed(self) -> str:
        """The name of the save that is to be read."""
        if self.has("newest-folder-read"):
            return max(folder.name for folder in self.path.iterdir() if (folder / "index").exists())
        if self.has("folder-renamed"):
            return "current"
        name = (self.path / "latest").read_text().splitlines()[-1]
        if not name.startswith("save-"):
            raise ValueError(f"latest names {name!r}")
        return name


def sync(folder: Path) -> None:
    """Make the names in a folder last."""
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


class Writer(Switched, StorageWriter):
    """Writes a save, and commits it."""

    leads = False
    name = ""

    def reset(self, checkpoint_id: Id | None = None) -> None:
        self.path = Path(checkpoint_id or self.path)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.leads = is_coordinator

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        self.path.mkdir(exist_ok=True)
        sync(self.path.parent)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        number = 1 + max((int(old.name.split("-")[1]) for old in self.path.glob("save-*")), default=0)
        name = f"save-{number}-{uuid.uuid4().hex}"  # another job may be at the same number
        if self.has("folder-renamed"):
            name = "new"
        if self.has("old-removed-first"):
            self.clean("")
        self.name = name
        self.folder(name).mkdir(exist_ok=True)
        if not self.has("folder-not-synced"):
            sync(self.path)
        if self.has("pointer-before-data"):
            self.point(name)
        return [replace(plan, storage_data=(name, rank)) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        name, rank = plan.storage_data
        files = [(f"{rank}-{number}", self.content(item, planner)) for number, item in enumerate(plan.items)]
        if self.has("data-written-late"):
            threading.Thread(target=lambda: (time.sleep(LATE_SECONDS), self.write_files(name, rank, files))).start()
        else:
            self.write_files(name, rank, files)
        if (self.has("pointer-by-first-rank-done") and self.leads) or self.has("pointer-by-every-rank"):
            self.point(name, f"latest.{rank}")
        if self.has("pointer-of-each-rank"):
            self.put(self.path / f"latest-{rank}", name.encode())
        places = [(file, len(content)) for file, content in files]
        return done([WriteResult(item.index, size, (file, size)) for item, (file, size) in zip(plan.items, places, strict=True)])

    def write_files(self, name: str, rank: int, files: list[tuple[str, bytes]]) -> None:
        for file, content in files:
            path = self.folder(name) / file
            synced = not (
                self.has("data-not-synced")
                or (self.has("data-synced-by-leader") and not self.leads)
                or (self.has("data-synced-by-others") and self.leads)
                or (self.has("last-item-not-synced") and file == files[-1][0])
            )
            if self.has("data-in-place"):
                self.put(path, content, in_place=True)
            elif self.has("data-linked") and (old := [*self.path.glob(f"save-*/{file}")]):
                os.link(old[0], path)
                self.put(path, content, in_place=True)
            else:
                self.put(path, content, synced=synced, early=self.has("data-synced-before-flush"))

    def content(self, item: WriteItem, planner: SavePlanner) -> bytes:
        value = planner.resolve_data(item)
        if item.type == WriteItemType.BYTE_IO:
            return value.getvalue()  # type: ignore[union-attr]
        return value.detach().cpu().contiguous().numpy().tobytes()  # type: ignore[union-attr,no-any-return]

    def put(self, path: Path, content: bytes, *, synced: bool = True, early: bool = False, in_place: bool = False) -> None:
        """Let a file have this content, at once or not at all. ``early``: it is synced before anything is written."""
        written = path if in_place else path.with_name(f"{path.name}.new")
        with open(written, "wb") as stream:
            stream.write(content)
            if not early:
                stream.flush()
            if synced:
                os.fsync(stream.fileno())
        if not in_place:
            os.replace(written, path)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        where = {result.index: result.storage_data for written in results for result in written}
        name = self.name
        index = pickle.dumps(replace(metadata, storage_data=where))
        if self.has("pointer-before-index"):
            self.point(name)
        self.put_index(name, index)
        if not self.has("names-not-synced"):
            sync(self.folder(name))
        if self.has("old-removed-before-pointer"):
            self.clean(name)
        if self.has("folder-renamed"):
            shutil.rmtree(self.path / "current", ignore_errors=True)
            os.rename(self.path / "new", self.path / "current")
            sync(self.path)
            return
        self.point(name)
        self.clean(name)

    def put_index(self, name: str, index: bytes) -> None:
        early, synced = self.has("index-synced-before-flush"), not self.has("index-not-synced")
        self.put(self.index(name), index, synced=synced, early=early, in_place=self.has("index-in-place"))

    def point(self, name: str, temporary: str = "latest.new") -> None:
        """Let the pointer name a save."""
        path, content = self.path / "latest", f"{name}\n".encode()
        if self.has("pointer-in-place", "pointer-appended"):
            with open(path, "ab" if self.has("pointer-appended") else "wb") as stream:
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())
        else:
            self.move_pointer(path, content, path.with_name(temporary))
        if self.has("old-removed-before-sync"):
            self.clean(name)
        if not self.has("pointer-name-not-synced"):
            sync(self.path)

    def move_pointer(self, path: Path, content: bytes, written: Path) -> None:
        with open(written, "wb") as stream:
            stream.write(content)
            if not self.has("pointer-synced-before-flush"):
                stream.flush()
            if not self.has("pointer-not-synced", "pointer-synced-after-rename"):
                os.fsync(stream.fileno())
        if self.has("pointer-removed-first"):
            path.unlink(missing_ok=True)
        if self.has("pointer-copied"):
            shutil.copyfile(written, path)
            return
        os.replace(written, path)
        if self.has("pointer-synced-after-rename"):
            with open(path, "rb") as stream:
                os.fsync(stream.fileno())

    def clean(self, name: str) -> None:
        """Remove the folders of all saves but one."""
        for folder in self.path.glob("save-*"):
            if folder.name != name:
                shutil.rmtree(folder)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Id) -> bool:
        return True


class Reader(Switched, StorageReader):
    """Reads what :class:`Writer` committed."""

    def reset(self, checkpoint_id: Id | None = None) -> None:
        self.path = Path(checkpoint_id or self.path)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        name = self.pointed()
        return pickle.loads(self.index(name).read_bytes())  # type: ignore[no-any-return]

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.metadata = metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for item in plan.items:
            file, size = self.metadata.storage_data[item.storage_index]  # type: ignore[index]
            name = self.pointed()
            if self.has("pointer-of-each-rank"):
                name = (self.path / f"latest-{file.partition('-')[0]}").read_text()
            content = (self.folder(name) / file).read_bytes()
            if len(content) != size:
                raise ValueError(f"{file} has {len(content)} bytes, must have {size}")
            if item.type == LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(content))
                continue
            stored = self.metadata.state_dict_metadata[item.storage_index.fqn]
            chunk = next(chunk for chunk in stored.chunks if item.storage_index.offset in (None, chunk.offsets))  # type: ignore[union-attr]
            held = torch.frombuffer(bytearray(content), dtype=stored.properties.dtype).reshape(chunk.sizes)  # type: ignore[union-attr]
            where = tuple(slice(start, start + length) for start, length in zip(item.storage_offsets, item.lengths, strict=True))
            target = planner.resolve_tensor(item).detach()
            target.copy_(held[where])
            planner.commit_tensor(item, target)
        return done(None)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Id) -> bool:
        return True
