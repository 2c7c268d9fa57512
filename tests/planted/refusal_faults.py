"""Faults of what saves and loads refuse, planted one at a time in the rank processes."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import _traverse, default_planner
from torch.distributed.tensor import DTensor

from tests.planted.hook import breaks, instead


@breaks("roundtrip.refuses[missing]")
def missing_dtensor_accepted() -> None:
    """A DTensor that the checkpoint has not is passed over in silence."""
    true = default_planner.create_default_local_load_plan

    def fault(state: dict[str, Any], metadata: Any, strict: bool = True) -> Any:
        known = metadata.state_dict_metadata
        return true({name: value for name, value in state.items() if name in known or not isinstance(value, DTensor)}, metadata, strict)

    default_planner.create_default_local_load_plan = fault


@breaks("roundtrip.refuses[size]")
def size_check_by_dims() -> None:
    """A tensor of another size is accepted as long as it has as many dims."""
    true = default_planner.create_default_local_load_plan

    def fault(state: dict[str, Any], metadata: Any, strict: bool = True) -> Any:
        entries = dict(metadata.state_dict_metadata)
        for name, value in state.items():
            entry = entries.get(name)
            if isinstance(value, torch.Tensor) and hasattr(entry, "chunks") and len(entry.size) == value.dim():
                entries[name] = dataclasses.replace(entry, size=value.size())
        return true(state, dataclasses.replace(metadata, state_dict_metadata=entries), strict)

    default_planner.create_default_local_load_plan = fault


@breaks("roundtrip.refuses[kind]")
def kind_check_skipped() -> None:
    """A tensor in the checkpoint is passed over where the destination holds another value."""
    true = default_planner._create_read_items

    def fault(name: str, entry: Any, value: Any) -> Any:
        if hasattr(entry, "chunks") and not isinstance(value, torch.Tensor):
            return []
        return true(name, entry, value)

    default_planner._create_read_items = fault


@breaks("roundtrip.refuses[save]")
def duplicate_names_accepted() -> None:
    """Of two leaves with one path the last one is kept."""

    def fault(state: dict[str, Any]) -> Any:
        flat: dict[str, Any] = {}
        paths: dict[str, Any] = {}

        def keep(path: Any, value: Any) -> None:
            name = ".".join(map(str, path))
            flat[name], paths[name] = value, path

        _traverse.traverse_state_dict(state, keep)
        return flat, paths

    default_planner.flatten_state_dict = fault


@breaks("roundtrip.refuses[hole]")
def holes_accepted() -> None:
    """The global plan is not held against the size of its tensors."""
    default_planner._validate_global_plan = lambda plan, metadata: []


@breaks("roundtrip.refuses[overwrite]")
def always_overwrites() -> None:
    """A writer never minds what is there."""

    @instead(dcp.FileSystemWriter, "__init__")
    def fault(true: Any, self: Any, *args: Any, **options: Any) -> None:
        true(self, *args, **{**options, "overwrite": True})
