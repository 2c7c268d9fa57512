"""What laws about checkpoints share: a save in one world and a load in another."""
