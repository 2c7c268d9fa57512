"""Families whose arguments matter as much as their shapes: convolutions, attention, losses, einsum, indexing, ties, promotion, foreach.

These ops try options of ops in other tables; the last part of a name says which.
"""

from __future__ import annotations

from shardlaw.strategies.op_table import read_ops

CONVOLUTIONS = read_ops("""
nn.functional.conv1d.options small light flat refuses-any
    a=p,m,n:::B w=k,m,3:::R n>=5 m>=1 k>=1 p>=3 | nn.functional.conv1d(a,w,dilation=2) nn.functional.conv1d(a,w,stride=2,padding=1)
                                                | nn.functional.conv1d(a,w,padding='same') nn.functional.conv1d(a,w,stride=3,padding=2)
    a=p,2*m,n:::B w=2*k,m,2:::R b=2*k:::R n>=3 m>=1 k>=1 p>=3 | nn.functional.conv1d(a,w,b,groups=2)
    a=p,m,n:::B w=m,1,2:::R n>=3 m>=1 p>=3      | nn.functional.conv1d(a,w,groups={m})
nn.functional.conv2d.options small light flat refuses-any
    a=p,m,n,n:::B w=k,m,2,2:::R n>=3 m>=1 k>=1 p>=3 | nn.functional.conv2d(a,w,stride=(2,1)) nn.functional.conv2d(a,w,padding=(1,0))
                                                    | nn.functional.conv2d(a,w,dilation=2) nn.functional.conv2d(a,w,padding='valid')
    a=p,2*m,n,n:::B w=2*k,m,2,2:::R b=2*k:::R n>=2 m>=1 k>=1 p>=3 | nn.functional.conv2d(a,w,b,groups=2)
# sharded along other dims than the batch, pending, or with sharded weights
nn.functional.conv1d.layouts flat
    a=p,m,n:::B w=k,m,2:::R n>=3 m>=1 k>=1 p>=3 | nn.functional.conv1d(a,w)
    a=p,m,n w=k,m,2 n>=3 m>=1 k>=1 p>=3         | nn.functional.conv1d(a,w)
nn.functional.conv2d.layouts flat
    a=p,m,n,n:::B w=k,m,2,2:::R b=k:::R n>=2 m>=1 k>=1 p>=3 | nn.functional.conv2d(a,w,b)
    a=p,m,n,n w=k,m,2,2 b=k n>=2 m>=1 k>=1 p>=3 | nn.functional.conv2d(a,w,b)
# sharded along the width, where ranks exchange the columns at the edges of their shards
nn.functional.conv1d.widths small light refuses-any
    a=p,m,2*n:::E w=k,m,3:::R n>=4 m>=1 k>=1 p>=4 | nn.functional.conv1d(a,w,padding=1)
    a=p,m,24:::E w=k,m,3:::R m>=1 k>=1 p>=4       | nn.functional.conv1d(a,w,stride=3)
nn.functional.conv2d.widths small light refuses-any
    a=p,m,n,2*n:::E w=k,m,3,3:::R n>=4 m>=1 k>=1 p>=4 | nn.functional.conv2d(a,w,padding=1)
    a=p,m,n,16:::E w=k,m,2,2:::R n>=2 m>=1 k>=1 p>=4  | nn.functional.conv2d(a,w,stride=2)
""")

ATTENTION = read_ops("""
# four dims are left out: DTensor plans their first call for ten seconds, which looks like a hang on a busy machine
nn.functional.scaled_dot_product_attention.math small light inexact no-zeros refuses-any shallow
    a=m,n,k b=m,n,k c=m,n,k m>=1 n>=1 k>=1 | nn.functional.scaled_dot_product_attention(a,b,c)
        | nn.functional.scaled_dot_product_attention(a,b,c,is_causal=True) nn.functional.scaled_dot_product_attention(a,b,c,scale=0.5)
    a=m,n,k b=m,q,k c=m,q,k m>=1 n>=1 k>=1 q>=1 | nn.functional.scaled_dot_product_attention(a,b,c)
    a=m,n,k b=m,n,k c=m,n,k d=n,n m>=1 n>=1 k>=1 | nn.functional.scaled_dot_product_attention(a,b,c,attn_mask=d)
    a=n,k b=n,k c=n,k n>=1 k>=1 | nn.functional.scaled_dot_product_attention(a,b,c)
    a=2*m,n,k b=m,n,k c=m,n,k m>=1 n>=1 k>=1 | nn.functional.scaled_dot_product_attention(a,b,c,enable_gqa=True)
""")

EINSUM = read_ops("""
einsum.several small light no-zeros refuses-any shallow
    a=m,k b=k,n c=n,p | einsum('ij,jk,kl->il',a,b,c)
    a=p,m,k b=p,k,n   | einsum('bij,bjk->bik',a,b) einsum('bij,bjk->ik',a,b) einsum('...ij,...jk->...ik',a,b)
    a=m,m             | einsum('ii->i',a) einsum('ii->',a)
    a=m,n b=m,n       | einsum('ij,ij->',a,b) einsum('ij,ij->i',a,b)
    a=p,m,n b=k,n     | einsum('bmn,kn->bmk',a,b)
tensordot small light no-zeros refuses-any shallow
    a=m,k b=k,n     | tensordot(a,b,1) tensordot(a,b,([1],[0])) tensordot(a,b,([-1],[-2]))
    a=p,m,k b=k,m,n | tensordot(a,b,([1,2],[1,0]))
    a=m,k b=m,k     | tensordot(a,b,2)
    a=m b=n         | tensordot(a,b,0)
""")

INDEXING = read_ops("""
index_put.accumulate small light refuses-any
    a=m,n i=k:int64:index{m} j=k:int64:index{n} s=k m>=1 n>=1 | index_put(a,(i,j),s,True)
    a=m,n i=k:int64:index{m} s=() m>=1   | index_put(a,(i,),s,True)
    a=m,n i=k,2:int64:index{m} s=n m>=1  | index_put(a,(i,),s,True)
index_copy light refuses-any
    a=m,n i=1:int64:index{m} s=1,n m>=1  | index_copy(a,0,i,s) index_copy(a,-2,i,s)
    a=m,n i=1:int64:index{n} s=m,1 n>=1  | index_copy(a,1,i,s) index_copy(a,-1,i,s)
take_along_dim.dims light refuses-any
    a=m,n i=k,n:int64:index{m} m>=1      | take_along_dim(a,i,0) take_along_dim(a,i,-2)
    a=m,n i=m,k:int64:index{n} n>=1      | take_along_dim(a,i,-1)
    a=m,n i=k:int64:index{m*n} m>=1 n>=1 | take_along_dim(a,i)
    a=m,n i=1,n:int64:index{m} m>=1      | take_along_dim(a,i,0)
getitem.broadcast refuses-any
    a=m,n i=k,p:int64:index{m} j=p:int64:index{n} m>=1 n>=1 | getitem(a,(i,j))
    a=m,n i=k,1:int64:index{m} j=p:int64:index{n} m>=1 n>=1 | getitem(a,(i,j))
    a=m,n,q i=k,p:int64:index{m} n>=1 m>=1                  | getitem(a,(i,)) getitem(a,(i,0))
index_fill.tensor light refuses-any
    a=m,n i=k:int64:index{m} s=() m>=1   | index_fill(a,0,i,s) index_fill(a,-2,i,s)
roll.wrapped light refuses-any
    a=m,n           | roll(a,5,0) roll(a,-7,-1) roll(a,(1,-2),(-1,-2)) roll(a,0,0) roll(a,-3)
    a=m,n,p         | roll(a,(1,1),(0,2)) roll(a,2,-2)
triangles light refuses-any
    a=m,n           | triu(a,-1) triu(a,2) tril(a,-2) tril(a,2)
    a=m,n,p         | triu(a,1) tril(a,-1) diagonal(a,1,1,2) diagonal(a,-1,0,1)
scatter.dims small light refuses-any
    a=m,n i=1,n:int64:index{m} s=1,n m>=1 | scatter(a,0,i,s) scatter(a,-2,i,s)
    a=m,n i=k,n:int64:index{m} s=k,n m>=1 | scatter_add(a,-2,i,s)
# an index may be shorter than what it reads or writes, along any dim; and a source longer than its index
gather.shorter refuses-any
    a=m,2*n i=k,n:int64:index{m} m>=1   | gather(a,0,i)
    a=2*m,n i=m,k:int64:index{n} n>=1   | gather(a,1,i) gather(a,-1,i)
scatter.shorter small refuses-any
    a=2*m,n i=m,1:int64:index{n} s=m,1 n>=1   | scatter(a,1,i,s) scatter_add(a,1,i,s)
    a=2*m,n i=m,1:int64:index{n} n>=1         | scatter(a,1,i,5)
scatter.longer small refuses-any
    a=m,n i=m,1:int64:index{n} s=2*m,1 n>=1   | scatter(a,1,i,s) scatter_add(a,-1,i,s)
    a=m,n i=1,n:int64:index{m} s=2,2*n m>=1   | scatter(a,0,i,s) scatter_add(a,-2,i,s)
index_put.between small refuses-any
    a=m,n,p i=k:int64:index{m} j=k:int64:index{p} s=k,n m>=1 p>=1 | aten.index_put.default(a,[i,None,j],s,True)
    a=m,n,p i=k:int64:index{m} j=k:int64:index{n} s=k,p m>=1 n>=1 | index_put(a,(i,j),s,True)
    a=m,n,p i=k,2:int64:index{n} s=m,k,2,p n>=1 | aten.index_put.default(a,[None,i],s,True)
    a=m,n,p i=k,2:int64:index{m} s=p m>=1       | index_put(a,(i,),s,True)
    a=m,n,p i=k:int64:index{n} j=k:int64:index{p} s=m,1 n>=1 p>=1 | aten.index_put.default(a,[None,i,j],s,True)
index_put.masks refuses-any
    a=m,n c=m:bool s=n      | index_put(a,(c,),s)
    a=m,n c=m,n:bool s=()   | index_put(a,(c,),s)
    a=m,n,p c=m,n:bool s=p  | index_put(a,(c,),s)
""")

TIES = read_ops("""
sort.ties ties light
    a=m,n | getitem(sort(a,0),0) getitem(sort(a,-1,descending=True),0)
    a=m,n | sort(a,dim=-2,stable=True) sort(a,dim=1,descending=True,stable=True)
topk.ties ties light
    a=m,n m>=3 n>=3 | getitem(topk(a,2,0),0) getitem(topk(a,3,-1,largest=False),0) getitem(topk(a,1,-2),0)
kthvalue.ties ties light
    a=m,n m>=3 n>=3 | getitem(kthvalue(a,2,0),0) getitem(kthvalue(a,3,-1,keepdim=True),0)
median.ties ties light refuses-any
    a=m,n m>=1 n>=1 | median(a) getitem(median(a,0),0) getitem(median(a,-1,keepdim=True),0)
cummax.ties ties light refuses-any
    a=m,n | getitem(cummax(a,0),0) getitem(cummin(a,-1),0)
""")

STATE = read_ops("""
nn.functional.batch_norm.training inexact light refuses-any
    a=m,n,p u=n:::W v=n::positive:W w=n b=n m>=2 p>=2 n>=3 | nn.functional.batch_norm(a,u,v,w,b,True)
    a=m,n u=n:::R v=n::positive:R m>=3 n>=3                | nn.functional.batch_norm(a,u,v,None,None,True,0.5)
nn.functional.instance_norm inexact light refuses-any
    a=m,n,p w=n b=n m>=2 p>=2 n>=3 | nn.functional.instance_norm(a,None,None,w,b)
    a=m,n,p u=n:::R v=n::positive:R m>=2 p>=2 n>=3 | nn.functional.instance_norm(a,u,v)
""")

LOSSES = read_ops("""
nn.functional.cross_entropy.options small inexact light refuses-any
    a=m,n i=m:int64:index{n} m>=1 n>=2 | nn.functional.cross_entropy(a,i,label_smoothing=0.5,reduction='sum')
        | nn.functional.cross_entropy(a,i,ignore_index=1,reduction='sum') nn.functional.cross_entropy(a,i,ignore_index=0,reduction='none')
        | nn.functional.cross_entropy(a,i,label_smoothing=0.25,reduction='none') nn.functional.cross_entropy(a,i,label_smoothing=0.5)
    a=m,n i=m:int64:index{n} w=n::positive m>=1 n>=2 | nn.functional.cross_entropy(a,i,w,reduction='none',label_smoothing=0.5)
        | nn.functional.cross_entropy(a,i,w,reduction='sum',ignore_index=1)
    a=m,n b=m,n::unit m>=1 n>=2 | nn.functional.cross_entropy(a,b,reduction='sum') nn.functional.cross_entropy(a,b,reduction='none')
    a=m,n,p i=m,p:int64:index{n} m>=1 n>=2 p>=1 | nn.functional.cross_entropy(a,i,reduction='sum')
        | nn.functional.cross_entropy(a,i,reduction='none')
nn.functional.nll_loss.options inexact light refuses-any
    a=m,n,p i=m,p:int64:index{n} m>=1 n>=2 p>=1 | nn.functional.nll_loss(a,i,reduction='sum') nn.functional.nll_loss(a,i,reduction='none')
    a=m,n i=m:int64:index{n} w=n::positive m>=1 n>=2 | nn.functional.nll_loss(a,i,w,ignore_index=1,reduction='sum')
        | nn.functional.nll_loss(a,i,w,ignore_index=0,reduction='none')
    a=n i=():int64:index{n} n>=2 | nn.functional.nll_loss(a,i)
nn.functional.nll_loss.ignored small inexact light refuses-any
    a=m,n i=m:int64:index{n} m>=1 n>=2 | nn.functional.nll_loss(a,i,ignore_index=1) nn.functional.cross_entropy(a,i,ignore_index=1)
    a=m,n,p i=m,p:int64:index{n} m>=1 n>=2 p>=1 | nn.functional.nll_loss(a,i,ignore_index=0)
nn.functional.nll_loss.weights inexact refuses-any
    a=m,n i=m:int64:index{n} w=n::positive m>=1 n>=2 | nn.functional.nll_loss(a,i,w,reduction='sum')
        | nn.functional.cross_entropy(a,i,w,reduction='sum') nn.functional.nll_loss(a,i,w,reduction='none')
""")

OPERANDS = read_ops("""
# a plain 0-d tensor of each dtype beside a sharded one
operand.dtypes small light refuses-any float32,int64,bool
    a=m,n | add(a,tensor(2,dtype=torch.int64)) add(a,tensor(0.5,dtype=torch.float64)) mul(a,tensor(2,dtype=torch.int32))
          | add(a,tensor(True)) mul(a,tensor(0.5,dtype=torch.bfloat16)) eq(a,tensor(1.0,dtype=torch.float64))
          | add(tensor(3,dtype=torch.uint8),a)
          | where(gt(a,0),a,tensor(0.5,dtype=torch.float64)) maximum(a,tensor(1,dtype=torch.int64))
# a sharded or replicated 0-d tensor of each dtype beside one with dims; nothing is pending beside bfloat16, which may be split into
# shares that it does not hold
operand.0-d small light refuses-any
    a=m,n b=():int64:small    | add(a,b) mul(b,a) eq(a,b) where(gt(a,0),a,b)
    a=m,n b=():float64:small  | add(a,b) sub(b,a) maximum(a,b)
    a=m,n:int64 b=():float32  | add(a,b) mul(a,b) lt(a,b)
    a=m,n:int32 b=():int64    | add(a,b) mul(a,b)
    a=m,n:bool b=():int64     | add(a,b) mul(a,b)
    a=m,n:bfloat16::W b=():float32::W | add(a,b) mul(a,b)
    a=m,n:float32 b=():bool   | add(a,b) mul(a,b)
promotion.pairs small light refuses-any
    a=m,n:int32 b=m,n:int64       | add(a,b) mul(a,b) eq(a,b)
    a=m,n:uint8 b=m,n:int32       | add(a,b) mul(a,b)
    a=m,n:bfloat16::W b=m,n:float32::W | add(a,b) mul(a,b)
    a=m,n:float32 b=n:float64     | add(a,b) mul(a,b) maximum(a,b)
    a=m,n:bool b=n:float32        | add(a,b) mul(a,b)
    a=m,n:int64::W b=m,1:bfloat16::W | add(a,b) mul(a,b)
    a=m,n:int64 b=m,n:float32     | stack([a,b]) where(gt(b,0),a,b) lerp(b,add(a,0.0),0.5)
""")

FOREACH = read_ops("""
foreach_maximum light refuses-any
    a=m,n b=k | _foreach_clamp_max([a,b],[a,b]) _foreach_minimum([a,b],[a,b]) _foreach_clamp_min([a,b],0.0) _foreach_maximum([a,b],2.0)
foreach_pow light small refuses-any
    a=m,n b=k | _foreach_pow([a,b],2) _foreach_pow([a,b],[2.0,3.0]) _foreach_neg([a,b])
foreach.lists light small refuses-any
    a=m,n b=m,n c=m,n d=m,n | _foreach_add([a,b],[c,d],alpha=2) _foreach_mul([a,b],[c,d]) _foreach_addcmul([a],[b],[c],2.0)
    a=m,n b=k c=() | _foreach_mul([a,b],c) _foreach_add([a,b],c)
foreach.in-place.lists light small refuses-any
    a=m,n b=m,n c=m,n d=m,n | _foreach_add_([a,b],[c,d]) _foreach_mul_([a,b],[c,d]) _foreach_copy_([a,b],[c,d])
        | _foreach_lerp_([a,b],[c,d],0.5) _foreach_addcmul_([a],[b],[c],2.0)
    a=m,n b=k | _foreach_zero_([a,b]) _foreach_neg_([a,b]) _foreach_clamp_min_([a,b],0.0) _foreach_sub_([a,b],1)
""")

FAMILIES = CONVOLUTIONS + ATTENTION + EINSUM + INDEXING + TIES + STATE + LOSSES + OPERANDS + FOREACH
