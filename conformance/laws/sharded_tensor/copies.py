"""Laws on what is made of a sharded tensor: with another dtype, a copy, one that was pickled; and on ops that users register for them."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from conformance.case import Case
from conformance.here import Here
from conformance.law import Limits
from conformance.laws.plan.torch import need
from conformance.laws.sharded_tensor import given as g
from conformance.laws.sharded_tensor import scripts
from conformance.laws.sharded_tensor.draws import DTYPES, FLOATS, dtypes, law_of, shared
from conformance.report.reproducer import Script
from reference.box import Box
from reference.sharded_tensor import EnumerableSpec, of_rank
from reference.tensors import DTYPES as BY_NAME
from reference.tensors import TensorSpec
from strategies import shapes
from strategies.shard_specs import chunk_specs, specs


@dataclass(frozen=True)
class Way:
    """What is made of ``t``, as text; whether its dtype becomes ``dtype``, and whether it is ``t`` itself or has memory of its own."""

    text: str
    converts: bool = False
    itself: bool = False
    apart: bool = False


WAYS = {
    "dtype": Way("t.to(dtype)", converts=True),
    "named": Way("t.to(dtype=dtype)", converts=True),
    "pair": Way("t.to(device, dtype)", converts=True),
    "like": Way("t.to(torch.zeros(1, dtype=dtype, device=device))", converts=True),
    "type-as": Way("t.type_as(torch.zeros(1, dtype=dtype, device=device))", converts=True),
    "same-dtype": Way("t.to(t.dtype)", itself=True),
    "device": Way("t.to(device)", itself=True),
    "device-text": Way("t.to(str(device))", itself=True),
    "to-cpu": Way("t.cpu()", itself=True),
    "copy": Way("t.to(dtype=t.dtype, copy=True)", apart=True),
    "clone": Way("t.clone()", apart=True),
    "deepcopy": Way("copy.deepcopy(t)", apart=True),
    "pickle": Way("load(pickle.dumps(t))", apart=True),
    "detach": Way("t.requires_grad_().detach()"),
    "stated": Way("st.ShardedTensor._init_from_local_shards_and_global_metadata(t.local_shards(), t.metadata(), process_group=group)"),
}


def check_copied(case: Case, here: Here) -> None:
    """What is made of a sharded tensor has its boxes and elements, of the dtype that was asked for, and leaves it as it was."""
    full, spec, group, how = g.values_of(case), g.spec_of(case), g.group_of(case, here), case.get("how")
    if here.rank not in g.members(case):
        return
    way, parts = WAYS[how], spec.parts(case.tensor("x").shape)
    dtype = BY_NAME[case.get("to")] if way.converts else full.dtype
    factories, within = need(here, "sharded_tensor", "load_with_process_group")
    held = g.from_parts(here, full, parts, group)

    def load(data: bytes) -> Any:
        with within(group):
            return pickle.loads(data)

    names = {"torch": torch, "copy": copy, "pickle": pickle, "st": factories, "dist": dist, "load": load}
    with g.without_warnings():
        made = eval(way.text, {**names, "t": held, "dtype": dtype, "device": here.device, "group": group})
        if not g.judge(here, made, full.to(dtype), parts, check="made"):
            return
        found = made.sharding_spec().build_metadata(made.size(), made.metadata().tensor_properties)
        due, told = g.described(parts), g.described(g.read_parts(found))
        here.require(told == due, "wrong-metadata", "spec", "the spec of what was made names other boxes than it has", due, told)
        grads = {
            made.requires_grad,
            made.metadata().tensor_properties.requires_grad,
            *(s.tensor.requires_grad for s in made.local_shards()),
        }
        here.require(grads == {False}, "wrong-metadata", "gradient", "what was made asks for a gradient", {False}, grads)
        if way.itself and (how != "to-cpu" or here.device == torch.empty(0).device):
            here.require(made is held, "wrong-metadata", "itself", "nothing had to be done, and the tensor is another one")
        for shard in made.local_shards() if way.apart or dtype != full.dtype else ():
            shard.tensor.zero_()
        g.judge(here, held, full, parts, check="kept")
        if how == "pickle":
            _judge_elsewhere(here, held, load, group)


def _judge_elsewhere(here: Here, held: Any, load: Any, group: Any) -> None:
    """A sharded tensor that another rank has pickled is not this one's."""
    size, at = dist.get_world_size(group), dist.get_rank(group)
    pickled: list[Any] = [None] * size
    dist.all_gather_object(pickled, pickle.dumps(held), group=group)
    if size > 1:
        here.refused(lambda: load(pickled[(at + 1) % size]), "elsewhere", "what another rank has pickled")
    if group is not None:
        here.refused(lambda: pickle.loads(pickled[at]), "other group", "what was pickled in a group, without the group")


def copied_script(case: Case) -> Script:
    way, parts = WAYS[case.get("how")], g.spec_of(case).parts(case.tensor("x").shape)
    dtype = f"torch.{case.get('to')}" if way.converts else "X.dtype"
    body = [
        *scripts.from_parts(case, parts),
        f'dtype, device = {dtype}, torch.device("cpu")',
        *([] if "group" in case else ["group = None"]),
        *(LOAD if "load(" in way.text else []),
        f"t = {way.text}",
    ]
    made = scripts.judged(case, body, parts, full="X.to(dtype)")
    return Script(made.stages, (*made.imports, *IMPORTS.get(case.get("how"), ())), made.constants)


LOAD = ["def load(data):", "    with load_with_process_group(group):", "        return pickle.loads(data)"]
IMPORTS = {"deepcopy": ("import copy",), "pickle": ("import pickle", "from torch.distributed._shard import load_with_process_group")}


def _copied(limits: Limits) -> SearchStrategy[Case]:
    @st.composite
    def case(draw: st.DrawFn) -> Case:
        how = draw(st.sampled_from(sorted(WAYS)))
        world, ranks, more = draw(shared(limits))
        shape, spec = draw(specs(draw(shapes(min_dims=1)), ranks))
        x = TensorSpec(shape, None, draw(dtypes(limits, FLOATS if how == "detach" else DTYPES)))
        to = draw(dtypes(limits)) if WAYS[how].converts else None
        return Case.of("sharded_tensor.copied", world=world, **more, x=x, spec=spec, how=how, to=to, seed=draw(st.integers(0, 9)) or None)

    return case()


def _each_way(limits: Limits) -> list[Case]:
    fields: dict[str, Any] = {"world": 2, "x": "5x3", "spec": "chunk(0)@0,1"}
    within: dict[str, Any] = {"world": 3, "x": "5x3", "spec": "chunk(0)@1,2", "group": "1,2"}
    found = [Case.of("sharded_tensor.copied", **fields, how=how, to="float64" if way.converts else None) for how, way in WAYS.items()]
    found += [Case.of("sharded_tensor.copied", **within, how="dtype", to="float64")]
    found += [Case.of("sharded_tensor.copied", **within, how=how) for how in ("pickle", "clone")]
    return [case for case in found if case.world <= limits.world_size]


def check_inferred(case: Case, here: Here) -> None:
    """Rows of which each rank knows its own alone are one tensor, in the order of the ranks; its length is what they hold together."""
    full, spec = g.values_of(case), g.spec_of(case)
    parts = spec.parts(case.tensor("x").shape)
    (box,) = of_rank(parts, here.rank)
    shard, make = need(here, "ShardOfTensor", "init_from_local_shards")
    with g.without_warnings():
        own = shard.from_tensor_and_offsets(here.tensor(full[box.slices()].contiguous()), [0] * full.ndim, here.rank)
        g.judge(here, make([own], None, *full.shape[1:]), full, parts, check="put together")


def inferred_script(case: Case) -> Script:
    parts = g.spec_of(case).parts(case.tensor("x").shape)
    table = ", ".join(f"{rank}: {scripts.cut(box)}" for box, rank in parts)
    lines = [
        f"own = {{{table}}}[rank].contiguous()",
        "mine = st.Shard.from_tensor_and_offsets(own, [0] * X.ndim, rank)",
        "t = st.init_from_local_shards([mine], None, *X.shape[1:])",
    ]
    return scripts.judged(case, lines, parts)


def _inferred(limits: Limits) -> SearchStrategy[Case]:
    @st.composite
    def case(draw: st.DrawFn) -> Case:
        world = draw(st.sampled_from([size for size in (2, 3, 4) if size <= limits.world_size]))
        counts = [draw(st.integers(1, 4)) for _ in range(world)]
        shape = (sum(counts), *draw(shapes(max_dims=2)))
        starts = [sum(counts[:rank]) for rank in range(world)]
        boxes = [Box((start, *[0] * (len(shape) - 1)), (count, *shape[1:])) for start, count in zip(starts, counts, strict=True)]
        spec = EnumerableSpec(tuple((box, rank) for rank, box in enumerate(boxes)))
        x = TensorSpec(shape, None, draw(dtypes(limits)))
        return Case.of("sharded_tensor.inferred", world=world, x=x, spec=str(spec), seed=draw(st.integers(0, 9)) or None)

    return case()


def _asked() -> Any:
    """A new function that hands itself to what its tensors have registered for it."""

    def asked(*args: Any, **options: Any) -> Any:
        tensors = [x for x in (*args, *options.values()) if isinstance(x, torch.Tensor)]
        return torch.overrides.handle_torch_function(asked, tensors, *args, **options)

    return asked


def check_custom(case: Case, here: Here) -> None:
    """An op that a user registers, for all sharded tensors or for those of a kind of spec, is called with what the function is given."""
    shape, spec, group = case.tensor("x").shape, g.spec_of(case), g.group_of(case, here)
    if here.rank not in g.members(case):
        return
    factories, of_spec = need(here, "sharded_tensor", "custom_sharding_spec_op")
    with g.without_warnings():
        held = factories.zeros(g.to_torch(here, spec), shape, process_group=group)
        boxes = EnumerableSpec(tuple((box, rank) for box, rank in spec.parts(shape) if box.volume))
        other = factories.zeros(g.to_torch(here, boxes), shape, process_group=group)
        asked, unknown, plain, answer = _asked(), _asked(), here.tensor(torch.ones(2)), object()
        met: list[tuple[Any, Any, Any, Any]] = []

        def own(types: Any, args: Any, kwargs: Any, process_group: Any) -> object:
            met.append((types, args, kwargs, process_group))
            return answer

        by_spec = case.get("by") == "spec"
        made = (of_spec(type(held.sharding_spec()), asked) if by_spec else factories.custom_sharded_op_impl(asked))(own)
        for args, options in {
            "first": ((held, plain), {"to": 3}),
            "last": ((plain, held), {}),
            "named": ((plain,), {"other": held}),
        }.values():
            met.clear()
            got = asked(*args, **options)
            here.require(got is answer, "wrong-value", "result", "the function gives something else than what is registered", answer, got)
            if here.require(len(met) == 1, "wrong-value", "calls", "what is registered is called another number of times", 1, len(met)):
                _judge_call(here, met[0], args, options, case)
        for what, call in {
            "unknown": lambda: unknown(held),
            "plain": lambda: made((), (plain,), {}, group),
            "nothing": lambda: made((), (), {}, group),
            **({"other spec": lambda: asked(other)} if by_spec else {}),
            **({"other group": lambda: asked(held, factories.zeros(g.to_torch(here, spec), shape))} if group is not None else {}),
        }.items():
            here.refused(call, what, f"an op that nobody has registered for what it gets ({what})")
        if not by_spec:
            here.require(asked(other) is answer, "wrong-value", "other spec", "an op for all sharded tensors is not called for other specs")


def _judge_call(here: Here, met: tuple[Any, Any, Any, Any], args: Any, options: Any, case: Case) -> None:
    types, got, kwargs, group = met
    alike = len(got) == len(args) and all(one is other for one, other in zip(got, args, strict=True))
    here.require(alike, "wrong-value", "arguments", "what is registered gets other arguments", args, got)
    here.require((kwargs or {}) == options, "wrong-value", "keywords", "what is registered gets other keyword arguments", options, kwargs)
    (kind,) = need(here, "ShardedTensor")
    here.require(kind in types, "wrong-metadata", "types", "the types that are handed on lack that of the tensor", kind, types)
    members = dist.get_process_group_ranks(group)
    here.require(members == [*g.members(case)], "wrong-metadata", "group", "the group has other members", g.members(case), members)


def custom_script(case: Case) -> Script:
    spec, group = g.spec_of(case), scripts.group(case)
    kind = type(spec).__name__.replace("ChunkSpec", "ChunkShardingSpec").replace("EnumerableSpec", "EnumerableShardingSpec")
    register = f"custom_sharding_spec_op({kind}, torch.sort)" if case.get("by") == "spec" else "st.custom_sharded_op_impl(torch.sort)"
    lines = [
        *scripts.entered(case),
        f"t = st.zeros({scripts.spec(spec)}, X.shape{group})",
        f"{register}(lambda types, args, kwargs, process_group: [a is t for a in args])",
        "return [True, False], torch.sort(t, 0)",
    ]
    imports = ["from torch.distributed._shard.sharding_spec.api import custom_sharding_spec_op"] if case.get("by") == "spec" else []
    return scripts.told(case, lines, imports=imports)


def _custom(limits: Limits) -> SearchStrategy[Case]:
    @st.composite
    def case(draw: st.DrawFn) -> Case:
        world, ranks, more = draw(shared(limits))
        shape, spec = draw(chunk_specs(draw(shapes(min_dims=1, min_size=1)), ranks))
        return Case.of(
            "sharded_tensor.custom", world=world, **more, x=TensorSpec(shape), spec=spec, by=draw(st.sampled_from(("function", "spec")))
        )

    return case()


def _within(limits: Limits) -> list[Case]:
    """Within a group, beside a tensor of all ranks."""
    texts = [f"sharded_tensor.custom world=3 group=1,2 x=5x3 spec=chunk(0)@1,2 by={by}" for by in ("function", "spec")]
    return [case for case in map(Case.parse, texts) if case.world <= limits.world_size]


LAWS = (
    law_of(
        "copied",
        clause="A sharded tensor of another dtype, copied, pickled or detached has its boxes and elements; without need it stays itself.",
        source=f"{g.SOURCE}, ShardedTensor.cpu, load_with_process_group; torch.Tensor.to: returns self where nothing has to be done",
        check=check_copied,
        holds="world=2 x=4x3 spec=chunk(0)@0,1 how=dtype to=float64",
        planted="other_dtypes_forgotten",
        sweep=_each_way,
        sweeps=len(WAYS) + 3,
        draw=_copied,
        draws=20,
        features=g.features("spec"),
        script=copied_script,
    ),
    law_of(
        "inferred",
        clause="Rows of which every rank knows its own alone are one sharded tensor, as long as all of them together.",
        source=f"{g.SOURCE}, ShardedTensor._init_from_local_shards: None for the size that is not known",
        check=check_inferred,
        holds="world=2 x=4x3 spec=0:1,0:3@0;1:4,0:3@1",
        planted="rows_without_an_offset",
        draw=_inferred,
        draws=8,
        smallest=2,
        features=g.features("spec"),
        script=inferred_script,
    ),
    law_of(
        "custom",
        clause="An op that is registered for sharded tensors, all or those of a spec, is called for them, with what the function gets.",
        source=f"{g.SOURCE}, custom_sharded_op_impl, custom_sharding_spec_op",
        check=check_custom,
        holds="world=2 x=4x3 spec=chunk(0)@0,1 by=function",
        planted="custom_ops_turned_round",
        sweep=_within,
        sweeps=2,
        draw=_custom,
        draws=6,
        features=g.features("spec"),
        script=custom_script,
    ),
)
