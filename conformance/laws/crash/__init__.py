"""What is left of a checkpoint when ranks or machines die in the middle of a save."""
