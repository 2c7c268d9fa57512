"""Programs of steps: their notation, what they may call, and what they become."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from conformance.program import Program
from conformance.program_tree import Call, Literal, Name, Node, Row, Step
from reference.notation import NotationError

CANONICAL = (
    "mean(a,1,keepdim=True)",
    "b=sum(a,0);relu(b)",
    "cat([a,b],dim=0)",
    "getitem(a,(slice(0,2),None,...,slice(None,None,2)))",
    "a.add_(2)",
    "add_(a,2)",
    "redistribute(a,'S(0),R')",
    "to(a,torch.int64)",
    "nn.functional.softmax(a,-1)",
    "linalg.vector_norm(a,0.5)",
    "setitem(a,(0,slice(1,None)),-2.5)",
    "aten.mean.dim(a,[0])",
    "einsum('ij,jk->ik',a,b)",
    "clamp(a,-inf,inf)",
    "sum(a,())",
    "sum(a,(0,))",
    "add(a,tensor(2,dtype=torch.int64))",
    "a.T",
    "x=t(a).contiguous();x",
    "_foreach_add_([a,b],1e-05)",
)


@pytest.mark.parametrize("text", CANONICAL)
def test_printing_is_canonical(text: str) -> None:
    assert str(Program.parse(text)) == text
    assert Program.parse(text).source()


def nodes() -> st.SearchStrategy[Node]:
    values = st.one_of(
        st.integers(-9, 9), st.floats(allow_nan=False), st.booleans(), st.none(), st.just(...), st.sampled_from(["", "a'b", "S(0)"])
    )
    leaves = st.one_of(st.sampled_from([Name("a"), Name("bb")]), values.map(Literal))
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.tuples(st.lists(inner, max_size=3), st.booleans()).map(lambda drawn: Row(tuple(drawn[0]), drawn[1])),
            st.tuples(st.lists(inner, max_size=2), st.lists(inner, max_size=1)).map(
                lambda drawn: Call("add", tuple(drawn[0]), tuple(("dim", value) for value in drawn[1]))
            ),
            inner.map(lambda base: Call("sum", (), (), Name("a") if isinstance(base, Literal) else base)),
        ),
        max_leaves=6,
    )


@given(st.lists(st.tuples(nodes(), st.sampled_from(["", "x", "y2"])), min_size=1, max_size=3))
def test_parsing_undoes_printing(steps: list[tuple[Node, str]]) -> None:
    program = Program(tuple(Step(node, target) for node, target in steps))
    assert Program.parse(str(program)) == program


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "at least one step"),
        ("a b", "character 3"),
        ("a+1", "a + 1"),
        ("foo(a)", "'foo'"),
        ("load('x')", "'load'"),
        ("torch.load('x')", "'load'"),
        ("os.system('ls')", "'system'"),
        ("a.__class__", ".__class__"),
        ("a.__reduce__()", "'__reduce__'"),
        ("nn.functional.nope(a)", "'nope'"),
        ("linalg.__loader__.load_module('os')", "load_module"),
        ("aten.mean(a)", "aten.mean.dim"),
        ("to(a,torch.nope)", "torch.nope"),
        ("sum(**a)", "**"),
        ("x,y=a", "neither"),
        ("[a for a in b]", "[a for a in b]"),
        ("import os", "neither"),
        ("-a", "-a"),
    ],
)
def test_errors_name_what_is_wrong(text: str, named: str) -> None:
    with pytest.raises(NotationError) as caught:
        Program.parse(text)
    assert named in str(caught.value) or named in str(caught.value).replace("'a'", "-a")


def test_running() -> None:
    a = torch.arange(6.0).reshape(2, 3)
    values = Program.parse("x=sum(a,0);y=redistribute(x,'R');mul(y,2)").run({"a": a})
    assert [value.tolist() for value in values] == [[3, 5, 7], [3, 5, 7], [6, 10, 14]]
    placed = Program.parse("redistribute(a,'S(0)')").run({"a": a}, lambda tensor, to: (tensor.shape, to))
    assert placed == [((2, 3), "S(0)")]
    assert Program.parse("setitem(a,(0,slice(1,None)),9)").run({"a": a.clone()})[0][0].tolist() == [0, 9, 9]
    with pytest.raises(NotationError, match="neither a tensor of the case"):
        Program.parse("neg(c)").run({"a": a})


def test_source_is_what_a_user_writes() -> None:
    assert Program.parse("b=sum(a,0);a.add_(2);redistribute(b,'S(0),P(sum)')").source() == [
        "b = torch.sum(a, 0)",
        "a.add_(2)",
        "out = b.redistribute(placements=[Shard(0), Partial('sum')])",
    ]
    assert Program.parse("getitem(a,(slice(0,2),None,...,slice(None,None,2)))").source() == ["out = a[0:2, None, ..., ::2]"]
    assert Program.parse("setitem(a,0,b)").source() == ["a[0] = b", "out = a"]
    assert Program.parse("clamp(a,-inf,2.5)").source("y") == ['y = torch.clamp(a, float("-inf"), 2.5)']


def test_names_and_functions() -> None:
    program = Program.parse("x=add(a,b);nn.functional.relu(x).mul(c)")
    assert program.names() == {"a", "b", "c"}
    assert program.functions() == ["add", "mul", "nn.functional.relu"]
