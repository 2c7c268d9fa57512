"""What a driver and the agents on its hosts say to each other over TCP, beside the streams of ranks: typed messages in frames."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
from typing import Any

import msgspec

from shardlaw.conformance.world import protocol
from shardlaw.conformance.world.progress import Place
from shardlaw.conformance.world.watch import Activity

PATIENCE = 10.0  # seconds, while the driver listens, for whoever connects to say who it is
ANSWER_SECONDS = 120.0  # for the driver to answer, which on a busy machine still loads torch
LARGEST_CLAIM = 1 << 12


class Orders(msgspec.Struct, frozen=True):
    """What an agent must know before it knows anything: where the driver is, the launch's token, the number of the launched process that
    it is in, the device of its ranks, whom it must not outlive, and whether all is on one machine."""

    host: str
    port: int
    token: bytes
    process: int
    device: int
    parent: int
    loopback: bool


# when a connection opens


class Challenge(msgspec.Struct, tag=True, frozen=True):
    """The driver's first word to whoever connects."""

    nonce: bytes


class Claim(msgspec.Struct, tag=True, frozen=True):
    """Who connects: the agent of a launched process, or (``world`` is not 0) the stream of its rank in a world; with a proof that it knows
    the launch's token."""

    process: int
    world: int
    nonce: bytes
    proof: bytes


class Welcome(msgspec.Struct, tag=True, frozen=True):
    """The claim is believed; the driver knows the token too."""

    proof: bytes


# driver to agent


class Begin(msgspec.Struct, tag=True, frozen=True):
    """Get ready to start ranks of a target. ``folder`` is the driver's, with a file ``mark`` in it: the agent may see it or not."""

    target: dict[str, Any]
    folder: str
    mark: str


class Start(msgspec.Struct, tag=True, frozen=True):
    """Start one rank of a world of ``size``, which meets at ``port`` of ``host``, and connect it to the driver."""

    world: int
    size: int
    rank: int
    host: str
    port: int


class Look(msgspec.Struct, tag=True, frozen=True):
    """Tell all that is seen of a world's rank, after it was made to ``dump`` its stacks or not."""

    world: int
    turn: int
    dump: bool


class End(msgspec.Struct, tag=True, frozen=True):
    """Kill a world's rank, and forget it."""

    world: int


# agent to driver


class Greeting(msgspec.Struct, tag=True, frozen=True):
    """Ranks can be started on ``host``; ``problem`` says why not. ``shares`` tells whether the driver's folder is seen."""

    host: str
    problem: str
    shares: bool


class Pulse(msgspec.Struct, tag=True, frozen=True):
    """Where a world's rank is and what it uses of the CPU, and the part of one that is to be had; sent when it changes. World 0: the agent
    lives."""

    world: int
    place: Place
    activity: Activity | None
    share: float


class Left(msgspec.Struct, tag=True, frozen=True):
    """What a world's rank leaves behind: messages that it has not sent, its stacks, what it printed last."""

    world: int
    turn: int
    unsent: bytes
    stack: str
    output: str


class Refused(msgspec.Struct, tag=True, frozen=True):
    """A world's rank could not be started."""

    world: int
    problem: str


class Exited(msgspec.Struct, tag=True, frozen=True):
    """A world's rank has ended, with an exit code or (negative) a signal."""

    world: int
    status: int


class Broken(msgspec.Struct, tag=True, frozen=True):
    """The agent can start no more ranks."""

    reason: str


ToAgent = Begin | Start | Look | End
FromAgent = Greeting | Pulse | Left | Refused | Exited | Broken


def proof(token: bytes, who: str, claim: Claim, nonce: bytes) -> bytes:
    """What only somebody who knows the token can say of a claim that answers the driver's ``nonce``; ``who`` says it."""
    words = f"{who} {claim.process} {claim.world} {nonce.hex()} {claim.nonce.hex()}"
    return hmac.digest(token, words.encode(), hashlib.sha256)


def tune(stream: socket.socket) -> None:
    """Send small messages at once, and notice within half a minute that the other host has gone."""
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 30_000)):
        if hasattr(socket, name):
            stream.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def connect(address: tuple[str, int], token: bytes, process: int, world: int = 0) -> socket.socket:
    """Connect to the driver and be believed. Raises ``OSError``, or :class:`~shardlaw.conformance.world.protocol.ProtocolError` where there
    is somebody else."""
    stream = socket.create_connection(address, ANSWER_SECONDS)
    try:
        tune(stream)
        nonce = _answer(stream, Challenge).nonce
        claim = Claim(process, world, secrets.token_bytes(16), b"")
        stream.sendall(protocol.frame(msgspec.structs.replace(claim, proof=proof(token, "agent", claim, nonce))))
        if not hmac.compare_digest(_answer(stream, Welcome).proof, proof(token, "driver", claim, nonce)):
            raise protocol.ProtocolError("it does not know the token of this launch")
    except BaseException:
        stream.close()
        raise
    stream.settimeout(None)
    return stream


def _answer(stream: socket.socket, kind: Any) -> Any:
    """The next frame, and not a byte more."""
    (length,) = protocol.HEADER.unpack(_exactly(stream, protocol.HEADER.size))
    if length > LARGEST_CLAIM:
        raise protocol.ProtocolError("it is no driver")
    try:
        return msgspec.msgpack.decode(_exactly(stream, length), type=kind)
    except msgspec.MsgspecError as error:
        raise protocol.ProtocolError(str(error)) from None


def _exactly(stream: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = stream.recv(count - len(data))
        if not more:
            raise protocol.ProtocolError("it closed the connection")
        data += more
    return data


class PendingConnection:
    """Somebody who has connected to the driver and has not yet shown who it is."""

    def __init__(self, stream: socket.socket, token: bytes) -> None:
        stream.setblocking(False)
        tune(stream)
        self.stream = stream
        self.silent = 0.0  # seconds
        self._token = token
        self._nonce = secrets.token_bytes(16)
        self._frames = protocol.Frames(Claim)
        self._heard = 0
        stream.send(protocol.frame(Challenge(self._nonce)))

    def hear(self) -> Claim | None:
        """The claim, once it is here and believed. Raises ``OSError`` or :class:`~shardlaw.conformance.world.protocol.ProtocolError`."""
        try:
            data = self.stream.recv(LARGEST_CLAIM)
        except BlockingIOError:
            return None
        self._heard += len(data)
        if not data or self._heard > LARGEST_CLAIM:
            raise protocol.ProtocolError("no claim")
        for claim in self._frames.feed(data):
            if not hmac.compare_digest(claim.proof, proof(self._token, "agent", claim, self._nonce)):
                raise protocol.ProtocolError("it does not know the token of this launch")
            self.stream.send(protocol.frame(Welcome(proof(self._token, "driver", claim, self._nonce))))
            self.stream.setblocking(True)
            found: Claim = claim
            return found
        return None
