"""Features: how a case departs from the plainest one."""
