"""The overloads of ops, each of which has a rule of its own in torch: in place, into an output, on lists, with numbers as operands."""

from __future__ import annotations

from shardlaw.strategies.op_corners import corner_samples
from shardlaw.strategies.ops import Sample

SHARD, SUM, WHOLE = "5x3:S(0)", "4x3:P(sum)", "4x3:R"
OPERANDS = {
    "shard": f"a={SHARD}:float32:FILL",
    "shards": f"a={SHARD}:float32:FILL b={SHARD}:float32:positive",
    "shards into": f"a={SHARD}:float32:FILL b={SHARD}:float32:positive o={SHARD}:float32:ties",
    "shards into bool": f"a={SHARD}:float32:FILL b={SHARD}:float32:small o={SHARD}:bool:ties",
    "doubles": f"a={SHARD}:float64:FILL b={SHARD}:float64:positive",
    "integers": f"a={SHARD}:int64:FILL b={SHARD}:int64:positive",
    "list": f"a={SHARD}:float32:FILL b=4:S(0):float32:FILL",
    "sum": f"a={SUM}:float32:FILL",
    "sum and whole": f"a={SUM}:float32:FILL b={WHOLE}:float32:positive",
    "whole and sum": f"a={WHOLE}:float32:FILL b={SUM}:float32:small",
    "sum into whole": f"a={SUM}:float32:FILL b={WHOLE}:float32:positive o={WHOLE}:float32:ties",
    "list of sums": f"a={SUM}:float32:FILL b=4:P(sum):float32:FILL",
}

# functions of one tensor, by the elements that it has; those behind ``|`` have no ``_foreach_`` function
UNARY = {
    "small": "abs neg sin cos atan sinh cosh tanh exp expm1 sigmoid erf erfc sign | sgn square exp2 asinh deg2rad rad2deg nan_to_num",
    "unit": "tan asin acos ceil floor frac trunc round | atanh sinc i0 erfinv logit",
    "positive": "log log1p log2 log10 rsqrt sqrt reciprocal lgamma | digamma acosh",
}

# operands, their elements, calls
OTHERS = """
shard | small | a.clamp_(-1,1) a.clamp_min_(0) a.clamp_max_(1) a.round_(decimals=1) a.zero_() a.fill_(3) a.pow_(2) relu_(a) a.logical_not_()
shard | small | nn.functional.elu_(a) nn.functional.celu_(a) nn.functional.leaky_relu_(a) nn.functional.hardtanh_(a) nn.functional.selu_(a)
shard | small | nn.functional.threshold_(a,1,2) nn.functional.silu(a,inplace=True) nn.functional.mish(a,inplace=True)
shard | small | nn.functional.hardsigmoid(a,inplace=True) nn.functional.relu6(a,inplace=True)
shard | small | a.eq_(1) a.ne_(1) a.ge_(1) a.gt_(1) a.le_(1) a.lt_(1) a.copysign_(-1.0) a.fmod_(3) a.remainder_(3) a.sub_(2) a.div_(4)
shard | small | a.div_(2,rounding_mode='trunc') a.mul_(3) a.add_(2)
sum | small | a.clamp_(-1,1) a.clamp_min_(0) nn.functional.elu_(a) nn.functional.leaky_relu_(a) relu_(a) a.zero_() a.fill_(3)
sum | small | a.eq_(1) a.gt_(1) a.copysign_(-1.0) a.fmod_(3) a.remainder_(3) a.sub_(2) a.div_(2,rounding_mode='trunc')
shards | small | a.atan2_(b) a.copysign_(b) a.hypot_(b) a.heaviside_(b) a.nextafter_(b) a.clamp_(b) a.clamp_min_(b) a.clamp_max_(b)
shards | small | a.eq_(b) a.ne_(b) a.ge_(b) a.gt_(b) a.le_(b) a.lt_(b) a.logical_and_(b) a.logical_or_(b) a.logical_xor_(b)
shards | positive | a.fmod_(b) a.remainder_(b) a.xlogy_(b) a.igamma_(b) a.igammac_(b) a.pow_(b) a.div_(b,rounding_mode='floor') a.div_(b)
shards | positive | a.addcdiv_(b,b) a.lerp_(b,b)
sum and whole | small | a.add_(b) a.mul_(b) a.div_(b) a.atan2_(b) a.fmod_(b) a.pow_(b) a.ge_(b)
whole and sum | small | a.add_(b) a.mul_(b) a.copysign_(b) a.clamp_(b) a.copy_(b) a.lt_(b)
doubles | positive | a.float_power_(b) a.float_power_(2)
integers | positive | a.gcd_(b) a.lcm_(b) a.bitwise_left_shift_(b) a.bitwise_right_shift_(b)
integers | positive | a.bitwise_and_(b) a.bitwise_or_(b) a.bitwise_xor_(b) a.bitwise_not_()
integers | positive | a.bitwise_and_(3) a.bitwise_or_(3) a.bitwise_xor_(3) a.bitwise_left_shift_(1) a.bitwise_right_shift_(1)
integers | positive | bitwise_and(a,3) bitwise_or(a,3) bitwise_xor(a,3) bitwise_and(3,a) bitwise_or(3,a) bitwise_xor(3,a)
integers | positive | bitwise_left_shift(a,1) bitwise_left_shift(1,a) bitwise_right_shift(a,1) bitwise_right_shift(64,a)
shard | small | copysign(a,-1.0) fmod(a,3) remainder(a,3) remainder(7,add(a,10)) float_power(a,2) clip(a,-1,1) positive(a) sub(a,2,alpha=3)
shard | small | ge(a,1) gt(a,1) le(a,1) lt(a,1) eq(a,1) ne(a,1) where(gt(a,0),a,2.0) where(gt(a,0),2.0,a)
shard | positive | xlogy(a,2) xlogy(2,a) float_power(2,a) pow(2,a) div(a,2,rounding_mode='floor') div(2,a) sub(2,a)
shard | positive | special.xlog1py(a,2) special.xlog1py(2,a) special.zeta(add(a,1),1) special.zeta(2,a)
sum | small | copysign(a,-1.0) fmod(a,3) remainder(a,3) float_power(a,2) clip(a,-1,1) positive(a) sub(a,2,alpha=3) rsub(a,2)
shards into | small | atan2(a,b,out=o) maximum(a,b,out=o) minimum(a,b,out=o) fmax(a,b,out=o) fmin(a,b,out=o) copysign(a,b,out=o)
shards into | small | hypot(a,b,out=o) logaddexp(a,b,out=o) clamp(a,-1,1,out=o) sub(a,b,out=o) div(a,b,out=o)
shards into | positive | pow(a,b,out=o) fmod(a,b,out=o) remainder(a,b,out=o) lerp(a,b,0.5,out=o)
shards into bool | small | eq(a,b,out=o) ne(a,b,out=o) ge(a,b,out=o) gt(a,b,out=o) le(a,b,out=o) lt(a,b,out=o) logical_and(a,b,out=o)
shards into bool | small | isneginf(a,out=o) isposinf(a,out=o) signbit(a,out=o) logical_not(a,out=o)
sum into whole | small | sub(a,b,out=o) div(a,b,out=o) pow(a,b,out=o) atan2(a,b,out=o)
list | small | _foreach_clamp_max([a,b],1) _foreach_clamp_max([a,b],[a,b]) _foreach_clamp_max_([a,b],1) _foreach_clamp_min([a,b],[1,2])
list | positive | _foreach_pow([a,b],[a,b]) _foreach_pow(2.0,[a,b]) _foreach_pow_([a,b],2) _foreach_lerp([a,b],[a,b],[a,b])
list | positive | _foreach_div([a,b],[2.0,4.0]) _foreach_mul([a,b],[2.0,3.0]) _foreach_sub([a,b],[1.0,2.0]) _foreach_maximum([a,b],[a,b])
list | positive | _foreach_div_([a,b],2) _foreach_mul_([a,b],[2.0,3.0]) _foreach_sub_([a,b],[1.0,2.0]) _foreach_add_([a,b],1)
list | positive | _foreach_addcdiv_([a,b],[a,b],[a,b],2) _foreach_zero_([a,b]) _foreach_max([a,b])
list of sums | small | _foreach_mul([a,b],[2.0,3.0]) _foreach_sub([a,b],1) _foreach_div_([a,b],2) _foreach_add_([a,b],1)
list of sums | small | _foreach_maximum([a,b],[a,b]) _foreach_pow([a,b],2)
"""


def overload_samples() -> list[Sample]:
    """Every overload on shards of two ranks, and those that are not linear on pending sums too, in order."""
    lines = list[str]()
    for fill, names in UNARY.items():
        listed, _, others = names.partition("|")
        every = [*listed.split(), *others.split()]
        calls = {
            ("shard", "sum"): [f"a.{name}_()" for name in every],
            ("shards into", "sum into whole"): [f"{name}(a,out=o)" for name in every],
            ("list", "list of sums"): [f"_foreach_{name}{mark}([a,b])" for name in listed.split() for mark in ("", "_")],
        }
        lines += [f"{kind} | {fill} | {' '.join(found)}" for kinds, found in calls.items() for kind in kinds]
    table = list[str]()
    for line in [*lines, *OTHERS.strip().splitlines()]:
        kind, fill, found = line.split(" | ")
        table.append(f"2 | {OPERANDS[kind].replace('FILL', fill)} | {found}")
    return corner_samples("\n".join(table))
