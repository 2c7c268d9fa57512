"""Laws of compiled functions and models: torch.compile over DTensors gives what the same code gives without it."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor, Replicate

from conformance.case import Case
from conformance.law import Law, Limits
from conformance.laws import draws, scripts
from conformance.laws.given import given
from conformance.laws.module.given import Modelled, features, judge_parameters, near
from conformance.laws.module.models import NEEDS, cases, run_backward, script
from conformance.report.reproducer import Script
from reference.mesh import Mesh
from reference.placement import Placement, Placements
from reference.placement import Replicate as R
from reference.placement import Shard as S
from reference.tensors import TensorSpec

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from conformance.here import Here

DOC = "torch.compile docs; torch.distributed.tensor docs: DTensors in torch.compile"
# what is compiled: its text, the function of the DTensor, and of the whole tensor where that differs
PROGRAMS: dict[str, tuple[str, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "pointwise": ("(x * 2 + 1).relu()", lambda x: (x * 2 + 1).relu(), lambda x: (x * 2 + 1).relu()),
    "sum": ("(x - 1).sum(0)", lambda x: (x - 1).sum(0), lambda x: (x - 1).sum(0)),
    "product": ("x @ x.t()", lambda x: x @ x.t(), lambda x: x @ x.t()),
    "turned": ("x.t() + x.t()", lambda x: x.t() + x.t(), lambda x: x.t() + x.t()),
    "gathered": (
        "x.redistribute(placements=[Replicate()] * x.device_mesh.ndim) * 3",
        lambda x: x.redistribute(placements=[Replicate()] * x.device_mesh.ndim) * 3,
        lambda x: x * 3,
    ),
    "locally": (
        "DTensor.from_local(x.to_local() * 2, x.device_mesh, x.placements)",
        lambda x: DTensor.from_local(x.to_local() * 2, x.device_mesh, x.placements),
        lambda x: x * 2,
    ),
}


def forget() -> None:
    """Forget all that was compiled. What shows its progress meanwhile starts no thread to watch it."""
    if importlib.util.find_spec("tqdm") is not None:
        importlib.import_module("tqdm").tqdm.monitor_interval = 0
    torch.compiler.reset()


def check_compiled(case: Case, here: Here) -> None:
    """The compiled function gives the dense result, twice in a row, and the dense gradient where the case asks for it."""
    x, (_, fn, dense) = given(case), PROGRAMS[case.get("fn")]
    forget()
    try:
        compiled = torch.compile(fn, backend=case.get("backend", "aot_eager"))
        for at in range(2):
            live = x.dtensor(here).detach().requires_grad_("grads" in case)
            whole = x.full.clone().requires_grad_("grads" in case)
            got: Any = compiled(live)
            want = dense(whole)
            here.same_dtensor(got.detach() if isinstance(got, DTensor) else got, want.detach(), f"call-{at}", mesh=x.layout.mesh)
            if "grads" in case:
                got.sum().backward()
                want.sum().backward()
                here.same_dtensor(live.grad, whole.grad, f"gradient-{at}", mesh=x.layout.mesh)  # type: ignore[arg-type]
    finally:
        forget()


def sweep_compiled(limits: Limits) -> list[Case]:
    """Each function on even shards. ``backend=inductor`` is for cases by hand: making machine code may take longer than a case may."""
    law, x = "module.compiled", TensorSpec((4, 4), (S(0),), "float64", "small")
    cases = [Case.of(law, mesh="2", x=x, fn=fn) for fn in PROGRAMS]
    cases += [Case.of(law, mesh="2", x=x, fn=fn, grads=1) for fn in ("pointwise", "product")]
    return [case for case in cases if case.world <= limits.world_size]


def draw_compiled(limits: Limits) -> SearchStrategy[Case]:
    on = [mesh for mesh in map(Mesh.parse, ("2", "2", "3", "2x2")) if mesh.size <= limits.world_size]

    @st.composite
    def case(draw: st.DrawFn) -> Case:
        mesh, fn = draw(st.sampled_from(on)), draw(st.sampled_from(sorted(PROGRAMS)))
        even = fn == "locally"
        shape = tuple(mesh.size * draw(st.sampled_from([1, 2])) if even else draw(st.sampled_from([4, 3, 5, 6])) for _ in range(2))
        places: list[Placement] = [S(0), S(1), R()]
        at: Placements = tuple(draw(st.sampled_from(places)) for _ in mesh.shape)
        x = TensorSpec(shape, at, "float64", "small")
        return Case.of("module.compiled", mesh=mesh, x=x, fn=fn, grads=draw(st.sampled_from([None, 1])), seed=draw(draws.seeds()))

    return case()


def script_compiled(case: Case) -> Script:
    x, (text, _, dense) = given(case), PROGRAMS[case.get("fn")]
    constants, body = scripts.source(x, case.world)
    whole = x.full.clone().requires_grad_()
    want = dense(whole)
    want.sum().backward()
    assert whole.grad is not None
    body += ["x = x.detach().requires_grad_()", f'got = torch.compile(lambda x: {text}, backend="{case.get("backend", "aot_eager")}")(x)']
    if "grads" in case:
        body += ["got.sum().backward()", f"return {scripts.tensor(whole.grad)}, x.grad.full_tensor()"]
    else:
        body += [f"return {scripts.tensor(want)}, got.full_tensor().detach()"]
    return scripts.script(body, world=case.world, constants=constants)


def check_model(case: Case, here: Here) -> None:
    """The compiled parallel model has the dense gradients."""
    given_ = Modelled(case)
    dense = given_.model()
    model = given_.parallel(dense, here)
    forget()
    try:
        compiled = torch.compile(model, backend=case.get("backend", "aot_eager"))
        x, whole = run_backward(given_, here, compiled, dense)
        if whole.grad is not None:
            near(here, x.grad, given_.part(whole.grad, given_.plan.entry, here.rank), "input", "the gradient of the input")
    finally:
        forget()
    judge_parameters(here, given_, model, dense, "gradients", grads=True)


def draw_model(limits: Limits) -> SearchStrategy[Case]:
    def of(kind: str) -> SearchStrategy[Case]:
        return cases("module.compiled-model", limits, kind, model=st.just(kind)).filter(
            lambda case: "uneven-sequence" not in features(case)
        )

    return st.one_of(of("mlp"), of("norm"), of("tied"))


LAWS = (
    Law(
        id="module.compiled",
        clause="A compiled function of DTensors gives what the function gives, gradients too, each time that it is called.",
        source=DOC,
        check=check_compiled,
        script=script_compiled,
        features=lambda case: {"compiled", f"way:{case.get('fn')}"} | ({"backward"} if "grads" in case else set()),
        control="module.compiled mesh=2 x=4x4:S(0):float64:small fn=pointwise",
        planted="compiled_output_is_local",
        draw=draw_compiled,
        draws=2,
        sweep=sweep_compiled,
        sweeps=1,
        needs=NEEDS,
        weight=0.2,
    ),
    Law(
        id="module.compiled-model",
        clause="A compiled parallel model has the gradients of the dense one.",
        source=DOC,
        check=check_model,
        script=script,
        features=lambda case: features(case) | {"compiled", "backward"},
        control="module.compiled-model mesh=2 way=pair dims=5x8x3 rows=3 model=mlp",
        planted="backward_counts_twice",
        draw=draw_model,
        draws=1,
        needs=NEEDS,
        weight=0.2,
    ),
)
