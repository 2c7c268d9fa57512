"""Laws of random ops that hold for any generator: results that are certain, seeds, replicas and shards."""

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
from shardlaw.conformance.law.act import fields, law
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
from shardlaw.strategies.placements import placements as placements_strategy

DOC = "torch.distributed.tensor._random"

# calls whose result is certain, each with its result for the dense x
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
# random calls, each with the smallest and the largest value
RANDOM: dict[str, tuple[Callable[[Any], Any], float, float]] = {
    "rand_like": (torch.rand_like, 0.0, 1.0),
    "randn_like": (torch.randn_like, float("-inf"), float("inf")),
    "exponential_": (lambda x: x.exponential_(), 0.0, float("inf")),
    "coin_": (lambda x: x.bernoulli_(0.5), 0.0, 1.0),
}


class ProbabilitiesField(TensorField):
    """The operand ``x``. For calls that take probabilities these are 0 or 1; for multinomial each row has a single
    1."""

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


def meshes(limits: Limits) -> list[Mesh]:
    """Meshes over the whole world."""
    return draws.meshes(limits, submeshes=False, permuted=False, min_size=2)


def features_random(case: Case) -> set[str]:
    return {"random"} | ({"certain"} if "call" in case and case.get("call") in CERTAIN else set())


@st.composite
def draw_certain(draw: st.DrawFn, limits: Limits) -> Case:
    call = draw(st.sampled_from([*CERTAIN, "bernoulli", "multinomial", "multinomial"]))
    mesh = draw(st.sampled_from(meshes(limits)))
    kinds = ("R", "S", "S", "P")  # in-place calls refuse pending sums
    shape = draw(shapes(min_dims=1, max_dims=2, min_size=1))
    at = draw(placements_strategy(mesh, len(shape), kinds=kinds))
    return fields(mesh=mesh, x=TensorSpec(shape, at), call=call, seed=draw(draws.seeds()))


@law(
    "random.certain",
    source="torch.bernoulli, multinomial, nn.functional.dropout, Tensor.uniform_ and normal_",
    control="mesh=2 x=4x3:S(0) call=multinomial",
    features=features_random,
    draw=draw_certain,
    draws=40,
    # seldom drawn: probabilities that are pending sums, which no rank has alone, and those of one row in several shards
    cases=(
        *(f"mesh=2 x=4x3:P(sum) call={call}" for call in ("bernoulli", "multinomial", "uniform_")),
        "mesh=2 x=4x3:S(0) call=multinomial-more",
        "mesh=2 x=4x3:S(1) call=multinomial",
    ),
    needs=("all_gather", "all_reduce"),
    refusal="allowed",
    weight=0.3,
)
def certain(x: Annotated[DTensor, ProbabilitiesField()], call: Annotated[str, WordField(CERTAIN)]):
    """A random call whose result is certain returns it: probabilities of 0 and 1, empty ranges, dropout of nothing or
    everything."""
    with torch.random.fork_rng(devices=[]):
        return CERTAIN[call][0](x)


@certain.due
def _(x: Global, call):
    full = CERTAIN[call][1](x.full)
    return x.holding(full) if call.endswith("_") else Claimed(full, x.mesh)


@st.composite
def draw_replicas(draw: st.DrawFn, limits: Limits) -> Case:
    mesh, shape = draw(st.sampled_from(meshes(limits))), draw(shapes(min_dims=1, max_dims=2, min_size=1))
    history = draw(st.sampled_from(["none", "even", "even", "none", "even", "uneven"]))
    partly_replicated = placements_strategy(mesh, len(shape), kinds=("R", "S")).filter(lambda at: Replicate() in at)
    x = TensorSpec(shape, draw(st.one_of(st.just((Replicate(),) * mesh.ndim), partly_replicated)))
    more: dict[str, Any] = {}
    if history != "none":
        uneven = history == "uneven"
        size = draw(st.sampled_from([3, 5, 7])) if uneven else mesh.size * draw(st.sampled_from([1, 2]))
        a = TensorSpec((size,), draw(placements_strategy(mesh, 1, kinds=("S", "S", "R"))))
        more = {"a": a, "before": "draw"}
    return fields(mesh=mesh, x=x, **more, call=draw(st.sampled_from(sorted(RANDOM))), seed=draw(draws.seeds()))


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
    call: Annotated[str, WordField(RANDOM)],
    seed: Seed,
    a: DTensor | None = None,
    before: Annotated[str, WordField(["draw"])] = "",
):
    """After one seed on all ranks, replicas agree bit by bit, the same seed repeats the result, another seed changes
    it, and values are in range."""
    function, least, most = RANDOM[call]

    def call_with_seed(seed):
        torch.manual_seed(seed)
        if before:
            torch.rand_like(a)  # type: ignore[arg-type]
        return function(x.clone())

    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        first, again, other = call_with_seed(seed + 1), call_with_seed(seed + 1), call_with_seed(seed + 2)
    local = first.to_local()
    return {
        "seed": torch.equal(again.to_local(), local),
        "other seed": call != "coin_" and local.numel() > 0 and torch.equal(other.to_local(), local),
        "out of range": local[(local < least) | (local > most) | local.isnan()].tolist(),
        "coins": call != "coin_" or set(local.flatten().tolist()) <= {0.0, 1.0},
        "shape": (tuple(first.shape), first.dtype),
        "replicas": first.full_tensor(),
    }


@replicas.due
def _(x: Global):
    alike = {"shape": Of((x.layout.shape, x.full.dtype)), "replicas": Alike(x.mesh)}
    return {"seed": True, "other seed": False, "out of range": [], "coins": True, **alike}


def draw_dropout(limits: Limits) -> SearchStrategy[Case]:
    def positive(case: Case) -> Case:
        spec = case.tensor("x")
        return case.with_fields(x=TensorSpec(spec.shape, spec.placements, "float32", "positive"))

    return draws.tensor_cases(limits, on=meshes(limits), kinds=("R", "S", "_S"), min_dims=1).map(positive)


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
    """Dropout drops or scales each element, keeps the layout, and passes the gradient of kept elements."""
    local.requires_grad_()
    x = DTensor.from_local(local, mesh, placements, shape=shape, stride=stride)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(seed)
        out = functional.dropout(x, 0.5)
    out_local = out.to_local()  # type: ignore[attr-defined]
    torch.autograd.backward([out_local], [torch.ones_like(out_local)])
    return {
        "same placements": [*out.placements] == placements,  # type: ignore[attr-defined]
        "scaled": torch.equal(out_local, 2 * local * (out_local != 0)),
        "gradient": local.grad is not None and torch.equal(local.grad, 2.0 * (out_local != 0)),
    }


@dropout.due
def _():
    return {"same placements": Of(True), "scaled": True, "gradient": True}


def repeated_shards(full: torch.Tensor, mesh: DeviceMesh, placements: Any) -> list[Any]:
    """The offsets of pairs of shards that begin with the same values."""
    parts = {}
    for at in itertools.product(*map(range, mesh.shape)):
        size, offset = compat.local_shape_and_offset_at(full.shape, mesh.shape, [*at], placements)
        slices = tuple(slice(start, start + count) for start, count in zip(offset, size, strict=True))
        parts[tuple(offset)] = full[slices].flatten().tolist()
    sizes = {pair: min(len(parts[at]) for at in pair) for pair in itertools.combinations(parts, 2)}
    return [(a, b) for (a, b), size in sizes.items() if size > 1 and parts[a][:size] == parts[b][:size]]


@law(
    "random.shards",
    source=f"{DOC}, docstrings of is_rng_supported_mesh and OffsetBasedRNGTracker",
    control="mesh=2 x=8x3:S(0)",
    features=features_random,
    draw=lambda limits: draws.tensor_cases(limits, on=meshes(limits), kinds=("R", "S"), min_dims=1),
    draws=12,
    needs=("all_gather",),
    weight=0.1,
)
def shards(x: DTensor, seed: Seed):
    """Shards of a random tensor do not repeat one another where the device supports random DTensors; elsewhere a
    warning is given."""
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        torch.manual_seed(seed)
        full = torch.rand_like(x).full_tensor()  # type: ignore[attr-defined]
    if compat.is_rng_supported_mesh(x.device_mesh):
        return {"warned": True, "repeated": repeated_shards(full, x.device_mesh, x.placements)}
    return {"warned": any("random" in str(warning.message) for warning in warned), "repeated": []}


@shards.due
def _():
    silent = "random ops on a device without support must be warned of, was silent"
    return {"warned": Of(True, "wrong-error", silent), "repeated": []}
