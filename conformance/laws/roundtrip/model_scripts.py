"""Reproducers of the laws on models and optimizers: the tensors of a case are the entries of a ``ParameterDict``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from conformance import trip as t
from conformance.case import Case
from conformance.report.reproducer import Script
from conformance.trip_script import compared, mesh_lines, script, tensor_text, writer_text
from reference.checkpoint.state_dict import Slot

MODULE = "torch.distributed.checkpoint.state_dict"
READER = "storage_reader=dcp.FileSystemReader(folder)"


def model(case: Case) -> Script:
    trip = t.read_trip(case)
    first = [
        *_made(trip, trip.save, "", "m"),
        f'dcp.save({{"model": get_model_state_dict(m)}}, storage_writer={writer_text(trip)})',
    ]
    expected, got = _held(trip, trip.load, trip.worlds[1])
    second = [
        *_made(trip, trip.load, "+ 1", "m"),
        'state = {"model": get_model_state_dict(m)}',
        f"dcp.load(state, {READER})",
        'set_model_state_dict(m, state["model"])',
        f"return {expected}, {got}",
    ]
    return _stages(trip, [(trip.worlds[0], first), (trip.worlds[1], second)], ("get_model_state_dict", "set_model_state_dict"))


def part(case: Case) -> Script:
    """The names of a module inside, with its prefix and without."""
    trip = t.read_trip(case)
    inside = [name for at, name in enumerate(trip.values) if at % 2]
    own = ", ".join(f"{name!r}: model[{name!r}]" for name in inside)
    expected, got = _held(replace(trip, values={name: trip.values[name] for name in inside}), trip.save, trip.worlds[0])
    ask = "get_model_state_dict(net, submodules={net['inner']}, options=StateDictOptions(keep_submodule_prefixes=kept))"
    lines = [
        *_made(trip, trip.save, "", "model"),
        f"net = ModuleDict({{'inner': ParameterDict({{{own}}}), 'rest': ParameterDict(model)}})",
        f"with_prefix, without = [{ask} for kept in (True, False)]",
        f"names = {sorted('inner.' + name for name in inside)}, {sorted(inside)}",
        "m = without",
        f"return [*names, *{expected}], [sorted(with_prefix), sorted(without), *{got}]",
    ]
    return _stages(trip, [(trip.worlds[0], lines)], ("StateDictOptions", "get_model_state_dict"), "from torch.nn import ModuleDict")


def whole(case: Case, frozen: Sequence[str]) -> Script:
    """``frozen``: the parameters that are not trained."""
    trip = t.read_trip(case)
    names = list(trip.values)
    expected, got = _held(trip, trip.save, trip.worlds[0])
    lines = [
        *_made(trip, trip.save, "", "model"),
        *(f'model["{name}"].requires_grad_(False)' for name in frozen),
        "whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))",
        "kept = sorted(get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True)))",
        *_made(trip, trip.save, "+ 1", "m")[-1:],
        f"full = {{{', '.join(f'{name!r}: {name.upper()}' for name in names)}}} if rank == 0 else {{}}",
        "set_model_state_dict(m, full, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))",
        f"want = [{', '.join(map(str.upper, names))}, {sorted({*names} - {*frozen, *_whole_numbers(trip)})}]",
        f"return want + {expected}, [{', '.join(f'whole[{name!r}]' for name in names)}, kept] + {got}",
    ]
    return _stages(trip, [(trip.worlds[0], lines)], ("StateDictOptions", "get_model_state_dict", "set_model_state_dict"))


def optimizer(case: Case, rates: tuple[float, ...], other_rates: tuple[float, ...]) -> Script:
    """``rates`` of the saved groups, ``other_rates`` of those that are loaded into."""
    trip = t.read_trip(case)
    count = len(trip.values)
    options = ", options=StateDictOptions(flatten_optimizer_state_dict=True)" if case.get("flat", "no") == "yes" else ""
    adam = "opt = Adam([{'params': [p], 'lr': r} for p, r in zip(m.values(), RATES)], betas=(0.5, 0.5), foreach=False)"
    want, before = ([given[at % len(given)] for at in range(count)] for given in (rates, other_rates))
    first = [
        *_made(trip, trip.save, "* 1", "m"),
        adam.replace("RATES", str(want)),
        "for p in m.values(): p.grad = p.detach().clone()",
        "opt.step()",
        f'dcp.save({{"optim": get_optimizer_state_dict(m, opt{options})}}, storage_writer={writer_text(trip)})',
    ]
    expected, got = _held(trip, trip.load, trip.worlds[1])
    for name in trip.values:
        got = got.replace(f'm["{name}"].detach()', f'2 * opt.state[m["{name}"]]["exp_avg"]')
    second = [
        *_made(trip, trip.load, "+ 1", "m"),
        adam.replace("RATES", str(before)),
        f'state = {{"optim": get_optimizer_state_dict(m, opt{options})}}',
        'asked = [g["lr"] for g in opt.param_groups]',
        f"dcp.load(state, {READER})",
        f'set_optimizer_state_dict(m, opt, state["optim"]{options})',
        f'return {expected} + [{before}, {want}], {got} + [asked, [g["lr"] for g in opt.param_groups]]',
    ]
    used = (*(["StateDictOptions"] if options else []), "get_optimizer_state_dict", "set_optimizer_state_dict")
    return _stages(trip, [(trip.worlds[0], first), (trip.worlds[1], second)], used, "from torch.optim import Adam")


def optimizer_whole(case: Case, rates: tuple[float, ...], other_rates: tuple[float, ...]) -> Script:
    trip = t.read_trip(case)
    names = list(trip.values)
    adam = "Adam([{'params': [p], 'lr': r} for p, r in zip(m.values(), RATES)], betas=(0.5, 0.5), foreach=False)"
    want, before = ([given[at % len(given)] for at in range(len(names))] for given in (rates, other_rates))
    expected, got = _held(trip, trip.save, trip.worlds[0])
    for name in names:
        got = got.replace(f'm["{name}"].detach()', f'2 * opt.state[m["{name}"]]["exp_avg"]')
    lines = [
        *_made(trip, trip.save, "* 1", "m"),
        f"opt = {adam.replace('RATES', str(want))}",
        "for p in m.values(): p.grad = p.detach().clone()",
        "opt.step()",
        "whole = get_optimizer_state_dict(m, opt, options=StateDictOptions(full_state_dict=True))",
        f"first = [2 * whole['state'][k]['exp_avg'] for k in {names}]",
        *_made(trip, trip.save, "+ 1", "m")[-1:],
        f"opt = {adam.replace('RATES', str(before))}",
        "how = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)",
        "set_optimizer_state_dict(m, opt, whole if rank == 0 else {}, options=how)",
        f'return [{", ".join(map(str.upper, names))}, *{expected}, {want}], [*first, *{got}, [g["lr"] for g in opt.param_groups]]',
    ]
    used = ("StateDictOptions", "get_optimizer_state_dict", "set_optimizer_state_dict")
    return _stages(trip, [(trip.worlds[0], lines)], used, "from torch.optim import Adam")


def _stages(trip: t.Trip, stages: Sequence[tuple[int, Sequence[str]]], used: Sequence[str], *imports: str) -> Script:
    parameters = "Parameter, ParameterDict" if _whole_numbers(trip) else "ParameterDict"
    return script(trip, stages, imports=[f"from {MODULE} import {', '.join(used)}", f"from torch.nn import {parameters}", *imports])


def _made(trip: t.Trip, end: t.End, spoil: str, variable: str) -> list[str]:
    world = trip.worlds[0 if end is trip.save else 1]
    texts = {name: tensor_text(trip, end, world, name, spoil) for name in trip.values}
    for name in _whole_numbers(trip):
        texts[name] = f"Parameter({texts[name]}, requires_grad=False)"
    entries = ", ".join(f"{name!r}: {text}" for name, text in texts.items())
    return [*mesh_lines(end), f"{variable} = ParameterDict({{{entries}}})"]


def _whole_numbers(trip: t.Trip) -> list[str]:
    """The tensors that cannot be trained."""
    return [name for name, full in trip.values.items() if not full.dtype.is_floating_point]


def _held(trip: t.Trip, end: t.End, world: int) -> tuple[str, str]:
    """What every parameter of ``m`` must be, and what it is."""
    expected, got = compared(trip, end, {name: Slot(name) for name in trip.values}, world)
    for name in trip.values:
        got = got.replace(f"state[{name!r}]", f'm["{name}"].detach()')
    return expected, got


def given_whole(case: Case, rates: tuple[float, ...], other_rates: tuple[float, ...], *, steps: int = 0) -> Script:
    """A whole state is handed out: of the model, or of its optimizer after so many steps."""
    trip = t.read_trip(case)
    names = list(trip.values)
    broadcast = case.get("how") == "broadcast"
    who = " if rank == 0 else {}" if broadcast else ""
    how = f"StateDictOptions(full_state_dict=True{', broadcast_from_rank0=True' if broadcast else ''})"
    expected, got = _held(trip, trip.save, trip.worlds[0])
    lines = [*_made(trip, trip.save, "+ 1", "m")]
    if not steps:
        lines += [
            f"whole = {{{', '.join(f'{name!r}: {name.upper()}' for name in names)}}}{who}",
            f"set_model_state_dict(m, whole, options={how})",
            f"return {expected}, {got}",
        ]
        return _stages(trip, [(trip.worlds[0], lines)], ("StateDictOptions", "set_model_state_dict"))
    want, before = ([given[at % len(given)] for at in range(len(names))] for given in (rates, other_rates))
    for name in names:
        got = got.replace(f'm["{name}"].detach()', f'2 * opt.state[m["{name}"]]["exp_avg"]')
    state = ", ".join(f"{n!r}: {{'step': torch.tensor({steps}.0), 'exp_avg': {n.upper()} / 2, 'exp_avg_sq': {n.upper()}}}" for n in names)
    lines += [
        f"opt = Adam([{{'params': [p], 'lr': r}} for p, r in zip(m.values(), {before})], betas=(0.5, 0.5), foreach=False)",
        "rest = {k: v for k, v in opt.param_groups[0].items() if k not in ('params', 'lr')}",
        f"groups = [{{'params': [n], 'lr': r, **rest}} for n, r in zip({names}, {want})]",
        f"whole = {{'state': {{{state}}}, 'param_groups': groups}}{who}",
        f"set_optimizer_state_dict(m, opt, whole, options={how})",
        'told = [g["lr"] for g in opt.param_groups], [float(opt.state[p]["step"]) for p in m.values()]',
        f"return [*{expected}, ({want}, {[float(steps)] * len(names)})], [*{got}, told]",
    ]
    used = ("StateDictOptions", "set_optimizer_state_dict")
    return _stages(trip, [(trip.worlds[0], lines)], used, "from torch.optim import Adam")


def pending_lines(case: Case, rates: tuple[float, ...], other_rates: tuple[float, ...]) -> Script:
    """The state of one optimizer is given to another, whose parameters have gradients."""
    trip = t.read_trip(case)
    count = len(trip.values)
    option = {"each": "full_state_dict=True", "flat": "flatten_optimizer_state_dict=True"}.get(case.get("how", ""), "")
    adam = "opt = Adam([{'params': [p], 'lr': r} for p, r in zip(m.values(), RATES)], betas=(0.5, 0.5), foreach=False)"
    want, before = ([given[at % len(given)] for at in range(count)] for given in (rates, other_rates))
    expected, got = _held(trip, trip.save, trip.worlds[0])
    for name in trip.values:
        got = got.replace(f'm["{name}"].detach()', f'2 * opt.state[m["{name}"]]["exp_avg"]')
    lines = [
        *_made(trip, trip.save, "* 1", "m"),
        adam.replace("RATES", str(want)),
        "for p in m.values(): p.grad = p.detach().clone()",
        "opt.step()",
        f"how = StateDictOptions({option})",
        "state = get_optimizer_state_dict(m, opt, options=how)",
        *_made(trip, trip.save, "* 1", "m")[-1:],
        adam.replace("RATES", str(before)),
        "for p in m.values(): p.grad = p.detach().clone()",
        "set_optimizer_state_dict(m, opt, state, options=how)",
        f'return {expected} + [{want}], {got} + [[g["lr"] for g in opt.param_groups]]',
    ]
    used = ("StateDictOptions", "get_optimizer_state_dict", "set_optimizer_state_dict")
    return _stages(trip, [(trip.worlds[0], lines)], used, "from torch.optim import Adam")


def several(case: Case, rates: tuple[float, ...], other_rates: tuple[float, ...]) -> Script:
    """One optimizer for each parameter: their state, taken back by others."""
    trip = t.read_trip(case)
    count = len(trip.values)
    adams = "opts = [Adam([p], lr=r, betas=(0.5, 0.5), foreach=False) for p, r in zip(m.values(), RATES)]"
    want, before = ([given[at % len(given)] for at in range(count)] for given in (rates, other_rates))
    expected, got = _held(trip, trip.save, trip.worlds[0])
    for name in trip.values:
        got = got.replace(f'm["{name}"].detach()', f'2 * held[m["{name}"]]["exp_avg"]')
    lines = [
        *_made(trip, trip.save, "* 1", "m"),
        adams.replace("RATES", str(want)),
        "for p in m.values(): p.grad = p.detach().clone()",
        "for opt in opts: opt.step()",
        f"how = StateDictOptions(flatten_optimizer_state_dict={case.get('how') == 'flat'})",
        "state = get_optimizer_state_dict(m, opts, options=how)",
        *_made(trip, trip.save, "* 1", "m")[-1:],
        adams.replace("RATES", str(before)),
        "set_optimizer_state_dict(m, opts[::-1], state, options=how)",
        "held = {p: kept for opt in opts for p, kept in opt.state.items()}",
        f'return {expected} + [{want}], {got} + [[opt.param_groups[0]["lr"] for opt in opts]]',
    ]
    used = ("StateDictOptions", "get_optimizer_state_dict", "set_optimizer_state_dict")
    return _stages(trip, [(trip.worlds[0], lines)], used, "from torch.optim import Adam")


def asked(case: Case, optimizer: str) -> Script:
    """Two optimizers make a step; one was asked for its state before. ``optimizer`` is the expression that makes one of ``m``."""
    trip = t.read_trip(case)
    body: list[str] = []
    for name in ("mine", "other"):
        body += [*_made(trip, trip.save, "* 1", "m")[len(body) > 0 :], f"{name}, kept_{name} = {optimizer}, m"]
        body += ["get_optimizer_state_dict(m, mine)"] if name == "mine" else []
        body += ["for p in m.values(): p.grad = p.detach().clone()", f"{name}.step()"]
    names = list(trip.values)
    whole = "[kept_{0}[k].detach().full_tensor() if hasattr(kept_{0}[k], 'full_tensor') else kept_{0}[k].detach() for k in " + f"{names}]"
    body.append(f"return {whole.format('other')}, {whole.format('mine')}")
    return _stages(trip, [(trip.worlds[0], body)], ("get_optimizer_state_dict",), "from torch.optim import SGD, Adagrad, Adam, RMSprop")


def regrouped(case: Case, rates: tuple[float, ...]) -> Script:
    """A flat state of parameters with these rates is loaded into one group of all of them, or from one group into one for each."""
    trip = t.read_trip(case)
    given = [rates[at % len(rates)] for at in range(len(trip.values))]
    wrong = len({*given}) > 1
    groups = [f"Adam([{{'params': [p], 'lr': r}} for p, r in zip(m.values(), {given})], foreach=False)"]
    groups.append(f"Adam(m.parameters(), lr={given[0]}, foreach=False)")
    saved, loaded = groups[::-1] if case.get("groups", "together") == "apart" else groups
    lines = [
        *_made(trip, trip.save, "* 1", "m"),
        f"opt = {saved}",
        "how = StateDictOptions(flatten_optimizer_state_dict=True)",
        "state = get_optimizer_state_dict(m, opt, options=how)",
        f"opt = {loaded}",
        "for group in opt.param_groups: group['lr'] = 0.75",
        "try:",
        "    set_optimizer_state_dict(m, opt, state, options=how)",
        "    got = {group['lr'] for group in opt.param_groups}",
        "except RuntimeError:",
        '    got = "refused"',
        f"return {repr('refused') if wrong else {given[0]}}, got",
    ]
    used = ("StateDictOptions", "get_optimizer_state_dict", "set_optimizer_state_dict")
    return _stages(trip, [(trip.worlds[0], lines)], used, "from torch.optim import Adam")
