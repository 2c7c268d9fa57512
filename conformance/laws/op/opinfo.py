"""Reads the samples of torch's OpInfo database as variants of ops.

A sample becomes a call in the notation of programs, with its numbers and strings as literals, and the shapes of its
tensors. The values of its tensors are replaced: the fill is one with which the dense op has finite results that agree
in float32 and float64. The case can then run without the database.

The database is imported by the driver alone, when the first op is read: that takes seconds and some hundred MB. An op
counts as supported if DTensor has a strategy, a rule, a handler or a decomposition for every overload that runs.
"""

from __future__ import annotations

import importlib.util
import itertools
import random
import re
import string
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch

from shardlaw.conformance import compat
from shardlaw.conformance.law.program.parse import Program
from shardlaw.conformance.laws.op.backward import flatten
from shardlaw.conformance.rank.context import is_close
from shardlaw.reference.notation import NotationError
from shardlaw.reference.tensors import DTYPES
from shardlaw.strategies.ops import Arg, Op, Variant

FILLS = ("distinct", "small", "unit", "positive")
SEEDS = range(4)
SEED = 1234
# of one op
MAX_EXAMINED = 30
MAX_VARIANTS = 10
MAX_ELEMENTS = 800
# tolerance between float32 and float64, relative to the largest element
AGREEMENT = {"float32": 1e-6, "complex64": 1e-6}

PRODUCTS = re.compile(r"matmul|multi_dot|inner|attention|linear|bilinear|vecdot|matrix_power")

RETURNS_OPERAND = "where it is not random it mostly returns its operand"
UNINITIALISED = "what it returns is not initialised"
NOT_UNIQUE = "its result is unique up to signs or the order of equal values only"
EQUAL_INDICES = "where indices are equal, which value is kept is not said"
EXCLUDED = {
    **dict.fromkeys(
        ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"), UNINITIALISED
    ),
    **dict.fromkeys(
        ("linalg.eig", "linalg.eigh", "linalg.svd", "linalg.qr", "svd", "qr", "geqrf", "lobpcg", "ormqr"), NOT_UNIQUE
    ),
    **dict.fromkeys(("svd_lowrank", "pca_lowrank", "linalg.householder_product", "linalg.eigvals", "mode"), NOT_UNIQUE),
    **dict.fromkeys(("index_copy", "put", "_unsafe_masked_index_put_accumulate", "as_strided_scatter"), EQUAL_INDICES),
    "nn.functional.scaled_dot_product_attention": "DTensor plans the first call for ten seconds; a table tries others",
    **dict.fromkeys(
        ("linalg.pinv", "pinverse", "linalg.matrix_rank"), "which singular values count as zero is a matter of rounding"
    ),
    **dict.fromkeys(("nn.functional.dropout", "nn.functional.dropout2d", "nn.functional.dropout3d"), RETURNS_OPERAND),
    **dict.fromkeys(
        ("nn.functional.alpha_dropout", "nn.functional.feature_alpha_dropout", "atleast_1d"), RETURNS_OPERAND
    ),
    **dict.fromkeys(("new_ones", "masked.argmax", "masked.argmin"), "a table has it"),
    "byte": "what a negative float becomes is undefined",
    **dict.fromkeys(("as_strided", "as_strided_copy"), "it speaks of the memory of the plain tensor"),
}


class UnreadableError(Exception):
    """No case can be made of an OpInfo or of one of its samples. The text says why."""


@dataclass(frozen=True)
class Reading:
    """The variants of an OpInfo and, for each that has gradients, the operands that get one; or the reason why there
    are none."""

    variants: tuple[Variant, ...] = ()
    gradients: tuple[tuple[Variant, tuple[str, ...]], ...] = ()
    reason: str = ""


@cache
def database() -> dict[str, Any]:
    """The OpInfos by name, with variants after a dot. Raises :class:`compat.TorchMovedError` if the database cannot be
    imported."""
    if importlib.util.find_spec("expecttest") is None:
        raise compat.TorchMovedError("samples of OpInfo want the package expecttest: pip install expecttest")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        infos = compat.name("op_db")
    return {user_name(info): info for info in infos}


def user_name(info: Any) -> str:
    """The name that users call, with the variant of the OpInfo."""
    name = str(info.name).removeprefix("torch.")
    return f"{name}.{info.variant_test_name}" if info.variant_test_name else name


@cache
def read(name: str) -> Reading:
    """The samples of an OpInfo, or of its in-place form if the name ends in ``.in-place``."""
    in_place = name.endswith(".in-place")
    info = database().get(name.removesuffix(".in-place"))
    if info is None:
        return Reading(reason="the installed torch has no such OpInfo")
    if str(info.name) in EXCLUDED:
        return Reading(reason=EXCLUDED[str(info.name)])
    if in_place and info.inplace_variant is None:
        return Reading(reason="it has no in-place form")
    variants: dict[tuple[object, str], Variant] = {}
    reasons: list[str] = []
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), _one_thread():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        for origin, sample in _samples(info):
            try:
                variant = _variant(info, sample, origin, in_place)
            except UnreadableError as error:
                reasons.append(str(error))
                continue
            variants.setdefault((variant.args, variant.call), variant)
            if len(variants) == MAX_VARIANTS:
                break
        found = tuple(sorted(variants.values(), key=_plainness))
        differentiable = found if info.supports_autograd and not in_place else ()
        gradients = [(variant, _operands_with_gradient(variant)) for variant in differentiable]
    reason = "" if found else max(dict.fromkeys(reasons), key=reasons.count, default="it has no samples")
    return Reading(found, tuple((variant, names) for variant, names in gradients if names), reason)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Run with one thread: small ops are many times faster on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def make_op(name: str, variants: Sequence[Variant]) -> Op:
    """An op with these variants, all refusals of which are allowed."""
    return Op(name, tuple(variants), exact=False, light=True, refuses="any", shallow=bool(PRODUCTS.search(name)))


def is_supported(overload: Any) -> bool:
    """Whether DTensor has a strategy, rule, handler or decomposition for an overload of aten."""
    propagator = compat.name("op_dispatcher").sharding_propagator
    planned = (propagator.op_strategy_funcs, propagator.op_single_dim_strategy_funcs, propagator.op_to_rules)
    known = any(overload in table for table in (*planned, compat.custom_op_handlers()))
    return known or bool(compat.name("has_decomposition")(overload))


def _samples(info: Any) -> Iterator[tuple[str, Any]]:
    device = torch.get_default_device().type
    supported = info.supported_dtypes(device)
    for dtype in (torch.float32, torch.int64, torch.bool, torch.complex64):
        if dtype in supported:
            samples = _seed_each(info.sample_inputs_func(info, device, dtype, False))
            for at, sample in enumerate(itertools.islice(samples, MAX_EXAMINED)):
                yield f"{str(dtype)[6:]}/{at}", sample
            return


def _seed_each(samples: Iterable[Any]) -> Iterator[Any]:
    """Each sample, generated from the seed of torch's tests, as ``sample_inputs`` of an OpInfo does. That method also
    inspects the stack and reads the source of every function on it."""
    remaining = iter(samples)
    while True:
        torch.default_generator.manual_seed(SEED)
        random.seed(SEED)
        np.random.seed(SEED)
        try:
            yield next(remaining)
        except StopIteration:
            return


def _plainness(variant: Variant) -> tuple[bool, bool, int]:
    """A sort key: samples that can be sharded and have elements come first."""
    shapes = [arg.shape({}) for arg in variant.args]
    return not all(shapes), any(0 in shape or 1 in shape for shape in shapes), len(variant.call)


@dataclass
class _Reader:
    """Writes a call in the notation of programs, and names its tensors."""

    tensors: dict[str, torch.Tensor]

    def text(self, value: Any) -> str:
        match value:
            case torch.Tensor():
                return self._name(value)
            case bool() | None:
                return repr(value)
            case int() | float():
                return "-inf" if value == float("-inf") else repr(value)
            case str() if not set(value) & set(" |{}'\\"):
                return repr(value)
            case torch.dtype() if str(value)[6:] in DTYPES:
                return str(value)
            case slice():
                return f"slice({','.join(map(self.text, (value.start, value.stop, value.step)))})"
            case tuple():
                return f"({','.join(map(self.text, value))}{',' if len(value) == 1 else ''})"
            case list():
                return f"[{','.join(map(self.text, value))}]"
        if value is Ellipsis:
            return "..."
        raise UnreadableError(f"an argument is a {type(value).__name__}")

    def _name(self, tensor: torch.Tensor) -> str:
        for name, known in self.tensors.items():
            if known is tensor:
                return name
        if tensor.layout is not torch.strided or str(tensor.dtype)[6:] not in DTYPES or tensor.numel() > MAX_ELEMENTS:
            raise UnreadableError("a tensor is large, sparse or of a dtype that cases do not have")
        name = string.ascii_lowercase[len(self.tensors) : len(self.tensors) + 1]
        if not name:
            raise UnreadableError("it takes too many tensors")
        self.tensors[name] = tensor
        return name


def _variant(info: Any, sample: Any, origin: str, in_place: bool) -> Variant:
    reader = _Reader({})
    given = [reader.text(value) for value in (sample.input, *sample.args)]
    given += [f"{key}={reader.text(value)}" for key, value in sample.kwargs.items()]
    if not any(tensor.numel() for tensor in reader.tensors.values()):
        raise UnreadableError("it takes no tensor")
    if in_place and (sample.broadcasts_input or not isinstance(sample.input, torch.Tensor)):
        raise UnreadableError("in place a result must fit into the operand")
    call = f"{str(info.name).removeprefix('torch.')}({','.join(given)})"
    if in_place:
        call = f"a.{info.name}_({','.join(given[1:])})"
    try:
        program = Program.parse(call)
    except NotationError:
        raise UnreadableError("it is no function of torch, nor a tensor method") from None
    _check_call(info, sample, program, reader.tensors, in_place)
    args = tuple(_arg(name, tensor) for name, tensor in reader.tensors.items())
    fill = next((fill for fill in FILLS if _is_stable(args, fill, program)), None)
    if fill is None:
        raise UnreadableError("no fill gives it finite values that float32 holds")
    dtypes = ("float32",) if any(not arg.dtype for arg in args) else (args[0].dtype,)
    return Variant(args, str(program), dtypes, fill, origin=origin)


def _check_call(info: Any, sample: Any, program: Program, tensors: dict[str, torch.Tensor], in_place: bool) -> None:
    """Check that the program does the same with a sample's tensors as the OpInfo, and that DTensor supports every
    overload. Raises :class:`UnreadableError`."""
    program_inputs, info_inputs = ({name: tensor.detach().clone() for name, tensor in tensors.items()} for _ in "ab")
    replacements = {id(tensor): info_inputs[name] for name, tensor in tensors.items()}
    call = _replace_tensors((sample.input, sample.args, sample.kwargs), replacements)
    overloads: list[Any] = []
    try:
        with compat.observe_overloads(lambda func, *args: overloads.append(func) if _has_tensors(args) else None):
            got = program.run_plain(program_inputs)[-1]
        want = (info.inplace_variant if in_place else info.op)(call[0], *call[1], **call[2])
    except Exception as error:
        raise UnreadableError(f"the plain call fails: {type(error).__name__}") from None
    if not overloads:
        raise UnreadableError("no op runs: it returns its operand")
    if any(torch.Tag.nondeterministic_seeded in func.tags for func in overloads):
        raise UnreadableError("its result is random")
    unsupported = [str(func) for func in overloads if not is_supported(func)]
    if unsupported:
        raise UnreadableError(f"not claimed: {unsupported[0]}")
    found, due = flatten(got), flatten(want)
    alike = len(found) == len(due) and all(map(_is_close, found, due))
    if not alike or not any(isinstance(part, torch.Tensor) and part.layout is torch.strided for part in found):
        raise UnreadableError("its result is no dense tensor, or not the same twice")


def _has_tensors(given: tuple[Any, dict[str, Any]]) -> bool:
    return any(isinstance(item, torch.Tensor) for item in flatten([list(given[0]), list(given[1].values())]))


def _is_close(got: Any, want: Any) -> bool:
    if not isinstance(got, torch.Tensor) or not isinstance(want, torch.Tensor):
        return type(got) is type(want)
    if got.layout is not torch.strided or str(got.dtype)[6:] not in DTYPES:
        return False
    if (got.shape, got.dtype) != (want.shape, want.dtype):
        return False
    return is_close(got.detach(), want.detach(), {"float32": 1e-6})


def _replace_tensors(value: Any, replacements: dict[int, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return replacements.get(id(value), value)
    if isinstance(value, dict):
        return {key: _replace_tensors(item, replacements) for key, item in value.items()}
    if type(value) in (tuple, list):
        return type(value)(_replace_tensors(item, replacements) for item in value)
    return value


def _arg(name: str, tensor: torch.Tensor) -> Arg:
    """The argument for a tensor. Indices keep their range."""
    dims = tuple(map(str, tensor.shape))
    dtype = str(tensor.dtype)[6:]
    if dtype == "float32":
        return Arg(name, dims)
    is_integer = not (tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype == torch.bool)
    ranged = is_integer and tensor.numel() and tensor.min().item() >= 0
    return Arg(name, dims, dtype, f"index{int(tensor.max().item()) + 1}" if ranged else "")


def build_tensors(variant: Variant, seed: int, *, wide: bool = False) -> dict[str, torch.Tensor]:
    """The dense tensors of a variant with fixed shapes; ``wide``: the same values in the wider dtype."""
    tensors = {}
    for at, arg in enumerate(variant.args):
        tensor = variant.spec(arg, {}, variant.dtypes[0]).build(seed * 64 + 7 * at + 1)
        wider = {torch.float32: torch.float64, torch.complex64: torch.complex128}.get(tensor.dtype, tensor.dtype)
        tensors[arg.name] = tensor.to(wider) if wide else tensor
    return tensors


def _is_stable(args: tuple[Arg, ...], fill: str, program: Program) -> bool:
    """Whether the dense op has finite results that do not change in the wider dtype, for every seed."""
    variant = Variant(args, "", ("float32",), fill)
    with torch.no_grad():
        try:
            return all(_is_precise(program, variant, seed) for seed in SEEDS)
        except Exception:
            return False


def _result_tensors(program: Program, tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    return [part for part in flatten(program.run_plain(tensors)[-1]) if isinstance(part, torch.Tensor)]


def _is_precise(program: Program, variant: Variant, seed: int) -> bool:
    parts = _result_tensors(program, build_tensors(variant, seed))
    if not all(part.isfinite().all() for part in parts):
        return False
    try:
        wide = _result_tensors(program, build_tensors(variant, seed, wide=True))
    except Exception:  # not every op has a kernel for the wider dtype
        return True
    return all(
        part.shape == other.shape and is_close(part, other.to(part.dtype), AGREEMENT)
        for part, other in zip(parts, wide, strict=True)
    )


def _operands_with_gradient(variant: Variant) -> tuple[str, ...]:
    """The operands with a gradient, if all gradients are finite and agree with those in float64 for every seed."""
    names: tuple[str, ...] = ()
    for seed in SEEDS:
        try:
            grads, wide = (_gradients(variant, seed, wide=wide) for wide in (False, True))
        except Exception:
            return ()
        names = tuple(grads)
        if set(grads) != set(wide) or not all(_is_precise_gradient(grads[name], wide[name]) for name in names):
            return ()
    return names


def _is_precise_gradient(grad: torch.Tensor, wide: torch.Tensor) -> bool:
    return bool(grad.isfinite().all()) and is_close(grad, wide.to(grad.dtype), AGREEMENT)


def _gradients(variant: Variant, seed: int, *, wide: bool) -> dict[str, torch.Tensor]:
    tensors = build_tensors(variant, seed, wide=wide)
    for tensor in tensors.values():
        tensor.requires_grad_(tensor.is_floating_point())
    parts = [part for part in _result_tensors(Program.parse(variant.call), tensors) if part.requires_grad]
    grads = [(torch.arange(part.numel()).reshape(part.shape) % 5 - 2).to(part.dtype) for part in parts]
    torch.autograd.backward(parts, grads)
    return {name: tensor.grad for name, tensor in tensors.items() if tensor.grad is not None}
