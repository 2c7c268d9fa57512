"""Which laws a release of torch was seen to support wholly: where one refuses cases of such a law, support was lost.

``expectations/supported-X.txt`` lists laws that allow refusals and of which torch X refused no case in the runs that the list was
made from (``python -m benchmarks.supported``). It says something of that release and of later ones. A law with the word ``smoke`` behind
it has cases that longer profiles try and that release refuses: of these profiles the list says nothing. It never does of ``nightly``, which
draws cases that no such run has tried.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from packaging.version import Version

from shardlaw.conformance.run.expectations import SHIPPED

if TYPE_CHECKING:
    from shardlaw.conformance.law.law import Law

FILES = "supported-*.txt"
LISTED_PROFILES = ("smoke", "ci")  # the profiles of the runs that lists are made from
# one refused case of many may be a corner that no earlier run drew
ENOUGH_REFUSED = 2


def _lists_up_to(torch_version: str) -> list[tuple[Version, Path]]:
    """The lists that say something of a release: its own, and those of earlier ones."""
    release = Version(Version(torch_version).base_version)
    lists = ((Version(file.stem.removeprefix("supported-")), file) for file in SHIPPED.glob(FILES))
    return [(version, file) for version, file in lists if version <= release]


@cache
def has_list_for(torch_version: str) -> bool:
    """Whether any list says something of a release: of one that is older than all nobody knows what it has to support."""
    return bool(_lists_up_to(torch_version))


def for_installed_torch(law: Law) -> Law:
    """A law as the torch at hand has to support it."""
    import torch

    return law if has_list_for(torch.__version__) else law.early()


def supported_laws(torch_version: str, profile: str = "smoke") -> frozenset[str]:
    """The laws of which neither the newest listed release nor an earlier one refuses a case of a profile; none on a torch that is older
    than all."""
    earlier = _lists_up_to(torch_version)
    return frozenset(parse_list(max(earlier)[1].read_text("utf-8").splitlines(), profile)) if earlier else frozenset()


def parse_list(lines: Iterable[str], profile: str = "smoke") -> list[str]:
    """The ids of a list that speak of a profile; what follows ``#`` is a comment."""
    named = [text.partition("#")[0].split() for text in lines]
    return [law for law, *only in filter(None, named) if profile in (only or LISTED_PROFILES)]
