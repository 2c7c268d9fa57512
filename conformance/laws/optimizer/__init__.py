"""The states of optimizers: sharded on one axis or two, through checkpoints, of fully sharded models, whole and in
parts."""
