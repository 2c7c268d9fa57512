"""Laws on crashes with other storages: safetensors of Hugging Face, and fsspec with local files and objects."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any

from shardlaw.conformance import compat
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.fields import RankField, ScriptArgument
from shardlaw.conformance.law.law import Law
from shardlaw.conformance.laws.checkpoint import trip
from shardlaw.conformance.laws.checkpoint.fields import WriterField, options_text
from shardlaw.conformance.laws.crash.fields import LaterObjectCrash, ObjectSaveCrash, crash_law
from shardlaw.conformance.laws.crash.saves import (
    due_new,
    due_new_or_nothing,
    due_old_new_or_nothing,
    save_into_new,
    save_over,
)
from shardlaw.conformance.laws.roundtrip.options import file_numbers, hf_options

if TYPE_CHECKING:
    from shardlaw.conformance.rank.context import RankContext

DOCS = "torch.distributed.checkpoint docs"
TWO = "mesh=2 x=4x2:S(0) a=3:R"
HF_SAVES = (
    (f"{TWO} hf=shards disk=posix", 20),
    (f"{TWO} hf=consolidated disk=posix", 80),
    ("mesh=1 x=4:- a=3:- hf=whole disk=posix", 20),
    ("mesh=3 x=6:S(0) hf=shards disk=kill", 30),
    ("mesh=2 x=4x2:S(0) a=3:S(0) hf=consolidated index=two disk=kill", 40),
)
LOCAL = (
    (f"{TWO} disk=posix", 45),
    ("mesh=2 x=4:S(0) files=item threads=2 disk=kill", 20),
    ("mesh=3 x=6:S(0) disk=kill", 35),
)
OBJECTS = (
    (TWO, 8),
    (f"{TWO} files=item", 10),
    ("mesh=3 x=6:S(0)", 12),
    ("mesh=1 x=4:- a=3:-", 6),
    ("mesh=2x2 x=4x4:S(0),S(1) a=3:R,R", 20),
)


def make_hf_writer(path: str, **options: Any) -> Any:
    return compat.HuggingFaceStorageWriter(path, **options)


def make_hf_reader(path: str) -> Any:
    return compat.HuggingFaceStorageReader(path)


def make_fsspec_writer(path: str, **options: Any) -> Any:
    return compat.fsspec_writer(path if "://" in path else f"file://{path}", **options)


def make_fsspec_reader(path: str) -> Any:
    return compat.fsspec_reader(path if "://" in path else f"file://{path}")


class OtherWriterField(WriterField):
    """A function from a path to a writer, ``writer`` with the options of the case; it needs a ``package``."""

    def __init__(self, writer: Callable[..., Any], package: str) -> None:
        super().__init__()
        self.writer, self.package = writer, package

    def build(self, value: Mapping[str, Any], here: RankContext) -> Any:
        if importlib.util.find_spec(self.package) is None:
            here.reject(f"{self.package} is not installed")
        return functools.partial(self.writer, **value)

    def to_script(self, value: Mapping[str, Any], name: str, world: int) -> ScriptArgument:
        if not value:
            return ScriptArgument(self.writer.__name__, uses=(self.writer,))
        text = f"functools.partial({self.writer.__name__}, {options_text(value)})"
        return ScriptArgument(text, imports=("import functools",), uses=(self.writer,))


class HfWriterField(OtherWriterField):
    """A function from a path to a writer of safetensors."""

    reads = ("hf", "index")

    def read(self, case: Case, name: str) -> dict[str, Any]:
        names = sorted(trip.read_trip(case).values) if "index" in case else ()
        return hf_options(case.get("hf"), file_numbers(names))


def reader_field(reader: Callable[..., Any]) -> RankField:
    """The field of a function from a path to a reader."""
    return RankField(lambda here: reader, reader.__name__, uses=(reader,))


HF_STORAGE = {
    "writer": Annotated[Any, HfWriterField(make_hf_writer, "safetensors")],
    "reader": Annotated[Any, reader_field(make_hf_reader)],
}
FSSPEC_STORAGE = {
    "writer": Annotated[Any, OtherWriterField(make_fsspec_writer, "fsspec")],
    "reader": Annotated[Any, reader_field(make_fsspec_reader)],
}
HF_RECORD: dict[str, Any] = {
    "source": f"{DOCS}, HuggingFaceStorageWriter",
    "control": f"{TWO} hf=shards disk=posix crash=0",
    "scenarios": HF_SAVES,
    "smoke": 4,
    "annotations": HF_STORAGE,
}
LOCAL_RECORD: dict[str, Any] = {
    "source": f"{DOCS}, FsspecWriter",
    "control": f"{TWO} disk=posix crash=0",
    "scenarios": LOCAL,
    "smoke": 2,
    "annotations": FSSPEC_STORAGE,
}
OBJECTS_RECORD: dict[str, Any] = {
    "source": f"{DOCS}, FsspecWriter; StorageWriter.finish: writes the metadata and marks the checkpoint as successful",
    "control": f"{TWO} crash=0",
    "scenarios": OBJECTS,
    "smoke": 2,
    "annotations": {**FSSPEC_STORAGE, "crash": ObjectSaveCrash},
    "features": lambda case: {"disk:object"},
}
RETURNED_RECORD = {
    "scenarios": tuple((scenario, 1) for scenario, _ in OBJECTS),
    "smoke": 1,
    "annotations": {**FSSPEC_STORAGE, "crash": LaterObjectCrash},
}


def storage_law(
    name: str, clause: str, act: Callable[..., Any], due: Callable[..., Any], record: Mapping[str, Any]
) -> Law:
    """A law of :mod:`shardlaw.conformance.laws.crash.saves` with another storage."""
    law = crash_law(name, clause=clause, **record)(act)
    law.due(due)
    return law


LAWS = [
    storage_law(
        "hugging-face[fresh]",
        "After a crash during a save of safetensors into a new folder the saved state loads, or nothing.",
        *(save_into_new, due_new_or_nothing, HF_RECORD),
    ),
    storage_law(
        "hugging-face[overwrite]",
        "After a crash during a save of safetensors over others the old ones load, or the new ones, or nothing.",
        *(save_over, due_old_new_or_nothing, HF_RECORD),
    ),
    storage_law(
        "fsspec[fresh]",
        "After a crash during a save through fsspec into a new folder the saved state loads, or nothing.",
        *(save_into_new, due_new_or_nothing, LOCAL_RECORD),
    ),
    storage_law(
        "fsspec[overwrite]",
        "After a crash during a save through fsspec over a checkpoint the old one loads, or the new one, or nothing.",
        *(save_over, due_old_new_or_nothing, LOCAL_RECORD),
    ),
    storage_law(
        "object[fresh]",
        "After a crash during a save into an object store, under a new name, the saved state loads, or nothing.",
        *(save_into_new, due_new_or_nothing, OBJECTS_RECORD),
    ),
    storage_law(
        "object[overwrite]",
        "After a crash during a save over a checkpoint in an object store the old or the new one loads, or nothing.",
        *(save_over, due_old_new_or_nothing, OBJECTS_RECORD),
    ),
    storage_law(
        "object[returned]",
        "After a save into an object store has returned on every rank, it loads after a crash.",
        *(save_over, due_new, {**OBJECTS_RECORD, **RETURNED_RECORD}),
    ),
]
