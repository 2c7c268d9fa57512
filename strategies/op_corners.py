"""Tables of programs that random draws would rarely give.

A line is ``MESH | TENSORS | PROGRAMS``. ``P(*)`` among the placements stands for each reduction in turn. Programs hold no spaces.
"""

from __future__ import annotations

from collections.abc import Iterator

from shardlaw.reference.mesh import Mesh
from shardlaw.reference.tensors import TensorSpec
from shardlaw.strategies.ops import Sample

REDUCTIONS = ("sum", "avg", "max", "min")

# scalars of either sign on pending reductions: a negative one swaps a minimum and a maximum
SCALED = """
2 | a=4x4:P(sum):float32:unit | x=to(a,torch.float64);to(a,torch.int64) x=to(a,torch.float64);y=to(a,torch.bool);to(a,torch.int32)
2 | a=4x3:P(*):float32:small | mul(a,-1) mul(a,2.5) div(a,-2) add(a,-3) sub(a,2) rsub(a,2) add(a,a,alpha=-1) clamp(a,-1,2) lerp(a,a,-1.0)
"""

# operands with different pending reductions, on different mesh dims
UNLIKE = """
2x2 | a=4x4:R,P(max) b=4x4:P(avg),R | add(a,b) sub(a,b) add(b,a) maximum(a,b)
2x2 | a=4x4:P(sum),R:float32:small b=4x4:R,P(min):float32:small | add(a,b) mul(a,b) minimum(a,b) mm(a,b)
2x2 | a=4x4:S(0),P(avg) b=4x4:P(max),S(0) | add(a,b) neg(a)
"""

# both mesh dims shard one tensor dim, whose halves are even and whose quarters are not
NESTED = """
2x2 | a=6x5:S(0),S(0) | mean(a,0) mean(a) sum(a,0) amax(a,0) linalg.vector_norm(a,2,0) var(a,0) select(a,0,3) narrow(a,0,1,4) t(a)
2x2 | a=6x5:S(0),S(0) | view(a,(30,)) unsqueeze(a,0) cat([a,a]) stack([a,a]) mm(t(a),a) sort(a,0) cumsum(a,0) argmax(a,0) argmax(a)
2x2 | a=6x5:S(0),S(0) | flip(a,(0,))
2x2 | a=5x6:S(1),S(1) | mean(a,-1) mean(a) sum(a,-1) amin(a,1) var(a,-1) select(a,-1,3) view(a,(30,)) transpose(a,-1,0) cat([a,a],-1)
2x2 | a=5x4:S(0),S(0) | view_copy(a,(20,))
2x2 | a=4x5:S(1),S(1) | view_copy(a,(20,))
2x2 | a=3x2x6:S(2),S(2) | view(a,(3,12)) flatten(a) reshape(a,(6,6)) mean(a,(0,2)) mean(a,(1,2))
"""

# pending results that are scattered, or joined with others
JOINED = """
2 | a=4x3:S(0):float32:small | x=linalg.vector_norm(a,2,0);redistribute(x,'S(0)') x=linalg.vector_norm(a,3,0);redistribute(x,'S(0)')
2 | a=5x6:S(1):float32:small | x=linalg.vector_norm(a,1,1);redistribute(x,'S(0)') x=mean(a,1);redistribute(x,'S(0)')
2 | a=5x6:S(1):float32:small | x=amin(a,1);redistribute(x,'S(0)')
2 | a=4x3:S(0):float32:small b=3:R:float32:positive | x=linalg.vector_norm(a,2,0);y=stack([x,b]);redistribute(y,'R')
2 | a=4x3:S(0):float32:small b=3:R:float32:positive | x=linalg.vector_norm(a,3,0);y=cat([b,x]);redistribute(y,'R')
2 | a=4x3:S(0):float32:small b=3:R:float32:positive | x=amax(a,0);stack([b,x]) x=mean(a,0);cat([x,b]) x=sum(a,0);stack([x,b])
2 | a=4x3:S(0):float32:small b=3:R:float32:positive | x=amin(a,0);cat([b,x,b])
2 | a=4x3:S(0):float32:small | x=linalg.vector_norm(a,2,0);y=linalg.vector_norm(a,3,0);z=stack([x,y]);redistribute(z,'R')
2 | a=4x3:S(0):float32:small | x=linalg.vector_norm(a,2,0);sum(x)
2 | a=4x3:S(0):float32:small | x=amax(a,0);y=amin(a,0);stack([x,y])
2 | a=4x3:S(0):float32:small | x=sum(a,0);y=amax(a,0);stack([x,y])
2x2 | a=4x6:S(0),S(1):float32:small | x=linalg.vector_norm(a,2,0);redistribute(x,'S(0),R') x=sum(a,0);y=amax(x,0);add(x,y)
2x2 | a=4x6:S(0),S(1):float32:small | x=mean(a,1);stack([x,x])
"""

# strided shards, as a view leaves them
STRIDED = """
2 | a=4x6:S(1) | x=view(a,(24,));view(x,(4,6)) x=view(a,(24,));view(x,(2,2,6)) x=view(a,(24,));y=unsqueeze(x,0);select(y,0,0)
2 | a=4x6:S(1) | x=view(a,(24,));y=unsqueeze(x,0);squeeze(y,0) x=view(a,(24,));y=stack([x,x]);select(y,0,1) x=view(a,(24,));sum(x)
2 | a=4x6:S(1) | x=view(a,(24,));y=unsqueeze(x,1);t(y) x=view(a,(24,));flip(x,(0,)) x=view(a,(24,));y=stack([x,x]);unbind(y)
2 | a=4x6:S(1) | x=view(a,(24,));mean(x)
2 | a=4x6:S(1) b=2x12:S(1) | x=view(a,(24,));y=view(b,(24,));add(x,y) x=view(a,(24,));y=view(b,(24,));maximum(y,x)
2 | a=4x6:S(1) | x=view(a,(24,));narrow(x,0,2,8) x=view(a,(24,));select(x,0,5) x=view(a,(24,));cat([x,x]) x=view(a,(24,));split(x,8)
2 | a=4x6:S(1) b=24:S(0) | x=view(a,(24,));add(x,b) x=view(a,(24,));mul(b,x)
2x2 | a=4x6:S(0),S(1) | x=view(a,(24,));view(x,(4,6)) x=view(a,(24,));neg(x) x=view(a,(24,));sum(x)
2x2 | a=2x4x6:S(1),S(2) | x=view(a,(2,24));view(x,(2,4,6)) x=view(a,(2,24));select(x,0,1) x=view(a,(2,24));sum(x,0)
"""

# arguments that tables give other shapes: indices of unlike dims, of size 1; channels that are not last; no batch
SHAPED = """
2 | a=5x4:R i=3:R:int64:index4 j=2x3:S(1):int64:index4 | getitem(a,(i,j)) getitem(a,(j,i))
2 | a=5x4:R i=3:S(0):int64:index4 j=2x3:R:int64:index4 | getitem(a,(i,j)) getitem(a,(j,i))
2 | a=3x5x4:S(2) i=3:R:int64:index3 j=2x3:R:int64:index3 | getitem(a,(i,j)) getitem(a,(j,i))
2 | a=5x4:S(1) i=5x1:R:int64:index4 | gather(a,1,i) gather(a,-1,i)
2 | a=4x5:S(0) i=1x5:R:int64:index4 | gather(a,0,i) gather(a,-2,i)
2 | a=4x4x3:S(1) i=4x3:R:int64:index4 | nn.functional.nll_loss(a,i,reduction='sum') nn.functional.cross_entropy(a,i,reduction='none')
2 | a=4x4x3:S(2) i=4x3:S(1):int64:index4 | nn.functional.nll_loss(a,i,reduction='none') nn.functional.cross_entropy(a,i,reduction='sum')
2 | a=4x4x2x3:S(1) i=4x2x3:R:int64:index4 | nn.functional.nll_loss(a,i,reduction='sum')
2 | a=3x4x4:S(1) | nn.functional.max_pool2d(a,2) nn.functional.avg_pool2d(a,2) nn.functional.adaptive_avg_pool2d(a,(2,2))
2 | a=4x4:S(1) | nn.functional.avg_pool1d(a,2) nn.functional.max_pool1d(a,2)
2 | a=2x4x4x4:S(1) | nn.functional.avg_pool3d(a,2) nn.functional.max_pool3d(a,2) nn.functional.interpolate(a,scale_factor=2.0)
3 | a=5x4:S(0) | view_copy(a,(20,)) view_copy(a,(5,2,2)) x=t(a);reshape(x,(20,))
"""

# on a submesh, ops whose result goes to the other ranks too
OUTSIDE = """
2@1,2 | a=4x3:S(0) b=4x3:R | equal(a,a) equal(a,b) equal(b,b)
"""

# ops with rules of their own, each operand pending in turn
OWN_RULES = """
2 | a=2x3x2x3:P(sum) b=2x2x2x2:R:float32:unit | grid_sampler_2d(a,b,0,0,False)
2 | a=2x3x2x3:R b=2x2x2x2:P(sum):float32:unit | grid_sampler_2d(a,b,0,0,False)
2 | a=2x3x2x3:S(1) b=2x2x2x2:R:float32:unit | grid_sampler_2d(a,b,0,0,True)
2 | a=2x2x3x3:P(*):float32:small | nn.functional.interpolate(a,size=(4,4),mode='bilinear') nn.functional.avg_pool2d(a,2)
2 | a=2x2x3x3:P(*):float32:small | nn.functional.max_pool2d(a,2)
2 | a=2x1x1:S(0):float32:positive b=2x1x3:P(sum):float32:small | cholesky_solve(b,a) linalg.solve(a,b)
2 | a=2x1x1:S(0):float32:positive b=2x1x3:P(sum):float32:small | linalg.solve_triangular(a,b,upper=True)
2 | a=2x1x1:P(sum):float32:positive b=2x1x3:R:float32:small | cholesky_solve(b,a) linalg.solve(a,b) linalg.solve_triangular(a,b,upper=True)
2 | a=2x2x2:P(sum):float32:small | linalg.matrix_exp(a) linalg.slogdet(a) linalg.det(a)
2 | a=3x2x2:S(1):float32:small | linalg.matrix_exp(a) linalg.det(a)
2 | a=4x3:P(*) i=2:R:int64:index4 v=():R | index_fill(a,0,i,v)
2 | a=4x3:R i=2:R:int64:index4 v=():P(*) | index_fill(a,0,i,v)
"""

# keepdim: the reduced dim stays before the sharded dim
KEPT = """
2 | a=3x5:S(1):float32:small | sum(a,0,keepdim=True) mean(a,0,keepdim=True) amax(a,0,keepdim=True) max(a,0,keepdim=True)
2 | a=3x5:S(1):float32:small | min(a,-2,keepdim=True)
2 | a=3x5:S(1) | median(a,0,keepdim=True) kthvalue(a,2,0,keepdim=True) nanmedian(a,-2,keepdim=True)
2 | a=3x5:S(1):float32:small | logsumexp(a,0,keepdim=True)
2 | a=3x5:S(1):float32:small | argmax(a,0,keepdim=True) argmin(a,-2,keepdim=True) var(a,0,keepdim=True) std(a,-2,keepdim=True)
2 | a=3x5:S(1):float32:small | any(a,0,keepdim=True)
2 | a=3x5:S(1):float32:small | all(a,0,keepdim=True) prod(a,0,keepdim=True) linalg.vector_norm(a,2,0,keepdim=True)
2 | a=3x5:S(1):float32:small | aminmax(a,dim=0,keepdim=True)
2 | a=2x3x5:S(2):float32:distinct | kthvalue(a,1,1) median(a,-2) max(a,1) argmax(a,-2) logsumexp(a,(0,1)) sum(a,(0,1)) var(a,(0,-2))
2 | a=2x3x5:S(2):float32:distinct | mean(a,(0,1))
"""

# the sharded dim is a keyword argument
NAMED = """
2 | a=3x4:S(0) b=3x4:S(0) | linalg.cross(a,b,dim=0) cross(a,b,dim=0) cat([a,b],dim=0) stack([a,b],dim=1)
2 | a=5x4:S(0):float32:small | sum(a,dim=0) amax(a,dim=0) argmax(a,dim=0) cumsum(a,dim=0) flip(a,dims=(0,)) roll(a,1,dims=0) std(a,dim=0)
2 | a=5x4:S(0) | nn.functional.softmax(a,dim=0) logsumexp(a,dim=0) topk(a,2,dim=0) sort(a,dim=0,descending=True)
2 | a=5x4:S(0):float32:small | aminmax(a,dim=0)
2 | a=5x4:S(0) | median(a,dim=0) kthvalue(a,2,dim=0) split(a,2,dim=0) select(a,dim=0,index=-1)
2 | a=5x4:S(0):float32:distinct | linalg.vector_norm(a,2,dim=0)
2 | a=5x4:S(0) i=5x4:S(0):int64:index4 | gather(a,dim=0,index=i) index_select(a,dim=0,index=select(i,0,1)) unsqueeze(a,dim=0)
2 | a=5x4:S(0) i=5x4:S(0):int64:index4 | diagonal(a,dim1=1,dim2=0)
"""

# parts of a sharded dim, with and without a step
SLICED = """
2 | a=6x5:S(0) | getitem(a,slice(None,None,2)) getitem(a,slice(1,None,2)) getitem(a,slice(0,-1)) getitem(a,slice(-2,None))
2 | a=6x5:S(0) | getitem(a,slice(0,6,3))
2 | a=5x6:S(1) | getitem(a,(slice(None),slice(None,None,2))) getitem(a,(slice(None),slice(None,-1)))
2 | a=5x6:S(1) | getitem(a,(slice(1,None),slice(2,None)))
2 | a=4x3:R b=6:R | x=getitem(sort(b),0);y=redistribute(x,'S(0)');bucketize(a,y)
2 | a=4x3:R b=6:R | x=getitem(sort(b),0);y=redistribute(a,'S(1)');bucketize(y,x)
2 | a=4x3:P(sum):float32:small b=4x3:P(max):float32:small | stack([a,b]) stack([b,a],-1) add(a,b) maximum(b,a)
"""

# three dims; those behind the dim argument have equal sizes, so that no shape reveals a swap
SOLID = """
2 | a=4x4:S(1) | repeat(a,(1,1,2)) tile(a,(1,2)) repeat(a,(2,1,1)) expand(a,(2,4,4))
2 | a=4x4:S(0) | repeat(a,(1,2,1)) tile(a,(2,1)) repeat(a,(2,1,1)) expand(a,(2,4,4))
2 | a=2x4x4:S(1) b=4x4:R | select_scatter(a,b,0,1) select(a,0,1) unbind(a) stack([a,a]) stack([a,a],1) repeat(a,(2,1,1)) expand(a,(2,2,4,4))
2 | a=2x4x4:S(2) b=4x4:S(0) | select_scatter(a,b,0,1) select(a,0,1) unbind(a) stack([a,a],2) movedim(a,0,1) movedim(a,(0,1),(1,2)) sum(a,0)
2 | a=4x2x4:S(2) b=4x4:S(0) | select_scatter(a,b,1,0) select(a,1,1) unbind(a,1) argmax(a,1) median(a,1) cumsum(a,1) topk(a,1,1)
2 | a=4x2x4:S(2) b=4x4:S(0) | kthvalue(a,1,1)
2 | a=4x4x4:S(1) b=4x4x2:R | slice_scatter(a,b,2,0,2) nn.functional.softmax(a,2) sort(a,0) flip(a,(0,2)) roll(a,1,2) split(a,2,2)
2 | a=4x4x4:S(1) b=4x4x2:R | diagonal(a,0,0,2)
2 | a=4x4x4:S(1) i=3:R:int64:index4 | index_select(a,0,i) index_select(a,2,i) index_fill(a,2,i,5) getitem(a,i)
2 | a=4x4x4:S(1) i=3:R:int64:index4 | getitem(a,(slice(None),slice(None),i))
"""

# NaN, infinities, zeros of both signs, and the limits of a dtype
EDGES = """
2 | a=5x4:S(0):float32:edges | amax(a,0) amin(a,0) max(a) argmax(a,0) sum(a,0) sort(a,0) isnan(a) nn.functional.softmax(a,0) logsumexp(a,0)
2 | a=5x4:S(1):float32:edges b=5x4:R:float32:edges | maximum(a,b) where(gt(a,b),a,b) mul(a,b) add(b,a) nn.functional.relu(a) cumsum(a,1)
2 | a=5x4:S(0):float32:edges | x=amax(a,0);mul(x,2) x=sum(a,0);nn.functional.relu(x) x=isnan(a);sum(x,0) linalg.vector_norm(a,inf)
2 | a=5x4:S(0):int64:edges | amax(a,0) argmin(a,0) sum(a,0) sort(a,0) gt(a,0)
2 | a=5x4:S(0):float64:wide b=5x4:P(sum):float64:wide | sum(a,0) add(a,b) sub(b,a) x=sum(a);neg(x) x=add(b,b);redistribute(x,'R')
"""

# the same under a maximum or minimum; a reduction over ranks must not lose a NaN
EXTREMES = """
2 | a=5x4:S(1):float32:edges | amax(a,1) amin(a,1) amin(a,0)
3 | a=7x4:S(0):float64:edges | amin(a,0) min(a)
2x2 | a=6x4:S(0),S(1):float32:edges | linalg.vector_norm(a,inf)
"""

# float8 values between two casts
E4, E5 = "torch.float8_e4m3fn", "torch.float8_e5m2"
RARE = f"""
2 | a=4x3:S(0):float32:small | x=to(a,{E4});to(x,torch.float32) x=to(a,{E5});y=t(x);to(y,torch.float32)
3 | a=5x6:S(0):float32:small | x=to(a,{E5});y=narrow(x,1,2,3);to(y,torch.bfloat16)
2 | a=4x6:S(1):float32:small | x=to(a,{E4});y=unsqueeze(x,0);to(y,torch.float32) x=to(a,{E4});y=select(x,0,1);to(y,torch.float64)
2 | a=4x3:P(*):float32:small | x=to(a,{E4});to(x,torch.float32)
2 | a=4x3:S(0):float32:small b=4x3:R:float32:small | x=to(a,{E4});y=to(b,{E4});z=eq(x,y);to(z,torch.int64)
2x2 | a=4x6:S(1),S(0):float32:small | x=to(a,{E5});y=transpose(x,0,1);to(y,torch.float32) x=to(a,{E4});y=clone(x);to(y,torch.float32)
"""

# dims between or behind others, and faults that only tensors of more dims show
BETWEEN = """
2 | a=4x4x4:S(1) b=4x4:R | diagonal_scatter(a,b,0,0,2)
2 | a=2x4x3x4:R i=4:S(0):int64:index4 | getitem(a,(slice(None),i,slice(None),i)) getitem(a,(slice(None),i,i))
2 | a=4x4x2x4:S(0) i=4:R:int64:index4 b=4x4x2:R | setitem(a,(slice(None),i,slice(None),i),b)
2 | w=4x6:S(1) i=():R:int64:index4 | nn.functional.embedding(i,w)
2 | w=4x6:S(1) i=2x3:R:int64:index4 | nn.functional.embedding(i,w)
2 | a=5x4:S(0) | argmax(a,keepdim=True) argmin(a,keepdim=True)
2x2 | a=4x4x4:R,S(2) | select(a,0,1) unbind(a,1) stack([a,a]) sum(a,0) amax(a,1) median(a,0)
2x2 | a=4x4x4:S(1),S(2) | select(a,0,1) unbind(a) stack([a,a]) mean(a,0) argmin(a,0) movedim(a,2,0)
2 | a=3x5x2x8:_S(3,2) i=3x2x8:R:int64:index5 | nn.functional.nll_loss(a,i) nn.functional.cross_entropy(a,i,reduction='sum')
"""

# comparisons of sizes: with equal numbers of dims, and with sizes that differ in the local tensors only
SIZES = """
2 | a=4x3:S(0) b=4x2:S(0) | is_same_size(a,b) is_same_size(a,a)
2 | a=3x4:S(0) b=3x4:S(1) | is_same_size(a,b) is_same_size(a,t(b))
"""

# uneven strided shards
LOOSE = """
2 | a=6x4:_S(0,2):float32:small | mean(a,0) mean(a) var(a,0) amax(a,0) linalg.vector_norm(a,2,0) cumsum(a,0) sort(a,0) narrow(a,0,1,4)
2 | a=6x4:_S(0,2):float32:small | select(a,0,3) split(a,2) nn.functional.pad(a,(0,0,1,1)) cat([a,a]) stack([a,a]) repeat(a,(2,1)) a.add_(1)
2 | a=6x4:_S(0,2):float32:small | nn.functional.layer_norm(a,(6,4)) x=redistribute(a,'S(0)');mean(x,0) roll(a,1,0) mm(t(a),a)
2 | a=5x6:_S(1,2):float32:small | mean(a,1,keepdim=True) mean(a,(0,1)) nn.functional.softmax(a,-1) view(a,(5,2,3)) sum(a,0)
3 | a=9x2:_S(0,2):float32:small | mean(a,0) neg(a)
"""

# in-place squeezes, after which shards are on other dims
SQUEEZED = """
2 | a=1x4:S(1) | a.squeeze_(0) a.squeeze_() a.squeeze_(0);mul(a,2)
2 | a=2x1x4:S(2) | a.squeeze_(1) a.squeeze_((0,1)) a.squeeze_(-2);sum(a,0)
2x2 | a=4x1x6:S(0),S(2) | a.squeeze_(1);t(a)
"""

# dims that a view merged and another splits at other places, or where two mesh dims shard one of them
REGROUPED = """
2 | a=4x4:S(1) | x=view(a,(16,));view(x,(2,8)) x=view(a,(16,));view(x,(8,2)) x=view(a,(16,));view(x,(2,2,4)) x=view(a,(16,));view(x,(4,2,2))
2 | a=2x8x2:S(1) | x=view(a,(16,2));view(x,(4,4,2)) x=flatten(a,0,1);unflatten(x,0,(2,2,4)) x=view(a,(2,16));view(x,(2,2,8)) view(a,(4,8))
2 | a=2x4x4:S(2) | x=view(a,(2,16));view(x,(2,2,8)) x=view(a,(32,));view(x,(4,8)) x=view(a,(8,4));view(x,(2,16))
2x2 | a=2x8x4:S(1),S(1) | x=view(a,(16,4));view(x,(2,8,4)) x=view(a,(64,));view(x,(2,8,4)) x=view(a,(16,4));mul(x,2)
2x2 | a=2x8x4:S(2),S(1) | x=view(a,(64,));view(x,(2,8,4)) x=view(a,(2,32));view(x,(2,8,4)) x=view(a,(64,));mul(x,2)
2x2 | a=2x8x4:S(1),S(2) | x=view(a,(64,));view(x,(2,8,4)) x=view(a,(2,32));view(x,(2,2,4,4)) x=view(a,(2,32));view(x,(1,16,4))
2x2 | a=4x4x2:S(0),S(1) | x=view(a,(16,2));view(x,(2,8,2)) x=view(a,(16,2));view(x,(4,4,2))
2x2 | a=2x8x3:S(1),S(1):float32:small w=5x3:R,R:float32:small | nn.functional.linear(a,w)
"""

# options and values for which the usual rule is wrong: a pending or sharded operand must be replicated
UNDER_OPTIONS = """
2 | a=5x4:S(0) | histc(a,4,1,1) histc(a,3,-2,-2)
2 | a=5x4:S(0):float32:edges | x=sum(a,0);nansum(x) x=sum(a,0);nansum(x,0) x=sum(a,0);nanmean(x)
2 | a=4x3:S(0) | x=masked_fill(a,gt(a,8),inf);y=amax(x,0);nan_to_num(y,posinf=-7.0)
2 | a=4x3:S(0) | x=masked_fill(a,lt(a,-8),-inf);y=amin(x,0);nan_to_num(y,neginf=99.0)
2 | a=4x3:P(sum):float32:small | aten.linalg__powsum.default(a,2) aten.linalg__powsum.default(a,2,[0])
2 | a=4x3:S(0):float32:small | aten.linalg__powsum.default(a,2) aten.linalg__powsum.default(a,3,[-1],True)
"""

# operands with different numbers of dims, and without a batch dim
UNLIKE_DIMS = """
2 | a=4x3:S(1) b=3:R | equal(a,b) equal(b,a)
2 | a=4x3:S(1) e=0:R | cat([e,a],1) cat([e,a],-1) cat([a,e],0) cat([e,a,a],-2)
2 | a=2x4x3:S(1) e=0:R | cat([e,a],-2) cat([a,e,a],1)
2 | a=2x4x4:R | x=aten.max_pool2d_with_indices.default(a,2);y=redistribute(getitem(x,0),'S(1)');nn.functional.max_unpool2d(y,getitem(x,1),2)
2 | a=2x4x4:R | x=aten.max_pool2d_with_indices.default(a,2);y=redistribute(getitem(x,1),'S(0)');nn.functional.max_unpool2d(getitem(x,0),y,2)
"""

# rows that a lookup gave, whose mask is pending while they are moved, selected, added up, multiplied
LOOKED_UP = """
2 | w=5x4:S(0) i=3x3:R:int64:index5 | x=nn.functional.embedding(i,w);transpose(x,0,1) x=nn.functional.embedding(i,w);permute(x,(2,1,0))
2 | w=5x4:S(0) i=4x3:R:int64:index5 | x=nn.functional.embedding(i,w);select(x,1,-1) x=nn.functional.embedding(i,w);narrow(x,0,1,2)
2 | w=5x4:S(0) i=4x3:R:int64:index5 | x=nn.functional.embedding(i,w);sum(x,1) x=nn.functional.embedding(i,w);mean(x,1)
2 | w=5x4:S(0) i=4x4:R:int64:index5 | x=nn.functional.embedding(i,w);sum(x,0) x=nn.functional.embedding(i,w);getitem(x,(slice(None),0))
2 | w=7x4:S(0) i=4:R:int64:index7 | x=nn.functional.embedding(i,w);t(x) x=nn.functional.embedding(i,w);cat([x,x],1)
2 | w=7x4:S(0) i=4:R:int64:index7 | x=nn.functional.embedding(i,w);flip(x,(0,))
2 | w=7x4:S(0) i=4:R:int64:index7 | x=nn.functional.embedding(i,w);unsqueeze(x,0) x=nn.functional.embedding(i,w);unsqueeze(x,-1)
3 | w=7x4:S(0) i=4:R:int64:index7 | x=nn.functional.embedding(i,w);mul(x,-2) x=nn.functional.embedding(i,w);view(x,(4,2,2))
2 | w=5x4:S(0) i=2x3:R:int64:index5 v=3x4:R | x=nn.functional.embedding(i,w);nn.functional.linear(x,v)
2 | w=5x4:S(0) i=2x3:R:int64:index5 v=3x4:R | x=nn.functional.embedding(i,w);mul(x,v)
2 | a=5x6:S(1) i=5x1:R:int64:index6 | x=gather(a,1,i);squeeze(x,1) x=gather(a,1,i);mean(x) x=gather(a,1,i);mul(x,2)
"""

# ops without a rule of their own that take dims apart and put them together, on shards that are uneven or too small for it
REARRANGED = """
2 | a=2x4x5x3:S(2) | nn.functional.pixel_shuffle(a,2)
2 | a=2x8x4x3:S(3) | nn.functional.pixel_shuffle(a,2) nn.functional.channel_shuffle(a,2)
2 | a=3x8x4x4:S(1) | nn.functional.pixel_shuffle(a,2) nn.functional.channel_shuffle(a,4)
2 | a=2x4x2x3:S(1) | nn.functional.pixel_shuffle(a,2)
2 | a=3x2x6x4:S(2) | nn.functional.pixel_unshuffle(a,2)
3 | a=2x1x8x4:S(2) | nn.functional.pixel_unshuffle(a,2)
2x2 | a=3x8x4x4:S(0),S(2) | nn.functional.pixel_shuffle(a,2) nn.functional.pixel_unshuffle(a,2)
"""

# complex numbers beside tensors
COMPLEX = """
2 | a=4x3:S(0):complex64:small | mul(a,1j) sub(a,2j) div(a,1j) eq(a,1j) ne(a,1j) pow(a,2j) full_like(a,1j) a.fill_(1j)
"""

# what is written has size 1 along the sharded dim
BROADCAST = """
2 | a=4x6:S(1) i=3:R:int64:index4 s=3x1:R | a.index_put_((i,),s) setitem(a,i,s) setitem(a,slice(1,4),s)
2 | a=4x6:S(1) s=4x1:R | a.copy_(s) a.add_(s)
2 | a=6x4:S(0) s=1x4:R | a.copy_(s) a.mul_(s) setitem(a,...,s) slice_scatter(a,s,0,2,3)
"""

# pending values that are rounded, cast to bool, or beside a replica; a plain tensor of one element; memory by columns; indices for some
# columns; images in groups; a flattened dim that two mesh dims cut unlike; repeats that add dims;
# what is true on one rank only
FURTHER = """
2 | a=4x3:P(sum):float32:small b=4x3:R:float32:positive | div(a,b,rounding_mode='floor') div(a,b,rounding_mode='trunc')
2 | a=4x4:P(sum):int64:ties | x=to(a,torch.bool);redistribute(x,'R')
2 | a=4x4:P(max):float32:ties | x=to(a,torch.bool);redistribute(x,'R')
2 | a=4x3:S(0):float32:small b=1:-:float32:small | add(a,b)
2 | a=6x4:S(1) | x=a.new_empty_strided((6,4),(1,6));x.copy_(a);y=t(x);view(y,(24,))
2 | a=3x6:S(1) i=2x3:R:int64:index3 s=2x3:R | scatter_add(a,0,i,s)
2 | a=5x4:S(1) | topk(a,2)
2 | a=2x3:S(0) | squeeze(a,0)
2 | a=4x3:P(max):float32:small b=4x3:P(max):float32:small | logaddexp(a,b)
2 | a=3x3:R:float32:small b=3x2:S(0):float32:small | linalg.solve_triangular(a,b,upper=True,unitriangular=True)
2 | a=4x4x2x3:S(0):float32:small | nn.functional.group_norm(a,2)
2x2 | a=4x6:S(1),S(0) | x=view(a,(24,));redistribute(x,'R,R') x=view(a,(24,));redistribute(x,'S(0),R')
2 | a=4x3:R:float32:small b=4x3:P(*):float32:positive | sub(a,b) add(a,b,alpha=-2) mul(a,b) mul(b,a) div(a,b) fmod(a,b) remainder(a,b)
2 | a=4x3:R:float32:small b=4x3:P(*):float32:small | maximum(a,b) minimum(b,a) copysign(a,b) lerp(a,b,-1) addcmul(b,a,b) gt(a,b) hypot(b,a)
2 | a=4x3:P(sum):float32:small | linalg.svdvals(a)
2 | a=4x3:S(0):float32:small | linalg.pinv(a)
2 | a=4x6:S(1) | repeat(a,(1,1,3)) repeat(a,(2,3,1)) tile(a,(2,1,2))
2 | a=4x3:S(0) | x=gt(a,8);any(x,(0,1)) x=lt(a,8);all(x,(0,1))
2 | a=4x6:S(0):float32:small | fft.fft2(a) fft.rfftn(a) fft.ifftn(a)
2 | a=4x4x6:S(0):float32:small b=4x2x3:R:float32:small | nn.functional.conv_transpose1d(a,b,stride=3)
2 | a=4x3:P(avg):float32:small | amax(a) amin(a,0)
2 | a=3x3:P(avg):float32:positive b=3x2:R:float32:small | linalg.solve_triangular(a,b,upper=True)
2 | a=4x3:P(product):float32:small | fft.fft(a)
2x2 | a=4x4:R,S(0) | repeat(a,(2,1))
"""

# what rules that were rewritten for one mesh dim gave up: fractions that are counted as integers, writes into views of pending products, of
# empty and of strided shards, pools and solves of fewer images than ranks, a split of nothing, integers beside pending integers
REWRITTEN = """
2 | a=4x3:P(sum):float32:unit | cumsum(a,0,dtype=torch.int64) sum(a,0,dtype=torch.int64)
2 | a=4x4:P(product) | x=t(a);x.zero_() x=select(a,0,1);x.zero_() x=narrow(a,0,1,2);x.zero_() x=split(a,2,1);y=getitem(x,0);y.zero_()
2 | a=4x4:P(product) | a.zero_() unbind(a,0)
3 | a=2x4:S(0) | x=split(a,2,1);y=getitem(x,0);y.zero_() x=chunk(a,2,-1);y=getitem(x,1);y.zero_() x=unbind(a,1);y=getitem(x,1);y.zero_()
2 | a=3x4:_S(0,2) | x=t(a);x.zero_() x=split(a,2,1);y=getitem(x,0);y.zero_() x=narrow(a,1,0,2);x.zero_()
2 | a=3x1x2x2:S(1) | nn.functional.max_pool2d(a,2) nn.functional.avg_pool2d(a,2)
3 | a=2x2x2:R:float32:small b=2x2x1:S(0):float32:small | linalg.solve_triangular(a,b,upper=True,unitriangular=True)
2 | a=0x4:R | split(a,2,0)
2 | a=4x4:P(sum):int64:small b=2x4:R:int64:small | slice_scatter(a,b,0,1,3)
2 | a=4x3:P(sum):int64:small b=4x3:P(sum):float32:unit | a.copy_(b)
"""

# dims that are counted from the end, among them those of which torch hands its rules what the caller gave
FROM_THE_END = """
2 | a=4x4:S(1) i=4x4:R:int64:index4 s=4x4:R | scatter(a,-1,i,5) scatter(a,-1,i,s) scatter_add(a,-1,i,s) gather(a,-1,i)
2 | a=4x4:S(1) i=4x4:R:int64:index4 s=4x4:R | take_along_dim(a,i,-1)
2 | a=4x4:S(0) i=4x4:R:int64:index4 s=4x4:R | scatter(a,-2,i,5) scatter(a,-2,i,s) scatter_add(a,-2,i,s) gather(a,-2,i)
2 | a=4x4:S(0) i=4x4:R:int64:index4 s=4x4:R | take_along_dim(a,i,-2)
2 | a=4x4:S(1) i=4:R:int64:index4 s=4x4:R | index_add(a,-1,i,s) index_fill(a,-1,i,5) index_select(a,-1,i) index_copy(a,-1,i,s)
2 | a=4x4:S(0) i=4:R:int64:index4 s=4x4:R | index_add(a,-2,i,s) index_fill(a,-2,i,5) index_select(a,-2,i) index_copy(a,-2,i,s)
2 | a=4x4x4:S(2) b=4x4:S(0) | select_scatter(a,b,-1,1) select_scatter(a,b,-2,1) diagonal(a,0,-1,-2) diagonal(a,0,-3,-2)
2 | a=4x4x4:S(2) b=4x4:S(0) | diagonal(a,0,-3,-1)
2 | a=4x4x4:S(1) b=4x4:S(0) | select_scatter(a,b,-1,1) select_scatter(a,b,-2,1) diagonal(a,0,-1,-2) diagonal(a,0,-3,-1)
2 | a=4x4x4:S(1) b=4x4:S(0) | diagonal_scatter(a,b,0,-2,-1)
2 | a=4x4x4:S(2) b=4x4x2:R | slice_scatter(a,b,-1,0,2) cat([a,b],-1) cat([a,a],-2) stack([a,a],-1) stack([a,a],-2) unsqueeze(a,-1)
2 | a=4x4x4:S(2) b=4x4x2:R | unsqueeze(a,-2)
2 | a=4x3x4:S(2):float32:distinct | cumsum(a,-2) flip(a,(-1,)) roll(a,1,-1) roll(a,1,-2)
2 | a=4x3x4:S(2):float32:distinct | sort(a,-1) sort(a,-2) topk(a,2,-1)
2 | a=4x3x4:S(2):float32:small | amax(a,(-1,-3)) sum(a,(-1,-2)) var(a,(-1,)) std(a,-2) argmax(a,-1) kthvalue(a,2,-1) mode(a,-1)
2 | a=4x3x4:S(2):float32:small | median(a,-2) logsumexp(a,-1)
2 | a=4x3x4:S(2):float32:small | linalg.vector_norm(a,2,-1) aminmax(a,dim=-1) any(a,-1) all(a,-2) prod(a,-1) mean(a,(-1,-2))
2 | a=4x3x4:S(2):float32:small | count_nonzero(a,-1)
2 | a=4x3x4:S(2):float32:small | nn.functional.softmax(a,-1) nn.functional.softmax(a,-2) nn.functional.log_softmax(a,-1)
2 | a=4x3x4:S(2):float32:small | nn.functional.glu(a,-1) unbind(a,-2)
2 | a=4x3x4:S(2) | split(a,2,-1) chunk(a,2,-2) tensor_split(a,2,-1) movedim(a,-1,0) transpose(a,-1,-2) permute(a,(-1,0,-2))
2 | a=4x3x4:S(2) | narrow(a,-1,1,2) select(a,-1,1) select(a,-2,1)
2 | a=4x3x4:S(2) | unflatten(a,-1,(2,2)) flatten(a,-2,-1) flatten(a,-3,-2) expand(a,(2,-1,-1,-1)) rot90(a,1,(-1,-3))
2 | a=4x3x1:S(0) | squeeze(a,-1) squeeze(a,(-1,))
2 | a=4x4x3:S(1):float32:small | nn.functional.layer_norm(a,(3,)) nn.functional.normalize(a,dim=-2) cross(a,a,dim=-1)
2 | a=4x4x3:S(1):float32:small | linalg.cross(a,a,dim=-1)
"""

# pending values that are compared, turned by a negative number, or divided as integers
TURNED = """
2x2 | a=4x3:S(0),P(sum):float32:small | x=redistribute(a,'S(0),R');equal(a,x)
2 | a=4x3:P(sum):float32:small | x=redistribute(a,'R');equal(a,x)
2 | a=4x3:P(max):float32:small b=4x3:P(min):float32:small | _foreach_mul([a,b],-2)
2 | a=4x3:P(sum):int64:positive b=4x3:R:int64:positive | floor_divide(a,b) div(a,b,rounding_mode='trunc')
"""

FORWARD = (
    RARE + EDGES + SCALED + UNLIKE + NESTED + JOINED + STRIDED + SHAPED + OUTSIDE + OWN_RULES + KEPT + NAMED + SLICED + SOLID + EXTREMES
    + BETWEEN + REGROUPED + SIZES + LOOSE + SQUEEZED + UNDER_OPTIONS + UNLIKE_DIMS + LOOKED_UP + REARRANGED + COMPLEX + BROADCAST
    + FURTHER + REWRITTEN + FROM_THE_END + TURNED
)  # fmt: skip


def corner_samples(table: str = FORWARD) -> list[Sample]:
    """The programs of ``table``, one sample each, in order."""
    found = []
    for mesh, tensors, programs, *_ in table_lines(table):
        specs = tuple((name, TensorSpec.parse(text)) for name, _, text in (word.partition("=") for word in tensors.split()))
        found += [Sample(Mesh.parse(mesh), specs, steps) for steps in programs.split()]
    return found


def table_lines(table: str) -> Iterator[list[str]]:
    """The columns of each line; a line with ``P(*)`` once for every reduction."""
    for line in filter(None, table.splitlines()):
        for op in REDUCTIONS if "P(*)" in line else ("",):
            yield [column.strip() for column in line.replace("P(*)", f"P({op})").split("|")]
