"""Shared by laws on checkpoints: states as fields, due values and script text, and calls of save and load."""
