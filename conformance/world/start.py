"""Entry point of the server process. Imports nothing slow."""

from __future__ import annotations

import os
import shutil

from shardlaw.conformance.world.parent_death import exit_with_driver


def serve(control: int, folder: str, driver: int) -> None:
    """Bind this process to its driver, then import the server and run it."""

    def give_up() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)

    exit_with_driver(driver, give_up)
    from shardlaw.conformance.world.server import main

    main(control, folder, driver)
