"""Functions that somebody hands to live ranks: how they travel, how a rank runs them, and what comes back.

Driver and ranks share a folder (:attr:`shardlaw.conformance.world.Pool.folder`). A call has a folder of its own in it: ``function`` says
what is to run, ``given`` holds what it is called with, and ``returned-N`` what it returned on rank N. The case itself only names the call.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import io
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from shardlaw.conformance.errors import UsageError
from shardlaw.conformance.law.case import Case
from shardlaw.conformance.law.law import Law

if TYPE_CHECKING:
    from shardlaw.conformance.rank.context import RankContext

CALL = "spmd.call"
MAIN = "__main__"
PLANTED = "SHARDLAW_PLANTED"


@dataclass(frozen=True)
class Function:
    """Where a function stands: its module, the file of that (empty: wherever the module is found), and its name in it."""

    module: str
    file: str
    name: str

    @classmethod
    def of(cls, function: Callable[..., object] | str) -> Function:
        """Where ``function`` stands, or what ``module:name`` names. Raises :class:`UsageError` where ranks could not find it."""
        if isinstance(function, str):
            module, colon, name = function.partition(":")
            if not (module and colon and name):
                raise UsageError(f"{function!r}: want module:name, or a function")
            return cls(module, "", name)
        name, module = getattr(function, "__qualname__", ""), getattr(function, "__module__", "")
        if not callable(function) or not name or not module:
            raise UsageError(f"{function!r}: want a function that stands at the top of a module")
        where = sys.modules.get(module)
        if "<" in name or where is None or _named(where, name) is not function:
            raise UsageError(f"{module}.{name}: want a function that stands at the top of a module: ranks look it up by its name")
        try:
            file = inspect.getfile(where)
        except TypeError:
            file = ""
        if module == MAIN and not Path(file).is_file():
            raise UsageError(f"{module}.{name}: want a function that stands in a file")
        return cls(module, os.path.abspath(file) if file else "", name)

    @classmethod
    def of_law(cls, law: Law) -> Function:
        """Where a law stands: its check, or itself where it was made of an act. Raises :class:`UsageError` where ranks could not find
        it."""
        if not law.acts:
            return cls.of(law.check or law.id)
        act = law.acts[0].function
        where = sys.modules.get(act.__module__)
        if where is None or _named(where, act.__qualname__) is not law:
            raise UsageError(f"{act.__module__}.{act.__qualname__}: want a law that stands at the top of a module")
        return cls(act.__module__, os.path.abspath(inspect.getfile(where)), act.__qualname__)

    @classmethod
    def of_setup(cls, setup: str) -> Function:
        """A target's ``setup``: a function, or, without a name, a module that need only be imported."""
        return cls.of(setup) if ":" in setup else cls(setup, "", "")

    def __str__(self) -> str:
        return f"{self.module}:{self.name}"

    def load(self) -> Any:
        """The function, in this process. Raises what importing its module raises."""
        module = sys.modules.get(self.module)
        if module is None or not self._is_of(module):
            try:
                module = importlib.import_module(self.module) if self.module != MAIN else None
            except ModuleNotFoundError:
                if not self.file:
                    raise
                module = None
        if module is None or not self._is_of(module):
            module = _from_file(self.module, self.file)
        found = _named(module, self.name)
        if not callable(found) and not isinstance(found, Law):
            raise AttributeError(f"{self.module} has no function {self.name}")
        return found

    def _is_of(self, module: ModuleType) -> bool:
        file = getattr(module, "__file__", None)
        return not self.file or (file is not None and os.path.abspath(file) == self.file)


def _named(module: ModuleType, name: str) -> Any:
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _from_file(name: str, file: str) -> ModuleType:
    """A module by its file, for one that no path leads to: a script, or a test that pytest imported by itself."""
    # a script must not run as one again; what was pickled in it is looked for under its own name
    spec = importlib.util.spec_from_file_location("__shardlaw_main__" if name == MAIN else name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no module")
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get(name)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name)
        if before is not None:
            sys.modules[name] = before
        raise
    return module


# What travels


def pack(value: object) -> bytes:
    """A value as bytes, tensors included. Raises ``TypeError`` for what belongs to its process."""
    import torch

    _refuse_distributed(value)
    data = io.BytesIO()
    try:
        torch.save(value, data)
    except Exception as error:
        raise TypeError(f"a {type(value).__name__} that cannot be sent: {error}") from error
    return data.getvalue()


def unpack(data: bytes) -> Any:
    """The inverse of :func:`pack`; tensors arrive on the CPU."""
    import torch

    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)


def _refuse_distributed(value: object) -> None:
    from torch.distributed.tensor import DTensor

    if isinstance(value, DTensor):
        raise TypeError("a DTensor cannot be sent: it belongs to its rank; its to_local() or full_tensor() can")
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ():
        _refuse_distributed(item)


@contextmanager
def posted(folder: Path, number: int, function: Function, given: object) -> Iterator[Path]:
    """The folder of a call, for as long as it is made; ``given`` is what the function is called with beyond the rank."""
    room = folder / f"call-{number}"
    room.mkdir()
    try:
        (room / "given").write_bytes(pack(given))
        (room / "function").write_text(json.dumps(asdict(function)))
        yield room
    finally:
        shutil.rmtree(room, ignore_errors=True)


def returned(room: Path, world: int) -> dict[int, Any]:
    """What the function returned, by rank, as far as ranks have said."""
    paths = {rank: room / f"returned-{rank}" for rank in range(world)}
    return {rank: unpack(path.read_bytes()) for rank, path in paths.items() if path.is_file()}


# In a rank


def run(case: Case, here: RankContext) -> None:
    """Call the function of a call on this rank."""
    room = Path(here.folder()).parent / f"call-{case.get('call')}"
    function = Function(**json.loads((room / "function").read_text())).load()
    given = unpack((room / "given").read_bytes())
    if isinstance(given, Case):  # a law that is in no catalogue
        if isinstance(function, Law):
            from shardlaw.conformance.rank.perform import try_case

            try_case(function, given, here)
        else:
            function(given, here)
        return
    args, options = given
    value = pack(function(here, *args, **options))
    arriving = room / f"arriving-{here.rank}"
    arriving.write_bytes(value)
    arriving.rename(room / f"returned-{here.rank}")


def planted() -> None:
    """A target's ``setup``: what its own would do, then the faults that are to be planted."""
    for fields in json.loads(os.environ[PLANTED]):
        function = Function(**fields)
        if function.name:
            function.load()()
        else:
            importlib.import_module(function.module)


LAWS = (
    Law(
        id=CALL,
        clause="A function does on every rank what it says, raises nowhere, and comes to an end.",
        source="whoever wrote it",
        check=run,
        control=f"{CALL} world=2 call=0",
        smallest=1,
    ),
)
