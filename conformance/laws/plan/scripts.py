"""Bodies of reproducers for the plan laws: the plans of all ranks as literals, handed to torch's planners by one process."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from conformance.case import Case
from conformance.laws import scripts
from conformance.laws.plan import cases
from conformance.report.reproducer import Script, Stage
from reference.box import Box
from reference.checkpoint.held import Held, parse_boxes, plans_of
from reference.checkpoint.load_plan import read_items
from reference.checkpoint.save_plan import Metadata, TensorEntry, WriteItem, describe
from reference.checkpoint.save_plan import dedup as shared_out
from reference.checkpoint.state_dict import Slot, State, flatten, parse_state
from reference.layout import Layout
from reference.mesh import Mesh
from reference.notation import Shape, parse_shape
from reference.placement import StridedShard
from reference.tensors import TensorSpec

IMPORTS = {
    "torch.distributed.checkpoint._dedup_save_plans": ("dedup_save_plans",),
    "torch.distributed.checkpoint._nested_dict": ("flatten_state_dict", "unflatten_state_dict"),
    "torch.distributed.checkpoint.default_planner": ("DefaultLoadPlanner", "DefaultSavePlanner"),
    "torch.distributed.checkpoint.metadata": (
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex", "TensorProperties", "TensorStorageMetadata"),
    ),
    "torch.distributed.checkpoint.planner": ("SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"),
    "torch.distributed.checkpoint.planner_helpers": ("create_read_items_for_chunk_list",),
    **scripts.IMPORTS,
}
CHUNK = ["def chunk(start, size):", "    return ChunkStorageMetadata(torch.Size(start), torch.Size(size))"]
ITEM = [
    "def item(kind, name, shape, dtype, start, size):",
    "    data = TensorWriteData(ChunkStorageMetadata(torch.Size(start), torch.Size(size)), TensorProperties(dtype), torch.Size(shape))",
    "    return WriteItem(MetadataIndex(name, start), WriteItemType[kind], tensor_data=data)",
]
VALUE = ["def value(name):", "    return WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO)"]
PLANNER = ["planner = DefaultSavePlanner(dedup_save_to_lowest_rank={lowest})", "planner.set_up_planner({{}}, is_coordinator=True)"]


def script(body: Sequence[str], constants: Iterable[str] = ()) -> Script:
    """A script of one process; the names that its lines use are imported."""
    constants, lines = tuple(constants), tuple(body)
    text = "\n".join((*constants, *lines))
    imports = []
    for module, names in IMPORTS.items():
        used = [name for name in names if re.search(rf"(?<![\w.]){name}\b", text)]
        if used:
            imports.append(f"from {module} import {', '.join(used)}")
    return Script((Stage(1, lines),), tuple(imports), constants)


def attempt(body: Sequence[str], call: str) -> list[str]:
    """Lines of a call that must be refused."""
    return [*body, "try:", f"    {call}", "except Exception:", '    return "refused", "refused"', 'return "refused", "accepted"']


# Plans as literals


def plans(case: Case) -> tuple[list[str], list[str]]:
    """Statements that make ``plans``, and how they are asked for."""
    given = plans_of(cases.leaves(case), cases.ranks(case))
    items = [item for plan in given for item in plan]
    lines = [*(ITEM if any(item.box is not None for item in items) else []), *(VALUE if any(item.box is None for item in items) else [])]
    rows = []
    for plan in given:
        paths = {item.name: (item.name,) for item in plan}
        rows.append(f"SavePlan([{', '.join(map(_item, plan))}], planner_data={paths}),")
    planner = [line.format(lowest=case.get("dedup", "") == "lowest") for line in PLANNER]
    return [*lines, "plans = [", *(f"    {row}" for row in rows), "]"], planner


def _item(item: WriteItem) -> str:
    if item.box is None:
        return f"value({item.name!r})"
    kind = "TENSOR" if item.replica else "SHARD"
    return f"item({kind!r}, {item.name!r}, {item.shape}, torch.{item.dtype}, {item.box.offset}, {item.box.size})"


def _place(item: WriteItem) -> tuple[str, Shape | None, Shape | None]:
    return (item.name, None, None) if item.box is None else (item.name, item.box.offset, item.box.size)


PLACES = [
    "def place(item):",
    "    chunk = item.tensor_data.chunk if item.tensor_data else None",
    "    return (item.index.fqn, chunk and tuple(chunk.offsets), chunk and tuple(chunk.sizes))",
]


def dedup(case: Case) -> Script:
    body, _ = plans(case)
    given = plans_of(cases.leaves(case), cases.ranks(case))
    due = sorted({_place(item) for plan in given for item in plan if item.box is None or item.box.volume}, key=repr)
    full = "[p for p in map(place, items) if not p[2] or 0 not in p[2]]"
    if case.get("dedup", "") == "lowest":
        first = shared_out([[item for item in plan if item.box is None or item.box.volume] for plan in given], lowest=True)  # type: ignore[misc]
        due = [sorted(map(_place, plan), key=repr) for plan in first]  # type: ignore[misc]
        got = f"[sorted({full.replace('items', 'plan.items')}, key=repr) for plan in shared]"
        return script([*body, *PLACES, "shared = dedup_save_plans(plans, True)", f"return {due}, {got}"])
    return script([*body, *PLACES, "items = [item for plan in dedup_save_plans(plans) for item in plan.items]",
                   f"return {due}, sorted({full}, key=repr)"])  # fmt: skip


def balanced(case: Case) -> Script:
    """The bytes that each rank is to write."""
    body, _ = plans(case)
    size = "item.tensor_data.chunk.sizes.numel() * item.tensor_data.properties.dtype.itemsize"
    lines = [
        f"sizes = [[{size} for item in plan.items] for plan in dedup_save_plans(plans)]",
        "largest, totals = max(map(max, filter(None, sizes))), [*map(sum, sizes)]",
        'return "balanced", "balanced" if max(totals) - min(totals) <= largest else f"{totals} bytes, by items of at most {largest}"',
    ]
    return script([*body, *lines])


def again(case: Case) -> Script:
    """The plans of all ranks, made twice; where the case names another order of the ranks, what is described is made in that one too."""
    body, planner = plans(case)
    order = case.get("order", "")
    if not order:
        return script([*body, *planner, "return planner.create_global_plan(plans), planner.create_global_plan(plans)"])
    told = [
        "def told(metadata):",
        "    chunks = lambda entry: {(c.offsets, c.sizes) for c in getattr(entry, 'chunks', ()) if 0 not in c.sizes}",
        "    return {name: chunks(entry) for name, entry in metadata.state_dict_metadata.items()}, metadata.planner_data",
        f"other = planner.create_global_plan([plans[rank] for rank in ({order},)])[1]",
    ]
    return script([*body, *planner, *told, "return told(planner.create_global_plan(plans)[1]), told(other)"])


def described(case: Case) -> Script:
    """Leaves with their shapes and chunks, as metadata tells them."""
    body, planner = plans(case)
    due = {name: _described(leaf) for name, leaf in cases.leaves(case).items()}
    told = [
        "def told(entry):",
        "    if isinstance(entry, BytesStorageMetadata):",
        "        return None",
        "    chunks = [(tuple(c.offsets), tuple(c.sizes)) for c in entry.chunks if 0 not in c.sizes]",
        "    return tuple(entry.size), str(entry.properties.dtype), sorted(chunks)",
    ]
    asked = ["_, metadata = planner.create_global_plan(plans)", f"due = {due}"]
    return script([*body, *told, *planner, *asked, "return due, {k: told(v) for k, v in metadata.state_dict_metadata.items()}"])


def _described(leaf: Held) -> object:
    if leaf.kind == "value":
        return None
    return leaf.shape, f"torch.{leaf.dtype}", sorted((box.offset, box.size) for box in leaf.boxes if box.volume)


def accepted(case: Case) -> Script:
    """A plan that must not be refused."""
    body, planner = plans(case)
    lines = ["try:", "    planner.create_global_plan(plans)", "except Exception as error:", '    return "accepted", str(error)']
    return script([*body, *planner, *lines, 'return "accepted", "accepted"'])


def refused(case: Case) -> Script:
    """A plan that must be refused."""
    body, planner = plans(case)
    return script(attempt([*body, *planner], "planner.create_global_plan(plans)"))


# DTensors, seat by seat


def seats(mesh: Mesh, name: str, of: TensorSpec) -> list[str]:
    """A function that makes a DTensor as one rank of a mesh holds it."""
    layout = Layout(of.shape, mesh, of.placements or ())
    sizes = {
        rank: (0,) * len(of.shape) if (at := mesh.coord(rank)) is None else layout.local_shape(at) for rank in range(max(mesh.ranks) + 1)
    }
    stride = tuple(math.prod(max(size, 1) for size in of.shape[dim + 1 :]) for dim in range(len(of.shape)))
    how = f", shape=torch.Size({of.shape}), stride={stride}" if of.shape else ""
    own = f"{sizes}[seat]" if len({*sizes.values()}) > 1 else f"{sizes[0]}"
    return [
        f"def {name}(seat):",
        f"    local = torch.zeros({own}, dtype=torch.{of.dtype})",
        f"    return DTensor.from_local(local, seen_from(seat), {scripts.placements(of.placements or ())}, run_check=False{how})",
    ]


def tensor_lines(specs: dict[str, TensorSpec], mesh: Mesh) -> list[str]:
    """Functions that make each tensor as one rank holds it."""
    made = scripts.mesh(mesh).removesuffix(")")
    placed = any(spec.placements is not None for spec in specs.values())
    lines = [f"seen_from = lambda seat: {made}, _init_backend=False, _rank=seat)"] if placed else []
    for name, spec in specs.items():
        plain = [f"def {name}(seat):", f"    return torch.zeros({spec.shape}, dtype=torch.{spec.dtype})"]
        lines += plain if spec.placements is None else seats(mesh, name, spec)
    return lines


def tree(state: object) -> str:
    """A state as an expression; tensors are calls of the functions of :func:`tensor_lines`."""
    match state:
        case Slot(name):
            return f"{name}(seat)"
        case dict():
            return "{" + ", ".join(f"{key!r}: {tree(value)}" for key, value in state.items()) + "}"
        case list():
            return "[" + ", ".join(map(tree, state)) + "]"
        case tuple():
            return "(" + ", ".join(map(tree, state)) + ("," if len(state) == 1 else "") + ")"
    return repr(state)


def items(case: Case) -> Script:
    """What every rank says that it holds."""
    mesh = case.mesh()
    specs = {name: case.tensor(name) for name in ("x", "a") if name in case}
    state: State = parse_state(case.get("state")) if "state" in case else {name: Slot(name) for name in specs}
    due: dict[int, list[tuple[str, Shape | None, Shape | None]]] = {}
    for rank in range(max(mesh.ranks) + 1):
        due[rank] = []
        for name, (_, leaf) in flatten(state).items():
            spec = specs[leaf.name] if isinstance(leaf, Slot) else None
            if spec is None:
                due[rank].append((name, None, None))
            elif spec.placements is None:
                due[rank].append((name, (0,) * len(spec.shape), spec.shape))
            elif (coord := mesh.coord(rank)) is not None:
                layout = Layout(spec.shape, mesh, spec.placements)
                box = layout.box(coord) or Box(layout.offset(coord), layout.local_shape(coord))
                due[rank] += [(name, box.offset, box.size)] if box.volume else []
        due[rank].sort(key=repr)
    full = "[p for p in map(place, planner.create_local_plan().items) if not p[2] or 0 not in p[2]]"
    boxless = any(
        spec.placements is not None and any(Layout(spec.shape, mesh, spec.placements).box(at) is None for at in mesh.coords())
        for spec in specs.values()
    )
    if boxless:
        x = specs["x"]
        layout = Layout(x.shape, mesh, x.placements or ())
        owned = {rank: [list(run) for run in layout.owned(at)] for rank in mesh.ranks if (at := mesh.coord(rank)) is not None}
        lines = [
            "got = {}",
            f"for seat in {sorted(owned)}:",
            "    chunks = x(seat).__create_chunk_list__()",
            "    spans = [[range(a, a + n) for a, n in zip(c.offsets, c.sizes)] for c in chunks]",
            "    got[seat] = [sorted({i for span in spans for i in span[d]}) for d in range(" + str(len(x.shape)) + ")]",
            f"return {owned}, got",
        ]
        return script([*tensor_lines({"x": x}, mesh), *lines])
    lines = [
        *PLACES,
        "got = {}",
        f"for seat in {sorted(due)}:",
        "    planner = DefaultSavePlanner()",
        f"    planner.set_up_planner({tree(state)})",
        f"    got[seat] = sorted({full}, key=repr)",
        f"return {due}, got",
    ]
    return script([*tensor_lines(specs, mesh), *lines])


def metadata_lines(of: Metadata) -> list[str]:
    """Statements that make ``metadata``."""
    entries = []
    for name, entry in of.entries.items():
        if entry is None:
            entries.append(f"{name!r}: BytesStorageMetadata(),")
        else:
            entries.append(f"{name!r}: {entry_text(entry)},")
    lines = CHUNK if any(entry is not None for entry in of.entries.values()) else []
    return [*lines, "metadata = Metadata({", *(f"    {entry}" for entry in entries), "})"]


def entry_text(of: TensorEntry) -> str:
    chunks = ", ".join(f"chunk({box.offset}, {box.size})" for box in of.chunks)
    return f"TensorStorageMetadata(TensorProperties(torch.{of.dtype}), torch.Size({of.shape}), [{chunks}])"


READ = "(tuple(i.storage_index.offset), tuple(i.storage_offsets), tuple(i.dest_offsets), tuple(i.lengths))"


def reshard(case: Case) -> Script:
    """What every rank of the mesh of the load reads; of a part that is no box, only how many elements."""
    from conformance.laws.plan.tensors import saved_by

    spec, mesh = case.tensor("x"), case.mesh()
    load_mesh = case.mesh("mesh.load") if "mesh.load" in case else mesh
    saved = saved_by(spec, mesh)
    entry = saved.entries["x"]
    assert entry is not None
    to = TensorSpec(spec.shape, None if case.get("to") == "-" else case.placements("to"), spec.dtype)
    due: dict[int, object] = {}
    layout = None if to.placements is None else Layout(spec.shape, load_mesh, to.placements)
    boxless = layout is not None and any(layout.box(at) is None for at in load_mesh.coords())
    for rank in range(max(load_mesh.ranks) + 1):
        coord = load_mesh.coord(rank)
        if boxless and layout is not None:
            due[rank] = sorted(set(layout.owned(coord)[_strided_dim(to)])) if coord is not None else []
            continue
        box = Box((0,) * len(spec.shape), spec.shape) if layout is None else None if coord is None else layout.box(coord)
        reads = read_items(entry.chunks, [box] if box is not None else [])
        due[rank] = sorted((entry.chunks[item.chunk].offset, item.chunk_offset, item.box_offset, item.lengths) for item in reads)
    got = f"sorted({READ} for i in items if 0 not in i.lengths)"
    if boxless:
        d = _strided_dim(to)
        got = f"sorted({{i.storage_index.offset[{d}] + i.storage_offsets[{d}] + k for i in items for k in range(i.lengths[{d}])}})"
    lines = [
        "got = {}",
        f"for seat in {sorted(due)}:",
        "    planner = DefaultLoadPlanner()",
        "    planner.set_up_planner({'x': x(seat)}, metadata)",
        "    items = planner.create_local_plan().items",
        f"    got[seat] = {got}",
        f"return {due}, got",
    ]
    return script([*metadata_lines(saved), *tensor_lines({"x": to}, load_mesh), *lines])


def _strided_dim(of: TensorSpec) -> int:
    dims = [placement.dim for placement in of.placements or () if isinstance(placement, StridedShard)]
    return dims[0] % len(of.shape)


# Boxes alone


def reads(case: Case) -> Script:
    shape = case.shape()
    chunks, boxes = parse_boxes(case.get("chunks"), len(shape)), parse_boxes(case.get("boxes"), len(shape))
    found = read_items(chunks, boxes)
    due = sorted((chunks[i.chunk].offset, boxes[i.box].offset, i.chunk_offset, i.box_offset, i.lengths) for i in found)
    got = READ.replace("(tuple(i.storage_index.offset)", "(tuple(i.storage_index.offset), tuple(i.dest_index.offset)", 1)
    body = [
        *CHUNK,
        f"saved = {entry_text(TensorEntry(shape, chunks))}",
        f"wanted = [{', '.join(f'chunk({box.offset}, {box.size})' for box in boxes)}]",
        'items = create_read_items_for_chunk_list("x", saved, wanted)',
        f"return {due}, sorted({got} for i in items if 0 not in i.lengths)",
    ]
    return script(body)


def uncovered(case: Case) -> Script:
    """Chunks that do not cover a tensor; where they do, a load that must be accepted."""
    from reference.box import tiling_errors

    shape = case.shape()
    chunks = parse_boxes(case.get("chunks"), len(shape))
    body = metadata_lines(Metadata({"x": TensorEntry(shape, chunks)}))
    body += ["planner = DefaultLoadPlanner()", f"planner.set_up_planner({{'x': torch.zeros({shape})}}, metadata)"]
    if tiling_errors(shape, chunks):
        return script(attempt(body, "planner.create_local_plan()"))
    return script([*body, f"return {math.prod(shape)}, sum(torch.Size(i.lengths).numel() for i in planner.create_local_plan().items)"])


def unloadable(case: Case) -> Script:
    """A destination that the checkpoint cannot fill."""
    return script(attempt(_other_than_saved(case), "planner.create_local_plan()"))


def partly(case: Case) -> Script:
    """How many elements are read of each leaf, in a partial load."""
    saved = {f"{name}.leaf": leaf for name, leaf in cases.leaves(case).items()}
    due = {name: math.prod(leaf.shape) if leaf.kind != "value" else 0 for name, leaf in saved.items()}
    lines = [
        "got = {}",
        "for item in planner.create_local_plan().items:",
        "    got[item.dest_index.fqn] = got.get(item.dest_index.fqn, 0) + item.lengths.numel()",
        f"hollow = {sorted(name for name, leaf in saved.items() if leaf.kind != 'value' and 0 in leaf.shape)}",
        f"return {due}, {{**dict.fromkeys(hollow, 0), **got}}",
    ]
    return script([*_other_than_saved(case, "allow_partial_load=True"), *lines])


def _other_than_saved(case: Case, how: str = "") -> list[str]:
    """Statements that make ``planner``, whose state is what was saved but for the culprit."""
    given = plans_of({f"{name}.leaf": leaf for name, leaf in cases.leaves(case).items()}, cases.ranks(case))
    state = {f"{name}.leaf": "1" if leaf.kind == "value" else f"torch.zeros({leaf.shape})" for name, leaf in cases.leaves(case).items()}
    want = case.get("want")
    state[f"{case.get('culprit')}.leaf"] = "1" if want == "value" else f"torch.zeros({parse_shape(want)})"
    into = ", ".join(f"{name!r}: {made}" for name, made in state.items())
    body = [*metadata_lines(describe(shared_out(given))), f"planner = DefaultLoadPlanner({how})"]
    return [*body, f"planner.set_up_planner({{{into}}}, metadata)"]
