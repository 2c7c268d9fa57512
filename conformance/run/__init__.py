"""A run: what was asked for, the search through cases, and what it comes to."""
