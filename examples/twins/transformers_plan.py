"""A tiny causal language model of transformers, loaded under the tensor-parallel plan of its own config.

`--option kind=qwen3` takes another model than llama.
"""

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from transformers.utils.logging import disable_progress_bar

from shardlaw import Twin

EAGER = {"experts_implementation": "eager"}  # what also runs in float64
disable_progress_bar()  # it leaves a thread


def make(kind="llama"):
    def model(layers, heads, head, vocab, **_):
        widths = {"hidden_size": heads * head, "intermediate_size": 2 * heads * head, "moe_intermediate_size": heads * head}
        counts = {"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": heads // 2, "vocab_size": vocab}
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **widths, **counts, head_dim=head, pad_token_id=0), **EAGER)

    def shard(model, mesh):
        held = {"config": model.config, "state_dict": model.state_dict(), "dtype": model.dtype}
        return type(model).from_pretrained(None, distributed_config=DistributedConfig(tp_size=mesh.size()), **held, **EAGER)

    def batch(step, batch, seq, vocab, **_):
        tokens = torch.randint(vocab, (batch, seq))
        return {"input_ids": tokens, "labels": tokens, "use_cache": False}

    sizes = {"layers": (2, 1), "heads": (4, 4), "head": (4, 2), "vocab": (32, 4), "batch": (2, 1), "seq": (8, 2)}
    return Twin(model, batch, shard, {"tp": 2}, sizes, loss=lambda output, batch: output.loss)
