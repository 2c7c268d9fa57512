"""Where the files of the project lie. The project itself is the installed one."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
