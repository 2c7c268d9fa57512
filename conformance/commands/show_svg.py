"""``shardlaw show --svg``: a layout as an SVG picture, every element in the colours of the ranks that hold it.

A tensor of one or two dims is one grid; a tensor of more dims has a grid for each slice along its leading dims. Along a long dim, a run of
elements that the same ranks hold is one cell.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from shardlaw.conformance.commands.show import describe_layout, format_tuple, parse_layout, remarks
from shardlaw.conformance.errors import UsageError
from shardlaw.conformance.report.layouts import COLOURS, rank_label
from shardlaw.reference.layout import Layout
from shardlaw.reference.notation import format_shape

MAX_EXTENT = 24  # elements of a dim that are drawn one by one
MAX_CELLS = 48
MAX_SLICES = 24
MAX_RANKS = 64
MAX_NAMED_RANKS = 8
CELL = 30
LETTER = 7.2
LINE = 18
HEADER = 20
GAP = 24
LINE_WIDTH = 900
MIN_WIDTH = 420


@dataclass(frozen=True)
class Block:
    """Neighbouring indices of a dim that the same mesh coordinates own."""

    first: int
    last: int

    @property
    def label(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}..{self.last}"


@dataclass(frozen=True)
class Stripe:
    """A part of a cell: the colour of one rank."""

    x: float
    y: int
    width: float
    colour: str


@dataclass(frozen=True)
class Label:
    """A text. ``anchor`` is SVG's text-anchor (``start``, ``middle`` or ``end``), ``title`` the full text of a shortened one."""

    x: float
    y: float
    text: str
    anchor: str = "start"
    quiet: bool = False
    title: str = ""


@dataclass(frozen=True)
class Frame:
    """The outline of a cell."""

    x: float
    y: int
    width: float


def show_svg(shape: str, mesh: str, placements: str) -> str:
    """Render a layout as an SVG document. Raises :class:`UsageError` for invalid arguments or too many ranks."""
    from shardlaw.conformance.report.templates import render_template

    layout = parse_layout(shape, mesh, placements)
    if layout.mesh.size > MAX_RANKS:
        raise UsageError(f"--mesh {mesh}: {layout.mesh.size} ranks: want at most {MAX_RANKS} in a picture")
    drawing = _Drawing(layout)
    title = f"tensor {format_shape(layout.shape)}, mesh {layout.mesh}, placements {','.join(map(str, layout.placements))}"
    return render_template("layout.svg.j2", drawing=drawing, title=title, described="; ".join(_legend(layout)), cell=CELL)


class _Drawing:
    """The shapes of the picture, from top to bottom: description, legend, grids, remarks."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.colours = {rank: COLOURS[at] if at < len(COLOURS) else _hue(at) for at, rank in enumerate(sorted(layout.mesh.ranks))}
        coords = layout.mesh.coords()
        self._owned_by_rank = sorted((layout.mesh.rank_at(coord), tuple(map(frozenset, layout.owned(coord)))) for coord in coords)
        self.frames: list[Frame] = []
        self.stripes: list[Stripe] = []
        self.labels: list[Label] = []
        self.width = float(MIN_WIDTH)
        self.height = LINE
        for at, line in enumerate(describe_layout(layout)):
            self._add_line(line.strip(), 12 if at else 0, quiet=bool(at))
        self.height += LINE // 2
        for rank, line in zip(sorted(layout.mesh.ranks), _legend(layout), strict=True):
            self.stripes.append(Stripe(0, self.height - 12, 14, self.colours[rank]))
            self.frames.append(Frame(0, self.height - 12, 14))
            self._add_line(line, 22)
        self.swatches = len(self.frames)
        self.height += LINE // 2
        self._add_grids()
        for line in filter(None, remarks(layout)):
            self._add_line(line, 0, quiet=True)

    def _add_line(self, text: str, x: int, *, quiet: bool = False) -> None:
        self.labels.append(Label(x, self.height, text, quiet=quiet))
        self.width = max(self.width, x + LETTER * len(text))
        self.height += LINE

    def _add_grids(self) -> None:
        layout = self.layout
        if 0 in layout.shape:
            return
        shape = (1, 1, *layout.shape)[-max(2, len(layout.shape)) :]
        blocks = [_split_dim(layout, len(layout.shape) - len(shape) + dim, extent) for dim, extent in enumerate(shape)]
        *leading, rows, columns = blocks
        cut = [f"{len(some)} runs along dim {dim}, {MAX_CELLS} of them drawn" for dim, some in enumerate(blocks) if len(some) > MAX_CELLS]
        rows, columns = rows[:MAX_CELLS], columns[:MAX_CELLS]
        slices = list(itertools.islice(itertools.product(*leading), MAX_SLICES + 1))
        if len(slices) > MAX_SLICES:
            cut.append(f"{math.prod(map(len, leading))} slices, {MAX_SLICES} of them drawn")
        holders = (self._holders((*at, row, column)) for at in slices[:MAX_SLICES] for row in rows for column in columns)
        widest = max(len(rank_label(ranks, MAX_NAMED_RANKS)) for ranks in holders)
        cell = max(CELL, LETTER * widest + 10, *(LETTER * len(column.label) + 8 for column in columns))
        margin = LETTER * max(len(row.label) for row in rows) + 8 if len(layout.shape) > 1 else 0
        slice_width = margin + cell * len(columns) + GAP
        slice_height = HEADER + CELL * len(rows) + (LINE if leading else 0) + GAP // 2
        in_line = max(1, int(LINE_WIDTH // slice_width))
        top = self.height - LINE // 2
        for number, at in enumerate(slices[:MAX_SLICES]):
            down, along = divmod(number, in_line)
            self._add_grid(along * slice_width, top + down * slice_height, at, rows, columns, cell, margin)
        shown = min(len(slices), MAX_SLICES)
        self.width = max(self.width, min(shown, in_line) * slice_width)
        self.height = top + -(-shown // in_line) * slice_height + LINE
        for line in cut:
            self._add_line(line, 0, quiet=True)

    def _holders(self, at: Sequence[Block]) -> list[int]:
        """The ranks that hold the elements of a cell, whose leading blocks may belong to added dims."""
        own = at[len(at) - len(self.layout.shape) :]
        return [rank for rank, owned in self._owned_by_rank if all(block.first in some for block, some in zip(own, owned, strict=True))]

    def _add_grid(
        self, x: float, y: int, at: Sequence[Block], rows: Sequence[Block], columns: Sequence[Block], cell: float, margin: float
    ) -> None:
        if at:
            self.labels.append(Label(x, y + 12, f"[{', '.join([*(block.label for block in at), ':', ':'])}]"))
            y += LINE
        for number, column in enumerate(columns):
            if self.layout.shape:
                self.labels.append(Label(x + margin + (number + 0.5) * cell, y + 13, column.label, "middle", quiet=True))
        for down, row in enumerate(rows):
            top = y + HEADER + down * CELL
            if margin:
                self.labels.append(Label(x + margin - 6, top + CELL / 2 + 4, row.label, "end", quiet=True))
            for along, column in enumerate(columns):
                left = x + margin + along * cell
                ranks = self._holders((*at, row, column))
                width = cell / max(len(ranks), 1)
                self.stripes += [Stripe(left + part * width, top, width, self.colours[rank]) for part, rank in enumerate(ranks)]
                self.frames.append(Frame(left, top, cell))
                title = f"ranks {', '.join(map(str, ranks))}" if len(ranks) > 1 else f"rank {ranks[0]}" if ranks else "no rank"
                self.labels.append(Label(left + cell / 2, top + CELL / 2 + 4, rank_label(ranks, MAX_NAMED_RANKS), "middle", title=title))


def _split_dim(layout: Layout, dim: int, extent: int) -> list[Block]:
    """The blocks of a dim: single elements, or runs that the same ranks hold if the dim is long. A negative ``dim`` is an added one."""
    if dim < 0:
        return [Block(0, 0)]
    if extent <= MAX_EXTENT:
        return [Block(at, at) for at in range(extent)]
    owners: list[set[int]] = [set() for _ in range(extent)]
    for number, coord in enumerate(layout.mesh.coords()):
        for at in layout.owned(coord)[dim]:
            owners[at].add(number)
    ends = [at for at in range(extent) if at + 1 == extent or owners[at + 1] != owners[at]]
    return [Block(first, last) for first, last in zip([0, *(end + 1 for end in ends)], ends, strict=False)]


def _legend(layout: Layout) -> list[str]:
    """A line for each rank, in ascending order, with what it holds."""
    lines = []
    for rank in sorted(layout.mesh.ranks):
        coord = layout.mesh.coord(rank)
        assert coord is not None
        empty = coord in layout.empty_coords()
        offset = "" if empty or not layout.shape else f" from {format_tuple(layout.offset(coord))}"
        part = f"{format_shape(layout.local_shape(coord))}{offset}{', nothing' if empty else ''}"
        lines.append(f"rank {rank} at {format_tuple(coord)} holds {part}")
    return lines


def _hue(at: int) -> str:
    """A colour for a rank beyond ``COLOURS``; successive ones differ by the golden angle."""
    return f"hsl({at * 137 % 360}, 70%, 78%)"
