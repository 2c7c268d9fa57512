"""Where a law stands: one rank of a live world, and how the law says what it found.

A law builds its inputs from the case alone, asks torch to do something, and compares what this rank holds with what the
reference says it must hold. It reports through :class:`RankContext` and goes on; nothing here communicates, except the first use
of a mesh (its groups must be made) and what torch itself does for the law.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from shardlaw.conformance import compat
from shardlaw.conformance.law.target import Target
from shardlaw.conformance.law.verdict import Answer, Deposit, Deviation, Kind, Raised
from shardlaw.reference import simulate
from shardlaw.reference.layout import Layout, LayoutError
from shardlaw.reference.mesh import Coord, Mesh
from shardlaw.reference.notation import format_shape
from shardlaw.reference.placement import MaskPartial as RefMask
from shardlaw.reference.placement import Partial as RefPartial
from shardlaw.reference.placement import Placement, Placements, format_placements
from shardlaw.reference.placement import Replicate as RefReplicate
from shardlaw.reference.placement import Shard as RefShard
from shardlaw.reference.placement import StridedShard as RefStrided

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement as TorchPlacement

    from shardlaw.conformance.law.verdict import Outcome
    from shardlaw.conformance.rank.trace import Tracer

SHOWN_ELEMENTS = 64
MOST_KEPT = 64


class Rejected(Exception):
    """The case means nothing (the plain run fails too): it is counted as rejected, never as held."""


class RankContext:
    """One rank of a world, for the length of one case. ``rank`` and ``world`` are global, ``stage`` counts a law's worlds."""

    def __init__(self, rank: int, world: int, target: Target, folder: str, kept: dict[Any, Any]) -> None:
        self.rank = rank
        self.world = world
        self.target = target
        self.device = torch.device(target.device)
        self.stage = 0
        self.tracer: Tracer | None = None
        self._folder = folder
        self._kept = kept
        self._deviations: list[Deviation] = []
        self._deposits: list[Deposit] = []
        self._features: set[str] = set()

    # What a law stands on

    def mesh(self, mesh: Mesh, *, fresh: bool = False, names: tuple[str, ...] | None = None) -> DeviceMesh:
        """The live mesh, its dims named: from what the world keeps, or made anew (by all ranks of the world) when ``fresh``."""

        def made() -> DeviceMesh:
            table = torch.tensor(mesh.ranks).reshape(mesh.shape)
            return DeviceMesh(self.target.device, table, mesh_dim_names=names)

        live: DeviceMesh = made() if fresh else self.kept((mesh, names), made)
        return live

    def group(self, ranks: tuple[int, ...], *, sort_ranks: bool = True) -> dist.ProcessGroup | None:
        """The process group of these ranks, ``None`` for that of all: from what the world keeps, or made (by all ranks of the world)."""
        if ranks == tuple(range(self.world)):
            return None
        options: dict[str, Any] = {} if sort_ranks else {"sort_ranks": False}
        group: dist.ProcessGroup = self.kept((ranks, sort_ranks), lambda: dist.new_group(list(ranks), **options))
        return group

    def kept(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What the world keeps under a key from case to case, made where it is missing; the oldest goes when there is too much."""
        if key not in self._kept:
            made = make()
            if len(self._kept) >= MOST_KEPT:
                self._kept.pop(next(iter(self._kept)))
            self._kept[key] = made
        return self._kept[key]

    def coord(self, mesh: Mesh) -> Coord | None:
        """Where this rank sits in ``mesh``, or ``None`` when it takes no part."""
        return mesh.coord(self.rank)

    def folder(self) -> str:
        """A folder that all ranks, and all stages, of this case share. Rejects the case where hosts share none."""
        if not self._folder:
            raise Rejected("its ranks are on hosts that share no folder: set TMPDIR to one that they do share")
        os.makedirs(self._folder, exist_ok=True)
        return self._folder

    def tensor(self, dense: torch.Tensor) -> torch.Tensor:
        """A dense CPU tensor on the device under test, in memory that is laid out alike."""
        return moved(dense, self.device)

    def placements(self, placements: Placements) -> list[TorchPlacement]:
        """Reference placements as torch's."""
        return [to_torch(placement) for placement in placements]

    def local(self, full: torch.Tensor, layout: Layout, seed: int = 0) -> torch.Tensor:
        """What this rank must hold of ``full`` (with unequal contributions where a reduction is pending), on the device.

        A rank outside the mesh holds an empty tensor of shape ``(0,)``.
        """
        coord = self.coord(layout.mesh)
        if coord is None:
            return torch.empty(0, dtype=full.dtype, device=self.device)
        if layout.has_partial():
            return self.tensor(simulate.distribute(full, layout, seed)[coord])
        return self.tensor(simulate.take(full, layout, coord))

    def dtensor(
        self, full: torch.Tensor, layout: Layout, *, seed: int = 0, requires_grad: bool = False, mesh: DeviceMesh | None = None
    ) -> DTensor:
        """``full`` as a DTensor of ``layout``, put together from local tensors without any communication."""
        local = self.local(full, layout, seed).requires_grad_(requires_grad)
        contiguous = full.contiguous().stride()
        return DTensor.from_local(
            local, mesh or self.mesh(layout.mesh), self.placements(layout.placements), run_check=False, shape=full.shape, stride=contiguous
        )

    # What a law says

    def deviates(self, kind: Kind, check: str, message: str, expected: object = "", got: object = "") -> None:
        """Record that something is not as it must be."""
        self._deviations.append(Deviation(kind, check, message, show(expected), show(got)))

    def require(self, held: bool, kind: Kind, check: str, message: str, expected: object = "", got: object = "") -> bool:
        """Record a deviation unless ``held``; returns ``held``."""
        if not held:
            self.deviates(kind, check, message, expected, got)
        return held

    def reject(self, reason: str) -> None:
        """Give the case up as meaningless. Only what all ranks decide alike, before any communication, may do so."""
        raise Rejected(reason)

    def reached(self, feature: str) -> None:
        """Count a feature that only the run can tell, such as ``op:aten.mean.dim``."""
        self._features.add(feature)

    def same(
        self,
        got: torch.Tensor,
        want: torch.Tensor,
        check: str,
        *,
        exact: bool = True,
        what: str = "local tensor",
        rounding: torch.dtype | None = None,
    ) -> bool:
        """Compare a local tensor with its expected value: shape, then dtype, then elements, rounded to ``rounding`` where it was computed
        in
        that. NaN equals NaN."""
        got = got.detach()
        if tuple(got.shape) != tuple(want.shape):
            message = f"{what} has shape {format_shape(tuple(got.shape))}, must have {format_shape(tuple(want.shape))}"
            self.deviates("wrong-layout", check, message, want, got)
        elif got.dtype != want.dtype:
            self.deviates("wrong-metadata", check, f"{what} has dtype {got.dtype}, must have {want.dtype}", want, got)
        elif not close(
            got.cpu().to(rounding or got.dtype), want.cpu().to(rounding or want.dtype), None if exact else self.target.tolerance
        ):
            self.deviates("wrong-value", check, f"{what} holds other elements than it must{by_how_much(got, want)}", want, got)
        else:
            return True
        return False

    def same_dtensor(
        self,
        got: Any,
        want: torch.Tensor,
        check: str,
        *,
        exact: bool = True,
        mesh: Mesh | None = None,
        placements: Placements | None = None,
        rounding: torch.dtype | None = None,
        what: str = "",
    ) -> bool:
        """Judge a DTensor by its own claims: its global shape and dtype are those of ``want``, its placements (``placements``,
        where the law knows them) are true of what this rank holds. Contributions are deposited for the driver.

        ``mesh`` is the mesh that it must live on; a rank outside it must hold nothing. ``what`` names it, where it is one of several.
        """
        of = f"{what}: " if what else ""
        if not isinstance(got, DTensor):
            return self.require(False, "wrong-metadata", check, f"{of}result is a {type(got).__name__}, must be a DTensor")
        if tuple(got.shape) != tuple(want.shape):
            return self.require(False, "wrong-metadata", check, f"{of}global shape is {tuple(got.shape)}, must be {tuple(want.shape)}",
                                tuple(want.shape), tuple(got.shape))  # fmt: skip
        if got.dtype != want.dtype:
            return self.require(False, "wrong-metadata", check, f"{of}dtype is {got.dtype}, must be {want.dtype}", want.dtype, got.dtype)
        live = mesh_once_read(got.device_mesh)
        if mesh is not None and live != mesh:
            return self.require(False, "wrong-metadata", check, f"{of}result lives on mesh {live}, must live on {mesh}", mesh, live)
        claimed = read_placements(got.placements)
        try:
            layout = Layout(tuple(want.shape), live, claimed)
        except LayoutError as error:
            return self.require(
                False, "wrong-metadata", check, f"{of}claimed placements mean nothing: {error}", "", format_placements(claimed)
            )
        if placements is not None and layout.placements != Layout(tuple(want.shape), live, placements).placements:
            return self.require(False, "wrong-metadata", check,
                                f"{of}placements are {format_placements(claimed)}, must be {format_placements(placements)}",
                                format_placements(placements), format_placements(claimed))  # fmt: skip
        with torch.no_grad():
            local = got.to_local()
        coord = live.coord(self.rank)
        if coord is None:
            return self.require(local.numel() == 0, "wrong-layout", check, f"{of}a rank outside the mesh holds elements", "nothing", local)
        what = f"{of}local tensor under {format_placements(claimed)}"
        if not layout.has_partial():
            return self.same(local, simulate.take(want, layout, coord), check, exact=exact, what=what, rounding=rounding)
        due = layout.local_shape(coord)
        if tuple(local.shape) != due:
            message = f"{what} has shape {format_shape(tuple(local.shape))}, must have {format_shape(due)}"
            return self.require(False, "wrong-layout", check, message, due, local)
        full = want.to(rounding or want.dtype) if self.rank == min(live.ranks) else None
        kept = local.cpu().clone()  # a result that is still on its way arrives, and later writes do not reach it
        self._deposits.append(Deposit(check, format_shape(layout.shape), str(live), format_placements(claimed), kept, full, exact))
        return True

    def alike(self, local: torch.Tensor, mesh: Mesh, check: str) -> None:
        """What all ranks of ``mesh`` must hold alike, bit by bit: the driver compares it with what the lowest of them holds."""
        kept = local.detach().cpu().clone()
        placements = format_placements((RefReplicate(),) * mesh.ndim)
        full = kept if self.rank == min(mesh.ranks) else None
        self._deposits.append(Deposit(check, format_shape(tuple(kept.shape)), str(mesh), placements, kept, full, True))

    def refused(
        self, attempt: Callable[[], object], check: str, message: str, *, errors: tuple[type[BaseException], ...] = (Exception,)
    ) -> bool:
        """Whether ``attempt`` raises one of ``errors``, as it must; records ``wrong-error`` when it does not."""
        try:
            got = attempt()
        except errors as error:
            text = str(error)
            return self.require(bool(text.strip()), "wrong-error", check, f"{message}: refused by {type(error).__name__} without a word")
        except Exception as error:
            names = " or ".join(kind.__name__ for kind in errors)
            return self.require(
                False, "wrong-error", check, f"{message}: must be refused by {names}, raised {type(error).__name__}: {error}"
            )
        return self.require(False, "wrong-error", check, f"{message}: must be refused, was accepted", "an error", repr(got)[:200])

    def near(self, got: Any, want: Any) -> bool:
        """Whether two numbers, or lists of numbers, agree within rounding."""
        if isinstance(want, list | tuple):
            return isinstance(got, list | tuple) and len(got) == len(want) and all(map(self.near, got, want))
        if not isinstance(want, float) or not isinstance(got, float):
            return bool(got == want)
        return abs(got - want) <= 1e-4 * max(1.0, abs(want)) or got == want or (got != got and want != want)

    def would_hold(self, judge: Callable[[], object]) -> bool:
        """Whether ``judge`` records nothing; whatever it records is forgotten."""
        kept = len(self._deviations), len(self._deposits)
        judge()
        held = len(self._deviations) == kept[0]
        del self._deviations[kept[0] :], self._deposits[kept[1] :]
        return held

    def settled(self, tensor: Any) -> Any:
        """A tensor whose pending reductions are plain ones: those with a transform of their own (norms, masked lookups) are done by the
        target, since only it knows what the contributions mean."""
        derived = [isinstance(placement, Partial) and type(placement) is not Partial for placement in getattr(tensor, "placements", ())]
        if not any(derived):
            return tensor
        self.reached("derived")
        return tensor.redistribute(placements=[Replicate() if one else old for one, old in zip(derived, tensor.placements, strict=True)])

    # What the runner makes of it

    def answer(self, raised: Raised | None = None, rejected: str = "") -> Answer:
        """All that was recorded, as this rank's answer."""
        outcome: Outcome = "rejected" if rejected else "raised" if raised else "deviates" if self._deviations else "held"
        trace, evidence = (tuple(self.tracer.steps), self.tracer.evidence) if self.tracer is not None else ((), None)
        said = tuple(self._deviations), raised, tuple(self._deposits), tuple(sorted(self._features))
        return Answer(self.rank, outcome, *said, reason=rejected, trace=trace, evidence=evidence)


def moved(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor on a device: with the strides that it has, the elements between its own among them, as ``to`` would not leave them."""
    if x.device.type == device.type or (x.is_contiguous() and not x.storage_offset()):
        return x.to(device)
    memory = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
    return memory.to(device).as_strided(x.shape, x.stride(), x.storage_offset())


def close(got: torch.Tensor, want: torch.Tensor, tolerance: Mapping[str, float] | None) -> bool:
    """Whether two tensors of one shape and dtype agree: exactly, or within the dtype's tolerance of the largest element."""
    if got.numel() == 0 or torch.equal(got, want):
        return True
    if not (got.dtype.is_floating_point or got.dtype.is_complex):
        return False
    same = (got == want) | (got.isnan() & want.isnan())
    if tolerance is None:
        return bool(same.all())
    finite = want.isfinite() & got.isfinite()
    scale = want[finite].abs().max().item() if finite.any() else 0.0
    step = tolerance.get(str(want.dtype).removeprefix("torch."), 0.0)
    near = (got.to(torch.complex128) - want.to(torch.complex128)).abs() <= 16 * step * max(scale, 1.0)
    return bool((same | near & finite).all())


def by_how_much(got: torch.Tensor, want: torch.Tensor) -> str:
    """How many elements differ, and by how much at most: ``: 2 of 6, by up to 3``."""
    a, b = got.cpu().to(torch.complex128), want.cpu().to(torch.complex128)
    other = ~((a == b) | (a.isnan() & b.isnan()))
    apart = (a - b).abs()[other & a.isfinite() & b.isfinite()]
    return f": {int(other.sum())} of {got.numel()}" + (f", by up to {apart.max().item():.3g}" if apart.numel() else "")


def to_torch(placement: Placement) -> TorchPlacement:
    """A reference placement as torch's."""
    match placement:
        case RefShard(dim):
            return Shard(dim)
        case RefStrided(dim, factor):
            strided: TorchPlacement = compat.name("StridedShard")(dim, split_factor=factor)
            return strided
        case RefPartial(op):
            return Partial(op)
        case RefReplicate():
            return Replicate()
    raise NotImplementedError(f"{placement} is made by operators only")


def read_placements(placements: Sequence[Any]) -> Placements:
    """Torch's placements as the reference's. Raises ``NotImplementedError`` for one that the reference does not know."""
    return tuple(map(_read_placement, placements))


def _read_placement(placement: Any) -> Placement:
    if isinstance(placement, compat.name("StridedShard")):
        return RefStrided(placement.dim, placement.split_factor)
    if isinstance(placement, compat.name("MaskPartial")):
        return RefMask(placement.offset_dim)
    if isinstance(placement, Shard):
        return RefShard(placement.dim)
    if isinstance(placement, Replicate):
        return RefReplicate()
    if isinstance(placement, Partial):
        return RefPartial(placement.reduce_op)
    raise NotImplementedError(f"the reference knows no placement {placement!r}")


def read_mesh(mesh: DeviceMesh) -> Mesh:
    """A live mesh as the reference's."""
    table = mesh.mesh
    return Mesh(tuple(table.shape), tuple(table.flatten().tolist()))


_READ: dict[int, tuple[weakref.ref[DeviceMesh], Mesh]] = {}


def mesh_once_read(mesh: DeviceMesh) -> Mesh:
    """As :func:`read_mesh`, for laws about tensors: a mesh is read once, since torch works its table out anew each time."""
    known, read = _READ.get(id(mesh), (None, None))
    if read is None or known is None or known() is not mesh:
        read = read_mesh(mesh)
        if len(_READ) >= 4 * MOST_KEPT:
            _READ.clear()
        _READ[id(mesh)] = weakref.ref(mesh), read
    return read


def show(value: object) -> str:
    """A value as text for people, at most a screenful."""
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu()
        text = f"{flat.tolist()}" if flat.numel() <= SHOWN_ELEMENTS else f"{flat.flatten()[:SHOWN_ELEMENTS].tolist()} ..."
        return f"{text} {str(flat.dtype).removeprefix('torch.')} {format_shape(tuple(flat.shape))}"
    return str(value)[:2000]
