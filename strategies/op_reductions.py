"""Ops that bring elements together: reductions, scans, sorts, softmax and norms, losses, products of matrices."""

from __future__ import annotations

from shardlaw.strategies.op_table import read_ops

REDUCTIONS = read_ops("""
sum numbers
    a=m,n   | sum(a) sum(a,0) sum(a,-1) sum(a,1,keepdim=True) sum(a,(0,1)) sum(a,(-1,)) sum(a,None) sum(a,0,dtype=torch.float64)
    a=m,n,p float32 | sum(a,1) sum(a,-2,keepdim=True) sum(a,(0,2))
    a=() float32    | sum(a)
    a=m,n float32   | sum(a,())
mean floats inexact
    a=m,n   | mean(a) mean(a,0) mean(a,-1) mean(a,1,keepdim=True) mean(a,(0,1)) mean(a,(-1,)) mean(a,(0,1),keepdim=True)
    a=m,n,p float32 | mean(a,1) mean(a,-2,keepdim=True) mean(a,(0,2))
    a=() float32    | mean(a)
prod float32,int64 ties
    a=m,n   | prod(a) prod(a,0) prod(a,-1) prod(a,1,keepdim=True)
    a=m,n,p float32 | prod(a,1) prod(a,-2,keepdim=True)
amax numbers
    a=m,n m>=1 n>=1 | amax(a) amax(a,0) amax(a,-1) amax(a,1,keepdim=True) amax(a,(0,1)) amax(a,(-1,))
    a=m,n,p m>=1 n>=1 p>=1 float32 | amax(a,1) amax(a,-2,keepdim=True) amax(a,(0,2))
    a=() float32 | amax(a)
amin numbers
    a=m,n m>=1 n>=1 | amin(a) amin(a,0) amin(a,-1) amin(a,1,keepdim=True) amin(a,(0,1)) amin(a,(-1,))
    a=m,n,p m>=1 n>=1 p>=1 float32 | amin(a,1) amin(a,-2,keepdim=True) amin(a,(0,2))
    a=() float32 | amin(a)
max numbers
    a=m,n m>=1 n>=1 | max(a) max(a,0) max(a,-1) max(a,1,keepdim=True)
    a=m,n,p m>=1 n>=1 p>=1 float32 | max(a,1) max(a,-2,keepdim=True)
    a=m,n m>=1 n>=1 ties float32 | max(a,0) max(a,1)
min numbers
    a=m,n m>=1 n>=1 | min(a) min(a,0) min(a,-1) min(a,1,keepdim=True)
    a=m,n,p m>=1 n>=1 p>=1 float32 | min(a,1) min(a,-2,keepdim=True)
    a=m,n m>=1 n>=1 ties float32 | min(a,0) min(a,1)
argmax float32,int64
    a=m,n m>=1 n>=1 | argmax(a) argmax(a,0) argmax(a,-1) argmax(a,1,keepdim=True)
    a=m,n,p m>=1 n>=1 p>=1 float32 | argmax(a,1) argmax(a,-2,keepdim=True) argmax(a)
    a=m,n m>=1 n>=1 ties float32 | argmax(a,0)
    a=m,n m>=1 n>=1 ties float32 | argmax(a)
    a=m,n:bool m>=1 n>=1 float32 | argmax(to(a,torch.int32),1)
argmin float32,int64
    a=m,n m>=1 n>=1 | argmin(a) argmin(a,0) argmin(a,-1) argmin(a,1,keepdim=True)
    a=m,n,p m>=1 n>=1 p>=1 float32 | argmin(a,1) argmin(a,-2,keepdim=True) argmin(a)
    a=m,n m>=1 n>=1 ties float32 | argmin(a,0)
    a=m,n m>=1 n>=1 ties float32 | argmin(a)
aminmax
    a=m,n m>=1 n>=1 | aminmax(a) aminmax(a,dim=0) aminmax(a,dim=-1,keepdim=True)
any any ties
    a=m,n:::W   | any(a) any(a,0) any(a,-1) any(a,1,keepdim=True) any(a,(0,1)) any(a,(-1,)) any(a,(0,1),keepdim=True)
    a=m,n,p:::W float32 | any(a,1) any(a,-2,keepdim=True)
    a=m,n float32 | any(a,-1)
    a=m,n:bool float32 | any(a) any(a,0)
all any ties
    a=m,n   | all(a) all(a,0) all(a,-1) all(a,1,keepdim=True) all(a,(0,1)) all(a,(-1,)) all(a,(0,1),keepdim=True)
    a=m,n,p float32 | all(a,1) all(a,-2,keepdim=True)
    a=m,n:bool float32 | all(a) all(a,0)
count_nonzero ties
    a=m,n | count_nonzero(a) count_nonzero(a,0) count_nonzero(a,(-1,))
nansum floats
    a=m,n | nansum(a) nansum(a,0) nansum(a,-1) nansum(a,1,keepdim=True)
nanmean inexact
    a=m,n | nanmean(a) nanmean(a,0) nanmean(a,-1)
logsumexp floats small inexact
    a=m,n | logsumexp(a,0) logsumexp(a,-1) logsumexp(a,1,keepdim=True) logsumexp(a,(0,1)) logsumexp(a,(-1,))
    a=m,n,p float32 | logsumexp(a,1) logsumexp(a,(0,2))
var inexact
    a=m,n m>=2 n>=2 | var(a) var(a,0) var(a,-1,keepdim=True) var(a,(0,1),correction=0) var(a,1,correction=0)
std inexact
    a=m,n m>=2 n>=2 | std(a) std(a,0) std(a,-1,keepdim=True) std(a,1,correction=0)
var_mean inexact
    a=m,n m>=2 n>=2 | var_mean(a) var_mean(a,0) var_mean(a,-1,correction=0)
norm small inexact
    a=m,n | norm(a) norm(a,1) norm(a,2,0) norm(a,2,-1,keepdim=True)
linalg.vector_norm small inexact
    a=m,n | linalg.vector_norm(a) linalg.vector_norm(a,2,0) linalg.vector_norm(a,2,-1,keepdim=True)
          | linalg.vector_norm(a,1) linalg.vector_norm(a,1,0) linalg.vector_norm(a,-2) linalg.vector_norm(a,3,-1)
          | linalg.vector_norm(a,0.5,0) linalg.vector_norm(a,0) linalg.vector_norm(a,0,-1,keepdim=True)
    a=m,n,p | linalg.vector_norm(a,2,(0,2))
linalg.vector_norm.inf small
    a=m,n m>=3 n>=3 | linalg.vector_norm(a,inf) linalg.vector_norm(a,inf,0) linalg.vector_norm(a,inf,-1,keepdim=True)
                    | linalg.vector_norm(a,-inf) linalg.vector_norm(a,-inf,0) norm(a,inf)
median float32,int64
    a=m,n m>=1 n>=1 | median(a) median(a,0) median(a,-1) median(a,1,keepdim=True)
    a=m,n,p m>=1 n>=1 p>=1 float32 | median(a,1) median(a,-2,keepdim=True)
nanmedian
    a=m,n m>=1 n>=1 | nanmedian(a) nanmedian(a,0) nanmedian(a,-1,keepdim=True)
mode ties
    a=m,n m>=1 n>=1 | getitem(mode(a,0),0) getitem(mode(a,-1,keepdim=True),0) getitem(mode(a),0)
kthvalue
    a=m,n m>=2 n>=2 | kthvalue(a,1,0) kthvalue(a,2,-1) kthvalue(a,1,1,keepdim=True) kthvalue(a,1)
# index_fill changes one row or column, which one rank may hold alone
equal ties
    a=m,n b=m,n        | equal(a,b)
    a=m,n i=1:int64:index{m}:R m>=1 | equal(a,index_fill(a,0,i,99)) equal(index_fill(a,0,i,99),a)
    a=m,n i=1:int64:index{n}:R n>=1 | equal(a,index_fill(a,1,i,99))
    a=m,n distinct     | equal(a,a) equal(a,clone(a))
    a=m,n c=m,n:bool   | equal(a,masked_fill(a,c,99)) equal(masked_fill(a,c,99),a)
    a=() b=()          | equal(a,b) equal(a,clone(a)) equal(add(a,1),a)
    a=m,n b=()         | equal(a,b)
item
    a=():::W           | a.item()
    a=1,1:::R          | a.item()
    a=m,n:::R m>=1 n>=1 | sum(a).item() amax(a).item()
    a=m,n:::R          | mul(sum(a),2).item() a.numel()
    a=():int64:::W     | a.item()
    a=()               | a.item()
histc light refuses-any
    a=m,n | histc(a,4,-8,8) histc(a,4) histc(a,3,-2)
""")

SCANS = read_ops("""
cumsum float32,int64 small
    a=m,n   | cumsum(a,0) cumsum(a,1)
    a=m,n,p float32 | cumsum(a,0) cumsum(a,1) cumsum(a,2)
    a=m float32     | cumsum(a,0)
    a=m,n float32   | cumsum(a,-1)
cumprod float32,int64 ties
    a=m,n   | cumprod(a,0) cumprod(a,1)
    a=m,n,p float32 | cumprod(a,0) cumprod(a,1) cumprod(a,2)
    a=m float32     | cumprod(a,0)
    a=m,n float32   | cumprod(a,-1)
logcumsumexp float32,float64 small inexact
    a=m,n   | logcumsumexp(a,0) logcumsumexp(a,1)
    a=m,n,p float32 | logcumsumexp(a,0) logcumsumexp(a,1) logcumsumexp(a,2)
    a=m float32     | logcumsumexp(a,0)
    a=m,n float32   | logcumsumexp(a,-1)
cummax
    a=m,n | cummax(a,0) cummax(a,1) cummax(a,-1) cummax(a,-2)
cummin
    a=m,n | cummin(a,0) cummin(a,-1)
""")

SORTS = read_ops("""
sort
    a=m,n | sort(a) sort(a,0) sort(a,-1,descending=True) sort(a,-2)
    a=m,n ties | sort(a,dim=0,stable=True) sort(a,dim=-1,stable=True)
    a=m,n,p | sort(a,1)
argsort
    a=m,n | argsort(a) argsort(a,0) argsort(a,-2,descending=True)
topk
    a=m,n m>=2 n>=2 | topk(a,2) topk(a,2,0) topk(a,1,-2) topk(a,2,-1,largest=False)
msort
    a=m,n | msort(a)
""")

SOFTMAX = read_ops("""
nn.functional.softmax small inexact
    a=m,n   | nn.functional.softmax(a,0) nn.functional.softmax(a,1) nn.functional.softmax(a,-1) nn.functional.softmax(a,-2)
            | nn.functional.softmax(a,0,dtype=torch.float64)
    a=m,n,p | nn.functional.softmax(a,1) nn.functional.softmax(a,-1)
nn.functional.log_softmax small inexact
    a=m,n   | nn.functional.log_softmax(a,0) nn.functional.log_softmax(a,1) nn.functional.log_softmax(a,-1)
            | nn.functional.log_softmax(a,-2)
    a=m,n,p | nn.functional.log_softmax(a,1) nn.functional.log_softmax(a,-1)
nn.functional.softmin small inexact
    a=m,n   | nn.functional.softmin(a,0) nn.functional.softmin(a,-1)
""")

NORMS = read_ops("""
nn.functional.layer_norm inexact
    a=m,n w=n b=n n>=1 | nn.functional.layer_norm(a,({n},),w,b) nn.functional.layer_norm(a,({n},),w)
                       | nn.functional.layer_norm(a,({n},),w,None,0.5)
    a=m,n,p n>=1 p>=1  | nn.functional.layer_norm(a,({p},)) nn.functional.layer_norm(a,({n},{p}))
    a=m,n,p w=n,p b=n,p n>=1 p>=1 | nn.functional.layer_norm(a,({n},{p}),w,b)
nn.functional.rms_norm inexact refuses-any
    a=m,n w=n n>=1     | nn.functional.rms_norm(a,({n},),w) nn.functional.rms_norm(a,({n},),w,0.5)
    a=m,n,p n>=1 p>=1  | nn.functional.rms_norm(a,({n},{p}))
nn.functional.group_norm inexact
    a=m,2*n,p w=2*n b=2*n n>=1 p>=1 m>=1 | nn.functional.group_norm(a,2,w,b) nn.functional.group_norm(a,{n},w,b)
    a=m,2*n,p n>=1 p>=1 m>=1             | nn.functional.group_norm(a,2)
nn.functional.batch_norm inexact refuses-any
    a=m,n,p w=n b=n u=n v=n::positive m>=1 p>=1 | nn.functional.batch_norm(a,u,v,w,b)
    a=m,n,p w=n b=n m>=2 p>=2 n>=3              | nn.functional.batch_norm(a,None,None,w,b,True)
nn.functional.normalize positive inexact
    a=m,n m>=1 n>=1 | nn.functional.normalize(a) nn.functional.normalize(a,dim=0) nn.functional.normalize(a,p=1.0,dim=-1)
""")

# a keyword only where a mean is asked for, so that the case says so
LOSSES = read_ops("""
nn.functional.mse_loss small inexact
    a=m,n b=m,n m>=1 n>=1 | nn.functional.mse_loss(a,b,None,None,'sum') nn.functional.mse_loss(a,b,None,None,'none')
                          | nn.functional.mse_loss(a,b,reduction='mean')
nn.functional.l1_loss small inexact
    a=m,n b=m,n m>=1 n>=1 | nn.functional.l1_loss(a,b) nn.functional.l1_loss(a,b,None,None,'none')
                          | nn.functional.l1_loss(a,b,None,None,'sum')
nn.functional.smooth_l1_loss small inexact refuses-any
    a=m,n b=m,n m>=1 n>=1 | nn.functional.smooth_l1_loss(a,b,None,None,'none') nn.functional.smooth_l1_loss(a,b,None,None,'sum')
nn.functional.nll_loss inexact refuses-any
    a=m,n i=m:int64:index{n} m>=1 n>=2 | nn.functional.nll_loss(a,i) nn.functional.nll_loss(a,i,reduction='none')
                                       | nn.functional.nll_loss(a,i,reduction='sum')
                                       | nn.functional.nll_loss(a,i,ignore_index=1,reduction='sum')
    a=m,n i=m:int64:index{n} w=n::positive m>=1 n>=2 | nn.functional.nll_loss(a,i,w,reduction='sum')
                                                     | nn.functional.nll_loss(a,i,w,reduction='none')
                                                     | nn.functional.nll_loss(a,i,weight=w)
nn.functional.cross_entropy small inexact refuses-any
    a=m,n i=m:int64:index{n} m>=1 n>=2 | nn.functional.cross_entropy(a,i) nn.functional.cross_entropy(a,i,reduction='none')
                                       | nn.functional.cross_entropy(a,i,reduction='sum')
    a=m,n i=m:int64:index{n} w=n::positive m>=1 n>=2 | nn.functional.cross_entropy(a,i,w,reduction='sum')
                                                     | nn.functional.cross_entropy(a,i,weight=w)
nn.functional.binary_cross_entropy_with_logits small inexact
    a=m,n b=m,n::unit m>=1 n>=1 | nn.functional.binary_cross_entropy_with_logits(a,b,None,None,None,'sum')
                                | nn.functional.binary_cross_entropy_with_logits(a,b,None,None,None,'none')
                                | nn.functional.binary_cross_entropy_with_logits(a,b,reduction='mean')
nn.functional.kl_div small inexact refuses-any
    a=m,n b=m,n::unit m>=1 n>=1 | nn.functional.kl_div(a,b,reduction='sum') nn.functional.kl_div(a,b,reduction='none')
""")

MATRICES = read_ops("""
mm pairs small float32,int64,bfloat16
    a=m,k b=k,n     | mm(a,b)
    a=m,n float32   | mm(a,t(a))
bmm small
    a=p,m,k b=p,k,n | bmm(a,b)
matmul small no-zeros refuses-any shallow
    a=m,k b=k,n     | matmul(a,b)
    a=m,k b=k       | matmul(a,b)
    a=k b=k         | matmul(a,b)
    a=p,m,k b=k,n   | matmul(a,b)
    a=p,m,k b=p,k,n | matmul(a,b)
    a=m,k b=p,k,n   | matmul(a,b)
    a=k b=k,n       | matmul(a,b)
addmm small inexact
    c=m,n a=m,k b=k,n | addmm(c,a,b) addmm(c,a,b,beta=2,alpha=3)
    c=n a=m,k b=k,n   | addmm(c,a,b)
    c=1,n a=m,k b=k,n | addmm(c,a,b)
    c=() a=m,k b=k,n  | addmm(c,a,b)
baddbmm small inexact
    c=p,m,n a=p,m,k b=p,k,n | baddbmm(c,a,b) baddbmm(c,a,b,beta=2,alpha=3)
    c=n a=p,m,k b=p,k,n     | baddbmm(c,a,b)
nn.functional.linear small inexact no-zeros refuses-any shallow
    a=m,k w=n,k b=n   | nn.functional.linear(a,w,b)
    a=m,k w=n,k       | nn.functional.linear(a,w)
    a=p,m,k w=n,k b=n | nn.functional.linear(a,w,b)
mv small
    a=m,k b=k         | mv(a,b)
dot small
    a=k b=k           | dot(a,b)
vdot small light refuses-any
    a=k b=k           | vdot(a,b)
outer small no-zeros
    a=m b=n           | outer(a,b)
einsum small no-zeros refuses-any shallow
    a=m,k b=k,n       | einsum('ik,kj->ij',a,b) einsum('ik,kj->ji',a,b)
    a=p,m,k b=p,n,k   | einsum('pmk,pnk->pmn',a,b)
    a=m,n             | einsum('mn->nm',a) einsum('mn->n',a)
    a=m b=n           | einsum('m,n->mn',a,b)
addmm.in-place small inexact no-zeros refuses-any
    c=m,n a=m,k b=k,n | c.addmm_(a,b)
linalg.inv inexact light refuses-any
    a=p,1,1::positive | linalg.inv(a)
linalg.solve_triangular inexact light refuses-any small
    a=p,1,1::positive b=p,1,n | linalg.solve_triangular(a,b,upper=True)
linalg.det inexact light small refuses-any
    a=p,2,2           | linalg.det(a)
linalg.cross light small
    a=m,3 b=m,3       | linalg.cross(a,b)
    a=3,n b=3,n       | linalg.cross(a,b,dim=0)
fft.rfft inexact light small refuses-any
    a=m,2*n m>=1 n>=1 | fft.irfft(fft.rfft(a)) fft.irfft(square(fft.rfft(a)))
nn.functional.conv1d small light flat refuses-any
    a=p,m,n:::B w=k,m,3:::R b=k:::R n>=3 m>=1 k>=1 p>=3 | nn.functional.conv1d(a,w,b) nn.functional.conv1d(a,w,b,padding=1)
    a=p,m,n:::B w=k,m,3:::R n>=3 m>=1 k>=1 p>=3         | nn.functional.conv1d(a,w,stride=2)
nn.functional.conv2d small light flat refuses-any
    a=p,m,n,n:::B w=k,m,2,2:::R b=k:::R n>=2 m>=1 k>=1 p>=3 | nn.functional.conv2d(a,w,b) nn.functional.conv2d(a,w,b,padding=1)
nn.functional.avg_pool1d inexact refuses-any
    a=p,m,n n>=2 m>=3 p>=3 | nn.functional.avg_pool1d(a,2)
nn.functional.max_pool2d light refuses-any
    a=p,m,n,n n>=2 m>=3 p>=3 | nn.functional.max_pool2d(a,2)
nn.functional.adaptive_avg_pool2d inexact light refuses-any
    a=p,m,n,n n>=2 m>=3 p>=3 | nn.functional.adaptive_avg_pool2d(a,(1,2))
nn.functional.interpolate inexact light refuses-any
    a=p,m,n n>=1 m>=3 p>=3   | nn.functional.interpolate(a,scale_factor=2.0) nn.functional.interpolate(a,size=(3,),mode='linear')
""")

GATHERING = REDUCTIONS + SCANS + SORTS + SOFTMAX + NORMS + LOSSES + MATRICES
