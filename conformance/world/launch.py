"""How ranks come to be. A launcher starts the ranks of a world and says when they end; it knows nothing of cases.

:class:`ForkserverLauncher` forks them from a warm server on this machine. A launcher over many hosts gives streams over TCP instead.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Protocol

from shardlaw.conformance.law.target import Target
from shardlaw.conformance.world import protocol
from shardlaw.conformance.world.observer import LocalObserver, Observer

BOOTSTRAP = "import sys; sys.path[:] = {path!r}; from shardlaw.conformance.world.start import serve; serve({control}, {folder!r}, {driver})"

PORTS = range(20_000, 32_000)  # Linux gives from 32768 on
PORT_ATTEMPTS = 100


class WorldError(Exception):
    """The target's ranks cannot be started. Its text is one line; ``output`` is what a rank printed, its stack among it."""

    output = ""


class LostError(WorldError):
    """A host, or a process that starts ranks, has gone and nothing takes its place: the run cannot go on."""


@dataclass(frozen=True, eq=False)
class Connected:
    """A stream to a rank stands that was not there yet when its world was launched."""

    world: int
    rank: int
    stream: socket.socket


class Launcher(Protocol):
    """Starts the ranks of worlds. Worlds have numbers, given by the caller."""

    @property
    def shares_files(self) -> bool:
        """Whether all ranks, and the driver, see the pool's folder. May wait for hosts to say; raises :class:`WorldError`."""

    def fileno(self) -> int:
        """A descriptor that is readable when :meth:`events` has something to tell."""

    def launch(self, world: int, size: int) -> tuple[Observer, dict[int, socket.socket]]:
        """Ask for a world; returns at once, with the driver's ends of those streams to its ranks that stand."""

    def end(self, world: int) -> None:
        """Kill the ranks of a world that have not ended."""

    def events(self) -> list[protocol.FromServer | Connected]:
        """What has happened since the last call, without waiting. Raises ``EOFError`` when the launcher itself is gone and another may take
        its place, :class:`WorldError` where none may."""

    def close(self) -> None:
        """End every rank, and whatever the launcher keeps."""


class ForkserverLauncher:
    """Ranks forked from a server process that has torch imported, on this machine, for one target. Files lie in ``folder``; ``apart``:
    not all ranks of a world are on this machine."""

    shares_files = True

    def __init__(self, target: Target, folder: str, *, apart: bool = False) -> None:
        self._target = asdict(target)
        self._folder = folder
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
                env=environment(target, apart=apart),
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
        """Ask for some ranks of a world, those that ``streams`` names, with their ends of these, and the devices that they work on. The
        whole world meets at ``port`` of ``host``, or where there is none in its folder."""
        folder = f"{self._folder}/world-{world}"
        observer = LocalObserver(folder, size, lambda: self._signal(world, protocol.DUMP_SIGNAL))
        message = protocol.frame(protocol.Spawn(world, size, folder, host, port, self._target, tuple(streams), devices))
        with suppress(OSError):  # events() tells
            sent = socket.send_fds(self._control, [message], [stream.fileno() for stream in streams.values()])
            self._control.sendall(message[sent:])
        return observer

    def end(self, world: int) -> None:
        self._signal(world, signal.SIGKILL)

    def _signal(self, world: int, number: int) -> None:
        with suppress(OSError):  # events() tells
            self._control.sendall(protocol.frame(protocol.Signal(world, number)))

    def events(self) -> list[protocol.FromServer | Connected]:
        found: list[protocol.FromServer | Connected] = []
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


def free_port(host: str = "localhost") -> int:
    """A TCP port of this machine that nobody listens on, for a process to come. It is below those that systems give to whoever asks for any
    port, so that none of them takes it in the meantime. Raises :class:`WorldError` where there is none."""
    for _ in range(PORT_ATTEMPTS):
        port = PORTS.start + secrets.randbelow(len(PORTS))
        with socket.socket() as probe, suppress(OSError):
            probe.bind((host, port))
            return port
    raise WorldError(f"no free TCP port among {PORT_ATTEMPTS} tried from {PORTS.start} to {PORTS.stop - 1}")


def environment(target: Target, *, apart: bool = False) -> dict[str, str]:
    """What the server, and so every rank, has in its environment: this process's, the target's, and one thread each. Ranks that are not
    ``apart`` speak over the loopback interface where nothing else is said."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", **dict(target.env)}
    # a server that has asked the CUDA driver for its devices cannot be forked any more
    env.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    loopback = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    if loopback and not apart:
        env.setdefault("GLOO_SOCKET_IFNAME", loopback[0])
    return env
