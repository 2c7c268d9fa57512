"""Due values: what a law's act must return, as its ``due`` function computes it from the reference.

A due function returns a dict with the keys of the act's dict, or a single value where the act returns one. A value is

=========================  =====================================================================================
:class:`Global`            a DTensor with this mesh and these placements, and the right local tensor on every rank
:class:`Claimed`           a DTensor of these elements; its own placements say which local tensor each rank must have
a ``torch.Tensor``         a plain tensor of the same shape, dtype and elements
:class:`Near`              the same, within the target's tolerance for rounding
:class:`Refused`           an exception, which the act returns (see :func:`caught`)
:class:`AtMost`            a number that is no larger
:class:`Alike`             any value, the same bits on all ranks of a mesh
:class:`Of`                another value, whose mismatch counts as another kind (``wrong-layout``, ``wrong-metadata``)
lists, tuples, dicts       of these, part by part
``...``                    anything: it is not compared
anything else              an equal value
=========================  =====================================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor

from shardlaw.reference import simulate
from shardlaw.reference.layout import Layout
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.placement import Placements
from shardlaw.reference.tensors import LOST_BY_CLONE, TensorSpec, lay_out

if TYPE_CHECKING:
    from shardlaw.conformance.law.verdict import Kind
    from shardlaw.conformance.rank.context import RankContext


class Meaningless(Exception):
    """The case has no defined result. A due function or an act raises it on every rank: the case is rejected; a script exits with 2."""


RESULT = "result"  # the key of a single value


def by_key(value: Any) -> Mapping[str, Any]:
    """What an act or a due function returns, by key; a single value under :data:`RESULT`."""
    return value if isinstance(value, Mapping) else {RESULT: value}


def caught(attempt: Callable[..., Any], *arguments: Any) -> Any:
    """What ``attempt(*arguments)`` returns, or the exception that it raises. For acts in which torch must refuse something."""
    try:
        return attempt(*arguments)
    except Exception as error:
        return error


class Due:
    """A due value with a comparison of its own."""

    def compare(self, here: RankContext, check: str, got: Any, place: str) -> None:
        """Record on ``here`` each deviation of ``got``, under the name ``check``; messages call the value ``place``."""
        raise NotImplementedError

    def for_script(self, rank: int) -> Any:
        """The value that the script's ``agrees`` compares with on this rank."""
        raise NotImplementedError

    def compares(self) -> Iterable[str]:
        """The parts of the script template's ``agrees`` that comparing with :meth:`for_script` needs."""
        return ()


DENSE_MEMORIES = ("transposed", "channels-last")  # memory layouts without gaps, which the global stride describes


@dataclass(frozen=True)
class Global(Due):
    """A dense tensor ``full`` and the layout in which ranks hold it. What a due function gets for a DTensor field."""

    full: torch.Tensor
    layout: Layout
    seed: int = 0
    memory: str = "plain"
    exact: bool = True
    rounding: torch.dtype | None = None
    laid: bool = False  # local tensors have the memory layout of the full one, also one that is not dense

    @classmethod
    def of(cls, spec: TensorSpec, mesh: Mesh, seed: int) -> Global:
        """The tensor of a spec on a mesh; a spec without placements is replicated."""
        from shardlaw.reference.placement import Replicate

        placements = (Replicate(),) * mesh.ndim if spec.placements is None else spec.placements
        return cls(spec.build(seed), Layout(spec.shape, mesh, placements), seed, spec.memory)

    @property
    def mesh(self) -> Mesh:
        return self.layout.mesh

    @property
    def placements(self) -> Placements:
        return self.layout.placements

    @property
    def stride(self) -> tuple[int, ...]:
        """The global stride of the DTensor."""
        return self.full.stride() if self.laid or self.memory in DENSE_MEMORIES else self.full.contiguous().stride()

    def under(self, placements: Placements, mesh: Mesh | None = None) -> Global:
        """The same tensor with other placements, on ``mesh`` where one is given."""
        return replace(self, layout=Layout(self.layout.shape, mesh or self.mesh, tuple(placements)))

    def holding(self, full: torch.Tensor) -> Global:
        """The tensor ``full`` on the same mesh with the same placements."""
        return replace(self, full=full, layout=Layout(tuple(full.shape), self.mesh, self.placements))

    def near(self, rounding: torch.dtype | None = None) -> Global:
        """The same, compared within the target's tolerance for ``rounding``, the dtype of the computation, or for its own dtype."""
        return replace(self, exact=False, rounding=rounding)

    def local(self, rank: int) -> torch.Tensor:
        """The local tensor of a rank: an unequal contribution where a reduction is pending, an empty tensor outside the mesh."""
        known: dict[int, torch.Tensor] = self.__dict__.setdefault("_locals", {})  # the act may change its argument: hand out clones
        if rank not in known:
            known[rank] = self._local(rank)
        local = known[rank].clone()
        one_row = self.memory == "expanded" and not self.layout.has_partial()
        return lay_out(local, self.memory) if self.laid and (one_row or self.memory in LOST_BY_CLONE) else local

    def _local(self, rank: int) -> torch.Tensor:
        coord = self.mesh.coord(rank)
        if coord is None:
            return torch.zeros((0,) if self.full.ndim else (), dtype=self.full.dtype)
        if self.layout.has_partial():
            local = simulate.distribute(self.full, self.layout, self.seed)[coord]
        else:
            local = simulate.take(self.full, self.layout, coord)
        return lay_out(local, self.memory) if self.memory in DENSE_MEMORIES else local

    def due_local(self, rank: int) -> Any:
        """The local tensor as a due value, exact or not as this one: ``...`` on a rank outside the mesh."""
        if self.mesh.coord(rank) is None:
            return ...
        return self.local(rank) if self.exact else Near(self.local(rank), self.rounding)

    def compare(self, here: RankContext, check: str, got: Any, place: str) -> None:
        what = "" if place == check else place
        here.same_dtensor(
            got, self.full, check, exact=self.exact, mesh=self.mesh, placements=self.placements, rounding=self.rounding, what=what
        )

    def for_script(self, rank: int) -> Any:
        if self.mesh.coord(rank) is None:
            return ...
        if self.layout.has_partial():
            return {"full": self.full, "placements": [*self.placements]}
        coord = self.mesh.coord(rank)
        assert coord is not None
        return ([*self.placements], self.layout.shape, simulate.take(self.full, self.layout, coord))


@dataclass(frozen=True)
class Claimed(Due):
    """A DTensor on ``mesh`` that denotes ``full`` under its own placements. Where it is not ``exact``, elements are compared within the
    target's tolerance for ``rounding``, the dtype of the computation, or for the tensor's own dtype."""

    full: torch.Tensor
    mesh: Mesh
    exact: bool = True
    rounding: torch.dtype | None = None

    def compare(self, here: RankContext, check: str, got: Any, place: str) -> None:
        here.same_dtensor(here.reduce_derived_partials(got), self.full, check, exact=self.exact, mesh=self.mesh, rounding=self.rounding)

    def for_script(self, rank: int) -> Any:
        return ... if self.mesh.coord(rank) is None else {"full": self.full}


@dataclass(frozen=True)
class Near(Due):
    """A plain tensor or a number, within the target's tolerance for ``rounding``, the dtype of the computation, or for its own dtype."""

    value: Any
    rounding: torch.dtype | None = None

    def compare(self, here: RankContext, check: str, got: Any, place: str) -> None:
        if isinstance(self.value, torch.Tensor):
            if _require_plain_tensor(here, got, check, place):
                here.same(got, self.value, check, exact=False, what=place, rounding=self.rounding)
        else:
            near = here.is_near(got, self.value)
            here.require(near, "wrong-value", check, f"{place} is {got!r:.200}, must be near {self.value!r:.200}", self.value, got)

    def for_script(self, rank: int) -> Any:
        return self.value


@dataclass(frozen=True)
class Refused(Due):
    """An exception of one of ``errors`` with a message; where ``words`` are given, one of them occurs in it."""

    errors: tuple[type[BaseException], ...] = (Exception,)
    words: tuple[str, ...] = ()

    def compare(self, here: RankContext, check: str, got: Any, place: str) -> None:
        names = " or ".join(error.__name__ for error in self.errors)
        if not isinstance(got, BaseException):
            here.deviates("wrong-error", check, f"{place}: must be refused, was accepted", "an error", repr(got)[:200])
        elif not isinstance(got, self.errors):
            message = f"{place}: must be refused by {names}, raised {type(got).__name__}: {got}"
            here.deviates("wrong-error", check, message, names, repr(got)[:200])
        elif not str(got).strip():
            here.deviates("wrong-error", check, f"{place}: refused by {type(got).__name__} without a word")
        elif self.words and not any(word in str(got) for word in self.words):
            here.deviates("wrong-error", check, f"{place}: refused in words that name none of {self.words}: {got}", self.words, str(got))

    def for_script(self, rank: int) -> Any:
        return self.errors[0] if len(self.errors) == 1 and not self.words else (type, *self.errors, *self.words)


@dataclass(frozen=True)
class AtMost(Due):
    """A number of at most ``most``."""

    most: int

    def compare(self, here: RankContext, check: str, got: Any, place: str) -> None:
        here.require(got <= self.most, "wrong-value", check, f"{place} is {got}, must be at most {self.most}", f"at most {self.most}", got)

    def for_script(self, rank: int) -> Any:
        return range(self.most + 1)


@dataclass(frozen=True)
class Alike(Due):
    """A plain tensor that is bitwise equal on all ranks of ``mesh``."""

    mesh: Mesh

    def compare(self, here: RankContext, check: str, got: Any, place: str) -> None:
        if here.coord(self.mesh) is not None:
            here.same_on_all_ranks(got, self.mesh, check)

    def for_script(self, rank: int) -> Any:
        return {"alike on": sorted(self.mesh.ranks)}


@dataclass(frozen=True)
class Of(Due):
    """A plain value whose mismatch counts as ``kind`` instead of ``wrong-value``, with ``message`` where one is given."""

    value: Any
    kind: Kind = "wrong-metadata"
    message: str = ""

    def compare(self, here: RankContext, check: str, got: Any, place: str) -> None:
        message = self.message or f"{place} is {got!r:.200}, must be {self.value!r:.200}"
        here.require(plain_equal(got, self.value), self.kind, check, message, self.value, got)

    def for_script(self, rank: int) -> Any:
        return self.value


@dataclass(frozen=True)
class Either(Due):
    """Any of several due values. Where none fits, the deviations from the first are recorded."""

    dues: tuple[Any, ...]

    def compare(self, here: RankContext, check: str, got: Any, place: str) -> None:
        if not any(here.would_pass(partial(compare, here, check, got, due, place)) for due in self.dues):
            compare(here, check, got, self.dues[0], place)

    def for_script(self, rank: int) -> Any:
        return {"either": [for_script(due, rank) for due in self.dues]}


def as_metadata(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values by key, each as one whose mismatch is ``wrong-metadata``."""
    return {key: Of(value) for key, value in values.items()}


def compare(here: RankContext, check: str, got: Any, want: Any, place: str = "") -> None:
    """Compare a value that an act returned with what is due, recursively; record each deviation on ``here``."""
    place = place or check
    if want is ...:
        return
    if isinstance(got, BaseException) and not isinstance(want, (Refused, Either)):
        here.require(False, "raised", check, f"{place}: raised {type(got).__name__}: {got}")
    elif isinstance(want, Due):
        want.compare(here, check, got, place)
    elif isinstance(want, torch.Tensor):
        if _require_plain_tensor(here, got, check, place):
            here.same(got, want, check, what=place)
    elif isinstance(want, Mapping):
        same = isinstance(got, Mapping) and got.keys() == want.keys()
        keys = [*got] if isinstance(got, Mapping) else type(got).__name__
        if here.require(same, "wrong-metadata", check, f"{place} has other keys than it must", [*want], keys):
            for key, value in want.items():
                compare(here, check, got[key], value, f"{place}.{key}")
    elif isinstance(want, list | tuple) and not isinstance(want, torch.Size) and any(map(_has_parts, want)):
        count = len(got) if isinstance(got, list | tuple) else type(got).__name__
        message = f"{place} has {count} parts, must have {len(want)}"
        if here.require(count == len(want), "wrong-metadata", check, message, len(want), count):
            for at, value in enumerate(want):
                compare(here, check, got[at], value, f"{place}[{at}]")
    else:
        here.require(plain_equal(got, want), "wrong-value", check, f"{place} is {got!r:.200}, must be {want!r:.200}", want, got)


def _require_plain_tensor(here: RankContext, got: Any, check: str, place: str) -> bool:
    plain = isinstance(got, torch.Tensor) and not isinstance(got, DTensor)
    return here.require(
        plain, "wrong-value" if got is None else "wrong-metadata", check, f"{place} is a {type(got).__name__}, must be a plain tensor"
    )


def _has_parts(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_parts, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_has_parts, value))
    return value is ... or isinstance(value, (Due, torch.Tensor))


def plain_equal(got: Any, want: Any) -> bool:
    """Whether two plain values are equal. NaN equals NaN, and a list equals a tuple of equal items."""
    if isinstance(want, list | tuple) and isinstance(got, list | tuple):
        return len(got) == len(want) and all(map(plain_equal, got, want))
    if want is None:
        return got is None
    return bool(got == want or (got != got and want != want))


def for_script(want: Any, rank: int) -> Any:
    """A due value as one that has a literal, for this rank."""
    if isinstance(want, Due):
        return want.for_script(rank)
    if isinstance(want, Mapping):
        return {key: for_script(value, rank) for key, value in want.items()}
    if isinstance(want, list | tuple) and not isinstance(want, torch.Size):
        return type(want)(for_script(value, rank) for value in want)
    return want


def is_exact(want: Any) -> bool:
    """Whether every value in ``want`` must be met exactly, without tolerance."""
    if isinstance(want, Mapping):
        return all(map(is_exact, want.values()))
    if isinstance(want, list | tuple):
        return all(map(is_exact, want))
    return not isinstance(want, Near) and getattr(want, "exact", True) is True
