"""Ops: the calls of each, and the tensors that they take.

An :class:`Op` is a list of variants; a :class:`Variant` is a call, such as ``mm(a,b)``, and the tensors that it takes, with symbolic
sizes: ``a=m,k b=k,n``. They are written down in tables (see :mod:`shardlaw.strategies.op_table`).

``a=m,k`` is a tensor of two dims, ``a=()`` a 0-d one. A dim may be a product or sum of sizes (``2*m``), and so may the text in
braces in a call: ``reshape(a,({m*n},))``. ``i=k:int64:index{n}`` fixes dtype and fill; where they are left out, they are the
op's. ``w=n:::R`` is always replicated; ``w=n:::W`` has no pending reduction; ``w=n:::B`` is
sharded on its first dim only, or not, ``w=n:::E`` on its first and last dims only, or not. Calls are in the notation of programs of steps.

With sizes, a mesh and placements a variant becomes a :class:`Sample`, from which a case is made. :meth:`Variant.match` recovers the sizes.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

from shardlaw.reference.mesh import Mesh
from shardlaw.reference.notation import Shape
from shardlaw.reference.placement import Partial, Placement, Placements, Replicate, Shard
from shardlaw.reference.tensors import TensorSpec

FLOATS = ("float32", "float64", "bfloat16")
NUMBERS = ("float32", "int64", "bfloat16", "float64", "int32")
ANY = ("float32", "int64", "bool", "bfloat16", "uint8")
INTEGERS = ("int64", "int32", "uint8")
Sizes = dict[str, int]
Refuses = Literal["never", "pending", "any"]


@dataclass(frozen=True)
class Sample:
    """Tensors on a mesh, and a program on them. ``origin`` names the OpInfo sample from which it was made, if there is one."""

    mesh: Mesh
    tensors: tuple[tuple[str, TensorSpec], ...]
    steps: str
    origin: str = ""


@dataclass(frozen=True)
class Arg:
    """A tensor argument: its symbolic dims; ``dtype`` and ``fill`` where they are not the op's. ``bound``: always replicated (``R``), never
    pending (``W``), or sharded on its first dim at most, as a batch (``B``), or on its first and last dims at most (``E``)."""

    name: str
    dims: tuple[str, ...]
    dtype: str = ""
    fill: str = ""
    bound: str = ""

    @classmethod
    def parse(cls, text: str) -> Arg:
        name, _, rest = text.partition("=")
        dims, dtype, fill, bound = [*rest.split(":"), "", "", ""][:4]
        return cls(name, () if dims == "()" else tuple(dims.split(",")), dtype, fill, bound)

    def shape(self, sizes: Mapping[str, int]) -> Shape:
        return tuple(evaluate(dim, sizes) for dim in self.dims)


@dataclass(frozen=True)
class Variant:
    """One call of an op. ``least`` holds the smallest size of a dim, where it is not 0; ``origin`` names a sample of OpInfo."""

    args: tuple[Arg, ...]
    call: str
    dtypes: tuple[str, ...]
    fill: str = "distinct"
    least: tuple[tuple[str, int], ...] = ()
    origin: str = ""

    @cached_property
    def symbols(self) -> tuple[str, ...]:
        """The names of the sizes, in order of appearance."""
        texts = [dim for arg in self.args for dim in arg.dims]
        return tuple(dict.fromkeys(name for text in texts for name in re.findall(r"[a-z]", text)))

    def steps(self, sizes: Mapping[str, int]) -> str:
        """The call with its sizes filled in."""
        return substitute(self.call, sizes)

    def fits(self, sizes: Mapping[str, int]) -> Sizes:
        """``sizes``, raised to what the call needs."""
        least = dict(self.least)
        return {name: max(sizes[name], least.get(name, 0)) for name in self.symbols}

    def spec(
        self, arg: Arg, sizes: Mapping[str, int], dtype: str, placements: Placements | None = None, memory: str = "plain"
    ) -> TensorSpec:
        """The spec of ``arg`` with these sizes."""
        chosen = arg.dtype or dtype
        fill = substitute(arg.fill or self.fill, sizes)
        fill = "index1" if fill == "index0" else fill
        return TensorSpec(arg.shape(sizes), placements, chosen, fill, memory)

    def sample(self, mesh: Mesh, sizes: Mapping[str, int], placed: Mapping[str, Placements], dtype: str, memory: str = "plain") -> Sample:
        """The variant with these sizes on ``mesh``; ``placed`` has the placements of every argument."""
        tensors = tuple((arg.name, self.spec(arg, sizes, dtype, placed[arg.name], memory)) for arg in self.args)
        return Sample(mesh, tensors, self.steps(sizes), self.origin)

    def match(self, tensors: Mapping[str, TensorSpec], steps: str) -> Sizes | None:
        """The sizes with which this variant gives ``steps`` on ``tensors``; ``None`` where there are none."""
        sizes: Sizes = {}
        if set(tensors) != {arg.name for arg in self.args}:
            return None
        for arg in self.args:
            shape = tensors[arg.name].shape
            if len(shape) != len(arg.dims):
                return None
            for dim, size in zip(arg.dims, shape, strict=True):
                name = re.sub(r"^\d+\*", "", dim)
                factor = int(dim[: -len(name) - 1]) if name != dim else 1
                if name.isidentifier() and not size % factor:
                    sizes.setdefault(name, size // factor)
        if set(sizes) != set(self.symbols):
            return None
        free = {tensors[arg.name].dtype for arg in self.args if not arg.dtype}
        alike = len(free) < 2 and all(self._could_be(arg, sizes, tensors[arg.name]) for arg in self.args)
        return sizes if alike and self.steps(sizes) == steps else None

    def _could_be(self, arg: Arg, sizes: Mapping[str, int], spec: TensorSpec) -> bool:
        due = self.spec(arg, sizes, spec.dtype)
        return (due.shape, due.dtype, due.fill) == (spec.shape, spec.dtype, spec.fill)


@dataclass(frozen=True)
class Op:
    """What a user calls, by OpInfo's name where it has one, with every way to call it.

    - ``exact``: the float32 result has one right value, rounding included.
    - ``pairs``: pairs of pending reductions of its arguments are tried.
    - ``light``: one of many similar ops, of which a few samples are enough.
    - ``zeros``: it is tried on tensors without elements.
    - ``flat``: it is tried on 1-D meshes only; ``shallow``: on 1-D and 2-D ones, since DTensor may plan it for many seconds on three dims;
      ``square``: every variant is tried on 2-D meshes too.
    - ``refuses``: when torch may refuse it, apart from zero-size and strided tensors: ``never``; with ``pending`` reductions, as an
      in-place op may whose result needs other placements; or in ``any`` layout, where torch documents or registers nothing.
    """

    name: str
    variants: tuple[Variant, ...]
    exact: bool = True
    pairs: bool = False
    light: bool = False
    zeros: bool = True
    flat: bool = False
    shallow: bool = False
    square: bool = False
    refuses: Refuses = "never"
    source: str = ""

    @cached_property
    def dtypes(self) -> frozenset[str]:
        """Those of any variant."""
        return frozenset(dtype for variant in self.variants for dtype in variant.dtypes)

    def find(self, tensors: Mapping[str, TensorSpec], steps: str) -> tuple[Variant, Sizes] | None:
        """The variant and sizes behind the tensors and steps of a case."""
        for variant in self.variants:
            sizes = variant.match(tensors, steps)
            if sizes is not None:
                return variant, sizes
        return None


@lru_cache(maxsize=4096)
def _tree(text: str) -> ast.expr:
    return ast.parse(text, mode="eval").body


def evaluate(text: str, sizes: Mapping[str, int]) -> int:
    """A whole number from an expression of sizes, such as ``2*m`` or ``n-1``. Raises ``ValueError``."""
    if text in sizes:  # most texts are a name
        return sizes[text]

    def value(node: ast.expr) -> int:
        match node:
            case ast.Constant(value=int(number)):
                return number
            case ast.Name(id=name):
                return sizes[name]
            case ast.BinOp(left=left, op=ast.Mult(), right=right):
                return value(left) * value(right)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return value(left) + value(right)
            case ast.BinOp(left=left, op=ast.Sub(), right=right):
                return value(left) - value(right)
            case ast.BinOp(left=left, op=ast.FloorDiv(), right=right):
                return value(left) // value(right)
        raise ValueError(f"size {text!r}: want names, whole numbers, * + - //")

    return value(_tree(text))


def substitute(text: str, sizes: Mapping[str, int]) -> str:
    """``text`` with expressions in braces replaced by their values."""
    return re.sub(r"\{([^{}]*)\}", lambda found: str(evaluate(found[1], sizes)), text) if "{" in text else text


def single_placements(arg: Arg, dtype: str, reduce_ops: Iterable[str] = ("sum",)) -> list[Placement]:
    """The placements of an argument on one mesh dim: a replica, each shard, each of ``reduce_ops`` pending."""
    dims = {"R": (), "B": range(1), "E": (0, len(arg.dims) - 1)}.get(arg.bound, range(len(arg.dims)))
    shards = [Shard(dim) for dim in dims]
    pending = [] if arg.bound else [Partial(op) for op in reduce_ops if reduces_safely(arg.dtype or dtype, op)]
    return [Replicate(), *shards, *pending]


def reduces_safely(dtype: str, op: str) -> bool:
    """Whether a reduction of contributions of this dtype neither rounds nor overflows."""
    if dtype in ("float32", "float64"):
        return op in ("sum", "avg", "min", "max", "product")
    if dtype in ("int64", "int32"):
        return op in ("sum", "min", "max", "product")
    return dtype == "bfloat16" and op in ("sum", "max", "min")
