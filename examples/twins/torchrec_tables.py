"""The embedding tables of torchrec, one whole on one rank, one by rows, one by columns: each rank brings its part of the batch."""

import torch
from by_hand import average
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.shard import shard as sharded
from torchrec.distributed.sharding_plan import column_wise, construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import ShardingEnv

from shardlaw import Twin

TABLES = ("on_one", "by_rows", "by_columns")


class Net(nn.Module):
    def __init__(self, rows, width):
        super().__init__()
        kinds = [EmbeddingBagConfig(name=name, feature_names=[name], num_embeddings=rows, embedding_dim=width) for name in TABLES]
        self.tables, self.top = EmbeddingBagCollection(tables=kinds), nn.Linear(3 * width, 1)

    def forward(self, ids):
        """Of ids (batch, table, how many)."""
        lengths = torch.full((3 * len(ids),), ids.shape[2])
        pooled = self.tables(KeyedJaggedTensor(list(TABLES), ids.transpose(0, 1).flatten(), lengths=lengths))
        return self.top(pooled.values().to(self.top.weight.dtype))  # it gives float32, whatever its tables are


def make(values_kept="yes"):
    def shard(model, mesh):
        ways = {"on_one": table_wise(rank=0), "by_rows": row_wise(), "by_columns": column_wise(ranks=list(range(mesh.size())))}
        sharder, env = EmbeddingBagCollectionSharder(), ShardingEnv.from_process_group(mesh.get_group())
        plan = construct_module_sharding_plan(model.tables, ways, sharder, mesh.size(), mesh.size(), device_type="cpu")
        values = model.tables.state_dict()
        model.tables = sharded(model.tables, plan, env, torch.device("cpu"), sharder)
        if values_kept == "yes":  # on CPUs it draws its tables anew
            model.tables.load_state_dict(values)

    return Twin(
        model=lambda rows, width, **_: Net(rows, width),
        batch=lambda step, batch, rows, **_: torch.randint(rows, (batch, 3, 4)),
        part=lambda batch, mesh: batch.chunk(mesh.size())[mesh.get_local_rank()],
        shard=shard,
        before_step=lambda model, mesh: average(model, mesh.get_group(), ("tables",)) if mesh is not None else None,
        mesh={"ranks": 2},
        sizes={"rows": (13, 2), "width": (16, 8), "batch": (6, 2)},
    )
