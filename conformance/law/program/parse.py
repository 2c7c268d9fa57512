"""Programs of steps: the calls of torch in a case of ops, as one line of text.

A program is steps joined by ``;``, in the syntax of Python calls and without spaces: ``b=sum(a,0);relu(b)``. A step may name its result;
the value of the last step is the result of the program. The program is translated into a function of plain torch code
(:mod:`shardlaw.conformance.law.program.python`), which runs on ranks and in scripts. It can call only what this table allows:

===========================================  ========================================================================
``a``, ``b``                                 a tensor of the case, or the result of a step before
``2``, ``-1.5``, ``True``, ``None``, ``'x'``  literals; ``inf`` and ``nan``; ``...``; ``(a,2)``, ``[a,b]``
``torch.int64``                              a dtype
``mean(a,1,keepdim=True)``                   a function of ``torch``; where it has none, the tensor method of the first argument
``add_(a,2)``                                a name that ends in ``_`` is always the in-place method of the first argument
``nn.functional.softmax(a,-1)``              a function of ``torch.nn.functional``, ``linalg``, ``special``, ``fft`` or ``masked``
``aten.mean.dim(a,[0])``                     an overload of ``torch.ops.aten``
``a.add_(2)``, ``a.T``                       a tensor method; the attributes ``T``, ``mT``, ``real`` and ``imag``
``getitem(a,(slice(0,2),None))``             ``a[0:2, None]``
``setitem(a,0,2)``                           ``a[0] = 2``, a step of its own; its value is ``a``
``redistribute(a,'S(0),R')``                 the tensor with other placements; a plain tensor stays as it is
``tensor(2,dtype=torch.int64)``              a plain tensor
===========================================  ========================================================================

Printing is canonical: parsing what was printed gives the same program.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

from shardlaw.conformance.law.program.python import StepsFunction
from shardlaw.reference.notation import NotationError


class PlainRunObserver:
    """Observes runs of programs on plain tensors: see :func:`observe_plain_runs`. By default it does nothing."""

    def plain_run_context(self) -> AbstractContextManager[Any]:
        """A context for the plain run, its backward pass included."""
        return nullcontext()

    def on_redistribute(self, tensor: Any, placements: str) -> None:
        """A step redistributes ``tensor`` to ``placements``."""


@dataclass(frozen=True)
class Program:
    """A parsed program; ``text`` is as it was given."""

    text: str
    tree: ast.Module = field(compare=False, repr=False)

    @staticmethod
    @cache
    def parse(text: str) -> Program:
        """The inverse of ``str``. Raises :class:`NotationError`."""
        try:
            program = Program(text, ast.parse(text))
        except SyntaxError as error:
            raise NotationError(f"steps {text!r}: {error.msg} at character {error.offset}") from None
        try:
            program.function  # noqa: B018
        except NotationError as error:
            raise type(error)(f"steps {text!r}: {error}") from None
        return program

    def __str__(self) -> str:
        return ";".join(map(canonical, self.tree.body))

    @cached_property
    def function(self) -> StepsFunction:
        """The program as the function ``steps(operands)``, which returns the value of every step."""
        return StepsFunction(self.tree)

    def names(self) -> frozenset[str]:
        """The names of the operands that the program takes."""
        return frozenset(self.function.names)

    def run(self, operands: Mapping[str, Any]) -> list[Any]:
        """The value of every step, on sharded tensors."""
        return self._sharded(operands)  # type: ignore[no-any-return]

    def run_plain(self, operands: Mapping[str, Any]) -> list[Any]:
        """The value of every step, on plain tensors, for which ``redistribute`` does nothing but notify the observer."""
        with plain_run_context():
            return self._plain(operands)  # type: ignore[no-any-return]

    @cached_property
    def _sharded(self) -> Callable[..., Any]:
        return self.function.compiled()

    @cached_property
    def _plain(self) -> Callable[..., Any]:
        return (
            StepsFunction(self.tree, plain=True).compiled(redistribute=_report_redistribute)
            if "redistribute(" in self.text
            else self._sharded
        )


OBSERVERS = [PlainRunObserver()]


@contextmanager
def observe_plain_runs(observer: PlainRunObserver) -> Iterator[None]:
    """Let ``observer`` observe the plain runs in this context."""
    OBSERVERS.append(observer)
    try:
        yield
    finally:
        OBSERVERS.pop()


def plain_run_context() -> AbstractContextManager[Any]:
    """The observer's context, for the backward pass of a plain run."""
    return OBSERVERS[-1].plain_run_context()


def _report_redistribute(tensor: Any, placements: str) -> Any:
    OBSERVERS[-1].on_redistribute(tensor, placements)
    return tensor


def canonical(node: ast.AST) -> str:
    """A step, or a part of one, without spaces."""
    return "".join(token.string for token in tokenize.generate_tokens(io.StringIO(ast.unparse(node)).readline))
