"""The commands that work on products: run, plan, verify.

Modules that only one command needs, or that a quiet run does not need, are imported in the functions.
"""

import shlex
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import click

from oocgemm import stores
from oocgemm.cli.parameters import QUIET, Place, Workers, option, transposes, verb_options, views
from oocgemm.cli.process import (
    EXIT_FAILED,
    JSON,
    print_error,
    print_interrupted,
    print_json,
    print_note,
    silence_warnings,
    stopping,
    taking,
)
from oocgemm.engine.executor import Observer
from oocgemm.errors import BackendError, BudgetError, ExecutionError
from oocgemm.integrity.rounding import BOUNDS
from oocgemm.jobs import resume
from oocgemm.jobs.option_groups import PlanOptions, Progress
from oocgemm.jobs.run import Result
from oocgemm.planning import Plan
from oocgemm.planning.cover import GRAMS
from oocgemm.planning.units import format_size
from oocgemm.verbs.gemm import gemm
from oocgemm.verbs.gemm import gram as multiply_gram
from oocgemm.verbs.gemm import plan as plan_product

# Memory in bytes. A report that takes at most this much is shown, even if the budgets of the run are smaller.
MIN_REPORT_ROOM = 256 << 20
# The options of a product that `oocgemm verify` takes, too.
CHECKED = ("alpha", "beta", "trans_a", "trans_b", "compute", "decode", "transform_a", "transform_b")
# What a report says about which elements of a Gram matrix are stored.
STORED = {
    "full": "  (both triangles)",
    "lower": "  (only the lower triangle, with the diagonal)",
    "upper": "  (only the upper triangle, with the diagonal)",
}


@click.command()
@click.argument("a", type=Place())
@click.argument("b", type=Place())
@click.argument("c", type=Place())
@verb_options("gemm")
@click.option(
    "--scheduler",
    metavar="ADDRESS",
    help="Compute with the workers of the dask scheduler at this address, such as tcp://10.0.0.5:8786.",
)
@click.option(
    "--scheduler-file",
    metavar="FILE",
    type=click.Path(),
    help="Compute with the workers of the dask scheduler that wrote this file.",
)
@taking(views("a", "b"), JSON, QUIET)
def run(a: str, b: str, c: str, **options: Any) -> None:
    """Multiply A and B, and store the product in C.

    A, B and C are paths or URLs of zarr arrays, or paths of .npy files. A and B may also be HDF5 datasets,
    such as file.h5::/name, or PLINK .bed files. If C does not exist, it is created.
    Memory use stays within the budgets. An interrupted run continues with --resume.

    Example: oocgemm run A.zarr B.zarr C.zarr --device-memory 2GiB
    """
    with ExitStack() as stack:
        run_product(partial(gemm, a, b, c), c, (a, b), **_workers(stack, **transposes(options)))


def run_product(
    verb: Callable[..., Any],
    c: str | None,
    operands: Sequence[str],
    *,
    as_json: bool,
    quiet: bool,
    dry_run: bool,
    **options: Any,
) -> Any:
    """Compute C by a verb, and print the progress and a report. Return what the verb returns.

    If the returned object has a method `save`, it is saved at C. `c` may be None in a dry run. `operands` are
    the paths of the operands.
    """
    if dry_run:
        stores.load_without_cupy(*operands, *filter(None, (c,)))
        planned = verb(dry_run=True, **options)
        show_plans(planned if isinstance(planned, tuple) else (planned,), options["tile"], as_json=as_json)
        return planned
    if c is None:
        raise click.UsageError("C is missing: give a path for it, or pass --dry-run")
    live = not quiet and not as_json
    if options["backend"] == "host":
        stores.load_without_cupy(*operands, c)
    if quiet:
        silence_warnings()
    try:
        with stopping(lambda: print_interrupted(resume.resume_hint(c))), _display(live) as progress:
            found = verb(progress=progress and _noting(progress), **options)
            if hasattr(found, "save"):
                found.save(c)
    except BudgetError:
        raise
    except (ExecutionError, BackendError, MemoryError, KeyboardInterrupt) as error:
        error.add_note(resume.resume_hint(c))
        if isinstance(error, ExecutionError) and resume.resume_hint(c):
            error.add_note("(add --trust-operands if you repair files of A or B first)")
        raise
    result: Result = getattr(found, "run", found)
    planned = result.plan
    # A selection has no triangle: its C is not stored.
    has_triangle = planned.problem.cover.halves and result.c is not None
    if not quiet:
        note_clipped(options["tile"], planned)
    if live and planned.done:
        print_note(f"{len(planned.done)} of {planned.grid.count} tiles were done already")
    if as_json:
        print_json(
            {
                "c": c,
                "plan": planned.to_dict(),
                "report": None if _too_long(result) else result.report.to_dict(),
                "backend": result.log.header["backend"],
                "timeline": options["timeline"],
            }
            | ({"uplo": result.uplo} if has_triangle else {})
        )
    elif not quiet:
        if _too_long(result):
            click.echo(_too_long(result))
        elif planned.steps:
            from oocgemm.cli.display import print_report

            print_report(result.report, result.timeline)
        stored = STORED[result.uplo] if has_triangle else ""
        click.echo(f"\nC: {Path(c) if '://' not in c else c}{stored}")
        if options["timeline"]:
            log = options["timeline"]
            click.echo(f"Timeline: {log}  ({shlex.join(('oocgemm', 'report', log))})")
    return found


def show_plans(plans: Sequence[Plan], tile: str | None, *, as_json: bool) -> None:
    """Print the plans of products in sequence. The JSON is the last plan, with the plans before it."""
    for planned in plans:
        note_clipped(tile, planned)
    if as_json:
        before = {"before": [planned.to_dict() for planned in plans[:-1]]} if len(plans) > 1 else {}
        print_json(plans[-1].to_dict() | before)
        return
    from oocgemm.cli.display import print_plan

    for number, planned in enumerate(plans):
        if number:
            click.echo()
        print_plan(planned)


def _workers(
    stack: ExitStack, scheduler: str | None, scheduler_file: str | None, **options: Any
) -> dict[str, Any]:
    """Return options in which a client replaces those that name a dask scheduler. `stack` closes it."""
    given = [scheduler, scheduler_file, options["workers"]]
    if sum(value is not None for value in given) > 1:
        raise click.UsageError(
            "--workers, --scheduler and --scheduler-file exclude each other: give one of them"
        )
    if scheduler is None and scheduler_file is None:
        return options
    from oocgemm.distributed.crew import connect

    return options | {"client": stack.enter_context(connect(scheduler, scheduler_file))}


def _display(live: bool) -> AbstractContextManager[Progress | None]:
    if not live:
        return nullcontext()
    from oocgemm.reports.progress import progress_display

    return progress_display()


def _too_long(result: Result) -> str:
    """Return a note if the report takes more memory than the run and `MIN_REPORT_ROOM`; else ""."""
    budgets = result.plan.budgets
    room = max(MIN_REPORT_ROOM, budgets.host + (budgets.device if result.plan.machine.unified else 0))
    if result.report_bytes <= room:
        return ""
    return (
        f"Note: no report is shown: for {result.log.spans} operations it would take "
        f"{format_size(result.report_bytes)} of memory, more than the {format_size(room)} allowed for it. To "
        "get a report, run with --timeline FILE and call oocgemm report FILE"
    )


def _noting(progress: Callable[[Plan], Observer]) -> Callable[[Plan], Observer]:
    """Return a progress callback that first prints the plan's note, if it has one."""

    def begin(planned: Plan) -> Observer:
        if planned.note:
            print_note(planned.note)
        return progress(planned)

    return begin


@click.command()
@click.argument("a", type=Place())
@click.argument("b", type=Place())
@click.argument("c", type=Place(), required=False)
@verb_options(PlanOptions)
@click.option(
    "--explain", is_flag=True, help="Also list the plans that were considered, and why each was not chosen."
)
@click.option(
    "--workers",
    type=Workers(),
    metavar="N",
    help="Also predict the product on N workers, each a machine like this one. A range, such as 1..64, "
    "compares numbers of workers.",
)
@click.option(
    "--storage-read",
    metavar="RATE",
    help="With --workers: what the storage delivers to all workers together, such as 100GB/s.  [default: "
    "what one worker reads]",
)
@taking(views("a", "b"), JSON)
def plan(
    a: str,
    b: str,
    c: str | None,
    as_json: bool,
    explain: bool,
    workers: tuple[int, ...] | None,
    storage_read: str | None,
    **options: Any,
) -> None:
    """Show how a product would be computed.

    It shows tiles, memory, traffic and predicted time. No GPU is used, and nothing is written. With --backend
    cuda, pass --device-memory, since the GPU's free memory is not queried.

    Example: oocgemm plan A.zarr B.zarr --backend cuda --device-memory 16GiB
    """
    from oocgemm.cli.display import print_plan, print_scaling

    if storage_read and not workers:
        raise click.UsageError("--storage-read is the rate that workers share: pass --workers N too")
    stores.load_without_cupy(*filter(None, (a, b, c)))
    planned = plan_product(a, b, c, **transposes(options))
    partitions = planned.scaling(workers, storage_read) if workers else ()
    note_clipped(options["tile"], planned)
    if as_json:
        found = planned.to_dict() | ({"considered": planned.explain()} if explain else {})
        print_json(found | ({"scaling": [p.to_dict() for p in partitions]} if workers else {}))
        return
    print_plan(planned, explain)
    if partitions:
        print_scaling(partitions)


@click.command()
@click.argument("x", type=Place())
@click.argument("c", type=Place(), required=False)
@verb_options("gram")
@taking(views("x"), JSON, QUIET)
def gram(x: str, c: str | None, **options: Any) -> None:
    """Multiply X and its conjugate transpose, and store the product in C.

    This takes about half the work of `oocgemm run`. X and C are paths or URLs of zarr arrays, or paths of
    .npy files. X may also be an HDF5 dataset, such as file.h5::/name, or a PLINK .bed file.
    --alpha and --beta must be real.

    Example: oocgemm gram X.zarr K.zarr
    """
    run_product(partial(multiply_gram, x, c), c, (x,), **options)


@click.command()
@click.argument("a", type=Place())
@click.argument("b", type=Place())
@click.argument("c", type=Place())
@taking(*(option("gemm", name) for name in CHECKED), JSON)
@click.option(
    "--gram",
    type=click.Choice(GRAMS),
    help="C is a Gram matrix of which this triangle is stored. Give X as A and as B, with --transpose-b for "
    "X X^T, or --transpose-a for X^T X; for complex X, --adjoint-b or --adjoint-a.  [default: what the run "
    "has recorded in C, or full]",
)
@click.option(
    "--c-before",
    type=Place(),
    metavar="PATH",
    help="Copy of C from before the run; required if beta is not 0.",
)
@click.option(
    "--host-memory",
    metavar="SIZE",
    help="Upper bound on memory, such as 8GiB. With more memory, smaller errors are found.  [default: 50% of "
    "available RAM]",
)
@click.option(
    "--bound",
    type=click.Choice(BOUNDS),
    default=BOUNDS[0],
    show_default=True,
    help="Model of rounding errors. probabilistic assumes that they are independent and of mean 0. "
    "worst-case assumes nothing, and finds large errors only.",
)
@click.option(
    "--seed",
    metavar="N",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    help="Seed of the random vectors. Another seed makes the check independent of an earlier one.",
)
@views("a", "b")
def verify(a: str, b: str, c: str, as_json: bool, **options: Any) -> None:
    """Check that C is the product of A and B within rounding error.

    C may come from any program. The check multiplies A, B and C by random vectors (Freivalds' algorithm), so
    it is far faster than the product. If C is wrong, it prints where, and the exit code is 1.

    Example: oocgemm verify A.zarr B.zarr C.zarr
    """
    from oocgemm.cli.display import doing, print_verification
    from oocgemm.jobs.verify import verify as check_product

    stores.load_without_cupy(*filter(None, (a, b, c, options["c_before"])))
    with doing(not as_json) as say:
        found = check_product(a, b, c, **transposes(options), say=say)
    if as_json:
        print_json(found.to_dict())
    else:
        print_verification(found)
    if not found:
        print_error(f"{c}: {found.message}")
        click.get_current_context().exit(EXIT_FAILED)


def note_clipped(tile: str | None, planned: Plan) -> None:
    """Print a note if the requested tile was larger than the product, and was therefore clipped."""
    asked = tile and "x".join(str(int(extent)) for extent in tile.lower().split("x"))
    if asked and asked != str(planned.tile):
        print_note(f"tile {tile} is larger than the product: {planned.tile} is used")
