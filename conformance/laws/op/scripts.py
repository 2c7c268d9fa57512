"""Reproducers of op cases: literal local tensors, the calls as a user writes them, the dense result that they must give."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from conformance.laws import scripts
from conformance.laws.op.check import changed, is_exact, leaves, operands, plain_of, program_of
from conformance.target.target import TOLERANCE

if TYPE_CHECKING:
    from collections.abc import Mapping

    from conformance.case import Case
    from conformance.laws.given import Given
    from conformance.report.reproducer import Script


def script_of(case: Case, *, exact: bool, every_step: bool = False) -> Script:
    """A script that runs the steps of ``case`` and compares full tensors; a refusal, where the plain run is refused too."""
    given, program = operands(case), program_of(case)
    constants, body = inputs(case, given)
    plain = plain_of(given)
    try:
        values = program.run(plain)
    except Exception:
        attempt = "; ".join(program.source())
        return scripts.refused(case, body, attempt, constants=constants)
    if every_step:
        names = [f"step{at + 1}" for at in range(len(program.steps))]
        for name, step in zip(names, program.steps, strict=True):
            body += replace(program, steps=(step,)).source(name)
        results = dict(zip(names, values, strict=True))
    else:
        body += program.source("out")
        results = {"out": values[-1]}
    for name, x in given.items():
        if changed(x, plain[name]):
            results[name] = plain[name]
    got = [full(name, value) for name, value in results.items()]
    want = [literal(value) for value in results.values()]
    found, due = (got[0], want[0]) if len(got) == 1 else (f"[{', '.join(got)}]", f"[{', '.join(want)}]")
    outside = sorted(set(range(case.world)) - set(case.mesh().ranks))
    body += [f"if rank in {outside}:", "    return None, None"] if outside else []
    made = scripts.script([*body, f"expected = {due}", f"return expected, {found}"], world=case.world, constants=constants)
    return replace(made, tolerance=0.0 if exact and is_exact(given) else tolerance(list(results.values())))


def inputs(case: Case, given: Mapping[str, Given]) -> tuple[list[str], list[str]]:
    """Constants and statements that put every tensor of a case together."""
    constants: list[str] = []
    body: list[str] = []
    for name, x in given.items():
        if x.spec.placements is None:
            body.append(f"{name} = {scripts.tensor(x.full)}")
            continue
        table, lines = scripts.source(x, case.world, name)
        constants += table
        body += lines if not body or lines[0] not in body else lines[1:]
    return constants, body


def full(name: str, value: Any) -> str:
    """The expression of a result: what it says its shape is, and its elements in full."""
    if isinstance(value, torch.Tensor):
        return f"[list({name}.shape), {name}.full_tensor()]"
    if isinstance(value, (tuple, list)) and all(isinstance(item, torch.Tensor) for item in value):
        return f"[[list(part.shape), part.full_tensor()] for part in {name}]"
    return name


def literal(value: Any) -> str:
    """A result as the expression that makes it."""
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(literal, value))}]"
    if isinstance(value, torch.Tensor):
        return f"[{list(value.shape)}, {scripts.tensor(value.contiguous())}]"
    return repr(value)


def tolerance(values: list[Any]) -> float:
    """The largest difference of two elements that rounding explains."""
    floats = [leaf for leaf in leaves(values) if isinstance(leaf, torch.Tensor) and leaf.dtype.is_floating_point and leaf.numel()]
    scales = [max(1.0, leaf.double().abs().nan_to_num(0, 0, 0).max().item()) * TOLERANCE[str(leaf.dtype)[6:]] for leaf in floats]
    return 16 * max(scales, default=0.0)
