"""What lists an object store that lag would change: nothing, since torch goes by names alone; what goes by lists is of local files."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from shardlaw.conformance import compat

LISTS = ("ls", "find", "walk", "glob")


def save(url: str, value: float) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"x": torch.full((3,), value)}, storage_writer=compat.fsspec_writer(url), no_dist=True)


def test_no_list_is_asked_for_by_a_save_over_a_checkpoint_or_by_a_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """A list that lags lacks what is new, or has what is gone: here every list is empty, and it is noted that it was asked for."""
    pytest.importorskip("fsspec")
    from fsspec.implementations.memory import MemoryFileSystem

    asked = list[str]()

    def noting(name: str) -> Any:
        def faked(*given: Any, **options: Any) -> list[str]:
            asked.append(name)
            return []

        return faked

    for name in LISTS:
        monkeypatch.setattr(MemoryFileSystem, name, noting(name))
    for value in (1.0, 2.0):
        save("memory:///listing", value)
    held: dict[str, Any] = {"x": torch.zeros(3)}
    dcp.load(held, storage_reader=compat.fsspec_reader("memory:///listing"), no_dist=True)
    assert held["x"].tolist() == [2.0] * 3
    assert not asked
    monkeypatch.undo()
    names = sorted(os.path.basename(path) for path in MemoryFileSystem().ls("/listing", detail=False))
    assert names == [".metadata", "__0_0.distcp"]


def test_safetensors_do_not_go_through_fsspec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A URL given to the writer of safetensors names a folder of this machine, so that there is no such save to crash."""
    pytest.importorskip("safetensors")
    monkeypatch.chdir(tmp_path)
    writer = compat.HuggingFaceStorageWriter("memory://hf", save_distributed=True)
    dcp.save({"x": torch.ones(2)}, storage_writer=writer, no_dist=True)
    assert [path.name for path in (tmp_path / "memory:" / "hf").iterdir()]
