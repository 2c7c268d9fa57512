"""Reproducers of the round trip laws that do more than save, load and compare."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from conformance import trip as t
from conformance.case import Case
from conformance.report.reproducer import Script
from conformance.trip_script import compared, load_lines, mesh_lines, save_lines, script, state_text, tensor_text, writer_text
from reference.checkpoint.state_dict import Slot, State, flatten, mapped, slots, spoiled

READ = "dcp.FileSystemReader({}).read_metadata()"
FAILED = "from torch.distributed.checkpoint.api import CheckpointException"


def meta(case: Case) -> Script:
    trip = t.read_trip(case)
    return script(trip, [(trip.worlds[0], save_lines(trip)), (trip.worlds[1], load_lines(trip, spoil="meta"))])


def subset(case: Case, want: State, kept: set[str], partial: bool) -> Script:
    """``want`` is what the destination must hold, ``kept`` the tensors in it that stay as they were."""
    trip = t.read_trip(case)
    planner = ", planner=dcp.DefaultLoadPlanner(allow_partial_load=True)" if partial else ""
    expected, got = compared(trip, trip.load, want, trip.worlds[1], kept=kept)
    lines = [*_poisoned(trip), f"dcp.load(state, storage_reader=dcp.FileSystemReader(folder){planner})", f"return {expected}, {got}"]
    return script(trip, [(trip.worlds[0], save_lines(trip)), (trip.worlds[1], lines)])


def refused_load(case: Case) -> Script:
    trip = t.read_trip(case)
    expected, got = compared(trip, trip.load, spoiled(trip.load.state), trip.worlds[1], kept=slots(trip.load.state))
    lines = [
        *_poisoned(trip),
        "try:",
        "    dcp.load(state, storage_reader=dcp.FileSystemReader(folder))",
        '    return "refused", "accepted"',
        "except CheckpointException:",
        f"    return {expected}, {got}",
    ]
    return script(trip, [(trip.worlds[0], save_lines(trip)), (trip.worlds[1], lines)], imports=[FAILED])


def refused_save(case: Case) -> Script:
    trip = t.read_trip(case)
    other = replace(trip.save, state=trip.load.state)
    good = t.Trip(trip.save, trip.save, trip.worlds, trip.values, trip.writer, trip.planner)
    lines = [
        *save_lines(trip),
        f"bad = {state_text(trip, other, trip.worlds[0])}",
        "try:",
        f"    dcp.save(bad, storage_writer={writer_text(trip)})",
        '    return "refused", "accepted"',
        "except CheckpointException:",
        "    pass",
    ]
    return script(trip, [(trip.worlds[0], lines), (trip.worlds[1], load_lines(good))], imports=[FAILED])


def _poisoned(trip: t.Trip) -> list[str]:
    """The statements that make the destination."""
    end = replace(trip.load, state=spoiled(trip.load.state))
    return [*mesh_lines(end), f"state = {state_text(trip, end, trip.worlds[1], spoil='+ 1')}"]


def metadata(case: Case, due: dict[str, Any]) -> Script:
    """``due``: by name of leaf its path and, for a tensor, its dtype, its size and its chunks."""
    trip = t.read_trip(case)
    want = {name: tuple(told) if len(told) > 1 else False for name, told in due.items()}
    chunks = "sorted((tuple(c.offsets), tuple(c.sizes)) for c in v.chunks if c.sizes.numel())"
    lines = [
        *save_lines(trip),
        f"md = {READ.format('folder')}",
        f"def told(k, v): return md.planner_data.get(k), str(v.properties.dtype), tuple(v.size), {chunks}",
        "got = {k: hasattr(v, 'chunks') and told(k, v) for k, v in md.state_dict_metadata.items()}",
        "spans = sorted((i.relative_path, i.offset, i.offset + i.length) for i in md.storage_data.values())",
        "inside = all(0 <= a < b <= os.path.getsize(os.path.join(folder, f)) for f, a, b in spans)",
        "apart = all(p[0] != q[0] or p[2] <= q[1] for p, q in zip(spans, spans[1:]))",
        f"return [{want!r}, True, True], [got, inside, apart]",
    ]
    return script(trip, [(case.world, lines)], imports=["import os"])


def dedup(case: Case, due: dict[int, list[Any]] | None) -> Script:
    """``due``: what each rank must write; ``None`` where all is shared out evenly."""
    trip = t.read_trip(case)
    recorder = (
        "class Recorder(dcp.DefaultSavePlanner):",
        "    def finish_plan(self, new_plan):",
        "        plan = super().finish_plan(new_plan)",
        "        self.items = [(i.index.fqn, i.index.offset and tuple(i.index.offset)) for i in plan.items]",
        "        return plan",
    )
    options = ", ".join(f"{key}={value}" for key, value in trip.planner.items())
    lines = [f"planner = Recorder({options})", *save_lines(trip, planner="planner")]
    if due is None:
        leaves, world = len(flatten(trip.save.state)), case.world
        lines.append(f"return True, {leaves // world} <= len(planner.items) <= {-(-leaves // world)}")
        return script(trip, [(case.world, lines)], constants=recorder)
    return script(trip, [(case.world, [*lines, f"return {due!r}[rank], sorted(planner.items, key=repr)"])], constants=recorder)


def overwrite(case: Case) -> Script:
    """The second save has a tensor ``X2`` for every ``X`` of the first one."""
    trip = t.read_trip(case)
    newer = t.End(mapped(trip.load.state, _renamed), trip.load.mesh, {f"{name}2": spec for name, spec in trip.load.specs.items()})
    back = t.End(newer.state, trip.save.mesh, {f"{name}2": spec for name, spec in trip.save.specs.items()})
    first, second = trip.worlds
    values = {f"{name}2": full for name, full in trip.values.items()}
    saved, read = replace(trip, worlds=(second, second), values=values), replace(trip, worlds=(first, first), values=values)
    others = [f"{name.upper()}2 = {'~' if full.dtype == torch.bool else '1 + '}{name.upper()}" for name, full in trip.values.items()]
    stages = [(first, save_lines(trip)), (second, save_lines(saved, end=newer)), (first, load_lines(read, end=back))]
    return script(trip, stages, constants=["; ".join(others)])


def _renamed(leaf: Any) -> Any:
    return Slot(f"{leaf.name}2") if isinstance(leaf, Slot) else leaf


def kept(case: Case) -> Script:
    trip = t.read_trip(case)
    alone = case.get("how", "") == "alone"
    *made, saved = save_lines(trip, how=", use_collectives=False" if alone else "")
    lines = [
        *made,
        saved,
        "try:",
        f"    {saved.replace('sync_files=False', 'sync_files=False, overwrite=False')}",
        '    return "refused", "accepted"',
        f"except {'RuntimeError' if alone else 'CheckpointException'}:",
        "    pass",
    ]
    return script(trip, [(trip.worlds[0], lines), (trip.worlds[1], load_lines(trip))], imports=[FAILED])


def caching(case: Case, ends: dict[str, t.End], order: str) -> Script:
    """Every save of ``order`` with one class of planner, then every load; dtypes and paths as the metadata tells them."""
    trip = t.read_trip(case)
    lines = mesh_lines(replace(trip.save, state={name: Slot(name) for name in trip.values}))
    states, want = {}, {}
    for which in sorted({*order}):
        states[which] = state_text(trip, ends[which], case.world)
        want[which] = {
            name: (path, f"torch.{ends[which].specs[leaf.name].dtype}" if isinstance(leaf, Slot) else None)
            for name, (path, leaf) in flatten(ends[which].state).items()
        }
    made = ", ".join(f"{which!r}: {text}" for which, text in states.items())
    lines += [
        f"states = {{{made}}}",
        f"for at, which in enumerate({order!r}):",
        "    planner = dcp.DefaultSavePlanner(enable_plan_caching=True)",
        f"    dcp.save(states[which], storage_writer={writer_text(trip, 'os.path.join(folder, str(at))')}, planner=planner)",
        "got = []",
        f"for at in range({len(order)}):",
        f"    md = {READ.format('os.path.join(folder, str(at))')}",
        "    dtypes = {k: str(v.properties.dtype) if hasattr(v, 'chunks') else None for k, v in md.state_dict_metadata.items()}",
        "    got.append({k: (md.planner_data[k], dtypes[k]) for k in sorted(dtypes)})",
        f"want = {want!r}",
        f"return [dict(sorted(want[which].items())) for which in {order!r}], got",
    ]
    return script(trip, [(case.world, lines)], imports=["import os"])


def again(case: Case) -> Script:
    """The last of the saves must be what is loaded."""
    trip = t.read_trip(case)
    ends, order = {"a": trip.save, "b": trip.load}, case.get("order")
    lines: list[str] = []
    for at, (which, way) in enumerate(zip(order, case.get("ways", "c" * len(order)), strict=True)):
        how = ", use_collectives=False" if way == "a" else ""
        one = replace(trip, save=ends[which], load=ends[which])
        saved = save_lines(one, how=how)
        if at < len(order) - 1:
            saved[-2] = f"state = {state_text(one, ends[which], trip.worlds[0], spoil='+ 1')}"
        lines += [line for line in saved if line not in lines or not line.startswith("mesh = ")]
    last = replace(trip, save=ends[order[-1]], load=ends[order[-1]])
    loaded = [line for line in load_lines(last) if not line.startswith("mesh = ")]
    return script(trip, [(case.world, [*lines, *loaded])])


def asynchronous(case: Case) -> Script:
    trip = t.read_trip(case)
    stager, names, world = case.get("async"), [*slots(trip.save.state)], trip.worlds[0]
    own = ", async_stager=DefaultStager(StagingOptions(False, False, False, False))" if stager == "stager" else ""
    lines = [
        *mesh_lines(trip.save),
        *(f"{name} = {tensor_text(trip, trip.save, world, name)}" for name in names),
        f"state = {state_text(trip, trip.save, world, make=str)}",
        f"writer = {writer_text(trip, cached=stager == 'cached')}",
        f"pending = dcp.async_save(state, storage_writer=writer{own})",
        *(f"({name}.to_local() if isinstance({name}, DTensor) else {name}).zero_()" for name in names),
        'getattr(pending, "upload_completion", pending).result()',
    ]
    imports = ["from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions"] if own else []
    return script(trip, [(world, lines), (trip.worlds[1], load_lines(trip))], imports=imports)


def hole(case: Case) -> Script:
    trip = t.read_trip(case)
    *made, saved = save_lines(trip)
    lines = [*made, "try:", f"    {saved}", '    return "refused", "accepted"', "except CheckpointException:", "    return None, None"]
    return script(trip, [(case.world, lines)], imports=[FAILED])
