"""Worlds over many hosts, which torchrun has started."""
