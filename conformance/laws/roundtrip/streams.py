"""The law on transforms of the byte streams of a checkpoint, such as compression."""

from __future__ import annotations

import io
from functools import cache
from typing import Any

from shardlaw.conformance import compat
from shardlaw.conformance.law.due import Refused, caught
from shardlaw.conformance.law.fields import Folder, Word
from shardlaw.conformance.laws.checkpoint.calls import CheckpointFailed, load, save
from shardlaw.conformance.laws.checkpoint.fields import Destination, Saved, WriterOptions
from shardlaw.conformance.laws.roundtrip.cases import NEEDS_FILES, trip_law
from shardlaw.conformance.laws.roundtrip.options import require_package

# how each transform maps bytes: no two of the first three commute
TABLES = {
    "flip": bytes(byte ^ 0x55 for byte in range(256)),
    "step": bytes((byte + 1) % 256 for byte in range(256)),
    "swap": bytes((byte * 16 + byte // 16) % 256 for byte in range(256)),
    "pieces": bytes(255 - byte for byte in range(256)),
    "buffer": bytes(255 - byte for byte in range(256)),
    "forward": bytes(255 - byte for byte in range(256)),
    "footer": bytes(255 - byte for byte in range(256)),
}
STREAMS = (
    "mesh=2 mesh.load=3 x=5x2:S(0) a=4:R:int64 state={x:x,d:{a:a,n:1}} to.x=S(1) through=flip",
    "mesh=2 mesh.load=1 x=5x2:S(0) a=4:R state={x:x,a:a,n:1,m:None} to.x=R through=flip+step",
    "mesh=3 mesh.load=2 x=7:S(0):bfloat16 a=3:- state={x:x,l:[a,1]} through=step+flip threads=2",
    "mesh=1 mesh.load=2 x=():R a=4x3:R:bool to.a=S(1) through=swap+step+flip files=item",
    "mesh=2 x=5x2:S(0) a=4:R state={x:x,a:a,n:1,m:None} through=pieces",
    "mesh=2 mesh.load=1 x=5x2:S(0) a=4:R:int64 state={x:x,d:{a:a,n:1}} to.x=R through=buffer",
    "mesh=2 mesh.load=1 x=5x2:S(0) a=4:R:int64 state={x:x,d:{a:a,n:1}} to.x=R through=forward",
    "mesh=2 mesh.load=1 x=5x2:S(0) a=4:R state={x:x,a:a,n:1} to.x=R through=flip storage=fsspec",
    "mesh=1 x=5:S(0) a=4:R through=footer",
)


def read_all(stream: Any, name: str) -> bytes:
    """The bytes of a stream, read as the transform ``name`` does: at once, in pieces, into a buffer, or the last one,
    as a format with a footer needs it, before all."""
    if name == "footer":
        stream.seek(-1, io.SEEK_END)
        last = stream.read(1)
        stream.seek(0)
        return stream.read(-1)[:-1] + last  # type: ignore[no-any-return]
    if name == "pieces":
        return b"".join(iter(lambda: stream.read(100), b""))
    if name == "buffer":
        buffer, data = bytearray(100), b""
        while count := stream.readinto(buffer):
            data += buffer[:count]
        return data
    return stream.read(-1)  # type: ignore[no-any-return]


class TranslatingStream(io.RawIOBase):
    """A stream that maps every written byte by a table, and closes the stream below when it is closed."""

    def __init__(self, output: Any, table: bytes) -> None:
        self.output, self.table = output, table

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.output.write(bytes(data).translate(self.table))
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self.output.close()
        super().close()


class ForwardStream(io.RawIOBase):
    """A stream of these bytes that cannot seek."""

    def __init__(self, data: bytes) -> None:
        self.data = io.BytesIO(data)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self.data.readinto(buffer)


@cache
def transform(name: str) -> Any:
    """The class of the transform ``name``."""

    class Transform(compat.StreamTransformExtension):  # type: ignore[misc]
        @staticmethod
        def registry_name() -> str:
            return f"stream.{name}"

        @staticmethod
        def from_descriptor(version: str) -> Any:
            if version != "1":
                raise ValueError(f"version {version!r}, not 1")
            return Transform()

        def get_descriptor(self) -> str:
            return f"stream.{name}/1"

        def transform_to(self, output: Any) -> Any:
            return TranslatingStream(output, TABLES[name])

        def transform_from(self, input: Any) -> Any:
            inverse = bytes(sorted(range(256), key=lambda byte: TABLES[name][byte]))
            data = read_all(input, name).translate(inverse)
            return ForwardStream(data) if name == "forward" else io.BytesIO(data)

    return Transform


def make_registry(through: str) -> Any:
    """A registry of the transforms."""
    registry = compat.ExtensionRegistry()
    for name in through.split("+"):
        registry.register(transform(name))
    return registry


@trip_law(
    "streams",
    source="torch.distributed.checkpoint._extension, docstrings of StreamTransformExtension and ExtensionRegistry",
    control="mesh=2 x=5:S(0) a=4:R through=flip",
    texts=STREAMS,
    needs=NEEDS_FILES,
)
def streams(state: Saved, options: WriterOptions, folder: Folder, through: Word, storage: Word = ""):
    """A load reverses the transforms through which a checkpoint was saved; a reader that lacks one of them refuses."""
    transforms = [transform(name)() for name in through.split("+")]
    save(state, compat.writer_with_transforms(folder, transforms, storage, **{"sync_files": False, **options}))
    return {}


@streams.due
def _(storage):
    if storage == "fsspec":
        require_package("fsspec")
    return {}


@streams.then
def _(state: Destination, other: Destination, folder: Folder, through: Word):
    unknown = caught(lambda: load(other, compat.reader_with_transforms(folder)))
    return {
        "unknown": unknown,
        "loaded": load(state, compat.reader_with_transforms(folder, make_registry(through))),
    }


@streams.due
def _(state):
    return {"unknown": Refused((CheckpointFailed,)), "loaded": state}
