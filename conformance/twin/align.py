"""Compares the local tensors of all ranks with the tensor of the whole model.

A DTensor is compared by its own placements: the local tensor of each rank must be the slice that they name. For a plain tensor the layout
is searched: of those that give every rank a tensor of its shape (replicated, in shards, or contributions to a sum), the one that comes
closest on all ranks. The same search finds the placements on mesh dims that a DTensor's own mesh lacks.

Where a batch is sharded over a mesh dim and every rank takes the mean over its shard, gradients are larger by the size of the dim. Which
mesh dims do so is the same for all tensors of a run.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from shardlaw.conformance.twin.record import BACKWARD, GRADIENTS, OF_PARAMETERS, START, STEP, Key, LocalTensor, twin_mesh_dims
from shardlaw.conformance.twin.steps import SAFETY, bitwise_equal, distance, largest
from shardlaw.reference import simulate
from shardlaw.reference.layout import Indices, Layout, LayoutError
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.placement import (
    Partial,
    Placement,
    Placements,
    Replicate,
    Shard,
    StridedShard,
    format_placements,
    is_reduction,
    parse_placements,
    shard_dim,
)

MAX_SHOWN = 4
FUSED_FACTORS = (2, 3)  # how many matrices may be fused into a parameter before it is sharded
FLATTENED_FACTORS = (2, 3, 4, 8)  # the sizes of a batch dim that a view may merge into the sharded dim behind it


@dataclass(frozen=True)
class TensorComparison:
    """The comparison of one tensor.

    - ``seen``, ``bound``: its largest distance from the whole model's, and the largest that is allowed.
    - ``layout``: the layout of the comparison, ``placements`` the same as data, ``scale`` the factor by which a gradient is larger.
    - ``rank``, ``elements``, ``wrong``: the rank that is furthest off, (global index, is, must be) of its worst elements, and how many of
      its elements are too far off.
    - ``pending``: a plain tensor that is right only as a sum over ranks.
    - ``word``: what is wrong, where it is no distance.
    """

    key: Key
    seen: float
    bound: float
    layout: str
    pending: bool = False
    word: str = ""
    rank: int = -1
    elements: tuple[tuple[tuple[int, ...], float, float], ...] = ()
    wrong: int = 0
    placements: Placements = ()
    scale: float = 1.0

    @property
    def ratio(self) -> float:
        """``seen / bound``; the tensor departs above 1."""
        return (0.0 if self.seen == 0 else math.inf) if self.bound == 0 else 0.0 if math.isinf(self.bound) else self.seen / self.bound

    @property
    def departs(self) -> bool:
        """Whether it differs from the whole model's tensor by more than the bound."""
        return bool(self.word) or not self.ratio <= 1


class Aligner:
    """Compares the tensors of one sharded run in order. Keeps the possible layouts of parameters, and of mesh dims that scale gradients."""

    def __init__(self, mesh: Mesh, names: Sequence[str], waits: bool) -> None:
        self._mesh, self._names, self._has_before_step = mesh, names, waits
        self._coords = {mesh.rank_at(coord): coord for coord in mesh.coords()}
        self._parameter_layouts: dict[tuple[str, str], list[Placements]] = {}
        dims = range(mesh.ndim)
        self._subsets = [frozenset(some) for n in range(mesh.ndim + 1) for some in itertools.combinations(dims, n)]
        self._scaled = self._subsets

    def compare(self, key: Key, want: torch.Tensor, bound: float, pieces: Mapping[int, LocalTensor]) -> TensorComparison:
        """Compare the ranks' local tensors ``pieces`` with ``want``, the tensor of the whole model."""
        best: TensorComparison | None = None
        fits = []
        for placements, scale in self._candidate_layouts(key, want, pieces):
            found = self._compare_under(key, want, bound, pieces, placements, scale)
            if found is None:
                continue
            if not found.departs and key.phase == START:
                fits.append(placements)
            if best is None or _fits_better(found, best):
                best = found
            if best.ratio * SAFETY <= 1 and key.phase != START:  # as close as rounding allows: no need to try others
                break
        nonempty = {rank: piece for rank, piece in pieces.items() if piece.local.numel()}
        if best is None and 0 < len(nonempty) < len(pieces):  # such as a table of which some ranks have no row
            return self.compare(key, want, bound, nonempty)
        if best is None:
            shapes = " ".join(f"rank {rank}: {tuple(one.local.shape)}" for rank, one in sorted(pieces.items()))
            claims = {f" {one.placements} of {one.shape}" for one in pieces.values() if one.placements}
            word = f"no layout of the whole tensor, of shape {tuple(want.shape)}, gives ranks these shapes:{''.join(claims)} {shapes}"
            return TensorComparison(key, math.inf, bound, "none", word=word)
        if key.phase == START:
            self._parameter_layouts[key.path, key.what] = fits
        if key.phase == BACKWARD and 2 * self._mesh.size * bound < largest(
            want.abs()
        ):  # for smaller tensors another scale would fit as well
            self._narrow_scaled_dims(best, pieces)
        return self._check_replicas(best, key, pieces) if key.phase == STEP and not best.departs else best

    # Layouts

    def _candidate_layouts(self, key: Key, want: torch.Tensor, pieces: Mapping[int, LocalTensor]) -> Iterator[tuple[Placements, float]]:
        """The layouts that a tensor may have, each with a factor by which it may be larger; likely ones first."""
        claimed = self._claimed_placements(pieces)
        if claimed is None:
            return
        known = (
            self._parameter_layouts.get((key.path, key.what)) if key.phase in OF_PARAMETERS and key.phase != START and not claimed else None
        )
        dims = range(want.dim())
        plain: list[Placement] = [Replicate(), *map(Shard, dims)]
        sums: list[Placement] = [Partial("sum"), Partial("avg")]
        factors = (
            FLATTENED_FACTORS
            if key.is_op
            else FUSED_FACTORS
            if key.phase == START or (key.phase in OF_PARAMETERS and known is None)
            else ()
        )
        fused = [StridedShard(dim, factor) for dim in dims for factor in factors]
        may_wait = want.is_floating_point() and (key.phase not in OF_PARAMETERS or (key.phase == GRADIENTS and self._has_before_step))
        free = [dim for dim in range(self._mesh.ndim) if dim not in claimed]
        seen: set[Placements] = set()
        for extra in ([], fused, sums if may_wait else []):
            options: list[Iterable[Placement]] = [[claimed[dim]] if dim in claimed else [*plain, *extra] for dim in range(self._mesh.ndim)]
            before = [one for old in known or [] for one in self._with_pending(old, extra)]
            for placements in itertools.product(*options) if known is None else before:
                if placements not in seen and (not free or self._may_fit(want, pieces, placements)):
                    seen.add(placements)
                    for scale in self._scales(key, placements, free, len(pieces)):
                        yield placements, scale

    def _may_fit(self, want: torch.Tensor, pieces: Mapping[int, LocalTensor], placements: Placements) -> bool:
        """Whether the shape on the mesh's first rank fits a layout: a quick test, since there are many."""
        first = pieces.get(self._mesh.ranks[0])
        if first is None:
            return True
        shape = list(want.shape)
        for size, placement in zip(self._mesh.shape, placements, strict=True):
            dim = shard_dim(placement)
            if dim is None or not -len(shape) <= dim < len(shape):
                continue
            if isinstance(placement, StridedShard) and shape[dim] % (size * placement.split_factor):
                return False  # fused matrices are sharded evenly
            shape[dim] = -(-shape[dim] // size)
        return tuple(shape) == tuple(first.local.shape)

    def _with_pending(self, old: Placements, extra: Sequence[Placement]) -> Iterator[Placements]:
        """The layouts of a parameter's gradient: those of the parameter, with pending sums where it is replicated."""
        return itertools.product(*([one, *extra] if isinstance(one, Replicate) else [one] for one in old))

    def _claimed_placements(self, pieces: Mapping[int, LocalTensor]) -> dict[int, Placement] | None:
        """The placements of a DTensor by dim of the twin's mesh; none for a plain tensor. None where ranks disagree."""
        claims = {self._claimed_by_rank(rank, piece) for rank, piece in pieces.items()}
        return dict(next(iter(claims))) if len(claims) == 1 else None

    def _claimed_by_rank(self, rank: int, piece: LocalTensor) -> tuple[tuple[int, Placement], ...]:
        dims = twin_mesh_dims(piece.mesh, self._mesh, rank) if piece.mesh and piece.placements != "?" else None
        return tuple(sorted(zip(dims, parse_placements(piece.placements), strict=True), key=lambda one: one[0])) if dims else ()

    def _scales(self, key: Key, placements: Placements, free: Sequence[int], ranks: int) -> list[float]:
        """How many times larger than the whole model's a gradient may be. Before a ``before_step``, which may divide, any factor counts."""
        if key.phase == GRADIENTS and self._has_before_step:
            return sorted({self._product(dims) for dims in self._subsets})
        if key.phase != BACKWARD:
            return [1.0]
        return sorted({scale for dims in self._scaled for scale in self._factors(placements, free, dims, ranks)})

    def _factors(self, placements: Placements, free: Sequence[int], scaled: frozenset[int], ranks: int) -> set[float]:
        """The possible factors, if the mesh dims ``scaled`` scale gradients: the product of those that shard the tensor. A tensor that not
        all ranks have, such as the tokens of an expert, may be scaled by the other dims too: its elements come from all their ranks."""
        fixed = frozenset(dim for dim in free if dim in scaled and shard_dim(placements[dim]) is not None)
        rest = [dim for dim in free if dim in scaled and dim not in fixed and ranks < self._mesh.size]
        return {self._product({*fixed, *some}) for n in range(len(rest) + 1) for some in itertools.combinations(rest, n)}

    def _product(self, dims: Iterable[int]) -> float:
        return float(math.prod(self._mesh.shape[dim] for dim in dims))

    def _narrow_scaled_dims(self, judged: TensorComparison, pieces: Mapping[int, LocalTensor]) -> None:
        """Drop the sets of scaling mesh dims that contradict the factor of this comparison."""
        if not judged.departs:
            claimed = self._claimed_placements(pieces) or {}
            free = [dim for dim in range(self._mesh.ndim) if dim not in claimed]
            self._scaled = [dims for dims in self._scaled if judged.scale in self._factors(judged.placements, free, dims, len(pieces))]

    # Values

    def _compare_under(
        self, key: Key, want: torch.Tensor, bound: float, pieces: Mapping[int, LocalTensor], placements: Placements, scale: float
    ) -> TensorComparison | None:
        """The comparison under one layout; None where the local shapes do not fit it."""
        try:
            layout = Layout(tuple(want.shape), self._mesh, placements)
        except LayoutError:
            return None
        pending = layout.has_partial()
        claimed = self._claimed_placements(pieces) or {}
        if any(tuple(one.local.shape) != layout.local_shape(self._coords[rank]) for rank, one in pieces.items()):
            return None
        if pending and (len(pieces) < self._mesh.size or self._are_replicas(pieces, placements)):
            return None
        name = f"{' '.join(self._names)}: {format_placements(placements)}" + (f", {scale:g} times" if scale != 1 else "")
        if pending:
            due = want.double() if want.is_floating_point() else want
            local = {self._coords[rank]: one.local.to(due.dtype) for rank, one in pieces.items()}
            replicas = simulate.assemble_replicas(local, layout)
            held: list[tuple[int, torch.Tensor, torch.Tensor, tuple[Indices, ...] | None]]
            held = [(self._mesh.rank_at(coord), full, due, None) for coord, full in replicas.items()]
        else:
            held = [
                (rank, one.local, simulate.take(want, layout, self._coords[rank]), layout.owned(self._coords[rank]))
                for rank, one in sorted(pieces.items())
            ]
        worst, best = -1.0, None
        for rank, got, must, owned in held:
            must = must * scale if scale != 1 else must
            apart = distance(got, must)
            far = largest(apart)
            if far > worst:
                worst, best = far, (rank, got, must, owned, apart)
        assert best is not None
        waits = any(is_reduction(placement) for dim, placement in enumerate(placements) if dim not in claimed)
        if not worst > bound * scale:
            return TensorComparison(key, worst / scale, bound, name, waits, placements=placements, scale=scale)
        rank, got, must, owned, apart = best
        return TensorComparison(
            key, worst / scale, bound, name, waits, "", rank, _worst_elements(got, must, owned, apart), int((apart > bound).sum())
        )

    def _are_replicas(self, pieces: Mapping[int, LocalTensor], placements: Placements) -> bool:
        """Whether a plain tensor is equal on all ranks along a mesh dim with a pending sum in ``placements``: then it is a replica."""
        pending = [dim for dim, placement in enumerate(placements) if is_reduction(placement) and self._mesh.shape[dim] > 1]
        if any(piece.mesh for piece in pieces.values()):
            return False
        return any(
            all(bitwise_equal(pieces[rank].local, pieces[self._mesh.group(dim, at)[0]].local) for rank, at in self._coords.items())
            for dim in pending
        )

    def _check_replicas(self, judged: TensorComparison, key: Key, pieces: Mapping[int, LocalTensor]) -> TensorComparison:
        """The comparison, or a departure where replicas of a parameter are not bitwise equal."""
        first: dict[tuple[int, ...], tuple[int, torch.Tensor]] = {}
        for rank, one in sorted(pieces.items()):
            place = tuple(
                at for at, placement in zip(self._coords[rank], judged.placements, strict=True) if not isinstance(placement, Replicate)
            )
            other, value = first.setdefault(place, (rank, one.local))
            if not bitwise_equal(value, one.local):
                apart = distance(one.local, value)
                word = f"the replica on rank {rank} is not bit by bit that on rank {other}"
                worst, wrong = _worst_elements(one.local, value, None, apart), int((apart > 0).sum())
                return replace(judged, pending=False, word=word, rank=rank, elements=worst, wrong=wrong, placements=(), scale=1.0)
        return judged


def _fits_better(one: TensorComparison, best: TensorComparison) -> bool:
    """Whether a layout fits better than the best so far. Of those that do not fit, one without pending sums is preferred."""
    if one.departs != best.departs:
        return best.departs
    return one.seen < best.seen and not (one.departs and one.pending)


def _worst_elements(
    got: torch.Tensor, must: torch.Tensor, owned: tuple[Indices, ...] | None, apart: torch.Tensor
) -> tuple[tuple[tuple[int, ...], float, float], ...]:
    """The elements that are furthest off: global index, value, and expected value."""
    shown = []
    for at in torch.topk(apart.flatten(), min(MAX_SHOWN, apart.numel())).indices.tolist():
        index = tuple(int(one) for one in torch.unravel_index(torch.tensor(at), got.shape)) if got.dim() else ()
        place = tuple(lists[i] for lists, i in zip(owned, index, strict=True)) if owned is not None else index
        is_, due = (float(one[index].abs() if one.is_complex() else one[index]) for one in (got, must))
        shown.append((place, is_, due))
    return tuple(shown)
