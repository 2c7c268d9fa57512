"""How the models of the zoo are parallelised: styles by name of module, and what follows from their documentation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any

import torch

from shardlaw.conformance.law.due import Claimed, Near
from shardlaw.conformance.laws.module.arguments import Style, on, style
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.placement import Placement
from shardlaw.reference.placement import Replicate as R
from shardlaw.reference.placement import Shard as S


@dataclass(frozen=True)
class Plan:
    """Styles by the names of modules, which are the ``argument`` of acts, and what is due under them.

    ``placed``: where the parameters of each pattern of names lie afterwards; others stay plain. ``entry`` and
    ``leave``: what a rank gives
    of the input and gets of the output; ``wrapped``: the output is a DTensor. ``even``: local tensors pass between the
    styles, so
    that what they shard has to split evenly.
    """

    argument: dict[str, Style]
    placed: Mapping[str, Placement]
    entry: Placement = field(default_factory=R)
    leave: Placement = field(default_factory=R)
    wrapped: bool = False
    even: bool = True

    def placement(self, name: str) -> Placement | None:
        """Where a parameter lies; ``None`` for a plain one."""
        return next((at for pattern, at in self.placed.items() if fnmatch(name, pattern)), None)

    def parameters(self, tensors: Mapping[str, torch.Tensor], mesh: Mesh) -> dict[str, Any]:
        """What is due of parameters that hold these dense ones, on the mesh that they are sharded on."""
        places = {name: self.placement(name) for name in tensors}
        return {name: on(mesh, tensors[name], at).near() if at else Near(tensors[name]) for name, at in places.items()}

    def gradients(self, tensors: Mapping[str, torch.Tensor | None], mesh: Mesh) -> dict[str, Any]:
        """What is due of gradients: those of sharded parameters may be placed in any way that is true."""
        return {
            name: None if whole is None else Claimed(whole, mesh, exact=False) if self.placement(name) else Near(whole)
            for name, whole in tensors.items()
        }

    def output(self, whole: torch.Tensor, mesh: Mesh, rank: int) -> Any:
        """What is due of the output on a rank."""
        out = on(mesh, whole, self.leave)
        return out.near() if self.wrapped else Near(out.local(rank))


COLUMNS, ROWS = style("ColwiseParallel"), style("RowwiseParallel")
KEPT_COLUMNS = style("ColwiseParallel", use_local_output=False)
SEQUENCE = style("SequenceParallel")
HEADS: dict[str, Placement] = {"wq.weight": S(0), "wk.weight": S(0), "wv.weight": S(0), "wo.weight": S(1)}
PAIRED: dict[str, Placement] = {"net1.weight": S(0), "net1.bias": S(0), "net2.weight": S(1), "net2.bias": R()}
FED: dict[str, Placement] = {"w1.weight": S(0), "w1.bias": S(0), "w2.weight": S(1), "w2.bias": R()}


def _under(prefix: str, placed: Mapping[str, Placement]) -> dict[str, Placement]:
    return {f"{prefix}.{name}": at for name, at in placed.items()}


def _attention(prefix: str, columns: Style, rows: Style) -> dict[str, Style]:
    return {f"{prefix}.wq": columns, f"{prefix}.wk": columns, f"{prefix}.wv": columns, f"{prefix}.wo": rows}


IN_LAYERS = {**_under("layers.*.attention", HEADS), **_under("layers.*.ffn", FED)}
BACK = style("RowwiseParallel", output_layouts=S(1), use_local_output=False)
GATHERED = style("PrepareModuleInput", input_layouts=S(1), desired_input_layouts=R())

PLANS: dict[str, dict[str, Plan]] = {
    "mlp": {
        "pair": Plan({"net1": COLUMNS, "net2": ROWS}, PAIRED),
        "gathered": Plan({"net1": style("ColwiseParallel", output_layouts=R())}, {"net1.*": S(0)}, even=False),
        "kept": Plan(
            {"net1": KEPT_COLUMNS, "net2": style("RowwiseParallel", output_layouts=S(-1), use_local_output=False)},
            PAIRED,
            leave=S(-1),
            wrapped=True,
            even=False,
        ),
        "scattered": Plan(
            {
                "net1": style("ColwiseParallel", input_layouts=S(0)),
                "net2": style("RowwiseParallel", output_layouts=S(0)),
            },
            PAIRED,
            entry=S(0),
            leave=S(0),
        ),
        "rows-first": Plan(
            {"net1": style("RowwiseParallel", input_layouts=R()), "net2": style("ColwiseParallel", output_layouts=R())},
            {"net1.weight": S(1), "net1.bias": R(), "net2.*": S(0)},
            even=False,
        ),
    },
    "stacked": {
        "pair": Plan({"layers.*.w1": COLUMNS, "layers.*.w2": ROWS}, _under("layers.*", FED)),
        "kept": Plan({"layers.*.w1": KEPT_COLUMNS, "layers.*.w2": ROWS}, _under("layers.*", FED), even=False),
    },
    "norm": {
        "sequence": Plan(
            {"norm": SEQUENCE, "out": style("ColwiseParallel", input_layouts=S(1), output_layouts=R())},
            {"norm.*": R(), "out.*": S(0)},
            entry=S(1),
        ),
        "local": Plan(
            {
                "norm": style("SequenceParallel", use_local_output=True),
                "out": style("ColwiseParallel", input_layouts=S(1), output_layouts=S(1)),
            },
            {"norm.*": R(), "out.*": S(0)},
            entry=S(1),
            leave=S(1),
        ),
        "replicated": Plan(
            {
                "": style("PrepareModuleInput", input_layouts=R(), desired_input_layouts=S(1)),
                "norm": SEQUENCE,
                "out": style("RowwiseParallel", input_layouts=S(1)),
            },
            {"norm.*": R(), "out.weight": S(1), "out.bias": R()},
            even=False,
        ),
    },
    "tied": {
        "local": Plan(
            {"tok": style("RowwiseParallel", input_layouts=R()), "out": style("ColwiseParallel", output_layouts=R())},
            {"*.weight": S(0)},
            even=False,
        ),
        "sequence": Plan(
            {
                "tok": style("RowwiseParallel", input_layouts=R(), output_layouts=S(1), use_local_output=False),
                "out": style("ColwiseParallel", input_layouts=S(1), output_layouts=R()),
            },
            {"*.weight": S(0)},
            even=False,
        ),
    },
    "attention": {
        "heads": Plan(
            _attention("attention", COLUMNS, ROWS),
            {**_under("attention", HEADS), "attention.w[qkv].bias": S(0), "*.bias": R()},
        ),
    },
    "transformer": {
        "tensor": Plan(
            {
                "tok": style("RowwiseParallel", input_layouts=R()),
                **_attention("layers.*.attention", COLUMNS, ROWS),
                "layers.*.ffn.w1": COLUMNS,
                "layers.*.ffn.w2": ROWS,
                "out": style("ColwiseParallel", output_layouts=R()),
            },
            {"tok.weight": S(0), "out.weight": S(0), **IN_LAYERS},
        ),
        "sequence": Plan(
            {
                "tok": style("RowwiseParallel", input_layouts=R(), output_layouts=S(1), use_local_output=False),
                "pos": style("RowwiseParallel", input_layouts=R(), output_layouts=S(0), use_local_output=False),
                "layers.*.attention_norm": SEQUENCE,
                "layers.*.attention": GATHERED,
                **_attention("layers.*.attention", COLUMNS, BACK),
                "layers.*.ffn_norm": SEQUENCE,
                "layers.*.ffn": GATHERED,
                "layers.*.ffn.w1": COLUMNS,
                "layers.*.ffn.w2": BACK,
                "norm": SEQUENCE,
                "out": style("ColwiseParallel", input_layouts=S(1), output_layouts=R()),
            },
            {"tok.weight": S(0), "pos.weight": S(0), "out.weight": S(0), "*norm.*": R(), **IN_LAYERS},
            even=False,
        ),
    },
}  # fmt: skip
