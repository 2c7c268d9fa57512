"""Faults of states that go other ways than through the files of a save: sent between ranks, handed to a process, read dequantized; of
modules sharded by a plan, and of transformed programs."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed._shard import api as shards
from torch.distributed.checkpoint import _async_process_executor, _pg_transport, _traverse, staging, state_dict_saver
from torch.distributed.checkpoint._experimental import checkpoint_reader
from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader
from torch.distributed.tensor.experimental import _tp_transform

from tests.planted.hook import breaks, instead


@breaks("roundtrip.quantized")
def blocks_counted_from_the_shard() -> None:
    """Which scale is whose is counted from the first row of what is read."""

    @instead(QuantizedHuggingFaceStorageReader, "_get_slice_to_block_mapping")
    def fault(true: Any, self: Any, req: Any) -> Any:
        _, columns, row, column = true(self, req)
        count = row.stop - row.start
        return (0, -(-count // self.block_size)), columns, slice(0, count), column


@breaks("roundtrip.sent")
def first_bytes_lost() -> None:
    @instead(_pg_transport, "_prepare_tensor")
    def fault(true: Any, tensor: torch.Tensor) -> Any:
        sent, meta = true(tensor)
        sent = sent.clone()
        sent[:1] += 1
        return sent, meta


@breaks("roundtrip.replica")
def zeros_kept_in_the_file() -> None:

    @instead(staging._ReplicationStager, "_persist_state_dict")
    def fault(true: Any, self: Any, state: Any, *ranks: int) -> None:
        true(self, {key: torch.zeros(()) for key in state}, *ranks)


@breaks("roundtrip.own-file")
def nothing_read() -> None:
    @instead(checkpoint_reader.CheckpointReader, "_partial_read")
    def fault(true: Any, self: Any, path: Any, state: Any, **options: Any) -> Any:
        return state, []


@breaks("roundtrip.process")
def saves_where_it_saved_first() -> None:
    first: list[Any] = []

    @instead(_async_process_executor._AsyncCheckpointProcess, "save")
    def fault(true: Any, self: Any, **options: Any) -> Any:
        first.append(options["storage_writer"])
        return true(self, **{**options, "storage_writer": first[0]})


@breaks("roundtrip.deprecated")
def zeros_saved() -> None:
    @instead(state_dict_saver, "_save_state_dict")
    def fault(true: Any, state: Any, *others: Any, **options: Any) -> Any:
        zeros = {key: value * 0 if isinstance(value, torch.Tensor) else value for key, value in state.items()}
        return true(zeros, *others, **options)


@breaks("sharded_tensor.module")
def other_values_sharded() -> None:
    @instead(shards, "_shard_tensor")
    def fault(true: Any, tensor: torch.Tensor, *others: Any, **options: Any) -> Any:
        return true(tensor + 1, *others, **options)


@breaks("module.transformed")
def weights_left_whole() -> None:
    @instead(_tp_transform, "_shard_state_dict")
    def fault(true: Any, state: Any, *others: Any) -> None:
        true({**state}, *others)


@breaks("plan.element")
def last_part_of_a_path_dropped() -> None:
    @instead(_traverse, "get_element")
    def fault(true: Any, root: Any, path: Any, default: Any = None) -> Any:
        return true(root, path[:-1], default)
