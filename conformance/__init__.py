"""How the specification is checked against real processes: laws, worlds, targets, search, findings, reports, commands.

The public names of all this are those of :mod:`shardlaw`.
"""
