"""Tells refusals from crashes of torch: a refusal is an error whose text says, in the field's terms, what is not supported.

Every part of the harness decides by :func:`is_refusal`.
"""

from __future__ import annotations

# a refusal has one of these classes
CLASSES = ("NotImplementedError", "RuntimeError", "ValueError", "TypeError", "IndexError")
# and one of these words in its text
WORDS = (
    "shard",
    "placement",
    "dtensor",
    "partial",
    "redistribut",
    "mesh",
    "strateg",
    "replicat",
    "uneven",
    "not supported",
    "not implemented",
    "only implemented",
    "invalid scalar type",
)
# an assertion is about torch's own bookkeeping, placements too, unless it says that something is not supported, or unsupported
LACK = "support"
# texts of internal errors of torch
INTERNAL_ERRORS = ("tuple index out of range", "list index out of range", "'NoneType' object", "object has no attribute", "unhashable type")
# torch appends these words and the op's schema to every error of its planner: they say nothing about the cause
SUFFIX = "Sharding propagation failed"


def is_refusal(error: str, text: str) -> bool:
    """Whether an exception, by the name of its class and its text, is a refusal and not an internal error."""
    message = text.partition(SUFFIX)[0]
    if any(words in message for words in INTERNAL_ERRORS):
        return False
    if error == "AssertionError":
        return LACK in message.lower()
    return error == "NotImplementedError" or (error in CLASSES and any(word in message.lower() for word in WORDS))
