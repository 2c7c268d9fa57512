"""Dense tensors whose values make a wrong element visible.

A tensor is described by one line, ``SHAPE[:PLACEMENTS[:DTYPE[:FILL[:MEMORY]]]]``, such as ``5x6:S(0),R:int64`` or
``4x3:R:float32:small:transposed``; omitted parts have defaults. The description and a seed determine every element, on every
machine and every version of torch: values are a pure function of the position, without a random generator. All values except those of
``edges`` are integers, or sums of a few powers of two, that the dtype represents exactly. Sums and products of a test's size are then exact
too, so that a rounding difference cannot look like a fault.

==============  ===========================================================================================================
fill            elements
==============  ===========================================================================================================
``distinct``    no two alike where the dtype has room, both signs, no zero for floats; alternating runs of ``bool``
``small``       integers from -3 to 3 (``uint8``: 0 to 6): products and long sums stay exact
``positive``    integers from 1 up, no two alike
``unit``        multiples of 1/64 strictly between 0 and 1
``ties``        integers from 0 to 2: maxima, sorts and modes meet equals
``index<N>``    integers from 0 to N-1, such as ``index5``
``zeros``       nothing but zeros
``wide``        odd integers of as many bits as leave a reduction over eight ranks exact: 46 of float64, 58 of int64
``edges``       NaN, infinities, both zeros, denormals, the largest and the smallest of the dtype, in turn
==============  ===========================================================================================================

=================  ========================================================================================================
memory             how the elements lie
=================  ========================================================================================================
``plain``          contiguous
``transposed``     the reverse order of dims in memory
``sliced``         every second element of a larger buffer along the last dim, behind an offset
``expanded``       the first dim has stride 0: all its rows are the first one
``offset``         contiguous, behind others in their storage
``channels-last``  the second of three or more dims lies innermost
=================  ========================================================================================================
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import cache, lru_cache

import torch

from shardlaw.reference.notation import NotationError, Shape, format_shape, parse_shape, split_outside
from shardlaw.reference.placement import Placements, format_placements, parse_placements

FILLS = ("distinct", "small", "positive", "unit", "ties", "zeros", "wide", "edges")
MEMORIES = ("plain", "transposed", "sliced", "expanded", "offset", "channels-last")
LOST_BY_CLONE = ("sliced", "offset")  # memory layouts that ``clone`` does not preserve
DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
        *(torch.complex64, torch.complex128),
    )
}
RARE_DTYPES = ("float8_e4m3fn", "float8_e5m2")  # calls may cast to them, but no tensor of a case has them
FORMATS = ("contiguous_format", "preserve_format", "channels_last")  # for which calls may ask
# Values repeat after this many, so that sums over four ranks, averages included, are exact in the dtype.
PERIOD = {torch.int8: 100, torch.uint8: 127, torch.bfloat16: 60}
# The bits of a value of ``wide``: so few that sums over eight ranks are exact, for floats also those of averages, whose contributions are
# eight times as large.
WIDE_BITS = {torch.float64: 46, torch.float32: 17, torch.float16: 4, torch.bfloat16: 2, torch.int64: 58, torch.int32: 26, torch.int16: 10,
        torch.int8: 3, torch.uint8: 5, torch.complex64: 16, torch.complex128: 45}  # fmt: skip

SCALAR_LIMIT = 64  # up to so many elements, Python is faster than tensors


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a case. ``placements`` is ``None`` for a plain tensor, which every rank holds in full."""

    shape: Shape
    placements: Placements | None = None
    dtype: str = "float32"
    fill: str = "distinct"
    memory: str = "plain"

    @staticmethod
    @lru_cache(4096)
    def parse(text: str) -> TensorSpec:
        """The inverse of ``str``. Raises :class:`NotationError`."""
        shape, placements, dtype, fill, memory = [*split_outside(text, ":"), "", "", "", "", ""][:5]
        dtype, fill, memory = dtype or "float32", fill or "distinct", memory or "plain"
        if text.count(":") > 4:
            raise NotationError(f"tensor {text!r}: want SHAPE:PLACEMENTS:DTYPE:FILL:MEMORY")
        if dtype not in DTYPES:
            raise NotationError(f"tensor {text!r}: dtype {dtype!r} is none of {', '.join(DTYPES)}")
        if fill not in FILLS and not re.fullmatch(r"index[1-9]\d*", fill):
            raise NotationError(f"tensor {text!r}: fill {fill!r} is none of {', '.join(FILLS)}, index<N>")
        if memory not in MEMORIES:
            raise NotationError(f"tensor {text!r}: memory {memory!r} is none of {', '.join(MEMORIES)}")
        placed = None if placements in ("", "-") else parse_placements(placements)
        return TensorSpec(parse_shape(shape), placed, dtype, fill, memory)

    def __str__(self) -> str:
        placed = "-" if self.placements is None else format_placements(self.placements)
        parts = [format_shape(self.shape), placed, self.dtype, self.fill, self.memory]
        for default in ("plain", "distinct", "float32", "-"):
            if parts[-1] != default:
                break
            parts.pop()
        return ":".join(parts)

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    def with_placements(self, placements: Placements | None) -> TensorSpec:
        """The same tensor with other placements."""
        return replace(self, placements=placements)

    def build(self, seed: int) -> torch.Tensor:
        """The dense global tensor, on the CPU. Tensors of one case have different seeds."""
        return lay_out(dense(self.shape, self.torch_dtype, self.fill, seed), self.memory)


def scatter_bits(seed: int, position: int) -> int:
    """A well-mixed 32-bit integer from a seed and a position (the finaliser of MurmurHash3)."""
    x = (seed * 0x9E3779B1 + position * 0x85EBCA6B + 0x27220A95) & 0xFFFFFFFF
    x = ((x ^ x >> 16) * 0x85EBCA6B) & 0xFFFFFFFF
    x = ((x ^ x >> 13) * 0xC2B2AE35) & 0xFFFFFFFF
    return x ^ x >> 16


def scatter_bits_tensor(seed: int, count: int) -> torch.Tensor:
    """:func:`scatter_bits` of the first ``count`` positions, as int64."""
    if count <= SCALAR_LIMIT:
        return torch.tensor([scatter_bits(seed, i) for i in range(count)], dtype=torch.int64)
    x = torch.arange(count) * 0x85EBCA6B + (seed * 0x9E3779B1 + 0x27220A95 & 0xFFFFFFFF)
    x.bitwise_and_(0xFFFFFFFF)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        # int64 products wrap around, but their lower 32 bits are right
        x = (x ^ x >> shift).mul_(factor).bitwise_and_(0xFFFFFFFF)
    return x ^ x >> 16


def dense(shape: Shape, dtype: torch.dtype, fill: str = "distinct", seed: int = 0) -> torch.Tensor:
    """A contiguous CPU tensor of ``shape`` with the elements that ``fill`` and ``seed`` name."""
    return _elements(math.prod(shape), dtype, fill, seed).clone().reshape(shape)


@lru_cache(256)
def _elements(count: int, dtype: torch.dtype, fill: str, seed: int) -> torch.Tensor:
    bits = scatter_bits_tensor(seed, count)
    if fill.startswith("index"):
        values = bits % int(fill[5:])
    elif fill == "zeros":
        values = torch.zeros(count, dtype=torch.int64)
    elif fill == "edges":
        some = edge_values(dtype)
        return some[(torch.arange(count) + bits[:1]) % len(some)]
    elif fill == "ties":
        values = bits % 3
    elif fill == "unit":
        values = (bits % 63 + 1) / 64
    elif dtype == torch.bool:
        values = bits % 2
    elif fill == "wide":
        top = 1 << WIDE_BITS[dtype] - 1
        values = (bits | scatter_bits_tensor(seed + 2, count) << 32) & top - 1 | top | 1
        if dtype != torch.uint8:
            values = torch.where(scatter_bits_tensor(seed + 1, count) % 2 == 1, -values, values)
    elif fill == "small":
        values = bits % 7 + (0 if dtype == torch.uint8 else -3)
    else:
        values = bits.argsort(stable=True) % PERIOD.get(dtype, max(count, 1)) + 1
        if fill == "distinct" and dtype != torch.uint8:
            values = torch.where(scatter_bits_tensor(seed + 1, count) % 2 == 1, -values, values)
    if dtype.is_complex:
        part = values.to(torch.float64)
        return torch.complex(part, -2 * part).to(dtype)
    return values.to(dtype)


@cache
def edge_values(dtype: torch.dtype) -> torch.Tensor:
    """The special values of a dtype: limits, zeros, infinities, denormals, NaN."""
    if dtype == torch.bool:
        return torch.tensor([True, False])
    if dtype.is_complex:
        part = edge_values(torch.float64 if dtype == torch.complex128 else torch.float32)
        part = part[part.isfinite()]  # arithmetic of infinite complex numbers is not standardised
        return torch.complex(part, part.roll(1))
    if not dtype.is_floating_point:
        ends = torch.iinfo(dtype)
        return torch.tensor([ends.max, 0, ends.min, 1, ends.max - 1, ends.min + 1, ends.max // 2], dtype=dtype)
    of, inf = torch.finfo(dtype), math.inf
    least = of.smallest_normal
    some = [math.nan, 1.0, inf, -0.0, least * of.eps, -inf, of.max, 1 + of.eps, -least, of.min, 0.0, -least * of.eps, least]
    return torch.tensor(some, dtype=torch.float64).to(dtype)


def lay_out(tensor: torch.Tensor, memory: str) -> torch.Tensor:
    """The same values (for ``expanded``: the first row repeated) in another arrangement of memory."""
    if memory == "transposed" and tensor.ndim > 1:
        dims = tuple(reversed(range(tensor.ndim)))
        return tensor.permute(dims).contiguous().permute(dims)
    if memory == "sliced" and tensor.ndim:
        wide = tensor.new_zeros((*tensor.shape[:-1], 2 * tensor.shape[-1] + 1))
        view = wide[..., 1::2]
        view.copy_(tensor)
        return view
    if memory == "expanded" and tensor.ndim and tensor.shape[0]:
        return tensor[:1].clone().expand(tensor.shape)
    if memory == "offset" and tensor.ndim:
        return torch.cat([tensor.new_zeros(3), tensor.flatten()])[3:].view(tensor.shape)
    if memory == "channels-last" and tensor.ndim > 2:
        return tensor.movedim(1, -1).contiguous().movedim(-1, 1)
    return tensor
