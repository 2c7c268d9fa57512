"""``shardlaw targets`` and ``shardlaw doctor``: the known targets, whether their ranks start, and what they can do."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import TYPE_CHECKING

import torch

from shardlaw import __version__
from shardlaw.conformance.errors import UsageError
from shardlaw.conformance.law.target import Target
from shardlaw.conformance.rank.shared_plans import why_unavailable
from shardlaw.conformance.target.builtin import count_devices, count_needed_devices
from shardlaw.conformance.target.config import check_target, get_target, read_config, target_origins, with_storage
from shardlaw.conformance.target.probe import PROBES, RANKS, describe_verdict, probe

if TYPE_CHECKING:
    from shardlaw.conformance.world import Pool


@contextmanager
def _start_pool(target: Target) -> Iterator[Pool]:
    """A pool of the target. Raises :class:`UsageError` if the target cannot start."""
    from shardlaw.conformance.world import Pool, WorldError

    try:
        with Pool(target) as pool:
            yield pool
    except WorldError as error:
        if error.output.strip():
            print("what the rank said:", *(f"    | {line}" for line in error.output.rstrip().splitlines()), sep="\n", flush=True)
        raise UsageError(f"target {target.name} cannot start: {error}") from None


def examine(name: str, storage: str | None = None) -> int:
    """Print what is installed and check that a target works; returns 0. Raises :class:`UsageError` if its ranks do not start, cannot
    reduce, or cannot save and load a checkpoint (only tried if the target or ``storage`` names one)."""
    config = read_config()
    target = with_storage(get_target(name, config), storage, config)
    print(f"shardlaw {__version__}, python {platform.python_version()}, torch {torch.__version__}")
    print(f"hypothesis {metadata.version('hypothesis')}, pytest {metadata.version('pytest')}, {os.cpu_count()} cpus, {platform.platform()}")
    print(f"target {target.name}: device {target.device}, backend {target.backend}, storage {target.storage}")
    check_target(target, RANKS)
    needed = count_needed_devices(target, RANKS)
    if needed:
        print(f"ok  {count_devices(target)} devices seen, {needed} needed for {RANKS} ranks")
    began = time.monotonic()
    with _start_pool(target) as pool:
        _time_probe(pool, "all_reduce", f"target {target.name}: all_reduce over {RANKS} ranks failed")
        print(f"ok  backend {target.backend} loads, {RANKS} ranks start and reduce: {time.monotonic() - began:.1f} s")
        seconds = _time_probe(pool, "all_reduce", f"target {target.name}: a second all_reduce failed")
        print(f"ok  all_reduce in a warm world: {seconds * 1000:.0f} ms")
        if storage is not None or target.writer:
            seconds = _time_probe(pool, "checkpoint", f"storage {target.storage}: a checkpoint of one tensor failed")
            print(f"ok  storage {target.storage}: a checkpoint is saved and loaded in {seconds:.1f} s")
    missing = why_unavailable()
    print(f"--  every rank plans every op: {missing}" if missing else "ok  ranks of a smoke or ci run plan an op once and share the plan")
    print(f"target {target.name} can be validated here")
    return 0


def _time_probe(pool: Pool, name: str, failed: str) -> float:
    """The seconds that a capability takes. Raises :class:`UsageError`, whose message begins with ``failed``, where it does not work."""
    verdict, seconds = probe(pool, name)
    if verdict.status != "held":
        raise UsageError(f"{failed}: {describe_verdict(verdict)}")
    return seconds


def list_targets(to_probe: bool) -> int:
    """Print every known target; with ``to_probe`` also its capabilities, tried on ranks. Returns 0."""
    config = read_config()
    for name, source in target_origins(config).items():
        try:
            target = get_target(name, config)
        except UsageError as error:
            print(f"{name}: {error}")
            continue
        cannot = f", cannot {', '.join(target.cannot)}" if target.cannot else ""
        print(f"{name}: device {target.device}, backend {target.backend}, storage {target.storage}{cannot} ({source})")
        try:
            check_target(target, RANKS)
            if to_probe:
                _print_capabilities(target)
        except UsageError as error:
            print(f"    not here: {error}")
    if config.storages:
        print(f"storages: filesystem, {', '.join(config.storages)}")
    return 0


def _print_capabilities(target: Target) -> None:
    """Try each capability and print whether it works and whether the target declares that."""
    gaps = []
    with _start_pool(target) as pool:
        for name in PROBES:
            verdict, _ = probe(pool, name)
            works, declared = verdict.status == "held", name in target.cannot
            if declared:
                note = "stale: declared missing, but it works" if works else "declared missing"
            else:
                note = "works" if works else f"undeclared: {describe_verdict(verdict)}"
                gaps += [] if works else [name]
            print(f"    {name:20}{note}", flush=True)
    if gaps:
        quoted = ", ".join(f'"{name}"' for name in (*target.cannot, *gaps))
        print(f"    a run makes findings of what is undeclared; to leave its laws out: cannot = [{quoted}]")
