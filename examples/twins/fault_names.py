"""The check of `--option fault=NAME`."""


def check_fault(fault, known):
    """Raise a `ValueError` for a fault that a twin does not have; an empty name is no fault."""
    if fault and fault not in known:
        raise ValueError(f"unknown fault {fault!r} (known: {', '.join(known)})")
