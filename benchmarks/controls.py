"""Writes ``conformance/laws/op/controls.txt``: for each op of OpInfo that no table of ours has a case that holds in the installed torch.

``python -m benchmarks.controls``. An op is in it once one of its samples holds, forward, in place or backward, on two ranks: sharded if
it does so, else replicated. Laws that are in the file stay in it; what an op misses is printed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.target import Target
from shardlaw.conformance.laws import find
from shardlaw.conformance.laws.op import backward, opinfo
from shardlaw.conformance.laws.op.forward import to_case
from shardlaw.conformance.laws.op.opinfo_laws import CONTROLS
from shardlaw.conformance.world import Pool
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.placement import Replicate
from shardlaw.strategies.op_catalogue import OPS
from shardlaw.strategies.op_gradients import DIFFERENTIABLE, Backward
from shardlaw.strategies.op_sweep import PLAINEST, row_sample
from shardlaw.strategies.ops import Variant

# the ids of laws that judge a program as those of ops do; ranks know no law that is not in the catalogue yet
PROGRAM, BACKWARD = "op.program", "op.program-backward"
TRIED = 12


def forward(variants: tuple[Variant, ...]) -> Iterator[Case]:
    """Plain cases of an op, the most telling first."""
    for variant in variants:
        yield to_case(row_sample(variant, PLAINEST, 0, 0))
        yield to_case(row_sample(variant, PLAINEST, 1, 1))
    for variant in variants:
        yield to_case(variant.sample(Mesh.of(2), {}, {arg.name: (Replicate(),) for arg in variant.args}, variant.dtypes[0]))


def gradients(wanted: tuple[tuple[Variant, tuple[str, ...]], ...]) -> Iterator[Case]:
    for variant, names in wanted:
        placed = {arg.name: (Replicate(),) for arg in variant.args}
        yield backward.to_case(Backward(variant.sample(Mesh.of(2), {}, placed, variant.dtypes[0]), names[:1], None))


def candidates() -> Iterator[tuple[str, list[Case]]]:
    """Each law that there might be, with cases that might be its control, or none."""
    for info in opinfo.database():
        for name in (info, f"{info}.in-place"):
            found = opinfo.read(name)
            if name not in OPS:
                yield f"op.forward[{name}]", list(forward(found.variants))
            if name not in DIFFERENTIABLE and name not in OPS and not name.endswith(".in-place"):
                yield f"op.backward[{name}]", list(gradients(found.gradients))


def main() -> None:
    torch.set_num_threads(1)
    kept = dict.fromkeys(CONTROLS.read_text().splitlines()) if CONTROLS.exists() else {}
    known = {Case.parse(line).law: line for line in kept}
    with Pool(Target()) as pool:
        for law_id, cases in candidates():
            if law_id in known:
                continue
            law = find(BACKWARD if law_id.startswith("op.backward") else PROGRAM)
            verdicts = pool.check(law, [replace(case, law=law.id) for case in cases[:TRIED]]) if cases else []
            found = next((verdict.case for verdict in verdicts if verdict.status == "held"), None)
            if found is not None:
                known[law_id] = replace(found, law=law_id).text
            elif verdicts:
                print(f"{law_id}: {verdicts[0].status} {verdicts[0].message[:150]}", flush=True)
    CONTROLS.write_text("".join(f"{line}\n" for line in known.values()))


if __name__ == "__main__":
    main()
