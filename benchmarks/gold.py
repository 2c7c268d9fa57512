"""Gold checkpoints: ``python -m benchmarks.gold [--save | --try]``.

``--save`` saves the checkpoints of ``roundtrip.release[...]`` with the torch at hand, into ``conformance/laws/roundtrip/gold/``.
``--try`` loads those of every release with the torch at hand, and notes in ``benchmarks/gold.json`` what became of them. Without
an option it writes ``docs/checkpoints.md`` from what every release has noted.
"""

from __future__ import annotations

import dataclasses
import io
import json
import pickle
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed.checkpoint as dcp

from shardlaw.conformance.api import Worlds
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.laws.checkpoint.fields import StateField
from shardlaw.conformance.laws.roundtrip.release import FOLDER, GOLD, LAWS, RELEASES, TEXTS

if TYPE_CHECKING:
    from shardlaw.conformance.rank.context import RankContext

ROOT = Path(__file__).parents[1]
NOTES, PAGE = ROOT / "benchmarks" / "gold.json", ROOT / "docs" / "checkpoints.md"
HERE = ".".join(torch.__version__.split(".")[:2])
HEAD = """\
# Which release of torch loads what another has saved

Written by `python -m benchmarks.gold`, from what `python -m benchmarks.gold --try` saw on each release (`tox -e versions`). Each release
loads {cases} cases of the {checkpoints} checkpoints that each has saved (`python -m benchmarks.gold --save`):
plain tensors of 12 dtypes, DTensors in even, uneven and empty shards on a mesh of two dims, sharded tensors, bytes, nested states, the
state of an optimizer; into the layout of the save, into plain tensors on one rank, and into another mesh. What is loaded must be what was
saved, bit by bit. Where a record of the metadata cannot be read, its fields that the loading release does not have are named. The laws
are `roundtrip.release[...]`, of every run.

"""


def saved(here: RankContext, text: str) -> bytes:
    """Save what a case says, as all ranks do; the files, packed."""
    field, case = StateField("save"), Case.parse(f"- {text}")
    folder = Path(here.folder()) / "gold"
    dcp.save(field.build(field.read(case, "state"), here), storage_writer=dcp.FileSystemWriter(folder))
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as files:
        for path in sorted(folder.iterdir()):
            files.writestr(zipfile.ZipInfo(path.name), path.read_bytes(), zipfile.ZIP_DEFLATED)
    return packed.getvalue()


def save_all() -> None:
    """The gold checkpoints of the torch at hand."""
    with Worlds() as worlds:
        for name, (text, _) in GOLD.items():
            files = worlds(Case.parse(f"- {text}").world).run("benchmarks.gold:saved", text)[0]
            (FOLDER / f"{HERE}-{name}.zip").write_bytes(files)
            print(f"{HERE}-{name}.zip: {len(files)} bytes")


def fields_of(gold: bytes) -> dict[str, list[str]]:
    """The fields that the torch at hand gives the records in metadata that it can read."""
    known: dict[str, list[str]] = {}

    class Listing(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            made = super().find_class(module, name)
            if dataclasses.is_dataclass(made):
                known[name] = [field.name for field in dataclasses.fields(made)]
            return made

    with zipfile.ZipFile(io.BytesIO(gold)) as files:
        Listing(io.BytesIO(files.read(".metadata"))).load()
    return known


def tried() -> dict[str, dict[str, Any]]:
    """How many cases of each release's checkpoints the torch at hand loads, and what it says of the others."""
    loaded: dict[str, dict[str, Any]] = {}
    with Worlds(ranks=4) as worlds:
        for law, release in zip(LAWS, RELEASES, strict=True):
            verdicts = [worlds.check(law, f"{law.id} {text}") for text in TEXTS]
            wrong = [verdict for verdict in verdicts if verdict.status != "held"]
            loaded[release] = {"held": len(verdicts) - len(wrong), "wrong": sorted({first_words(verdict.message) for verdict in wrong})}
            print(f"{release}>{HERE}: {loaded[release]}", flush=True)
    return loaded


def try_all() -> None:
    """Note what the torch at hand loads."""
    notes = json.loads(NOTES.read_text("utf-8")) if NOTES.exists() else {}
    notes[HERE] = {"fields": fields_of((FOLDER / f"{HERE}-optimizer.zip").read_bytes()), "loaded": tried()}
    NOTES.write_text(json.dumps(dict(sorted(notes.items())), indent=1) + "\n", "utf-8")


def first_words(message: str) -> str:
    """What is wrong, without what it is wrong in."""
    return " ".join(message.split())[:300]


def page(notes: dict[str, Any]) -> str:
    """``docs/checkpoints.md``: a row for each release that saves, a column for each that loads."""
    lines = [f"| saved by | {' | '.join(f'loaded by {release}' for release in notes)} |", f"| --- |{' --- |' * len(notes)}"]
    for saver in RELEASES:
        lines.append(f"| {saver} | {' | '.join(_cell(notes, saver, loader) for loader in notes)} |")
    said = sorted({one for loader in notes.values() for told in loader["loaded"].values() for one in told["wrong"]})
    head = HEAD.format(cases=len(TEXTS), checkpoints=len(GOLD))
    return head + "\n".join([*lines, "", *(["What was said:", ""] if said else []), *(f"- {one}" for one in said)]) + "\n"


def _cell(notes: dict[str, Any], saver: str, loader: str) -> str:
    told = notes[loader]["loaded"][saver]
    if not told["wrong"]:
        return "all"
    of_saver, of_loader = notes[saver]["fields"], notes[loader]["fields"]
    lacking = [f"`{name}.{one}`" for name, fields in of_saver.items() for one in fields if one not in of_loader.get(name, ())]
    return f"{told['held']} of {len(TEXTS)}: no {', '.join(lacking) or 'field is lacking'}"


def main(arguments: list[str]) -> int:
    match arguments:
        case ["--save"]:
            save_all()
        case ["--try"]:
            try_all()
        case []:
            PAGE.write_text(page(json.loads(NOTES.read_text("utf-8"))), "utf-8")
        case _:
            print(f"gold: {' '.join(arguments)}: want --save, --try or nothing", file=sys.stderr)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
