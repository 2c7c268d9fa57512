"""Laws on staging: an asynchronous save stores values of all kinds like a synchronous one."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.staging import AsyncStager

from shardlaw.conformance import compat
from shardlaw.conformance.law.due import Of
from shardlaw.conformance.law.fields import Folder, Word
from shardlaw.conformance.laws.checkpoint.calls import load, wait_for_save
from shardlaw.conformance.laws.checkpoint.fields import Destination, Newer, NewerDestination, Reader, Saved, Writer
from shardlaw.conformance.laws.roundtrip.cases import DOCS, add_load, save_only, trip_law
from shardlaw.conformance.laws.roundtrip.saves import make_stager, mutate


class Pair(NamedTuple):
    """A named tuple, as in the state of a scheduler."""

    first: int
    second: int


class Slotted:
    """An object with a slot."""

    __slots__ = ("first",)


class SlotAndDict(Slotted):
    """An object with a slot and a ``__dict__``."""

    def __init__(self) -> None:
        self.first, self.second = [1], [2]

    def __repr__(self) -> str:
        return f"SlotAndDict({getattr(self, 'first', None)}, {getattr(self, 'second', None)})"


class Tally:
    """An object with a method."""

    def __init__(self) -> None:
        self.counts = [1]

    def count(self) -> int:
        return len(self.counts)

    def __repr__(self) -> str:
        return f"Tally({self.counts})"


def make_bound() -> SimpleNamespace:
    """An object and a method of it."""
    tally = Tally()
    return SimpleNamespace(tally=tally, count=tally.count)


class Tagged(torch.Tensor):
    """A tensor with an attribute."""

    tag: Any

    def __deepcopy__(self, memo: Any) -> Any:
        copied: Any = self.detach().clone()
        copied.tag = copy.deepcopy(self.tag, memo)
        return copied

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Tagged({self.tolist()}, {self.tag})"


def make_tagged() -> SimpleNamespace:
    """An object with a tensor that has an attribute."""
    tensor = torch.ones(2).as_subclass(Tagged)
    tensor.tag = [1, "a"]
    return SimpleNamespace(kept=tensor)


class Numbered:
    """An object whose state is made when it is asked for."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number

    def __repr__(self) -> str:
        return f"Numbered({self.number})"


class Summary(Tally):
    """An object with a state to look at, which cannot be loaded."""

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count()}


def make_described() -> Any:
    """A tensor whose fields say that its rows are those of another in another order."""
    rows: Any = torch.arange(6.0).reshape(3, 2)
    rows.global_shape = (3, 2)
    rows.global_offsets, rows.local_offsets = ((2, 0), (0, 0)), ((0, 0), (1, 0))
    rows.local_sizes = ((1, 2), (2, 2))
    return rows


COMPLEX = (1 + 2j, 3 - 4j)
# functions that make a value
VALUES: dict[str, Callable[[], Any]] = {
    "conjugated": lambda: torch.tensor(COMPLEX).conj(),
    "negated": lambda: torch.tensor(COMPLEX).conj().imag,
    "expanded": lambda: torch.ones(1, 2).expand(3, 2),
    "transposed": lambda: torch.arange(6.0).reshape(2, 3).t(),
    "offset": lambda: torch.arange(6.0)[2:4],
    "frozen": lambda: nn.Parameter(torch.ones(2), requires_grad=False),
    "0-d": lambda: torch.tensor(5.5),
    "tuple": lambda: (torch.ones(2), 1),
    "list": lambda: [1, [2, 3]],
    "set": lambda: {1, 2},
    "bytearray": lambda: bytearray(b"ab"),
    "named-tuple": lambda: Pair(1, 2),
    "size": lambda: torch.Size((2, 3)),
    "dtype": lambda: torch.float16,
    "deque": lambda: deque([1, 2]),
}
# functions that make an object whose attributes a staged copy must copy too
OBJECTS: dict[str, Callable[[], Any]] = {
    "slots": SlotAndDict,
    "entries": lambda: SimpleNamespace(kept=OrderedDict(a=[1]), later=(1, [2]), counted=defaultdict(list, b=[3])),
    "parameter": lambda: SimpleNamespace(kept=nn.Parameter(torch.ones(2))),
    "sparse": lambda: SimpleNamespace(kept=torch.eye(2).to_sparse()),
    "method": make_bound,
    "tagged": make_tagged,
}
# functions that make a value that a copy in another dtype, by an address in use again, or of its state would change
EXACT: dict[str, Callable[[], Any]] = {
    "count": lambda: torch.tensor(2**24 + 1),
    "several": lambda: [Numbered(number) for number in range(6)],
    "summary": Summary,
}

# a tensor with fields that a save goes by, from torch 2.14 on
DESCRIBED: dict[str, Callable[[], Any]] = {"described": make_described}


STAGED = tuple(
    f"mesh={2 if at % 3 else 1} x=5:S(0) value={name} async={how}"
    for how in ("stager", "writer")
    for at, name in enumerate(VALUES)
) + tuple(
    f"mesh=1 x=5:S(0) value={name} async={how}"
    for name in (*OBJECTS, *EXACT, *DESCRIBED)
    for how in ("stager", "writer")
)
MAKERS = VALUES | OBJECTS | EXACT | DESCRIBED

STAGED_AGAIN = (
    "mesh=2 x=5x2:S(0) a=4:R state={x:x,d:{a:a,n:1}}",
    "mesh=3 mesh.load=2 x=7:S(0):int64 a=3:-:float64 state={x:x,l:[a,1]} to.x=R",
    "mesh=2 mesh.load=1 x=6x4:-:float32:distinct:sliced a=4:S(0):bool threads=2",
    "mesh=1 x=():R a=5x3:-:float32:distinct:transposed",
    "mesh=2 x=5x2:S(0) log=7",
    "mesh=1 x=5:- log=2",
)


@save_only
@trip_law(
    "staged",
    source=f"{DOCS}, async_save: first de-stages the state_dict; AsyncStager.stage: inoculated from later updates",
    control="mesh=2 x=5:S(0) value=tuple async=writer",
    texts=STAGED,
    features=lambda case: {f"staged:{case.get('value')}", f"stager:{case.get('async')}"},
)
def staged(state: Saved, writer: Writer, folder: Folder, value: Word, async_: Word):
    """An asynchronous save stores a value as a synchronous save does: equal and of its type at the time of the call."""
    entry, stager = MAKERS[value](), make_stager(async_)
    state["value"] = [entry] if isinstance(entry, tuple) else entry
    pending = dcp.async_save(state, storage_writer=writer(folder), async_stager=stager)
    mutate(entry)
    wait_for_save(pending)
    if stager is not None:
        stager.close()
    return {}


@staged.then
def _(state: Destination, reader: Reader, folder: Folder, value: Word):
    want = MAKERS[value]()
    destination = torch.zeros(want.shape, dtype=want.dtype) if isinstance(want, torch.Tensor) else 0
    state["value"] = [destination] if isinstance(want, tuple) else destination
    load(state, reader(folder))
    got = state.pop("value")
    got = got[0] if isinstance(want, tuple) and isinstance(got, list) else got
    if isinstance(want, torch.Tensor):
        return {"loaded": state, "value": got}
    return {"loaded": state, "type": type(got).__name__, "value": repr(got)}


@staged.due
def _(state, value):
    want = MAKERS[value]()
    if isinstance(want, torch.Tensor):
        moved = value in DESCRIBED and compat.torch_release() >= (2, 14)
        full = want.detach().clone()
        return {"loaded": state, "value": full.roll(-1, 0) if moved else full}
    return {"loaded": state, "type": Of(type(want).__name__), "value": repr(want)}


def copy_tensors(value: Any, newer: Any) -> None:
    """Copy the elements of every tensor of a newer state into the tensor of this state."""
    if isinstance(value, torch.Tensor):
        with torch.no_grad():
            value.copy_(newer)
    elif isinstance(value, dict):
        for key in value:
            copy_tensors(value[key], newer[key])
    elif isinstance(value, list):
        for entry, other in zip(value, newer, strict=True):
            copy_tensors(entry, other)


@save_only
@trip_law(
    "staged-again",
    source=f"{DOCS}, async_save: async_stager, closed after the last checkpoint; AsyncStager.stage",
    control="mesh=2 x=5:S(0) a=4:R",
    texts=STAGED_AGAIN,
    features=lambda case: {"async-save"},
)
def staged_again(state: Saved, newer: Newer, writer: Writer, folder: Folder, log: int = 4):
    """Saves with one stager each store the values at the time of their call, of tensors that change in place, one also
    in size."""
    stager, entries = make_stager("stager"), torch.arange(4.0)
    with_log = {**state, "log": entries}
    wait_for_save(dcp.async_save(with_log, storage_writer=writer(f"{folder}/first"), async_stager=stager))
    copy_tensors(state, newer)
    resize(entries, log)
    wait_for_save(dcp.async_save(with_log, storage_writer=writer(f"{folder}/second"), async_stager=stager))
    stager.close()
    return {}


def resize(tensor: torch.Tensor, size: int) -> None:
    """Give a tensor and its memory another size, and number its elements."""
    tensor.resize_(size)
    tensor.untyped_storage().resize_(size * tensor.itemsize)
    tensor.copy_(torch.arange(size))


@staged_again.then
def _(state: Destination, newer: NewerDestination, reader: Reader, folder: Folder, log: int = 4):
    first, second = reader(f"{folder}/first"), reader(f"{folder}/second")
    return {
        "first": load(state, first),
        "second": load(newer, second),
        "logs": [load({"log": torch.zeros(4)}, first)["log"], load({"log": torch.zeros(log)}, second)["log"]],
    }


@staged_again.due
def _(state, newer, log):
    return {"first": state, "second": newer, "logs": [torch.arange(4.0), torch.arange(float(log))]}


@trip_law(
    "stager",
    source=f"{DOCS}, AsyncStager: stage, should_synchronize_after_execute, synchronize_staging; async_save",
    control="mesh=2 x=5:S(0) a=4:R waits=yes",
    texts=(
        "mesh=2 x=5:S(0) a=4:R waits=no",
        "mesh=2x2 x=5x4:S(0),S(1) a=3:-:int64 state={x:x,d:{a:a,n:1}} waits=yes",
        "mesh=3 mesh.load=2 x=7:S(0):float64 waits=no",
    ),
    features=lambda case: {"async-save"},
)
def stager(state: Saved, newer: Newer, writer: Writer, folder: Folder, waits: Literal["yes", "no"]):
    """An asynchronous save stores the state that a custom stager returns, and waits for the stager if it says so."""
    calls = []

    class CustomStager(AsyncStager):
        should_synchronize_after_execute = waits == "yes"

        def stage(self, state_dict):
            calls.append("stage")
            return state

        def synchronize_staging(self):
            calls.append("synchronize")

        def close(self):
            pass

    wait_for_save(dcp.async_save(newer, storage_writer=writer(folder), async_stager=CustomStager()))
    return {"calls": calls}


@stager.due
def _(waits):
    return {"calls": ["stage", "synchronize"] if waits == "yes" else ["stage"]}


add_load(stager)
