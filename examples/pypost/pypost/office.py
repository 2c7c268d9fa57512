"""Letters between processes. A letter has a key that is used once, and bytes.

A process has one office: a socket on which it listens, and a thread that takes in what arrives. Letters may come before somebody
expects them, and wait.
"""

from __future__ import annotations

import os
import pickle
import selectors
import socket
import struct
import threading
from collections.abc import Callable, Hashable
from functools import cache
from typing import Any

HEAD = struct.Struct("!IQ")  # how many bytes the key has, and the letter


class Office:
    """Sends and receives the letters of one process. ``address`` is where others reach it."""

    def __init__(self, host: str) -> None:
        self._listener = socket.create_server((host, 0))
        self.address = "{}:{}".format(*self._listener.getsockname()[:2])
        self._lock = threading.Lock()
        self._waiting: dict[Hashable, bytes] = {}
        self._expected: dict[Hashable, Callable[[bytes], None]] = {}
        self._lines: dict[str, socket.socket] = {}
        threading.Thread(target=self._take_in, name="pypost", daemon=True).start()

    def send(self, address: str, key: Hashable, letter: bytes) -> None:
        """Hand a letter over; returns once the system has taken it."""
        if address == self.address:
            self._deliver(key, letter)
            return
        if address not in self._lines:
            host, _, port = address.rpartition(":")
            self._lines[address] = socket.create_connection((host, int(port)))
            self._lines[address].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        name = pickle.dumps(key)
        self._lines[address].sendall(HEAD.pack(len(name), len(letter)) + name + letter)

    def expect(self, key: Hashable, then: Callable[[bytes], None]) -> None:
        """Call ``then`` with the letter of this key, from whatever thread brings it: at once where it is there already."""
        with self._lock:
            if key not in self._waiting:
                self._expected[key] = then
                return
            letter = self._waiting.pop(key)
        then(letter)

    def _deliver(self, key: Hashable, letter: bytes) -> None:
        with self._lock:
            if key not in self._expected:
                self._waiting[key] = letter
                return
            then = self._expected.pop(key)
        then(letter)

    def _take_in(self) -> None:
        selector = selectors.DefaultSelector()
        selector.register(self._listener, selectors.EVENT_READ, None)
        while True:
            for ready, _ in selector.select():
                source: Any = ready.fileobj
                if ready.data is None:
                    line, _ = source.accept()
                    selector.register(line, selectors.EVENT_READ, bytearray())
                    continue
                try:
                    data = source.recv(1 << 18)
                except ConnectionError:
                    data = b""
                if not data:
                    selector.unregister(source)
                    source.close()
                    continue
                ready.data.extend(data)
                self._open(ready.data)

    def _open(self, buffer: bytearray) -> None:
        """Deliver every letter that has arrived whole."""
        while len(buffer) >= HEAD.size:
            name, letter = HEAD.unpack_from(buffer)
            middle, end = HEAD.size + name, HEAD.size + name + letter
            if len(buffer) < end:
                return
            key, content = pickle.loads(buffer[HEAD.size : middle]), bytes(buffer[middle:end])
            del buffer[:end]
            self._deliver(key, content)


@cache
def office() -> Office:
    """The office of this process, opened when it is first asked for. ``PYPOST_HOST`` says on which address it listens."""
    return Office(os.environ.get("PYPOST_HOST", "127.0.0.1"))
