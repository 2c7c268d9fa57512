"""Run a user's function on live ranks: send it with its arguments, call it, and read the results.

Driver and ranks share a folder (:attr:`shardlaw.conformance.world.Pool.folder`), in which each call has a folder of its own. There,
``function`` locates the function, ``given`` holds its arguments, and ``returned-N`` the result of rank N. The case only names the call.
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
    """The location of a function: its module, the module's file (empty: wherever Python finds it), and its qualified name."""

    module: str
    file: str
    name: str

    @classmethod
    def from_callable(cls, function: Callable[..., object] | str) -> Function:
        """The location of a function, or of ``module:name``. Raises :class:`UsageError` where ranks could not find it."""
        if isinstance(function, str):
            module, colon, name = function.partition(":")
            if not (module and colon and name):
                raise UsageError(f"{function!r}: want module:name, or a function")
            return cls(module, "", name)
        name, module = getattr(function, "__qualname__", ""), getattr(function, "__module__", "")
        if not callable(function) or not name or not module:
            raise UsageError(f"{function!r}: want a function that stands at the top of a module")
        where = sys.modules.get(module)
        if "<" in name or where is None or _look_up(where, name) is not function:
            raise UsageError(f"{module}.{name}: want a function that stands at the top of a module: ranks look it up by its name")
        try:
            file = inspect.getfile(where)
        except TypeError:
            file = ""
        if module == MAIN and not Path(file).is_file():
            raise UsageError(f"{module}.{name}: want a function that stands in a file")
        return cls(module, os.path.abspath(file) if file else "", name)

    @classmethod
    def from_law(cls, law: Law) -> Function:
        """The location of a law's check, or of the law where it has acts. Raises :class:`UsageError` where ranks could not find it."""
        if not law.acts:
            return cls.from_callable(law.check or law.id)
        act = law.acts[0].function
        where = sys.modules.get(act.__module__)
        if where is None or _look_up(where, act.__qualname__) is not law:
            raise UsageError(f"{act.__module__}.{act.__qualname__}: want a law that stands at the top of a module")
        return cls(act.__module__, os.path.abspath(inspect.getfile(where)), act.__qualname__)

    @classmethod
    def from_setup(cls, setup: str) -> Function:
        """The location of a target's ``setup``: ``module:function``, or a module that is only imported."""
        return cls.from_callable(setup) if ":" in setup else cls(setup, "", "")

    def __str__(self) -> str:
        return f"{self.module}:{self.name}"

    def load(self) -> Any:
        """Import the function or law in this process. Raises what importing its module raises."""
        module = sys.modules.get(self.module)
        if module is None or not self._is_of(module):
            try:
                module = importlib.import_module(self.module) if self.module != MAIN else None
            except ModuleNotFoundError:
                if not self.file:
                    raise
                module = None
        if module is None or not self._is_of(module):
            module = _load_file(self.module, self.file)
        found = _look_up(module, self.name)
        if not callable(found) and not isinstance(found, Law):
            raise AttributeError(f"{self.module} has no function {self.name}")
        return found

    def _is_of(self, module: ModuleType) -> bool:
        file = getattr(module, "__file__", None)
        return not self.file or (file is not None and os.path.abspath(file) == self.file)


def _look_up(module: ModuleType, name: str) -> Any:
    found: Any = module
    for part in name.split("."):
        found = getattr(found, part, None)
    return found


def _load_file(name: str, file: str) -> ModuleType:
    """Import a module from its file, where ``sys.path`` does not lead to it: a script, or a test that pytest has imported."""
    # under another name, since the script must not run its main block; unpickling looks in sys.modules under the original name
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


def pack(value: object) -> bytes:
    """Pickle a value, tensors included. Raises ``TypeError`` for what cannot leave its process, such as a DTensor."""
    import torch

    _check_sendable(value)
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


def _check_sendable(value: object) -> None:
    from torch.distributed.tensor import DTensor

    if isinstance(value, DTensor):
        raise TypeError("a DTensor cannot be sent: it belongs to its rank; its to_local() or full_tensor() can")
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ():
        _check_sendable(item)


@contextmanager
def call_folder(folder: Path, number: int, function: Function, given: object) -> Iterator[Path]:
    """The folder of a call, removed on exit; ``given`` are the arguments of the function after the rank, or the case for a law."""
    path = folder / f"call-{number}"
    path.mkdir()
    try:
        (path / "given").write_bytes(pack(given))
        (path / "function").write_text(json.dumps(asdict(function)))
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def read_results(folder: Path, world: int) -> dict[int, Any]:
    """The results of a call, by rank, of those ranks that have returned."""
    paths = {rank: folder / f"returned-{rank}" for rank in range(world)}
    return {rank: unpack(path.read_bytes()) for rank, path in paths.items() if path.is_file()}


def run_call(case: Case, here: RankContext) -> None:
    """Run the call that ``case`` names on this rank."""
    folder = Path(here.folder()).parent / f"call-{case.get('call')}"
    function = Function(**json.loads((folder / "function").read_text())).load()
    given = unpack((folder / "given").read_bytes())
    if isinstance(given, Case):  # for a law outside the catalogue
        if isinstance(function, Law):
            from shardlaw.conformance.rank.perform import try_case

            try_case(function, given, here)
        else:
            function(given, here)
        return
    args, options = given
    value = pack(function(here, *args, **options))
    arriving = folder / f"arriving-{here.rank}"
    arriving.write_bytes(value)
    arriving.rename(folder / f"returned-{here.rank}")


def plant_faults() -> None:
    """The ``setup`` of a target with planted faults: run its own setup, then each fault."""
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
        check=run_call,
        control=f"{CALL} world=2 call=0",
        smallest=1,
    ),
)
