"""Ops of torch's OpInfo database, forward, in place and backward: those that no table of ours has.

``controls.txt`` beside this file holds one case of each, which holds. It names the laws, so that the catalogue needs no OpInfo, and a
smoke run tries a variation of it. The other profiles read the samples of the installed torch (see :mod:`conformance.laws.op.opinfo`).
``python -m benchmarks.controls`` writes the file anew.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, overload

from hypothesis import strategies as st

from conformance.case import Case
from conformance.compat import TorchMovedError
from conformance.law import Law, Limits
from conformance.laws.draws import Listed
from conformance.laws.op import backward, opinfo
from conformance.laws.op.check import check_program, operands
from conformance.laws.op.forward import DTENSOR, case_of
from conformance.laws.op.scripts import script_of
from reference.tensors import TensorSpec
from strategies.op_draws import no_larger
from strategies.op_gradients import Backward, GradientSweep
from strategies.op_sweep import SQUARE, Sweep, row
from strategies.ops import Arg, Sample, Variant

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from conformance.here import Here

CONTROLS = Path(__file__).with_name("controls.txt")
# of ops that the fault of most of them does not touch
PLANTED = {"squeeze.multiple": "results_claimed_whole"}


class Sampled(Sequence[Case]):
    """Cases of one op: the ``first`` ones, and those made of its samples, which are read when one of them is asked for."""

    def __init__(self, first: Sequence[Case], read: Callable[[], Listed]) -> None:  # type: ignore[type-arg]
        self._first = first
        self._read = read

    @cached_property
    def _rest(self) -> Listed:  # type: ignore[type-arg]
        return self._read()

    def __len__(self) -> int:
        return len(self._first) + len(self._rest)

    @overload
    def __getitem__(self, at: int) -> Case: ...

    @overload
    def __getitem__(self, at: slice) -> list[Case]: ...

    def __getitem__(self, at: int | slice) -> Case | list[Case]:
        if isinstance(at, slice):
            return list(itertools.islice(self, at.start, at.stop, at.step))
        return self._first[at] if at < len(self._first) else self._rest[at - len(self._first)]

    @property
    def combinations(self) -> int:
        """How many cases there were if everything were combined with everything; 0 as long as no sample was read."""
        return len(self._first) + self._rest.combinations if "_rest" in vars(self) else 0


def fixed(name: str, spec: TensorSpec) -> Arg:
    """The argument that is one tensor of a case."""
    return Arg(name, tuple(map(str, spec.shape)), "" if spec.dtype == "float32" else spec.dtype, spec.fill)


def _on_two_dims(control: Case, limits: Limits) -> list[Case]:
    """The call of a control on a mesh of two dims, where there are ranks enough."""
    args = tuple(fixed(name, x.spec) for name, x in operands(control).items())
    variant = Variant(args, control.get("steps"), ("float32",))
    return [case_of(control.law, row(variant, SQUARE, 0, 0))] if limits.world_size > max(SQUARE.mesh.ranks) else [control]


def narrowed(case: Case) -> SearchStrategy[Case]:
    """The same call on tensors of no larger extents, those alike kept alike, on a plainer mesh in plainer placements."""
    specs = {name: x.spec for name, x in operands(case).items()}
    extents = sorted({extent for spec in specs.values() for extent in spec.shape})
    symbol = dict(zip(extents, "bcdefghijklmnopqrstuvwxyz", strict=False))
    args = [
        replace(fixed(name, spec), dims=tuple(symbol.get(extent, str(extent)) for extent in spec.shape)) for name, spec in specs.items()
    ]
    op = opinfo.op_of(case.law, [Variant(tuple(args), case.get("steps"), ("float32",))])
    smaller = no_larger(op, Sample(case.mesh(), tuple(specs.items()), case.get("steps")))
    if smaller is None:
        return st.just(case)
    return st.tuples(smaller, st.integers(0, case.seed)).map(lambda drawn: case_of(case.law, *drawn))


def _check(case: Case, here: Here) -> None:
    check_program(case, here, exact=False)


def _forward(control: Case) -> Law:
    law, name = control.law, control.law.partition("[")[2][:-1]

    def read(limits: Limits) -> Listed[Sample]:
        found = opinfo.read(name)
        if not found.variants:
            raise TorchMovedError(f"no samples: {found.reason}")
        return Listed(Sweep(opinfo.op_of(name, found.variants), limits.world_size), lambda sample: case_of(law, sample))

    return Law(
        id=law,
        clause=f"{name} of sharded tensors has the value, shape and dtype that it has of the full tensors, under the placements "
        "that its result claims.",
        source=DTENSOR,
        check=_check,
        control=control.text,
        planted=PLANTED.get(name, "operands_claimed_whole"),
        sweep=lambda limits: Sampled(_on_two_dims(control, limits), lambda: read(limits)),
        sweeps=1,
        profile="ci" if name.endswith(".in-place") else "smoke",
        narrow=narrowed,
        refusal="allowed",
        script=lambda case: script_of(case, exact=False),
    )


def _backward(control: Case) -> Law:
    law, name = control.law, control.law.partition("[")[2][:-1]

    def read(limits: Limits) -> Listed[Backward]:
        found = opinfo.read(name)
        if not found.gradients:
            raise TorchMovedError(f"no samples that have gradients: {found.reason or 'not in the installed torch'}")
        sweep = GradientSweep(opinfo.op_of(name, found.variants), limits.world_size, dict(found.gradients))
        return Listed(sweep, lambda drawn: backward.case_of(law, drawn))

    return Law(
        id=law,
        clause=f"Gradients through {name} of sharded tensors are those of the full tensors, under the placements that they claim, "
        "also where the incoming gradient lies otherwise than the result.",
        source=backward.SOURCE,
        check=backward.check_gradients,
        control=control.text,
        planted="leaf_gradients_shifted",
        sweep=lambda limits: Sampled([control], lambda: read(limits)),
        sweeps=1,
        profile="ci",
        narrow=backward.plainer,
        refusal="allowed",
        features=backward.features,
        script=backward.script_of,
    )


def _laws() -> list[Law]:
    controls = [Case.parse(line) for line in CONTROLS.read_text().splitlines()] if CONTROLS.exists() else []
    return [(_backward if control.law.startswith("op.backward") else _forward)(control) for control in controls]


LAWS = _laws()
