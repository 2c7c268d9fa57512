"""Plain torch code for acts about fully_shard: collectives of the user's own, and tensors with hooks that say how they
are gathered."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from shardlaw.conformance import compat


class OwnAllGather:
    """A custom all-gather that reuses its buffers."""

    def __init__(self) -> None:
        self.buffers: dict[Any, torch.Tensor] = {}

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return self.buffers.setdefault((tuple(size), dtype), torch.empty(*size, dtype=dtype, device=device))

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> Any:
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


class OwnReduceScatter:
    """A custom reduce-scatter."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> Any:
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


def gather_in_two_parts(shard: Any) -> None:
    """Give a local shard the hooks of fully_shard that gather it as its float32 value and the rest."""

    def pre_all_gather(mesh: Any, size: Any, stride: Any, module: Any, policy: Any) -> Any:
        rounded = shard.float()
        return (rounded, shard - rounded), None

    def post_all_gather(outputs: Any, metadata: Any, dtype: torch.dtype, *, out: torch.Tensor | None = None) -> Any:
        full = outputs[0].double() + outputs[1]
        if out is not None:
            return out.data.copy_(full)
        return full, (full,)

    shard.fsdp_pre_all_gather, shard.fsdp_post_all_gather = pre_all_gather, post_all_gather


class TwoParts(torch.Tensor):
    """A float64 tensor that is held as its float32 value and the rest, and that fully_shard gathers so."""

    high: torch.Tensor
    rest: torch.Tensor

    @staticmethod
    def __new__(cls, high: torch.Tensor, rest: torch.Tensor) -> Any:
        return compat.make_wrapper_subclass(cls, high.size(), strides=high.stride(), dtype=torch.float64)

    def __init__(self, high: torch.Tensor, rest: torch.Tensor) -> None:
        self.high, self.rest = high, rest

    @classmethod
    def of(cls, full: torch.Tensor) -> Any:
        return cls(full.float(), full - full.float())

    def full(self) -> torch.Tensor:
        return self.high.double() + self.rest

    def __tensor_flatten__(self) -> Any:
        return ["high", "rest"], None

    @classmethod
    def __tensor_unflatten__(cls, parts: dict[str, torch.Tensor], metadata: Any, size: Any, stride: Any) -> Any:
        return cls(parts["high"], parts["rest"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        name = func.name().removeprefix("aten::").partition(".")[0]
        if name == "new_zeros":
            return cls(args[0].high.new_zeros(args[1]), args[0].rest.new_zeros(args[1]))
        if name in ("alias", "as_strided", "clone", "detach", "slice", "split", "view"):
            high, rest = (func(part, *args[1:], **(kwargs or {})) for part in (args[0].high, args[0].rest))
            return [*map(cls, high, rest)] if isinstance(high, list) else cls(high, rest)
        full = [arg.full() if isinstance(arg, TwoParts) else arg for arg in args]
        out = func(*full, **(kwargs or {}))
        if not name.endswith("_") or not isinstance(args[0], TwoParts):
            return out
        args[0].high.copy_(full[0])
        args[0].rest.copy_(full[0] - args[0].high)
        return args[0]


class BeforeAlone(TwoParts):
    """Has no hook after the all-gather."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self.high, self.rest), None


class AfterAlone(TwoParts):
    """Has no hook before the all-gather."""

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
        return TwoParts(*outputs), outputs


class GivenMesh(AfterAlone):
    """Its hook is given the mesh alone, along which it is gathered in one part, into a plain tensor."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self.full(),), mesh.size() * self.size(0)

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
        if outputs[0].size(0) != metadata:
            raise ValueError(f"{outputs[0].size(0)} rows come from a mesh that has {metadata}")
        return outputs[0], outputs


class GivenAll(AfterAlone):
    """Its hook is given the global size too, and pads the shard; what is gathered stays in two parts."""

    def fsdp_pre_all_gather(self, mesh: Any, size: Any, stride: Any, module: Any, policy: Any) -> Any:
        missing = -(-size[0] // mesh.size()) - self.size(0)
        pads = [0, 0] * (len(size) - 1) + [0, missing]
        return tuple(torch.nn.functional.pad(part, pads) for part in (self.high, self.rest)), None


class InUnlikeParts(AfterAlone):
    """It is gathered as its rows, each divided by a number, and these numbers, into a plain tensor."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        scales = 1 + self.full().abs().amax(1, keepdim=True)
        return (self.full() / scales, scales), None

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
        full = outputs[0] * outputs[1]
        return (full, (full,)) if out is None else out.data.copy_(full)


class GivenTwo(AfterAlone):
    """Its hook takes two arguments, which no hook is given."""

    def fsdp_pre_all_gather(self, mesh: Any, size: Any) -> Any:
        return (self.high, self.rest), None
