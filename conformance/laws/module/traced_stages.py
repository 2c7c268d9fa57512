"""The law of a model that is traced and split into the stages of a pipeline.

Fields of a case: ``kind`` says what the parts of the model have beside a linear layer: a ``norm``, a weight that all of
them share (``shared``), or tensors that are no part of its state (``unsaved``). ``traced`` is the mode in which the
model is traced, ``mode`` that to which its stages are set afterwards.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import torch
from torch import nn
from torch.nn.functional import mse_loss

from shardlaw.conformance.law.act import law
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Near
from shardlaw.conformance.law.fields import NamedMesh, Rank, Seed
from shardlaw.conformance.laws.module.arguments import FromCase, ModuleCall
from shardlaw.conformance.laws.module.ddp import copied_gradients
from shardlaw.conformance.laws.module.pipelined import DOC, WIDTH, batch
from shardlaw.reference.mesh import Mesh
from shardlaw.strategies.modules import build_model

Kind = Literal["plain", "norm", "shared", "unsaved"]
Mode = Literal["train", "eval"]
CASES = (
    "mesh=2 kind=plain",
    "mesh=3 kind=norm",
    "mesh=2 kind=norm traced=eval mode=eval",
    "mesh=2 kind=norm mode=eval",
    "mesh=2 kind=norm traced=eval",
    "mesh=2 kind=shared",
    "mesh=2 kind=unsaved",
)


class Part(nn.Module):
    """A linear layer, and what the kind of the model says."""

    def __init__(self, width: int, bias: bool, kind: str) -> None:
        super().__init__()
        self.kind, self.net = kind, nn.Linear(width, width, bias)
        if kind == "norm":
            self.norm = nn.BatchNorm1d(width)
            self.norm.num_batches_tracked = None  # what is traced in eval mode does not use it, and so does not have it
        if kind == "unsaved":
            self.table = nn.Buffer(torch.full((width,), 0.5), persistent=False)
            self.shift = torch.full((width,), 0.25, dtype=torch.float64)

    def forward(self, x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        x = self.net(x) if weight is None else self.net(x) * weight
        if self.kind == "norm":
            x = self.norm(x)
        return x * self.table + self.shift if self.kind == "unsaved" else x


class Parts(nn.Module):
    """Parts one after the other."""

    def __init__(self, sizes: tuple[int, ...], bias: bool, kind: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(sizes[0])) if kind == "shared" else None
        self.parts = nn.ModuleList(Part(sizes[0], bias, kind) for _ in range(sizes[1]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x, self.weight)
        return x


def read_parts(case: Case) -> ModuleCall:
    return ModuleCall(build_model, (Parts, (WIDTH, *case.mesh().shape), True, case.seed), {"kind": case.get("kind")})


@law(
    "module.traced-stages",
    source=f"{DOC}, splitting a model automatically: the forward behavior is truly preserved, weights and hierarchies "
    "are the original ones, and with a stage an optimizer can be created, checkpoints saved or loaded",
    control=CASES[0],
    cases=CASES,
    features=lambda case: {"module", "backward", "way:gpipe"},
    needs=("p2p",),
    weight=0.1,
)
def traced_stages(
    model: Annotated[Any, FromCase(read_parts, "kind")],
    mesh: NamedMesh,
    kind: Kind,
    seed: Seed,
    traced: Mode = "train",
    mode: Mode = "train",
):
    """The stages into which a traced model is split compute what the model does in the mode to which they are set, have
    the gradients of all its uses of a parameter, and the part of its state that is theirs, under the same names."""
    from torch.distributed import pipelining

    model.train(traced == "train")
    x, target = batch(2, 0, seed, mesh.device_type)
    splits = {f"parts.{number}": pipelining.SplitPoint.BEGINNING for number in range(1, mesh.size())}
    place, group = mesh.get_local_rank(), mesh.get_group()
    pipe = pipelining.pipeline(model, (x[:3],), split_spec=splits)
    stage = pipe.build_stage(place, torch.device(mesh.device_type), group)
    stage.submod.train(mode == "train")
    losses: list[Any] = []
    last: dict[str, Any] = {"target": target, "losses": losses} if place == mesh.size() - 1 else {}
    out = pipelining.ScheduleGPipe(stage, 2, mse_loss).step(*([] if place else [x]), **last)
    state = {name: value.double() for name, value in stage.submod.state_dict().items()}
    return {"output": out, "losses": losses, "gradients": copied_gradients(stage.submod), "state": state}


@traced_stages.due
def _(model, mesh: Mesh, seed: int, mode: str, rank: Rank):
    model.train(mode == "train")
    ((ranks,), (place,)) = mesh.shape, mesh.coord(rank) or (0,)
    x, target = batch(2, 0, seed)
    results = [(model(part), wanted) for part, wanted in zip(x.split(3), target.split(3), strict=True)]
    found = [mse_loss(*pair) for pair in results]
    torch.stack(found).mean().backward()
    own = ("weight", f"parts.{place}.")
    state = {name: value.double() for name, value in model.state_dict().items() if name.startswith(own)}
    grads = {name: grad for name, grad in copied_gradients(model).items() if name in state}
    is_last = place == ranks - 1
    return {
        "output": Near(torch.cat([out for out, _ in results]).detach()) if is_last else None,
        "losses": [Near(loss.detach()) for loss in found] if is_last else [],
        "gradients": {name: Near(grad) for name, grad in grads.items()},
        "state": {name: Near(value) for name, value in state.items()},
    }
