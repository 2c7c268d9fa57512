"""A target is data: everything a world needs to know to start ranks on somebody's backend, and to judge them fairly."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

# What a target may declare that it cannot do, and a law may need. Storages that a config file names have no ``checkpoint_files``: what they
# keep is no folder of files that a law could read, or damage, by itself.
CAPABILITIES = (
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "checkpoint",
    "checkpoint_files",
    "gather",
    "object_collectives",
    "p2p",
    "p2p_tags",
    "reduce",
    "reduce_scatter",
    "scatter",
    "subgroups",
)

BACK_END = "the back end "  # what a finding in one that is not torch's says of where to look, before the name
BACKENDS = ("gloo", "nccl", "rccl", "xccl", "ucc", "mpi")  # that torch brings

# Relative error that a dtype may show per step of a reduction; integers and bools are exact.
TOLERANCE = {
    "float16": 2e-3,
    "bfloat16": 1.6e-2,
    "float32": 2e-6,
    "complex64": 4e-6,
    "float64": 1e-14,
    "complex128": 1e-14,
}


@dataclass(frozen=True)
class Target:
    """``setup`` is ``module:function``, called in every rank before the process group starts, or a module that is imported then.
    Times are in seconds.

    ``storage`` is a name; ``writer``, ``reader`` (``module:Class``), ``options`` and ``reader_options`` are set where a config file
    says what stands behind it.
    ``init_options`` are further arguments of ``init_process_group``: ``device_id`` (true: the rank's own device, to which the backend
    connects at once) and ``pg_options`` (``module:function``, which every rank calls). ``expect`` names the target's own files of
    expectations.
    """

    name: str = "gloo"
    device: str = "cpu"
    backend: str = "gloo"
    setup: str = ""
    env: tuple[tuple[str, str], ...] = ()
    cannot: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ("float32", "float64", "bfloat16", "int64", "int32", "uint8", "bool")
    timeout: float = 10.0
    startup_timeout: float = 60.0
    storage: str = "filesystem"
    tolerance: dict[str, float] = field(default_factory=lambda: dict(TOLERANCE), hash=False)
    init_method: str = ""
    writer: str = ""
    reader: str = ""
    options: tuple[tuple[str, Any], ...] = ()
    reader_options: tuple[tuple[str, Any], ...] = ()
    init_options: tuple[tuple[str, Any], ...] = ()
    expect: tuple[str, ...] = ()

    @property
    def foreign(self) -> bool:
        """Whether its collectives are done by a back end that torch does not bring."""
        return {*re.split("[,:]", self.backend)}.isdisjoint(BACKENDS)
