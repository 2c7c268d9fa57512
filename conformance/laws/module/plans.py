"""How the models of the zoo are parallelised: a style for each module, and the layouts that the styles document."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any

import torch

from shardlaw.conformance.law.due import Claimed, Near
from shardlaw.conformance.laws.module.arguments import Style, dtensor, style
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.placement import Placement
from shardlaw.reference.placement import Replicate as R
from shardlaw.reference.placement import Shard as S


@dataclass(frozen=True)
class Plan:
    """Styles by module name (``argument``, which the act gets), and the layouts that are due under them.

    ``placements``: the placement of the parameters whose names match a pattern; others stay plain tensors. ``entry``
    and ``leave``: how the input and output are sharded over the ranks. ``wrapped``: the output is a DTensor. ``even``:
    styles pass local tensors to one another, so the dims that they shard must divide by the number of ranks.
    """

    argument: dict[str, Style]
    placements: Mapping[str, Placement]
    entry: Placement = field(default_factory=R)
    leave: Placement = field(default_factory=R)
    wrapped: bool = False
    even: bool = True

    def placement(self, name: str) -> Placement | None:
        """The placement of a parameter; ``None`` if it stays a plain tensor."""
        return next((placement for pattern, placement in self.placements.items() if fnmatch(name, pattern)), None)

    def parameters(self, tensors: Mapping[str, torch.Tensor], mesh: Mesh) -> dict[str, Any]:
        """The due parameters on the mesh, given the dense ones by name."""

        def due(name: str, full: torch.Tensor) -> Any:
            placement = self.placement(name)
            return dtensor(mesh, full, placement).near() if placement else Near(full)

        return {name: due(name, full) for name, full in tensors.items()}

    def gradients(self, tensors: Mapping[str, torch.Tensor | None], mesh: Mesh) -> dict[str, Any]:
        """The due gradients; those of sharded parameters may have any placements, if these are true."""
        return {
            name: None if full is None else Claimed(full, mesh, exact=False) if self.placement(name) else Near(full)
            for name, full in tensors.items()
        }

    def output(self, full: torch.Tensor, mesh: Mesh, rank: int) -> Any:
        """The due output on a rank, given the dense one."""
        out = dtensor(mesh, full, self.leave)
        return out.near() if self.wrapped else Near(out.local(rank))


COLUMNS, ROWS = style("ColwiseParallel"), style("RowwiseParallel")
COLUMNS_DTENSOR = style("ColwiseParallel", use_local_output=False)
SEQUENCE = style("SequenceParallel")
# placements of parameters
ATTENTION: dict[str, Placement] = {
    "wq.weight": S(0),
    "wk.weight": S(0),
    "wv.weight": S(0),
    "wo.weight": S(1),
}
MLP: dict[str, Placement] = {"net1.weight": S(0), "net1.bias": S(0), "net2.weight": S(1), "net2.bias": R()}
FFN: dict[str, Placement] = {"w1.weight": S(0), "w1.bias": S(0), "w2.weight": S(1), "w2.bias": R()}


def _under(prefix: str, placements: Mapping[str, Placement]) -> dict[str, Placement]:
    return {f"{prefix}.{name}": placement for name, placement in placements.items()}


def _attention(prefix: str, columns: Style, rows: Style) -> dict[str, Style]:
    return {f"{prefix}.wq": columns, f"{prefix}.wk": columns, f"{prefix}.wv": columns, f"{prefix}.wo": rows}


LAYERS = {**_under("layers.*.attention", ATTENTION), **_under("layers.*.ffn", FFN)}
ROWS_TO_SEQUENCE = style("RowwiseParallel", output_layouts=S(1), use_local_output=False)
GATHER_SEQUENCE = style("PrepareModuleInput", input_layouts=S(1), desired_input_layouts=R())

PLANS: dict[str, dict[str, Plan]] = {
    "mlp": {
        "pair": Plan({"net1": COLUMNS, "net2": ROWS}, MLP),
        "gathered": Plan({"net1": style("ColwiseParallel", output_layouts=R())}, {"net1.*": S(0)}, even=False),
        "kept": Plan(
            {"net1": COLUMNS_DTENSOR, "net2": style("RowwiseParallel", output_layouts=S(-1), use_local_output=False)},
            MLP,
            leave=S(-1),
            wrapped=True,
            even=False,
        ),
        "scattered": Plan(
            {
                "net1": style("ColwiseParallel", input_layouts=S(0)),
                "net2": style("RowwiseParallel", output_layouts=S(0)),
            },
            MLP,
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
        "pair": Plan({"layers.*.w1": COLUMNS, "layers.*.w2": ROWS}, _under("layers.*", FFN)),
        "kept": Plan({"layers.*.w1": COLUMNS_DTENSOR, "layers.*.w2": ROWS}, _under("layers.*", FFN), even=False),
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
            {**_under("attention", ATTENTION), "attention.w[qkv].bias": S(0), "*.bias": R()},
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
            {"tok.weight": S(0), "out.weight": S(0), **LAYERS},
        ),
        "sequence": Plan(
            {
                "tok": style("RowwiseParallel", input_layouts=R(), output_layouts=S(1), use_local_output=False),
                "pos": style("RowwiseParallel", input_layouts=R(), output_layouts=S(0), use_local_output=False),
                "layers.*.attention_norm": SEQUENCE,
                "layers.*.attention": GATHER_SEQUENCE,
                **_attention("layers.*.attention", COLUMNS, ROWS_TO_SEQUENCE),
                "layers.*.ffn_norm": SEQUENCE,
                "layers.*.ffn": GATHER_SEQUENCE,
                "layers.*.ffn.w1": COLUMNS,
                "layers.*.ffn.w2": ROWS_TO_SEQUENCE,
                "norm": SEQUENCE,
                "out": style("ColwiseParallel", input_layouts=S(1), output_layouts=R()),
            },
            {"tok.weight": S(0), "pos.weight": S(0), "out.weight": S(0), "*norm.*": R(), **LAYERS},
            even=False,
        ),
    },
}  # fmt: skip
