"""The tests' own laws and planted faults are modules of ``tests``, which ranks import too."""

import sys
from pathlib import Path

from hypothesis import settings

# behind everything else: where the project is installed, the installed one is tested
sys.path.append(str(Path(__file__).parent.parent))

# how long an example takes says something of the machine, not of the code
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")
