"""The tests' own laws and planted faults are modules of ``tests``, which ranks import too."""

import gc
import os
import sys
from pathlib import Path

from hypothesis import settings

# behind everything else: where the project is installed, the installed one is tested
sys.path.append(str(Path(__file__).parent.parent))

# where these tests run in a workflow, what they run has nothing to say to it
for name in ("GITHUB_ACTIONS", "GITHUB_STEP_SUMMARY"):
    os.environ.pop(name, None)

# small ops are many times faster with one thread where the cores are busy, and they are
os.environ.setdefault("OMP_NUM_THREADS", "1")

# how long an example takes says something of the machine, not of the code
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")


def pytest_collection_finish() -> None:
    """What is loaded by now, torch and the catalogue, stays: it need not be searched for garbage again and again."""
    gc.collect()
    gc.freeze()
