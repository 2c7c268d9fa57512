"""Strategies for the cases of the sharded tensor chapter: a tensor, the ranks that share it, and its specs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from shardlaw.conformance.law.act import fields, law
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.law import Law, Limits
from shardlaw.conformance.laws.sharded_tensor.fields import members, spec_features
from shardlaw.reference.notation import Shape
from shardlaw.reference.sharded_tensor import Spec
from shardlaw.reference.tensors import TensorSpec
from shardlaw.strategies import shapes
from shardlaw.strategies.shard_specs import chunk_specs, specs

WORLDS = (2, 3, 2, 3, 4)
GROUPS = {3: ((1, 2), (0, 2)), 4: ((1, 3), (0, 2, 3), (1, 2, 3))}
DTYPES = ("float32", "float32", "int64", "bfloat16", "int32", "float64", "bool", "int32", "uint8", "float32")
FACTORIES = ("zeros", "ones", "full", "empty", "rand", "randn")
FLOATS = ("float32", "float64", "bfloat16")


def sharded_law(id: str, **record: Any) -> Callable[[Callable[..., Any]], Law]:
    """Decorate a law whose act only the members of a case's group call."""
    defaults = {"needs": ("object_collectives",), "smallest": 1, "members": members, "features": spec_features("spec")}
    return law(id, **{**defaults, **record})


@st.composite
def acting_ranks(
    draw: st.DrawFn, limits: Limits, *, groups: bool = True
) -> tuple[int, tuple[int, ...], dict[str, Any]]:
    """The size of a world, the acting ranks, and the field ``group`` if these are not all ranks."""
    world = draw(st.sampled_from([size for size in WORLDS if size <= limits.world_size] or [1]))
    if groups and world in GROUPS and draw(st.integers(0, 7)) == 7:
        ranks = draw(st.sampled_from(GROUPS[world]))
        return world, ranks, {"group": ",".join(map(str, ranks))}
    return world, tuple(range(world)), {}


def dtypes(limits: Limits, names: Sequence[str] = DTYPES) -> SearchStrategy[str]:
    return st.sampled_from([name for name in names if name in limits.dtypes])


@st.composite
def factory_cases(draw: st.DrawFn, limits: Limits, *, chunks: bool) -> Case:
    """Cases of a factory, with a chunk spec or a spec of any kind."""
    world, ranks, group_field = draw(acting_ranks(limits))
    shape = draw(shapes(min_dims=1))
    spec = draw(_specs(shape, ranks, chunks=chunks, every=False))
    make = draw(st.sampled_from(FACTORIES))
    x = TensorSpec(shape, None, draw(dtypes(limits, FLOATS if make.startswith("rand") else DTYPES)))
    size = "apart" if make != "full" and draw(st.integers(0, 3)) == 3 else None
    return fields(world=world, **group_field, x=x, spec=spec, make=make, size=size)


@st.composite
def spec_cases(
    draw: st.DrawFn,
    limits: Limits,
    *,
    chunks: bool = False,
    with_respec: bool = False,
    rank_field: str = "",
    hows: Sequence[str] = (),
) -> Case:
    """Cases of a tensor with a spec: a chunk spec with a chunk for each rank (``chunks``), or a spec of any kind.

    ``with_respec``: also a field ``respec`` with a second spec of that kind. ``rank_field``: the name of a field with a
    position in the group. ``hows``: the values of the field ``how``."""
    world, ranks, group_field = draw(acting_ranks(limits))
    shape = draw(shapes(min_dims=1))
    case_fields: dict[str, Any] = {"spec": draw(_specs(shape, ranks, chunks=chunks, every=chunks))}
    if with_respec:
        case_fields["respec"] = draw(_specs(shape, ranks, chunks=chunks, every=True))
    if rank_field:
        case_fields[rank_field] = draw(st.sampled_from([None, None, *range(1, len(ranks))]))
    if hows:
        how = draw(st.sampled_from(hows))
        case_fields["how"] = None if how == "plain" else how
    x = TensorSpec(shape, None, draw(dtypes(limits)))
    return fields(world=world, **group_field, x=x, **case_fields, seed=draw(st.integers(0, 9)) or None)


def _specs(shape: Shape, ranks: tuple[int, ...], *, chunks: bool, every: bool) -> SearchStrategy[Spec]:
    return chunk_specs(shape, ranks, every=every) if chunks else specs(shape, ranks)
