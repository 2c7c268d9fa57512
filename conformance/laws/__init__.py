"""The catalogue: modules whose functions are laws (:func:`shardlaw.conformance.law.act.law`), or that have a list
``LAWS``.

Modules of other packages join it in two ways; driver and ranks both look. An installed package names them in the
entry-point group
``shardlaw.laws``::

    [project.entry-points."shardlaw.laws"]
    mylib = "mylib.laws"

The environment variable ``SHARDLAW_LAWS`` names further ones, separated by commas. Such a module may have
``EXPECTATIONS``: files of known findings, by paths that start where the module lies. How to write one:
``docs/library.md``.
"""

from __future__ import annotations

import importlib
import os
import re
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from shardlaw.conformance.errors import UsageError, one_of
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.law import Law
from shardlaw.conformance.law.target import CAPABILITIES
from shardlaw.reference.notation import NotationError

GROUP = "shardlaw.laws"
VARIABLE = "SHARDLAW_LAWS"

# in the order of a run: what the author of a back end asks first, then what is likeliest to find a fault of torch in
# the time that it takes
MODULES = (
    "collective.values",
    "rng.random_ops",
    "rng.seeding",
    "rng.random_writes",
    "layout.distribute",
    "layout.from_local",
    "layout.arithmetic",
    "layout.factories",
    "layout.wrapper",
    "layout.orders",
    "layout.memory",
    "layout.inputs",
    "layout.tensor_methods",
    "layout.modules",
    "plan.save",
    "plan.tensors",
    "plan.load",
    "plan.state",
    "plan.scale",
    "redistribute.placements",
    "redistribute.refusals",
    "redistribute.pairs",
    "redistribute.closure",
    "redistribute.values",
    "redistribute.payloads",
    "redistribute.views",
    "mesh.coordinates",
    "mesh.views",
    "mesh.creation",
    "mesh.algebra",
    "mesh.names",
    "mesh.tables",
    "mesh.backends",
    "mesh.renewed",
    "mesh.kept_order",
    "op.programs",
    "op.local",
    "op.forward",
    "op.backward",
    "sharded_tensor.specs",
    "sharded_tensor.copies",
    "sharded_tensor.filled",
    "sharded_tensor.lookups",
    "sharded_tensor.spec_boxes",
    "sharded_tensor.refusals",
    "sharded_tensor.checkpoints",
    "sharded_tensor.modules",
    "roundtrip.example",
    "roundtrip.reshard",
    "roundtrip.shards",
    "roundtrip.models",
    "roundtrip.state",
    "roundtrip.store",
    "roundtrip.saves",
    "roundtrip.plan_caching",
    "roundtrip.arguments",
    "roundtrip.protocol",
    "roundtrip.damage",
    "roundtrip.options",
    "roundtrip.staging",
    "roundtrip.background",
    "roundtrip.streams",
    "roundtrip.quantized",
    "roundtrip.transports",
    "roundtrip.process",
    "roundtrip.deprecated",
    "roundtrip.experimental",
    "roundtrip.torch_files",
    "roundtrip.release",
    "gradient.conversions",
    "gradient.autograd",
    "gradient.autograd_functions",
    "gradient.saved_operands",
    "gradient.transforms",
    "gradient.contexts",
    "module.models",
    "module.styles",
    "module.prepare_module",
    "module.fully_shard",
    "module.experts",
    "module.meta_device",
    "module.fsdp_methods",
    "module.fully_shard_groups",
    "module.complex_parameters",
    "module.between_steps",
    "module.finalized",
    "module.altered",
    "module.layers",
    "module.counted",
    "module.contexts",
    "module.data_and_tensor_parallel",
    "module.loss_parallel",
    "module.training",
    "module.whole_optimizers",
    "module.grad_scaler",
    "module.zero",
    "module.ddp",
    "module.joined",
    "module.averaged",
    "module.fsdp1",
    "module.local_map",
    "module.microbatches",
    "module.pipelined",
    "module.pipeline_stages",
    "module.traced_stages",
    "module.experimental",
    "module.context_parallel",
    "module.register_sharding",
    "module.fully_shard_options",
    "module.exported_programs",
    "module.gather_hooks",
    "module.fully_shard_refusals",
    "optimizer.sharded_load",
    "optimizer.sharded_attempts",
    "optimizer.checkpointed",
    "optimizer.recipe",
    "optimizer.fully_sharded",
    "optimizer.full_states",
    "optimizer.both_states",
    "optimizer.set_states",
    "optimizer.resumed",
    "optimizer.extra_states",
    "optimizer.left_whole",
    "op.opinfo_laws",
    "op.modes",
    "op.refusals",
    "collective.in_flight",
    "collective.functional",
    "collective.unfinished",
    "collective.autograd",
    "collective.groups",
    "collective.subgroups",
    "collective.messages",
    "collective.payloads",
    "collective.refusals",
    "roundtrip.faults",
    "crash.saves",
    "crash.protocols",
    "crash.storages",
    "module.compiled",
    "collective.compiled",
    "engine.local_tensor_mode",
)


# rooms whose laws are found by their id, and are part of no run
UNLISTED = ("shardlaw.conformance.rank.spmd", "shardlaw.conformance.target.probe")


@cache
def offered() -> dict[str, str]:
    """The modules of laws that installed packages name, each with where it is named. Raises :class:`UsageError`."""
    found: dict[str, str] = {}
    for entry in sorted(entry_points(group=GROUP)):
        where = f"entry point {entry.name} of {GROUP}"
        if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", entry.value):
            raise UsageError(f"{where} = {entry.value!r}: want the name of a module with LAWS")
        found.setdefault(entry.value, where)
    return found


def foreign() -> dict[str, str]:
    """The modules of laws that are not ours, each with where it is named: by installed packages, then by the
    environment."""
    named = dict.fromkeys(filter(None, os.environ.get(VARIABLE, "").split(",")), VARIABLE)
    return {**offered(), **{module: where for module, where in named.items() if module not in offered()}}


def modules() -> tuple[str, ...]:
    """The modules that hold laws: ours, then those of others."""
    return (*(f"{__name__}.{name}" for name in MODULES), *foreign())


@cache
def laws_of(module: str) -> tuple[Law, ...]:
    """The laws of one module, in the order in which it lists them. Raises :class:`UsageError` where one that is not
    ours cannot be read."""
    if module.startswith(f"{__name__}.") or module in UNLISTED:
        return _of_module(importlib.import_module(module))
    where = foreign().get(module, module)
    held = _held(module, where)
    laws = _of_module(held)
    listed = getattr(held, "LAWS", None)
    if (
        not laws
        or (listed is not None and not isinstance(listed, (list, tuple)))
        or not all(isinstance(law, Law) for law in laws)
    ):
        raise UsageError(
            f"{where}: {module} has {'no LAWS' if listed is None else f'LAWS = {listed!r:.80}'}: want a list of Law"
        )
    for law in laws:
        _check(law, f"{where}: {module}: law {law.id!r}")
    return tuple(laws)


def _of_module(module: Any) -> tuple[Law, ...]:
    """The laws of a module: those that its functions have been made, in their order, then those of its list
    ``LAWS``."""
    told = (value for value in vars(module).values() if isinstance(value, Law) and value.acts)
    own = [law for law in told if any(act.function.__module__ == module.__name__ for act in law.acts)]
    listed = getattr(module, "LAWS", ())
    return tuple({id(law): law for law in (*own, *(listed if isinstance(listed, (list, tuple)) else ()))}.values())


def _held(module: str, where: str) -> Any:
    try:
        return importlib.import_module(module)
    except Exception as error:
        text = str(error).strip().splitlines()
        raise UsageError(
            f"{where}: {module} cannot be imported: {type(error).__name__}{f': {text[0]}' if text else ''}"
        ) from error


def _check(law: Law, where: str) -> None:
    """Refuse a law that no run could try. Raises :class:`UsageError`."""
    from shardlaw.conformance.law.act import check_case  # loads torch

    if not re.fullmatch(r"[a-z][\w-]*(\.[\w-]+)+(\[\S+\])?", law.id):
        raise UsageError(f"{where}: want an id such as mylib.embedding or mylib.embedding[variant]")
    for name in ("clause", "source"):
        if not str(getattr(law, name)).strip():
            raise UsageError(f"{where}: want a {name}")
    if bool(law.draw) != bool(law.draws) or bool(law.sweep) != bool(law.sweeps):  # neither: a law for replays alone
        raise UsageError(
            f"{where}: want a strategy and how many cases of it (draw, draws), or an enumerator (sweep, sweeps)"
        )
    if any(act.due is None for act in law.acts):
        raise UsageError(f"{where}: want a function that returns what is due, decorated with @NAME.due")
    for need in law.needs:
        if need not in CAPABILITIES:
            raise UsageError(f"{where}: needs: unknown {need!r} ({one_of(need, CAPABILITIES)})")
    try:
        control = Case.parse(law.control)
        check_case(law, control)
    except NotationError as error:
        raise UsageError(f"{where}: control: {error}") from None
    if control.law != law.id:
        raise UsageError(f"{where}: control = {law.control!r}: want a case of this law, such as '{law.id} mesh=2'")


def expectations() -> list[Path]:
    """The files of known findings that come with the laws of others. Raises :class:`UsageError` for one that is not
    there."""
    found = []
    for module, where in foreign().items():
        held = _held(module, where)
        for name in getattr(held, "EXPECTATIONS", ()):
            path = Path(held.__file__ or "").parent / name
            if not path.is_file():
                raise UsageError(f"{where}: EXPECTATIONS of {module}: no such file {path}")
            found.append(path)
    return found


@cache
def catalogue() -> dict[str, Law]:
    """Every law by its id. Raises :class:`UsageError` when two have one id, or a module of laws cannot be read."""
    found: dict[str, Law] = {}
    home: dict[str, str] = {}
    for module in modules():
        for law in laws_of(module):
            if law.id in found:
                raise UsageError(f"two laws are called {law.id}: one in {home[law.id]}, one in {module}")
            found[law.id], home[law.id] = law, module
    return found


def find(law_id: str) -> Law:
    """The law of this id or alias, listed or not. Raises ``KeyError``."""
    laws = catalogue()
    if law_id in laws:
        return laws[law_id]
    unlisted = {law.id: law for module in UNLISTED for law in laws_of(module)}
    return unlisted.get(law_id) or next((law for law in laws.values() if law_id in law.aliases), None) or laws[law_id]
