"""The law of uneven inputs: ranks that come to the end of their inputs join, and stand in for themselves meanwhile.

Fields of a case: ``counts`` is the number of inputs of each rank, ``way`` what joins, ``divisor`` by how many ranks
gradients are divided, and ``throws`` has every rank stop once one has no more inputs.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from shardlaw.conformance.law.act import law
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Near, Of
from shardlaw.conformance.law.fields import NamedMesh, Rank
from shardlaw.conformance.laws.module.arguments import ByRank, FromCase, ModuleCall
from shardlaw.conformance.laws.module.model_fields import copied_parameters
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.notation import NotationError
from shardlaw.strategies.modules import MLP, build_model, eighths

DIMS, PASSES = (3, 4, 2), 2
Way = Literal["method", "join", "held", "hook", "view", "unused", "optimizer", "buffers"]
CASES = (
    "mesh=2 counts=1,3 way=method",
    "mesh=3 counts=2,0,3 way=join divisor=active",
    "mesh=2 counts=3,1 way=held",
    "mesh=2 counts=1,2 way=hook",
    "mesh=3 counts=1,3,2 way=view",
    "mesh=2 counts=2,1 way=unused divisor=active",
    "mesh=2@1,2 counts=1,3 way=join",
    "mesh=2 counts=2,2 way=optimizer",
    "mesh=2 counts=1,3 way=optimizer",
    "mesh=2 counts=1,3 way=method throws=yes",
    "mesh=3 counts=3,2,2 way=join throws=yes",
    "mesh=2 counts=1,3 way=buffers",
    "mesh=3 counts=1,0,2 way=buffers",
)


def read_model(case: Case) -> ModuleCall:
    return ModuleCall(build_model, (MLP, DIMS, True, case.seed))


def read_inputs(case: Case) -> ByRank:
    """The inputs of each rank: for each of its steps, those of its passes."""
    counts, mesh = [int(count) for count in case.get("counts").split(",")], case.mesh()
    if len(counts) != mesh.size:
        raise NotationError(f"counts={case.get('counts')}: want one for each of {mesh.size} ranks")

    def inputs_of(rank: int) -> list[list[torch.Tensor]]:
        steps = range(counts[mesh.ranks.index(rank)]) if rank in mesh.ranks else ()
        return [
            [eighths((2, DIMS[0]), case.seed + 7 * rank + PASSES * step + n) for n in range(PASSES)] for step in steps
        ]

    return ByRank(inputs_of, [inputs_of(rank) for rank in mesh.ranks])


# Plain torch, for acts


def note_input(model: Any, given: tuple[Any, ...]) -> None:
    """Add what a model is given to a buffer."""
    model.seen += given[0].detach().sum(0)


def joined(parallel: Any, optim: Any, way: str, divisor: str, throws: bool) -> Any:
    """The context in which ranks may join."""
    options = {"divide_by_initial_world_size": divisor == "all", "throw_on_early_termination": throws}
    if way == "method":
        return parallel.join(**options)
    return Join([parallel, optim] if way == "optimizer" else [parallel], **options)


def take_steps(parallel: Any, optim: Any, inputs: list[list[torch.Tensor]], way: str, done: list[int]) -> None:
    """Train with the inputs of this rank. The numbers of steps that are done are added to ``done``."""
    for number, passes in enumerate(inputs):
        optim.zero_grad()
        if way == "held":
            with parallel.no_sync():
                parallel(passes[0]).square().sum().backward()
        parallel(passes[1]).square().sum().backward()
        optim.step()
        done.append(number)


@law(
    "module.joined",
    source=(
        "torch.distributed.algorithms docs, Join, and DistributedDataParallel.join: training with uneven inputs; "
        "divide_by_initial_world_size, throw_on_early_termination"
    ),
    control=CASES[0],
    cases=CASES,
    features=lambda case: {"module", "backward", "repeated", f"way:{case.get('way')}"},
    needs=("all_reduce", "broadcast"),
    weight=0.1,
)
def join(
    mesh: NamedMesh,
    model: Annotated[nn.Module, FromCase(read_model)],
    inputs: Annotated[list[Any], FromCase(read_inputs, "counts")],
    way: Way,
    divisor: Literal["all", "active"] = "all",
    throws: bool = False,
):
    """Ranks that have fewer inputs than others join them: every rank has the parameters that training with all inputs
    gives, where gradients are divided by the number of all ranks or of those that have inputs left, and the buffers of
    the last rank. If ranks are to stop instead, each does once the first has no more inputs."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    if mesh.get_coordinate() is None:
        return {}
    group = mesh.get_group()
    model.register_buffer("seen", torch.zeros(DIMS[0], dtype=torch.float64))
    if way == "buffers":
        model.register_forward_pre_hook(note_input)
    parallel = DistributedDataParallel(
        model, process_group=group, gradient_as_bucket_view=way == "view", find_unused_parameters=way == "unused"
    )
    if way == "hook":
        parallel.register_comm_hook(group, allreduce_hook)
    if way == "optimizer":
        optim: Any = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, process_group=group, lr=0.25)
    else:
        optim = torch.optim.SGD(model.parameters(), lr=0.25)
    done = list[int]()
    try:
        with joined(parallel, optim, way, divisor, throws):
            take_steps(parallel, optim, inputs, way, done)
    except RuntimeError as error:
        if not throws or "exhausted" not in str(error):
            raise
    return {"steps": len(done), "parameters": copied_parameters(model), "seen": model.seen}


@join.due
def _(mesh: Mesh, model, inputs: list[Any], way: str, divisor: str, throws: bool, rank: Rank):
    if mesh.coord(rank) is None:
        return {}
    optim = torch.optim.SGD(model.parameters(), lr=0.25)
    counts = [len(steps) for steps in inputs]
    for number in range(min(counts) if throws else max(counts)):
        active = [steps[number] for steps in inputs if len(steps) > number]
        optim.zero_grad()
        for passes in active:
            for x in passes if way == "held" else passes[1:]:
                (model(x).square().sum() / (len(inputs) if divisor == "all" else len(active))).backward()
        optim.step()
    steps = min(counts) if throws else counts[mesh.ranks.index(rank)]
    last = inputs[counts.index(max(counts))] if way == "buffers" else []
    return {
        "steps": Of(steps),
        "parameters": {name: Near(full) for name, full in copied_parameters(model).items()},
        "seen": Near(sum((x.sum(0) for _, x in last), torch.zeros(DIMS[0], dtype=torch.float64))),
    }
