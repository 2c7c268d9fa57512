"""Share op plans between the ranks of a world: one rank plans how an op is sharded, and the others take its plan.

Planning is most of the work of a case, and does not depend on the rank. The leader for a schema is chosen by a hash of all that the plan
depends on. It writes the plan to a file in the world's folder; the case's number is part of the name, so that no plan of an earlier case
is taken. The other ranks wait for the file: up to :data:`MAX_WAIT` once the leader has started, which an empty file shows, else about
three times as long as they would need to plan. A rank that has waited in vain plans itself, and does not wait again in this case. Meshes
and ops are pickled by name, and each rank puts in its own.

Every rank plans for itself:

- one schema in :data:`CHECK_EVERY`;
- ops whose plan holds local shapes, or that have neither a rule nor a decomposition;
- schemas with values that have state or identity (tensors, generators, symbolic sizes), or with derived placements (masks, sums with a
  transform);
- ops that are being traced;
- plans during which the leader raises or reads its mesh coordinate;
- all ops of a rank outside the mesh.

A case that does not share first drops the plans that were taken before it.
"""

from __future__ import annotations

import copyreg
import hashlib
import io
import os
import pickle
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from operator import attrgetter
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from shardlaw.conformance import compat
from shardlaw.conformance.compat import plans
from shardlaw.conformance.rank.context import read_mesh_cached

CHECK_EVERY = 16  # one key in so many is never shared
MAX_WAIT_FOR_START = 0.3  # seconds, for a leader to start
MAX_WAIT = 10.0  # seconds, for a leader that has started
STARTED = "-begun"
MAX_FILES = 512  # of each rank, beyond which it removes its oldest
NAP, MAX_NAP = 0.001, 0.02  # seconds
NOT_SHARED = b""  # instead of a plan: each rank must plan itself
PICKLED_BY_VALUE = (torch.dtype, torch.Size, torch.device, torch.layout, torch.memory_format)
PLACEMENTS = (Replicate, Shard, Partial)
SPEC_MODULES = "torch.distributed.tensor"

Plan = Callable[[Any], Any]


class NotShareableError(Exception):
    """A schema or a plan that cannot be shared with other ranks."""


class SharedPlans:
    """Shares the plans of one rank with the other ranks of its world, through files in ``folder``."""

    def __init__(self, rank: int, folder: str) -> None:
        self._rank = rank
        self._folder = folder
        self._case = ""
        self._undo: tuple[Callable[[], None], ...] = ()
        self._is_planning = self._has_taken = False
        self._leading = ""  # the file name of the plan that this rank makes for others
        self._may_wait = True
        self._mean_seconds = MAX_WAIT_FOR_START / 30
        self._files: deque[str] = deque()

    def begin_case(self, case: str) -> None:
        """Start a case, named alike on all ranks: its plans are shared. With an empty name torch plans unchanged, and plans that were taken
        from other ranks are dropped."""
        if case and not self._undo:
            self._undo = plans.observe_coordinate_reads(self._on_coordinate_read), plans.override_planning(self._plan)
        if not case:
            for undo in self._undo:
                undo()
            self._undo = ()
        if not case and self._has_taken:
            compat.clear_op_plans()
            self._has_taken = False
        self._case, self._may_wait = case, True

    def _on_coordinate_read(self) -> None:
        if self._leading:  # the plan depends on the rank: tell the others at once
            self._publish(self._leading, NOT_SHARED)
            self._leading = ""

    def _plan(self, original: Plan, schema: Any) -> Any:
        if not self._case or self._is_planning or compat.name("are_tracing")():  # _is_planning: within the plan of another op
            return original(schema)
        try:
            key, meshes = plan_key(schema)
        except NotShareableError:
            return original(schema)
        members = read_mesh_cached(meshes[0]).ranks
        if key[0] % CHECK_EVERY == 0 or len(members) == 1 or self._rank not in members:
            return original(schema)
        name = f"{self._folder}/{self._case}-{key.hex()}"
        if members[key[1] % len(members)] == self._rank:
            return self._plan_as_leader(original, schema, name, meshes)
        answer = self._wait_for(name)
        if answer:
            with suppress(NotShareableError):
                found = load_plan(answer, meshes)
                plans.record_decomposition(schema.op)
                self._has_taken = True
                return found
        return self._plan_alone(original, schema)

    def _plan_as_leader(self, original: Plan, schema: Any, name: str, meshes: list[DeviceMesh]) -> Any:
        """Plan, and publish the plan for the others."""
        answer, self._leading = NOT_SHARED, name
        self._publish(name + STARTED, b"")
        try:
            found = self._plan_alone(original, schema)
            if self._leading:
                with suppress(NotShareableError):
                    answer = dump_plan(found, meshes)
            return found
        finally:
            if self._leading:
                self._publish(name, answer)
            self._leading = ""

    def _plan_alone(self, original: Plan, schema: Any) -> Any:
        began = time.monotonic()
        self._is_planning = True
        try:
            return original(schema)
        finally:
            self._is_planning = False
            self._mean_seconds += (time.monotonic() - began - self._mean_seconds) / 8

    def _publish(self, name: str, answer: bytes) -> None:
        with suppress(OSError):
            arriving = f"{name}.{self._rank}"
            with open(arriving, "wb") as file:
                file.write(answer)
            os.rename(arriving, name)
            self._files.append(name)
            if len(self._files) > MAX_FILES:
                os.unlink(self._files.popleft())

    def _wait_for(self, name: str) -> bytes:
        """The leader's plan, or :data:`NOT_SHARED` if it does not come in time."""
        began, own = time.monotonic(), min(MAX_WAIT_FOR_START, max(MAX_WAIT_FOR_START / 3, 3 * self._mean_seconds))
        while True:
            waited = time.monotonic() - began
            try:
                with open(name, "rb") as file:
                    return file.read()
            except OSError:
                if not self._may_wait:
                    return NOT_SHARED
            if waited > own and (waited > MAX_WAIT or not os.path.exists(name + STARTED)):
                self._may_wait = False
            else:
                time.sleep(min(max(NAP, waited / 4), MAX_NAP))  # each wake-up takes CPU time from the leader


def plan_key(schema: Any) -> tuple[bytes, list[DeviceMesh]]:
    """A hash of all that the plan of a schema depends on, the same on all ranks, and the meshes in the schema. Raises
    :class:`NotShareableError`."""
    if not plans.is_plan_shareable(schema.op):
        raise NotShareableError
    meshes: list[DeviceMesh] = []
    frozen = str(schema.op), _freeze_value(schema.args_schema, meshes), _freeze_value(schema.kwargs_schema, meshes), plans.plan_settings()
    if not meshes:
        raise NotShareableError
    return hashlib.blake2b(repr((frozen, *map(_describe_mesh, meshes))).encode(), digest_size=16).digest(), meshes


def _freeze_value(value: Any, meshes: list[DeviceMesh]) -> Any:
    """A value whose ``repr`` is the same on all ranks. A spec becomes its attributes, with the index of its mesh in ``meshes``, to which
    new meshes are added. Raises :class:`NotShareableError`."""
    kind = type(value)
    if kind in plans.PLAIN_TYPES:
        return value
    if kind is plans.spec_type():
        if not all(map(_is_sent_whole, value.placements)):
            raise NotShareableError
        attributes = {
            key: _freeze_value(item, meshes) for key, item in vars(value).items() if key not in ("mesh", "placements", plans.SPEC_HASH)
        }
        return _mesh_index(value.mesh, meshes, new=True), value.placements, attributes
    if kind is dict:
        return {key: _freeze_value(item, meshes) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return kind.__name__, [_freeze_value(item, meshes) for item in value]
    raise NotShareableError


def _is_sent_whole(placement: Placement) -> bool:
    """Whether pickling keeps a placement whole: derived placements hold more than they pickle."""
    return type(placement) in PLACEMENTS or type(placement) is compat.StridedShard


def _mesh_index(mesh: DeviceMesh, meshes: list[DeviceMesh], *, new: bool = False) -> int:
    """The index of a mesh in ``meshes``; ``new``: append a mesh that is missing, instead of raising :class:`NotShareableError`."""
    index = next((index for index, known in enumerate(meshes) if known is mesh), len(meshes))
    if index == len(meshes):
        if not new:
            raise NotShareableError
        meshes.append(mesh)
    return index


def _describe_mesh(mesh: DeviceMesh) -> tuple[Any, ...]:
    """The attributes of a mesh, the same on every rank. Raises :class:`NotShareableError` for a mesh whose coordinate is not this
    rank's."""
    own, table = mesh.get_coordinate(), read_mesh_cached(mesh)
    coord = table.coord(torch.distributed.get_rank())
    if own is not None and tuple(own) != coord:
        raise NotShareableError
    return table.shape, table.ranks, mesh.mesh_dim_names, mesh.device_type


def dump_plan(answer: Any, meshes: list[DeviceMesh]) -> bytes:
    """A plan as bytes, in which a mesh is its index in ``meshes``. Raises :class:`NotShareableError`."""
    stream = io.BytesIO()
    try:
        _Pickler(stream, meshes).dump(answer)
    except Exception as error:
        raise NotShareableError from error
    return stream.getvalue()


def load_plan(data: bytes, meshes: list[DeviceMesh]) -> Any:
    """The inverse of :func:`dump_plan`, with the meshes of this rank. Raises :class:`NotShareableError`."""
    try:
        return _Unpickler(data, meshes).load()
    except Exception as error:
        raise NotShareableError from error


class _Pickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, meshes: list[DeviceMesh]) -> None:
        super().__init__(stream, pickle.HIGHEST_PROTOCOL)
        self._meshes = meshes

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, DeviceMesh):
            return _mesh_index(value, self._meshes)
        return str(value) if isinstance(value, compat.OpOverload) else None

    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        if kind is plans.spec_type():
            return copyreg.__newobj__, (kind,), {**vars(value), plans.SPEC_HASH: None}  # type: ignore[attr-defined]
        if isinstance(value, Placement) and not _is_sent_whole(value):
            raise NotShareableError
        if isinstance(value, (type, FunctionType, BuiltinFunctionType, *PICKLED_BY_VALUE)) or kind.__module__.startswith(SPEC_MODULES):
            return NotImplemented
        raise NotShareableError


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, meshes: list[DeviceMesh]) -> None:
        super().__init__(io.BytesIO(data))
        self._meshes = meshes

    def persistent_load(self, name: int | str) -> Any:
        return _overload(name) if isinstance(name, str) else self._meshes[name]


@cache
def _overload(name: str) -> Any:
    return attrgetter(name)(torch.ops)


def why_unavailable() -> str:
    """What the installed torch lacks for ranks to share plans; empty where they can."""
    try:
        for name in ("op_plans", "DTensorSpec", "StridedShard", "OpOverload", "planner", "has_decomposition", "note_decomposed"):
            compat.name(name)
        plans.override_planning(lambda original, schema: original(schema))()
    except (compat.TorchMovedError, AttributeError) as error:
        return str(error)
    return ""
