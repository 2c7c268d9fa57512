"""The messages between driver, server and ranks: typed, in length-prefixed frames over a byte stream.

A frame is four bytes of length (big-endian) and a MessagePack body. Nothing in it depends on the machine that wrote it, so that the
stream may be a socket pair or TCP. Tensors are sent as dtype, shape and raw bytes. This module does not import torch: the driver starts
the server before it has loaded torch.
"""

from __future__ import annotations

import ctypes
import signal
import socket
import struct
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from shardlaw.conformance.law.target import Target
from shardlaw.conformance.law.verdict import Answer, Deposit, Deviation, Outcome, Raised, Tracing

if TYPE_CHECKING:
    import torch

DUMP_SIGNAL = signal.SIGUSR1  # makes a rank dump the stacks of all its threads
EVERY_GROUP = "*"
HEADER = struct.Struct(">I")
MAX_FRAME_BYTES = 1 << 30


class ProtocolError(Exception):
    """Bytes that no peer of this version would have sent."""


PackedTensor = tuple[str, tuple[int, ...], bytes]


class PackedAnswer(msgspec.Struct, tag=True, frozen=True, omit_defaults=True):
    """One rank's :class:`~shardlaw.conformance.law.verdict.Answer` to the case at ``index`` of a batch. ``collectives`` counts those that
    it ran, by group."""

    batch: int
    index: int
    outcome: Outcome
    deviations: tuple[Deviation, ...] = ()
    raised: Raised | None = None
    deposits: tuple[tuple[str, str, str, str, PackedTensor, PackedTensor | None, bool], ...] = ()
    features: tuple[str, ...] = ()
    output: str = ""
    reason: str = ""
    collectives: dict[str, int] = {}
    trace: tuple[str, ...] = ()
    evidence: bytes = b""


class Task(msgspec.Struct, array_like=True, frozen=True):
    """A case to run: its law, its text, the folder that its ranks share, its stage, when to send a trace, and whether ranks may reuse
    results of earlier cases (:mod:`shardlaw.conformance.rank.reuse`)."""

    law: str
    text: str
    folder: str
    stage: int
    traced: Tracing = ""
    reuse: bool = False


# driver to rank


class Batch(msgspec.Struct, tag=True, frozen=True):
    """Cases to run in order."""

    serial: int
    tasks: tuple[Task, ...]


class Resume(msgspec.Struct, tag=True, frozen=True):
    """Every rank raised at the same case: go on, once the groups named in ``verify`` (``*``: all) have passed an ``all_reduce``."""

    verify: tuple[str, ...] = ()


class Stop(msgspec.Struct, tag=True, frozen=True):
    """Exit normally."""


# rank to driver


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The rank has joined the process group."""


class Failed(msgspec.Struct, tag=True, frozen=True):
    """The rank could not start, or must be replaced; ``error`` is one line."""

    error: str


class SoFar(msgspec.Struct, tag=True, frozen=True):
    """What the rank would answer if the case ended here."""

    answer: PackedAnswer


class Groups(msgspec.Struct, tag=True, frozen=True):
    """The process groups of this rank, each with its global ranks; sent when they have changed."""

    ranks: dict[str, tuple[int, ...]]


class Parked(msgspec.Struct, tag=True, frozen=True):
    """The rank raised at ``index`` and waits for :class:`Resume`. ``total`` counts the collectives of each of its groups so far,
    ``collectives`` those of this case. An ``unusable`` rank must not run further cases."""

    batch: int
    index: int
    total: dict[str, int]
    collectives: dict[str, int]
    unusable: bool


class BatchDone(msgspec.Struct, tag=True, frozen=True):
    """A rank has run a batch. Its resource usage: open descriptors, threads (native ones too), process groups, resident bytes."""

    batch: int
    files: int
    threads: int
    groups: int
    memory: int


# driver to server


class Spawn(msgspec.Struct, tag=True, frozen=True):
    """Fork ``ranks`` of a world of ``size``; ``devices`` are their device indices, in the same order. They rendezvous at ``port``, a free
    TCP port of ``host``, or in ``folder`` where ``host`` is empty. The descriptors of their streams are sent with this frame."""

    world: int
    size: int
    folder: str
    host: str
    port: int
    target: Target
    ranks: tuple[int, ...]
    devices: tuple[int, ...]


class Signal(msgspec.Struct, tag=True, frozen=True):
    """Send a signal to the ranks of a world that are still alive."""

    world: int
    signal: int


# server to driver


class Hello(msgspec.Struct, tag=True, frozen=True):
    """The server has imported everything; ``problem`` is the error of an import that failed, or empty."""

    problem: str = ""


class Spawned(msgspec.Struct, tag=True, frozen=True):
    """The process ids of a world's ranks; ``problem`` says why there are none."""

    world: int
    pids: dict[int, int]
    problem: str = ""


class Exited(msgspec.Struct, tag=True, frozen=True):
    """A rank has ended, with an exit code or (negative) a signal."""

    world: int
    rank: int
    status: int


ToRank = Batch | Resume | Stop
FromRank = Ready | Failed | PackedAnswer | SoFar | Groups | Parked | BatchDone
ToServer = Spawn | Signal
FromServer = Hello | Spawned | Exited

_encoder = msgspec.msgpack.Encoder()


def encode_frame(message: object) -> bytes:
    """The bytes of one frame that holds ``message``."""
    body = _encoder.encode(message)
    return HEADER.pack(len(body)) + body


class FrameDecoder:
    """Decodes a byte stream, given in pieces of any size, into messages of type ``kind``."""

    def __init__(self, kind: Any) -> None:
        self._decode: Callable[[bytes], Any] = msgspec.msgpack.Decoder(kind).decode
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """The messages that ``data`` completes. Raises :class:`ProtocolError`."""
        self._bytes += data
        while len(self._bytes) >= HEADER.size:
            (length,) = HEADER.unpack_from(self._bytes)
            if length > MAX_FRAME_BYTES:
                raise ProtocolError(f"a frame of {length} bytes")
            if len(self._bytes) < HEADER.size + length:
                return
            body = bytes(self._bytes[HEADER.size : HEADER.size + length])
            del self._bytes[: HEADER.size + length]
            try:
                message = self._decode(body)
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise ProtocolError(str(error)) from None
            yield message


def receive(stream: socket.socket, frames: FrameDecoder) -> Iterator[Any]:
    """Wait for bytes and yield the messages that they complete. Raises ``EOFError`` once the peer has closed the stream."""
    data = stream.recv(1 << 16)
    if not data:
        raise EOFError
    yield from frames.feed(data)


def pack_tensor(tensor: torch.Tensor) -> PackedTensor:
    """A CPU tensor as dtype, shape and bytes."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous()
    size = flat.numel() * flat.element_size()
    return str(flat.dtype).removeprefix("torch."), tuple(flat.shape), ctypes.string_at(flat.data_ptr(), size) if size else b""


def unpack_tensor(packed: PackedTensor) -> torch.Tensor:
    """The inverse of :func:`pack_tensor`."""
    import torch

    dtype, shape, data = packed
    kind = getattr(torch, dtype)
    return torch.frombuffer(bytearray(data), dtype=kind).reshape(shape) if data else torch.empty(shape, dtype=kind)


def pack_answer(batch: int, index: int, answer: Answer, output: str, collectives: dict[str, int]) -> PackedAnswer:
    """The message for a rank's answer to the case at ``index`` of a batch."""
    from shardlaw.conformance.law.evidence import pack

    return PackedAnswer(
        batch,
        index,
        answer.outcome,
        answer.deviations,
        answer.raised,
        tuple(
            (d.check, d.shape, d.mesh, d.placements, pack_tensor(d.local), None if d.want is None else pack_tensor(d.want), d.exact)
            for d in answer.deposits
        ),
        answer.features,
        output,
        answer.reason,
        collectives,
        answer.trace,
        b"" if answer.evidence is None else pack(answer.evidence),
    )


def unpack_answer(rank: int, message: PackedAnswer) -> Answer:
    """The inverse of :func:`pack_answer`. Raises :class:`ProtocolError` for tensors or evidence that cannot be read: torch may have
    overwritten the memory of a rank."""
    try:
        return _unpack_answer(rank, message)
    except Exception as error:
        raise ProtocolError(f"{type(error).__name__}: {error}") from error


def _unpack_answer(rank: int, message: PackedAnswer) -> Answer:
    from shardlaw.conformance.law.evidence import unpack

    return Answer(
        rank,
        message.outcome,
        message.deviations,
        message.raised,
        tuple(
            Deposit(check, shape, mesh, placements, unpack_tensor(local), None if want is None else unpack_tensor(want), exact)
            for check, shape, mesh, placements, local, want, exact in message.deposits
        ),
        message.features,
        message.raised.stack if message.raised else "",
        message.output,
        message.reason,
        message.trace,
        unpack(message.evidence) if message.evidence else None,
    )
