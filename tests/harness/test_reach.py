"""What of a file a run enters, and what not."""

import builtins
from pathlib import Path

import pytest

from benchmarks import reach

SOURCE = '''
def asked(x):
    """Says what x is."""
    if x > 3:
        return "large"
    else:
        for _ in range(x):
            pass
    return "small"


def never():
    if asked(1):
        return 1
'''


def test_blocks_that_were_not_entered_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "looked_at.py"
    file.write_text(SOURCE)
    entered = bytearray(6)
    monkeypatch.setattr(builtins, reach.MARK, entered, raising=False)
    loader = reach._Noting("looked_at", str(file))
    inside: dict[str, object] = {}
    exec(loader.get_code("looked_at"), inside)
    asked = inside["asked"]
    assert callable(asked)
    assert asked.__doc__ == "Says what x is."
    assert asked(2) == "small"
    assert sum(entered) == 3
    assert list(reach.missed(file, bytes(entered))) == [(13, "def never():"), (5, "if x > 3:")]


def test_a_command_is_wanted() -> None:
    import subprocess
    import sys

    done = subprocess.run([sys.executable, "-m", "benchmarks.reach", "tensor"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("benchmarks.reach: no command")
