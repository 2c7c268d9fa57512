"""How an op is sharded is worked out on one rank of its mesh, and the others take its answer: no part of it depends on the rank, and it is
most of the work of a case.

The leader of a schema is chosen by a hash of all that the plan depends on. It writes its answer into a file of the world's folder, under
the number of the case: what an earlier case has shown is never taken. The others wait for the file: for a leader that has begun, which an
empty file says, as long as it takes, and else no longer than they would need themselves; whoever waits in vain works it out, and waits no
more in that case. Meshes and ops travel by name: each rank puts its own in.

On every rank are planned: one schema in :data:`CHECKED`; ops whose plan holds local shapes, or that have neither rule nor decomposition;
schemas with what has a state or an identity (tensors, generators, symbolic sizes) and with placements that ops make (masks, sums with a
transform); what is traced; whatever makes the leader raise or ask where it stands; and all that ranks outside the mesh plan. A case that
is not to share forgets first what was taken before it.
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
from shardlaw.conformance.rank.context import mesh_once_read

CHECKED = 16
PATIENCE = 0.3  # seconds at most, with a leader that has not begun
LONGEST = 10.0  # seconds, with one that has
BEGUN = "-begun"
KEPT_FILES = 512  # of each rank
NAP, LONGEST_NAP = 0.001, 0.02  # seconds
APART = b""  # an answer: each rank must find its own
PLAIN = (torch.dtype, torch.Size, torch.device, torch.layout, torch.memory_format)
ATOMS = {type(None), bool, int, float, complex, str, *PLAIN} - {torch.Size}
PLACEMENTS = (Replicate, Shard, Partial)
SPECS = "torch.distributed.tensor"

Plan = Callable[[Any], Any]


class ApartError(Exception):
    """A schema, or an answer, of which no other rank can make use."""


class SharedPlans:
    """The plans of one rank of a world whose ranks share ``folder``."""

    def __init__(self, rank: int, folder: str) -> None:
        self._rank = rank
        self._folder = folder
        self._case = ""
        self._undo: tuple[Callable[[], None], ...] = ()
        self._busy = self._taken = False
        self._leads = ""  # the name of what this rank plans for others
        self._patient = True
        self._usual = PATIENCE / 30
        self._files: deque[str] = deque()

    def begin(self, case: str) -> None:
        """What is planned from here on is shared under the name of a case, the same on all ranks; where it has none, torch is as it was."""
        if case and not self._undo:
            self._undo = plans.note_coordinates(self._note), plans.plan_by(self._plan)
        if not case:
            for undo in self._undo:
                undo()
            self._undo = ()
        if not case and self._taken:
            compat.name("op_plans")()
            self._taken = False
        self._case, self._patient = case, True

    def _note(self) -> None:
        if self._leads:  # the others need not wait for the end
            self._publish(self._leads, APART)
            self._leads = ""

    def _plan(self, true: Plan, schema: Any) -> Any:
        if not self._case or self._busy or compat.name("are_tracing")():  # busy: an op that is planned within the plan of another
            return true(schema)
        try:
            key, meshes = key_of(schema)
        except ApartError:
            return true(schema)
        members = mesh_once_read(meshes[0]).ranks
        if key[0] % CHECKED == 0 or len(members) == 1 or self._rank not in members:
            return true(schema)
        name = f"{self._folder}/{self._case}-{key.hex()}"
        if members[key[1] % len(members)] == self._rank:
            return self._lead(true, schema, name, meshes)
        answer = self._wait_for(name)
        if answer:
            with suppress(ApartError):
                found = read(answer, meshes)
                plans.taken(schema.op)
                self._taken = True
                return found
        return self._own(true, schema)

    def _lead(self, true: Plan, schema: Any, name: str, meshes: list[DeviceMesh]) -> Any:
        """Work it out, and tell the others."""
        answer, self._leads = APART, name
        self._publish(name + BEGUN, b"")
        try:
            found = self._own(true, schema)
            if self._leads:
                with suppress(ApartError):
                    answer = written(found, meshes)
            return found
        finally:
            if self._leads:
                self._publish(name, answer)
            self._leads = ""

    def _own(self, true: Plan, schema: Any) -> Any:
        began = time.monotonic()
        self._busy = True
        try:
            return true(schema)
        finally:
            self._busy = False
            self._usual += (time.monotonic() - began - self._usual) / 8

    def _publish(self, name: str, answer: bytes) -> None:
        with suppress(OSError):
            arriving = f"{name}.{self._rank}"
            with open(arriving, "wb") as file:
                file.write(answer)
            os.rename(arriving, name)
            self._files.append(name)
            if len(self._files) > KEPT_FILES:
                os.unlink(self._files.popleft())

    def _wait_for(self, name: str) -> bytes:
        """The leader's answer, or :data:`APART` where it does not come."""
        began, own = time.monotonic(), min(PATIENCE, max(PATIENCE / 3, 3 * self._usual))
        while True:
            waited = time.monotonic() - began
            try:
                with open(name, "rb") as file:
                    return file.read()
            except OSError:
                if not self._patient:
                    return APART
            if waited > own and (waited > LONGEST or not os.path.exists(name + BEGUN)):
                self._patient = False
            else:
                time.sleep(min(max(NAP, waited / 4), LONGEST_NAP))  # each time that it wakes up takes CPU time from the leader


def key_of(schema: Any) -> tuple[bytes, list[DeviceMesh]]:
    """A hash of all that the plan of a schema depends on, alike on all ranks, and the meshes that it names. Raises :class:`ApartError`."""
    if not plans.is_planned_alike(schema.op):
        raise ApartError
    meshes: list[DeviceMesh] = []
    told = str(schema.op), _told(schema.args_schema, meshes), _told(schema.kwargs_schema, meshes), plans.plans_depend_on()
    if not meshes:
        raise ApartError
    return hashlib.blake2b(repr((told, *map(_described, meshes))).encode(), digest_size=16).digest(), meshes


def _told(value: Any, meshes: list[DeviceMesh]) -> Any:
    """A value in which a spec stands as what it says of itself, with the place of its mesh in ``meshes``, where it is added if need be."""
    kind = type(value)
    if kind in ATOMS:
        return value
    if kind is plans.spec_type():
        if not all(map(_travels, value.placements)):
            raise ApartError
        said = {key: _told(item, meshes) for key, item in vars(value).items() if key not in ("mesh", "placements", plans.SPEC_HASH)}
        return _place(value.mesh, meshes, new=True), value.placements, said
    if kind is dict:
        return {key: _told(item, meshes) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return kind.__name__, [_told(item, meshes) for item in value]
    raise ApartError


def _travels(placement: Placement) -> bool:
    """Whether a placement is read as it was written: those that ops make of others hold more than they write."""
    return type(placement) in PLACEMENTS or type(placement) is compat.StridedShard


def _place(mesh: DeviceMesh, meshes: list[DeviceMesh], *, new: bool = False) -> int:
    """The place of a mesh in ``meshes``. Raises :class:`ApartError` where it has none and is not to be added as a ``new`` one."""
    at = next((at for at, known in enumerate(meshes) if known is mesh), len(meshes))
    if at == len(meshes):
        if not new:
            raise ApartError
        meshes.append(mesh)
    return at


def _described(mesh: DeviceMesh) -> tuple[Any, ...]:
    """What a mesh is on every rank. Raises :class:`ApartError` for one that takes this rank for another."""
    own, told = mesh.get_coordinate(), mesh_once_read(mesh)
    coord = told.coord(torch.distributed.get_rank())
    if own is not None and tuple(own) != coord:
        raise ApartError
    return told.shape, told.ranks, mesh.mesh_dim_names, mesh.device_type


def written(answer: Any, meshes: list[DeviceMesh]) -> bytes:
    """A plan as bytes, in which meshes stand by their place in ``meshes``. Raises :class:`ApartError`."""
    stream = io.BytesIO()
    try:
        _Pickler(stream, meshes).dump(answer)
    except Exception as error:
        raise ApartError from error
    return stream.getvalue()


def read(data: bytes, meshes: list[DeviceMesh]) -> Any:
    """The value that was :func:`written`, on the meshes of this rank. Raises :class:`ApartError`."""
    try:
        return _Unpickler(data, meshes).load()
    except Exception as error:
        raise ApartError from error


class _Pickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, meshes: list[DeviceMesh]) -> None:
        super().__init__(stream, pickle.HIGHEST_PROTOCOL)
        self._meshes = meshes

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, DeviceMesh):
            return _place(value, self._meshes)
        return str(value) if isinstance(value, compat.OpOverload) else None

    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        if kind is plans.spec_type():
            return copyreg.__newobj__, (kind,), {**vars(value), plans.SPEC_HASH: None}  # type: ignore[attr-defined]
        if isinstance(value, Placement) and not _travels(value):
            raise ApartError
        if isinstance(value, (type, FunctionType, BuiltinFunctionType, *PLAIN)) or kind.__module__.startswith(SPECS):
            return NotImplemented
        raise ApartError


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, meshes: list[DeviceMesh]) -> None:
        super().__init__(io.BytesIO(data))
        self._meshes = meshes

    def persistent_load(self, name: int | str) -> Any:
        return _overload(name) if isinstance(name, str) else self._meshes[name]


@cache
def _overload(name: str) -> Any:
    return attrgetter(name)(torch.ops)


def lacking() -> str:
    """What the installed torch lacks for ranks to share plans, or nothing."""
    try:
        for name in ("op_plans", "DTensorSpec", "StridedShard", "OpOverload", "planner", "has_decomposition", "note_decomposed"):
            compat.name(name)
        plans.plan_by(lambda true, schema: true(schema))()
    except (compat.TorchMovedError, AttributeError) as error:
        return str(error)
    return ""
