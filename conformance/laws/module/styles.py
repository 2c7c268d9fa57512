"""Laws of each parallel style: its input and output layouts, the placements of parameters, and the rank that parameters
come from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from shardlaw.conformance.law.act import fields, law, texts
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Global, Near, Of
from shardlaw.conformance.law.fields import Rank, Seed, Shape, WordField
from shardlaw.conformance.law.law import Limits
from shardlaw.conformance.laws.module.arguments import (
    ByRank,
    DTensorValue,
    FromCase,
    ModuleCall,
    Style,
    dtensor,
    make_laws,
    module_input,
    style,
)
from shardlaw.conformance.laws.module.model_fields import NEEDS, uneven
from shardlaw.conformance.laws.shared import draws
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.notation import format_shape
from shardlaw.reference.placement import Placement
from shardlaw.reference.placement import Replicate as R
from shardlaw.reference.placement import Shard as S
from shardlaw.strategies.meshes import palette_meshes
from shardlaw.strategies.modules import LAYERS, build_layer, eighths, indices

DOC = "torch.distributed.tensor.parallel docs"
# how a plan names its module, for draws
KEYS = ("style", "path", "pattern", "path", "pattern", "path", "itself")
# placements of weight and bias, by style and layer
PARAMETER_PLACEMENTS: dict[str, tuple[Placement, ...]] = {
    "ColwiseParallel Linear": (S(0), S(0)),
    "RowwiseParallel Linear": (S(1), R()),
    "ColwiseParallel Embedding": (S(1),),
    "RowwiseParallel Embedding": (S(0),),
}
# values of the field ``frozen``: the parameters without a gradient
FROZEN = {"": "", "1": "all", "weight": "weight", "bias": "bias"}
# input and output layout of a style without options
DEFAULT_LAYOUTS: dict[str, tuple[Placement, Placement]] = {
    "ColwiseParallel": (R(), S(-1)),
    "RowwiseParallel": (S(-1), R()),
    "SequenceParallel": (S(1), S(1)),
}


@dataclass(frozen=True)
class StyleOptions:
    """The style of a case, with its input layout, its output layout, and whether its output is a local tensor."""

    argument: Style
    input_layout: Placement
    output_layout: Placement
    local: bool

    def parameters(self, dense: nn.Module, mesh: Mesh) -> dict[str, Global]:
        """The due parameters of a layer."""
        named = dict(dense.named_parameters())
        layers = (f"{self.argument.name} {kind.__name__}" for kind in type(dense).__mro__)  # a subclass as its base
        known = (PARAMETER_PLACEMENTS[layer] for layer in layers if layer in PARAMETER_PLACEMENTS)
        placements = next(known, (R(),) * len(named))
        return {name: dtensor(mesh, full, at) for (name, full), at in zip(named.items(), placements, strict=True)}


def read_style(case: Case) -> StyleOptions:
    """The style of a case: its class, and its options from the fields ``from``, ``to``, ``dim`` and ``local``."""
    kind, options = WordField(DEFAULT_LAYOUTS).parse(case.get("style")), dict[str, Any]()
    input_layout, output_layout = DEFAULT_LAYOUTS[kind]
    if "dim" in case:
        input_layout = output_layout = S(case.integer("dim"))
        options["sequence_dim"] = case.integer("dim")
    if "from" in case:
        (input_layout,) = case.placements("from")
        options |= {"input_layouts": input_layout} if kind != "SequenceParallel" else {}
    if "to" in case:
        (output_layout,) = case.placements("to")
        options["output_layouts"] = output_layout
    local = case.get("local", "no" if kind == "SequenceParallel" else "yes") == "yes"
    if "local" in case:
        options["use_local_output"] = local
    return StyleOptions(style(kind, **options), input_layout, output_layout, local)


def read_input(case: Case) -> DTensorValue | ByRank:
    """The input of a layer, in the style's input layout: floats, or indices for an embedding."""
    shape, is_embedding = case.shape("input"), case.get("module") == "embedding"
    full = indices(shape, case.shape("dims")[0], case.seed) if is_embedding else eighths(shape, case.seed + 5)
    return module_input(dtensor(case.mesh(), full, read_style(case).input_layout), wrapped="wrapped" in case)


def read_layer(case: Case) -> ModuleCall:
    """The layer of a case. ``frozen`` is the name of the parameter without a gradient, or 1 for all parameters."""
    name, frozen = WordField(LAYERS).parse(case.get("module")), WordField(FROZEN).parse(case.get("frozen", ""))
    return ModuleCall(build_layer, (name, case.shape("dims"), case.seed), {"frozen": FROZEN[frozen]} if frozen else {})


LayerStyle = Annotated[Any, FromCase(read_style, "style", "from", "to", "dim", "local")]
Layer = Annotated[nn.Module, FromCase(read_layer, "module", "dims", "frozen")]
Input = Annotated[torch.Tensor, FromCase(read_input, "input", "wrapped")]


def styled(style: LayerStyle, module: Layer, input: Input, mesh: DeviceMesh, offset: float | None = None):
    parallelize_module(module, mesh, style)
    with torch.no_grad():
        out = module(input) if offset is None else module(input, offset)
    named = dict(module.named_parameters())
    return {"parameters": named, "trained": [parameter.requires_grad for parameter in named.values()], "output": out}


def styled_due(style: StyleOptions, module, input: Global, mesh: Mesh, offset: float | None, rank: Rank):
    with torch.no_grad():
        full = module(input.full) if offset is None else module(input.full, offset)
    out = dtensor(mesh, full, style.output_layout)
    return {
        "parameters": style.parameters(module, mesh),
        "trained": Of([parameter.requires_grad for parameter in module.parameters()]),
        "output": Near(out.local(rank)) if style.local else out.near(),
    }


def meshes_1d(limits: Limits) -> list[Mesh]:
    """1-D meshes over the whole world."""
    return palette_meshes(("2", "2", "3", "3", "4"), limits.world_size)


@st.composite
def weighted_cases(draw: st.DrawFn, limits: Limits, kind: str) -> Case:
    sizes, options = st.sampled_from([5, 3, 7, 4, 6, 8]), [None, R(), S(0), S(-1)]
    mesh, name = draw(st.sampled_from(meshes_1d(limits))), draw(st.sampled_from(["linear", "linear", "embedding"]))
    dims = draw(st.tuples(sizes, sizes))
    batch_shape = draw(st.sampled_from([(4,), (3,), (6, 2), (2, 5)]))
    shape = (*batch_shape, dims[0]) if name == "linear" else batch_shape
    source, to = draw(st.sampled_from(options)), draw(st.sampled_from([*options, S(1)]))
    if name == "embedding" and kind == "RowwiseParallel" and source is None:
        source = R()
    input_layout = source or DEFAULT_LAYOUTS[kind][0]
    even = not isinstance(input_layout, S) or input_layout.dim >= len(shape) or shape[input_layout.dim] % mesh.size == 0
    values: dict[str, Any] = {"from_": source, "to": to}
    wrapped = draw(st.sampled_from([None, 1])) if even else 1
    values["local"] = draw(st.sampled_from([None, None, "yes", "no"]))
    values |= {"wrapped": wrapped, "frozen": draw(st.sampled_from([None, None, None, 1])), "seed": draw(draws.seeds())}
    return fields(mesh=mesh, style=kind, module=name, dims=format_shape(dims), input=format_shape(shape), **values)


def draw_weighted(kind: str) -> Callable[[Limits], SearchStrategy[Case]]:
    """Cases of a style that shards the weight of a linear layer or an embedding."""

    def leaves_no_rank_empty(case: Case) -> bool:
        extents, ranks = [*case.shape("dims"), *case.shape("input")], case.mesh().size
        return all(-(-extent // ranks) * (ranks - 1) < extent for extent in extents)

    return lambda limits: weighted_cases(limits, kind).filter(leaves_no_rank_empty)


def sweep_weighted(kind: str) -> Callable[[Limits], list[Case]]:
    """Frozen parameters, which are seldom drawn: all of a layer, and one of two; and a layer with a second argument."""
    return texts(
        f"mesh=2 style={kind} module=linear dims=4x6 input=4x4 frozen=1",
        f"mesh=2 style={kind} module=embedding dims=4x6 input=4 from=R frozen=1",
        f"mesh=2 style={kind} module=linear dims=4x6 input=4x4 frozen=bias",
        f"mesh=2 style={kind} module=linear dims=4x6 input=4x4 frozen=weight",
        f"mesh=2 style={kind} module=offset-linear dims=4x6 input=4x4 offset=8.0",
    )


@st.composite
def draw_sequence(draw: st.DrawFn, limits: Limits) -> Case:
    mesh, name = draw(st.sampled_from(meshes_1d(limits))), draw(st.sampled_from(["layer-norm", "rms-norm", "dropout"]))
    width, dim = draw(st.sampled_from([3, 5, 4])), draw(st.sampled_from([None, 0, 1]))
    shape = [draw(st.sampled_from([4, 3, 5, 6])) for _ in range(2)]
    wrapped, sequence_dim = draw(st.sampled_from([None, 1])), 1 if dim is None else dim
    source = draw(st.sampled_from([None, R(), S(1 - sequence_dim)])) if wrapped else None
    if not wrapped:
        shape[sequence_dim] = mesh.size * draw(st.sampled_from([1, 2]))
    frozen = draw(st.sampled_from([*[None] * 5, 1])) if name != "dropout" else None
    values: dict[str, Any] = {"dim": dim, "from_": source, "local": draw(st.sampled_from([None, None, "yes", "no"]))}
    values |= {"wrapped": wrapped, "frozen": frozen, "seed": draw(draws.seeds())}
    shape = [max(extent, mesh.size) for extent in shape]  # a sequence has at least as many steps as ranks
    return fields(
        mesh=mesh, style="SequenceParallel", module=name, dims=width, input=format_shape((*shape, width)), **values
    )


def features_styles(case: Case) -> set[str]:
    style, shape = read_style(case), case.shape("input")
    found = {"module", f"style:{style.argument.name}"} | ({"frozen"} if "frozen" in case else set())
    layouts = (style.input_layout, style.output_layout)
    extents = [shape[at.dim] for at in layouts if isinstance(at, S) and -len(shape) <= at.dim < len(shape)]
    return found | uneven((*extents, *case.shape("dims")), case.mesh().size)


LAYOUT_OPTIONS = (
    "and has the layouts that input_layouts, output_layouts and use_local_output say; further arguments pass unchanged."
)
LAWS = make_laws(
    styled,
    styled_due,
    {
        "module.styles[colwise]": {
            "clause": f"ColwiseParallel shards weights by columns {LAYOUT_OPTIONS}",
            "source": f"{DOC}, ColwiseParallel",
            "control": "mesh=2 style=ColwiseParallel module=linear dims=5x4 input=4x5 to=S(0) local=no",
            "draw": draw_weighted("ColwiseParallel"),
            "draws": 11,
            "sweep": sweep_weighted("ColwiseParallel"),
            "sweeps": 5,
        },
        "module.styles[rowwise]": {
            "clause": f"RowwiseParallel shards weights by rows {LAYOUT_OPTIONS}",
            "source": f"{DOC}, RowwiseParallel",
            "control": "mesh=2 style=RowwiseParallel module=linear dims=4x5 input=4x4 to=S(0)",
            "draw": draw_weighted("RowwiseParallel"),
            "draws": 11,
            "sweep": sweep_weighted("RowwiseParallel"),
            "sweeps": 5,
        },
        "module.styles[sequence]": {
            "clause": (
                "SequenceParallel replicates parameters and shards the sequence dim of its input, also of a DTensor "
                "with another placement; further arguments pass unchanged."
            ),
            "source": f"{DOC}, SequenceParallel",
            "control": "mesh=2 style=SequenceParallel module=layer-norm dims=2 input=2x4x2 from=R wrapped=1",
            "draw": draw_sequence,
            "draws": 12,
            "sweep": texts(
                "mesh=2 style=SequenceParallel module=layer-norm dims=4 input=4x3x4 dim=0",
                "mesh=2 style=SequenceParallel module=offset-norm dims=4 input=2x4x4 offset=8.0",
            ),
            "sweeps": 2,
        },
    },
    features=features_styles,
    needs=NEEDS,
    weight=0.2,
)


@st.composite
def draw_source(draw: st.DrawFn, limits: Limits) -> Case:
    mesh, sizes = draw(st.sampled_from(meshes_1d(limits))), st.sampled_from([3, 5, 4])
    source, key = draw(st.sampled_from(["0", "1", str(mesh.size - 1), "own"])), draw(st.sampled_from(KEYS))
    dims, kind = draw(st.tuples(sizes, sizes)), draw(st.sampled_from(["ColwiseParallel", "RowwiseParallel"]))
    module = draw(st.sampled_from([None, None, "embedding"]))
    return fields(
        mesh=mesh, style=kind, module=module, dims=format_shape(dims), key=key, src=source, seed=draw(draws.seeds())
    )


@law(
    "module.source",
    source=f"{DOC}, parallelize_module (src_data_rank)",
    control="mesh=2 style=ColwiseParallel dims=3x4 key=path src=1",
    draw=draw_source,
    draws=8,
    # sharded and replicated parameters, from the second rank
    cases=[
        f"mesh=2 style={style} {module}dims=3x4 key=path src=1"
        for module in ("", "module=embedding ")
        for style in ("ColwiseParallel", "RowwiseParallel")
    ],
    features=lambda case: {"module", f"way:{case.get('key')}"},
    needs=("broadcast", "scatter"),
    weight=0.1,
)
def source(
    style: LayerStyle,
    mesh: DeviceMesh,
    dims: Shape,
    rank: Rank,
    seed: Seed,
    key: Literal["style", "itself", "path", "pattern"],
    src: Annotated[str, WordField([*map(str, range(8)), "own"])],
    module: Literal["linear", "embedding"] = "linear",
):
    """parallelize_module takes parameters from the rank src_data_rank, or each rank's own if that is None."""
    net = build_layer(module, dims, seed + rank).to(mesh.device_type)  # every rank has weights of its own
    model = net if key in ("style", "itself") else nn.ModuleDict({"net": nn.ModuleDict({"inner": net})})
    plan = {"style": style, "itself": {"": style}, "path": {"net.inner": style}, "pattern": {"n*.*": style}}[key]
    parallelize_module(model, mesh, plan, src_data_rank=None if src == "own" else int(src))
    return dict(net.named_parameters())


@source.due
def _(style: StyleOptions, mesh: Mesh, dims, rank, seed, src, module):
    return style.parameters(build_layer(module, dims, seed + (rank if src == "own" else mesh.ranks[int(src)])), mesh)
