"""The commands corr and cov: correlations and covariances of the rows or columns of a matrix."""

from typing import Any

import click

from oocgemm.cli.basics import taking
from oocgemm.cli.options import AXIS, STATISTICS
from oocgemm.cli.parameters import Place
from oocgemm.cli.products import run_product
from oocgemm.jobs import correlation
from oocgemm.jobs.options import Progress
from oocgemm.jobs.request import SELECTION_OPTIONS
from oocgemm.jobs.result import Result
from oocgemm.jobs.similarity import check_saving
from oocgemm.jobs.standardizing import CONSTANT


@click.command()
@click.argument("x", type=Place())
@click.argument("out", type=Place())
@AXIS
@click.option("--topk", metavar="N", type=int, help="Store only the N largest coefficients of each row.")
@click.option(
    "--threshold",
    metavar="NUMBER",
    type=float,
    help="Store only coefficients of at least this magnitude, such as 0.5.",
)
@click.option(
    "--constant",
    type=click.Choice(CONSTANT),
    default=CONSTANT[0],
    show_default=True,
    help="Rows of equal elements, which have no coefficients. nan: theirs are NaN. drop: leave them out. "
    "raise: stop.",
)
@taking(*STATISTICS)
def corr(
    x: str,
    out: str,
    as_json: bool,
    quiet: bool,
    topk: int | None,
    threshold: float | None,
    **options: Any,
) -> None:
    """Compute Pearson's correlation coefficients of the rows of X.

    All coefficients are stored in OUT, the path of a zarr array or a .npy file. With --topk or --threshold,
    the other coefficients are not stored, and OUT is a new zarr group as for `oocgemm similarity`.

    Example: oocgemm corr X.zarr pairs.zarr --threshold 0.5
    """
    if topk is None and threshold is None:

        def compute(progress: Progress | None) -> Result:
            return correlation.corr(x, out, progress=progress, **options)

    else:
        dropped = options["constant"] == "drop"  # then it is not known how many rows are left
        check_saving(out, x, None if dropped else topk, options["axis"])
        kept = {name: value for name, value in options.items() if value or name in SELECTION_OPTIONS}

        def compute(progress: Progress | None) -> Result:
            found = correlation.selected_corr(x, topk, threshold, progress=progress, **kept)
            found.save(out)
            return found.run

    run_product(compute, out, (x,), options, as_json=as_json, quiet=quiet)


@click.command()
@click.argument("x", type=Place())
@click.argument("out", type=Place())
@AXIS
@click.option(
    "--ddof",
    metavar="N",
    type=int,
    default=1,
    show_default=True,
    help="Divide sums of products by the number of elements of a row minus N.",
)
@taking(*STATISTICS)
def cov(x: str, out: str, as_json: bool, quiet: bool, **options: Any) -> None:
    """Compute covariances of the rows of X, and store them.

    OUT is the path of a zarr array or of a .npy file.

    Example: oocgemm cov X.zarr C.zarr
    """

    def compute(progress: Progress | None) -> Result:
        return correlation.cov(x, out, progress=progress, **options)

    run_product(compute, out, (x,), options, as_json=as_json, quiet=quiet)
