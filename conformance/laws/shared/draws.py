"""Strategies for the cases of several chapters: meshes of a small palette, tensors on them, and redistributions.

Creating a 2x2 mesh costs more than a redistribution on it. So meshes come from a small palette, which a world can
cache, and most have two or three ranks. Permuted meshes and sub-meshes have small weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.law import Limits
from shardlaw.reference.layout import Layout
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.notation import Shape
from shardlaw.reference.placement import Partial, Replicate
from shardlaw.reference.tensors import TensorSpec
from shardlaw.strategies import redistributions, shapes
from shardlaw.strategies.meshes import palette_meshes
from shardlaw.strategies.op_sweep import LazySequence
from shardlaw.strategies.placements import placements

# the weight of each mesh, the plainest first: cases shrink towards the first
PLAIN_MESHES = {
    "2": 13,
    "3": 10,
    "2x2": 12,
    "4": 2,
    "1": 1,
    "1x2": 3,
    "2x1": 3,
    "1x3": 1,
    "3x1": 1,
    "1x2x2": 2,
    "2x1x2": 2,
    "2x2x1": 1,
}
SUBMESHES = {"1@1": 1, "2@0,2": 3, "2@1,2": 2, "1x2@0,2": 1, "3@0,1,3": 1}
PERMUTED_MESHES = {"2@1,0": 2, "3@2,0,1": 1, "1x2@1,0": 1, "2x2@0,2,1,3": 1, "2x2@3,1,2,0": 1}
SELDOM_EDGES = (*("distinct",) * 5, "edges")
FLOATS = ("float32", "float64")
EXACT = ("float32", "int64", "float64", "int32")


# further fields of a case: a strategy for each, or a function that draws them from the layout of ``x``
ExtraFields = Mapping[str, SearchStrategy[Any]] | Callable[[st.DrawFn, Layout], dict[str, Any]]


def _draw_extra(draw: st.DrawFn, extra: ExtraFields | None, layout: Layout) -> dict[str, Any]:
    if callable(extra):
        return extra(draw, layout)
    return {name: draw(strategy) for name, strategy in (extra or {}).items()}


def meshes(
    limits: Limits, *, dims: Iterable[int] = (1, 2, 3), submeshes: bool = True, permuted: bool = True, min_size: int = 1
) -> list[Mesh]:
    """The meshes of the palette that the limits and options allow, each repeated by its weight, and larger ones."""
    palette = {**PLAIN_MESHES, **(SUBMESHES if submeshes else {}), **(PERMUTED_MESHES if permuted else {})}
    ndims = set(dims)
    weighted = [(Mesh.parse(text), weight) for text, weight in palette.items()]
    texts = [
        str(mesh) for mesh, weight in weighted if mesh.ndim in ndims and mesh.size >= min_size for _ in range(weight)
    ]
    return palette_meshes(texts, limits.world_size)


def permuted_mesh_cases(placements: str, *, dims: int = 3, **fields: Any) -> Callable[[Limits], list[Case]]:
    """A sweep of three cases on permuted meshes, for laws with too few draws to reach them.

    ``placements``, and those in ``fields``, are of the last mesh dim; the dims before it replicate. ``dims``: the
    largest number of mesh dims.
    """

    def sweep(limits: Limits) -> list[Case]:
        cases = []
        for mesh in map(Mesh.parse, ("2@1,0", "3@2,0,1", "1x2@1,0")):
            replicated = "R," * (mesh.ndim - 1)
            further = {
                name: f"{replicated}{value}" if name in ("to", "via", "declared") else value
                for name, value in fields.items()
            }
            cases.append(Case.of("-", mesh=mesh, x=f"4x3:{replicated}{placements}", after=(), **further))
        return [case for case in cases if case.world <= limits.world_size and case.mesh().ndim <= dims]

    return sweep


def seeds() -> SearchStrategy[int | None]:
    """Seeds of values; 0, the plainest, is ``None``, which leaves the field out."""
    return st.integers(0, 9).map(lambda seed: seed or None)


def tensor_cases(
    limits: Limits,
    *,
    on: Iterable[Mesh] | None = None,
    kinds: Iterable[str] = ("R", "S", "_S"),
    reduce_ops: Iterable[str] = ("sum",),
    dtypes: Iterable[str] = ("float32",),
    memories: Iterable[str] = ("plain",),
    fills: Iterable[str] = ("distinct",),
    min_dims: int = 0,
    negative: bool = False,
    extra: ExtraFields | None = None,
) -> SearchStrategy[Case]:
    """Cases of a tensor ``x`` on a mesh, with the further fields ``extra``. Some ``fills`` have ambiguous sums; do not
    combine them with ``P`` in ``kinds``."""
    mesh_strategy = st.sampled_from(list(on) if on is not None else meshes(limits))
    shape_strategy = shapes(min_dims=min_dims)
    dtype_strategy = _weighted_to_first([dtype for dtype in dtypes if dtype in limits.dtypes])
    memory_strategy = _weighted_to_first(list(memories))
    placement_kinds, ops, fill_strategy = tuple(kinds), tuple(reduce_ops), st.sampled_from(list(fills))

    @st.composite
    def case(draw: st.DrawFn) -> Case:
        mesh, shape = draw(mesh_strategy), draw(shape_strategy)
        chosen = draw(placements(mesh, len(shape), kinds=placement_kinds, reduce_ops=ops, negative=negative))
        spec = TensorSpec(shape, chosen, draw(dtype_strategy), draw(fill_strategy), draw(memory_strategy))
        further = _draw_extra(draw, extra, Layout(shape, mesh, chosen))
        return Case.of("-", mesh=mesh, x=spec, **further, seed=draw(seeds()))

    return case()


def redistribution_cases(
    limits: Limits,
    *,
    on: Iterable[Mesh] | None = None,
    kinds: Iterable[str] = ("R", "S", "_S", "P"),
    targets: Iterable[str] = ("R", "S", "_S", "P"),
    reduce_ops: Iterable[str] = ("sum", "max", "avg"),
    dtypes: Iterable[str] = ("float32",),
    memories: Iterable[str] = ("plain",),
    fills: Iterable[str] = ("distinct",),
    via: bool = False,
    extra: ExtraFields | None = None,
) -> SearchStrategy[Case]:
    """Cases of a tensor ``x`` and its placements ``to`` after a redistribution, perhaps ``via`` others. Partial tensors
    have distinct values, whatever the ``fills``."""
    mesh_strategy = st.sampled_from(list(on) if on is not None else meshes(limits))
    layout_pairs = redistributions(mesh=mesh_strategy, source_kinds=kinds, target_kinds=targets, reduce_ops=reduce_ops)
    dtype_strategy = _weighted_to_first([dtype for dtype in dtypes if dtype in limits.dtypes])
    memory_strategy = _weighted_to_first(list(memories))
    via_kinds, fill_strategy = tuple(kind for kind in targets if kind != "P"), st.sampled_from(list(fills))

    @st.composite
    def case(draw: st.DrawFn) -> Case:
        source, target = draw(layout_pairs)
        dtype = draw(dtype_strategy)
        if source.has_partial():
            dtype = dtype if dtype in (FLOATS if "avg" in str(source) else EXACT) else "float32"
        fill = "distinct" if source.has_partial() else draw(fill_strategy)
        spec = TensorSpec(source.shape, source.placements, dtype, fill, draw(memory_strategy))
        allowed = tuple(kind for kind in via_kinds if kind == "R" or source.shape)
        between = draw(placements(source.mesh, len(source.shape), kinds=allowed)) if via else None
        if between is not None and target.has_partial():
            target = target.replace([Replicate() if isinstance(old, Partial) else old for old in target.placements])
        further = _draw_extra(draw, extra, source)
        return Case.of("-", mesh=source.mesh, x=spec, via=between, to=target.placements, **further, seed=draw(seeds()))

    return case()


def smaller_shapes(shape: Shape) -> SearchStrategy[Shape]:
    """Shapes of the same number of dims whose extents are at most as large, the plainest first."""
    return st.tuples(
        *(
            st.sampled_from([size for size in (2, 3, 4, 5, 7, 8, 1, 0) if size <= extent] or [extent])
            for extent in shape
        )
    )


def with_smaller_tensor(case: Case, name: str = "x") -> SearchStrategy[Case]:
    """The case with a smaller tensor ``name``."""
    spec = case.tensor(name)
    return smaller_shapes(spec.shape).map(
        lambda shape: case.with_fields(**{name: TensorSpec(shape, spec.placements, spec.dtype, spec.fill, spec.memory)})
    )


def _weighted_to_first(choices: list[str]) -> SearchStrategy[str]:
    return st.sampled_from(choices[:1] * max(1, len(choices) - 1) + choices[1:])


Item = TypeVar("Item")


class LazyCases(LazySequence[Case], Generic[Item]):
    """The cases of some items, each created when it is read."""

    def __init__(self, items: Sequence[Item], case: Callable[[Item], Case]) -> None:
        self._items = items
        self._case = case

    def __len__(self) -> int:
        return len(self._items)

    @property
    def combinations(self) -> int:
        """How many cases the full cross product has."""
        return getattr(self._items, "combinations", len(self._items))

    def item(self, at: int) -> Case:
        return self._case(self._items[at])


class Chained(LazySequence[Item]):
    """Two sequences, one after the other."""

    def __init__(self, first: Sequence[Item], rest: Sequence[Item]) -> None:
        self._first, self._rest = first, rest

    def __len__(self) -> int:
        return len(self._first) + len(self._rest)

    @property
    def combinations(self) -> int:
        """How many items the full cross product has."""
        return len(self._first) + int(getattr(self._rest, "combinations", len(self._rest)))

    def item(self, at: int) -> Item:
        return self._first[at] if at < len(self._first) else self._rest[at - len(self._first)]
