"""Ops that move elements: views, slices, indexing, joining and splitting, and those that make new tensors."""

from __future__ import annotations

from shardlaw.strategies.op_table import read_ops

VIEWS = read_ops("""
view square refuses-any
    a=m,n   | view(a,({m*n},)) view(a,({m},1,{n})) view(a,({m},{n})) view(a,(-1,{n}))
    a=2*m,n | view(a,(2,{m},{n})) view(a,({m},2,{n}))
    a=m,n,p | view(a,({m*n},{p})) view(a,({m},{n*p}))
    a=m     | view(a,(1,{m})) view(a,({m},1))
reshape square no-zeros refuses-any
    a=m,n     | reshape(a,({m*n},)) reshape(a,({n},{m})) reshape(a,({m},1,{n})) reshape(a,(-1,))
    a=2*m,3*n | reshape(a,(2,{m},3,{n})) reshape(a,({m},{6*n}))
    a=m,n,p   | reshape(a,({m},{n*p}))
flatten square no-zeros refuses-any
    a=m,n   | flatten(a)
    a=m,n,p | flatten(a,0,1) flatten(a,1) flatten(a,-2,-1)
    a=()    | flatten(a)
unflatten square no-zeros refuses-any
    a=2*m,n | unflatten(a,0,(2,{m})) unflatten(a,0,({m},2)) unflatten(a,-2,(2,-1))
    a=m,2*n | unflatten(a,-1,(2,{n})) unflatten(a,1,({n},2))
permute square
    a=m,n,p | permute(a,(2,0,1)) permute(a,(0,2,1)) permute(a,(-1,-2,-3))
    a=m,n   | permute(a,(1,0))
transpose square
    a=m,n   | transpose(a,0,1) transpose(a,0,-1)
    a=m,n,p | transpose(a,0,-1) transpose(a,-2,-1) transpose(a,1,0)
t
    a=m,n   | t(a) a.T a.mT
    a=m     | t(a)
movedim
    a=m,n,p | movedim(a,0,-1) movedim(a,(0,1),(2,0)) movedim(a,-1,0)
squeeze no-zeros refuses-any
    a=m,1,n | squeeze(a) squeeze(a,1) squeeze(a,-2) squeeze(a,0) squeeze(a,(1,)) squeeze(a,(-2,-1))
    a=2,1,n | squeeze(a,(0,1)) squeeze(a)
    a=1,m   | squeeze(a,0) squeeze(a,-2) squeeze(a)
    a=m,1   | squeeze(a,-1)
    a=m,1,n | a.squeeze_(1)
unsqueeze
    a=m,n   | unsqueeze(a,0) unsqueeze(a,1) unsqueeze(a,2) unsqueeze(a,-1) unsqueeze(a,-2)
    a=()    | unsqueeze(a,0)
expand no-zeros refuses-any
    a=m,1   | expand(a,({m},3)) expand(a,(2,{m},3)) expand(a,(-1,2))
    a=1,n   | expand(a,(4,{n}))
    a=m,n   | expand(a,(2,{m},{n}))
    a=m,1 b=m,n | expand_as(a,b)
    a=()    | expand(a,(3,))
broadcast_to
    a=n     | broadcast_to(a,(3,{n})) broadcast_to(a,(2,3,{n}))
    a=m,n   | broadcast_to(a,(2,{m},{n})) broadcast_to(a,({m},{n}))
    a=():::W | broadcast_to(a,(2,3))
    a=m,1   | broadcast_to(a,({m},4))
view_as_complex light refuses-any
    a=m,2   | view_as_real(view_as_complex(a))
view.dtype light small
    a=m,n:::W | view(a,torch.int32) view(a,torch.float32) view(add(a,0),torch.int32)
    a=m,n     | view(a,torch.int32)
contiguous
    a=m,n   | t(a).contiguous() a.contiguous()
diagonal
    a=m,n   | diagonal(a) diagonal(a,1) diagonal(a,-1)
    a=m,n,p | diagonal(a,0,-2,-1) diagonal(a,0,0,2)
view.in-place no-zeros refuses-any
    a=m,n:::W   | b=t(a);b.add_(1);a b=view(a,({m},{n}));b.zero_();a b=unsqueeze(a,0);b.neg_();a b=transpose(a,0,1);b.mul_(2);a
                | b=view(a,({m},1,{n}));b.add_(1);a b=detach(a);b.add_(1);a b=permute(a,(1,0));b.mul_(2);a
    a=m,n:::R m>=2 n>=2 | b=narrow(a,1,0,1);b.mul_(2);a b=getitem(a,slice(1,None));b.add_(1);a
    a=m,n m>=1 n>=1     | b=select(a,0,0);b.add_(1);a
""")

SLICES = read_ops("""
select
    a=m,n m>=1 n>=1 | select(a,0,0) select(a,1,-1) select(a,-1,0) select(a,-2,-1)
    a=m,n,p n>=1    | select(a,1,0)
narrow
    a=m,n m>=3 n>=2 | narrow(a,0,1,2) narrow(a,-1,0,2) narrow(a,1,{n-2},2) narrow(a,0,0,{m})
getitem
    a=m,n m>=2 n>=2 | getitem(a,slice(0,2)) getitem(a,slice(1,None)) getitem(a,(slice(None),slice(0,2)))
                    | getitem(a,(slice(None),slice(None,None,2))) getitem(a,slice(-2,None)) getitem(a,0)
                    | getitem(a,(slice(None),-1)) getitem(a,(None,slice(None))) getitem(a,(...,1)) getitem(a,slice(0,0))
                    | getitem(a,slice(0,100)) getitem(a,(slice(1,3),slice(1,2)))
getitem.tensor
    a=m,n i=k:int64:index{m} m>=1      | getitem(a,i)
    a=m,n,p,q i=k:int64:index{n} j=k:int64:index{q} n>=1 q>=1 | getitem(a,(slice(None),i,slice(None),j))
    a=m,n i=k:int64:index{n} n>=1 m>=1 | getitem(a,(slice(None),i)) getitem(a,(slice(0,1),i))
    a=m,n i=k:int64:index{m} j=k:int64:index{n} m>=1 n>=1   | getitem(a,(i,j))
    a=m,n,p i=k:int64:index{m} j=k:int64:index{p} m>=1 p>=1 | getitem(a,(i,slice(None),j))
    a=m,n,p i=k:int64:index{n} n>=1    | getitem(a,(slice(None),i)) getitem(a,(slice(None),i,slice(None)))
    a=m,n i=k,2:int64:index{m} m>=1    | getitem(a,i)
    a=m,n i=k:int64:index{m} j=2,k:int64:index{n} m>=1 n>=1 k>=1 | getitem(a,(i,j))
split
    a=m,n m>=2 n>=2 | split(a,2) split(a,2,1) split(a,3,-1) split(a,(1,{m-1}),0) split(a,({n-2},2),-1)
chunk
    a=m,n m>=1 n>=1 | chunk(a,2) chunk(a,3,1) chunk(a,2,-2)
tensor_split
    a=m,n m>=1 n>=1 | tensor_split(a,2) tensor_split(a,(1,3),-1)
unbind refuses-any
    a=m,2           | unbind(a,1) unbind(a,-1)
    a=3,n           | unbind(a) unbind(a,-2)
""")

INDEXING = read_ops("""
gather
    a=m,n i=m,k:int64:index{n} n>=1 | gather(a,1,i) gather(a,-1,i)
    a=m,n i=k,n:int64:index{m} m>=1 | gather(a,0,i) gather(a,-2,i)
take_along_dim
    a=m,n i=m,k:int64:index{n} n>=1 | take_along_dim(a,i,1)
index_select
    a=m,n i=k:int64:index{m} m>=1   | index_select(a,0,i) index_select(a,-2,i)
    a=m,n i=k:int64:index{n} n>=1   | index_select(a,1,i) index_select(a,-1,i)
scatter
    a=m,n i=m,1:int64:index{n} s=m,1 n>=1 | scatter(a,1,i,s) scatter(a,-1,i,s)
    a=m,n i=1,n:int64:index{m} m>=1 | scatter(a,0,i,7) scatter(a,-2,i,7)
    a=m,n i=m,n:int64:index{n} n>=1 | scatter(a,1,i,5)
scatter_add small
    a=m,n i=m,k:int64:index{n} s=m,k n>=1 | scatter_add(a,1,i,s) scatter_add(a,-1,i,s)
    a=m,n i=k,n:int64:index{m} s=k,n m>=1 | scatter_add(a,0,i,s)
index_add small
    a=m,n i=k:int64:index{m} s=k,n m>=1 | index_add(a,0,i,s)
index_fill
    a=m,n i=k:int64:index{m} m>=1   | index_fill(a,0,i,5) index_fill(a,-2,i,5)
    a=m,n i=k:int64:index{n} n>=1   | index_fill(a,1,i,5) index_fill(a,-1,i,5)
index_reduce light small refuses-any
    a=m,n i=k:int64:index{m} s=k,n m>=1 | index_reduce(a,0,i,s,'amax')
index_put small
    a=m,n i=k:int64:index{m} s=k,n m>=1 | index_put(a,(i,),s,True)
    a=m,n i=k:int64:index{m} s=n m>=1   | index_put(a,(i,),s)
    a=m,n i=k:int64:index{m} j=k:int64:index{n} s=() m>=1 n>=1 distinct | index_put(a,(i,j),s)
index_put.in-place small refuses-any
    a=m,n i=k:int64:index{n}:R s=() n>=1 distinct | setitem(a,(slice(None),i),s)
    a=m,n i=k:int64:index{m} s=k,n m>=1 | a.index_put_((i,),s,True)
setitem no-zeros refuses-any
    a=m,n b=m,n           | setitem(a,slice(None),b) setitem(a,...,b)
    a=m,n i=k:int64:index{n} s=() n>=1 | setitem(a,(slice(None),i),s)
    a=m,n b=n             | setitem(a,slice(None),b)
    a=m,n:::R b=n m>=2    | setitem(a,slice(0,1),b)
    a=m,n b=n m>=1        | setitem(a,0,b)
select_scatter
    a=m,n s=n m>=1        | select_scatter(a,s,0,0) select_scatter(a,s,-2,-1)
    a=m,n s=m n>=1        | select_scatter(a,s,1,0)
slice_scatter
    a=m,n s=2,n m>=3      | slice_scatter(a,s,0,1,3) slice_scatter(a,s,-2,0,2)
    a=m,n s=m,2 n>=2      | slice_scatter(a,s,1,0,2)
diagonal_scatter
    a=m,m,p s=p,m         | diagonal_scatter(a,s)
bucketize
    a=m,n b=k::positive   | bucketize(a,getitem(sort(b),0))
nn.functional.embedding
    w=m,n i=k:int64:index{m} m>=1       | nn.functional.embedding(i,w)
    w=m,n i=k,2:int64:index{m} m>=1     | nn.functional.embedding(i,w) nn.functional.embedding(i,w,padding_idx=0)
    w=m,n i=k:int64:index{m} c=k,n m>=1 | add(nn.functional.embedding(i,w),c)
nn.functional.one_hot light refuses-any
    i=k:int64:index3      | nn.functional.one_hot(i,3)
""")

JOINS = read_ops("""
cat pairs refuses-pending
    a=m,n b=k,n numbers | cat([a,b]) cat([a,b],-2)
    a=m,n b=m,k         | cat([a,b],1) cat([a,b,a],-1)
    a=m,n:int64 b=k,n:float32 | cat([a,b])
stack pairs refuses-pending
    a=m,n b=m,n         | stack([a,b]) stack([a,b],1) stack([a,b],-1) stack([a,b],2)
hstack refuses-pending
    a=m,n b=m,k         | hstack([a,b]) dstack([a,a])
    a=m,n b=k,n         | vstack([a,b])
repeat
    a=m,n   | repeat(a,(2,1)) repeat(a,(1,3)) repeat(a,(2,1,1))
    a=m     | repeat(a,(2,))
tile
    a=m,n   | tile(a,(2,)) tile(a,(2,1))
flip
    a=m,n   | flip(a,(0,)) flip(a,(-1,)) flip(a,(0,1)) flip(a,(-2,))
roll
    a=m,n   | roll(a,1,0) roll(a,-1,1) roll(a,2,-1) roll(a,1) roll(a,(1,2),(0,1))
tril
    a=m,n   | tril(a) tril(a,1) tril(a,-1)
    a=m,n,p | tril(a)
triu
    a=m,n   | triu(a) triu(a,1)
    a=m,n,p | triu(a,-1)
diag
    a=m     | diag(a) diag(a,1)
    a=m,n   | diag(a)
diag_embed
    a=m,n   | diag_embed(a) diag_embed(a,0,0,2)
constant_pad_nd
    a=m,n n>=2 | constant_pad_nd(a,(1,1)) constant_pad_nd(a,(0,0,1,2),3) constant_pad_nd(a,(-1,0))
               | nn.functional.pad(a,(1,0,0,1),value=2.0)
rot90
    a=m,n   | rot90(a,1,(0,1))
kron light no-zeros refuses-any
    a=m b=n | kron(a,b) cartesian_prod(a,b)
""")

CREATION = read_ops("""
clone any
    a=m,n | clone(a) add(clone(a),1)
detach
    a=m,n | detach(a) aten.alias.default(a)
zeros_like
    a=m,n | zeros_like(a) zeros_like(a,dtype=torch.int64) add(zeros_like(a),a)
ones_like
    a=m,n | ones_like(a) ones_like(a,dtype=torch.bool) mul(ones_like(a),a)
full_like
    a=m,n | full_like(a,2.5) full_like(a,3,dtype=torch.int64)
new_zeros
    a=m,n | a.new_zeros(({m},{n})) a.new_zeros((2,3)) a.new_ones(({m},{n})) a.new_ones((3,))
new_full
    a=m,n | a.new_full(({m},{n}),2) a.new_full((4,),2.5)
fill
    a=m,n | fill(a,3) fill(a,-1.5)
empty_like refuses-pending
    a=m,n     | zero_(empty_like(a)) copy_(empty_like(a),a)
    a=m,n:::W | fill_(empty_like(a),2)
""")

MOVING = VIEWS + SLICES + INDEXING + JOINS + CREATION
