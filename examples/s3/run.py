"""The laws of checkpoints against S3: starts moto's server on a free port of this machine, runs ``shardlaw run``, ends the server.

    python examples/s3/run.py [ARGUMENT OF shardlaw run ...]

Without a law among the arguments, ``plan.*`` and ``roundtrip.*`` are tried; without ``--storage``, that is ``s3``. Objects live in
the server's memory: nothing is left behind but the report. The exit code is that of the run.
"""

from __future__ import annotations

import http.client
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
BUCKET = "shardlaw"
START_SECONDS = 60.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def make_bucket(port: int, server: subprocess.Popen[bytes]) -> bool:
    """Wait until the server listens, and make the bucket; whether that was done in time."""
    until = time.monotonic() + START_SECONDS
    while server.poll() is None and time.monotonic() < until:
        line = http.client.HTTPConnection("127.0.0.1", port, timeout=START_SECONDS)
        try:
            line.request("PUT", f"/{BUCKET}")
            if line.getresponse().status == 200:
                return True
        except OSError:
            time.sleep(0.2)
        finally:
            line.close()
    return False


def main(arguments: list[str]) -> int:
    port = free_port()
    server = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "--host", "127.0.0.1", "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    # a signal ends the run, and the server with it
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        if not make_bucket(port, server):
            print("s3: moto's server does not start: pip install s3fs 'moto[server]'", file=sys.stderr)
            return 2
        given = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_DEFAULT_REGION": "us-east-1"}
        endpoint = f"http://127.0.0.1:{port}"
        env = {**os.environ, **given, "AWS_ENDPOINT_URL": endpoint, "FSSPEC_S3_ENDPOINT_URL": endpoint}
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH", ""))))
        laws = [] if any(word.startswith(("plan", "roundtrip")) for word in arguments) else ["plan.*", "roundtrip.*"]
        # the run has its folder here, for the sake of the config file; its report belongs where this was started
        named = zip(["", *arguments], arguments, strict=False)
        arguments = [str(Path.cwd() / word) if before == "--report" else word for before, word in named]
        report = [] if "--report" in arguments else ["--report", str(Path.cwd() / "shardlaw-report")]
        storage = [] if "--storage" in arguments else ["--storage", "s3"]
        command = [sys.executable, "-m", "shardlaw", "run", *laws, *storage, *report, *arguments]
        return subprocess.run(command, cwd=HERE, env=env, check=False).returncode
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
