"""The one error that a person causes and can mend."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

ALL_NAMED = 20
NUMBERS = {"integer": "whole number", "number": "number"}  # typer's words and ours


class UsageError(Exception):
    """What was asked for cannot be understood or cannot be done here.

    The message is one line that names the offending text and says what would be right. The command line prints it as
    ``shardlaw: ...`` and ends with exit code 2.
    """

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(line.strip() for line in message.splitlines()))


def nearest(word: str, known: Iterable[str]) -> list[str]:
    """Up to three of the ``known`` words that look most like ``word``, the most alike first; then those that contain it. Of many, some
    look alike by chance."""
    names = list(known)
    cutoff = 0.4 if len(names) <= ALL_NAMED else 0.55
    containing = sorted((name for name in names if len(word) > 2 and word in name), key=len)
    return list(dict.fromkeys([*difflib.get_close_matches(word, names, n=3, cutoff=cutoff), *containing]))[:3]


def one_of(word: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown word: the nearest known ones, or all of them where there are few."""
    names = sorted(known)
    close = nearest(word, names)
    if close:
        return f"nearest: {', '.join(close)}"
    return f"known: {', '.join(names)}" if 0 < len(names) <= ALL_NAMED else f"{len(names)} are known"


def convert_table(
    table: Mapping[str, Any], keys: Mapping[str, tuple[Any, str]], refuse: Callable[[str, str], UsageError]
) -> dict[str, Any]:
    """The values of a table from a file, converted to the types of their ``keys``, each of which also says what is wanted. Raises
    ``refuse(key, message)`` for an unknown key and for a value of another type."""
    for key in table:
        if key not in keys:
            raise refuse(key, f"unknown key {key!r} ({one_of(key, keys)})")
    found = {}
    for key, value in table.items():
        kind, wanted = keys[key]
        try:
            found[key] = msgspec.convert(value, kind)
        except msgspec.ValidationError:
            raise refuse(key, f"{key} = {value!r}: want {wanted}") from None
    return found


def explain_parser_error(error: Any) -> str:
    """The message of typer about arguments that it cannot parse, with what would be right."""
    message = error.format_message().replace("Value error, ", "")
    message = re.sub("Input should be a valid (integer|number), .*", lambda found: f"want a {NUMBERS[found[1]]}", message)
    context = getattr(error, "ctx", None)
    lacks_hint = message.startswith(("No such", "Got unexpected", "Missing")) and not re.search("Did you mean|Possible options", message)
    return f"{message.rstrip('.')}; see {context.command_path} --help" if context and lacks_hint else message
