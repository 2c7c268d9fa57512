"""A c10d backend in Python: the members of a group send each other letters over TCP.

``register()`` makes it known to torch, after which ``init_process_group("pypost", ...)`` works. It carries CPU tensors of every dtype.
"""

import torch.distributed as dist

from pypost.faults import check_planted
from pypost.group import create


def register() -> None:
    """Make the backend ``pypost`` known to torch; a second call changes nothing."""
    check_planted()
    if not hasattr(dist.Backend, "PYPOST"):
        dist.Backend.register_backend("pypost", create, extended_api=True, devices=["cpu"])
