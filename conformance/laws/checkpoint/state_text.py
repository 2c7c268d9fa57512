"""Builds states on ranks, and prints them for scripts."""

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
from shardlaw.conformance.laws.checkpoint.holders import HOLDERS, elements, wrapper_dtensor
from shardlaw.reference.checkpoint.state_dict import Slot, State, Stateful, slot_names
from shardlaw.reference.tensors import lay_out

if TYPE_CHECKING:
    from shardlaw.conformance.rank.context import RankContext


Fill = Callable[[torch.Tensor], torch.Tensor]


def initial_state(value: Contents, fill: str) -> tuple[t.End, Fill]:
    """An end before it is saved or loaded into, and a function from the due local elements to the initial ones."""
    if fill == "meta":
        return value.end, lambda local: local.to("meta")
    return (value.before_load().end, poison) if fill else (value.end, torch.clone)


def build_contents(value: Contents, here: RankContext, fill: str) -> State:
    """The state on a rank."""
    end, initial = initial_state(value, fill)
    return t.build_state(end, lambda name: t.build_tensor(here, end, name, value.full(name), initial))


def script_contents(value: Contents, prefix: str, world: int, fill: str) -> ScriptArgument:
    """The state in a script: statements for its tensors, which are named ``prefix`` and their name, and the expression
    of the tree."""
    end, initial = initial_state(value, fill)
    lines, used = list[str](), set[Callable[..., Any]]()
    mesh = "mesh" if end.mesh == value.trip.save.mesh else "mesh.load"
    for name in slot_names(end.state):
        spec, layout, full = end.specs[name], end.layout(name), value.full(name)
        if layout is not None and end.holder not in HOLDERS and mesh_line(end.mesh, mesh) not in lines:
            lines.append(mesh_line(end.mesh, mesh))
        if layout is not None and end.holder:
            shards = script_shards(end, name, full, initial, world)
            if end.holder == "wrapper":
                placements = texts.placements_literal(layout.placements)
                expression = f"wrapper_dtensor({shards}, {mesh_name(mesh)}, {placements}, {layout.shape})"
                used.add(wrapper_dtensor)
            else:
                holder = HOLDERS[end.holder]
                expression = f"{holder.__name__}({shards}, {layout.shape})"
                used.add(holder)
        else:
            locals_ = {rank: tensor_text(initial(t.local_tensor(end, name, full, rank))) for rank in range(world)}
            expression = select_by_rank(locals_)
            if spec.memory != "plain" and spec.shape:
                expression = f"lay_out({expression}, {spec.memory!r})"
                used.add(lay_out)
            if layout is not None:
                expression = dtensor_expression(Global(full, layout), expression, mesh_name(mesh))
        lines.append(f"{prefix}{name} = {expression}")
    if any(isinstance(entry, Stateful) for entry in end.state.values()):
        used.add(App)
    uses = tuple(sorted(used, key=lambda function: function.__name__))
    return ScriptArgument(tree_text(end.state, prefix), (), tuple(lines), uses=uses)


def script_shards(end: t.End, name: str, full: torch.Tensor, initial: Fill, world: int) -> str:
    """The expression of the shards of a rank: pairs of offsets and elements."""
    shards = {
        rank: [f"({box.offset}, {tensor_text(initial(elements(full, box)))})" for box in end.boxes(name, rank)]
        for rank in range(world)
    }
    return select_by_rank({rank: f"[{', '.join(pairs)}]" for rank, pairs in shards.items()})


def tensor_text(local: torch.Tensor) -> str:
    """The expression of a tensor."""
    if local.is_meta:
        return f'torch.empty({tuple(local.shape)}, dtype={local.dtype}, device="meta")'
    if local.numel() > 2 and bool((local == local.flatten()[0]).all()):
        return f"torch.full({tuple(local.shape)}, {texts.literal(local.flatten()[0].item())}, dtype={local.dtype})"
    return texts.tensor_literal(local.contiguous())


def select_by_rank(expressions: Mapping[int, str]) -> str:
    """An expression that selects this rank's one, where they differ."""
    if len({*expressions.values()}) == 1:
        return next(iter(expressions.values()))
    return "{\n" + "".join(f"    {rank}: {value},\n" for rank, value in expressions.items()) + "}[rank]"


def tree_text(value: Any, prefix: str) -> str:
    """The expression of a tree, in which tensors are named ``prefix`` and their name."""
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
