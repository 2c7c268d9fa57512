"""Laws of loss_parallel: the cross entropy of logits whose classes are sharded, its gradient, and where the context ends."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn.functional import cross_entropy

from conformance.case import Case
from conformance.law import Law, Limits
from conformance.laws import draws, scripts
from conformance.laws.given import Given, given
from conformance.laws.module.given import incoming, near, near_dtensor
from conformance.report.reproducer import Script
from reference import simulate
from reference.layout import Layout
from reference.mesh import Mesh
from reference.placement import Partial, Placements, Shard
from reference.placement import Replicate as R
from reference.tensors import TensorSpec
from strategies.modules import eighths, indices

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from hypothesis.strategies import SearchStrategy

    from conformance.here import Here

DOC = "torch.distributed.tensor.parallel docs, loss_parallel"
NEEDS = ("all_gather", "all_reduce")
# what is known to deviate, and would hide the rest if it were drawn: labels of two dims, an ignored label that is no class beside weights,
# a rank that is left without classes
KNOWN = {
    "module.loss": (
        "mesh=2 x=2x5x3x2:S(1):float64 reduction=mean ignore=1 targets=sharded seed=4",
        "mesh=2 x=5x8x2:S(1):float64 reduction=none weight=plain ignore=255",
        "mesh=3 x=1x4:S(1) reduction=mean ignore=1 weight=plain targets=sharded",
        "mesh=2 x=4x5:S(1):float64 reduction=mean ignore=1 weight=plain",
    ),
    "module.loss-beside": (
        "mesh=2x2 x=2x4x3x2:S(1),S(2):float64 reduction=none weight=sharded ignore=0 targets=sharded seed=8",
        "mesh=1x2 x=4x9x2:S(0),S(1) reduction=none weight=plain ignore=-100 targets=sharded",
    ),
}


@contextlib.contextmanager
def parallel_loss() -> Iterator[None]:
    """The context; a body that raises leaves nothing of it behind, whatever torch does."""
    try:
        with loss_parallel():
            yield
    except BaseException:
        with loss_parallel():
            pass
        raise


class Loss:
    """The loss that a case asks for: logits ``x``, ``reduction``, and as it says ``ignore``, ``weight``, ``targets`` and ``smooth``."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.x: Given = given(case)
        self.layout = self.x.layout
        self.classes = 1 if self.x.full.ndim > 1 else 0
        self.count = self.layout.shape[self.classes]
        self.reduction = case.get("reduction", "mean")

    def logits(self) -> torch.Tensor:
        """Eighths, larger towards the last class."""
        return eighths(self.layout.shape, self.case.seed).to(self.x.full.dtype)

    def labels(self) -> torch.Tensor:
        """Classes, or chances of them; every third label is the one to ignore, if any is."""
        shape = tuple(extent for dim, extent in enumerate(self.layout.shape) if dim != self.classes)
        if self.case.get("targets", "") == "chances":
            return torch.full(self.layout.shape, 1 / self.count, dtype=self.x.full.dtype)
        made = indices(shape, self.count, self.case.seed)
        if "ignore" in self.case:
            made = torch.where(torch.arange(made.numel()).reshape(shape) % 3 == 2, self.case.integer("ignore"), made)
        return made

    def weight(self) -> torch.Tensor | None:
        """A power of two for each class."""
        return 2.0 ** (torch.arange(self.count, dtype=self.x.full.dtype) % 4 - 1) if "weight" in self.case else None

    def options(self) -> dict[str, Any]:
        told: dict[str, Any] = {"reduction": self.reduction}
        if "ignore" in self.case:
            told["ignore_index"] = self.case.integer("ignore")
        if "smooth" in self.case:
            told["label_smoothing"] = float(self.case.get("smooth"))
        return told

    def label_placements(self) -> Placements:
        """Those of the logits without the dim of the classes."""

        def without(dim: int) -> Any:
            return R() if dim == self.classes else Shard(dim - (dim > self.classes))

        return tuple(without(at.dim) if isinstance(at, Shard) else at for at in self.layout.placements)

    def leaves(self) -> Placements:
        """What the documents say of the loss: sums are pending where samples are sharded."""
        labels = self.label_placements()
        return labels if self.reduction == "none" else tuple(Partial("sum") if isinstance(at, Shard) else at for at in labels)

    def dense(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The loss and the gradient of the logits, each dense."""
        full = self.logits().requires_grad_()
        loss: Any = cross_entropy(full, self.labels(), self.weight(), **self.options())
        loss.backward(incoming(loss, self.case.seed).to(loss.dtype) if self.reduction == "none" else torch.ones_like(loss))
        assert full.grad is not None
        return loss.detach(), full.grad

    def live(self, here: Here, full: torch.Tensor, placements: Placements) -> Any:
        """A DTensor on the mesh of the case, a leaf without a gradient."""
        layout = Layout(tuple(full.shape), self.layout.mesh, placements)
        coord = here.coord(layout.mesh)
        assert coord is not None
        local = here.tensor(simulate.take(full, layout, coord)).contiguous()
        at = here.placements(placements)
        return DTensor.from_local(local, here.mesh(layout.mesh), at, shape=full.shape, stride=full.stride()).detach()


def check_loss(case: Case, here: Here) -> None:
    """The loss and the gradient are the dense ones, and the loss is placed as documented."""
    loss = Loss(case)
    want, want_grad = loss.dense()
    logits = loss.live(here, loss.logits(), loss.layout.placements).requires_grad_()
    sharded = case.get("targets", "plain") == "sharded"
    labels = loss.live(here, loss.labels(), loss.label_placements()) if sharded else here.tensor(loss.labels())
    weight: Any = loss.weight()
    if weight is not None:
        mesh = loss.layout.mesh
        weight = loss.live(here, weight, (R(),) * mesh.ndim) if case.get("weight") == "sharded" else here.tensor(weight)
    with parallel_loss():
        got: Any = cross_entropy(logits, labels, weight, **loss.options())
        near_dtensor(here, got, want, "loss", "the loss", None if "smooth" in case else loss.leaves())
        if loss.reduction == "none":
            got.backward(loss.live(here, incoming(want, case.seed).to(want.dtype), loss.label_placements()))
        else:
            got.backward()
    near_dtensor(here, logits.grad, want_grad, "gradient", "the gradient of the logits")


def features_loss(case: Case) -> set[str]:
    """What is asked of the loss. A rank without classes counts, one without samples does not matter here."""
    loss = Loss(case)
    found = {"module", "parallel-loss", "backward", f"option:reduction-{loss.reduction}"}
    found |= {f"option:{name}" for name in ("ignore", "weight", "smooth") if name in case}
    if "ignore" in case and not 0 <= case.integer("ignore") < loss.count:
        found.add("ignored-label")
    if sum(extent > 1 for extent in loss.layout.shape[2:]) > 1:
        found.add("label-dims")
    return found


def script_loss(case: Case) -> Script:
    loss = Loss(case)
    mesh, at = scripts.mesh(loss.layout.mesh), scripts.placements(loss.layout.placements)
    labels, weight = scripts.tensor(loss.labels()), loss.weight()
    options = ", ".join(f"{key}={value!r}" for key, value in loss.options().items())
    body = [f"mesh, full, labels = {mesh}, {scripts.tensor(loss.logits())}, {labels}"]
    body += [f"weight = {None if weight is None else scripts.tensor(weight)}"]
    body += [f"x = distribute_tensor(full, mesh, {at}).requires_grad_()", "full.requires_grad_()", "given, weighs = labels, weight"]
    if case.get("targets", "plain") == "sharded":
        body += [f"given = distribute_tensor(labels, mesh, {scripts.placements(loss.label_placements())})"]
    if case.get("weight", "plain") == "sharded":
        body += ["weighs = distribute_tensor(weight, mesh, [Replicate()] * mesh.ndim)"]
    call = "torch.nn.functional.cross_entropy"
    body += [
        f"want = {call}(full, labels, weight, {options})",
        "want.sum().backward()",
        "with loss_parallel():",
        f"    got = {call}(x, given, weighs, {options})",
        "    got.sum().backward()",
        "return [want.detach(), full.grad], [got.full_tensor().detach(), x.grad.full_tensor()]",
    ]
    made = scripts.script(body, world=case.world)
    imports = (*made.imports, "from torch.distributed.tensor.parallel import loss_parallel")
    return Script(made.stages, imports, made.constants, tolerance=1e-6)


def draw_loss(law: str, on: tuple[str, ...], *, odd: bool = False) -> Callable[[Limits], SearchStrategy[Case]]:
    """Cases on these meshes; ``odd`` ones are those that the documents leave out, which may be refused."""

    def strategy(limits: Limits) -> SearchStrategy[Case]:
        palette = [mesh for mesh in map(Mesh.parse, on) if mesh.size <= limits.world_size]
        counts = st.sampled_from([5, 7, 8, 6, 4, 3, 9])

        @st.composite
        def case(draw: st.DrawFn) -> Case:
            mesh, count = draw(st.sampled_from(palette)), draw(counts)
            rows = draw(st.sampled_from([3, 4, 5, 1]))
            wide = [(rows, count), (rows, count), (rows, count, 2), (count,), (2, count, 1, 3)]
            shape: tuple[int, ...] = draw(st.sampled_from(wide))
            classes = 1 if len(shape) > 1 else 0
            along = draw(st.integers(0, mesh.ndim - 1))
            others = [R()] + [Shard(dim) for dim in range(len(shape)) if dim != classes]
            at: Placements = tuple(Shard(classes) if dim == along else draw(st.sampled_from(others)) for dim in range(mesh.ndim))
            beside = any(isinstance(one, Shard) and one.dim != classes for one in at)
            fields: dict[str, Any] = {"x": TensorSpec(shape, at, draw(st.sampled_from(["float64", "float64", "float32"])))}
            fields["reduction"] = draw(st.sampled_from(["mean", "sum", "none"] if mesh.ndim == 1 else ["sum", "none", "none"]))
            fields["weight"] = draw(st.sampled_from([None, None, "plain", "sharded"]))
            fields["ignore"] = draw(st.sampled_from([None, None, 0, 1, *((-100, 255) if fields["weight"] is None else ())]))
            fields["targets"] = "sharded" if beside else draw(st.sampled_from([None, "sharded"]))
            if odd:
                fields["smooth"] = draw(st.sampled_from(["0.25", None]))
                if fields["smooth"] is None and len(shape) > 1 and not beside:
                    fields |= {"targets": "chances", "ignore": None}
                elif mesh.ndim > 1:
                    fields["reduction"] = "mean"
            return Case.of(law, mesh=mesh, **fields, seed=draw(draws.seeds()))

        return case().filter(lambda case: not empty(case))

    return strategy


def sweep_known(law: str) -> Callable[[Limits], list[Case]]:
    cases = [Case.parse(f"{law} {text}") for text in KNOWN[law]]
    return lambda limits: [case for case in cases if case.world <= limits.world_size]


def empty(case: Case) -> bool:
    """Whether a rank is left without classes, or without samples."""
    return bool(given(case).layout.empty_coords())


# What is refused, and what is over at the end

# logits, placements of the labels as DTensors (none for a plain tensor), and the errors that refuse it
REFUSED: dict[str, tuple[str, str, str, tuple[type[Exception], ...]]] = {
    "classes-whole": ("2", "4x6:S(0)", "", (ValueError,)),
    "classes-replicated": ("2", "4x6:R", "", (ValueError,)),
    "rows-plain": ("2x2", "4x6:S(0),S(1)", "", (ValueError,)),
    "labels-elsewhere": ("2", "4x6:S(1)", "S(0)", (ValueError, RuntimeError)),
    "classes-twice": ("2x2", "4x8:S(1),S(1)", "R,R", (ValueError,)),
    "pending-sum": ("2x2", "4x6:P(sum),S(1)", "R,R", (ValueError,)),
    "pending-extreme": ("1x2", "4x6:P(max),S(1)", "R,R", (ValueError,)),
}
ENDS = ("over", "raised", "again")


def check_ends(case: Case, here: Here) -> None:
    """What the context does not take is refused; when it is over, also by an error, cross entropy is what it was before."""
    loss, attempt = Loss(case), case.get("way")
    logits = loss.live(here, loss.logits(), loss.layout.placements).requires_grad_()
    labels = loss.live(here, loss.labels(), case.placements("labels")) if "labels" in case else here.tensor(loss.labels())
    if attempt in REFUSED:

        def tried() -> object:
            with parallel_loss():
                return cross_entropy(logits, labels, **loss.options())

        here.refused(tried, attempt, f"logits {case.get('x')} in loss_parallel", errors=REFUSED[attempt][3])
        return
    try:
        for _ in range(2 if attempt == "again" else 1):
            with contextlib.suppress(KeyError), loss_parallel():
                if attempt == "raised":
                    raise KeyError("a body that raises")
        got: Any = cross_entropy(logits, labels, **loss.options())  # classes are whole: within the context this is refused
        near(here, got.full_tensor(), loss.dense()[0], "afterwards", "the loss")
    finally:
        with loss_parallel():
            pass


def sweep_ends(limits: Limits) -> list[Case]:
    law = "module.loss-ends"
    cases = [
        Case.of(law, mesh=mesh, x=x, labels=labels or None, way=way, reduction="sum" if "P(" in x else None)
        for way, (mesh, x, labels, _) in REFUSED.items()
    ]
    cases += [Case.of(law, mesh="2", x="4x6:R", labels="R", way=way) for way in ENDS]
    return [case for case in cases if case.world <= limits.world_size]


def features_ends(case: Case) -> set[str]:
    return {"module", "parallel-loss", f"way:{case.get('way')}"} | ({"must-refuse"} if case.get("way") in REFUSED else set())


def script_ends(case: Case) -> Script:
    loss, attempt = Loss(case), case.get("way")
    mesh, at = scripts.mesh(loss.layout.mesh), scripts.placements(loss.layout.placements)
    told = "".join(f", {key}={value!r}" for key, value in loss.options().items() if value != "mean")
    call = f"torch.nn.functional.cross_entropy(x, labels{told})"
    body = [f"mesh, full, labels = {mesh}, {scripts.tensor(loss.logits())}, {scripts.tensor(loss.labels())}"]
    body += [f"x = distribute_tensor(full, mesh, {at})"]
    if "labels" in case:
        body += [f"labels = distribute_tensor(labels, mesh, {scripts.placements(case.placements('labels'))})"]
    if attempt in REFUSED:
        body += ["try:", "    with loss_parallel():", f"        {call}", "except (ValueError, RuntimeError):"]
        body += ['    return "refused", "refused"', 'return "refused", "accepted"']
    else:
        inside = 'raise KeyError("a body that raises")' if attempt == "raised" else "pass"
        body += [f"for _ in range({2 if attempt == 'again' else 1}):", "    with contextlib.suppress(KeyError), loss_parallel():"]
        body += [f"        {inside}", f"return {scripts.tensor(loss.dense()[0])}, {call}.full_tensor()"]
    made = scripts.script(body, world=case.world)
    imports = (*made.imports, "import contextlib", "from torch.distributed.tensor.parallel import loss_parallel")
    return Script(made.stages, imports, made.constants, tolerance=1e-6)


LAWS = (
    Law(
        id="module.loss",
        clause="Within loss_parallel the cross entropy of logits sharded by classes is the dense loss, and their gradient the dense one.",
        source=DOC,
        check=check_loss,
        script=script_loss,
        features=features_loss,
        control="module.loss mesh=2 x=4x5:S(1):float64 reduction=mean",
        planted="loss_forgets_the_mask",
        draw=draw_loss("module.loss", ("2", "2", "2", "3", "3", "4")),
        draws=10,
        sweep=sweep_known("module.loss"),
        sweeps=4,
        needs=NEEDS,
        weight=0.2,
    ),
    Law(
        id="module.loss-beside",
        clause="On a mesh of two dims, samples sharded or not beside the classes, the loss is the dense one and placed as documented.",
        source=DOC,
        check=check_loss,
        script=script_loss,
        features=features_loss,
        control="module.loss-beside mesh=2x2 x=4x6:S(0),S(1):float64 reduction=sum targets=sharded",
        planted="loss_forgets_the_mask",
        draw=draw_loss("module.loss-beside", ("2x2", "2x2", "1x2", "2x1")),
        draws=6,
        sweep=sweep_known("module.loss-beside"),
        sweeps=2,
        needs=NEEDS,
        refusal="allowed",
        weight=0.2,
    ),
    Law(
        id="module.loss-odd",
        clause="What loss_parallel does not support, smoothed labels, chances, means on meshes of two dims, is refused or right.",
        source=DOC,
        check=check_loss,
        script=script_loss,
        features=features_loss,
        control="module.loss-odd mesh=2 x=4x5:S(1):float64 reduction=mean",
        planted="loss_forgets_the_mask",
        draw=draw_loss("module.loss-odd", ("2", "3", "2x2"), odd=True),
        draws=5,
        needs=NEEDS,
        refusal="allowed",
        weight=0.1,
    ),
    Law(
        id="module.loss-ends",
        clause="loss_parallel refuses logits and labels that it does not take, and leaves nothing behind when it is over.",
        source=DOC,
        check=check_ends,
        script=script_ends,
        features=features_ends,
        control="module.loss-ends mesh=2 x=4x6:R labels=R way=over",
        planted="loss_context_stays",
        sweep=sweep_ends,
        sweeps=10,
        needs=NEEDS,
        weight=0.1,
    ),
)
