"""Laws of parallel models: tensor-parallel styles, FSDP, DDP, optimizers, losses, local_map and custom ops."""
