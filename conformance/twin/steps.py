"""What ranks run for a twin: the whole model, with bounds that follow from its own rounding, and the sharded model.

The bound of a tensor is measured. The whole model runs again: ``draws`` times with every parameter and every float of the batch one unit in
the last place higher or lower, and once in float64. The distances of these runs from the first show what rounding does to the tensor:
``noise`` is the largest distance of any element, and at least one unit in the last place of the largest element. The sharded model adds the
same terms in another order, so it may differ by :data:`SAFETY` times ``noise``: a factor of two, since both models may be off by that much,
and another two, since a few draws do not show the largest possible distance. Where values are exact and the whole model is bitwise equal
to its float64 run, nothing was rounded, and the bound is zero.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor

from shardlaw.conformance.errors import UsageError
from shardlaw.conformance.twin import build
from shardlaw.conformance.twin.record import BACKWARD, BEFORE_STEP, FORWARD, GRADIENTS, START, STEP, Key, LocalTensor, Recorder
from shardlaw.conformance.twin.spec import Plan, Twin

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from shardlaw.conformance.rank.context import RankContext

SAFETY = 4.0
ChangeGradients = Callable[[torch.nn.Module, int, str], None]
EXACT = "exact"


@dataclass(frozen=True)
class WholeRun:
    """A run of the whole model: its tensors in order, their bounds, and the class names of its submodules by path."""

    tensors: dict[Key, torch.Tensor]
    bounds: dict[Key, float]
    classes: dict[str, str]


@dataclass(frozen=True)
class RankRun:
    """A run of the sharded model on one rank. ``trail``: the ops of the submodule ``Plan.ops``; ``chances``: the ``p`` of each
    ``torch.nn.Dropout`` by path."""

    pieces: dict[Key, LocalTensor]
    trail: tuple[str, ...]
    chances: dict[str, float]


def run_whole(here: RankContext, plan: Plan, path: list[str]) -> WholeRun:
    """Run the whole model in a world of one rank. Raises :class:`UsageError` where two runs differ: the model draws random numbers."""
    sys.path[:] = path
    first = _train_whole(plan, build.unchanged)
    known = {key: piece.local for key, piece in first.events.items()}
    other = _train_whole(plan, build.unchanged, reseed=True)
    for key, value in known.items():
        if key not in other.events or not bitwise_equal(value, other.events[key].local):
            raise UsageError(f"the whole model gives another value when it runs again, first at {key}: dropout or noise must be off")
    double = _train_whole(plan, build.to_float64)
    noise = {key: _rounding_error(value, double.events[key].local) for key, value in known.items() if key in double.events}
    moved = [_perturbed_run(plan, noise, torch.Generator().manual_seed(draw)) for draw in range(plan.draws)]
    return WholeRun(known, {key: _bound(key, value, plan, double, moved) for key, value in known.items()}, first.classes)


def run_sharded(here: RankContext, plan: Plan, path: list[str]) -> RankRun:
    """Run the sharded model on this rank."""
    sys.path[:] = path
    twin = plan.twin()
    mesh = here.mesh(plan.reference_mesh(), names=tuple(plan.mesh))
    initial = replace(plan, seed=plan.seed + 1) if plan.load else plan  # other values, which the checkpoint must replace
    model = build.build_model(twin, initial, build.unchanged)
    model = twin.shard(model, mesh) or model
    rename = twin.name
    recorder = Recorder(model, (lambda path: rename(path, mesh)) if rename else lambda path: path, plan.ops)
    _train(twin, plan, model, mesh, recorder, build.unchanged)
    drops = ((path, part) for path, part in model.named_modules() if isinstance(part, torch.nn.Dropout) and part.training)
    chances = {rename(path, mesh) if rename else path: part.p for path, part in drops if 0 < part.p < 1}
    return RankRun(recorder.events, tuple(recorder.trail), chances)


def bitwise_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal in shape, dtype and every element; NaN equals NaN."""
    return one.shape == other.shape and one.dtype == other.dtype and bool(((one == other) | ((one != one) & (other != other))).all())


def distance(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The distance of each pair of elements, in float64; infinite where only one of the two is NaN."""
    if one.is_complex() or other.is_complex():
        return distance(torch.view_as_real(one.to(torch.complex128)), torch.view_as_real(other.to(torch.complex128))).amax(-1)
    one, other = one.double(), other.double()
    equal = (one == other) | ((one != one) & (other != other))
    return torch.where(equal, 0.0, (one - other).abs().nan_to_num(nan=torch.inf))


def largest(value: torch.Tensor) -> float:
    """The largest element; 0 where there is none."""
    return float(value.max()) if value.numel() else 0.0


def _rounding_error(value: torch.Tensor, double: torch.Tensor) -> float:
    """The largest distance of a tensor from its float64 version; at least one unit in the last place of its largest element."""
    if value.shape != double.shape or not value.is_floating_point():
        return 0.0
    return max(largest(distance(value, double)), torch.finfo(value.dtype).eps * largest(value.abs()))


def _perturbed_run(plan: Plan, noise: Mapping[Key, float], generator: torch.Generator) -> Recorder:
    """A run of the whole model with all values moved by one unit in the last place, and gradients, before the optimizer's step, by twice
    their noise, as those of two models may differ: for a gradient near zero the optimizer's step may then be quite different."""

    def change_gradients(model: torch.nn.Module, step: int, phase: str) -> None:
        for name, parameter in model.named_parameters():
            owner, _, leaf = name.rpartition(".")
            far = 2 * noise.get(Key(step, phase, owner, leaf), 0.0)
            if parameter.grad is not None and far:
                sign = 2 * torch.randint(0, 2, parameter.grad.shape, generator=generator) - 1
                parameter.grad += torch.where(parameter.grad == 0, 0.0, far * sign).to(parameter.grad.dtype)

    return _train_whole(plan, build.move_by_ulp(generator), change_gradients=change_gradients)


def _train_whole(plan: Plan, change: build.Change, reseed: bool = False, change_gradients: ChangeGradients | None = None) -> Recorder:
    twin = plan.twin()
    model = build.build_model(twin, plan, change)
    recorder = Recorder(model, lambda path: path, plan.ops)
    _train(twin, plan, model, None, recorder, change, reseed, change_gradients)
    return recorder


def _bound(key: Key, value: torch.Tensor, plan: Plan, double: Recorder, moved: list[Recorder]) -> float:
    if any(key not in run.events or run.events[key].local.shape != value.shape for run in (double, *moved)):
        return torch.inf  # rounding decides its shape, such as which tokens are routed to an expert
    rounded = largest(distance(value, double.events[key].local))
    if plan.values == EXACT and not rounded:
        return 0.0
    noise = max(rounded, *(largest(distance(value, run.events[key].local)) for run in moved)) if moved else rounded
    last = torch.finfo(value.dtype).eps * largest(value.abs()) if value.is_floating_point() else 0.0
    return SAFETY * max(noise, last)


def _train(
    twin: Twin,
    plan: Plan,
    model: Any,
    mesh: DeviceMesh | None,
    recorder: Recorder,
    change: build.Change,
    reseed: bool = False,
    change_gradients: ChangeGradients | None = None,
) -> None:
    """Train for the steps of the plan, and record every tensor. ``reseed``: seed each step, so that a model that draws random numbers
    gives other values than in its first run."""
    optimizer = twin.optimizer(model) if twin.optimizer else torch.optim.SGD(model.parameters(), lr=0.125)
    if plan.load:
        (twin.load or load)(model, optimizer, plan.folder)
    else:
        recorder.record_parameters(START)
    for step in range(plan.load, plan.save or plan.steps):
        batch = build.build_batch(twin, plan, step, change)
        if reseed:
            torch.manual_seed(step)
        if plan.dropout and mesh is not None:
            (twin.seed or (lambda mesh, step: torch.manual_seed(step)))(mesh, step)
        if mesh is not None and twin.part:
            batch = twin.part(batch, mesh)
        recorder.begin(step, FORWARD)
        with recorder.recording_ops(), build.float64_casts(change):
            output = run_forward(twin, model, batch)
            loss = compute_loss(twin, output, batch)
            recorder.record_loss(loss)
            recorder.begin(step, BACKWARD)
            loss.backward()  # type: ignore[no-untyped-call]
        recorder.record_parameters(GRADIENTS)
        if twin.before_step:
            twin.before_step(model, mesh)
            recorder.record_parameters(BEFORE_STEP)
        if change_gradients is not None:
            change_gradients(model, step, BEFORE_STEP if twin.before_step else GRADIENTS)
        optimizer.step()
        optimizer.zero_grad()
        recorder.record_parameters(STEP)
    if plan.save and mesh is not None:
        (twin.save or save)(model, optimizer, plan.folder)


def save(model: Any, optimizer: torch.optim.Optimizer, folder: str) -> None:
    """Save a model and its optimizer as torch's documentation does."""
    weights, moments = get_state_dict(model, optimizer)
    checkpoint.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)


def load(model: Any, optimizer: torch.optim.Optimizer, folder: str) -> None:
    """Load what :func:`save` saved, into a model that may be sharded differently."""
    weights, moments = get_state_dict(model, optimizer)
    state: dict[str, Any] = {"model": weights, "optimizer": moments}
    checkpoint.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def run_forward(twin: Twin, model: Callable[..., Any], batch: Any) -> Any:
    """The output of a model for a batch, by the twin's ``forward`` or its default."""
    if twin.forward:
        return twin.forward(model, batch)
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(batch[0]) if isinstance(batch, (tuple, list)) else model(batch)


def compute_loss(twin: Twin, output: Any, batch: Any) -> torch.Tensor:
    """The loss by the twin's ``loss`` or its default: a scalar output itself, else the mean of its squares."""
    if twin.loss:
        found = twin.loss(output, batch)
        if not isinstance(found, torch.Tensor) or found.numel() != 1:
            raise UsageError(f"loss returned {found!r}: want a tensor of one element")
        return found
    value = build.tensors_in(output if isinstance(output, (torch.Tensor, tuple, list, dict)) else vars(output))[0]
    if value.dim() == 0:
        return value
    value = value.full_tensor() if isinstance(value, DTensor) else value
    return value.float().square().mean() if value.dtype != torch.float64 else value.square().mean()
