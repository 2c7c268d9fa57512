"""The cases that the placement chapters draw: meshes from a palette that a world can keep, tensors placed on them,
targets.

A 2x2 mesh costs more to make than a redistribution on it, so meshes come from a small palette, and most of them need
two or three
ranks. Tables that do not ascend and sub-meshes come often enough to be reached and seldom enough to leave room for the
rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar, overload

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.law import Limits
from shardlaw.reference.layout import Layout
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.notation import Shape
from shardlaw.reference.placement import Partial, Placements, Replicate
from shardlaw.reference.tensors import TensorSpec
from shardlaw.strategies import redistributions, shapes
from shardlaw.strategies.meshes import palette_meshes
from shardlaw.strategies.placements import placements

# (mesh, weight), the plainest first: a case shrinks towards the beginning of its list
PLAIN = {
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
OUTSIDE = {"1@1": 1, "2@0,2": 3, "2@1,2": 2, "1x2@0,2": 1, "3@0,1,3": 1}
TABLES = {"2@1,0": 2, "3@2,0,1": 1, "1x2@1,0": 1, "2x2@0,2,1,3": 1, "2x2@3,1,2,0": 1}
SELDOM_EDGES = (*("distinct",) * 5, "edges")
FLOATS = ("float32", "float64")
EXACT = ("float32", "int64", "float64", "int32")


# further fields of a case: a strategy for each, or a function that draws them for the layout of ``x``
Extra = Mapping[str, SearchStrategy[Any]] | Callable[[st.DrawFn, Layout], dict[str, Any]]


def _further(draw: st.DrawFn, extra: Extra | None, layout: Layout) -> dict[str, Any]:
    return extra(draw, layout) if callable(extra) else {name: draw(drawn) for name, drawn in (extra or {}).items()}


def meshes(
    limits: Limits, *, dims: Iterable[int] = (1, 2, 3), outside: bool = True, tables: bool = True, least: int = 1
) -> list[Mesh]:
    """The palette, each mesh as often as its weight, as far as the limits and the options allow, and larger ones."""
    palette = {**PLAIN, **(OUTSIDE if outside else {}), **(TABLES if tables else {})}
    wanted = set(dims)
    drawn = [(Mesh.parse(text), weight) for text, weight in palette.items()]
    kept = [str(mesh) for mesh, weight in drawn if mesh.ndim in wanted and mesh.size >= least for _ in range(weight)]
    return palette_meshes(kept, limits.world_size)


def out_of_order(placements: str, *, dims: int = 3, **fields: Any) -> Callable[[Limits], list[Case]]:
    """A few cases on meshes whose table does not ascend, for laws with so few draws that chance would not do.

    ``placements`` are those of the last mesh dim; mesh dims before it replicate. ``dims``: the most dims that a mesh
    has.
    """

    def sweep(limits: Limits) -> list[Case]:
        cases = []
        for mesh in map(Mesh.parse, ("2@1,0", "3@2,0,1", "1x2@1,0")):
            rest = "R," * (mesh.ndim - 1)
            more = {
                name: f"{rest}{value}" if name in ("to", "via", "declared") else value for name, value in fields.items()
            }
            cases.append(Case.of("-", mesh=mesh, x=f"4x3:{rest}{placements}", after=(), **more))
        return [case for case in cases if case.world <= limits.world_size and case.mesh().ndim <= dims]

    return sweep


def seeds() -> SearchStrategy[int | None]:
    """Seeds of values; 0, the plainest, is not printed."""
    return st.integers(0, 9).map(lambda seed: seed or None)


def placed(
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
    extra: Extra | None = None,
) -> SearchStrategy[Case]:
    """Cases of a tensor ``x`` on a mesh; ``extra`` draws further fields. Sums of some ``fills`` have no one value:
    these are for cases without pending ones."""
    mesh_drawn = st.sampled_from(list(on) if on is not None else meshes(limits))
    shape_drawn = shapes(min_dims=min_dims)
    dtype_drawn, memory_drawn = _mostly_first([d for d in dtypes if d in limits.dtypes]), _mostly_first(list(memories))
    chosen, ops, fill_drawn = tuple(kinds), tuple(reduce_ops), st.sampled_from(list(fills))

    @st.composite
    def case(draw: st.DrawFn) -> Case:
        mesh, shape = draw(mesh_drawn), draw(shape_drawn)
        at = draw(placements(mesh, len(shape), kinds=chosen, reduce_ops=ops, negative=negative))
        spec = TensorSpec(shape, at, draw(dtype_drawn), draw(fill_drawn), draw(memory_drawn))
        more = _further(draw, extra, Layout(shape, mesh, at))
        return Case.of("-", mesh=mesh, x=spec, **more, seed=draw(seeds()))

    return case()


def moved(
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
    extra: Extra | None = None,
) -> SearchStrategy[Case]:
    """Cases of a tensor ``x`` and the placements ``to`` which it must go (``via`` others); what is pending has distinct
    values, whatever the ``fills``."""
    mesh_drawn = st.sampled_from(list(on) if on is not None else meshes(limits))
    pair = redistributions(mesh=mesh_drawn, source_kinds=kinds, target_kinds=targets, reduce_ops=reduce_ops)
    dtype_drawn, memory_drawn = _mostly_first([d for d in dtypes if d in limits.dtypes]), _mostly_first(list(memories))
    whole, fill_drawn = tuple(kind for kind in targets if kind != "P"), st.sampled_from(list(fills))

    @st.composite
    def case(draw: st.DrawFn) -> Case:
        first, last = draw(pair)
        dtype = draw(dtype_drawn)
        if first.has_partial():
            dtype = dtype if dtype in (FLOATS if "avg" in str(first) else EXACT) else "float32"
        fill = "distinct" if first.has_partial() else draw(fill_drawn)
        spec = TensorSpec(first.shape, first.placements, dtype, fill, draw(memory_drawn))
        kept = tuple(kind for kind in whole if kind == "R" or first.shape)
        between = draw(placements(first.mesh, len(first.shape), kinds=kept)) if via else None
        if between is not None and last.has_partial():
            last = last.replace([Replicate() if isinstance(old, Partial) else old for old in last.placements])
        more = _further(draw, extra, first)
        return Case.of("-", mesh=first.mesh, x=spec, via=between, to=last.placements, **more, seed=draw(seeds()))

    return case()


def replicated(layout: Layout) -> Placements:
    """``R`` on every mesh dim."""
    return (Replicate(),) * layout.mesh.ndim


def smaller(shape: Shape) -> SearchStrategy[Shape]:
    """Shapes of as many dims, no extent larger: the sizes that matter, plainest first."""
    return st.tuples(
        *(
            st.sampled_from([size for size in (2, 3, 4, 5, 7, 8, 1, 0) if size <= extent] or [extent])
            for extent in shape
        )
    )


def narrowed(case: Case, name: str = "x") -> SearchStrategy[Case]:
    """The same case with a smaller tensor."""
    spec = case.tensor(name)
    return smaller(spec.shape).map(
        lambda shape: case.with_fields(**{name: TensorSpec(shape, spec.placements, spec.dtype, spec.fill, spec.memory)})
    )


def _mostly_first(choices: list[str]) -> SearchStrategy[str]:
    return st.sampled_from(choices[:1] * max(1, len(choices) - 1) + choices[1:])


Item = TypeVar("Item")


class Listed(Sequence[Case], Generic[Item]):
    """A sweep as cases, each made when it is asked for."""

    def __init__(self, items: Sequence[Item], case: Callable[[Item], Case]) -> None:
        self._items = items
        self._case = case

    def __len__(self) -> int:
        return len(self._items)

    @property
    def combinations(self) -> int:
        """How many cases there were if everything were combined with everything."""
        return getattr(self._items, "combinations", len(self._items))

    @overload
    def __getitem__(self, at: int) -> Case: ...

    @overload
    def __getitem__(self, at: slice) -> list[Case]: ...

    def __getitem__(self, at: int | slice) -> Case | list[Case]:
        return [self._case(item) for item in self._items[at]] if isinstance(at, slice) else self._case(self._items[at])


class First(Sequence[Item]):
    """Some items, and those of a sweep behind them."""

    def __init__(self, first: Sequence[Item], rest: Sequence[Item]) -> None:
        self._first, self._rest = first, rest

    def __len__(self) -> int:
        return len(self._first) + len(self._rest)

    @property
    def combinations(self) -> int:
        """How many items there were if everything were combined with everything."""
        return len(self._first) + int(getattr(self._rest, "combinations", len(self._rest)))

    @overload
    def __getitem__(self, at: int) -> Item: ...

    @overload
    def __getitem__(self, at: slice) -> list[Item]: ...

    def __getitem__(self, at: int | slice) -> Item | list[Item]:
        if isinstance(at, slice):
            return [self[i] for i in range(*at.indices(len(self)))]
        return self._first[at] if at < len(self._first) else self._rest[at - len(self._first)]
