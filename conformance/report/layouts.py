"""Small pictures of the layouts of a case's tensors: every element in the colours of the ranks that hold it.

A tensor of more than two dims is drawn as two-dimensional: all dims but the last are flattened into rows. Neighbouring elements with the
same ranks form one area.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shardlaw.reference.layout import Layout, LayoutError
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.notation import NotationError, Shape, format_shape
from shardlaw.reference.placement import format_placements, parse_placements

# distinguishable for the colour-blind, and light enough for dark text
COLOURS = ("#8ec7ff", "#ffc27a", "#a5e0a0", "#f5a8c8", "#d3b8f5", "#f4e37a", "#8fe0dc", "#d8c3a5")
MAX_EXTENT = 16  # rows or columns; a larger tensor is not drawn
MAX_NAMED_RANKS = 6
CELL = 16
MAX_CELL = 54
LETTER = 6.8


@dataclass(frozen=True)
class Stripe:
    """The part of an area in the colour of one rank. Lengths are in pixels."""

    x: float
    y: int
    width: float
    height: int
    colour: str


@dataclass(frozen=True)
class Area:
    """The label of an area: its position in pixels, its text, and the full list of ranks as ``title``."""

    x: float
    y: float
    text: str
    title: str


@dataclass(frozen=True)
class LayoutPicture:
    """The layout of one tensor, ready to be drawn. ``lines`` is the SVG path of the lines between elements."""

    name: str
    title: str
    described: str
    command: str
    width: float
    height: int
    stripes: tuple[Stripe, ...]
    areas: tuple[Area, ...]
    lines: str


def draw_layouts(case: Mapping[str, Any]) -> tuple[LayoutPicture, ...]:
    """Draw the layouts of a case in JSON: of its tensors, and of the first tensor redistributed to the placements in ``to``."""
    from shardlaw.reference.tensors import TensorSpec  # loads torch, which COLOURS do not need

    fields = case.get("fields")
    if not isinstance(fields, dict) or not all(isinstance(value, str) for value in fields.values()) or "mesh" not in fields:
        return ()
    found: list[LayoutPicture] = []
    first: Shape | None = None
    for name, text in fields.items():
        if name != "mesh" and ":" in text:
            try:
                spec = TensorSpec.parse(text)
                found += [_draw_layout(name, Layout(spec.shape, Mesh.parse(fields["mesh"]), spec.placements))] if spec.placements else []
            except (NotationError, LayoutError, ValueError):
                continue
            first = spec.shape if first is None else first
    if first is not None and "to" in fields:
        with contextlib.suppress(NotationError, LayoutError, ValueError):
            found.append(_draw_layout("to", Layout(first, Mesh.parse(fields["mesh"]), parse_placements(fields["to"]))))
    return tuple(found)


def _draw_layout(name: str, layout: Layout) -> LayoutPicture:
    shape, mesh, placements = format_shape(layout.shape), layout.mesh, format_placements(layout.placements)
    rows, columns = math.prod(layout.shape[:-1]), (layout.shape or (1,))[-1]
    is_drawn = 0 < rows <= MAX_EXTENT and 0 < columns <= MAX_EXTENT
    areas = list(_merge_areas(ranks_by_element(layout, rows, columns))) if is_drawn else []
    cell = min(MAX_CELL, max([CELL, *((len(rank_label(ranks)) * LETTER + 4) / wide for _, _, wide, _, ranks in areas)]))
    colours = {rank: COLOURS[at % len(COLOURS)] for at, rank in enumerate(sorted(mesh.ranks))}
    stripes, names = [], []
    for left, top, wide, tall, ranks in areas:
        part = wide * cell / len(ranks)
        stripes += [
            Stripe(round(left * cell + at * part, 1), top * CELL, round(part, 1), tall * CELL, colours[rank])
            for at, rank in enumerate(ranks)
        ]
        middle = round((left + wide / 2) * cell, 1), (top + tall / 2) * CELL + 4
        names.append(Area(*middle, rank_label(ranks), f"held by rank {', '.join(map(str, ranks))}"))
    across = "".join(f"M0 {at * CELL}h{columns * cell:g}" for at in range(1, rows))
    down = "".join(f"M{at * cell:g} 0v{rows * CELL}" for at in range(1, columns))
    return LayoutPicture(
        name=name,
        title=f"{shape} on {mesh} {placements}",
        described=f"{name}: who holds what of {shape} on mesh {mesh} as {placements}",
        command=f"shardlaw show '{shape}' --mesh '{mesh}' --place '{placements}'",
        width=round(columns * cell, 1) if is_drawn else 0,
        height=rows * CELL if is_drawn else 0,
        stripes=tuple(stripes),
        areas=tuple(names),
        lines=across + down if is_drawn else "",
    )


def ranks_by_element(layout: Layout, rows: int, columns: int) -> list[list[tuple[int, ...]]]:
    """The ranks that hold each element, in ascending order, by row and column."""
    ranks_at: list[list[list[int]]] = [[[] for _ in range(columns)] for _ in range(rows)]
    for rank, coord in sorted((layout.mesh.rank_at(coord), coord) for coord in layout.mesh.coords()):
        *leading, last = layout.owned(coord) or ((0,),)
        numbers = [0]
        for size, own in zip(layout.shape[:-1], leading, strict=True):
            numbers = [number * size + at for number in numbers for at in own]
        for row in numbers:
            for column in last:
                ranks_at[row][column].append(rank)
    return [[tuple(ranks) for ranks in row] for row in ranks_at]


def _merge_areas(ranks_by_element: Sequence[Sequence[tuple[int, ...]]]) -> Iterator[tuple[int, int, int, int, tuple[int, ...]]]:
    """Yield rectangles of elements with the same ranks: left, top, width, height, ranks."""
    open_: dict[tuple[int, int, tuple[int, ...]], int] = {}
    for row, line in enumerate([*ranks_by_element, []]):
        runs: list[tuple[int, int, tuple[int, ...]]] = []
        for column, ranks in enumerate(line):
            if runs and runs[-1][2] == ranks and sum(runs[-1][:2]) == column:
                runs[-1] = (runs[-1][0], runs[-1][1] + 1, ranks)
            else:
                runs.append((column, 1, ranks))
        for (left, wide, ranks), top in [item for item in open_.items() if item[0] not in runs]:
            yield left, top, wide, row - top, ranks
            del open_[left, wide, ranks]
        for run in runs:
            open_.setdefault(run, row)


def rank_label(ranks: Sequence[int], limit: int = MAX_NAMED_RANKS) -> str:
    """The ranks as a list, or how many they are if there are more than ``limit``."""
    return ",".join(map(str, ranks)) if len(ranks) <= limit else f"{len(ranks)} ranks"
