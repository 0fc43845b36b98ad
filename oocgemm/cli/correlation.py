"""The commands corr and cov: correlations and covariances of the rows or columns of a matrix."""

from typing import Any

import click

from oocgemm.cli.output import JSON, taking
from oocgemm.cli.parameters import QUIET, Place, verb_options
from oocgemm.cli.products import run_product
from oocgemm.jobs import correlation
from oocgemm.jobs.options import SELECTION_OPTIONS, Progress
from oocgemm.jobs.result import Result
from oocgemm.jobs.similarity import check_saving


@click.command()
@click.argument("x", type=Place())
@click.argument("out", type=Place())
@verb_options("corr")
@taking(JSON, QUIET)
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
@verb_options("cov")
@taking(JSON, QUIET)
def cov(x: str, out: str, as_json: bool, quiet: bool, **options: Any) -> None:
    """Compute covariances of the rows of X, and store them.

    OUT is the path of a zarr array or of a .npy file.

    Example: oocgemm cov X.zarr C.zarr
    """

    def compute(progress: Progress | None) -> Result:
        return correlation.cov(x, out, progress=progress, **options)

    run_product(compute, out, (x,), options, as_json=as_json, quiet=quiet)
