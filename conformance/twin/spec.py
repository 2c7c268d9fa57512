"""A user's description of a model and its sharding, and the plan of one run, as plain data."""

from __future__ import annotations

import math
import os
import reprlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardlaw.conformance.errors import UsageError, one_of
from shardlaw.conformance.rank.spmd import Function
from shardlaw.reference.mesh import Mesh

if TYPE_CHECKING:
    import torch
    from torch.distributed.device_mesh import DeviceMesh

MAX_RANKS = 16
VALUES = ("exact", "float32", "bfloat16")


@dataclass(frozen=True)
class Twin:
    """A model and its sharding; what ``make`` returns.

    - ``model(**sizes)``: the whole module. It is called under a fixed seed.
    - ``batch(step, **sizes)``: the whole batch of a step, a tensor or a tuple, list or dict of such; also under a seed.
    - ``shard(model, mesh)``: shards what ``model`` gave, filled already; returns the sharded module, or None where it changed it in place.
    - ``mesh``: the names and sizes of the mesh dims, such as ``{"dp": 2, "tp": 2}``.
    - ``sizes``: what ``model`` and ``batch`` take, as ``size`` or ``(size, smallest)``; those with a smallest are shrunk.
    - ``part(batch, mesh)``: what of the batch this rank is given; all of it where there is none.
    - ``forward(model, batch)``: ``model(batch)`` where there is none, ``model(**batch)`` of a dict, ``model(batch[0])`` of a tuple.
    - ``loss(output, batch)``: a scalar; the mean of the squared output where there is none, or a scalar output itself.
    - ``optimizer(model)``: SGD with a learning rate of 1/8 where there is none.
    - ``before_step(model, mesh)``: called between backward and the optimizer's step; the mesh is None on the whole model.
    - ``name(path, mesh)``: the path that a submodule of the sharded model has in the whole one, where that is another.
    - ``save(model, optimizer, folder)`` and ``load(model, optimizer, folder)``: a checkpoint, for ``--resume``; that of
      ``torch.distributed.checkpoint`` where there are none, which knows how DTensors lie and nothing of tensors that were cut by hand.
    - ``seed(mesh, step)``: seeds a rank before a step with dropout; ``torch.manual_seed(step)`` on every rank where there is none.
    - ``values``: which values to try: ``exact``, ``float32``, ``bfloat16``.
    """

    model: Callable[..., torch.nn.Module]
    batch: Callable[..., Any]
    shard: Callable[[Any, DeviceMesh], Any]
    mesh: Mapping[str, int]
    sizes: Mapping[str, int | tuple[int, int]] = field(default_factory=dict)
    part: Callable[[Any, DeviceMesh], Any] | None = None
    forward: Callable[[Any, Any], Any] | None = None
    loss: Callable[[Any, Any], Any] | None = None
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None
    before_step: Callable[[Any, DeviceMesh | None], object] | None = None
    name: Callable[[str, DeviceMesh], str] | None = None
    save: Callable[[Any, Any, str], object] | None = None
    load: Callable[[Any, Any, str], object] | None = None
    seed: Callable[[DeviceMesh, int], object] | None = None
    values: tuple[str, ...] = VALUES

    def check(self) -> None:
        """Raise :class:`UsageError` for invalid fields."""
        for value in self.values:
            if value not in VALUES:
                raise UsageError(f"values={self.values!r}: unknown {value!r} ({one_of(value, VALUES)})")
        if not self.values or not self.mesh:
            raise UsageError("a twin wants a mesh, such as mesh={'tp': 2}, and values to try")
        for what, size in (*self.mesh.items(), *self.sizes.items()):
            if not all(isinstance(one, int) and one >= 1 for one in (size if isinstance(size, tuple) else (size,))):
                raise UsageError(f"{what}={size!r}: want a size of 1 or more, or (size, smallest)")
        if math.prod(self.mesh.values()) > MAX_RANKS:
            raise UsageError(f"mesh {dict(self.mesh)}: want at most {MAX_RANKS} ranks")

    def largest(self) -> dict[str, int]:
        """The size of each name."""
        return {name: size[0] if isinstance(size, tuple) else size for name, size in self.sizes.items()}

    def smallest(self) -> dict[str, int]:
        """The smallest size of each name."""
        return {name: size[1] if isinstance(size, tuple) else size for name, size in self.sizes.items()}


@dataclass(frozen=True)
class Plan:
    """One run of a twin: sizes, values, steps. It is sent to ranks.

    - ``draws``: how many perturbed runs of the whole model determine the bounds.
    - ``ops``: the path of the submodule whose ops are recorded.
    - ``save``: the sharded run saves in ``folder`` after this many steps and ends. ``load``: it loads from ``folder`` and starts with the
      step of this number.
    - ``dropout``: dropout is on, with the same seed on all ranks.
    """

    make: Function
    options: Mapping[str, str]
    mesh: Mapping[str, int]
    sizes: Mapping[str, int]
    values: str = "float32"
    steps: int = 2
    seed: int = 0
    draws: int = 8
    ops: str | None = None
    save: int = 0
    load: int = 0
    folder: str = ""
    dropout: bool = False

    def twin(self) -> Twin:
        """Call ``make`` in this process."""
        return call_make(self.make.load(), self.options)

    @property
    def ranks(self) -> int:
        """The number of ranks of the sharded run."""
        return math.prod(self.mesh.values())

    def reference_mesh(self) -> Mesh:
        """The mesh, as the reference's."""
        return Mesh.of(*self.mesh.values())

    def __str__(self) -> str:
        def words(sizes: Mapping[str, int]) -> str:
            return " ".join(f"{name}={size}" for name, size in sizes.items())

        loaded = f", those after the first {self.load} from a checkpoint" if self.load else ""
        return f"mesh {words(self.mesh)}; sizes {words(self.sizes) or 'none'}; {self.values}; {self.steps} steps{loaded}; seed {self.seed}"


def call_make(make: Callable[..., Any], options: Mapping[str, str]) -> Twin:
    """The twin that ``make`` returns. Raises :class:`UsageError` where it fails or returns something else."""
    try:
        twin = make(**options)
    except Exception as error:
        raise UsageError(f"make({', '.join(options)}): {type(error).__name__}: {error}") from error
    if not isinstance(twin, Twin):
        raise UsageError(f"make returned {reprlib.repr(twin)}: want a shardlaw.Twin")
    twin.check()
    return twin


def find_make(text: str) -> Function:
    """The function of ``package.module:make`` or ``file.py:make``. Puts the current folder, or that of the file, on ``sys.path``. Raises
    :class:`UsageError`."""
    module, colon, name = text.rpartition(":")
    if not (colon and module and name):
        raise UsageError(f"{text!r}: want PACKAGE.MODULE:FUNCTION or FILE.py:FUNCTION")
    path = Path(module).absolute()
    by_file = module.endswith(".py")
    if by_file and not path.is_file():
        raise UsageError(f"{module}: no such file")
    folder = str(path.parent) if by_file else os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)
    function = Function(path.stem if by_file else module, str(path) if by_file else "", name)
    try:
        function.load()
    except Exception as error:
        raise UsageError(f"{text}: cannot be loaded: {type(error).__name__}: {error}") from error
    return function
