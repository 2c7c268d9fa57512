"""Laws of ShardedTensor with chunk and enumerable specs: creating, resharding, gathering, saving and loading it."""
