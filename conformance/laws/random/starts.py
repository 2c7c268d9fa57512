"""Laws of where random numbers start: seeds on a mesh, and functions that initialise parameters."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import DTensor

from conformance import compat
from conformance.case import Case
from conformance.law import Law, Limits
from conformance.laws import draws, scripts
from conformance.laws.given import Given, given
from conformance.laws.random.numbers import DOC, inside
from conformance.report.reproducer import Script
from reference.mesh import Mesh
from reference.notation import Shape
from reference.tensors import TensorSpec
from strategies import shapes
from strategies.placements import placements

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from conformance.here import Here


def check_seed(case: Case, here: Here) -> None:
    """Where the device has random DTensors the generator is seeded; elsewhere it is left alone, and the user is warned."""
    mesh, live = case.mesh(), here.mesh(case.mesh())
    seed = case.integer("to")
    member, seeds = here.coord(mesh) is not None, compat.name("manual_seed")
    with here.restoring_rng(), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        supported = compat.name("is_rng_supported_mesh")(live)
        told.clear()
        torch.manual_seed(1)
        before = torch.rand(4)
        torch.manual_seed(1)
        if supported and not member:
            here.refused(lambda: seeds(seed, live), "outside", "a seed on a mesh without this rank", errors=(RuntimeError,))
            return
        seeds(seed, live)
        got = torch.rand(4)
        torch.manual_seed(seed)
        want = torch.rand(4) if supported else before
    here.same(got, want, "seeded", what="what is drawn next")
    here.require(supported or bool(told), "wrong-error", "warning", "nobody is told that the mesh has no random DTensors")


def draw_seed(limits: Limits) -> SearchStrategy[Case]:
    on = draws.meshes(limits, tables=False)
    return st.builds(lambda mesh, to: Case.of("random.seed", mesh=mesh, to=to), st.sampled_from(on), st.integers(2, 60))


def script_seed(case: Case) -> Script:
    body = [f"mesh = {scripts.mesh(case.mesh())}", "torch.manual_seed(1)", "want = torch.rand(4)", "torch.manual_seed(1)"]
    body += ["with warnings.catch_warnings(record=True) as told:", '    warnings.simplefilter("always")']
    body += [f"    manual_seed({case.get('to')}, mesh)", "return (want, True), (torch.rand(4), bool(told))"]
    made = scripts.script(body, world=case.world)
    return Script(made.stages, (*made.imports, "import warnings", "from torch.distributed.tensor._random import manual_seed"))


# a function that initialises: the text of the call, the call, and what it gives of a whole tensor, which is certain
FIXED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "zeros": ("nn.init.zeros_(x)", nn.init.zeros_),
    "ones": ("nn.init.ones_(x)", nn.init.ones_),
    "constant": ("nn.init.constant_(x, 2.5)", lambda x: nn.init.constant_(x, 2.5)),
    "uniform": ("nn.init.uniform_(x, 2.0, 2.0)", lambda x: nn.init.uniform_(x, 2.0, 2.0)),
    "normal": ("nn.init.normal_(x, 3.0, 0.0)", lambda x: nn.init.normal_(x, 3.0, 0.0)),
    "eye": ("nn.init.eye_(x)", nn.init.eye_),
    "dirac": ("nn.init.dirac_(x)", nn.init.dirac_),
    "xavier-none": ("nn.init.xavier_uniform_(x, 0.0)", lambda x: nn.init.xavier_uniform_(x, 0.0)),
}


def xavier(shape: Shape) -> float:
    """The bound that the whole tensor's fans give."""
    field = math.prod(shape[2:])
    return math.sqrt(6 / ((shape[0] + shape[1]) * field))


# by chance: the text of the call, the call, and the largest magnitude that the whole tensor's sizes allow
BOUNDED: dict[str, tuple[str, Callable[[Any], Any], Callable[[Shape], float]]] = {
    "xavier-uniform": ("nn.init.xavier_uniform_(x)", nn.init.xavier_uniform_, xavier),
    "kaiming-uniform": (
        "nn.init.kaiming_uniform_(x, math.sqrt(5))",
        lambda x: nn.init.kaiming_uniform_(x, math.sqrt(5)),
        lambda shape: 1 / math.sqrt(math.prod(shape[1:])),
    ),
    "kaiming-out": (
        "nn.init.kaiming_uniform_(x, math.sqrt(5), 'fan_out')",
        lambda x: nn.init.kaiming_uniform_(x, math.sqrt(5), "fan_out"),
        lambda shape: 1 / math.sqrt(shape[0] * math.prod(shape[2:])),
    ),
    "uniform-some": ("nn.init.uniform_(x, -2.0, 2.0)", lambda x: nn.init.uniform_(x, -2.0, 2.0), lambda shape: 2.0),
    "trunc-normal": ("nn.init.trunc_normal_(x)", nn.init.trunc_normal_, lambda shape: 2.0),
}


def parameter(case: Case, here: Here) -> tuple[Given, Any]:
    x = given(case)
    return x, nn.Parameter(x.dtensor(here).detach())


def check_init(case: Case, here: Here) -> None:
    """What is certain comes out as it does of the whole; what is by chance keeps the whole tensor's bounds, and replicas agree."""
    x, live = parameter(case, here)
    call = case.get("call")
    with here.restoring_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(case.seed + 1)
        got = (FIXED[call] if call in FIXED else BOUNDED[call])[1](live)
    here.require(got is live, "wrong-metadata", "itself", "another tensor than the one that was given comes back")
    if call in FIXED:
        want = FIXED[call][1](x.full.clone())
        here.same_dtensor(live.detach(), want, call, mesh=x.layout.mesh, placements=x.layout.placements)
        return
    most = BOUNDED[call][2](x.layout.shape)
    local = live.detach().to_local()
    kept = isinstance(live, DTensor) and live.requires_grad
    here.require(kept, "wrong-metadata", "kept", "the parameter is no longer one")
    out = local[local.abs() > most * (1 + 1e-6)]
    here.require(out.numel() == 0, "wrong-value", "bound", f"elements are larger than {most:.4f}", most, out)
    if local.numel() > 8:
        here.require(bool(local.abs().max() > 0), "wrong-value", "chance", "nothing was drawn")
    here.alike(live.detach().full_tensor(), x.layout.mesh, "replicas")


def draw_init(limits: Limits) -> SearchStrategy[Case]:
    on: list[Mesh] = inside(limits)
    often = [call for call in (*FIXED, *BOUNDED, *BOUNDED) if call not in ("eye", "dirac")]

    @st.composite
    def case(draw: st.DrawFn) -> Case:
        mesh, call = draw(st.sampled_from(on)), draw(st.sampled_from(often))
        dims = (3, 3) if call == "dirac" else (2, 2) if call not in ("zeros", "ones", "constant", "uniform", "normal") else (1, 3)
        shape = draw(shapes(min_dims=dims[0], max_dims=dims[1], min_size=1))
        at = draw(placements(mesh, len(shape), kinds=("R", "S", "S")))
        return Case.of("random.init", mesh=mesh, x=TensorSpec(shape, at), call=call, seed=draw(draws.seeds()))

    return case()


def sweep_init(limits: Limits) -> list[Case]:
    """What is known to deviate, and would hide the rest if it were drawn."""
    sizes = (("3", "8x4:S(1)", "eye"), ("2", "4x2:R", "eye"), ("3", "4x2x3:S(1)", "dirac"), ("2", "3x2x3:R", "dirac"))
    cases = [Case.of("random.init", mesh=mesh, x=x, call=call) for mesh, x, call in sizes]
    return [case for case in cases if case.world <= limits.world_size]


def features_init(case: Case) -> set[str]:
    call = case.get("call")
    return {"random", "in-place", f"init:{call}"} | ({"certain"} if call in FIXED else set())


def script_init(case: Case) -> Script:
    x, call = given(case), case.get("call")
    constants, body = scripts.source(x, case.world)
    body += ["x = nn.Parameter(x.detach())", f"torch.manual_seed({case.seed + 1})"]
    if call in FIXED:
        want = FIXED[call][1](x.full.clone())
        body += [FIXED[call][0], f"return {scripts.tensor(want)}, x.full_tensor().detach()"]
    else:
        body += [BOUNDED[call][0], "full = x.full_tensor().detach()", "first = full.clone()", "dist.broadcast(first, 0)"]
        body += [f"return (first, True), (full, bool(full.abs().max() <= {BOUNDED[call][2](x.layout.shape) * (1 + 1e-6)}))"]
    made = scripts.script(body, world=case.world, constants=constants)
    return Script(made.stages, (*made.imports, "import math", "from torch import nn"), made.constants)


LAWS = (
    Law(
        id="random.seed",
        clause="manual_seed on a mesh seeds its ranks where the device has random DTensors; elsewhere it warns and changes nothing.",
        source=f"{DOC}, docstring of manual_seed",
        check=check_seed,
        script=script_seed,
        features=lambda case: {"random"},
        control="random.seed mesh=2 to=7",
        planted="seeds_start_anywhere",
        draw=draw_seed,
        draws=8,
        weight=0.1,
    ),
    Law(
        id="random.init",
        clause="torch.nn.init gives a sharded parameter what it gives the whole: its values, bounds by its fans, and replicas that agree.",
        source="torch.nn.init; torch.distributed.tensor docs: a DTensor has the semantics of the global tensor",
        check=check_init,
        script=script_init,
        features=features_init,
        control="random.init mesh=2 x=4x6:R call=ones",
        planted="ones_are_twos",
        draw=draw_init,
        draws=36,
        sweep=sweep_init,
        sweeps=4,
        needs=("all_gather",),
        refusal="allowed",
        weight=0.2,
    ),
)
