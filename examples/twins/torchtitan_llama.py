"""The smallest llama 3 of torchtitan, sharded by its own `parallelize_llama`: tensor and sequence parallelism, FSDP2, its own loss.

`--option sequence=no` is without sequence parallelism.
"""

import torch
from torch.distributed.fsdp import FSDPModule
from torchtitan.components.loss import cross_entropy_loss
from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import parallel_dims
from torchtitan.distributed.utils import set_spmd_backend
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import llama3_configs, parallelize_llama
from torchtitan.models.llama3.sharding import set_llama3_sharding_config

from shardlaw import Twin

parallel_dims.device_type = "cpu"  # it takes CUDA for granted where there is no accelerator
DTENSOR = "partial_dtensor"


def built(layers, sequence):
    """Fewer layers than the smallest has, and an attention that has a backward on CPUs."""
    config = llama3_configs["debugmodel"]("flex")
    config.layers = config.layers[:layers]
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    set_llama3_sharding_config(config, enable_sp=sequence == "yes")
    model = config.build()
    model.init_states()
    return model


def make(sequence="yes"):
    def shard(model, mesh):
        set_spmd_backend(DTENSOR)
        dims = parallel_dims.ParallelDims(1, mesh["dp"].size(), 1, mesh["tp"].size(), 1, 1, mesh.size(), DTENSOR)
        training = TrainingConfig(mixed_precision_param="float32", mixed_precision_reduce="float32")
        rest = {"compile_config": CompileConfig(), "ac_config": None, "dump_folder": ""}
        parallelize_llama(model, parallel_dims=dims, training=training, parallelism=ParallelismConfig(spmd_backend=DTENSOR), **rest)
        for module in model.modules():
            if isinstance(module, FSDPModule):  # gloo refuses the reduction that a divisor of one asks for
                module.set_force_sum_reduction_for_comms(True)

    def batch(step, batch, seq, **_):
        tokens = torch.randint(2048, (batch, seq + 1))
        return tokens[:, :-1], tokens[:, 1:], batch * seq

    def part(batch, mesh):
        return *(half.chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()] for half in batch[:2]), batch[2]

    how = {"part": part, "loss": lambda logits, batch: cross_entropy_loss(logits, batch[1]) / batch[2]}
    sizes = {"layers": (2, 1), "batch": (4, 2), "seq": (8, 2)}
    return Twin(lambda layers, **_: built(layers, sequence), batch, shard, {"dp": 2, "tp": 2}, sizes, **how)
