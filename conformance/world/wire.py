"""The messages between a driver and the agents on its hosts, over TCP, and how a connection is opened and authenticated."""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
from typing import Any

import msgspec

from shardlaw.conformance.law.target import Target
from shardlaw.conformance.world import protocol
from shardlaw.conformance.world.progress import Position
from shardlaw.conformance.world.watch import Activity

CLAIM_SECONDS = 10.0  # for a new connection to authenticate, while the driver listens
ANSWER_SECONDS = 120.0  # for the driver to answer, which may still be loading torch
MAX_CLAIM_BYTES = 1 << 12


class AgentConfig(msgspec.Struct, frozen=True):
    """What an agent is started with: the driver's address, the launch's token, the number of its launched process, the device index of its
    ranks, the process id that it must not outlive, and whether all processes are on one machine (``loopback``)."""

    host: str
    port: int
    token: bytes
    process: int
    device: int
    parent: int
    loopback: bool


# opening a connection


class Challenge(msgspec.Struct, tag=True, frozen=True):
    """The driver's first message on a new connection."""

    nonce: bytes


class Claim(msgspec.Struct, tag=True, frozen=True):
    """Who connects: the agent of a launched ``process``, or, where ``world`` is not 0, its rank in that world; with a proof that it knows
    the launch's token."""

    process: int
    world: int
    nonce: bytes
    proof: bytes


class Welcome(msgspec.Struct, tag=True, frozen=True):
    """The driver has accepted the claim, and proves that it knows the token too."""

    proof: bytes


# driver to agent


class Begin(msgspec.Struct, tag=True, frozen=True):
    """Prepare to start ranks of a target. ``mark`` is a file in the driver's ``folder``, which the agent may see or not."""

    target: Target
    folder: str
    mark: str


class StartRank(msgspec.Struct, tag=True, frozen=True):
    """Start one rank of a world of ``size``, which has its rendezvous at ``port`` of ``host``, and connect it to the driver."""

    world: int
    size: int
    rank: int
    host: str
    port: int


class RequestReport(msgspec.Struct, tag=True, frozen=True):
    """Send a :class:`RankReport` of a world's rank; ``dump``: have the rank dump its stacks first."""

    world: int
    request: int
    dump: bool


class EndRank(msgspec.Struct, tag=True, frozen=True):
    """Kill a world's rank, and remove its files."""

    world: int


# agent to driver


class AgentReady(msgspec.Struct, tag=True, frozen=True):
    """The agent can start ranks on ``host``, or cannot because of a ``problem``. ``shares_folder``: whether it sees the driver's folder."""

    host: str
    problem: str
    shares_folder: bool


class RankStatus(msgspec.Struct, tag=True, frozen=True):
    """The position of a world's rank, its CPU use, and the share of a CPU that a rank gets on its host; sent on change. World 0: a
    heartbeat of the agent."""

    world: int
    position: Position
    activity: Activity | None
    cpu_share: float


class RankReport(msgspec.Struct, tag=True, frozen=True):
    """A rank's unsent messages, its stacks and the end of its output. ``request`` is that of the :class:`RequestReport`, or 0."""

    world: int
    request: int
    unsent: bytes
    stack: str
    output: str


class StartFailed(msgspec.Struct, tag=True, frozen=True):
    """A world's rank could not be started."""

    world: int
    problem: str


class Exited(msgspec.Struct, tag=True, frozen=True):
    """A world's rank has ended, with an exit code or (negative) a signal."""

    world: int
    status: int


class AgentFailed(msgspec.Struct, tag=True, frozen=True):
    """The agent can start no more ranks."""

    reason: str


ToAgent = Begin | StartRank | RequestReport | EndRank
FromAgent = AgentReady | RankStatus | RankReport | StartFailed | Exited | AgentFailed


def proof(token: bytes, who: str, claim: Claim, nonce: bytes) -> bytes:
    """The proof that ``who`` (``agent`` or ``driver``) knows the token: a digest of the claim and the driver's ``nonce``."""
    words = f"{who} {claim.process} {claim.world} {nonce.hex()} {claim.nonce.hex()}"
    return hmac.digest(token, words.encode(), hashlib.sha256)


def tune(stream: socket.socket) -> None:
    """Set the options of a socket: send small messages at once, and detect within half a minute that the other host has gone."""
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 30_000)):
        if hasattr(socket, name):
            stream.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def connect(address: tuple[str, int], token: bytes, process: int, world: int = 0) -> socket.socket:
    """Connect to the driver, and authenticate. Raises ``OSError``, or :class:`~shardlaw.conformance.world.protocol.ProtocolError` where the
    peer is not the driver of this launch."""
    stream = socket.create_connection(address, ANSWER_SECONDS)
    try:
        tune(stream)
        nonce = _receive_message(stream, Challenge).nonce
        claim = Claim(process, world, secrets.token_bytes(16), b"")
        stream.sendall(protocol.encode_frame(msgspec.structs.replace(claim, proof=proof(token, "agent", claim, nonce))))
        if not hmac.compare_digest(_receive_message(stream, Welcome).proof, proof(token, "driver", claim, nonce)):
            raise protocol.ProtocolError("it does not know the token of this launch")
    except BaseException:
        stream.close()
        raise
    stream.settimeout(None)
    return stream


def _receive_message(stream: socket.socket, kind: Any) -> Any:
    """Receive exactly one frame."""
    (length,) = protocol.HEADER.unpack(_receive_exactly(stream, protocol.HEADER.size))
    if length > MAX_CLAIM_BYTES:
        raise protocol.ProtocolError("it is no driver")
    try:
        return msgspec.msgpack.decode(_receive_exactly(stream, length), type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise protocol.ProtocolError(str(error)) from None


def _receive_exactly(stream: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = stream.recv(count - len(data))
        if not more:
            raise protocol.ProtocolError("it closed the connection")
        data += more
    return data


class PendingConnection:
    """A connection to the driver that is not authenticated yet. ``silent`` is how many seconds it has taken so far."""

    def __init__(self, stream: socket.socket, token: bytes) -> None:
        stream.setblocking(False)
        tune(stream)
        self.stream = stream
        self.silent = 0.0
        self._token = token
        self._nonce = secrets.token_bytes(16)
        self._frames = protocol.FrameDecoder(Claim)
        self._received = 0
        stream.send(protocol.encode_frame(Challenge(self._nonce)))

    def read_claim(self) -> Claim | None:
        """The claim, once it has arrived and its proof is right, else ``None``. Raises ``OSError`` or
        :class:`~shardlaw.conformance.world.protocol.ProtocolError`."""
        try:
            data = self.stream.recv(MAX_CLAIM_BYTES)
        except BlockingIOError:
            return None
        self._received += len(data)
        if not data or self._received > MAX_CLAIM_BYTES:
            raise protocol.ProtocolError("no claim")
        for claim in self._frames.feed(data):
            if not hmac.compare_digest(claim.proof, proof(self._token, "agent", claim, self._nonce)):
                raise protocol.ProtocolError("it does not know the token of this launch")
            self.stream.send(protocol.encode_frame(Welcome(proof(self._token, "driver", claim, self._nonce))))
            self.stream.setblocking(True)
            found: Claim = claim
            return found
        return None
