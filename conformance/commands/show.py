"""``shardlaw show``: a layout as text: which rank holds what. Computed by the reference, without ranks or torch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from shardlaw.conformance.errors import UsageError
from shardlaw.conformance.report.layouts import ranks_by_element
from shardlaw.conformance.report.wording import count_noun
from shardlaw.reference.layout import Layout, LayoutError
from shardlaw.reference.mesh import Coord, Mesh
from shardlaw.reference.notation import NotationError, format_shape, parse_shape
from shardlaw.reference.placement import format_placements, is_reduction, parse_placements, shard_dim

MAX_INDICES = 2_000_000
MAX_WIDTH = 110
MAX_ROWS = 48
# what torch prints: Shard(dim=0), Replicate(), Partial(sum)
TORCH_PLACEMENT = re.compile(r"(Replicate|Partial|_?Shard|_?StridedShard)\(([^()]*)\)")


def show(shape: str, mesh: str, placements: str) -> str:
    """Describe a layout in several lines. Raises :class:`UsageError` for invalid arguments."""
    layout = parse_layout(shape, mesh, placements)
    return "\n".join([*describe_layout(layout), "", *_rank_table(layout), "", *remarks(layout), *_element_table(layout)]).rstrip()


def parse_layout(shape: str, mesh: str, placements: str) -> Layout:
    """Parse the texts of a layout. Raises :class:`UsageError` if they are invalid, or the layout is too large to list."""
    try:
        sizes, table, parsed = (
            parse_shape(shape),
            Mesh.parse(mesh),
            parse_placements(TORCH_PLACEMENT.sub(_to_notation, re.sub(r"^\[(.*)\]$", r"\1", placements))),
        )
        if table.size * max(sum(sizes), 1) > MAX_INDICES:
            raise UsageError(f"shape {shape} on mesh {mesh}: too large to show, every index is listed")
        return Layout(sizes, table, parsed)
    except (NotationError, LayoutError) as error:
        raise UsageError(str(error)) from None


def _to_notation(printed: re.Match[str]) -> str:
    """Convert a placement from torch's notation (``Shard(dim=0)``) to ours."""
    name, argument = printed[1].strip("_"), re.sub(r"\s|\w+=|['\"]", "", printed[2])
    return {"Replicate": "R", "Shard": f"S({argument})", "StridedShard": f"_S({argument})", "Partial": f"P({argument or 'sum'})"}[name]


def describe_layout(layout: Layout) -> list[str]:
    """The layout in words: one line for the whole, one for each mesh dim."""
    mesh = layout.mesh
    lines = [f"tensor {format_shape(layout.shape)}, mesh {mesh}, placements {format_placements(layout.placements)}"]
    for dim, (size, placement) in enumerate(zip(mesh.shape, layout.placements, strict=True)):
        along = shard_dim(placement)
        what = "replicates" if not is_reduction(placement) else "holds contributions"
        if along is not None:
            what = f"shards tensor dim {along}"
        lines.append(f"  mesh dim {dim} ({count_noun(size, 'rank')}) {what}: {placement}")
    return lines


def _rank_table(layout: Layout) -> list[str]:
    rows = [["rank", "coordinate", "local shape", "offset", *(f"indices of dim {dim}" for dim in range(len(layout.shape)))]]
    for coord in layout.mesh.coords():
        owned = layout.owned(coord)
        rows.append(
            [
                str(layout.mesh.rank_at(coord)),
                format_tuple(coord),
                format_shape(layout.local_shape(coord)),
                format_tuple(layout.offset(coord)),
                *map(format_indices, owned),
            ]
        )
    return align_columns(rows)


def remarks(layout: Layout) -> list[str]:
    """Lines about empty ranks, replicas, uneven and scattered shards, with a blank line at the end; none if nothing applies."""
    mesh, lines = layout.mesh, []
    coords_by_owned: dict[tuple[tuple[int, ...], ...], list[Coord]] = {}
    for coord in mesh.coords():
        coords_by_owned.setdefault(layout.owned(coord), []).append(coord)
    empty = [mesh.rank_at(coord) for coord in layout.empty_coords()]
    if math.prod(layout.shape) == 0:
        lines.append("the tensor has no elements")
    elif empty:
        lines.append(f"nothing is held by {_format_ranks(empty)}")
    if layout.replicas() > 1:
        what = "contributions to the same elements" if layout.has_partial() else "the same elements"
        groups = [_format_ranks(map(mesh.rank_at, coords)) for owned, coords in coords_by_owned.items() if len(coords) > 1 and all(owned)]
        lines += [f"{what} are held by {group}" for group in groups]
    if not layout.is_even():
        lines.append("uneven: the local shapes differ")
    scattered = [mesh.rank_at(coord) for coord in mesh.coords() if layout.box(coord) is None]
    if scattered:
        lines.append(f"not one rectangle of the tensor: what {_format_ranks(scattered)} hold{'s' * (len(scattered) == 1)}")
    outside = sorted(set(range(max(mesh.ranks))) - set(mesh.ranks))
    if outside:
        lines.append(f"outside the mesh: {_format_ranks(outside)}")
    return [*lines, ""] if lines else []


def _element_table(layout: Layout) -> list[str]:
    """The elements of a tensor of one or two dims as a table, each with the ranks that hold it."""
    if len(layout.shape) not in (1, 2) or 0 in layout.shape:
        return []
    rows, columns = (1, *layout.shape)[-2:]
    if rows > MAX_ROWS or columns > MAX_WIDTH // 2:
        return [f"(a picture of {format_shape(layout.shape)} would be too large)"]
    cells = [[",".join(map(str, ranks)) for ranks in row] for row in ranks_by_element(layout, rows, columns)]
    names = [str(row) for row in range(rows)] if len(layout.shape) == 2 else ["rank"]
    table = align_columns([["", *map(str, range(columns))], *([name, *row] for name, row in zip(names, cells, strict=True))])
    if max(map(len, table)) > MAX_WIDTH:
        return [f"(a picture of {format_shape(layout.shape)} would be too large)"]
    title = "ranks by element (row, column)" if len(layout.shape) == 2 else "rank by element"
    width = table[0].index("0")
    ruled = [f"{line[: width - 1]}| {line[width:]}" for line in table]
    return [f"{title}:", ruled[0], "-" * max(map(len, ruled)), *ruled[1:]]


def format_indices(owned: Sequence[int]) -> str:
    """Format sorted indices; a run of six or more as its ends: ``0..6 9 11``. ``-`` for none."""
    if not owned:
        return "-"
    parts: list[str] = []
    at = 0
    while at < len(owned):
        end = at
        while end + 1 < len(owned) and owned[end + 1] == owned[end] + 1:
            end += 1
        parts += [f"{owned[at]}..{owned[end]}"] if end - at >= 5 else map(str, owned[at : end + 1])
        at = end + 1
    text = " ".join(parts)
    return text if len(text) <= MAX_WIDTH else f"{text[: MAX_WIDTH - 20].rpartition(' ')[0]} ... ({len(owned)} in all)"


def align_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Format rows of cells as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def format_tuple(values: Sequence[int]) -> str:
    return f"({', '.join(map(str, values))})"


def _format_ranks(ranks: Iterable[int]) -> str:
    numbers = [str(rank) for rank in ranks]
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {' '.join(numbers)}"
