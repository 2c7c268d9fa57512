"""Gradients through the ways in and out of sharded tensors."""
