"""The commands that fit linear models, or find singular values, by a few reads of X: lstsq, ridge, svd."""

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
from oocgemm.verbs.svd import MAX_READS as SVD_READS


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
    """Find the b for which the sum of squares of Y - X b, plus ALPHA times that of b, is smallest.

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


@click.command()
@click.argument("x", type=Place())
@click.argument("out", type=Place())
@click.option(
    "--components", metavar="N", type=int, help="Number of singular values, such as 40.  [default: all]"
)
@verb_options("svd")
@taking(views("x"), JSON, QUIET)
def svd(x: str, out: str, components: int | None, **options: Any) -> None:
    """Find the largest singular values of X and their vectors, in float64, by a few reads of X.

    X may be larger than memory. OUT is the path of a new zarr group, with the arrays singular_values and vt;
    if X has more columns than rows, u in place of vt. --u stores the longer vectors, too.

    Example: oocgemm svd X.zarr svd.zarr --components 40 --u U.zarr
    """
    call = partial(oocgemm.svd, x, components, out)
    _report(call, (x,), out, SVD_READS + 1, ("singular_values",), **options)


def _fit(fit: Callable[..., Any], operands: tuple[Any, ...], out: str, **options: Any) -> None:
    _report(fit, operands, out, MAX_READS, ("condition", "residual_ss"), **options)


def _report(
    call: Callable[..., Any],
    operands: tuple[Any, ...],
    out: str,
    reads: int,
    shown: tuple[str, ...],
    *,
    as_json: bool,
    quiet: bool,
    **options: Any,
) -> None:
    """Call a verb that saves its result at `out`, and print some of its numbers."""
    stores.load_without_cupy(*operands, out)
    if options["dry_run"]:
        show_plans((call(**options),), None, as_json=as_json)
        return
    if quiet:
        silence_warnings()
    started = perf_counter()
    with stopping(lambda: print_interrupted("")), doing(not (quiet or as_json)) as say:
        found = call(progress=counting(reads, say), **options)
    numbers = {name: np.atleast_1d(getattr(found, name)) for name in shown}
    if as_json:
        lists = {name: array.tolist() for name, array in numbers.items()}
        print_json({"out": out, "passes": found.passes} | lists)
    elif not quiet:
        click.echo(f"X was read {found.passes} times, in {format_time(perf_counter() - started)}")
        for name, array in numbers.items():
            click.echo(f"{name.replace('_', ' ')}: {', '.join(f'{each:.6g}' for each in array.ravel()[:5])}")
        click.echo(f"\nResult: {out}")
