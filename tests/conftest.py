"""The tests' own laws and planted faults are modules of ``tests``, which ranks import too."""

import sys
from pathlib import Path

# behind everything else: where the project is installed, the installed one is tested
sys.path.append(str(Path(__file__).parent.parent))
