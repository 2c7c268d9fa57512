"""Agents on this machine, without torchrun: what a launch over many hosts comes down to."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from shardlaw.conformance.law.target import Target
from shardlaw.conformance.world import Pool
from shardlaw.conformance.world.hosts.hub import Hub
from shardlaw.conformance.world.hosts.torchrun import agent_command
from shardlaw.conformance.world.wire import AgentConfig

SECONDS = 30


@contextmanager
def hub_of(size: int) -> Iterator[tuple[Hub, list["subprocess.Popen[bytes]"]]]:
    """A hub and its agents; whatever is left of these at the end is killed."""
    hub = Hub("127.0.0.1", size, loopback=True)
    agents: list[subprocess.Popen[bytes]] = []
    try:
        agents += [start(hub, process) for process in range(size)]
        yield hub, agents
    finally:
        hub.close()
        for agent in agents:
            try:
                agent.wait(SECONDS)
            except subprocess.TimeoutExpired:
                agent.kill()
                agent.wait()


def start(hub: Hub, process: int, token: bytes | None = None) -> "subprocess.Popen[bytes]":
    """One agent, which may have been given another token than the hub's."""
    command, descriptor = agent_command(AgentConfig(*hub.address, token or hub.token, process, process, os.getpid(), True))
    try:
        return subprocess.Popen(command, pass_fds=[descriptor], stderr=subprocess.PIPE, process_group=0)
    finally:
        os.close(descriptor)


def pool_of(hub: Hub, target: Target | None = None) -> Pool:
    return Pool(target or Target(timeout=3), launch=hub.begin)
