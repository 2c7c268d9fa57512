"""The built-in targets, and a check that this machine has the devices that a target needs."""

from __future__ import annotations

from shardlaw.conformance.errors import UsageError
from shardlaw.conformance.law.target import Target

GPU_DTYPES = ("float32", "float64", "float16", "bfloat16", "int64", "int32", "uint8", "bool")

# A rank exits by itself when a collective fails or exceeds the timeout of its process group, without waiting to tear its communicator
# down. That timeout is six times the limit of a case, so that the driver finds a hang first. A rank that the driver ends writes no dump.
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
        backend="cpu:gloo,cuda:nccl",  # asynchronous checkpoints need a CPU backend too
        env=NCCL_ENV,
        cannot=("p2p_any_source", "p2p_tags"),
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
        env=(("TORCH_FR_BUFFER_SIZE", "0"),),  # the flight recorder of torch 2.15 cannot attach to a process group written in Python
        dtypes=GPU_DTYPES,
        timeout=20.0,
        startup_timeout=120.0,
    ),
}


def count_needed_devices(target: Target, ranks: int) -> int:
    """How many accelerators a world of ``ranks`` needs: NCCL one for each rank, other backends one that all share."""
    if target.device == "cpu":
        return 0
    return ranks if "nccl" in target.backend else 1


def count_devices(target: Target) -> int:
    """How many devices of the target's type this process has; 0 where torch does not know the type."""
    import torch

    try:
        return int(torch.get_device_module(target.device).device_count())
    except (RuntimeError, AttributeError):
        return 0


def check_devices(target: Target, ranks: int) -> None:
    """Raises :class:`UsageError` if there are fewer devices than the target needs for ``ranks``.

    A device type that the target's ``setup`` registers cannot be counted here: its ranks will raise.
    """
    needed = count_needed_devices(target, ranks)
    if not needed or (target.setup and target.device != "cuda"):
        return
    import torch

    try:
        torch.device(target.device)
    except RuntimeError:
        raise UsageError(
            f"target {target.name}: device = {target.device!r}: torch has no such device type, and no setup registers one"
        ) from None
    seen = count_devices(target)
    if seen >= needed:
        return
    kind = "GPU" if target.device == "cuda" else f"{target.device} device"
    why = "one for each rank" if count_needed_devices(target, ranks + 1) > needed else "shared by the ranks"
    built = "" if torch.version.cuda or target.device != "cuda" else f"; torch {torch.__version__} is built without CUDA"
    raise UsageError(
        f"target {target.name} with {ranks} rank{'s' * (ranks != 1)} needs {needed} {kind}{'s' * (needed != 1)} ({why}), {seen} seen{built}"
        + (f"; run --world-size {seen} fits" if seen else "")
    )
