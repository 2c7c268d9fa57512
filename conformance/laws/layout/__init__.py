"""Layouts: who holds which elements of a tensor, however it came to be sharded."""
