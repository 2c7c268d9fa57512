"""Python expressions for values, which a script contains in place of a case."""

from __future__ import annotations

import math
import types
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from shardlaw.conformance import compat
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.placement import Partial, Placement, Placements, Shard, StridedShard


def literal(value: object) -> str:
    """The expression of ``value``. Meshes and placements of the reference become torch's. Raises ``TypeError`` where there is none."""
    if type(value) in (int, bool, str) or (type(value) is float and math.isfinite(value)):  # most values: skip the match
        return repr(value)
    if hasattr(value, "literal"):
        return str(value.literal())
    match value:
        case torch.Tensor():
            return tensor_literal(value)
        case torch.Size():
            return f"torch.Size({[*value]})"
        case torch.dtype() | torch.device():
            return repr(value) if isinstance(value, torch.device) else str(value)
        case Mesh():
            return mesh_literal(value)
        case Shard() | StridedShard() | Partial():
            return placement_literal(value)
        case float() if value != value or value in (float("inf"), -float("inf")):
            return f'float("{value}")'
        case type():
            # the source of a class of ours is copied into the script
            local = value.__module__ == "builtins" or value.__module__.startswith("shardlaw.")
            return value.__name__ if local else f"{value.__module__}.{value.__qualname__}"
        case dict():
            return "{" + ", ".join(f"{literal(key)}: {literal(item)}" for key, item in value.items()) + "}"
        case list():
            return "[" + ", ".join(map(literal, value)) + "]"
        case set() | frozenset():
            return f"{type(value).__name__}({literal(sorted(value, key=repr))})"
        case tuple():
            return "(" + ", ".join(map(literal, value)) + ("," if len(value) == 1 else "") + ")"
        case types.EllipsisType():
            return "..."
        case None | bool() | int() | float() | complex() | str() | bytes() | range() | slice():
            return repr(value)
    if type(value).__name__ == "Replicate":
        return "Replicate()"
    raise TypeError(f"a {type(value).__name__} has no literal: {value!r:.80}")


def tensor_literal(value: torch.Tensor) -> str:
    """The expression of a tensor, its strides included."""
    value = value.detach().cpu()
    flat, shape = value.flatten().tolist(), tuple(value.shape)
    default = value.dtype in (torch.float32, torch.int64, torch.bool) and flat
    text = f"torch.tensor({literal(flat)}{'' if default else f', dtype={value.dtype}'})"
    if len(shape) != 1:
        text += f".reshape({shape})"
    if not value.is_contiguous() and 0 in value.stride():
        return f"{tensor_literal(value[:1].clone())}.expand({shape})"
    if not value.is_contiguous():
        return f"torch.empty_strided({shape}, {value.stride()}, dtype={value.dtype}).copy_({text})"
    return text


def mesh_literal(value: Mesh, names: Sequence[str] | None = None) -> str:
    """The expression of a mesh."""
    dim_names = f", mesh_dim_names={tuple(names)}" if names else ""
    return f'DeviceMesh("cpu", {nested_ranks(value)}{dim_names})'


def nested_ranks(mesh: Mesh) -> Any:
    """The ranks of a mesh as nested lists, one level for each mesh dim."""
    return torch.tensor(mesh.ranks).reshape(mesh.shape).tolist()


def placement_literal(value: Placement) -> str:
    match value:
        case Shard(dim):
            return f"Shard({dim})"
        case StridedShard(dim, factor):
            return f"{compat.STRIDED_SHARD}({dim}, split_factor={factor})"
        case Partial(op):
            return f'Partial("{op}")'
    return "Replicate()"


def placements_literal(values: Placements) -> str:
    return f"[{', '.join(map(placement_literal, values))}]"


def rank_table(name: str, values: Mapping[int, object]) -> list[str]:
    """Lines that define ``NAME = {rank: value}``, one for each rank; a single line where all ranks have the same value."""
    texts = {rank: literal(value) for rank, value in values.items()}
    if len({*texts.values()}) == 1 and len(texts) > 1:
        return [f"{name} = dict.fromkeys({[*texts]}, {texts[next(iter(texts))]})"]
    return [f"{name} = {{", *(f"    {rank}: {text}," for rank, text in texts.items()), "}"]
