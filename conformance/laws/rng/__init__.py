"""Laws of random ops: seeds, replicas, shards, generator offsets."""
