"""The features of tensors, layouts, meshes and states, read from their texts.

The functions return names of :data:`shardlaw.conformance.law.features.features.FEATURES`. They are cached, since cases share their parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import cache, lru_cache
from math import prod

from shardlaw.reference.checkpoint.state_dict import Slot, Stateful, parse_state
from shardlaw.reference.layout import Layout, LayoutError
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.notation import NotationError, Shape
from shardlaw.reference.placement import Partial, Placements, Shard, StridedShard, is_reduction, parse_placements, shard_dim
from shardlaw.reference.tensors import TensorSpec


@cache
def mesh_features(mesh: Mesh, world: int) -> frozenset[str]:
    found = set()
    if mesh.ndim > 1:
        found |= {"mesh-2d"} if mesh.ndim == 2 else {"mesh-2d", "mesh-3d"}
    if 1 in mesh.shape:
        found.add("unit-mesh-dim")
    if list(mesh.ranks) != sorted(mesh.ranks):
        found.add("permuted")
        groups = (mesh.group(dim, coord) for dim in range(mesh.ndim) for coord in mesh.coords())
        if any(list(group) != sorted(group) for group in groups):
            found.add("unsorted-group")
    if world > mesh.size:
        found.add("submesh")
    return frozenset(found)


@cache
def shape_features(shape: Shape) -> frozenset[str]:
    names = {"size-0": 0 in shape, "size-1": 1 in shape, "0-d": not shape}
    return frozenset(name for name, holds in names.items() if holds)


@lru_cache(8192)
def tensor_features(text: str, mesh: str) -> frozenset[str]:
    spec = TensorSpec.parse(text)
    found = set(shape_features(spec.shape))
    indices = spec.fill.startswith("index")
    if spec.dtype != "float32" and not (indices and spec.dtype == "int64"):
        found.add(f"dtype:{spec.dtype}")
    wide = [extent for extent in spec.shape if extent > 1]
    if (spec.memory == "transposed" and len(wide) > 1) or (spec.memory in ("sliced", "expanded") and wide):
        found |= {"noncontiguous", f"memory:{spec.memory}"}
    if spec.memory == "channels-last" and len(spec.shape) > 2 and len(wide) > 1:
        found |= {"noncontiguous", "memory:channels-last"}
    if spec.memory == "offset" and spec.shape:
        found.add("memory:offset")
    if spec.fill == "ties":
        found.add("tie")
    if spec.fill in ("wide", "edges"):
        found.add("edge" if spec.fill == "edges" else "wide")
        found |= {"nan"} if spec.fill == "edges" and spec.torch_dtype.is_floating_point else set()
    if spec.placements is not None and mesh:
        placed = placement_features(spec.shape, mesh, ",".join(map(str, spec.placements)))
        found |= placed
        if spec.fill == "zeros" and any(feature.startswith("partial:") for feature in placed):
            found.add("cancelling")
    return frozenset(found)


@lru_cache(8192)
def placement_features(shape: Shape, mesh_text: str, placements_text: str) -> frozenset[str]:
    """The features of a layout; none where a text is no mesh or no list of placements."""
    try:
        mesh, placements = Mesh.parse(mesh_text), parse_placements(placements_text)
    except NotationError:
        return frozenset()
    found = set()
    if len(placements) != mesh.ndim:
        found.add("few-placements" if len(placements) < mesh.ndim else "many-placements")
    if any((shard_dim(placement) or 0) < 0 for placement in placements):
        found.add("negative-shard")
    ops = [placement.op for placement in placements if isinstance(placement, Partial)]
    found |= {f"partial:{op}" for op in ops}
    if sum(map(is_reduction, placements)) > 1:
        found.add("partial-twice")
    if len(set(ops)) > 1:
        found.add("partial-mixed" if set(ops) <= {"sum", "avg"} else "mixed-partials")
    if any(isinstance(placement, StridedShard) for placement in placements):
        found.add("strided")
    try:
        layout = Layout(shape, mesh, placements)
    except LayoutError as error:
        return frozenset(found | ({"dim-out-of-range"} if error.kind == "dim" else set()))
    if 0 not in shape and layout.empty_coords():
        found.add("empty-shard")
    if not layout.is_even():
        found.add("uneven")
    if "strided" in found and 0 not in shape and any(layout.box(coord) is None for coord in mesh.coords()):
        found.add("no-box")
    found.update(_nesting_features(layout.shape, layout.mesh.shape, layout.placements))
    return frozenset(found)


def _nesting_features(shape: Shape, mesh: Shape, placements: Placements) -> Iterator[str]:
    for at, placement in enumerate(placements):
        dim = shard_dim(placement)
        if dim is None:
            continue
        others = [other for other in placements[:at] if shard_dim(other) == dim]
        if others:
            yield "nested"
        elif isinstance(placement, Shard) and shape[dim] >= mesh[at] and -(-shape[dim] // mesh[at]) * (mesh[at] - 1) >= shape[dim] > 0:
            yield "late-empty-shard"
        if isinstance(placement, StridedShard):
            extents = [extent for extent, other in zip(mesh, placements, strict=True) if shard_dim(other) == dim]
            inner = extents[len(others) + 1 :]
            uneven = bool(shape[dim] % (prod(extents[: len(others) + 1]) * placement.split_factor))
            if any(isinstance(other, StridedShard) for other in others):
                yield "strided-stacked"
            if uneven:
                yield "strided-uneven"
            if uneven or placement.split_factor != prod(inner):
                yield "strided-loose"


def is_strided_beside(dims: int, layouts: Iterable[str]) -> bool:
    """Whether one of these layouts on a mesh has a strided shard of a dim that another mesh dim shards, in it or in another one; of a
    tensor of so many dims."""
    shards: set[tuple[int, int]] = set()  # tensor dim and mesh dim
    strided: set[tuple[int, int]] = set()
    for text in layouts:
        with suppress(NotationError):
            for at, placement in enumerate(parse_placements(text)):
                if (dim := shard_dim(placement)) is not None:
                    shards.add((dim % max(dims, 1), at))
                    if isinstance(placement, StridedShard):
                        strided.add((dim % max(dims, 1), at))
    return any(dim == other and at != beside for dim, at in strided for other, beside in shards)


def operand_features(texts: Iterable[str]) -> Iterator[str]:
    """The features of how the tensors of a case differ from each other."""
    specs = [TensorSpec.parse(text) for text in texts]
    values = [spec for spec in specs if not spec.fill.startswith("index")]
    if len({spec.dtype for spec in values}) > 1:
        yield "type-promotion"
    placed = [spec for spec in specs if spec.placements is not None]
    if placed and len(placed) < len(specs):
        yield "plain-operand"
    if len({spec.placements for spec in placed}) > 1:
        yield "unlike-placements"
    for at, one in enumerate(placed):
        for other in placed[:at]:
            if one.shape != other.shape and _broadcasts(one.shape, other.shape):
                yield "broadcast"
            for first, second in zip(one.placements or (), other.placements or (), strict=False):
                dim = shard_dim(first)
                both = dim is not None and dim == shard_dim(second) and max(dim, -dim - 1) < min(len(one.shape), len(other.shape))
                if both and one.shape[dim or 0] != other.shape[dim or 0]:
                    yield "extents-differ"


def _broadcasts(a: Shape, b: Shape) -> bool:
    return all(x == y or 1 in (x, y) for x, y in zip(reversed(a), reversed(b), strict=False))


@cache
def state_features(text: str) -> frozenset[str]:
    found = {"nested-state"}
    seen: set[str] = set()

    def visit(value: object) -> None:
        if isinstance(value, Slot):
            found.update({"alias"} if value.name in seen else ())
            seen.add(value.name)
        elif isinstance(value, Stateful):
            found.add("stateful")
            visit(value.state)
        elif isinstance(value, dict | list | tuple):
            found.update(() if value else {"empty-container"})
            if isinstance(value, dict):
                found.update({"odd-keys"} if any(not isinstance(key, str) or "." in key for key in value) else ())
            for entry in value.values() if isinstance(value, dict) else value:
                visit(entry)
        else:
            found.add("other-values")

    visit(parse_state(text))
    return frozenset(found)
