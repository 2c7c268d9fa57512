"""What driver, server and ranks say to each other: typed messages in length-prefixed frames over a byte stream.

A frame is four bytes of length (big-endian) and a MessagePack body. Nothing in a frame refers to the machine that wrote it: the
same stream works over a socket pair and over TCP. Tensors travel as dtype, shape and raw bytes. Importing this module does not import
torch: the server is started before the driver has it.
"""

from __future__ import annotations

import ctypes
import signal
import socket
import struct
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal

import msgspec

if TYPE_CHECKING:
    import torch

    from shardlaw.conformance.law.verdict import Answer

DUMP_SIGNAL = signal.SIGUSR1  # makes a rank write down the stacks of all its threads
EVERY_GROUP = "*"
HEADER = struct.Struct(">I")
LARGEST_FRAME = 1 << 30


class ProtocolError(Exception):
    """Bytes that no peer of this version would have sent."""


Packed = tuple[str, tuple[int, ...], bytes]


class Said(msgspec.Struct, tag=True, frozen=True, omit_defaults=True):
    """One rank's :class:`~shardlaw.conformance.law.verdict.Answer` to the case at ``index`` of a batch; ``ran`` counts its collectives by
    group."""

    batch: int
    index: int
    outcome: Literal["held", "deviates", "raised", "rejected"]
    deviations: tuple[tuple[str, str, str, str, str], ...] = ()
    raised: tuple[str, str, str] | None = None
    deposits: tuple[tuple[str, str, str, str, Packed, Packed | None, bool], ...] = ()
    features: tuple[str, ...] = ()
    output: str = ""
    reason: str = ""
    ran: dict[str, int] = {}
    trace: tuple[str, ...] = ()
    evidence: bytes = b""


class Task(msgspec.Struct, array_like=True, frozen=True):
    """A case to run: its law, its text, the folder that its ranks share, which of the law's worlds this is, whether it is traced, and
    whether ranks may reuse what was worked out before (:mod:`shardlaw.conformance.rank.reuse`)."""

    law: str
    text: str
    folder: str
    stage: int
    traced: bool = False
    reuse: bool = False


# driver to rank


class Batch(msgspec.Struct, tag=True, frozen=True):
    """Cases to run one after the other."""

    serial: int
    tasks: tuple[Task, ...]


class Go(msgspec.Struct, tag=True, frozen=True):
    """Every rank raised at the same case: go on. ``prove`` names the groups that must first show that they still work, or is ``*``."""

    prove: tuple[str, ...] = ()


class Stop(msgspec.Struct, tag=True, frozen=True):
    """End in good order."""


# rank to driver


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The process group stands."""


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The rank could not start; ``error`` is one line."""

    error: str


class Groups(msgspec.Struct, tag=True, frozen=True):
    """The process groups of this rank and their global ranks, sent when they have changed."""

    ranks: dict[str, tuple[int, ...]]


class Parked(msgspec.Struct, tag=True, frozen=True):
    """The rank's check raised at ``index`` and it waits for :class:`Go`. ``total`` counts the collectives of each of its groups so far,
    ``ran`` those of this case. A ``spoilt`` rank must not serve any more."""

    batch: int
    index: int
    total: dict[str, int]
    ran: dict[str, int]
    spoilt: bool


class Done(msgspec.Struct, tag=True, frozen=True):
    """A batch is over. What the rank weighs by now: open descriptors, threads (native ones too), process groups, resident bytes."""

    batch: int
    files: int
    threads: int
    groups: int
    memory: int


# driver to server


class Spawn(msgspec.Struct, tag=True, frozen=True):
    """Fork ``ranks`` of a world of ``size``. They meet at ``port``, a free TCP port, of ``host``, or where there is none in ``folder``.
    Each works on the device of the same place in ``devices``. The descriptors of their streams travel beside this frame."""

    world: int
    size: int
    folder: str
    host: str
    port: int
    target: dict[str, Any]
    ranks: tuple[int, ...]
    devices: tuple[int, ...]


class Signal(msgspec.Struct, tag=True, frozen=True):
    """Send a signal to the ranks of a world that are still alive."""

    world: int
    signal: int


# server to driver


class Hello(msgspec.Struct, tag=True, frozen=True):
    """Everything is imported; ``problem`` says what could not be."""

    problem: str = ""


class Spawned(msgspec.Struct, tag=True, frozen=True):
    """The process ids of a world's ranks; or why there is none."""

    world: int
    pids: dict[int, int]
    problem: str = ""


class Exited(msgspec.Struct, tag=True, frozen=True):
    """A rank has ended, with an exit code or (negative) a signal."""

    world: int
    rank: int
    status: int


ToRank = Batch | Go | Stop
FromRank = Ready | Failed | Said | Groups | Parked | Done
ToServer = Spawn | Signal
FromServer = Hello | Spawned | Exited

_encoder = msgspec.msgpack.Encoder()


def frame(message: object) -> bytes:
    """A message as the bytes of one frame."""
    body = _encoder.encode(message)
    return HEADER.pack(len(body)) + body


class Frames:
    """Takes in bytes as they come and gives out whole frames, decoded as one of the messages of ``kind``."""

    def __init__(self, kind: Any) -> None:
        self._decode: Callable[[bytes], Any] = msgspec.msgpack.Decoder(kind).decode
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """The messages that ``data`` completes. Raises :class:`ProtocolError`."""
        self._bytes += data
        while len(self._bytes) >= HEADER.size:
            (length,) = HEADER.unpack_from(self._bytes)
            if length > LARGEST_FRAME:
                raise ProtocolError(f"a frame of {length} bytes")
            if len(self._bytes) < HEADER.size + length:
                return
            body = bytes(self._bytes[HEADER.size : HEADER.size + length])
            del self._bytes[: HEADER.size + length]
            try:
                message = self._decode(body)
            except msgspec.MsgspecError as error:
                raise ProtocolError(str(error)) from None
            yield message


def receive(stream: socket.socket, frames: Frames) -> Iterator[Any]:
    """Block for bytes and give out the messages that they complete. Raises ``EOFError`` once the peer is gone."""
    data = stream.recv(1 << 16)
    if not data:
        raise EOFError
    yield from frames.feed(data)


def pack_tensor(tensor: torch.Tensor) -> Packed:
    """A CPU tensor as dtype, shape and bytes."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous()
    size = flat.numel() * flat.element_size()
    return str(flat.dtype).removeprefix("torch."), tuple(flat.shape), ctypes.string_at(flat.data_ptr(), size) if size else b""


def unpack_tensor(packed: Packed) -> torch.Tensor:
    """The inverse of :func:`pack_tensor`."""
    import torch

    dtype, shape, data = packed
    kind = getattr(torch, dtype)
    return torch.frombuffer(bytearray(data), dtype=kind).reshape(shape) if data else torch.empty(shape, dtype=kind)


def pack_answer(batch: int, index: int, answer: Answer, output: str, ran: dict[str, int]) -> Said:
    """What a rank sends of an answer."""
    if answer.outcome == "held" and not answer.deposits:
        return Said(batch, index, "held", features=answer.features, ran=ran, trace=answer.trace, evidence=_pack_evidence(answer))
    assert answer.outcome != "crashed"
    assert answer.outcome != "silent"
    return Said(
        batch,
        index,
        answer.outcome,
        tuple((d.kind, d.check, d.message, d.expected, d.got) for d in answer.deviations),
        (answer.raised.error, answer.raised.text, answer.raised.stack) if answer.raised else None,
        tuple(
            (d.check, d.shape, d.mesh, d.placements, pack_tensor(d.local), None if d.want is None else pack_tensor(d.want), d.exact)
            for d in answer.deposits
        ),
        answer.features,
        output,
        answer.reason,
        ran,
        answer.trace,
        _pack_evidence(answer),
    )


def _pack_evidence(answer: Answer) -> bytes:
    from shardlaw.conformance.law.evidence import pack

    return pack(answer.evidence) if answer.evidence is not None else b""


def unpack_answer(rank: int, said: Said) -> Answer:
    """The answer that the rank gave."""
    from shardlaw.conformance.law.evidence import unpack
    from shardlaw.conformance.law.verdict import Answer, Deposit, Deviation, Raised

    evidence = unpack(said.evidence) if said.evidence else None
    if said.outcome == "held" and not said.deposits:
        return Answer(rank, "held", features=said.features, trace=said.trace, evidence=evidence)
    return Answer(
        rank,
        said.outcome,
        tuple(Deviation(*item) for item in said.deviations),  # type: ignore[arg-type]
        Raised(*said.raised) if said.raised else None,
        tuple(
            Deposit(check, shape, mesh, placements, unpack_tensor(local), None if want is None else unpack_tensor(want), exact)
            for check, shape, mesh, placements, local, want, exact in said.deposits
        ),
        said.features,
        said.raised[2] if said.raised else "",
        said.output,
        said.reason,
        said.trace,
        evidence,
    )
