"""Trying a case again: from a stored finding, from a folder of them, or from one line of text."""

from __future__ import annotations

import re
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from conformance.case import Case
from conformance.errors import UsageError, one_of
from conformance.report.finding_file import finding_files, read_finding, told
from reference.mesh import Mesh
from reference.notation import NotationError
from reference.tensors import TensorSpec

if TYPE_CHECKING:
    from conformance.law import Law
    from conformance.target import Target
    from conformance.verdict import Verdict
    from conformance.world import Pool

LARGEST_WORLD = 64
MEANINGLESS = frozenset({"NotationError", "LayoutError", "MeshError"})


@dataclass(frozen=True)
class Wanted:
    """One case to try, and what it is known to do: ``name`` says where it comes from."""

    case: Case
    law: Law
    name: str = ""
    signature: str = ""
    expected: bool = False
    target: str = ""


def replay(what: str, target: str | None = None, times: int = 1, trace: bool = False) -> int:
    """Try ``what`` again, each time in a fresh world, and print every verdict; returns the exit code.

    1 when any case deviates, unless it is stored as expected and does what it did; 0 when all hold. Raises :class:`UsageError`.
    """
    from conformance.target.config import check_target, named_target, read_config, with_storage
    from conformance.world import Pool, WorldError

    if times < 1:
        raise UsageError(f"--times {times}: want 1 or more")
    wanted = list(_wanted(what))
    config = read_config()
    targets: dict[str, Target] = {}
    for one in wanted:
        name = target or one.target or "gloo"
        try:
            targets[name] = with_storage(named_target(name, config), None, config)
        except UsageError as error:
            raise UsageError(f"{one.name + ': ' if one.name and not target else ''}{error}") from None
        check_target(targets[name], max(one.case.world, one.law.smallest))
    code, judged = 0, 0
    with ExitStack() as stack:
        pools: dict[str, Pool] = {}
        for one in wanted:
            name = target or one.target or "gloo"
            try:
                if name not in pools:
                    pools[name] = stack.enter_context(Pool(targets[name]))
                verdicts = _try(one, pools[name], times, trace)
            except WorldError as error:
                raise UsageError(f"target {name} cannot start: {error}") from None
            judged += sum(verdict.status != "rejected" for verdict in verdicts)
            code = max(code, _conclude(one, verdicts))
    if not judged:
        raise UsageError(f"no case was judged: {verdicts[-1].message}")
    return code


def script_of(what: str) -> str:
    """The reproducer of a stored finding, or of a case by its text. Raises :class:`UsageError` where there is none."""
    from conformance.report.reproducer import Join, ScriptError, reproducer
    from conformance.target.config import named_target, read_config

    path, join = Path(what), Join()
    if path.is_file() or " " not in what:
        data = read_finding(path)
        law, case, kind, seen = law_of(data["case"].law, f"{path}: "), data["case"], data["kind"], str(data["target"].get("torch", ""))
        with suppress(UsageError):  # a target that is not described here
            join = Join.of(named_target(str(data["target"].get("name", "gloo")), read_config()))
    else:
        (one,) = _wanted(what)
        law, case, kind, seen = one.law, one.case, "", ""
    try:
        return reproducer(law, case, kind, seen, join)
    except (ScriptError, NotationError) as error:
        raise UsageError(f"{what}: no reproducer: {error}") from None


def law_of(law_id: str, where: str = "") -> Law:
    """The law of this id or alias. Raises :class:`UsageError`, which names the nearest."""
    from conformance.laws import catalogue, find

    try:
        return find(law_id)
    except KeyError:
        raise UsageError(f"{where}no law is called {law_id!r} ({one_of(law_id, catalogue())})") from None


def check_case(case: Case) -> None:
    """Refuse a case whose fields cannot be read, or whose meshes its world is too small for. Raises :class:`UsageError`."""
    try:
        for name, text in case.fields:
            if name == "mesh" or name.startswith("mesh."):
                mesh = Mesh.parse(text)
                if "world" in case and max(mesh.ranks) >= case.world:
                    raise UsageError(f"case {case.text!r}: {name}={text} has rank {max(mesh.ranks)}, the world has {case.world} ranks")
            elif re.fullmatch(r"[a-z]\d?", name) and ":" in text and not text.startswith("'"):
                TensorSpec.parse(text)
        if not 1 <= case.world <= LARGEST_WORLD:
            raise UsageError(f"case {case.text!r} wants {case.world} ranks: want 1 to {LARGEST_WORLD}")
        _ = case.seed
    except NotationError as error:
        raise UsageError(str(error)) from None


def _wanted(what: str) -> list[Wanted]:
    path = Path(what)
    if path.is_dir():
        files = finding_files(path)
        if not files:
            raise UsageError(f"{what}: no findings in this folder")
        return [_stored(file) for file in files]
    if path.is_file() or (path.suffix == ".json" and "=" not in what):
        return [_stored(path)]
    if " " not in what.strip() and "=" not in what and ("/" in what or "." not in what):
        raise UsageError(f"{what}: no such file or folder, and no case: want LAW NAME=VALUE ...")
    try:
        case = Case.parse(what)
    except NotationError as error:
        raise UsageError(str(error)) from None
    law = law_of(case.law)
    check_case(case)
    return [Wanted(Case(law.id, case.fields), law)]


def _stored(path: Path) -> Wanted:
    data = read_finding(path)
    case: Case = data["case"]
    law = law_of(case.law, f"{path}: ")
    check_case(case)
    where = data["target"].get("name", "")
    return Wanted(case, law, data["id"], data["signature"], data["status"] == "expected", where if isinstance(where, str) else "")


def _try(one: Wanted, pool: Pool, times: int, trace: bool) -> list[Verdict]:
    history = f" (after {len(one.case.after)} earlier cases)" if one.case.after else ""
    print(f"{one.name + ': ' if one.name else ''}{one.case.text}{history}")
    verdicts: list[Verdict] = []
    for at in range(times):
        try:
            verdict = pool.fresh(one.law, one.case)
        except NotationError as error:
            raise UsageError(f"case {one.case.text!r}: {error}") from None
        for answer in verdict.ranks:
            if answer.raised is not None and answer.raised.error in MEANINGLESS:
                raise UsageError(f"case {one.case.text!r}: {answer.raised.text}")
        count = f"{at + 1} of {times}: " if times > 1 else ""
        print(f"  {count}{_said(verdict)}", flush=True)
        if trace or (verdict.status == "deviates" and not any(_alike(verdict, seen) for seen in verdicts)):
            print(*_ranks(verdict, trace), sep="\n", flush=True)
        verdicts.append(verdict)
    return verdicts


def _alike(a: Verdict, b: Verdict) -> bool:
    return (a.status, a.signature) == (b.status, b.signature)


def _said(verdict: Verdict) -> str:
    if verdict.status == "deviates":
        return f"{verdict.kind} ({verdict.check}): {_line(verdict.message)}"
    return verdict.status + (f": {_line(verdict.message)}" if verdict.message else "")


def _ranks(verdict: Verdict, trace: bool) -> list[str]:
    lines = []
    for answer in verdict.ranks:
        said = told(answer)
        lines.append(f"    rank {answer.rank} {answer.outcome}" + (f": {_line(said['message'])}" if said["message"] else ""))
        lines += [f"      {key} {said[key] if trace else _line(said[key])}" for key in ("expected", "got") if said[key]]
        if trace:
            lines += [f"      | {line}" for key in ("stack", "output") for line in said[key].splitlines()]
    return lines


def _conclude(one: Wanted, verdicts: list[Verdict]) -> int:
    """Say what all tries together mean; returns the exit code of this case."""
    times = len(verdicts)
    deviating = [verdict for verdict in verdicts if verdict.status == "deviates"]
    if not deviating:
        print(
            f"  {verdicts[0].status} {times} of {times} times" if len({v.status for v in verdicts}) == 1 else "  no deviation", flush=True
        )
        return 0
    as_stored = sum(verdict.signature == one.signature for verdict in deviating)
    text = f"  deviates {len(deviating)} of {times} times"
    if one.signature:
        text += ", as stored" if as_stored == len(deviating) else f", {as_stored} of them as stored ({one.signature})"
    known = one.expected and as_stored == len(deviating)
    print(text + (", which is expected" if known else ""), flush=True)
    return 0 if known else 1


def _line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 400 else f"{line[:397]}..."
