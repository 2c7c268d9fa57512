"""Results that are written into a tensor that is given, and views beside what they look at."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from shardlaw.reference.mesh import Mesh
from shardlaw.reference.placement import Partial, Placement, Placements, Replicate, Shard
from shardlaw.strategies.meshes import pool
from shardlaw.strategies.op_table import read_ops
from shardlaw.strategies.ops import Op, Sample

SIZES = (2, 3, 4, 5, 6, 7)
MESHES = (*("2",) * 6, *("3",) * 2, *("2x2",) * 2)

# o is the tensor that takes the result in: of its shape and dtype, and with elements that are not the result's
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
""")

# of a view v of a
VIEWS = read_ops("""
alias
    a=m,n       | t(a) transpose(a,0,-1) view(a,({m},1,{n})) view(a,({m},{n})) unsqueeze(a,0) detach(a) permute(a,(1,0)) a.T
    a=m,n       | view(a,(-1,{n})) expand(a,({m},{n})) aten.alias.default(a) view_as(a,a)
    a=2*m,n     | view(a,(2,{m},{n})) unflatten(a,0,({m},2)) narrow(a,0,0,{2*m}) getitem(a,slice(None)) getitem(a,...)
    a=m,1,n     | squeeze(a,1) movedim(a,0,-1) select(a,1,0)
    a=m,n,p     | select(a,1,0) narrow(a,1,0,1) diagonal(a,0,0,2) view(a,({m},{n*p})) getitem(a,(slice(None),slice(0,1)))
""")
WRITES = ("add_(1)", "mul_(2)", "neg_()", "zero_()", "fill_(5)")


def _meshes(world_size: int) -> list[Mesh]:
    return pool(MESHES, world_size)


def _placed(mesh: Mesh, ndim: int, *pending: Placement) -> SearchStrategy[Placements]:
    shards = [Shard(dim) for dim in range(ndim)]
    return st.tuples(*(st.sampled_from([Replicate(), *shards, *shards, *pending]) for _ in mesh.shape))


def out_samples(op: Op, *, world_size: int = 4) -> SearchStrategy[Sample]:
    """A call of ``op`` with ``out=``, its operands replicated, sharded or pending, what takes the result in replicated or sharded; one in
    five once more with another such tensor ``p``."""
    meshes = _meshes(world_size)

    @st.composite
    def drawn(draw: st.DrawFn) -> Sample:
        variant, mesh = draw(st.sampled_from(op.variants)), draw(st.sampled_from(meshes))
        extents = variant.fits({name: draw(st.sampled_from(SIZES)) for name in variant.symbols})
        placed: dict[str, Placements] = {}
        together = draw(st.booleans())
        for arg in variant.args:
            alike = placed.get("a", ()) if together and arg.dims == variant.args[0].dims else ()
            pending = [] if arg.bound or arg.dtype else [Partial("sum")]
            free = _placed(mesh, 0 if arg.bound == "R" else len(arg.dims), *pending)
            placed[arg.name] = draw(free) if not alike or any(isinstance(p, Partial) for p in alike) else alike
        sample = variant.sample(mesh, extents, placed, "float32")
        if draw(st.integers(0, 4)):
            return sample
        taking = dict(sample.tensors)["o"]
        other = replace(taking, placements=draw(_placed(mesh, len(taking.shape))))
        return Sample(mesh, (*sample.tensors, ("p", other)), f"{sample.steps};{sample.steps.replace('out=o', 'out=p')}")

    return drawn()


def alias_samples(*, world_size: int = 4) -> SearchStrategy[Sample]:
    """A view ``v`` of ``a``, and a write to either, whose result is the other one."""
    meshes = _meshes(world_size)

    @st.composite
    def drawn(draw: st.DrawFn) -> Sample:
        variant, mesh = draw(st.sampled_from(VIEWS[0].variants)), draw(st.sampled_from(meshes))
        extents = {name: draw(st.sampled_from(SIZES)) for name in variant.symbols}
        placed = {arg.name: draw(_placed(mesh, len(arg.dims))) for arg in variant.args}
        sample = variant.sample(mesh, extents, placed, "float32")
        written, seen = draw(st.sampled_from([("a", "v"), ("v", "a")]))
        return Sample(mesh, sample.tensors, f"v={sample.steps};{written}.{draw(st.sampled_from(WRITES))};{seen}")

    return drawn()
