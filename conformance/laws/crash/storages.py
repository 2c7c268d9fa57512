"""Laws on crashes in storages of torch that keep files in their own ways: safetensors of Hugging Face, and fsspec, in
local files and as objects."""

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
from shardlaw.conformance.laws.crash.fields import CrashingObjects, CrashingObjectsLater, crash_law
from shardlaw.conformance.laws.crash.saves import into_new, new, new_or_nothing, old_new_or_nothing, over

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


def hf_writer(path: str, **options: Any) -> Any:
    return compat.HuggingFaceStorageWriter(path, **options)


def hf_reader(path: str) -> Any:
    return compat.HuggingFaceStorageReader(path)


def through_fsspec(path: str, **options: Any) -> Any:
    return compat.fsspec_writer(path if "://" in path else f"file://{path}", **options)


def from_fsspec(path: str) -> Any:
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
    """Writers of safetensors."""

    def fields(self, name: str) -> tuple[str, ...]:
        return ("hf", "index")

    def read(self, case: Case, name: str) -> dict[str, Any]:
        how = case.get("hf")
        options: dict[str, Any] = {"save_distributed": how != "whole", "enable_consolidation": how == "consolidated"}
        if "index" in case:
            names = sorted(trip.read_trip(case).values)
            options["fqn_to_index_mapping"] = {name: 1 + at % 2 for at, name in enumerate(names)}
        return options


def reader_field(reader: Callable[..., Any]) -> RankField:
    """The field of a function from a path to a reader."""
    return RankField(lambda here: reader, reader.__name__, uses=(reader,))


HF = {
    "writer": Annotated[Any, HfWriterField(hf_writer, "safetensors")],
    "reader": Annotated[Any, reader_field(hf_reader)],
}
FSSPEC = {
    "writer": Annotated[Any, OtherWriterField(through_fsspec, "fsspec")],
    "reader": Annotated[Any, reader_field(from_fsspec)],
}
OF_HF: dict[str, Any] = {
    "source": f"{DOCS}, HuggingFaceStorageWriter",
    "control": f"{TWO} hf=shards disk=posix crash=0",
    "scenarios": HF_SAVES,
    "smoke": 4,
    "takes": HF,
}
OF_LOCAL: dict[str, Any] = {
    "source": f"{DOCS}, FsspecWriter",
    "control": f"{TWO} disk=posix crash=0",
    "scenarios": LOCAL,
    "smoke": 2,
    "takes": FSSPEC,
}
OF_OBJECTS: dict[str, Any] = {
    "source": f"{DOCS}, FsspecWriter; StorageWriter.finish: writes the metadata and marks the checkpoint as successful",
    "control": f"{TWO} crash=0",
    "scenarios": OBJECTS,
    "smoke": 2,
    "takes": {**FSSPEC, "crash": CrashingObjects},
    "features": lambda case: {"disk:object"},
}
RETURNED = {
    "scenarios": tuple((scenario, 1) for scenario, _ in OBJECTS),
    "smoke": 1,
    "takes": {**FSSPEC, "crash": CrashingObjectsLater},
}


def made(name: str, clause: str, act: Callable[..., Any], due: Callable[..., Any], of: Mapping[str, Any]) -> Law:
    """One of the laws on saves, of another storage."""
    law = crash_law(name, clause=clause, **of)(act)
    law.due(due)
    return law


LEFT = "Whatever a crash leaves of a save"
LAWS = [
    made(
        "hugging-face[fresh]",
        f"{LEFT} of safetensors into a new folder loads as what was saved, or not at all.",
        *(into_new, new_or_nothing, OF_HF),
    ),
    made(
        "hugging-face[overwrite]",
        f"{LEFT} of safetensors over others loads as the old ones, as the new ones, or not at all.",
        *(over, old_new_or_nothing, OF_HF),
    ),
    made(
        "fsspec[fresh]",
        f"{LEFT} through fsspec into a new folder loads as what was saved, or not at all.",
        *(into_new, new_or_nothing, OF_LOCAL),
    ),
    made(
        "fsspec[overwrite]",
        f"{LEFT} through fsspec over a checkpoint loads as the old one, as the new one, or not at all.",
        *(over, old_new_or_nothing, OF_LOCAL),
    ),
    made(
        "object[fresh]",
        f"{LEFT} into an object store, under a new name, loads as what was saved, or not at all.",
        *(into_new, new_or_nothing, OF_OBJECTS),
    ),
    made(
        "object[overwrite]",
        f"{LEFT} over a checkpoint in an object store loads as the old one, as the new one, or not at all.",
        *(over, old_new_or_nothing, OF_OBJECTS),
    ),
    made(
        "object[returned]",
        "A save into an object store that has returned on every rank loads after a crash.",
        *(over, new, {**OF_OBJECTS, **RETURNED}),
    ),
]
