"""Launchers: each starts the ranks of worlds and reports when they end. A launcher knows nothing of cases.

:class:`ForkserverLauncher` forks ranks from a warm server on this machine. The launcher of many hosts is in ``hosts/hub.py``.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from shardlaw.conformance.law.target import Target
from shardlaw.conformance.world import protocol
from shardlaw.conformance.world.observer import LocalObserver, Observer

BOOTSTRAP = "import sys; sys.path[:] = {path!r}; from shardlaw.conformance.world.start import serve; serve({control}, {folder!r}, {driver})"

PORTS = range(20_000, 32_000)  # Linux hands out ports from 32768 on
PORT_ATTEMPTS = 100


class WorldError(Exception):
    """The target's ranks cannot be started. Its text is one line; ``output`` is what a rank printed, with its stack."""

    output = ""


class LostError(WorldError):
    """A host, or a process that starts ranks, has ended and cannot be replaced: the run cannot go on."""


@dataclass(frozen=True, eq=False)
class Connected:
    """A rank has connected to the driver after its world was launched."""

    world: int
    rank: int
    stream: socket.socket


class Launcher(Protocol):
    """Starts the ranks of worlds. The caller numbers the worlds."""

    @property
    def shares_files(self) -> bool:
        """Whether all ranks and the driver see the pool's folder. May wait for hosts to report it. Raises :class:`WorldError`."""

    def fileno(self) -> int:
        """A descriptor that is readable when :meth:`read_events` has something to return."""

    def launch(self, world: int, size: int) -> tuple[Observer, dict[int, socket.socket]]:
        """Start a world without waiting for its ranks. Returns its observer, and the driver's ends of the streams that exist already, by
        rank."""

    def kill_world(self, world: int) -> None:
        """Kill the ranks of a world that have not ended."""

    def read_events(self) -> list[protocol.FromServer | Connected]:
        """The events since the last call; does not wait. Raises ``EOFError`` when the launcher has ended and may be replaced,
        :class:`WorldError` when it may not."""

    def close(self) -> None:
        """End every rank, and release what the launcher holds."""


class ForkserverLauncher:
    """Forks the ranks of one target from a server process on this machine, which has imported torch. Its files are in ``folder``.
    ``multi_host``: some ranks of a world are on other machines."""

    shares_files = True

    def __init__(self, target: Target, folder: str, *, multi_host: bool = False) -> None:
        self._target = target
        self._folder = folder
        self._frames = protocol.FrameDecoder(protocol.FromServer)
        self._output = f"{folder}/server.out"
        self._control, theirs = socket.socketpair()
        self._has_started = False
        path = [entry or os.getcwd() for entry in sys.path]
        code = BOOTSTRAP.format(path=path, control=theirs.fileno(), folder=folder, driver=os.getpid())
        with theirs, open(self._output, "wb") as output:
            # in a process group of its own, so that Ctrl-C reaches the driver alone
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
                process_group=0,
                env=rank_environment(target, multi_host=multi_host),
            )

    def fileno(self) -> int:
        return self._control.fileno()

    def launch(self, world: int, size: int) -> tuple[LocalObserver, dict[int, socket.socket]]:
        pairs = [socket.socketpair() for _ in range(size)]
        everyone = tuple(range(size))
        observer = self.spawn(world, size, dict(zip(everyone, (theirs for _, theirs in pairs), strict=True)), everyone, "", free_port())
        for _, theirs in pairs:
            theirs.close()
        return observer, {rank: mine for rank, (mine, _) in enumerate(pairs)}

    def spawn(
        self, world: int, size: int, streams: dict[int, socket.socket], devices: tuple[int, ...], host: str, port: int
    ) -> LocalObserver:
        """Have the server fork the ranks of a world that ``streams`` names; ``devices`` are their device indices, in the same order.

        All ranks of the world rendezvous at ``port`` of ``host``, or in the world's folder where ``host`` is empty.
        """
        folder = f"{self._folder}/world-{world}"
        observer = LocalObserver(folder, size, lambda: self._signal(world, protocol.DUMP_SIGNAL))
        message = protocol.encode_frame(protocol.Spawn(world, size, folder, host, port, self._target, tuple(streams), devices))
        with suppress(OSError):  # read_events() reports it
            sent = socket.send_fds(self._control, [message], [stream.fileno() for stream in streams.values()])
            self._control.sendall(message[sent:])
        return observer

    def kill_world(self, world: int) -> None:
        self._signal(world, signal.SIGKILL)

    def _signal(self, world: int, number: int) -> None:
        with suppress(OSError):  # read_events() reports it
            self._control.sendall(protocol.encode_frame(protocol.Signal(world, number)))

    def read_events(self) -> list[protocol.FromServer | Connected]:
        found: list[protocol.FromServer | Connected] = []
        while True:
            try:
                data = self._control.recv(1 << 16, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return found
            except ConnectionError:
                data = b""
            if not data:
                raise EOFError(self._last_output_line())
            found.extend(self._frames.feed(data))
            self._has_started = True

    def _last_output_line(self) -> str:
        try:
            with open(self._output, errors="replace") as file:
                lines = [line.strip() for line in file if line.strip()]
        except OSError:
            lines = []
        return lines[-1] if lines else "it printed nothing"

    def close(self) -> None:
        self._control.close()
        try:
            self._process.wait(3 if self._has_started else 0)
        except subprocess.TimeoutExpired:
            self._process.kill()  # its ranks go with it
            self._process.wait()


def free_port(host: str = "localhost") -> int:
    """A TCP port of this machine on which nothing listens. It is below the range from which systems hand out ports, so that it stays free
    until a rank binds it. Raises :class:`WorldError` where none is found."""
    for _ in range(PORT_ATTEMPTS):
        port = PORTS.start + secrets.randbelow(len(PORTS))
        with socket.socket() as probe, suppress(OSError):
            probe.bind((host, port))
            return port
    raise WorldError(f"no free TCP port among {PORT_ATTEMPTS} tried from {PORTS.start} to {PORTS.stop - 1}")


def rank_environment(target: Target, *, multi_host: bool = False) -> dict[str, str]:
    """The environment of the server and its ranks: this process's, the target's, and one OpenMP thread. Ranks of one host use the loopback
    interface for gloo unless ``GLOO_SOCKET_IFNAME`` is set."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", **dict(target.env)}
    # a server that has asked the CUDA driver for its devices cannot be forked any more
    env.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    if loopback and not multi_host:
        env.setdefault("GLOO_SOCKET_IFNAME", loopback[0])
    return env
