"""Every text is the one text of its value: parse after print is the identity, print after parse too."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardlaw.reference.mesh import Mesh
from shardlaw.reference.notation import NotationError, format_shape, parse_shape, split_outside
from shardlaw.reference.placement import (
    REDUCE_OPS,
    MaskPartial,
    Partial,
    Placement,
    Replicate,
    Shard,
    StridedShard,
    format_placements,
    parse_placements,
)
from shardlaw.reference.tensors import DTYPES, FILLS, MEMORIES, TensorSpec
from shardlaw.strategies import meshes, shapes, specs

PLACEMENTS: st.SearchStrategy[Placement] = st.one_of(
    st.just(Replicate()),
    st.integers(-4, 12).map(Shard),
    st.builds(StridedShard, st.integers(-4, 12), st.integers(1, 20)),
    st.sampled_from(REDUCE_OPS).map(Partial),
    st.integers(0, 4).map(MaskPartial),
)


@given(st.lists(st.integers(0, 10**12), max_size=6).map(tuple))
def test_shapes(shape: tuple[int, ...]) -> None:
    assert parse_shape(format_shape(shape)) == shape


@given(st.lists(PLACEMENTS, min_size=1, max_size=4).map(tuple))
def test_placements(placements: tuple[Placement, ...]) -> None:
    text = format_placements(placements)
    assert parse_placements(text) == placements
    assert format_placements(parse_placements(text)) == text
    assert " " not in text


@given(meshes(world_size=8))
def test_meshes(mesh: Mesh) -> None:
    assert Mesh.parse(str(mesh)) == mesh


@given(st.permutations(range(6)), st.sampled_from([(6,), (2, 3), (3, 2), (1, 6), (3, 1, 2)]))
def test_meshes_of_any_ranks(ranks: list[int], shape: tuple[int, ...]) -> None:
    mesh = Mesh(shape, tuple(ranks))
    assert Mesh.parse(str(mesh)) == mesh
    assert ("@" in str(mesh)) == (ranks != list(range(6)))


@given(specs(shape=shapes(), dtypes=DTYPES, fills=(*FILLS, "index5"), memories=MEMORIES))
def test_plain_tensors(spec: TensorSpec) -> None:
    assert TensorSpec.parse(str(spec)) == spec


@given(specs(mesh=Mesh.of(2, 2), dtypes=DTYPES, fills=(*FILLS, "index12"), memories=MEMORIES, reduce_ops=REDUCE_OPS, negative=True))
def test_placed_tensors(spec: TensorSpec) -> None:
    text = str(spec)
    assert TensorSpec.parse(text) == spec
    assert str(TensorSpec.parse(text)) == text
    assert not text.endswith(":")


@given(st.text("xSRP_M()@,0123456789-sum avg:", max_size=12))
def test_what_is_read_prints_as_a_text_that_reads_back(text: str) -> None:
    for parse, show in ((parse_shape, format_shape), (parse_placements, format_placements), (Mesh.parse, str), (TensorSpec.parse, str)):
        try:
            value = parse(text)  # type: ignore[operator]
        except NotationError:
            continue
        assert parse(show(value)) == value  # type: ignore[operator]


@pytest.mark.parametrize("text", ["", "x", "5x", "x6", "5X6", "-1", "5x-1", "5 x6", "1.5", "()x2", "²", "5,6"])
def test_no_shapes(text: str) -> None:
    with pytest.raises(NotationError, match="want sizes joined by 'x'"):
        parse_shape(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "S(",
        "S()",
        "S(a)",
        "s(0)",
        "r",
        "_S(0)",
        "_S(0,0)",
        "_S(0,-1)",
        "P()",
        "P(mean)",
        "P(sum",
        "M(-1)",
        "R,",
        ",R",
        "R;R",
        "S(0)S(1)",
    ],
)
def test_no_placements(text: str) -> None:
    with pytest.raises(NotationError, match="want"):
        parse_placements(text)


@pytest.mark.parametrize("text", ["", "0", "2x0", "2@", "2@0", "2@0,0", "2@0,-1", "2@a,b", "2x2@0,1,2", "@0,1", "()", "2@0,1,", "2 @0,1"])
def test_no_meshes(text: str) -> None:
    with pytest.raises(NotationError, match="mesh") as caught:
        Mesh.parse(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    "text", ["5:R:float", "5:R:float32:odd", "5:R:float32:index0", "5:R:float32:distinct:far", "5:R:float32:small:plain:", "5:Q"]
)
def test_no_tensors(text: str) -> None:
    with pytest.raises(NotationError):
        TensorSpec.parse(text)


def test_commas_inside_brackets_and_quotes_do_not_split() -> None:
    assert split_outside("S(0),_S(0,2),R") == ["S(0)", "_S(0,2)", "R"]
    assert split_outside("a;redistribute(a,'x;y');[1;2]", ";") == ["a", "redistribute(a,'x;y')", "[1;2]"]
    assert split_outside("") == []
