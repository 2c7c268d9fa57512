"""Laws of tensors whose ranks hold shards of any size, several or none, in a ``LocalShardsWrapper``: the layouts of embedding tables."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import DTensor

from conformance import compat
from conformance.case import Case
from conformance.law import Law, Limits
from conformance.laws import draws, scripts
from conformance.laws.given import Given, given
from conformance.report.reproducer import Script
from reference.box import Box
from reference.mesh import Mesh
from reference.placement import Placement, Replicate, Shard
from reference.shards import Shards, side_by_side
from reference.tensors import TensorSpec
from strategies import shards

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from conformance.here import Here

WRAPPER = "torch.distributed.tensor._shards_wrapper, LocalShardsWrapper"
FROM_LOCAL = "torch.distributed.tensor docs, DTensor.from_local (shape, stride) and DTensor.to_local"
IMPORT = "from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper"
DTYPES = (*("float32",) * 7, "float64", "int64", "bfloat16")

# meshes by the way in which a tensor is handed out
MESHES = {
    "rows": ("2", "3", "4", "2@0,2", "2@1,0"),
    "columns": ("2", "3", "4", "2@1,2"),
    "table": ("1", "1@1", "1@2", "1@3"),
    "grid": ("2x2", "1x2", "2x1", "1x3", "2x2@0,2,1,3"),
}


def placed(way: str, shape: tuple[int, ...]) -> tuple[Placement, ...]:
    """The placements that name the dims along which a tensor is handed out."""
    ways: dict[str, tuple[Placement, ...]] = {"rows": (Shard(0),), "columns": (Shard(len(shape) - 1),), "grid": (Shard(0), Shard(1))}
    return ways.get(way, (Replicate(),))


def handed_out(law: str, limits: Limits, way: str, extra: dict[str, SearchStrategy[Any]] | None = None) -> SearchStrategy[Case]:
    """Cases of a tensor ``x`` that is handed out in ``boxes``; where ``extra`` names further fields, with these."""
    on = [mesh for mesh in map(Mesh.parse, MESHES[way]) if max(mesh.ranks) < limits.world_size]
    mesh_drawn, sparse_drawn = st.sampled_from(on), st.sampled_from([False] * 5 + [True])
    dtype_drawn = st.sampled_from([name for name in DTYPES if name in limits.dtypes])

    @st.composite
    def case(draw: st.DrawFn) -> Case:
        mesh = draw(mesh_drawn)
        held = draw(shards(mesh, way=way, sparse=draw(sparse_drawn)).filter(lambda held: bool(held.boxes)))
        spec = TensorSpec(held.shape, placed(way, held.shape), draw(dtype_drawn))
        more = {name: draw(drawn) for name, drawn in (extra or {}).items()}
        return Case.of(law, mesh=mesh, x=spec, boxes=str(held), **more, seed=draw(draws.seeds()))

    return case()


def boxes_of(case: Case) -> Shards:
    """The boxes of the tensor ``x``."""
    return Shards.parse(case.tensor("x").shape, case.get("boxes"))


def features_held(case: Case) -> set[str]:
    """Ranks of the mesh that hold several boxes, or none."""
    counts = [len(boxes_of(case).of(rank)) for rank in case.mesh().ranks]
    names = {"several-shards": max(counts) > 1, "shardless": min(counts) == 0}
    return {name for name, holds in names.items() if holds}


def wrapped(case: Case, here: Here) -> Any:
    """The wrapper around what this rank holds."""
    full, own = given(case).full, boxes_of(case).of(here.rank)
    return compat.name("LocalShardsWrapper")([here.tensor(_cut_out(full, box)) for box in own], [box.offset for box in own])


def _cut_out(full: torch.Tensor, box: Box) -> torch.Tensor:
    return full[box.slices()].clone(memory_format=torch.contiguous_format)


def _made(x: Given, local: Any, here: Here) -> DTensor:
    where, how = here.mesh(x.layout.mesh), here.placements(x.layout.placements)
    return DTensor.from_local(local, where, how, run_check=False, shape=x.full.shape, stride=x.full.stride())


def holds(here: Here, got: Any, full: torch.Tensor, own: tuple[Box, ...], check: str) -> bool:
    """``got`` is a wrapper around the boxes ``own`` of ``full``: it says so, and holds their elements."""
    kind = compat.name("LocalShardsWrapper")
    if not here.require(isinstance(got, kind), "wrong-metadata", check, f"a {type(got).__name__}, must be a {kind.__name__}"):
        return False
    meta = got.storage_metadata()
    listed = [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in meta.chunks]
    told = [box for box in listed if box.volume]
    sound = here.require(told == list(own), "wrong-layout", check, "its chunks are not the boxes that it holds", list(own), told)
    held = got.local_shards()
    sound &= here.require(len(held) == len(own), "wrong-layout", check, f"it holds {len(held)} shards, must hold {len(own)}")
    for box, shard in zip(own, held, strict=False):
        sound &= here.same(shard, full[box.slices()], check, what=f"the shard at {box.offset}")
    if own and side_by_side(own):
        due = (*own[0].size[:-1], sum(box.size[-1] for box in own))
        told_shape = tuple(meta.size)
        sound &= here.require(told_shape == due, "wrong-metadata", check, f"its shape is {told_shape}, must be {due}", due, told_shape)
    return sound


def check_wrapper(case: Case, here: Here) -> None:
    """A DTensor around shards in boxes has the shape given on every rank, holds and lists each rank's boxes, and gives the wrapper back."""
    x, own = given(case), boxes_of(case).of(here.rank)
    member = here.coord(x.layout.mesh) is not None
    local: Any = wrapped(case, here) if member else here.tensor(torch.empty(0, dtype=x.full.dtype))
    got = _made(x, local, here)
    want = tuple(x.full.shape), x.full.stride()
    here.require((tuple(got.shape), got.stride()) == want, "wrong-metadata", "whole", "global shape or stride is not the one given",
                 want, (tuple(got.shape), got.stride()))  # fmt: skip
    back: Any = got.to_local()
    if not member:
        here.require(back.numel() == 0, "wrong-layout", "outside", "a rank outside the mesh holds elements", "nothing", back)
        return
    if not holds(here, back, x.full, own, "to_local"):
        return
    for given_shard, shard in zip(local.local_shards(), back.local_shards(), strict=True):
        same = shard.data_ptr() == given_shard.data_ptr()
        here.require(same, "wrong-value", "storage", "to_local gives other storage back than from_local was given")
    chunks = [Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in got.__create_chunk_list__()]  # type: ignore[no-untyped-call]
    chunks = [box for box in chunks if box.volume]
    here.require(chunks == list(own), "wrong-layout", "chunks", "the DTensor lists other chunks than it holds", list(own), chunks)
    counts = len(back.local_sizes()), len(back.local_offsets())
    message = "sizes and offsets are not listed one for each shard"
    here.require(counts == (len(own), len(own)), "wrong-metadata", "count", message, (len(own),) * 2, counts)
    for at, (box, shard) in enumerate(zip(own, back.local_shards(), strict=True)):
        for number in (None, at, (at + 1) % len(own)):  # a hint: what is asked for is where the shard starts
            found: Any = got.__get_tensor_shard__(MetadataIndex("x", torch.Size(box.offset), number))  # type: ignore[no-untyped-call]
            same = found.data_ptr() == shard.data_ptr() and found.shape == shard.shape
            here.require(same, "wrong-value", "lookup", f"the shard at {box.offset}, by the number {number}, is another")
    if own:
        here.require(got.dtype == x.full.dtype, "wrong-metadata", "dtype", "dtype is not that of the shards", x.full.dtype, got.dtype)


def table(name: str, by_rank: dict[int, list[str]]) -> list[str]:
    return [f"{name} = {{", *(f"    {rank}: [{', '.join(entries)}]," for rank, entries in by_rank.items()), "}"]


def literals(case: Case) -> list[str]:
    """The shards and offsets of every rank of the mesh, as tables."""
    full, held, ranks = given(case).full, boxes_of(case), sorted(case.mesh().ranks)
    return [
        *table("SHARDS", {rank: [scripts.tensor(_cut_out(full, box)) for box in held.of(rank)] for rank in ranks}),
        *table("OFFSETS", {rank: [str(box.offset) for box in held.of(rank)] for rank in ranks}),
    ]


def script_wrapper(case: Case) -> Script:
    x, held = given(case), boxes_of(case)
    sizes = table("SIZES", {rank: [str(box.size) for box in held.of(rank)] for rank in sorted(case.mesh().ranks)})
    whole = f"shape=torch.Size({x.layout.shape}), stride={x.full.stride()}"
    body = [
        f"mesh = {scripts.mesh(x.layout.mesh)}",
        "local = LocalShardsWrapper(SHARDS[rank], OFFSETS[rank]) if rank in SHARDS else torch.empty(0)",
        f"d = DTensor.from_local(local, mesh, {scripts.placements(x.layout.placements)}, run_check=False, {whole})",
        f"expected, got = [{x.layout.shape}, {x.full.stride()}], [tuple(d.shape), d.stride()]",
        "if rank in SHARDS:",
        "    back = d.to_local()",
        f"    expected += [SIZES[rank], OFFSETS[rank], SHARDS[rank], {x.full.dtype} if SHARDS[rank] else d.dtype]",
        "    for at, offset in enumerate(OFFSETS[rank]):",
        "        for number in (None, at, (at + 1) % len(OFFSETS[rank])):",
        '            found = d.__get_tensor_shard__(MetadataIndex("x", torch.Size(offset), number))',
        "            assert found.data_ptr() == back.local_shards()[at].data_ptr()",
        "    got += [list(map(tuple, back.local_sizes())), list(map(tuple, back.local_offsets())), back.local_shards(), d.dtype]",
        "return expected, got",
    ]
    made = scripts.script(body, world=case.world, constants=[*literals(case), *sizes])
    looked_up = "from torch.distributed.checkpoint.metadata import MetadataIndex"
    return Script(made.stages, (IMPORT, looked_up, *made.imports), made.constants)


OPS = ("clone", "detach", "copy", "equal", "view", "new_empty")


def draw_ops(limits: Limits) -> SearchStrategy[Case]:
    more = {"op": st.sampled_from(OPS), "requires_grad": st.sampled_from([None] * 4 + [1])}
    by_way = [handed_out("layout.wrapper-ops", limits, way, more) for way in ("rows", "columns")]
    drawn = st.sampled_from(by_way).flatmap(lambda one: one)
    # whether a clone that requires no gradient is equal to what does is left open: equal looks at the metadata too
    return drawn.filter(lambda case: "requires_grad" not in case or (case.tensor("x").dtype == "float32" and case.get("op") != "equal"))


def features_ops(case: Case) -> set[str]:
    return features_held(case) | ({"wrapper-detach"} if case.get("op") == "detach" else set())


def check_ops(case: Case, here: Here) -> None:
    """A copy of a wrapper is of its own, a view or a detached one shares its shards; all hold the same boxes, and it stays as it was."""
    full, own, op, grad = given(case).full, boxes_of(case).of(here.rank), case.get("op"), "requires_grad" in case
    source = wrapped(case, here)
    if grad:
        source.requires_grad_()
    if op == "equal":
        _check_equal(here, source, source.clone(), own)
    elif op == "copy":
        holds(here, source.to(torch.complex64), full.to(torch.complex64), own, op)
    else:
        made = {"clone": source.clone, "detach": source.detach, "view": lambda: source.view(source.shape),
                "new_empty": lambda: source.new_empty(source.shape)}[op]()  # fmt: skip
        if op == "new_empty":
            for shard in made.local_shards():
                shard.zero_()
        holds(here, made, torch.zeros_like(full) if op == "new_empty" else full, own, op)
        if own:
            shared = made.local_shards()[0].data_ptr() == source.local_shards()[0].data_ptr()
            due = op in ("detach", "view")
            here.require(shared is due, "wrong-value", op, "whether the result shares the shards' storage differs", due, shared)
        free = not any(shard.requires_grad for shard in made.local_shards())
        here.require(op != "detach" or free, "wrong-metadata", op, "a detached shard requires a gradient")
    holds(here, source, full, own, "source")
    asks = [shard.requires_grad for shard in source.local_shards()]
    here.require(asks == [grad] * len(own), "wrong-metadata", "source", f"after {op} the source requires gradients otherwise",
                 [grad] * len(own), asks)  # fmt: skip


def _check_equal(here: Here, source: Any, copy: Any, own: tuple[Box, ...]) -> None:
    here.require(torch.equal(source, copy), "wrong-value", "equal", "a wrapper is not equal to its clone", True, False)
    if not own:
        return
    wrapper = compat.name("LocalShardsWrapper")
    moved = wrapper([shard.clone() for shard in copy.local_shards()], [tuple(at + 1 for at in box.offset) for box in own])
    here.require(not torch.equal(source, moved), "wrong-value", "equal", "wrappers of other offsets are equal", False, True)
    fewer = wrapper(copy.local_shards()[1:], [box.offset for box in own[1:]])
    here.require(not torch.equal(source, fewer), "wrong-value", "equal", "wrappers of other shards are equal", False, True)
    with torch.no_grad():
        copy.local_shards()[-1].view(-1)[-1:].zero_()
    here.require(not torch.equal(source, copy), "wrong-value", "equal", "wrappers of other elements are equal", False, True)


def script_ops(case: Case) -> Script:
    op, grad = case.get("op"), "requires_grad" in case
    calls = {"clone": "w.clone()", "detach": "w.detach()", "copy": "w.to(torch.complex64)", "view": "w.view(w.shape)",
             "new_empty": "w.new_empty(w.shape)", "equal": "w.clone()"}  # fmt: skip
    body = [
        "w = LocalShardsWrapper(SHARDS[rank], OFFSETS[rank]) if rank in SHARDS else LocalShardsWrapper([], [])",
        *(["w.requires_grad_()"] if grad else []),
        "asked = [shard.requires_grad for shard in w.local_shards()]",
        f"y = {calls[op]}",
        "told = [list(map(tuple, v.local_offsets())) for v in (y, w)]",
        f"expected = (told[1], True, {grad}, asked)",
        f"same = {'torch.equal(w, y)' if op == 'equal' else 'len(y.local_shards()) == len(asked)'}",
        f"return expected, (told[0], same, {grad}, [shard.requires_grad for shard in w.local_shards()])",
    ]
    made = scripts.script(body, world=case.world, constants=literals(case))
    return Script(made.stages, (IMPORT, *made.imports), made.constants)


# what a wrapper does not do, or is not: an expression in which W makes a wrapper of two shards and w is one
ATTEMPTS: dict[str, tuple[str, Callable[[Any, Any], object]]] = {
    "add": ("w + 1", lambda W, w: w + 1),
    "mul": ("w * w", lambda W, w: w * w),
    "sum": ("w.sum()", lambda W, w: w.sum()),
    "mean": ("w.mean()", lambda W, w: w.mean()),
    "transpose": ("w.t()", lambda W, w: w.t()),
    "index": ("w[0]", lambda W, w: w[0]),
    "cat": ("torch.cat([w, w])", lambda W, w: torch.cat([w, w])),
    "relu": ("torch.relu(w)", lambda W, w: torch.relu(w)),
    "fill": ("w.fill_(0)", lambda W, w: w.fill_(0)),
    "copy_": ("w.copy_(w)", lambda W, w: w.copy_(w)),
    "unsqueeze": ("w.unsqueeze(0)", lambda W, w: w.unsqueeze(0)),
    "matmul": ("w @ w.view(w.shape)", lambda W, w: w @ w.view(w.shape)),
    "eq": ("w == 1", lambda W, w: w == 1),
    "fewer-offsets": ("W([x, x], [(0, 0)])", lambda W, w: W(w.local_shards(), [(0, 0)])),
    "short-offset": ("W([x], [(0,)])", lambda W, w: W(w.local_shards()[:1], [(0,)])),
    "other-dims": ("W([x, x[0]], [(0, 0), (2,)])", lambda W, w: W([w.local_shards()[0], w.local_shards()[0][0]], [(0, 0), (2,)])),
}
MALFORMED = ("fewer-offsets", "short-offset", "other-dims")


def sweep_refusals(limits: Limits) -> list[Case]:
    return [Case.of("layout.wrapper-refusals", mesh="2", attempt=attempt) for attempt in ATTEMPTS]


def check_refusals(case: Case, here: Here) -> None:
    """An op that a wrapper does not support, and shards that are not described one by one, are refused."""
    attempt, wrapper = case.get("attempt"), compat.name("LocalShardsWrapper")
    one = wrapper([here.tensor(torch.ones(2, 2)), here.tensor(torch.ones(2, 2))], [(0, 0), (0, 2)])
    errors = (Exception,) if attempt in MALFORMED else (NotImplementedError, AssertionError, RuntimeError)
    text, call = ATTEMPTS[attempt]
    here.refused(lambda: call(wrapper, one), attempt, text, errors=errors)


def features_refusals(case: Case) -> set[str]:
    return {"malformed-shards"} if case.get("attempt") in MALFORMED else set()


def script_refusals(case: Case) -> Script:
    body = ["W, x = LocalShardsWrapper, torch.ones(2, 2)", "w = W([x, x.clone()], [(0, 0), (0, 2)])"]
    made = scripts.refused(case, body, ATTEMPTS[case.get("attempt")][0])
    return Script(made.stages, (IMPORT, *made.imports), made.constants)


CLAUSES = {
    "rows": "Rows of any number for each rank, in a wrapper, are what its DTensor holds and lists, under the global shape that was given.",
    "columns": "Columns in any order, several runs for one rank and none for another, are what a wrapper and its DTensor hold and list.",
    "table": "A whole table on one rank, the mesh being that rank alone, has its shape and stride on all ranks, and elements on one.",
    "grid": "Rows by columns of any numbers, on a mesh of two dims, are what a wrapper and its DTensor hold and list.",
}
CONTROLS = {
    "rows": "mesh=4 x=8x3:S(0) boxes=0:1,0:3@0;1:4,0:3@1;4:5,0:3@2;5:8,0:3@3",
    "columns": "mesh=2 x=4x6:S(1) boxes=0:4,0:1@0;0:4,1:3@0;0:4,3:4@1;0:4,4:6@1",
    "table": "mesh=1@2 x=4x3:R boxes=0:4,0:3@2",
    "grid": "mesh=2x2 x=4x5:S(0),S(1) boxes=0:1,0:2@0;0:1,2:5@1;1:4,0:2@2;1:4,2:5@3",
}
COUNTS = {"rows": 60, "columns": 60, "table": 24, "grid": 30}

LAWS = (
    *(
        Law(
            id=f"layout.wrapper[{way}]",
            clause=CLAUSES[way],
            source=f"{WRAPPER}: local_shards, local_sizes, local_offsets, storage_metadata; {FROM_LOCAL}",
            check=check_wrapper,
            script=script_wrapper,
            control=f"layout.wrapper[{way}] {CONTROLS[way]}",
            planted="wrapper_forgets_elements" if way == "table" else "wrapper_forgets_offsets",
            features=features_held,
            draw=partial(lambda limits, way: handed_out(f"layout.wrapper[{way}]", limits, way), way=way),
            draws=COUNTS[way],
            weight=0.3,
            tier="extended",
        )
        for way in MESHES
    ),
    Law(
        id="layout.wrapper-ops",
        clause="The ops that a wrapper supports give a wrapper of the same boxes, and leave the one that they are given as it was.",
        source=f"{WRAPPER}: the ops that __torch_dispatch__ lists",
        check=check_ops,
        script=script_ops,
        control="layout.wrapper-ops mesh=2 x=4x6:S(1) boxes=0:4,0:1@0;0:4,1:3@0;0:4,3:6@1 op=clone",
        planted="wrapper_clone_aliases",
        features=features_ops,
        draw=draw_ops,
        draws=90,
        weight=0.3,
        tier="extended",
    ),
    Law(
        id="layout.wrapper-refusals",
        clause="An op that a wrapper does not support, and shards without one offset of as many dims for each, are refused.",
        source=f"{WRAPPER}: __torch_dispatch__ raises for other ops; the constructor takes one offset for each shard",
        check=check_refusals,
        script=script_refusals,
        control="layout.wrapper-refusals mesh=2 attempt=add",
        planted="wrapper_does_anything",
        features=features_refusals,
        sweep=sweep_refusals,
        sweeps=len(ATTEMPTS),
        weight=0.1,
        tier="extended",
    ),
)
