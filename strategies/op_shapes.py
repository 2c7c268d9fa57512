"""Ops that move elements: views, slices, indexing, joining and splitting, and those that make new tensors."""

from __future__ import annotations

from strategies.ops import ANY, NUMBERS, Op, variants

VIEWS = (
    Op("view", variants("a=m,n", "view(a,({m*n},))", "view(a,({m},1,{n}))", "view(a,({m},{n}))", "view(a,(-1,{n}))")
       + variants("a=2*m,n", "view(a,(2,{m},{n}))", "view(a,({m},2,{n}))") + variants("a=m,n,p", "view(a,({m*n},{p}))", "view(a,({m},{n*p}))")
       + variants("a=m", "view(a,(1,{m}))", "view(a,({m},1))"), refuses="any"),
    Op("reshape", variants("a=m,n", "reshape(a,({m*n},))", "reshape(a,({n},{m}))", "reshape(a,({m},1,{n}))", "reshape(a,(-1,))")
       + variants("a=2*m,3*n", "reshape(a,(2,{m},3,{n}))", "reshape(a,({m},{2*3*n}))") + variants("a=m,n,p", "reshape(a,({m},{n*p}))"), refuses="any", zeros=False),
    Op("flatten", variants("a=m,n", "flatten(a)") + variants("a=m,n,p", "flatten(a,0,1)", "flatten(a,1)", "flatten(a,-2,-1)") + variants("a=()", "flatten(a)"),
       refuses="any", zeros=False),
    Op("unflatten", variants("a=2*m,n", "unflatten(a,0,(2,{m}))", "unflatten(a,0,({m},2))", "unflatten(a,-2,(2,-1))")
       + variants("a=m,2*n", "unflatten(a,-1,(2,{n}))", "unflatten(a,1,({n},2))"), refuses="any", zeros=False),
    Op("permute", variants("a=m,n,p", "permute(a,(2,0,1))", "permute(a,(0,2,1))", "permute(a,(-1,-2,-3))") + variants("a=m,n", "permute(a,(1,0))")),
    Op("transpose", variants("a=m,n", "transpose(a,0,1)", "transpose(a,0,-1)") + variants("a=m,n,p", "transpose(a,0,-1)", "transpose(a,-2,-1)",
                                                                                           "transpose(a,1,0)")),
    Op("t", variants("a=m,n", "t(a)", "a.T", "a.mT") + variants("a=m", "t(a)")),
    Op("movedim", variants("a=m,n,p", "movedim(a,0,-1)", "movedim(a,(0,1),(2,0))", "movedim(a,-1,0)")),
    Op("squeeze", variants("a=m,1,n", "squeeze(a)", "squeeze(a,1)", "squeeze(a,-2)", "squeeze(a,0)", "squeeze(a,(1,))")
       + variants("a=1,m", "squeeze(a,0)", "squeeze(a,-2)", "squeeze(a)") + variants("a=m,1", "squeeze(a,-1)"), refuses="any", zeros=False),
    Op("unsqueeze", variants("a=m,n", "unsqueeze(a,0)", "unsqueeze(a,1)", "unsqueeze(a,2)", "unsqueeze(a,-1)", "unsqueeze(a,-2)") + variants("a=()", "unsqueeze(a,0)")),
    Op("expand", variants("a=m,1", "expand(a,({m},3))", "expand(a,(2,{m},3))", "expand(a,(-1,2))") + variants("a=1,n", "expand(a,(4,{n}))")
       + variants("a=m,n", "expand(a,(2,{m},{n}))") + variants("a=m,1 b=m,n", "expand_as(a,b)") + variants("a=()", "expand(a,(3,))"), refuses="any", zeros=False),
    Op("broadcast_to", variants("a=n", "broadcast_to(a,(3,{n}))") + variants("a=m,1", "broadcast_to(a,({m},4))")),
    Op("view_as_complex", variants("a=m,2", "view_as_real(view_as_complex(a))"), refuses="any"),
    Op("contiguous", variants("a=m,n", "t(a).contiguous()", "a.contiguous()")),
    Op("diagonal", variants("a=m,n", "diagonal(a)", "diagonal(a,1)", "diagonal(a,-1)") + variants("a=m,n,p", "diagonal(a,0,-2,-1)", "diagonal(a,0,0,2)")),
)  # fmt: skip

SLICES = (
    Op("select", variants("a=m,n", "select(a,0,0)", "select(a,1,-1)", "select(a,-1,0)", "select(a,-2,-1)", least={"m": 1, "n": 1})
       + variants("a=m,n,p", "select(a,1,0)", least={"n": 1})),
    Op("narrow", variants("a=m,n", "narrow(a,0,1,2)", "narrow(a,-1,0,2)", "narrow(a,1,{n-2},2)", "narrow(a,0,0,{m})", least={"m": 3, "n": 2})),
    Op("getitem", variants("a=m,n", "getitem(a,slice(0,2))", "getitem(a,slice(1,None))", "getitem(a,(slice(None),slice(0,2)))",
                           "getitem(a,(slice(None),slice(None,None,2)))", "getitem(a,slice(-2,None))", "getitem(a,0)", "getitem(a,(slice(None),-1))",
                           "getitem(a,(None,slice(None)))", "getitem(a,(...,1))", "getitem(a,slice(0,0))", "getitem(a,slice(0,100))",
                           "getitem(a,(slice(1,3),slice(1,2)))", least={"m": 2, "n": 2})),
    Op("getitem.tensor", variants("a=m,n i=k:int64:index{m}", "getitem(a,i)", "getitem(a,(i,slice(None)))", least={"m": 1})
       + variants("a=m,n i=k:int64:index{n}", "getitem(a,(slice(None),i))", "getitem(a,(slice(0,1),i))", least={"n": 1, "m": 1})
       + variants("a=m,n i=k:int64:index{m} j=k:int64:index{n}", "getitem(a,(i,j))", least={"m": 1, "n": 1})
       + variants("a=m,n,p i=k:int64:index{m} j=k:int64:index{p}", "getitem(a,(i,slice(None),j))", least={"m": 1, "p": 1})
       + variants("a=m,n,p i=k:int64:index{n}", "getitem(a,(slice(None),i))", "getitem(a,(slice(None),i,slice(None)))", least={"n": 1})
       + variants("a=m,n,p,q i=k:int64:index{n} j=k:int64:index{q}", "getitem(a,(slice(None),i,slice(None),j))", least={"n": 1, "q": 1})
       + variants("a=m,n i=k,2:int64:index{m}", "getitem(a,i)", least={"m": 1})),
    Op("split", variants("a=m,n", "split(a,2)", "split(a,2,1)", "split(a,3,-1)", "split(a,(1,{m-1}),0)", "split(a,({n-2},2),-1)", least={"m": 2, "n": 2})),
    Op("chunk", variants("a=m,n", "chunk(a,2)", "chunk(a,3,1)", "chunk(a,2,-2)", least={"m": 1, "n": 1})),
    Op("tensor_split", variants("a=m,n", "tensor_split(a,2)", "tensor_split(a,(1,3),-1)", least={"m": 1, "n": 1})),
    Op("unbind", variants("a=3,n", "unbind(a)", "unbind(a,-2)") + variants("a=m,2", "unbind(a,1)", "unbind(a,-1)"), refuses="any"),
)  # fmt: skip

INDEXING = (
    Op("gather", variants("a=m,n i=m,k:int64:index{n}", "gather(a,1,i)", "gather(a,-1,i)", least={"n": 1})
       + variants("a=m,n i=k,n:int64:index{m}", "gather(a,0,i)", "gather(a,-2,i)", least={"m": 1})),
    Op("take_along_dim", variants("a=m,n i=m,k:int64:index{n}", "take_along_dim(a,i,1)", least={"n": 1})),
    Op("index_select", variants("a=m,n i=k:int64:index{m}", "index_select(a,0,i)", "index_select(a,-2,i)", least={"m": 1})
       + variants("a=m,n i=k:int64:index{n}", "index_select(a,1,i)", "index_select(a,-1,i)", least={"n": 1})),
    Op("scatter", variants("a=m,n i=m,1:int64:index{n} s=m,1", "scatter(a,1,i,s)", "scatter(a,-1,i,s)", least={"n": 1})
       + variants("a=m,n i=1,n:int64:index{m}", "scatter(a,0,i,7)", "scatter(a,-2,i,7)", least={"m": 1})
       + variants("a=m,n i=m,n:int64:index{n}", "scatter(a,1,i,5)", least={"n": 1})),
    Op("scatter_add", variants("a=m,n i=m,k:int64:index{n} s=m,k", "scatter_add(a,1,i,s)", "scatter_add(a,-1,i,s)", fill="small", least={"n": 1})
       + variants("a=m,n i=k,n:int64:index{m} s=k,n", "scatter_add(a,0,i,s)", fill="small", least={"m": 1})),
    Op("index_add", variants("a=m,n i=k:int64:index{m} s=k,n", "index_add(a,0,i,s)", fill="small", least={"m": 1})),
    Op("index_fill", variants("a=m,n i=k:int64:index{m}", "index_fill(a,0,i,5)", "index_fill(a,-2,i,5)", least={"m": 1})
       + variants("a=m,n i=k:int64:index{n}", "index_fill(a,1,i,5)", "index_fill(a,-1,i,5)", least={"n": 1})),
    Op("index_put", variants("a=m,n i=k:int64:index{m} s=k,n", "index_put(a,(i,),s,True)", fill="small", least={"m": 1})
       + variants("a=m,n i=k:int64:index{m} s=n", "index_put(a,(i,),s)", fill="small", least={"m": 1})
       + variants("a=m,n i=k:int64:index{m} j=k:int64:index{n} s=()", "index_put(a,(i,j),s)", least={"m": 1, "n": 1})),
    Op("index_put.in-place", variants("a=m,n i=k:int64:index{m} s=k,n", "a.index_put_((i,),s,True)", fill="small", least={"m": 1})
       + variants("a=m,n i=k:int64:index{n} s=()", "setitem(a,(slice(None),i),s)", least={"n": 1}), refuses="any"),
    Op("setitem", variants("a=m,n", "setitem(a,(0,1),9)", "setitem(a,slice(1,None),2.5)", least={"m": 2, "n": 2})
       + variants("a=m,n b=n", "setitem(a,0,b)", "setitem(a,slice(0,1),b)", least={"m": 1}), refuses="any"),
    Op("slice.in-place", variants("a=m,n", "b=select(a,0,0);b.add_(1);a", "b=narrow(a,1,0,1);b.mul_(2);a", "b=t(a);b.add_(1);a", "b=view(a,({m},{n}));b.zero_();a",
                                  "b=getitem(a,slice(1,None));b.fill_(3);a", "b=unsqueeze(a,0);b.neg_();a", least={"m": 1, "n": 1}), refuses="any", zeros=False),
    Op("squeeze.in-place", variants("a=m,1,n", "a.squeeze_(1)", "a.squeeze_(-2)", "a.unsqueeze_(0)", "a.transpose_(0,2)") + variants("a=m,n", "a.t_()"), refuses="any", zeros=False),
    Op("select_scatter", variants("a=m,n s=n", "select_scatter(a,s,0,0)", "select_scatter(a,s,-2,-1)", least={"m": 1})
       + variants("a=m,n s=m", "select_scatter(a,s,1,0)", least={"n": 1})),
    Op("slice_scatter", variants("a=m,n s=2,n", "slice_scatter(a,s,0,1,3)", "slice_scatter(a,s,-2,0,2)", least={"m": 3})
       + variants("a=m,n s=m,2", "slice_scatter(a,s,1,0,2)", least={"n": 2})),
    Op("diagonal_scatter", variants("a=m,m,p s=p,m", "diagonal_scatter(a,s)")),
    Op("bucketize", variants("a=m,n b=k::positive", "bucketize(a,getitem(sort(b),0))")),
    Op("nn.functional.embedding", variants("w=m,n i=k:int64:index{m}", "nn.functional.embedding(i,w)", least={"m": 1})
       + variants("w=m,n i=k,2:int64:index{m}", "nn.functional.embedding(i,w)", "nn.functional.embedding(i,w,padding_idx=0)", least={"m": 1})
       + variants("w=m,n i=k:int64:index{m} c=k,n", "add(nn.functional.embedding(i,w),c)", least={"m": 1})),
    Op("nn.functional.one_hot", variants("i=k:int64:index3", "nn.functional.one_hot(i,3)"), refuses="any"),
)  # fmt: skip

JOINS = (
    Op("cat", variants("a=m,n b=k,n", "cat([a,b])", "cat([a,b],-2)", dtypes=NUMBERS) + variants("a=m,n b=m,k", "cat([a,b],1)", "cat([a,b,a],-1)")
       + variants("a=m,n:int64 b=k,n:float32", "cat([a,b])"), pairs=True),
    Op("stack", variants("a=m,n b=m,n", "stack([a,b])", "stack([a,b],1)", "stack([a,b],-1)", "stack([a,b],2)"), pairs=True),
    Op("hstack", variants("a=m,n b=m,k", "hstack([a,b])", "dstack([a,a])") + variants("a=m,n b=k,n", "vstack([a,b])")),
    Op("repeat", variants("a=m,n", "repeat(a,(2,1))", "repeat(a,(1,3))", "repeat(a,(2,1,1))") + variants("a=m", "repeat(a,(2,))")),
    Op("tile", variants("a=m,n", "tile(a,(2,))", "tile(a,(2,1))")),
    Op("flip", variants("a=m,n", "flip(a,(0,))", "flip(a,(-1,))", "flip(a,(0,1))", "flip(a,(-2,))")),
    Op("roll", variants("a=m,n", "roll(a,1,0)", "roll(a,-1,1)", "roll(a,2,-1)", "roll(a,1)", "roll(a,(1,2),(0,1))")),
    Op("tril", variants("a=m,n", "tril(a)", "tril(a,1)", "tril(a,-1)") + variants("a=m,n,p", "tril(a)")),
    Op("triu", variants("a=m,n", "triu(a)", "triu(a,1)") + variants("a=m,n,p", "triu(a,-1)")),
    Op("diag", variants("a=m", "diag(a)", "diag(a,1)") + variants("a=m,n", "diag(a)")),
    Op("diag_embed", variants("a=m,n", "diag_embed(a)", "diag_embed(a,0,0,2)")),
    Op("constant_pad_nd", variants("a=m,n", "constant_pad_nd(a,(1,1))", "constant_pad_nd(a,(0,0,1,2),3)", "constant_pad_nd(a,(-1,0))",
                                   "nn.functional.pad(a,(1,0,0,1),value=2.0)", least={"n": 2})),
    Op("rot90", variants("a=m,n", "rot90(a,1,(0,1))")),
    Op("meshgrid", variants("a=m b=n", "cartesian_prod(a,b)", "kron(a,b)"), refuses="any", zeros=False),
)  # fmt: skip

CREATION = (
    Op("clone", variants("a=m,n", "clone(a)", "add(clone(a),1)", dtypes=ANY)),
    Op("detach", variants("a=m,n", "detach(a)", "aten.alias.default(a)")),
    Op("zeros_like", variants("a=m,n", "zeros_like(a)", "zeros_like(a,dtype=torch.int64)", "add(zeros_like(a),a)")),
    Op("ones_like", variants("a=m,n", "ones_like(a)", "ones_like(a,dtype=torch.bool)", "mul(ones_like(a),a)")),
    Op("full_like", variants("a=m,n", "full_like(a,2.5)", "full_like(a,3,dtype=torch.int64)")),
    Op("new_zeros", variants("a=m,n", "a.new_zeros(({m},{n}))", "a.new_zeros((2,3))", "a.new_ones(({m},{n}))", "a.new_ones((3,))")),
    Op("new_full", variants("a=m,n", "a.new_full(({m},{n}),2)", "a.new_full((4,),2.5)")),
    Op("fill", variants("a=m,n", "fill(a,3)", "fill(a,-1.5)")),
    Op("empty_like", variants("a=m,n", "zero_(empty_like(a))", "fill_(empty_like(a),2)", "copy_(empty_like(a),a)")),
)  # fmt: skip

MOVING = VIEWS + SLICES + INDEXING + JOINS + CREATION
