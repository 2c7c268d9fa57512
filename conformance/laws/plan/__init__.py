"""Laws of checkpoint plans. One process computes the plans of all ranks."""
