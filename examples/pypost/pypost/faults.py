"""Faults that somebody may plant, by ``PYPOST_FAULT``, to see whether a check of this backend finds them."""

import os

FAULTS = {
    "wrong-reduction": "a reduction leaves out its last member",
    "swapped-ranks": "all_gather swaps what the last two members gave",
    "dropped-last": "reduce_scatter does not write the last element of its result",
    "lost-wait": "the work of an asynchronous call says that it is done before it is",
    "group-order": "groups other than the default one count their members from the end",
}


def check_planted() -> None:
    """Raise a ``ValueError`` where the environment names a fault that is not known."""
    fault = os.environ.get("PYPOST_FAULT", "")
    if fault and fault not in FAULTS:
        raise ValueError(f"PYPOST_FAULT={fault}: unknown fault (known: {', '.join(FAULTS)})")


def planted(fault: str) -> bool:
    """Whether this fault is planted."""
    return os.environ.get("PYPOST_FAULT", "") == fault
