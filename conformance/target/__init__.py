"""What is being validated: a device type, a backend, a storage, and what they say they cannot do."""

from conformance.target.target import Target

__all__ = ["Target"]
