"""Reproducers of the laws on states that are given to a model and its optimizer."""

from __future__ import annotations

from conformance import trip as t
from conformance.case import Case
from conformance.laws.optimizer.together_scripts import WHOLE, make_lines, net_lines, put, told_shortly
from conformance.report.reproducer import Script
from conformance.trip_script import mesh_lines

RATES = (0.75, 0.875, 0.375)


def options_text(case: Case, *more: str) -> str:
    how = case.get("how", "plain").split(",")
    given = ["full_state_dict=True"] if "whole" in how or "broadcast" in how else []
    given += ["broadcast_from_rank0=True"] if "broadcast" in how else []
    given += ["cpu_offload=True"] if "offload" in how else []
    return f"sd.StateDictOptions({', '.join([*given, *more])})"


def state_text(case: Case, trip: t.Trip) -> str:
    """The state that is given."""
    how = case.get("how", "plain").split(",")
    whole, odd = "whole" in how or "broadcast" in how, case.get("with", "").split(",")
    entries = {}
    for at, name in enumerate(trip.values):
        if name != case.get("lacks", "") and (at % 2 or "by" not in case):
            text = f"{name.upper()}.clone()" if whole else put(trip.save, name)
            for path in paths_of(case, trip, name, at):
                entries[path] = text
    if "extra" in odd and case.get("lacks", "") != "extra":
        entries["_extra_state" if "by" in case else "inner._extra_state"] = "3"
    if "adds" in case:
        entries["stranger"] = "torch.ones(2)"
    text = "{" + ", ".join(f"{path!r}: {value}" for path, value in entries.items()) + "}"
    text = f"{{[m for k, m in net.named_modules() if k.split('.')[-1] == 'inner'][0]: {text}}}" if "by" in case else text
    return f"{text} if rank == 0 else {{}}" if "broadcast" in how else text


def paths_of(case: Case, trip: t.Trip, name: str, at: int) -> list[str]:
    odd, first = case.get("with", "").split(","), name == next(iter(trip.values))
    own = name if not at % 2 or "by" in case else f"inner.{name}"
    return [own, *(["head.weight"] if first and "tied" in odd else []), *(["kept.weight"] if first and "renamed" in odd else [])]


def made(case: Case, trip: t.Trip) -> list[str]:
    return [
        *mesh_lines(trip.save),
        *net_lines(case, trip, trip.save, "net", "+ 1", case.get("wrap", "none"), RATES),
    ]


def told(case: Case, trip: t.Trip, lines: list[str]) -> Script:
    used = [WHOLE] if "whole(" in "\n".join(lines) else []
    return told_shortly(case, trip, lines, [*used, *make_lines(case, trip)])


def due_text(case: Case, trip: t.Trip) -> tuple[str, str]:
    """What each parameter must hold, and what it does: with what is lacking as it was."""
    want, got = [], []
    for at, name in enumerate(trip.values):
        spared = name == case.get("lacks", "") or ("by" in case and not at % 2)
        want.append(f"{name.upper()} + 1" if spared else name.upper())
        got.append(f"whole(own[{('inner.' if at % 2 else '') + name!r}].detach())")
    if "extra" in case.get("with", "").split(","):
        want.append("7" if case.get("lacks", "") == "extra" else "3")
        got.append("core.extra")
    return f"[{', '.join(want)}]", f"[{', '.join(got)}]"


def own_lines(case: Case) -> list[str]:
    """What the model holds, by the names that it has where nothing is wrapped around it."""
    bare = "k.replace('module.', '').replace('_orig_mod.', '')" if "wrap" in case else "k"
    lines = [f"own = {{{bare}: p for k, p in net.named_parameters()}}"]
    extra = "extra" in case.get("with", "").split(",")
    return [*lines, *(["core = [m for m in net.modules() if hasattr(m, 'extra')][0]"] if extra else [])]


def lenient(case: Case) -> Script:
    """What the state has is loaded, and what it lacks or has beyond is told."""
    trip = t.read_trip(case)
    want, got = due_text(case, trip)
    lines = [
        *made(case, trip),
        f"state = {state_text(case, trip)}",
        f"said = sd.set_model_state_dict(net, state, options={options_text(case, 'strict=False')})",
        *own_lines(case),
    ]
    lacks = [name for name in (case.get("lacks", ""),) if name]
    missing = (
        ["inner._extra_state"]
        if lacks == ["extra"]
        else [
            path
            for at, name in enumerate(trip.values)
            if name in lacks or ("by" in case and not at % 2)
            for path in paths_of_model(case, trip, name, at)
        ]
    )
    if case.get("wrap", "none") == "none":
        told_due = f"{sorted(missing)}, {['stranger'] if 'adds' in case else []}"
        broadcast = " if rank == 0 else None" if "broadcast" in case.get("how", "plain") else ""
        want, got = f"({want}, ({told_due}){broadcast})", f"({got}, (sorted(said.missing_keys), said.unexpected_keys){broadcast})"
    return told(case, trip, [*lines, f"return {want}, {got}"])


def paths_of_model(case: Case, trip: t.Trip, name: str, at: int) -> list[str]:
    own = paths_of(case, trip, name, at)
    return [f"inner.{name}" if at % 2 else name, *own[1:]]


def blank(case: Case) -> Script:
    """Parameters on the meta device get memory."""
    trip = t.read_trip(case)
    want, got = due_text(case, trip)
    chosen = "[*net.modules()][:1]" if case.get("blank") == "first" else "net.modules()"
    which = f"[{next(iter(trip.values))!r}]" if case.get("blank") == "first" else "[*m._parameters]"
    lines = [
        *made(case, trip),
        f"for m in {chosen}:",
        f"    for k in {which}: setattr(m, k, torch.nn.Parameter(getattr(m, k).detach().to('meta'), getattr(m, k).requires_grad))",
        f"sd.set_model_state_dict(net, {state_text(case, trip)}, options={options_text(case)})",
        *own_lines(case),
        f"return {want}, {got}",
    ]
    return told(case, trip, lines)


def refuses(case: Case) -> Script:
    """The request must be refused."""
    trip, what = t.read_trip(case), case.get("what")
    alone = "options=sd.StateDictOptions(broadcast_from_rank0=True)"
    calls = {
        "no-optimizer": "sd.get_optimizer_state_dict(net, [])",
        "empty-model": "sd.set_model_state_dict(net, {})",
        "empty-optimizer": "sd.set_state_dict(net, net_opt, model_state_dict=state, optim_state_dict={})",
        "lacks": f"sd.set_model_state_dict(net, state, options={options_text(case)})",
        "adds": f"sd.set_model_state_dict(net, state, options={options_text(case)})",
        "texts": "sd.get_optimizer_state_dict(net, net_opt, options=sd.StateDictOptions(flatten_optimizer_state_dict=True))",
        "groups": "sd.set_optimizer_state_dict(net, net_opt, optim)",
        "merged": "sd.set_optimizer_state_dict(net, net_opt, optim)",
        "broadcast-get": f"sd.get_state_dict(net, net_opt, {alone})",
        "broadcast-get-model": f"sd.get_model_state_dict(net, {alone})",
        "broadcast-set": f"sd.set_model_state_dict(net, state, {alone})",
    }
    lines = [*made(case, trip), f"state = {state_text(case, trip)}"]
    if what == "texts":
        lines += ["for p in net_all: net_opt.state[p]['note'] = 'text'"]
    if what in ("groups", "merged"):
        lines += ["optim = sd.get_optimizer_state_dict(net, net_opt)", "rest = {**optim['param_groups'][0], 'params': []}"]
    if what == "groups":
        groups = f"[g for g in optim['param_groups'] if g['params']] + [rest] * {case.integer('saved', 0)}"
        lines.append(f"optim['param_groups'] = {groups}")
    if what == "merged":
        lines.append("optim['param_groups'] = [{**rest, 'params': [*optim['state']], 'lr': 0.5}]")
    kept = '"refused"' if what != "merged" else "[0.5] * len(net_opt.param_groups)"
    got = '"accepted"' if what != "merged" else "[g.get('lr') for g in net_opt.param_groups]"
    lines += ["try:", f"    {calls[what]}", "except Exception:", "    return None, None", f"return {kept}, {got}"]
    return told(case, trip, lines)
