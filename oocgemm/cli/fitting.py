"""The commands that fit linear models by a few reads of X: lstsq, ridge."""

from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any

import click
import numpy as np

import oocgemm
from oocgemm import stores
from oocgemm.cli.display import doing
from oocgemm.cli.parameters import QUIET, Place, verb_options, views
from oocgemm.cli.process import JSON, print_interrupted, print_json, silence_warnings, stopping, taking
from oocgemm.cli.products import show_plans
from oocgemm.cli.statistics import counting
from oocgemm.jobs.normal_equations import MAX_READS
from oocgemm.planning.units import format_time
from oocgemm.verbs.lstsq import LeastSquares


def _operands(function: Callable[..., Any]) -> Callable[..., Any]:
    given = (click.argument(name, type=Place()) for name in ("x", "y", "out"))
    return taking(*given)(function)


@click.command()
@_operands
@verb_options("lstsq")
@taking(views("x", "y"), JSON, QUIET)
def lstsq(x: str, y: str, out: str, **options: Any) -> None:
    """Find the b for which the sum of squares of Y - X b is smallest, in float64.

    X has at least as many rows as columns, and Y has as many rows as X. Both may be larger than memory: paths
    or URLs of zarr arrays, .npy files or HDF5 datasets. OUT is the path of a new zarr group, with the arrays
    coefficients, intercept, residual_ss and condition.

    Example: oocgemm lstsq X.zarr y.npy model.zarr --intercept
    """
    _fit(partial(oocgemm.lstsq, x, y, out), (x, y), out, **options)


@click.command()
@_operands
@click.option(
    "--alpha", metavar="N[,N..]", required=True, help="Penalty, or several, separated by commas: 0.1,1,10."
)
@verb_options("ridge")
@taking(views("x", "y"), JSON, QUIET)
def ridge(x: str, y: str, out: str, alpha: str, **options: Any) -> None:
    """Find the b for which the sum of squares of Y - X b, plus ALPHA |b|^2, is smallest, in float64.

    X, Y and OUT are as for `oocgemm lstsq`. X may have more columns than rows. With several penalties, the
    arrays in OUT have a first axis for them.

    Example: oocgemm ridge X.zarr Y.zarr model.zarr --alpha 0.1,1,10
    """
    try:
        penalties = [float(each) for each in alpha.split(",")]
    except ValueError:
        raise click.UsageError(f"--alpha {alpha}: write numbers separated by commas, such as 0.1,1") from None
    chosen = penalties if "," in alpha else penalties[0]
    _fit(partial(oocgemm.ridge, x, y, chosen, out), (x, y), out, **options)


def _fit(
    fit: Callable[..., Any],
    operands: tuple[Any, ...],
    out: str,
    *,
    as_json: bool,
    quiet: bool,
    **options: Any,
) -> None:
    """Fit a model, and print how it fits."""
    stores.load_without_cupy(*operands, out)
    if options["dry_run"]:
        show_plans((fit(**options),), None, as_json=as_json)
        return
    if quiet:
        silence_warnings()
    started = perf_counter()
    with stopping(lambda: print_interrupted("")), doing(not (quiet or as_json)) as say:
        found: LeastSquares = fit(progress=counting(MAX_READS, say), **options)
    condition, squares = np.atleast_1d(found.condition).tolist(), np.atleast_1d(found.residual_ss)
    if as_json:
        print_json(
            {"out": out, "passes": found.passes, "condition": condition, "residual_ss": squares.tolist()}
        )
    elif not quiet:
        click.echo(f"X was read {found.passes} times, in {format_time(perf_counter() - started)}")
        click.echo(f"condition number: {', '.join(f'{each:.3g}' for each in condition)}")
        click.echo(f"residual sums of squares: {', '.join(f'{each:.6g}' for each in squares.ravel()[:5])}")
        click.echo(f"\nCoefficients: {out}")
