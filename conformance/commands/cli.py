"""The command line. torch and hypothesis are imported only after the arguments were parsed.

Exit codes: 0 nothing new; 1 a new finding; 2 the request is invalid, the target cannot start, or no case was judged: one line on
stderr; 3 the run could not be finished; 130 interrupted, 143 terminated.
"""

from __future__ import annotations

import os
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from shardlaw import __version__
from shardlaw.conformance.errors import UsageError, explain_parser_error
from shardlaw.conformance.world import signals
from shardlaw.conformance.world.garbage import collect_rarely
from shardlaw.conformance.world.hosts import torchrun
from shardlaw.conformance.world.hosts.torchrun import is_secondary_process, launch_info

app = typer.Typer(
    name="shardlaw",
    help="Check sharded tensors and checkpoints on real processes against an executable specification.",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)

FIRST_STEPS = """\
Where to begin:
  shardlaw doctor                     does gloo work here: some seconds
  shardlaw run 'redistribute.*'       the laws of one chapter: a minute
  shardlaw run                        the smoke profile: some minutes; the report is shardlaw-report/report.html
  shardlaw targets --probe            what your own backend can do, once shardlaw.toml describes it
  shardlaw laws redistribute.local    what a law says, and what its cases may say
"""

Laws = Annotated[list[str] | None, typer.Argument(metavar="LAW", help="Law ids; * and ? are special, a leading ! excludes.")]
TargetName = Annotated[str, typer.Option("--target", metavar="NAME", help="What to validate; see 'shardlaw targets'.")]


@app.callback(invoke_without_command=True)
def shardlaw(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        print(f"shardlaw {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        print(f"{FIRST_STEPS}\n{context.get_help()}")


@app.command()
def run(
    laws: Laws = None,
    *,
    target: TargetName = "gloo",
    storage: Annotated[str | None, typer.Option(metavar="NAME", help="Checkpoint storage; default: the target's.")] = None,
    world_size: Annotated[
        int | None,
        typer.Option(metavar="N", help="Ranks of the largest world; default: 4, few cases 8, or all that torchrun has launched."),
    ] = None,
    profile: Annotated[Literal["smoke", "ci", "nightly"], typer.Option(help="How many cases each law tries.")] = "smoke",
    budget: Annotated[str | None, typer.Option(metavar="TIME", help="Cut every law's list of cases short: 90s, 2m.")] = None,
    op: Annotated[list[str] | None, typer.Option(metavar="GLOB", help="Of laws that take an op, only these; alone: no others.")] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="One seed, one list of cases.")] = 0,
    expect: Annotated[list[Path] | None, typer.Option(metavar="FILE", help="Further expectations; may be repeated.")] = None,
    no_expect: Annotated[bool, typer.Option("--no-expect", help="Expect nothing: every finding is new.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="A stale expectation fails the run too.")] = False,
    known: Annotated[Path | None, typer.Option(metavar="DIR", help="Try the findings stored here first.")] = None,
    report: Annotated[Path, typer.Option(metavar="DIR", help="Where the report goes.")] = Path("shardlaw-report"),
    shard: Annotated[str, typer.Option(metavar="I/N", help="The I-th of N parts of the run.")] = "1/1",
    worlds: Annotated[
        int | None, typer.Option("-n", metavar="WORLDS", help="Worlds of one size side by side; default: as many as help.")
    ] = None,
    timeout: Annotated[float | None, typer.Option(metavar="SECONDS", help="Limit for one case; default: the target's.")] = None,
    exitfirst: Annotated[bool, typer.Option("-x", help="Stop at the first new finding; what shows most is tried first.")] = False,
    list_: Annotated[bool, typer.Option("--list", help="Only list the laws that would be tried.")] = False,
    certify: Annotated[
        str, typer.Option(metavar="PROFILE", help="Try a certified profile, such as collectives-2026.1: a frozen list of cases.")
    ] = "",
    last_failed: Annotated[bool, typer.Option("--last-failed", help="Only the laws that deviated in the report of --report.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run of --report, which was not finished.")] = False,
) -> int:
    """Try the laws on a target; exit 1 when something new deviates."""
    from shardlaw.conformance.run.request import DEFAULT_WORLD, LARGER_WORLD, RunRequest, parse_duration, parse_shard

    launched = launch_info()
    request = RunRequest(
        laws=tuple(laws or ()),
        target=target,
        storage=storage,
        world_size=world_size if world_size is not None else launched.size if launched else DEFAULT_WORLD,
        larger_world_size=LARGER_WORLD if world_size is None and not launched else 0,
        profile=profile,
        budget=None if budget is None else parse_duration(budget),
        ops=tuple(op or ()),
        seed=seed,
        expect=tuple(expect or ()),
        no_expect=no_expect,
        strict=strict,
        known=known,
        report=report,
        shard=parse_shard(shard),
        worlds=worlds,
        timeout=timeout,
        exitfirst=exitfirst,
        list=list_,
        certify=certify,
        last_failed=last_failed,
        resume=resume,
    )
    if not request.list:
        from shardlaw.conformance.commands.run import run as run_laws

        if launched:
            return torchrun.run_launched(launched, request.world_size, partial(run_laws, request))
        return run_laws(request)
    if is_secondary_process():
        return 0
    from shardlaw.conformance.commands.listing import list_selected

    print(list_selected(request))
    return 0


@app.command()
def replay(
    what: Annotated[str, typer.Argument(metavar="FINDING.json|FOLDER|'CASE TEXT'", help="What to try again.")],
    target: Annotated[str | None, typer.Option(metavar="NAME", help="Default: where it was found, else gloo.")] = None,
    storage: Annotated[str | None, typer.Option(metavar="NAME", help="Default: where it was found, else the target's.")] = None,
    times: Annotated[int, typer.Option(metavar="N", help="How often, each time in a fresh world.")] = 1,
    trace: Annotated[bool, typer.Option("--trace", help="Print every rank's calls into torch, stack and output.")] = False,
) -> int:
    """Try stored findings or one case again; same exit codes as run."""
    from shardlaw.conformance.commands.replay import replay as replay_cases

    return replay_cases(what, target, storage, times, trace)


@app.command()
def repro(
    finding: Annotated[
        str,
        typer.Argument(metavar="FINDING.json | 'CASE TEXT'", help="A file from findings/ of a report, a case, or a law: its control case."),
    ],
    output: Annotated[Path | None, typer.Option("-o", metavar="FILE", help="Default: print it.")] = None,
) -> int:
    """Write the script of a finding, which needs torch alone."""
    from shardlaw.conformance.commands.replay import reproducer_of

    _write_output(reproducer_of(finding), output)
    return 0


def _write_output(text: str, output: Path | None) -> None:
    """Write a text to a file, or print it without one. Raises :class:`UsageError`."""
    if output is None:
        sys.stdout.write(text)
        return
    try:
        output.write_text(text, "utf-8")
    except OSError as error:
        raise UsageError(f"-o {output}: cannot be written: {error.strerror}") from None


expect = typer.Typer(help="Write down known findings, each with a reason.", rich_markup_mode=None, pretty_exceptions_enable=False)
app.add_typer(expect, name="expect")


@expect.callback(invoke_without_command=True)
def expectations(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        print(context.get_help())


@expect.command("update")
def expect_update(
    report: Annotated[Path, typer.Argument(metavar="REPORT", help="The folder of a report, or its report.json.")],
    output: Annotated[Path, typer.Option("-o", metavar="FILE", help="Where the entries go, at its end.")] = Path("shardlaw-expect.toml"),
) -> int:
    """Write an expectation for each new finding of a report.

    Each wants a reason, which is yours to fill in: until then a run refuses the file. Nothing that stands in FILE is changed. Give it
    to a run with --expect FILE, or name it in shardlaw.toml. Expectations that the run found stale or too wide are listed.
    """
    from shardlaw.conformance.commands.expect_update import update

    return update(report, output)


@app.command()
def compare(
    first: Annotated[Path, typer.Argument(metavar="REPORT", help="The folder of a report, or its report.json: what was.")],
    second: Annotated[Path, typer.Argument(metavar="REPORT", help="The same: what is.")],
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    page: Annotated[bool, typer.Option("--page", help="Also write what changed into the second's report.html.")] = False,
) -> int:
    """Compare two reports; exit 1 when the second is worse.

    Else exit 2 when the two were not asked the same. Two nights, two versions of torch, or a target of your own against gloo: findings that
    are new, gone or changed, laws with another outcome, features no longer reached, and which cases only one of them judged.
    """
    from shardlaw.conformance.commands.compare import compare as compare_reports

    return compare_reports(first, second, as_json, page)


@app.command()
def merge(
    reports: Annotated[list[Path], typer.Argument(metavar="REPORT", help="The reports of the shards of one run (--shard I/N).")],
    output: Annotated[Path, typer.Option("-o", metavar="DIR", help="Where the report of the whole goes.")] = Path("shardlaw-report"),
) -> int:
    """Make one report of the reports of shards; same exit codes as run."""
    from shardlaw.conformance.commands.merge import merge as merge_reports

    return merge_reports(reports, output)


@app.command()
def verify(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="What shardlaw run --certify has left.")],
    rerun: Annotated[int, typer.Option(metavar="N", help="Also try N of its cases again, on the target as it is described here.")] = 0,
) -> int:
    """Check the report of a certified run; exit 1 where it is none."""
    from shardlaw.conformance.commands.verify import verify as verify_report

    return verify_report(folder, rerun)


@app.command()
def board(
    reports: Annotated[list[Path], typer.Argument(metavar="FOLDER", help="Reports of certified runs.")],
    output: Annotated[Path, typer.Option("-o", metavar="FILE", help="Where the page goes.")] = Path("shardlaw-board.html"),
) -> int:
    """Write one page of many certified runs, by target and profile."""
    from shardlaw.conformance.commands.board import render_board as page

    _write_output(page(reports, output.parent), output)
    print(output)
    return 0


@app.command()
def trend(
    reports: Annotated[list[Path], typer.Argument(metavar="REPORT", help="Reports of many nights, in any order.")],
    output: Annotated[Path, typer.Option("-o", metavar="FILE", help="Where the page goes.")] = Path("shardlaw-trend.html"),
) -> int:
    """Write one page of what came and went over many runs."""
    from shardlaw.conformance.report.trend import render_trend as page

    _write_output(page(reports, output.parent), output)
    print(output)
    return 0


@app.command()
def laws(
    laws: Laws = None,
    features: Annotated[bool, typer.Option("--features", help="The features that cases may have, instead of laws.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> int:
    """List the laws; of a few also what their cases may say."""
    from shardlaw.conformance.commands.listing import list_features, list_laws

    print((list_features if features else list_laws)(tuple(laws or ()), as_json))
    return 0


@app.command()
def show(
    shape: Annotated[str, typer.Argument(metavar="SHAPE", help="Such as 5x6, or () for a 0-d tensor.")],
    mesh: Annotated[str, typer.Option(metavar="MESH", help="Such as 2x3, or 2x2@0,2,1,3.")],
    place: Annotated[str, typer.Option(metavar="PLACEMENTS", help="One a mesh dim: R, S(0), _S(0,2), P(sum).")],
    svg: Annotated[bool, typer.Option("--svg", help="A picture instead of text: an SVG document.")] = False,
    output: Annotated[Path | None, typer.Option("-o", metavar="FILE", help="Default: print it.")] = None,
) -> int:
    """Show which rank holds what of a sharded tensor."""
    if svg:
        from shardlaw.conformance.commands.show_svg import show_svg

        _write_output(show_svg(shape, mesh, place), output)
    else:
        from shardlaw.conformance.commands.show import show as show_layout

        _write_output(show_layout(shape, mesh, place) + "\n", output)
    return 0


@app.command()
def twin(
    make: Annotated[str, typer.Argument(metavar="PACKAGE.MODULE:MAKE | FILE.py:MAKE", help="A function that returns a shardlaw.Twin.")],
    options: Annotated[list[str] | None, typer.Option("--option", metavar="NAME=VALUE", help="Given to MAKE; may be repeated.")] = None,
    sizes: Annotated[
        list[str] | None, typer.Option("--size", metavar="NAME=N", help="A size, or a mesh dim, instead of the twin's; may be repeated.")
    ] = None,
    values: Annotated[
        list[str] | None, typer.Option(metavar="KIND", help="exact, float32 or bfloat16; may be repeated. Default: the twin's.")
    ] = None,
    steps: Annotated[int, typer.Option(metavar="N", help="Steps of the optimizer.")] = 2,
    seed: Annotated[int, typer.Option(metavar="N", help="Of parameters and batches.")] = 0,
    target: TargetName = "gloo",
    report: Annotated[Path, typer.Option(metavar="DIR", help="Where twin.html and twin.json go.")] = Path("shardlaw-twin"),
    resume: Annotated[
        list[str] | None,
        typer.Option(
            metavar="DIM=N|same", help="Also save in the middle and go on, on a mesh with another size of this dim; may be repeated."
        ),
    ] = None,
    dropout: Annotated[
        bool, typer.Option("--dropout", help="Also a step with dropout: replicas drop the same, shards by themselves.")
    ] = False,
    no_shrink: Annotated[bool, typer.Option("--no-shrink", help="Do not look for the smallest that shows it.")] = False,
) -> int:
    """Compare a sharded model with the whole; exit 1 on a difference.

    MAKE says how the model and a batch are made and how the model is sharded. It runs whole and on real ranks, forward, backward and some
    steps of its optimizer; what rounding may do to each tensor is worked out from the whole model. docs/twin.md has one in ten lines.
    """
    from shardlaw.conformance.commands.twin import twin as run_twin

    return run_twin(make, options or (), sizes or (), values or (), steps, seed, target, report, not no_shrink, resume, dropout)


@app.command()
def targets(probe: Annotated[bool, typer.Option("--probe", help="Start each one and see what it can do.")] = False) -> int:
    """List the targets, and whether they can run here."""
    if is_secondary_process():
        return 0
    from shardlaw.conformance.commands.doctor import list_targets

    return list_targets(probe)


@app.command()
def doctor(
    target: TargetName = "gloo",
    storage: Annotated[str | None, typer.Option(metavar="NAME", help="Also save and load a checkpoint there.")] = None,
) -> int:
    """Check that a target starts: backend, ranks, one all_reduce."""
    if is_secondary_process():
        return 0
    from shardlaw.conformance.commands.doctor import examine

    return examine(target, storage)


def main(arguments: list[str] | None = None) -> int:
    """Run one command; returns the exit code. A :class:`UsageError` is printed as one line, without a traceback."""
    arguments = sys.argv[1:] if arguments is None else arguments
    collect_rarely()
    if threading.current_thread() is not threading.main_thread():
        return _run_command(arguments)
    with signals.handle_signals():
        return _run_command(arguments)


def _run_command(arguments: list[str]) -> int:
    try:
        code: Any = typer.main.get_command(app)(args=arguments, prog_name="shardlaw", standalone_mode=False)
        sys.stdout.flush()
        if signals.is_stop_requested():  # typer makes 130 of every interrupt
            return signals.acknowledge_stop()
        return code if isinstance(code, int) else 0
    except UsageError as error:
        return _refuse(str(error))
    except (KeyboardInterrupt, typer.Abort):
        return signals.acknowledge_stop()
    except (BrokenPipeError, SystemExit):  # typer makes a SystemExit of a pipe that nobody reads, and of nothing else
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 0
    except Exception as error:
        if signals.is_stop_requested():  # a signal in the middle of an import comes out as an ImportError
            return signals.acknowledge_stop()
        # typer brings its own copy of click, whose errors have no public name
        if hasattr(error, "format_message"):
            return _refuse(explain_parser_error(error))
        import traceback

        traceback.print_exc()
        print(f"shardlaw: internal error: {type(error).__name__}; this is a fault of shardlaw", file=sys.stderr)
        return 3


def _refuse(message: str) -> int:
    if is_secondary_process():
        return 0
    print("shardlaw:", " ".join(message.split()), file=sys.stderr)
    return 2
