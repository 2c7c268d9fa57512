"""The targets that need no config file, and whether this machine has the devices that a target asks for."""

from __future__ import annotations

from shardlaw.conformance.errors import UsageError
from shardlaw.conformance.law.target import Target

GPU_DTYPES = ("float32", "float64", "float16", "bfloat16", "int64", "int32", "uint8", "bool")

# A rank whose collective has failed, or has outlived the limit of its process group, ends itself, and does not wait for a communicator
# that cannot be torn down. That limit is six times that of a case: what hangs is seen, and named, by the driver first. A rank that
# is ended by the driver writes no dumps for anybody to wait for.
NCCL_ENV = (
    ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3"),
    ("TORCH_NCCL_BLOCKING_WAIT", "0"),
    ("TORCH_NCCL_DUMP_ON_TIMEOUT", "0"),
)

BUILTIN = {
    "gloo": Target(),
    "nccl": Target(
        name="nccl",
        device="cuda",
        backend="cpu:gloo,cuda:nccl",  # what a checkpoint in the background needs beside NCCL
        env=NCCL_ENV,
        cannot=("p2p_tags",),
        dtypes=GPU_DTYPES,
        timeout=20.0,
        startup_timeout=120.0,
        init_options=(("device_id", True),),
    ),
    "cuda-gloo": Target(
        name="cuda-gloo",
        device="cuda",
        backend="over-host",
        setup="shardlaw.conformance.compat.over_host:register",
        env=(("TORCH_FR_BUFFER_SIZE", "0"),),  # the flight recorder of torch 2.15 cannot attach to a group that is written in Python
        dtypes=GPU_DTYPES,
        timeout=20.0,
        startup_timeout=120.0,
    ),
}


def devices_needed(target: Target, ranks: int) -> int:
    """How many accelerators a world of ``ranks`` takes: NCCL wants one for each rank, other backends share them."""
    if target.device == "cpu":
        return 0
    return ranks if "nccl" in target.backend else 1


def devices_seen(target: Target) -> int:
    """How many devices of the target's type this process sees; 0 where torch does not know the type."""
    import torch

    try:
        return int(torch.get_device_module(target.device).device_count())
    except (RuntimeError, AttributeError):
        return 0


def check_devices(target: Target, ranks: int) -> None:
    """Raises :class:`UsageError`, which says how many devices are needed and seen, where there are too few.

    A device type that its own ``setup`` has yet to register cannot be counted here: its ranks will tell.
    """
    needed = devices_needed(target, ranks)
    if not needed or (target.setup and target.device != "cuda"):
        return
    import torch

    try:
        torch.device(target.device)
    except RuntimeError:
        raise UsageError(
            f"target {target.name}: device = {target.device!r}: torch has no such device type, and no setup registers one"
        ) from None
    seen = devices_seen(target)
    if seen >= needed:
        return
    kind = "GPU" if target.device == "cuda" else f"{target.device} device"
    why = "one for each rank" if devices_needed(target, ranks + 1) > needed else "shared by the ranks"
    built = "" if torch.version.cuda or target.device != "cuda" else f"; torch {torch.__version__} is built without CUDA"
    raise UsageError(
        f"target {target.name} with {ranks} rank{'s' * (ranks != 1)} needs {needed} {kind}{'s' * (needed != 1)} ({why}), {seen} seen{built}"
        + (f"; run --world-size {seen} fits" if seen else "")
    )
