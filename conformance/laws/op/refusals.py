"""What an op must refuse: operands that have no meaning together, and what the plain op refuses too."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import strategies as st

from conformance.case import Case
from conformance.law import Law, Limits
from conformance.laws import scripts
from conformance.laws.given import given
from conformance.laws.op.check import Setting, check_program, operands, program_of
from conformance.laws.op.scripts import inputs, script_of
from conformance.program import Program
from reference.mesh import Mesh
from reference.placement import Placement, Placements, Replicate, Shard
from reference.tensors import TensorSpec

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from conformance.here import Here
    from conformance.report.reproducer import Script

DTENSOR = "torch.distributed.tensor docs, DTensor"
PAIRED = (
    "add(a,b)",
    "mul(b,a)",
    "mm(a,b)",
    "cat([a,b])",
    "stack([b,a])",
    "where(gt(a,0),a,b)",
    "maximum(a,b)",
    "eq(a,b)",
    "equal(a,b)",
    "a.add_(b)",
    "a.copy_(b)",
    "lerp(a,b,0.5)",
    "nn.functional.linear(a,b)",
    "_foreach_add([a],[b])",
    "addmm(b,a,a)",
    "gather(a,0,argsort(b,0))",
    "scatter(a,0,argsort(a,0),b)",
)
# of these, the ones that a plain vector could be broadcast in
BROADCAST = ("add(a,b)", "mul(b,a)", "where(gt(a,0),a,b)", "maximum(a,b)", "eq(a,b)", "a.add_(b)", "lerp(a,b,0.5)")
# calls on a 4x6 tensor a and a 6x4 tensor b that no tensor allows
SENSELESS = (
    "add(a,b)",
    "mm(a,a)",
    "cat([a,b],0)",
    "stack([a,b])",
    "sum(a,2)",
    "sum(a,-3)",
    "mean(a,(0,0))",
    "amax(a,5)",
    "nn.functional.softmax(a,2)",
    "cumsum(a,2)",
    "sort(a,3)",
    "view(a,(5,5))",
    "reshape(a,(7,))",
    "permute(a,(0,0))",
    "permute(a,(0,))",
    "transpose(a,0,2)",
    "unsqueeze(a,4)",
    "expand(a,(5,6))",
    "select(a,0,4)",
    "select(a,2,0)",
    "narrow(a,0,3,2)",
    "getitem(a,(0,0,0))",
    "split(a,(1,2),0)",
    "topk(a,7)",
    "bmm(a,b)",
    "a.add_(b)",
    "a.copy_(b)",
    "flip(a,(2,))",
    "roll(a,1,2)",
    "where(gt(a,0),a,b)",
    "nn.functional.layer_norm(a,(5,))",
    "addmm(a,b,a)",
    "dot(a,b)",
    "matmul(a,a)",
)


def _meshes(limits: Limits) -> list[Mesh]:
    return [mesh for mesh in map(Mesh.parse, ("2", "3", "2x2")) if mesh.size <= limits.world_size]


def _placed(mesh: Mesh, ndim: int) -> SearchStrategy[Placements]:
    return st.tuples(*(st.sampled_from([Replicate(), *map(Shard, range(ndim))]) for _ in mesh.shape))


def _must_refuse(case: Case, here: Here) -> None:
    setting = Setting(case, here)
    here.refused(setting.run_sharded, "refusal", f"{case.get('steps')} of a plain tensor and a sharded one")


def _mixed(limits: Limits) -> SearchStrategy[Case]:
    @st.composite
    def drawn(draw: st.DrawFn) -> Case:
        mesh = draw(st.sampled_from(_meshes(limits)))
        if draw(st.integers(0, 3)) == 3:
            a, b = TensorSpec((4, 4), draw(_placed(mesh, 2))), TensorSpec((4,), None)
            return Case.of("op.refuses[mixed]", mesh=mesh, a=a, b=b, steps=draw(st.sampled_from(BROADCAST)))
        steps = draw(st.sampled_from(PAIRED))
        specs = [TensorSpec((4, 4), draw(_placed(mesh, 2))), TensorSpec((4, 4), None)]
        a, b = specs if draw(st.booleans()) else reversed(specs)
        return Case.of("op.refuses[mixed]", mesh=mesh, a=a, b=b, steps=steps)

    return drawn()


def _mixed_script(case: Case) -> Script:
    constants, body = inputs(case, operands(case))
    return scripts.refused(case, body, "; ".join(program_of(case).source()), constants=constants)


MIXED = Law(
    id="op.refuses[mixed]",
    clause="An op of a sharded tensor and a plain one that is no scalar is refused on every rank.",
    source=f"{DTENSOR}: all torch.Tensor arguments must be converted to DTensor before they meet one",
    check=_must_refuse,
    control="op.refuses[mixed] mesh=2 a=4x4:S(0) b=4x4 steps=add(a,b)",
    planted="plain_operand_accepted",
    draw=_mixed,
    draws=24,
    script=_mixed_script,
)


def _across(case: Case, here: Here) -> None:
    live = {name: here.mesh(case.mesh(name)) for name in ("mesh", "mesh.other")}
    a, b = given(case, "a"), given(case, "b", "mesh.other")
    tensors = {"a": a.dtensor(here, mesh=live["mesh"]), "b": b.dtensor(here, mesh=live["mesh.other"])}
    here.refused(lambda: program_of(case).run(tensors), "refusal", f"{case.get('steps')} of tensors on two meshes")


def _two_meshes(limits: Limits) -> SearchStrategy[Case]:
    pairs = [("2", "2@1,0"), ("2", "3"), ("3", "2"), ("2", "1"), ("2", "2@0,2"), ("4", "2x2"), ("2x2", "2x2@0,2,1,3"), ("2x2", "2")]
    parsed = [(Mesh.parse(mesh), Mesh.parse(other)) for mesh, other in pairs]
    fitting = [pair for pair in parsed if all(max(mesh.ranks) < limits.world_size for mesh in pair)]

    @st.composite
    def drawn(draw: st.DrawFn) -> Case:
        mesh, other = draw(st.sampled_from(fitting))
        a, b = TensorSpec((4, 4), draw(_placed(mesh, 2))), TensorSpec((4, 4), draw(_placed(other, 2)))
        return Case.of("op.refuses[meshes]", mesh=mesh, mesh__other=other, a=a, b=b, steps=draw(st.sampled_from(PAIRED)))

    return drawn()


def _across_script(case: Case) -> Script:
    constants: list[str] = []
    body: list[str] = []
    for name, on in (("a", "mesh"), ("b", "mesh.other")):
        table, lines = scripts.source(given(case, name, on), case.world, name)
        constants += table
        body += lines
    return scripts.refused(case, body, "; ".join(program_of(case).source()), constants=constants)


MESHES = Law(
    id="op.refuses[meshes]",
    clause="An op of tensors that live on different meshes is refused on every rank.",
    source=f"{DTENSOR}: operators need all their tensors on one DeviceMesh; communication across meshes is not supported",
    check=_across,
    control="op.refuses[meshes] mesh=2 mesh.other=2@1,0 a=4x4:S(0) b=4x4:S(0) steps=add(a,b)",
    planted="other_mesh_accepted",
    draw=_two_meshes,
    draws=20,
    script=_across_script,
)


def _parity(case: Case, here: Here) -> None:
    check_program(case, here, exact=True)


def _senseless(limits: Limits) -> SearchStrategy[Case]:
    @st.composite
    def drawn(draw: st.DrawFn) -> Case:
        mesh = draw(st.sampled_from(_meshes(limits)))
        steps = draw(st.sampled_from(SENSELESS))
        a = TensorSpec((4, 6), draw(_placed(mesh, 2)))
        b = TensorSpec((6, 4), draw(_placed(mesh, 2))) if "b" in Program.parse(steps).names() else None
        return Case.of("op.refuses[parity]", mesh=mesh, a=a, b=b, steps=steps)

    return drawn()


PARITY = Law(
    id="op.refuses[parity]",
    clause="What the plain op refuses, such as sizes that do not fit or a dim out of range, the sharded op refuses on every rank.",
    source=f"{DTENSOR}: operators on sharded tensors follow the semantics of torch.Tensor, its errors included",
    check=_parity,
    control="op.refuses[parity] mesh=2 a=4x6:S(0) steps=sum(a,2)",
    planted="errors_swallowed",
    draw=_senseless,
    draws=60,
    weight=2.0,
    script=lambda case: script_of(case, exact=True),
)


def _unbind(limits: Limits) -> SearchStrategy[Case]:
    @st.composite
    def drawn(draw: st.DrawFn) -> Case:
        mesh = draw(st.sampled_from(_meshes(limits)))
        shape = draw(st.sampled_from([(2, 3), (3, 2), (4, 2, 3)]))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, mesh.ndim - 1))
        either: list[Placement] = [Replicate(), Shard(dim)]
        placed = tuple(either[1] if i == at else draw(st.sampled_from(either)) for i in range(mesh.ndim))
        spoken = draw(st.sampled_from([dim, dim - len(shape)]))
        return Case.of("op.refuses[unbind]", mesh=mesh, a=TensorSpec(shape, placed), steps=f"unbind(a,{spoken})")

    return drawn()


def _unbound(case: Case, here: Here) -> None:
    setting = Setting(case, here)
    here.refused(setting.run_sharded, "refusal", "unbind of a sharded dim")


UNBIND = Law(
    id="op.refuses[unbind]",
    clause="A tensor is not taken apart along a dim that is sharded: that would need a redistribution that nobody asked for.",
    source="torch.distributed.tensor, the message of unbind: it cannot be performed along a sharded dim without redistribution",
    check=_unbound,
    control="op.refuses[unbind] mesh=2 a=2x3:S(0) steps=unbind(a,0)",
    planted="unbind_of_shards_accepted",
    draw=_unbind,
    draws=8,
    tier="extended",
    script=_mixed_script,
)

REFUSALS = (MIXED, MESHES, PARITY, UNBIND)
