"""The sizes and placements of operands of programs: chains, histories, calls with ``out=``, views and gradients.

A :class:`Scenario` is a mesh and the corners that a sample must have on it. Scenarios are drawn (:func:`scenarios`), or enumerated from a
table that covers meshes and kinds evenly (:func:`enumerate_scenarios`). A sample is built from a scenario by a function of a
:class:`Choose`, which draws from Hypothesis, or is determined by a number (:func:`choose_by_number`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from shardlaw.reference.mesh import Mesh
from shardlaw.reference.notation import Shape
from shardlaw.reference.placement import Partial, Placement, Placements, Replicate, Shard, StridedShard, is_reduction
from shardlaw.reference.tensors import scatter_bits
from shardlaw.strategies.meshes import palette_meshes
from shardlaw.strategies.ops import Variant, reduces_safely

Option = TypeVar("Option")
Built = TypeVar("Built")

SIZES = (2, 3, 4, 5, 1, 6, 7)
SPLIT_FACTOR = 2  # of strided shards
SCENARIO_COUNT = 240  # how many scenarios are enumerated, for the larger profiles
# torch does not terminate on these calls for tensors without elements; op.forward[view] covers that
REGROUPED = re.compile(r"\b(view|unflatten|flatten)\(")
# the plainest first, repeated by weight
MESHES = (*("2",) * 8, *("3",) * 3, *("2x2",) * 4, *("2@1,0",) * 2, "3@2,0,1", "2x2@0,2,1,3", *("2@1,2",) * 2, "2@2,0", "1x2", "2x1x2")
KINDS = (*((),) * 10, *(("strided",),) * 3, ("avg",), ("max",), ("min",), ("product",), ("max", "strided"))
# 24 scenarios in a row have each of these meshes (10 are 3-D, 11 are permuted although most of their groups ascend, 10 are submeshes) and
# each of these kinds (10 and more are strided, 11 have a reduction other than a sum).
MESH_TABLE = tuple(map(Mesh.parse, (
    "2x2x2", "2@1,0", "2@1,2", "2x2x2@0,4,2,6,1,5,3,7", "2@2,1", "2x2x2", "3@0,1,3", "2x2@0,2,1,3", "2@0,2",
    "2x2x2@0,1,4,5,2,3,6,7", "2x2@0,3,1,4", "2x2x2", "2@1,2", "2x2x2", "2x2@0,2,1,3", "2@0,2", "2x2x2@0,4,1,5,2,6,3,7",
    "3@2,0,1", "2x2x2", "1x2@0,2", "2x2x2@0,2,1,3,4,6,5,7", "2x2@1,4,2,5", "3@1,2,3", "2x2x2",
)))  # fmt: skip
STRIDED, STRIDED_MAX = ("strided",), ("max", "strided")
KIND_TABLE: tuple[tuple[str, ...], ...] = (
    STRIDED, ("max",), (), ("avg",), STRIDED, ("min", "strided"), STRIDED, ("max",), STRIDED, ("product",), STRIDED, ("avg",),
    (), STRIDED, STRIDED_MAX, ("min",), STRIDED, (), STRIDED_MAX, ("product",), STRIDED, ("max",), (), ("avg",),
)  # fmt: skip
EMPTY_TABLE = (0, 1, 1, 0, 1, 0, 0, 1, 0, 1, 0, 1, 1, 0, 0, 1, 0, 1, 0, 1, 0, 0, 1, 0)


@dataclass(frozen=True)
class Scenario:
    """A mesh, the ``kinds`` of placements of the first operand (``strided``, or the op of a pending reduction), and whether a size is 0."""

    mesh: Mesh
    kinds: tuple[str, ...] = ()
    empty: bool = False


class Choose(Protocol):
    """A function that chooses one of several options, of which the first is the plainest."""

    def __call__(self, options: Sequence[Option], /) -> Option:
        """One of the options."""


def choose_by_number(number: int) -> Choose:
    """A choice function that ``number`` determines: it makes the same choices each time."""
    turn = iter(range(1 << 20))
    return lambda options: options[scatter_bits(number, next(turn)) % len(options)]


@st.composite
def strategy_of(draw: st.DrawFn, build: Callable[[Choose, Scenario], Built], world_size: int, *, deep: bool = True) -> Built:
    """A strategy for what ``build`` returns for drawn scenarios and choices."""
    return build(lambda options: draw(st.sampled_from(options)), draw(scenarios(world_size, deep=deep)))


def scenarios(world_size: int, *, deep: bool = True) -> SearchStrategy[Scenario]:
    """Scenarios; with ``deep``, on 3-D meshes as well. Shrinks to the mesh ``2`` without kinds or empty sizes."""
    meshes = [mesh for mesh in palette_meshes(MESHES, world_size) if deep or mesh.ndim < 3]
    empty = (False,) * 9 + (True,)
    return st.builds(Scenario, st.sampled_from(meshes), st.sampled_from(KINDS), st.sampled_from(empty))


def enumerate_scenarios(world_size: int, count: int, start: int = 0) -> list[Scenario]:
    """The scenarios ``start`` to ``start + count - 1`` whose meshes fit into ``world_size``; 24 in a row cover all meshes and kinds."""
    found = []
    for at in range(start, start + count):
        turn, place = divmod(at, len(MESH_TABLE))
        kinds = KIND_TABLE[(5 * place + 7 * turn) % len(MESH_TABLE)]
        empty = EMPTY_TABLE[(7 * place + 5 * turn) % len(MESH_TABLE)]
        found.append(Scenario(MESH_TABLE[place], kinds, bool(empty)))
    return [scenario for scenario in found if max(scenario.mesh.ranks) < world_size]


def choose_sizes(choose: Choose, scenario: Scenario, names: Iterable[str], variant: Variant | None = None) -> dict[str, int]:
    """A size for each name, at least what ``variant`` needs. In a strided scenario the first is mostly even under a strided shard; in an
    empty one, one is 0."""
    names = list(names)
    least = dict(variant.least) if variant is not None else {}
    sizes = {name: max(choose(SIZES), least.get(name, 0)) for name in names}
    free = [name for name in names if not least.get(name, 0)]
    if "strided" in scenario.kinds and names and choose((True, True, False)):
        sizes[names[0]] = max(scenario.mesh.shape) * SPLIT_FACTOR * choose((1, 2))
        free = [name for name in free if name != names[0]] or free
    if scenario.empty and free:
        sizes[choose(free)] = 0
    return sizes


def choose_placements(
    choose: Choose,
    scenario: Scenario,
    shape: Shape,
    dtype: str = "float32",
    *,
    kinds: Iterable[str] = (),
    pending: Sequence[str] = ("sum",),
) -> Placements:
    """Placements of one operand: shards most often, and each of ``kinds`` on another mesh dim, while there are any. Reductions in
    ``pending`` may occur where no other is pending."""
    mesh, dims = scenario.mesh, range(len(shape))
    shards: list[Placement] = [Shard(dim) for dim in dims]
    sums: list[Placement] = [Partial(op) for op in pending if reduces_safely(dtype, op)]
    row: list[Placement] = []
    for _ in mesh.shape:
        taken = {p for p in row if is_reduction(p)}
        row.append(choose([Replicate(), *shards, *shards, *(p for p in sums if not taken or p in taken)]))
    left = list(range(mesh.ndim))
    for kind in kinds:
        if not left or (kind == "strided" and not shape) or (kind != "strided" and not reduces_safely(dtype, kind)):
            continue
        at = choose(sorted(left, key=lambda at: mesh.shape[at] == 1))
        left.remove(at)
        if kind == "strided":
            even = [dim for dim in dims if shape[dim] and shape[dim] % (mesh.shape[at] * SPLIT_FACTOR) == 0]
            row[at] = StridedShard(choose(even or dims), SPLIT_FACTOR)
        else:
            row = [Replicate() if is_reduction(p) else p for p in row]
            row[at] = Partial(kind)
    return tuple(row)
