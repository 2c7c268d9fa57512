"""A model of one's own, whole and sharded: what holds, what departs and is named, what cannot be asked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from shardlaw.conformance.commands import cli
from shardlaw.conformance.twin import session
from shardlaw.conformance.twin.session import Session

pytestmark = pytest.mark.ranks

SMALL = """
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from shardlaw import Twin

class Net(nn.Module):
    def __init__(self, width, layers):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width)) for _ in range(layers)
        )

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x

def make(fault=""):
    def shard(model, mesh):
        for layer in model.layers:
            parallelize_module(layer, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        if fault == "drift" and mesh.get_rank() == 1:  # one replica of a bias, by one unit in the last place
            with torch.no_grad():
                bias = model.layers[0][2].bias.to_local()
                bias.copy_(torch.nextafter(bias, torch.full_like(bias, 9.0)))
        if fault == "row":
            model.layers[1][2].register_forward_hook(lambda module, args, output: output * 2)
        if fault == "raises" and mesh.get_rank() == 1:
            raise ValueError("no such plan")
        if fault == "wide":
            model.layers[1][2].register_forward_hook(lambda module, args, output: torch.cat([output, output], 1))
        if fault == "drawn":
            model.layers[1][2].reset_parameters()
        if fault == "nothing":
            return nn.Sequential(model)
    return Twin(
        model=lambda width, layers, **_: Net(width, layers),
        batch=lambda step, batch, width, **_: torch.randn(batch, width),
        shard=shard,
        mesh={"tp": 2},
        sizes={"width": (8, 2), "layers": (3, 1), "batch": 4},
        values=("exact", "float32"),
    )

def noisy():
    class Noisy(Net):
        def forward(self, x):
            return super().forward(x) + torch.randn_like(x)
    return Twin(lambda **_: Noisy(4, 1), lambda step, **_: torch.randn(2, 4), lambda model, mesh: model, {"tp": 2})

def broken():
    return Twin(lambda **_: Net(4, 1), lambda step, **_: torch.randn(2, 5), lambda model, mesh: model, {"tp": 2})

def other():
    return 5
"""


@pytest.fixture(scope="module")
def live() -> Iterator[Session]:
    with Session() as made:
        yield made


@pytest.fixture
def same_ranks(live: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands use the ranks of earlier ones, instead of starting their own as the first test does."""
    monkeypatch.setattr(session, "Session", lambda target, tell: nullcontext(live))


def twin(tmp_path: Path, *arguments: str, make: str = "make") -> int:
    """Run the command on the twin above; returns the exit code."""
    (tmp_path / "small.py").write_text(SMALL)
    return cli.main(["twin", f"{tmp_path / 'small.py'}:{make}", "--report", str(tmp_path / "report"), *arguments])


def test_what_is_the_same_model_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert twin(tmp_path) == 0
    out = capsys.readouterr().out
    assert out.startswith("  values exact: the whole model, and the sharded one on "), "what is tried is said at once"
    assert "exact: held" in out
    assert "float32: held" in out
    data = json.loads((tmp_path / "report" / "twin.json").read_bytes())
    assert not data["departs"]
    seen = data["runs"][1]["tensors"]
    assert {one["phase"] for one in seen} == {"start", "forward", "loss", "backward", "gradients", "step"}
    assert {one["submodule"] for one in seen} >= {"", "layers.0", "layers.2.2", "(loss)"}
    assert max(one["ratio"] for one in seen) < 1
    exact = {
        (one["submodule"], one["what"]): one["bound"] for one in data["runs"][0]["tensors"] if one["phase"] == "forward" and not one["step"]
    }
    assert exact["layers.0.0", "output 0"] == 0
    assert exact["layers.0.1", "output 0"] > 0


@pytest.mark.usefixtures("same_ranks")
def test_the_first_departure_is_named_and_shrunk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert twin(tmp_path, "--option", "fault=row") == 1
    departure = json.loads((tmp_path / "report" / "twin.json").read_bytes())["runs"][-1]["departure"]
    assert departure["path"] == "layers.1.2"
    assert (departure["phase"], departure["what"], departure["step"]) == ("forward", "output 0", 0)
    smallest = json.loads((tmp_path / "report" / "twin.json").read_bytes())["smallest"]
    assert smallest["plan"]["sizes"] == {"width": 2, "layers": 2, "batch": 4}
    assert smallest["plan"]["steps"] == 1
    page = (tmp_path / "report" / "twin.html").read_text()
    assert "departs first: layers.1.2" in page
    assert "layers.1.2" in capsys.readouterr().out


@pytest.mark.usefixtures("same_ranks")
def test_a_replica_that_drifts_by_one_unit_is_seen(tmp_path: Path) -> None:
    assert twin(tmp_path, "--option", "fault=drift", "--no-shrink", "--values", "float32") == 1
    departure = json.loads((tmp_path / "report" / "twin.json").read_bytes())["runs"][-1]["departure"]
    assert departure["submodule"] == "layers.0.2"
    assert departure["what"] == "bias"


@pytest.mark.usefixtures("same_ranks")
def test_submodules_of_other_paths_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert twin(tmp_path, "--option", "fault=nothing", "--values", "float32") == 0
    assert "not compared, since the sharded model has none of them: layers.0.0" in capsys.readouterr().out


@pytest.mark.usefixtures("same_ranks")
def test_a_rank_that_raises_is_a_departure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert twin(tmp_path, "--option", "fault=raises") == 1
    assert "rank 1 raised ValueError: no such plan" in capsys.readouterr().out


@pytest.mark.usefixtures("same_ranks")
def test_what_every_rank_says_is_said_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert twin(tmp_path, "--option", "fault=wide", "--values", "float32") == 1
    out = capsys.readouterr().out
    assert out.count("RuntimeError: The size of tensor") == 2  # in the headline and of both ranks
    assert "ranks 0, 1 raised" in out
    assert "in Net.forward" in out
    assert "_call_impl" not in out


@pytest.mark.usefixtures("same_ranks")
def test_values_that_are_drawn_after_sharding_are_another_models(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert twin(tmp_path, "--option", "fault=drawn", "--no-shrink", "--values", "float32") == 1
    out = capsys.readouterr().out
    assert "layers.1.2: its weight before the first step" in out
    assert "drawn or loaded after sharding" in out


@pytest.mark.usefixtures("same_ranks")
def test_dropout_that_there_is_none_of_cannot_be_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert twin(tmp_path, "--dropout", "--values", "float32") == 2
    assert capsys.readouterr().err.startswith("shardlaw: dropout: the sharded model has no torch.nn.Dropout")


@pytest.mark.parametrize(
    ("arguments", "make", "said"),
    [
        ([], "none", "has no function none"),
        ([], "other", "make returned 5: want a shardlaw.Twin"),
        ([], "noisy", "gives another value when it runs again, first at (the model): its output 0"),
        ([], "broken", "the whole model does not run"),
        (["--option", "flaw=row"], "make", "unexpected keyword argument 'flaw'"),
        (["--size", "depth=2"], "make", "size depth=2: the twin has no such size or mesh dim"),
        (["--size", "layers=0"], "make", "want a whole number of 1 or more"),
        (["--values", "float8"], "make", "--values float8: unknown"),
        (["--steps", "0"], "make", "--steps 0: want 1 or more"),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("same_ranks")
def test_what_cannot_be_asked_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], make: str, said: str
) -> None:
    assert twin(tmp_path, *arguments, make=make) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
