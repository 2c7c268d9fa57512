"""Laws of what fully_shard can be asked for: hybrid meshes, several passes, other dtypes, shared weights, other dims."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from conformance.case import Case
from conformance.here import read_placements
from conformance.law import Law, Limits
from conformance.laws import draws, scripts
from conformance.laws.module.given import incoming, near
from conformance.laws.module.models import NEEDS
from conformance.laws.module.sharded import FSDP, named
from conformance.report.reproducer import Script
from reference.mesh import Mesh
from reference.notation import format_shape
from reference.placement import Placements
from reference.placement import Replicate as R
from reference.placement import Shard as S
from strategies.modules import ZOO, built

if TYPE_CHECKING:
    from collections.abc import Callable

    from hypothesis.strategies import SearchStrategy

    from conformance.here import Here

DTYPES = {"float32": torch.float32, "float64": torch.float64}
CLAUSES = {
    "hybrid": "On a mesh of two dims parameters are replicated along the first and sharded along the second; gradients are means over all.",
    "accumulated": "Gradients of several backward passes add up whether each is shared with the other ranks or the last alone.",
    "precision": "Parameters compute in param_dtype, gradients travel in reduce_dtype and arrive in the parameter's own dtype.",
    "shared": "A weight that two modules share is sharded once, and its gradient is the sum of both uses.",
    "partly": "Parameters may stay sharded over fewer ranks between the forward and the backward pass; gradients are the same.",
    "otherwise": "Parameters are sharded on the dim that shard_placement_fn names, gradients divided by the factor that was set.",
}
PLANTED = {"hybrid": "gradients_are_summed_not_averaged", "accumulated": "gradients_are_summed_not_averaged",
           "precision": "parameters_keep_their_dtype", "shared": "gradients_are_summed_not_averaged",
           "partly": "gradients_are_summed_not_averaged",
           "otherwise": "divide_factors_are_forgotten"}  # fmt: skip


def kind_of(case: Case) -> str:
    return case.law.partition("[")[2].removesuffix("]")


def resharded(case: Case) -> bool | int:
    """What becomes of parameters after the forward pass: all sharded, all kept, or sharded over so many ranks."""
    told = case.get("reshard")
    return int(told) if told.isdecimal() else told == "yes"


def options(case: Case, here: Here) -> dict[str, Any]:
    """What fully_shard is given."""
    told: dict[str, Any] = {"mesh": named(case, here), "reshard_after_forward": resharded(case)}
    if "compute" in case:
        told["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=DTYPES[case.get("compute")],
            reduce_dtype=DTYPES[case.get("reduce")] if "reduce" in case else None,
            output_dtype=DTYPES[case.get("output")] if "output" in case else None,
        )
    if "dim" in case:
        told["shard_placement_fn"] = lambda parameter: Shard(case.integer("dim") if parameter.ndim > 1 else 0)
    return told


def model_of(case: Case, here: Here, dense: nn.Module) -> Any:
    """A copy of the model, fully sharded: the whole alone, or each linear layer and then the rest."""
    model = copy.deepcopy(dense).to(here.device)
    told = options(case, here)
    if "units" in case:
        linear: list[nn.Module] = [part for part in model.modules() if isinstance(part, nn.Linear)]
        for part in linear:
            fully_shard(part, **told)
    fully_shard(model, **told)
    if "factor" in case:
        sharded: list[Any] = [part for part in model.modules() if isinstance(part, FSDPModule)]
        for one in sharded:
            one.set_gradient_divide_factor(float(case.get("factor")))
    return model


def placed(case: Case, parameter: torch.Tensor) -> Placements:
    """Where a parameter must lie."""
    dim = case.integer("dim", 0) if parameter.ndim > 1 else 0
    return (R(),) * (case.mesh().ndim - 1) + (S(dim),)


def check_fsdp(case: Case, here: Here) -> None:
    """Two steps of SGD, each after one or several backward passes, on every rank with inputs of its own."""
    mesh, sizes = case.mesh(), case.shape("dims")
    kind = case.get("model")
    coord = here.coord(mesh)
    assert coord is not None
    place, ranks = mesh.ranks.index(here.rank), mesh.size
    dense = built(kind, sizes, "bias" not in case, case.seed).eval()
    model = model_of(case, here, dense)
    compute = copy.deepcopy(dense).to(DTYPES[case.get("compute", "float64")])
    ours, theirs = (torch.optim.SGD(one.parameters(), lr=0.5) for one in (model, dense))
    judge(here, case, model, dense, "parameters")
    passes, scale = case.integer("passes", 1), float(case.get("factor", str(ranks)))
    for step in range(2):
        for at in range(passes):
            inputs = [ZOO[kind].entry(sizes, 2, 3, case.seed + 5 * rank + at + 2 * step) for rank in range(ranks)]
            own = next(iter(compute.parameters())).dtype
            outs = [compute(one.to(own) if one.is_floating_point() else one) for one in inputs]
            for rank, out in enumerate(outs):
                out.backward((incoming(out, case.seed + rank) / scale).to(out.dtype))
            if "synced" in case:
                if case.get("synced") == "held":  # shared with the ranks that shard, held back from those that replicate
                    model.set_requires_all_reduce(at == passes - 1)
                else:
                    model.set_requires_gradient_sync(at == passes - 1 or case.get("synced") == "each")
            got = model(here.tensor(inputs[place]))
            want = outs[place].detach().to(DTYPES[case.get("output", case.get("compute", "float64"))])
            near(here, got, want, f"forward-{step}", "the output")
            got.backward(here.tensor(incoming(want, case.seed + place)).to(want.dtype))
        for parameter, computed in zip(dense.parameters(), compute.parameters(), strict=True):
            parameter.grad = None if computed.grad is None else computed.grad.to(parameter.dtype)
        judge(here, case, model, dense, f"gradients-{step}", grads=True)
        ours.step()
        theirs.step()
        ours.zero_grad()
        with torch.no_grad():
            for parameter, computed in zip(dense.parameters(), compute.parameters(), strict=True):
                computed.copy_(parameter)
                computed.grad = None
        judge(here, case, model, dense, f"step-{step}")
    if "looked" in case:
        model.unshard()
        for name, parameter in model.named_parameters(recurse="units" not in case):
            near(here, parameter, dict(compute.named_parameters())[name], "unshard", name)  # in the dtype that it computes in
        model.reshard()
        judge(here, case, model, dense, "reshard")


def judge(here: Here, case: Case, model: nn.Module, dense: nn.Module, check: str, *, grads: bool = False) -> None:
    """Parameters, or their gradients, denote the dense ones and lie where they must."""
    named_ours = list(model.named_parameters())
    names = [name for name, _ in dense.named_parameters()]
    if not here.require(
        [name for name, _ in named_ours] == names, "wrong-metadata", check, "other names", names, [n for n, _ in named_ours]
    ):
        return
    for (name, parameter), whole in zip(named_ours, dense.parameters(), strict=True):
        got: Any = parameter.grad if grads else parameter
        want = whole.grad if grads else whole
        if (
            not here.require((got is None) == (want is None), "wrong-value", check, f"{name} has no gradient, or one too many")
            or want is None
        ):
            continue
        if here.require(isinstance(got, DTensor), "wrong-metadata", check, f"{name} is a {type(got).__name__}, must be a DTensor"):
            at, due = read_placements(got.placements), placed(case, whole)
            here.require(at == due, "wrong-metadata", check, f"{name} is placed otherwise", due, at)
            near(here, got.full_tensor().detach(), want, check, name)


def draw_fsdp(kind: str) -> Callable[[Limits], SearchStrategy[Case]]:
    def strategy(limits: Limits) -> SearchStrategy[Case]:
        texts = {"hybrid": ("2x2", "2x2", "1x2", "2x1"), "accumulated": ("2", "3", "2x2"), "partly": ("4",)}.get(kind, ("2", "2", "3"))
        on = [mesh for mesh in map(Mesh.parse, texts) if mesh.size <= limits.world_size]
        sizes = st.sampled_from([3, 5, 7, 4, 2])

        @st.composite
        def case(draw: st.DrawFn) -> Case:
            mesh = draw(st.sampled_from(on))
            model = "tied" if kind == "shared" else draw(st.sampled_from(["mlp", "mlp", "norm"]))
            dims: tuple[int, ...] = draw(st.tuples(sizes, sizes, sizes)) if model == "mlp" else draw(st.tuples(sizes, sizes))
            fields: dict[str, Any] = {"reshard": draw(st.sampled_from(["yes", "no"]))}
            if kind == "partly":
                fields["reshard"] = "2"
            fields["units"] = draw(st.sampled_from([None, 1])) if model != "tied" else None
            fields["looked"] = draw(st.sampled_from([None, 1]))
            if kind == "accumulated":
                fields |= {"passes": draw(st.sampled_from([2, 3])), "synced": draw(st.sampled_from(["last", "last", "each"]))}
            if kind == "precision":
                fields |= {"compute": "float32", "reduce": draw(st.sampled_from([None, "float32", "float64"]))}
                fields["output"] = draw(st.sampled_from([None, "float64"]))
            if kind == "otherwise":
                dims = tuple(mesh.size * draw(st.sampled_from([1, 2])) for _ in dims)
                fields |= {"dim": draw(st.sampled_from([1, 1, 0])), "factor": draw(st.sampled_from([None, "1.0", "8.0"]))}
            return Case.of(f"module.fsdp[{kind}]", mesh=mesh, model=model, dims=format_shape(dims), **fields, seed=draw(draws.seeds()))

        return case()

    return strategy


# cases that few draws would not meet
ALWAYS = {"accumulated": ("mesh=2x2 model=mlp dims=5x7x3 reshard=yes passes=2 synced=held",)}


def sweep_fsdp(kind: str) -> Callable[[Limits], list[Case]]:
    return lambda limits: [case for text in ALWAYS[kind] if (case := Case.parse(f"module.fsdp[{kind}] {text}")).world <= limits.world_size]


def features_fsdp(case: Case) -> set[str]:
    shards = case.mesh().shape[-1]
    uneven = {"uneven"} if any(extent % shards for extent in case.shape("dims")) else set()
    return {"module", "fully-sharded", "backward", f"way:{kind_of(case)}"} | uneven


def script_fsdp(case: Case) -> Script:
    """One linear layer of the same size: its gradient after as many passes as the case makes."""
    mesh, dims = case.mesh(), case.shape("dims")
    made = f"fully_shard(net, mesh=mesh, reshard_after_forward={resharded(case)}"
    if "compute" in case:
        reduce = f", reduce_dtype=torch.{case.get('reduce')}" if "reduce" in case else ""
        made += f", mp_policy=MixedPrecisionPolicy(param_dtype=torch.{case.get('compute')}{reduce})"
    made += f", shard_placement_fn=lambda p: Shard({case.get('dim')} if p.ndim > 1 else 0))" if "dim" in case else ")"
    passes, ranks = case.integer("passes", 1), mesh.size
    value = passes * 2 * sum(range(1, ranks + 1)) / float(case.get("factor", str(ranks)))
    synced = case.get("synced", "")
    body = [
        f"mesh = {scripts.mesh(mesh, ('data', 'model')[: mesh.ndim])}",
        f"net = torch.nn.Linear({dims[0]}, {dims[1]}).double()",
        "torch.nn.init.ones_(net.weight)",
        made,
        *([f"net.set_gradient_divide_factor({case.get('factor')})"] if "factor" in case else []),
        f"for at in range({passes}):",
        *(
            [f"    net.set_requires_gradient_sync({True if synced == 'each' else f'at == {passes - 1}'})"]
            if synced in ("each", "last")
            else []
        ),
        *([f"    net.set_requires_all_reduce(at == {passes - 1})"] if synced == "held" else []),
        f"    net(torch.ones(2, {dims[0]}, dtype=torch.float64) * (1 + rank)).sum().backward()",
        f"want = torch.full({(dims[1], dims[0])}, {value}, dtype=torch.float64)",
        "return want, net.weight.grad.full_tensor()",
    ]
    told = scripts.script(body, world=case.world)
    return Script(told.stages, (*told.imports, "from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard"), tolerance=1e-6)


CONTROLS = {
    "hybrid": "mesh=2x2 model=mlp dims=5x7x3 reshard=yes",
    "accumulated": "mesh=2 model=mlp dims=5x7x3 reshard=yes passes=2 synced=last",
    "precision": "mesh=2 model=mlp dims=5x7x3 reshard=yes compute=float32 reduce=float64",
    "shared": "mesh=2 model=tied dims=5x3 reshard=yes",
    "partly": "mesh=4 model=mlp dims=5x7x3 reshard=2 units=1",
    "otherwise": "mesh=2 model=mlp dims=4x6x2 reshard=yes dim=1 factor=1.0",
}
LAWS = tuple(
    Law(
        id=f"module.fsdp[{kind}]",
        clause=clause,
        source=FSDP,
        check=check_fsdp,
        script=script_fsdp if kind != "shared" else None,
        features=features_fsdp,
        control=f"module.fsdp[{kind}] {CONTROLS[kind]}",
        planted=PLANTED[kind],
        draw=draw_fsdp(kind),
        draws=3 if kind == "partly" else 5,
        sweep=sweep_fsdp(kind) if kind in ALWAYS else None,
        sweeps=len(ALWAYS.get(kind, ())),
        needs=NEEDS,
        weight=0.1,
    )
    for kind, clause in CLAUSES.items()
)
