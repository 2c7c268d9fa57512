"""Look up a law by id and check a case that a user wrote, before any rank starts."""

from __future__ import annotations

import math
import re
import traceback
from typing import TYPE_CHECKING

from shardlaw.conformance.errors import UsageError, one_of
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.run.request import MAX_LOCAL_RANKS
from shardlaw.reference.layout import LayoutError
from shardlaw.reference.mesh import Mesh, MeshError
from shardlaw.reference.notation import NotationError
from shardlaw.reference.tensors import TensorSpec

if TYPE_CHECKING:
    from shardlaw.conformance.law.act import Act
    from shardlaw.conformance.law.law import Law

MAX_ELEMENTS = 2**26  # of one tensor; every rank builds the global tensor
INVALID_CASE_ERRORS = frozenset({"NotationError", "LayoutError", "MeshError"})


def resolve_law(law_id: str, where: str = "") -> Law:
    """The law with this id or alias. Raises :class:`UsageError`, which suggests the nearest id; ``where`` is put before its message."""
    from shardlaw.conformance.laws import catalogue, find

    try:
        return find(law_id)
    except KeyError:
        raise UsageError(f"{where}no law is called {law_id!r} ({one_of(law_id, catalogue())})") from None


def check_case(law: Law, case: Case) -> None:
    """Raise :class:`UsageError`, naming the field, for a case that does not parse, has fields that its law does not take, or has a mesh
    that is larger than its world."""
    from shardlaw.conformance.law.act import check_case
    from shardlaw.conformance.law.due import Meaningless

    # one process simulates all ranks: then only the law knows what its fields mean
    is_simulated = "world=1" in law.control.split()
    try:
        for name, text in case.fields if not is_simulated else ():
            try:
                _check_field(case, name, text)
            except NotationError as error:
                raise UsageError(f"case {case.text!r}: field {name!r}: {error}") from None
        if not 1 <= case.world <= MAX_LOCAL_RANKS:
            raise UsageError(f"case {case.text!r} wants {case.world} ranks: want 1 to {MAX_LOCAL_RANKS}")
        _ = case.seed
        check_case(law, case)
        for stage, act in enumerate(law.acts):
            _compute_due(act, case, min(law.member_ranks(case, stage) or [0]))
    except Meaningless as error:
        raise UsageError(f"case {case.text!r} asks for nothing: {error}") from None
    except (LayoutError, MeshError) as error:
        raise UsageError(f"case {case.text!r}: {error}") from None
    except NotationError as error:
        raise UsageError(str(error)) from None


def _check_field(case: Case, name: str, text: str) -> None:
    if name == "mesh" or name.startswith("mesh."):
        mesh = Mesh.parse(text)
        if "world" in case and max(mesh.ranks) >= case.world:
            raise UsageError(f"case {case.text!r}: {name}={text} has rank {max(mesh.ranks)}, the world has {case.world} ranks")
    elif re.fullmatch(r"[a-z]\d?", name) and ":" in text and not text.startswith("'"):
        count = math.prod(TensorSpec.parse(text).shape)
        if count > MAX_ELEMENTS:
            raise UsageError(f"case {case.text!r}: {name}={text} has {count:,} elements: want at most {MAX_ELEMENTS:,}")


def _compute_due(act: Act, case: Case, rank: int) -> None:
    """Call the due function as ``rank`` will. Raises :class:`UsageError`, with file and line, for an error in the due function itself."""
    from shardlaw.conformance.law.due import Meaningless

    try:
        act.due_on(case, rank, case.world)
    except (Meaningless, LayoutError, MeshError, NotationError):
        raise
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        at = f"{frame.filename}:{frame.lineno}"
        raise UsageError(f"case {case.text!r}: its due function raised {type(error).__name__}: {error} ({at})") from error
