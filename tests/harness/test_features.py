"""Features: a closed catalogue, a line of the input space for each, and the right ones read from a case."""

from __future__ import annotations

import pytest

from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.features.feature_lines import LINES
from shardlaw.conformance.law.features.features import FEATURES, features_of, is_known, missed_features
from shardlaw.conformance.laws import find

INPUT_SPACE = [
    "sizes", "what is judged", "partial inputs", "programs", "history", "arguments", "in place", "backward", "meshes", "strided shards",
    "placements given oddly", "dtypes", "memory", "checkpoints", "crashes", "collectives", "modules", "outcomes",
]  # fmt: skip

READ: list[tuple[str, str]] = [
    ("redistribute.local mesh=2 x=4:R to=S(0) seed=3", ""),
    ("redistribute.local mesh=2 x=5:S(0) to=R", "uneven"),
    ("redistribute.local mesh=2 x=4:R to=_S(0,3)", "no-box strided strided-loose strided-uneven"),
    ("redistribute.local mesh=3 x=2:S(0) to=R", "empty-shard uneven world:3"),
    ("redistribute.local mesh=2 x=0x1:R to=R", "size-0 size-1"),
    ("redistribute.local mesh=2 x=() to=R", "0-d"),
    ("redistribute.local mesh=2x2@0,2,1,3 x=8:S(0),S(0) to=R,R", "mesh-2d nested permuted world:4"),
    ("redistribute.local mesh=1x2@2,1 x=4:R,S(-1) to=R,R",
     "mesh-2d negative-shard permuted submesh unit-mesh-dim unsorted-group world:3"),
    ("redistribute.local mesh=2x2 x=8:_S(0,2),_S(0,2) to=_S(0,2),S(0)",
     "mesh-2d nested no-box strided strided-beside strided-loose strided-stacked world:4"),
    ("redistribute.local mesh=2x2 x=16:R,_S(0,2) to=R,S(0)", "mesh-2d no-box strided strided-loose world:4"),
    ("redistribute.local mesh=2x2 x=16:R,_S(0,2) to=S(-1),R",
     "mesh-2d negative-shard no-box strided strided-beside strided-loose world:4"),
    ("redistribute.local mesh=2x2 x=16:R,_S(0,2) to=S(0),R", "mesh-2d no-box strided strided-beside strided-loose world:4"),
    ("redistribute.local mesh=2x2 x=4:P(sum),P(avg):float64 to=R,R",
     "dtype:float64 mesh-2d partial-mixed partial-twice partial:avg partial:sum world:4"),
    ("redistribute.reduce mesh=2 x=4:P(max):float32:zeros to=R", "cancelling partial:max"),
    ("redistribute.refusals mesh=2 x=4:R to=S(1) attempt=far", "dim-out-of-range must-refuse"),
    ("redistribute.refusals mesh=2x2 x=4:R to=P(sum),P(max) attempt=mixed",
     "few-placements mesh-2d mixed-partials must-refuse partial-twice partial:max partial:sum world:4"),
    ("redistribute.refusals mesh=2 x=4:R to=R,R attempt=many", "many-placements must-refuse"),
    ("redistribute.bystander mesh=2 mesh.b=2@1,0 x=4:S(0) to=R flatten=a before=add",
     "bystander mesh-view permuted two-meshes unsorted-group"),
    ("redistribute.bystander mesh=2 x=4:S(0) to=R before=none", ""),
    ("mesh.equality mesh=2 mesh.b=2 names=both world=3", "named-mesh submesh world:3"),
    ("layout.distribute mesh=2 x=4x4:S(0):bfloat16:distinct:sliced", "dtype:bfloat16 memory:sliced noncontiguous"),
    ("layout.distribute mesh=2 x=4:S(0):float32:distinct:transposed", ""),
    ("gradient.to-local mesh=2 x=4:S(0) declared=R", "backward grad-placements"),
    ("op.forward[mean] mesh=2 a=4x4:S(0) steps=mean(a,1)", ""),
    ("op.forward[mean] mesh=2 a=4x4:S(0) steps=mean(a,(0,-1),keepdim=True)", "dim-tuple keepdim negative-dim"),
    ("op.forward[sum] mesh=2 a=4x4:S(0) steps=sum(a,None);sum(a,())", "dim-empty dim-none program repeated reused"),
    ("op.forward[add] mesh=2 a=4x2:S(0) b=1x2:R:int64 steps=add(a,b,alpha=-2)",
     "broadcast dtype:int64 option:alpha size-1 type-promotion unlike-placements"),
    ("op.forward[add] mesh=2 a=4:S(0) steps=add(a,-2)", "scalar:int"),
    ("op.forward[mul] mesh=2 a=4:S(0) b=4 steps=mul(mul(mul(a,2.5),True),tensor(2));b",
     "plain-operand program repeated scalar:bool scalar:float scalar:tensor"),
    ("op.forward[add_] mesh=2 a=4x2:S(0) steps=t(a).add_(1);b=getitem(a,0);b.zero_();a",
     "in-place program reused scalar:int view write-through-view"),
    ("op.forward[sort] mesh=2 a=4:R:float32:ties steps=sort(a,-1,descending=True)", "negative-dim option:descending several-outputs tie"),
    ("op.forward[max] mesh=2 a=4x2:R steps=max(a,1)", "no-identity several-outputs"),
    ("op.forward[max] mesh=2 a=4x2:R steps=max(a)", "no-identity"),
    ("op.forward[norm] mesh=2 a=4:S(0) steps=_foreach_norm([a],inf);linalg.vector_norm(a,-inf,0);linalg.vector_norm(a,1)",
     "no-identity operands-in-list program repeated reused"),
    ("op.forward[norm] mesh=2 a=4:S(0) steps=norm(a,2)", ""),
    ("op.forward[cat] mesh=2 a=4:S(0) b=6:S(0) steps=cat([a,b],0)", "extents-differ operands-in-list"),
    ("op.forward[embedding] mesh=2 i=4:R:int64:index6 w=6x2:S(0) steps=nn.functional.embedding(i,w)", "unlike-placements"),
    ("op.forward[reshape] mesh=2 a=4x2:S(0) steps=reshape(a,(-1,))", "view"),
    ("op.forward[add] mesh=2 a=4:S(0) b=4:S(0) c=4:S(0) steps=add(a,b,out=c)", "out-argument"),
    ("op.program mesh=2 a=4:S(0) steps=x=redistribute(a,'R');neg(x)", "program redistributed"),
    ("roundtrip.dtensor mesh=2 x=4:S(0)", ""),
    ("roundtrip.dtensor mesh=2 mesh.load=3@2,1,0 x=6:S(0) to.x=S(0)", "permuted reshard reworld unsorted-group world:3"),
    ("roundtrip.plain mesh=2 x=4:S(0) a=4 to.x=- to.a=-", "kinds-crossed plain-tensor several-tensors"),
    ("roundtrip.dtype mesh=2 x=4:S(0) dtype=int64 memory=transposed", "cast dtype:int64 memory:transposed noncontiguous"),
    ("roundtrip.kinds mesh=2 x=4:S(0) state={w:x,0:x,b:[],n:1,h:stateful({})} into={w:x}",
     "alias empty-container nested-state odd-keys other-state other-values stateful"),
    ("roundtrip.files mesh=2 x=4:S(0) threads=2 async=stager order=ab", "async-save saved-twice saved-with:threads storage-option"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "features"), READ, ids=[text for text, _ in READ])
def test_the_features_of_a_case(text: str, features: str) -> None:
    assert sorted(features_of(Case.parse(text))) == features.split()


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("collective.all-gather mesh=2 x=2", "all_gather"),
        ("collective.dtypes mesh=2 x=2 call=reduce_scatter_single", "reduce_scatter reduce_scatter_single"),
        ("collective.functional[all_gather_coalesced] mesh=2 x=5x3", "all_gather"),
        ("collective.async mesh=2 x=2 calls=all_reduce/broadcast", "all_reduce broadcast"),
        ("collective.interleaved mesh=2 mesh.b=2@2,3 x=2 calls=a:all_gather/b:reduce", "all_gather reduce"),
        ("collective.new-group mesh=2", ""),
    ],
)
def test_a_case_names_the_collectives_whose_forms_it_calls(text: str, named: str) -> None:
    case = Case.parse(text)
    found = features_of(case, find(case.law))
    assert sorted(name.removeprefix("collective:") for name in found if name.startswith("collective:")) == named.split()


def test_a_history_is_a_feature() -> None:
    case = Case.parse("redistribute.local mesh=2 x=4:R to=R")
    assert features_of(case.with_after((case,))) == {"history"}


def test_every_line_of_the_input_space_has_features() -> None:
    assert list(LINES) == INPUT_SPACE
    assert all(LINES.values())
    names = [name for features in LINES.values() for name in features]
    assert len(names) == len(set(names)) == len(FEATURES)


def test_the_catalogue_knows_its_names_and_the_families_and_nothing_else() -> None:
    assert is_known("uneven")
    assert is_known("op:aten.mean.dim")
    assert is_known("option:alpha")
    assert not is_known("odd")
    assert not is_known("op:")
    assert not is_known("op:*")


def test_what_was_not_reached_is_listed_and_a_family_is_reached_by_any_of_its_members() -> None:
    left = missed_features({"uneven", "op:aten.mean.dim"})
    assert "uneven" not in left
    assert "op:*" not in left
    assert {"option:*", "dtype:bool", "partial:avg"} <= set(left)
    assert "history" not in left
    assert missed_features(FEATURES) == []
