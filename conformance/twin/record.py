"""Records the tensors of a model's training step: each submodule's inputs and outputs, their gradients, all parameters and theirs.

The same hooks record the whole and the sharded model, so tensors with the same :class:`Key` correspond. Each input passes through a view:
its gradient is then the contribution of this submodule alone, also where the tensor has other uses.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardlaw.conformance import compat
from shardlaw.conformance.rank.context import read_mesh_cached, read_placements
from shardlaw.conformance.twin.build import map_tensors, tensors_in
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.placement import format_placements

START, FORWARD, LOSS, BACKWARD, GRADIENTS, BEFORE_STEP, STEP = "start", "forward", "loss", "backward", "gradients", "before step", "step"
PHASES = (START, FORWARD, LOSS, BACKWARD, GRADIENTS, BEFORE_STEP, STEP)
OF_PARAMETERS = (START, GRADIENTS, BEFORE_STEP, STEP)


@dataclass(frozen=True)
class Key:
    """Identifies a tensor by step, phase, path of the submodule, role (such as ``input 0``), and call of the submodule in the step."""

    step: int
    phase: str
    path: str
    what: str
    call: int = 0

    @property
    def is_op(self) -> bool:
        """Whether it is the result of an op inside a submodule."""
        return self.what.startswith("op ")

    def __str__(self) -> str:
        gradient = "the gradient of its " if self.phase in (BACKWARD, GRADIENTS, BEFORE_STEP) and not self.is_op else "its "
        again = f", call {self.call + 1}" if self.call else ""
        before = " before the first step" if self.step < 0 else f" in step {self.step + 1}"
        after = {BEFORE_STEP: ", after before_step", STEP: ", after the optimizer's step"}.get(self.phase, "")
        return f"{self.path or '(the model)'}: {gradient}{self.what}{again}{before}{after}"


@dataclass(frozen=True)
class LocalTensor:
    """A tensor on one rank; for a DTensor, its local tensor with its mesh, placements and global shape."""

    local: torch.Tensor
    mesh: str = ""
    placements: str = ""
    shape: tuple[int, ...] = ()


class Recorder:
    """Records tensors in the order in which the model computes them. ``path`` maps the path of a submodule to that in the whole model. For
    the submodule ``ops`` every op is recorded too."""

    def __init__(self, model: torch.nn.Module, path: Callable[[str], str], ops: str | None = None) -> None:
        self.events: dict[Key, LocalTensor] = {}
        self.trail: list[str] = []
        self.classes: dict[str, str] = {}
        self._path, self._ops = path, ops
        self._model = model
        self._step, self._phase = -1, START
        self._calls: Counter[tuple[str, str]] = Counter()
        self._stack: list[tuple[str, int]] = []
        self._backward_path = ""
        self._paused = False
        for name, module in model.named_modules():
            self.classes[path(name)] = type(module).__name__
            if not isinstance(module, (torch.nn.ModuleList, torch.nn.ModuleDict)):
                module.register_forward_pre_hook(self._pre_hook(path(name)), with_kwargs=True)
                module.register_forward_hook(self._post_hook(path(name)), with_kwargs=True)

    def begin(self, step: int, phase: str) -> None:
        """Start a phase of a step."""
        if step != self._step or phase == FORWARD:
            self._calls.clear()
        self._step, self._phase, self._stack, self._backward_path = step, phase, [], ""

    def record_loss(self, value: torch.Tensor) -> None:
        """Record the loss, which belongs to no submodule."""
        self._record(Key(self._step, LOSS, "(loss)", "value"), value)

    def record_parameters(self, phase: str) -> None:
        """Record every parameter, or in phases of gradients each gradient."""
        self.begin(self._step, phase)
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            owner, _, leaf = name.rpartition(".")
            value = parameter.grad if phase in (GRADIENTS, BEFORE_STEP) else parameter
            if value is not None:
                self._record(Key(self._step, phase, self._path(owner), leaf), value)

    # Hooks

    def _pre_hook(self, path: str) -> Callable[..., Any]:
        def hook(module: Any, args: Any, kwargs: Any) -> Any:
            if self._phase != FORWARD:  # activation checkpointing calls it again in backward
                return None
            call = self._calls[path, "in"]
            self._calls[path, "in"] += 1
            self._stack.append((path, call))
            count = iter(range(10_000))

            def record_input(tensor: torch.Tensor) -> torch.Tensor:
                what = f"input {next(count)}"
                self._record(Key(self._step, FORWARD, path, what, call), tensor)
                if not tensor.requires_grad:
                    return tensor
                with self._not_recording():
                    tensor = tensor.view_as(tensor)
                self._watch_gradient(tensor, Key(self._step, BACKWARD, path, what, call))
                return tensor

            return map_tensors(args, record_input), map_tensors(kwargs, record_input)

        return hook

    def _post_hook(self, path: str) -> Callable[..., None]:
        def hook(module: Any, args: Any, kwargs: Any, output: Any) -> None:
            if self._phase != FORWARD:
                return
            call = self._stack.pop()[1] if self._stack and self._stack[-1][0] == path else 0
            for at, tensor in enumerate(tensors_in(output)):
                self._record(Key(self._step, FORWARD, path, f"output {at}", call), tensor)
                if tensor.requires_grad:
                    self._watch_gradient(tensor, Key(self._step, BACKWARD, path, f"output {at}", call))

        return hook

    def _watch_gradient(self, tensor: torch.Tensor, key: Key) -> None:
        def on_gradient(gradient: torch.Tensor) -> None:
            if key.what.startswith("output"):
                self._backward_path = key.path
            self._record(key, gradient)

        tensor.register_hook(on_gradient)  # type: ignore[no-untyped-call]

    def _record(self, key: Key, value: torch.Tensor) -> None:
        if key not in self.events:
            with self._not_recording():
                self.events[key] = copy_local(value)

    # Ops

    @contextmanager
    def recording_ops(self) -> Iterator[None]:
        """Record each op of the submodule ``ops``, if there is one."""
        if self._ops is None:
            yield
            return
        recorder = self

        class EachOp(compat.name("TorchDispatchMode")):  # type: ignore[misc]
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                result = func(*args, **(kwargs or {}))
                recorder._record_op(str(func), args, result)
                return result

        with EachOp():
            yield

    def _record_op(self, op: str, args: Any, result: Any) -> None:
        at = (self._stack[-1] if self._stack else ("", 0)) if self._phase == FORWARD else (self._backward_path, 0)
        if self._paused or at[0] != self._ops or self._phase not in (FORWARD, BACKWARD):
            return
        operands, results = tensors_in(tuple(args)), tensors_in((result,) if isinstance(result, torch.Tensor) else result)
        number = self._calls[f"{self._phase} {at}", op]
        self._calls[f"{self._phase} {at}", op] += 1
        with self._not_recording():
            line = f"{op}({', '.join(map(describe_tensor, operands))}) gives {', '.join(map(describe_tensor, results)) or 'nothing'}"
        self.trail.append(f"step {self._step + 1} {self._phase}: {line}")
        for index, tensor in enumerate(results):
            self._record(Key(self._step, self._phase, at[0], f"op {op}#{number}" + (f".{index}" if index else ""), at[1]), tensor)

    @contextmanager
    def _not_recording(self) -> Iterator[None]:
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before


def copy_local(value: torch.Tensor) -> LocalTensor:
    """A copy of this rank's tensor on the CPU."""
    with torch.no_grad():
        if not isinstance(value, DTensor):
            return LocalTensor(value.detach().cpu().clone())
        try:
            placements = format_placements(read_placements(value.placements))
        except NotImplementedError:
            placements = "?"
        return LocalTensor(
            value.to_local().detach().cpu().clone(), str(read_mesh_cached(value.device_mesh)), placements, tuple(value.shape)
        )


def describe_tensor(tensor: torch.Tensor) -> str:
    """The shape of a tensor, and the placements of a DTensor."""
    shape = "x".join(map(str, tensor.shape)) or "()"
    return f"{shape}:{','.join(map(str, tensor.placements))}" if isinstance(tensor, DTensor) else shape


def twin_mesh_dims(mesh: str, names: Mesh, rank: int) -> tuple[int, ...] | None:
    """The dims of the twin's mesh that make up a DTensor's mesh, on this rank; None where it is no slice of the twin's mesh."""
    coord, theirs = names.coord(rank), Mesh.parse(mesh)
    if coord is None:
        return None
    for dims in itertools.permutations(range(names.ndim), theirs.ndim):
        if names.slice(dims, coord) == theirs:
            return dims
    return None
