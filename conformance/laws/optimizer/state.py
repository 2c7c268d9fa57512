"""Laws on the states of optimizers of sharded models, through a checkpoint: saved by a model sharded one way, loaded by another.

The parameters of a case are ``a``, ``b``, ``c``: the first and the last at the top of the model, the second in a module inside. ``way``
and ``way.load`` say how they are sharded: ``line`` (by hand, by rows over all ranks), ``fsdp`` (``fully_shard``) or ``fsdp1``
(``FullyShardedDataParallel``). One step of Adam with betas of a half leaves halves of the gradient and of its square, exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor

from conformance import trip as t
from conformance.case import Case
from conformance.here import Here
from conformance.law import Law, Limits
from conformance.laws.optimizer import scripts
from conformance.laws.sharded_tensor import given as g
from conformance.target import storage
from reference.layout import Layout
from reference.mesh import Mesh
from reference.placement import Shard
from reference.sharded_tensor import ChunkSpec
from reference.tensors import TensorSpec
from strategies import shapes

DOCS = "torch.distributed.checkpoint.state_dict docs"
RATES, OTHER_RATES = (0.5, 0.25, 0.125), (0.75, 0.875, 0.375)
OFTEN = ("line", "fsdp", "line", "fsdp", "fsdp1")
T = TypeVar("T")
PATHS = {"a": "a", "b": "inner.b", "c": "c"}


class Net(nn.Module):
    """Parameters at the top and inside; its output is the sum of their products with the given gradients, which are its gradients."""

    def __init__(self, parameters: dict[str, nn.Parameter], grads: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self.own = [name for name in parameters if name != "b"]
        self.grads = grads
        for name in self.own:
            self.register_parameter(name, parameters[name])
        if "b" in parameters:
            self.inner = Net.within(parameters["b"], grads)

    @staticmethod
    def within(parameter: nn.Parameter, grads: dict[str, torch.Tensor]) -> nn.Module:
        inner = Net({}, grads)
        inner.own = ["b"]
        inner.register_parameter("b", parameter)
        return inner

    def forward(self) -> torch.Tensor:
        total = torch.zeros(())
        for name in self.own:
            if name in self.grads:
                total = total + (getattr(self, name) * self.grads[name]).sum()
        return total + self.inner() if hasattr(self, "inner") else total


def values(case: Case) -> dict[str, torch.Tensor]:
    """The gradient of each parameter."""
    return {name: case.tensor(name).build(case.seed + 31 * at) for at, name in enumerate(n for n in PATHS if n in case)}


def worlds(case: Case) -> tuple[int, ...]:
    return case.integer("world.save", case.world), case.integer("world.load", case.world)


def line(here: Here) -> Mesh:
    return Mesh((here.world,), tuple(range(here.world)))


def layout_of(here: Here, full: torch.Tensor) -> Layout:
    """By rows over all ranks: how every one of the ways shards."""
    return Layout(tuple(full.shape), line(here), (Shard(0),))


def model_of(case: Case, here: Here, way: str) -> Any:
    """A model of zeros, sharded in a way, whose backward pass gives the gradients of the case."""
    grads, mesh = values(case), here.mesh(line(here))
    unused = case.get("unused", "")
    trained = {name: here.tensor(grad) for name, grad in grads.items() if name not in (unused, case.get("frozen", ""))}
    dense = {name: torch.zeros_like(grad) for name, grad in grads.items()}
    made: dict[str, nn.Parameter] = {}
    for name, full in dense.items():
        tensor = here.dtensor(full, layout_of(here, full)) if way == "line" else here.tensor(full)
        made[name] = nn.Parameter(tensor, requires_grad=name != case.get("frozen", ""))
    net: Any = Net(made, trained)
    if way == "fsdp":
        if hasattr(net, "inner"):
            fully_shard(net.inner, mesh=mesh)
        fully_shard(net, mesh=mesh)
    if way == "fsdp1":
        given: dict[str, Any] = {"device_id": here.device, "use_orig_params": True}
        if hasattr(net, "inner"):
            net.inner = FullyShardedDataParallel(net.inner, **given)
        net = FullyShardedDataParallel(net, **given)
    return net


def grouped(case: Case, end: str, held: Sequence[T]) -> list[list[T]]:
    """Parameters in the groups of the optimizer at one ``end``: ``each`` its own, in their order or from the ``back``, or all in ``one``;
    with ``hollow``, the first or the last group has none."""
    how = case.get("groups", "each") if end == "save" else case.get("groups.load", case.get("groups", "each"))
    found = [[*held]] if how == "one" else [[one] for one in (reversed(held) if how == "back" else held)]
    if "hollow" in case:
        found.insert(0 if case.get("hollow") == "first" else len(found), [])
    return found


def rates_due(case: Case, end: str, count: int) -> list[float]:
    """The rates of the groups at one end, where ``count`` parameters have those that their groups had at the save."""
    saved = {tuple(group): RATES[at % len(RATES)] for at, group in enumerate(grouped(case, "save", range(count)))}
    return [saved[tuple(group)] for group in grouped(case, end, range(count))]


def optimizer_of(case: Case, model: nn.Module, end: str) -> torch.optim.Optimizer:
    """Adam, with the rates that are saved or with others."""
    rates = RATES if end == "save" else OTHER_RATES
    told = [{"params": group, "lr": rates[at % len(rates)]} for at, group in enumerate(grouped(case, end, list(model.parameters())))]
    return torch.optim.Adam(told, betas=(0.5, 0.5), foreach=False)


def stepped(case: Case, here: Here, way: str) -> tuple[Any, torch.optim.Optimizer]:
    """A model and its optimizer after one step."""
    model = model_of(case, here, way)
    optimizer = optimizer_of(case, model, "save")
    if way == "line":
        for name in model.grads:
            grad, parameter = values(case)[name], dict(model.named_parameters())[PATHS[name]]
            parameter.grad = here.dtensor(grad, layout_of(here, grad))
    else:
        model().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def averages(case: Case) -> Iterator[tuple[str, str, torch.Tensor]]:
    """The name in the model, the name in the state and the value of each average."""
    for name, grad in values(case).items():
        if name not in (case.get("unused", ""), case.get("frozen", "")):
            yield PATHS[name], "exp_avg", grad / 2
            yield PATHS[name], "exp_avg_sq", grad * grad / 2


def judge(case: Case, here: Here, way: str, model: Any, optimizer: torch.optim.Optimizer, check: str) -> None:
    """Every average, step and rate is what one step of the saved optimizer left."""
    held = dict(model.named_parameters())
    with g.without_warnings():
        told: Any = get_optimizer_state_dict(model, optimizer)["state"] if way == "fsdp1" else {}
    for path, key, full in averages(case):
        state = told.get(path, {}) if way == "fsdp1" else optimizer.state.get(held[path], {})
        if not here.require(key in state, "wrong-metadata", check, f"the state of {path} has no {key}", key, [*state]):
            continue
        got = state[key]
        if way == "fsdp1":
            parts = ChunkSpec(0, tuple(range(here.world))).parts(tuple(full.shape))
            g.judge(here, got, full, parts, check=check, what=f"{key} of {path}")
        else:
            t.judge_tensor(here, got, full, layout_of(here, full), place=f"{key} of {path}", check=check)
        step = state["step"]
        count = float(step.to_local() if isinstance(step, DTensor) else step)
        here.require(count == 1, "wrong-value", check, f"the step of {path} is {count}, must be 1", 1, count)
    due = rates_due(case, "load" if check == "loaded" else "save", len(held))
    rates = [float(group["lr"]) if "lr" in group else None for group in optimizer.param_groups]
    here.require(rates == due, "wrong-value", check, "the rates are not those of the saved optimizer", due, rates)


def options_of(case: Case, **more: Any) -> StateDictOptions:
    return StateDictOptions(flatten_optimizer_state_dict=case.get("flat", "no") == "yes", cpu_offload="offload" in case, **more)


def without(case: Case, state: dict[str, Any], path: str) -> dict[str, Any]:
    """The state without that of one parameter."""
    if case.get("flat", "no") == "yes":
        return {key: value for key, value in state.items() if not key.startswith(f"state.{path}.")}
    return {**state, "state": {key: value for key, value in state["state"].items() if key != path}}


def check_state(case: Case, here: Here) -> None:
    """What an optimizer has learned is found again in one whose model is sharded otherwise, in a world of another size."""
    way = case.get("way") if here.stage == 0 else case.get("way.load", case.get("way"))
    options = options_of(case)
    if here.stage == 0:
        model, optimizer = stepped(case, here, way)
        with g.without_warnings(), t.told_plainly():
            state = get_optimizer_state_dict(model, optimizer, options=options)
            t.dcp.save({"optim": state}, storage_writer=storage.writer(here.target, here.folder()))
        judge(case, here, way, model, optimizer, "saved")
        return
    model = model_of(case, here, way)
    optimizer = optimizer_of(case, model, "load")
    unused = case.get("unused", "")
    with g.without_warnings(), t.told_plainly():
        blank: Any = get_optimizer_state_dict(model, optimizer, options=options)
        wanted = {"optim": without(case, blank, PATHS[unused]) if unused else blank}
        t.dcp.load(wanted, storage_reader=storage.reader(here.target, here.folder()))
        if unused:
            message = "a state without that of a parameter, loaded strictly"
            here.refused(lambda: set_optimizer_state_dict(model, optimizer, wanted["optim"], options=options), "missing", message)
            options = options_of(case, strict=False)
        set_optimizer_state_dict(model, optimizer, wanted["optim"], options=options)
    judge(case, here, way, model, optimizer, "loaded")


def features(case: Case) -> set[str]:
    save, load = worlds(case)
    found = {f"way:{case.get('way')}", f"way:{case.get('way.load', case.get('way'))}", "module"}
    found |= {"fully-sharded"} if "fsdp" in case.get("way") + case.get("way.load", "") else set()
    found |= {"reworld"} if save != load else set()
    for name, feature in (("unused", "stateless"), ("frozen", "frozen"), ("offload", "offloaded"), ("hollow", "hollow-group")):
        found |= {feature} if name in case else set()
    found |= {"flat-state"} if case.get("flat", "no") == "yes" else set()
    found |= {"regrouped"} if "back" in (case.get("groups", ""), case.get("groups.load", "")) else set()
    found |= {"hollow-group-first"} if case.get("hollow", "") == "first" else set()
    for name in PATHS:
        if name in case:
            shape = case.tensor(name).shape
            for world in (save, load):
                found |= g.features_of_spec(shape, ChunkSpec(0, tuple(range(world))), tuple(range(world))) - {"shardless"}
    return found


def _drawn(limits: Limits) -> SearchStrategy[Case]:
    sizes = [size for size in (2, 2, 3, 4) if size <= limits.world_size]

    @st.composite
    def case(draw: st.DrawFn) -> Case:
        save, load = draw(st.sampled_from(sizes)), draw(st.sampled_from(sizes))
        way, way_load = draw(st.sampled_from(OFTEN)), draw(st.sampled_from(OFTEN))
        fields: dict[str, Any] = {"world": max(save, load)}
        if save != load:
            fields |= {"world__save": save, "world__load": load}
        names = "abc"[: draw(st.sampled_from((2, 3, 1)))]
        for name in names:
            shape = draw(shapes(min_dims=1, max_dims=2, min_size=1))
            fields[name] = TensorSpec(shape, None, "float32", "small")
        fields |= {"way": way, "way__load": None if way_load == way else way_load}
        fields["flat"] = draw(st.sampled_from((None, None, "yes")))
        fields["groups"] = draw(st.sampled_from((None, "one", "back")))
        if fields["groups"] != "one":
            fields["groups__load"] = draw(st.sampled_from((None, None, "back", "each")))
        fields["offload"] = draw(st.sampled_from((None, None, None, "yes")))
        odd = draw(st.integers(0, 5)) if len(names) > 1 and "fsdp1" not in (way, way_load) else 0
        if odd == 5 and fields["flat"] is None:
            fields["unused"] = names[-1]
        if odd == 4:
            fields["frozen"] = names[-1]
        if odd in (2, 3) and fields["flat"] is None:
            fields["hollow"] = "last"
        return Case.of("optimizer.state", **fields, seed=draw(st.integers(0, 9)) or None)

    return case()


def groups_told(case: Case) -> tuple[scripts.Groups, scripts.Groups]:
    """The groups at the save and at the load, by places of parameters, and the rates that they begin with and must end with."""
    count, found = len(values(case)), []
    for end, rates in (("save", RATES), ("load", OTHER_RATES)):
        groups = grouped(case, end, range(count))
        found.append(scripts.Groups(groups, [rates[at % len(rates)] for at in range(len(groups))], rates_due(case, end, count)))
    return found[0], found[1]


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
)


def _sweep(limits: Limits) -> list[Case]:
    found = [Case.parse(f"optimizer.state {text}") for text in STATES]
    return [case for case in found if case.world <= limits.world_size]


LAWS = (
    Law(
        id="optimizer.state",
        clause="What the optimizer of a sharded model has learned is found again by that of a model sharded otherwise, in another world.",
        source=f"{DOCS}, get_optimizer_state_dict, set_optimizer_state_dict: FSDP, fully_shard, tensor parallelism",
        check=check_state,
        control="optimizer.state world=2 a=4x3:-:float32:small b=6:-:float32:small way=fsdp way.load=line",
        planted="rates_of_the_last_group",
        sweep=_sweep,
        sweeps=len(STATES),
        draw=_drawn,
        draws=12,
        needs=("checkpoint", "object_collectives"),
        stages=worlds,
        weight=2.0,
        features=features,
        script=lambda case: scripts.state(case, values(case), worlds(case), groups_told(case)),
    ),
)
