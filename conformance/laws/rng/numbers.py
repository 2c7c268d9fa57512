"""Laws of random ops: what a draw must be whatever the generator gives, seeds, replicas and shards."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from typing import Annotated, Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn import functional

from shardlaw.conformance import compat
from shardlaw.conformance.law.act import fields, law, texts
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.due import Alike, Claimed, Global, Of
from shardlaw.conformance.law.fields import Seed, TensorField, WordField
from shardlaw.conformance.law.law import Limits
from shardlaw.conformance.laws.shared import draws
from shardlaw.conformance.laws.shared.tensor_fields import LocalShard, PlacementsOf, ShapeOf, StrideOf
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.placement import Replicate
from shardlaw.reference.tensors import TensorSpec, dense
from shardlaw.strategies import shapes
from shardlaw.strategies.placements import placements as drawn_placements

DOC = "torch.distributed.tensor._random"

# calls whose outcome is certain, each with what it gives of the whole x
CERTAIN: dict[str, tuple[Callable[[Any], Any], Callable[[torch.Tensor], torch.Tensor]]] = {
    "bernoulli": (torch.bernoulli, lambda x: x),
    "multinomial": (lambda x: torch.multinomial(x, 1), lambda x: x.argmax(-1, keepdim=True)),
    "multinomial-more": (
        lambda x: [torch.multinomial(x, many, True) for many in (1, 2)][1],
        lambda x: x.argmax(-1, keepdim=True).expand(*x.shape[:-1], 2),
    ),
    "dropout-none": (lambda x: functional.dropout(x, 0.0), lambda x: x),
    "dropout-all": (lambda x: functional.dropout(x, 1.0), torch.zeros_like),
    "dropout-off": (lambda x: functional.dropout(x, 0.5, training=False), lambda x: x),
    "bernoulli_": (lambda x: x.bernoulli_(1.0), torch.ones_like),
    "uniform_": (lambda x: x.uniform_(2.0, 2.0), lambda x: torch.full_like(x, 2.0)),
    "normal_": (lambda x: x.normal_(3.0, 0.0), lambda x: torch.full_like(x, 3.0)),
    "randint_like": (lambda x: torch.randint_like(x, 3, 4), lambda x: torch.full_like(x, 3.0)),
}
# calls by chance, each with the least and the largest value
CHANCE: dict[str, tuple[Callable[[Any], Any], float, float]] = {
    "rand_like": (torch.rand_like, 0.0, 1.0),
    "randn_like": (torch.randn_like, float("-inf"), float("inf")),
    "exponential_": (lambda x: x.exponential_(), 0.0, float("inf")),
    "coin_": (lambda x: x.bernoulli_(0.5), 0.0, 1.0),
}


class ChancesField(TensorField):
    """A tensor of which some calls want chances, 0 and 1 in any order; for draws of indices one 1 in each row."""

    def fields(self, name: str) -> tuple[str, ...]:
        return name, self.mesh, "call"

    def read(self, case: Case, name: str) -> Global:
        x, call = super().read(case, name), case.get("call")
        if call != "bernoulli" and not call.startswith("multinomial"):
            return x
        ones = dense(x.layout.shape, torch.int64, "index2", case.seed)
        if call.startswith("multinomial"):
            *rows, width = x.layout.shape
            ones = functional.one_hot(dense((*rows,), torch.int64, f"index{width}", case.seed + 1), width)
        return x.holding(ones.to(x.full.dtype))


def inside(limits: Limits) -> list[Mesh]:
    return draws.meshes(limits, submeshes=False, permuted=False, min_size=2)


def features_random(case: Case) -> set[str]:
    return {"random"} | ({"certain"} if "call" in case and case.get("call") in CERTAIN else set())


def draw_certain(limits: Limits) -> SearchStrategy[Case]:
    on = inside(limits)

    @st.composite
    def case(draw: st.DrawFn) -> Case:
        call = draw(st.sampled_from([*CERTAIN, "bernoulli", "multinomial", "multinomial"]))
        mesh = draw(st.sampled_from(on))
        kinds = ("R", "S", "S", "P")  # a pending sum is written into only where that is refused
        shape = draw(shapes(min_dims=1, max_dims=2, min_size=1))
        at = draw(drawn_placements(mesh, len(shape), kinds=kinds))
        return fields(mesh=mesh, x=TensorSpec(shape, at), call=call, seed=draw(draws.seeds()))

    return case()


@law(
    "random.certain",
    source="torch.bernoulli, multinomial, nn.functional.dropout, Tensor.uniform_ and normal_",
    control="mesh=2 x=4x3:S(0) call=multinomial",
    features=features_random,
    draw=draw_certain,
    draws=40,
    # chances that are pending sums, which no rank has alone: seldom drawn together
    sweep=texts(
        *(f"mesh=2 x=4x3:P(sum) call={call}" for call in ("bernoulli", "multinomial", "uniform_")),
        "mesh=2 x=4x3:S(0) call=multinomial-more",
    ),
    sweeps=4,
    needs=("all_gather", "all_reduce"),
    refusal="allowed",
    weight=0.3,
)
def certain(x: Annotated[DTensor, ChancesField()], call: Annotated[str, WordField(CERTAIN)]):
    """A random call whose outcome is certain gives it: chances of 0 and 1, empty ranges, nothing or everything
    dropped."""
    with torch.random.fork_rng(devices=[]):
        return CERTAIN[call][0](x)


@certain.due
def _(x: Global, call):
    whole = CERTAIN[call][1](x.full)
    return x.holding(whole) if call.endswith("_") else Claimed(whole, x.mesh)


def draw_replicas(limits: Limits) -> SearchStrategy[Case]:
    on = inside(limits)

    @st.composite
    def case(draw: st.DrawFn) -> Case:
        mesh, shape = draw(st.sampled_from(on)), draw(shapes(min_dims=1, max_dims=2, min_size=1))
        history = draw(st.sampled_from(["none", "even", "even", "none", "even", "uneven"]))
        some = drawn_placements(mesh, len(shape), kinds=("R", "S")).filter(lambda at: Replicate() in at)
        x = TensorSpec(shape, draw(st.one_of(st.just((Replicate(),) * mesh.ndim), some)))
        more: dict[str, Any] = {}
        if history != "none":
            size = (
                draw(st.sampled_from([3, 5, 7])) if history == "uneven" else mesh.size * draw(st.sampled_from([1, 2]))
            )
            a = TensorSpec((size,), draw(drawn_placements(mesh, 1, kinds=("S", "S", "R"))))
            more = {"a": a, "before": "draw"}
        return fields(mesh=mesh, x=x, **more, call=draw(st.sampled_from(sorted(CHANCE))), seed=draw(draws.seeds()))

    return case()


@law(
    "random.replicas",
    source=f"{DOC}, docstring of manual_seed: the SPMD region maintains a synchronous RNG state",
    control="mesh=2 x=4x3:R call=rand_like",
    features=features_random,
    draw=draw_replicas,
    draws=40,
    needs=("all_gather",),
    weight=0.3,
)
def replicas(
    x: DTensor,
    call: Annotated[str, WordField(CHANCE)],
    seed: Seed,
    a: DTensor | None = None,
    before: Annotated[str, WordField(["draw"])] = "",
):
    """After one seed on all ranks, replicas agree bit by bit; the seed gives the same again, another seed another, all
    in range."""
    draw, least, most = CHANCE[call]

    def drawn(seed):
        torch.manual_seed(seed)
        if before:
            torch.rand_like(a)  # type: ignore[arg-type]
        return draw(x.clone())

    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one, again, other = drawn(seed + 1), drawn(seed + 1), drawn(seed + 2)
    local = one.to_local()
    return {
        "seed": torch.equal(again.to_local(), local),
        "other seed": call != "coin_" and local.numel() > 0 and torch.equal(other.to_local(), local),
        "out of range": local[(local < least) | (local > most) | local.isnan()].tolist(),
        "coins": call != "coin_" or set(local.flatten().tolist()) <= {0.0, 1.0},
        "shape": (tuple(one.shape), one.dtype),
        "replicas": one.full_tensor(),
    }


@replicas.due
def _(x: Global):
    alike = {"shape": Of((x.layout.shape, x.full.dtype)), "replicas": Alike(x.mesh)}
    return {"seed": True, "other seed": False, "out of range": [], "coins": True, **alike}


def draw_dropout(limits: Limits) -> SearchStrategy[Case]:
    def positive(case: Case) -> Case:
        spec = case.tensor("x")
        return case.with_fields(x=TensorSpec(spec.shape, spec.placements, "float32", "positive"))

    return draws.tensor_cases(limits, on=inside(limits), kinds=("R", "S", "_S"), min_dims=1).map(positive)


@law(
    "random.dropout",
    source="torch.nn.functional.dropout",
    control="mesh=2 x=4x6:S(0):float32:positive",
    features=features_random,
    draw=draw_dropout,
    draws=20,
    refusal="allowed",
    weight=0.2,
)
def dropout(
    local: LocalShard, mesh: DeviceMesh, placements: PlacementsOf, shape: ShapeOf, stride: StrideOf, seed: Seed
):
    """Dropout drops or scales each element, keeps the layout, and lets the gradient through where one was kept."""
    local.requires_grad_()
    x = DTensor.from_local(local, mesh, placements, shape=shape, stride=stride)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        out = functional.dropout(x, 0.5)
    kept = out.to_local()  # type: ignore[attr-defined]
    torch.autograd.backward([kept], [torch.ones_like(kept)])
    return {
        "same placements": [*out.placements] == placements,  # type: ignore[attr-defined]
        "scaled": torch.equal(kept, 2 * local * (kept != 0)),
        "gradient": local.grad is not None and torch.equal(local.grad, 2.0 * (kept != 0)),
    }


@dropout.due
def _():
    return {"same placements": Of(True), "scaled": True, "gradient": True}


def repeated(whole: torch.Tensor, mesh: DeviceMesh, placements: Any) -> list[Any]:
    """The offsets of two shards that begin alike."""
    parts = {}
    for at in itertools.product(*map(range, mesh.shape)):
        size, offset = compat.local_shape_and_offset_at(whole.shape, mesh.shape, [*at], placements)
        slices = tuple(slice(start, start + count) for start, count in zip(offset, size, strict=True))
        parts[tuple(offset)] = whole[slices].flatten().tolist()
    both = [(one, other, min(len(parts[one]), len(parts[other]))) for one, other in itertools.combinations(parts, 2)]
    return [(one, other) for one, other, size in both if size > 1 and parts[one][:size] == parts[other][:size]]


@law(
    "random.shards",
    source=f"{DOC}, docstrings of is_rng_supported_mesh and OffsetBasedRNGTracker",
    control="mesh=2 x=8x3:S(0)",
    features=features_random,
    draw=lambda limits: draws.tensor_cases(limits, on=inside(limits), kinds=("R", "S"), min_dims=1),
    draws=12,
    needs=("all_gather",),
    weight=0.1,
)
def shards(x: DTensor, seed: Seed):
    """Shards of a random tensor do not repeat one another where the device has random DTensors; elsewhere the user is
    warned."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        torch.manual_seed(seed)
        whole = torch.rand_like(x).full_tensor()  # type: ignore[attr-defined]
    if compat.is_rng_supported_mesh(x.device_mesh):
        return {"warned": True, "repeated": repeated(whole, x.device_mesh, x.placements)}
    return {"warned": any("random" in str(one.message) for one in warned), "repeated": []}


@shards.due
def _():
    silent = "random ops on a device without support must be warned of, was silent"
    return {"warned": Of(True, "wrong-error", silent), "repeated": []}
