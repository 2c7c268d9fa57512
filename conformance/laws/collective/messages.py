"""Laws of messages between two ranks, and of collectives of values that are no tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from conformance.case import Case
from conformance.law import Law, Limits
from conformance.laws import scripts
from conformance.laws.collective import scripts as texts
from conformance.laws.collective.calls import STALE, members, team
from conformance.laws.collective.draws import features, one_in
from conformance.laws.collective.values import DOC
from conformance.report.reproducer import Script
from reference import collective
from reference.tensors import DTYPES, TensorSpec
from strategies import shapes
from strategies.collectives import groups, payload

if TYPE_CHECKING:
    from conformance.here import Here

Message = tuple[int, int, int]


def messages(case: Case) -> list[Message]:
    """Who sends to whom under which tag, by position in the group, in order."""
    found = []
    for word in case.get("sends").split("/"):
        pair, _, tag = word.partition(":")
        source, _, destination = pair.partition("-")
        found.append((int(source), int(destination), int(tag or 0)))
    return found


def draw_messages(law: str, limits: Limits, tags: bool) -> SearchStrategy[Case]:
    @st.composite
    def case(draw: st.DrawFn) -> Case:
        mesh = draw(groups(world_size=limits.world_size, least=2))
        pairs = [(i, j) for i in range(mesh.size) for j in range(mesh.size) if i != j]
        sends = draw(st.lists(st.sampled_from(pairs), min_size=1, max_size=6))
        tagged = [f"{i}-{j}:{draw(st.integers(0, 2))}" if tags else f"{i}-{j}" for i, j in sends]
        spec = TensorSpec(draw(shapes(max_size=5)), None, draw(st.sampled_from([limits.dtypes[0], *limits.dtypes])))
        how = draw(st.sampled_from(("batch", "works") if tags else ("batch", "batch", "works", "blocking")))
        return Case.of(
            law,
            mesh=mesh,
            x=spec,
            sends="/".join(tagged),
            how=how,
            receive="reversed" if tags and draw(st.booleans()) else None,
            by="position" if how != "batch" and draw(one_in(3)) else None,
        )

    return case()


def check_messages(case: Case, here: Here) -> None:
    """Every message arrives with whom it is for; those of one pair and tag in the order in which they were sent."""
    on, how, spec = team(case, here), case.get("how"), case.tensor("x")
    if on.position is None:
        return
    sent = messages(case)
    dtype = DTYPES[spec.dtype]
    values = [payload(spec.shape, dtype, at) for at in range(len(sent))]
    mine = [at for at, (source, destination, _) in enumerate(sent) if on.position in (source, destination)]
    rooms = {at: here.tensor(torch.full(spec.shape, STALE, dtype=dtype)) for at in mine if sent[at][1] == on.position}

    def posted(at: int, send: Any, receive: Any) -> Any:
        source, destination, tag = sent[at]
        there, key = (destination, "dst") if source == on.position else (source, "src")
        whom = {f"group_{key}": there} if case.get("by", "rank") == "position" else {key: on.ranks[there]}
        act, buffer = (send, here.tensor(values[at])) if source == on.position else (receive, rooms[at])
        return act(buffer, group=on.group, tag=tag, **whom)

    if how == "blocking":
        for at in mine:
            posted(at, dist.send, dist.recv)
    else:
        order = turned(case, mine, sent, on.position)
        if how == "batch":
            ops = []
            for at in order:
                source, destination, tag = sent[at]
                out = source == on.position
                buffer, peer = (here.tensor(values[at]), on.ranks[destination]) if out else (rooms[at], on.ranks[source])
                ops.append(dist.P2POp(dist.isend if out else dist.irecv, buffer, peer, on.group, tag))
            works = dist.batch_isend_irecv(ops) if ops else []
        else:
            works = [posted(at, dist.isend, dist.irecv) for at in order]
        for work in works:
            work.wait()
    arrived = collective.delivered(
        (source, destination, tag, value) for (source, destination, tag), value in zip(sent, values, strict=True)
    )
    for at, room in rooms.items():
        here.same(room, arrived[sent[at]].pop(0), "message", what=f"message {at}, {sent[at]},")


def turned(case: Case, posted: Sequence[int], sent: Sequence[Message], position: int | None = None) -> list[int]:
    """The order in which messages are posted: those that ``position`` sends first, as they are listed; then those that it receives, last
    tag first where they are received in reverse."""
    backwards = case.get("receive", "") == "reversed"
    return sorted(posted, key=lambda at: (sent[at][0] != position, -sent[at][2] if backwards and sent[at][0] != position else 0))


def script_messages(case: Case) -> Script:
    """Every rank posts its messages in order, and waits for all of them."""
    ranks, sent, spec = members(case), messages(case), case.tensor("x")
    values = [payload(spec.shape, DTYPES[spec.dtype], at) for at in range(len(sent))]
    constants = ["SENT = [", *(f"    {ranks[i], ranks[j], tag}," for i, j, tag in sent), "]"]
    constants += ["VALUES = [", *(f"    {scripts.tensor(value)}," for value in values), "]"]
    order, blocking = turned(case, range(len(sent)), sent), case.get("how") == "blocking"
    send, receive = ("send", "recv") if blocking else ("isend", "irecv")
    apart = [] if blocking else [f"for at in {order}:", "    source, destination, tag = SENT[at]"]
    body = [
        *texts.group(case),
        "rooms, works = {}, []",
        f"for at in {list(range(len(sent)))}:",
        "    source, destination, tag = SENT[at]",
        "    if rank == source:",
        f"        works.append(dist.{send}(VALUES[at], destination, group, tag))",
        *apart,
        "    if rank == destination:",
        f"        rooms[at] = torch.full_like(VALUES[at], {STALE})",
        f"        works.append(dist.{receive}(rooms[at], source, group, tag))",
    ]
    body += [] if blocking else ["for work in works:", "    work.wait()"]
    body += ["mine = sorted(rooms)", "return [VALUES[at] for at in mine], [rooms[at] for at in mine]"]
    return scripts.script(body, world=case.world, constants=constants)


def features_messages(case: Case) -> set[str]:
    sent = messages(case)
    more = {"blocking"} if case.get("how") == "blocking" else {"async", "in-flight"} if len(sent) > 1 else {"async"}
    return features(case) | more | ({"repeated"} if len(set(sent)) < len(sent) else set())


OBJECTS: dict[str, Any] = {
    "number": 7,
    "text": "müßig",
    "nothing": None,
    "empty": "",
    "large": list(range(3000)),
    "nested": {"a": [1, (2.5, None)], 3: {"b": {4, 5}, "c": b"\x00\xff"}},
    "tensor": [torch.arange(4), torch.ones(0, 2)],
    "complex": 1 - 2j,
    "big": 10**30,
    "nan-free": float("inf"),
}
CALLS = ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list")


def value(case: Case, position: int, part: int = 0) -> Any:
    """What a member sends: another kind, and another number of bytes, for each."""
    names = case.get("values").split(".")
    return [names[(position + part) % len(names)], position, part, OBJECTS[names[(position + part) % len(names)]]]


def draw_objects(limits: Limits) -> SearchStrategy[Case]:
    @st.composite
    def case(draw: st.DrawFn) -> Case:
        call = draw(st.sampled_from(CALLS))
        mesh = draw(groups(world_size=limits.world_size, least=2 if call == "send_object_list" else 1))
        names = draw(st.lists(st.sampled_from(sorted(OBJECTS)), min_size=1, max_size=3))
        root = draw(st.integers(0, mesh.size - 1)) if call != "all_gather_object" else 0
        by = "position" if call != "all_gather_object" and draw(one_in(3)) else None
        return Case.of("collective.objects", mesh=mesh, call=call, values=".".join(names), root=root or None, by=by)

    return case()


def alike(one: Any, other: Any) -> bool:
    """Whether two values are equal, their kinds and the tensors in them included."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(alike(one[key], other[key]) for key in one)
    return bool(one == other)


def check_objects(case: Case, here: Here) -> None:
    """Values of any kind and any size arrive as they were sent, with whom they are for."""
    on, call, root = team(case, here), case.get("call"), case.integer("root", 0)
    if on.position is None:
        return
    size, at, mine = len(on.ranks), on.position, value(case, on.position)

    def by(key: str, position: int) -> dict[str, Any]:
        return {f"group_{key}": position} if "by" in case else {key: on.ranks[position]}

    got: list[Any] = [STALE] * size
    want: list[Any] = [value(case, other) for other in range(size)]
    if call == "all_gather_object":
        dist.all_gather_object(got, mine, group=on.group)
    elif call == "gather_object":
        dist.gather_object(mine, got if at == root else None, group=on.group, **by("dst", root))
        want = want if at == root else [STALE] * size
    elif call == "broadcast_object_list":
        want = [value(case, root, part) for part in range(2)]
        got = list(want) if at == root else [STALE, STALE]
        dist.broadcast_object_list(got, group=on.group, **by("src", root))
    elif call == "scatter_object_list":
        row = [value(case, root, part) for part in range(size)]
        got, want = [STALE], [row[at]]
        dist.scatter_object_list(got, row if at == root else None, group=on.group, **by("src", root))
    else:
        to = (root + 1) % size
        want = [value(case, root, part) for part in range(2)]
        got = [STALE, STALE]
        if at == root:
            dist.send_object_list(want, group=on.group, **by("dst", to))
        elif at == to:
            dist.recv_object_list(got, group=on.group, **by("src", root))
        if at != to:
            return
    here.require(alike(got, want), "wrong-value", "objects", f"{call} gave other values than were sent", want, got)


def script_objects(case: Case) -> Script:
    ranks, call, root = list(members(case)), case.get("call"), case.integer("root", 0)
    size = len(ranks)
    body = [*texts.group(case), *texts.outsiders(case), f"at = {ranks}.index(rank)"]

    def by(key: str, position: int) -> str:
        return f"group_{key}={position}" if "by" in case else f"{key}={ranks[position]}"

    rows = [value(case, other) for other in range(size)] if "gather" in call else [value(case, root, part) for part in range(max(size, 2))]
    row = f"[{', '.join(map(_printed, rows[:2] if 'list' in call and 'scatter' not in call else rows[:size]))}]"
    body += [f"values, stale = {row}, [{STALE}] * {2 if 'list' in call and 'scatter' not in call else size}"]
    if call == "all_gather_object":
        body += ["dist.all_gather_object(stale, values[at], group=group)", "return values, stale"]
    elif call == "gather_object":
        body += [f"dist.gather_object(values[at], stale if at == {root} else None, group=group, {by('dst', root)})"]
        body += [f"return (values, stale) if at == {root} else (None, None)"]
    elif call == "broadcast_object_list":
        body += [f"got = list(values) if at == {root} else stale", f"dist.broadcast_object_list(got, group=group, {by('src', root)})"]
        body += ["return values, got"]
    elif call == "scatter_object_list":
        body += ["got = [None]", f"dist.scatter_object_list(got, values if at == {root} else None, group=group, {by('src', root)})"]
        body += ["return values[at : at + 1], got"]
    else:
        to = (root + 1) % size
        body += [f"if at == {root}:", f"    dist.send_object_list(values, group=group, {by('dst', to)})"]
        body += [f"if at != {to}:", "    return None, None", f"dist.recv_object_list(stale, group=group, {by('src', root)})"]
        body += ["return values, stale"]
    return scripts.script(body, world=case.world)


def _printed(item: Any) -> str:
    if isinstance(item, torch.Tensor):
        return scripts.tensor(item)
    if isinstance(item, list):
        return "list(range(3000))" if len(item) == len(OBJECTS["large"]) else f"[{', '.join(map(_printed, item))}]"
    return "float('inf')" if item == float("inf") else repr(item)


def features_objects(case: Case) -> set[str]:
    return features(case) | {"objects", f"collective:{case.get('call')}"}


LAWS = (
    Law(
        id="collective.send-recv",
        clause="Every message arrives with whom it is for, those of one pair in the order in which they were sent.",
        source=DOC + "send, recv, isend, irecv, batch_isend_irecv",
        check=check_messages,
        script=script_messages,
        features=features_messages,
        control="collective.send-recv mesh=2 x=5x3 sends=0-1/0-1/1-0 how=batch",
        planted="messages_overtake",
        draw=lambda limits: draw_messages("collective.send-recv", limits, False),
        draws=50,
        needs=("p2p", "subgroups"),
        weight=0.3,
    ),
    Law(
        id="collective.tags",
        clause="A message is received by its tag, in whatever order the tags are asked for.",
        source=DOC + "send, recv: tag",
        check=check_messages,
        script=script_messages,
        features=features_messages,
        control="collective.tags mesh=2 x=5x3 sends=0-1:0/0-1:1 how=works receive=reversed",
        planted="tags_are_ignored",
        draw=lambda limits: draw_messages("collective.tags", limits, True),
        draws=30,
        tier="extended",
        needs=("p2p", "p2p_tags", "subgroups"),
        weight=0.2,
    ),
    Law(
        id="collective.objects",
        clause="Values of any kind and any size arrive as they were sent, with whom they are for.",
        source=DOC + "all_gather_object, gather_object, broadcast_object_list, scatter_object_list, send_object_list",
        check=check_objects,
        script=script_objects,
        features=features_objects,
        control="collective.objects mesh=2 call=all_gather_object values=nested.large",
        planted="objects_of_the_first_member",
        draw=draw_objects,
        draws=40,
        needs=("object_collectives", "p2p", "subgroups"),
        weight=0.3,
    ),
)
