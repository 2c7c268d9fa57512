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
    "collective",
    "collective_flight",
    "collective_functional",
    "collective_groups",
    "collective_messages",
    "collective_refusals",
    "mesh",
    "mesh_views",
    "mesh_made",
    "mesh_algebra",
    "mesh_tables",
    "layout",
    "layout_local",
    "layout_math",
    "layout_factories",
    "layout_wrapper",
    "layout_kinds",
    "layout_modules",
    "layout_random",
    "redistribute",
    "redistribute_partial",
    "redistribute_refusals",
    "redistribute_history",
    "redistribute_pairs",
    "redistribute_closure",
    "redistribute_masked",
    "redistribute_values",
    "redistribute_views",
    "gradient",
    "gradient_ways",
    "gradient_graphs",
    "op",
    "op_backward",
    "op_memory",
    "random",
    "module",
    "module_styles",
    "module_prepare",
    "module_sharded",
    "plan",
    "roundtrip",
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
