"""Redistribution: from any placements to any others, pending reductions among them."""
