"""States as ranks build them, and as scripts print them: tensors, each made once, and the tree around them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from shardlaw.conformance.law import literal as texts
from shardlaw.conformance.law.due import Global
from shardlaw.conformance.law.fields import ScriptArgument, dtensor_expression, mesh_line, mesh_name
from shardlaw.conformance.laws.checkpoint import trip as t
from shardlaw.conformance.laws.checkpoint.calls import App, poison
from shardlaw.conformance.laws.checkpoint.contents import Contents
from shardlaw.conformance.laws.checkpoint.holders import elements, sharded, wrapped
from shardlaw.reference.checkpoint.state_dict import Slot, State, Stateful, slot_names
from shardlaw.reference.tensors import lay_out

if TYPE_CHECKING:
    from shardlaw.conformance.rank.context import RankContext


def filled(value: Contents, blank: str) -> tuple[Contents, Callable[[torch.Tensor], torch.Tensor]]:
    """What a state holds at first, and what is done to the elements of its tensors."""
    if blank == "meta":
        return value, lambda local: local.to("meta")
    return (value.untouched(), poison) if blank else (value, torch.clone)


def built(value: Contents, here: RankContext, blank: str) -> State:
    first, put = filled(value, blank)
    return t.build(first.end, lambda name: t.placed(here, first.end, name, value.full(name), put))


def printed(value: Contents, prefix: str, world: int, blank: str) -> ScriptArgument:
    """A state of a script: statements that make its tensors, each once, and the expression of the whole."""
    first, put = filled(value, blank)
    end, lines = first.end, list[str]()
    on = "mesh" if end.mesh == value.trip.save.mesh else "mesh.load"
    used = set[Callable[..., Any]]()
    for name in slot_names(end.state):
        spec, layout, full = end.specs[name], end.layout(name), value.full(name)
        if layout is not None and end.held != "sharded" and mesh_line(end.mesh, on) not in lines:
            lines.append(mesh_line(end.mesh, on))
        if layout is not None and end.held:
            make = wrapped if end.held == "wrapper" else sharded
            placements = f"{mesh_name(on)}, {texts.placements_literal(layout.placements)}, " if make is wrapped else ""
            held = pieces_text(end, name, full, put, world)
            lines.append(f"{prefix}{name} = {make.__name__}({held}, {placements}{layout.shape})")
            used.add(make)
            continue
        held = at_rank(
            {rank: text(t.part(end, name, full, rank), "" if put is torch.clone else blank) for rank in range(world)}
        )
        if spec.memory != "plain" and spec.shape:
            held = f"lay_out({held}, {spec.memory!r})"
            used.add(lay_out)
        if layout is not None:
            held = dtensor_expression(Global(full, layout), held, mesh_name(on))
        lines.append(f"{prefix}{name} = {held}")
    if any(isinstance(entry, Stateful) for entry in end.state.values()):
        used.add(App)
    return ScriptArgument(
        tree_text(end.state, prefix), (), tuple(lines), uses=tuple(sorted(used, key=lambda one: one.__name__))
    )


def pieces_text(
    end: t.End, name: str, full: torch.Tensor, put: Callable[[torch.Tensor], torch.Tensor], world: int
) -> str:
    """The expression of the shards of a rank: their offsets and elements."""
    own = {
        rank: [f"({box.offset}, {text(put(elements(full, box)))})" for box in end.boxes(name, rank)]
        for rank in range(world)
    }
    return at_rank({rank: f"[{', '.join(shards)}]" for rank, shards in own.items()})


def text(held: torch.Tensor, blank: str = "") -> str:
    """The expression of a tensor; of one that is to be ``blank``, of what stands there instead."""
    if blank == "meta":
        return f'torch.empty({tuple(held.shape)}, dtype={held.dtype}, device="meta")'
    held = poison(held) if blank else held
    if held.numel() > 2 and bool((held == held.flatten()[0]).all()):
        return f"torch.full({tuple(held.shape)}, {texts.literal(held.flatten()[0].item())}, dtype={held.dtype})"
    return texts.tensor_literal(held.contiguous())


def at_rank(by_rank: Mapping[int, str]) -> str:
    """The expression of what a rank holds."""
    if len({*by_rank.values()}) == 1:
        return next(iter(by_rank.values()))
    return "{\n" + "".join(f"    {rank}: {value},\n" for rank, value in by_rank.items()) + "}[rank]"


def tree_text(value: Any, prefix: str) -> str:
    match value:
        case Slot(name):
            return f"{prefix}{name}"
        case Stateful(state):
            return f"App({tree_text(state, prefix)})"
        case dict():
            return "{" + ", ".join(f"{key!r}: {tree_text(entry, prefix)}" for key, entry in value.items()) + "}"
        case list():
            return "[" + ", ".join(tree_text(entry, prefix) for entry in value) + "]"
        case tuple():
            return "(" + ", ".join(tree_text(entry, prefix) for entry in value) + ("," if len(value) == 1 else "") + ")"
    return texts.literal(value)
