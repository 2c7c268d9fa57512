"""How a program of ops is judged: the same program on plain tensors is right, and every rank compares what it holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate

from conformance import compat
from conformance.calls import of_steps
from conformance.departures import of_layout
from conformance.laws.given import Given
from conformance.program import Program
from reference.layout import Layout
from reference.mesh import Mesh
from reference.placement import parse_placements

if TYPE_CHECKING:
    from conformance.case import Case
    from conformance.here import Here

RULES_KNOWN_FROM = (2, 13)
EXACT_DTYPES = (torch.float32, torch.float64)


class UnwarrantedRefusalError(Exception):
    """An op was refused that is registered for every layout, and nothing documents that it may be."""


def program_of(case: Case) -> Program:
    return Program.parse(case.get("steps"))


def operands(case: Case) -> dict[str, Given]:
    """The tensors that the steps of a case want, each with a seed of its own; plain ones are laid out as replicated."""
    wanted, mesh = program_of(case).names(), case.mesh()
    found = {}
    for at, name in enumerate(name for name, _ in case.fields if name in wanted):
        spec, seed = case.tensor(name), case.seed * 64 + 7 * at + 1
        placements = spec.placements or parse_placements(",".join("R" * mesh.ndim))
        found[name] = Given(spec, spec.build(seed), Layout(spec.shape, mesh, placements), seed)
    return found


def plain_of(given: Mapping[str, Given]) -> dict[str, torch.Tensor]:
    """Dense tensors that a program may change."""
    return {name: x.full.clone(memory_format=torch.preserve_format) for name, x in given.items()}


def is_exact(given: Mapping[str, Given]) -> bool:
    """Whether small integers and their sums stay exact: by the dtypes, and because a share of a value, which an operand may have
    to be split into, is exact where every mesh dim is a power of two."""
    dtypes = {x.spec.torch_dtype for x in given.values()}
    halves = all(size & (size - 1) == 0 for x in given.values() for size in x.layout.mesh.shape)
    return halves and all(dtype in EXACT_DTYPES or not dtype.is_floating_point for dtype in dtypes)


def sharded(x: Given, here: Here) -> torch.Tensor:
    return here.tensor(x.full.clone()) if x.spec.placements is None else x.dtensor(here)


class Setting:
    """The tensors of a case, plain and sharded, and what they were before anything ran."""

    def __init__(self, case: Case, here: Here) -> None:
        self.here = here
        self.program = program_of(case)
        self.writes = "in-place" in of_steps(case.get("steps"))
        self.mesh = case.mesh()
        here.mesh(self.mesh)
        self.given = operands(case)
        self.plain = plain_of(self.given)
        self.sharded = {name: sharded(x, here) for name, x in self.given.items()}
        self.locals = {name: local_of(tensor).clone() for name, tensor in self.sharded.items()}

    def place(self, tensor: Any, placements: str) -> Any:
        """What the step ``redistribute`` does to a sharded tensor; the new layout's departures are the case's."""
        for feature in of_layout(tuple(tensor.shape), str(self.mesh), placements):
            self.here.reached(feature)
        return tensor.redistribute(placements=self.here.placements(parse_placements(placements)))

    def run_plain(self) -> list[Any]:
        with noting_overloads(self.here):
            return self.program.run(self.plain)

    def run_sharded(self) -> list[Any]:
        return self.program.run(self.sharded, self.place)


def check_program(
    case: Case, here: Here, *, exact: bool, unrefused: Callable[[Setting], bool] | None = None, every_step: bool = False
) -> None:
    """Run the steps of ``case`` plain and sharded, and judge the result (with ``every_step`` all of them) and the operands.

    ``exact``: results must agree to the bit, dtypes allowing. ``unrefused`` tells when a refusal is a deviation. What the plain run
    refuses, the sharded run must refuse too.
    """
    with plans_of_its_own() if every_step or "tensor(" in case.get("steps") else nullcontext():
        _check_program(Setting(case, here), exact, unrefused, every_step)


@contextmanager
def plans_of_its_own() -> Iterator[None]:
    """What torch remembers of how ops are sharded neither comes into the case nor outlives it: a plan for a number is known to be
    taken for a 0-d tensor, and the other way round."""
    _forget_plans()()
    try:
        yield
    finally:
        _forget_plans()()


@cache
def _forget_plans() -> Callable[[], object]:
    try:
        forget: Callable[[], object] = compat.name("op_plans")
    except compat.TorchMovedError:
        return lambda: None
    return forget


def _check_program(setting: Setting, exact: bool, unrefused: Callable[[Setting], bool] | None, every_step: bool) -> None:
    here = setting.here
    failure: Exception | None = None
    want: list[Any] = []
    try:
        want = setting.run_plain()
    except Exception as error:
        failure = error
    try:
        got = setting.run_sharded()
    except Exception as error:
        if failure is not None:
            return
        if unrefused is not None and unrefused(setting) and not is_without_rule(error):
            raise UnwarrantedRefusalError(f"{type(error).__name__}: {error}") from error
        raise
    if failure is not None:
        message = f"the plain op is refused ({type(failure).__name__}: {str(failure).splitlines()[0]}), the sharded one is accepted"
        here.deviates("wrong-error", "parity", message, "an error", str(got[-1]))
        return
    sharp = exact and is_exact(setting.given)
    for at in range(len(want)) if every_step else [len(want) - 1]:
        judge_value(here, got[at], want[at], f"step{at + 1}" if every_step else "result", mesh=setting.mesh, exact=sharp)
    for name in setting.given:
        judge_operand(setting, name, sharp)


def judge_operand(setting: Setting, name: str, exact: bool) -> None:
    """What the plain run changed in place must hold the new value under its old placements; the rest must be untouched."""
    here, x = setting.here, setting.given[name]
    now, tensor, check = setting.plain[name], setting.sharded[name], f"operand.{name}"
    # what is written may be what was there; the contributions to it are others then
    if not changed(x, now) and not (setting.writes and x.layout.has_partial()):
        local, before = local_of(tensor), setting.locals[name]
        same = local.shape == before.shape and torch.equal(local, before)
        here.require(same, "wrong-value", check, f"operand {name} must not change", before, local)
    elif x.spec.placements is None:
        here.same(tensor, now, check, exact=exact, what=f"operand {name}")
    elif here.coord(setting.mesh) is not None:
        kept = x.layout.placements if now.shape == x.full.shape else None
        here.same_dtensor(tensor, now, check, exact=exact, mesh=setting.mesh, placements=kept)


def changed(x: Given, now: torch.Tensor) -> bool:
    """Whether a program has changed the dense tensor that it was given."""
    return now.shape != x.full.shape or now.dtype != x.full.dtype or not torch.equal(now, x.full)


def judge_value(here: Here, got: Any, want: Any, check: str, *, mesh: Mesh, exact: bool) -> None:
    """Judge one result, or each part of a result that has several."""
    theirs, ours = list(leaves(got)), list(leaves(want))
    if not here.require(len(theirs) == len(ours), "wrong-metadata", check, f"{len(theirs)} results, must be {len(ours)}"):
        return
    member = here.coord(mesh) is not None
    for at, (found, due) in enumerate(zip(theirs, ours, strict=True)):
        name = check if len(ours) == 1 else f"{check}[{at}]"
        if isinstance(due, torch.Tensor) and member:
            here.same_dtensor(settled(found, here), due, name, exact=exact, mesh=mesh)
        elif isinstance(due, torch.Tensor):
            judge_outsider(here, found, due, name)
        elif member:
            alike = type(found) is type(due) and same_number(found, due, exact)
            here.require(alike, "wrong-value", name, f"is {found!r}, must be {due!r}", due, found)


def judge_outsider(here: Here, found: Any, due: torch.Tensor, check: str) -> None:
    """A rank outside the mesh knows the global shape and dtype of a result, and no more."""
    if here.require(isinstance(found, DTensor), "wrong-metadata", check, f"result is a {type(found).__name__}, must be a DTensor"):
        claimed = (tuple(found.shape), found.dtype)
        seen = claimed == (tuple(due.shape), due.dtype)
        here.require(seen, "wrong-metadata", check, "a rank outside the mesh sees another shape or dtype", due.shape, claimed)


def settled(tensor: Any, here: Here) -> Any:
    """A tensor whose pending reductions are plain ones: those with a transform of their own (norms, masked lookups) are done by
    the target, since only it knows what the contributions mean."""
    if not isinstance(tensor, DTensor) or not any(map(derived, tensor.placements)):
        return tensor
    here.reached("derived")
    return tensor.redistribute(placements=[Replicate() if derived(placement) else placement for placement in tensor.placements])


def derived(placement: object) -> bool:
    """Whether a placement is a pending reduction with a transform of its own."""
    return isinstance(placement, Partial) and type(placement) is not Partial


def same_number(found: Any, due: Any, exact: bool) -> bool:
    """Whether two Python results agree."""
    if isinstance(due, float) and not exact:
        return abs(found - due) <= 1e-4 * max(1.0, abs(due)) or (math.isnan(found) and math.isnan(due))
    return bool(found == due)


def leaves(value: Any) -> Iterator[Any]:
    """The parts of a result, tuples and lists unpacked."""
    if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        for item in value:
            yield from leaves(item)
    else:
        yield value


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(tensor, DTensor):
        return tensor
    with torch.no_grad():  # no node for a graph that nobody wants
        return tensor.to_local()


def is_without_rule(error: Exception) -> bool:
    """Whether an older torch says that it has no rule for an op: which ops are never refused is known of newer ones."""
    return "not have a sharding strategy registered" in str(error) and compat.torch_release() < RULES_KNOWN_FROM


def registered_everywhere(setting: Setting) -> bool:
    """Whether nothing about the tensors is out of the way: they have elements, lie in one piece and are not strided."""
    return all(0 not in x.spec.shape and not x.layout.is_strided() and x.spec.memory == "plain" for x in setting.given.values())


def without_pending(setting: Setting) -> bool:
    """As :func:`registered_everywhere`, no reduction is pending, no shard is empty, and no dim of size 1 may pass for broadcasting."""
    aside = any(x.layout.has_partial() or x.layout.empty_coords() or 1 in x.spec.shape for x in setting.given.values())
    return registered_everywhere(setting) and not aside


def noting_overloads(here: Here) -> AbstractContextManager[Any]:
    """Counts, as features, the aten overloads that the plain run calls; on one rank, which is enough."""
    return _noting()(here) if here.rank == 0 else nullcontext()


@cache
def _noting() -> Any:
    mode = compat.name("TorchDispatchMode")

    class Noting(mode):  # type: ignore[misc,valid-type]
        def __init__(self, here: Here) -> None:
            super().__init__()
            self.here = here

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.here.reached(f"op:{func}")
            return func(*args, **(kwargs or {}))

    return Noting
