"""Laws of the ops in torch's OpInfo database that are in no table of ours: forward, in place and backward.

``controls.txt`` has one case of each op that holds. It lists the laws, so that the catalogue does not import OpInfo; a
smoke run tries a variation of it. Other profiles read the samples of the installed torch
(:mod:`shardlaw.conformance.laws.op.opinfo`). ``python -m benchmarks.controls`` writes the file.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, overload

from shardlaw.conformance.compat import TorchMovedError
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.law import Law, Limits
from shardlaw.conformance.laws.op import backward, opinfo
from shardlaw.conformance.laws.op.forward import CLAUSE, DTENSOR, fields_text, narrow, to_case
from shardlaw.conformance.laws.op.results import result_law, specs
from shardlaw.conformance.laws.shared.draws import LazyCases
from shardlaw.reference.tensors import TensorSpec
from shardlaw.strategies.op_gradients import Backward, GradientSweep
from shardlaw.strategies.op_sweep import SQUARE, Sweep, row_sample
from shardlaw.strategies.ops import Arg, Sample, Variant

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy


CONTROLS = Path(__file__).with_name("controls.txt")


class ReadLater(Sequence[Case]):
    """The ``first`` cases, then those made of an op's samples, which are read when one of them is indexed."""

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
        """The size of the full product of the samples' options; 0 before samples are read."""
        return len(self._first) + self._rest.combinations if "_rest" in vars(self) else 0


def fixed_arg(name: str, spec: TensorSpec) -> Arg:
    """An argument of exactly the shape of a tensor in a case."""
    return Arg(name, tuple(map(str, spec.shape)), "" if spec.dtype == "float32" else spec.dtype, spec.fill)


def _on_2d_mesh(control: Case, limits: Limits) -> list[Case]:
    """The call of a control on a 2-D mesh, if there are enough ranks."""
    args = tuple(fixed_arg(name, spec) for name, spec in specs(control).items())
    variant = Variant(args, control.get("steps"), ("float32",))
    return [to_case(row_sample(variant, SQUARE, 0, 0))] if limits.world_size > max(SQUARE.mesh.ranks) else [control]


def narrow_cases(case: Case) -> SearchStrategy[Case]:
    """The same call on tensors with no larger extents, equal ones kept equal, on plainer meshes and placements."""
    extents = sorted({extent for spec in specs(case).values() for extent in spec.shape})
    symbol = dict(zip(extents, "bcdefghijklmnopqrstuvwxyz", strict=False))
    args = [
        replace(fixed_arg(name, spec), dims=tuple(symbol.get(extent, str(extent)) for extent in spec.shape))
        for name, spec in specs(case).items()
    ]
    return narrow(opinfo.make_op(case.law, [Variant(tuple(args), case.get("steps"), ("float32",))]), case)


def forward_law(control: Case, name: str) -> Law:
    def read(limits: Limits) -> LazyCases[Sample]:
        found = opinfo.read(name)
        if not found.variants:
            raise TorchMovedError(f"no samples: {found.reason}")
        return LazyCases(Sweep(opinfo.make_op(name, found.variants), limits.world_size), to_case)

    return result_law(
        control.law,
        exact=False,
        clause=f"{name} {CLAUSE}",
        source=DTENSOR,
        control=fields_text(control),
        sweep=lambda limits: ReadLater(_on_2d_mesh(control, limits), lambda: read(limits)),
        sweeps=1,
        profile="ci" if name.endswith(".in-place") else "smoke",
        narrow=narrow_cases,
        refusal="allowed",
    )


def backward_law(control: Case, name: str) -> Law:
    def read(limits: Limits) -> LazyCases[Backward]:
        found = opinfo.read(name)
        if not found.gradients:
            raise TorchMovedError(f"no samples that have gradients: {found.reason or 'not in the installed torch'}")
        sweep = GradientSweep(opinfo.make_op(name, found.variants), limits.world_size, dict(found.gradients))
        return LazyCases(sweep, backward.to_case)

    return backward.gradient_law(
        control.law,
        name,
        source=backward.SOURCE,
        control=fields_text(control),
        sweep=lambda limits: ReadLater([control], lambda: read(limits)),
        sweeps=1,
        profile="ci",
    )


def make_law(control: Case) -> Law:
    make = backward_law if control.law.startswith("op.backward") else forward_law
    return make(control, control.law.partition("[")[2][:-1])


LAWS = [make_law(Case.parse(line)) for line in CONTROLS.read_text().splitlines()]
