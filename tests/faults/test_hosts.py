"""Ranks over agents: the verdicts of ranks on this machine, and the end of the run where an agent is lost."""

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace

import psutil
import pytest

from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.target import Target
from shardlaw.conformance.world import Pool, WorldError, protocol, wire
from shardlaw.conformance.world.hosts import hub
from shardlaw.conformance.world.launch import LostError
from tests.faults.agents import hub_of, pool_of, start
from tests.faults.conftest import LAWS, House, case
from tests.faults.test_leaving import left

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(150)]
AGENTS = 3


@pytest.fixture(scope="module")
def hosts() -> Iterator[tuple[hub.Hub, Pool]]:
    with hub_of(AGENTS) as (made, _), pool_of(made) as pool:
        yield made, pool


@pytest.fixture
def far(hosts: tuple[hub.Hub, Pool]) -> House:
    return House(hosts[1])


@pytest.mark.parametrize(
    ("name", "kind", "outcomes"),
    [
        ("wrong", "wrong-value", ["held", "deviates", "held"]),
        ("raises_alike", "raised", ["raised"] * 3),
        ("raises_alone", "divergence", ["held", "raised", "held"]),
        ("raises_while_others_wait", "divergence", ["silent", "raised", "silent"]),
        ("all_wait", "hang", ["silent"] * 3),
    ],
)
def test_what_a_rank_does_has_the_verdict_that_it_has_here(far: House, name: str, kind: str, outcomes: list[str]) -> None:
    verdict = far.among(name)
    assert (verdict.kind, [answer.outcome for answer in verdict.ranks]) == (kind, outcomes)
    if "silent" in outcomes:
        assert all("laws.py" in answer.stack for answer in verdict.ranks if answer.outcome == "silent")


@pytest.mark.parametrize(("name", "reason"), [("exits", "exit code 3"), ("killed", "signal SIGKILL"), ("aborts", "signal SIGABRT")])
def test_rank_that_ends_is_named(far: House, name: str, reason: str) -> None:
    verdict = far.among(name)
    assert (verdict.kind, verdict.error) == ("crash", reason)
    assert verdict.ranks[1].outcome == "crashed"
    assert all(answer.stack for answer in (verdict.ranks[0], verdict.ranks[2]))
    assert ("terminate called" in verdict.ranks[1].output) == (name == "aborts")


def test_worlds_of_every_size_that_was_launched(far: House) -> None:
    cases = [case("sums", 2 + i % (AGENTS - 1), seed=i) for i in range(60)]
    assert {verdict.status for verdict in far.judge(*cases)} == {"held"}
    one = Case.of("fault.rank[passes_on]", first=2, second=3)
    assert [verdict.status for verdict in far.judge(one)] == ["held"]
    assert far.pool.check_fresh(LAWS["killed"], case("killed", 2)).kind == "crash"


def test_hosts_that_share_no_folder_reject_what_needs_one_and_more_ranks_than_were_launched_are_refused() -> None:
    with hub_of(2) as (made, _):

        def begin(target: Target, folder: str) -> hub.Hub:
            made.begin(target, folder)
            (mark,) = [name for name in os.listdir(folder) if name.startswith(hub.MARK)]
            os.remove(f"{folder}/{mark}")
            return made

        with Pool(Target(timeout=3), launch=begin) as pool:
            one = Case.of("fault.rank[passes_on]", first=2, second=2)
            (verdict,) = pool.check(LAWS["passes_on"], [one])
            assert verdict.status == "rejected"
            assert "share no folder" in verdict.message
            assert pool.check(LAWS["sums"], [case("sums", 2)])[0].status == "held"
            with pytest.raises(WorldError, match="wants 3 ranks, 2 processes were launched"):
                pool.check(LAWS["sums"], [case("sums", 3)])


ALONE = replace(LAWS["sums"], smallest=1)  # which one rank can try


def work(pool: Pool, world: int, batches: int = 2000) -> None:
    """Judge cases: many of them take minutes."""
    for first in range(0, batches * 50, 50):
        pool.check(ALONE, [case("sums", world, seed=first + at) for at in range(50)])


# one of two, whose ranks end with it and the others with the run; and one that is alone
@pytest.mark.parametrize(("number", "size"), [(signal.SIGKILL, 2), (signal.SIGTERM, 1)])
def test_agent_that_is_killed_ends_the_run_and_takes_its_ranks_along(number: signal.Signals, size: int) -> None:
    with hub_of(size) as (made, agents), pool_of(made) as pool:
        work(pool, size, 1)
        theirs = [child.pid for agent in agents for child in psutil.Process(agent.pid).children(recursive=True)]
        assert len(theirs) == 2 * size
        agents[-1].send_signal(number)
        with pytest.raises(LostError, match=rf"launched process {size - 1} on \S+ is gone"):
            work(pool, size)
        pool.close()
        assert left({"pids": [*theirs, *(agent.pid for agent in agents)], "folder": pool.folder}, 10) == []


def test_agent_that_falls_silent_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with hub_of(2) as (made, agents), pool_of(made) as pool:
        work(pool, 2, 1)
        monkeypatch.setattr(hub, "SILENCE_SECONDS", 3.0)
        agents[1].send_signal(signal.SIGSTOP)
        try:
            with pytest.raises(LostError, match="has been silent for 3 s"):
                work(pool, 2)
        finally:
            agents[1].send_signal(signal.SIGCONT)


def test_wrong_token_is_refused_by_either_side(hosts: tuple[hub.Hub, Pool]) -> None:
    made, pool = hosts
    stranger = start(made, 0, b"another token")
    assert stranger.stderr is not None
    with stranger.stderr, socket.create_connection(made.address):  # which says nothing
        until = time.monotonic() + 60
        while stranger.poll() is None and time.monotonic() < until:
            assert pool.check(LAWS["sums"], [case("sums", 2)])[0].status == "held"
        assert stranger.poll() == 0
        assert b"no driver at" in stranger.stderr.read()


def test_agent_believes_no_driver_that_does_not_know_the_token() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def pretend() -> None:
            stream, _ = listener.accept()
            with stream:
                stream.sendall(protocol.encode_frame(wire.Challenge(b"nonce")))
                stream.recv(4096)
                stream.sendall(protocol.encode_frame(wire.Welcome(b"proof")))

        pretender = threading.Thread(target=pretend)
        pretender.start()
        with pytest.raises(protocol.ProtocolError, match="does not know the token"):
            wire.connect(listener.getsockname(), b"token", 1)
        pretender.join(10)


def test_agent_ends_when_nobody_listens() -> None:
    with hub_of(1) as (made, agents):
        made.close()
        assert agents[0].wait(30) == 0


def test_claims_are_bound_to_what_they_claim() -> None:
    claim = wire.Claim(1, 2, b"nonce", b"")
    proofs = {
        wire.proof(token, who, one, nonce)
        for token in (b"a", b"b")
        for who in ("agent", "driver")
        for one in (claim, replace_claim(claim, process=3), replace_claim(claim, world=3))
        for nonce in (b"n", b"m")
    }
    assert len(proofs) == 24


def replace_claim(claim: wire.Claim, **fields: int) -> wire.Claim:
    return wire.Claim(fields.get("process", claim.process), fields.get("world", claim.world), claim.nonce, claim.proof)
