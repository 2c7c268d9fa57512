"""Collectives and messages between ranks, compared with their definitions on lists."""
