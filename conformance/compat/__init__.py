"""Every private name of torch that the project uses, in one place.

Supported: torch 2.11 to 2.15. A name is looked up in each place where one of these versions keeps it. A name that is in none of them raises
:class:`TorchMovedError`, which gives the places and what the name is needed for. A test checks this list against the installed version.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache
from typing import Any


class TorchMovedError(ImportError):
    """A private name of torch is not where any supported version keeps it."""


def torch_release() -> tuple[int, ...]:
    """The numbers of the installed torch: ``(2, 13, 0)``."""
    import torch

    return tuple(int(part) for part in torch.__version__.partition("+")[0].split(".") if part.isdecimal())


def find_private(purpose: str, *places: str) -> Any:
    """The object at the first of ``places`` (``module:attribute.attribute``) that exists. Raises :class:`TorchMovedError`."""
    return _locate(purpose, *places)[1]


def _locate(purpose: str, *places: str) -> tuple[str, Any]:
    """As :func:`find_private`, with the place that has the object."""
    for place in places:
        with suppress(ImportError, AttributeError):
            return place, pkgutil.resolve_name(place)
    import torch

    raise TorchMovedError(f"torch {torch.__version__} has none of {', '.join(places)}: needed to {purpose}")


# by key: what the name is needed for, and the places that may have it, the newest first
NAMES: dict[str, tuple[str, ...]] = {
    "old_tensor": ("import from where DTensor was before", "torch.distributed._tensor:"),
    "old_placement_types": ("import from where placements were before", "torch.distributed._tensor.placement_types:"),
    "StridedShard": ("place strided shards", "torch.distributed.tensor.placement_types:_StridedShard"),
    "MaskPartial": (
        "recognise masked partials",
        "torch.distributed.tensor._ops._embedding_ops:_MaskPartial",
        "torch.distributed.tensor.placement_types:_MaskPartial",
    ),
    "local_shape_and_offset": (
        "ask for the local shape and offset",
        "torch.distributed.tensor._utils:compute_local_shape_and_global_offset",
    ),
    "DTensorSpec": ("read shard orders", "torch.distributed.tensor._dtensor_spec:DTensorSpec"),
    "ShardOrderEntry": ("write shard orders", "torch.distributed.tensor._dtensor_spec:ShardOrderEntry"),
    "is_rng_supported_mesh": ("ask for random DTensors", "torch.distributed.tensor._random:is_rng_supported_mesh"),
    "activation_wrappers": (
        "wrap modules whose activations are computed again",
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper:",
    ),
    "fsdp_common": ("shard parameters on meshes of their own", "torch.distributed.fsdp._fully_shard._fsdp_common:"),
    "make_wrapper_subclass": ("hold a tensor in parts", "torch:Tensor._make_wrapper_subclass"),
    "hybrid_shard_of_gradients": (
        "shard gradients alone, with replicas",
        "torch.distributed.fsdp:ShardingStrategy._HYBRID_SHARD_ZERO2",
    ),
    "fsdp_comm_hooks": ("compress gradients of FSDP1", "torch.distributed.algorithms._comm_hooks.default_hooks:"),
    "replicate": ("replicate a module in place", "torch.distributed._composable.replicate:replicate"),
    "pre_dp_module_transform": ("replicate parallel models", "torch.distributed.tensor.parallel.ddp:_pre_dp_module_transform"),
    "context_parallel_unshard": (
        "put buffers together within a context",
        "torch.distributed.tensor.experimental._attention:context_parallel_unshard",
    ),
    "set_rotate_method": ("choose how keys go round", "torch.distributed.tensor.experimental._attention:set_rotate_method"),
    "ContextParallel": ("gather keys", "torch.distributed.tensor.experimental._context_parallel._attention:_ContextParallel"),
    "ring_attention": (
        "have keys go round",
        "torch.distributed.tensor.experimental._context_parallel._attention:_templated_ring_attention",
    ),
    "ring_attention_backward": (
        "have gradients go round",
        "torch.distributed.tensor.experimental._context_parallel._attention:_templated_ring_attention_backward",
    ),
    "context_parallel_shard": ("cut buffers up", "torch.distributed.tensor.experimental._attention:_context_parallel_shard"),
    "DocumentBalancer": ("deal documents", "torch.distributed.tensor.experimental._attention:_PerDocumentHeadTailLoadBalancer"),
    "transformation": ("transform exported programs", "torch.distributed.tensor.experimental._tp_transform:"),
    "input_reshard": ("shard what a backward pass keeps", "torch.distributed.tensor.parallel.input_reshard:input_reshard"),
    "manual_seed": ("seed the ranks of a mesh", "torch.distributed.tensor._random:manual_seed"),
    "OffsetBasedRNGTracker": ("ask where the random numbers of a shard start", "torch.distributed.tensor._random:OffsetBasedRNGTracker"),
    "rng_offsets": (
        "ask where the random numbers of a shard start without drawing any",
        "torch.distributed.tensor._random:OffsetBasedRNGTracker._compute_rng_offsets",
    ),
    "PhiloxState": ("read and write how far a generator has come", "torch.distributed.tensor._random:_PhiloxState"),
    "TensorMeta": ("describe a tensor to its spec", "torch.distributed.tensor._dtensor_spec:TensorMeta"),
    "BackendOptions": ("make options of any backend", "torch._C._distributed_c10d:Backend.Options"),
    "default_group": ("ask for the default group", "torch.distributed.distributed_c10d:_get_default_group"),
    "groups": ("list the live process groups", "torch.distributed.distributed_c10d:_world"),
    "sequence_number": ("count the collectives of a group", "torch.distributed:ProcessGroup._get_sequence_number_for_group"),
    "TorchDispatchMode": ("note which overloads run", "torch.utils._python_dispatch:TorchDispatchMode"),
    "OpOverload": ("recognise overloads", "torch._ops:OpOverload"),
    "functions": ("list the functions of torch", "torch._C:_VariableFunctions"),
    "min_cost_plan": ("choose how redistributions are planned", "torch.distributed.tensor._redistribute:use_min_cost_redistribution_plan"),
    "unmerged_plan": (
        "keep collectives of a redistribution apart",
        "torch.distributed.tensor._redistribute:disable_redistribute_transform_optimization",
    ),
    "ExplicitRedistributionContext": ("have ops refuse to redistribute", "torch.distributed.tensor._utils:ExplicitRedistributionContext"),
    "are_tracing": ("plan alone what is traced", "torch.distributed._functional_collectives:_are_we_tracing"),
    "op_plans": ("forget how ops are sharded", "torch.distributed.tensor.debug:_clear_sharding_prop_cache"),
    "LocalShardsWrapper": ("hold several shards a rank", "torch.distributed.tensor._shards_wrapper:LocalShardsWrapper"),
    "ShardedTensor": ("recognise sharded tensors", "torch.distributed._shard.sharded_tensor:ShardedTensor"),
    "ShardOfTensor": ("make the shards of a sharded tensor", "torch.distributed._shard.sharded_tensor:Shard"),
    "sharded_tensor": ("make sharded tensors", "torch.distributed._shard.sharded_tensor:"),
    "ShardMetadata": ("describe shards", "torch.distributed._shard.metadata:ShardMetadata"),
    "TensorProperties": ("describe the tensors of shards", "torch.distributed._shard.sharded_tensor.metadata:TensorProperties"),
    "ChunkShardingSpec": ("shard tensors by chunks", "torch.distributed._shard.sharding_spec:ChunkShardingSpec"),
    "EnumerableShardingSpec": ("shard tensors by boxes", "torch.distributed._shard.sharding_spec:EnumerableShardingSpec"),
    "load_with_process_group": ("load pickled sharded tensors", "torch.distributed._shard.api:load_with_process_group"),
    "custom_sharding_spec_op": (
        "register an op for sharded tensors of a spec",
        "torch.distributed._shard.sharding_spec.api:custom_sharding_spec_op",
    ),
    "sharded_optim": ("optimize sharded tensors", "torch.distributed._shard.sharded_optim:"),
    "shard_api": ("shard modules by a plan", "torch.distributed._shard.api:"),
    "shard_tensor": ("hand out a tensor in shards", "torch.distributed._shard.api:_shard_tensor"),
    "ReaderWithOffset": ("plan the load of a part of an optimizer's state", "torch.distributed.checkpoint.optimizer:_ReaderWithOffset"),
    "state_dict_2d_layout": ("ask where the parts of a model lie", "torch.distributed.checkpoint.optimizer:_get_state_dict_2d_layout"),
    "init_from_local_shards_and_metadata": (
        "make a sharded tensor that describes itself",
        "torch.distributed._shard.sharded_tensor:ShardedTensor._init_from_local_shards_and_global_metadata",
    ),
    "ShardedTensorMetadata": ("describe sharded tensors", "torch.distributed._shard.sharded_tensor:ShardedTensorMetadata"),
    "init_from_local_tensor": (
        "make a sharded tensor of local tensors",
        "torch.distributed._shard.sharded_tensor:ShardedTensor._init_from_local_tensor",
    ),
    "init_from_local_shards": ("make a sharded tensor", "torch.distributed._shard.sharded_tensor:init_from_local_shards"),
    "global_tensor_shape": ("put the shapes of uneven shards together", "torch.distributed.tensor._utils:compute_global_tensor_shape"),
    "local_tensor_info": ("ask for the shape and strides of an even shard", "torch.distributed.tensor._utils:compute_local_tensor_info"),
    "local_shape_and_offset_at": (
        "ask for the local shape and offset at a coordinate",
        "torch.distributed.tensor._utils:_compute_local_shape_and_global_offset",
    ),
    "global_tensor_info": ("ask which global shape follows from a local one", "torch.distributed.tensor._utils:compute_global_tensor_info"),
    "split_by_shard": ("cut a tensor up", "torch.distributed.tensor.placement_types:Shard._split_tensor"),
    "split_by_strided_shard": ("cut a tensor up in strides", "torch.distributed.tensor.placement_types:_StridedShard._split_tensor"),
    "orders_to_placements": (
        "write shard orders as placements",
        "torch.distributed.tensor._dtensor_spec:DTensorSpec._convert_shard_order_to_StridedShard",
    ),
    "placements_to_orders": (
        "read shard orders from placements",
        "torch.distributed.tensor._dtensor_spec:DTensorSpec._maybe_convert_StridedShard_to_shard_order",
    ),
    "MeshLayout": ("compute with the layouts of meshes", "torch.distributed._mesh_layout:_MeshLayout"),
    "FlatLayout": ("compute with the layouts of flattened meshes", "torch.distributed._mesh_layout:_FlatLayout"),
    "dedup_save_plans": ("share out what several ranks hold", "torch.distributed.checkpoint._dedup_save_plans:dedup_save_plans"),
    "fsspec_writer": ("write checkpoints through fsspec", "torch.distributed.checkpoint._fsspec_filesystem:FsspecWriter"),
    "fsspec_reader": ("read checkpoints through fsspec", "torch.distributed.checkpoint._fsspec_filesystem:FsspecReader"),
    "fsspec_files": ("see what goes through fsspec", "torch.distributed.checkpoint._fsspec_filesystem:FileSystem"),
    "StreamTransformExtension": ("transform streams", "torch.distributed.checkpoint._extension:StreamTransformExtension"),
    "ExtensionRegistry": ("transform streams back", "torch.distributed.checkpoint._extension:ExtensionRegistry"),
    "HuggingFaceStorageWriter": ("write safetensors", "torch.distributed.checkpoint.hf_storage:HuggingFaceStorageWriter"),
    "HuggingFaceStorageReader": ("read safetensors", "torch.distributed.checkpoint.hf_storage:HuggingFaceStorageReader"),
    "PGTransport": ("send states between ranks", "torch.distributed.checkpoint._pg_transport:PGTransport"),
    "make_sync_checkpointer": ("save a file for each rank", "torch.distributed.checkpoint._experimental:make_sync_checkpointer"),
    "ReplicationStager": ("keep replicas of states", "torch.distributed.checkpoint.staging:_ReplicationStager"),
    "async_process": ("end the process of a save", "torch.distributed.checkpoint._async_process_executor:"),
    "consolidate_on_every_rank": (
        "put files together",
        "torch.distributed.checkpoint._consolidate_hf_safetensors:consolidate_safetensors_files_on_every_rank",
    ),
    "load_state_dict_from_keys": ("load what some keys name", "torch.distributed.checkpoint.state_dict_loader:_load_state_dict_from_keys"),
    "flatten_state_dict": ("flatten a state", "torch.distributed.checkpoint._nested_dict:flatten_state_dict"),
    "unflatten_state_dict": ("put a state together again", "torch.distributed.checkpoint._nested_dict:unflatten_state_dict"),
    "get_element": ("look up an element of a state", "torch.distributed.checkpoint._traverse:get_element"),
    "functional": ("call functional collectives", "torch.distributed._functional_collectives:"),
    "op_db": ("read samples of ops", "torch.testing._internal.common_methods_invocations:op_db"),
    "op_dispatcher": ("ask which ops can be sharded", "torch.distributed.tensor:DTensor._op_dispatcher"),
    "planner": ("plan ops", "torch.distributed.tensor:DTensor._op_dispatcher.sharding_propagator"),
    "has_decomposition": (
        "ask which ops are sharded by their decomposition",
        "torch.distributed.tensor._decompositions:DecompShardingStrategy.has_decomp",
    ),
    "note_decomposed": (
        "take the plan of an op that is sharded by its decomposition",
        "torch.distributed.tensor._decompositions:DecompShardingStrategy.ensure_schema_info",
    ),
    "CHECKPOINT_PREFIX": (
        "know a parameter in a wrapper by its own name",
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper:_CHECKPOINT_PREFIX",
    ),
    "register_state_dict_hook": ("have a module hand out sharded tensors", "torch.nn:Module._register_state_dict_hook"),
    "CommDebugMode": ("count collectives", "torch.distributed.tensor.debug:CommDebugMode"),
    # laws of ranks that are simulated in one process
    "LocalTensor": ("hold the tensors of all ranks in one", "torch.distributed._local_tensor:LocalTensor"),
    "LocalTensorMode": ("act for all ranks in one process", "torch.distributed._local_tensor:LocalTensorMode"),
    "tensor_map": ("see the tensors of all ranks", "torch.distributed._local_tensor:tensor_map"),
    # laws of random numbers
    "set_offset_before_op": (
        "set where the random numbers of a shard start",
        "torch.distributed.tensor._random:OffsetBasedRNGTracker._set_pre_op_offset",
    ),
    "set_offset_after_op": (
        "set where the random numbers of the next tensor start",
        "torch.distributed.tensor._random:OffsetBasedRNGTracker._set_post_op_offset",
    ),
}


@cache
def name(key: str) -> Any:
    """The object behind a key of :data:`NAMES`."""
    return find_private(*NAMES[key])


def supports_all_to_all(backend: str) -> bool:
    """Whether a backend supports ``all_to_all`` of lists: gloo does so only from torch 2.13 on."""
    return backend != "gloo" or torch_release() >= (2, 13)


def mesh_for_rank(device: str, table: Any, rank: int) -> Any:
    """A mesh as rank ``rank`` would have it, created in any process. It has no process groups, and cannot communicate."""
    from torch.distributed.device_mesh import DeviceMesh

    try:
        return DeviceMesh(device, table, _init_backend=False, _rank=rank)
    except TypeError as error:
        raise TorchMovedError(f"a mesh cannot be created for another rank: {error}") from error


def group_timeout(group: Any, device: Any) -> Any:
    """The timeout of a process group's backend for a device."""
    return group._get_backend(device).options._timeout


def custom_op_handlers() -> Any:
    """DTensor's table of overloads that have a handler of their own."""
    return name("op_dispatcher")._custom_op_handlers


def clear_save_plans() -> None:
    """Clear the plans that save planners cache between saves."""
    from torch.distributed.checkpoint.planner import SavePlanner

    for attribute, cached in vars(SavePlanner).items():
        if attribute.startswith("_cached") and isinstance(cached, dict):
            cached.clear()


def observe_overloads(on_overload: Callable[[Any, Any, Any], object]) -> AbstractContextManager[Any]:
    """A context in which ``on_overload(overload, args, kwargs)`` is called before each overload runs."""
    return _overload_observer()(on_overload)  # type: ignore[no-any-return]


@cache
def _overload_observer() -> Any:
    mode = name("TorchDispatchMode")

    class OverloadObserver(mode):  # type: ignore[misc,valid-type]
        def __init__(self, on_overload: Callable[[Any, Any, Any], object]) -> None:
            super().__init__()
            self.on_overload = on_overload

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.on_overload(func, args, kwargs or {})
            return func(*args, **(kwargs or {}))

    return OverloadObserver


@contextmanager
def without_cached_plans() -> Iterator[None]:
    """Clear torch's cache of how ops are sharded before and after the block."""
    clear_op_plans()
    try:
        yield
    finally:
        clear_op_plans()


def clear_op_plans() -> None:
    """Clear torch's cache of how ops are sharded, where it can be cleared."""
    with suppress(TorchMovedError):
        name("op_plans")()


@cache
def location_of(key: str) -> str:
    """Where the installed torch has a name of :data:`NAMES`: ``module:attribute``. Raises :class:`TorchMovedError`."""
    return _locate(*NAMES[key])[0]


def __getattr__(key: str) -> Any:
    """``compat.KEY`` is ``compat.name("KEY")``."""
    if key not in NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {key!r}")
    return name(key)


def writer_with_transforms(folder: str, transforms: list[Any], storage: str = "", **options: Any) -> Any:
    """A writer of files, or of the storage ``fsspec``, that applies these stream transforms."""
    from torch.distributed.checkpoint import FileSystemWriter

    writer = name("fsspec_writer") if storage == "fsspec" else FileSystemWriter
    return writer(folder, _extensions=transforms, **options)


def reader_with_transforms(folder: str, registry: Any = None) -> Any:
    """A reader of files that knows the transforms of a registry, or only torch's own."""
    from torch.distributed.checkpoint import FileSystemReader

    return FileSystemReader(folder, _extension_registry=registry)


def reset_async_process() -> None:
    """Make the next save that runs in a process of its own start a new process."""
    name("async_process")._CHECKPOINT_PROCESS = None


def clear_redistribution_plans() -> None:
    """Clear torch's caches of planned redistributions."""
    from torch.distributed.tensor import _redistribute

    _redistribute._gen_transform_infos.cache_clear()
    getattr(_redistribute, "_planner_cache", {}).clear()


# Mesh views, whose methods are private


def flatten_mesh(mesh: Any, name: str | None = None, **options: Any) -> Any:
    """Flatten the dims of a mesh into one."""
    return mesh._flatten(name, **options)


def unflatten_mesh(mesh: Any, dim: int | str, sizes: Any, names: Any, **options: Any) -> Any:
    """Split one dim of a mesh into several."""
    return mesh._unflatten(dim, sizes, names, **options)


def concatenate_meshes(meshes: Any) -> Any:
    """Concatenate views of one mesh, dim after dim."""
    return type(meshes[0])._concatenate(meshes)


def set_local_tensor(dtensor: Any, local: Any) -> None:
    """Replace the local tensor of a DTensor, by a tensor subclass for instance."""
    dtensor._local_tensor = local


def base_tensor(tensor: Any) -> Any:
    """The base of a view, or the tensor itself if it is not a view."""
    return tensor if tensor._base is None else tensor._base


def foreach(name: str, tensors: Any, *arguments: Any) -> Any:
    """Call an op on a list of tensors, such as ``mul_``."""
    import torch

    # joined: the prefix alone is no name of torch, and cases and tables have it too
    return getattr(torch, "_".join(("", "foreach", name)))(tensors, *arguments)


def import_statement(key: str) -> str:
    """The statement that imports a name of :data:`NAMES` into a script; the name is at the top of its module."""
    source, _, path = location_of(key).partition(":")
    return f"from {source} import {path}"


# what :func:`mesh_for_rank` does, as source for scripts
MESH_FOR_RANK = 'DeviceMesh("cpu", {}, _init_backend=False, _rank=seat)'
# the name of a strided shard in scripts
STRIDED_SHARD = "_StridedShard"

# for ranks to share instead of importing: torch imports the first two when a process first uses DTensor, few laws need the last
LAZY_MODULES = ("torch._dynamo", "torch.distributed.tensor.debug", "torch.distributed.optim")
