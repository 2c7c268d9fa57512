"""Laws of point-to-point messages, and of collectives of Python objects."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

import torch
import torch.distributed as dist
from hypothesis import strategies as st

from shardlaw.conformance.law.act import fields
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.fields import Between, Field, Rank, ScriptArgument
from shardlaw.conformance.law.law import Limits
from shardlaw.conformance.law.literal import literal
from shardlaw.conformance.laws.collective import draws
from shardlaw.conformance.laws.collective.calls import STALE
from shardlaw.conformance.laws.collective.fields import Group
from shardlaw.reference import collective
from shardlaw.reference.notation import NotationError
from shardlaw.reference.tensors import DTYPES, TensorSpec
from shardlaw.strategies import shapes
from shardlaw.strategies.collectives import groups, payload

if TYPE_CHECKING:
    from shardlaw.conformance.rank.context import RankContext


class MessagesField(Field):
    """Messages ``0-1/1-0:2`` of tensors like ``x``: ``SOURCE-DESTINATION``, positions in the group, and a tag."""

    takes = "messages such as 0-1/1-0:2"

    def fields(self, name: str) -> tuple[str, ...]:
        return name, "x"

    def read(self, case: Case, name: str) -> Any:
        spec, found = case.tensor("x"), []
        for at, word in enumerate(case.get(name).split("/")):
            pair, _, tag = word.partition(":")
            source, _, destination = pair.partition("-")
            found.append((int(source), int(destination), int(tag or 0), payload(spec.shape, DTYPES[spec.dtype], at)))
        if any(not 0 <= at < case.mesh().size for message in found for at in message[:2]):
            raise NotationError(f"{case.get(name)!r}: no such member")
        if case.get("by", "") == "anyone" and len({pair[:2] for pair in found}) > len({pair[1] for pair in found}):
            raise NotationError(f"{case.get(name)!r}: by=anyone takes one source for each destination")
        return found

    def build(self, value: Any, here: RankContext) -> Any:
        return [(*message, here.tensor(tensor)) for *message, tensor in value]

    def to_script(self, value: Any, name: str, world: int) -> ScriptArgument:
        return ScriptArgument("SENT", ("SENT = [", *(f"    {literal(message)}," for message in value), "]"))


@contextmanager
def apart(group, by):
    """No earlier or later message is taken for one that is received from anyone."""
    if by == "anyone":
        dist.barrier(group)
    yield
    if by == "anyone":
        dist.barrier(group)


def messages(
    sends: Annotated[Any, MessagesField()],
    group: Group,
    how: Literal["batch", "works", "blocking"],
    receive: Literal["reversed"] | None = None,
    by: Literal["position", "anyone"] | None = None,
    waits: Annotated[int, Between(1, 2)] = 1,
):
    """Send and receive this rank's messages, in the order in which they are listed where ``how`` is blocking; ``by``
    anyone receives without saying from whom. Each work is waited for ``waits`` times."""
    here, ranks = dist.get_rank(group), dist.get_process_group_ranks(group)
    received = {at: torch.full_like(tensor, STALE) for at, (_, to, _, tensor) in enumerate(sends) if to == here}
    own = [at for at, (source, *_) in enumerate(sends) if source == here or at in received]

    def peer(key, position):
        if by == "anyone" and key == "src":
            return {}
        return {f"group_{key}": position} if by == "position" else {key: ranks[position]}

    def post(at, send, receive):
        source, to, tag, tensor = sends[at]
        if source == here:
            return send(tensor, group=group, tag=tag, **peer("dst", to))
        return receive(received[at], group=group, tag=tag, **peer("src", source))

    def operation(at):
        source, to, tag, tensor = sends[at]
        if source == here:
            return dist.P2POp(dist.isend, tensor, ranks[to], group, tag)
        return dist.P2POp(dist.irecv, received[at], ranks[source], group, tag)

    if how == "blocking":
        with apart(group, by):
            senders = [sender for at in own if (sender := post(at, dist.send, dist.recv)) is not None]
        return {"message": list(received.values()), "sender": senders}
    # first what this rank sends, in order, then what it receives, with ``receive=reversed`` the last tag first
    own.sort(key=lambda at: (at in received, -sends[at][2] if receive and at in received else 0))
    with apart(group, by):
        if how == "batch":
            works = dist.batch_isend_irecv([operation(at) for at in own]) if own else []
        else:
            works = [post(at, dist.isend, dist.irecv) for at in own]
        for work in [*works] * waits:
            work.wait()
    return {"message": list(received.values())}


def messages_due(sends, group, how, rank: Rank):
    arrived = collective.deliver(sends)
    received = [(source, to, tag) for source, to, tag, _ in sends if group[to] == rank]
    due = {"message": [arrived[message].pop(0) for message in received]}
    return due | ({"sender": [group[source] for source, *_ in received]} if how == "blocking" else {})


@st.composite
def draw_messages(draw: st.DrawFn, limits: Limits, tags: bool) -> Case:
    mesh = draw(groups(world_size=limits.world_size, least=2))
    pairs = [(i, j) for i in range(mesh.size) for j in range(mesh.size) if i != j]
    sends = draw(st.lists(st.sampled_from(pairs), min_size=1, max_size=6))
    tagged = [f"{i}-{j}:{draw(st.integers(0, 2))}" if tags else f"{i}-{j}" for i, j in sends]
    how = draw(st.sampled_from(("batch", "works") if tags else ("batch", "batch", "works", "blocking")))
    return fields(
        mesh=mesh,
        x=draw(messages_tensor(limits)),
        sends="/".join(tagged),
        how=how,
        receive="reversed" if tags and draw(st.booleans()) else None,
        by="position" if how != "batch" and draw(draws.one_in(3)) else None,
    )


@st.composite
def draw_from_anyone(draw: st.DrawFn, limits: Limits) -> Case:
    mesh = draw(groups(world_size=limits.world_size, least=2))
    members = range(mesh.size)
    source_of = {to: draw(st.sampled_from([at for at in members if at != to])) for to in members}
    receivers = draw(st.lists(st.sampled_from(members), min_size=1, max_size=6))
    sends = "/".join(f"{source_of[to]}-{to}" for to in receivers)
    how = draw(st.sampled_from(("works", "blocking")))
    return fields(mesh=mesh, x=draw(messages_tensor(limits)), sends=sends, how=how, by="anyone")


def messages_tensor(limits: Limits) -> st.SearchStrategy[TensorSpec]:
    """The tensor that is sent."""
    dtypes = st.sampled_from([limits.dtypes[0], *limits.dtypes])
    return st.builds(lambda shape, dtype: TensorSpec(shape, None, dtype), shapes(max_size=5), dtypes)


def features_messages(case: Case) -> set[str]:
    sent = [word.removesuffix(":0") for word in case.get("sends").split("/")]
    more = {"blocking"} if case.get("how") == "blocking" else {"async", "in-flight"} if len(sent) > 1 else {"async"}
    return draws.features_of(case) | more | ({"repeated"} if len(set(sent)) < len(sent) else set())


send_recv = draws.collective_law(
    "send-recv",
    draws.DOC + "send, recv, isend, irecv, batch_isend_irecv",
    "mesh=2 x=5x3 sends=0-1/0-1/1-0 how=batch",
    needs=("p2p",),
    clause="Every message arrives at its destination, those from one rank to another in the order of sending.",
    features=features_messages,
    cases=("mesh=2 x=5x3 sends=0-1 how=works waits=2",),
    draw=lambda limits: draw_messages(limits, False),
    draws=50,
    members=True,
    weight=0.3,
)(messages)
send_recv.due(messages_due)

tags = draws.collective_law(
    "tags",
    draws.DOC + "send, recv: tag",
    "mesh=2 x=5x3 sends=0-1:0/0-1:1 how=works receive=reversed",
    needs=("p2p", "p2p_tags"),
    clause="A message is received by its tag, in whatever order tags are received.",
    features=features_messages,
    draw=lambda limits: draw_messages(limits, True),
    draws=30,
    members=True,
    tier="extended",
    weight=0.2,
)(messages)
tags.due(messages_due)

any_source = draws.collective_law(
    "any-source",
    draws.DOC + "recv, irecv: src",
    "mesh=2 x=5x3 sends=0-1/0-1 how=blocking by=anyone",
    needs=("p2p", "p2p_any_source"),
    clause="A receiver that names no source gets the messages of whoever sends them, in the order of sending.",
    features=features_messages,
    draw=draw_from_anyone,
    draws=20,
    members=True,
    tier="extended",
    weight=0.2,
)(messages)
any_source.due(messages_due)

OBJECTS = {
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
OBJECT_CALLS = Literal[
    "all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list", "send_object_list"
]
LISTS = ("broadcast_object_list", "send_object_list")  # take lists of any length
# members whose ranks in the group are not those in the world
OBJECT_CASES = (
    "mesh=2@1,2 call=all_gather_object values=number.text",
    "mesh=2@1,2 call=gather_object values=text.nothing root=1",
    "mesh=2@1,2 call=gather_object values=nested.number root=1 by=position",
    "mesh=2@1,2 call=broadcast_object_list values=text.number root=1",
    "mesh=2@1,2 call=scatter_object_list values=empty.number root=1 by=position",
    "mesh=2@1,2 call=send_object_list values=number.text",
    "mesh=2@0,2 call=send_object_list values=tensor.nothing root=1 by=position",
    "mesh=2@1,2 call=send_object_list values=text.number batched=1",
    "mesh=2@1,2 call=send_object_list values=large.number root=1 by=position batched=1 count=3",
)


class ValuesField(Field):
    """Names of :data:`OBJECTS`, joined by dots."""

    takes = f"some of {', '.join(OBJECTS)}, joined by dots"

    def parse(self, text: str) -> list[str]:
        names = text.split(".")
        if not {*names} <= {*OBJECTS}:
            raise NotationError(f"{text!r} has others")
        return names


@st.composite
def draw_objects(draw: st.DrawFn, limits: Limits) -> Case:
    call = draw(st.sampled_from(get_args(OBJECT_CALLS)))
    mesh = draw(groups(world_size=limits.world_size, least=2 if call == "send_object_list" else 1))
    names = draw(st.lists(st.sampled_from(sorted(OBJECTS)), min_size=1, max_size=3))
    root = draw(st.integers(0, mesh.size - 1)) if call != "all_gather_object" else 0
    by = "position" if call != "all_gather_object" and draw(draws.one_in(3)) else None
    if call == "send_object_list" and draw(draws.one_in(6)):
        by = "anyone"
    count = draw(st.sampled_from((*[None] * 8, 0, 1, 3))) if call in LISTS else None
    return fields(mesh=mesh, call=call, values=".".join(names), root=root or None, by=by, count=count)


@draws.collective_law(
    "objects",
    draws.DOC + "all_gather_object, gather_object, broadcast_object_list, scatter_object_list, send_object_list",
    "mesh=2 call=all_gather_object values=nested.large",
    needs=("object_collectives", "p2p"),
    features=lambda case: draws.features_of_call(case) | {"objects"},
    cases=OBJECT_CASES,
    draw=draw_objects,
    draws=40,
    members=True,
    weight=0.3,
)
def objects(
    group: Group,
    call: OBJECT_CALLS,
    values: Annotated[list[str], ValuesField()],
    root: int = 0,
    by: Literal["position", "anyone"] | None = None,
    count: int = 2,
    batched: bool = False,
):
    """Collectives of objects deliver values of any type and size unchanged, and tell a receiver who sent them."""
    at, size = dist.get_rank(group), dist.get_world_size(group)
    to = (root + 1) % size

    def value(member, part=0):
        name = values[(member + part) % len(values)]
        return [name, member, part, OBJECTS[name]]

    ranks, sender = dist.get_process_group_ranks(group), None

    def peer(key, position):
        if by == "anyone" and key == "src":
            return {}
        return {f"group_{key}": position} if by == "position" else {key: ranks[position]}

    row = [value(root, part) for part in range(size if call == "scatter_object_list" else count)]
    got, want = [STALE] * count, row
    if call in ("all_gather_object", "gather_object"):
        got, want = [STALE] * size, [value(member) for member in range(size)]
    if call == "all_gather_object":
        dist.all_gather_object(got, value(at), group=group)
    elif call == "gather_object":
        dist.gather_object(value(at), got if at == root else None, group=group, **peer("dst", root))
        want = want if at == root else [STALE] * size
    elif call == "broadcast_object_list":
        got = list(row) if at == root else got
        dist.broadcast_object_list(got, group=group, **peer("src", root))
    elif call == "scatter_object_list":
        got, want = [STALE], [row[at]]
        dist.scatter_object_list(got, row if at == root else None, group=group, **peer("src", root))
    else:
        with apart(group, by):
            if at == root:
                dist.send_object_list(row, group=group, use_batch=batched, **peer("dst", to))
            elif at == to:
                sender = dist.recv_object_list(got, group=group, use_batch=batched, **peer("src", root))
        want = row if at == to else got
    return {
        # texts also tell types, dtypes and the elements of these small tensors
        "wrong values": [(mine, sent) for mine, sent in zip(got, want, strict=False) if repr(mine) != repr(sent)],
        "count": len(got) - len(want),
        "sender": sender,
    }


@objects.due
def _(group, call, rank: Rank, root=0):
    receives = call == "send_object_list" and rank == group[(root + 1) % len(group)]
    return {"wrong values": [], "count": 0, "sender": group[root] if receives else None}
