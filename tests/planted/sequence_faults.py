"""Faults of sequences that are cut up for attention, of microbatches and stages, and of random numbers in place, planted one at a time."""

from __future__ import annotations

from typing import Any

from torch.distributed.pipelining import Pipe, PipelineStage, microbatch
from torch.distributed.tensor import Replicate, _dispatch
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.distributed.tensor.experimental._context_parallel import _attention

from tests.planted.hook import breaks, instead


@breaks("module.context-buffers")
def context_leaves_attention_exchanged() -> None:
    @instead(_attention, "_restore_function")
    def fault(true: Any, function: Any, module: Any) -> None:
        return None


@breaks("module.ring-attention")
def later_keys_are_taken_whole() -> None:
    @instead(_attention, "_is_causal_behavior")
    def fault(true: Any, rank: int, world_size: int, i: int, is_causal: bool) -> Any:
        behavior = true(rank, world_size, i, is_causal)
        causal = _attention._CausalBehavior
        return causal.NOT_IS_CAUSAL if behavior is causal.IS_CAUSAL else behavior


@breaks("module.gathered-keys")
def gradients_of_gathered_keys_are_doubled() -> None:
    @instead(_attention, "flex_cp_allgather")
    def fault(true: Any, key: Any, value: Any, *rest: Any) -> Any:
        keys, values = true(key, value, *rest)
        return keys * 2 - keys.detach(), values


@breaks("random.writes")
def what_is_filled_claims_replicas() -> None:
    @instead(_dispatch.OpDispatcher, "_dispatch_fast_path_python_tail")
    def fault(true: Any, self: Any, op: Any, arguments: Any, *rest: Any) -> Any:
        out = true(self, op, arguments, *rest)
        if op._schema.name == "aten::cauchy_":
            out._spec = DTensorSpec(out.device_mesh, (Replicate(),) * out.device_mesh.ndim, out._spec.tensor_meta)
        return out


@breaks("module.microbatches")
def last_microbatch_is_merged_first() -> None:
    @instead(microbatch, "merge_chunks")
    def fault(true: Any, chunks: Any, spec: Any) -> Any:
        return true(chunks[::-1], spec)


@breaks("module.pipelined")
def gradients_of_a_stage_are_divided_twice() -> None:
    @instead(PipelineStage, "scale_grads")
    def fault(true: Any, self: Any, factor: int) -> None:
        true(self, factor * 2)


@breaks("module.pipeline-stages")
def a_stage_is_sent_half_of_each_gradient() -> None:
    @instead(PipelineStage, "_retrieve_recv_grads")
    def fault(true: Any, self: Any, chunk: int) -> Any:
        return tuple(grad if grad is None else grad / 2 for grad in true(self, chunk))


@breaks("module.traced-stages")
def weights_of_traced_stages_are_halved() -> None:
    @instead(Pipe, "get_stage_module")
    def fault(true: Any, self: Any, number: int) -> Any:
        stage = true(self, number)
        for parameter in stage.parameters():
            parameter.data /= 2
        return stage
