"""Ops that work element by element: unary, binary with broadcasting and scalars, comparisons, selection, casts."""

from __future__ import annotations

from strategies.ops import ANY, FLOATS, INTEGERS, NUMBERS, Op, Variant, variants


def _unary(name: str, call: str = "", *more: str, dtypes: tuple[str, ...] = FLOATS, fill: str = "distinct", exact: bool = False) -> Op:
    function = call or f"{name}(a)"
    made = variants("a=m,n", function, *more, dtypes=dtypes, fill=fill) + variants("a=()", function, dtypes=dtypes, fill=fill)
    return Op(name, made, exact, light=True)


def _in_place(
    name: str, *calls: str, dtypes: tuple[str, ...] = FLOATS, fill: str = "distinct", exact: bool = True, args: str = "a=m,n"
) -> Op:
    return Op(f"{name}.in-place", variants(args, *calls, dtypes=dtypes, fill=fill), exact, light=True, refuses="pending")


def _binary(
    name: str,
    *more: str,
    dtypes: tuple[str, ...] = NUMBERS,
    fill: str = "distinct",
    exact: bool = True,
    pairs: bool = False,
    scalars: bool = True,
) -> Op:
    """Two tensors: alike, broadcast either way, 0-d, the same one twice; then Python scalars of each kind."""
    both = f"{name}(a,b)"
    made: tuple[Variant, ...] = (
        *variants("a=m,n b=m,n", both, dtypes=dtypes, fill=fill),
        *variants("a=m,n b=n", both, dtypes=dtypes, fill=fill),
        *variants("a=m,1 b=1,n", both, dtypes=dtypes, fill=fill),
        *variants("a=n b=m,n", both, dtypes=dtypes, fill=fill),
        *variants("a=m,n b=()", both, dtypes=dtypes, fill=fill),
        *variants("a=m,n", f"{name}(a,a)", dtypes=dtypes, fill=fill),
    )
    if scalars:
        made += variants("a=m,n", f"{name}(a,2)", f"{name}(a,2.5)", dtypes=dtypes, fill=fill)
    return Op(name, made + variants("a=m,n b=m,n", *more, dtypes=dtypes, fill=fill), exact, pairs, light=not pairs)


def _compare(name: str) -> Op:
    both = f"{name}(a,b)"
    return Op(
        name,
        variants("a=m,n b=m,n", both, dtypes=ANY, fill="ties")
        + variants("a=m,n b=n", both, dtypes=NUMBERS, fill="ties")
        + variants("a=m,n b=()", both, fill="ties")
        + variants("a=m,n", f"{name}(a,1)", f"{name}(a,0.5)", f"{name}(a,a)", dtypes=NUMBERS, fill="ties"),
        pairs=name in ("eq", "gt"),
        light=name not in ("eq", "gt"),
    )


def _logic(name: str, dtypes: tuple[str, ...]) -> Op:
    both = f"{name}(a,b)"
    made = variants("a=m,n b=m,n", both, dtypes=dtypes, fill="ties") + variants("a=m,n b=n", both, dtypes=dtypes, fill="ties")
    return Op(name, made, light=True)


UNARY = (
    _unary("abs", exact=True, dtypes=NUMBERS),
    _unary("neg", exact=True, dtypes=NUMBERS),
    _unary("positive", exact=True, dtypes=NUMBERS),
    _unary("sign", exact=True, dtypes=NUMBERS),
    _unary("sgn", exact=True),
    _unary("square", exact=True, fill="small"),
    _unary("floor", "floor(a)", exact=True, fill="unit"),
    _unary("ceil", exact=True, fill="unit"),
    _unary("trunc", exact=True, fill="unit"),
    _unary("round", "round(a)", "round(a,decimals=1)", fill="unit"),
    _unary("frac", exact=True, fill="unit"),
    _unary("signbit", exact=True),
    _unary("isnan", exact=True),
    _unary("isfinite", exact=True),
    _unary("logical_not", exact=True, dtypes=ANY, fill="ties"),
    _unary("bitwise_not", exact=True, dtypes=("int64", "bool", "uint8")),
    _unary("exp", fill="small"),
    _unary("exp2", fill="small"),
    _unary("expm1", fill="small"),
    _unary("log", fill="positive"),
    _unary("log1p", fill="positive"),
    _unary("log2", fill="positive"),
    _unary("sqrt", fill="positive"),
    _unary("rsqrt", fill="positive"),
    _unary("reciprocal", fill="positive"),
    _unary("sin"),
    _unary("cos"),
    _unary("tanh", fill="small"),
    _unary("atan"),
    _unary("asinh"),
    _unary("sinh", fill="small"),
    _unary("sigmoid", fill="small"),
    _unary("erf", fill="small"),
    _unary("erfc", fill="small"),
    _unary("logit", fill="unit"),
    _unary("deg2rad"),
    _unary("nan_to_num", exact=True),
    _unary("nn.functional.relu", exact=True, dtypes=NUMBERS),
    _unary("nn.functional.gelu", fill="small"),
    _unary("nn.functional.silu", fill="small"),
    _unary("nn.functional.elu", fill="small"),
    _unary("nn.functional.leaky_relu", "nn.functional.leaky_relu(a,0.5)", "nn.functional.leaky_relu(a,-0.5)", exact=True),
    _unary("nn.functional.softplus", fill="small"),
    _unary("nn.functional.hardtanh", exact=True),
    _unary("nn.functional.threshold", "nn.functional.threshold(a,0.0,-1.0)", "nn.functional.threshold(a,0.0,5.0)", exact=True),
    _unary("nn.functional.hardshrink", exact=True),
    _unary("nn.functional.logsigmoid", fill="small"),
)

BINARY = (
    _binary("add", "add(a,b,alpha=2)", "add(a,b,alpha=-1)", "add(a,2,alpha=3)", pairs=True),
    _binary("sub", "sub(a,b,alpha=2)", "sub(a,b,alpha=-1)", pairs=True),
    _binary("mul", "mul(a,-1)", "mul(a,True)", fill="small", pairs=True),
    _binary("div", "div(a,b,rounding_mode='floor')", "div(a,2,rounding_mode='trunc')", dtypes=FLOATS, fill="positive", exact=False, pairs=True),
    _binary("true_divide", dtypes=NUMBERS, fill="positive", exact=False),
    _binary("floor_divide", dtypes=NUMBERS, fill="positive"),
    _binary("rsub", fill="small", dtypes=NUMBERS),
    _binary("remainder", fill="positive"),
    _binary("fmod", fill="positive"),
    Op("pow", variants("a=m,n", "pow(a,2)", "pow(a,3)", "pow(a,0)", "pow(2,a)", dtypes=("float32", "float64"), fill="small")
       + variants("a=m,n b=n:float32:ties", "pow(a,b)", fill="small")),
    _binary("maximum", scalars=False, pairs=True),
    _binary("minimum", scalars=False, pairs=True),
    _binary("fmax", scalars=False),
    _binary("fmin", scalars=False),
    _binary("atan2", dtypes=FLOATS, exact=False, scalars=False),
    _binary("hypot", dtypes=FLOATS, exact=False, scalars=False),
    _binary("copysign", dtypes=FLOATS),
    _binary("logaddexp", dtypes=FLOATS, exact=False, scalars=False, fill="small"),
    _binary("xlogy", dtypes=FLOATS, exact=False, fill="positive"),
    _binary("float_power", dtypes=("float32",), exact=False, fill="small", scalars=False),
    Op("lerp", variants("a=m,n b=m,n", "lerp(a,b,0.5)", "lerp(a,b,2.0)") + variants("a=m,n b=m,n c=n", "lerp(a,b,c)", fill="small")),
    Op("addcmul", variants("a=m,n b=m,n c=m,n", "addcmul(a,b,c)", "addcmul(a,b,c,value=2)", fill="small")
       + variants("a=m,n b=n c=m,1", "addcmul(a,b,c)", fill="small")),
    Op("addcdiv", variants("a=m,n b=m,n c=m,n", "addcdiv(a,b,c)", "addcdiv(a,b,c,value=2)", fill="positive"), exact=False),
)  # fmt: skip

COMPARISONS = tuple(map(_compare, ("eq", "ne", "lt", "le", "gt", "ge")))

LOGIC = (
    _logic("logical_and", ANY),
    _logic("logical_or", ("bool", "float32")),
    _logic("logical_xor", ("bool", "float32")),
    _logic("bitwise_and", ("int64", "bool", "uint8")),
    _logic("bitwise_or", ("int64", "bool", "uint8")),
    _logic("bitwise_xor", ("int64", "bool", "uint8")),
)

SELECTION = (
    Op("where", variants("c=m,n:bool a=m,n b=m,n", "where(c,a,b)", dtypes=NUMBERS)
       + variants("c=n:bool a=m,n b=m,1", "where(c,a,b)")
       + variants("c=m,n:bool a=m,n", "where(c,a,0)", "where(c,a,-1.5)")
       + variants("a=m,n b=m,n", "where(gt(a,0),a,b)"), pairs=True),
    Op("clamp", variants("a=m,n", "clamp(a,-2,3)", "clamp(a,min=0)", "clamp(a,max=1)", dtypes=NUMBERS)
       + variants("a=m,n b=m,n c=n", "clamp(a,b,c)") + variants("a=m,n b=n", "clamp(a,min=b)", "clamp(a,max=b)")),
    Op("clamp_min", variants("a=m,n", "clamp_min(a,0)") + variants("a=m,n b=m,n", "clamp_min(a,b)")),
    Op("clamp_max", variants("a=m,n", "clamp_max(a,0)") + variants("a=m,n b=m,n", "clamp_max(a,b)")),
    Op("masked_fill", variants("a=m,n c=m,n:bool", "masked_fill(a,c,7)", "masked_fill(a,c,-inf)", dtypes=FLOATS)
       + variants("a=m,n c=n:bool", "masked_fill(a,c,0)") + variants("a=m,n c=m,n:bool v=()", "masked_fill(a,c,v)")),
)  # fmt: skip

CASTS = (
    Op("to", variants("a=m,n", "to(a,torch.int64)", "to(a,torch.float64)", "to(a,torch.bool)", "to(a,torch.bfloat16)", "to(a,torch.float32)",
                      dtypes=("float32", "int64", "float64", "bool"), fill="small")
       + variants("a=m,n", "to(div(a,4),torch.int32)") + variants("a=()", "to(a,torch.int64)")),
    Op("type_as", variants("a=m,n:float32 b=m,n:int64", "type_as(a,b)", "type_as(b,a)")),
    Op("promotion", variants("a=m,n:int64 b=m,n:float32", "add(a,b)", "mul(a,b)", "eq(a,b)", "div(a,b)", fill="positive")
       + variants("a=m,n:bool b=m,n:int64", "add(a,b)", "mul(a,b)", "where(a,b,0.5)")
       + variants("a=m,n:int64", "add(a,0.5)", "mul(a,True)", "div(a,2)", "sum(a)", "mean(a,dtype=torch.float32)")
       + variants("a=m,n:float32 b=():float64", "add(a,b)", "mul(b,a)") + variants("a=m,n:bool", "add(a,1)", "sum(a,0)", "mul(a,2.0)"), exact=False),
    Op("operand", variants("a=m,n", "add(a,tensor(2))", "mul(a,tensor(2.0))", "add(tensor(1.5),a)", "eq(a,tensor(1))",
                           dtypes=("float32", "int64"), fill="small")),
)  # fmt: skip

IN_PLACE = (
    _in_place("add", "a.add_(2)", "a.add_(2.5)", "a.add_(a)"),
    Op("add.in-place.tensor", variants("a=m,n b=m,n", "a.add_(b)", "a.add_(b,alpha=2)", dtypes=NUMBERS) + variants("a=m,n b=n", "a.add_(b)"),
       pairs=True, refuses="pending"),
    Op("sub.in-place", variants("a=m,n b=m,n", "a.sub_(b)") + variants("a=m,n", "a.sub_(1)"), refuses="pending"),
    Op("mul.in-place", variants("a=m,n b=m,n", "a.mul_(b)", fill="small") + variants("a=m,n b=n", "a.mul_(b)", fill="small")
       + variants("a=m,n", "a.mul_(2)", "a.mul_(a)", "a.mul_(-1)", fill="small"), pairs=True, refuses="pending"),
    Op("div.in-place", variants("a=m,n b=m,n", "a.div_(b)", fill="positive") + variants("a=m,n", "a.div_(2)"), exact=False, refuses="pending"),
    _in_place("relu", "relu_(a)"),
    _in_place("clamp", "a.clamp_(-2,2)", "a.clamp_(min=0)"),
    _in_place("abs", "a.abs_()"),
    _in_place("neg", "a.neg_()"),
    _in_place("exp", "a.exp_()", fill="small", exact=False),
    _in_place("sqrt", "a.sqrt_()", fill="positive", exact=False),
    _in_place("pow", "a.pow_(2)", fill="small"),
    _in_place("round", "a.round_()", "a.floor_()", "a.trunc_()", fill="unit"),
    _in_place("zero", "a.zero_()", dtypes=NUMBERS),
    _in_place("fill", "a.fill_(3)", "a.fill_(-1.5)"),
    Op("copy.in-place", variants("a=m,n b=m,n", "a.copy_(b)") + variants("a=m,n:float32 b=m,n:int64", "a.copy_(b)", "b.copy_(a)")
       + variants("a=m,n b=n", "a.copy_(b)"), pairs=True, refuses="pending"),
    Op("masked_fill.in-place", variants("a=m,n c=m,n:bool", "a.masked_fill_(c,0)", "a.masked_fill_(c,-1.5)"), refuses="pending"),
    Op("lerp.in-place", variants("a=m,n b=m,n", "a.lerp_(b,0.5)"), refuses="pending"),
    Op("addcmul.in-place", variants("a=m,n b=m,n c=m,n", "a.addcmul_(b,c)", fill="small"), refuses="pending"),
    Op("eq.in-place", variants("a=m,n b=m,n", "a.eq_(b)", "a.gt_(b)", "a.logical_not_()", fill="ties"), refuses="pending"),
    Op("bitwise.in-place", variants("a=m,n b=m,n", "a.bitwise_and_(b)", "a.bitwise_or_(b)", "a.bitwise_xor_(b)", dtypes=INTEGERS), refuses="pending"),
)  # fmt: skip

FOREACH = (
    Op("foreach_add", variants("a=m,n b=k", "_foreach_add([a,b],2)", "_foreach_add([a,b],[a,b])", "_foreach_add([a,b],[1.0,2.0])")),
    Op("foreach_mul", variants("a=m,n b=k", "_foreach_mul([a,b],2)", "_foreach_mul([a,b],[a,b])", fill="small")),
    Op(
        "foreach_norm",
        variants("a=m,n b=k", "_foreach_norm([a,b])", "_foreach_norm([a,b],1)", "_foreach_norm([a,b],inf)", fill="small"),
        exact=False,
    ),
    Op(
        "foreach_sqrt",
        variants("a=m,n b=k", "_foreach_sqrt([a,b])", "_foreach_neg([a,b])", "_foreach_abs([a,b])", fill="positive"),
        exact=False,
    ),
    Op("foreach_max", variants("a=m,n b=k", "_foreach_max([a,b])", least={"m": 1, "n": 1, "k": 1})),
)

POINTWISE = UNARY + BINARY + COMPARISONS + LOGIC + SELECTION + CASTS + IN_PLACE + FOREACH
