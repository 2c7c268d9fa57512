"""Faults of checkpoint storage and of how saves and loads deal with failures, planted one at a time in the rank processes.

Every function plants one fault when it is called, before the process group starts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import (
    _consolidate_hf_safetensors,
    _fsspec_filesystem,
    default_planner,
    filesystem,
    format_utils,
    hf_storage,
    staging,
    utils,
)
from torch.distributed.checkpoint.planner import SavePlanner

from tests.planted.hook import breaks, instead


@breaks("roundtrip.protocol[save]")
def planned_globally_on_every_rank() -> None:
    """Every rank makes a global plan, of its own plan alone, before the leading one does."""

    @instead(dcp.FileSystemWriter, "prepare_local_plan")
    def fault(true: Any, self: Any, plan: Any) -> Any:
        self.prepare_global_plan([plan])
        return true(self, plan)


@breaks("roundtrip.again")
def metadata_remembered() -> None:
    """A reader goes by the metadata that it saw first at a place."""
    seen: dict[str, Any] = {}

    @instead(dcp.FileSystemReader, "read_metadata")
    def fault(true: Any, self: Any, *args: Any, **options: Any) -> Any:
        return seen.setdefault(str(self.path), true(self, *args, **options))


@breaks("roundtrip.protocol[load]")
def tensors_never_committed() -> None:
    """A reader copies what it reads and does not say so."""

    @instead(dcp.FileSystemReader, "read_data")
    def fault(true: Any, self: Any, plan: Any, planner: Any) -> Any:
        committed = planner.commit_tensor
        planner.commit_tensor = lambda *args: None
        try:
            return true(self, plan, planner)
        finally:
            planner.commit_tensor = committed


@breaks("roundtrip.complete")
def metadata_written_late() -> None:
    """The metadata are written by a thread that takes its time."""

    @instead(dcp.FileSystemWriter, "finish")
    def fault(true: Any, self: Any, metadata: Any, results: Any) -> None:
        def write() -> None:
            time.sleep(0.3)
            true(self, metadata, results)

        threading.Thread(target=write).start()


@breaks("roundtrip.fault[save]", "roundtrip.fault[load]")
def failures_of_followers_unheard() -> None:
    """Only what fails on the leading rank counts."""

    @instead(utils, "_get_failure_dict")
    def fault(true: Any, results: list[Any]) -> dict[int, Any]:
        return {rank: failure for rank, failure in true(results).items() if rank == 0}


@breaks("roundtrip.fault[overwrite]")
def data_written_in_planning() -> None:
    """Data are written as soon as a rank has its local plan, whatever becomes of the save."""

    @instead(dcp.FileSystemWriter, "prepare_local_plan")
    def fault(true: Any, self: Any, plan: Any) -> Any:
        made = true(self, plan)
        if self._metadata_exists():
            prefix = filesystem._StoragePrefix(f"__{self.rank}_")
            self.write_data(dataclasses.replace(plan, storage_data=prefix), self.planner_in_use)
        return made

    @instead(default_planner.DefaultSavePlanner, "create_local_plan")
    def noted(true: Any, self: Any) -> Any:
        filesystem._FileSystemWriter.planner_in_use = self
        return true(self)


@breaks("roundtrip.fault[caching]")
def plan_cache_of_a_failed_save() -> None:
    """A plan is kept as soon as it is made, before it is known to serve."""

    @instead(default_planner.DefaultSavePlanner, "create_local_plan")
    def fault(true: Any, self: Any) -> Any:
        plan = true(self)
        if self._enable_plan_caching and plan.usable:
            SavePlanner._cached_save_plan[self._cached_plans_key] = plan
        return plan


@breaks("roundtrip.refuses[damaged]")
def missing_files_passed_over() -> None:
    """A file that is not there, or cannot be read, is passed over."""

    @instead(dcp.FileSystemReader, "read_data")
    def fault(true: Any, self: Any, plan: Any, planner: Any) -> Any:
        try:
            return true(self, plan, planner)
        except Exception:
            return true(self, dataclasses.replace(plan, items=[]), planner)


@breaks("roundtrip.options")
def nested_values_forgotten() -> None:
    """A planner that does not flatten its state drops the dicts in it."""

    @instead(default_planner.DefaultSavePlanner, "set_up_planner")
    def fault(true: Any, self: Any, state_dict: Any, **options: Any) -> None:
        if not self.flatten_state_dict:
            state_dict = {name: None if isinstance(value, dict) else value for name, value in state_dict.items()}
        true(self, state_dict, **options)


@breaks("roundtrip.fsspec")
def fsspec_forgets_the_end() -> None:
    """A file that is written through fsspec lacks its last bytes."""

    @instead(_fsspec_filesystem.FileSystem, "rename")
    def fault(true: Any, self: Any, path: str, new_path: str) -> None:
        with self.fs.open(path, "rb") as file:
            content = file.read()
        with self.fs.open(path, "wb") as file:
            file.write(content[:-1])
        true(self, path, new_path)


@breaks("roundtrip.hugging-face", "roundtrip.hugging-face-anew")
def consolidated_from_the_first_offset() -> None:
    """Whole tensors are put together from shards that all start at the beginning."""

    @instead(_consolidate_hf_safetensors, "_write_sub_tensor_to_file_optimized")
    def fault(true: Any, whole: Any, data: Any, size: int, shape: Any, offsets: Any, shard: Any) -> None:
        true(whole, data, size, shape, [0] * len(offsets), shard)


@breaks("roundtrip.torch-file")
def file_read_in_reverse() -> None:
    """What one rank reads from a file of whole tensors is turned round before it is put in its place."""

    @instead(format_utils, "narrow_tensor_by_index")
    def fault(true: Any, tensor: Any, offsets: Any, sizes: Any) -> Any:
        return true(tensor.flip(0) if tensor.ndim else tensor, offsets, sizes)


@breaks("roundtrip.refuses[file]")
def misfits_left_as_they_are() -> None:
    """What cannot be read from a file is not missed."""

    @instead(format_utils.BroadcastingTorchSaveReader, "read_data")
    def fault(true: Any, self: Any, plan: Any, planner: Any) -> Any:
        found: Any = torch.futures.Future()
        found.set_result(None)
        return found


@breaks("roundtrip.refuses[value]")
def values_of_files_are_skipped() -> None:
    """A value that is no tensor is left out where a file of tensors is loaded."""

    @instead(format_utils.DynamicMetaLoadPlanner, "set_up_planner")
    def fault(true: Any, self: Any, state: Any, *args: Any, **how: Any) -> Any:
        return true(self, {key: value for key, value in state.items() if hasattr(value, "shape")}, *args, **how)


@breaks("roundtrip.keys")
def keys_of_the_top_alone() -> None:
    """Keys name nothing but leaves."""

    @instead(default_planner._EmptyStateDictLoadPlanner, "_should_include_key")
    def fault(true: Any, self: Any, key: str, metadata: Any) -> bool:
        return self.keys is None or key in self.keys


@breaks("roundtrip.staged-again")
def staged_once_for_all() -> None:
    """A stager gives each save what it staged for the first."""

    @instead(staging.DefaultStager, "stage")
    def fault(true: Any, self: Any, state: Any, **options: Any) -> Any:
        if not hasattr(self, "first"):
            self.first = true(self, state, **options)
        return self.first


@breaks("roundtrip.stager")
def stagers_not_waited_for() -> None:
    """A stager that says that it must be waited for is not."""

    @instead(dcp, "async_save")
    def fault(true: Any, *given: Any, async_stager: Any = None, **options: Any) -> Any:
        async_stager.should_synchronize_after_execute = False
        return true(*given, async_stager=async_stager, **options)


@breaks("roundtrip.streams")
def transforms_left_out_of_loads() -> None:
    """What is read is not transformed back."""

    @instead(filesystem._StorageReaderTransforms, "transform_load_stream")
    def fault(true: Any, self: Any, item: Any, descriptors: Any, stream: Any) -> Any:
        return stream


@breaks("roundtrip.threads-fail")
def loads_go_on_without_what_threads_read() -> None:
    """A thread that fails is not missed."""

    @instead(hf_storage.HuggingFaceStorageReader, "_process_read_request")
    def fault(true: Any, self: Any, file: Any, req: Any, planner: Any) -> None:
        with contextlib.suppress(RuntimeError):
            true(self, file, req, planner)


@breaks("roundtrip.places")
def first_place_for_good() -> None:
    @instead(filesystem.FileSystemReader, "reset")
    def fault(true: Any, self: Any, checkpoint_id: Any = None) -> None:
        self.place = getattr(self, "place", None) or checkpoint_id
        true(self, self.place)


@breaks("roundtrip.older")
def older_checkpoints_taken_for_new_ones() -> None:
    true = default_planner.flatten_state_dict

    def fault(state: Any) -> Any:
        default_planner._version._derived_version = None
        return true(state)

    default_planner.flatten_state_dict = fault
