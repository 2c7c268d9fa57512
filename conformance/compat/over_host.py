"""A back end for ranks that share a device: what they tell each other goes over host memory, by gloo.

NCCL wants a device for each rank, and gloo itself takes tensors of a GPU for two of its collectives alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

NAME = "over-host"
# what a group is asked for: tensors come back in the first argument
CALLS = (
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
LATER = {  # what later releases call some
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
}
TAKES = ("barrier", "send")  # and gives nothing back


def register() -> None:
    """Make the back end known to torch, for tensors of any device."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, lambda options, more: OverHost(options), extended_api=True, devices=["cpu", "cuda"])


Group: Any = dist.ProcessGroup  # whose methods have other names from release to release


class OverHost(Group):  # type: ignore[misc]
    """A process group whose members give each other copies of their tensors in host memory."""

    def __init__(self, options: Any) -> None:
        super().__init__(options.group_rank, options.group_size)
        self._gloo: Any = dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, timeout=options.timeout)
        self._calls = 0

    def _through(self, call: str, gives: bool, *arguments: Any, **options: Any) -> OnItsWay:
        self._calls += 1
        hosted = [_mapped(argument, _on_host) for argument in arguments]
        back = [*zip(_tensors(arguments[0]), _tensors(hosted[0]), strict=True)] if gives else []
        return OnItsWay(getattr(self._gloo, call)(*hosted, **options), back)

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

    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> OnItsWay:
        """Of tensors of any sizes: gloo itself takes lists of one size alone."""
        self._calls += 1
        sent = torch.cat([_on_host(x).reshape(-1) for x in inputs])
        sizes = [x.numel() for x in outputs]
        came = sent.new_empty(sum(sizes))
        work = self._gloo.alltoall_base(came, sent, sizes, [x.numel() for x in inputs])
        return OnItsWay(work, [(ours, part.view(ours.shape)) for ours, part in zip(outputs, torch.split(came, sizes), strict=True)])

    def _allgather_base(self, output: torch.Tensor, x: torch.Tensor, opts: Any) -> OnItsWay:
        if x.ndim:
            return self._through("_allgather_base", True, output, x, opts)
        self._calls += 1
        came = _on_host(output)  # gloo wants what is joined to have as many dims as its parts
        return OnItsWay(self._gloo._allgather_base(came.reshape(-1), _on_host(x).reshape(1), opts), [(output, came)])

    def allgather_into_tensor_coalesced(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> AllOnTheirWay:
        return AllOnTheirWay([self._allgather_base(out, x, opts) for out, x in zip(outputs, inputs, strict=True)])

    def reduce_scatter_tensor_coalesced(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None) -> AllOnTheirWay:
        return AllOnTheirWay([self._reduce_scatter_base(out, x, opts) for out, x in zip(outputs, inputs, strict=True)])


def _passed_on(call: str, gives: bool) -> Callable[..., OnItsWay]:
    return lambda self, *arguments, **options: self._through(call, gives, *arguments, **options)


for _call in (*CALLS, *TAKES):
    setattr(OverHost, _call, _passed_on(_call, _call in CALLS))
for _later, _call in LATER.items():
    setattr(OverHost, _later, getattr(OverHost, _call))


class OnItsWay(dist.Work):
    """The work of gloo; once it is done its results go ``back``: pairs of a tensor and its copy on the host."""

    def __init__(self, work: Any, back: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        super().__init__()
        self._work, self._back = work, back
        self._lock, self._done = threading.Lock(), False
        self._results = [ours for ours, _ in back]

    def _arrive(self) -> None:
        with self._lock:
            for ours, host in self._back:
                if ours is not host:
                    with torch.inference_mode() if ours.is_inference() else torch.no_grad():
                        ours.copy_(host)
            self._back, self._done = [], True

    def wait(self, timeout: timedelta | None = None) -> bool:
        done = bool(self._work.wait() if timeout is None else self._work.wait(timeout))
        self._arrive()
        return done

    def is_completed(self) -> bool:
        if not self._done and not self._work.is_completed():
            return False
        if self.is_success():
            self._arrive()
        return True

    def is_success(self) -> bool:
        return bool(self._work.is_success())

    def exception(self) -> Any:
        return self._work.exception()

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        def results(done: Any) -> list[torch.Tensor]:
            done.value()
            self._arrive()
            return self._results

        return self._work.get_future().then(results)  # type: ignore[no-any-return]

    def source_rank(self) -> int:
        return int(self._work.source_rank())

    _source_rank = source_rank


class AllOnTheirWay(dist.Work):
    """Several works as one."""

    def __init__(self, works: list[OnItsWay]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        return all(work.wait(timeout) if timeout else work.wait() for work in self._works)

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)


def _on_host(x: torch.Tensor) -> torch.Tensor:
    """A tensor as gloo takes it: itself where it lies on the host in order."""
    if x.layout is not torch.strided or x.is_quantized:
        raise NotImplementedError(f"{NAME}: a tensor of {x.dtype} in the layout {x.layout} cannot be sent")
    return x.detach().cpu().contiguous() if x.device.type != "cpu" or not x.is_contiguous() else x


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_mapped(entry, change) for entry in value]
    return change(value) if isinstance(value, torch.Tensor) else value


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, list):
        return [x for entry in value for x in _tensors(entry)]
    return [value]
