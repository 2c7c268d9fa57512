"""Reproducers of the laws on the states of a model and its optimizer together."""

from __future__ import annotations

from conformance import trip as t
from conformance.case import Case
from conformance.laws import scripts
from conformance.report.reproducer import Script
from conformance.trip_script import mesh_lines, script

MODULE = "import torch.distributed.checkpoint.state_dict as sd"
STATING = (
    "class Stating(torch.nn.Module):",
    "    get_extra_state = lambda self: self.extra",
    "    set_extra_state = lambda self, extra: setattr(self, 'extra', extra)",
)
RENAMING = (
    "class Renaming(torch.nn.Module):",
    "    _fqn_modifiers = lambda self: {'weight': 'own'}",
    "    def put(self, own):",
    "        self.own = torch.nn.ParameterDict({'weight': own})",
    "        self.register_state_dict_post_hook(lambda m, s, p, _: s.update({p + 'weight': s.pop(p + 'own.weight')}))",
    "        self.register_load_state_dict_pre_hook(lambda m, s, p, *_: s.update({p + 'own.weight': s.pop(p + 'weight')}))",
    "        return self",
)
DEEP = (
    "class Deep(torch.optim.Optimizer):",
    "    def step(self, closure=None):",
    "        for p in [p for g in self.param_groups for p in g['params'] if p.grad is not None]:",
    "            self.state[p] = {'step': 1, 'seen': {'left': {'0': p.grad / 2}}}",
)
WHOLE = "whole = lambda t: t.full_tensor() if hasattr(t, 'full_tensor') else t"
AVERAGE = {"adam": "['exp_avg']", "deep": "['seen']['left']['0']"}


def make_lines(case: Case, trip: t.Trip) -> list[str]:
    """The constants that make models of a case, and the optimizers of those."""
    odd, first, names = case.get("with", "").split(","), next(iter(trip.values)), paths(trip)
    trained = [key for key, full in trip.values.items() if full.dtype.is_floating_point]
    frozen = [names[key] for key in trained[1:][-1:]] if "frozen" in odd else []
    asks = ["p.is_floating_point()"] if len(trained) < len(trip.values) else []
    asks += [f"k not in {frozen}"] if frozen else []
    kind = f"torch.nn.Parameter(p{', ' + ' and '.join(asks) if asks else ''})"
    body = ["net = torch.nn.Module()", f"net.inner = {'Stating' if 'extra' in odd else 'torch.nn.Module'}()"]
    body += ["net.inner.extra = extra"] if "extra" in odd else []
    body += [f"for k, p in told.items(): setattr(net.inner if '.' in k else net, k[-1], {kind})"]
    body += ["net.inner.register_buffer('scratch', torch.ones(3), persistent=False)"] if "hidden" in odd else []
    body += [f"net.head = torch.nn.ParameterDict({{'weight': net.{first}}})"] if "tied" in odd else []
    body += ["net.outer = torch.nn.ModuleDict({'again': net.inner})"] if "same" in odd else []
    body += [f"net.kept = Renaming().put(torch.nn.Parameter(told['{first}'].clone()))"] if "renamed" in odd else []
    lines = [*(STATING if "extra" in odd else ()), *(RENAMING if "renamed" in odd else ())]
    lines += [f"def make(told{', extra' if 'extra' in odd else ''}):", *(f"    {line}" for line in [*body, "return net"])]
    groups = (
        "[{'params': ps, 'lr': rates[0]}]"
        if case.get("groups", "each") == "one"
        else "[{'params': [p], 'lr': r} for p, r in zip(ps, rates)]"
    )
    groups += " + [{'params': []}]" if "hollow" in odd else ""
    made = f"Deep({groups}, {{}})" if case.get("opt", "adam") == "deep" else f"Adam({groups}, betas=(0.5, 0.5))"
    return [*lines, f"adam = lambda ps, *rates: {made}"]


def paths(trip: t.Trip) -> dict[str, str]:
    return {key: f"inner.{key}" if at % 2 else key for at, key in enumerate(trip.values)}


def put(end: t.End, name: str, spoil: str = "") -> str:
    """The expression of a tensor, as a rank holds it."""
    placed = end.specs[name].placements
    text = f"{name.upper()} {spoil}".strip()
    return f"put({text}, {', '.join(map(scripts.placement, placed))})" if placed is not None else text if spoil else f"{text}.clone()"


PUT = "put = lambda t, *placed: distribute_tensor(t, mesh, placed)"
PLACES = "from torch.distributed.tensor import Replicate, Shard, distribute_tensor"


def net_lines(case: Case, trip: t.Trip, end: t.End, name: str, spoil: str, wrap: str, rates: tuple[float, ...]) -> list[str]:
    """The statements that make a model and its optimizer, ``NAME`` and ``NAME_opt``."""
    told = ", ".join(f"{path!r}: {put(end, key, spoil)}" for key, path in paths(trip).items())
    extra = f", {7 if spoil == '+ 1' else 3}" if "extra" in case.get("with", "").split(",") else ""
    given = f"{name}_all[:-1]" if "idle" in case.get("with", "").split(",") else f"{name}_all"
    lines = [f"{name} = make({{{told}}}{extra})", f"{name}_all = [*{name}.parameters()]"]
    lines += [f"{name}_opt = adam({given}, {', '.join(map(str, rates))})"]
    inner = wrap in ("inside", "ddp-inside")
    place = f"{name}.inner" if inner else name
    for how in ["compile" if wrap == "inside" else "ddp"] if inner else reversed(wrap.split("-")) if wrap != "none" else []:
        lines.append(f"{place} = {f'DDP({place})' if how == 'ddp' else f'torch.compile({place})'}")
    return lines


def options_text(told: str) -> str:
    return f", options=sd.StateDictOptions({told})" if told else ""


def together(case: Case) -> Script:
    """Both states of one model are given to another, and parameters, averages, rates and names compared."""
    trip, how = t.read_trip(case), case.get("how", "plain").split(",")
    odd = case.get("with", "").split(",")
    whole, broadcast = "whole" in how or "broadcast" in how, "broadcast" in how
    options = {"full_state_dict": whole, "cpu_offload": "offload" in how, "flatten_optimizer_state_dict": "flat" in how}
    told = ", ".join(f"{name}=True" for name, holds in options.items() if holds)
    end = trip.load if whole else trip.save
    option = "initial_lr" if "scheduled" in odd else "lr"
    mine = " if rank == 0 else {}" if broadcast else ""
    lines = [
        *(mesh_lines(trip.save) or mesh_lines(end)),
        *net_lines(case, trip, trip.save, "one", "* 1", case.get("wrap", "none"), (0.5, 0.25, 0.125)),
        *(["for g in one_opt.param_groups: g['initial_lr'] = 2 * g['lr']"] if "scheduled" in odd else []),
        "for p in one_all: p.grad = p.detach().clone() if p.requires_grad else None",
        "one_opt.step()",
        f"model, optim = sd.get_state_dict(one, one_opt{options_text(told)})",
        *net_lines(case, trip, end, "two", "+ 1", case.get("wrap.load", case.get("wrap", "none")), (0.75, 0.875, 0.375)),
    ]
    if broadcast and "apart" in how:
        lines += [f"told = sd.StateDictOptions({told}, broadcast_from_rank0=True)"]
        lines += [f"sd.set_model_state_dict(two, model{mine}, options=told)"]
        lines += [f"sd.set_optimizer_state_dict(two, two_opt, optim{mine}, options=told)"]
    else:
        both = f"model_state_dict=model{mine}, optim_state_dict=optim{mine}"
        lines += [f"sd.set_state_dict(two, two_opt, {both}{options_text(told + ', broadcast_from_rank0=True' * broadcast)})"]
    wraps = "[k for k in model if 'module' in k or '_orig_mod' in k]" if "wrap" in case else "[]"
    lines += [f"return [*facts(one_all, one_opt), []], [*facts(two_all, two_opt), {wraps}]"]
    average = AVERAGE[case.get("opt", "adam")]
    told = f"[whole(opt.state[p]{average}) for p in net if p in opt.state], [g.get('{option}') for g in opt.param_groups]"
    constants = [
        WHOLE,
        f"facts = lambda net, opt: ([whole(p.detach()) for p in net], {told})",
        *(DEEP if case.get("opt", "adam") == "deep" else ()),
        *make_lines(case, trip),
    ]
    return told_shortly(case, trip, lines, constants)


def told_shortly(case: Case, trip: t.Trip, lines: list[str], constants: list[str]) -> Script:
    """The script of one stage, with what its lines need."""
    text = "\n".join([*lines, *constants])
    made = [at for at, line in enumerate(lines) if line.startswith("mesh = ")]
    if "put(" in text and made:
        lines = [*lines[: made[0] + 1], PUT, *lines[made[0] + 1 :]]
    imports = [MODULE, *([PLACES] if "put(" in text else [])]
    imports += ["from torch.nn.parallel import DistributedDataParallel as DDP"] if "DDP(" in text else []
    imports += ["from torch.optim import Adam"] if "Adam(" in text else []
    return script(trip, [(case.world, lines)], imports=imports, constants=constants)
