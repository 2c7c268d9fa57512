"""Laws of each parallel style: what it takes, what it gives, where it leaves parameters, and from which rank it takes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from conformance.case import Case
from conformance.law import Law, Limits
from conformance.laws import draws, scripts
from conformance.laws.module import plans as module_plans
from conformance.laws.module.given import near_dtensor
from conformance.laws.module.models import NEEDS
from conformance.laws.module.plans import Style, style
from conformance.report.reproducer import Script
from reference import simulate
from reference.layout import Layout
from reference.mesh import Mesh
from reference.notation import Shape, format_shape
from reference.placement import Placement
from reference.placement import Replicate as R
from reference.placement import Shard as S
from strategies.modules import RMSNorm, eighths, indices

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from conformance.here import Here

DOC = "torch.distributed.tensor.parallel docs"
# how a plan names its module
KEYS = ("style", "path", "pattern", "path", "pattern", "path", "itself")

# a module by name: its text, where weight and bias lie under each style, and how many dims its weight adds
MODULES: dict[str, tuple[str, dict[str, tuple[Placement, Placement]]]] = {
    "linear": ("nn.Linear(%d, %d)", {"ColwiseParallel": (S(0), S(0)), "RowwiseParallel": (S(1), R())}),
    "embedding": ("nn.Embedding(%d, %d)", {"ColwiseParallel": (S(1), R()), "RowwiseParallel": (S(0), R())}),
    "layer-norm": ("nn.LayerNorm(%d, eps=0.125)", {"SequenceParallel": (R(), R())}),
    "rms-norm": ("RMSNorm(%d)", {"SequenceParallel": (R(), R())}),
    "dropout": ("nn.Dropout(0.5)", {"SequenceParallel": (R(), R())}),
}
DEFAULTS: dict[str, tuple[Placement, Placement]] = {"ColwiseParallel": (R(), S(-1)), "RowwiseParallel": (S(-1), R())}


def made(case: Case) -> nn.Module:
    """The module of a case in float64 with exact weights, in eval mode."""
    dims = case.shape("dims")
    match case.get("module"):
        case "linear":
            module: nn.Module = nn.Linear(dims[0], dims[1])
        case "embedding":
            module = nn.Embedding(dims[0], dims[1])
        case "layer-norm":
            module = nn.LayerNorm(dims[0], eps=0.125)
        case "rms-norm":
            module = RMSNorm(dims[0])
        case _:
            module = nn.Dropout(0.5)
    with torch.no_grad():
        for at, parameter in enumerate(module.double().parameters()):
            parameter.data = eighths(tuple(parameter.shape), case.seed + 3 * at)
            parameter.requires_grad = "frozen" not in case
    return module.eval()


def entry(case: Case) -> torch.Tensor:
    """The whole input: floats, or indices for an embedding."""
    shape = case.shape("input")
    if case.get("module") == "embedding":
        return indices(shape, case.shape("dims")[0], case.seed)
    return eighths(shape, case.seed + 5)


def asked(case: Case) -> Style:
    """The style of a case with the options that it names."""
    name, options = case.get("style"), dict[str, Any]()
    for field, option in (("from", "input_layouts"), ("to", "output_layouts")):
        if field in case and name != "SequenceParallel":
            options[option] = case.placements(field)[0]
    if name == "SequenceParallel" and "dim" in case:
        options["sequence_dim"] = case.integer("dim")
    if "local" in case:
        options["use_local_output"] = case.get("local") == "yes"
    return style(name, **options)


def ends(case: Case) -> tuple[Placement, Placement, bool]:
    """How the input is laid out, how the output must be, and whether it must be a local tensor."""
    name = case.get("style")
    if name == "SequenceParallel":
        at: Placement = S(case.integer("dim", 1))
        return (case.placements("from")[0] if "from" in case else at), at, case.get("local", "no") == "yes"
    before, after = DEFAULTS[name]
    before = case.placements("from")[0] if "from" in case else before
    return before, case.placements("to")[0] if "to" in case else after, case.get("local", "yes") == "yes"


def taken(full: torch.Tensor, at: Placement, mesh: Mesh, rank: int) -> torch.Tensor:
    """What a rank holds of a tensor."""
    coord = mesh.coord(rank)
    assert coord is not None
    return simulate.take(full, Layout(tuple(full.shape), mesh, (at,)), coord).contiguous()


def check_styles(case: Case, here: Here) -> None:
    """The output is the dense one, laid out and wrapped as asked; parameters lie as documented, frozen ones stay frozen."""
    mesh, dense = case.mesh(), made(case)
    before, after, local = ends(case)
    module = parallelize_module(made(case).to(here.device), here.mesh(mesh), asked(case).make())
    for at, (name, parameter) in zip(MODULES[case.get("module")][1][case.get("style")], list(module.named_parameters()), strict=False):
        near_dtensor(here, parameter, dict(dense.named_parameters())[name], name, name, (at,))
        due = "frozen" not in case
        here.require(parameter.requires_grad is due, "wrong-metadata", "frozen", f"requires_grad of {name} differs", due, not due)
    whole = entry(case)
    want, given = dense(whole).detach(), here.tensor(taken(whole, before, mesh, here.rank))
    if "wrapped" in case:
        given = DTensor.from_local(given, here.mesh(mesh), here.placements((before,)), shape=whole.shape, stride=whole.stride())
    with torch.no_grad():
        got = module(given)
    kind = "a local tensor" if local else "a DTensor"
    if not here.require(isinstance(got, DTensor) is not local, "wrong-metadata", "kind", f"the output must be {kind}", kind, type(got)):
        return
    if local:
        here.same(got, taken(want, after, mesh, here.rank), "output", exact=False, what="the output")
    else:
        near_dtensor(here, got, want, "output", "the output", (after,))


def features_styles(case: Case) -> set[str]:
    found = {"module", f"style:{case.get('style')}"} | ({"frozen"} if "frozen" in case else set())
    ranks, shape = case.mesh().size, case.shape("input")
    extents = [shape[at.dim] for at in ends(case)[:2] if isinstance(at, S) and -len(shape) <= at.dim < len(shape)]
    return found | ({"uneven"} if any(extent % ranks for extent in (*extents, *case.shape("dims"))) else set())


def script_styles(case: Case) -> Script:
    mesh, dense, one = case.mesh(), made(case), asked(case)
    before, after, local = ends(case)
    text, whole = MODULES[case.get("module")][0], entry(case)
    if case.get("module") == "rms-norm":
        text = "nn.RMSNorm(%d, eps=0.125)"
    text = text % case.shape("dims")[: text.count("%d")]
    want = dense(whole).detach()
    body = [f"mesh, module = {scripts.mesh(mesh)}, {text}.double().eval()"]
    for name, parameter in dense.named_parameters():
        body += [f"module.{name} = nn.Parameter({scripts.tensor(parameter)}, {parameter.requires_grad})"]
    body += [f"parallelize_module(module, mesh, {one})", "x = X[rank]"]
    if "wrapped" in case:
        at = scripts.placements((before,))
        body += [f"x = DTensor.from_local(x, mesh, {at}, shape={tuple(whole.shape)}, stride={whole.stride()})"]
    body += ["out = module(x)", "kind, asks = isinstance(out, DTensor), [p.requires_grad for p in module.parameters()]"]
    body += ["out = out.to_local() if kind else out"]
    asks = [parameter.requires_grad for parameter in dense.parameters()]
    body += [f"return ({not local}, {asks}, WANT[rank]), (kind, asks, out.detach())"]
    constants = scripts.tensors("X", {rank: taken(whole, before, mesh, rank) for rank in mesh.ranks})
    constants += scripts.tensors("WANT", {rank: taken(want, after, mesh, rank) for rank in mesh.ranks})
    told = scripts.script(body, world=case.world, constants=constants)
    return Script(told.stages, (*told.imports, "from torch import nn", module_plans.imports([one])), told.constants, tolerance=1e-6)


def lines(limits: Limits) -> list[Mesh]:
    """Meshes of one dim over the whole world."""
    return [mesh for mesh in map(Mesh.parse, ("2", "2", "3", "3", "4")) if mesh.size <= limits.world_size]


def _dealt(mesh: Mesh, at: Placement, shape: Shape) -> bool:
    return not isinstance(at, S) or at.dim >= len(shape) or shape[at.dim] % mesh.size == 0


def draw_weighed(kind: str) -> Any:
    """Cases of a style that shards the weight of a linear layer or an embedding."""

    def strategy(limits: Limits) -> SearchStrategy[Case]:
        on, sizes = lines(limits), st.sampled_from([5, 3, 7, 4, 6, 8])

        @st.composite
        def case(draw: st.DrawFn) -> Case:
            mesh, name = draw(st.sampled_from(on)), draw(st.sampled_from(["linear", "linear", "embedding"]))
            dims = draw(st.tuples(sizes, sizes))
            lead = draw(st.sampled_from([(4,), (3,), (6, 2), (2, 5)]))
            shape = (*lead, dims[0]) if name == "linear" else lead
            options = [None, R(), S(0), S(-1)]
            before, after = draw(st.sampled_from(options)), draw(st.sampled_from([*options, S(1)]))
            if name == "embedding" and kind == "RowwiseParallel" and before is None:
                before = R()
            real = before or DEFAULTS[kind][0]
            wrapped = draw(st.sampled_from([None, 1])) if _dealt(mesh, real, shape) else 1
            local = draw(st.sampled_from([None, None, "yes", "no"]))
            frozen = draw(st.sampled_from([None, None, None, 1]))
            fields: dict[str, Any] = {
                "from_": before,
                "to": after,
                "local": local,
                "wrapped": wrapped,
                "frozen": frozen,
                "seed": draw(draws.seeds()),
            }
            law, at = f"module.styles[{'colwise' if kind.startswith('C') else 'rowwise'}]", format_shape(shape)
            return Case.of(law, mesh=mesh, style=kind, module=name, dims=format_shape(dims), input=at, **fields)

        def meant(case: Case) -> bool:
            """No rank is left without rows of the weight, nor without elements of what goes in and out."""
            parts = [*case.shape("dims"), *case.shape("input")]
            ranks = case.mesh().size
            return all(-(-extent // ranks) * (ranks - 1) < extent for extent in parts)

        return case().filter(meant)

    return strategy


def sweep_weighed(kind: str) -> Any:
    """Frozen parameters of either module, which few draws would meet."""
    law = f"module.styles[{'colwise' if kind.startswith('C') else 'rowwise'}]"
    linear: dict[str, Any] = {"module": "linear", "dims": "4x6", "input": "4x4"}
    embedding: dict[str, Any] = {"module": "embedding", "dims": "4x6", "input": "4", "from_": R()}
    cases = [Case.of(law, mesh="2", style=kind, **fields, frozen=1) for fields in (linear, embedding)]
    return lambda limits: cases


def draw_sequence(limits: Limits) -> SearchStrategy[Case]:
    on = lines(limits)

    @st.composite
    def case(draw: st.DrawFn) -> Case:
        mesh, name = draw(st.sampled_from(on)), draw(st.sampled_from(["layer-norm", "rms-norm", "dropout"]))
        width, dim = draw(st.sampled_from([3, 5, 4])), draw(st.sampled_from([None, 0, 1]))
        shape = [draw(st.sampled_from([4, 3, 5, 6])) for _ in range(2)]
        wrapped = draw(st.sampled_from([None, 1]))
        before = draw(st.sampled_from([None, R(), S(1 - (1 if dim is None else dim))])) if wrapped else None
        if not wrapped:
            shape[1 if dim is None else dim] = mesh.size * draw(st.sampled_from([1, 2]))
        frozen = draw(st.sampled_from([*[None] * 5, 1])) if name != "dropout" else None
        local = draw(st.sampled_from([None, None, "yes", "no"]))
        fields: dict[str, Any] = {
            "dim": dim,
            "from_": before,
            "local": local,
            "wrapped": wrapped,
            "frozen": frozen,
            "seed": draw(draws.seeds()),
        }
        shape = [max(extent, mesh.size) for extent in shape]  # fewer steps than ranks are no sequence to share
        at = format_shape((*shape, width))
        return Case.of("module.styles[sequence]", mesh=mesh, style="SequenceParallel", module=name, dims=width, input=at, **fields)

    return case()


def _source(case: Case, rank: int) -> list[tuple[str, torch.Tensor]]:
    """The parameters that a rank has before, by name: of a linear layer weight and bias, of an embedding its table."""
    dims = case.shape("dims")
    if case.get("module", "linear") == "embedding":
        return [("weight", eighths(dims, case.seed + rank))]
    return [("weight", eighths(dims[::-1], case.seed + rank)), ("bias", eighths(dims[1:], case.seed + rank + 5))]


def check_source(case: Case, here: Here) -> None:
    """Every rank has weights of its own; those that count are the source's, or each rank's own where the source is none."""
    mesh, source, key = case.mesh(), case.get("src"), case.get("key")
    kind = case.get("module", "linear")
    make: Any = nn.Linear if kind == "linear" else nn.Embedding
    net: Any = make(*case.shape("dims")).double()
    for name, own in _source(case, here.rank):
        getattr(net, name).data = here.tensor(own)
    plan: Any = style(case.get("style")).make()
    model = net if key in ("style", "itself") else nn.ModuleDict({"net": nn.ModuleDict({"inner": net})})
    whole = {"style": plan, "itself": {"": plan}, "path": {"net.inner": plan}, "pattern": {"n*.*": plan}}[key]
    parallelize_module(model, here.mesh(mesh), whole, src_data_rank=None if source == "own" else int(source))
    parts = _source(case, here.rank if source == "own" else mesh.ranks[int(source)])
    for (name, full), at in zip(parts, MODULES[kind][1][case.get("style")], strict=False):
        here.same_dtensor(getattr(net, name), full, name, placements=(at,))


def script_source(case: Case) -> Script:
    mesh, source, key, one = case.mesh(), case.get("src"), case.get("key"), style(case.get("style"))
    option = None if source == "own" else int(source)
    kind, places = case.get("module", "linear"), MODULES[case.get("module", "linear")][1][case.get("style")]
    made = "nn.Linear" if kind == "linear" else "nn.Embedding"
    body, constants, names = [f"mesh, net = {scripts.mesh(mesh)}, {made}{tuple(case.shape('dims'))}"], list[str](), list[str]()
    for at, (name, _) in enumerate(_source(case, 0)):
        own = {rank: _source(case, rank)[at][1] for rank in mesh.ranks}
        due = {rank: taken(own[rank if option is None else mesh.ranks[option]], places[at], mesh, rank) for rank in mesh.ranks}
        constants += [*scripts.tensors(name.upper(), own), *scripts.tensors(f"WANT_{name.upper()}", due)]
        body.append(f"net.{name}.data = {name.upper()}[rank]")
        names.append(name)
    model = "net" if key in ("style", "itself") else 'nn.ModuleDict({"net": nn.ModuleDict({"inner": net})})'
    plan = {"style": f"{one}", "itself": f'{{"": {one}}}', "path": f'{{"net.inner": {one}}}', "pattern": f'{{"n*.*": {one}}}'}[key]
    want, got = (", ".join(text.format(name=name, NAME=name.upper()) for name in names)
                 for text in ("WANT_{NAME}[rank]", "net.{name}.to_local().detach()"))  # fmt: skip
    body += [f"parallelize_module({model}, mesh, {plan}, src_data_rank={option})", f"return [{want}], [{got}]"]
    told = scripts.script(body, world=case.world, constants=constants)
    return Script(told.stages, (*told.imports, "from torch import nn", module_plans.imports([one])), told.constants)


def draw_source(limits: Limits) -> SearchStrategy[Case]:
    @st.composite
    def case(draw: st.DrawFn) -> Case:
        mesh, sizes = draw(st.sampled_from(lines(limits))), st.sampled_from([3, 5, 4])
        source, key = draw(st.sampled_from(["0", "1", str(mesh.size - 1), "own"])), draw(st.sampled_from(KEYS))
        dims, kind = draw(st.tuples(sizes, sizes)), draw(st.sampled_from(["ColwiseParallel", "RowwiseParallel"]))
        fields: dict[str, Any] = {"module": draw(st.sampled_from([None, None, "embedding"])), "dims": format_shape(dims)}
        return Case.of("module.source", mesh=mesh, style=kind, **fields, key=key, src=source, seed=draw(draws.seeds()))

    return case()


def sweep_source(limits: Limits) -> list[Case]:
    """Every kind of parameter, from the second rank: sharded and replicated ones."""
    kinds = [(style, module) for module in (None, "embedding") for style in ("ColwiseParallel", "RowwiseParallel")]
    return [Case.of("module.source", mesh="2", style=style, module=module, dims="3x4", key="path", src="1") for style, module in kinds]


def features_source(case: Case) -> set[str]:
    return {"module", f"way:{case.get('key')}"}


COLUMN_CONTROL = "module.styles[colwise] mesh=2 style=ColwiseParallel module=linear dims=5x4 input=4x5 to=S(0) local=no"
ROW_CONTROL = "module.styles[rowwise] mesh=2 style=RowwiseParallel module=linear dims=4x5 input=4x4 to=S(0)"
LAWS = (
    Law(
        id="module.styles[colwise]",
        clause="ColwiseParallel shards weights by columns and takes and gives what input_layouts, output_layouts and use_local_output say.",
        source=f"{DOC}, ColwiseParallel",
        check=check_styles,
        script=script_styles,
        features=features_styles,
        control=COLUMN_CONTROL,
        planted="colwise_always_gives_local_tensors",
        draw=draw_weighed("ColwiseParallel"),
        draws=11,
        sweep=sweep_weighed("ColwiseParallel"),
        sweeps=2,
        needs=NEEDS,
        weight=0.2,
    ),
    Law(
        id="module.styles[rowwise]",
        clause="RowwiseParallel shards weights by rows and takes and gives what input_layouts, output_layouts and use_local_output say.",
        source=f"{DOC}, RowwiseParallel",
        check=check_styles,
        script=script_styles,
        features=features_styles,
        control=ROW_CONTROL,
        planted="rowwise_stays_pending",
        draw=draw_weighed("RowwiseParallel"),
        draws=11,
        sweep=sweep_weighed("RowwiseParallel"),
        sweeps=2,
        needs=NEEDS,
        weight=0.2,
    ),
    Law(
        id="module.styles[sequence]",
        clause="SequenceParallel replicates parameters and works on the sequence dim, to which it moves a DTensor that comes otherwise.",
        source=f"{DOC}, SequenceParallel",
        check=check_styles,
        script=script_styles,
        features=features_styles,
        control="module.styles[sequence] mesh=2 style=SequenceParallel module=layer-norm dims=2 input=2x4x2 from=R wrapped=1",
        planted="sequence_stays_where_it_is",
        draw=draw_sequence,
        draws=12,
        needs=NEEDS,
        weight=0.2,
    ),
    Law(
        id="module.source",
        clause="parallelize_module takes parameters from the rank that src_data_rank names, or each rank's own where it names none.",
        source=f"{DOC}, parallelize_module (src_data_rank)",
        check=check_source,
        script=script_source,
        features=features_source,
        control="module.source mesh=2 style=ColwiseParallel dims=3x4 key=path src=1",
        planted="source_is_always_first",
        draw=draw_source,
        draws=8,
        sweep=sweep_source,
        sweeps=4,
        needs=("broadcast", "scatter"),
        weight=0.1,
    ),
)
