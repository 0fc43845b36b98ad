"""The command pca: principal components of a matrix."""

from collections.abc import Callable
from time import perf_counter
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from oocgemm import stores
from oocgemm.cli.doing import doing
from oocgemm.cli.interrupts import stopping
from oocgemm.cli.output import JSON, print_interrupted, print_json, silence_warnings, taking
from oocgemm.cli.parameters import QUIET, Place, verb_options
from oocgemm.engine.executor import Observer
from oocgemm.errors import InputError, OocGemmError
from oocgemm.jobs import pca as jobs
from oocgemm.jobs import pca_state
from oocgemm.planning import Plan
from oocgemm.planning.units import format_time
from oocgemm.timeline import Span

# Options that a dry run does not need.
_RUN_ONLY = ("device", "quiet", "resume", "seed", "tol")
# Of the singular values, this many are shown.
SHOWN = 5


@click.command()
@click.argument("x", type=Place())
@click.argument("out", type=Place(), required=False)
@click.option(
    "--components", metavar="N", type=int, required=True, help="Number of components to find, such as 50."
)
@verb_options("pca")
@taking(JSON, QUIET)
@click.option("--dry-run", is_flag=True, help="Show how often X would be read, and how. Write nothing.")
def pca(
    x: str,
    out: str | None,
    as_json: bool,
    dry_run: bool,
    components: int,
    **options: Any,
) -> None:
    """Find the principal components of X, which is read once per iteration.

    X has samples as rows and features as columns, and may be larger than memory. It is the path or URL of a
    zarr array, or the path of a .npy file or an HDF5 dataset. OUT is the path of a new zarr group, with the
    arrays components, singular_values, explained_variance, mean, scale, residuals and errors, and with
    --scores also scores.

    Example: oocgemm pca X.zarr components.zarr --components 50
    """
    stores.load_without_cupy(*filter(None, (x, out)))
    if dry_run:
        kept = {name: value for name, value in options.items() if name not in _RUN_ONLY}
        planned = jobs.plan_pca(x, components, **kept)
        _print_plan(planned, as_json=as_json)
        return
    if out is None:
        raise click.UsageError("OUT is missing: give a path for it, or pass --dry-run")
    quiet = options.pop("quiet")
    if quiet:
        silence_warnings()
    started = perf_counter()
    hint = f"To continue, add --resume ({pca_state.path_of(out)} has the state)."
    try:
        with stopping(lambda: print_interrupted(hint)), doing(not (quiet or as_json)) as say:
            progress = _counting(options["iterations"], options["scores"], say)
            found = jobs.pca(x, components, out, progress=progress, **options)
    except (OocGemmError, MemoryError, KeyboardInterrupt) as error:
        if pca_state.path_of(out).exists() and not isinstance(error, InputError):
            error.add_note(hint)
        raise
    if as_json:
        print_json(
            {
                "out": out,
                "passes": found.passes,
                "singular_values": found.singular_values.tolist(),
                "explained_variance": found.explained_variance.tolist(),
                "residuals": found.residuals.tolist(),
                "errors": found.errors.tolist(),
                "converged": found.converged,
            }
        )
    elif not quiet:
        again = ", and again to check each product" if options["verify"] else ""
        click.echo(f"X was read {found.passes} times{again}, in {format_time(perf_counter() - started)}")
        click.echo(f"singular values: {_listed(found.singular_values, 6)}")
        click.echo(f"residuals:       {_listed(found.residuals, 2)}")
        click.echo(f"\nComponents: {out}")


def _listed(numbers: NDArray[np.float64], digits: int) -> str:
    """Return the first numbers as text."""
    more = ", ..." if len(numbers) > SHOWN else ""
    return ", ".join(f"{number:.{digits}g}" for number in numbers[:SHOWN]) + more


def _counting(iterations: int, scores: bool, say: Callable[[str], None]) -> Callable[[Plan], Observer]:
    """Return a callback for the progress, which says the number of the pass and the share that is done."""
    number = 0

    def begin(planned: Plan) -> Observer:
        nonlocal number
        number += 1
        pass_name = f"pass {number} of at most {iterations + scores} over X"
        say(pass_name)
        done = 0

        def observe(span: Span) -> None:
            nonlocal done
            done += span.flops
            say(f"{pass_name}, {100 * done // max(1, planned.flops)}%")

        return observe

    return begin


def _print_plan(planned: jobs.PCAPlan, *, as_json: bool) -> None:
    """Print how often X is read, and the plan of a pass."""
    if as_json:
        read = {"passes": planned.passes, "statistics": planned.statistics, "checks": planned.checks}
        print_json(read | {"bytes_read": planned.bytes_read, "pass": planned.pass_plan.to_dict()})
        return
    from oocgemm.cli.display import print_plan

    click.echo(f"{planned.summary}. A pass:\n")
    print_plan(planned.pass_plan)
