"""The interface of a law to one rank of a live world: it builds inputs, compares results, and records deviations.

A law builds its inputs from the case alone, calls torch, and compares what this rank holds with the reference. It records deviations
through :class:`RankContext` and goes on. Nothing here communicates, except the first use of a mesh or group, which all ranks create.
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

MAX_SHOWN_ELEMENTS = 64
MAX_CACHED = 64


class Rejected(Exception):
    """The case has no meaning (the run without sharding fails too): it is counted as rejected, never as held."""


class RankContext:
    """One rank of a world, during one case. ``rank`` is global, ``world`` is the number of ranks, ``stage`` counts the worlds of the
    case."""

    def __init__(self, rank: int, world: int, target: Target, folder: str, cache: dict[Any, Any]) -> None:
        self.rank = rank
        self.world = world
        self.target = target
        self.device = torch.device(target.device)
        self.stage = 0
        self.tracer: Tracer | None = None
        self._folder = folder
        self._cache = cache
        self._deviations: list[Deviation] = []
        self._deposits: list[Deposit] = []
        self._features: set[str] = set()

    def mesh(self, mesh: Mesh, *, fresh: bool = False, names: tuple[str, ...] | None = None) -> DeviceMesh:
        """The live mesh, with dims of these ``names``. It is cached by the world, or created again if ``fresh``; all ranks of the world
        must ask for it."""

        def make() -> DeviceMesh:
            table = torch.tensor(mesh.ranks).reshape(mesh.shape)
            return DeviceMesh(self.target.device, table, mesh_dim_names=names)

        live: DeviceMesh = make() if fresh else self.cached((mesh, names), make)
        return live

    def group(self, ranks: tuple[int, ...], *, sort_ranks: bool = True) -> dist.ProcessGroup | None:
        """The process group of these ranks, ``None`` for the default group. It is cached by the world; all its ranks must ask for it."""
        if ranks == tuple(range(self.world)):
            return None
        options: dict[str, Any] = {} if sort_ranks else {"sort_ranks": False}
        group: dist.ProcessGroup = self.cached((ranks, sort_ranks), lambda: dist.new_group(list(ranks), **options))
        return group

    def cached(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The value that the world caches under ``key`` from case to case; ``make()`` creates it. The oldest is dropped from a full
        cache."""
        if key not in self._cache:
            value = make()
            if len(self._cache) >= MAX_CACHED:
                self._cache.pop(next(iter(self._cache)))
            self._cache[key] = value
        return self._cache[key]

    def coord(self, mesh: Mesh) -> Coord | None:
        """The coordinate of this rank in ``mesh``, or ``None`` if it is not in it."""
        return mesh.coord(self.rank)

    def folder(self) -> str:
        """A folder that all ranks and stages of this case share. Rejects the case where hosts share none."""
        if not self._folder:
            raise Rejected("its ranks are on hosts that share no folder: set TMPDIR to one that they do share")
        os.makedirs(self._folder, exist_ok=True)
        return self._folder

    def tensor(self, dense: torch.Tensor) -> torch.Tensor:
        """A dense CPU tensor on the device under test, with the same strides and storage offset."""
        return to_device(dense, self.device)

    def placements(self, placements: Placements) -> list[TorchPlacement]:
        """Reference placements as torch's."""
        return [to_torch(placement) for placement in placements]

    def local(self, full: torch.Tensor, layout: Layout, seed: int = 0) -> torch.Tensor:
        """The local tensor of this rank for ``full`` under ``layout``, on the device. Contributions to a pending reduction differ by rank.

        A rank outside the mesh gets an empty tensor of shape ``(0,)``.
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
        """``full`` as a DTensor of ``layout``, made of local tensors without communication."""
        local = self.local(full, layout, seed).requires_grad_(requires_grad)
        contiguous = full.contiguous().stride()
        return DTensor.from_local(
            local, mesh or self.mesh(layout.mesh), self.placements(layout.placements), run_check=False, shape=full.shape, stride=contiguous
        )

    def deviates(self, kind: Kind, check: str, message: str, expected: object = "", got: object = "") -> None:
        """Record a deviation."""
        self._deviations.append(Deviation(kind, check, message, describe_value(expected), describe_value(got)))

    def require(self, held: bool, kind: Kind, check: str, message: str, expected: object = "", got: object = "") -> bool:
        """Record a deviation unless ``held``; returns ``held``."""
        if not held:
            self.deviates(kind, check, message, expected, got)
        return held

    def reject(self, reason: str) -> None:
        """Reject the case as meaningless. All ranks must do so alike, before any communication."""
        raise Rejected(reason)

    def add_feature(self, feature: str) -> None:
        """Add a feature to the case that is known only when it runs, such as ``op:aten.mean.dim``."""
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
        """Compare a local tensor with the expected one: shape, dtype, then elements, both cast to ``rounding`` if given. NaN equals NaN.
        Not ``exact``: within the target's tolerance."""
        got = got.detach()
        if tuple(got.shape) != tuple(want.shape):
            message = f"{what} has shape {format_shape(tuple(got.shape))}, must have {format_shape(tuple(want.shape))}"
            self.deviates("wrong-layout", check, message, want, got)
        elif got.dtype != want.dtype:
            self.deviates("wrong-metadata", check, f"{what} has dtype {got.dtype}, must have {want.dtype}", want, got)
        elif not is_close(
            got.cpu().to(rounding or got.dtype), want.cpu().to(rounding or want.dtype), None if exact else self.target.tolerance
        ):
            self.deviates("wrong-value", check, f"{what} holds other elements than it must{describe_difference(got, want)}", want, got)
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
        """Compare a DTensor with the full tensor ``want``: global shape and dtype, then the local tensor, by the placements that it claims.

        ``placements`` and ``mesh``, where given, are those that it must have. A rank outside the mesh must hold no elements. Contributions
        to a pending reduction are deposited, for the driver to compare. ``what`` names the DTensor in messages.
        """
        prefix = f"{what}: " if what else ""

        def deviates(kind: Kind, message: str, expected: object = "", got: object = "") -> bool:
            return self.require(False, kind, check, prefix + message, expected, got)

        if not isinstance(got, DTensor):
            return deviates("wrong-metadata", f"result is a {type(got).__name__}, must be a DTensor")
        shape, global_shape = tuple(got.shape), tuple(want.shape)
        if shape != global_shape:
            return deviates("wrong-metadata", f"global shape is {shape}, must be {global_shape}", global_shape, shape)
        if got.dtype != want.dtype:
            return deviates("wrong-metadata", f"dtype is {got.dtype}, must be {want.dtype}", want.dtype, got.dtype)
        live = read_mesh_cached(got.device_mesh)
        if mesh is not None and live != mesh:
            return deviates("wrong-metadata", f"result lives on mesh {live}, must live on {mesh}", mesh, live)
        claimed = read_placements(got.placements)
        shown = format_placements(claimed)
        try:
            layout = Layout(global_shape, live, claimed)
        except LayoutError as error:
            return deviates("wrong-metadata", f"claimed placements mean nothing: {error}", "", shown)
        if placements is not None and layout.placements != Layout(global_shape, live, placements).placements:
            due_placements = format_placements(placements)
            return deviates("wrong-metadata", f"placements are {shown}, must be {due_placements}", due_placements, shown)
        with torch.no_grad():
            local = got.to_local()
        coord = live.coord(self.rank)
        if coord is None:
            return local.numel() == 0 or deviates("wrong-layout", "a rank outside the mesh holds elements", "nothing", local)
        what = f"{prefix}local tensor under {shown}"
        if not layout.has_partial():
            return self.same(local, simulate.take(want, layout, coord), check, exact=exact, what=what, rounding=rounding)
        local_shape, due_shape = tuple(local.shape), layout.local_shape(coord)
        if local_shape != due_shape:
            message = f"{what} has shape {format_shape(local_shape)}, must have {format_shape(due_shape)}"
            return self.require(False, "wrong-layout", check, message, due_shape, local)
        full = want.to(rounding or want.dtype) if self.rank == min(live.ranks) else None
        copy = local.cpu().clone()  # waits for a pending collective, and is independent of later writes
        self._deposits.append(Deposit(check, format_shape(layout.shape), str(live), shown, copy, full, exact))
        return True

    def same_on_all_ranks(self, local: torch.Tensor, mesh: Mesh, check: str) -> None:
        """Require that all ranks of ``mesh`` hold the same tensor, bit by bit: the driver compares it with that of the lowest rank."""
        copy = local.detach().cpu().clone()
        placements = format_placements((RefReplicate(),) * mesh.ndim)
        full = copy if self.rank == min(mesh.ranks) else None
        self._deposits.append(Deposit(check, format_shape(tuple(copy.shape)), str(mesh), placements, copy, full, True))

    def refused(
        self, attempt: Callable[[], object], check: str, message: str, *, errors: tuple[type[BaseException], ...] = (Exception,)
    ) -> bool:
        """Whether ``attempt()`` raises one of ``errors`` with a text; records ``wrong-error`` if it does not."""
        from shardlaw.conformance.law.due import Refused

        classes: tuple[type[BaseException], ...] = (Exception, *errors)
        try:
            got = attempt()
        except classes as error:
            got = error
        recorded = len(self._deviations)
        Refused(errors).compare(self, check, got, message)
        return len(self._deviations) == recorded

    def is_near(self, got: Any, want: Any) -> bool:
        """Whether two numbers, or lists of numbers, agree within rounding."""
        if isinstance(want, list | tuple):
            return isinstance(got, list | tuple) and len(got) == len(want) and all(map(self.is_near, got, want))
        if not isinstance(want, float) or not isinstance(got, float):
            return bool(got == want)
        return abs(got - want) <= 1e-4 * max(1.0, abs(want)) or got == want or (got != got and want != want)

    def would_pass(self, compare: Callable[[], object]) -> bool:
        """Whether ``compare()`` records no deviation; what it records is dropped."""
        deviations, deposits = len(self._deviations), len(self._deposits)
        compare()
        passes = len(self._deviations) == deviations
        del self._deviations[deviations:], self._deposits[deposits:]
        return passes

    def reduce_derived_partials(self, tensor: Any) -> Any:
        """The tensor with its derived partial placements (norms, masked lookups) redistributed to ``Replicate`` by the target, since only
        torch knows what their contributions mean."""
        is_derived = [isinstance(placement, Partial) and type(placement) is not Partial for placement in getattr(tensor, "placements", ())]
        if not any(is_derived):
            return tensor
        self.add_feature("derived")
        return tensor.redistribute(
            placements=[Replicate() if derived else old for derived, old in zip(is_derived, tensor.placements, strict=True)]
        )

    def answer(self, raised: Raised | None = None, rejected: str = "") -> Answer:
        """This rank's answer: all that was recorded."""
        outcome: Outcome = "rejected" if rejected else "raised" if raised else "deviates" if self._deviations else "held"
        trace, evidence = (tuple(self.tracer.steps), self.tracer.evidence) if self.tracer is not None else ((), None)
        recorded = tuple(self._deviations), raised, tuple(self._deposits), tuple(sorted(self._features))
        return Answer(self.rank, outcome, *recorded, reason=rejected, trace=trace, evidence=evidence)


def to_device(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor copied to a device with its whole storage, so that strides and storage offset stay, which ``Tensor.to`` would change."""
    if x.device.type == device.type or (x.is_contiguous() and not x.storage_offset()):
        return x.to(device)
    memory = torch.empty(0, dtype=x.dtype).set_(x.untyped_storage())
    return memory.to(device).as_strided(x.shape, x.stride(), x.storage_offset())


def is_close(got: torch.Tensor, want: torch.Tensor, tolerance: Mapping[str, float] | None) -> bool:
    """Whether two tensors of the same shape agree: exactly, or within 16 times the relative ``tolerance`` of the dtype of ``want``, scaled
    by the largest element. Their dtypes may differ: what is claimed to be an average of integers or bools is assembled as floats."""
    if got.numel() == 0 or torch.equal(got, want):
        return True
    if not (got.dtype.is_floating_point or got.dtype.is_complex):
        return False
    same = (got == want) | (got.isnan() & want.isnan())
    if tolerance is None:
        return bool(same.all())
    finite = want.isfinite() & got.isfinite()
    scale = want[finite].to(torch.complex128).abs().max().item() if finite.any() else 0.0
    step = tolerance.get(str(want.dtype).removeprefix("torch."), 0.0)
    near = (got.to(torch.complex128) - want.to(torch.complex128)).abs() <= 16 * step * max(scale, 1.0)
    return bool((same | near & finite).all())


def describe_difference(got: torch.Tensor, want: torch.Tensor) -> str:
    """How many elements differ, and by how much at most: ``: 2 of 6, by up to 3``."""
    a, b = got.cpu().to(torch.complex128), want.cpu().to(torch.complex128)
    differs = ~((a == b) | (a.isnan() & b.isnan()))
    amounts = (a - b).abs()[differs & a.isfinite() & b.isfinite()]
    return f": {int(differs.sum())} of {got.numel()}" + (f", by up to {amounts.max().item():.3g}" if amounts.numel() else "")


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


_MESHES: dict[int, tuple[weakref.ref[DeviceMesh], Mesh]] = {}


def read_mesh_cached(mesh: DeviceMesh) -> Mesh:
    """As :func:`read_mesh`, cached by mesh, since torch computes the table of ranks each time that it is asked."""
    known, read = _MESHES.get(id(mesh), (None, None))
    if read is None or known is None or known() is not mesh:
        read = read_mesh(mesh)
        if len(_MESHES) >= 4 * MAX_CACHED:
            _MESHES.clear()
        _MESHES[id(mesh)] = weakref.ref(mesh), read
    return read


def describe_value(value: object) -> str:
    """A value as text for people, at most a screenful."""
    if isinstance(value, torch.Tensor) and not isinstance(value, DTensor):
        flat = value.detach().cpu()
        text = f"{flat.tolist()}" if flat.numel() <= MAX_SHOWN_ELEMENTS else f"{flat.flatten()[:MAX_SHOWN_ELEMENTS].tolist()} ..."
        return f"{text} {str(flat.dtype).removeprefix('torch.')} {format_shape(tuple(flat.shape))}"
    return str(value)[:2000]
