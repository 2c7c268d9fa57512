"""Programs of steps: their notation, what they may call, and what they become."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardlaw.conformance.law.program.parse import PlainRunObserver, Program, observe_plain_runs
from shardlaw.reference.notation import NotationError

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
    compile("\n".join(Program.parse(text).function.lines), text, "exec")


def expressions() -> st.SearchStrategy[str]:
    values = st.one_of(
        st.integers(-9, 9),
        st.floats(allow_nan=False),
        st.booleans(),
        st.none(),
        st.just(...),
        st.sampled_from(["", "a'b", "S(0)", "a, b"]),
    )
    literals = values.map(lambda value: "..." if value is ... else repr(value))
    return st.recursive(
        st.one_of(st.sampled_from(["a", "bb"]), literals),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3).map(lambda items: f"[{', '.join(items)}]"),
            st.lists(inner, max_size=3).map(lambda items: f"({''.join(f'{item}, ' for item in items)})"),
            st.tuples(st.lists(inner, max_size=2), inner).map(lambda drawn: f"add({', '.join([*drawn[0], f'dim = {drawn[1]}'])})"),
            inner.map(lambda base: f"{base if base[0].isalpha() else 'a'}.sum( )"),
        ),
        max_leaves=6,
    )


@given(st.lists(st.tuples(expressions(), st.sampled_from(["", "x = ", "y2="])), min_size=1, max_size=3))
def test_parsing_undoes_printing(steps: list[tuple[str, str]]) -> None:
    program = Program.parse("; ".join(f"{target}{text}" for text, target in steps))
    assert str(Program.parse(str(program))) == str(program)
    assert Program.parse(str(program)).function.lines == program.function.lines
    assert " " not in str(program).replace("a, b", "")


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
        ("neg(setitem(a,0,1))", "step of its own"),
        ("torch=neg(a)", "neither"),
        ("redistribute(a,b)", "as the notation says"),
    ],
)
def test_errors_name_what_is_wrong(text: str, named: str) -> None:
    with pytest.raises(NotationError) as caught:
        Program.parse(text)
    assert named in str(caught.value) or named in str(caught.value).replace("'a'", "-a")


def test_running() -> None:
    a = torch.arange(6.0).reshape(2, 3)
    values = Program.parse("x=sum(a,0);y=redistribute(x,'R');mul(y,2)").run_plain({"a": a})
    assert [value.tolist() for value in values] == [[3, 5, 7], [3, 5, 7], [6, 10, 14]]
    assert Program.parse("setitem(a,(0,slice(1,None)),9)").run({"a": a.clone()})[0][0].tolist() == [0, 9, 9]
    assert Program.parse("setitem(select(a,0,1),0,9)").run({"a": a.clone()})[0].tolist() == [9, 4, 5]
    assert [value.item() for value in Program.parse("x=sum(a);x=neg(x);abs(x)").run({"a": a})] == [15, -15, 15]


def test_whoever_watches_is_told_of_plain_runs() -> None:
    class Seen(PlainRunObserver):
        placements: tuple[str, ...] = ()

        def on_redistribute(self, tensor: Any, placements: str) -> None:
            self.placements += (f"{tuple(tensor.shape)} {placements}",)

    with observe_plain_runs(seen := Seen()):
        Program.parse("redistribute(a,'S(0)')").run_plain({"a": torch.ones(2, 3)})
    assert seen.placements == ("(2, 3) S(0)",)


def code(text: str) -> list[str]:
    """The lines of a program between the operands and the result."""
    return [line.strip() for line in Program.parse(text).function.lines if " = operands[" not in line][1:]


def test_source_is_what_a_user_writes() -> None:
    assert Program.parse("neg(a)").function.lines == [
        "def steps(operands):",
        "    a = operands['a']",
        "    step1 = torch.neg(a)",
        "    return [step1]",
    ]
    assert code("b=sum(a,0);a.add_(2);redistribute(b,'S(0),P(sum)')") == [
        "b = torch.sum(a, 0)",
        "step2 = a.add_(2)",
        'step3 = b.redistribute(placements=[Shard(0), Partial("sum")])',
        "return [b, step2, step3]",
    ]
    assert code("getitem(a,(slice(0,2),None,...,slice(None,None,2)))")[0] == "step1 = a[0:2, None, ..., ::2]"
    assert code("setitem(a,0,b)")[:2] == ["a[0] = b", "step1 = a"]
    assert code("y=clamp(a,-inf,2.5)")[0] == "y = torch.clamp(a, -torch.inf, 2.5)"


def test_the_tensors_of_a_program() -> None:
    assert Program.parse("x=add(a,b);nn.functional.relu(x).mul(c)").names() == {"a", "b", "c"}
