"""Laws on checkpoints that one world saves and another loads."""
