"""Strategies for programs of several ops: chains of calls, and one op called several times with different arguments.

A chain is built call by call. The symbolic shape and the kind of every value are known, so it is valid for any sizes. A value that is
rounded is never cast to integers or compared, so that a rounding difference stays small.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from hypothesis.strategies import SearchStrategy

from shardlaw.reference.mesh import Mesh
from shardlaw.reference.placement import Placements, Replicate, Shard
from shardlaw.reference.tensors import TensorSpec
from shardlaw.strategies.op_operands import (
    REGROUPED,
    SCENARIO_COUNT,
    Choose,
    Scenario,
    choose_by_number,
    choose_placements,
    choose_sizes,
    enumerate_scenarios,
    strategy_of,
)
from shardlaw.strategies.op_table import read_ops
from shardlaw.strategies.ops import Op, Sample

NAMES = ("x", "y", "z")
MESH = Mesh.of(2)


@dataclass(frozen=True)
class Value:
    """A value of a chain: its name, its symbolic dims, its kind (``float``, ``int`` or ``bool``), and whether it is exact."""

    name: str
    dims: tuple[str, ...]
    kind: str = "float"
    exact: bool = True


@dataclass(frozen=True)
class Link:
    """A call on ``{x}``, and maybe on ``{a}``, a tensor of the case; the other fields describe its result."""

    call: str
    dims: tuple[str, ...]
    kind: str
    exact: bool


def links(x: Value, a: Value, mesh_ndim: int) -> Iterator[Link]:
    """Every valid call on ``x``, the plainest first."""
    ndim, number = len(x.dims), x.kind != "bool"
    same = x.dims

    def keep(*calls: str, kind: str = "", exact: bool = True, dims: tuple[str, ...] | None = None) -> Iterator[Link]:
        for call in calls:
            yield Link(call, same if dims is None else dims, kind or x.kind, x.exact and exact)

    yield from keep("redistribute({x},'" + ",".join(["R"] * mesh_ndim) + "')")
    if ndim:
        yield from keep(f"redistribute({{x}},'{','.join(['S(0)', *['R'] * (mesh_ndim - 1)])}')")
    if number:
        yield from keep(
            "mul({x},2)", "neg({x})", "add({x},1)", "sub({x},3)", "abs({x})", "nn.functional.relu({x})", "add({x},{x})", "clamp({x},min=1)"
        )
        if x.exact:
            yield from keep("gt({x},0)", "eq({x},1)", "ne({x},0)", kind="bool")
            yield from keep("mul({x},{x})", "sign({x})", "maximum({x},neg({x}))")
    if x.kind == "float":
        yield from keep("sigmoid({x})", "sqrt(abs({x}))", "div({x},3)", exact=False)
        if x.exact:
            yield from keep("to({x},torch.int64)", kind="int")
            yield from keep("to({x},torch.float64)", "floor(div({x},2))")
    if x.kind == "int":
        yield from keep("to({x},torch.float32)", "mul({x},0.5)", kind="float")
    if x.kind == "bool":
        yield from keep("logical_not({x})")
        yield from keep("to({x},torch.float32)", kind="float")
        yield from keep("to({x},torch.int64)", kind="int")
    for dim in range(ndim):
        rest = (*same[:dim], *same[dim + 1 :])
        kept = (*same[:dim], "1", *same[dim + 1 :])
        if number:
            yield from keep(f"sum({{x}},{dim})", f"amax({{x}},{dim - ndim})", f"amin({{x}},{dim})", dims=rest)
            yield from keep(f"sum({{x}},{dim - ndim},keepdim=True)", dims=kept)
        else:
            yield from keep(f"sum({{x}},{dim})", dims=rest, kind="int")
            yield from keep(f"any({{x}},{dim})", f"all({{x}},{dim - ndim})", dims=rest)
        if x.kind == "float":
            yield from keep(f"mean({{x}},{dim})", f"linalg.vector_norm({{x}},2,{dim})", dims=rest, exact=False)
            yield from keep(f"linalg.vector_norm({{x}},1,{dim})", f"linalg.vector_norm({{x}},inf,{dim})", dims=rest)
            yield from keep(f"nn.functional.softmax({{x}},{dim - ndim})", exact=False)
        if number:
            yield from keep(f"cumsum({{x}},{dim})")
        yield from keep(f"unsqueeze({{x}},{dim})", dims=(*same[:dim], "1", *same[dim:]))
        yield from keep(f"flip({{x}},({dim},))", f"flip({{x}},({dim - ndim},))")
    if ndim:
        whole = ("sum({x})", "amax({x})", "amin({x})") if number else ("any({x})", "all({x})")
        yield from keep(*whole, dims=())
        if x.kind == "float":
            yield from keep("mean({x})", "linalg.vector_norm({x})", dims=(), exact=False)
    if ndim == 2:
        yield from keep("t({x})", "transpose({x},-2,-1)", dims=(same[1], same[0]))
        if x.kind == "float" and x.exact and same[1] == a.dims[-1]:
            yield from keep("mm({x},t({a}))", dims=(same[0], a.dims[0]))
    if number and _broadcasts(same, a.dims):
        yield Link("add({x},{a})", _broadcast_dims(same, a.dims), "float", x.exact)
        yield Link("sub({a},{x})", _broadcast_dims(same, a.dims), "float", x.exact)
        yield Link("mul({a},{x})", _broadcast_dims(same, a.dims), "float", x.exact)
    if number and same == a.dims and x.kind == "float":
        yield from keep("where(gt({a},0),{x},{a})", "maximum({x},{a})", "masked_fill({x},gt({a},0),5)")


def _broadcasts(x: tuple[str, ...], a: tuple[str, ...]) -> bool:
    return all(p == q or "1" in (p, q) for p, q in zip(reversed(x), reversed(a), strict=False))


def _broadcast_dims(x: tuple[str, ...], a: tuple[str, ...]) -> tuple[str, ...]:
    longer, shorter = (x, a) if len(x) >= len(a) else (a, x)
    padded = ("1",) * (len(longer) - len(shorter)) + shorter
    return tuple(q if p == "1" else p for p, q in zip(longer, padded, strict=True))


STARTS = frozenset(
    ("sum({a},0)", "sum({a},1)", "amax({a},0)", "linalg.vector_norm({a},2,0)", "mm({a},t({a}))", "mul({a},2)", "mean({a},-1)", "sum({a})")
)
# reductions that are undefined for no elements
NEEDS_ELEMENTS = re.compile(r"^(amax|amin)\(|inf,")


def build_program(choose: Choose, scenario: Scenario) -> Sample:
    """A chain of two to four calls on a 2-D tensor ``a`` with the kinds of placements of the scenario."""
    mesh = scenario.mesh
    sizes = choose_sizes(choose, scenario, ("m", "n"))
    shape = (sizes["m"], sizes["n"])
    spec = TensorSpec(shape, choose_placements(choose, scenario, shape, kinds=scenario.kinds, pending=("sum", "max")), "float32", "small")
    a = x = Value("a", ("m", "n"))
    calls = []
    for at in range(choose((2, 3, 4))):
        options = [link for link in links(x, a, mesh.ndim) if not (scenario.empty and NEEDS_ELEMENTS.search(link.call))]
        favoured = [link for link in options if link.call.replace("{x}", "{a}") in STARTS] if at == 0 else []
        link = choose(favoured + options)
        calls.append(link.call.replace("{x}", x.name).replace("{a}", "a"))
        x = Value(NAMES[at] if at < len(NAMES) else "", link.dims, link.kind, link.exact)
    return Sample(mesh, (("a", spec),), join_calls(calls))


def op_programs(*, world_size: int = 4) -> SearchStrategy[Sample]:
    """Chains of two to four calls on a tensor ``a`` of two dims; a later call gets the result of an earlier one, pending where it is.

    Shrinks to two calls on a 2x2 tensor on the mesh ``2``.
    """
    return strategy_of(build_program, world_size)


@cache
def enumerate_programs(world_size: int) -> list[Sample]:
    """A chain for each of many scenarios."""
    return [build_program(choose_by_number(at), scenario) for at, scenario in enumerate(enumerate_scenarios(world_size, SCENARIO_COUNT))]


def join_calls(calls: list[str]) -> str:
    return ";".join(call if at == len(calls) - 1 else f"{NAMES[at]}={call}" for at, call in enumerate(calls))


# One op with different arguments on the same tensors; a cache may confuse calls that differ in them.
FAMILIES = read_ops("""
add      int64,float32 positive
    a=m,n | add(a,2) add(a,2.0) add(a,2.5) add(a,True) add(a,tensor(2)) add(a,tensor(2.5))
sub      int64,float32 positive
    a=m,n | sub(a,2) sub(a,2.0) sub(a,2.5) sub(a,tensor(2)) sub(a,tensor(2.5))
mul      int64,float32 positive
    a=m,n | mul(a,2) mul(a,2.0) mul(a,2.5) mul(a,True) mul(a,tensor(2)) mul(a,tensor(2.5))
div      int64,float32 positive
    a=m,n | div(a,2) div(a,2.0) div(a,2.5) div(a,True) div(a,tensor(2)) div(a,tensor(2.5))
eq       int64,float32 positive
    a=m,n | eq(a,2) eq(a,2.0) eq(a,2.5) eq(a,True) gt(a,2) gt(a,2.5)
pow      int64,float32 positive
    a=m,n | pow(a,2) pow(a,2.0) pow(a,1) pow(a,True)
remainder int64,float32 positive
    a=m,n | remainder(a,2) remainder(a,2.0) remainder(a,2.5)
clamp    int64,float32 small
    a=m,n | clamp(a,0) clamp(a,0.5) clamp(a,None,2) clamp(a,1,2)
where    int64,float32 small
    a=m,n | where(gt(a,0),a,1) where(gt(a,0),a,1.5) where(gt(a,0),a,True)
full_like int64,float32
    a=m,n | full_like(a,2) full_like(a,2.5) full_like(a,True)
to       float32,int64 small
    a=m,n | to(a,torch.int64) to(a,torch.float64) to(a,torch.bool) to(a,torch.float32)
sum      float32,int64
    a=m,n | sum(a) sum(a,0) sum(a,1) sum(a,-1) sum(a,0,keepdim=True) sum(a,(0,1)) sum(a,dtype=torch.float64)
amax
    a=m,n m>=3 n>=3 | amax(a) amax(a,0) amax(a,1) amax(a,-1,keepdim=True)
max
    a=m,n m>=3 n>=3 | max(a,0) max(a,1) max(a,1,keepdim=True) max(a)
argmax
    a=m,n m>=3 n>=3 | argmax(a) argmax(a,0) argmax(a,1) argmax(a,1,keepdim=True)
norm     small
    a=m,n | linalg.vector_norm(a,1) linalg.vector_norm(a,2) linalg.vector_norm(a,2.5) linalg.vector_norm(a,2,0)
var
    a=m,n m>=2 n>=2 | var(a,0) var(a,0,correction=0) var(a,1) var(a,1,keepdim=True)
softmax  small
    a=m,n | nn.functional.softmax(a,0) nn.functional.softmax(a,1) nn.functional.softmax(a,-1)
cumsum   small
    a=m,n | cumsum(a,0) cumsum(a,1)
sort
    a=m,n | sort(a,0) sort(a,1) sort(a,0,descending=True)
topk
    a=m,n m>=2 n>=2 | topk(a,2,0) topk(a,2,1) topk(a,2,0,False) topk(a,1,0)
transpose
    a=m,n | transpose(a,0,1) transpose(a,0,0) permute(a,(1,0)) permute(a,(0,1)) unsqueeze(a,0) unsqueeze(a,1) unsqueeze(a,2)
expand
    a=m,n | expand(a,(2,{m},{n})) expand(a,(3,{m},{n}))
select
    a=m,n m>=2 n>=2 | select(a,0,0) select(a,1,0) select(a,0,-1) narrow(a,0,0,1) narrow(a,0,1,1) narrow(a,1,0,2) narrow(a,0,0,{m})
split
    a=m,n m>=2 n>=2 | split(a,1) split(a,2) split(a,1,1)
flip
    a=m,n | flip(a,(0,)) flip(a,(1,)) roll(a,1,0) roll(a,1,1) roll(a,2,0)
tril
    a=m,n | tril(a) tril(a,1) triu(a,-1) triu(a,1)
pad
    a=m,n | constant_pad_nd(a,(1,0)) constant_pad_nd(a,(0,1)) constant_pad_nd(a,(1,0),5) constant_pad_nd(a,(0,0,1,0))
repeat
    a=m,n | repeat(a,(2,1)) repeat(a,(1,2)) repeat(a,(3,1))
alpha
    a=m,n b=m,n | add(a,b) add(a,b,alpha=2) add(a,b,alpha=-1) sub(a,b,alpha=2)
cat
    a=m,n b=m,n | cat([a,b],0) cat([a,b],1) stack([a,b],0) stack([a,b],1) cat([a,b,a],0)
index_select
    a=m,n i=k:int64:index2 m>=2 n>=2 | index_select(a,0,i) index_select(a,1,i) index_fill(a,0,i,5) index_fill(a,1,i,5)
gather
    a=m,m i=m,m:int64:index2 m>=2 | gather(a,0,i) gather(a,1,i) scatter(a,0,i,5) scatter(a,1,i,5)
embedding
    a=m,n i=k:int64:index2 m>=2 n>=2 | nn.functional.embedding(i,a) nn.functional.embedding(i,a,padding_idx=0) getitem(a,i) getitem(a,(i,i))
means
    a=m,n m>=2 n>=2 | mean(a,0) mean(a,1) mean(a,1,keepdim=True) prod(a,0) prod(a,1) std(a,0) std(a,1) var_mean(a,0) var_mean(a,1)
bools    ties
    a=m,n | any(a,0) any(a,1) any(a,1,keepdim=True) all(a,0) all(a,1) all(a) count_nonzero(a,0) count_nonzero(a,1)
chosen
    a=m,n m>=3 n>=3 | median(a,0) median(a,1) kthvalue(a,1,0) kthvalue(a,1,1) kthvalue(a,1,1,keepdim=True) aminmax(a,dim=0) aminmax(a,dim=1)
ordered
    a=m,n m>=3 n>=3 | sort(a,dim=0,stable=True) sort(a,dim=1,stable=True) argsort(a,0) argsort(a,1) cummax(a,0) cummax(a,1) argmin(a,0)
        | argmin(a,1)
logs     small
    a=m,n | logsumexp(a,0) logsumexp(a,1) logsumexp(a,(0,1)) logcumsumexp(a,0) logcumsumexp(a,1) nn.functional.log_softmax(a,0)
        | nn.functional.log_softmax(a,1)
diagonal
    a=m,n m>=2 n>=2 | diagonal(a) diagonal(a,1) diag(a) diag_embed(a) diag_embed(a,0,0,2) diag_embed(a,0,0,1)
views
    a=4,2*n | view(a,(4,2,{n})) view(a,(2,2,{2*n})) view(a,({8*n},)) unflatten(a,1,(2,{n})) unflatten(a,0,(2,2)) flatten(a)
pieces
    a=m,n m>=2 n>=2 | getitem(a,slice(0,1)) getitem(a,slice(1,None)) getitem(a,(slice(None),slice(0,1))) split(a,(1,{m-1}))
        | tensor_split(a,2,1)
scattered
    a=m,m b=m m>=2 | select_scatter(a,b,0,0) select_scatter(a,b,1,0) select_scatter(a,b,0,1)
taken
    a=m,m i=m:int64:index2 o=m,m::small:W m>=2 | index_select(a,1,i,out=o) index_select(a,0,i,out=o)
counted
    a=m,n | histc(a,4,-8,8) histc(a,3,-8,8) histc(a,4)
nansum
    a=m,n | nansum(a,0) nansum(a,1) nansum(a,1,keepdim=True)
shapes
    a=m,n b=n m>=3 n>=3 | sum(a) sum(b) amax(a) amax(b) neg(a) neg(b)
dtypes   small
    a=m,n:float32 b=m,n:int64 | sum(a) sum(b) mul(a,2) mul(b,2) mul(a,2.5) mul(b,2.5)
    a=m,n:float32 b=m,n:int64 | to(a,torch.int64) to(b,torch.float32) abs(a) abs(b)
transposed
    a=m,n b=n,m | sum(a,0) sum(b,0) t(a) t(b) nn.functional.relu(a) nn.functional.relu(b)
""")


# Further ones, each tried once.
MORE_FAMILIES = read_ops("""
deviations small
    a=m,n m>=2 n>=2 | std(a,0) std(a,0,keepdim=True) std(a,1,keepdim=True) std(a,1) var_mean(a,1) var_mean(a,1,keepdim=True)
largest
    a=m,n m>=2 n>=2 | topk(a,2,1) topk(a,2,0) topk(a,2,0,False) topk(a,2,1,False)
norms    small
    a=m,n | linalg.vector_norm(a,2,1) linalg.vector_norm(a,2,0) linalg.vector_norm(a,1,0) linalg.vector_norm(a,2,0,True)
moved
    a=m,m | movedim(a,0,0) movedim(a,0,1) rot90(a,1,(0,1)) rot90(a,2,(0,1)) squeeze(a,0) t(a) tile(a,(1,2)) tile(a,(2,1))
apart
    a=2,2 | chunk(a,2) chunk(a,2,1) diff(a,1,0) diff(a,1,1) cumprod(a,0) cumprod(a,1)
rolled
    a=m,n m>=2 n>=2 | roll(a,1,1) roll(a,1,0) roll(a,1) roll(a,(1,1),(0,1)) flip(a,(1,)) flip(a,(0,1)) flip(a,(0,))
spectra  small
    a=m,n | fft.fft(a,dim=0) fft.fft(a,dim=1) fft.rfft(a,dim=1) fft.rfft(a,dim=0)
losses   small
    a=m,3 i=m:int64:index3 | nn.functional.nll_loss(a,i,reduction='sum') nn.functional.nll_loss(a,i,reduction='none')
        | nn.functional.nll_loss(a,i,ignore_index=1,reduction='sum')
along
    a=m,m i=m,m:int64:index2 m>=2 | take_along_dim(a,i,1) take_along_dim(a,i,0) scatter_add(a,1,i,a) scatter_add(a,0,i,a)
added
    a=m,m i=2:int64:index2 m>=2 | index_select(a,1,i) index_select(a,0,i) index_fill(a,1,i,2.5) index_fill(a,0,i,2.5)
within   small
    a=m,n | nn.functional.layer_norm(a,({n},)) nn.functional.layer_norm(a,({m},{n})) nn.functional.softmax(a,1)
        | nn.functional.softmax(a,0) nn.functional.softmax(a,0,dtype=torch.float64)
# both dims have the three elements that a cross product needs
crossed  small
    a=3,3 b=3,3 | linalg.cross(a,b,dim=1) linalg.cross(a,b,dim=0) cross(a,b,dim=-1) cross(a,b,dim=-2)
frequent ties
    a=m,n m>=2 n>=2 | mode(a,1) mode(a,0) mode(a,0,keepdim=True)
diagonals
    a=m,m,m b=m,m m>=2 | diagonal_scatter(a,b,0,1,2) diagonal_scatter(a,b,0,0,2) diagonal_scatter(a,b,0,0,1)
copied
    a=m,2,n,2 m>=2 n>=2 | clone(a) clone(a,memory_format=torch.channels_last) to(a,torch.float64)
        | to(a,torch.float64,memory_format=torch.channels_last) a.contiguous(memory_format=torch.channels_last)
filled
    a=m,2,n,2 m>=2 n>=2 | zeros_like(a) zeros_like(a,memory_format=torch.channels_last) full_like(a,2)
        | full_like(a,2,memory_format=torch.channels_last)
grouped  small
    a=m,4,n | native_group_norm(a,None,None,{m},4,{n},2,1e-05) native_group_norm(a,None,None,{m},4,{n},4,1e-05)
""")


# Families of which it is the dtype that differs: of the result, or as which the elements are seen.
TYPED_FAMILIES = read_ops("""
seen     small
    a=m,4*n | view(a,torch.int32) view(a,torch.int64) view(a,torch.int16) view(a,torch.complex64)
reduced  int64,int32 positive
    a=m,n m>=2 n>=2 | sum(a) sum(a,dtype=torch.float64) prod(a,1) prod(a,1,dtype=torch.float32) sum(a,0) sum(a,0,dtype=torch.float64)
scanned  int64,int32 positive
    a=m,n m>=2 n>=2 | cumsum(a,0) cumsum(a,0,dtype=torch.float64) cumprod(a,1) cumprod(a,1,dtype=torch.float32)
averaged small
    a=m,n m>=2 n>=2 | mean(a,0) mean(a,0,dtype=torch.float64) linalg.vector_norm(a,2,0) linalg.vector_norm(a,2,0,dtype=torch.float64)
divided  int64,int32 positive
    a=m,n b=m,n | div(a,b,rounding_mode=None) div(a,b,rounding_mode='floor') div(a,b,rounding_mode='trunc')
sought   small
    a=m,n b=2 | bucketize(a,b) bucketize(a,b,out_int32=True)
""")


def build_history(choose: Choose, scenario: Scenario) -> Sample:
    """Two or three calls of one family. The first tensor has the kinds of placements of the scenario."""
    fitting = [[v for v in family.variants if not scenario.empty or not (v.least or REGROUPED.search(v.call))] for family in FAMILIES]
    several = choose([variants for variants in fitting if variants])
    first = choose(several)
    family = [variant for variant in several if variant.args == first.args]
    sizes = choose_sizes(choose, scenario, first.symbols, first)
    dtype = choose(first.dtypes)
    calls = list(family)
    while len(calls) > max(2, min(len(family), choose((2, 3)))):
        calls.remove(choose(calls))
    if choose((False, True)):
        calls.reverse()
    specs = []
    for at, arg in enumerate(first.args):
        kinds = scenario.kinds if at == 0 else ()
        lies = choose_placements(choose, scenario, arg.shape(sizes), arg.dtype or dtype, kinds=kinds, pending=("sum", "max"))
        specs.append((arg.name, first.spec(arg, sizes, dtype, lies)))
    return Sample(scenario.mesh, tuple(specs), ";".join(call.steps(sizes) for call in calls))


def op_histories(*, world_size: int = 4) -> SearchStrategy[Sample]:
    """One op called two or three times in one program with different arguments: kinds of scalars, dims, dtypes, shapes.

    Shrinks to two calls of the first family on a 2x2 tensor on the mesh ``2``.
    """
    return strategy_of(build_history, world_size)


@cache
def enumerate_histories(world_size: int) -> list[Sample]:
    """A family for each of many scenarios."""
    return [build_history(choose_by_number(at), scenario) for at, scenario in enumerate(enumerate_scenarios(world_size, SCENARIO_COUNT))]


def family_histories() -> list[Sample]:
    """Every call of each family on the same tensors, in order, sharded on dims in turn; then, where that was the first dim, on the last: a
    cached plan of a call along an unsharded dim is wrong along a sharded one."""
    families = [*FAMILIES, *MORE_FAMILIES]
    found = [sample for at, family in enumerate(families) for sample in _family_samples(family, at)]
    return found + [sample for family in families[::2] for sample in _family_samples(family, -1)]


def typed_histories() -> list[Sample]:
    """Every call of each family whose dtypes differ, on a mesh that leaves a rank out, which sees shape and dtype of the result alone."""
    return [sample for at, family in enumerate(TYPED_FAMILIES) for sample in _family_samples(family, at, Mesh.parse("2@1,2"))]


def _family_samples(family: Op, dim: int, mesh: Mesh = MESH) -> Iterator[Sample]:
    for args in dict.fromkeys(variant.args for variant in family.variants):
        several = [variant for variant in family.variants if variant.args == args]
        sizes = several[0].fits(dict.fromkeys(several[0].symbols, 3))
        placed: dict[str, Placements] = {}
        for arg in args:
            shards = [Shard(at) for at in range(len(arg.dims)) if not arg.dtype]
            placed[arg.name] = (shards[dim % len(shards)] if shards else Replicate(),)
        sample = several[0].sample(mesh, sizes, placed, several[0].dtypes[0])
        yield replace(sample, steps=";".join(variant.steps(sizes) for variant in several))
