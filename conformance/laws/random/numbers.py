"""Laws of random ops: what a draw must be whatever the generator gives, seeds, replicas and shards."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor
from torch.nn import functional

from conformance import compat
from conformance.case import Case
from conformance.law import Law, Limits
from conformance.laws import draws, scripts
from conformance.laws.given import Given, given
from conformance.report.reproducer import Script
from reference import simulate
from reference.layout import Layout
from reference.mesh import Coord, Mesh
from reference.placement import Replicate, shard_dim
from reference.tensors import TensorSpec, dense
from strategies import shapes
from strategies.placements import placements

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from conformance.here import Here

DOC = "torch.distributed.tensor._random"

# a call whose outcome is certain: the text of the call, and what it gives of the whole x
CERTAIN: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "bernoulli": ("torch.bernoulli(x)", lambda x: x),
    "multinomial": ("torch.multinomial(x, 1)", lambda x: x.argmax(-1, keepdim=True)),
    "dropout-none": ("functional.dropout(x, 0.0)", lambda x: x),
    "dropout-all": ("functional.dropout(x, 1.0)", torch.zeros_like),
    "dropout-off": ("functional.dropout(x, 0.5, training=False)", lambda x: x),
    "bernoulli_": ("x.bernoulli_(1.0)", torch.ones_like),
    "uniform_": ("x.uniform_(2.0, 2.0)", lambda x: torch.full_like(x, 2.0)),
    "normal_": ("x.normal_(3.0, 0.0)", lambda x: torch.full_like(x, 3.0)),
    "randint_like": ("torch.randint_like(x, 3, 4)", lambda x: torch.full_like(x, 3.0)),
}
CALLS: dict[str, Callable[[Any], Any]] = {
    "bernoulli": torch.bernoulli,
    "multinomial": lambda x: torch.multinomial(x, 1),
    "dropout-none": lambda x: functional.dropout(x, 0.0),
    "dropout-all": lambda x: functional.dropout(x, 1.0),
    "dropout-off": lambda x: functional.dropout(x, 0.5, training=False),
    "bernoulli_": lambda x: x.bernoulli_(1.0),
    "uniform_": lambda x: x.uniform_(2.0, 2.0),
    "normal_": lambda x: x.normal_(3.0, 0.0),
    "randint_like": lambda x: torch.randint_like(x, 3, 4),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "exponential_": lambda x: x.exponential_(),
    "coin_": lambda x: x.bernoulli_(0.5),
    "dropout": lambda x: functional.dropout(x, 0.5),
}
# calls by chance: the text of the call, and the least and the largest value
CHANCE: dict[str, tuple[str, float, float]] = {
    "rand_like": ("torch.rand_like(x)", 0.0, 1.0),
    "randn_like": ("torch.randn_like(x)", float("-inf"), float("inf")),
    "exponential_": ("x.exponential_()", 0.0, float("inf")),
    "coin_": ("x.bernoulli_(0.5)", 0.0, 1.0),
}
CONTINUOUS = ("rand_like", "randn_like", "exponential_")


def sure(case: Case) -> Given:
    """The tensor of a case with entries of 0 and 1 where a call wants chances: one 1 in each row for ``multinomial``."""
    x, call = given(case), case.get("call")
    if call not in ("bernoulli", "multinomial"):
        return x
    ones = dense(x.layout.shape, torch.int64, "index2", case.seed)
    if call == "multinomial":
        width = x.layout.shape[-1]
        ones = torch.nn.functional.one_hot(dense(x.layout.shape[:-1], torch.int64, f"index{width}", case.seed + 1), width)
    return Given(x.spec, ones.to(x.full.dtype), x.layout, x.seed)


def check_certain(case: Case, here: Here) -> None:
    """A call that leaves nothing to chance gives what it gives on the whole tensor."""
    x, call = sure(case), case.get("call")
    with here.restoring_rng():
        torch.manual_seed(case.seed)
        got = CALLS[call](x.dtensor(here))
    want = CERTAIN[call][1](x.full)
    here.same_dtensor(got, want, call, mesh=x.layout.mesh, placements=x.layout.placements if call.endswith("_") else None)


def script_certain(case: Case) -> Script:
    x, call = sure(case), case.get("call")
    constants, body = scripts.source(x, case.world)
    want = CERTAIN[call][1](x.full)
    made = scripts.script(
        [*body, f"got = {CERTAIN[call][0]}.full_tensor()", f"return {scripts.tensor(want)}, got"], world=case.world, constants=constants
    )
    return Script(made.stages, (*made.imports, "from torch.nn import functional"), made.constants)


def inside(limits: Limits) -> list[Mesh]:
    return draws.meshes(limits, outside=False, tables=False, least=2)


def draw_certain(limits: Limits) -> SearchStrategy[Case]:
    on = inside(limits)

    @st.composite
    def case(draw: st.DrawFn) -> Case:
        call, mesh = draw(st.sampled_from([*CERTAIN, "bernoulli", "multinomial", "multinomial"])), draw(st.sampled_from(on))
        kinds = ("R", "S", "S", "P")  # a pending sum is written into only where that is refused
        shape = draw(shapes(min_dims=1, max_dims=2, min_size=1))
        at = draw(placements(mesh, len(shape), kinds=kinds))
        return Case.of("random.certain", mesh=mesh, x=TensorSpec(shape, at), call=call, seed=draw(draws.seeds()))

    return case()


def sweep_certain(limits: Limits) -> list[Case]:
    """Chances that are pending sums, which no rank has alone: seldom drawn together."""
    calls = ("bernoulli", "multinomial", "uniform_")
    return [Case.of("random.certain", mesh="2", x="4x3:P(sum)", call=call) for call in calls if limits.world_size > 1]


def drawn(case: Case, here: Here, x: Given, seed: int) -> DTensor:
    """The call of a case on a fresh tensor after seeding; what is drawn ``before`` comes between."""
    torch.manual_seed(seed)
    if "before" in case:
        earlier = given(case, "a")
        torch.rand_like(earlier.dtensor(here))
    got: DTensor = CALLS[case.get("call")](x.dtensor(here))
    return got


def check_replicas(case: Case, here: Here) -> None:
    """Replicas agree bit by bit, one seed gives the same again and another seed another; elements are in range."""
    x, call, mesh = given(case), case.get("call"), given(case).layout.mesh
    with here.restoring_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one, two, other = (drawn(case, here, x, seed) for seed in (case.seed + 1, case.seed + 1, case.seed + 2))
    local = one.to_local()
    here.same(two.to_local(), local, "seed", what="what the same seed gives again")
    if call in CONTINUOUS and local.numel():
        here.require(not torch.equal(other.to_local(), local), "wrong-value", "other-seed", "another seed gives the same")
    _, least, most = CHANCE[call]
    here.require(
        bool(((local >= least) & (local <= most)).all()), "wrong-value", "range", "an element is out of range", (least, most), local
    )
    if call == "coin_":
        here.require(bool(((local == 0) | (local == 1)).all()), "wrong-value", "range", "a coin that is neither 0 nor 1", "", local)
    here.require(tuple(one.shape) == x.layout.shape and one.dtype == x.full.dtype, "wrong-metadata", "kind", "shape or dtype differs")
    here.alike(one.full_tensor(), mesh, "replicas")


def script_replicas(case: Case) -> Script:
    x, call = given(case), case.get("call")
    constants, body = scripts.source(x, case.world)
    body = [
        body[0],
        f"torch.manual_seed({case.seed + 1})",
        *(["torch.rand_like(a)"] if "before" in case else []),
        body[1],
        f"full = {CHANCE[call][0]}.full_tensor()",
        "first = full.clone()",
        "dist.broadcast(first, 0)",
        "return first, full",
    ]
    if "before" in case:
        more, made = scripts.source(given(case, "a"), case.world, "a")
        constants, body = [*constants, *more], [*body[:1], *made[1:], *body[1:]]
    return scripts.script(body, world=case.world, constants=constants)


def draw_replicas(limits: Limits) -> SearchStrategy[Case]:
    on = inside(limits)

    @st.composite
    def case(draw: st.DrawFn) -> Case:
        mesh, shape = draw(st.sampled_from(on)), draw(shapes(min_dims=1, max_dims=2, min_size=1))
        history = draw(st.sampled_from(["none", "even", "even", "none", "even", "uneven"]))
        some = placements(mesh, len(shape), kinds=("R", "S")).filter(lambda at: Replicate() in at)
        x = TensorSpec(shape, draw(st.one_of(st.just((Replicate(),) * mesh.ndim), some)))
        fields: dict[str, Any] = {}
        if history != "none":
            size = draw(st.sampled_from([3, 5, 7])) if history == "uneven" else mesh.size * draw(st.sampled_from([1, 2]))
            fields = {"a": TensorSpec((size,), draw(placements(mesh, 1, kinds=("S", "S", "R")))), "before": "draw"}
        return Case.of("random.replicas", mesh=mesh, x=x, **fields, call=draw(st.sampled_from(sorted(CHANCE))), seed=draw(draws.seeds()))

    return case()


def check_dropout(case: Case, here: Here) -> None:
    """Each element is dropped or scaled, and the gradient of what was dropped is 0; the layout stays, or what was pending is reduced."""
    x = given(case)
    local = here.tensor(x.local(here.coord(x.layout.mesh))).requires_grad_()
    at = here.placements(x.layout.placements)
    live = DTensor.from_local(local, here.mesh(x.layout.mesh), at, shape=x.full.shape, stride=x.stride)
    with here.restoring_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(case.seed)
        out: Any = functional.dropout(live, 0.5)
    got = out.to_local()
    if not here.require(list(out.placements) == at, "wrong-metadata", "placements", "dropout changes the placements", at, out.placements):
        return
    held = local.detach()
    here.require(
        bool(((got == 0) | (got == 2 * held)).all()), "wrong-value", "scaled", "an element is neither dropped nor scaled", 2 * held, got
    )
    torch.autograd.backward([got], [torch.ones_like(got)])
    if here.require(local.grad is not None, "wrong-value", "gradient", "there is no gradient") and local.grad is not None:
        here.same(local.grad, (got.detach() != 0).to(got.dtype) * 2, "gradient", what="the gradient")


def draw_dropout(limits: Limits) -> SearchStrategy[Case]:
    def positive(case: Case) -> Case:
        spec = case.tensor("x")
        return case.with_fields(x=TensorSpec(spec.shape, spec.placements, "float32", "positive"))

    return draws.placed("random.dropout", limits, on=inside(limits), kinds=("R", "S", "_S"), min_dims=1).map(positive)


def script_dropout(case: Case) -> Script:
    constants, body = scripts.source(given(case), case.world)
    body += ["out, mine = torch.nn.functional.dropout(x, 0.5), X[rank]", "good = (out.to_local() == 0) | (out.to_local() == 2 * mine)"]
    return scripts.script([*body, "return (True, x.placements), (bool(good.all()), out.placements)"], world=case.world, constants=constants)


def same_shard(layout: Layout, one: Coord, other: Coord) -> bool:
    """Whether two coordinates are replicas of one shard."""
    return all(shard_dim(at) is None or a == b for at, a, b in zip(layout.placements, one, other, strict=True))


def check_shards(case: Case, here: Here) -> None:
    """No shard repeats another where the device has random DTensors; elsewhere the user is warned."""
    x = given(case)
    live = x.dtensor(here)
    with here.restoring_rng(), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        torch.manual_seed(case.seed)
        drawn_like: Any = torch.rand_like(live)
        full = drawn_like.full_tensor()
    if not compat.name("is_rng_supported_mesh")(live.device_mesh):
        words = any("random" in str(one.message) for one in told)
        here.require(words, "wrong-error", "warning", "random ops on a device without support must be warned of, was silent")
        return
    dense = torch.tensor(full.tolist(), dtype=full.dtype)
    parts = {coord: simulate.take(dense, x.layout, coord).flatten() for coord in x.layout.mesh.coords()}
    for one, mine in parts.items():
        for other, theirs in parts.items():
            size = min(len(mine), len(theirs))
            if one < other and size > 1 and not same_shard(x.layout, one, other):
                here.require(
                    not torch.equal(mine[:size], theirs[:size]), "wrong-value", "repeated", f"shards at {one} and {other} repeat", "", full
                )


def script_shards(case: Case) -> Script:
    constants, body = scripts.source(given(case), case.world)
    body += ["with warnings.catch_warnings(record=True) as told:", '    warnings.simplefilter("always")', "    torch.rand_like(x)"]
    made = scripts.script([*body, "return True, bool(told)"], world=case.world, constants=constants)
    return Script(made.stages, ("import warnings", *made.imports), made.constants)


def features_random(case: Case) -> set[str]:
    return {"random"} | ({"certain"} if "call" in case and case.get("call") in CERTAIN else set())


LAWS = (
    Law(
        id="random.certain",
        clause="A random call whose outcome is certain gives it: chances of 0 and 1, empty ranges, nothing or everything dropped.",
        source="torch.bernoulli, multinomial, nn.functional.dropout, Tensor.uniform_ and normal_; torch.distributed.tensor docs",
        check=check_certain,
        script=script_certain,
        features=features_random,
        control="random.certain mesh=2 x=4x3:S(0) call=multinomial",
        planted="draws_among_own_categories",
        draw=draw_certain,
        draws=40,
        sweep=sweep_certain,
        sweeps=3,
        needs=("all_gather", "all_reduce"),
        refusal="allowed",
        weight=0.3,
    ),
    Law(
        id="random.replicas",
        clause="After one seed on all ranks, replicas agree bit by bit; the seed gives the same again, another seed another.",
        source=f"{DOC}, docstring of manual_seed: the SPMD region maintains a synchronous RNG state",
        check=check_replicas,
        script=script_replicas,
        features=features_random,
        control="random.replicas mesh=2 x=4x3:R call=rand_like",
        planted="ranks_seed_apart",
        draw=draw_replicas,
        draws=40,
        needs=("all_gather",),
        weight=0.3,
    ),
    Law(
        id="random.dropout",
        clause="Dropout drops or scales each element, keeps the layout, and lets the gradient through where an element was kept.",
        source="torch.nn.functional.dropout",
        check=check_dropout,
        script=script_dropout,
        features=features_random,
        control="random.dropout mesh=2 x=4x6:S(0):float32:positive",
        planted="dropout_forgets_to_scale",
        draw=draw_dropout,
        draws=20,
        refusal="allowed",
        weight=0.2,
    ),
    Law(
        id="random.shards",
        clause="Shards of a random tensor do not repeat one another where the device has random DTensors; elsewhere the user is warned.",
        source=f"{DOC}, docstrings of is_rng_supported_mesh and OffsetBasedRNGTracker",
        check=check_shards,
        script=script_shards,
        features=features_random,
        control="random.shards mesh=2 x=8x3:S(0)",
        planted="random_calls_are_silent",
        draw=lambda limits: draws.placed("random.shards", limits, on=inside(limits), kinds=("R", "S"), min_dims=1),
        draws=12,
        needs=("all_gather",),
        weight=0.1,
    ),
)
