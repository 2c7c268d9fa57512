"""Laws on checkpoints that another release of torch has saved.

``gold`` names such a checkpoint, a zip file for every release of :data:`RELEASES`. The other fields of a case are those
of :mod:`shardlaw.conformance.laws.checkpoint.trip`. ``python -m benchmarks.gold --save`` writes the checkpoints of the
installed torch.
"""

from __future__ import annotations

import base64
import dataclasses
import io
import os
import pickle
import textwrap
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from hypothesis import strategies as st

from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Of, caught
from shardlaw.conformance.law.fields import Field, Folder, Rank, ScriptArgument
from shardlaw.conformance.law.law import Law, Limits
from shardlaw.conformance.laws.checkpoint.calls import load
from shardlaw.conformance.laws.checkpoint.fields import Destination, Reader
from shardlaw.conformance.laws.checkpoint.trip import world_sizes
from shardlaw.conformance.laws.roundtrip.cases import DOCS, NEEDS_FILES, sweep_texts, trip_law
from shardlaw.reference.checkpoint.state_dict import format_state, parse_state
from shardlaw.reference.notation import NotationError

if TYPE_CHECKING:
    from shardlaw.conformance.rank.context import RankContext

RELEASES = ("2.11", "2.12", "2.13", "2.14", "2.15")
FOLDER = Path(__file__).parent / "gold"

# the fields of the save of each gold checkpoint, and those of further loads
GOLD: dict[str, tuple[str, tuple[str, ...]]] = {
    "values": (
        'mesh=2 state={n:1,f:0.5,s:"text",y:b"bytes",o:None,t:(1,2),l:[1,{k:True}],d:{e:{},i:{j:"deep"}}}',
        ("mesh.load=1",),
    ),
    "dtypes": (
        "mesh=2 a=3:-:float64 b=3:-:bfloat16 c=3:-:int64 d=3:-:int32 e=3:-:uint8 f=3:-:bool g=():- h=0x3:- x=2x3:-",
        ("mesh.load=1", "mesh.load=3 to.x=S(0) to.b=S(0) to.f=S(0) to.a=R"),
    ),
    "even": (
        "mesh=2x2 x=4x6:S(0),S(1) a=8:S(0),S(0):int64 b=4x2:R,S(0):bfloat16 c=3:R,R state={x:x,a:a,b:b,c:c,n:1}",
        ("mesh.load=1 to=-", "mesh.load=3 to.x=S(1) to.a=S(0) to.b=R to.c=S(0)"),
    ),
    "uneven": (
        "mesh=2x2 x=5x7:S(0),S(1) a=7x3:S(0),S(0):float64 b=5:R,S(0):bool",
        ("mesh.load=1 to=-", "mesh.load=3 to.x=S(1) to.a=S(0) to.b=S(0)"),
    ),
    "empty": (
        "mesh=2x2 x=1x3:S(0),S(1) a=2:S(0),S(0):int32 b=0x4:S(1),R c=3x1:S(0),S(1)",
        ("mesh.load=1 to=-", "mesh.load=2 to.x=S(1) to.a=S(0) to.b=R to.c=S(0)"),
    ),
    "sharded-tensor": (
        "mesh=3 x=7x2:S(0) a=4:S(0):int64 held=sharded",
        ("held.load=sharded", "mesh.load=1 to=-", "mesh.load=2x2 to.x=S(0),S(1) to.a=R,S(0)"),
    ),
    "nested": (
        'mesh=2 x=5x2:S(0) a=4:R b=3:- state={m:{"w.x":x,i:{a:a,l:[b,2]}},s:{y:b"\\x00\\xff",n:-3}}',
        ("mesh.load=1 to=-", "mesh.load=3 to.x=S(1) to.a=S(0) to.b=-"),
    ),
    "optimizer": (
        "mesh=2x2 w=5x4:R,S(0) b=5:S(0),R e=5x4:R,S(0) v=5x4:R,S(0) c=5:S(0),R u=5:S(0),R s=():- "
        'state={model:{"l.weight":w,"l.bias":b},optim:{state:{"l.weight":{step:s,exp_avg:e,exp_avg_sq:v},'
        '"l.bias":{step:s,exp_avg:c,exp_avg_sq:u}},param_groups:[{lr:0.001,betas:(0.9,0.999),foreach:None,'
        'params:["l.weight","l.bias"]}]}}',
        ("mesh.load=1 to=-", "mesh.load=3 to.w=S(1) to.b=S(0) to.e=S(1) to.v=S(1) to.c=S(0) to.u=S(0) to.s=-"),
    ),
    "rare-dtypes": (
        "mesh=2 a=3:-:float16 b=3:-:int16 c=3:-:int8 d=3:-:complex64 e=3:-:complex128",
        ("mesh.load=1", "mesh.load=3 to.a=S(0) to.b=S(0) to.d=R"),
    ),
}
TEXTS = tuple(f"{saved} {more} gold={name}" for name, (saved, into) in GOLD.items() for more in ("", *into))


class GoldField(Field):
    """The zip file of a checkpoint that the release of the law has saved."""

    takes = f"one of {', '.join(GOLD)}"
    always = True

    def read(self, case: Case, name: str) -> bytes:
        file = FOLDER / f"{case.law.partition('[')[2].removesuffix(']')}-{case.get('gold')}.zip"
        try:
            return file.read_bytes()
        except FileNotFoundError:
            raise NotationError(f"gold={case.get('gold')}: want {self.takes}, of {', '.join(RELEASES)}") from None

    def build(self, value: bytes, here: RankContext) -> bytes:
        return value

    def to_script(self, value: bytes, name: str, world: int) -> ScriptArgument:
        lines = "\n".join(f'    "{line}"' for line in textwrap.wrap(base64.b64encode(value).decode(), 110))
        return ScriptArgument(f"base64.b64decode(\n{lines}\n)", imports=("import base64",))


def unpack(gold: bytes, folder: str) -> str:
    """Extract the files into ``folder`` and return it."""
    with zipfile.ZipFile(io.BytesIO(gold)) as files:
        files.extractall(folder)
    return folder


class FieldCheckingUnpickler(pickle.Unpickler):
    """Reads objects, and records dataclasses whose number of saved fields differs from today's."""

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self.unread: list[str] = []

    def find_class(self, module: str, name: str) -> Any:
        cls, unread = super().find_class(module, name), self.unread
        bases: tuple[Any, ...] = (cls,)
        if not dataclasses.is_dataclass(cls) or not hasattr(cls, "__setstate__"):
            return cls

        def restore(self: Any, state: Any) -> None:
            try:
                cls.__setstate__(self, state)
            except Exception as error:
                known = [field.name for field in dataclasses.fields(cls)]
                unread.append(f"{name} has the fields {', '.join(known)}, and {len(state)} were saved: {error}")

        return type(name, bases, {"__setstate__": restore})


def unread_fields(file: str) -> list[str]:
    """The dataclasses in a metadata file that the installed torch cannot read, each once."""
    with open(file, "rb") as stream:
        unpickler = FieldCheckingUnpickler(stream)
        try:
            unpickler.load()
        except (AttributeError, ImportError) as error:  # the class no longer exists
            unpickler.unread.append(str(error))
    return sorted({*unpickler.unread})


def load_gold(state: Destination, reader: Reader, gold: Annotated[bytes, GoldField()], rank: Rank, folder: Folder):
    path = unpack(gold, os.path.join(folder, str(rank)))
    return {
        "unread": unread_fields(os.path.join(path, ".metadata")),
        "loaded": caught(lambda: load(state, reader(path))),
    }


@st.composite
def narrow(draw: st.DrawFn, case: Case) -> Case:
    """Cases that load fewer entries of the same checkpoint."""
    names = [name for name, _ in case.fields if len(name) == 1]
    state = parse_state(case.get("into", case.get("state", f"{{{','.join(f'{name}:{name}' for name in names)}}}")))
    keys = [key for key in state if draw(st.booleans())] or list(state)[:1]
    return case.with_fields(into=format_state({key: state[key] for key in keys}))


def release_law(release: str) -> Law:
    law = trip_law(
        f"release[{release}]",
        clause=f"A checkpoint saved by torch {release} loads bit by bit into any layout.",
        source=f"{DOCS}, load; torch.distributed.checkpoint.metadata.Metadata: backward compatibility of the metadata",
        control=f"{GOLD['values'][0]} gold=values",
        texts=TEXTS,
        sweeps=len(sweep_texts(*TEXTS)(Limits())),
        narrow=narrow,
        stages=lambda case: world_sizes(case)[1:],
        needs=NEEDS_FILES,
        weight=0.5,
    )(load_gold)
    law.due(lambda state: {"unread": Of([]), "loaded": state})
    return law


LAWS = [release_law(release) for release in RELEASES]
