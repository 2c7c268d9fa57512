"""Sharded tensors by chunks and by enumerated boxes: made, moved, gathered, saved and loaded."""
