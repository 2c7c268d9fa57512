"""A table of programs whose gradients random draws would rarely ask for, written as those of :mod:`shardlaw.strategies.op_corners`."""

from __future__ import annotations

from shardlaw.reference.placement import parse_placements
from shardlaw.strategies.op_corners import corner_samples, table_lines
from shardlaw.strategies.op_gradients import Backward

# the last column has the placements of the incoming gradient: means of even batches, ops with backward rules of their own
BACKWARD = """
2 | a=4x3:S(0) i=4:S(0):int64:index3 | nn.functional.nll_loss(a,i) nn.functional.cross_entropy(a,i) | a |
2 | a=4x3:S(0) i=4:R:int64:index3 | nn.functional.nll_loss(a,i,ignore_index=1) nn.functional.cross_entropy(a,i,ignore_index=1) | a | R
2 | a=4x3x2:S(0) i=4x2:S(0):int64:index3 | nn.functional.nll_loss(a,i) nn.functional.cross_entropy(a,i,reduction='none') | a |
2 | a=4x2x5:S(0) w=2x2x3:R b=2:R | nn.functional.conv1d(a,w,b) | a,w,b | R
2 | a=4x2x5:S(0) w=2x2x3:R b=2:R | nn.functional.conv1d(a,w,b,padding=1) | a,w | P(sum)
2 | a=4x2x3x3:S(0) w=3x2x2x2:R | nn.functional.conv2d(a,w) | w | R
2 | a=4x3x2:S(0) w=2:R b=2:R | nn.functional.layer_norm(a,(2,),w,b) nn.functional.rms_norm(a,(2,),w) | a,w | R
2 | a=4x3x2:S(1) w=3x2:R b=3x2:R | nn.functional.layer_norm(a,(3,2),w,b) | a,w,b | S(0)
2 | w=4x3:S(0) i=5:R:int64:index4 | nn.functional.embedding(i,w) | w | S(0)
2 | w=4x3:R i=5:S(0):int64:index4 | nn.functional.embedding(i,w) | w | R
2 | a=2x3x4x4:S(1) | nn.functional.max_pool2d(a,2) nn.functional.avg_pool2d(a,2) nn.functional.interpolate(a,scale_factor=2.0) | a | P(sum)
2 | a=5x4:S(0) | nn.functional.softmax(a,0) nn.functional.log_softmax(a,-1) logsumexp(a,0) cumsum(a,0) sort(a,0) | a | S(0)
2 | a=5x4:S(1) i=3:R:int64:index5 | index_select(a,0,i) getitem(a,i) select(a,0,-1) narrow(a,0,1,3) | a | R
2 | a=6x4:R | narrow(a,0,1,3) getitem(a,slice(1,5)) select(a,1,1) getitem(a,(slice(None),slice(1,3))) | a | S(0)
2 | a=4x4:S(1) i=4:R:int64:index4 | nn.functional.nll_loss(a,i,reduction='sum') nn.functional.nll_loss(a,i) | a |
2x2 | a=6x4:S(0),S(0) | mean(a,0) mean(a) linalg.vector_norm(a,2,1) view(a,(24,)) | a | R,R
2 | w=4x6:R i=2x4:R:int64:index4 | nn.functional.embedding(i,w) | w | S(1)
2 | a=8x3:R | narrow(a,0,2,4) | a | _S(0,2)
2 | a=5x7:S(0) | x=nn.functional.softmax(a,1);y=nn.functional.softmax(a,0);add(x,y) | a | S(0)
2 | a=5x5:S(0) | x=nn.functional.log_softmax(a,0);y=nn.functional.log_softmax(a,1);add(x,y) | a | S(0)
2 | a=5x5:S(0) | x=select(a,1,1);y=select(a,0,1);add(x,y) x=narrow(a,1,1,3);y=narrow(a,0,1,3);u=sum(x,1);v=sum(y,0);add(u,v) | a | R
2 | a=5x5:S(0) | x=select(a,1,1);y=select(a,0,1);add(x,y) | a | S(0)
2 | a=5x5:S(0) | x=cumsum(a,1);y=cumsum(a,0);add(x,y) x=amax(a,1);y=amax(a,0);add(x,y) x=logsumexp(a,1);y=logsumexp(a,0);add(x,y) | a |
2 | w=4x3:R v=6x3:R i=5:S(0):int64:index4 | x=nn.functional.embedding(i,w);y=nn.functional.embedding(i,v);add(x,y) | w,v | S(0)
2 | a=2x3x4:S(1) | nn.functional.interpolate(a,size=6,mode='linear') nn.functional.interpolate(a,size=6) | a | S(0)
2 | a=2x3x4:S(1) | nn.functional.interpolate(a,size=6,mode='nearest-exact') | a |
2 | a=2x3x4x4:S(1) | nn.functional.interpolate(a,size=6,mode='bilinear') nn.functional.interpolate(a,size=6,mode='bicubic') | a |
2 | a=2x3x4x4:S(0) | nn.functional.interpolate(a,size=6,mode='nearest-exact') | a | R
2 | a=2x3x4x4:S(1) | nn.functional.interpolate(a,size=3,mode='bilinear',antialias=True) | a |
2 | a=2x3x4x4:S(0) | nn.functional.interpolate(a,size=3,mode='bicubic',antialias=True) | a |
2 | a=2x3x2x2x2:S(1) | nn.functional.interpolate(a,size=3,mode='trilinear') nn.functional.interpolate(a,size=3) | a |
2 | a=2x3x2x2x2:S(0) | nn.functional.interpolate(a,size=3,mode='nearest-exact') | a |
2 | w=4x3:R i=6:S(0):int64:index4 | nn.functional.embedding(i,w,scale_grad_by_freq=True) | w | S(0)
2 | w=4x3:R i=2x4:S(1):int64:index4 | nn.functional.embedding(i,w,scale_grad_by_freq=True,padding_idx=1) | w | S(1)
2 | w=4x3:S(0) i=6:R:int64:index4 | nn.functional.embedding(i,w,scale_grad_by_freq=True) | w | R
2 | a=3x4x4:S(1) | nn.functional.adaptive_avg_pool2d(a,(2,2)) nn.functional.max_pool2d(a,2) | a | S(1)
2 | w=5x4:S(0) i=3:R:int64:index5 v=2x4:R:float32:small | x=nn.functional.embedding(i,w);nn.functional.linear(x,v) | w,v | R
2 | w=5x4:S(0) i=3:R:int64:index5 v=2x4:R:float32:small | x=nn.functional.embedding(i,w);nn.functional.linear(x,v) | w | R
2 | w=5x4:S(0) i=3x3:R:int64:index5 | x=nn.functional.embedding(i,w);y=redistribute(x,'R');transpose(y,0,1) | w | R
2 | a=2x8x4x4:S(2) | nn.functional.pixel_shuffle(a,2) nn.functional.pixel_unshuffle(a,2) nn.functional.channel_shuffle(a,2) | a |
2 | a=4x3:S(0):float32:positive b=4x3:S(0):float32:small | polar(a,b) complex(a,b) | a,b | R
2 | a=5x4:S(1) | nn.functional.softmax(a,-1) nn.functional.log_softmax(a,-1) | a | S(1)
2 | a=1x2x4x4:S(2) | nn.functional.adaptive_avg_pool2d(a,3) | a | S(2)
2 | a=1x4x3x3:S(1) b=1x2x2x2:R | x=div(b,8);nn.functional.grid_sample(a,x,align_corners=False) | a,b | S(1)
2 | a=4x3:S(0) w=3:R b=3:R | nn.functional.layer_norm(a,(3,),w,b) | a,b | S(0)
2x2 | a=2x3x4x4:R,R w=2x3x2x2:R,R b=2:R,R | nn.functional.conv2d(a,w,None,2) nn.functional.conv2d(a,w,b,2) | a,w |
2x2 | a=4x3x4x4:S(0),R w=2x3x2x2:R,R b=2:R,R | nn.functional.conv2d(a,w,b,padding=1) | w,b |
2 | w=4x3:R i=2:R:int64:index4 | nn.functional.embedding(i,w) | w | P(avg)
2 | a=4x3:S(0):float32:small i=4:S(0):int64:index3 w=3:R:float32:positive | nn.functional.nll_loss(a,i,weight=w) | a |
2 | a=4x3:R i=2:R:int64:index4 s=3:R:float32:small | index_put(a,(i,),s) | a,s |
"""


def corner_gradients(table: str = BACKWARD) -> list[Backward]:
    """The programs of ``table``, with the leaves whose gradients are compared, and the placements of the incoming gradient."""
    return [
        Backward(sample, tuple(wrt.split(",")), parse_placements(arrives) if arrives else None)
        for mesh, tensors, programs, wrt, arrives in table_lines(table)
        for sample in corner_samples(f"{mesh} | {tensors} | {programs}")
    ]
