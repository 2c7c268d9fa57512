"""How other processes of these tests find the project: the installed one where there is one, else this folder."""

from importlib.metadata import entry_points
from pathlib import Path

ROOT = Path(__file__).parents[2]
IS_INSTALLED = any(entry.name == "shardlaw" for entry in entry_points(group="pytest11"))
# for PYTHONPATH
HOME = [] if IS_INSTALLED else [str(ROOT)]
# for pytest
PLUGIN = [] if IS_INSTALLED else ["-p", "conformance.plugin"]
