"""What counts as a refusal: an error that says, in the words of the field, what is not possible.

Everything that asks whether a target refused a case, or stumbled over it, asks here.
"""

from __future__ import annotations

# classes that refusals have
CLASSES = ("NotImplementedError", "RuntimeError", "ValueError", "TypeError", "AssertionError", "IndexError")
# words of which a refusal has one
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
    "invalid scalar type",
)
# what an error says that stumbled instead of refusing
STUMBLES = ("tuple index out of range", "list index out of range", "'NoneType' object", "object has no attribute", "unhashable type")
# torch ends whatever went wrong while it planned an op with these words and the op's schema: they say nothing about the cause
SUFFIX = "Sharding propagation failed"


def is_refusal(error: str, text: str) -> bool:
    """Whether an exception (the name of its class, its text) says that this cannot be sharded, instead of stumbling over it."""
    said = text.partition(SUFFIX)[0]
    if any(words in said for words in STUMBLES):
        return False
    return error == "NotImplementedError" or (error in CLASSES and any(word in said.lower() for word in WORDS))
