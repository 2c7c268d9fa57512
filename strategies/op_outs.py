"""Calls with ``out=``, and writes to a tensor and a view of it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial

from hypothesis.strategies import SearchStrategy

from shardlaw.reference.placement import Partial, Placements, StridedShard
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

OUT_SCENARIOS = 2  # for each op in a smoke run
SCALE = 8  # times as many are enumerated for the larger profiles

# o is the output tensor: it has the shape and dtype of the result, and other elements
OUTS = read_ops("""
add
    a=m,n b=m,n o=m,n::small:W | add(a,b,out=o)
    a=m,n b=n o=m,n::small:W   | add(a,b,out=o)
mul small
    a=m,n b=m,n o=m,n::ties:W  | mul(a,b,out=o)
    a=m,n o=m,n::ties:W        | mul(a,2,out=o)
exp small inexact
    a=m,n o=m,n::positive:W    | exp(a,out=o)
neg
    a=m,n o=m,n::small:W       | neg(a,out=o)
mm small
    a=m,k b=k,n o=m,n::ties:W  | mm(a,b,out=o)
sum
    a=m,n o=n::small:W         | sum(a,0,out=o)
    a=m,n o=m::small:W         | sum(a,-1,out=o)
    a=m,n o=m,1::small:W       | sum(a,1,keepdim=True,out=o)
mean inexact
    a=m,n o=n::small:W         | mean(a,0,out=o)
amax
    a=m,n o=m::small:W m>=3 n>=3 | amax(a,1,out=o)
cumsum small
    a=m,n o=m,n::ties:W        | cumsum(a,0,out=o)
cat
    a=m,n b=k,n o=m+k,n::small:W | cat([a,b],out=o)
stack
    a=m,n b=m,n o=2,m,n::small:W | stack([a,b],out=o)
clamp
    a=m,n o=m,n::positive:W    | clamp(a,-2,3,out=o)
maximum
    a=m,n b=m,n o=m,n::small:W | maximum(a,b,out=o)
eq ties
    a=m,n b=m,n o=m,n:bool::W  | eq(a,b,out=o)
index_select
    a=m,n i=k:int64:index2:R o=k,n::small:W m>=2 | index_select(a,0,i,out=o)
# two results, the second (e) of another dtype, which the next op reads
frexp
    a=m,n o=m,n::small:W e=m,n:int32:small:W       | frexp(a,out=(o,e));neg(e)
max
    a=m,n o=n::small:W e=n:int64:small:W m>=3 n>=3 | max(a,0,out=(o,e));neg(e)
    a=m,n o=m::small:W e=m:int64:small:W m>=3 n>=3 | max(a,1,out=(o,e));neg(e)
min
    a=m,n o=m::small:W e=m:int64:small:W m>=3 n>=3 | min(a,1,out=(o,e));neg(e)
kthvalue
    a=m,n o=n::small:W e=n:int64:small:W m>=3 n>=3 | kthvalue(a,2,0,out=(o,e));neg(e)
amin
    a=m,n o=n::small:W m>=3 n>=3 | amin(a,0,out=o)
prod ties
    a=m,n o=m::small:W         | prod(a,1,out=o)
any ties
    a=m,n o=n:bool::W          | any(a,0,out=o)
""")

# views v of a
VIEWS = read_ops("""
alias
    a=m,n       | t(a) transpose(a,0,-1) view(a,({m},1,{n})) view(a,({m},{n})) unsqueeze(a,0) detach(a) permute(a,(1,0)) a.T
    a=m,n       | view(a,(-1,{n})) expand(a,({m},{n})) aten.alias.default(a) view_as(a,a)
    a=2*m,n     | view(a,(2,{m},{n})) unflatten(a,0,({m},2)) narrow(a,0,0,{2*m}) getitem(a,slice(None)) getitem(a,...)
    a=m,1,n     | squeeze(a,1) movedim(a,0,-1) select(a,1,0)
    a=m,n,p     | select(a,1,0) narrow(a,1,0,1) diagonal(a,0,0,2) view(a,({m},{n*p})) getitem(a,(slice(None),slice(0,1)))
""")
# views that come in lists, or lose several dims, of the sharded dim and of another, as op_corners writes programs
LISTED = """
2 | a=4x4:S(0) | x=split(a,2,1);v=getitem(x,1);a.add_(1);v x=chunk(a,2,1);v=getitem(x,0);v.mul_(2);a x=unbind(a,1);v=getitem(x,3);a.neg_();v
2 | a=4x6:S(1) | x=split(a,2);v=getitem(x,1);v.fill_(5);a x=split(a,(1,3));v=getitem(x,1);a.neg_();v
2 | a=4x6:S(1) | x=tensor_split(a,2);v=getitem(x,1);v.add_(1);a
2 | a=4x4:S(0) | x=split(a,2);v=getitem(x,1);a.add_(1);v x=chunk(a,2);v=getitem(x,0);v.mul_(2);a
2 | a=4x4:S(0) | x=tensor_split(a,2);v=getitem(x,1);v.neg_();a
2x2 | a=4x6:S(0),R | x=chunk(a,3,1);v=getitem(x,2);v.zero_();a x=chunk(a,2,0);v=getitem(x,1);a.mul_(2);v
2 | a=2x1x2:S(1) | v=squeeze(a,(1,));v.add_(1);a v=squeeze(a);a.mul_(2);v
"""
WRITES = ("add_(1)", "mul_(2)", "neg_()", "zero_()", "fill_(5)")


def build_out_call(op: Op, choose: Choose, scenario: Scenario) -> Sample:
    """A call of ``op`` with ``out=``. Its first operand has the kinds of placements of the scenario; the output is replicated or sharded, a
    second output ``e`` often like the first. One sample in five repeats the call with another output ``p``."""
    variant = choose([variant for variant in op.variants if not (scenario.empty and variant.least)] or op.variants)
    sizes = choose_sizes(choose, scenario, variant.symbols, variant)
    together = choose((False, True))
    lies: dict[str, Placements] = {}
    for arg in variant.args:
        if arg.name == "e":
            apart = choose((False, False, True))  # laid out by itself
            lies["e"] = choose_placements(choose, scenario, arg.shape(sizes), pending=()) if apart else lies["o"]
            continue
        alike = lies.get("a", ()) if together and arg.dims == variant.args[0].dims else ()
        if alike and not any(isinstance(p, Partial | StridedShard) for p in alike):
            lies[arg.name] = alike
            continue
        kinds = scenario.kinds if arg.name == "a" else ()
        pending = () if arg.bound or arg.dtype else ("sum",)
        lies[arg.name] = choose_placements(choose, scenario, () if arg.bound == "R" else arg.shape(sizes), kinds=kinds, pending=pending)
    sample = variant.sample(scenario.mesh, sizes, lies, "float32")
    if "e" in lies or choose((True, True, True, True, False)):
        return sample
    taking = dict(sample.tensors)["o"]
    other = replace(taking, placements=choose_placements(choose, scenario, taking.shape, pending=()))
    return Sample(scenario.mesh, (*sample.tensors, ("p", other)), f"{sample.steps};{sample.steps.replace('out=o', 'out=p')}")


def out_samples(op: Op, *, world_size: int = 4) -> SearchStrategy[Sample]:
    """Calls of ``op`` with ``out=``."""
    return strategy_of(partial(build_out_call, op), world_size)


def enumerate_out_calls(op: Op, world_size: int) -> list[Sample]:
    """Calls of ``op`` with ``out=`` for its own scenarios; those of all ops together cover every mesh and kind."""
    own = enumerate_scenarios(world_size, OUT_SCENARIOS * SCALE, OUTS.index(op) * OUT_SCENARIOS)
    return [build_out_call(op, choose_by_number(at), scenario) for at, scenario in enumerate(own)]


def build_alias(choose: Choose, scenario: Scenario) -> Sample:
    """A view ``v`` of ``a``, and a write to one of them; the result is the other. ``a`` has the kinds of placements of the scenario."""
    variant = choose([variant for variant in VIEWS[0].variants if not (scenario.empty and REGROUPED.search(variant.call))])
    sizes = choose_sizes(choose, scenario, variant.symbols)
    lies = {arg.name: choose_placements(choose, scenario, arg.shape(sizes), kinds=scenario.kinds, pending=()) for arg in variant.args}
    sample = variant.sample(scenario.mesh, sizes, lies, "float32")
    written, seen = choose((("a", "v"), ("v", "a")))
    return Sample(scenario.mesh, sample.tensors, f"v={sample.steps};{written}.{choose(WRITES)};{seen}")


def alias_samples(*, world_size: int = 4) -> SearchStrategy[Sample]:
    """Tensors and views, one of which is written to."""
    return strategy_of(build_alias, world_size)


@cache
def enumerate_aliases(world_size: int) -> list[Sample]:
    """A view and a write for each of many scenarios."""
    return [build_alias(choose_by_number(at), scenario) for at, scenario in enumerate(enumerate_scenarios(world_size, SCENARIO_COUNT))]
