"""Laws of modules whose parameters and buffers are distributed: by ``distribute_module``, and by the parallel styles."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from conformance.case import Case
from conformance.law import Law, Limits
from conformance.laws import draws, scripts
from conformance.laws.given import given
from conformance.laws.layout.distribute import of_rank
from conformance.report.reproducer import Script
from reference.layout import Layout
from reference.mesh import Mesh
from reference.placement import Placements
from reference.placement import Replicate as RefReplicate
from reference.placement import Shard as RefShard
from reference.tensors import TensorSpec, dense
from strategies import shapes
from strategies.placements import placements

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from conformance.here import Here

DOC = "torch.distributed.tensor docs, distribute_module"
STYLES_DOC = "torch.distributed.tensor.parallel docs, ColwiseParallel and RowwiseParallel"
HOOKS = ("none", "input", "output", "both")


class Table(nn.Module):
    """A module that gives back what it is given: a weight and a bias in a module inside, and a buffer."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor, buffer: torch.Tensor, *, frozen: bool) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.register_parameter("weight", nn.Parameter(weight, requires_grad=not frozen))
        self.inner.register_parameter("bias", nn.Parameter(bias))
        self.inner.register_parameter("none", None)
        self.register_buffer("kept", buffer)

    def forward(self, given: Any) -> Any:
        return given


def draw_module(limits: Limits) -> SearchStrategy[Case]:
    on = draws.meshes(limits, tables=False)
    hooks, arguments = st.sampled_from(HOOKS), st.sampled_from([3, 3, 2])
    frozen, fn = st.sampled_from([None, None, 1]), st.sampled_from(["some", "some", "some", "none"])
    others = shapes(min_dims=1, max_dims=2)  # of a 0-d tensor a rank outside holds a placeholder with an element

    @st.composite
    def case(draw: st.DrawFn) -> Case:
        mesh, shape = draw(st.sampled_from(on)), draw(shapes(min_dims=1))
        at = draw(placements(mesh, len(shape), kinds=("R", "S")))
        way, hook = draw(fn), draw(hooks)
        if way == "none":
            at = (RefReplicate(),) * mesh.ndim
        x, a, b = TensorSpec(shape, at), TensorSpec(draw(others)), TensorSpec(draw(others), None, "int64")
        count = draw(arguments) if hook != "none" else None
        return Case.of(
            "layout.module", mesh=mesh, x=x, a=a, b=b, fn=way, hooks=hook, arguments=count, frozen=draw(frozen), seed=draw(draws.seeds())
        )

    return case()


def _of(case: Case, name: str, rank: int) -> torch.Tensor:
    """The tensor ``name`` as ``rank`` has it before it is distributed."""
    return of_rank(case, rank) if name == "x" else case.tensor(name).build(case.seed + 7 * (rank + 1))


def check_module(case: Case, here: Here) -> None:
    """What partition_fn distributes is as it says, all else is replicated from the first rank; hooks see what goes in and out, once."""
    x, frozen = given(case), "frozen" in case
    mesh, live, at = x.layout.mesh, here.mesh(x.layout.mesh), here.placements(x.layout.placements)
    parts = [here.tensor(_of(case, name, here.rank)) for name in "xab"]
    module, met = Table(*parts, frozen=frozen), list[tuple[str, bool]]()

    def partition(name: str, part: nn.Module, on: Any) -> None:
        met.append((name, on is live))
        if name == "inner":
            own: Any = part.weight
            placed = distribute_tensor(own.data, on, at)
            part.register_parameter("weight", nn.Parameter(placed, requires_grad=not frozen))

    options, seen = _hooks(case, live)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        got = distribute_module(module, live, partition if case.get("fn") == "some" else None, **options)
    here.require(got is module, "wrong-metadata", "result", "it gives another module than it was given")
    if case.get("fn") == "some":
        here.require(met == [("", True), ("inner", True)], "wrong-value", "partition_fn", "partition_fn met other modules", "", met)
    if options:
        due = case.get("arguments") == "2"
        told = any(issubclass(one.category, FutureWarning) for one in warned)
        here.require(told is due, "wrong-metadata", "warning", "whether hooks of two arguments are warned of differs", due, told)
    first = mesh.rank_at((0,) * mesh.ndim)
    whole = (RefReplicate(),) * mesh.ndim
    weight, bias, kept = module.inner.weight, module.inner.bias, module.kept
    here.same_dtensor(weight, _of(case, "x", first), "weight", mesh=mesh, placements=x.layout.placements)
    here.same_dtensor(bias, _of(case, "a", first), "bias", mesh=mesh, placements=whole)
    here.same_dtensor(kept, _of(case, "b", first), "buffer", mesh=mesh, placements=whole)
    kinds = isinstance(weight, nn.Parameter), isinstance(bias, nn.Parameter), isinstance(kept, nn.Parameter)
    here.require(kinds == (True, True, False), "wrong-metadata", "kinds", "parameters and buffers are others than before", "", kinds)
    asks = weight.requires_grad, bias.requires_grad
    here.require(asks == (not frozen, True), "wrong-metadata", "requires_grad", "requires_grad differs", (not frozen, True), asks)
    names = sorted(dict(module.named_parameters())), sorted(dict(module.named_buffers()))
    here.require(names == (["inner.bias", "inner.weight"], ["kept"]), "wrong-metadata", "names", "names differ", "", names)
    passed = here.tensor(torch.ones(2))
    out = module(passed)
    want = [hook for hook in ("input", "output") if case.get("hooks") in (hook, "both")]
    here.require(seen == want, "wrong-value", "hooks", "other hooks ran than were given, or not once each", want, seen)
    if "output" in want:
        here.require(isinstance(out, tuple) and out[0] == "out", "wrong-value", "output", "what output_fn gives is not the result", "", out)
        out = out[1] if isinstance(out, tuple) else out
    here.require(
        isinstance(out, DTensor) is ("input" in want), "wrong-value", "input", "what input_fn gives is not the input", "", type(out)
    )


def _hooks(case: Case, mesh: Any) -> tuple[dict[str, Any], list[str]]:
    """The hooks of a case, with as many arguments as it says, and a list in which each notes that it ran."""
    seen: list[str] = []

    def enter(module: Any, inputs: Any, on: Any) -> Any:
        seen.append("input")
        return DTensor.from_local(inputs[0], on, [Replicate()] * on.ndim)

    def leave(module: Any, outputs: Any, on: Any) -> Any:
        seen.append("output")
        return "out", outputs

    def of_two(hook: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any], Any]:
        return lambda values, on: hook(None, values, on)

    chosen = {f"{name}_fn": hook for name, hook in (("input", enter), ("output", leave)) if case.get("hooks") in (name, "both")}
    return {name: of_two(hook) if case.get("arguments") == "2" else hook for name, hook in chosen.items()}, seen


def script_module(case: Case) -> Script:
    x = given(case)
    mesh, free = x.layout.mesh, "frozen" not in case
    first = mesh.rank_at((0,) * mesh.ndim)
    full, whole = _of(case, "x", first), scripts.placements(draws.replicated(x.layout))
    body = [
        f"mesh, w = {scripts.mesh(mesh)}, {scripts.tensor(full)}",
        "net = torch.nn.Module()",
        f"net.weight = torch.nn.Parameter(w if rank == {first} else w * 0, requires_grad={free})",
        f"net.bias = torch.nn.Parameter(torch.zeros({case.tensor('a').shape}))",
        f'net.register_buffer("kept", torch.zeros({case.tensor("b").shape}, dtype=torch.int64))',
        "def place(name, part, mesh):",
        f"    placed = distribute_tensor(part.weight.data, mesh, {scripts.placements(x.layout.placements)})",
        f"    part.weight = torch.nn.Parameter(placed, requires_grad={free})",
        f"distribute_module(net, mesh, {'place' if case.get('fn') == 'some' else None})",
        f"alike = all(list(t.placements) == {whole} for t in (net.bias, net.kept))",
        f"good = alike and net.weight.requires_grad == {free}",
    ]
    made = scripts.holds(case, body, "net.weight if good else None", full, x.layout)
    return Script(made.stages, (*made.imports, "from torch.distributed.tensor import distribute_module"), made.constants)


def _ready(here: Here, mesh: Mesh) -> nn.Module:
    return nn.Linear(3, 4, device=here.device)


def _again(here: Here, mesh: Mesh) -> object:
    return distribute_module(distribute_module(_ready(here, mesh), here.mesh(mesh)), here.mesh(mesh))


def _with(**hooks: Any) -> Callable[[Here, Mesh], object]:
    return lambda here, mesh: distribute_module(_ready(here, mesh), here.mesh(mesh), **hooks)


# what distribute_module refuses: how it is called, its text, and the error that is documented
ATTEMPTS: dict[str, tuple[Callable[[Here, Mesh], object], str, type[Exception]]] = {
    "again": (_again, "distribute_module(distribute_module(torch.nn.Linear(3, 4), mesh), mesh)", RuntimeError),
    "input-of-one": (_with(input_fn=lambda a: a), "distribute_module(torch.nn.Linear(3, 4), mesh, input_fn=lambda a: a)", ValueError),
    "input-of-four": (
        _with(input_fn=lambda a, b, c, d: a), "distribute_module(torch.nn.Linear(3, 4), mesh, input_fn=lambda a, b, c, d: a)", ValueError
    ),
    "output-of-one": (_with(output_fn=lambda a: a), "distribute_module(torch.nn.Linear(3, 4), mesh, output_fn=lambda a: a)", ValueError),
    "output-of-four": (
        _with(output_fn=lambda a, b, c, d: a), "distribute_module(torch.nn.Linear(3, 4), mesh, output_fn=lambda a, b, c, d: a)", ValueError
    ),
    "no-mesh": (lambda here, mesh: distribute_module(_ready(here, mesh)), "distribute_module(torch.nn.Linear(3, 4))", RuntimeError),
}  # fmt: skip


def sweep_refusals(limits: Limits) -> list[Case]:
    cases = [Case.of("layout.module-refusals", mesh=mesh, attempt=attempt) for attempt in ATTEMPTS for mesh in ("2", "1x2", "2x2", "2@0,2")]
    return [case for case in cases if case.world <= limits.world_size]


def check_refusals(case: Case, here: Here) -> None:
    """A module that is distributed already, hooks of other than two or three arguments, and no mesh at all are refused."""
    attempt, mesh = case.get("attempt"), case.mesh()
    here.mesh(mesh)
    call, text, error = ATTEMPTS[attempt]
    here.refused(lambda: call(here, mesh), attempt, text, errors=(error,))


def script_refusals(case: Case) -> Script:
    _, text, error = ATTEMPTS[case.get("attempt")]
    made = scripts.refused(case, [f"mesh = {scripts.mesh(case.mesh())}"], text, errors=error.__name__)
    return Script(made.stages, (*made.imports, "from torch.distributed.tensor import distribute_module"), made.constants)


# a style by name: the class that makes it, the module, and the placements of weight and bias
STYLES: dict[str, tuple[type[Any], str, Placements, Placements]] = {
    "colwise": (ColwiseParallel, "linear", (RefShard(0),), (RefShard(0),)),
    "rowwise": (RowwiseParallel, "linear", (RefShard(1),), (RefReplicate(),)),
    "colwise-embedding": (ColwiseParallel, "embedding", (RefShard(1),), ()),
    "rowwise-embedding": (RowwiseParallel, "embedding", (RefShard(0),), ()),
}


def draw_parallel(limits: Limits) -> SearchStrategy[Case]:
    on = draws.meshes(limits, dims=(1,), tables=False)

    @st.composite
    def case(draw: st.DrawFn) -> Case:
        mesh, style = draw(st.sampled_from(on)), draw(st.sampled_from([*STYLES, "pair"]))
        shape = draw(shapes(min_dims=2, max_dims=2, min_size=1))
        if style == "pair":
            shape = (mesh.size * draw(st.sampled_from([1, 2, 3])), shape[1])
            out = draw(shapes(min_dims=1, max_dims=1, min_size=1))
            spec = TensorSpec((*out, shape[0]), STYLES["rowwise"][2], fill="small")
            x = TensorSpec(shape, STYLES["colwise"][2], fill="small")
            return Case.of("layout.parallel", mesh=mesh, x=x, a=spec, style=style, seed=draw(draws.seeds()))
        return Case.of("layout.parallel", mesh=mesh, x=TensorSpec(shape, STYLES[style][2]), style=style, seed=draw(draws.seeds()))

    return case().filter(lambda case: case.get("style") != "pair" or 1 < case.mesh().size == case.world)


def _linear(weight: torch.Tensor, seed: int, here: Here) -> nn.Module:
    made = nn.Linear(weight.shape[1], weight.shape[0])
    with torch.no_grad():
        made.weight.copy_(weight)
        made.bias.copy_(dense((weight.shape[0],), weight.dtype, "small", seed))
    return made.to(here.device)


def _embedding(weight: torch.Tensor, here: Here) -> nn.Module:
    made = nn.Embedding(weight.shape[0], weight.shape[1])
    with torch.no_grad():
        made.weight.copy_(weight)
    return made.to(here.device)


def check_parallel(case: Case, here: Here) -> None:
    """A parallel style shards the weight and bias of its module as its name says; two of them in a row compute what the model did."""
    x, style, live = given(case), case.get("style"), here.mesh(case.mesh())
    with here.restoring_rng():
        if style == "pair":
            _check_pair(case, here)
            return
        kind, module, weight_at, bias_at = STYLES[style]
        net: Any = _linear(x.full, case.seed, here) if module == "linear" else _embedding(x.full, here)
    bias = dense((x.layout.shape[0],), x.full.dtype, "small", case.seed) if module == "linear" else None
    parallelize_module(net, live, kind())
    here.same_dtensor(net.weight, x.full, "weight", mesh=x.layout.mesh, placements=weight_at)
    if bias is not None:
        here.same_dtensor(net.bias, bias, "bias", mesh=x.layout.mesh, placements=bias_at)
    here.require(isinstance(net.weight, nn.Parameter), "wrong-metadata", "kind", "the weight is no parameter any more")


def _check_pair(case: Case, here: Here) -> None:
    x, second = given(case), given(case, "a")
    nets = [_linear(x.full, case.seed, here), nn.ReLU(), _linear(second.full, case.seed + 1, here)]
    entry = here.tensor(dense((3, x.layout.shape[1]), x.full.dtype, "small", case.seed + 2))
    want = nets[2](nets[1](nets[0](entry))).detach()
    model = parallelize_module(nn.Sequential(*nets), here.mesh(x.layout.mesh), {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for name, net, side in (("first", model[0], x), ("second", model[2], second)):  # type: ignore[index]
        here.same_dtensor(net.weight, side.full, name, mesh=x.layout.mesh, placements=side.layout.placements)
    # the bias is shared out among the ranks: over three of them that rounds
    here.same(model(entry), want, "forward", exact=False, what="what the model computes")


def script_parallel(case: Case) -> Script:
    x, style = given(case), case.get("style")
    imports = ("from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module",)
    shape = x.layout.shape
    body = [f"mesh, w = {scripts.mesh(x.layout.mesh)}, {scripts.tensor(x.full)}"]
    if style == "pair":
        second = given(case, "a")
        entry = scripts.tensor(dense((3, shape[1]), x.full.dtype, "small", case.seed + 2))
        body += [
            f"v, y = {scripts.tensor(second.full)}, {entry}",
            f"nets = [torch.nn.Linear({shape[1]}, {shape[0]}), torch.nn.ReLU(), torch.nn.Linear{second.layout.shape[::-1]}]",
            "nets[0].weight.data, nets[0].bias.data, nets[2].weight.data, nets[2].bias.data = w, w[:, 0].clone(), v, v[:, 0].clone()",
            "model = torch.nn.Sequential(*nets)",
            "want = model(y).detach()",
            'parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})',
            "return want, model(y).detach()",
        ]
        paired = scripts.script(body, world=case.world)
        made = Script(paired.stages, paired.imports, tolerance=1e-3)
    else:
        kind, module, at, _ = STYLES[style]
        made_of = f"torch.nn.Linear{shape[::-1]}" if module == "linear" else f"torch.nn.Embedding{shape}"
        body += [f"net = {made_of}", "net.weight.data = w", f"parallelize_module(net, mesh, {kind.__name__}())"]
        made = scripts.holds(case, body, "net.weight", x.full, Layout(shape, x.layout.mesh, at))
    return Script(made.stages, (*imports, *made.imports), made.constants, made.tolerance)


def sweep_module(limits: Limits) -> list[Case]:
    """The layouts of a partly replicated model on a 2-D mesh, and of one on a sub-mesh."""
    two = (("128x5", "R,S(0)", "128"), ("12x128", "R,S(1)", "12"))
    cases = [
        Case.of("layout.module", mesh="2x2", x=f"{w}:{at}", a=b, b="3:-:int64", fn="some", hooks="both", arguments=3) for w, at, b in two
    ]
    cases += [
        Case.of("layout.module", mesh="2@0,2", x=f"16x10:{at}", a="16", b="3:-:int64", fn="some", hooks="none")
        for at in ("S(0)", "S(1)", "R")
    ]
    return [case for case in cases if case.world <= limits.world_size]


LAWS = (
    Law(
        id="layout.module",
        clause="distribute_module leaves what partition_fn placed, replicates all other parameters and buffers, and installs the hooks.",
        source=DOC,
        check=check_module,
        script=script_module,
        control="layout.module mesh=2x2 x=5x6:R,S(0) a=5 b=3:-:int64 fn=some hooks=both arguments=3",
        planted="module_forgets_buffers",
        draw=draw_module,
        draws=60,
        sweep=sweep_module,
        sweeps=5,
        needs=("broadcast", "scatter"),
        weight=0.6,
    ),
    Law(
        id="layout.module-refusals",
        clause="A second call on a module, hooks of other than two or three arguments, and a call without any mesh are refused.",
        source=DOC,
        check=check_refusals,
        script=script_refusals,
        control="layout.module-refusals mesh=2 attempt=again",
        planted="module_is_distributed_again",
        sweep=sweep_refusals,
        sweeps=24,
        needs=("broadcast",),
        weight=0.2,
    ),
    Law(
        id="layout.parallel",
        clause="Column-wise and row-wise styles shard the weight and bias of a linear or an embedding, and in a row compute the same.",
        source=STYLES_DOC,
        check=check_parallel,
        script=script_parallel,
        control="layout.parallel mesh=2 x=5x6:S(0) style=colwise",
        planted="colwise_shards_rows",
        draw=draw_parallel,
        draws=50,
        needs=("broadcast", "scatter", "all_reduce"),
        weight=0.5,
    ),
)
