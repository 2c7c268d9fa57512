"""How ranks come to be. A launcher starts the ranks of a world and says when they end; it knows nothing of cases.

:class:`ForkserverLauncher` forks them from a warm server on this machine. A launcher over many hosts gives streams over TCP instead.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict
from typing import Protocol

from conformance.target import Target
from conformance.world import protocol

BOOTSTRAP = "import sys; sys.path[:] = {path!r}; from conformance.world.leash import serve; serve({control}, {folder!r}, {driver})"


class WorldError(Exception):
    """The target's ranks cannot be started. Its text is one line."""


class Launcher(Protocol):
    """Starts the ranks of worlds. Worlds have numbers, given by the caller."""

    def fileno(self) -> int:
        """A descriptor that is readable when :meth:`events` has something to tell."""

    def launch(self, world: int, size: int, folder: str) -> list[socket.socket]:
        """Ask for a world; returns at once, with the driver's ends of the streams to its ranks, by rank."""

    def signal(self, world: int, number: int) -> None:
        """Send a signal to the ranks of a world that have not ended."""

    def events(self) -> list[protocol.FromServer]:
        """What has happened since the last call, without waiting. Raises ``EOFError`` when the launcher itself is gone."""

    def close(self) -> None:
        """End every rank, and whatever the launcher keeps."""


class ForkserverLauncher:
    """Ranks forked from a server process that has torch imported, on this machine, for one target."""

    def __init__(self, target: Target, folder: str) -> None:
        self._target = asdict(target)
        self._frames = protocol.Frames(protocol.FromServer)
        self._output = f"{folder}/server.out"
        self._control, theirs = socket.socketpair()
        self._greeted = False
        path = [entry or os.getcwd() for entry in sys.path]
        code = BOOTSTRAP.format(path=path, control=theirs.fileno(), folder=folder, driver=os.getpid())
        with theirs, open(self._output, "wb") as output:
            # of its own process group: an interrupt from the keyboard is the driver's to handle
            self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
                process_group=0,
                env=environment(target),
            )

    def fileno(self) -> int:
        return self._control.fileno()

    def launch(self, world: int, size: int, folder: str) -> list[socket.socket]:
        pairs = [socket.socketpair() for _ in range(size)]
        message = protocol.frame(protocol.Spawn(world, size, folder, free_port(), self._target))
        with suppress(OSError):  # events() tells
            sent = socket.send_fds(self._control, [message], [theirs.fileno() for _, theirs in pairs])
            self._control.sendall(message[sent:])
        for _, theirs in pairs:
            theirs.close()
        return [mine for mine, _ in pairs]

    def signal(self, world: int, number: int) -> None:
        with suppress(OSError):  # events() tells
            self._control.sendall(protocol.frame(protocol.Signal(world, number)))

    def events(self) -> list[protocol.FromServer]:
        found: list[protocol.FromServer] = []
        while True:
            try:
                data = self._control.recv(1 << 16, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return found
            except ConnectionError:
                data = b""
            if not data:
                raise EOFError(self._last_words())
            found.extend(self._frames.feed(data))
            self._greeted = True

    def _last_words(self) -> str:
        try:
            with open(self._output, errors="replace") as file:
                lines = [line.strip() for line in file if line.strip()]
        except OSError:
            lines = []
        return lines[-1] if lines else "no last words"

    def close(self) -> None:
        self._control.close()
        try:
            self._process.wait(3 if self._greeted else 0)
        except subprocess.TimeoutExpired:
            self._process.kill()  # its ranks go with it
            self._process.wait()


def free_port() -> int:
    """A TCP port that nobody on this machine listens on."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port: int = probe.getsockname()[1]
        return port


def environment(target: Target) -> dict[str, str]:
    """What the server, and so every rank, has in its environment: the driver's, the target's, and one thread each."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", **dict(target.env)}
    # a server that has asked the CUDA driver for its devices cannot be forked any more
    env.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    if loopback:
        env.setdefault("GLOO_SOCKET_IFNAME", loopback[0])
    return env
