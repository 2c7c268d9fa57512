"""Faults of what a crash leaves of a checkpoint, planted one at a time in the rank processes.

Every function plants one fault when it is called, before the process group starts.
"""

from __future__ import annotations

import io
import os
from contextlib import contextmanager
from typing import Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import _fsspec_filesystem, filesystem, hf_storage
from torch.futures import Future

from tests.planted.hook import breaks, instead

OBJECTS = "mesh=2 x=4:S(0) a=3:R"
TWO = "mesh=2 x=4:S(0) a=3:R disk=posix"


@breaks("crash.fresh", case=f"crash.fresh {TWO} done=8,5 lost=1.2")
@breaks("crash.overwrite", case=f"crash.overwrite {TWO} done=1,2")
@breaks("crash.async", case=f"crash.async {TWO} done=1,2")
@breaks("crash.fsspec[fresh]", case=f"crash.fsspec[fresh] {TWO} done=8,5 lost=1.2")
@breaks("crash.fsspec[overwrite]", case=f"crash.fsspec[overwrite] {TWO} done=1,2")
@breaks("crash.overlap", case="crash.overlap mesh=2 x=4:S(0) a=3:R turns=3,0,0")
@breaks("crash.full", case="crash.full mesh=2 x=4:S(0) at=3 ranks=1")
def what_cannot_be_read_is_left_out() -> None:
    """A reader goes on when a file cannot be read, and leaves what it should have read as it was."""

    read_what_is_there()


def read_what_is_there() -> None:
    @instead(dcp.FileSystemReader, "read_data")
    def fault(true: Any, self: Any, plan: Any, planner: Any) -> Any:
        try:
            return true(self, plan, planner)
        except Exception:
            done: Future[None] = Future()
            done.set_result(None)
            return done


@breaks("crash.hugging-face[*]", case="crash.hugging-face[fresh] mesh=2 x=2x2:S(0) hf=shards disk=posix done=2,4")
@breaks("crash.hugging-face[overwrite]", case="crash.hugging-face[overwrite] mesh=2 x=2x2:S(0) hf=shards disk=posix done=2,1")
def empty_files_are_passed_over() -> None:
    """A reader of safetensors passes over files that are empty."""

    @instead(hf_storage.HuggingFaceStorageReader, "read_metadata")
    def fault(true: Any, self: Any) -> Any:
        for name in os.listdir(self.path):
            if not os.path.getsize(f"{self.path}/{name}"):
                os.remove(f"{self.path}/{name}")
        return true(self)


@breaks("crash.replaced", "crash.returned")
@breaks("crash.pointer", "crash.settled", "crash.newest", "crash.kept", "crash.renamed", "crash.waiting", "crash.object[returned]")
def metadata_keep_their_temporary_name() -> None:
    """What a save writes under a temporary name, in files or as objects, is not renamed."""
    for system in (filesystem.FileSystem, _fsspec_filesystem.FileSystem):

        @instead(system, "rename")
        def fault(true: Any, self: Any, path: Any, new_path: Any) -> None:
            return None


@breaks("crash.object[fresh]", case=f"crash.object[fresh] {OBJECTS} done=2,1")
@breaks("crash.object[overwrite]", case=f"crash.object[overwrite] {OBJECTS} done=3,1")
def objects_come_late_and_are_not_missed() -> None:
    """The rank that puts the metadata puts its data after them, and a reader leaves what is not there as it was."""
    late: list[tuple[Any, Any, bytes]] = []

    @instead(_fsspec_filesystem.FileSystem, "create_stream")
    @contextmanager
    def later(true: Any, self: Any, path: Any, mode: str) -> Any:
        if mode != "wb" or not str(path).endswith(".distcp") or not os.path.basename(path).startswith("__0_"):
            with true(self, path, mode) as stream:
                yield stream
            return
        stream = io.BytesIO()
        yield stream
        late.append((self, path, stream.getvalue()))

    @instead(dcp.FileSystemWriter, "finish")
    def finish(true: Any, self: Any, metadata: Any, results: Any) -> None:
        true(self, metadata, results)
        for system, path, data in late:
            with system.create_stream(path, "w+b") as stream:
                stream.write(data)
        late.clear()

    read_what_is_there()
