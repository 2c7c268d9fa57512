"""Random ops: seeds, replicas, shards."""
