"""What a case of the module chapter names: a model, dense and parallelised, what goes into it, and how its tensors are judged."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from conformance.case import Case
from conformance.departures import of_layout
from conformance.here import mesh_once_read, read_placements
from conformance.laws.given import NAMES, viewed
from conformance.laws.module.plans import PLANS, Plan
from reference import simulate
from reference.layout import Layout
from reference.mesh import Mesh
from reference.notation import format_shape
from reference.placement import Partial, Placement, Placements, Replicate
from strategies.modules import ZOO, built, eighths

if TYPE_CHECKING:
    from conformance.here import Here


RECOMPUTED = "_checkpoint_wrapped_module."  # what activation checkpointing puts before the names of what it wraps


@dataclass(frozen=True)
class Modelled:
    """A model of the zoo by the fields of a case: ``dims``, ``rows``, ``length``, ``bias``, ``norm`` and ``way``."""

    case: Case

    @property
    def kind(self) -> str:
        return self.case.law.partition("[")[2].removesuffix("]") or self.case.get("model")

    @property
    def plan(self) -> Plan:
        return PLANS[self.kind][self.case.get("way")]

    @property
    def mesh(self) -> Mesh:
        return self.case.mesh()

    @property
    def along(self) -> int:
        """The mesh dim that the model is sharded along."""
        return NAMES.index(self.case.get("slice", NAMES[0]))

    @property
    def ranks(self) -> int:
        return self.mesh.shape[self.along]

    def model(self) -> nn.Module:
        """The dense model, in eval mode where the case says nothing else."""
        options = {"norm": self.case.get("norm")} if "norm" in self.case else {}
        return built(self.kind, self.case.shape("dims"), "bias" not in self.case, self.case.seed, **options).eval()

    def entry(self, at: int = 0) -> torch.Tensor:
        """The ``at``-th input."""
        sizes, rows, length = self.case.shape("dims"), self.case.integer("rows", 2), self.case.integer("length", 1)
        return ZOO[self.kind].entry(sizes, rows, length, self.case.seed + 3 * at)

    def live(self, here: Here) -> Any:
        """The mesh that the model is sharded on: the whole, or a slice of it."""
        return viewed(self.case, here)[self.case.get("slice")] if "slice" in self.case else here.mesh(self.mesh)

    def parallel(self, dense: nn.Module, here: Here) -> nn.Module:
        """A copy of ``dense``, parallelised as the plan says."""
        copied = copy.deepcopy(dense).to(here.device)
        styles = {name: one.make() for name, one in self.plan.styles.items()}
        model: Any = parallelize_module(copied, self.live(here), styles)
        if self.plan.tied:
            model.out.weight = model.tok.weight
        parallel: nn.Module = model
        return parallel

    def placement(self, name: str) -> Placement | None:
        """Where a parameter lies; ``None`` for a plain one."""
        return next((at for pattern, at in self.plan.placed.items() if fnmatch(name, pattern)), None)

    def part(self, full: torch.Tensor, at: Placement, rank: int) -> torch.Tensor:
        """What a rank gives or gets of a tensor that is laid out as ``at`` along the dim that the model is sharded on."""
        coord = self.mesh.coord(rank)
        assert coord is not None
        line = Mesh((self.ranks,), tuple(range(self.ranks)))
        return simulate.take(full, Layout(tuple(full.shape), line, (at,)), (coord[self.along],))


def incoming(out: torch.Tensor, seed: int) -> torch.Tensor:
    """The gradient that arrives at an output."""
    return eighths(tuple(out.shape), seed + 7)


def features(case: Case) -> set[str]:
    """What the parameters depart in, by the layouts that the plan gives them."""
    given = Modelled(case)
    found = {"module", f"way:{case.get('way')}"}
    if case.integer("length", given.ranks) % given.ranks:
        found.add("uneven-sequence")
    if "slice" in case:
        found |= {"mesh-view", "named-mesh"}
    for name, parameter in given.model().named_parameters():
        at = given.placement(name)
        if at is not None:
            found |= of_layout(tuple(parameter.shape), str(given.ranks), str(at)) & {"uneven", "empty-shard"}
    return found


def near(here: Here, got: Any, want: torch.Tensor, check: str, what: str) -> bool:
    """Compare plain tensors in float32: what float64 rounds away is no finding."""
    if not here.require(isinstance(got, torch.Tensor), "wrong-metadata", check, f"{what} is a {type(got).__name__}"):
        return False
    if not here.require(got.dtype == want.dtype, "wrong-metadata", check, f"{what} has dtype {got.dtype}", want.dtype, got.dtype):
        return False
    return here.same(got.detach().float(), want.detach().float(), check, exact=False, what=what)


def near_dtensor(here: Here, got: Any, want: torch.Tensor, check: str, what: str, placements: Placements | None = None) -> bool:
    """Compare a DTensor with the whole that it must denote, by its own claims; pending sums are reduced."""
    if not here.require(isinstance(got, DTensor), "wrong-metadata", check, f"{what} is a {type(got).__name__}, must be a DTensor"):
        return False
    if not here.require(tuple(got.shape) == tuple(want.shape), "wrong-metadata", check, f"{what} has another global shape",
                        format_shape(tuple(want.shape)), format_shape(tuple(got.shape))):  # fmt: skip
        return False
    claimed, live = read_placements(got.placements), mesh_once_read(got.device_mesh)
    layout = Layout(tuple(want.shape), live, claimed)
    if placements is not None:
        due = Layout(tuple(want.shape), live, placements).placements
        here.require(layout.placements == due, "wrong-metadata", check, f"{what} is placed otherwise", due, layout.placements)
    local = got.detach().to_local()
    if any(isinstance(at, Partial) for at in claimed):
        local, layout = got.detach().full_tensor(), layout.replace((Replicate(),) * live.ndim)
    coord = live.coord(here.rank)
    if coord is None:
        return here.require(local.numel() == 0, "wrong-layout", check, "a rank outside the mesh holds elements", "nothing", local)
    return near(here, local, simulate.take(want.detach(), layout, coord), check, what)


def judge_parameters(here: Here, given: Modelled, model: nn.Module, dense: nn.Module, check: str, *, grads: bool = False) -> None:
    """Parameters (or their gradients) are the dense ones, and lie where the plan puts them."""
    wanted = dict(dense.named_parameters(remove_duplicate=False))
    named = {name.replace(RECOMPUTED, ""): one for name, one in model.named_parameters(remove_duplicate=False)}
    if not here.require(list(named) == list(wanted), "wrong-metadata", check, "parameters have other names", list(wanted), list(named)):
        return
    for name, parameter in named.items():
        at, whole = given.placement(name), wanted[name]
        got, want = (parameter.grad, whole.grad) if grads else (parameter, whole)
        what = f"{'gradient of ' if grads else ''}{name}"
        if grads and not here.require(
            (got is None) == (want is None), "wrong-value", check, f"{what} is missing", want is None, got is None
        ):
            continue
        if want is None:
            continue
        if at is None:
            near(here, got, want, check, what)
        else:
            near_dtensor(here, got, want, check, what, None if grads else (at,))
