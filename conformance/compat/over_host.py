"""A backend for ranks that share a GPU: it copies tensors to the host, runs the collective with gloo, and copies the results back.

NCCL needs a device for each rank, and gloo supports GPU tensors in two of its collectives only.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
from torch._C._functorch import get_unwrapped, is_functorch_wrapped_tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.distributed.tensor import DTensor

NAME = "over-host"
# methods whose results are in the first argument
WITH_RESULTS = (
    "allreduce",
    "allreduce_coalesced",
    "reduce",
    "broadcast",
    "allgather",
    "gather",
    "scatter",
    "reduce_scatter",
    "_reduce_scatter_base",
    "alltoall_base",
    "recv",
    "recv_anysource",
)
NEW_NAMES = {  # methods that later releases have renamed
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
}
WITHOUT_RESULTS = ("barrier", "send")  # methods without results


def register() -> None:
    """Register the backend with torch, for CPU and CUDA tensors."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, lambda options, more: OverHost(options), extended_api=True, devices=["cpu", "cuda"])


def _outside_transforms(method: Callable[..., Any]) -> Callable[..., Any]:
    """A method on the tensors within those that torch.func wraps: torch unwraps them for back ends in C++ alone."""

    @wraps(method)
    def call(self: OverHost, *arguments: Any, **options: Any) -> Any:
        with temporarily_clear_interpreter_stack():
            return method(self, *map(_unwrap_nested, arguments), **options)

    return call


Group: Any = dist.ProcessGroup  # Any: its methods have other names from release to release


class OverHost(Group):  # type: ignore[misc]
    """A process group that runs its collectives with gloo, on copies in host memory."""

    def __init__(self, options: Any) -> None:
        super().__init__(options.group_rank, options.group_size)
        self._gloo: Any = dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, timeout=options.timeout)
        self._calls = 0

    def _call_gloo(self, call: str, has_results: bool, *arguments: Any, **options: Any) -> HostCopyWork:
        self._calls += 1
        on_host = [_to_host_nested(argument) for argument in arguments]
        copies = [*zip(_tensors(arguments[0]), _tensors(on_host[0]), strict=True)] if has_results else []
        return HostCopyWork(getattr(self._gloo, call)(*on_host, **options), copies)

    def getBackendName(self) -> str:
        return NAME

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_name(self) -> str:
        return self._name

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    @property
    def group_desc(self) -> str:
        return self._desc

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in ("cpu", "cuda")[: 1 + torch.cuda.is_available()]]

    def _get_backend(self, device: torch.device) -> OverHost:
        return self

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return False

    def _get_sequence_number_for_group(self) -> int:
        return self._calls

    def shutdown(self) -> None:
        self._gloo.shutdown()

    @_outside_transforms
    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> HostCopyWork:
        """Exchange tensors of any sizes; gloo's own method requires equal sizes."""
        self._calls += 1
        inputs_on_host = torch.cat([_to_host(x).reshape(-1) for x in inputs])
        sizes = [x.numel() for x in outputs]
        received = inputs_on_host.new_empty(sum(sizes))
        work = self._gloo.alltoall_base(received, inputs_on_host, sizes, [x.numel() for x in inputs])
        parts = torch.split(received, sizes)
        return HostCopyWork(work, [(output, part.view(output.shape)) for output, part in zip(outputs, parts, strict=True)])

    @_outside_transforms
    def _allgather_base(self, output: torch.Tensor, x: torch.Tensor, opts: Any) -> HostCopyWork:
        if x.ndim:
            return self._call_gloo("_allgather_base", True, output, x, opts)
        self._calls += 1
        received = _to_host(output)  # gloo requires as many dims in the output as in the input
        return HostCopyWork(self._gloo._allgather_base(received.reshape(-1), _to_host(x).reshape(1), opts), [(output, received)])

    def allgather_into_tensor_coalesced(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> CombinedWork:
        return CombinedWork([self._allgather_base(out, x, opts) for out, x in zip(outputs, inputs, strict=True)])

    def reduce_scatter_tensor_coalesced(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> CombinedWork:
        return CombinedWork([self._reduce_scatter_base(out, x, opts) for out, x in zip(outputs, inputs, strict=True)])


def _forward(call: str, has_results: bool) -> Callable[..., HostCopyWork]:
    return _outside_transforms(lambda self, *arguments, **options: self._call_gloo(call, has_results, *arguments, **options))


for _call in (*WITH_RESULTS, *WITHOUT_RESULTS):
    setattr(OverHost, _call, _forward(_call, _call in WITH_RESULTS))
for _new_name, _call in NEW_NAMES.items():
    setattr(OverHost, _new_name, getattr(OverHost, _call))


class HostCopyWork(dist.Work):
    """The work of a gloo collective. When it is done, each host copy in ``copies`` is copied to its original: ``(original, host copy)``."""

    def __init__(self, work: Any, copies: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__()
        self._work, self._copies = work, copies
        self._lock, self._done = threading.Lock(), False
        self._results = [original for original, _ in copies]

    def _copy_back(self) -> None:
        with self._lock, temporarily_clear_interpreter_stack():
            for original, host in self._copies:
                if original is not host:
                    with torch.inference_mode() if original.is_inference() else torch.no_grad():
                        original.copy_(host)
            self._copies, self._done = [], True

    def wait(self, timeout: timedelta | None = None) -> bool:
        done = bool(self._work.wait() if timeout is None else self._work.wait(timeout))
        self._copy_back()
        return done

    def is_completed(self) -> bool:
        if not self._done and not self._work.is_completed():
            return False
        if self.is_success():
            self._copy_back()
        return True

    def is_success(self) -> bool:
        return bool(self._work.is_success())

    def exception(self) -> Any:
        return self._work.exception()

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        def results(done: Any) -> list[torch.Tensor]:
            done.value()
            self._copy_back()
            return self._results

        return self._work.get_future().then(results)  # type: ignore[no-any-return]

    def source_rank(self) -> int:
        return int(self._work.source_rank())

    _source_rank = source_rank


class CombinedWork(dist.Work):
    """Several works, waited for together."""

    def __init__(self, works: list[HostCopyWork]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        return all(work.wait(timeout) if timeout else work.wait() for work in self._works)

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


def _to_host(x: torch.Tensor) -> torch.Tensor:
    """A contiguous copy on the host; the tensor itself if it is one. Raises ``NotImplementedError`` for sparse and quantized tensors, and
    for DTensors, which no back end sends."""
    if isinstance(x, DTensor):
        raise NotImplementedError(f"{NAME}: a DTensor cannot be sent")
    if x.layout is not torch.strided or x.is_quantized:
        raise NotImplementedError(f"{NAME}: a tensor of {x.dtype} in the layout {x.layout} cannot be sent")
    return x.detach().cpu().contiguous() if x.device.type != "cpu" or not x.is_contiguous() else x


def _unwrap_nested(value: Any) -> Any:
    if isinstance(value, list):
        return [_unwrap_nested(entry) for entry in value]
    while isinstance(value, torch.Tensor) and is_functorch_wrapped_tensor(value):
        value = get_unwrapped(value)
    return value


def _to_host_nested(value: Any) -> Any:
    if isinstance(value, list):
        return [_to_host_nested(entry) for entry in value]
    return _to_host(value) if isinstance(value, torch.Tensor) else value


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, list):
        return [x for entry in value for x in _tensors(entry)]
    return [value]
