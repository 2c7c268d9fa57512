"""The catalogue: one module a chapter, each with a list ``LAWS``.

Further modules (a library's own laws, a test's) join by being named in the environment variable ``SHARDLAW_LAWS``, separated by
commas: driver and ranks both read it.
"""

from __future__ import annotations

import importlib
import os
from functools import cache

from conformance.law import Law

MODULES = (
    "collective.values",
    "collective.flight",
    "collective.functional",
    "collective.groups",
    "collective.messages",
    "collective.refusals",
    "mesh.coordinates",
    "mesh.views",
    "mesh.made",
    "mesh.algebra",
    "mesh.tables",
    "layout.distribute",
    "layout.local",
    "layout.math",
    "layout.factories",
    "layout.wrapper",
    "layout.kinds",
    "layout.modules",
    "layout.random",
    "redistribute.placements",
    "redistribute.partial",
    "redistribute.refusals",
    "redistribute.history",
    "redistribute.pairs",
    "redistribute.closure",
    "redistribute.masked",
    "redistribute.values",
    "redistribute.views",
    "gradient.values",
    "gradient.ways",
    "gradient.graphs",
    "op.forward",
    "op.backward",
    "op.memory",
    "random.numbers",
    "module.models",
    "module.styles",
    "module.prepare",
    "module.sharded",
    "plan.save",
    "roundtrip.reshard",
)


def modules() -> tuple[str, ...]:
    """The modules that hold laws: ours, then those that the environment names."""
    extra = tuple(filter(None, os.environ.get("SHARDLAW_LAWS", "").split(",")))
    return tuple(f"{__name__}.{name}" for name in MODULES) + extra


@cache
def laws_of(module: str) -> tuple[Law, ...]:
    """The laws of one module, in the order in which it lists them."""
    return tuple(importlib.import_module(module).LAWS)


@cache
def catalogue() -> dict[str, Law]:
    """Every law by its id. Raises ``ValueError`` when two have one id."""
    found: dict[str, Law] = {}
    for module in modules():
        for law in laws_of(module):
            if law.id in found:
                raise ValueError(f"two laws are called {law.id}")
            found[law.id] = law
    return found


def find(law_id: str) -> Law:
    """The law of this id or alias. Raises ``KeyError``."""
    laws = catalogue()
    if law_id in laws:
        return laws[law_id]
    return next((law for law in laws.values() if law_id in law.aliases), None) or laws[law_id]
