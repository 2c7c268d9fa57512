"""Laws of each parallel style: what it takes, what it gives, where it leaves parameters, and from which rank it takes
them."""

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
from shardlaw.conformance.laws.module.model_fields import NEEDS
from shardlaw.conformance.laws.shared import draws
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.notation import format_shape
from shardlaw.reference.placement import Placement
from shardlaw.reference.placement import Replicate as R
from shardlaw.reference.placement import Shard as S
from shardlaw.strategies.meshes import palette_meshes
from shardlaw.strategies.modules import LAYERS, build_layer, eighths, indices

DOC = "torch.distributed.tensor.parallel docs"
# how a plan names its module
KEYS = ("style", "path", "pattern", "path", "pattern", "path", "itself")
# where weight and bias of a layer lie under a style
PLACES: dict[str, tuple[Placement, ...]] = {
    "ColwiseParallel Linear": (S(0), S(0)),
    "RowwiseParallel Linear": (S(1), R()),
    "ColwiseParallel Embedding": (S(1),),
    "RowwiseParallel Embedding": (S(0),),
}
# which parameter asks for no gradient
FROZEN = {"": "", "1": "all", "weight": "weight", "bias": "bias"}
# how a style takes its input and lays its output out, where nothing else is asked for
ENDS: dict[str, tuple[Placement, Placement]] = {
    "ColwiseParallel": (R(), S(-1)),
    "RowwiseParallel": (S(-1), R()),
    "SequenceParallel": (S(1), S(1)),
}


@dataclass(frozen=True)
class Asked:
    """A style with the options that a case names: how its input is laid out, how its output must be, and whether that
    is a local tensor."""

    argument: Style
    before: Placement
    after: Placement
    local: bool

    def parameters(self, dense: nn.Module, mesh: Mesh) -> dict[str, Global]:
        """Where the parameters of a layer lie."""
        named = dict(dense.named_parameters())
        places = PLACES.get(f"{self.argument.name} {type(dense).__name__}", (R(),) * len(named))
        return {name: dtensor(mesh, whole, at) for (name, whole), at in zip(named.items(), places, strict=True)}


def asked(case: Case) -> Asked:
    """The style of a case by its class, and by the fields ``from``, ``to``, ``dim`` and ``local`` its options."""
    kind, options = WordField(ENDS).parse(case.get("style")), dict[str, Any]()
    before, after = ENDS[kind]
    if "dim" in case:
        before = after = S(case.integer("dim"))
        options["sequence_dim"] = case.integer("dim")
    if "from" in case:
        (before,) = case.placements("from")
        options |= {"input_layouts": before} if kind != "SequenceParallel" else {}
    if "to" in case:
        (after,) = case.placements("to")
        options["output_layouts"] = after
    local = case.get("local", "no" if kind == "SequenceParallel" else "yes") == "yes"
    return Asked(
        style(kind, **options, **({"use_local_output": local} if "local" in case else {})), before, after, local
    )


def input_of(case: Case) -> DTensorValue | ByRank:
    """The input of a layer, laid out as its style takes it: floats, or indices for an embedding."""
    shape, tokens = case.shape("input"), case.get("module") == "embedding"
    whole = indices(shape, case.shape("dims")[0], case.seed) if tokens else eighths(shape, case.seed + 5)
    return module_input(dtensor(case.mesh(), whole, asked(case).before), wrapped="wrapped" in case)


def layer_of(case: Case) -> ModuleCall:
    """``frozen=1`` stands for all parameters, another word for the one of this name."""
    name, frozen = WordField(LAYERS).parse(case.get("module")), WordField(FROZEN).parse(case.get("frozen", ""))
    return ModuleCall(build_layer, (name, case.shape("dims"), case.seed), {"frozen": FROZEN[frozen]} if frozen else {})


AskedStyle = Annotated[Any, FromCase(asked, "style", "from", "to", "dim", "local")]
Layer = Annotated[nn.Module, FromCase(layer_of, "module", "dims", "frozen")]
Input = Annotated[torch.Tensor, FromCase(input_of, "input", "wrapped")]


def styled(style: AskedStyle, module: Layer, input: Input, mesh: DeviceMesh):
    parallelize_module(module, mesh, style)
    with torch.no_grad():
        out = module(input)
    named = dict(module.named_parameters())
    return {"parameters": named, "trained": [parameter.requires_grad for parameter in named.values()], "output": out}


def styled_due(style: Asked, module, input: Global, mesh: Mesh, rank: Rank):
    with torch.no_grad():
        out = dtensor(mesh, module(input.full), style.after)
    return {
        "parameters": style.parameters(module, mesh),
        "trained": Of([parameter.requires_grad for parameter in module.parameters()]),
        "output": Near(out.local(rank)) if style.local else out.near(),
    }


def lines(limits: Limits) -> list[Mesh]:
    """Meshes of one dim over the whole world."""
    return palette_meshes(("2", "2", "3", "3", "4"), limits.world_size)


@st.composite
def drawn_weighed(draw: st.DrawFn, limits: Limits, kind: str) -> Case:
    sizes, options = st.sampled_from([5, 3, 7, 4, 6, 8]), [None, R(), S(0), S(-1)]
    mesh, name = draw(st.sampled_from(lines(limits))), draw(st.sampled_from(["linear", "linear", "embedding"]))
    dims = draw(st.tuples(sizes, sizes))
    lead = draw(st.sampled_from([(4,), (3,), (6, 2), (2, 5)]))
    shape = (*lead, dims[0]) if name == "linear" else lead
    before, after = draw(st.sampled_from(options)), draw(st.sampled_from([*options, S(1)]))
    if name == "embedding" and kind == "RowwiseParallel" and before is None:
        before = R()
    real = before or ENDS[kind][0]
    even = not isinstance(real, S) or real.dim >= len(shape) or shape[real.dim] % mesh.size == 0
    said: dict[str, Any] = {"from_": before, "to": after}
    wrapped = draw(st.sampled_from([None, 1])) if even else 1
    said["local"] = draw(st.sampled_from([None, None, "yes", "no"]))
    said |= {"wrapped": wrapped, "frozen": draw(st.sampled_from([None, None, None, 1])), "seed": draw(draws.seeds())}
    return fields(mesh=mesh, style=kind, module=name, dims=format_shape(dims), input=format_shape(shape), **said)


def draw_weighed(kind: str) -> Callable[[Limits], SearchStrategy[Case]]:
    """Cases of a style that shards the weight of a linear layer or an embedding."""

    def meant(case: Case) -> bool:
        """No rank is left without rows of the weight, nor without elements of what goes in and out."""
        parts, ranks = [*case.shape("dims"), *case.shape("input")], case.mesh().size
        return all(-(-extent // ranks) * (ranks - 1) < extent for extent in parts)

    return lambda limits: drawn_weighed(limits, kind).filter(meant)


def frozen(kind: str) -> Callable[[Limits], list[Case]]:
    """Frozen parameters of either module, which few draws would meet: all of them, and one beside one that is not."""
    return texts(
        f"mesh=2 style={kind} module=linear dims=4x6 input=4x4 frozen=1",
        f"mesh=2 style={kind} module=embedding dims=4x6 input=4 from=R frozen=1",
        f"mesh=2 style={kind} module=linear dims=4x6 input=4x4 frozen=bias",
        f"mesh=2 style={kind} module=linear dims=4x6 input=4x4 frozen=weight",
    )


@st.composite
def draw_sequence(draw: st.DrawFn, limits: Limits) -> Case:
    mesh, name = draw(st.sampled_from(lines(limits))), draw(st.sampled_from(["layer-norm", "rms-norm", "dropout"]))
    width, dim = draw(st.sampled_from([3, 5, 4])), draw(st.sampled_from([None, 0, 1]))
    shape = [draw(st.sampled_from([4, 3, 5, 6])) for _ in range(2)]
    wrapped, along = draw(st.sampled_from([None, 1])), 1 if dim is None else dim
    before = draw(st.sampled_from([None, R(), S(1 - along)])) if wrapped else None
    if not wrapped:
        shape[along] = mesh.size * draw(st.sampled_from([1, 2]))
    frozen = draw(st.sampled_from([*[None] * 5, 1])) if name != "dropout" else None
    said: dict[str, Any] = {"dim": dim, "from_": before, "local": draw(st.sampled_from([None, None, "yes", "no"]))}
    said |= {"wrapped": wrapped, "frozen": frozen, "seed": draw(draws.seeds())}
    shape = [max(extent, mesh.size) for extent in shape]  # fewer steps than ranks are no sequence to share
    return fields(
        mesh=mesh, style="SequenceParallel", module=name, dims=width, input=format_shape((*shape, width)), **said
    )


def features_styles(case: Case) -> set[str]:
    one, ranks, shape = asked(case), case.mesh().size, case.shape("input")
    found = {"module", f"style:{one.argument.name}"} | ({"frozen"} if "frozen" in case else set())
    extents = [
        shape[at.dim] for at in (one.before, one.after) if isinstance(at, S) and -len(shape) <= at.dim < len(shape)
    ]
    return found | ({"uneven"} if any(extent % ranks for extent in (*extents, *case.shape("dims"))) else set())


SAYS = "and takes and gives what input_layouts, output_layouts and use_local_output say."
LAWS = make_laws(
    styled,
    styled_due,
    {
        "module.styles[colwise]": {
            "clause": f"ColwiseParallel shards weights by columns {SAYS}",
            "source": f"{DOC}, ColwiseParallel",
            "control": "mesh=2 style=ColwiseParallel module=linear dims=5x4 input=4x5 to=S(0) local=no",
            "draw": draw_weighed("ColwiseParallel"),
            "draws": 11,
            "sweep": frozen("ColwiseParallel"),
            "sweeps": 4,
        },
        "module.styles[rowwise]": {
            "clause": f"RowwiseParallel shards weights by rows {SAYS}",
            "source": f"{DOC}, RowwiseParallel",
            "control": "mesh=2 style=RowwiseParallel module=linear dims=4x5 input=4x4 to=S(0)",
            "draw": draw_weighed("RowwiseParallel"),
            "draws": 11,
            "sweep": frozen("RowwiseParallel"),
            "sweeps": 4,
        },
        "module.styles[sequence]": {
            "clause": (
                "SequenceParallel replicates parameters and works on the sequence dim, to which it moves a DTensor "
                "that comes otherwise."
            ),
            "source": f"{DOC}, SequenceParallel",
            "control": "mesh=2 style=SequenceParallel module=layer-norm dims=2 input=2x4x2 from=R wrapped=1",
            "draw": draw_sequence,
            "draws": 12,
        },
    },
    features=features_styles,
    needs=NEEDS,
    weight=0.2,
)


@st.composite
def draw_source(draw: st.DrawFn, limits: Limits) -> Case:
    mesh, sizes = draw(st.sampled_from(lines(limits))), st.sampled_from([3, 5, 4])
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
    # every kind of parameter, from the second rank: sharded and replicated ones
    sweep=texts(
        *(
            f"mesh=2 style={style} {module}dims=3x4 key=path src=1"
            for module in ("", "module=embedding ")
            for style in ("ColwiseParallel", "RowwiseParallel")
        )
    ),
    sweeps=4,
    features=lambda case: {"module", f"way:{case.get('key')}"},
    needs=("broadcast", "scatter"),
    weight=0.1,
)
def source(
    style: AskedStyle,
    mesh: DeviceMesh,
    dims: Shape,
    rank: Rank,
    seed: Seed,
    key: Literal["style", "itself", "path", "pattern"],
    src: Annotated[str, WordField([*map(str, range(8)), "own"])],
    module: Literal["linear", "embedding"] = "linear",
):
    """parallelize_module takes parameters from the rank that src_data_rank names, or each rank's own where it names
    none."""
    net = build_layer(module, dims, seed + rank).to(mesh.device_type)  # every rank has weights of its own
    model = net if key in ("style", "itself") else nn.ModuleDict({"net": nn.ModuleDict({"inner": net})})
    plan = {"style": style, "itself": {"": style}, "path": {"net.inner": style}, "pattern": {"n*.*": style}}[key]
    parallelize_module(model, mesh, plan, src_data_rank=None if src == "own" else int(src))
    return dict(net.named_parameters())


@source.due
def _(style: Asked, mesh: Mesh, dims, rank, seed, src, module):
    return style.parameters(build_layer(module, dims, seed + (rank if src == "own" else mesh.ranks[int(src)])), mesh)
