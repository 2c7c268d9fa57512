"""How the specification is checked against real processes: laws, worlds, targets, search, findings, reports, commands."""

__version__ = "0.1.0"
