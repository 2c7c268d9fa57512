"""Strategies for cases of collectives, and the features of these cases."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from shardlaw.conformance.law.act import fields, law
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.law import Law, Limits
from shardlaw.conformance.laws.collective.specs import parse_ints
from shardlaw.reference.collective import is_reducible
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.tensors import DTYPES, TensorSpec
from shardlaw.strategies import shapes
from shardlaw.strategies.collectives import extents, groups, split_tables

DOC = "torch.distributed docs, "
OPS = ("sum", "sum", "max", "min", "product", "avg", "band", "bor", "bxor")
# reductions of equal numbers to that number
IDEMPOTENT = ("max", "min", "avg", "band", "bor")
FILLS = st.sampled_from(("distinct",) * 8 + ("wide", "edges"))
# further fields of a case: a strategy for each, or a function that draws them for the mesh
Extra = Mapping[str, SearchStrategy[Any]] | Callable[[st.DrawFn, Mesh], dict[str, Any]]
Features = Callable[[Case], set[str]]


def calls(
    limits: Limits,
    *,
    forms: Sequence[str] = (),
    root: bool = False,
    reduces: bool = False,
    in_place: bool = False,
    uneven: Iterable[str] = (),
    uneven_one_in: int = 2,
    all_ranks: Iterable[str] = (),
    splits: bool = False,
    least: int = 1,
    min_dims: int = 0,
    max_dims: int = 3,
    memories: bool = True,
    timing: bool = True,
    idempotent: bool = False,
    outputs: bool = True,
    floats: bool = False,
    expanded: bool = True,
    parts: bool = True,
    tables: bool = True,
    extra: Extra = MappingProxyType({}),
) -> SearchStrategy[Case]:
    """Cases of one collective.

    ``forms``: how one tensor stands for a list of tensors. ``uneven``: forms in which the number of rows may differ by
    member, one case in ``uneven_one_in``. ``all_ranks``: forms whose uneven and stacked cases have a group of all
    ranks, so that every rank gets the same error. ``root``, ``reduces``: the call has a root, a reduction.
    ``in_place``: the call writes into its input. ``memories``, ``expanded``: inputs and outputs may be non-contiguous,
    inputs have a stride of 0. ``timing``: the call may be asynchronous, and a rank late. ``idempotent``: only
    reductions of equal numbers to that number. ``outputs``: the caller passes output tensors. ``floats``: only
    floating-point dtypes. ``least``, ``parts`` and ``tables`` restrict the groups. ``extra`` draws further fields.
    """
    some_ranks = groups(world_size=limits.world_size, least=least, parts=parts, tables=tables)
    every_rank = groups(world_size=limits.world_size, least=2, parts=False, tables=False)
    shape_drawn = shapes(min_dims=min_dims, max_dims=max_dims, max_size=5)
    dtypes = [
        dtype
        for dtype in limits.dtypes
        if (not floats or DTYPES[dtype].is_floating_point) and not (idempotent and dtype == "bool")
    ]
    dtype_drawn = st.sampled_from(dtypes[:1] * 4 + dtypes)
    uneven, all_ranks = tuple(uneven), tuple(all_ranks)

    @st.composite
    def case(draw: st.DrawFn) -> Case:
        form = draw(st.sampled_from(forms)) if forms else ""
        is_uneven = form in uneven and draw(one_in(uneven_one_in))
        on_all_ranks = form in all_ranks and (is_uneven or form == "stacked")
        mesh = draw(every_rank if on_all_ranks else some_ranks)
        values: dict[str, Any] = {"mesh": mesh, **({} if on_all_ranks else _draw_world(draw, mesh, limits))}
        if list(mesh.ranks) != sorted(mesh.ranks) and draw(st.booleans()):
            values["ranks"] = "kept"
        shape = draw(shape_drawn)
        if not shape and (is_uneven or form == "joined"):
            shape = (2,)
        dtype = draw(dtype_drawn)
        memory = out = "plain"
        if memories and shape and not is_uneven:  # uneven tensors may be contiguous, and accepted, on some ranks only
            memory, out = _draw_memories(draw, in_place, expanded)
        fill = draw(FILLS) if dtype != "bool" else "distinct"
        values |= {"out": out if out != "plain" and outputs else None, "form": form or None}
        if reduces:
            ops = [op for op in OPS if is_reducible(DTYPES[dtype], op) and (not idempotent or op in IDEMPOTENT)]
            op = draw(st.sampled_from(ops))
            values["op"] = op if op != "sum" else None
            # the sum of which an average is taken would exceed the dtype
            fill = "wide" if (fill, op) == ("edges", "avg") else fill
        values["x"] = TensorSpec(shape, None, dtype, fill, memory)
        if is_uneven:
            every_row_uneven = on_all_ranks and mesh.size > 1
            if splits:
                table = split_tables(mesh.size)
                rows = draw(table.filter(lambda rows: all(map(_differ, rows))) if every_row_uneven else table)
                values["splits"] = "/".join(map(join_ints, rows))
            else:
                row = extents(mesh.size)
                values["extents"] = join_ints(draw(row.filter(_differ) if every_row_uneven else row))
        if root:
            at = draw(st.integers(0, mesh.size - 1))
            values |= {"root": at or None, "by": "position" if draw(one_in(3)) else None}
        if timing:
            values["work"] = "async" if draw(one_in(3)) else None
            late = draw(st.integers(0, 8 * mesh.size))
            values["late"] = late if late and late < mesh.size else None
        values |= extra(draw, mesh) if callable(extra) else {name: draw(drawn) for name, drawn in extra.items()}
        return fields(**values, seed=draw(st.integers(0, 9)) or None)

    return case()


def join_ints(values: Iterable[int]) -> str:
    """Numbers as ``1.2.0``."""
    return ".".join(map(str, values))


def collective_law(
    name: str,
    source: str,
    control: str,
    *,
    needs: tuple[str, ...] = (),
    features: Features | None = None,
    **record: Any,
) -> Callable[..., Law]:
    """Decorate the act of a law that needs groups of some ranks."""
    return law(
        f"collective.{name}",
        source=source,
        control=control,
        features=features or features_of,
        needs=(*needs, "subgroups"),
        **record,
    )


def one_in(count: int) -> SearchStrategy[bool]:
    """True in one draw of ``count``."""
    return st.sampled_from([False] * (count - 1) + [True])


def _differ(values: Iterable[Hashable]) -> bool:
    return len(set(values)) > 1


def _draw_memories(draw: st.DrawFn, in_place: bool, expanded: bool) -> tuple[str, str]:
    """The memory layouts of inputs and of outputs, at most one of them non-contiguous."""
    side = draw(st.sampled_from(("", "", "input", "output")))
    if in_place:
        layouts: tuple[str, ...] = ("transposed",)
    elif side == "output" or not expanded:
        layouts = ("sliced", "transposed")
    else:
        layouts = ("sliced", "transposed", "expanded")
    memory = draw(st.sampled_from(layouts)) if side else "plain"
    return (memory, "plain") if side == "input" or in_place else ("plain", memory)


def _draw_world(draw: st.DrawFn, mesh: Mesh, limits: Limits) -> dict[str, Any]:
    """In one case of eight a world with one rank more than the group needs."""
    larger = max(mesh.ranks) + 2
    return {"world": larger} if larger <= limits.world_size and draw(one_in(8)) else {}


def features_of_call(case: Case) -> set[str]:
    return features_of(case) | {f"collective:{case.get('call')}"}


# prefixes of the names of calls, the longest first
COLLECTIVES = ("all_gather", "all_reduce", "all_to_all", "reduce_scatter", "broadcast", "gather", "reduce", "scatter")


def collectives_of(case: Case) -> set[str]:
    """Features for the collectives that a case calls in any form."""
    variant = case.law.partition("[")[2].rstrip("]") or case.law.partition(".")[2]
    calls = [variant, case.get("call", ""), *(call.rpartition(":")[2] for call in case.get("calls", "").split("/"))]
    known = (next((name for name in COLLECTIVES if call.replace("-", "_").startswith(name)), "") for call in calls)
    return {f"collective:{name}" for name in known if name}


def features_of(case: Case) -> set[str]:
    """The features of a case of a collective beyond those of its tensor and its group."""
    found = collectives_of(case)
    by_field = {
        "work": {"async"},
        "calls": {"in-flight", "async"},
        "late": {"late-rank"},
        "by": {"by-position"},
        "root": {"source-rank"},
    }
    for field, names in by_field.items():
        found |= names if field in case else set()
    by_text = {"form=stacked": "stacked", "form=list": "list-of-tensors", "ranks=kept": "kept-order"}
    found |= {feature for word, feature in by_text.items() if word in case.text.split()}
    meshes = [frozenset(mesh.ranks) for mesh in case.meshes]
    if meshes and meshes[0] != frozenset(range(case.world)):
        found.add("group")
    if len(meshes) > 1:
        found |= {
            "overlapping-groups" if first & second else "disjoint-groups"
            for first, second in itertools.combinations(meshes, 2)
        }
    texts = [*case.get("splits", "").split("/"), case.get("extents", "")]
    rows = [parse_ints(text) for text in texts if text]
    if any(map(_differ, rows)) or ("splits" in case and _differ(rows)):
        found.add("uneven-split")
    if any(0 in row for row in rows) or ("x" in case and 0 in case.tensor("x").shape):
        found.add("zero-size-input")
    if case.get("out", "plain") != "plain":
        found.add("noncontiguous-output")
    if "op" in case:
        found.add(f"reduce-op:{case.get('op')}")
    return found
