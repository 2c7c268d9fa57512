"""Laws of ops on sharded tensors: forward, backward, programs, refusals."""
