"""The ops that the tables know, as one strategy."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument
from hypothesis.strategies import SearchStrategy

from shardlaw.strategies._arguments import check_choices, check_count
from shardlaw.strategies.op_catalogue import OPS
from shardlaw.strategies.op_draws import op_samples
from shardlaw.strategies.ops import Sample


def ops(
    names: Iterable[str] | None = None, *, world_size: int = 4, dtypes: Sequence[str] = ("float32", "int64", "bool")
) -> SearchStrategy[Sample]:
    """Calls of ops on sharded tensors: a mesh of up to ``world_size`` ranks, the tensors with their placements on it, and what is called.

    ``names`` are what a user calls: ``mean``, ``nn.functional.softmax``, ``add.in-place``, as ``shardlaw laws 'op.forward'`` lists them;
    left out, they are all. ``dtypes`` are those that tensors may have; an op that takes none of them uses its own first one.

    A :class:`~shardlaw.strategies.ops.Sample` has ``mesh``, ``tensors`` (pairs of a name and a
    :class:`~shardlaw.reference.tensors.TensorSpec`) and ``steps``, such as ``mean(a,1)``, which
    ``shardlaw.conformance.law.program.parse.Program.parse(steps).run({name: tensor})`` carries out on tensors of any kind and gives the
    value of every step.

    Shrinks to few tensors of few dims, and as :func:`~shardlaw.strategies.op_draws.op_samples` does.

    Raises ``InvalidArgument`` where an option is wrong.
    """
    chosen = tuple(OPS) if names is None else check_choices("names", names)
    unknown = [name for name in chosen if name not in OPS]
    if unknown:
        near = difflib.get_close_matches(str(unknown[0]), OPS, n=3, cutoff=0.4)
        raise InvalidArgument(f"names: no op is called {unknown[0]!r}" + (f" (nearest: {', '.join(near)})" if near else ""))
    check_count("world_size", world_size, 2)
    allowed = tuple(dtypes)
    return st.sampled_from(chosen).flatmap(lambda name: op_samples(OPS[name], world_size=world_size, dtypes=allowed))
