"""Ops on sharded tensors: forward, backward, programs, what is refused."""
