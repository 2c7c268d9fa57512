"""Reproducers of the laws on optimizers' states."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from conformance.case import Case
from conformance.laws.scripts import mesh as mesh_text
from conformance.laws.scripts import tensor as tensor_text
from conformance.laws.sharded_tensor import given as g
from conformance.laws.sharded_tensor import scripts, trips
from conformance.report.reproducer import Script, Stage
from reference.box import Box
from reference.checkpoint.held import parse_box, parse_boxes
from reference.checkpoint.optimizer import around, part_items, shares, shifted
from reference.sharded_tensor import ChunkSpec, Part

DCP = "import torch.distributed.checkpoint as dcp"
ON_MESHES = (
    "from torch.distributed.device_mesh import DeviceMesh",
    "from torch.distributed.tensor import DTensor, Replicate, Shard",
)


def loaded(case: Case, members: Callable[[Case, int], tuple[int, ...]]) -> Script:
    """Save as the case says, load with ``load_sharded_optimizer_state_dict``, and compare the local shards. ``members`` gives the ranks
    that share the state with a rank."""
    end, shape = trips.held(case, "save"), case.tensor("x").shape
    worlds = trips.worlds(case)
    part = parse_box(case.get("part"), len(shape)) if "part" in case else Box((0,) * len(shape), shape)
    shared = [
        (box, rank) for rank in range(worlds[1]) for box, holder in ChunkSpec(0, members(case, rank)).parts(part.size) if holder == rank
    ]
    first = [f"mesh = {mesh_text(end.layout.mesh)}"] if end.layout else []
    first += [
        *trips.made_lines(end, "X", ""),
        'dcp.save({"opt": {"state": {"w": {"exp_avg": t}}}}, checkpoint_id=folder)',
        "return None, None",
    ]
    second, model = [], "{}"
    if "part" in case:
        second += nested(case, part, shared)
        model = '{"w": outer}'
    second += [
        f'found = dcp.load_sharded_optimizer_state_dict({model}, "opt", dcp.FileSystemReader(folder))',
        'x = found["opt"]["state"]["w"]["exp_avg"]',
    ]
    if case.tensor("x").build(0).numel() == 1:
        second.append("return X, x")
    else:
        table = scripts.held([(shifted(box, part.offset), rank) for box, rank in shared], range(worlds[1]))
        second += [
            "got = [s.tensor for s in x.local_shards() if s.tensor.numel()]",
            f"return [x for _, x in {table}[rank]], got",
        ]
    text = "\n".join((*first, *second))
    imports = [DCP, *([scripts.SHARDED] if "st." in text else []), *(ON_MESHES if "DeviceMesh" in text else ())]
    imports += [scripts.SPECS] if "ShardMetadata" in text else []
    constants = (f"X = {tensor_text(g.values_of(case))}",)
    return Script((Stage(worlds[0], tuple(first)), Stage(worlds[1], tuple(second))), tuple(imports), constants)


def nested(case: Case, part: Box, shared: Sequence[Part]) -> list[str]:
    """Lines that make ``outer``, of which every rank holds the part, itself a sharded tensor ``inner`` of the boxes ``shared``."""
    table = "{" + ", ".join(f"{rank}: ({[*box.offset]}, {[*box.size]})" for box, rank in shared) + "}"
    world = trips.worlds(case)[1]
    boxes = around(part, case.tensor("x").shape)
    rest = ", ".join(f'ShardMetadata({[*box.offset]}, {[*box.size]}, f"rank:{{(rank + 1) % {world}}}/cpu")' for box in boxes)
    lines = [f'group = DeviceMesh("cpu", [[0, 1], [2, 3]]).get_group({case.get("axis")})'] if "axis" in case else []
    return [
        *lines,
        f"at, size = {table}[rank]",
        "kind = X.dtype",
        "mine = [st.Shard.from_tensor_and_offsets(torch.zeros(size, dtype=kind), at, rank)]",
        f"inner = st.init_from_local_shards(mine, *{part.size}{', process_group=group' if lines else ''})",
        f'own = ShardMetadata({[*part.offset]}, {[*part.size]}, f"rank:{{rank}}/cpu")',
        f"told = st.ShardedTensorMetadata([own, {rest}], X.shape, st.TensorProperties(dtype=kind))",
        "outer = st.ShardedTensor._init_from_local_shards_and_global_metadata([st.Shard(inner, own)], told)",
    ]


def offsets(case: Case) -> Script:
    """The items of the planner for the part, by where they lie."""
    shape, ranks = case.tensor("x").shape, tuple(range(case.world))
    part = parse_box(case.get("part"), len(shape))
    chunks = parse_boxes(case.get("chunks"), len(shape))
    due = {}
    for rank in ranks:
        wanted = shares(part, ranks, rank)
        items = part_items(chunks, part, wanted)
        due[rank] = sorted((shifted(wanted[i.box], part.offset).offset, i.chunk_offset, i.box_offset, i.lengths) for i in items)
    shared = ChunkSpec(0, ranks).parts(part.size)
    table = "{" + ", ".join(f"{rank}: ({[*box.offset]}, {[*box.size]})" for box, rank in shared) + "}"
    lines = [
        f"at, size = {table}[rank]",
        "mine = [st.Shard.from_tensor_and_offsets(torch.zeros(size, dtype=X.dtype), at, rank)]",
        f"t = st.init_from_local_shards(mine, *{part.size})",
        f"chunks = [ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in {[(box.offset, box.size) for box in chunks]}]",
        "entry = TensorStorageMetadata(TensorProperties(dtype=X.dtype), X.shape, chunks)",
        f'planner = _ReaderWithOffset({{"s": {part.offset}}})',
        'planner.set_up_planner({"s": t}, Metadata({"s": entry}, planner_data={"s": ("s",)}), True)',
        "items = [i for i in planner.create_local_plan().items if 0 not in i.lengths]",
        "got = [(i.dest_index.offset, i.storage_offsets, i.dest_offsets, i.lengths) for i in items]",
        f"return {due}[rank], sorted(tuple(map(tuple, item)) for item in got)",
    ]
    metadata = "ChunkStorageMetadata, Metadata, TensorProperties, TensorStorageMetadata"
    used = [
        f"from torch.distributed.checkpoint.metadata import {metadata}",
        "from torch.distributed.checkpoint.optimizer import _ReaderWithOffset",
    ]
    return scripts.told(case, lines, imports=used)


@dataclass(frozen=True)
class Groups:
    """The groups of an optimizer by places of parameters, the rates that it begins with, and those that it must end with."""

    places: list[list[int]]
    rates: list[float]
    due: list[float]


def state(case: Case, grads: Mapping[str, torch.Tensor], worlds: Sequence[int], groups: tuple[Groups, Groups]) -> Script:
    """One step of Adam on a model of these gradients, saved, and loaded into an optimizer with other rates; then averages and rates."""
    unused, frozen = case.get("unused", ""), case.get("frozen", "")
    told = {"flatten_optimizer_state_dict=True": case.get("flat", "no") == "yes", "cpu_offload=True": "offload" in case}
    given = [text for text, holds in told.items() if holds]
    names = [name for name in grads if name not in (unused, frozen)]
    way, way_load = case.get("way"), case.get("way.load", case.get("way"))
    first = [
        *_model(case, way, groups[0]),
        f"for k in {names}: net[k].grad = distribute_tensor(G[k], net[k].device_mesh, [Shard(0)])" if way == "line" else "net().backward()",
        "opt.step()",
        f'dcp.save({{"o": sd.get_optimizer_state_dict(net, opt{_options(given)})}}, checkpoint_id=folder)',
        "return None, None",
    ]
    second = [
        *_model(case, way_load, groups[1]),
        f'state = {{"o": sd.get_optimizer_state_dict(net, opt{_options(given)})}}',
        *([f'state["o"]["state"].pop("{unused}")'] if unused and not given else []),
        "dcp.load(state, checkpoint_id=folder)",
        f'sd.set_optimizer_state_dict(net, opt, state["o"]{_options([*given, "strict=False"] if unused else given)})',
        'got = sd.get_optimizer_state_dict(net, opt, options=sd.StateDictOptions(full_state_dict=True))["state"]',
        f'got = [got[k]["exp_avg"] for k in {names}] + [g.get("lr") for g in opt.param_groups]',
        f"return [G[k] / 2 for k in {names}] + {groups[1].due}, got",
    ]
    constants = [
        f"G = {{{', '.join(f'{name!r}: {tensor_text(full)}' for name, full in grads.items())}}}",
        "class Net(torch.nn.ParameterDict):",
        f"    forward = lambda self: sum((self[k] * G[k]).sum() for k in {names})",
        "made = lambda net, group, rate: dict(params=[[*net.parameters()][at] for at in group], lr=rate)",
        "adam = lambda net, *told: torch.optim.Adam([made(net, *one) for one in told], betas=(0.5, 0.5))",
    ]
    text = "\n".join((*first, *second))
    imports = [DCP, "import torch.distributed.checkpoint.state_dict as sd"]
    imports += ["from torch.distributed.tensor import Shard, distribute_tensor"] if "distribute_tensor" in text else []
    sharding = [name for name in ("FullyShardedDataParallel", "fully_shard") if name in text]
    imports += [f"from torch.distributed.fsdp import {', '.join(sharding)}"] if sharding else []
    return Script((Stage(worlds[0], tuple(first)), Stage(worlds[1], tuple(second))), tuple(imports), tuple(constants))


def _options(given: Sequence[str]) -> str:
    return f", options=sd.StateDictOptions({', '.join(given)})" if given else ""


def _model(case: Case, way: str, groups: Groups) -> list[str]:
    placed = 'distribute_tensor(0 * g, dist.init_device_mesh("cpu", (dist.get_world_size(),)), [Shard(0)])'
    frozen = f", requires_grad=k != {case.get('frozen')!r}" if "frozen" in case else ""
    made = {
        "line": [],
        "fsdp": ["fully_shard(net)"],
        "fsdp1": ['net = FullyShardedDataParallel(net, device_id=torch.device("cpu"), use_orig_params=True)'],
    }
    told = ", ".join(f"({group}, {rate})" for group, rate in zip(groups.places, groups.rates, strict=True))
    parameters = f"torch.nn.Parameter({placed if way == 'line' else '0 * g'}{frozen})"
    return [f"net = Net({{k: {parameters} for k, g in G.items()}})", *made[way], f"opt = adam(net, {told})"]
