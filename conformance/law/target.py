"""A target, as data: what a world needs to start ranks on a backend, and to compare their results within its tolerances."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

# Capabilities that a law may need and a target may lack. Storages from a config file lack ``checkpoint_files``: their checkpoints are no
# folder of files that a law could read or damage.
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
    "p2p_any_source",
    "p2p_tags",
    "reduce",
    "reduce_scatter",
    "scatter",
    "subgroups",
)

DTYPES = ("float32", "float64", "bfloat16", "int64", "int32", "uint8", "bool")  # of a target that names none
BACK_END = "the back end "  # with its name: the place of a finding in a back end that is not torch's
BACKENDS = ("gloo", "nccl", "rccl", "xccl", "ucc", "mpi")  # those of torch

# Relative error that a dtype may have for each step of a reduction; integers and bools are exact.
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
    """A target. Times are in seconds.

    - ``setup``: ``module:function`` or a module, which every rank calls or imports before the process group starts.
    - ``storage``: its name; for one of a config file also ``writer``, ``reader`` (``module:Class``), ``options`` and ``reader_options``.
    - ``init_options``: further arguments of ``init_process_group``. ``device_id`` (true: the rank's own device, to which the backend
      connects eagerly) and ``pg_options`` (``module:function``, which every rank calls).
    - ``expect``: the target's own files of expectations.
    """

    name: str = "gloo"
    device: str = "cpu"
    backend: str = "gloo"
    setup: str = ""
    env: tuple[tuple[str, str], ...] = ()
    cannot: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = DTYPES
    timeout: float = 10.0
    startup_timeout: float = 60.0
    storage: str = "filesystem"
    tolerance: dict[str, float] = field(default_factory=lambda: dict(TOLERANCE), hash=False)
    init_method: str = ""
    writer: str = ""
    reader: str = ""
    options: tuple[tuple[str, Any], ...] = field(default=(), hash=False)
    reader_options: tuple[tuple[str, Any], ...] = field(default=(), hash=False)
    init_options: tuple[tuple[str, Any], ...] = field(default=(), hash=False)
    expect: tuple[str, ...] = ()

    @property
    def foreign(self) -> bool:
        """Whether its back end is not one of torch's."""
        return {*re.split("[,:]", self.backend)}.isdisjoint(BACKENDS)
