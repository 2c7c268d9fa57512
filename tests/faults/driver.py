"""A driver to be ended in every way: it says what it has started, then does as it is told."""

import json
import os
import signal
import sys
import threading
import time

import psutil

from shardlaw.conformance.law.target import Target
from shardlaw.conformance.world import Pool
from tests.faults.conftest import LAWS, case


def tell(pool: Pool) -> None:
    children = psutil.Process().children(recursive=True)
    print(json.dumps({"pids": [child.pid for child in children], "folder": pool.folder}), flush=True)


def main(how: str) -> None:
    if how == "loading":
        pool = Pool(Target())
        tell(pool)
        time.sleep(60)
    with Pool(Target()) as pool:
        pool.check(LAWS["sums"], [case("sums", 2), case("sums", 3)])
        tell(pool)
        if how == "raises":
            raise ValueError("the driver")
        if how == "forgets":
            # the thread that made the second pool ends, the driver lives on; nobody closes the first
            made: list[Pool] = []
            maker = threading.Thread(target=lambda: made.append(Pool(Target())))
            maker.start()
            maker.join()
            with made[0] as other:
                assert other.check(LAWS["sums"], [case("sums", 2)])[0].status == "held"
                tell(other)
            pool.close = lambda: None  # type: ignore[method-assign]
        else:
            for i in range(10**9):
                pool.submit(LAWS["sums"], case("sums", 2 + i % 2, seed=i), lambda verdict: None)


if __name__ == "__main__":
    os.environ.setdefault("SHARDLAW_LAWS", "tests.faults.laws")
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell has its background jobs ignore
    main(sys.argv[1])
