"""Features: the departures of a case from the plainest one.

The plainest case is a single call, forward, on one contiguous float32 tensor of two elements, replicated or evenly sharded on a 1-D mesh
of two ranks. Every departure from it is a feature. A report counts the features that a run reached and lists those that it missed; a
finding has those of its smallest case; an expectation names those that it needs.

The catalogue is closed: :mod:`shardlaw.conformance.law.features.feature_lines` has every name, with patterns that end in ``*`` for a few
families. :func:`features_of` reads features from the fields of a case; those marked *seen by a rank* are recorded during a run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cache, lru_cache
from typing import TYPE_CHECKING

from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.features.feature_lines import LINES
from shardlaw.conformance.law.features.layout_features import (
    is_strided_beside,
    mesh_features,
    operand_features,
    placement_features,
    shape_features,
    state_features,
    tensor_features,
)
from shardlaw.conformance.law.program.calls import program_features
from shardlaw.reference.mesh import Mesh
from shardlaw.reference.notation import NotationError, parse_shape
from shardlaw.reference.tensors import TensorSpec

if TYPE_CHECKING:
    from shardlaw.conformance.law.law import Law

#: every feature or pattern, with its meaning and the line of the input space that it belongs to
FEATURES: dict[str, str] = {name: f"{meaning} ({line})" for line, names in LINES.items() for name, meaning in names.items()}
PATTERNS = tuple(name.removesuffix("*") for name in FEATURES if name.endswith("*"))

# fields that are options of a checkpoint's writer or planner
SAVE_OPTIONS = ("threads", "files", "dedup", "sync", "ahead", "format", "nested", "inner")
# the feature of a case that has the field
FIELD_FEATURES = {
    **dict.fromkeys(("slice", "flatten", "of", "groups", "sizes"), "mesh-view"),
    **dict.fromkeys(SAVE_OPTIONS, "storage-option"),
    **dict.fromkeys(("declared", "grads"), "grad-placements"),
    "async": "async-save",
    "attempt": "must-refuse",
    "before": "bystander",
    "boxes": "explicit-shards",
    "fn": "module",
    "style": "module",
    "into": "other-state",
    "names": "named-mesh",
    "order": "saved-twice",
    "plan": "planner",
    "requires_grad": "requires-grad",
    "src": "source-rank",
}
# calls whose result may be a pending maximum or minimum
EXTREME = re.compile(r"\b(a?max|a?min|aminmax)\(|vector_norm\(\w+,-?inf")
# chapters whose cases have two ends, a save and a load
TWO_ENDS = ("roundtrip", "plan")


def is_known(feature: str) -> bool:
    """Whether the catalogue has this feature, by name or by a pattern."""
    return not feature.endswith("*") and (feature in FEATURES or any(feature.startswith(p) and feature != p for p in PATTERNS))


def missed_features(reached: Iterable[str]) -> list[str]:
    """The features of the catalogue that are not in ``reached``; a pattern, where no feature matches it."""
    seen = set(reached)
    seen |= {"history", "own:"}  # no case is drawn with a history; only laws of other packages have features of their own
    return [name for name in FEATURES if name not in seen and not (name.endswith("*") and any(s.startswith(name[:-1]) for s in seen))]


def features_of(case: Case, law: Law | None = None) -> frozenset[str]:
    """The features that follow from the fields of a case, and those that its law adds."""
    chapter = case.law.partition(".")[0]
    found = set(_field_features(chapter, case.fields))
    if case.after:
        found.add("history")
    if chapter == "gradient" or "backward" in case.law:
        found.add("backward")
    if "refus" in case.law:
        found.add("must-refuse")
    if law is not None and law.features is not None:
        found |= law.features(case)
    return frozenset(found)


@lru_cache(8192)
def _field_features(chapter: str, fields: tuple[tuple[str, str], ...]) -> frozenset[str]:
    case = Case("", fields)
    specs = dict(_tensors(case))
    found = {*_world_features(chapter, case), *_layout_features(case, specs), *_option_features(chapter, case)}
    if "steps" in case:
        found |= {*operand_features(specs.values()), *program_features(case.get("steps"))}
    for field in ("state", "into"):
        if field in case:
            found |= state_features(case.get(field))
    extreme = found & {"partial:max", "partial:min"} or case.get("op", "") in ("max", "min") or EXTREME.search(case.get("steps", ""))
    if "nan" in found and extreme:
        found.add("nan-extreme")
    if chapter in TWO_ENDS and "mesh" in case:
        found.update(_reshard_features(case, specs))
    return frozenset(found)


def _world_features(chapter: str, case: Case) -> Iterator[str]:
    """The features of the world of a case, and of its meshes."""
    for name, _ in case.fields:
        if name == "mesh" or name.startswith("mesh."):
            mesh = case.mesh(name)
            yield from mesh_features(mesh, _world_size(case, name, mesh))
    if len(set(case.meshes)) > 1 and chapter not in TWO_ENDS:
        yield "two-meshes"
    if case.world != 2:
        yield f"world:{case.world}"


def _layout_features(case: Case, specs: dict[str, str]) -> Iterator[str]:
    """The features of the tensors of a case, or of its ``shape``, and of the layouts to which they are redistributed."""
    mesh = str(case.meshes[0]) if case.meshes else ""
    if "shape" in case:
        shape = case.shape()
        yield from shape_features(shape)
        for target in _targets(case, ""):
            yield from placement_features(shape, mesh, target)
    load_mesh = case.get("mesh.load", mesh)
    for name, text in specs.items():
        yield from tensor_features(text, mesh)
        shape, targets = parse_shape(text.partition(":")[0]), _targets(case, name)
        for target in targets:
            yield from placement_features(shape, load_mesh, target)
        if is_strided_beside(len(shape), [*text.split(":")[1:2], *(targets if load_mesh == mesh else [])]):
            yield "strided-beside"


def _option_features(chapter: str, case: Case) -> Iterator[str]:
    """The features of single fields."""
    for name, value in case.fields:
        if name in FIELD_FEATURES and value != "none":
            yield FIELD_FEATURES[name]
        if name in SAVE_OPTIONS and chapter in ("roundtrip", "crash"):
            yield f"saved-with:{name}"
        if name in ("dtype", "memory") and (feature := f"{name}:{value}") in FEATURES:
            yield from (feature, "noncontiguous") if name == "memory" else (feature,)


def _tensors(case: Case) -> Iterator[tuple[str, str]]:
    """The fields of a case that are tensors, by name (a letter, or a letter and a digit) and by text."""
    for name, value in case.fields:
        if re.fullmatch(r"[a-z]\d?", name) and parse_spec(value) is not None:
            yield name, value


@cache
def parse_spec(text: str) -> TensorSpec | None:
    """The spec that a field's text is; ``None`` where it is none."""
    try:
        return TensorSpec.parse(text)
    except NotationError:
        return None


def _world_size(case: Case, name: str, mesh: Mesh) -> int:
    """The size of the world in which a mesh is used: a save and a load have different worlds."""
    if "mesh.load" in case or "world.save" in case or "world.load" in case:
        return case.integer("world.load" if name == "mesh.load" else "world.save", max(mesh.ranks) + 1)
    return case.world


def _targets(case: Case, name: str) -> list[str]:
    """The placements to which the tensor ``name`` is redistributed, or through which it goes."""
    wanted = [f"to.{name}" if f"to.{name}" in case else "to", "via"]
    return [case.get(field) for field in wanted if field in case]


def _reshard_features(case: Case, specs: dict[str, str]) -> Iterator[str]:
    """How a load differs from the save."""
    if len(specs) > 1:
        yield "several-tensors"
    mesh, load_mesh = case.mesh(), Mesh.parse(case.get("mesh.load", case.get("mesh")))
    saved_in, loaded_in = case.integer("world.save", max(mesh.ranks) + 1), case.integer("world.load", max(load_mesh.ranks) + 1)
    if saved_in != loaded_in:
        yield "reworld"
    for name, text in specs.items():
        spec = TensorSpec.parse(text)
        saved = "-" if spec.placements is None else ",".join(map(str, spec.placements))
        loaded = case.get(f"to.{name}", case.get("to", "same"))
        loaded = saved if loaded == "same" else loaded
        if "-" in (saved, loaded):
            yield "plain-tensor"
            if saved != loaded:
                yield "kinds-crossed"
        elif (saved, mesh) != (loaded, load_mesh):
            yield "reshard"
        if case.get("dtype", spec.dtype) != spec.dtype:
            yield "cast"
