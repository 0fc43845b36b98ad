"""The command line: run, plan, verify, report, calibrate, bench, tune, info."""

import os
import shlex
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click

from oocgemm import __version__, backends, stores
from oocgemm.cli import measuring
from oocgemm.cli.display import (
    doing,
    print_comparison,
    print_info,
    print_plan,
    print_report,
    print_verification,
)
from oocgemm.cli.interrupts import Interrupted, stopping
from oocgemm.cli.measuring import DEVICE, print_json, taking
from oocgemm.cli.parameters import Chunks, Place, Scalar
from oocgemm.engine.executor import Observer
from oocgemm.errors import BackendError, BudgetError, ExecutionError, InputError, OocGemmError
from oocgemm.integrity.tolerance import BOUNDS
from oocgemm.jobs import api, resume
from oocgemm.jobs.result import Result
from oocgemm.jobs.verify import verify as check_product
from oocgemm.machine import info as system
from oocgemm.planning import COMPUTES, Plan
from oocgemm.planning.units import format_size
from oocgemm.reports import exports
from oocgemm.reports.progress import progress_display
from oocgemm.timeline import read_log, report, same_product

REPORT_BYTES = 256 << 20  # that a report may take, whatever the budgets of its run
EXIT_FAILED, EXIT_USAGE, EXIT_BUDGET, EXIT_INTERRUPTED = 1, 2, 3, 130

F = TypeVar("F", bound=Callable[..., Any])


_PRODUCT = (
    click.option("--alpha", type=Scalar(), default=1.0, help="Factor of op(A) op(B).  [default: 1]"),
    click.option("--beta", type=Scalar(), default=0.0, help="Factor of the old C.  [default: 0]"),
    click.option("--transpose-a", is_flag=True, help="Multiply by the transpose of A."),
    click.option("--transpose-b", is_flag=True, help="Multiply by the transpose of B."),
    click.option("--adjoint-a", is_flag=True, help="Multiply by the conjugate transpose of A."),
    click.option("--adjoint-b", is_flag=True, help="Multiply by the conjugate transpose of B."),
    click.option(
        "--compute",
        type=click.Choice(list(COMPUTES)),
        default="native",
        show_default=True,
        help="tf32, bf16: float32 operands may be rounded to that, on cuda. emulated: float64 and float32 by exact int8 "
        "products, as accurate as native.",
    ),
)
_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
_PROBLEM = (
    *_PRODUCT,
    click.option(
        "--backend",
        type=click.Choice(backends.NAMES),
        default="auto",
        show_default=True,
        help="Where to multiply; auto is cuda where a device answers.",
    ),
    click.option(
        "--kernel",
        type=click.Choice(list(dict.fromkeys(k for kernels in backends.KERNELS.values() for k in kernels))),
        default="auto",
        show_default=True,
        help="What multiplies: blas on the host; on cuda cublas or a kernel of ours, auto the fastest that tune measured.",
    ),
    click.option(
        "--out-dtype",
        metavar="DTYPE",
        help="dtype of C: float32 for float16 or bfloat16; int32, int64, float32 or float64 for int8.  "
        "[default: the operands', int32 for int8]",
    ),
    click.option(
        "--device-memory",
        metavar="SIZE",
        help="Bound on device memory, such as 2GiB.  [default: 9/10 of what is free; on host 3/8]",
    ),
    click.option(
        "--host-memory",
        metavar="SIZE",
        help="Bound on host memory for staging, such as 8GiB.  [default: 1/2 of what is available; on host 1/8]",
    ),
    click.option(
        "--tile",
        metavar="WxHxR",
        help="Tile of C (w x h) and panel depth r, such as 4096x4096x512; clipped to the product.  [default: as planned]",
    ),
    click.option(
        "--chunks",
        type=Chunks(),
        metavar="RxC",
        help="Chunks of a new C, such as 1024x1024.  [default: about 8 MiB]",
    ),
    click.option(
        "--compressor", type=click.Choice(stores.COMPRESSORS), help="Compressor of a new C.  [default: none]"
    ),
    _JSON,
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="oocgemm")
@click.option("--debug", is_flag=True, help="Show tracebacks.")
@click.pass_context
def cli(context: click.Context, debug: bool) -> None:
    """Matrix products of zarr arrays larger than memory: C = alpha op(A) op(B) + beta C."""
    context.with_resource(_warnings_as_notes())


@cli.command()
@click.argument("a", type=Place())
@click.argument("b", type=Place())
@click.argument("c", type=Place())
@taking(*_PROBLEM)
@DEVICE
@click.option("--timeline", type=click.Path(dir_okay=False), help="Log every operation to this file.")
@click.option(
    "--verify", is_flag=True, help="Check every tile against checksums of its panels, and redo what differs."
)
@click.option("--overwrite", is_flag=True, help="Replace the contents of a C that exists.")
@click.option("--resume", is_flag=True, help="Go on with an unfinished run of the same command.")
@click.option(
    "--trust-operands",
    is_flag=True,
    help="With --resume: go on although files of A or B have changed, as when damage was repaired.",
)
@click.option("--quiet", is_flag=True, help="Print nothing but errors.")
def run(a: str, b: str, c: str, as_json: bool, quiet: bool, **options: Any) -> None:
    """Multiply A and B into C: paths of zarr arrays or .npy files.

    What is held in memory stays within the two budgets. A run that did not get to its end goes on with --resume.
    """
    live = not quiet and not as_json
    if options["backend"] == "host":
        stores.load_zarr()
    if quiet:
        warnings.simplefilter("ignore", UserWarning)
    try:
        with (
            stopping(lambda: _interrupted(resume.how_far(c))),
            progress_display(live) as progress,
        ):
            result = api.gemm(a, b, c, progress=progress and _noting(progress), **_transposes(options))
    except (ExecutionError, BackendError, MemoryError, KeyboardInterrupt) as error:
        error.add_note(resume.how_far(c))
        if isinstance(error, ExecutionError) and resume.how_far(c):
            error.add_note("(with --trust-operands too, if files of A or B are repaired before)")
        raise
    planned = result.plan
    if not quiet:
        _note_clipped(options["tile"], planned)
    if live and planned.done:
        tiles = planned.grid.shape[0] * planned.grid.shape[1]
        click.echo(f"Note: {len(planned.done)} of {tiles} tiles were done already", err=True)
    if as_json:
        print_json(
            {
                "c": c,
                "plan": planned.to_dict(),
                "report": None if _too_long(result) else result.report.to_dict(),
                "backend": result.log.header["backend"],
                "timeline": options["timeline"],
            }
        )
    elif not quiet:
        if _too_long(result):
            click.echo(_too_long(result))
        elif planned.steps:
            print_report(result.report, result.timeline)
        click.echo(f"\nC: {Path(c) if '://' not in c else c}")
        if options["timeline"]:
            log = options["timeline"]
            click.echo(f"Timeline: {log}  ({shlex.join(('oocgemm', 'report', log))})")


def _too_long(result: Result) -> str:
    """Why there is no report of a run of so many operations that it would take more memory than the run; empty if there is one."""
    budgets = result.plan.budgets
    room = max(REPORT_BYTES, budgets.host + (budgets.device if result.plan.machine.unified else 0))
    if result.report_bytes <= room:
        return ""
    return (
        f"Note: no report, which takes {format_size(result.report_bytes)} for {result.log.spans} operations, more than the "
        f"{format_size(room)} of the run; for one by oocgemm report, run with --timeline FILE"
    )


def _noting(progress: Callable[[Plan], Observer]) -> Callable[[Plan], Observer]:
    """Print what there is to say of a plan before its run begins."""

    def begin(planned: Plan) -> Observer:
        if planned.note:
            click.echo(f"Note: {planned.note}", err=True)
        return progress(planned)

    return begin


@cli.command()
@click.argument("a", type=Place())
@click.argument("b", type=Place())
@click.argument("c", type=Place(), required=False)
@taking(*_PROBLEM)
@click.option("--explain", is_flag=True, help="Say what else was considered, and why this was chosen.")
def plan(a: str, b: str, c: str | None, as_json: bool, explain: bool, **options: Any) -> None:
    """Show how a product would be run.

    No GPU is touched, and nothing is written.
    """
    stores.load_zarr()
    planned = api.plan(a, b, c, **_transposes(options))
    _note_clipped(options["tile"], planned)
    if as_json:
        print_json(planned.to_dict() | ({"considered": planned.explain()} if explain else {}))
    else:
        print_plan(planned, explain)


@cli.command()
@click.argument("a", type=Place())
@click.argument("b", type=Place())
@click.argument("c", type=Place())
@taking(*_PRODUCT, _JSON)
@click.option("--c-before", type=Place(), metavar="PATH", help="What C was before, where beta is not 0.")
@click.option(
    "--host-memory",
    metavar="SIZE",
    help="Bound on memory, such as 8GiB.  [default: 1/2 of what is available]",
)
@click.option(
    "--bound",
    type=click.Choice(BOUNDS),
    default=BOUNDS[0],
    show_default=True,
    help="Of rounding errors. worst-case assumes nothing of them, and finds large errors only.",
)
@click.option(
    "--seed",
    metavar="N",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Of the random vectors.",
)
def verify(a: str, b: str, c: str, as_json: bool, **options: Any) -> None:
    """Check that C is the product of A and B within rounding error.

    By Freivalds' check: each array is read once. Exits with 1 if C is wrong, and says where.
    """
    stores.load_zarr()
    with doing(not as_json) as say:
        found = check_product(a, b, c, **_transposes(options), say=say)
    if as_json:
        print_json(found.to_dict())
    else:
        print_verification(found)
    if not found.right:
        _complain(f"C at {c} {found.complaint}")
        click.get_current_context().exit(EXIT_FAILED)


@cli.command(name="report")
@click.argument("timeline", type=click.Path())
@click.argument("other", type=click.Path(), required=False)
@click.option("--html", type=click.Path(dir_okay=False), help="Write a page with charts, complete in itself.")
@click.option("--svg", type=click.Path(dir_okay=False), help="Write the Gantt chart as SVG.")
@click.option("--png", type=click.Path(dir_okay=False), help="Write the Gantt chart as PNG.")
@click.option("--trace", type=click.Path(dir_okay=False), help="Write a trace for Perfetto.")
@_JSON
def report_command(timeline: str, other: str | None, as_json: bool, **outputs: str | None) -> None:
    """Show what bounded a run, and what to change.

    TIMELINE is what run --timeline wrote. With that of another run the two are compared, as text, as JSON and on the
    page.
    """
    logs = [timeline, *([other] if other else [])]
    recorded = [read_log(log) for log in logs]
    figures = [report(one) for one in recorded]
    written = exports.export(logs, recorded, outputs)
    if as_json:
        several = {"same_product": same_product(recorded), "runs": [one.to_dict() for one in figures]}
        print_json(figures[0].to_dict() if len(logs) == 1 else several)
        return
    if len(logs) == 1:
        print_report(figures[0], recorded[0], advise=True)
    else:
        print_comparison(logs, figures, recorded)
    for what, path in written:
        click.echo(f"{what}: {path}")


for command in (measuring.calibrate, measuring.bench_group, measuring.tune):
    cli.add_command(command)


@cli.command()
@_JSON
def info(as_json: bool) -> None:
    """Show what is installed, how fast it is, and what is missing.

    Rates are those that plans go by in the current folder: as calibrated, or else assumed. What is missing comes with the
    command that brings it.
    """
    found = system.info()
    if as_json:
        print_json(found)
    else:
        print_info(found)


@contextmanager
def _warnings_as_notes() -> Iterator[None]:
    """Print our warnings as notes on stderr, without the place in the code. Those of other packages stay as they are."""
    with warnings.catch_warnings():
        before = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if category is UserWarning:
                print(f"Note: {message}", file=sys.stderr, flush=True)
            else:
                before(message, category, *where, **more)

        warnings.showwarning = show
        yield


def _note_clipped(tile: str | None, planned: Plan) -> None:
    """Say so where the tile that was asked for is larger than the product."""
    asked = tile and "x".join(str(int(extent)) for extent in tile.lower().split("x"))
    if asked and asked != str(planned.tile):
        click.echo(f"Note: tile {tile} is larger than the product: {planned.tile} is used", err=True)


def _transposes(options: dict[str, Any]) -> dict[str, Any]:
    """--transpose-x and --adjoint-x as trans_x."""
    for side in "ab":
        transpose, adjoint = options.pop(f"transpose_{side}"), options.pop(f"adjoint_{side}")
        if transpose and adjoint:
            raise click.UsageError(f"--transpose-{side} and --adjoint-{side} exclude each other")
        options[f"trans_{side}"] = "C" if adjoint else "T" if transpose else "N"
    return options


def main() -> NoReturn:
    """Entry point: errors become one line and an exit code."""
    debug = "--debug" in sys.argv[1:] or bool(os.environ.get("OOCGEMM_DEBUG"))
    # Wherever it stands on the line.
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    code = 0
    try:
        code = cli.main(args=arguments, prog_name="oocgemm", standalone_mode=False) or 0
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        code = EXIT_USAGE
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        hint = f" ({context.command_path} --help says more)" if context else ""
        _complain(f"{error.format_message().rstrip('.')}{hint}")
        code = EXIT_USAGE
    except (click.Abort, KeyboardInterrupt) as error:
        cause = error.__cause__ or error
        _interrupted(_notes(cause))
        code = cause.code if isinstance(cause, Interrupted) else EXIT_INTERRUPTED
    except (OocGemmError, MemoryError) as error:
        if debug:
            traceback.print_exc()
        out_of_memory = "out of host memory: pass a smaller --host-memory"
        message = out_of_memory if isinstance(error, MemoryError) else str(error)
        _complain(". ".join(filter(None, (message, _notes(error)))))
        code = _exit_code(error)
    sys.exit(code)


def _interrupted(note: str) -> None:
    click.echo(" ".join(filter(None, ("Interrupted.", note))), err=True)


def _notes(error: BaseException) -> str:
    return " ".join(getattr(error, "__notes__", ()))


def _complain(message: str) -> None:
    """An error, on one line whatever it quotes."""
    click.echo(f"Error: {' '.join(message.splitlines())}", err=True)


def _exit_code(error: Exception) -> int:
    if isinstance(error, BudgetError):
        return EXIT_BUDGET
    return EXIT_USAGE if isinstance(error, InputError) else EXIT_FAILED


if __name__ == "__main__":
    main()
