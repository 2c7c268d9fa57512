"""Reproducers of saves and loads that fail: a planner or a storage of which one method raises."""

from __future__ import annotations

from dataclasses import replace

from conformance import trip as t
from conformance.case import Case
from conformance.laws.roundtrip.spying import LOAD_PLANNER, SAVE_PLANNER
from conformance.report.reproducer import Script
from conformance.trip_script import compared, load_lines, mesh_lines, save_lines, script, state_text, writer_text
from reference.checkpoint.state_dict import slots, spoiled

FAILED = "from torch.distributed.checkpoint.api import CheckpointException"
FAILING = ("fail = lambda *args, **options: 1 / 0",)
WIDE = (
    "class Wide(Exception):",
    "    def __init__(self, code, text):",
    "        super().__init__(text)",
    "def fail(*args, **options):",
    '    raise Wide(1, "planted")',
)
IN_THREAD = (
    "def fail(*args, **options):",
    "    if threading.current_thread() is not threading.main_thread():",
    '        raise RuntimeError("planted")',
    "    time.sleep(1)",
    "    return true(*args, **options)",
)


def _ranks(case: Case, world: int) -> list[int]:
    text = case.get("ranks", "all")
    return [*range(world)] if text == "all" else [int(rank) for rank in text.split(",")]


def _helpers(case: Case) -> tuple[tuple[str, ...], list[str]]:
    if case.get("in", "") == "thread":
        return (), ["import threading, time"]
    return (WIDE if case.get("error", "plain") == "wide" else FAILING), []


def _break(case: Case, ranks: list[int], *, saves: bool) -> list[str]:
    """The statements that let the method fail on these ranks."""
    at = case.get("at")
    owner = "planner" if at in (SAVE_PLANNER if saves else LOAD_PLANNER) else "storage"
    if case.get("in", "") == "thread":
        return [f"true = {owner}.{at}", *IN_THREAD, f"if rank in {ranks}:", f"    {owner}.{at} = fail"]
    fail = "lambda *args, **options: sys.exit(1)" if case.get("error", "") == "exit" else "fail"
    return [f"if rank in {ranks}:", f"    {owner}.{at} = {fail}"]


def _attempt(case: Case, trip: t.Trip, state: str, *, saves: bool) -> list[str]:
    """The statements that try a save or a load that must fail; ``failed`` names the ranks that it tells of."""
    verb, kind = ("save", "storage_writer") if saves else ("load", "storage_reader")
    how = ", checkpoint_id=folder" if case.get("at") == "reset" else ""
    how += ", use_collectives=False" if case.get("how", "") == "alone" else ""
    call, done = ("dcp.async_save", ".result()") if case.get("how", "") == "async" else (f"dcp.{verb}", "")
    planner = f"dcp.Default{verb.title()}Planner()"
    made = writer_text(trip) if saves else "dcp.FileSystemReader(folder)"
    return [
        f"planner, storage = {planner}, {made}",
        *_break(case, _ranks(case, trip.worlds[0 if saves else 1]), saves=saves),
        "failed = None",
        "try:",
        f"    {call}({state}, {kind}=storage, planner=planner{how}){done}",
        "except CheckpointException as error:",
        "    failed = sorted(error.failures)",
    ]


def failed_save(case: Case) -> Script:
    trip = t.read_trip(case)
    helpers, imports = _helpers(case)
    lines = [*mesh_lines(trip.save), *_attempt(case, trip, state_text(trip, trip.save, trip.worlds[0]), saves=True)]
    due = _ranks(case, trip.worlds[0])
    return script(trip, [(trip.worlds[0], [*lines, f"return {due}, failed"])], helpers, [FAILED, *imports])


def failed_over(case: Case) -> Script:
    """The older checkpoint must load as it was, or not at all."""
    trip = t.read_trip(case)
    helpers, imports = _helpers(case)
    newer = state_text(trip, trip.save, trip.worlds[0], spoil="+ 1")
    attempt = [line for line in _attempt(case, trip, newer, saves=True) if not line.startswith("failed")]
    lines = [*save_lines(trip), *attempt[:-1], "    pass"]
    *made, load, judged = load_lines(trip)
    after = [*made, "try:", f"    {load}", "except CheckpointException:", "    return None, None", judged]
    return script(trip, [(trip.worlds[0], lines), (trip.worlds[1], after)],
                  helpers, [FAILED, *imports])  # fmt: skip


def failed_load(case: Case) -> Script:
    trip = t.read_trip(case)
    helpers, imports = _helpers(case)
    end = replace(trip.load, state=spoiled(trip.load.state))
    made = f"state = {state_text(trip, end, trip.worlds[1], spoil='+ 1')}"
    expected, got = compared(trip, trip.load, spoiled(trip.load.state), trip.worlds[1], kept=slots(trip.load.state))
    due = str(_ranks(case, trip.worlds[1]))
    early = case.get("at") not in ("finish_plan", "read_data", "load_bytes", "resolve_tensor", "commit_tensor")
    answer = f"return [{due}, {expected}], [failed, {got}]" if early else f"return {due}, failed"
    lines = [*mesh_lines(end), made, *_attempt(case, trip, "state", saves=False), answer]
    return script(trip, [(trip.worlds[0], save_lines(trip)), (trip.worlds[1], lines)], helpers, [FAILED, *imports])


def retried(case: Case) -> Script:
    """Saves with kept plans, one of which fails; every other one must load."""
    trip = t.read_trip(case)
    ends = {"a": trip.save, "b": trip.load}
    fails, order, ranks = case.integer("fails"), case.get("order"), _ranks(case, case.world)
    last = ends[order[-1]]
    owner = "planner" if case.get("at") in SAVE_PLANNER else "storage"
    lines = list(dict.fromkeys([*mesh_lines(trip.save), *mesh_lines(trip.load)]))
    texts = ", ".join(f"{which!r}: {state_text(trip, ends[which], case.world)}" for which in sorted(ends) if which in order)
    folder = "os.path.join(folder, str(at))"
    lines += [
        f"states = {{{texts}}}",
        f"for at, which in enumerate({order!r}):",
        f"    planner, storage = dcp.DefaultSavePlanner(enable_plan_caching=True), {writer_text(trip, folder)}",
        f"    if at == {fails} and rank in {ranks}:",
        f"        {owner}.{case.get('at')} = fail",
        "    try:",
        "        dcp.save(states[which], storage_writer=storage, planner=planner)",
        "    except CheckpointException as error:",
        f"        if at != {fails}:",
        '            return "saved", str(error).splitlines()[-1]',
    ]
    one = replace(trip, save=last, load=last)
    back = load_lines(one, folder=f'os.path.join(folder, "{len(order) - 1}")')
    lines += [line for line in back if not line.startswith("mesh = ")]
    return script(trip, [(case.world, lines)], FAILING, [FAILED, "import os"])
