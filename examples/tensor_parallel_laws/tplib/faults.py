"""Faults to plant: each breaks one layer in the process that calls it, and one law must notice."""

from __future__ import annotations

import torch

from tplib import layers


def last_row_is_nobodys() -> None:
    layers.is_mine = lambda ids, first, rows: (ids >= first) & (ids < first + rows - 1)


def parts_in_reverse() -> None:
    join = torch.cat
    torch.cat = lambda parts, dim=0: join(parts[::-1], dim=dim)
