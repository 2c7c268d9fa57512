"""The back end by which ranks share a GPU, between ranks that have none: whatever it is told goes over host memory all the same."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from shardlaw.conformance.compat import over_host
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.laws import catalogue, find
from shardlaw.conformance.target.builtin import BUILTIN
from shardlaw.conformance.world import Pool

pytestmark = pytest.mark.ranks

TARGET = replace(BUILTIN["cuda-gloo"], device="cpu", name="host-gloo")
LAWS = [law.id for law in catalogue().values() if law.chapter == "collective"]
# what gloo by itself does otherwise: strides, pieces of several sizes, work that is asked whether it is done
BEYOND_GLOO = (
    "collective.broadcast mesh=2 x=5x3:-:float32:distinct:sliced root=1",
    "collective.all-to-all mesh=2 x=3x2 form=list splits=1.2/3.1",
    "collective.reduce-scatter mesh=2 form=joined x=2 work=async",
    "redistribute.local mesh=3 x=7x5:S(0) to=S(1)",
    "module.fully-shard mesh=2 model=mlp dims=3x3x3 optimizer=sgd reshard=yes",
    "module.replicated mesh=2 gives=tensor",
    "roundtrip.sent mesh=2 x=2x2:R state={x:x}",
)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool(TARGET) as pool:
        yield pool


@pytest.mark.parametrize("law", LAWS)
def test_controls_of_collectives_hold(law: str, pool: Pool) -> None:
    (verdict,) = pool.check(find(law), [Case.parse(find(law).control)])
    assert verdict.status == "held", verdict.message


@pytest.mark.parametrize("text", BEYOND_GLOO)
def test_what_is_staged_arrives(text: str, pool: Pool) -> None:
    case = Case.parse(text)
    (verdict,) = pool.check(find(case.law), [case])
    assert verdict.status == "held", verdict.message


def test_the_target_names_it() -> None:
    assert BUILTIN["cuda-gloo"].backend == over_host.NAME
    over_host.register()
    over_host.register()
    assert over_host.NAME in dist.Backend.backend_list


def test_tensors_of_other_layouts_are_refused_in_words() -> None:
    with pytest.raises(NotImplementedError, match=r"over-host: a tensor of torch.float32 in the layout torch.sparse_coo cannot be sent"):
        over_host._to_host(torch.eye(2).to_sparse())


def test_what_torch_func_wraps_is_sent_as_the_tensor_within() -> None:
    """torch.func wraps a tensor once for each transform, and unwraps it for back ends in C++ alone."""
    seen = []

    def note(x: torch.Tensor) -> torch.Tensor:
        seen.extend([x, *over_host._unwrap_nested([x])])
        return x * 2

    x = torch.ones(2)
    torch.func.jvp(lambda x: torch.func.jvp(note, (x,), (x,))[1], (x,), (x,))
    wrapped, bare = seen
    assert wrapped is not x
    assert bare.data_ptr() == x.data_ptr()
