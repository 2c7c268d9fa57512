"""Laws of models whose parameters are placed by hand, and of models that are fully sharded while they are not in use."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from conformance.case import Case
from conformance.law import Law, Limits
from conformance.laws import draws, scripts
from conformance.laws.module.given import incoming, near, near_dtensor
from conformance.laws.module.models import NEEDS, OPTIMIZERS
from conformance.report.reproducer import Script
from reference.mesh import Mesh
from reference.notation import format_shape
from reference.placement import Placements
from reference.placement import Replicate as R
from reference.placement import Shard as S
from strategies.modules import ZOO, built

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from conformance.here import Here

HAND = "torch.distributed.tensor docs, distribute_module"
FSDP = "torch.distributed.fsdp docs, fully_shard"


def by_hand(case: Case) -> dict[str, Placements]:
    """Where each parameter of the model is to lie: the weights as the case says, each bias along with the rows of its weight."""
    mesh = case.mesh()
    first, second = case.placements("net1"), case.placements("net2")
    rows = [tuple(at if at == S(0) else R() for at in side) for side in (first, second)]
    assert all(len(side) == mesh.ndim for side in (first, second))
    return {"net1.weight": first, "net1.bias": rows[0], "net2.weight": second, "net2.bias": rows[1]}


def distributed(case: Case, dense: nn.Module, here: Here) -> nn.Module:
    """The model with its parameters placed by a partition function, between hooks that take and give whole tensors."""
    placed, live = by_hand(case), here.mesh(case.mesh())

    def partition(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for key, parameter in list(module.named_parameters(recurse=False)):
            at = here.placements(placed[f"{name}.{key}"])
            module.register_parameter(key, nn.Parameter(distribute_tensor(parameter.data, mesh, at)))

    def enter(module: nn.Module, inputs: Any, mesh: DeviceMesh) -> Any:
        return DTensor.from_local(inputs[0], mesh, [Replicate()] * mesh.ndim)

    def leave(module: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
        return outputs.full_tensor()

    return distribute_module(copy.deepcopy(dense).to(here.device), live, partition, enter, leave)


def check_by_hand(case: Case, here: Here) -> None:
    """Ranks of the mesh see the dense output and gradients; ranks outside hold nothing and do not fail."""
    mesh, dense = case.mesh(), built("mlp", case.shape("dims"), True, case.seed)
    model = distributed(case, dense, here)
    member = here.coord(mesh) is not None
    whole = ZOO["mlp"].entry(case.shape("dims"), case.integer("rows"), 1, case.seed)
    want = dense(whole)
    for name, parameter in model.named_parameters():
        near_dtensor(here, parameter, dict(dense.named_parameters())[name], "parameters", name, by_hand(case)[name])
    inside = mesh.size == case.world
    x = here.tensor(whole.clone()).requires_grad_(inside)
    got = model(x)
    if not inside:
        if member:
            near(here, got, want, "forward", "the output")
        else:
            here.require(got.numel() == 0, "wrong-value", "outside", "a rank outside the mesh has an output", "nothing", got)
        return
    near(here, got, want, "forward", "the output")
    grad = incoming(want, case.seed)
    entry = whole.clone().requires_grad_()
    dense(entry).backward(grad)
    got.backward(here.tensor(grad))
    assert entry.grad is not None
    near(here, x.grad, entry.grad, "input", "the gradient of the input")
    for name, parameter in model.named_parameters():
        near_dtensor(here, parameter.grad, dict(dense.named_parameters())[name].grad, "gradients", f"gradient of {name}")  # type: ignore[arg-type]


def sweep_by_hand(limits: Limits) -> list[Case]:
    """The layouts that the documents show: partly replicated on a 2-D mesh, and on a mesh of every other rank."""
    shown = [("2x2", "R,S(0)", "R,S(1)"), ("2@0,2", "S(0)", "S(1)"), ("2@0,2", "R", "R"), ("2@1,3", "S(1)", "S(0)"), ("3", "S(0)", "S(1)")]
    sizes = ("5x8x3", "5x7x12")
    cases = [Case.of("module.by-hand", mesh=mesh, dims=dims, rows=3, net1=one, net2=two) for mesh, one, two in shown for dims in sizes]
    return [case for case in cases if case.world <= limits.world_size]


def draw_by_hand(limits: Limits) -> SearchStrategy[Case]:
    on = [mesh for mesh in map(Mesh.parse, ("2", "3", "2x2", "1x2", "2x1")) if mesh.size <= limits.world_size]
    sizes = st.sampled_from([5, 4, 7, 8, 6])

    @st.composite
    def case(draw: st.DrawFn) -> Case:
        mesh = draw(st.sampled_from(on))
        one, two = (tuple(draw(st.sampled_from([R(), S(0), S(1)])) for _ in mesh.shape) for _ in range(2))
        dims = format_shape(draw(st.tuples(sizes, sizes, sizes)))
        return Case.of(
            "module.by-hand", mesh=mesh, dims=dims, rows=draw(st.sampled_from([3, 4])), net1=one, net2=two, seed=draw(draws.seeds())
        )

    def split_once(case: Case) -> bool:
        return all(side.count(S(dim)) < 2 for side in (case.placements("net1"), case.placements("net2")) for dim in (0, 1))

    return case().filter(split_once)


def features_hand(case: Case) -> set[str]:
    dims = case.shape("dims")
    shapes = {"net1": (dims[1], dims[0]), "net2": (dims[2], dims[1])}
    uneven = any(
        isinstance(at, S) and shape[at.dim] % size
        for name, shape in shapes.items()
        for at, size in zip(case.placements(name), case.mesh().shape, strict=True)
    )
    return {"module"} | ({"uneven"} if uneven else set())


def script_by_hand(case: Case) -> Script:
    mesh, dense = case.mesh(), built("mlp", case.shape("dims"), True, case.seed)
    whole = ZOO["mlp"].entry(case.shape("dims"), case.integer("rows"), 1, case.seed)
    names = [name for name, _ in dense.named_parameters()]
    body = [f"mesh, x = {scripts.mesh(mesh)}, {scripts.tensor(whole)}"]
    for name, parameter in dense.named_parameters():
        at = scripts.placements(by_hand(case)[name])
        body += [f"{name.replace('.', '_')} = distribute_tensor({scripts.tensor(parameter)}, mesh, {at})"]
    one, two, three, four = (name.replace(".", "_") for name in names)
    linear = "torch.nn.functional.linear"
    body += [
        f"x = DTensor.from_local(x, mesh, {scripts.placements((R(),) * mesh.ndim)})",
        f"out = {linear}({linear}(x, {one}, {two}).relu(), {three}, {four}).full_tensor()",
    ]
    want = dense(whole).detach()
    members = dict.fromkeys(sorted(mesh.ranks), want)
    made = scripts.compared(case, body, "out.detach()", members)
    return Script(made.stages, made.imports, made.constants, tolerance=1e-6)


# Fully sharded

_NAMED: dict[Mesh, DeviceMesh] = {}


def named(case: Case, here: Here) -> DeviceMesh:
    """The mesh with its dims named: data, then, where there are two, model."""
    mesh = case.mesh()
    if mesh not in _NAMED:
        _NAMED[mesh] = here.mesh(mesh, names=("data", "model")[: mesh.ndim])
    return _NAMED[mesh]


def check_fully(case: Case, here: Here) -> None:
    """Every rank has inputs of its own; the gradient is the mean over the ranks, frozen parameters stay as they are."""
    mesh, kind = case.mesh(), case.get("model")
    shards = mesh.shape[0]
    dense = built(kind, case.shape("dims"), "bias" not in case, case.seed).eval()
    model = copy.deepcopy(dense).to(here.device)
    for one in (dense, model):
        for name, parameter in one.named_parameters():
            parameter.requires_grad = not ("frozen" in case and case.get("frozen") in name)
    live, coord = named(case, here), here.coord(mesh)
    assert coord is not None
    if mesh.ndim > 1:
        parallelize_module(model, live["model"], {"net1": ColwiseParallel(), "net2": RowwiseParallel()})
    options: dict[str, Any] = {"mesh": live["data"] if mesh.ndim > 1 else live, "reshard_after_forward": case.get("reshard") == "yes"}
    if "units" in case:
        for part in [part for part in model.modules() if isinstance(part, nn.Linear)]:
            fully_shard(part, **options)
    fully_shard(model, **options)
    make, settings = OPTIMIZERS[case.get("optimizer")]
    steps: Any = make
    ours, theirs = (steps([p for p in one.parameters() if p.requires_grad], **settings) for one in (model, dense))
    for at in range(2):
        inputs = [ZOO[kind].entry(case.shape("dims"), 2, 3, case.seed + 5 * rank + at) for rank in range(shards)]
        outs = [dense(one) for one in inputs]
        for rank, out in enumerate(outs):
            out.backward(incoming(out, case.seed + rank) / shards)
        got = model(here.tensor(inputs[coord[0]]))
        near(here, got, outs[coord[0]], f"forward-{at}", "the output")
        got.backward(here.tensor(incoming(outs[coord[0]], case.seed + coord[0])))
        _judge(here, model, dense, f"gradients-{at}", grads=True)
        ours.step()
        theirs.step()
        ours.zero_grad()
        theirs.zero_grad()
        _judge(here, model, dense, f"step-{at}")


def _judge(here: Here, model: nn.Module, dense: nn.Module, check: str, *, grads: bool = False) -> None:
    """Parameters, or their gradients, denote the dense ones and are sharded."""
    for (name, ours), (_, theirs) in zip(model.named_parameters(), dense.named_parameters(), strict=True):
        got: Any = ours.grad if grads else ours
        want = theirs.grad if grads else theirs
        if (
            here.require((got is None) == (want is None), "wrong-value", check, f"{name} has a gradient where it must not, or none")
            and want is not None
        ):
            whole = got.full_tensor().detach() if isinstance(got, DTensor) else got
            here.require(isinstance(got, DTensor), "wrong-metadata", check, f"{name} is not sharded")
            near(here, whole, want, check, name)
        here.require(ours.requires_grad == theirs.requires_grad, "wrong-metadata", check, f"requires_grad of {name} differs")


def sweep_fully(limits: Limits) -> list[Case]:
    """Beside tensor parallelism, as one unit and as several; with widths that do and do not fit the mesh."""
    both: list[tuple[str, dict[str, Any]]] = [
        ("5x8x3", {"optimizer": "sgd", "reshard": "yes"}),
        ("3x4x5", {"optimizer": "adamw", "reshard": "no", "units": 1}),
    ]
    cases = [Case.of("module.fully-shard", mesh="2x2", model="mlp", dims=dims, **asked) for dims, asked in both]
    return [case for case in cases if case.world <= limits.world_size]


def draw_fully(limits: Limits) -> SearchStrategy[Case]:
    on = [mesh for mesh in map(Mesh.parse, ("2", "2", "3", "3", "4", "2x2")) if mesh.size <= limits.world_size]
    sizes = st.sampled_from([3, 5, 7, 4, 2])

    @st.composite
    def case(draw: st.DrawFn) -> Case:
        mesh = draw(st.sampled_from(on))
        kind = "mlp" if mesh.ndim > 1 else draw(st.sampled_from(["mlp", "mlp", "stacked", "norm"]))
        width = draw(sizes) if mesh.ndim == 1 else mesh.shape[1] * draw(st.sampled_from([1, 2, 3]))
        dims = (draw(sizes), width, draw(sizes)) if kind == "mlp" else (draw(sizes), width)
        fields: dict[str, Any] = {"model": kind, "dims": format_shape(dims), "optimizer": draw(st.sampled_from(["sgd", "adamw"]))}
        fields |= {"reshard": draw(st.sampled_from(["yes", "no"])), "units": draw(st.sampled_from([None, 1]))}
        fields["frozen"] = draw(st.sampled_from([None, None, "weight", "bias"]))
        return Case.of("module.fully-shard", mesh=mesh, **fields, seed=draw(draws.seeds()))

    return case()


def features_fully(case: Case) -> set[str]:
    found = {"module", "fully-sharded", "backward"} | ({"frozen"} if "frozen" in case else set())
    return found | ({"uneven"} if any(extent % case.mesh().shape[0] for extent in case.shape("dims")[1:]) else set())


def script_fully(case: Case) -> Script:
    """One linear layer of the same size, fully sharded: its gradient is the mean over the ranks."""
    mesh, dims = case.mesh(), case.shape("dims")
    names = ("data", "model")[: mesh.ndim]
    part = '["data"]' if mesh.ndim > 1 else ""
    body = [
        f"mesh = {scripts.mesh(mesh, names)}{part}",
        f"net = torch.nn.Linear({dims[0]}, {dims[1]}).double()",
        "torch.nn.init.ones_(net.weight)",
        f"fully_shard(net, mesh=mesh, reshard_after_forward={case.get('reshard') == 'yes'})",
        f"net(torch.ones(2, {dims[0]}, dtype=torch.float64) * (1 + mesh.get_local_rank())).sum().backward()",
        f"want = torch.full({(dims[1], dims[0])}, {2 * sum(range(1, mesh.shape[0] + 1)) / mesh.shape[0]}, dtype=torch.float64)",
    ]
    made = scripts.script([*body, "return want, net.weight.grad.full_tensor()"], world=case.world)
    return Script(made.stages, (*made.imports, "from torch.distributed.fsdp import fully_shard"), tolerance=1e-6)


LAWS = (
    Law(
        id="module.by-hand",
        clause="A model whose parameters a partition function placed gives the dense output and gradients on every rank of its mesh.",
        source=HAND,
        check=check_by_hand,
        script=script_by_hand,
        features=features_hand,
        control="module.by-hand mesh=2x2 dims=5x8x3 rows=3 net1=R,S(0) net2=R,S(1)",
        planted="full_tensor_of_first_mesh_dim",
        draw=draw_by_hand,
        draws=10,
        sweep=sweep_by_hand,
        sweeps=10,
        needs=NEEDS,
        weight=0.2,
    ),
    Law(
        id="module.fully-shard",
        clause="A fully sharded model computes the dense output, the mean of the ranks' gradients, and the dense optimizer's steps.",
        source=FSDP,
        check=check_fully,
        script=script_fully,
        features=features_fully,
        control="module.fully-shard mesh=2 model=mlp dims=5x7x3 optimizer=sgd reshard=yes",
        planted="gradients_are_summed_not_averaged",
        draw=draw_fully,
        draws=8,
        sweep=sweep_fully,
        sweeps=2,
        needs=NEEDS,
        weight=0.2,
    ),
)
