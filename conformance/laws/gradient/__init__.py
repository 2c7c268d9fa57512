"""Laws of gradients through conversions and redistributions of sharded tensors."""
