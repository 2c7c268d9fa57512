"""The cases of the op chapter, without ranks: what a sweep starts with, that cases read back, shrink, and become scripts."""

from __future__ import annotations

import pytest

from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.program.parse import Program
from shardlaw.conformance.laws.op.forward import LAWS
from shardlaw.conformance.laws.op.programs import may_refuse
from shardlaw.conformance.run.search import draw
from shardlaw.reference.placement import Partial, Shard
from shardlaw.strategies.op_catalogue import OPS
from shardlaw.strategies.op_sweep import Sweep
from shardlaw.strategies.op_table import TableError, read_ops
from shardlaw.strategies.ops import Op

FORWARD = [law for law in LAWS if law.name == "op.forward"]


def test_there_is_a_law_for_every_op() -> None:
    assert [law.variant for law in FORWARD] == list(OPS)
    assert len(FORWARD) >= 250


def test_a_sweep_starts_with_every_variant_and_every_placement() -> None:
    for op in OPS.values():
        samples = Sweep(op).chosen
        assert any(sample.mesh.ndim == 2 for sample in samples) or op.flat, op.name
        found = [op.find(dict(sample.tensors), sample.steps) for sample in samples]
        met = {(variant.call, variant.fill) for variant, _ in filter(None, found)}
        assert met == {(variant.call, variant.fill) for variant in op.variants}, op.name
        for arg in op.variants[0].args:
            placed = {p for sample in samples for name, spec in sample.tensors if name == arg.name for p in spec.placements or ()}
            shards = {Shard(dim) for dim in range(len(arg.dims)) if not arg.bound and not (op.light and dim)}
            assert shards <= placed, (op.name, arg.name)
            assert arg.dtype or arg.bound or any(isinstance(p, Partial) for p in placed), (op.name, arg.name)


def test_sweeps_are_lazy_and_repeatable() -> None:
    one, other = Sweep(OPS["addmm"]), Sweep(OPS["addmm"])
    assert len(one) > 50_000
    spots = [0, 17, len(one.chosen), 4242, len(one) - 1]
    assert [one[at] for at in spots] == [other[at] for at in spots]
    assert len({one[at] for at in range(len(one.chosen), len(one.chosen) + 300)}) == 300
    with pytest.raises(IndexError):
        one[len(one)]


def test_a_smaller_world_has_smaller_meshes() -> None:
    assert {sample.mesh.size for sample in Sweep(OPS["mm"], world_size=2)[:60]} == {2}


def test_what_a_sweep_found_shrinks() -> None:
    law = next(law for law in FORWARD if law.variant == "mm")
    assert law.narrow is not None
    case = Case.parse("op.forward[mm] mesh=2x2 a=7x5:S(0),P(sum):float32:small b=5x6:R,S(1):float32:small steps=mm(a,b) seed=2")
    near: list[Case] = []
    draw(law.narrow(case), 0, 60, near.append)
    for smaller in near:
        assert smaller.mesh().size <= 4
        assert smaller.seed <= 2
        assert all(size <= 7 for name in "ab" for size in smaller.tensor(name).shape)
    assert any(smaller.mesh().ndim == 1 for smaller in near)
    assert any(smaller.tensor("a").shape != (7, 5) for smaller in near)


def test_programs_of_the_sweep_are_canonical() -> None:
    for op in OPS.values():
        for variant in op.variants:
            steps = variant.steps(variant.fits(dict.fromkeys(variant.symbols, 3)))
            assert str(Program.parse(steps)) == steps


@pytest.mark.parametrize(
    "table",
    [
        "mm huge\n    a=m | mm(a)",
        "    a=m | neg(a)",
        "mm\n    a=m mm(a)",
        "mm n>=1\n    a=m | mm(a)",
        "mm\n    a=m inexact | mm(a)",
    ],
)
def test_a_wrong_table_is_refused(table: str) -> None:
    with pytest.raises(TableError):
        read_ops(table)


def test_a_variant_finds_its_sizes() -> None:
    op: Op = OPS["unflatten"]
    variant = op.variants[0]
    sizes = {"m": 3, "n": 4}
    specs = {arg.name: variant.spec(arg, sizes, "float32") for arg in variant.args}
    assert specs["a"].shape == (6, 4)
    assert variant.match(specs, "unflatten(a,0,(2,3))") == sizes
    assert variant.match(specs, "unflatten(a,0,(3,2))") is None


@pytest.mark.parametrize(
    ("text", "allowed"),
    [("mesh=2 a=5x4:S(0) steps=view(a,(20,))", True), ("mesh=2 a=4x4:S(0) steps=view(a,(16,))", False)],
)
def test_a_view_in_a_program_may_ask_for_a_redistribution_of_uneven_shards_alone(text: str, allowed: bool) -> None:
    case = Case.parse(f"op.program {text}")
    assert may_refuse(case, "Please redistribute the tensor before this operation.") is allowed
    assert not may_refuse(case, "Operator aten.view.default does not support this sharding.")
