"""Setup hooks of targets that cannot start."""

import os
import time


def breaks() -> None:
    raise RuntimeError("this backend\nis broken")


def ends() -> None:
    os._exit(5)


def sleeps() -> None:
    time.sleep(60)


def marks() -> None:
    if os.environ.get("WANTED") == "here":
        os.environ["MARKED"] = "yes"


def kills_server() -> None:
    os.kill(os.getppid(), 9)
