"""What every rank starts before anything is tried: the thread in which fsspec waits for answers stays for good, and is no law's."""

from __future__ import annotations

from fsspec.asyn import get_loop


def waiting_thread() -> None:
    get_loop()
