"""Where the server's process starts. Imports nothing that takes time."""

from __future__ import annotations

import os
import shutil

from shardlaw.conformance.world.parent_death import follow


def serve(control: int, folder: str, driver: int) -> None:
    """Entry point of the server's process: it dies with its driver before anything heavy is imported."""

    def give_up() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)

    follow(driver, give_up)
    from shardlaw.conformance.world.server import main

    main(control, folder, driver)
