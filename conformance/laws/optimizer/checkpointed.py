"""The law of an optimizer's state in a checkpoint, saved from a model sharded one way, loaded into one sharded another.

The fields ``a``, ``b`` and ``c`` of a case are the gradients of the parameters of these names; ``b`` is in an inner
module. ``way`` and ``way.load`` say how the model is sharded: ``line`` (DTensors in rows over all ranks), ``fsdp``
(``fully_shard``), ``fsdp1`` (``FullyShardedDataParallel``) or ``both`` (in rows within pairs of ranks, then
``fully_shard`` over the pairs). After one step of Adam with betas of 0.5, the averages are exactly half of the gradient
and half of its square.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from shardlaw.conformance.law.act import fields, law
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Global, Meaningless, Refused, caught
from shardlaw.conformance.law.fields import Device, Folder, Rank, Word, WorldSize
from shardlaw.conformance.law.law import Limits
from shardlaw.conformance.laws.checkpoint.calls import load, save
from shardlaw.conformance.laws.checkpoint.fields import Reader, Writer
from shardlaw.conformance.laws.checkpoint.models import (
    OTHER_RATES,
    RATES,
    adam,
    averages_and_rates,
    grouped,
    keeps,
    saved_rates,
)
from shardlaw.conformance.laws.optimizer.fields import Gradients, WorldMesh
from shardlaw.conformance.laws.sharded_tensor.act_helpers import describe_if_sharded
from shardlaw.conformance.laws.sharded_tensor.checkpoints import world_fields, world_sizes
from shardlaw.conformance.laws.sharded_tensor.fields import due_rows, features_of_spec
from shardlaw.reference.layout import Layout
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.placement import Shard as ReferenceShard
from shardlaw.reference.placement import StridedShard
from shardlaw.reference.sharded_tensor import ChunkSpec
from shardlaw.reference.tensors import TensorSpec
from shardlaw.strategies import shapes

DOCS = "torch.distributed.checkpoint.state_dict docs"
WAYS = ("line", "fsdp", "line", "fsdp", "fsdp1")
PATHS = {"a": "a", "b": "inner.b", "c": "c"}
Way = Literal["line", "fsdp", "fsdp1", "both"]
Groups = Literal["each", "one", "back"]
Hollow = Literal["first", "last"]


class ProductSum(nn.Module):
    """A module whose output is the sum of its parameters times constants, which are therefore their gradients."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], grads: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.grads = {name: grad for name, grad in grads.items() if name in parameters}
        for name, parameter in parameters.items():
            self.register_parameter(name, parameter)
        self.inner: Any = None

    def forward(self) -> torch.Tensor:
        products = [(getattr(self, name) * grad).sum() for name, grad in self.grads.items()]
        return sum([*products, *([self.inner()] if self.inner is not None else [])], torch.zeros(()))


def sharded_model(
    grads: Mapping[str, torch.Tensor],
    way: Way,
    mesh: DeviceMesh,
    device: torch.device,
    unused: str = "",
    frozen: str = "",
) -> tuple[Any, dict[str, torch.Tensor]]:
    """A model of zeros, sharded in this way, and the gradients of its ``used`` parameters."""
    zeros = {name: torch.zeros_like(grad) for name, grad in grads.items()}
    if way == "both":
        grid = DeviceMesh(mesh.device_type, mesh.mesh.view(-1, 2), mesh_dim_names=("full", "pair"))
        mesh, pair = grid["full"], grid["pair"]
        grads = {name: shard_rows(grad, pair) for name, grad in grads.items()}
        zeros = {name: shard_rows(full, pair) for name, full in zeros.items()}
    if way == "line":
        zeros = {name: shard_rows(full, mesh) for name, full in zeros.items()}
    parameters = {name: nn.Parameter(full, requires_grad=name != frozen) for name, full in zeros.items()}
    used = {name: grad for name, grad in grads.items() if name not in (unused, frozen)}
    model: Any = ProductSum({name: parameter for name, parameter in parameters.items() if name != "b"}, used)
    model.inner = ProductSum({"b": parameters["b"]}, used) if "b" in parameters else None
    if way in ("fsdp", "both"):
        for module in filter(None, (model.inner, model)):
            fully_shard(module, mesh=mesh)
    if way == "fsdp1":
        options: dict[str, Any] = {"device_id": device, "use_orig_params": True}
        if mesh.ndim > 1:
            groups = mesh.get_group("shard"), mesh.get_group("replica")
            options |= {"process_group": groups, "sharding_strategy": ShardingStrategy.HYBRID_SHARD}
        if model.inner is not None:
            model.inner = FullyShardedDataParallel(model.inner, **options)
        model = FullyShardedDataParallel(model, **options)
    return model, used


def shard_rows(full: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    return distribute_tensor(full, mesh, [Shard(0)], src_data_rank=None)


def optimizer_contents(
    model: nn.Module, optimizer: torch.optim.Optimizer, way: Way, names: Iterable[str]
) -> dict[str, Any]:
    """The learning rates of an optimizer, and its state of these parameters."""
    if way == "fsdp1":
        states: Any = get_optimizer_state_dict(model, optimizer)["state"]
    else:
        states = {path: optimizer.state.get(parameter, {}) for path, parameter in model.named_parameters()}
    found = {path: states.get(path, {}) for path in (PATHS[name] for name in names)}
    found = {path: {key: describe_if_sharded(value) for key, value in state.items()} for path, state in found.items()}
    return averages_and_rates(found, optimizer)


def drop_parameter(state: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The state of an optimizer, flat or nested, without the entries of one parameter."""
    if "state" in state:
        return {**state, "state": {name: value for name, value in state["state"].items() if name != path}}
    return {name: value for name, value in state.items() if not name.startswith(f"state.{path}.")}


def due_optimizer_contents(
    grads: Mapping[str, torch.Tensor],
    way: Way,
    rank: int,
    world: int,
    names: Sequence[str],
    rates: Sequence[float],
    first: int = 0,
) -> dict[str, Any]:
    """The due result of :func:`optimizer_contents` after one step, for the parameters but for ``names``, on ``world``
    ranks from ``first`` on."""
    ranks = tuple(range(first, first + world))
    if way == "both" and world % 2:
        raise Meaningless("an odd number of ranks has no pairs")

    def due_sharded(full: torch.Tensor) -> Any:
        if way == "fsdp1":
            return due_rows(full, ranks, rank) if world > 1 else full
        if way == "both":
            pairs = Mesh((world // 2, 2), ranks)
            return Global(full, Layout(tuple(full.shape), pairs, (StridedShard(0, 2), ReferenceShard(0))))
        return Global(full, Layout(tuple(full.shape), Mesh((world,), ranks), (ReferenceShard(0),)))

    due = keeps({PATHS[name]: grad for name, grad in grads.items() if name not in names}, rates)
    averages = {
        path: {key: due_sharded(full) for key, full in state.items()} for path, state in due["averages"].items()
    }
    return {"rates": due["rates"], "steps": due["steps"], "averages": averages}


def features(case: Case) -> set[str]:
    save_ranks, load_ranks = world_sizes(case)
    found = {f"way:{case.get('way')}", f"way:{case.get('way.load', case.get('way'))}", "module"}
    found |= {"fully-sharded"} if {*found} & {"way:fsdp", "way:fsdp1", "way:both"} else set()
    found |= {"reworld"} if save_ranks != load_ranks else set()
    by_field = {"unused": "stateless", "frozen": "frozen", "offload": "offloaded", "hollow": "hollow-group"}
    found |= {feature for name, feature in by_field.items() if name in case}
    found |= {"flat-state"} if case.get("flat", "no") == "yes" else set()
    found |= {"regrouped"} if "back" in (case.get("groups", ""), case.get("groups.load", "")) else set()
    for shape in (case.tensor(name).shape for name in PATHS if name in case):
        for ranks in (tuple(range(save_ranks)), tuple(range(load_ranks))):
            found |= features_of_spec(shape, ChunkSpec(0, ranks), ranks) - {"shardless"}
    return found


def draw_states(limits: Limits) -> SearchStrategy[Case]:
    sizes = [size for size in (2, 2, 3, 4) if size <= limits.world_size]

    @st.composite
    def case(draw: st.DrawFn) -> Case:
        save_ranks, load_ranks = draw(st.sampled_from(sizes)), draw(st.sampled_from(sizes))
        ways = [(*WAYS, "both", "both") if size % 2 == 0 else WAYS for size in (save_ranks, load_ranks)]
        way, way_load = (draw(st.sampled_from(choices)) for choices in ways)
        case_fields: dict[str, Any] = {**world_fields(save_ranks, load_ranks)}
        names = "abc"[: draw(st.sampled_from((2, 3, 1)))]
        for name in names:
            shape = draw(shapes(min_dims=1, max_dims=2, min_size=1))
            case_fields[name] = TensorSpec(shape, None, "float32", "small")
        case_fields |= {"way": way, "way__load": None if way_load == way else way_load}
        case_fields["flat"] = draw(st.sampled_from((None, None, "yes")))
        case_fields["groups"] = draw(st.sampled_from((None, "one", "back")))
        if case_fields["groups"] != "one":
            case_fields["groups__load"] = draw(st.sampled_from((None, None, "back", "each")))
        case_fields["offload"] = draw(st.sampled_from((None, None, None, "yes")))
        oddity = draw(st.integers(0, 5)) if len(names) > 1 and "fsdp1" not in (way, way_load) else 0
        if oddity == 5 and case_fields["flat"] is None:
            case_fields["unused"] = names[-1]
        if oddity == 4:
            case_fields["frozen"] = names[-1]
        if oddity in (2, 3) and case_fields["flat"] is None:
            case_fields["hollow"] = "last"
        return fields(**case_fields, seed=draw(st.integers(0, 9)) or None)

    return case()


BOTH_WAYS = (
    "way=both",
    "way=both flat=yes",
    "way=both way.load=fsdp",
    "way=fsdp way.load=both",
    "way=line way.load=both",
)
STATES = (
    "world=3 world.save=2 world.load=3 a=5x3:-:float32:small b=7:-:float32:small way=fsdp",
    "world=3 world.save=3 world.load=2 a=5x3:-:float32:small b=2:-:float32:small way=fsdp way.load=line flat=yes",
    "world=2 a=4x3:-:float32:small b=6:-:float32:small c=5:-:float32:small way=line way.load=fsdp frozen=c",
    "world=2 a=4x3:-:float32:small b=6:-:float32:small c=5:-:float32:small way=fsdp way.load=line unused=c",
    "world=2 a=5x2:-:float32:small b=3:-:float32:small way=fsdp1 way.load=fsdp",
    "world=3 world.save=2 world.load=3 a=5x2:-:float32:small b=4:-:float32:small way=fsdp way.load=fsdp1",
    "world=2 a=5x2:-:float32:small b=3:-:float32:small way=fsdp1 groups=one offload=yes",
    "world=2 a=4x3:-:float32:small b=6:-:float32:small c=5:-:float32:small way=line groups=back",
    "world=2 a=4x3:-:float32:small b=6:-:float32:small way=fsdp way.load=line groups=each groups.load=back flat=yes",
    "world=2 a=4:-:float32:small b=6:-:float32:small way=fsdp groups=back groups.load=each hollow=last",
    "world=2 a=4:-:float32:small b=6:-:float32:small way=line hollow=first",
    *(f"world=4 a=8x3:-:float32:small b=4:-:float32:small c=12:-:float32:small {how}" for how in BOTH_WAYS),
    "world=4 world.save=4 world.load=2 a=8x3:-:float32:small b=4:-:float32:small way=both",
    "world=4 world.save=3 world.load=4 a=8:-:float32:small b=4x2:-:float32:small way=fsdp way.load=both",
)


@law(
    "optimizer.state",
    source=f"{DOCS}, get_optimizer_state_dict, set_optimizer_state_dict: FSDP, fully_shard, tensor parallelism",
    control="world=2 a=4x3:-:float32:small b=6:-:float32:small way=fsdp way.load=line",
    cases=STATES,
    draw=draw_states,
    draws=12,
    needs=("checkpoint", "object_collectives"),
    stages=world_sizes,
    weight=2.0,
    features=features,
)
def state(
    grads: Gradients,
    way: Way,
    mesh: WorldMesh,
    device: Device,
    writer: Writer,
    folder: Folder,
    flat: bool = False,
    groups: Groups = "each",
    hollow: Hollow | None = None,
    unused: Word = "",
    frozen: Word = "",
    offload: bool = False,
):
    """The state of a sharded model's optimizer, saved in a checkpoint, can be loaded into the optimizer of a model that
    is sharded differently, in another world."""
    model, used = sharded_model(grads, way, mesh, device, unused, frozen)
    optimizer = adam([*model.parameters()], RATES, groups, hollow)
    if way == "line":
        for name, parameter in model.named_parameters():
            parameter.grad = shard_rows(used[name[-1]], mesh) if name[-1] in used else None
    else:
        model().backward()
    optimizer.step()
    optimizer.zero_grad()
    options = StateDictOptions(flatten_optimizer_state_dict=flat, cpu_offload=offload)
    save({"optim": get_optimizer_state_dict(model, optimizer, options=options)}, writer(folder))
    return optimizer_contents(model, optimizer, way, used)


@state.due
def _(grads, way, rank: Rank, world: WorldSize, groups, hollow, unused, frozen):
    return due_optimizer_contents(grads, way, rank, world, [unused, frozen], saved_rates([*grads], groups, hollow))


@state.then
def state_loaded(
    grads: Gradients,
    way: Way,
    mesh: WorldMesh,
    device: Device,
    reader: Reader,
    folder: Folder,
    way__load: Way | None = None,
    flat: bool = False,
    groups: Groups = "each",
    groups__load: Groups | None = None,
    hollow: Hollow | None = None,
    unused: Word = "",
    frozen: Word = "",
    offload: bool = False,
):
    """Load it into the optimizer of another model; strictly only if every parameter has a state."""
    way = way__load or way
    model, used = sharded_model(grads, way, mesh, device, unused, frozen)
    optimizer = adam([*model.parameters()], OTHER_RATES, groups__load or groups, hollow)
    options = StateDictOptions(flatten_optimizer_state_dict=flat, cpu_offload=offload)
    fresh, refused = get_optimizer_state_dict(model, optimizer, options=options), None
    state = {"optim": drop_parameter(fresh, PATHS[unused]) if unused else fresh}
    load(state, reader(folder))
    if unused:
        refused = caught(lambda: set_optimizer_state_dict(model, optimizer, state["optim"], options=options))
        options.strict = False
    set_optimizer_state_dict(model, optimizer, state["optim"], options=options)
    return {"missing": refused, **optimizer_contents(model, optimizer, way, used)}


@state.due
def _(grads, way, rank: Rank, world: WorldSize, way__load, groups, groups__load, hollow, unused, frozen):
    saved = dict(zip(map(tuple, grouped([*grads], groups, hollow)), saved_rates([*grads], groups, hollow), strict=True))
    load_groups = [tuple(group) for group in grouped([*grads], groups__load or groups, hollow)]
    if not {*load_groups} <= {*saved}:
        raise Meaningless("there are other groups at the load than at the save")
    rates = [saved[group] for group in load_groups]
    due = due_optimizer_contents(grads, way__load or way, rank, world, [unused, frozen], rates)
    return {"missing": Refused() if unused else None, **due}
