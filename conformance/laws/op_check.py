"""How a program of ops is judged: the same program on plain tensors is right, and every rank compares what it holds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate

from conformance import compat
from conformance.program import Program
from reference.layout import Layout
from reference.mesh import Mesh
from reference.placement import Placements, parse_placements
from reference.tensors import TensorSpec, lay_out

if TYPE_CHECKING:
    from conformance.case import Case
    from conformance.here import Here

EXACT_DTYPES = (torch.float32, torch.float64)


class UnwarrantedRefusal(Exception):
    """An op was refused though every tensor is replicated or evenly sharded, and nothing documents that it may be."""


class Setting:
    """The tensors of a case, plain and sharded, and what they were before anything ran."""

    def __init__(self, case: Case, here: Here) -> None:
        self.here = here
        self.program = Program.parse(case.get("steps"))
        self.mesh = case.mesh()
        wanted = self.program.names()
        names = [name for name, _ in case.fields if name in wanted]
        self.specs = {name: case.tensor(name) for name in names}
        self.seeds = {name: seed_of(case.seed, at) for at, name in enumerate(names)}
        live = here.mesh(self.mesh)
        self.plain = {name: spec.build(self.seeds[name]) for name, spec in self.specs.items()}
        self.sharded = {name: self._sharded(name, spec) for name, spec in self.specs.items()}
        self.live = live
        self.before = {name: tensor.clone() for name, tensor in self.plain.items()}
        self.locals = {name: local_of(tensor).clone() for name, tensor in self.sharded.items()}

    def _sharded(self, name: str, spec: TensorSpec) -> torch.Tensor:
        full = self.plain[name]
        if spec.placements is None:
            return self.here.tensor(full.clone())
        layout = Layout(spec.shape, self.mesh, spec.placements)
        if spec.memory == "plain":
            return self.here.dtensor(full, layout, seed=self.seeds[name])
        local = lay_out(self.here.local(full, layout, self.seeds[name]), spec.memory)
        placements = self.here.placements(layout.placements)
        return DTensor.from_local(local, self.here.mesh(self.mesh), placements, run_check=False, shape=full.shape, stride=full.stride())

    def place(self, tensor: Any, placements: str) -> Any:
        """What the step ``redistribute`` does to a sharded tensor."""
        return tensor.redistribute(placements=self.here.placements(parse_placements(placements)))


def seed_of(seed: int, at: int) -> int:
    """The seed of the ``at``-th tensor of a case."""
    return seed * 64 + 7 * at + 1


def check_program(case: Case, here: Here, *, exact: bool, unrefused: bool = False, every_step: bool = False) -> None:
    """Run the steps of ``case`` plain and sharded, and judge the result (with ``every_step`` all of them) and the operands.

    ``exact``: results must agree to the bit, dtypes allowing. ``unrefused``: a refusal is a deviation. What the plain run refuses, the
    sharded run must refuse too.
    """
    setting = Setting(case, here)
    failure: Exception | None = None
    want: list[Any] = []
    try:
        with noting_overloads(here):
            want = setting.program.run(setting.plain)
    except Exception as error:
        failure = error
    try:
        got = setting.program.run(setting.sharded, setting.place)
    except Exception as error:
        if failure is None:
            if unrefused:
                raise UnwarrantedRefusal(f"refused with every tensor replicated or evenly sharded: {type(error).__name__}: {error}") from error
            raise
        return
    if failure is not None:
        message = f"the plain op is refused ({type(failure).__name__}: {str(failure).splitlines()[0]}), the sharded one is accepted"
        here.deviates("wrong-error", "parity", message, "an error", str(got[-1]))
        return
    sharp = exact and all(spec.torch_dtype in EXACT_DTYPES or not spec.torch_dtype.is_floating_point for spec in setting.specs.values())
    steps = range(len(want)) if every_step else [len(want) - 1]
    for at in steps:
        judge_value(here, got[at], want[at], f"step{at + 1}" if every_step else "result", setting.mesh, sharp)
    judge_operands(setting, sharp)


def judge_operands(setting: Setting, exact: bool) -> None:
    """What the plain run changed in place must hold the new value under its old placements; the rest must be untouched."""
    here = setting.here
    for name, spec in setting.specs.items():
        now, before = setting.plain[name], setting.before[name]
        tensor = setting.sharded[name]
        if tuple(now.shape) == tuple(before.shape) and now.dtype == before.dtype and torch.equal(now, before):
            local = local_of(tensor)
            same = local.shape == setting.locals[name].shape and torch.equal(local, setting.locals[name])
            here.require(same, "wrong-value", f"operand.{name}", f"operand {name} must not change", setting.locals[name], local)
        elif spec.placements is None:
            here.same(tensor, now, f"operand.{name}", exact=exact, what=f"operand {name}")
        elif here.coord(setting.mesh) is not None:
            kept = spec.placements if tuple(now.shape) == tuple(before.shape) else None
            here.same_dtensor(tensor, now, f"operand.{name}", exact=exact, mesh=setting.mesh, placements=kept)


def judge_value(here: Here, got: Any, want: Any, check: str, mesh: Mesh, exact: bool) -> None:
    """Judge one result, or each part of a result that has several."""
    theirs, ours = list(leaves(got)), list(leaves(want))
    if not here.require(len(theirs) == len(ours), "wrong-metadata", check, f"{len(theirs)} results, must be {len(ours)}", len(ours), len(theirs)):
        return
    member = here.coord(mesh) is not None
    for at, (found, due) in enumerate(zip(theirs, ours, strict=True)):
        name = check if len(ours) == 1 else f"{check}[{at}]"
        if not isinstance(due, torch.Tensor):
            if member:
                here.require(type(found) is type(due) and alike(found, due, exact), "wrong-value", name, f"is {found!r}, must be {due!r}", due, found)
        elif not member:
            judge_outsider(here, found, due, name)
        else:
            here.same_dtensor(settled(found), due, name, exact=exact, mesh=mesh)


def judge_outsider(here: Here, found: Any, due: torch.Tensor, check: str) -> None:
    """A rank outside the mesh knows the global shape and dtype of a result, and no more."""
    if here.require(isinstance(found, DTensor), "wrong-metadata", check, f"result is a {type(found).__name__}, must be a DTensor"):
        claimed = (tuple(found.shape), found.dtype)
        here.require(claimed == (tuple(due.shape), due.dtype), "wrong-metadata", check, "a rank outside the mesh sees another shape or dtype",
                     (tuple(due.shape), due.dtype), claimed)  # fmt: skip


def settled(tensor: Any) -> Any:
    """A tensor whose pending reductions are plain ones: those with a transform of their own (norms, masked lookups) are done by
    the target, since only it knows what the contributions mean."""
    if not isinstance(tensor, DTensor) or not any(derived(placement) for placement in tensor.placements):
        return tensor
    return tensor.redistribute(placements=[Replicate() if derived(placement) else placement for placement in tensor.placements])


def derived(placement: object) -> bool:
    """Whether a placement is a pending reduction with a transform of its own."""
    return isinstance(placement, Partial) and type(placement) is not Partial


def alike(found: Any, due: Any, exact: bool) -> bool:
    """Whether two Python results agree."""
    if isinstance(due, float) and not exact:
        return bool(abs(found - due) <= 1e-4 * max(1.0, abs(due))) or found != found and due != due
    return bool(found == due)


def leaves(value: Any) -> Iterator[Any]:
    """The parts of a result, tuples and lists unpacked."""
    if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        for item in value:
            yield from leaves(item)
    else:
        yield value


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def noting_overloads(here: Here) -> Any:
    """Counts, as features, the aten overloads that the plain run calls; on one rank, which is enough."""
    return _noting()(here) if here.rank == 0 else nullcontext()


@cache
def _noting() -> type:
    mode = compat.name("TorchDispatchMode")

    class Noting(mode):  # type: ignore[misc,valid-type]
        def __init__(self, here: Here) -> None:
            super().__init__()
            self.here = here

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.here.reached(f"op:{func}")
            return func(*args, **(kwargs or {}))

    return Noting


def evenly(specs: Sequence[TensorSpec], mesh: Mesh) -> bool:
    """Whether every tensor is replicated or evenly sharded on a plain 1-D mesh."""
    return mesh.ndim == 1 and all(spec.placements is not None and _even(spec, mesh, spec.placements) for spec in specs)


def _even(spec: TensorSpec, mesh: Mesh, placements: Placements) -> bool:
    layout = Layout(spec.shape, mesh, placements)
    return not layout.has_partial() and not layout.is_strided() and layout.is_even() and 0 not in spec.shape
