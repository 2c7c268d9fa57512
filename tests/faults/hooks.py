"""Setup hooks of targets: of some that cannot start, of others that bring something with them."""

import os
import threading
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


def keeps_a_thread() -> None:
    threading.Thread(target=time.sleep, args=(600,), daemon=True, name="kept").start()


def kills_server() -> None:
    os.kill(os.getppid(), 9)
    time.sleep(5)  # or the rank might be ready before anybody has noticed


def aborts_gathers() -> None:
    """Make every gather of a sharded tensor end its rank, as an abort in C++ does."""
    from torch.distributed.tensor import Shard

    def _to_replicate_tensor(*args: object) -> None:
        os.abort()

    Shard._to_replicate_tensor = _to_replicate_tensor
