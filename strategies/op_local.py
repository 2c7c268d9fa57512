"""Programs that each shard allows on its own, and how their results are placed."""

from __future__ import annotations

from shardlaw.reference.placement import Placements, parse_placements
from shardlaw.strategies.op_corners import corner_samples, table_lines
from shardlaw.strategies.ops import Sample

# mesh | operands | placements of the result | programs
LOCAL = """
2 | a=5x4:S(0) | S(0) | neg(a) exp(a) mul(a,2) pow(a,2) add(a,a) where(gt(a,0),a,2.0) clamp(a,0) to(a,torch.float64) clone(a)
2 | a=5x4:S(0) | S(0) | zeros_like(a) full_like(a,3) new_zeros(a,(5,4)) new_empty(a,(5,4)) fill(a,2.0) masked_fill(a,gt(a,0),1.0)
2 | a=5x4:S(0) b=5x4:S(0) | S(0) | add(a,b) maximum(a,b) atan2(a,b) where(gt(a,b),a,b) addcmul(a,a,b) lerp(a,b,0.5) cat([a,b],1)
2 | a=5x4:S(0) b=5x4:S(0) | S(0) | stack([a,b],1) stack([a,b],-1) hstack([a,b]) nn.functional.mse_loss(a,b,reduction='none')
2 | a=5x4:S(0) b=5x4:S(0) | S(1) | stack([a,b],0)
2 | a=5x4:S(0) b=4:R | S(0) | add(a,b) mul(b,a) cat([a,a,a],-1)
2 | a=5x4:S(1) b=4:S(0) | S(1) | add(a,b) mul(b,a)
2 | a=5x4:S(0) b=5x1:S(0) | S(0) | add(a,b) div(a,b)
2 | a=5x4:S(0) | S(1) | t(a) transpose(a,0,1) permute(a,(1,0)) unsqueeze(a,0) movedim(a,0,1) expand(unsqueeze(a,0),(3,5,4))
2 | a=5x4:S(0) | S(0) | sum(a,1) amax(a,1) mean(a,1) argmax(a,1) logsumexp(a,1) var(a,1) prod(a,1) any(gt(a,0),1) std(a,-1) argmin(a,1)
2 | a=5x4:S(0) | S(0) | linalg.vector_norm(a,2,1) cumsum(a,1) cumprod(a,1) nn.functional.softmax(a,1) nn.functional.log_softmax(a,-1)
2 | a=5x4:S(0) | S(0) | flip(a,(1,)) roll(a,1,1) narrow(a,1,1,2) select(a,1,0) repeat(a,(1,2)) unsqueeze(a,-1)
2 | a=5x4:S(0) | P(sum) | sum(a) sum(a,0) sum(a,(0,1)) histc(a,4,-8,8)
2 | a=4x4:S(0) | P(avg) | mean(a) mean(a,0)
2 | a=5x4:S(0) | P(max) | amax(a) amax(a,0) max(a)
2 | a=5x4:S(0) | P(min) | amin(a) amin(a,0) min(a)
2 | a=5x3:S(0) w=3x4:R | S(0) | mm(a,w) matmul(a,w) nn.functional.linear(a,t(w)) addmm(mm(a,w),a,w)
2 | a=5x3:R w=3x4:S(1) | S(1) | mm(a,w) matmul(a,w) nn.functional.linear(a,t(w))
2 | a=5x4:S(1) w=4x3:S(0) | P(sum) | mm(a,w) matmul(a,w) nn.functional.linear(a,t(w))
2 | a=5x3:P(sum) w=3x4:R | P(sum) | mm(a,w)
2 | a=2x5x3:S(0) b=2x3x4:S(0) | S(0) | bmm(a,b) matmul(a,b) baddbmm(bmm(a,b),a,b)
2 | a=5x4:S(0) b=4:R | S(0) | mv(a,b)
2 | a=4:S(0) b=4:S(0) | P(sum) | dot(a,b)
2 | a=4x3x2:S(0) w=2:R b=2:R | S(0) | nn.functional.layer_norm(a,(2,),w,b) nn.functional.rms_norm(a,(2,),w)
2 | w=4x3:R i=5:S(0):int64:index4 | S(0) | nn.functional.embedding(i,w)
2 | w=4x6:S(1) i=5:R:int64:index4 | S(1) | nn.functional.embedding(i,w)
2 | a=4x6:S(0) | S(0) | view(a,(4,2,3)) unflatten(a,1,(2,3)) view(a,(24,)) reshape(a,(4,3,2)) flatten(a) view(a,(2,2,6))
2 | a=2x4x6:S(1) | S(0) | select(a,0,1) squeeze(narrow(a,0,0,1),0)
2 | a=5x4:S(0) i=3:R:int64:index4 | S(0) | index_select(a,1,i) getitem(a,(slice(None),i))
2 | a=5x4:S(0) i=5x2:S(0):int64:index4 | S(0) | gather(a,1,i)
2 | a=4x3:S(0) i=4:S(0):int64:index3 | S(0) | nn.functional.cross_entropy(a,i,reduction='none') nn.functional.nll_loss(a,i,reduction='none')
2 | a=4x3:S(0) i=4:S(0):int64:index3 | P(sum) | nn.functional.cross_entropy(a,i,reduction='sum')
2 | a=5x4:P(sum) | P(sum) | mul(a,2) neg(a) div(a,2) t(a) add(a,a) sum(a,0) view(a,(20,)) narrow(a,0,1,2)
2 | a=5x4:S(0) | S(0) | getitem(topk(a,2,1),0) getitem(sort(a,1),1) getitem(max(a,1),0) getitem(var_mean(a,1),1) getitem(unbind(a,1),1)
2 | a=5x4:S(0) | S(0) | getitem(split(a,2,1),0) getitem(chunk(a,2,1),1) getitem(median(a,1),0) getitem(kthvalue(a,2,1),0)
2 | a=5x4:S(0) b=5x2:S(0) c=5:S(0) | S(0) | slice_scatter(a,b,1,1,3) select_scatter(a,c,1,0)
2 | a=5x4:S(0) i=2:R:int64:index4 b=5x2:S(0) | S(0) | index_add(a,1,i,b) index_copy(a,1,i,b) index_fill(a,1,i,2.0)
2 | a=5x4:S(0) b=5x4:S(0) | S(0) | a.add_(1) a.mul_(b) a.copy_(b) a.zero_() a.fill_(2.0)
2 | a=5x4:S(1) w=4x3:R | P(sum) | mm(a,w) matmul(a,w)
2 | a=5x4:R w=4x3:S(0) | P(sum) | mm(a,w)
2 | a=4x4:P(avg) | P(avg) | mul(a,2) add(a,a) neg(a) t(a)
2 | a=5x4:P(max) | P(max) | t(a) view(a,(20,)) narrow(a,0,1,2)
3 | a=2x4:S(0) | S(0) | neg(a) sum(a,1) mul(a,2) nn.functional.softmax(a,1)
2x2 | a=4x6:S(0),S(1) | S(0),S(1) | neg(a) add(a,a) mul(a,2) clone(a) where(gt(a,0),a,a)
2x2 | a=4x6:S(0),S(1) | S(1),S(0) | t(a)
2x2 | a=4x6:S(0),S(1) | P(sum),P(sum) | sum(a)
2x2 | a=4x6:S(0),S(1) | S(0),P(sum) | sum(a,1)
2x2 | a=4x6:S(0),R w=6x4:R,S(1) | S(0),S(1) | mm(a,w)
2x2 | a=4x6:S(0),S(1) w=6x4:R,S(0) | S(0),P(sum) | mm(a,w)
2 | a=2x3x4:S(2):float32:unit | S(2) | bernoulli(a)
"""


def local_samples() -> list[tuple[Sample, Placements]]:
    """Every program of the table, and the placements of its result."""
    return [
        (sample, parse_placements(to))
        for mesh, tensors, to, programs in table_lines(LOCAL)
        for sample in corner_samples(f"{mesh} | {tensors} | {programs}")
    ]
