"""Ops that bring elements together: reductions, scans, sorts, softmax and norms, losses, products of matrices."""

from __future__ import annotations

from strategies.ops import ANY, FLOATS, NUMBERS, Op, Variant, variants

FULL = ("{0}(a)",)
BY_DIM = ("{0}(a,0)", "{0}(a,-1)", "{0}(a,1,keepdim=True)")
BY_DIMS = ("{0}(a,(0,1))", "{0}(a,(-1,))", "{0}(a,(0,1),keepdim=True)")


def _reduction(
    name: str,
    *,
    dims: bool = True,
    full: bool = True,
    dtypes: tuple[str, ...] = FLOATS,
    fill: str = "distinct",
    exact: bool = True,
    least: int = 0,
    more: tuple[str, ...] = (),
) -> Op:
    """A reduction of all elements, by one dim (negative, kept), by several, of a 3-D and of a 0-d tensor."""
    calls = (FULL if full else ()) + BY_DIM + (BY_DIMS if dims else ())
    lows = {"m": least, "n": least, "p": least}
    made = variants("a=m,n", *(call.format(name) for call in calls), *more, dtypes=dtypes, fill=fill, least=lows)
    made += variants(
        "a=m,n,p", f"{name}(a,1)", f"{name}(a,-2,keepdim=True)", *([f"{name}(a,(0,2))"] if dims else ()), fill=fill, least=lows
    )
    if full:
        made += variants("a=()", f"{name}(a)", fill=fill)
    return Op(name, made, exact)


def _scan(name: str, fill: str = "small", exact: bool = True, dtypes: tuple[str, ...] = ("float32", "int64")) -> Op:
    return Op(name, variants("a=m,n", *(f"{name}(a,{dim})" for dim in (0, 1, -1, -2)), dtypes=dtypes, fill=fill), exact)


def _norm(calls: tuple[str, ...]) -> tuple[Variant, ...]:
    return variants("a=m,n", *calls, fill="small")


REDUCTIONS = (
    _reduction("sum", dtypes=NUMBERS, more=("sum(a,())", "sum(a,0,dtype=torch.float64)", "sum(a,None)")),
    _reduction("mean", exact=False),
    _reduction("prod", dims=False, fill="ties", dtypes=("float32", "int64")),
    _reduction("amax", least=1, dtypes=NUMBERS),
    _reduction("amin", least=1, dtypes=NUMBERS),
    _reduction("max", dims=False, least=1, dtypes=NUMBERS),
    _reduction("min", dims=False, least=1, dtypes=NUMBERS),
    _reduction("argmax", dims=False, least=1, fill="ties", dtypes=("float32", "int64")),
    _reduction("argmin", dims=False, least=1, fill="ties", dtypes=("float32", "int64")),
    Op("aminmax", variants("a=m,n", "aminmax(a)", "aminmax(a,dim=0)", "aminmax(a,dim=-1,keepdim=True)", least={"m": 1, "n": 1})),
    _reduction("any", dtypes=ANY, fill="ties"),
    _reduction("all", dtypes=ANY, fill="ties"),
    Op("count_nonzero", variants("a=m,n", "count_nonzero(a)", "count_nonzero(a,0)", "count_nonzero(a,(-1,))", fill="ties")),
    _reduction("nansum"),
    _reduction("logsumexp", full=False, fill="small", exact=False),
    Op("var", variants("a=m,n", "var(a)", "var(a,0)", "var(a,-1,keepdim=True)", "var(a,(0,1),correction=0)", "var(a,1,correction=0)",
                       least={"m": 2, "n": 2}), exact=False),
    Op("std", variants("a=m,n", "std(a)", "std(a,0)", "std(a,-1,keepdim=True)", "std(a,1,correction=0)", least={"m": 2, "n": 2}), exact=False),
    Op("var_mean", variants("a=m,n", "var_mean(a)", "var_mean(a,0)", "var_mean(a,-1,correction=0)", least={"m": 2, "n": 2}), exact=False),
    Op("norm", _norm(("norm(a)", "norm(a,1)", "norm(a,inf)", "norm(a,2,0)", "norm(a,2,-1,keepdim=True)")), exact=False),
    Op("linalg.vector_norm", _norm(tuple(
        f"linalg.vector_norm(a,{p}{dim})" for p in ("2", "1", "3", "0.5", "inf", "-inf", "0") for dim in ("", ",0", ",-1,keepdim=True")
    )) + variants("a=m,n,p", "linalg.vector_norm(a,2,(0,2))", fill="small"), exact=False),
    _reduction("median", dims=False, least=1, dtypes=("float32", "int64")),
    Op("mode", variants("a=m,n", "getitem(mode(a,0),0)", "getitem(mode(a,-1,keepdim=True),0)", fill="ties", least={"m": 1, "n": 1})),
    Op("kthvalue", variants("a=m,n", "kthvalue(a,1,0)", "kthvalue(a,2,-1)", "kthvalue(a,1,1,keepdim=True)", "kthvalue(a,1)",
                            least={"m": 2, "n": 2})),
    Op("equal", variants("a=m,n b=m,n", "equal(a,b)", fill="ties") + variants("a=m,n", "equal(a,a)", "equal(a,clone(a))")
       + variants("a=m,n b=n", "equal(a,b)") + variants("a=m,n c=m,n:bool", "equal(a,masked_fill(a,c,99))")),
    Op("item", variants("a=()", "a.item()") + variants("a=1,1", "a.item()") + variants("a=m,n", "sum(a).item()", "amax(a).item()",
                                                                                         least={"m": 1, "n": 1})),
)  # fmt: skip

SCANS = (
    _scan("cumsum"),
    _scan("cumprod", "ties"),
    Op("cummax", variants("a=m,n", "cummax(a,0)", "cummax(a,1)", "cummax(a,-1)", "cummax(a,-2)")),
    Op("cummin", variants("a=m,n", "cummin(a,0)", "cummin(a,-1)")),
    _scan("logcumsumexp", dtypes=("float32", "float64"), exact=False),
)  # fmt: skip

SORTS = (
    Op("sort", variants("a=m,n", "sort(a)", "sort(a,0)", "sort(a,-1,descending=True)", "sort(a,-2)")
       + variants("a=m,n", "sort(a,dim=0,stable=True)", "sort(a,dim=-1,stable=True)", fill="ties") + variants("a=m,n,p", "sort(a,1)")),
    Op("argsort", variants("a=m,n", "argsort(a)", "argsort(a,0)", "argsort(a,-2,descending=True)")),
    Op("topk", variants("a=m,n", "topk(a,2)", "topk(a,2,0)", "topk(a,1,-2)", "topk(a,2,-1,largest=False)", least={"m": 2, "n": 2})),
    Op("msort", variants("a=m,n", "msort(a)")),
)  # fmt: skip

SOFTMAX = (
    *(
        Op(name, variants("a=m,n", f"{name}(a,0)", f"{name}(a,1)", f"{name}(a,-1)", f"{name}(a,-2)", fill="small")
           + variants("a=m,n,p", f"{name}(a,1)", f"{name}(a,-1)", fill="small")
           + variants("a=m,n", f"{name}(a,0,dtype=torch.float64)", fill="small"), exact=False)
        for name in ("nn.functional.softmax", "nn.functional.log_softmax")
    ),
)  # fmt: skip

NORMS = (
    Op("nn.functional.layer_norm", variants("a=m,n w=n b=n", "nn.functional.layer_norm(a,({n},),w,b)", "nn.functional.layer_norm(a,({n},),w)",
                                            "nn.functional.layer_norm(a,({n},),w,None,0.5)", least={"n": 1})
       + variants("a=m,n,p", "nn.functional.layer_norm(a,({p},))", "nn.functional.layer_norm(a,({n},{p}))", least={"n": 1, "p": 1}), exact=False),
    Op("nn.functional.rms_norm", variants("a=m,n w=n", "nn.functional.rms_norm(a,({n},),w)", "nn.functional.rms_norm(a,({n},),w,0.5)",
                                          least={"n": 1})
       + variants("a=m,n,p", "nn.functional.rms_norm(a,({n},{p}))", least={"n": 1, "p": 1}), exact=False, refuses="any"),
    Op("nn.functional.group_norm", variants("a=m,2*n,p w=2*n b=2*n", "nn.functional.group_norm(a,2,w,b)", "nn.functional.group_norm(a,{n},w,b)",
                                            least={"n": 1, "p": 1, "m": 1})
       + variants("a=m,2*n,p", "nn.functional.group_norm(a,2)", least={"n": 1, "p": 1, "m": 1}), exact=False),
    Op("nn.functional.batch_norm", variants("a=m,n,p w=n b=n u=n v=n::positive", "nn.functional.batch_norm(a,u,v,w,b)", least={"m": 1, "p": 1})
       + variants("a=m,n,p w=n b=n", "nn.functional.batch_norm(a,None,None,w,b,True)", least={"m": 2, "p": 2}), exact=False, refuses="any"),
    Op("nn.functional.normalize", variants("a=m,n", "nn.functional.normalize(a)", "nn.functional.normalize(a,dim=0)",
                                           "nn.functional.normalize(a,p=1.0,dim=-1)", fill="positive", least={"m": 1, "n": 1}), exact=False),
)  # fmt: skip

LOSSES = (
    Op("nn.functional.mse_loss", variants("a=m,n b=m,n", *(f"nn.functional.mse_loss(a,b,reduction='{how}')" for how in ("none", "sum", "mean")),
                                          fill="small", least={"m": 1, "n": 1}), exact=False),
    Op("nn.functional.l1_loss", variants("a=m,n b=m,n", *(f"nn.functional.l1_loss(a,b,reduction='{how}')" for how in ("none", "sum", "mean")),
                                         fill="small", least={"m": 1, "n": 1}), exact=False),
    Op("nn.functional.nll_loss", variants("a=m,n i=m:int64:index{n}", *(
        f"nn.functional.nll_loss(a,i,reduction='{how}')" for how in ("none", "sum", "mean")), "nn.functional.nll_loss(a,i,ignore_index=1,reduction='sum')",
        least={"m": 1, "n": 2})
       + variants("a=m,n i=m:int64:index{n} w=n::positive", "nn.functional.nll_loss(a,i,w,reduction='sum')", "nn.functional.nll_loss(a,i,w)",
                  "nn.functional.nll_loss(a,i,w,reduction='none')", least={"m": 1, "n": 2}), exact=False, refuses="any"),
    Op("nn.functional.cross_entropy", variants("a=m,n i=m:int64:index{n}", *(
        f"nn.functional.cross_entropy(a,i,reduction='{how}')" for how in ("none", "sum", "mean")),
        fill="small", least={"m": 1, "n": 2})
       + variants("a=m,n i=m:int64:index{n} w=n::positive", "nn.functional.cross_entropy(a,i,w)", fill="small", least={"m": 1, "n": 2}),
       exact=False, refuses="any"),
    Op("nn.functional.binary_cross_entropy_with_logits", variants(
        "a=m,n b=m,n::unit", "nn.functional.binary_cross_entropy_with_logits(a,b)",
        "nn.functional.binary_cross_entropy_with_logits(a,b,reduction='sum')", fill="small", least={"m": 1, "n": 1}), exact=False),
)  # fmt: skip

MATRICES = (
    Op("mm", variants("a=m,k b=k,n", "mm(a,b)", fill="small", dtypes=("float32", "int64", "bfloat16")) + variants("a=m,n", "mm(a,t(a))", fill="small"),
       pairs=True),
    Op("bmm", variants("a=p,m,k b=p,k,n", "bmm(a,b)", fill="small")),
    Op("matmul", variants("a=m,k b=k,n", "matmul(a,b)", fill="small") + variants("a=k b=k,n", "matmul(a,b)", fill="small")
       + variants("a=m,k b=k", "matmul(a,b)", fill="small") + variants("a=k b=k", "matmul(a,b)", fill="small")
       + variants("a=p,m,k b=k,n", "matmul(a,b)", fill="small") + variants("a=p,m,k b=p,k,n", "matmul(a,b)", fill="small")
       + variants("a=m,k b=p,k,n", "matmul(a,b)", fill="small"), refuses="any", zeros=False),
    Op("addmm", variants("c=m,n a=m,k b=k,n", "addmm(c,a,b)", "addmm(c,a,b,beta=2,alpha=3)", fill="small")
       + variants("c=n a=m,k b=k,n", "addmm(c,a,b)", fill="small") + variants("c=1,n a=m,k b=k,n", "addmm(c,a,b)", fill="small")
       + variants("c=() a=m,k b=k,n", "addmm(c,a,b)", fill="small"), exact=False),
    Op("baddbmm", variants("c=p,m,n a=p,m,k b=p,k,n", "baddbmm(c,a,b)", fill="small") + variants("c=n a=p,m,k b=p,k,n", "baddbmm(c,a,b)", fill="small"), exact=False),
    Op("nn.functional.linear", variants("a=m,k w=n,k b=n", "nn.functional.linear(a,w,b)", fill="small")
       + variants("a=m,k w=n,k", "nn.functional.linear(a,w)", fill="small") + variants("a=p,m,k w=n,k b=n", "nn.functional.linear(a,w,b)", fill="small"),
       exact=False, refuses="any", zeros=False),
    Op("mv", variants("a=m,k b=k", "mv(a,b)", fill="small")),
    Op("dot", variants("a=k b=k", "dot(a,b)", fill="small")),
    Op("einsum", variants("a=m,k b=k,n", "einsum('ik,kj->ij',a,b)", "einsum('ik,kj->ji',a,b)", fill="small")
       + variants("a=p,m,k b=p,n,k", "einsum('pmk,pnk->pmn',a,b)", fill="small") + variants("a=m,n", "einsum('mn->nm',a)", "einsum('mn->n',a)", fill="small")
       + variants("a=m b=n", "einsum('m,n->mn',a,b)", fill="small"), refuses="any", zeros=False),
    Op("outer", variants("a=m b=n", "outer(a,b)", fill="small"), zeros=False),
    Op("addmm.in-place", variants("c=m,n a=m,k b=k,n", "c.addmm_(a,b)", fill="small"), exact=False, refuses="any", zeros=False),
    Op("nn.functional.conv1d", variants("a=p,m,n w=k,m,3:::R b=k:::R", "nn.functional.conv1d(a,w,b)", "nn.functional.conv1d(a,w,b,padding=1)",
                                        "nn.functional.conv1d(a,w,b,stride=2)", fill="small", least={"n": 3, "m": 1, "k": 1, "p": 1}), refuses="any"),
    Op("nn.functional.conv2d", variants("a=p,m,n,n w=k,m,2,2:::R b=k:::R", "nn.functional.conv2d(a,w,b)", "nn.functional.conv2d(a,w,b,padding=1)",
                                        fill="small", least={"n": 2, "m": 1, "k": 1, "p": 1}), refuses="any"),
    Op("nn.functional.avg_pool1d", variants("a=p,m,n", "nn.functional.avg_pool1d(a,2)", least={"n": 2, "m": 1, "p": 1}), exact=False, refuses="any"),
)  # fmt: skip

GATHERING = REDUCTIONS + SCANS + SORTS + SOFTMAX + NORMS + LOSSES + MATRICES
