"""What the model of object stores says of a put, held against S3: moto's server on this machine. Needs s3fs and moto[server]."""

from __future__ import annotations

import http.client
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from shardlaw.conformance import compat
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.target import Target
from shardlaw.conformance.laws import find
from shardlaw.conformance.laws.crash.objects import Store, watch_objects
from shardlaw.conformance.world import Pool

missing = [name for name in ("s3fs", "moto") if importlib.util.find_spec(name) is None]
pytestmark = [pytest.mark.ranks, pytest.mark.skipif(bool(missing), reason="needs s3fs and moto[server]")]

ROOT = Path(__file__).parents[2]
PARTS = """
import sys, fsspec
fs, path = fsspec.core.url_to_fs(sys.argv[1])
with fs.open(path, "wb", block_size=5 * 2**20) as file:
    for part in range(3):
        file.write(bytes([part]) * (6 * 2**20))
        print(part, flush=True)
        sys.stdin.readline()
"""


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "--host", "127.0.0.1", "--port", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    given = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_DEFAULT_REGION": "us-east-1"}
    try:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in {**given, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}.items():
                patch.setenv(name, value)
            for _ in range(300):
                try:
                    line = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
                    line.request("PUT", "/crash")
                    assert line.getresponse().status == 200
                    break
                except OSError:
                    time.sleep(0.1)
            yield "s3://crash"
    finally:
        server.kill()
        server.wait()


def steps_of(url: str) -> list[tuple[str, str]]:
    """What a save by one rank over another does to the objects below a URL, and that this is all that is there afterwards."""
    state: dict[str, Any] = {"x": torch.arange(6.0)}
    dcp.save(state, storage_writer=compat.fsspec_writer(url), no_dist=True)
    store = Store(url)
    before = store.objects()
    due, steps = dict(before), list[tuple[str, str]]()

    def note(kind: str, name: str) -> None:
        steps.append((kind, name))
        if kind == "put":
            due[name] = store.objects()[name]
        else:
            due.pop(name)

    with watch_objects(store, note):
        dcp.save({"x": state["x"] + 1}, storage_writer=compat.fsspec_writer(url), no_dist=True)
    assert store.objects() == due
    loaded = {"x": torch.zeros(6)}
    dcp.load(loaded, storage_reader=compat.fsspec_reader(url), no_dist=True)
    assert torch.equal(loaded["x"], state["x"] + 1)
    return steps


def test_a_save_takes_on_s3_the_steps_that_it_takes_in_memory(bucket: str) -> None:
    found = steps_of(f"{bucket}/steps")
    assert found == steps_of("memory:///steps")
    assert ("put", ".metadata") in found
    assert next(name for kind, name in found if kind == "put").endswith(".distcp")


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_of_a_put_that_is_killed_between_its_parts_nothing_is_there(bucket: str, parts: int) -> None:
    url = f"{bucket}/parts-{parts}"
    Store(url).write({"other": b"whole"})
    client = subprocess.Popen([sys.executable, "-c", PARTS, f"{url}/data"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert client.stdin is not None
    assert client.stdout is not None
    for _ in range(parts - 1):
        client.stdout.readline()
        client.stdin.write("\n")
        client.stdin.flush()
    client.stdout.readline()
    client.send_signal(signal.SIGKILL)
    assert client.wait() == -signal.SIGKILL
    assert Store(url).objects() == {"other": b"whole"}


def test_the_laws_of_objects_say_on_s3_what_they_say_in_memory(bucket: str) -> None:
    """Ranks share this store; in memory each has one of its own."""
    with Pool(Target(env=(("PYTHONPATH", str(ROOT)),), setup="examples.s3.started:waiting_thread", timeout=60)) as pool:
        for law, wanted in (("fresh", "held"), ("overwrite", "deviates"), ("returned", "held")):
            name = f"crash.object[{law}]"
            done = "" if law == "returned" else " done=1,0"
            cases = [Case.parse(f"{name} mesh=2 x=2:S(0) store={store}{done}") for store in (bucket, "memory://")]
            verdicts = pool.check(find(name), cases)
            assert [verdict.status for verdict in verdicts] == [wanted] * 2, [verdict.message for verdict in verdicts]
            assert verdicts[0].message == verdicts[1].message


def test_of_a_put_whose_parts_are_complete_all_is_there(bucket: str) -> None:
    url = f"{bucket}/whole"
    command = [sys.executable, "-c", PARTS, f"{url}/data"]
    subprocess.run(command, input="\n" * 3, capture_output=True, text=True, check=True, timeout=120, env=dict(os.environ))
    assert {name: len(data) for name, data in Store(url).objects().items()} == {"data": 18 * 2**20}
