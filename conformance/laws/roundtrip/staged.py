"""Laws on what an asynchronous save makes of values of all kinds: what it stages is what a save would have written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from conformance import trip as t
from conformance.case import Case
from conformance.here import Here
from conformance.laws.roundtrip.cases import law_of
from conformance.laws.roundtrip.saves import finish, stager_of
from conformance.report.reproducer import Script
from conformance.trip_script import script

DOCS = "torch.distributed.checkpoint docs"


class Pair(NamedTuple):
    """A tuple with names, as schedulers keep them."""

    first: int
    second: int


COMPLEX = (1 + 2j, 3 - 4j)
# by name of the case: what makes the value, and the expression of it in a script
VALUES: dict[str, tuple[Callable[[], Any], str]] = {
    "conjugated": (lambda: torch.tensor(COMPLEX).conj(), "torch.tensor([1 + 2j]).conj()"),
    "negated": (lambda: torch.tensor(COMPLEX).conj().imag, "torch.tensor([1 + 2j]).conj().imag"),
    "expanded": (lambda: torch.ones(1, 2).expand(3, 2), "torch.ones(1, 2).expand(3, 2)"),
    "transposed": (lambda: torch.arange(6.0).reshape(2, 3).t(), "torch.arange(6.0).reshape(2, 3).t()"),
    "offset": (lambda: torch.arange(6.0)[2:4], "torch.arange(6.0)[2:4]"),
    "frozen": (lambda: nn.Parameter(torch.ones(2), requires_grad=False), "torch.nn.Parameter(torch.ones(2), requires_grad=False)"),
    "0-d": (lambda: torch.tensor(5.0), "torch.tensor(5.0)"),
    "tuple": (lambda: (torch.ones(2), 1), "(torch.ones(2), 1)"),
    "list": (lambda: [1, [2, 3]], "[1, [2, 3]]"),
    "set": (lambda: {1, 2}, "{1, 2}"),
    "bytearray": (lambda: bytearray(b"ab"), "bytearray(b'ab')"),
    "named-tuple": (lambda: Pair(1, 2), "collections.namedtuple('Pair', 'first second')(1, 2)"),
    "size": (lambda: torch.Size((2, 3)), "torch.Size((2, 3))"),
    "dtype": (lambda: torch.float16, "torch.float16"),
}


def check_staged(case: Case, here: Here) -> None:
    """What is saved in the background is the value of the call, of its type, whatever becomes of it afterwards."""
    trip, make = t.read_trip(case), VALUES[case.get("value")][0]
    if here.stage == 0:
        value, own = make(), stager_of(case)
        state = {**t.source(trip, here), "value": [value] if isinstance(value, tuple) else value}
        pending = t.dcp.async_save(state, storage_writer=t.writer_of(trip, here), async_stager=own)
        spoil(value)
        with t.told_plainly():
            finish(pending)
        if own is not None:
            own.close()
        return
    want = make()
    blank: Any = torch.zeros(want.shape, dtype=want.dtype) if isinstance(want, torch.Tensor) else 0
    state = t.load(here, {**t.destination(trip, here), "value": [blank] if isinstance(want, tuple) else blank})
    got = state.pop("value")
    t.judge(trip, here, state)
    got = got[0] if isinstance(want, tuple) and isinstance(got, list) else got
    if isinstance(want, torch.Tensor):
        here.same(got, want.detach().clone(), "value", what=f"the {case.get('value')} tensor")
        return
    kept = here.require(type(got) is type(want), "wrong-metadata", "type", f"a {type(want).__name__} comes back as {type(got).__name__}",
                        repr(want), repr(got))  # fmt: skip
    if kept:
        here.require(repr(got) == repr(want), "wrong-value", "value", f"the {case.get('value')} is another", repr(want), repr(got))


def spoil(value: Any) -> None:
    """Change a value in place, as far as it can be changed."""
    if isinstance(value, torch.Tensor):
        base = value if value._base is None else value._base
        with torch.no_grad():
            base.zero_()
    elif isinstance(value, tuple):
        for entry in value:
            spoil(entry)
    elif isinstance(value, list):
        for entry in value:
            spoil(entry)
        value.append("late")
    elif isinstance(value, set):
        value.add("late")
    elif isinstance(value, bytearray):
        value.extend(b"late")


def staged_script(case: Case) -> Script:
    """The value alone, staged and saved by every rank."""
    own = ", async_stager=DefaultStager(StagingOptions(False, False, False, False))" if case.get("async") == "stager" else ""
    lines = [
        f"value = {VALUES[case.get('value')][1]}",
        "tensor = isinstance(value, torch.Tensor)",
        f"pending = dcp.async_save({{'value': [value]}}, storage_writer=dcp.FileSystemWriter(folder, sync_files=False){own})",
        'getattr(pending, "upload_completion", pending).result()',
        "state = {'value': [torch.zeros(value.shape, dtype=value.dtype) if tensor else 0]}",
        "dcp.load(state, storage_reader=dcp.FileSystemReader(folder))",
        "got = state['value'][0] if isinstance(state['value'], list) else state['value']",
        "return (value, got) if tensor else ((type(value).__name__, repr(value)), (type(got).__name__, repr(got)))",
    ]
    imports = ["import collections", "import torch.distributed.checkpoint as dcp"]
    imports += ["from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions"] if own else []
    return script(t.read_trip(case), [(case.world, lines)], imports=imports)


STAGED = tuple(
    f"mesh={2 if at % 3 else 1} x=5:S(0) value={name} async={how}" for how in ("stager", "writer") for at, name in enumerate(VALUES)
)

LAWS = (
    law_of(
        "staged",
        clause="A value that is saved in the background comes back as a save would have kept it: equal, of its type, as of the call.",
        source=f"{DOCS}, async_save: first de-stages the state_dict; AsyncStager.stage: inoculated from later updates",
        check=check_staged,
        script=staged_script,
        holds="mesh=2 x=5:S(0) value=tuple async=writer",
        planted="staging_without_copy",
        texts=STAGED,
        sweeps=len(STAGED),
        stages=t.worlds,
        features=lambda case: {f"staged:{case.get('value')}", f"stager:{case.get('async')}"},
    ),
)
