"""Checkpoints saved by one world and loaded by another."""
