"""Ops that work element by element: unary, binary with broadcasting and scalars, comparisons, selection, casts."""

from __future__ import annotations

from shardlaw.strategies.op_table import read_ops

UNARY = read_ops("""
abs           unary numbers
neg           unary numbers
sign          unary numbers
sgn           unary floats
square        unary floats small
floor         unary floats unit
ceil          unary floats unit
trunc         unary floats unit
round         unary floats unit inexact
    a=m,n | round(a,decimals=1)
frac          unary floats unit
signbit       unary floats
isnan         unary floats
isfinite      unary floats
isposinf      unary
logical_not   unary any ties
bitwise_not   unary int64,bool,uint8
exp           unary floats small inexact
exp2          unary floats small inexact
expm1         unary floats small inexact
log           unary floats positive inexact
log1p         unary floats positive inexact
log2          unary floats positive inexact
log10         unary floats positive inexact
sqrt          unary floats positive inexact
rsqrt         unary floats positive inexact
reciprocal    unary floats positive inexact
sin           unary floats inexact
cos           unary floats inexact
tan           unary unit inexact
asin          unary unit inexact
acos          unary unit inexact
atan          unary floats inexact
sinh          unary floats small inexact
cosh          unary small inexact
tanh          unary floats small inexact
asinh         unary floats inexact
acosh         unary positive inexact
atanh         unary unit inexact
sigmoid       unary floats small inexact
erf           unary floats small inexact
erfc          unary floats small inexact
erfinv        unary unit inexact
lgamma        unary positive inexact
digamma       unary positive inexact
sinc          unary unit inexact
i0            unary unit inexact
logit         unary floats unit inexact
deg2rad       unary floats inexact
rad2deg       unary floats inexact
nan_to_num    unary floats
nn.functional.relu        unary numbers
nn.functional.relu6       unary
nn.functional.gelu        unary floats small inexact
nn.functional.silu        unary floats small inexact
nn.functional.mish        unary small inexact
nn.functional.elu         unary floats small inexact
nn.functional.celu        unary small inexact
nn.functional.selu        unary small inexact
nn.functional.softplus    unary floats small inexact
nn.functional.softshrink  unary
nn.functional.hardtanh    unary floats
nn.functional.hardsigmoid unary small inexact
nn.functional.hardswish   unary small inexact
nn.functional.hardshrink  unary floats
nn.functional.logsigmoid  unary floats small inexact
nn.functional.leaky_relu  light floats
    a=m,n | nn.functional.leaky_relu(a,0.5) nn.functional.leaky_relu(a,-0.5)
nn.functional.threshold   light floats
    a=m,n | nn.functional.threshold(a,0.0,-1.0) nn.functional.threshold(a,0.0,5.0)
polygamma light positive inexact
    a=m,n | polygamma(1,a)
""")

BINARY = read_ops("""
add binary pairs numbers
    a=m,n       | add(a,2) add(a,2.5) add(a,2,alpha=3)
    a=m,n b=m,n | add(a,b,alpha=2) add(a,b,alpha=-1)
sub binary pairs numbers
    a=m,n       | sub(a,2) sub(a,2.5)
    a=m,n b=m,n | sub(a,b,alpha=2) sub(a,b,alpha=-1)
mul binary pairs numbers small
    a=m,n       | mul(a,2) mul(a,2.5) mul(a,-1) mul(a,True)
div binary pairs floats positive inexact
    a=m,n       | div(a,2) div(a,2.5) div(a,2,rounding_mode='trunc')
    a=m,n b=m,n | div(a,b,rounding_mode='floor')
true_divide binary light numbers positive inexact
    a=m,n       | true_divide(a,2)
floor_divide light numbers positive
    a=m,n       | floor_divide(a,2) floor_divide(a,2.5)
    a=m,n b=n   | floor_divide(a,b)
rsub light numbers small
    a=m,n       | rsub(a,2) rsub(a,2.5)
    a=m,n b=m,n | rsub(a,b)
remainder binary light numbers positive
    a=m,n       | remainder(a,3) remainder(a,2.5)
fmod binary light numbers positive
    a=m,n       | fmod(a,3) fmod(a,2.5)
pow float32,float64 small
    a=m,n       | pow(a,2) pow(a,3) pow(a,0) pow(2,a)
    a=m,n b=n:float32:ties float32 | pow(a,b)
maximum binary pairs numbers
minimum binary pairs numbers
fmax binary light numbers
fmin binary light numbers
atan2 binary light floats inexact
hypot binary light floats inexact
copysign binary light floats
    a=m,n       | copysign(a,2) copysign(a,-2.5)
logaddexp binary light floats small inexact
logaddexp2 binary light small inexact
xlogy binary light floats positive inexact
    a=m,n       | xlogy(a,2)
special.xlog1py binary light positive inexact
float_power binary light positive inexact
nextafter binary light
heaviside binary light small
ldexp light small
    a=m,n b=m,n | ldexp(a,b)
gcd binary light integers positive
lcm binary light integers positive
lerp
    a=m,n b=m,n       | lerp(a,b,0.5) lerp(a,b,2.0)
    a=m,n b=m,n c=n small | lerp(a,b,c)
addcmul small
    a=m,n b=m,n c=m,n | addcmul(a,b,c) addcmul(a,b,c,value=2)
    a=m,n b=n c=m,1   | addcmul(a,b,c)
addcdiv positive inexact
    a=m,n b=m,n c=m,n | addcdiv(a,b,c) addcdiv(a,b,c,value=2)
""")

COMPARISONS = read_ops("""
eq binary pairs any ties
    a=m,n numbers | eq(a,1) eq(a,0.5)
ne binary light any ties
    a=m,n numbers | ne(a,1) ne(a,0.5)
lt binary light any ties
    a=m,n numbers | lt(a,1) lt(a,0.5)
le binary light any ties
    a=m,n numbers | le(a,1) le(a,0.5)
gt binary pairs any ties
    a=m,n numbers | gt(a,1) gt(a,0.5)
ge binary light any ties
    a=m,n numbers | ge(a,1) ge(a,0.5)
logical_and binary light any ties
logical_or binary light bool,float32 ties
logical_xor binary light bool,float32 ties
bitwise_and binary light int64,bool,uint8 ties
bitwise_or binary light int64,bool,uint8 ties
bitwise_xor binary light int64,bool,uint8 ties
bitwise_left_shift light integers ties
    a=m,n b=m,n | bitwise_left_shift(a,b)
isclose light small refuses-any
    a=m,n b=m,n | isclose(a,b)
""")

SELECTION = read_ops("""
where pairs
    c=m,n:bool a=m,n b=m,n numbers | where(c,a,b)
    c=n:bool a=m,n b=m,1           | where(c,a,b)
    c=m,n:bool a=m,n               | where(c,a,0) where(c,a,-1.5)
    a=m,n b=m,n                    | where(gt(a,0),a,b)
clamp numbers
    a=m,n                     | clamp(a,-2,3) clamp(a,min=0) clamp(a,max=1)
    a=m,n b=m,n c=n float32   | clamp(a,b,c)
    a=m,n b=n float32         | clamp(a,min=b) clamp(a,max=b)
clamp_min
    a=m,n       | clamp_min(a,0)
    a=m,n b=m,n | clamp_min(a,b)
clamp_max
    a=m,n       | clamp_max(a,0)
    a=m,n b=m,n | clamp_max(a,b)
masked_fill floats
    a=m,n c=m,n:bool              | masked_fill(a,c,7) masked_fill(a,c,-inf)
    a=m,n c=n:bool float32        | masked_fill(a,c,0)
    a=m,n c=m,n:bool v=() float32 | masked_fill(a,c,v)
""")

CASTS = read_ops("""
to float32,int64,float64,bool small
    a=m,n unit float32 | to(a,torch.int64)
    a=m,n | to(a,torch.int64) to(a,torch.float64) to(a,torch.bool) to(a,torch.bfloat16) to(a,torch.float32)
    a=m,n distinct float32 | to(div(a,4),torch.int32)
    a=m,n unit float32     | to(a,torch.bool)
    a=() distinct float32  | to(a,torch.int64)
type_as
    a=m,n:float32 b=m,n:int64 | type_as(a,b) type_as(b,a)
promotion inexact
    a=m,n:int64 b=m,n:float32 positive | add(a,b) mul(a,b) eq(a,b) div(a,b)
    a=m,n:bool b=m,n:int64             | add(a,b) mul(a,b) where(a,b,0.5)
    a=m,n:int64                        | add(a,0.5) mul(a,True) div(a,2) sum(a) mean(a,dtype=torch.float32)
    a=m,n:float32 b=():float64         | add(a,b) mul(b,a)
    a=m,n:bool                         | add(a,1) sum(a,0) mul(a,2.0)
# a plain 0-d tensor beside a sharded one
operand float32,int64 small
    a=m,n | add(a,tensor(2)) mul(a,tensor(2.0)) add(tensor(1.5),a) eq(a,tensor(1))
""")

IN_PLACE = read_ops("""
add.in-place refuses-pending
    a=m,n                 | a.add_(2) a.add_(2.5) a.add_(a)
add.in-place.tensor pairs numbers refuses-pending
    a=m,n b=m,n           | a.add_(b) a.add_(b,alpha=2)
    a=m,n b=n float32     | a.add_(b)
sub.in-place refuses-pending
    a=m,n b=m,n           | a.sub_(b)
    a=m,n                 | a.sub_(1)
mul.in-place pairs small refuses-pending
    a=m,n b=m,n           | a.mul_(b)
    a=m,n b=n             | a.mul_(b)
    a=m,n                 | a.mul_(2) a.mul_(a) a.mul_(-1)
div.in-place positive inexact refuses-pending
    a=m,n b=m,n           | a.div_(b)
    a=m,n                 | a.div_(2)
relu.in-place light floats refuses-pending
    a=m,n                 | relu_(a)
clamp.in-place light floats refuses-pending
    a=m,n                 | a.clamp_(-2,2) a.clamp_(min=0)
abs.in-place light floats refuses-pending
    a=m,n                 | a.abs_()
neg.in-place light floats refuses-pending
    a=m,n                 | a.neg_()
exp.in-place light floats small inexact refuses-pending
    a=m,n                 | a.exp_()
sqrt.in-place light floats positive inexact refuses-pending
    a=m,n                 | a.sqrt_()
pow.in-place light floats small refuses-pending
    a=m,n                 | a.pow_(2)
round.in-place light floats unit refuses-pending
    a=m,n                 | a.round_() a.floor_() a.trunc_()
zero.in-place light numbers refuses-pending
    a=m,n                 | a.zero_()
fill.in-place floats refuses-pending
    a=m,n:::W             | a.fill_(3) a.fill_(-1.5)
    a=():::W              | a.fill_(3)
    a=m,n                 | a.fill_(2)
copy.in-place pairs refuses-pending
    a=m,n b=m,n           | a.copy_(b)
    a=m,n:float32 b=m,n:int64 | a.copy_(b) b.copy_(a)
    a=m,n b=n             | a.copy_(b)
masked_fill.in-place refuses-pending
    a=m,n c=m,n:bool      | a.masked_fill_(c,0) a.masked_fill_(c,-1.5)
lerp.in-place refuses-pending
    a=m,n b=m,n           | a.lerp_(b,0.5)
addcmul.in-place small refuses-pending
    a=m,n b=m,n c=m,n     | a.addcmul_(b,c)
eq.in-place ties refuses-pending
    a=m,n b=m,n           | a.eq_(b) a.gt_(b) a.logical_not_()
bitwise.in-place integers refuses-pending
    a=m,n b=m,n           | a.bitwise_and_(b) a.bitwise_or_(b) a.bitwise_xor_(b)
""")

FOREACH = read_ops("""
foreach_add light
    a=m,n b=k | _foreach_add([a,b],2) _foreach_add([a,b],[a,b]) _foreach_add([a,b],[1.0,2.0])
foreach_sub light
    a=m,n b=k | _foreach_sub([a,b],2) _foreach_sub([a,b],[a,b])
foreach_mul light small
    a=m,n b=k | _foreach_mul([a,b],2) _foreach_mul([a,b],[a,b])
foreach_div light positive inexact
    a=m,n b=k | _foreach_div([a,b],2) _foreach_div([a,b],[a,b])
foreach_norm small inexact
    a=m,n b=k | _foreach_norm([a,b]) _foreach_norm([a,b],1) _foreach_norm([a,b],inf)
foreach_sqrt light positive inexact
    a=m,n b=k | _foreach_sqrt([a,b]) _foreach_neg([a,b]) _foreach_abs([a,b])
foreach_exp light small inexact
    a=m,n b=k | _foreach_exp([a,b]) _foreach_sign([a,b])
    a=m,n b=k positive | _foreach_reciprocal([a,b])
foreach_addcmul light small
    a=m,n b=k | _foreach_addcmul([a,b],[a,b],[a,b],2)
foreach_lerp light
    a=m,n b=k | _foreach_lerp([a,b],[a,b],0.5)
foreach_max light
    a=m,n b=k m>=3 n>=3 k>=3 | _foreach_max([a,b])
foreach.in-place light small refuses-pending
    a=m,n b=k | _foreach_add_([a,b],2) _foreach_mul_([a,b],2) _foreach_add_([a,b],[a,b])
""")

POINTWISE = UNARY + BINARY + COMPARISONS + SELECTION + CASTS + IN_PLACE + FOREACH
