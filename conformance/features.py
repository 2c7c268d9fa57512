"""Features: the departures of a case from the plainest one.

The plainest case is one float32 tensor, contiguous, of two elements on a 1-D mesh of two ranks, replicated or evenly sharded, used once
by one call that goes forward. Everything else that a case has is a feature. A report counts the features that a run reached and
lists those that it missed; a finding carries those of its smallest case; an expectation names those that it needs.

The catalogue is closed: :data:`FEATURES` holds every name, and for a few families a pattern that ends in ``*``. The features of
:func:`features_of` are read from the fields of the case alone; those marked *seen by a rank* only a run can tell.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cache, lru_cache
from typing import TYPE_CHECKING

from conformance.calls import of_steps
from conformance.case import Case
from conformance.departures import of_layout, of_mesh, of_operands, of_shape, of_state, of_tensor
from reference.mesh import Mesh
from reference.notation import NotationError, parse_shape
from reference.placement import REDUCE_OPS
from reference.tensors import DTYPES, MEMORIES, TensorSpec

if TYPE_CHECKING:
    from conformance.law import Law

# The lines of the input space: what a generator must reach.
LINES: dict[str, dict[str, str]] = {
    "sizes": {
        "uneven": "the ranks of a sharded tensor hold local tensors of different shapes",
        "empty-shard": "a rank holds nothing of a tensor that has elements",
        "late-empty-shard": "a rank holds nothing of a dim that has an element for every rank: the shards before it are larger",
        "size-0": "a tensor dim of extent 0",
        "size-1": "a tensor dim of extent 1",
        "0-d": "a tensor without dims",
        "replicated": "a tensor that nothing shards or leaves to be reduced",
        "broadcast": "operands of different shapes that broadcast",
        "extents-differ": "operands of different extents along a dim that both shard",
    },
    "what is judged": {
        "several-outputs": "a call that gives several tensors, each of which is judged",
        "view": "a call whose result shares memory with an operand, which is judged too",
        "own:*": "a corner that a law of another package names",
    },
    "partial inputs": {
        **{f"partial:{op}": f"contributions whose reduction by {op} is pending" for op in REDUCE_OPS},
        "partial-twice": "reductions pending along two mesh dims",
        "partial-mixed": "sum pending along one mesh dim, avg along another",
        "derived": "seen by a rank: a pending reduction with a transform of its own, such as a norm or a masked lookup",
        "masked-beside-shard": "a masked lookup along one mesh dim, a shard of its rows or columns along another",
        "cancelling": "contributions that cancel to 0 everywhere",
    },
    "programs": {
        "program": "more than one call",
        "random": "a tensor of random elements",
        "module": "a module whose parameters are distributed",
        "reused": "one tensor consumed twice",
        "redistributed": "a redistribution between calls",
        "op:*": "seen by a rank: an overload that ran",
    },
    "history": {
        "history": "the world must have served other cases before",
        "bystander": "something else is done first that must not matter: another mesh view, another op",
        "repeated": "one function called more than once, on other arguments",
    },
    "arguments": {
        "negative-dim": "a dim argument that counts from the end",
        "dim-tuple": "several dims in one argument",
        "dim-empty": "an empty tuple for a dim argument",
        "dim-none": "None for a dim argument",
        "keepdim": "a reduction that keeps its dims",
        "no-identity": "a reduction that no elements at all do not have: the largest or the smallest",
        "scalar:int": "a Python int as operand",
        "scalar:float": "a Python float as operand",
        "scalar:bool": "a Python bool as operand",
        "scalar:tensor": "a plain 0-d tensor as operand",
        "plain-operand": "a plain tensor beside a sharded one",
        "unlike-placements": "operands that are placed differently",
        "tie": "elements that are equal, for ops that choose among them",
        "option:*": "a keyword argument by name, other than dim and keepdim",
        "source-rank": "data that is taken from another rank than the first",
        "planner": "a redistribution that is planned in another way",
    },
    "in place": {
        "in-place": "a call that changes an operand",
        "write-through-view": "a call that changes an operand through a view of it",
        "write:*": "a write that a gradient goes back through, by name",
        "out-argument": "a result written into a given tensor",
    },
    "backward": {
        "backward": "gradients are judged",
        "requires-grad": "a tensor that asks for a gradient",
        "grad-placements": "placements that are given for a gradient",
        "last-alone": "of three or more operands only the last one's gradient is wanted",
    },
    "meshes": {
        "mesh-2d": "a mesh of two dims",
        "mesh-3d": "a mesh of three dims or more",
        "unit-mesh-dim": "a mesh dim of size 1",
        "permuted": "a mesh whose table of ranks does not ascend",
        "unsorted-group": "a mesh with a group, along one of its dims, whose ranks do not ascend",
        "submesh": "ranks of the world that are outside the mesh",
        "two-meshes": "two different meshes in one case",
        "mesh-view": "a slice, a flattened or an unflattened part of a mesh",
        "named-mesh": "mesh dims that have names",
        "flattened-dims": "dims of the mesh in use that were flattened into one",
        "rank-twice": "a table that holds a rank twice",
        "rank-outside": "a table that holds a rank outside the world",
        "name-twice": "a slice by one name given twice",
        "world:*": "a world of so many ranks, other than 2",
        "nested": "two mesh dims shard the same tensor dim",
    },
    "strided shards": {
        "strided": "a strided shard, as source or target",
        "strided-lone": "a strided shard of a dim that no mesh dim to the right shards",
        "strided-stacked": "two strided shards of one tensor dim",
        "strided-uneven": "a strided shard whose runs are not all of one length",
        "strided-loose": "a strided shard that is uneven, or that is no part of an order of shards",
    },
    "placements given oddly": {
        "negative-shard": "a placement that counts its dim from the end",
        "few-placements": "fewer placements than mesh dims",
        "many-placements": "more placements than mesh dims",
        "dim-out-of-range": "a placement of a dim that the tensor does not have",
        "mixed-partials": "reductions that may not stand side by side",
        "other-sizes": "local tensors of other sizes than the placements name",
        "explicit-shards": "a tensor that is handed out in boxes of any size",
        "several-shards": "a rank that holds several shards of a tensor",
        "shardless": "a rank of the mesh that holds no shard of a tensor",
        "beyond-the-end": "an empty chunk that would begin beyond the end of its dim, counted in chunks of equal size",
        "same-dim": "chunks that move among ranks, along the dim that they lie on",
        "cyclic": "chunks that move among ranks, not all of them by exchanging places",
        "dim-named-twice": "one dim, counted from the beginning and from the end",
        "malformed-shards": "shards that are not described one by one",
        "wrapper-detach": "a wrapper around shards that is detached",
    },
    "dtypes": {
        **{f"dtype:{name}": f"a tensor of {name}" for name in DTYPES if name != "float32"},
        "type-promotion": "operands of different dtypes",
        "rare-dtype": "a dtype that few backends carry, such as float8 or uint16",
        "dtype-between": "a dtype in which a result or a gradient travels, other than its tensor's",
    },
    "memory": {
        "noncontiguous": "a tensor that is not contiguous",
        **{f"memory:{memory}": f"a tensor whose memory is {memory}" for memory in MEMORIES if memory != "plain"},
        "memory:channels-last": "a tensor whose second dim lies innermost in memory",
        "memory:offset": "a contiguous tensor that begins behind others in its storage",
    },
    "checkpoints": {
        "reshard": "loaded with another layout than it was saved with",
        "reworld": "loaded in a world of another size",
        "plain-tensor": "a plain tensor in a checkpoint",
        "kinds-crossed": "saved as a DTensor and loaded as a plain tensor, or the other way round",
        "cast": "loaded into another dtype",
        "several-tensors": "more than one tensor in a checkpoint",
        "part": "a tensor of which a rank wants the part that its model has",
        "later-group": "a group that shares a state and is not the first ranks of the world",
        "flat-state": "the state of an optimizer without nested dicts",
        "whole-state": "the state of an optimizer in whole tensors",
        "stateless": "a parameter of which the optimizer has no state",
        "offloaded": "a state that is brought to the memory of the host",
        "pending-gradients": "parameters with gradients that no step has used yet",
        "never-stepped": "an optimizer that has not made a step",
        "rates-differ": "parameters of one group that were saved with different options",
        "hook": "a state that a hook adds to a module's",
        "nested-state": "a state of dicts and lists",
        "odd-keys": "keys that are numbers or hold dots",
        "int-keys": "a dict in a state that is keyed by whole numbers",
        "empty-container": "an empty dict, list or tuple in a state",
        "list-with-empty-dict": "a list in a state that holds an empty dict",
        "unusual-values": "sets and complex numbers in a state",
        "value-for-tensor": "a value that is no tensor, where the destination holds a tensor",
        "staging-cache": "a writer that keeps the memory that it staged into",
        "other-values": "values that are no tensors in a state",
        "stateful": "an object that hands out and takes back its state",
        "alias": "one tensor under two keys",
        "other-state": "loaded into another state than the one that was saved",
        "storage-option": "an option of the writer or the planner",
        "saved-with:*": "an option of the writer or the planner, by name",
        "storage:*": "a storage other than the target's, by name",
        "storage-calls": "the calls that a planner and a storage get",
        "checkpoint-id": "a checkpoint that is named in the call",
        "no-collectives": "a save in which every rank writes for itself",
        "no-collectives-after": "a save in which every rank writes for itself, over one in which they wrote together",
        "fails:*": "a call to a planner or a storage that fails, by name",
        "error:*": "what a call fails with, other than an ordinary error",
        "fails-on-follower": "a call that fails on one rank, not the leading one",
        "fails-on-several": "a call that fails on more ranks than one",
        "fails-in-thread": "a call that fails in a thread of the storage",
        "fails-after-plan": "a save that fails while it writes, or later",
        "first-save-fails": "a first save that fails",
        "plan-cache": "plans that are kept from one save to the next",
        "staged:*": "a value of a kind that a save in the background must copy, by name",
        "stager:*": "what copies the state of a save in the background",
        "only-inner-flattened": "a planner that flattens sharded tensors within one another, and no states",
        "integers": "a tensor of whole numbers or bools, where floats are the rule",
        "damaged-file:*": "a checkpoint whose files were damaged, by how",
        "async-save": "saved in the background",
        "saved-twice": "several saves, one after the other",
        "other-paths": "a leaf whose path is another in the next save, with nothing else changed for some rank",
        "one-plan": "a save that one rank plans alone",
        "shared-chunk": "a chunk that several ranks hold",
        "several-chunks": "a tensor that is saved in several chunks",
        "empty-chunk": "a chunk without elements of a tensor that has some",
        "empty-chunk:*": "where a chunk without elements lies: at the end, where another begins, inside one, or beyond the bounds",
        "damaged:*": "chunks that tiled their tensor until they were damaged in this way",
        "untiled": "saved chunks that leave a hole in their tensor, or overlap",
        "no-box": "a rank whose elements are no box",
    },
    "collectives": {
        "async": "a collective whose work is waited for",
        "in-flight": "several works under way at once",
        "late-rank": "a rank that comes later than the others",
        "group": "a group of some ranks of the world",
        "kept-order": "a group whose members keep the order in which they were listed",
        "overlapping-groups": "two groups with a common rank",
        "disjoint-groups": "two groups without a common rank",
        "uneven-split": "members that give or get different numbers of rows",
        "zero-size-input": "a member that gives or gets no elements",
        "list-of-tensors": "a list of tensors, one for each member",
        "stacked": "one tensor with a leading dim for the members",
        "by-position": "a member that is named by its position in the group",
        "noncontiguous-output": "a result written into a tensor that is not contiguous",
        "functional": "a collective that gives a new tensor",
        "objects": "values that are no tensors, sent as bytes",
        "several-dims": "a tensor of more than one dim, where a collective is given rows",
        "along-later-dim": "blocks along another dim than the first",
        "coalesced": "several tensors in one collective",
        "blocking": "messages that are sent one at a time",
        "new-group": "a group that is made, used and destroyed",
        "reduce-op:*": "a reduction other than a sum",
        "refused-call:*": "a call that means nothing, by what is wrong with it",
        "mismatch:*": "members that disagree in something",
        "collective:*": "a collective by name, where one law is about many",
    },
    "modules": {
        "uneven-sequence": "a sequence that the ranks do not share evenly",
        "way:*": "how a model is parallelised, by name",
        "style:*": "a parallel style, by name",
        "frozen": "a parameter that asks for no gradient",
        "fully-sharded": "a model whose parameters are sharded while it is not in use",
        "certain": "a random call whose outcome is certain",
        "parallel-loss": "a loss of logits whose classes are sharded",
        "ignored-label": "a label that is no class, and is not to count",
        "label-dims": "labels of two dims or more beside the samples",
        "clipped": "gradients that are clipped",
        "norm:*": "a norm of this order",
        "optimizer:*": "an optimizer, by name",
        "local-map": "a function that is mapped over local tensors",
        "uneven-local": "local tensors of different shapes that a function is mapped over",
        "implicit-replication": "plain tensors that count as replicas",
        "recomputed": "activations that are computed again in the backward pass",
        "recompute:*": "which activations are computed again, and how",
        "training": "a model in train mode",
        "compiled": "a function that is compiled",
        "init:*": "a function that initialises a parameter, by name",
        "registered-rule": "an op whose rule a user registered",
        "context-parallel": "buffers that are cut along a sequence for a while",
        "sequence-first": "a sequence along the first dim, without a batch",
        "tiny-shards": "three shards or more, none of more than two elements",
    },
    "outcomes": {
        "must-refuse": "something without meaning, which every rank must refuse",
    },
}  # fmt: skip

#: every feature or pattern, with its meaning and the line of the input space that it belongs to
FEATURES: dict[str, str] = {name: f"{meaning} ({line})" for line, names in LINES.items() for name, meaning in names.items()}
PATTERNS = tuple(name.removesuffix("*") for name in FEATURES if name.endswith("*"))

# fields of a checkpoint that are options of its writer or its planner
SAVE_OPTIONS = ("threads", "files", "dedup", "sync", "ahead", "format", "nested", "inner")
# what a field means by being there
OF_FIELD = {
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
# where a case has two ends, a save and a load
TWO_ENDS = ("roundtrip", "plan")


def known(feature: str) -> bool:
    """Whether the catalogue has this feature, by its name or by the pattern of its family."""
    return not feature.endswith("*") and (feature in FEATURES or any(feature.startswith(p) and feature != p for p in PATTERNS))


def line_of(feature: str) -> str:
    """The line of the input space that a known feature belongs to. Raises ``KeyError``."""
    for line, names in LINES.items():
        if feature in names or any(name.endswith("*") and feature.startswith(name[:-1]) for name in names):
            return line
    raise KeyError(feature)


def missing(reached: Iterable[str]) -> list[str]:
    """The features of the catalogue that are not among ``reached``, patterns included when nothing of their family is."""
    seen = set(reached)
    seen.add("history")  # a finding may turn out to need one; nothing is drawn with one
    seen.add("own:")  # of no law of ours
    return [name for name in FEATURES if name not in seen and not (name.endswith("*") and any(s.startswith(name[:-1]) for s in seen))]


def features_of(case: Case, law: Law | None = None) -> frozenset[str]:
    """The departures of a case from the plainest one, as far as its fields tell, with those that its law adds."""
    chapter = case.law.partition(".")[0]
    found = set(_of_fields(chapter, case.fields))
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
def _of_fields(chapter: str, fields: tuple[tuple[str, str], ...]) -> frozenset[str]:
    case = Case("", fields)
    found: set[str] = set()
    specs = dict(_tensors(case))
    meshes = case.meshes
    for name in (field for field, _ in fields if field == "mesh" or field.startswith("mesh.")):
        mesh = case.mesh(name)
        found |= of_mesh(mesh, _world(case, name, mesh))
    if len(set(meshes)) > 1 and chapter not in TWO_ENDS:
        found.add("two-meshes")
    if case.world != 2:
        found.add(f"world:{case.world}")
    on = str(meshes[0]) if meshes else ""
    for spec in specs.values():
        found |= of_tensor(spec, on)
    for shape in (parse_shape(case.get("shape")),) if "shape" in case else ():
        found |= of_shape(shape)
        found |= set().union(*(of_layout(shape, on, text) for text in _targets(case, "")))
    if "steps" in case:
        found.update(of_operands(specs.values()))
        found |= of_steps(case.get("steps"))
    found |= {OF_FIELD[name] for name, value in fields if name in OF_FIELD and value != "none"}
    if chapter == "roundtrip":
        found |= {f"saved-with:{name}" for name, _ in fields if name in SAVE_OPTIONS}
    for name, feature in (("dtype", f"dtype:{case.get('dtype', '')}"), ("memory", f"memory:{case.get('memory', '')}")):
        if name in case and feature in FEATURES:
            found |= {feature, "noncontiguous"} if name == "memory" else {feature}
    load_mesh = case.get("mesh.load", on)
    for name, text in specs.items():
        for target in _targets(case, name):
            found |= of_layout(parse_shape(text.partition(":")[0]), load_mesh, target)
    for field in ("state", "into"):
        if field in case:
            found |= of_state(case.get(field))
    if chapter in TWO_ENDS and "mesh" in case:
        found.update(_of_two_ends(case, specs))
    return frozenset(found)


def _tensors(case: Case) -> Iterator[tuple[str, str]]:
    """The fields of a case that are tensors: one letter, or a letter and a digit, and the text of a tensor."""
    for name, value in case.fields:
        if re.fullmatch(r"[a-z]\d?", name) and _spec(value) is not None:
            yield name, value


@cache
def _spec(text: str) -> TensorSpec | None:
    try:
        return TensorSpec.parse(text)
    except NotationError:
        return None


def _world(case: Case, name: str, mesh: Mesh) -> int:
    """How many ranks there are where a mesh is used: a save and a load have worlds of their own."""
    if "mesh.load" in case or "world.save" in case or "world.load" in case:
        return case.integer("world.load" if name == "mesh.load" else "world.save", max(mesh.ranks) + 1)
    return case.world


def _targets(case: Case, name: str) -> list[str]:
    """Placements that the tensor ``name`` is to have later, or passes through."""
    wanted = [f"to.{name}" if f"to.{name}" in case else "to", "via"]
    return [case.get(field) for field in wanted if field in case]


def _of_two_ends(case: Case, specs: dict[str, str]) -> Iterator[str]:
    """How what is loaded departs from what was saved."""
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
