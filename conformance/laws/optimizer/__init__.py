"""Laws of the states of optimizers and models: get_state_dict and set_state_dict, checkpoints, FSDP, sharded loads."""
