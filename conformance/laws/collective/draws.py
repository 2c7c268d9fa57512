"""The cases that the chapter of collectives draws, and their features."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from shardlaw.conformance.law.act import fields, law
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.law import Law, Limits
from shardlaw.conformance.laws.collective.pieces import numbers
from shardlaw.reference.collective import is_reducible
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.tensors import DTYPES, TensorSpec
from shardlaw.strategies import shapes
from shardlaw.strategies.collectives import extents, groups, split_tables

DOC = "torch.distributed docs, "
OPS = ("sum", "sum", "max", "min", "product", "avg", "band", "bor", "bxor")
# by which equal numbers are no more than one of them
IDEMPOTENT = ("max", "min", "avg", "band", "bor")
# most values say which member they come from and where they stood
FILLS = st.sampled_from(("distinct",) * 8 + ("wide", "edges"))
Extra = Callable[[st.DrawFn, Mesh], dict[str, Any]]
Features = Callable[[Case], set[str]]


def calls(
    limits: Limits,
    *,
    forms: Sequence[str] = (),
    root: bool = False,
    reduces: bool = False,
    changes: bool = False,
    uneven: Iterable[str] = (),
    uneven_one_in: int = 2,
    whole: Iterable[str] = (),
    splits: bool = False,
    least: int = 1,
    min_dims: int = 0,
    max_dims: int = 3,
    memories: bool = True,
    works: bool = True,
    idempotent: bool = False,
    outputs: bool = True,
    floats: bool = False,
    expanded: bool = True,
    parts: bool = True,
    tables: bool = True,
    extra: Extra | None = None,
) -> SearchStrategy[Case]:
    """Cases of one collective.

    ``forms``: how tensors stand for lists; ``uneven``: forms in which rows may differ by member, one case in
    ``uneven_one_in``; ``whole``: forms that all ranks of the world take part in where they are uneven or stacked, so
    that an error is one of every rank; ``changes``: the call overwrites what it is given; ``idempotent``: only
    reductions of equal numbers to one of them; ``outputs``: the caller makes room for results; ``floats``: no other
    dtypes; ``expanded``: what is given may have a stride of 0; ``parts`` and ``tables`` are those of the groups;
    ``extra`` draws further fields.
    """
    on, shape_drawn = (
        groups(world_size=limits.world_size, least=least, parts=parts, tables=tables),
        shapes(min_dims=min_dims, max_dims=max_dims, max_size=5),
    )
    carried = [
        dtype
        for dtype in limits.dtypes
        if (not floats or DTYPES[dtype].is_floating_point) and not (idempotent and dtype == "bool")
    ]
    dtypes = carried[:1] * 4 + carried
    uneven, whole = tuple(uneven), tuple(whole)
    full = groups(world_size=limits.world_size, least=2, parts=False, tables=False)

    @st.composite
    def case(draw: st.DrawFn) -> Case:
        form = draw(st.sampled_from(forms)) if forms else ""
        rows = form in uneven and draw(one_in(uneven_one_in))
        everybody = form in whole and (rows or form == "stacked")
        mesh = draw(full if everybody else on)
        said: dict[str, Any] = {"mesh": mesh, **({} if everybody else _world(draw, mesh, limits))}
        if list(mesh.ranks) != sorted(mesh.ranks) and draw(st.booleans()):
            said["ranks"] = "kept"
        shape = draw(shape_drawn)
        if not shape and (rows or form == "joined"):
            shape = (2,)
        dtype = draw(st.sampled_from(dtypes))
        # where rows differ, a tensor may be contiguous on some ranks only, and only some would refuse it
        memory, out = _memories(draw, changes, expanded) if memories and shape and not rows else ("plain", "plain")
        fill = draw(FILLS) if dtype != "bool" else "distinct"
        said |= {"out": out if out != "plain" and outputs else None, "form": form or None}
        if reduces:
            ops = [op for op in OPS if is_reducible(DTYPES[dtype], op) and (not idempotent or op in IDEMPOTENT)]
            op = draw(st.sampled_from(ops))
            said["op"] = op if op != "sum" else None
            # what is large on every rank has no average within the dtype
            fill = "wide" if (fill, op) == ("edges", "avg") else fill
        said["x"] = TensorSpec(shape, None, dtype, fill, memory)
        if rows:
            kept = everybody and mesh.size > 1
            if splits:
                said["splits"] = slashed(
                    draw(split_tables(mesh.size).filter(_uneven_for_all) if kept else split_tables(mesh.size))
                )
            else:
                said["extents"] = dotted(
                    draw(extents(mesh.size).filter(lambda row: len(set(row)) > 1) if kept else extents(mesh.size))
                )
        if root:
            at = draw(st.integers(0, mesh.size - 1))
            said |= {"root": at or None, "by": "position" if draw(one_in(3)) else None}
        if works:
            said["work"] = "async" if draw(one_in(3)) else None
            late = draw(st.integers(0, 8 * mesh.size))
            said["late"] = late if late and late < mesh.size else None
        said |= extra(draw, mesh) if extra else {}
        return fields(**said, seed=draw(st.integers(0, 9)) or None)

    return case()


def dotted(values: Sequence[int]) -> str:
    return ".".join(map(str, values))


def slashed(table: Sequence[Sequence[int]]) -> str:
    return "/".join(map(dotted, table))


def collective_law(
    name: str,
    source: str,
    control: str,
    *,
    needs: tuple[str, ...] = (),
    features: Features | None = None,
    **record: Any,
) -> Callable[..., Law]:
    """Decorates the act of a law for which groups of some ranks must be made."""
    known, needed = features or features_of, (*needs, "subgroups")
    return law(f"collective.{name}", source=source, control=control, features=known, needs=needed, **record)


def one_in(count: int) -> SearchStrategy[bool]:
    return st.sampled_from([False] * (count - 1) + [True])


def _uneven_for_all(table: tuple[tuple[int, ...], ...]) -> bool:
    return all(len(set(row)) > 1 for row in table)


def _memories(draw: st.DrawFn, changes: bool, expanded: bool) -> tuple[str, str]:
    """Memory of what is given and of what is written: plain, or out of the ordinary in one of them."""
    odd = draw(st.sampled_from(("", "", "given", "out")))
    ways = (
        ("transposed",)
        if changes
        else ("sliced", "transposed")
        if odd == "out" or not expanded
        else ("sliced", "transposed", "expanded")
    )
    memory = draw(st.sampled_from(ways)) if odd else "plain"
    return (memory, "plain") if odd == "given" or changes else ("plain", memory)


def _world(draw: st.DrawFn, mesh: Mesh, limits: Limits) -> dict[str, Any]:
    """A world with one rank more than the group names, seldom."""
    larger = max(mesh.ranks) + 2
    return {"world": larger} if larger <= limits.world_size and draw(one_in(8)) else {}


def features_of_call(case: Case) -> set[str]:
    return features_of(case) | {f"collective:{case.get('call')}"}


# the collectives that the calls of other names are forms of
FORMS_OF = ("all_gather", "all_reduce", "all_to_all", "reduce_scatter", "broadcast", "gather", "reduce", "scatter")


def collectives_of(case: Case) -> set[str]:
    """The collectives that a case is about, whatever the form in which it calls them."""
    name = case.law.partition("[")[2].rstrip("]") or case.law.partition(".")[2]
    names = [name, case.get("call", ""), *(one.rpartition(":")[2] for one in case.get("calls", "").split("/"))]
    known = (next((form for form in FORMS_OF if one.replace("-", "_").startswith(form)), "") for one in names)
    return {f"collective:{form}" for form in known if form}


def features_of(case: Case) -> set[str]:
    """What a case of a collective departs in beyond its tensor and its group."""
    found = collectives_of(case)
    given = {
        "work": {"async"},
        "calls": {"in-flight", "async"},
        "late": {"late-rank"},
        "by": {"by-position"},
        "root": {"source-rank"},
    }
    for field, names in given.items():
        found |= names if field in case else set()
    if case.get("form", "") == "stacked":
        found.add("stacked")
    if case.get("form", "") == "list":
        found.add("list-of-tensors")
    if case.get("ranks", "") == "kept":
        found.add("kept-order")
    meshes = [frozenset(mesh.ranks) for mesh in case.meshes]
    if meshes and meshes[0] != frozenset(range(case.world)):
        found.add("group")
    if len(meshes) > 1:
        found |= {
            "overlapping-groups" if one & other else "disjoint-groups"
            for at, one in enumerate(meshes)
            for other in meshes[:at]
        }
    rows = [numbers(row) for row in case.get("splits", "").split("/") if row] + [numbers(case.get("extents", ""))]
    rows = [row for row in rows if row]
    if any(len(set(row)) > 1 for row in rows) or len({row for row in rows if "splits" in case}) > 1:
        found.add("uneven-split")
    if any(0 in row for row in rows) or ("x" in case and 0 in case.tensor("x").shape):
        found.add("zero-size-input")
    if case.get("out", "plain") != "plain":
        found.add("noncontiguous-output")
    if "op" in case:
        found.add(f"reduce-op:{case.get('op')}")
    return found
