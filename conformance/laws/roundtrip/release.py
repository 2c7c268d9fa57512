"""Laws on checkpoints that another release of torch has saved.

``gold`` names such a checkpoint: a folder of files, packed, one of each for every release of :data:`RELEASES`. The
other fields of a case say what was saved, in the notation of :mod:`shardlaw.conformance.laws.checkpoint.trip`, and what
it is loaded into. ``python -m benchmarks.gold --save`` makes those of the torch at hand.
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
from hypothesis.strategies import SearchStrategy

from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Of, caught
from shardlaw.conformance.law.fields import Field, Folder, Rank, ScriptArgument
from shardlaw.conformance.law.law import Law, Limits
from shardlaw.conformance.laws.checkpoint.calls import load
from shardlaw.conformance.laws.checkpoint.fields import Destination, Reader
from shardlaw.conformance.laws.checkpoint.trip import world_sizes
from shardlaw.conformance.laws.roundtrip.cases import NEEDS_FILES, sweep_texts, trip_law
from shardlaw.reference.checkpoint.state_dict import format_state, parse_state
from shardlaw.reference.notation import NotationError

if TYPE_CHECKING:
    from shardlaw.conformance.rank.context import RankContext

DOCS = "torch.distributed.checkpoint docs"
RELEASES = ("2.11", "2.13", "2.14", "2.15")
FOLDER = Path(__file__).parent / "gold"

# what each gold checkpoint holds, as the fields of a save, and what it is loaded into otherwise
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
    """The files of a checkpoint that the release of the law has saved, packed."""

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


def unpacked(gold: bytes, folder: str) -> str:
    """The folder in which the files lie now."""
    with zipfile.ZipFile(io.BytesIO(gold)) as files:
        files.extractall(folder)
    return folder


class Noting(pickle.Unpickler):
    """Reads objects, and notes the records of which more fields were saved than there are today, or fewer."""

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self.unread: list[str] = []

    def find_class(self, module: str, name: str) -> Any:
        made, unread = super().find_class(module, name), self.unread
        bases: tuple[Any, ...] = (made,)
        if not dataclasses.is_dataclass(made) or not hasattr(made, "__setstate__"):
            return made

        def restore(self: Any, state: Any) -> None:
            try:
                made.__setstate__(self, state)
            except Exception as error:
                known = [field.name for field in dataclasses.fields(made)]
                unread.append(f"{name} has the fields {', '.join(known)}, and {len(state)} were saved: {error}")

        return type(name, bases, {"__setstate__": restore})


def unread_fields(file: str) -> list[str]:
    """The records in a file of metadata that the installed torch cannot read, each once."""
    with open(file, "rb") as stream:
        noting = Noting(stream)
        try:
            noting.load()
        except (AttributeError, ImportError) as error:  # a class that is there no longer
            noting.unread.append(str(error))
    return sorted({*noting.unread})


def released(state: Destination, reader: Reader, gold: Annotated[bytes, GoldField()], rank: Rank, folder: Folder):
    place = unpacked(gold, os.path.join(folder, str(rank)))
    return {
        "unread": unread_fields(os.path.join(place, ".metadata")),
        "loaded": caught(lambda: load(state, reader(place))),
    }


def due_released(state):
    return {"unread": Of([]), "loaded": state}


def narrow(case: Case) -> SearchStrategy[Case]:
    """Cases that load fewer entries of the same checkpoint."""

    @st.composite
    def smaller(draw: st.DrawFn) -> Case:
        names = [name for name, _ in case.fields if len(name) == 1]
        state = parse_state(case.get("into", case.get("state", f"{{{','.join(f'{one}:{one}' for one in names)}}}")))
        kept = [key for key in state if draw(st.booleans())] or list(state)[:1]
        return case.with_fields(into=format_state({key: state[key] for key in kept}))

    return smaller()


def law_of_release(release: str) -> Law:
    made = trip_law(
        f"release[{release}]",
        clause=f"A checkpoint that torch {release} has saved is loaded bit by bit, into any layout.",
        source=f"{DOCS}, load; torch.distributed.checkpoint.metadata.Metadata: backward compatibility of the metadata",
        control=f"{GOLD['values'][0]} gold=values",
        texts=TEXTS,
        sweeps=len(sweep_texts(*TEXTS)(Limits())),
        narrow=narrow,
        stages=lambda case: world_sizes(case)[1:],
        needs=NEEDS_FILES,
        weight=0.5,
    )(released)
    made.due(due_released)
    return made


LAWS = [law_of_release(release) for release in RELEASES]
