"""Ops of torch's OpInfo database, forward, in place and backward: those that no table of ours has.

``controls.txt`` beside this file holds one case of each, which holds. It names the laws, so that the catalogue needs
no OpInfo, and a
smoke run tries a variation of it. The other profiles read the samples of the installed torch (see
:mod:`shardlaw.conformance.laws.op.opinfo`). ``python -m benchmarks.controls`` writes the file anew.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, overload

from shardlaw.conformance.compat import TorchMovedError
from shardlaw.conformance.law.act import law
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.law import Law, Limits
from shardlaw.conformance.laws.op import backward, opinfo
from shardlaw.conformance.laws.op.forward import DTENSOR, VALUE, case_of, narrowed, text_of
from shardlaw.conformance.laws.op.results import result, result_due, specs
from shardlaw.conformance.laws.shared.draws import LazyCases
from shardlaw.reference.tensors import TensorSpec
from shardlaw.strategies.op_gradients import Backward, GradientSweep
from shardlaw.strategies.op_sweep import SQUARE, Sweep, row_sample
from shardlaw.strategies.ops import Arg, Sample, Variant

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy


CONTROLS = Path(__file__).with_name("controls.txt")


class Sampled(Sequence[Case]):
    """Cases of one op: the ``first`` ones, and those made of its samples, which are read when one of them is asked
    for."""

    def __init__(self, first: Sequence[Case], read: Callable[[], LazyCases]) -> None:  # type: ignore[type-arg]
        self._first = first
        self._read = read

    @cached_property
    def _rest(self) -> LazyCases:  # type: ignore[type-arg]
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
    args = tuple(fixed(name, spec) for name, spec in specs(control).items())
    variant = Variant(args, control.get("steps"), ("float32",))
    return [case_of(row_sample(variant, SQUARE, 0, 0))] if limits.world_size > max(SQUARE.mesh.ranks) else [control]


def smaller(case: Case) -> SearchStrategy[Case]:
    """The same call on tensors of no larger extents, those alike kept alike, on a plainer mesh in plainer
    placements."""
    extents = sorted({extent for spec in specs(case).values() for extent in spec.shape})
    symbol = dict(zip(extents, "bcdefghijklmnopqrstuvwxyz", strict=False))
    args = [
        replace(fixed(name, spec), dims=tuple(symbol.get(extent, str(extent)) for extent in spec.shape))
        for name, spec in specs(case).items()
    ]
    return narrowed(opinfo.op_of(case.law, [Variant(tuple(args), case.get("steps"), ("float32",))]), case)


def forward(control: Case, name: str) -> Law:
    def read(limits: Limits) -> LazyCases[Sample]:
        found = opinfo.read(name)
        if not found.variants:
            raise TorchMovedError(f"no samples: {found.reason}")
        return LazyCases(Sweep(opinfo.op_of(name, found.variants), limits.world_size), case_of)

    made = law(
        control.law,
        clause=f"{name} {VALUE}",
        source=DTENSOR,
        control=text_of(control),
        sweep=lambda limits: Sampled(_on_two_dims(control, limits), lambda: read(limits)),
        sweeps=1,
        profile="ci" if name.endswith(".in-place") else "smoke",
        narrow=smaller,
        refusal="allowed",
    )(result)
    made.due(result_due(exact=False))
    return made


def op_backward(control: Case, name: str) -> Law:
    def read(limits: Limits) -> LazyCases[Backward]:
        found = opinfo.read(name)
        if not found.gradients:
            raise TorchMovedError(f"no samples that have gradients: {found.reason or 'not in the installed torch'}")
        sweep = GradientSweep(opinfo.op_of(name, found.variants), limits.world_size, dict(found.gradients))
        return LazyCases(sweep, backward.case_of)

    return backward.gradient_law(
        control.law,
        name,
        source=backward.SOURCE,
        control=text_of(control),
        sweep=lambda limits: Sampled([control], lambda: read(limits)),
        sweeps=1,
        profile="ci",
    )


def of_control(control: Case) -> Law:
    make = op_backward if control.law.startswith("op.backward") else forward
    return make(control, control.law.partition("[")[2][:-1])


LAWS = [of_control(Case.parse(line)) for line in CONTROLS.read_text().splitlines()]
