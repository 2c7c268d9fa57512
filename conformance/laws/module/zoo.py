"""What a case of the module chapter names: a model of the zoo, the mesh that it is sharded on, what goes into it and
what comes back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.features.layout_features import placement_features
from shardlaw.conformance.law.fields import DIM_NAMES as NAMES
from shardlaw.conformance.law.fields import MeshField, ScriptArgument, mesh_line
from shardlaw.conformance.law.law import Limits
from shardlaw.conformance.laws.module.arguments import ByRank, Call, FromCase, on
from shardlaw.conformance.laws.module.plans import PLANS, Plan
from shardlaw.conformance.laws.shared import draws
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.notation import NotationError
from shardlaw.strategies.meshes import palette_meshes
from shardlaw.strategies.modules import ZOO, build_model, module_sizes

if TYPE_CHECKING:
    from shardlaw.conformance.rank.context import RankContext

NEEDS = ("all_gather", "all_reduce", "broadcast", "reduce_scatter", "scatter")
# lengths of a sequence, 0 for as many steps as there are ranks
LENGTHS = {"norm": (0, 0, 4, 5), "tied": (3, 0, 5, 7), "attention": (3, 4, 5, 1), "transformer": (3, 0, 5, 7)}
MESHES = (*("2",) * 6, *("3",) * 5, "4", *("2x2",) * 2)
Pairs = list[tuple[torch.Tensor, torch.Tensor]]


# Plain torch, for acts


def there_and_back(model: Any, x: torch.Tensor, grad: torch.Tensor) -> Any:
    """Go through a model with this rank's part of an input, and back with its part of the gradient that arrives at the
    output."""
    out = model(x.requires_grad_(x.is_floating_point()))
    if isinstance(out, DTensor):
        grad = DTensor.from_local(grad, out.device_mesh, out.placements, shape=out.shape, stride=out.stride())
    out.backward(grad)
    return out


def parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """The parameters as they are now, by all their names."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters(remove_duplicate=False)}


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """The gradients of the parameters, by all their names, with pending sums done."""
    named = {name: parameter.grad for name, parameter in model.named_parameters(remove_duplicate=False)}
    for name, grad in named.items():
        if isinstance(grad, DTensor):
            at = [Replicate() if one.is_partial() else one for one in grad.placements]
            named[name] = grad.redistribute(placements=at)
    return named


# What cases say


def kind_of(case: Case) -> str:
    """The model of a case: its field ``model``, or the variant of its law. Raises :class:`NotationError`."""
    kind = case.get("model", case.law.partition("[")[2].removesuffix("]"))
    if kind not in ZOO:
        raise NotationError(f"{kind!r} is no model: want one of {', '.join(ZOO)}")
    return kind


def model_of(case: Case) -> Call:
    """A model of the zoo by the fields ``model``, ``dims``, ``bias``, ``norm`` and ``seed``."""
    options = {"norm": case.get("norm")} if "norm" in case else {}
    return Call(build_model, (ZOO[kind_of(case)].build, case.shape("dims"), "bias" not in case, case.seed), options)


def plan_of(case: Case) -> Plan:
    """The plan that the field ``way`` names, of the model of the case."""
    plans = PLANS[kind_of(case)]
    if case.get("way") not in plans:
        raise NotationError(f"way={case.get('way')}: want one of {', '.join(plans)}")
    return plans[case.get("way")]


@dataclass(frozen=True)
class Sharded:
    """The mesh that a model is sharded on: a mesh of one dim, or the slice of a larger one on which a rank sits."""

    mesh: Mesh
    part: str = ""

    def at(self, rank: int) -> Mesh:
        """The 1-D mesh on which a rank has its part of the model."""
        coord = self.mesh.coord(rank)
        return self.mesh.slice((NAMES.index(self.part),), coord) if self.part and coord else self.mesh


def sharded_on(case: Case) -> Sharded:
    return Sharded(case.mesh(), case.get("slice", ""))


class ModelMeshField(MeshField):
    """A mesh of one dim, or the slice of a mesh with named dims that the field ``slice`` names."""

    def fields(self, name: str) -> tuple[str, ...]:
        return name, "slice"

    def read(self, case: Case, name: str) -> Any:
        return sharded_on(case)

    def build(self, value: Any, here: RankContext) -> DeviceMesh:
        return (
            here.mesh(value.mesh, names=NAMES[: value.mesh.ndim])[value.part] if value.part else here.mesh(value.mesh)
        )

    def due(self, value: Any, rank: int, world: int) -> Any:
        return value.at(rank)

    def to_script(self, value: Any, name: str, world: int) -> ScriptArgument:
        names = NAMES[: value.mesh.ndim] if value.part else None
        return ScriptArgument(
            f"{name}[{value.part!r}]" if value.part else name, (), (mesh_line(value.mesh, name, names),)
        )


def batches_of(case: Case, count: int = 1) -> ByRank:
    """``count`` inputs of ``rows`` rows and ``length`` steps, two where the case says ``again``, each with the
    gradient that arrives at its
    output: a rank's parts as the plan takes and leaves them."""
    kind, plan, sizes, pairs = ZOO[kind_of(case)], plan_of(case), case.shape("dims"), []
    for at in range(2 if "again" in case else count):
        x = kind.make_input(sizes, case.integer("rows"), case.integer("length", 1), case.seed + 3 * at)
        pairs.append((x, kind.make_output_gradient(sizes, x, case.seed + at)))

    def parts(rank: int) -> Pairs:
        mesh = sharded_on(case).at(rank)
        return [(on(mesh, x, plan.entry).local(rank), on(mesh, grad, plan.leave).local(rank)) for x, grad in pairs]

    return ByRank(parts, pairs)


SIZES = ("rows", "length", "again")
Model = Annotated[nn.Module, FromCase(model_of, "model", "dims", "bias", "norm")]
StylePlan = Annotated[dict[str, Any], FromCase(plan_of, "way")]
ModelMesh = Annotated[DeviceMesh, ModelMeshField()]
OneBatch = Annotated[Pairs, FromCase(batches_of, *SIZES)]
TwoBatches = Annotated[Pairs, FromCase(lambda case: batches_of(case, 2), *SIZES)]


def features(case: Case) -> set[str]:
    """What the parameters depart in, by the layouts that the plan gives them."""
    plan, ranks = plan_of(case), sharded_on(case).at(0).size
    found = {"module", f"way:{case.get('way')}"}
    if case.integer("length", ranks) % ranks:
        found.add("uneven-sequence")
    if "slice" in case:
        found |= {"mesh-view", "named-mesh"}
    for name, parameter in model_of(case)().named_parameters():
        at = plan.placement(name)
        if at is not None:
            found |= placement_features(tuple(parameter.shape), str(ranks), str(at)) & {"uneven", "empty-shard"}
    return found


@st.composite
def drawn(
    draw: st.DrawFn, limits: Limits, kind: str, only: Sequence[str], more: dict[str, SearchStrategy[Any]]
) -> Case:
    on = palette_meshes(MESHES, limits.world_size)
    mesh, name = draw(st.sampled_from(on)), draw(st.sampled_from(sorted(only or PLANS[kind])))
    part = draw(st.sampled_from(NAMES[: mesh.ndim])) if mesh.ndim > 1 else None
    plan, ranks = PLANS[kind][name], mesh.shape[NAMES.index(part) if part else 0]
    cut = {getattr(at, "dim", None) for at in (plan.entry, plan.leave)}
    said: dict[str, Any] = {"dims": "x".join(map(str, draw(module_sizes(kind, ranks, even=plan.even))))}
    said["rows"] = ranks * draw(st.sampled_from([1, 2])) if 0 in cut else draw(st.sampled_from([2, 3, 1, 5]))
    if ZOO[kind].sequences:
        said["length"] = (
            ranks * draw(st.sampled_from([1, 2])) if 1 in cut else draw(st.sampled_from(LENGTHS[kind])) or ranks
        )
    said["bias"] = draw(st.sampled_from([None, None, "no"])) if kind not in ("tied", "transformer") else None
    said["norm"] = draw(st.sampled_from(["rms", "layer"])) if kind == "norm" else None
    said |= {key: draw(strategy) for key, strategy in more.items()}
    return Case.of(f"-[{kind}]", mesh=mesh, slice=part, way=name, **said, seed=draw(draws.seeds()))


def cases(limits: Limits, kind: str, only: Sequence[str] = (), **more: SearchStrategy[Any]) -> SearchStrategy[Case]:
    """Cases of a model of the zoo under any of its plans."""
    return drawn(limits, kind, only, more).filter(lambda case: "empty-shard" not in features(case))
