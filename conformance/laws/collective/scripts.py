"""Bodies of reproducers for collectives: literal inputs, the call, and what each member must get."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from conformance.case import Case
from conformance.laws import scripts
from conformance.laws.collective.calls import KINDS, STALE, Ask, Part, members
from conformance.report.reproducer import Script

Given = torch.Tensor | list[torch.Tensor] | None


def group(case: Case, field: str = "mesh", variable: str = "group") -> list[str]:
    """The statement that makes the group of a mesh field."""
    ranks = list(members(case, field))
    if ranks == list(range(case.world)):
        return [f"{variable} = None"]
    return [f"{variable} = dist.new_group({ranks}{', sort_ranks=False' if case.get('ranks', '') == 'kept' else ''})"]


def outsiders(case: Case, field: str = "mesh") -> list[str]:
    """What ranks outside the group do: nothing."""
    ranks = list(members(case, field))
    return [f"if rank not in {ranks}:", "    return None, None"] if len(ranks) < case.world else []


def table(name: str, by_rank: Mapping[int, Given]) -> list[str]:
    return [f"{name} = {{", *(f"    {rank}: {literal(value)}," for rank, value in by_rank.items()), "}"]


def literal(value: Given) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(scripts.tensor, value))}]"
    return "None" if value is None else scripts.tensor(value)


def room(want: torch.Tensor, memory: str) -> str:
    """The expression that makes a buffer for a result."""
    shape = tuple(want.shape)
    if memory == "transposed" and len(shape) > 1:
        return f"torch.full({shape[::-1]}, {STALE}, dtype={want.dtype}).permute({tuple(reversed(range(len(shape))))})"
    if memory == "sliced" and shape:
        return f"torch.full({(*shape[:-1], 2 * shape[-1] + 1)}, {STALE}, dtype={want.dtype})[..., 1::2]"
    return f"torch.full({shape}, {STALE}, dtype={want.dtype})"


def call(case: Case, ask: Ask, parts: Sequence[Part], *, kept: bool = False) -> Script:
    """A script of one collective, judged by what it gives each member; with ``kept``, what it read is overwritten afterwards."""
    ranks, kind = members(case), KINDS[ask.name]
    single, listed = "x" in kind.arguments, "xs" in kind.arguments
    constants: list[str] = []
    if single or listed:
        given: dict[int, Given] = {
            rank: part.given[0] if single else list(part.given) or None for rank, part in zip(ranks, parts, strict=True)
        }
        constants += table("GIVEN", given)
    body = [*group(case), *outsiders(case), f"{'x' if single else 'xs'} = GIVEN[rank]"]
    changes = parts[0].changes
    wanted: dict[int, Given] = {
        rank: None if part.wanted is None else list(part.wanted) or None for rank, part in zip(ranks, parts, strict=True)
    }
    if not changes:
        rooms = {rank: f"[{', '.join(room(want, ask.out) for want in part.wanted or ())}]" for rank, part in zip(ranks, parts, strict=True)}
        if len(set(rooms.values())) == 1:
            body.append(f"outs = {next(iter(rooms.values()))}")
        else:
            constants += ["ROOM = {", *(f"    {rank}: {text}," for rank, text in rooms.items()), "}"]
            body.append("outs = ROOM[rank]")
    waited = case.get("work", "") == "async"
    made = [f"work = {statement(case, ask)}, async_op=True)", "work.wait()"] if waited else [f"{statement(case, ask)})"]
    body += [*_splits(ask, ranks), *made]
    if kept:
        body += ["for given in " + ("[x]" if single else "xs or []") + ":", f"    given.fill_({STALE})"]
    constants += table("WANT", wanted)
    got = f"{'[x]' if changes else 'outs'} if WANT[rank] else None"
    ending = f"return (WANT[rank], True), ({got}, work.is_completed())" if waited else f"return WANT[rank], {got}"
    return scripts.script([*body, ending], world=case.world, constants=constants)


def _splits(ask: Ask, ranks: tuple[int, ...]) -> list[str]:
    if not (ask.splits and ask.name == "all_to_all_single"):
        return []
    return [f"splits, at = {[list(row) for row in ask.splits]}, {list(ranks)}.index(rank)"]


def statement(case: Case, ask: Ask, group: str = "group", ranks: Sequence[int] = ()) -> str:
    """The call of one collective, up to its closing bracket."""
    kind = KINDS[ask.name]
    passed = ["outs[0]" if name == "out" else "outs or None" if name == "outs" and kind.root else name for name in kind.arguments]
    options = [f"group={group}"]
    if kind.reduces:
        options.append(f"op=dist.ReduceOp.{ask.op.upper()}")
    if kind.root:
        by_position = case.get("by", "rank") == "position"
        options.append(f"group_{kind.root}={ask.root}" if by_position else f"{kind.root}={(ranks or members(case))[ask.root]}")
    if ask.splits and ask.name == "all_to_all_single":
        options += ["output_split_sizes=[row[at] for row in splits]", "input_split_sizes=splits[at]"]
    return f"dist.{kind.function}({', '.join([*passed, *options])}"
