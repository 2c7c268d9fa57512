"""Which laws a release of torch fully supports: if a later release refuses cases of such a law, support was lost.

``expectations/supported-X.txt`` lists laws that allow refusals but of which torch X refused no case. ``python -m benchmarks.supported``
writes it from reports of smoke and ci runs; it applies to release X and later ones. ``smoke`` after a law's id restricts that line to the
smoke profile, because ci runs have cases that X refuses. No line applies to ``nightly``, which draws cases that no such run has tried.
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
LISTED_PROFILES = ("smoke", "ci")  # the profiles of the runs that a list is written from
# a single refused case may be one that no earlier run drew
ENOUGH_REFUSED = 2


def _lists_up_to(torch_version: str) -> list[tuple[Version, Path]]:
    """The lists of a release and of all earlier ones."""
    release = Version(Version(torch_version).base_version)
    lists = ((Version(file.stem.removeprefix("supported-")), file) for file in SHIPPED.glob(FILES))
    return [(version, file) for version, file in lists if version <= release]


@cache
def has_list_for(torch_version: str) -> bool:
    """Whether a list applies to a release; to one that is older than all lists none does."""
    return bool(_lists_up_to(torch_version))


def for_installed_torch(law: Law) -> Law:
    """The law with the refusals that the installed torch is allowed."""
    import torch

    return law if has_list_for(torch.__version__) else law.for_earlier_release()


def supported_laws(torch_version: str, profile: str = "smoke") -> frozenset[str]:
    """The laws of which this release must refuse no case of a profile, by the newest list that applies; empty if none does."""
    earlier = _lists_up_to(torch_version)
    return frozenset(parse_list(max(earlier)[1].read_text("utf-8").splitlines(), profile)) if earlier else frozenset()


def parse_list(lines: Iterable[str], profile: str = "smoke") -> list[str]:
    """The law ids of a list that apply to a profile; ``#`` begins a comment."""
    named = [text.partition("#")[0].split() for text in lines]
    return [law for law, *only in filter(None, named) if profile in (only or LISTED_PROFILES)]
