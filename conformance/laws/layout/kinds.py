"""Laws of local tensors out of the ordinary: of every dtype, and not contiguous."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor, distribute_tensor

from conformance.case import Case
from conformance.law import Law, Limits
from conformance.laws import draws, scripts
from conformance.laws.given import given, target
from conformance.report.reproducer import Script
from reference import simulate
from reference.tensors import DTYPES, TensorSpec

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from conformance.here import Here

DOC = "torch.distributed.tensor docs"


# dtypes that few backends carry, by the whole numbers of the same width that stand for their bits
RARE = {"float8_e4m3fn": "uint8", "float8_e5m2": "uint8", "uint16": "int16", "uint32": "int32", "uint64": "int64"}


def draw_dtype(limits: Limits) -> SearchStrategy[Case]:
    on = draws.meshes(limits, tables=False)
    usual = [name for name in DTYPES if name not in limits.dtypes]
    declared = st.sampled_from(limits.dtypes)
    common, rare = st.sampled_from([*usual, *usual, *limits.dtypes]), st.sampled_from(list(RARE))
    strange, how = st.sampled_from([False] * 3 + [True]), st.sampled_from(["scatter", "full", "move", "move"])
    drawn = draws.moved("layout.dtype", limits, on=on, kinds=("R", "S"), targets=("R", "S"))

    @st.composite
    def case(draw: st.DrawFn) -> Case:
        base = draw(drawn)
        outside = base.mesh().size < base.world  # a rank outside takes no part, and cannot refuse what the others do
        odd = draw(strange) and not outside
        spec, dtype = base.tensor("x"), draw(rare) if odd else draw(declared if outside else common)
        changed = TensorSpec(spec.shape, spec.placements, RARE.get(dtype, dtype), "positive" if odd else "distinct")
        more = {"bits": dtype} if odd else {}
        return base.with_fields(x=changed, how=draw(how), **more)

    return case()


def features_dtype(case: Case) -> set[str]:
    return {"rare-dtype"} if "bits" in case else set()


def check_dtype(case: Case, here: Here) -> None:
    """Elements of every dtype arrive bit by bit, or every rank refuses them; those that the target declares are never refused."""
    x, name = given(case), case.get("bits", case.tensor("x").dtype)
    try:
        _send(case, here)
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        text = str(error).lower()
        said = any(word in text for word in ("scalar type", "scalartype", "dtype", "not implemented", "not supported", "unsupported"))
        if name in here.target.dtypes or not said:
            raise
        raise NotImplementedError(f"{name} is not supported: {error}") from None
    here.reached(f"dtype:{x.spec.dtype}")


def _send(case: Case, here: Here) -> None:
    x, how = given(case), case.get("how")
    bits = getattr(torch, case.get("bits", x.spec.dtype))
    live, at = here.mesh(x.layout.mesh), here.placements(x.layout.placements)
    coord, to = here.coord(x.layout.mesh), target(case, x) if how == "move" else x.layout
    local = here.tensor(x.local(coord)).view(bits) if coord is not None else torch.empty(0, dtype=bits, device=here.device)
    source = None if how == "scatter" else DTensor.from_local(local, live, at, shape=x.full.shape, stride=x.full.contiguous().stride())
    if source is None:
        got: Any = distribute_tensor(here.tensor(x.full).view(bits), live, at)
    else:
        got = source.full_tensor() if how == "full" else source.redistribute(placements=here.placements(to.placements))
    if coord is None:
        return
    here.require(got.dtype == bits, "wrong-metadata", "dtype", f"dtype is {got.dtype}, must be {bits}", bits, got.dtype)
    held = got if how == "full" else got.to_local()
    here.same(held.contiguous().view(x.full.dtype), x.full if how == "full" else simulate.take(x.full, to, coord), how)


def script_dtype(case: Case) -> Script:
    x, how = given(case), case.get("how")
    bits = f"torch.{case.get('bits', x.spec.dtype)}"
    to = target(case, x) if how == "move" else x.layout
    constants, body = scripts.source(x, case.world)
    members = {rank: x.full if how == "full" else x.local_of(to, rank) for rank in sorted(x.layout.mesh.ranks)}
    at = scripts.placements(x.layout.placements)
    if how == "scatter":
        constants, body = [], [body[0], f"y = distribute_tensor({scripts.tensor(x.full)}.view({bits}), mesh, {at})"]
    else:
        body[-1] = body[-1].replace("X[rank]", f"X[rank].view({bits})")
        body.append("y = x.full_tensor()" if how == "full" else f"y = x.redistribute(placements={scripts.placements(to.placements)})")
    held = "y" if how == "full" else "y.to_local()"
    table = scripts.tensors("WANT", members)
    lines = [*body, "if rank not in WANT:", "    return None, None"]
    lines += [f"return ({bits}, WANT[rank]), (y.dtype, {held}.contiguous().view({x.full.dtype}))"]
    return scripts.script(lines, world=case.world, constants=[*constants, *table])


LIES = ("sliced", "expanded", "transposed", "channels-last", "offset")


def lie(local: torch.Tensor, how: str) -> torch.Tensor:
    """The same elements (for ``expanded``: the first row repeated), lying in memory as ``how`` says."""
    if how == "channels-last" and local.ndim > 1:
        return local.movedim(1, -1).contiguous().movedim(-1, 1)
    if how == "transposed" and local.ndim > 1:
        order = tuple(reversed(range(local.ndim)))
        return local.permute(order).contiguous().permute(order)
    if how == "expanded" and local.ndim and local.shape[0]:
        return local[:1].clone().expand(local.shape)
    if how == "sliced" and local.ndim:
        wide = torch.zeros((*local.shape[:-1], 2 * local.shape[-1] + 1), dtype=local.dtype)
        wide[..., 1::2] = local
        return wide[..., 1::2]
    buffer = torch.zeros(local.numel() + 3, dtype=local.dtype)
    return buffer[3:].view(local.shape).copy_(local)


def draw_memory(limits: Limits) -> SearchStrategy[Case]:
    law = "layout.memory"
    on = draws.meshes(limits, tables=False)
    deep = draws.moved(law, limits, on=on, kinds=("R", "S"), targets=("R", "S"), dtypes=draws.EXACT)
    lies, how = st.sampled_from(LIES), st.sampled_from(["keep", "full", "move", "move", "scatter"])
    four = st.tuples(st.sampled_from([2, 3, 1]), *[st.sampled_from([2, 3, 4])] * 3)

    @st.composite
    def case(draw: st.DrawFn) -> Case:
        base, memory = draw(deep), draw(lies)
        spec = base.tensor("x")
        shape = draw(four) if memory == "channels-last" and len(spec.shape) > 1 else spec.shape
        return base.with_fields(x=TensorSpec(shape, spec.placements, spec.dtype), memory=memory, how=draw(how))

    return case()


def check_memory(case: Case, here: Here) -> None:
    """However a tensor lies in memory, from_local and to_local keep it as it lies, and what is sent of it are its elements."""
    x, how, memory = given(case), case.get("how"), case.get("memory")
    live, at, coord = here.mesh(x.layout.mesh), here.placements(x.layout.placements), here.coord(x.layout.mesh)
    if how == "scatter":
        full = lie(x.full, memory)
        got = distribute_tensor(here.tensor(full), live, at)
        here.same_dtensor(got, full, "scatter", mesh=x.layout.mesh, placements=x.layout.placements)
        here.require(
            got.stride() == full.stride(), "wrong-metadata", "stride", "global stride is not the tensor's", full.stride(), got.stride()
        )
        return
    full = _rows_alike(x.full) if memory == "expanded" else x.full
    local = torch.empty(0, dtype=full.dtype) if coord is None else lie(simulate.take(full, x.layout, coord), memory)
    local = here.tensor(local)
    source = DTensor.from_local(local, live, at, shape=x.full.shape, stride=x.full.contiguous().stride())
    if coord is None:
        source.full_tensor() if how == "full" else source.redistribute(placements=here.placements(target(case, x).placements))
        return
    back = source.to_local()
    lies, due = _lies(back), _lies(local)
    here.require(lies == due, "wrong-metadata", "to_local", "to_local gives back a tensor that lies otherwise", due[1:], lies[1:])
    if how == "full":
        here.same(source.full_tensor(), full, "full", what="full tensor")
    elif how == "move":
        to = target(case, x)
        here.same_dtensor(source.redistribute(placements=here.placements(to.placements)), full, "moved", mesh=x.layout.mesh)
    here.same(local, simulate.take(full, x.layout, coord), "input", what="the local tensor that was given")


def _lies(tensor: torch.Tensor) -> tuple[object, ...]:
    """Where the elements of a tensor lie: steps of dims of one index say nothing, nor does a tensor without elements."""
    steps = [step for step, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
    return (tensor.data_ptr(), tensor.storage_offset(), steps) if tensor.numel() else ()


def _rows_alike(full: torch.Tensor) -> torch.Tensor:
    return full[:1].expand(full.shape).contiguous() if full.ndim and full.shape[0] else full


def script_memory(case: Case) -> Script:
    x, how, memory = given(case), case.get("how"), case.get("memory")
    at, mesh = scripts.placements(x.layout.placements), x.layout.mesh
    if how == "scatter":
        full = lie(x.full, memory)
        body = [f"mesh = {scripts.mesh(mesh)}", f"d = distribute_tensor({scripts.tensor(full)}, mesh, {at})"]
        return scripts.holds(case, body, "d", full.contiguous(), x.layout)
    full = _rows_alike(x.full) if memory == "expanded" else x.full
    held = {mesh.rank_at(coord): lie(simulate.take(full, x.layout, coord), memory) for coord in mesh.coords()}
    held.update({rank: torch.empty(0, dtype=full.dtype) for rank in range(case.world) if rank not in held})
    whole = f"shape=torch.Size({x.layout.shape}), stride={x.full.contiguous().stride()}" if x.layout.shape else "run_check=False"
    body = [f"mesh = {scripts.mesh(mesh)}", f"d = DTensor.from_local(X[rank], mesh, {at}, {whole})"]
    to = target(case, x) if how == "move" else x.layout.replace(draws.replicated(x.layout)) if how == "full" else x.layout
    moved = "d" if how == "keep" else f"d.redistribute(placements={scripts.placements(to.placements)})"
    return scripts.holds(case, body, moved, full, to, constants=scripts.tensors("X", dict(sorted(held.items()))))


LAWS = (
    Law(
        id="layout.dtype",
        clause="Elements of every dtype are scattered, gathered and redistributed bit by bit, or refused by all ranks alike.",
        source=f"{DOC}, distribute_tensor, DTensor.full_tensor and DTensor.redistribute: no dtype is excepted",
        check=check_dtype,
        script=script_dtype,
        features=features_dtype,
        control="layout.dtype mesh=2x2 x=5x6:S(0),R:float16 to=R,S(1) how=move",
        planted="gather_rounds_to_bytes",
        draw=draw_dtype,
        draws=110,
        weight=0.8,
        needs=("broadcast", "scatter", "all_gather"),
        refusal="allowed",
    ),
    Law(
        id="layout.memory",
        clause="A local tensor that is not contiguous is kept as it lies, and its elements are what is gathered and redistributed.",
        source=f"{DOC}, DTensor.from_local, DTensor.to_local and DTensor.redistribute: nothing is said of memory",
        check=check_memory,
        script=script_memory,
        control="layout.memory mesh=2 x=5x6:S(0) to=R memory=sliced how=full",
        planted="gather_ignores_strides",
        draw=draw_memory,
        draws=110,
        weight=0.8,
        needs=("broadcast", "scatter", "all_gather"),
    ),
)
