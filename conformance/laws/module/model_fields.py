"""Fields of cases about models: a model of the zoo, the mesh on which it is sharded, its inputs, and the gradients of
its outputs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Claimed
from shardlaw.conformance.law.features.layout_features import placement_features
from shardlaw.conformance.law.fields import DIM_NAMES as NAMES
from shardlaw.conformance.law.fields import MeshField, ScriptArgument, mesh_line
from shardlaw.conformance.law.law import Limits
from shardlaw.conformance.laws.module.arguments import ByRank, FromCase, ModuleCall, dtensor
from shardlaw.conformance.laws.module.plans import PLANS, Plan
from shardlaw.conformance.laws.shared import draws
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.notation import NotationError
from shardlaw.strategies.meshes import palette_meshes
from shardlaw.strategies.modules import ZOO, build_model, module_sizes

if TYPE_CHECKING:
    from shardlaw.conformance.rank.context import RankContext

NEEDS = ("all_gather", "all_reduce", "broadcast", "reduce_scatter", "scatter")
# lengths of a sequence to draw from; 0: the number of ranks
LENGTHS = {"norm": (0, 0, 4, 5), "tied": (3, 0, 5, 7), "attention": (3, 4, 5, 1), "transformer": (3, 0, 5, 7)}
MESHES = (*("2",) * 6, *("3",) * 5, "4", *("2x2",) * 2)
Pairs = list[tuple[torch.Tensor, torch.Tensor]]


# Plain torch, for acts


def forward_backward(model: Any, x: torch.Tensor, grad: torch.Tensor) -> Any:
    """Run a model forward on this rank's part of an input, and backward from its part of the output's gradient. Returns
    the output."""
    out = model(x.requires_grad_(x.is_floating_point()))
    if isinstance(out, DTensor):
        grad = DTensor.from_local(grad, out.device_mesh, out.placements, shape=out.shape, stride=out.stride())
    out.backward(grad)
    return out


def copied_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the parameters under all their names."""
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters(remove_duplicate=False)}


def reduced_gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """The gradients of the parameters under all their names; pending sums are reduced."""
    named = {name: parameter.grad for name, parameter in model.named_parameters(remove_duplicate=False)}
    for name, grad in named.items():
        if isinstance(grad, DTensor):
            placements = [Replicate() if placement.is_partial() else placement for placement in grad.placements]
            named[name] = grad.redistribute(placements=placements)
    return named


def take_step(model: Any, optim: torch.optim.Optimizer) -> dict[str, Any]:
    """Step the optimizer and drop the gradients. Returns the reduced gradients and the updated parameters."""
    grads = reduced_gradients(model)
    optim.step()
    optim.zero_grad()
    return {"gradients": grads, "parameters": copied_parameters(model)}


# What is due


def sgd(model: nn.Module, gradients: dict[str, Any]) -> None:
    """A step of plain gradient descent with these gradients."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if gradients[name] is not None:  # frozen
                parameter -= 0.5 * gradients[name]  # type: ignore[misc]


def claimed(
    tensors: Mapping[str, torch.Tensor | None], mesh: Mesh, rounding: torch.dtype | None = None
) -> dict[str, Any]:
    """Due tensors by name, under whatever placements they claim; ``None`` stays ``None``."""
    return {
        name: None if full is None else Claimed(full, mesh, exact=False, rounding=rounding)
        for name, full in tensors.items()
    }


def mean_backward(model: Any, pairs: Pairs, divisor: float = 0) -> list[torch.Tensor]:
    """Run a dense model forward and backward on the inputs of all ranks. Its gradients are the mean over the ranks, or
    the sum divided by ``divisor``. Returns the outputs by rank."""
    dtype = next(model.parameters()).dtype
    outputs: list[torch.Tensor] = [model(x.to(dtype) if x.is_floating_point() else x) for x, _ in pairs]
    for output, (_, grad) in zip(outputs, pairs, strict=True):
        output.backward((grad / (divisor or len(pairs))).to(output.dtype))
    return outputs


# Fields


def uneven(extents: Iterable[int], ranks: int) -> set[str]:
    """The feature ``uneven`` if one of the extents does not divide by the number of ranks."""
    return {"uneven"} if any(extent % ranks for extent in extents) else set()


def model_name(case: Case) -> str:
    """The name of a case's model: its field ``model``, or else the variant of its law. Raises
    :class:`NotationError`."""
    kind = case.get("model", case.law.partition("[")[2].removesuffix("]"))
    if kind not in ZOO:
        raise NotationError(f"{kind!r} is no model: want one of {', '.join(ZOO)}")
    return kind


def read_model(case: Case) -> ModuleCall:
    """The model of a case, by its fields ``model``, ``dims``, ``bias``, ``norm`` and ``seed``."""
    options = {"norm": case.get("norm")} if "norm" in case else {}
    return ModuleCall(
        build_model, (ZOO[model_name(case)].build, case.shape("dims"), "bias" not in case, case.seed), options
    )


def read_plan(case: Case) -> Plan:
    """The plan of the field ``way`` for the case's model. Raises :class:`NotationError`."""
    plans = PLANS[model_name(case)]
    if case.get("way") not in plans:
        raise NotationError(f"way={case.get('way')}: want one of {', '.join(plans)}")
    return plans[case.get("way")]


@dataclass(frozen=True)
class ModelMeshSlice:
    """The mesh on which a model is sharded: ``mesh`` itself, or its slice along the dim named ``dim`` that contains the
    rank."""

    mesh: Mesh
    dim: str = ""

    def on_rank(self, rank: int) -> Mesh:
        """The 1-D mesh on which a rank has its part of the model."""
        coord = self.mesh.coord(rank)
        return self.mesh.slice((NAMES.index(self.dim),), coord) if self.dim and coord else self.mesh


def read_model_mesh(case: Case) -> ModelMeshSlice:
    return ModelMeshSlice(case.mesh(), case.get("slice", ""))


class ModelMeshField(MeshField):
    """A 1-D mesh, or the slice of a mesh with named dims along the dim of the field ``slice``."""

    def fields(self, name: str) -> tuple[str, ...]:
        return name, "slice"

    def read(self, case: Case, name: str) -> Any:
        return read_model_mesh(case)

    def build(self, value: Any, here: RankContext) -> DeviceMesh:
        return here.mesh(value.mesh, names=NAMES[: value.mesh.ndim])[value.dim] if value.dim else here.mesh(value.mesh)

    def due(self, value: Any, rank: int, world: int) -> Any:
        return value.on_rank(rank)

    def to_script(self, value: Any, name: str, world: int) -> ScriptArgument:
        names = NAMES[: value.mesh.ndim] if value.dim else None
        return ScriptArgument(
            f"{name}[{value.dim!r}]" if value.dim else name, (), (mesh_line(value.mesh, name, names),)
        )


def read_batches(case: Case, count: int = 1) -> ByRank:
    """``count`` inputs of ``rows`` rows and ``length`` steps, or two if the case has ``again``, each with the gradient
    of its output. Each rank has its parts, as the plan's ``entry`` and ``leave`` shard them."""
    kind, plan, sizes, pairs = ZOO[model_name(case)], read_plan(case), case.shape("dims"), []
    for number in range(2 if "again" in case else count):
        x = kind.make_input(sizes, case.integer("rows"), case.integer("length", 1), case.seed + 3 * number)
        pairs.append((x, kind.make_output_gradient(sizes, x, case.seed + number)))

    def local_pairs(rank: int) -> Pairs:
        mesh = read_model_mesh(case).on_rank(rank)
        return [
            (dtensor(mesh, x, plan.entry).local(rank), dtensor(mesh, grad, plan.leave).local(rank)) for x, grad in pairs
        ]

    return ByRank(local_pairs, pairs)


SIZES = ("rows", "length", "again")
Model = Annotated[nn.Module, FromCase(read_model, "model", "dims", "bias", "norm")]
StylePlan = Annotated[dict[str, Any], FromCase(read_plan, "way")]
ModelMesh = Annotated[DeviceMesh, ModelMeshField()]
OneBatch = Annotated[Pairs, FromCase(read_batches, *SIZES)]
TwoBatches = Annotated[Pairs, FromCase(lambda case: read_batches(case, 2), *SIZES)]


def features(case: Case) -> set[str]:
    """The features of a parallel model: its plan, its mesh, and how the plan lays out its parameters."""
    plan, ranks = read_plan(case), read_model_mesh(case).on_rank(0).size
    found = {"module", f"way:{case.get('way')}"}
    if case.integer("length", ranks) % ranks:
        found.add("uneven-sequence")
    if "slice" in case:
        found |= {"mesh-view", "named-mesh"}
    for name, parameter in read_model(case)().named_parameters():
        placement = plan.placement(name)
        if placement is not None:
            found |= placement_features(tuple(parameter.shape), str(ranks), str(placement)) & {"uneven", "empty-shard"}
    return found


@st.composite
def model_cases(
    draw: st.DrawFn, limits: Limits, kind: str, plans: Sequence[str], strategies: dict[str, SearchStrategy[Any]]
) -> Case:
    meshes = palette_meshes(MESHES, limits.world_size)
    mesh, way = draw(st.sampled_from(meshes)), draw(st.sampled_from(sorted(plans or PLANS[kind])))
    dim = draw(st.sampled_from(NAMES[: mesh.ndim])) if mesh.ndim > 1 else None
    plan, ranks = PLANS[kind][way], mesh.shape[NAMES.index(dim) if dim else 0]
    sharded_dims = {getattr(at, "dim", None) for at in (plan.entry, plan.leave)}
    values: dict[str, Any] = {"dims": "x".join(map(str, draw(module_sizes(kind, ranks, even=plan.even))))}
    values["rows"] = ranks * draw(st.sampled_from([1, 2])) if 0 in sharded_dims else draw(st.sampled_from([2, 3, 1, 5]))
    if ZOO[kind].sequences:
        values["length"] = (
            ranks * draw(st.sampled_from([1, 2]))
            if 1 in sharded_dims
            else draw(st.sampled_from(LENGTHS[kind])) or ranks
        )
    values["bias"] = draw(st.sampled_from([None, None, "no"])) if kind not in ("tied", "transformer") else None
    values["norm"] = draw(st.sampled_from(["rms", "layer"])) if kind == "norm" else None
    values |= {key: draw(strategy) for key, strategy in strategies.items()}
    return Case.of(f"-[{kind}]", mesh=mesh, slice=dim, way=way, **values, seed=draw(draws.seeds()))


def cases(
    limits: Limits, kind: str, plans: Sequence[str] = (), **strategies: SearchStrategy[Any]
) -> SearchStrategy[Case]:
    """Cases of a model of the zoo under one of its plans, or of those named ``plans``; further fields are drawn from
    ``strategies``."""
    return model_cases(limits, kind, plans, strategies).filter(lambda case: "empty-shard" not in features(case))
