"""The warm server: a process that imports everything once, then forks ranks on request and reaps them.

It has one thread and never runs a collective, so that its children start with a clean runtime. When the driver ends, the kernel signals
the server and their stream closes: the server then kills its ranks and exits.
"""

from __future__ import annotations

import gc
import importlib
import os
import select
import shutil
import signal
import socket
import traceback
from contextlib import suppress
from typing import NoReturn

from shardlaw.conformance.world import protocol
from shardlaw.conformance.world.garbage import collect_rarely
from shardlaw.conformance.world.parent_death import die_with_parent, exit_with_driver

MAX_DESCRIPTORS = 64  # in one message: a stream for each rank of the largest world of a machine
MAX_OUTPUT_BYTES = 1 << 20
TRIMMED_BYTES = 1 << 14
POLL_SECONDS = 0.1
FLOOD_POLL_SECONDS = 0.01


class Server:
    """Forks, signals and reaps the ranks of all worlds of one driver."""

    def __init__(self, control: socket.socket, folder: str, driver: int) -> None:
        self._control = control
        self._folder = folder
        self._driver = driver
        self._frames = protocol.FrameDecoder(protocol.ToServer)
        self._ranks: dict[int, tuple[int, int]] = {}
        self._outputs: dict[int, str] = {}
        self._descriptors: list[int] = []
        self._wake_reader, self._wake_writer = os.pipe()
        os.set_blocking(self._wake_writer, False)
        os.set_blocking(self._wake_reader, False)

    def shut_down(self) -> NoReturn:
        """Kill every rank, remove the pool's folder, and exit."""
        for pid in self._ranks:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in self._ranks:
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)
        shutil.rmtree(self._folder, ignore_errors=True)
        os._exit(0)

    def serve(self) -> None:
        """Handle requests until the driver closes its end."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wake_writer, warn_on_full_buffer=False)
        self._send(protocol.Hello(preload()))
        wait, control = POLL_SECONDS, self._control.fileno()
        while True:
            readable = set(select.select([control, self._wake_reader], [], [], wait)[0])
            if self._wake_reader in readable:
                os.read(self._wake_reader, 4096)
            self._reap()
            if control in readable:
                self._handle_messages()
            if os.getppid() != self._driver:
                self.shut_down()
            wait = FLOOD_POLL_SECONDS if self._trim_outputs() else POLL_SECONDS

    def _handle_messages(self) -> None:
        data, descriptors, _, _ = socket.recv_fds(self._control, 1 << 16, MAX_DESCRIPTORS)
        if not data:
            self.shut_down()
        self._descriptors += descriptors
        for message in self._frames.feed(data):
            if isinstance(message, protocol.Spawn):
                self._spawn(message)
            elif isinstance(message, protocol.Signal):
                for pid in [pid for pid, (world, _) in self._ranks.items() if world == message.world]:
                    os.kill(pid, message.signal)

    def _spawn(self, spawn: protocol.Spawn) -> None:
        count = len(spawn.ranks)
        mine, self._descriptors = self._descriptors[:count], self._descriptors[count:]
        pids: dict[int, int] = {}
        problem = ""
        try:
            for at, rank in enumerate(spawn.ranks):
                pid = os.fork()
                if pid == 0:
                    self._run_rank(at, spawn, mine)
                self._ranks[pid] = (spawn.world, rank)
                self._outputs[pid] = f"{spawn.folder}/rank-{rank}.out"
                pids[rank] = pid
        except OSError as error:
            problem = f"cannot fork: {error}"
        for descriptor in mine:
            os.close(descriptor)
        self._send(protocol.Spawned(spawn.world, pids, problem))

    def _run_rank(self, at: int, spawn: protocol.Spawn, descriptors: list[int]) -> NoReturn:
        """Turn a forked child into one of the ranks of ``spawn``."""
        try:
            server = os.getppid()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            die_with_parent(signal.SIGKILL)
            if os.getppid() != server:
                os._exit(1)
            self._control.close()
            for descriptor in (self._wake_reader, self._wake_writer, *descriptors[:at], *descriptors[at + 1 :], *self._descriptors):
                os.close(descriptor)
            from shardlaw.conformance.world import worker

            worker.main(at, spawn, socket.socket(fileno=descriptors[at]))
        finally:
            os._exit(1)

    def _reap(self) -> None:
        while self._ranks:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._ranks:
                world, rank = self._ranks.pop(pid)
                del self._outputs[pid]
                self._send(protocol.Exited(world, rank, os.waitstatus_to_exitcode(status)))

    def _trim_outputs(self) -> bool:
        """Cut output files that have grown too large down to their end; returns whether there were any."""
        cut = False
        for path in self._outputs.values():
            try:
                size = os.stat(path).st_size
                if size > MAX_OUTPUT_BYTES:
                    with open(path, "r+b") as file:
                        file.seek(size - TRIMMED_BYTES)
                        end = file.read(TRIMMED_BYTES)
                        file.seek(0)
                        file.write(end)
                        file.truncate()  # after the write, so that a concurrent reader finds text
                    cut = True
            except OSError:
                pass
        return cut

    def _send(self, message: protocol.FromServer) -> None:
        try:
            self._control.sendall(protocol.encode_frame(message))
        except OSError:
            self.shut_down()


def preload() -> str:
    """Import what ranks need. Returns the error as one line, or an empty text."""
    usual = gc.get_threshold()
    collect_rarely()
    try:
        import torch
        import torch.distributed.checkpoint
        import torch.distributed.tensor

        torch.set_num_threads(1)
        from shardlaw.conformance import compat, laws
        from shardlaw.conformance.compat import plans
        from shardlaw.conformance.world import worker  # noqa: F401

        laws.catalogue()
        for late in compat.LAZY_MODULES:
            with suppress(ImportError):
                importlib.import_module(late)
        plans.dtensor_modules()
    except BaseException as error:
        text = " ".join(str(error).split())[:500]
        return f"{type(error).__name__}: {text}"
    gc.collect()
    gc.freeze()
    gc.set_threshold(*usual)
    return ""


def main(control: int, folder: str, driver: int) -> None:
    """Serve the driver, at the other end of descriptor ``control``, until it ends."""
    server = Server(socket.socket(fileno=control), folder, driver)
    exit_with_driver(driver, server.shut_down)
    try:
        server.serve()
    except BaseException:
        traceback.print_exc()
    server.shut_down()
