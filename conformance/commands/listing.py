"""``shardlaw laws``: the laws and features as text or JSON."""

from __future__ import annotations

import json
import textwrap
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardlaw.conformance.law.law import Law
    from shardlaw.conformance.run.request import RunRequest

WIDTH = 100
MAX_DETAILED = 5  # so many selected laws are shown with the fields of their cases


def list_laws(patterns: tuple[str, ...], as_json: bool) -> str:
    """The laws that the patterns select; if they are few, also the fields of their cases. Raises
    :class:`~shardlaw.conformance.errors.UsageError`."""
    from shardlaw.conformance.law.selection import select
    from shardlaw.conformance.laws import catalogue
    from shardlaw.conformance.report.wording import count_noun

    def record(law: Law) -> dict[str, Any]:
        return {
            "id": law.id,
            "chapter": law.chapter,
            "tier": law.tier,
            "clause": law.clause,
            "source": law.source,
            "needs": list(law.needs),
            "smallest": law.smallest,
            "weight": law.weight,
            "draws": law.draws,
            "sweeps": law.sweeps,
            "refusal": law.refusal if isinstance(law.refusal, str) else "allowed",
            "control": law.control,
            "aliases": list(law.aliases),
        }

    laws = select(list(catalogue().values()), patterns)
    if as_json:
        return json.dumps([record(law) for law in laws], indent=2)
    lines = []
    for law in laws:
        lines.append(f"{law.id}  ({law.tier})")
        lines += textwrap.wrap(law.clause, WIDTH, initial_indent="    ", subsequent_indent="    ")
        lines += textwrap.wrap(f"source: {law.source}", WIDTH, initial_indent="    ", subsequent_indent="      ")
        if len(laws) <= MAX_DETAILED:
            lines += [f"    case:   {law.control}", *_field_lines(law)]
    return "\n".join([*lines, count_noun(len(laws), "law")])


def list_selected(request: RunRequest) -> str:
    """The ids of the laws that a run would try, after its target and expectations were checked. Raises
    :class:`~shardlaw.conformance.errors.UsageError`."""
    import torch

    from shardlaw.conformance.law.selection import select
    from shardlaw.conformance.laws import catalogue
    from shardlaw.conformance.run import expectations
    from shardlaw.conformance.target.config import get_target, read_config, with_storage

    config, laws = read_config(), list(catalogue().values())
    target = with_storage(get_target(request.target, config), request.storage, config)
    given = [] if request.no_expect else expectations.given_files(target, request.expect)
    expectations.load(given, laws, torch.__version__, target.name, given)
    return "\n".join(law.id for law in select(laws, request.laws, request.ops))


def _field_lines(law: Law) -> list[str]:
    """The fields of a law's cases: a line for each parameter, and one for what else it is read from."""
    from shardlaw.conformance.law.act import law_parameters
    from shardlaw.conformance.law.fields import MeshField, TensorField

    parameters = law_parameters(law)
    own, seen, lines = {parameter.field for parameter in parameters}, set[str](), []
    for parameter in parameters:
        field, read = parameter.field, parameter.type.fields(parameter.field)
        names = [name for name in read if name not in seen and (name == field or name not in own)]
        seen.update(names)
        beside = [name for name in names if field in read and name != field]
        meshes = [name for name in beside if name.partition(".")[0] == "mesh"]
        wants = f"{parameter.type.takes}{'' if parameter.required else ', or nothing'}"
        for part, text in (
            ([name for name in names if name not in (*beside, "*")], wants),
            (["a, b, ... (its tensors)"] * ("*" in names), TensorField.takes),
            (meshes, MeshField.takes),
            ([name for name in beside if name not in (*meshes, "*")], f"belong to {field}; the cases.txt of a run shows their values"),
        ):
            lines += [f"{', '.join(part)}: {text}"] if part else []
    return [
        line
        for at, text in enumerate(lines)
        for line in textwrap.wrap(
            text, WIDTH, initial_indent="    fields: " if not at else " " * 12, subsequent_indent=" " * 14, break_on_hyphens=False
        )
    ]


def list_features(patterns: tuple[str, ...], as_json: bool) -> str:
    """The features that the patterns select, grouped by the axis of the input space. Raises
    :class:`~shardlaw.conformance.errors.UsageError`."""
    from shardlaw.conformance.errors import UsageError, one_of
    from shardlaw.conformance.law.features.feature_lines import LINES
    from shardlaw.conformance.law.selection import glob

    known = [name for names in LINES.values() for name in names]
    for pattern in patterns:
        if not any(glob(pattern).fullmatch(name) for name in known):
            raise UsageError(f"no feature matches {pattern!r} ({one_of(pattern.strip('*'), known)})")

    def is_selected(name: str) -> bool:
        return not patterns or any(glob(pattern).fullmatch(name) for pattern in patterns)

    selected = {line: {name: names[name] for name in filter(is_selected, names)} for line, names in LINES.items()}
    selected = {line: names for line, names in selected.items() if names}
    if as_json:
        return json.dumps(selected, indent=2)
    width = max(len(name) for names in selected.values() for name in names)
    lines = []
    for line, names in selected.items():
        lines += [line, *(f"    {name:{width}}  {meaning}" for name, meaning in names.items())]
    return "\n".join(lines)
