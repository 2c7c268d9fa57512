"""Plans of checkpoints, without any process."""
