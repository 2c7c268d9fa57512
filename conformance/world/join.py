"""How a rank joins its world's process group: the target's ``setup``, backend and options."""

from __future__ import annotations

import importlib
import resource
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shardlaw.conformance.compat import gloo
from shardlaw.conformance.errors import UsageError, one_of
from shardlaw.conformance.law.target import Target
from shardlaw.conformance.world import protocol

MAX_MEMORY_BYTES = 4 << 30  # that a rank on the CPU may allocate


def join_process_group(rank: int, device: int, spawn: protocol.Spawn) -> None:
    """Join the world's process group as the target describes it. In its ``init_method``, ``{folder}``, ``{host}`` and ``{port}`` are
    replaced by the world's. Raises :class:`UsageError` for a function or a backend that does not exist."""
    target = spawn.target
    gloo.share_device()
    if target.setup:
        call_by_name(target.setup)
    for backend in (part.rpartition(":")[2].lower() for part in target.backend.split(",")):
        if backend and backend not in (known := dist.Backend.backend_list):
            registered = "registers one" if target.setup else "to register one"
            raise UsageError(f"torch has no backend {backend!r} ({one_of(backend, known)}), and no setup {registered}")
    if target.device == "cpu":
        limit = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (MAX_MEMORY_BYTES if limit < 0 else min(limit, MAX_MEMORY_BYTES), limit))
    else:
        devices = torch.get_device_module(target.device)
        devices.set_device(device % devices.device_count())
    host = spawn.host or "localhost"
    method = target.init_method or ("tcp://{host}:{port}" if spawn.host else "file://{folder}/store")
    dist.init_process_group(
        target.backend,
        init_method=method.format(folder=spawn.folder, host=f"[{host}]" if ":" in host else host, port=spawn.port),
        rank=rank,
        world_size=spawn.size,
        timeout=timedelta(seconds=max(600.0, 6 * target.timeout)),  # the driver ends ranks that hang before the backend does
        **init_options(target),
    )


def init_options(target: Target) -> dict[str, Any]:
    """The target's own arguments for ``init_process_group``, on a rank that has set its device."""
    found = dict(target.init_options)
    if found.pop("device_id", False):
        found["device_id"] = torch.device(target.device, torch.get_device_module(target.device).current_device())
    if "pg_options" in found:
        found["pg_options"] = call_by_name(found["pg_options"])
    return found


def call_by_name(name: str) -> Any:
    """Call ``module:function`` and return the result; a ``module`` alone is only imported. Raises :class:`UsageError` for a function that
    the module does not have."""
    module, _, function = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in filter(None, function.split(".")):
        if not hasattr(found, part):
            known = [each for each, value in vars(found).items() if callable(value) and not each.startswith("_")]
            raise UsageError(f"{name!r}: {module} has no {function} ({one_of(part, known)})")
        found = getattr(found, part)
    return found() if function else None
