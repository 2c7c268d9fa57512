"""Layouts: the local tensors of DTensors that are distributed or created in any way."""
