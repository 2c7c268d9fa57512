"""Collectives: messages between ranks, against their list specifications."""
