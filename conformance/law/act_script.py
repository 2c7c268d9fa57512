"""Writes the script of a case from the law's acts: their source, literal arguments, and the literal due value that was not met."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from shardlaw.conformance import compat
from shardlaw.conformance.law import due
from shardlaw.conformance.law.literal import rank_table
from shardlaw.conformance.law.script import Script, ScriptError, Stage
from shardlaw.conformance.law.source import SourceError, Sources

if TYPE_CHECKING:
    from shardlaw.conformance.law.case import Case
    from shardlaw.conformance.law.fields import ScriptArgument
    from shardlaw.conformance.law.law import Law

# names that occur in literals, by the module that has them
LITERAL_IMPORTS = {
    "torch.distributed.device_mesh": ("DeviceMesh", "init_device_mesh"),
    "torch.distributed.tensor": ("DTensor", "Partial", "Replicate", "Shard"),
}
EPSILON = {torch.float64: 2**-52, torch.float32: 2**-23, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def act_script(law: Law, case: Case, key: str = "") -> Script:
    """The script of a case. It compares ``key`` alone where a stage has that key, else the whole result. Raises :class:`ScriptError`."""
    sources, stages, constants = Sources(), list[Stage](), list[str]()
    arguments: list[ScriptArgument] = []
    compared: list[Any] = []
    for at, (act, world) in enumerate(zip(law.acts, law.worlds(case), strict=False)):
        try:
            name = sources.add(act.function, identifier(law.id) + (f"_{at + 1}" if at else ""))
        except SourceError as error:
            raise ScriptError(str(error)) from None
        by_parameter = act.script_arguments(case, world)
        stage, own_constants, own_compared = _stage_script(law, case, key, at, world, name, by_parameter)
        stages.append(stage)
        constants += [text for text in own_constants if text not in constants]
        compared += own_compared
        arguments += by_parameter.values()
        for function in dict.fromkeys(function for argument in by_parameter.values() for function in argument.uses):
            sources.include(function)
    lines = [*constants, *(line for stage in stages for line in stage.body)]
    tables = _prune_tables(sources.definitions.values(), lines)
    definitions = _prune_unused(dict(zip(sources.definitions, tables, strict=True)), lines)
    text = "\n".join([*definitions, *lines])
    names = _names_in(text)
    used = (line for argument in arguments for line in argument.imports)
    return Script(
        tuple(stages),
        imports=(*(line for name, line in sources.imports.items() if name in names), *used, *_literal_imports(text)),
        constants=tuple(constants),
        tolerance=max(map(_tolerance, compared), default=0.0),
        definitions=tuple(definitions),
        compares=tuple(sorted({part for value in compared for part in _comparisons(value)})),
    )


def _stage_script(
    law: Law, case: Case, key: str, at: int, world: int, name: str, arguments: Mapping[str, ScriptArgument]
) -> tuple[Stage, list[str], list[Any]]:
    """The script of the act number ``at``, which is called ``name`` there: its stage, its constants, and the due values that it compares
    with."""
    act, members = law.acts[at], law.member_ranks(case, at)
    acting = range(world) if members is None else members
    due_values = {rank: due.by_key(act.due_on(case, rank, world)) if rank in acting else ... for rank in range(world)}
    keys = {each for value in due_values.values() if isinstance(value, Mapping) for each in value}
    is_single = keys <= {due.RESULT}
    picked = due.RESULT if is_single else key if key in keys else None
    if picked is not None:
        due_values = {rank: value.get(picked, ...) if isinstance(value, Mapping) else value for rank, value in due_values.items()}
    table = f"WANT_{at + 1}" if len(law.acts) > 1 else "WANT"
    try:
        want = rank_table(table, {rank: due.for_script(value, rank) for rank, value in due_values.items()})
    except TypeError as error:
        raise ScriptError(f"{law.id}: what is due: {error}") from None
    body = list(dict.fromkeys(line for argument in arguments.values() for line in argument.statements))
    if len(acting) < world:
        body += [f"if rank not in {sorted(acting)}:", "    return ..., None"]
    body.append(f"got = {name}({', '.join(f'{parameter}={argument.expression}' for parameter, argument in arguments.items())})")
    if picked is not None and not is_single:
        body.append(f"got = got.get({picked!r})")
    body.append(f"return {table}[rank], got")
    constants = ["\n".join(argument.constants) for argument in arguments.values() if argument.constants]
    return Stage(world, tuple(body)), [*constants, "\n".join(want)], list(due_values.values())


def _prune_tables(definitions: Iterable[str], lines: Sequence[str]) -> list[str]:
    """The definitions; a table of functions keeps only the entries whose keys occur elsewhere in the script."""
    found = list(definitions)
    for at, text in enumerate(found):
        if _is_table(text):
            (node,) = ast.parse(text).body
            table = node.value  # type: ignore[attr-defined]
            rest = "\n".join([*lines, *found[:at], *found[at + 1 :]])
            pairs = zip(table.keys, table.values, strict=True)
            named = [(key, value) for key, value in pairs if not isinstance(key, ast.Constant) or repr(key.value) in rest]
            table.keys, table.values = [key for key, _ in named], [value for _, value in named]
            found[at] = ast.unparse(node)
    return found


def _prune_unused(definitions: Mapping[str, str], lines: Iterable[str]) -> list[str]:
    """The definitions that the lines use, directly or through others: a pruned table no longer uses what its entries did."""
    found, pending = set[str](), [*lines]
    while pending:
        new = (_names_in(pending.pop()) & definitions.keys()) - found
        found |= new
        pending += [definitions[name] for name in new]
    return [text for name, text in definitions.items() if name in found]


def _names_in(text: str) -> set[str]:
    return set(re.findall(r"[^\W\d]\w*", text))


@lru_cache(1024)
def _is_table(text: str) -> bool:
    """Whether a definition is a dict of lambdas."""
    (node,) = ast.parse(text).body
    table = node.value if isinstance(node, ast.Assign) else None
    return isinstance(table, ast.Dict) and any(isinstance(one, ast.Lambda) for one in table.values)


def identifier(law_id: str) -> str:
    """A law's id, without its variant, as a Python name."""
    return re.sub(r"\W", "_", law_id.partition("[")[0])


def _literal_imports(text: str) -> Iterator[str]:
    def uses(name: str) -> bool:
        return name in text and bool(re.search(rf"(?<![\w.]){name}\b", text))

    for module, names in LITERAL_IMPORTS.items():
        if used := [*filter(uses, names)]:
            yield f"from {module} import {', '.join(used)}"
    if uses(compat.STRIDED_SHARD):
        yield compat.import_statement("StridedShard")


def _comparisons(want: Any) -> Iterator[str]:
    """The parts of the script template's ``agrees`` that comparing with a due value needs."""
    match want:
        case due.Global() | due.Claimed():
            yield from ("dtensor", "tensor", "list")
        case due.Refused(errors=errors, words=words):
            yield "error" if len(errors) == 1 and not words else "errors"
        case due.AtMost():
            yield "range"
        case due.Alike():
            yield "alike"
        case due.Either(dues=dues):
            yield "either"
            for one in dues:
                yield from _comparisons(one)
        case due.Near(value=value) | due.Of(value=value):
            yield from _comparisons(value)
            yield "number"
        case torch.Tensor():
            yield "tensor"
        case Mapping():
            yield "dict"
            for value in want.values():
                yield from _comparisons(value)
        case list() | tuple():
            yield "list"
            for value in want:
                yield from _comparisons(value)
        case float():
            yield "number"
        case due.Due():
            yield from want.compares()


def _tolerance(want: Any) -> float:
    """The largest absolute difference that rounding may cause, over all values in ``want`` that are not exact."""
    if isinstance(want, Mapping):
        return max(map(_tolerance, want.values()), default=0.0)
    if isinstance(want, list | tuple):
        return max(map(_tolerance, want), default=0.0)
    if isinstance(want, due.Near):
        value = want.value
    elif isinstance(want, (due.Global, due.Claimed)) and not want.exact:
        value = want.full
    else:
        return 0.0
    if not isinstance(value, torch.Tensor):
        return 1e-4 * max(1.0, float(abs(value)))
    if not (value.is_floating_point() or value.is_complex()):
        return 0.0
    finite = value[value.isfinite()].abs() if value.numel() else value
    computed = getattr(want, "rounding", None) or value.dtype
    return float(64 * EPSILON.get(computed, 2**-23) * max(1.0, float(finite.max()) if finite.numel() else 0.0))
